"""How much arithmetic training needs: that of matrix products, which is most.

Counted per token: two operations for each weight that it meets. Attention is
counted over the whole window, since masked scores are computed too.
"""

from __future__ import annotations

from specjax.models.transformer import TransformerConfig


def body(config: TransformerConfig, window: int) -> int:
  """Operations per token of a forward pass up to the features."""
  c, size = config, config.head_size
  attention = c.width * (2 * c.heads + 2 * c.kv_heads) * size
  mixing = 2 * window * c.heads * size
  return 2 * c.layers * (attention + mixing + 3 * c.width * c.hidden)


def head(config: TransformerConfig) -> int:
  """Operations per token for the logits."""
  return 2 * config.width * config.vocab_size


def distillation(
  target: TransformerConfig, draft: TransformerConfig, window: int
) -> int:
  """Operations per token of `distill.distill_loss` and its gradient.

  A gradient costs twice what its pass does. What is computed again for it, to
  save memory, is no part of the work.

  Args:
    target: its forward pass alone.
    draft: a draft model, trained.
    window: T.
  """
  theirs = body(target, window) + head(target)
  return theirs + 3 * (body(draft, window) + head(draft))

"""Equal seeds: text that must be the same, token for token, or nearly tied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import generation, warps
from specjax.types import Array, Key, LanguageModel, Warp

# Scores of a token in a block and of the same one alone: float32 sums differ
# by some 1e-5.
NEAR_TIE = 1e-4


def first_mismatches(
  target: LanguageModel,
  plain: generation.Result,
  other: generation.Result,
  *,
  warp: Warp = warps.UNCHANGED,
  keys: Key | None = None,
) -> list[dict[str, Any]]:
  """Where rows first leave what plain decoding wrote with the same keys.

  Args:
    target: which wrote both.
    plain: what it wrote without drafts.
    other: what it wrote with them, of the same prompts.
    warp: the sampling transform.
    keys: `[B]` the rows' keys, for text under `sampler_match`; None for greedy
      text.

  Returns:
    For each row that differs: `row`; `position`; `margin`, how much the
    winning token's score exceeded the next there: of logits or, for sampled
    text, of log p plus the Gumbel noise it was drawn with. Above `NEAR_TIE` it
    is not rounding, in float32.
  """
  found = []
  for row in np.flatnonzero((plain.tokens != other.tokens).any(1)):
    at = int(np.argmax(plain.tokens[row] != other.tokens[row]))
    tokens, key = plain.tokens[row], None if keys is None else keys[row]
    scores = _scores(target, warp, key, tokens, at)
    first, second = jax.lax.top_k(scores, 2)[0].tolist()
    found.append({'row': int(row), 'position': at, 'margin': first - second})
  return found


@jax.jit
def _scores(target, warp, key, tokens, at) -> Array:
  """`[V]`: the largest of these is the token at place `at`."""
  output = target.forward(tokens[None], jnp.ones_like(tokens)[None])
  logits = target.unembed(output.features[0, at - 1])
  if key is None:
    return logits
  log_p = jax.nn.log_softmax(warp(logits))
  # The key of the position, as `decode` makes it.
  key = jax.random.fold_in(jax.random.fold_in(key, 0), at)
  return log_p + jax.random.gumbel(key, log_p.shape, jnp.float32)

"""A second, smaller language model as the drafter."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import draws, warps
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import Array, Block, Draft, LanguageModel, Warp, pytree

# Tokens fed at a time. After a fully accepted round two are new to the draft:
# its own last one, which it drew but never read, and the bonus. The same pass,
# in a loop, reads a whole prompt.
_NEW = 2


class ModelMemory(NamedTuple):
  """What the draft model knows.

  Attributes:
    cache: the draft model's own cache, describing a prefix of the tokens.
    fed: `[B]` nodes of the current block that lie in the cache as scratch.
  """

  cache: Any
  fed: Array


@pytree
class ModelDrafter:
  """Samples a chain of `k` tokens from a draft model.

  Attributes:
    model: the draft.
    k: draft length.
    warp: applied to the draft's logits. The draft is exact under any warp;
      acceptance is best when it is the target's.
  """

  model: LanguageModel
  k: int = dataclasses.field(metadata={'static': True})
  warp: Warp = warps.UNCHANGED

  siblings = 'single'

  def __post_init__(self):
    """Refuses a negative length."""
    if self.k < 0:
      raise ValueError(f'the draft length k is {self.k}: at least 0')

  def init(self, target, batch, size):
    """An empty cache.

    Raises:
      ValueError: if the vocabularies differ in size.
    """
    if self.model.vocab_size != target.vocab_size:
      raise ValueError(
        f'the draft has {self.model.vocab_size} tokens and the target'
        f' {target.vocab_size}: they must share one vocabulary'
      )
    return ModelMemory(
      self.model.init_cache(batch, size), jnp.zeros(batch, jnp.int32)
    )

  def propose(self, target, cache, memory, keys, tokens, length):
    """A sampled chain and the laws it was drawn from."""
    batch = tokens.shape[0]
    if self.k == 0:
      empty = jnp.zeros((batch, 0), jnp.int32)
      return Draft(empty), memory._replace(fed=jnp.zeros_like(memory.fed))

    own, features = self.catch_up(memory.cache, tokens, length)

    def draw(features, i):
      logits = self.warp(self.model.unembed(features[:, 0]))
      return self._draw(keys, length + i, i, logits), logits

    def grow(carry, i):
      own, token = carry
      block = Block(token[:, None])
      output, rows = self.model.extend(block, own)
      own = self.model.commit(own, rows, jnp.ones((batch, 1), bool))
      token, logits = draw(output.features, i)
      return (own, token), (token, logits)

    token, logits = draw(features, 0)
    # A loop, not an unrolled chain: one compiled step for every k.
    (own, _), (more, more_logits) = jax.lax.scan(
      grow, (own, token), jnp.arange(1, self.k)
    )
    chain = jnp.concatenate([token[:, None], more.T], 1)
    laws = jnp.concatenate([logits[:, None], more_logits.transpose(1, 0, 2)], 1)
    draft = Draft(chain, logits=laws, siblings=self.siblings)
    # The pending token and all but the last drafted one lie in the cache, but
    # only `observe` learns which of them came true.
    own = own._replace(length=length - 1)
    return draft, ModelMemory(own, jnp.full_like(length, self.k))

  def observe(self, target, memory, block, kept, output):
    """Counts the kept nodes that the draft had fed; the rest it catches up."""
    count = jnp.minimum(kept.sum(-1, dtype=jnp.int32), memory.fed)
    own = memory.cache._replace(length=memory.cache.length + count)
    return ModelMemory(own, jnp.zeros_like(memory.fed))

  def at(self, k: int) -> ModelDrafter:
    """The same draft model with draft length `k`."""
    return dataclasses.replace(self, k=k)

  def score(self, target, batch, output):
    """Features `[B, T, 1, D']` of the draft on training windows."""
    own = self.model.forward(batch.tokens, batch.segments)
    return own.features[:, :, None]

  def unembed(self, target, features):
    """The draft's logits `[..., V]`."""
    return self.model.unembed(features)

  def catch_up(self, own, tokens, length):
    """Reads what is committed and new, as far as the pending token.

    Args:
      own: the draft model's cache.
      tokens: `[B, T]`.
      length: `[B]`.

    Returns:
      The cache of `tokens[:length]`, and features `[B, 1, D']` of the last.
    """

    def behind(carry):
      return jnp.any(carry[0].length < length)

    def read(carry):
      own, features = carry
      last = (length - own.length - 1)[:, None, None]
      output, own = self._feed(own, tokens, length)
      here = jnp.take_along_axis(
        output.features, jnp.clip(last, 0, _NEW - 1), 1
      )
      # Rows that are done reading wait for the others.
      return own, jnp.where((last >= 0) & (last < _NEW), here, features)

    shape = jax.eval_shape(self._feed, own, tokens, length)[0].features
    empty = jnp.zeros((tokens.shape[0], 1, shape.shape[2]), shape.dtype)
    return jax.lax.while_loop(behind, read, (own, empty))

  def _draw(self, keys, position, i, logits):
    """Tokens `[B]` of node i, which would stand at `position` `[B]`."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return jax.vmap(draws.inverse_cdf)(fold(keys.draft, i), logits)

  def _feed(self, own, tokens, end):
    """Feeds the next `_NEW` tokens behind the cache, as far as `end` `[B]`."""
    index = own.length[:, None] + jnp.arange(_NEW)
    inside = jnp.minimum(index, tokens.shape[1] - 1)
    block = Block(jnp.take_along_axis(tokens, inside, 1))
    output, rows = self.model.extend(block, own)
    return output, self.model.commit(own, rows, index < end[:, None])


def build(config, vocab_size, rngs) -> ModelDrafter:
  """Reads `k` and, under `model`, the sizes of a transformer."""
  sizes = TransformerConfig(vocab_size=vocab_size, **config['model'])
  return ModelDrafter(Transformer(sizes, rngs), config['k'])

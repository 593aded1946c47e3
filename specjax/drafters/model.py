"""A second, smaller language model as the drafter."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax import chains, warps
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import Array, Block, Draft, LanguageModel, Warp, pytree

# Tokens fed at a time. After a fully accepted round two are new to the draft:
# its own last one, which it drew but never read, and the bonus. A prompt, or
# what was decoded without a draft, is read in larger pieces.
_NEW, _MANY = 2, 16


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
    # Behind the last token there is room for all that is read at a time.
    own = self.model.init_cache(batch, size + _MANY)
    return ModelMemory(own, jnp.zeros(batch, jnp.int32))

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """A sampled chain and the laws it was drawn from."""
    batch = tokens.shape[0]
    if self.k == 0:
      empty = jnp.zeros((batch, 0), jnp.int32)
      nothing = memory._replace(fed=jnp.zeros_like(memory.fed))
      return Draft(empty, siblings=self.siblings), nothing

    most = self.k if limit is None else limit.nodes
    own, features = self.catch_up(memory.cache, tokens, length, most > 0)

    def first():
      return self.model.unembed(features[:, 0])

    def step(i, token, own):
      output, rows = self.model.extend(Block(token[:, None]), own)
      own = self.model.commit(own, rows, jnp.ones((batch, 1), bool))
      return self.model.unembed(output.features[:, 0]), own

    draft, fed, own = chains.grow(
      step,
      own,
      jnp.zeros(batch, jnp.int32),
      k=self.k,
      draw=self._draw(keys, length),
      warp=self.warp,
      limit=limit,
      first=first,
    )
    draft = dataclasses.replace(draft, siblings=self.siblings)
    # The pending token and all but the last drafted one lie in the cache, but
    # only `observe` learns which of them came true.
    own = own._replace(length=jnp.where(most > 0, length - 1, own.length))
    return draft, ModelMemory(own, jnp.full_like(length, fed))

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

  def catch_up(self, own, tokens, length, wanted=True):
    """Reads what is committed and new, as far as the pending token.

    Args:
      own: the draft model's cache.
      tokens: `[B, T]`.
      length: `[B]`.
      wanted: scalar bool; without it nothing is read.

    Returns:
      The cache of `tokens[:length]`, and features `[B, 1, D']` of the last.
    """

    pieces = (_NEW, _MANY), (0, _NEW)

    def feed(own, size):
      return self._feed(own, tokens, length, size)

    return chains.catch_up(feed, own, length, pieces, wanted)

  def _draw(self, keys, length) -> chains.Draw:
    """How node i is drawn, which would stand at `length + i`."""
    return chains.by_slot(keys.draft)

  def _feed(self, own, tokens, end, size):
    """Feeds the next `size` tokens behind the cache, as far as `end` `[B]`."""
    index = own.length[:, None] + jnp.arange(size)
    inside = jnp.minimum(index, tokens.shape[1] - 1)
    block = Block(jnp.take_along_axis(tokens, inside, 1))
    output, rows = self.model.extend(block, own)
    own = self.model.commit(own, rows, index < end[:, None])
    return output.features, own


def build(config, target, rngs) -> ModelDrafter:
  """Reads `k` and, under `model`, the sizes of a transformer."""
  own = {'positions': target.positions, **config['model']}
  sizes = TransformerConfig(vocab_size=target.vocab_size, **own)
  return ModelDrafter(Transformer(sizes, rngs), config['k'])

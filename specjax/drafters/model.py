"""A second, smaller language model as the drafter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import draws, warps
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

    def draw(i, features, active):
      logits = self.model.unembed(features[:, 0])
      if limit is not None and limit.go_on is not None:
        active &= limit.go_on(i, logits)
      logits = self.warp(logits)
      return self._draw(keys, length + i, i, logits), logits, active

    def nothing(i, features, active):
      shapes = jax.eval_shape(draw, i, features, active)
      return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    active = jnp.ones(batch, bool)
    if limit is None:
      token, logits, active = draw(0, features, active)
    else:
      token, logits, active = jax.lax.cond(
        most > 0, draw, nothing, 0, features, active
      )

    def going(carry):
      i, *_, active = carry
      return (i < most) & active.any()

    def grow(carry):
      i, own, chain, laws, count, active = carry
      token = jax.lax.dynamic_slice_in_dim(chain, i - 1, 1, 1)
      output, rows = self.model.extend(Block(token), own)
      own = self.model.commit(own, rows, jnp.ones((batch, 1), bool))
      token, logits, active = draw(i, output.features, active)
      chain = chain.at[:, i].set(token)
      laws = laws.at[:, i].set(logits)
      return i + 1, own, chain, laws, count + active, active

    chain = jnp.zeros((batch, self.k), jnp.int32).at[:, 0].set(token)
    laws = jnp.zeros((batch, self.k, logits.shape[-1]), logits.dtype)
    laws = laws.at[:, 0].set(logits)
    start = 1, own, chain, laws, active.astype(jnp.int32), active
    # A loop, not an unrolled chain: one compiled step for every k.
    fed, own, chain, laws, count, _ = jax.lax.while_loop(going, grow, start)
    valid = None if limit is None else jnp.arange(self.k) < count[:, None]
    draft = Draft(chain, logits=laws, valid=valid, siblings=self.siblings)
    # The pending token and all but the last drafted one lie in the cache, but
    # only `observe` learns which of them came true.
    own = own._replace(length=jnp.where(most > 0, length - 1, own.length))
    fed = jnp.where(most > 0, fed, 0)
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

    def reading(size, carry):
      own, features = carry
      last = (length - own.length - 1)[:, None, None]
      output, own = self._feed(own, tokens, length, size)
      here = jnp.take_along_axis(
        output.features, jnp.clip(last, 0, size - 1), 1
      )
      # Rows that are done reading wait for the others.
      return own, jnp.where((last >= 0) & (last < size), here, features)

    def behind(by, carry):
      return wanted & jnp.any(length - carry[0].length > by)

    feed = functools.partial(self._feed, size=_NEW)
    shape = jax.eval_shape(feed, own, tokens, length)[0].features
    empty = jnp.zeros((tokens.shape[0], 1, shape.shape[2]), shape.dtype)
    carry = own, empty
    for by, size in ((_NEW, _MANY), (0, _NEW)):
      carry = jax.lax.while_loop(
        functools.partial(behind, by), functools.partial(reading, size), carry
      )
    return carry

  def _draw(self, keys, position, i, logits):
    """Tokens `[B]` of node i, which would stand at `position` `[B]`."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return jax.vmap(draws.inverse_cdf)(fold(keys.draft, i), logits)

  def _feed(self, own, tokens, end, size):
    """Feeds the next `size` tokens behind the cache, as far as `end` `[B]`."""
    index = own.length[:, None] + jnp.arange(size)
    inside = jnp.minimum(index, tokens.shape[1] - 1)
    block = Block(jnp.take_along_axis(tokens, inside, 1))
    output, rows = self.model.extend(block, own)
    return output, self.model.commit(own, rows, index < end[:, None])


def build(config, target, rngs) -> ModelDrafter:
  """Reads `k` and, under `model`, the sizes of a transformer."""
  sizes = TransformerConfig(vocab_size=target.vocab_size, **config['model'])
  return ModelDrafter(Transformer(sizes, rngs), config['k'])

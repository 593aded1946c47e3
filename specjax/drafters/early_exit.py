"""The target's own first layers as the drafter, reading the target's cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax import chains, warps, weights
from specjax.cache import Cache
from specjax.types import Array, Block, Draft, Warp, pytree


@pytree
class EarlyExit:
  """Samples a chain from the target's first layers, its norm and its head.

  What the layers need of the text lies in the target's cache already, so there
  is no memory, no prompt to read and nothing to catch up on: a draft keeps the
  rows of its own nodes aside, and forgets them. It has few new weights or none.
  (Elhoushi et al. 2024, LayerSkip, arXiv 2404.16710, who train the target for
  it; Liu et al. 2024, Kangaroo, arXiv 2404.18911, who train an adapter, as
  here, but a larger one.)

  Attributes:
    layers: how many.
    k: draft length.
    adapter: `[D, D]` of a residual projection of the features in front of the
      head, which learns what the layers left out would have added; None, or
      zeros, is the exit as it is.
    warp: applied to the draft's logits; see `ModelDrafter`.
  """

  layers: int = dataclasses.field(metadata={'static': True})
  k: int = dataclasses.field(metadata={'static': True})
  adapter: Array | None = None
  warp: Warp = warps.UNCHANGED

  def __post_init__(self):
    """Refuses a negative length; the layers are checked with the target."""
    if self.k < 0:
      raise ValueError(f'the draft length k is {self.k}: at least 0')

  def init(self, target, batch, size):
    """No memory: the target's cache is all it needs.

    Raises:
      ValueError: for a target without layers to leave early.
    """
    if not hasattr(target, 'subset'):
      raise ValueError(
        f'an early exit needs a target of layers: {type(target).__name__} has'
        ' none to leave early'
      )
    return ()

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """A sampled chain and the laws it was drawn from."""
    batch = tokens.shape[0]
    if self.k == 0:
      return Draft(jnp.zeros((batch, 0), jnp.int32)), memory
    shallow = target.subset(range(self.layers))
    cache = Cache(cache.rows[: self.layers], cache.length)
    block = Block(jnp.zeros((batch, self.k), jnp.int32))
    shapes = jax.eval_shape(shallow.extend, block, cache)[1]
    rows = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(i, token, rows):
      output, rows = shallow.follow(token[:, None], cache, rows, i)
      return self.unembed(target, self._adapt(output.features)[:, 0]), rows

    draft, _, _ = chains.grow(
      step,
      rows,
      jnp.take_along_axis(tokens, length[:, None] - 1, 1)[:, 0],
      k=self.k,
      draw=chains.by_slot(keys.draft),
      warp=self.warp,
      limit=limit,
    )
    return draft, memory

  def observe(self, target, memory, block, kept, output):
    """Nothing to learn that the target's cache does not hold."""
    return memory

  def at(self, k: int) -> EarlyExit:
    """The same exit with draft length `k`."""
    return dataclasses.replace(self, k=k)

  def score(self, target, batch, output):
    """Features `[B, T, 1, D]` at the exit, on training windows."""
    shallow = target.subset(range(self.layers))
    features = shallow.forward(batch.tokens, batch.segments).features
    return self._adapt(features)[:, :, None]

  def unembed(self, target, features):
    """Logits `[..., V]` by the target's head."""
    return target.unembed(features)

  def _adapt(self, features: Array) -> Array:
    if self.adapter is None:
      return features
    return features + weights.dot(features, self.adapter)


def build(config, target, rngs) -> EarlyExit:
  """Reads `k` and `layers` (else a third of the target's).

  The adapter begins at zero, as the exit as it is.

  Raises:
    ValueError: the target has fewer layers.
  """
  layers = config.get('layers') or max(1, target.layers // 3)
  if layers > target.layers:
    raise ValueError(
      f'draft.layers is {layers}: the target has {target.layers} to leave early'
    )
  adapter = jnp.zeros((target.width, target.width))
  return EarlyExit(layers, config['k'], adapter)

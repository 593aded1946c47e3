"""Heads on the target's last features: what drafters made of them share.

The token behind those features is the pending one. It has been drawn already,
so no head is spent on it: head h predicts the token `1 + h` behind the pending
one. It knows all that precedes the pending token but not that token itself,
whose features only the next pass brings, nor what the other heads say. The law
of a chain is therefore the product of their laws, and a chain that is sampled
head by head is exact under every rule for chains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax import chains, draws, warps
from specjax.types import Array, Draft, Warp, pytree


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  """What the `draft` section of a page says of heads of a kind.

  Raises:
    ValueError: it does not say how many there are. A draft may be shorter, so
      its length does not tell.
  """
  found = config.get(name, {})
  if 'heads' not in found:
    raise ValueError(
      f'draft.{name}.heads is missing: how many heads, each a token further'
    )
  return found


class Head(Protocol):
  """A pytree that maps features to those of a token further ahead."""

  width: int

  def __call__(self, features: Array) -> Array:
    """`[..., D]` to `[..., D]`, D the width of the target."""


@pytree
class HeadsDrafter:
  """Samples a chain of `k` tokens, one from each of the first `k` heads.

  Its memory is `[B, D]`, the target's features of the last committed token, or
  zeros where there is none yet. The target stays as it is, and its unembedding
  serves all heads.

  Attributes:
    heads: those of the first, second, ... token of a draft.
    k: draft length, at most the number of heads.
    warp: applied to the heads' logits. The draft is exact under any warp;
      acceptance is best when it is the target's.
  """

  heads: tuple[Head, ...]
  k: int = dataclasses.field(metadata={'static': True})
  warp: Warp = warps.UNCHANGED

  def __post_init__(self):
    """Refuses drafts that are longer than there are heads."""
    count = len(self.heads)
    if not 0 <= self.k <= count:
      raise ValueError(
        f'the draft length k is {self.k}, and the draft has {count} heads, one'
        f' for each token: k must be 0 to {count}'
      )

  def init(self, target, batch, size):
    """No features yet.

    Raises:
      ValueError: if the heads are for features of another width.
    """
    width = jax.eval_shape(target.embed, jnp.zeros(1, jnp.int32)).shape[-1]
    for head in self.heads:
      if head.width != width:
        raise ValueError(
          f'the heads are for features of width {head.width}, and those of the'
          f' target have {width}: they belong to another target'
        )
    return jnp.zeros((batch, width))

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """A sampled chain and the laws it was drawn from."""
    if self.k == 0:
      return Draft(jnp.zeros((len(length), 0), jnp.int32)), memory

    def draw(features):
      logits = self._logits(target, features)
      laws = self.warp(logits)
      fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
      each = fold(keys.draft, jnp.arange(self.k))
      chain = jax.vmap(jax.vmap(draws.inverse_cdf))(each, laws)
      return chain, laws, self._within(limit, logits)

    # All heads or none: they share a pass over the unembedding, which is nearly
    # all that they cost.
    chain, laws, valid = chains.if_any(limit, draw, memory)
    return Draft(chain, logits=laws, valid=valid), memory

  def observe(self, target, memory, block, kept, output):
    """Keeps the features of the last node that was kept."""
    # Parents stand before their children, so it is the last of the block's.
    last = kept.shape[1] - 1 - jnp.argmax(kept[:, ::-1], 1)
    here = jnp.take_along_axis(output.features, last[:, None, None], 1)[:, 0]
    return jnp.where(kept.any(1)[:, None], here, memory)

  def at(self, k: int) -> HeadsDrafter:
    """The same heads with draft length `k`."""
    return dataclasses.replace(self, k=k)

  def score(self, target, batch, output):
    """Features `[B, T, H, D]`: horizon h is head h on the token before t.

    As in decoding, where t is pending: the target has no features of it.
    """
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    before = jnp.where(same[..., None], output.features[:, :-1], 0.0)
    before = jnp.pad(before, ((0, 0), (1, 0), (0, 0)))
    return self._ahead(before, len(self.heads))

  def unembed(self, target, features):
    """The target's logits `[..., V]` of features."""
    return target.unembed(features)

  def _ahead(self, features: Array, count: int) -> Array:
    """`[..., count, D]` from `[..., D]`."""
    return jnp.stack([head(features) for head in self.heads[:count]], -2)

  def _logits(self, target, features: Array) -> Array:
    """`[B, K, V]` of the tokens of a draft, before the warp."""
    return target.unembed(self._ahead(features, self.k))

  def _within(self, limit, logits: Array) -> Array | None:
    """`[B, K]` which nodes a limit leaves; None: all."""
    if limit is None:
      return None
    index = jnp.arange(self.k)
    going = jnp.broadcast_to(index < limit.nodes, logits.shape[:2])
    if limit.go_on is not None:
      going &= jax.vmap(limit.go_on, (0, 1), 1)(index, logits)
    return jnp.cumprod(going, 1).astype(bool)

"""A tabular language model whose every law is known exactly: the oracle."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from specjax import cache as caches
from specjax.types import Array, Block, Output


class Markov(nnx.Module):
  """The next token depends on the last `order` tokens, by a table.

  It keeps those tokens in a real cache, written by the same `commit` as keys
  and values, so that a cache fault shows as a wrong law. What precedes the
  start of a sequence or document counts as token 0. Features are logits.

  Args:
    logits: `[V] * order + [V]`; the last axis is the next token.
  """

  def __init__(self, logits: Array):
    """Holds the table."""
    if logits.ndim < 2 or len(set(logits.shape)) != 1:
      raise ValueError(f'a Markov table is [V] * order + [V]: {logits.shape}')
    self.logits = nnx.Param(jnp.asarray(logits, jnp.float32))

  @property
  def vocab_size(self) -> int:
    """V."""
    return self.logits.shape[-1]

  def init_cache(self, batch: int, size: int) -> caches.Cache:
    """An empty cache of `size` tokens."""
    rows = jnp.zeros((batch, 1, size, 1), jnp.int32)
    return caches.Cache(rows, jnp.zeros(batch, jnp.int32))

  def extend(
    self, block: Block, cache: caches.Cache, taps: tuple[int, ...] = ()
  ) -> tuple[Output, Array]:
    """Scores a block; its rows are its tokens."""
    past = [_from_end(cache, 1 + i) for i in range(self.logits.ndim - 2)]
    if block.parents is None:
      recent = _recent_in_chain(block.tokens, past)
    else:
      recent = _recent_in_tree(block, past)
    features = self.logits[...][tuple(reversed(recent))]
    return Output(features), block.tokens[:, None, :, None]

  def commit(
    self, cache: caches.Cache, rows: Array, kept: Array, chain: bool = True
  ) -> caches.Cache:
    """Writes the kept tokens; see `cache.commit`."""
    return caches.commit(cache, rows, kept, chain)

  def forward(
    self, tokens: Array, segments: Array, taps: tuple[int, ...] = ()
  ) -> Output:
    """Scores whole windows `[B, T]`."""
    recent = []
    for i in range(self.logits.ndim - 1):
      same = _shift(segments, i, -1) == segments
      recent.append(jnp.where(same, _shift(tokens, i, 0), 0))
    return Output(self.logits[...][tuple(reversed(recent))])

  def embed(self, tokens: Array) -> Array:
    """One-hot `[..., V]`."""
    return jnp.eye(self.vocab_size)[tokens]

  def unembed(self, features: Array) -> Array:
    """Features are logits already."""
    return features


def _shift(x: Array, by: int, fill: int) -> Array:
  return jnp.pad(x, ((0, 0), (by, 0)), constant_values=fill)[:, : x.shape[1]]


def _from_end(cache: caches.Cache, back: int) -> Array:
  """The committed token `[B]` that lies `back` from the end, 0 before it."""
  index = cache.length - back
  rows = cache.rows[:, 0, :, 0]
  token = jnp.take_along_axis(rows, jnp.maximum(index, 0)[:, None], 1)[:, 0]
  return jnp.where(index >= 0, token, 0)


def _recent_in_chain(tokens: Array, past: list[Array]) -> list[Array]:
  """`recent[i][b, m]` is the token i before node m."""
  line = jnp.stack([*reversed(past), *tokens.T], axis=1)
  size = tokens.shape[1]
  return [
    line[:, len(past) - i : len(past) - i + size] for i in range(len(past) + 1)
  ]


def _recent_in_tree(block: Block, past: list[Array]) -> list[Array]:
  node = jnp.broadcast_to(jnp.arange(block.tokens.shape[1]), block.tokens.shape)
  above = jnp.zeros_like(node)  # how many committed tokens back, once outside
  recent = []
  for _ in range(len(past) + 1):
    token = jnp.take_along_axis(block.tokens, jnp.maximum(node, 0), 1)
    for j, old in enumerate(past):
      token = jnp.where(above == j + 1, old[:, None], token)
    recent.append(token)
    parent = jnp.take_along_axis(block.parents, jnp.maximum(node, 0), 1)
    node = jnp.where(node >= 0, parent, -1)
    above = jnp.where(node < 0, above + 1, 0)
  return recent

"""The key/value cache: read while scoring, written once a round.

A model's `extend` only reads the cache and returns the block's own rows;
`commit` then writes those of the kept nodes. Nothing that was rejected is ever
part of the committed prefix, so there is nothing to roll back. What lies at or
above `length` is scratch and never read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import products, trees
from specjax.types import Array


class Cache(NamedTuple):
  """Buffers and how much of them counts.

  Attributes:
    rows: pytree of `[B, heads, S, D]`, one array per layer and kind, so that an
      update never touches the others.
    length: `[B]` int32 committed tokens.
  """

  rows: Any
  length: Array


def after(features: Array, rows: Any) -> Any:
  """A block's rows, made to depend on its features `[B, M, D]`.

  Rows are known before their attention has read the cache, and XLA would copy
  every buffer so as to write them early. Made to depend on what comes last,
  they are written in place. (A barrier does not achieve it.) The condition only
  fails where the rule would meet a NaN.
  """
  sound = jnp.isfinite(features[..., -1])[:, None, :, None]
  return jax.tree.map(lambda r: jnp.where(sound, r, 0), rows)


def commit(cache: Cache, rows: Any, kept: Array, chain: bool) -> Cache:
  """Writes the kept rows of a block behind the committed ones, packed.

  Args:
    cache: needs room for the whole block: `length + M <= S`.
    rows: pytree of `[B, heads, M, D]` from `extend`.
    kept: `[B, M]` bool.
    chain: that the kept nodes are a prefix of the block, so that they need no
      packing.

  Returns:
    The cache, longer by the number of kept nodes.
  """
  dtypes = jax.tree.map(lambda x: x.dtype, cache.rows)
  if not chain:
    order = trees.pack(kept)[:, None, :, None]
    rows = jax.tree.map(lambda r: jnp.take_along_axis(r, order, axis=2), rows)

  zero = np.int32(0)
  rows = jax.tree.map(lambda r, like: _bits(r.astype(like)), rows, dtypes)

  def write(b, buffers):
    b = b.astype(np.int32)  # of the length's type, also under jax_enable_x64

    # One in-place update per row; a vmapped update would become a scatter.
    def update(buffer, new):
      new = jax.lax.dynamic_slice_in_dim(new, b, 1)
      at = b, zero, cache.length[b], zero
      return jax.lax.dynamic_update_slice(buffer, new, at)

    return jax.tree.map(update, buffers, rows)

  buffers = jax.tree.map(_bits, cache.rows)
  buffers = jax.lax.fori_loop(zero, np.int32(len(kept)), write, buffers)
  return Cache(
    jax.tree.map(lambda x, like: x.view(like), buffers, dtypes),
    cache.length + kept.sum(-1, dtype=jnp.int32),
  )


def attend(
  query: Array,
  block: tuple[Array, Array],
  visible: Array,
  cached: tuple[Array, Array] | None,
  live: Array | None,
) -> Array:
  """Attention over the cache and over the block itself, one softmax over both.

  Two products instead of one over a concatenation, which would copy the cache.

  Args:
    query: `[B, heads, M, D]`.
    block: keys and values `[B, kv_heads, R, D]`, of the block or of more
      nodes.
    visible: `[B or 1, M, R]` bool, which rows of the block a node sees.
    cached: keys and values `[B, kv_heads, S, D]`, or None.
    live: `[B, M or 1, S]` bool, which of them a node sees, or None.

  Returns:
    `[B, heads, M, D]` float32.
  """
  batch, heads, m, dim = query.shape
  kv_heads = block[0].shape[1]
  # The queries that share a key/value head become rows of one product.
  query = (query * dim**-0.5).reshape(batch, kv_heads, -1, dim)
  scores = _dot(query, block[0], 3, 3)
  scores = jnp.where(_for_heads(visible, query), scores, -jnp.inf)
  if cached is None:
    return _dot(_softmax(scores, block[1]), block[1], 3, 2).reshape(
      batch, heads, m, dim
    )
  size = cached[0].shape[2]
  past = _dot(query, cached[0], 3, 3)
  past = jnp.where(_for_heads(live, query), past, -jnp.inf)
  weights = _softmax(jnp.concatenate([past, scores], -1), block[1])
  mixed = _dot(weights[..., :size], cached[1], 3, 2)
  mixed += _dot(weights[..., size:], block[1], 3, 2)
  return mixed.reshape(batch, heads, m, dim)


def live(cache: Cache) -> Array:
  """`[B, 1, S]` which rows of a transformer's cache count."""
  size = jax.tree.leaves(cache.rows)[0].shape[2]
  return (jnp.arange(size) < cache.length[:, None])[:, None]


def _bits(x: Array) -> Array:
  """What a bfloat16 array is made of, where XLA would make it float32.

  CPUs update no slices in bfloat16: for every row that is written XLA would
  convert all rows, there and back.
  """
  if x.dtype == jnp.bfloat16 and products.on_cpu():
    return x.view(jnp.uint16)
  return x


def _for_heads(mask: Array, query: Array) -> Array:
  """A mask `[B, M or 1, R]` for all the queries that share a key/value head."""
  if mask.shape[1] > 1:
    mask = jnp.tile(mask, (1, query.shape[2] // mask.shape[1], 1))
  return mask[:, None]


def _softmax(scores: Array, values: Array) -> Array:
  return jax.nn.softmax(scores).astype(values.dtype)


def _dot(left: Array, right: Array, i: int, j: int) -> Array:
  """Contracts axes i and j, batched over the first two; float32 sums."""
  if products.rounded():
    terms = 'bhqd,bhkd->bhqk' if j == 3 else 'bhqk,bhkd->bhqd'
    return products.product(terms, left, right)
  return jax.lax.dot_general(
    left.astype(right.dtype),
    right,
    (((i,), (j,)), ((0, 1), (0, 1))),
    preferred_element_type=jnp.float32,
  )

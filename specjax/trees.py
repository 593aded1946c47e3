"""Chains and trees of tokens: the only place that knows how parents work."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Array


def ancestors(parents: Array | None, size: int) -> Array:
  """Which nodes each node may attend to: itself and its ancestors.

  Args:
    parents: `[B, M]` int32 with -1 for the root, parents before children, or
      None for a chain.
    size: M.

  Returns:
    `[B, M, M]` bool (`[1, M, M]` for a chain); row i marks node i's path.
  """
  if parents is None:
    return jnp.tril(jnp.ones((size, size), bool))[None]

  def one(parents):
    def add(i, paths):
      own = jnp.arange(size) == i
      inherited = jnp.where(parents[i] >= 0, paths[parents[i]], False)
      return paths.at[i].set(inherited | own)

    return jax.lax.fori_loop(0, size, add, jnp.zeros((size, size), bool))

  return jax.vmap(one)(parents)


def depths(paths: Array) -> Array:
  """Depths `[B, M]` (the root's is 0) from the result of `ancestors`."""
  return paths.sum(-1, dtype=jnp.int32) - 1


def pack(kept: Array) -> Array:
  """`[B, M]` order that brings the kept nodes to the front, in block order."""
  return jnp.argsort(~kept, axis=-1, stable=True)


def block_parents(parents: Array) -> Array:
  """`[..., N + 1]` parents of a block, from `[..., N]` of its draft."""
  root = jnp.full((*parents.shape[:-1], 1), -1, parents.dtype)
  return jnp.concatenate([root, parents + 1], -1)


def merge(tokens: Array, parents: Array, valid: Array | None = None) -> Array:
  """Hangs what hangs off equal siblings off the first of them.

  Paths that begin alike then share their beginning, so that a rule that keeps
  it can go on along any of them. The other siblings stay, as leaves: they are
  draws that a rule has to count.

  Args:
    tokens: `[B, N]`.
    parents: `[B, N]`, -1 for a child of the pending token.
    valid: `[B, N]` bool; an invalid node is no sibling. None is all.

  Returns:
    `[B, N]` parents.
  """
  if valid is None:
    valid = jnp.ones(tokens.shape, bool)

  def one(tokens, parents, valid):
    place = jnp.arange(tokens.shape[0])

    def move(i, carry):
      moved, first = carry
      parent = jnp.where(parents[i] >= 0, first[parents[i]], -1)
      moved = moved.at[i].set(parent)
      equal = (tokens == tokens[i]) & (moved == parent) & valid & (place < i)
      twin = jnp.where(equal.any() & valid[i], jnp.argmax(equal), i)
      return moved, first.at[i].set(twin)

    return jax.lax.fori_loop(0, len(place), move, (parents, place))[0]

  return jax.vmap(one)(tokens, parents, valid)

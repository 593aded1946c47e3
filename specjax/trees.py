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

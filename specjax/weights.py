"""Weights of dense layers: how they lie, and products with them.

A `Weight` is `[outputs, inputs]`, as it was made, trained and saved. `pack`
lays a float32 one out as CPUs read it in products of a few rows.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import products
from specjax.types import Array

Tree = TypeVar('Tree')

_FEW = 4  # rows, of fewer of which XLA makes slower products on CPUs
_PACKED = 24  # rows, up to which products with packed weights are faster
_TILE = 64  # outputs that lie together in a packed weight


class Weight(nnx.Param):
  """A weight `[outputs, inputs]` for `dot`."""


class Packed(Weight):
  """A weight as `pack` lays it out, `[outputs / 64, inputs, 64]`."""


def worth_packing(rows: int) -> bool:
  """Whether products of so many rows are faster with packed weights."""
  return rows <= _PACKED


def pack(tree: Tree, rows: int) -> Tree:
  """Models with their weights laid out as products of a few rows read them.

  On CPUs, XLA's library lays a float32 weight out anew in every product of
  several rows. Where it lies so beforehand, five rows take half as long on some
  machines and one no longer, on others not: a short measurement, one in each
  process, tells. Prefilling takes longer. So nothing is laid out where that is
  no gain or products have many rows, nor a weight that is bfloat16 or on
  several devices or whose outputs are not two or more times 64, nor anything
  on other devices. What is laid out is a copy, and the original goes when the
  caller drops it.

  Args:
    tree: models, drafters or containers of them, for decoding alone: training,
      saving, casting and meshes are for what they were made of. Heads and
      adapters, which are small, stay as they are.
    rows: that most products will have: B (K + 1).
  """
  if not worth_packing(rows) or not products.on_cpu() or not tiles_pay():
    return tree
  done: dict[int, Array] = {}  # what is shared stays shared

  def pack(leaf):
    if type(leaf) is not Weight or not _can_be_packed(leaf[...]):
      return leaf
    weight = leaf[...]
    if id(weight) not in done:
      done[id(weight)] = _in_tiles(weight)
    return Packed(done[id(weight)])

  return jax.tree.map(pack, tree, is_leaf=lambda x: isinstance(x, Weight))


def is_packed(tree: Any) -> bool:
  """Whether a weight in it is packed."""
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Weight))
  return any(isinstance(leaf, Packed) for leaf in leaves)


def require_whole(tree: Any, what: str) -> None:
  """Refuses models of which weights are packed.

  Args:
    tree: models or containers of them.
    what: cannot be done with such, for the message.

  Raises:
    ValueError: there is one.
  """
  if is_packed(tree):
    raise ValueError(
      f'packed weights cannot be {what}: take the model that was packed'
    )


def dot(x: Array, weight: Array) -> Array:
  """Product of `x` `[..., inputs]` with a weight `[outputs, inputs]`.

  Or with one that is packed, which is float32 and rounds no factors.

  Weights stay in their dtype (no conversion per call); sums are float32. Inputs
  come last: where weights come from memory, XLA on CPUs multiplies blocks of
  five tokens in .8 of the time that it takes otherwise, in bfloat16 in .6. It
  would transpose them first, and all of them in every call, where `x` had more
  axes than two.
  """
  flat = x.reshape(-1, x.shape[-1])
  if weight.ndim == 3:
    found = _dot_of_tiles(flat, weight)
  elif products.rounded():
    found = products.product('td,fd->tf', flat, weight)
  else:
    if len(flat) < _FEW and weight.dtype == jnp.bfloat16 and products.on_cpu():
      # Of one row XLA makes a float32 product there, and of the weight a copy;
      # two or three take longer than four.
      flat = jnp.pad(flat, ((0, _FEW - len(flat)), (0, 0)))
    found = jax.lax.dot_general(
      flat.astype(weight.dtype),
      weight,
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    found = found[: math.prod(x.shape[:-1])]
  return found.reshape(*x.shape[:-1], -1)


def rows(table: Array, ids: Array) -> Array:
  """Rows `[..., D]` of a table `[V, D]`, which may be packed, float32."""
  if table.ndim == 3:
    return table[ids // _TILE, :, ids % _TILE]
  if table.dtype == jnp.bfloat16 and products.on_cpu():
    # Or the whole table is made float32, before the loop and in every call.
    table, ids = jax.lax.optimization_barrier((table, ids))
  return table[ids].astype(jnp.float32)


def _can_be_packed(weight) -> bool:
  return (
    isinstance(weight, jax.Array)
    and not isinstance(weight, jax.core.Tracer)
    and weight.ndim == 2
    and weight.dtype == jnp.float32
    and len(weight) > _TILE  # of one tile alone XLA makes a reshape
    and not len(weight) % _TILE
    and len(weight.sharding.device_set) == 1
  )


@jax.jit
def _in_tiles(weight):
  return weight.reshape(-1, _TILE, weight.shape[1]).transpose(0, 2, 1)


def _dot_of_tiles(flat, tiles):
  """`[T, inputs]` with `[outputs / 64, inputs, 64]`.

  Not as a product: XLA would make one of the weight laid out in its own way,
  and of one row it does so still. Where several rows are a mere reshape of
  something, that becomes a part of the library's call, which then is no product
  to the library: reversed, they are not.
  """
  one = len(flat) == 1
  flat = jnp.pad(flat, ((0, 1), (0, 0))) if one else flat[::-1]
  found = (tiles[:, None] * flat[:, :, None]).sum(2)
  found = found.transpose(1, 0, 2).reshape(len(flat), -1)
  return found[:1] if one else found[::-1]


@functools.cache
def tiles_pay() -> bool:
  """Whether products with tiles take less time here, measured once.

  XLA's library has all tiles of a weight, but of the largest, read by one
  thread; whether that one reads about as fast as all do is the machine's.
  """
  whole = [jnp.full((1536, 576), float(i)) for i in range(16)]  # a cache's size
  tiles = [_in_tiles(weight) for weight in whole]
  product = jax.jit(dot)

  def seconds(rows, weights):
    x = jnp.ones((rows, 576))
    start = time.perf_counter()
    jax.block_until_ready([product(x, weight) for weight in weights])
    return time.perf_counter() - start

  arms = [(rows, found) for rows in (1, 5) for found in (whole, tiles)]
  turns = [[seconds(*arm) for arm in arms] for _ in range(6)]  # one compiles
  one, one_tiled, five, five_tiled = np.min(turns, axis=0)
  return one_tiled < 1.1 * one and five_tiled < 0.8 * five

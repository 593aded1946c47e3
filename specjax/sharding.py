"""One mesh of devices, and where everything lies on it.

It has three axes. The rows of a batch are divided over `data` and `fsdp`; the
parameters, and with them the optimiser's state, over `fsdp` and `tensor`, as
one table says. `tensor` divides the work of a layer, too; `fsdp` only what is
stored: parameters are gathered where they are used, and for decoding whole,
before its loop.

The axes are JAX's Auto axes: XLA's partitioner finds what lies between, and a
gather whose indices depend on data, as in decoding, is allowed. (Explicit axes,
the default of `jax.make_mesh`, refuse those.) Where there is no mesh, None,
everything is on one device and nothing here does anything.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from specjax import weights
from specjax.types import Array

Tree = TypeVar('Tree')

AXES = ('data', 'fsdp', 'tensor')
ROWS = PartitionSpec(('data', 'fsdp'))

# By the last part of a parameter's name: what divides its last axes, outputs
# and inputs. All else, norms and scalars, is on every device.
RULES = {
  'embedding|head|qkv|gate_up|inner': ('tensor', 'fsdp'),  # out of the stream
  'proj|down|outer': ('fsdp', 'tensor'),  # back onto it
  'qkv_bias': ('tensor',),
  'adapter|fuse|join|weights': (None, 'fsdp'),  # of drafters
}


def make(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh | None:
  """The mesh of all processes' devices.

  Args:
    data: devices along the axis; 0 is all that the others leave.
    fsdp: likewise, not 0.
    tensor: likewise, not 0.

  Returns:
    The mesh, or None where it would be one device.

  Raises:
    ValueError: a size is too small; there are not so many devices; or a
      process would have none of its own in it.
  """
  for name, size, least in zip(
    AXES, (data, fsdp, tensor), (0, 1, 1), strict=True
  ):
    if not isinstance(size, int) or size < least:
      raise ValueError(f'mesh.{name} is {size!r}: at least {least}, and whole')
  count, other = jax.device_count(), fsdp * tensor
  sizes = (data or count // other, fsdp, tensor)
  asked = ', '.join(f'{n} {s}' for n, s in zip(AXES, sizes, strict=True))
  if not 0 < math.prod(sizes) <= count or (not data and count % other):
    here = f'{count} device{"s" * (count > 1)}'
    raise ValueError(
      f'a mesh of {asked} does not fit on {here}: the product of mesh.data,'
      f' mesh.fsdp and mesh.tensor is {count} at most, and where mesh.data is 0'
      f' that of the others divides {count}; to try meshes on a CPU,'
      ' XLA_FLAGS=--xla_force_host_platform_device_count=4 makes it four'
    )
  if jax.process_count() > 1 and math.prod(sizes) != count:
    raise ValueError(
      f'a mesh of {asked} leaves out some of the {count} devices of'
      f' {jax.process_count()} processes: with mesh.data=0 it has them all'
    )
  if math.prod(sizes) == 1:
    return None
  devices = jax.devices()[: math.prod(sizes)]
  return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 3, devices=devices)


def parts(mesh: Mesh | None) -> int:
  """Into how many parts the rows of a batch are divided."""
  if mesh is None:
    return 1
  _require_axes(mesh)
  return mesh.shape['data'] * mesh.shape['fsdp']


def whole_parts(count: int, mesh: Mesh | None) -> int:
  """The least number from `count` on that divides into these parts."""
  return -(-count // parts(mesh)) * parts(mesh)


def require_rows(mesh: Mesh | None, count: int, what: str) -> None:
  """Refuses batches that cannot be divided.

  Args:
    mesh: the mesh.
    count: of rows.
    what: they are, for the message.

  Raises:
    ValueError: it is no multiple of the number of the parts.
  """
  if count % parts(mesh):
    raise ValueError(
      f'{what} is {count}, and the mesh divides rows into {parts(mesh)} parts'
      ' (data times fsdp): it must be a multiple'
    )


def spec(path: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
  """How an array is divided, by its name and shape.

  An axis that a dimension is no multiple of does not divide it. Axes in front
  of those in the table, as of drafts that train together, are whole.

  Args:
    path: of the array, parts joined by dots.
    shape: of the array.
    mesh: whose axes.
  """
  for names, axes in RULES.items():
    named = re.search(rf'(^|\.)({names})(\.\d+)?$', path)
    if named and len(shape) >= len(axes):
      sizes = shape[len(shape) - len(axes) :]
      fits = [
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, sizes, strict=True)
      ]
      return PartitionSpec(*[None] * (len(shape) - len(axes)), *fits)
  return PartitionSpec()


def placed(tree: Any, mesh: Mesh) -> Any:
  """The shardings of a tree of parameters, or of an optimiser's state.

  Args:
    tree: arrays, or their shapes.
    mesh: where.

  Raises:
    ValueError: it is not as `make` makes them.
  """
  _require_axes(mesh)

  def place(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    # An NNX variable shows its only field in the path.
    name = name.removesuffix('.value')
    return NamedSharding(mesh, spec(name, np.shape(leaf), mesh))

  return jax.tree_util.tree_map_with_path(place, tree)


def require_divided(tree: Any, mesh: Mesh | None, what: str) -> None:
  """Refuses a mesh on which every device would have the whole of a model.

  Args:
    tree: arrays, or their shapes.
    mesh: where it shall lie.
    what: it is, for the message.

  Raises:
    ValueError: `fsdp` or `tensor` divides nothing of it.
  """
  if mesh is None:
    return
  places = [place.spec for place in jax.tree.leaves(placed(tree, mesh))]
  for axis in AXES[1:]:
    if mesh.shape[axis] > 1 and not any(axis in divided for divided in places):
      raise ValueError(
        f'{axis} is {mesh.shape[axis]} and divides nothing of the {what}: take'
        ' a number that divides its sizes, or leave it 1'
      )


def described(tree: Tree, mesh: Mesh | None) -> Tree:
  """Shapes and dtypes of a tree of parameters, and where they shall lie."""
  if mesh is None:
    return jax.eval_shape(lambda tree: tree, tree)

  def describe(x, place):
    dtype = jnp.result_type(x)
    return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=place)

  return jax.tree.map(describe, tree, placed(tree, mesh))


def spread(tree: Tree, mesh: Mesh | None) -> Tree:
  """Parameters, or an optimiser's state, on the mesh as the table says.

  Args:
    tree: arrays that are the same in every process.
    mesh: where; None leaves them.

  Raises:
    ValueError: see `placed`.
  """
  if mesh is None:
    return tree
  weights.require_whole(tree, 'put on a mesh')
  return jax.tree.map(_put, tree, placed(tree, mesh))


def on_host(mesh: Mesh | None) -> contextlib.AbstractContextManager:
  """Within it models for a mesh are made in the memory of the host.

  They would be whole on one device else, before `spread` takes them apart; and
  are, where JAX was told of no CPUs (JAX_PLATFORMS=cuda, without cpu).
  """
  if mesh is None:
    return contextlib.nullcontext()
  try:
    return jax.default_device(jax.local_devices(backend='cpu')[0])
  except RuntimeError:  # there is no such backend
    return contextlib.nullcontext()


def require_placed(tree: Any, mesh: Mesh | None, what: str) -> None:
  """Refuses parameters that lie elsewhere.

  Args:
    tree: what `spread` was to be given.
    mesh: where it shall lie; None is anywhere.
    what: it is, for the message.

  Raises:
    ValueError: an array of it is bound to other devices.
  """
  for x in jax.tree.leaves(tree) if mesh else ():
    bound = isinstance(x, jax.Array) and x.committed
    if bound and x.sharding.device_set != set(mesh.devices.flat):
      raise ValueError(
        f'the {what} does not lie on the mesh: put it there with'
        ' specjax.sharding.spread(model, mesh)'
      )


def by_rows(tree: Tree, mesh: Mesh | None) -> Tree:
  """Arrays `[B, ...]`, the same in every process, divided by rows."""
  if mesh is None:
    return tree
  return jax.tree.map(lambda x: _put(x, NamedSharding(mesh, ROWS)), tree)


def step(function: Callable[..., Any], state: Any) -> Callable[..., Any]:
  """An update `(state, ...) -> (state, scalars)`, compiled.

  The state that comes out lies as the one that is given, whose buffers it
  takes.

  Args:
    function: the update.
    state: an example, or a description that has shardings.
  """
  places = jax.tree.map(lambda x: x.sharding, state)
  if not all(isinstance(p, NamedSharding) for p in jax.tree.leaves(places)):
    return jax.jit(function, donate_argnums=0)
  mesh = jax.tree.leaves(places)[0].mesh
  everywhere = NamedSharding(mesh, PartitionSpec())
  return jax.jit(function, donate_argnums=0, out_shardings=(places, everywhere))


def over_rows(
  function: Callable[..., Any], mesh: Mesh, ins: Any, outs: Any
) -> Callable[..., Any]:
  """A function whose rows know nothing of one another, one call for each part.

  Each part then has loops of its own, which end when its rows do. Were they one
  program's, it would exchange what is written row by row, and every part would
  wait for the slowest.

  Args:
    function: to be mapped; within it `tensor` is still divided by XLA.
    mesh: where.
    ins: `ROWS` or `PartitionSpec()` for each argument.
    outs: for the result.
  """
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=ins,
    out_specs=outs,
    axis_names=set(ROWS[0]),
    check_vma=False,
  )


def gathered(x: Array) -> Array:
  """Whole on all devices of `tensor`, within `over_rows`; elsewhere as it is.

  A part of what is divided over `tensor` would be sent from device to device,
  in one exchange of all parts of the rows; they wait for one another there, and
  for good where their loops end apart.
  """
  if _parted() is None:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec())


def by_heads(x: Array) -> Array:
  """Heads `[B, heads, ...]` divided over `tensor`, within `over_rows`."""
  mesh = _parted()
  if mesh is None or x.shape[1] % mesh.shape['tensor']:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(None, 'tensor'))


def fetch(tree: Any) -> Any:
  """The whole arrays of a tree, as NumPy, in every process."""

  def whole(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
      return x
    if x.is_fully_replicated:
      return x
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.device_get(jax.tree.map(whole, tree))


def bytes_each(tree: Any) -> int:
  """Bytes of a tree on the device that has most of them."""

  def one(x):
    shape = np.shape(x)
    if getattr(x, 'sharding', None) is not None:
      shape = x.sharding.shard_shape(shape)
    return math.prod(shape) * jnp.result_type(x).itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def _require_axes(mesh: Any) -> None:
  """Refuses what is no mesh, or has axes of other names or types."""
  axes = getattr(mesh, 'axis_names', None), getattr(mesh, 'axis_types', None)
  if axes != (AXES, (AxisType.Auto,) * len(AXES)):
    raise ValueError(
      f'the mesh is {mesh}: make it with specjax.sharding.make, which gives it'
      f' the axes {", ".join(AXES)}, all of them Auto'
    )


def _parted() -> AbstractMesh | None:
  """The mesh, within `over_rows`."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if set(ROWS[0]) <= set(mesh.manual_axes) else None


def _put(x: Any, place: NamedSharding) -> Array:
  if not isinstance(x, jax.Array):
    x = np.asarray(x, jnp.result_type(x))  # not whole on one device first
  elif jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = _put(jax.random.key_data(x), place)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  spread_already = isinstance(x, jax.Array) and not x.is_fully_addressable
  if place.is_fully_addressable or spread_already:
    return jax.device_put(x, place)
  x = np.asarray(x)
  return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

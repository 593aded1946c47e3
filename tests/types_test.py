"""Dataclasses as pytrees."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters, types, warps
from specjax.types import pytree


@pytree
class Pair:
  first: jax.Array
  second: jax.Array
  size: int = dataclasses.field(default=0, metadata={'static': True})

  def __post_init__(self):
    if self.first is None:
      raise ValueError('no first')


@pytree
class Other:
  first: jax.Array
  second: jax.Array
  size: int = dataclasses.field(default=0, metadata={'static': True})


def test_fields_are_leaves_and_static_ones_structure():
  leaves, structure = jax.tree.flatten(Pair(1.0, (2.0, 3.0), size=4))
  assert leaves == [1.0, 2.0, 3.0]
  again = jax.tree.unflatten(structure, leaves)
  assert again == Pair(1.0, (2.0, 3.0), size=4)
  assert structure == jax.tree.structure(Pair(5.0, (6.0, 7.0), size=4))
  assert structure != jax.tree.structure(Pair(5.0, (6.0, 7.0), size=5))
  paths, _ = jax.tree_util.tree_flatten_with_path(Pair(1.0, 2.0))
  assert [jax.tree_util.keystr(path) for path, _ in paths] == [
    '.first',
    '.second',
  ]


def test_what_stands_for_a_leaf_is_not_checked():
  assert jax.tree.map(lambda _: None, Pair(1.0, 2.0)).first is None


def test_alike_classes_have_other_structures():
  """Else a cache of programs may take one for the other."""
  one, other = (jax.tree.structure(c(1.0, 2.0)) for c in (Pair, Other))
  assert one != other
  f = jax.jit(lambda x: x.first + (1 if isinstance(x, Pair) else 2))
  assert [float(f(c(1.0, 2.0))) for c in (Pair, Other) * 2] == [2, 3, 2, 3]


def test_plain_registration_still_needs_this():
  """When this fails, `jax.tree_util.register_dataclass` will do."""

  def plain(name):
    cls = dataclasses.make_dataclass(name, ['first'], frozen=True)
    return jax.tree_util.register_dataclass(cls)

  one, other = (jax.tree.structure(plain(name)(1.0)) for name in 'ab')
  assert one == other


def test_no_two_warps_or_drafters_have_one_structure():
  made = [
    warps.Temperature(1.0),
    warps.TopK(1),
    warps.TopP(1.0),
    warps.MinP(1.0),
    warps.Greedy(),
  ]
  for name in drafters.names():
    module = drafters.find(name)
    made += [
      object.__new__(cls)
      for cls in vars(module).values()
      if isinstance(cls, type)
      and cls.__module__ == module.__name__
      and dataclasses.is_dataclass(cls)
    ]
  for drafter in made[5:]:
    for field in dataclasses.fields(drafter):
      object.__setattr__(drafter, field.name, 2)
  for one, other in itertools.combinations(made, 2):
    assert jax.tree.structure(one) != jax.tree.structure(other)


def test_a_draft_is_mapped_like_any_pytree():
  draft = types.Draft(jnp.zeros((3, 2), jnp.int32), siblings='iid')
  got = jax.vmap(lambda d: d.tokens.sum() + len(d.siblings))(draft)
  np.testing.assert_array_equal(got, [3, 3, 3])

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toys

import specjax
from specjax import products, sharding
from specjax.drafters.model import ModelDrafter
from specjax.models import tensors


def low(x):
  return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)


def draw(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
  'terms, a, b',
  [
    ('td,df->tf', (5, 7), (7, 3)),
    ('td,vd->tv', (5, 7), (3, 7)),
    ('bhqk,bhkd->bhqd', (2, 3, 5, 4), (2, 3, 4, 6)),
  ],
)
def test_factors_are_rounded_and_sums_are_not(terms, a, b):
  x, y = draw(0, *a), draw(1, *b)
  z, pull = jax.vjp(lambda x, y: products.product(terms, x, y), x, y)
  np.testing.assert_allclose(z, np.einsum(terms, low(x), low(y)), atol=1e-5)
  g = draw(2, *z.shape)
  dx, dy = pull(g)
  left, right, out = terms.replace('->', ',').split(',')
  exact = (
    np.einsum(f'{out},{right}->{left}', low(g), low(y)),
    np.einsum(f'{left},{out}->{right}', low(x), low(g)),
  )
  for got, wanted in zip((z, dx, dy), (None, *exact), strict=True):
    assert got.dtype == jnp.float32
    if wanted is not None:
      np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(got - low(got)).max() > 1e-4  # no bfloat16 results
  # It differs from the product of what was not rounded.
  assert np.abs(z - np.einsum(terms, x, y)).max() > 1e-4


def test_it_holds_within_and_in_what_was_compiled_outside():
  model = toys.transformer()
  tokens = jnp.arange(8)[None]
  forward = toys.jit(lambda m: m.forward(tokens, tokens * 0).features)
  exact = forward(model)
  with products.of('bfloat16'):
    assert products.rounded()
    rough = forward(model)
  assert not products.rounded()
  np.testing.assert_array_equal(forward(model), exact)
  gap = np.abs(rough - exact).max()
  assert 1e-4 < gap < 0.2
  with products.of('float32'):
    np.testing.assert_array_equal(forward(model), exact)
  with pytest.raises(ValueError, match="dtype is 'int8': use float32 or"):
    products.of('int8')


@pytest.mark.parametrize('shape', [(1, 48), (48,), (1, 5, 48), (3, 3, 48)])
def test_a_packed_weight_gives_the_same_products_and_rows(shape):
  x, weight = draw(0, *shape), draw(1, 192, 48)
  tiles = products.packed(products.Weight(weight), 1)[...]
  if jax.default_backend() != 'cpu':  # what it is for
    assert tiles is weight
    return
  assert tiles.shape == (3, 48, 64)
  found = toys.jit(products.dot)(x, tiles)
  assert found.shape == (*shape[:-1], 192) and found.dtype == jnp.float32
  np.testing.assert_allclose(found, products.dot(x, weight), atol=1e-4)
  np.testing.assert_allclose(found, x @ weight.T, atol=1e-4)
  ids = jnp.array([[0, 63, 64], [191, 65, 127]])
  np.testing.assert_array_equal(products.rows(tiles, ids), weight[ids])
  # A weight that lies otherwise is told by its products.
  assert np.abs(products.dot(x, tiles[::-1]) - found).max() > 1


def test_what_would_not_gain_is_left_as_it_is():
  def pack(rows, *shape, dtype='float32'):
    leaf = products.Weight(draw(0, *shape).astype(dtype))
    return products.packed((leaf, 3), rows)[0] is not leaf

  on_cpu = jax.default_backend() == 'cpu'
  assert pack(24, 128, 8) == on_cpu
  assert not pack(25, 128, 8)  # many rows
  assert not pack(1, 96, 8)  # outputs that do not divide
  assert not pack(1, 64, 8)
  assert not pack(1, 128, 8, dtype='bfloat16')
  assert not pack(1, 2, 128, 8)  # packed, or no weight of `dot`
  table = jnp.zeros((128, 8))
  assert products.packed(table, 1) is table  # as of a tabular model
  traced = toys.jit(lambda w: products.packed(products.Weight(w), 1)[...])
  assert traced(table).ndim == 2
  pair = [products.Weight(table) for _ in range(2)]
  first, second = products.packed(pair, 1)
  assert first[...] is second[...]  # what is shared stays so
  assert (first[...].ndim == 3) == on_cpu


def test_packed_models_are_for_decoding_alone():
  model = toys.transformer(vocab_size=128, width=128, hidden=96)
  (packed,) = specjax.packed(model)
  devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  mesh = jax.sharding.Mesh(devices, ('data', 'fsdp', 'tensor'))
  calls = {
    'cast': lambda m: m.cast('bfloat16'),
    'exported': lambda m: list(tensors.split(m)),
    'put on a mesh': lambda m: sharding.spread(m, mesh),
  }
  for what, call in calls.items():
    call(model)
    if packed.embedding[...].ndim == 3:
      with pytest.raises(ValueError, match=f'packed weights cannot be {what}'):
        call(packed)


def test_packed_models_decode_as_they_did():
  """Greedy text of models that are nowhere near a tie."""
  sizes = dict(vocab_size=128, width=128, hidden=96)
  target = toys.transformer(**sizes)
  drafter = ModelDrafter(toys.transformer(1, **sizes), 3)
  found = specjax.packed(target, drafter, batch=2)
  kept, changed = (
    [jnp.ndim(leaf) for leaf in jax.tree.leaves(tree)]
    for tree in ((target, drafter), found)
  )
  assert (3 in changed) == (jax.default_backend() == 'cpu')
  assert 3 not in kept  # what was given is as it was
  prompts = [[1, 2, 3], [4]]

  def text(target, drafter):
    key, greedy = jax.random.key(0), specjax.Temperature(0.0)
    return specjax.generate(
      target, drafter, prompts, key=key, max_new_tokens=12, warp=greedy
    ).new_tokens()

  drafter = dataclasses.replace(drafter, warp=specjax.Temperature(0.0))
  assert text(*specjax.packed(target, drafter, batch=2)) == text(
    target, drafter
  )


@pytest.mark.parametrize('shape', [(1, 48), (1, 1, 48), (3, 48), (48,)])
def test_no_copy_is_made_of_a_bfloat16_weight(shape):
  """Not for one row either, of which XLA would make a float32 product."""
  x, weight = draw(0, *shape), draw(1, 80, 48).astype(jnp.bfloat16)
  made = toys.jit(products.dot)
  found = made(x, weight)
  assert found.shape == (*shape[:-1], 80) and found.dtype == jnp.float32
  np.testing.assert_allclose(found, low(x) @ low(weight).T, atol=1e-5)

  def converted(dot):
    return 'f32[80,48]' in dot.lower(x, weight).compile().as_text()

  assert not converted(made)

  def plain(x, w):
    return jax.lax.dot_general(
      x.astype(w.dtype),
      w,
      (((x.ndim - 1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )

  if jax.default_backend() == 'cpu':  # what it is for
    assert converted(toys.jit(plain)) == (shape != (3, 48))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toys

from specjax import products


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

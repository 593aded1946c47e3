import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import toys

import specjax
from specjax import checkpoint, optimizing, sharding, weights
from specjax.drafters.model import ModelDrafter
from specjax.models import tensors

TILES_PAY = weights.tiles_pay.__wrapped__  # tests pack without asking it


def low(x):
  return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)


def draw(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize('shape', [(1, 48), (48,), (1, 5, 48), (3, 3, 48)])
def test_a_packed_weight_gives_the_same_products_and_rows(shape):
  x, weight = draw(0, *shape), draw(1, 192, 48)
  tiles = weights.pack(weights.Weight(weight), 1)[...]
  if jax.default_backend() != 'cpu':  # what it is for
    assert tiles is weight
    return
  assert tiles.shape == (3, 48, 64)
  found = toys.jit(weights.dot)(x, tiles)
  assert found.shape == (*shape[:-1], 192) and found.dtype == jnp.float32
  np.testing.assert_allclose(found, weights.dot(x, weight), atol=1e-4)
  np.testing.assert_allclose(found, x @ weight.T, atol=1e-4)
  ids = jnp.array([[0, 63, 64], [191, 65, 127]])
  np.testing.assert_array_equal(weights.rows(tiles, ids), weight[ids])
  # A weight that lies otherwise is told by its products.
  assert np.abs(weights.dot(x, tiles[::-1]) - found).max() > 1


def test_what_would_not_gain_is_left_as_it_is():
  def pack(rows, *shape, dtype='float32'):
    leaf = weights.Weight(draw(0, *shape).astype(dtype))
    return weights.pack((leaf, 3), rows)[0] is not leaf

  on_cpu = jax.default_backend() == 'cpu'
  assert pack(24, 128, 8) == on_cpu
  assert not pack(25, 128, 8)  # many rows
  assert not pack(1, 96, 8)  # outputs that do not divide
  assert not pack(1, 64, 8)
  assert not pack(1, 128, 8, dtype='bfloat16')
  assert not pack(1, 2, 128, 8)  # packed, or no weight of `dot`
  table = jnp.zeros((128, 8))
  assert weights.pack(table, 1) is table  # as of a tabular model
  traced = toys.jit(lambda w: weights.pack(weights.Weight(w), 1)[...])
  assert traced(table).ndim == 2
  pair = [weights.Weight(table) for _ in range(2)]
  first, second = weights.pack(pair, 1)
  assert first[...] is second[...]  # what is shared stays so
  assert (first[...].ndim == 3) == on_cpu


@pytest.mark.parametrize('pays', [False, True])
def test_weights_are_packed_where_that_was_measured_to_pay(monkeypatch, pays):
  def nothing(flat, tiles):
    return jnp.zeros((len(flat), tiles.shape[0] * 64))

  def thrice(flat, tiles):
    steps = jnp.arange(3.0)
    dense = tiles.transpose(0, 2, 1).reshape(-1, flat.shape[1])
    return jax.lax.map(lambda step: (flat + step) @ dense.T, steps).sum(0)

  monkeypatch.setattr(weights, '_dot_of_tiles', nothing if pays else thrice)
  jax.clear_caches()  # of `dot`, with what it called before
  assert TILES_PAY() == pays
  monkeypatch.setattr(weights, 'tiles_pay', lambda: pays)
  leaf = weights.Weight(jnp.zeros((128, 8)))
  packed = pays and jax.default_backend() == 'cpu'
  assert (weights.pack(leaf, 1) is not leaf) == packed


def test_packed_models_are_for_decoding_alone(tmp_path):
  model = toys.transformer(vocab_size=128, width=128, hidden=96)
  (packed,) = specjax.pack(model)
  devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
  mesh = jax.sharding.Mesh(devices, ('data', 'fsdp', 'tensor'))
  calls = {
    'cast': lambda m: m.cast('bfloat16'),
    'exported': lambda m: list(tensors.split(m)),
    'put on a mesh': lambda m: sharding.spread(m, mesh),
    'saved': lambda m: checkpoint.save_model(tmp_path / 'model', m),
    'trained': lambda m: optimizing.init(m, optax.sgd(1.0)),
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
  found = specjax.pack(target, drafter, batch=2)
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
  assert text(*specjax.pack(target, drafter, batch=2)) == text(target, drafter)


@pytest.mark.parametrize('shape', [(1, 48), (1, 1, 48), (3, 48), (48,)])
def test_no_copy_is_made_of_a_bfloat16_weight(shape):
  """Not for one row either, of which XLA would make a float32 product."""
  x, weight = draw(0, *shape), draw(1, 80, 48).astype(jnp.bfloat16)
  made = toys.jit(weights.dot)
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

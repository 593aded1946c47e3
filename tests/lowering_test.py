"""Rounds and training steps lower for accelerators that are not here."""

import functools
import re

import conformance_test
import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest
import toys
from jax.sharding import AbstractMesh, NamedSharding

from specjax import (
  data,
  decode,
  distill,
  generation,
  optimizing,
  products,
  sharding,
  verify,
  warps,
  weights,
)
from specjax.draft_length import FIXED
from specjax.types import Block

PLATFORMS = pytest.mark.parametrize('platform', ['tpu', 'cuda'])
EVERYDAY = 'model', 'ngram'
MESH = AbstractMesh((2, 1, 2), sharding.AXES)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
  """What is written for CPUs alone is not taken, as it is not there."""
  monkeypatch.setattr(products, 'on_cpu', lambda: False)


def module(function, platform, *args, devices=1):
  """What would be compiled there."""
  exported = jax.export.export(jax.jit(function), platforms=[platform])(*args)
  assert exported.platforms == (platform,)
  assert exported.nr_devices == devices
  return exported.mlir_module()


def rows(*arrays):
  """Descriptions of trees of arrays whose rows are divided over the mesh."""
  place = NamedSharding(MESH, sharding.ROWS)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays
  )


@PLATFORMS
@pytest.mark.parametrize(
  'name',
  [
    name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow)
    for name in conformance_test.EXAMPLES
  ],
)
def test_decoding_lowers(name, platform):
  target = conformance_test.TARGET
  for drafter in conformance_test.EXAMPLES[name]:
    warp = warps.compose(warps.temperature(0.8), warps.TopP(0.95))
    drafter = conformance_test.with_warp(drafter, warp)
    rule = verify.as_pytree(conformance_test.rule_for(drafter))

    def run(target, drafter, warp, tokens, length, rule=rule):
      rows = jax.random.split(jax.random.key(0), 2)
      texts = tokens, length, length + 8, length, rows
      state = decode.prefill(target, drafter, *texts)
      eos = jnp.zeros(1, jnp.int32)
      return decode.advance(target, drafter, rule, warp, eos, state, 9).tokens

    tokens, length = jnp.zeros((2, 24), jnp.int32), jnp.array([1, 4])
    text = module(run, platform, target, drafter, warp, tokens, length)
    assert 'stablehlo.while' in text
    # No kernel of anybody's own: what XLA can compile anywhere.
    assert 'tpu_custom_call' not in text and '__gpu$' not in text


@PLATFORMS
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('accumulate', [1, 2])
def test_a_step_of_distillation_lowers(platform, dtype, accumulate):
  tx = optax.adamw(1e-3)
  update = optimizing.make_step(
    distill.distill_loss, tx, batch=1, dtype=dtype, accumulate=accumulate
  )
  drafter = conformance_test.EXAMPLES['model'][0]
  state = optimizing.init(drafter, tx)
  weights = distill.objective(3.0)
  args = state, conformance_test.TARGET, data.described(2, 8), weights
  text = module(update, platform, *args)
  assert ('bf16' in text) == (dtype == 'bfloat16')


@PLATFORMS
def test_a_step_of_pretraining_lowers(platform):
  tx = optax.adamw(1e-3)
  update = optimizing.make_step(distill.language_loss, tx)
  state = optimizing.init(conformance_test.TARGET, tx)
  module(update, platform, state, data.described(2, 8))
  state = sharding.described(jax.eval_shape(lambda: state), MESH)
  step = sharding.step(update, state)
  module(step, platform, state, data.described(4, 8, MESH), devices=4)


@PLATFORMS
def test_decoding_on_a_mesh_lowers(platform):
  drafter = conformance_test.EXAMPLES['model'][0]
  pair = sharding.described((conformance_test.TARGET, drafter), MESH)
  rule, eos = verify.as_pytree(verify.rejection), jnp.zeros(1, jnp.int32)
  keys, ints = jax.random.split(jax.random.key(0), 4), jnp.ones(4, jnp.int32)
  texts = rows(jnp.zeros((4, 24), jnp.int32), ints, 9 * ints, ints, keys)
  begin = functools.partial(generation._prefill, mesh=MESH)
  args = *pair, *texts, FIXED
  text = module(begin, platform, *args, devices=4)
  assert 'sdy.manual_computation' in text
  (state,) = rows(jax.eval_shape(begin, *args))
  run = functools.partial(generation.advance, mesh=MESH)
  args = *pair, rule, warps.UNCHANGED, eos, state, 9, FIXED
  text = module(run, platform, *args, devices=4)
  assert 'sdy.manual_computation' in text and 'stablehlo.while' in text


@PLATFORMS
def test_a_training_step_on_a_mesh_lowers(platform):
  tx = optax.adamw(1e-3)
  drafter = conformance_test.EXAMPLES['model'][0]
  state = jax.eval_shape(lambda: optimizing.init(drafter, tx))
  state = sharding.described(state, MESH)
  target = sharding.described(conformance_test.TARGET, MESH)
  update = optimizing.make_step(distill.distill_loss, tx, batch=1)
  args = state, target, data.described(4, 8, MESH), distill.objective(3.0)
  text = module(sharding.step(update, state), platform, *args, devices=4)
  divided = re.findall(r'sdy.sharding = #sdy.sharding<@mesh[^>]*"tensor"', text)
  assert len(divided) > 10


@PLATFORMS
def test_what_is_done_for_cpus_is_not_done_there(platform, monkeypatch):
  x, weight = jnp.ones((1, 8)), jnp.ones((16, 8), 'bfloat16')
  padded = 'tensor<4x8'
  assert padded not in module(weights.dot, platform, x, weight)
  monkeypatch.setattr(products, 'on_cpu', lambda: True)
  assert padded in module(lambda *a: weights.dot(*a), platform, x, weight)


@PLATFORMS
def test_nothing_is_kept_apart_there(platform, monkeypatch):
  table, ids = jnp.ones((16, 8), 'bfloat16'), jnp.zeros(3, jnp.int32)
  for function, *args in (
    (weights.rows, table, ids),
    (lambda x: warps.TopP(0.9)(x), jnp.ones((1, 5000))),
  ):
    barrier = 'optimization_barrier'
    with monkeypatch.context() as patch:
      patch.setattr(products, 'on_cpu', lambda: True)
      assert barrier in module(functools.partial(function), platform, *args)
    assert barrier not in module(functools.partial(function), platform, *args)


@PLATFORMS
def test_bfloat16_stays_bfloat16(platform):
  target = toys.transformer(dtype='bfloat16')
  cache = target.init_cache(1, 16)
  block = Block(jnp.zeros((1, 3), jnp.int32))
  text = module(lambda *x: target.extend(*x)[0], platform, block, cache)
  products = re.findall(r'dot_general.*: \((.*)\) -> (.*)', text)
  assert len(products) > 10
  for factors, out in products:
    assert factors.count('bf16') == 2 and 'xf32' in out, (factors, out)

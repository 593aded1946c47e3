"""Rounds and training steps lower for accelerators that are not here."""

import re

import conformance_test
import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest
import toys
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from specjax import decode, distill, optimizing, sharding, verify, warps
from specjax.types import Batch, Block

PLATFORMS = pytest.mark.parametrize('platform', ['tpu', 'cuda'])
EVERYDAY = 'model', 'ngram'
MESH = AbstractMesh((2, 1, 2), sharding.AXES)


def module(function, platform, *args, devices=1):
  """What would be compiled there."""
  exported = jax.export.export(jax.jit(function), platforms=[platform])(*args)
  assert exported.platforms == (platform,)
  assert exported.nr_devices == devices
  return exported.mlir_module()


def rows(*arrays):
  """Descriptions of arrays whose rows are divided over the mesh."""
  place = NamedSharding(MESH, sharding.ROWS)
  return [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arrays
  ]


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
def test_a_training_step_lowers(platform, dtype):
  tx = optax.adamw(1e-3)
  update = optimizing.make_step(distill.distill_loss, tx, batch=1, dtype=dtype)
  drafter = conformance_test.EXAMPLES['model'][0]
  state = optimizing.init(drafter, tx)
  batch = Batch(*(jnp.ones((2, 8), t) for t in ('int32', 'int32', 'float32')))
  weights = distill.objective(3.0)
  args = state, conformance_test.TARGET, batch, weights
  text = module(update, platform, *args)
  assert ('bf16' in text) == (dtype == 'bfloat16')


@PLATFORMS
def test_decoding_on_a_mesh_lowers(platform):
  drafter = conformance_test.EXAMPLES['model'][0]
  pair = sharding.described((conformance_test.TARGET, drafter), MESH)
  rule, eos = verify.as_pytree(verify.rejection), jnp.zeros(1, jnp.int32)

  def part(target, drafter, tokens, length, keys):
    texts = tokens, length, length + 8, length, keys
    state = decode.prefill(target, drafter, *texts)
    args = target, drafter, rule, warps.UNCHANGED, eos, state, 9
    return decode.advance(*args).tokens

  whole = PartitionSpec()
  ins = whole, whole, *[sharding.ROWS] * 3
  run = sharding.over_rows(part, MESH, ins, sharding.ROWS)
  keys = jax.random.split(jax.random.key(0), 4)
  texts = rows(jnp.zeros((4, 24), jnp.int32), jnp.ones(4, jnp.int32), keys)
  text = module(run, platform, *pair, *texts, devices=4)
  assert 'sdy.manual_computation' in text and 'stablehlo.while' in text


@PLATFORMS
def test_a_training_step_on_a_mesh_lowers(platform):
  tx = optax.adamw(1e-3)
  drafter = conformance_test.EXAMPLES['model'][0]
  state = jax.eval_shape(lambda: optimizing.init(drafter, tx))
  state = sharding.described(state, MESH)
  target = sharding.described(conformance_test.TARGET, MESH)
  update = optimizing.make_step(distill.distill_loss, tx, batch=1)
  tokens, ones = jnp.ones((4, 8), jnp.int32), jnp.ones((4, 8))
  args = state, target, Batch(*rows(tokens, tokens, ones))
  step = sharding.step(update, state)
  text = module(step, platform, *args, distill.objective(3.0), devices=4)
  divided = re.findall(r'sdy.sharding = #sdy.sharding<@mesh[^>]*"tensor"', text)
  assert len(divided) > 10


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

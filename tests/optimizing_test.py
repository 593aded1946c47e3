import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

from specjax import distill, optimizing
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import Batch

V, B, T = 7, 4, 45
# What a CPU would otherwise reorder so as to do more at a time.
SPARING = {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}


def transformer(seed=0, layers=1, **more):
  sizes = TransformerConfig(V, 8, layers, 2, 1, 16, **more)
  return Transformer(sizes, nnx.Rngs(seed))


def windows(seed=0, rows=B):
  """Rows in which different numbers of tokens count."""
  rng = np.random.default_rng(seed)
  tokens = jnp.asarray(rng.integers(0, V, (rows, T)))
  counted = 1 + 2 * np.arange(rows)[:, None]
  weight = jnp.asarray(np.arange(T) < counted, jnp.float32)
  return Batch(tokens, jnp.ones((rows, T), jnp.int32), weight)


def moved(tx, batch, model=None, **options):
  """The model after a step, less the model before it; and the scalars."""
  step = optimizing.make_step(distill.language_loss, tx, **options)
  state = optimizing.init(model or transformer(), tx)
  after, scalars = toys.jit(step)(state, batch)
  return jax.tree.map(jnp.subtract, after.model, state.model), scalars


def distance(a, b):
  """Of two trees, relative to their size."""
  gap = optax.tree.norm(jax.tree.map(jnp.subtract, a, b))
  return float(gap / optax.tree.norm(b))


def same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_micro_batches_add_up_to_the_batch():
  sgd, batch = optax.sgd(1.0), windows()
  whole, scalars = moved(sgd, batch)
  split, again = moved(sgd, batch, accumulate=4)
  assert distance(split, whole) < 1e-5
  assert again['tokens'] == scalars['tokens'] == 1 + 3 + 5 + 7 - 4
  assert again['loss'] == pytest.approx(float(scalars['loss']), rel=1e-5)
  # What it must not be: a mean of means, in which a row of few tokens weighs
  # as much as a row of many.
  rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(B)]
  means = [moved(sgd, row)[0] for row in rows[1:]]
  wrong = jax.tree.map(lambda *x: sum(x) / len(x), *means)
  assert distance(wrong, whole) > 0.1


def test_what_cannot_be_divided_is_refused():
  with pytest.raises(ValueError, match='4 rows does not divide into 3'):
    moved(optax.sgd(1.0), windows(), accumulate=3)
  with pytest.raises(ValueError, match="dtype is 'float16'"):
    moved(optax.sgd(1.0), windows(), dtype='float16')


def scratch(model, **options):
  """Bytes that a step takes beside its arguments and results."""
  tx = optax.sgd(1.0)
  step = optimizing.make_step(distill.language_loss, tx, **options)
  lowered = jax.jit(step).lower(optimizing.init(model, tx), windows(rows=32))
  compiled = lowered.compile(toys.QUICK | SPARING)
  return compiled.memory_analysis().temp_size_in_bytes


def kept(model):
  """Bytes that a loss keeps for its gradient."""
  batch = windows(rows=32)

  def gradient(model):
    return jax.vjp(lambda m: distill.language_loss(m, batch)[0], model)[1]

  leaves = jax.tree.leaves(jax.eval_shape(gradient, model))
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_micro_batches_take_less_memory():
  model = transformer()
  assert scratch(model, accumulate=8) < scratch(model) / 3


@pytest.mark.slow
def test_layers_computed_again_give_the_same_gradient_in_less_memory():
  plain, again = (transformer(layers=4, remat=remat) for remat in (False, True))
  sgd, batch = optax.sgd(1.0), windows()
  a, b = moved(sgd, batch, plain)[0], moved(sgd, batch, again)[0]
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
  assert kept(again) < kept(plain) / 10
  assert scratch(again) < 0.8 * scratch(plain)


def test_bfloat16_products_leave_float32_parameters():
  batch = windows()
  exact, scalars = moved(optax.sgd(1.0), batch)
  rough, again = moved(optax.sgd(1.0), batch, dtype='bfloat16')
  assert {str(x.dtype) for x in jax.tree.leaves(rough)} == {'float32'}
  assert again['loss'] == pytest.approx(float(scalars['loss']), rel=1e-2)
  assert 1e-5 < distance(rough, exact) < 0.05  # it is rounded, and not much


def test_small_updates_are_not_lost_in_bfloat16():
  tx = optax.sgd(1e-3)
  model = transformer()
  steps, _ = moved(tx, windows(), model, dtype='bfloat16')
  exact, _ = moved(tx, windows(), model)
  assert distance(steps, exact) < 0.05
  # Added to bfloat16 parameters most of the same updates change nothing.
  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
  after = jax.tree.map(lambda x, d: x + d.astype(x.dtype), low, exact)
  stuck = jax.tree.map(lambda a, b: (a == b).sum(), low, after)
  sizes = jax.tree.map(lambda x: x.size, low)
  assert sum(jax.tree.leaves(stuck)) > sum(jax.tree.leaves(sizes)) / 2


@pytest.mark.parametrize(
  'slope, rate', [(jnp.inf, 1.0), (jnp.nan, 1.0), (1e15, 1e10)]
)
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(slope, rate):
  """An infinite loss, a NaN, and an update that overflows."""
  tx = optax.adam(1e-3) if rate == 1 else optax.sgd(rate)
  step = jax.jit(
    optimizing.make_step(lambda x, a: (jnp.sum(a * x), jnp.ones(())), tx)
  )
  good, scalars = step(optimizing.init(jnp.ones(3), tx), 1e-10)
  assert good.step == 1 and np.isfinite(list(scalars.values())).all()
  after, scalars = step(good, slope)
  same(after, good)
  assert not np.isfinite(list(scalars.values())).all()


def test_a_batch_without_a_counted_token_leaves_the_model_as_it_is():
  batch = windows()
  empty = batch._replace(weight=jnp.zeros_like(batch.weight))
  change, scalars = moved(optax.sgd(1.0), empty)
  assert scalars['loss'] == 0 and scalars['tokens'] == 0
  assert all((leaf == 0).all() for leaf in jax.tree.leaves(change))


def test_only_matrices_decay():
  tx = optimizing.optimizer(0.1, 20, 0, weight_decay=0.1)
  params = {'matrix': jnp.ones((2, 2)), 'norm': jnp.ones(2)}
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = tx.update(zeros, tx.init(params), params)
  assert updates['norm'].tolist() == [0, 0]
  assert float(updates['matrix'][0, 0]) == pytest.approx(-0.01)


def test_the_rate_warms_up_and_falls_to_zero():
  tx = optimizing.optimizer(1e-3, 100, 10)
  params = {'matrix': jnp.ones((1, 1))}
  state, rates = tx.init(params), []
  for _ in range(101):
    # Adam's update for a constant gradient is the rate itself.
    updates, state = tx.update(params, state, params)
    rates.append(-float(updates['matrix'][0, 0]))
  assert rates[0] == 0
  assert rates[5] == pytest.approx(5e-4, rel=1e-3)
  assert rates[10] == pytest.approx(1e-3, rel=1e-3)
  assert rates[55] == pytest.approx(5e-4, rel=1e-3)
  assert rates[100] == pytest.approx(0, abs=1e-9)
  with pytest.raises(ValueError, match='warmup is 100'):
    optimizing.optimizer(1e-3, 100, 100)

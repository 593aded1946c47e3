import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill, logs, training
from specjax.checkpoint import Checkpoints
from specjax.models.markov import Markov
from specjax.types import Batch

TX = distill.optimizer(0.1, 6, 1)
STEP = jax.jit(distill.make_step(distill.language_loss, TX))


class Batches:
  """Batch i is a function of i."""

  def __init__(self, die_at=None):
    self.asked, self.die_at = [], die_at

  def __call__(self, i, model):
    if i == self.die_at:
      raise KeyboardInterrupt
    self.asked.append(i)
    tokens = np.random.default_rng(i).integers(0, 5, (2, 9))
    ones = np.ones((2, 9))
    return Batch(tokens, ones.astype(int), ones.astype(np.float32))


def fit(folder, batches, step=STEP, steps=6):
  return training.fit(
    distill.init(Markov(jnp.zeros((5, 5))), TX),
    step,
    batches,
    lambda model: {'size': float(jnp.abs(model.logits[...]).sum())},
    steps=steps,
    every=2,
    folder=folder / 'model',
    log=folder / 'logs' / 'test',
    meta={'answer': 42},
    score=lambda values: values['size'],
  )


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
  straight = fit(tmp_path / 'a', Batches())
  broken, rest = Batches(die_at=5), Batches()
  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path / 'b', broken)
  resumed = fit(tmp_path / 'b', rest)
  assert broken.asked == [0, 1, 2, 3, 4]
  assert rest.asked == [4, 5]  # step 5 was done but not saved
  for a, b in zip(
    jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  a, b = (
    [
      {key: value for key, value in line.items() if key != 'time'}
      for line in logs.read(tmp_path / run / 'logs' / 'test.jsonl')
    ]
    for run in 'ab'
  )
  assert a == b
  assert [line['step'] for line in a] == [2, 4, 6]


def test_a_finished_run_does_nothing_more(tmp_path):
  first, second = Batches(), Batches()
  done = fit(tmp_path, first)
  again = fit(tmp_path, second)
  assert second.asked == []
  assert Checkpoints(tmp_path / 'model').meta(6) == {'answer': 42}
  for a, b in zip(jax.tree.leaves(done), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good(tmp_path):
  def step(state, batch):
    state, scalars = STEP(state, batch)
    broken = state.step == 4
    return state, {'loss': jnp.where(broken, jnp.nan, scalars['loss'])}

  with pytest.raises(FloatingPointError, match='nan by step 4.*keeps step 2'):
    fit(tmp_path, Batches(), step)
  assert Checkpoints(tmp_path / 'model').latest() == 2

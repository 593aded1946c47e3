import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import data, distill, logs, optimizing, training
from specjax.checkpoint import Checkpoints
from specjax.models.markov import Markov
from specjax.types import Batch

TX = optimizing.optimizer(0.1, 40, 1)
STEP = jax.jit(
  optimizing.make_step(distill.language_loss, TX), donate_argnums=0
)


class Batches:
  """A batch is a function of its step, and of the model before it."""

  def __init__(self, die_at=None):
    self.asked, self.die_at = [], die_at

  def __call__(self, i, model):
    if i == self.die_at:
      raise KeyboardInterrupt
    self.asked.append(i)
    own = int(1000 * float(model.logits[...].sum()))
    tokens = np.random.default_rng([i, own % 97]).integers(0, 5, (2, 9))
    ones = np.ones((2, 9))
    return Batch(tokens, ones.astype(int), ones.astype(np.float32))


def start():
  return optimizing.init(Markov(jnp.eye(5)), TX)


def size(model):
  return {'size': float(jnp.abs(model.logits[...]).sum())}


def fit(folder, batches, step=STEP, steps=6, evaluate=size, **options):
  return training.fit(
    start(),
    step,
    batches,
    evaluate,
    **{
      'steps': steps,
      'every': 2,
      'folder': folder / 'model',
      'log': folder / 'logs' / 'test',
      'meta': {'answer': 42},
      'score': lambda values: values['size'],
      'like': data.described(2, 9),
      **options,
    },
  )


def same(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
  straight = fit(tmp_path / 'a', Batches())
  broken, rest = Batches(die_at=5), Batches()
  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path / 'b', broken)
  resumed = fit(tmp_path / 'b', rest)
  assert broken.asked == [0, 1, 2, 3, 4]
  assert rest.asked == [4, 5]  # step 5 was done but not saved
  same(straight, resumed)
  a, b = (
    [
      {key: value for key, value in line.items() if key != 'time'}
      for line in logs.read(tmp_path / run / 'logs' / 'test.jsonl')
    ]
    for run in 'ab'
  )
  assert a == b
  assert [line['step'] for line in a] == [2, 4, 6]


class Terminated(Batches):
  """A scheduler wants the machine back while a batch is read."""

  def __init__(self, at):
    super().__init__()
    self.at = at

  def __call__(self, i, model):
    if i == self.at:
      os.kill(os.getpid(), signal.SIGTERM)
    return super().__call__(i, model)


@pytest.mark.parametrize('at', [0, 2, 3, 5])
def test_sigterm_saves_the_step_that_it_is_at(tmp_path, capsys, at):
  straight = fit(tmp_path / 'a', Batches())
  before = signal.getsignal(signal.SIGTERM)
  terminated, rest = Terminated(at), Batches()
  with pytest.raises(SystemExit) as ended:
    fit(tmp_path / 'b', terminated)
  assert ended.value.code == 143
  said = capsys.readouterr().err
  assert f'test is saved at step {at + 1}, and it ends' in said
  # The progress that is shown last is of that step, too.
  assert f'{at + 1}/6' in said
  assert signal.getsignal(signal.SIGTERM) is before
  assert terminated.asked == [*range(at + 1)]
  assert Checkpoints(tmp_path / 'b' / 'model').latest() == at + 1
  same(straight, fit(tmp_path / 'b', rest))
  assert rest.asked == [*range(at + 1, 6)]


def test_a_finished_run_does_nothing_more(tmp_path):
  first, second = Batches(), Batches()
  done = fit(tmp_path, first)
  again = fit(tmp_path, second)
  assert second.asked == []
  assert Checkpoints(tmp_path / 'model').meta(6) == {'answer': 42}
  same(done, again)


def test_a_model_that_was_saved_alone_is_a_finished_run(tmp_path):
  model = jax.tree.map(lambda x: x + 1, start().model)
  Checkpoints(tmp_path / 'model').save(6, {'model': model}, {'answer': 42})
  batches = Batches()
  same(fit(tmp_path, batches).model, model)
  assert batches.asked == []


def test_each_checkpoint_is_of_its_own_step_though_training_went_on(tmp_path):
  # Buffers are donated, so that a write that read them late would see others.
  states = [state := start()]
  batches = Batches()
  for i in range(11):
    state, _ = STEP(jax.tree.map(jnp.copy, state), batches(i, state.model))
    states.append(state)
  for stop in (10, 11):
    fit(tmp_path / str(stop), Batches(), steps=stop, every=1)
    folder = Checkpoints(tmp_path / str(stop) / 'model')
    assert folder.latest() == stop
    for step in folder.steps():
      like = {'model': state.model, 'opt': state.opt}
      saved = folder.restore(step, like)
      same(saved, {'model': states[step].model, 'opt': states[step].opt})


@pytest.mark.parametrize('bad', [5, 7, 8, 17])
def test_what_is_not_finite_stops_at_its_step_and_keeps_the_last_good(
  tmp_path, bad
):
  def step(state, batch):
    poison = jnp.where(state.step == bad - 1, jnp.nan, 1.0)
    return STEP(state, batch._replace(weight=batch.weight * poison))

  every, good = 4, 4 * ((bad - 1) // 4)
  for _ in range(2):  # said again, it meets the same step again
    with pytest.raises(
      FloatingPointError, match=f'nan at step {bad}: .*{good}$'
    ):
      fit(tmp_path, Batches(), step, steps=40, every=every)
    folder = Checkpoints(tmp_path / 'model')
    assert folder.latest() == good
    for saved in folder.steps():
      items = folder.restore(saved, {'model': start().model})
      assert jnp.isfinite(items['model'].logits[...]).all()


def scores(values):
  """What evaluations say, one after the other."""
  shown = iter(values)
  return lambda model: {'size': next(shown)}


@pytest.mark.parametrize(
  'values, patience, stop',
  [
    ([1, 2, 3, 4, 5, 6], 1, 12),
    ([1, 2, 2, 3, 3, 3], 1, 6),
    ([1, 2, 2, 3, 1, 2], 2, 12),
    ([3, 2, 1, 9, 9, 9], 2, 6),
    ([3, 2, 1, 0, 9, 9], 3, 8),
    ([3, 2, 1, 0, 0, 0], 0, 12),
  ],
)
def test_it_stops_when_it_no_longer_gains(tmp_path, values, patience, stop):
  straight = Batches()
  fit(
    tmp_path / 'a',
    straight,
    steps=12,
    patience=patience,
    evaluate=scores(values),
  )
  assert straight.asked == list(range(stop))
  # Killed after every evaluation, it stops where it would have.
  for i in range(6):
    batches = Batches(die_at=2 * i + 3)
    try:
      fit(
        tmp_path / 'b',
        batches,
        steps=12,
        patience=patience,
        evaluate=scores(values[i:]),
      )
    except KeyboardInterrupt:
      continue
    break
  a, b = (Checkpoints(tmp_path / name / 'model') for name in 'ab')
  assert a.latest() == b.latest() == stop
  assert a.steps() == b.steps() and a.best() == b.best()
  # And it stays stopped.
  again = Batches()
  fit(tmp_path / 'b', again, steps=12, patience=patience)
  assert again.asked == []


def test_what_a_device_holds_is_told_before_a_batch_is_made(tmp_path, capsys):
  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path, Batches(die_at=0), beside=jnp.zeros(300))
  said = capsys.readouterr().out
  assert 'on one device 100 B parameters' in said and '1.2 kB target' in said
  assert '216 B text' in said


def test_tokens_per_second_are_told(tmp_path, capsys):
  fit(tmp_path / 'a', Batches())
  out = capsys.readouterr().out
  assert ' tokens per second' in out and 'GFLOP' not in out
  fit(tmp_path / 'b', Batches(), operations=lambda *_: 10**9)
  assert ' GFLOP/s in matrix products' in capsys.readouterr().out

"""Checkpoints: what goes in comes out, and nothing else is accepted."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from specjax import checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
  width: int = 4
  layers: int = 2
  dtype: str = 'float32'


class Layer(nnx.Module):
  def __init__(self, config, rngs):
    shape = (config.width, config.width)
    self.weight = nnx.Param(jax.random.normal(rngs(), shape, config.dtype))


class Model(nnx.Module):
  """The shape of a real model: a list of layers and a static configuration."""

  def __init__(self, config, rngs):
    self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
    self.config = config

  def __call__(self, x):
    for layer in self.layers:
      x = jnp.tanh(x @ layer.weight[...])
    return x


def build(config):
  return Model(Config(**config), nnx.Rngs(0))


def same(a, b):
  """Whether two pytrees agree in structure, dtype and every bit."""
  assert jax.tree.structure(a) == jax.tree.structure(b)

  def bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, _KEY) else x

  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(bits(x)).tobytes() == np.asarray(bits(y)).tobytes()
  return True


_KEY = jax.dtypes.prng_key


# A peak rate of 1e-3, ten steps of linear warm-up, linear decay to 0 at 100.
SCHEDULE = optax.join_schedules(
  [
    optax.linear_schedule(0.0, 1e-3, 10),
    optax.linear_schedule(1e-3, 0.0, 90),
  ],
  [10],
)
OPTIMISER = optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE)


def start():
  model = Model(Config(), nnx.Rngs(0))
  return {
    'model': model,
    'optimiser': OPTIMISER.init(model),
    'key': jax.random.key(7),
  }


@jax.jit
def update(state):
  """One step with dropout, so that parameters, moments and key all matter."""
  key, mask_key, data_key = jax.random.split(state['key'], 3)
  mask = jax.random.bernoulli(mask_key, 0.9, (8, 4))
  x = jax.random.normal(data_key, (8, 4)) * mask / 0.9
  gradient = jax.grad(lambda model: jnp.mean(jnp.square(model(x) - 1)))
  moves, optimiser = OPTIMISER.update(
    gradient(state['model']), state['optimiser'], state['model']
  )
  model = optax.apply_updates(state['model'], moves)
  rate = optimiser.hyperparams['learning_rate']
  return {'model': model, 'optimiser': optimiser, 'key': key}, rate


def run(state, steps):
  rates = []
  for _ in range(steps):
    state, rate = update(state)
    rates.append(float(rate))
  return state, rates


def test_resume_is_bit_identical_and_keeps_the_schedule(tmp_path):
  straight, rates = run(start(), 30)
  half, first = run(start(), 25)
  checkpoint.Checkpoints(tmp_path).save(25, half)

  again = checkpoint.Checkpoints(tmp_path)
  state = again.restore(again.latest(), jax.eval_shape(start))
  assert same(state, half)
  resumed, second = run(state, 5)
  assert same(resumed, straight)
  assert first + second == rates
  np.testing.assert_allclose(second[0], 1e-3 * 75 / 90, rtol=1e-5)


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_typed_keys_round_trip(tmp_path, impl):
  keys = jax.random.split(jax.random.key(3, impl=impl), 4)
  folder = checkpoint.Checkpoints(tmp_path)
  folder.save(1, {'key': keys, 'nested': {'key': keys[0]}})
  like = {'key': jax.eval_shape(lambda: keys), 'nested': {'key': keys[0]}}
  restored = folder.restore(1, like)
  assert same(restored, {'key': keys, 'nested': {'key': keys[0]}})


def test_bfloat16_keeps_its_bits(tmp_path):
  x = jnp.asarray([1.0, 1 / 3, -0.0, jnp.inf, jnp.nan], jnp.bfloat16)
  folder = checkpoint.Checkpoints(tmp_path)
  folder.save(1, {'x': x})
  assert same(folder.restore(1, {'x': x})['x'], x)


def test_meta_comes_back(tmp_path):
  meta = {'loss': {'kl_weight': float('inf')}, 'data': {'next': [3, None]}}
  folder = checkpoint.Checkpoints(tmp_path)
  folder.save(1, {'x': jnp.ones(2)}, meta)
  assert folder.meta(1) == meta


@pytest.mark.parametrize(
  'scores, kept, best',
  [
    ([None, None, None], [3], 3),
    ([1.0, 3.0, 2.0], [2, 3], 2),
    ([3.0, 1.0, 2.0], [1, 3], 1),
    ([1.0, 2.0, 3.0], [3], 3),
    ([2.0, 2.0, float('nan')], [1, 3], 1),
    ([float('nan'), None, None], [3], 3),
    ([-1.0, -3.0, None], [1, 3], 1),
  ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, scores, kept, best):
  folder = checkpoint.Checkpoints(tmp_path)
  for step, score in enumerate(scores, start=1):
    folder.save(step, {'x': jnp.full(2, step)}, score=score)
  reopened = checkpoint.Checkpoints(tmp_path)
  assert reopened.steps() == kept
  assert reopened.latest() == 3
  assert reopened.best() == best
  restored = reopened.restore(best, {'x': jnp.zeros(2, int)})['x']
  assert restored.tolist() == [best, best]


def test_a_folder_without_checkpoints(tmp_path):
  folder = checkpoint.Checkpoints(tmp_path / 'absent')
  assert folder.steps() == []
  assert folder.latest() is None
  assert folder.best() is None
  with pytest.raises(FileNotFoundError, match=r'absent/4 \(steps here: none'):
    folder.meta(4)
  with pytest.raises(FileNotFoundError, match='no checkpoint in .*absent'):
    checkpoint.load_model(tmp_path / 'absent', build)


def test_what_does_not_fit_is_one_clear_line(tmp_path):
  folder = checkpoint.Checkpoints(tmp_path)
  state = start()
  folder.save(1, {name: state[name] for name in ('model', 'key')})

  def restore(**like):
    with pytest.raises(ValueError) as raised:
      folder.restore(1, like)
    assert '\n' not in str(raised.value)
    return str(raised.value)

  missing = restore(model=state['model'], optimiser=state['optimiser'])
  assert "holds no 'optimiser', only key, model" in missing
  wider = restore(model=Model(Config(width=8), nnx.Rngs(0)))
  assert 'checkpoint of another model' in wider
  assert 'float32[4, 4] at model.layers.0.weight' in wider
  assert 'expected float32[8, 8] (and 1 more)' in wider
  deeper = restore(model=Model(Config(layers=3), nnx.Rngs(0)))
  assert 'nothing at model.layers.2.weight' in deeper
  shallower = restore(model=Model(Config(layers=1), nnx.Rngs(0)))
  assert 'expected nothing' in shallower
  narrower = restore(model=Model(Config(dtype='bfloat16'), nnx.Rngs(0)))
  assert 'expected bfloat16[4, 4]' in narrower
  assert 'key<fry>[]' in restore(key=jax.random.key_data(state['key']))


def test_a_damaged_checkpoint_says_so(tmp_path):
  folder = checkpoint.Checkpoints(tmp_path)
  folder.save(1, {'x': jnp.arange(1000)})
  for path in (tmp_path / '1' / 'x').rglob('*'):
    if path.is_file():
      path.write_bytes(path.read_bytes()[:5])
  with pytest.raises(ValueError, match='1 is damaged') as raised:
    folder.restore(1, {'x': jnp.zeros(1000, int)})
  assert '\n' not in str(raised.value)


@pytest.mark.parametrize(
  ('first', 'said'),
  [
    (OSError('No space left\non device'), 'No space left'),
    (KeyError('x'), "KeyError: 'x'"),
    (ValueError(), 'ValueError'),
  ],
)
def test_the_reason_is_what_failed_first(first, said):
  try:
    try:
      raise first
    except Exception as error:
      raise RuntimeError('a save failed') from error
  except RuntimeError as last:
    assert checkpoint._reason(last) == said


def test_a_model_is_rebuilt_from_its_folder_alone(tmp_path):
  model = Model(Config(width=3, layers=1), nnx.Rngs(5))
  checkpoint.save_model(tmp_path, model, {'tokenizer': 'abc'})
  assert same(checkpoint.load_model(tmp_path, build), model)
  assert checkpoint.Checkpoints(tmp_path).meta(0)['tokenizer'] == 'abc'
  with pytest.raises(FileExistsError):
    checkpoint.save_model(tmp_path, model)


def test_a_training_run_gives_its_best_model(tmp_path):
  folder = checkpoint.Checkpoints(tmp_path)
  states = [start(), run(start(), 1)[0]]
  meta = {'model': dataclasses.asdict(Config())}
  folder.save(0, states[0], meta, score=2.0)
  folder.save(1, states[1], meta, score=1.0)
  best = checkpoint.load_model(tmp_path, build)
  newest = checkpoint.load_model(tmp_path, build, step=1)
  assert same(best, states[0]['model'])
  assert same(newest, states[1]['model'])


def test_the_rest_of_an_unfinished_save_is_ignored_then_removed(tmp_path):
  folder = checkpoint.Checkpoints(tmp_path)
  folder.save(1, {'x': jnp.ones(2)})
  rest = tmp_path / '2.orbax-checkpoint-tmp'
  rest.mkdir()
  (rest / '_CHECKPOINT_METADATA').write_text('{')
  assert folder.steps() == [1]
  folder.save(2, {'x': jnp.full(2, 2.0)})
  assert folder.restore(2, {'x': jnp.zeros(2)})['x'].tolist() == [2, 2]
  assert not rest.exists()


# Dies at the last possible moment: everything is written, nothing is renamed.
KILLED = """
import os, signal, sys
import jax.numpy as jnp
from specjax import checkpoint
folder = checkpoint.Checkpoints(sys.argv[1])
folder.save(1, {'x': jnp.ones(4)}, {'step': 1})
def die(*args, **kwargs):
  os.kill(os.getpid(), signal.SIGKILL)
os.rename = os.replace = die
folder.save(2, {'x': jnp.zeros(4)}, {'step': 2})
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_previous_one(tmp_path):
  script = textwrap.dedent(KILLED)
  command = [sys.executable, '-c', script, str(tmp_path)]
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
  result = subprocess.run(command, env=environment, capture_output=True)
  assert result.returncode == -signal.SIGKILL
  folder = checkpoint.Checkpoints(tmp_path)
  assert len(list(tmp_path.iterdir())) == 2, 'the kill came too early or late'
  assert folder.steps() == [1]
  assert folder.meta(1) == {'step': 1}
  assert folder.restore(1, {'x': jnp.zeros(4)})['x'].tolist() == [1] * 4
  folder.save(2, {'x': jnp.full(4, 2.0)})
  assert folder.restore(2, {'x': jnp.zeros(4)})['x'].tolist() == [2] * 4


def test_what_is_being_written_may_be_overwritten(tmp_path):
  """As a training step does that donates its state."""
  next_ = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
  x = next_(jnp.arange(2**22, dtype=jnp.float32))
  wanted = np.array(x, copy=True)
  with checkpoint.Checkpoints(tmp_path) as folder:
    folder.save_async(1, {'x': x})
    for _ in range(20):
      x = next_(x)
  saved = folder.restore(1, {'x': jax.ShapeDtypeStruct(x.shape, x.dtype)})
  np.testing.assert_array_equal(saved['x'], wanted)
  assert (np.asarray(x) != wanted).all()


def test_an_error_of_one_process_asks_nothing_of_the_others(
  tmp_path, monkeypatch
):
  """They do not know of it, and would never answer."""

  def never(action, what):
    raise AssertionError(what)

  with pytest.raises(OSError, match='a full disk'):
    with checkpoint.Checkpoints(tmp_path) as kept:
      kept.save_async(1, {'x': jnp.zeros(3)})
      monkeypatch.setattr(checkpoint.processes, 'by_first', never)
      raise OSError('a full disk')
  assert checkpoint.Checkpoints(tmp_path).steps() == [1]
  monkeypatch.undo()
  with pytest.raises(AssertionError, match='thinning'):
    with checkpoint.Checkpoints(tmp_path) as kept:
      kept.save_async(2, {'x': jnp.zeros(3)})
      monkeypatch.setattr(checkpoint.processes, 'by_first', never)


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path):
  x = jnp.arange(2**16, dtype=jnp.float32)
  folder = checkpoint.Checkpoints(tmp_path)
  folder.save(1, {'x': x})
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # No file may grow beyond this many bytes, which a write finds out like that
  # a disk is full.
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
  try:
    folder.save_async(2, {'x': x + 1})
    with pytest.raises(
      OSError, match='2 could not be written.*intact: 1. '
    ) as e:
      folder.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert '\n' not in str(e.value)
  assert folder.steps() == [1]
  same(folder.restore(1, {'x': x})['x'], x)
  folder.save(2, {'x': x + 1})
  same(folder.restore(2, {'x': x})['x'], x + 1)

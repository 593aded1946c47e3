"""Kill -9 at random moments changes nothing that a run ends with."""

import random
import time

import jax
import numpy as np
import pytest
import scripts
from orbax.checkpoint import v1 as ocp

from specjax import logs
from specjax.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

KILLS, STEPS = 10, 300
COMMAND = (
  'train/distill.py',
  '--config=configs/stdlib.py:tiny',
  f'--config.distill.steps={STEPS}',
  '--config.distill.eval_every=5',
)


def start(folder):
  return scripts.start(*COMMAND, f'--workdir={folder}')


def newest(folder):
  return Checkpoints(folder).latest() or 0


def kill(process, folder, delay):
  """Kills it so many seconds after it has saved something new there."""
  begun = newest(folder)
  while newest(folder) == begun and process.poll() is None:
    time.sleep(0.005)
  time.sleep(delay)
  process.kill()
  process.communicate()


def contents(folder):
  """All arrays of the newest checkpoint: parameters and optimiser."""
  return ocp.load_checkpointables(folder / str(newest(folder)))


def lines(folder):
  """The log but its times."""
  found = logs.read(folder / 'logs' / 'draft.jsonl')
  return [{k: v for k, v in line.items() if k != 'time'} for line in found]


@pytest.mark.filterwarnings('ignore:Sharding info')
def test_ten_kills_change_nothing(tmp_path):
  rng = random.Random(0)
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  undisturbed = start(whole)
  moments = []
  for i in range(KILLS):
    process = start(broken)
    # The first hits the target's training, or what comes before the draft's.
    kill(process, broken / ('draft' if i else 'target'), rng.uniform(0, 0.2))
    assert process.returncode == -9
    moments.append(newest(broken / 'draft'))
  for process in (start(broken), undisturbed):
    code, _, error = scripts.finish(process)
    assert code == 0, error
  assert len(set(moments)) == KILLS and moments[-1] < STEPS
  assert newest(whole / 'draft') == newest(broken / 'draft') == STEPS
  for name in ('target', 'draft'):
    a, b = contents(whole / name), contents(broken / name)
    assert set(a) == set(b) == {'model', 'opt'}
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
      np.testing.assert_array_equal(x, y)
  assert lines(whole) == lines(broken)

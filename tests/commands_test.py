"""Every configuration, shrunk, through the commands of the README."""

import json

import hf_files
import llama2c_files
import numpy as np
import pytest
import scripts

from specjax import experiment
from specjax.checkpoint import Checkpoints

pytestmark = pytest.mark.slow

# An ablation's page is another's, and has a test of its own.
PAGES = sorted(
  path.name
  for path in (scripts.ROOT / 'configs').glob('*.py')
  if not path.name.startswith('ablation_')
)

WHOLE = 'stdlib.py'  # goes through all commands


def model(folder):
  """A target that a page asks for, and its tokenizer."""
  llama2c_files.checkpoint(folder / 'model.bin')
  llama2c_files.tokenizer(folder / 'tok300.bin', llama2c_files.pieces())
  return folder / 'model.bin'


def chat_model(folder):
  """A target with special tokens."""
  hf_files.model(folder / 'model')
  return folder / 'model'


def text(folder, name):
  """Text that a page asks for."""
  path = folder / f'{name}.txt'
  path.write_text(''.join(f'{name} has line {i}\n' for i in range(4000)))
  return f'files:{path}'


# What a page may leave to be given, and how to come by it.
WANTED = {
  'target.path': model,
  'corpus.name': lambda folder: text(folder, 'train'),
  'corpus.test': lambda folder: text(folder, 'test'),
}


def given(page, folder):
  """The flags that a page cannot do without."""
  config = experiment.load(scripts.ROOT / 'configs' / f'{page}:tiny')
  wanted = {**WANTED}
  if config.target.get('document_start'):
    wanted['target.path'] = chat_model
  for key, make in wanted.items():
    section, name = key.split('.')
    if config[section][name] is None:
      yield f'--config.{key}={make(folder)}'


def test_there_are_pages():
  assert PAGES


@pytest.mark.parametrize('page', [page for page in PAGES if page != WHOLE])
def test_every_page_distils_and_decodes(page, tmp_path):
  folder = tmp_path / 'run'
  here = f'--config=configs/{page}:tiny', f'--workdir={folder}'
  here += tuple(given(page, tmp_path))
  for script in ('train/distill.py', 'eval/generate.py'):
    code, _, error = scripts.run(script, *here)
    assert code == 0, error
  for name in ('target', 'draft'):
    assert Checkpoints(folder / name).latest() is not None


def test_from_text_to_a_measured_speedup(tmp_path):
  folder = tmp_path / 'run'
  here = f'--config=configs/{WHOLE}:tiny', f'--workdir={folder}'

  def run(script, *more):
    code, out, error = scripts.run(script, *here, *more)
    assert code == 0, error
    return out

  code, _, error = scripts.run('eval/draft_size.py', *here)
  assert code == 2 and 'has no target yet: run `python train/' in error

  # A draft wants a target: the first command trains both.
  run('train/distill.py')
  newest = {
    name: Checkpoints(folder / name).latest() for name in ('target', 'draft')
  }
  assert None not in newest.values()
  first = weights(folder / 'draft')

  # Said again, it trains nothing further.
  run('train/distill.py')
  assert newest == {
    name: Checkpoints(folder / name).latest() for name in newest
  }
  np.testing.assert_array_equal(first, weights(folder / 'draft'))

  run('eval/ablation.py')
  points = json.loads((folder / 'ablation.json').read_text())['points']
  assert (
    len({str(point['loss.kl_weight']) for point in points}) == len(points) > 1
  )
  run('eval/ablation.py')
  again = json.loads((folder / 'ablation.json').read_text())['points']
  assert again == points
  np.testing.assert_array_equal(first, weights(folder / 'draft'))

  out = run('eval/draft_size.py')
  table = json.loads((folder / 'draft_size.json').read_text())
  sizes = {path.name: weights(path) for path in (folder / 'sizes').iterdir()}
  assert len(sizes) == len(table['sizes']) > 1
  for row in table['sizes']:
    size = row['ratio'] * table['target_parameters']
    assert row['parameters'] == pytest.approx(size)
    assert 0 < row['of_them_embedding'] < row['parameters']
    assert 0 < row['acceptance'] <= 1 and row['draft_cost_ratio'] > 0
    speeds = {r['k']: r['speedup'] for r in row['sweep']}
    assert row['speedup'] == speeds[row['k']] == max(speeds.values())
    assert row['speedup_at_longest'] == speeds[table['longest_k']]
  assert (folder / 'draft_size.png').exists()
  assert 'fastest: sizes/' in out
  # Said again, it only measures; and sizes that are there stay what they are.
  run('eval/draft_size.py')
  hidden = '--config.draft_sizes.hidden=32,48'
  code, _, error = scripts.run('eval/draft_size.py', *here, hidden)
  assert code == 2 and 'draft.model.hidden: 16 -> 48' in error
  for name, before in sizes.items():
    np.testing.assert_array_equal(before, weights(folder / 'sizes' / name))

  out = run('eval/speedup.py')
  report = json.loads((folder / 'speedup.json').read_text())
  assert f'{report["speedup"]:.2f}x at K = {report["k"]}' in out

  few = '--ks=1,2', '--vocab=50', '--prompts=2'
  assert '(LOSSY)' in run('eval/rules.py', *few)
  report = json.loads((folder / 'rules.json').read_text())
  for row in report['accepted']:
    assert 0 <= row['rejection'] <= row['block'] + 1e-6 <= row['k'] + 1e-5
    assert row['block_gain_least'] >= -1e-6

  # Another loss into the same folder would mix two experiments.
  code, _, error = scripts.run(
    'train/distill.py', *here, '--config.loss.kl_weight=0.5'
  )
  assert code == 2
  assert 'loss.kl_weight' in error and error.count('\n') == 1
  np.testing.assert_array_equal(first, weights(folder / 'draft'))


def weights(folder):
  """All numbers of the newest checkpoint's files, as bytes."""
  found = sorted(p for p in folder.rglob('*') if p.is_file())
  data = b''.join(path.read_bytes() for path in found)
  return np.frombuffer(data, np.uint8)

"""The comparison with other software: it decodes what we decode."""

import importlib.util
import json

import pytest
import scripts
import toys

from specjax import experiment, runs
from specjax.checkpoint import Checkpoints
from specjax.drafters.model import ModelDrafter
from specjax.workspace import Workspace

pytestmark = pytest.mark.slow  # a process, and what it imports

for package in ('torch', 'transformers', 'safetensors'):
  pytest.importorskip(package, reason=f'no {package}')

PEERS = {
  'specjax': {'plain', 'ngram@2', 'model:draft@2', 'early_exit:1@3'},
  'transformers': {'plain', 'ngram@2', 'model:draft@2', 'early_exit:1@3'},
  'llama.cpp': {'plain', 'ngram@2'},
}
NEAR_TIE = 1e-3  # as in the script


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A tiny run whose models are random, and sure of what they say."""
  folder = tmp_path_factory.mktemp('runs') / 'tiny'
  path = scripts.ROOT / 'configs' / 'stdlib.py:tiny'
  config = experiment.load(path).to_dict()
  config['target'] |= {'layers': 2}
  runs.open_run(folder, config, (), set(config))
  config = runs.read_json(folder / 'config.json')
  workspace = Workspace(folder, config)
  target, draft = workspace.target_config, workspace.draft_config
  sizes = {**draft['model'], 'vocab_size': target['vocab_size']}
  for name, model, description in (
    ('target', toys.transformer(0, **target), target),
    ('draft', ModelDrafter(toys.transformer(1, **sizes), 2), draft),
  ):
    Checkpoints(folder / name).save(
      config['pretrain']['steps'],
      {'model': model},
      {'model': description, 'tokenizer': workspace.tokenizer.hash},
    )
  return folder


@pytest.fixture(scope='module')
def report(run):
  arms = sorted(PEERS['specjax'] - {'plain'})
  code, out, error = scripts.run(
    'eval/peers.py',
    f'--workdir={run}',
    f'--arms={",".join(arms)}',
    '--tokens=12',
    '--count=2',
    '--repeats=1',
    '--threads=1',
  )
  assert code == 0, error
  report = json.loads((run / 'peers.json').read_text())
  assert (run / 'peers.png').exists()
  for row in report['rows']:
    assert row['peer'] in out and row['way'] in out
  return report


def test_every_peer_has_the_arms_that_it_knows(report):
  has_llama = importlib.util.find_spec('llama_cpp') is not None
  wanted = {
    name: PEERS[name] for name in PEERS if name not in report['left_out']
  }
  assert set(report['left_out']) <= {'llama.cpp'}
  assert ('llama.cpp' in wanted) == has_llama
  for t in (0.0, 1.0):
    found = {name: set() for name in wanted}
    for row in report['rows']:
      if row['temperature'] == t:
        found[row['peer']].add(row['way'])
    assert found == wanted
  assert report['threads'] == 1


def test_greedy_text_is_ours(report):
  for row in report['rows']:
    if row['temperature'] == 0:
      for found in row['mismatches']:
        assert found['margin'] < NEAR_TIE, row
    else:
      assert row['mismatches'] is None


def test_passes_and_ratios(report):
  for row in report['rows']:
    if row['way'] == 'plain':
      assert row['tokens_per_pass'] == row['own_speedup'] == 1
    else:
      k = int(row['way'].split('@')[1])
      assert 1 <= row['tokens_per_pass'] <= k + 1
    assert len(row['seconds']) == 1
    assert row['speedup'] > 0 and row['tokens_per_second'] > 0

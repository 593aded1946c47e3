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


def measured(run, arms, *more):
  """The report of a comparison."""
  code, out, error = scripts.run(
    'eval/peers.py',
    f'--workdir={run}',
    f'--arms={",".join(sorted(arms - {"plain"}))}',
    '--tokens=96',
    '--count=2',
    '--repeats=1',
    '--threads=1',
    *more,
  )
  assert code == 0, error
  report = json.loads((run / 'peers.json').read_text())
  assert (run / 'peers.png').exists()
  for row in report['rows']:
    assert row['peer'] in out and row['way'] in out and row['condition'] in out
  return report


@pytest.fixture(scope='module')
def report(run, tmp_path_factory):
  """Of two tasks."""
  path = tmp_path_factory.mktemp('prompts') / 'question.jsonl'
  lines = [
    {'question_id': i, 'category': category, 'turns': [text]}
    for i, (category, text) in enumerate(
      (('writing', 'def f(x):'), ('writing', 'import'), ('math', 'return 1'))
    )
  ]
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return measured(run, PEERS['specjax'], f'--prompts={path}')


def ways(report):
  """Those of each who is there, by temperature."""
  found: dict = {}
  for row in report['rows']:
    own = found.setdefault(row['temperature'], {})
    own.setdefault(row['peer'], set()).add(row['way'])
  return found


def test_every_peer_has_the_arms_that_it_knows(report):
  has_llama = importlib.util.find_spec('llama_cpp') is not None
  wanted = {
    name: PEERS[name] for name in PEERS if name not in report['left_out']
  }
  assert set(report['left_out']) <= {'llama.cpp'}
  assert ('llama.cpp' in wanted) == has_llama
  assert ways(report) == {0.0: wanted, 1.0: wanted}
  assert report['threads'] == 1


def test_many_prompts_in_halved_weights(run):
  """The others draft for no batch, and the bindings of llama.cpp take none."""
  report = measured(
    run,
    {'plain', 'ngram@2'},
    '--batches=2',
    '--contexts=112',
    '--dtypes=bfloat16',
    '--top_p=.9',
  )
  many = {'specjax': {'plain', 'ngram@2'}, 'transformers': {'plain'}}
  assert ways(report) == {0.0: many, 1.0: many}
  for row in report['rows']:
    assert row['dtype'] == 'bfloat16' and row['batch'] == 2
    assert row['top_p'] == (0.9 if row['temperature'] else 1.0)
    assert row['prompts'] == 2 and row['prompt_tokens'] == 16


def test_tasks_stand_beside_all_of_them(report):
  tasks = {row['task'] for row in report['rows']}
  assert len(tasks) == 3
  for row in report['rows']:
    if row['task'] == 'all tasks':
      own = [
        other
        for other in report['rows']
        if all(other[key] == row[key] for key in ('peer', 'way', 'temperature'))
        and other['task'] != 'all tasks'
      ]
      assert row['prompts'] == sum(other['prompts'] for other in own) == 3
      whole = sum(other['seconds'][0] for other in own)
      assert row['seconds'][0] == pytest.approx(whole)


def test_greedy_text_is_ours(report):
  for row in report['rows']:
    if row['temperature']:
      assert row['mismatches'] is None
    else:
      for found in row['mismatches']:
        assert found['margin'] < NEAR_TIE, row


def test_passes_and_ratios(report):
  for row in report['rows']:
    if row['way'] == 'plain':
      assert row['tokens_per_pass'] == row['own_speedup'] == 1
      assert row['peak_bytes'] > 1e8  # an interpreter with its libraries
    else:
      k = int(row['way'].split('@')[1])
      assert 1 <= row['tokens_per_pass'] <= k + 1
    assert len(row['seconds']) == 1
    assert row['speedup'] > 0 and row['tokens_per_second'] > 0
    assert row['first_token_seconds'] > 0 and row['begin_seconds'] > 0


@pytest.mark.parametrize(
  ('flags', 'said'),
  [
    (['--batches=2'], 'prompts of one batch must be as long'),
    (['--contexts=32'], 'and 32 of it are new tokens'),
    (['--arms=model:none@2'], 'has no draft none: train it'),
  ],
)
def test_what_makes_no_sense_is_refused(run, flags, said):
  code, _, error = scripts.run(
    'eval/peers.py', f'--workdir={run}', '--tokens=32', *flags
  )
  assert code != 0 and said in error

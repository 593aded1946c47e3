"""The scripts that measure a run: what they write, say and refuse."""

import json

import pytest
import scripts
from scripts import ROOT, finish, start

from specjax import experiment, logs, profiling, runs
from specjax.checkpoint import Checkpoints
from specjax.draft_length import CONTROLLERS
from specjax.workspace import Workspace

pytestmark = pytest.mark.slow  # a process each, and most of a second to start


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A tiny run whose models were never trained."""
  return untrained(tmp_path_factory.mktemp('runs') / 'tiny', 'stdlib')


def untrained(folder, page):
  config = experiment.load(ROOT / 'configs' / f'{page}.py:tiny').to_dict()
  config['speedup'] |= {'ks': (1, 2), 'batches': (1,)}
  runs.open_run(folder, config, (), set(config))
  config = runs.read_json(folder / 'config.json')
  workspace = Workspace(folder, config)
  sizes = workspace.target_config
  for name, model, description in (
    ('target', workspace.new_target(0), sizes),
    ('draft', workspace.new_drafter(1), workspace.draft_config),
  ):
    Checkpoints(folder / name).save(
      config['pretrain']['steps'],
      {'model': model},
      {'model': description, 'tokenizer': workspace.tokenizer.hash},
    )
  with logs.Logger(folder / 'logs' / 'pretrain') as logger:
    logger.write(1, loss=2.0, nats=2.0, bits_per_byte=3.0)
  return folder


def test_speedup_reports_and_draws(run):
  code, out, error = finish(start('eval/speedup.py', f'--workdir={run}'))
  assert code == 0, error
  report = json.loads((run / 'speedup.json').read_text())
  assert {
    'device',
    'versions',
    'config',
    'temperature',
    'batch',
    'k',
    'baseline_tokens_per_second',
    'tokens_per_second',
    'speedup',
    'sweep',
    'acceptance_rate',
    'acceptance_by_depth',
    'tokens_per_round',
    'draft_cost_ratio',
    'verify_cost',
    'predicted_speedup',
    'greedy_identical',
    'repetition',
    'corpus_repetition',
    'compile_seconds',
  } <= set(report)
  arms = {(r['drafter'], r['temperature'], r['k']) for r in report['sweep']}
  assert arms == {
    (name, t, k)
    for t in (0.0, 1.0)
    for name, k in (
      ('model', 1),
      ('model', 2),
      *((name, 2) for name in ('ngram', *CONTROLLERS[1:])),
    )
  }
  assert 'modelled' in out and 'every rung after the first of 0, 1, 2' in out
  assert (report['temperature'], report['batch']) == (1.0, 1)
  best = max(
    (
      r
      for r in report['sweep']
      if (r['drafter'], r['temperature']) == ('model', 1.0)
    ),
    key=lambda r: r['speedup'],
  )
  assert (report['k'], report['speedup']) == (best['k'], best['speedup'])
  for row in report['sweep']:
    assert row['speedup_min'] <= row['speedup'] <= row['speedup_max']
    assert 1 <= row['tokens_per_round'] <= row['k'] + 1
    if row['drafter'] in CONTROLLERS:
      assert sum(row['lengths']) > 0
      stops_itself = row['drafter'] == 'confidence'
      assert (row['modelled_speedup'] is None) == stops_itself
      continue
    (cost,) = report['costs'].values()  # of one batch size
    cost, new = cost[row['drafter']], report['config']['decode']
    rounds = new['max_new_tokens'] / row['expected_tokens_per_pass']
    predicted = (cost['call'] + new['max_new_tokens']) / (
      cost['start']
      + rounds * (row['k'] * row['draft_cost_ratio'] + row['verify_cost'])
    )
    assert row['predicted_speedup'] == pytest.approx(predicted)
    assert 1 + row['off'] == pytest.approx(
      (1 + row['off_by_tokens']) * (1 + row['off_by_time'])
    )
    assert sum(row['round_parts'].values()) == pytest.approx(
      row['round_seconds']
    )
  assert all(m['margin'] < 1e-4 for m in report['greedy_mismatches'])
  assert f'{report["speedup"]:.2f}x at K = {report["k"]}, T = 1' in out
  (kept,) = json.loads((run / 'costs.json').read_text())
  assert kept['costs'] == report['costs']['1']['model']
  assert (kept['batch'], kept['context']) == (1, 64)
  assert 'best K: ' in out and 'predicted [95 %]' in out
  for picture in (
    'speedup',
    'acceptance_by_depth',
    'predictions',
    'training_pretrain',
  ):
    assert (run / f'{picture}.png').exists()
    assert f'{picture}.png' in out


def test_a_profile_has_all_parts_of_a_round(run):
  code, out, error = finish(
    start(
      'eval/speedup.py',
      f'--workdir={run}',
      '--profile',
      '--arms=ngram,model:draft@2',
      '--top_p=0.9',
    )
  )
  assert code == 0, error
  report = json.loads((run / 'profile.json').read_text())
  assert set(report['rounds']) == {'none', 'ngram@2', 'model:draft@2'}
  for name, found in report['rounds'].items():
    whole = found.pop(profiling.ROUND)
    assert set(found) == {*profiling.PARTS, profiling.REST}
    assert found['scoring']['floor'] > 0 and whole['floor'] > 0
    # Lookup reads no weights.
    assert (found['drafting']['floor'] > 0) == name.startswith('model')
    traces = (run / 'profile' / name).rglob('perfetto_trace.json.gz')
    assert len([*traces]) == 1
  assert 'warp and rule' in out and 'profile.json' in out


def test_text_that_leaves_plain_decoding_by_more_than_a_near_tie_fails():
  speedup = scripts.load('eval/speedup.py')

  def said(*margins, dtype='float32'):
    mismatches = [{'margin': margin} for margin in margins]
    report = {
      'greedy_identical': False,
      'greedy_mismatches': mismatches,
      'config': {'target': {'dtype': dtype}},
    }
    return speedup.greedy(report), speedup.is_lost(report)

  text, lost = said(1e-6, 3e-5)
  assert 'near-tie' in text and not lost
  text, lost = said(1e-6, 0.2)
  assert 'NOT LOSSLESS' in text and lost
  text, lost = said(0.2, dtype='bfloat16')
  assert 'NOT' not in text and not lost


def test_the_conclusion_names_the_fastest_size_and_what_is_as_fast():
  draft_size = scripts.load('eval/draft_size.py')

  def row(name, ratio, speedup, spread):
    return {
      'draft': name,
      'ratio': ratio,
      'k': 4,
      'speedup': speedup,
      'speedup_min': speedup - spread,
      'speedup_max': speedup + spread,
      'sweep': [{'k': k, 'speedup': speedup - k / 16} for k in (2, 4, 8, 16)],
    }

  sizes = [
    row('a', 0.5, 1.0, 0.1),
    row('b', 0.1, 2.0, 0.2),
    row('c', 0.02, 1.7, 0.1),
  ]
  text = draft_size.conclusion({'sizes': sizes, 'longest_k': 16})
  assert text == (
    'fastest: b, 1/10 of the target, 2.00x at K = 4 (min–max does not tell it'
    ' from c); of that draft, 1.75x at K = 4, 1.50x at K = 8, 1.00x at K = 16'
  )


def test_sizes_differ_in_the_model_and_its_learning_rate_alone():
  config = experiment.load(ROOT / 'configs' / 'stdlib.py').to_dict()
  columns = config['draft_sizes']
  found = scripts.load('eval/draft_size.py').configs(config)
  assert len(found) == len(columns['width'])
  for i, (name, own) in enumerate(found.items()):
    sizes = own['draft'].pop('model') | own['distill']
    for key, column in columns.items():
      assert sizes[key] == column[i]
    assert name == f'sizes/{sizes["width"]}x{sizes["layers"]}'
    own['draft']['model'] = config['draft']['model']
    own['distill']['learning_rate'] = config['distill']['learning_rate']
    assert own == config


def test_generate_is_plain_text_when_piped_whatever_drafts(run):
  flags = [f'--workdir={run}', '--temperature=0', '--tokens=8']
  processes = [
    start('eval/generate.py', '--prompt=def ', f'--drafter={drafter}', *flags)
    for drafter in ('model', 'ngram', 'suffix', 'mixture', 'none')
  ]
  outputs = [finish(process) for process in processes]
  texts = {out for _, out, _ in outputs}
  assert all(code == 0 for code, _, _ in outputs), outputs
  (text,) = texts  # greedy text does not depend on what drafts
  assert text.startswith('def ') and text.endswith('\n')
  assert '\x1b' not in text
  for _, _, error in outputs:
    assert 'tokens per round' in error and 'tokens/s' in error
  assert 'no drafts, 1.00 tokens per round' in outputs[-1][2]


def test_heads_are_measured_like_any_draft(tmp_path):
  run = untrained(tmp_path / 'run', 'heads')
  code, out, error = finish(start('eval/speedup.py', f'--workdir={run}'))
  assert code == 0, error
  report = json.loads((run / 'speedup.json').read_text())
  assert report['drafter'] == 'medusa' and report['k'] in (1, 2)
  code, _, error, report = certify(run, '--sequences=0')
  assert code == 0, error
  assert report['verdict'] == 'PASS' and 0 < report['tv_of_draft'] < 1
  flags = [f'--workdir={run}', '--temperature=0', '--tokens=8']
  texts = set()
  for drafter in ('model', 'candidates', 'none'):
    code, text, error = finish(
      start('eval/generate.py', f'--drafter={drafter}', *flags)
    )
    assert code == 0, error
    texts.add(text)
  assert len(texts) == 1
  code, _, error = finish(start('eval/generate.py', '--k=3', *flags))
  assert code == 2 and 'k is 3, and the draft has 2 heads' in error
  code, _, error = finish(start('eval/draft_size.py', flags[0]))
  assert code == 2 and "draft.drafter is 'medusa', and draft_sizes" in error


def test_an_empty_prompt_starts_a_document_and_a_closed_pipe_is_quiet(run):
  flags = '--prompt=', '--tokens=8', '--temperature=0', '--drafter=none'
  process = start('eval/generate.py', f'--workdir={run}', *flags)
  process.stdout.close()
  process.stdout = None
  code, _, error = finish(process)
  assert code == 0
  assert 'Error' not in error


def certify(run, *arguments):
  small = '--num_tokens=1500', '--sequences=1200'
  code, out, error = finish(
    start('eval/losslessness.py', f'--workdir={run}', *small, *arguments), 300
  )
  report = json.loads((run / 'losslessness.json').read_text())
  return code, out, error, report


def test_a_lossless_decoder_passes_the_certificate(run):
  code, out, error, report = certify(run)
  assert code == 0, error
  assert report['verdict'] == 'PASS' and out.endswith('PASS\n')
  assert {test['arm'] for test in report['tests']} == {'speculative', 'plain'}
  assert not any(test['rejected'] for test in report['tests'])
  assert 0 < report['detectable_leak'] < 1
  assert [row['arm'] for row in report['display']] == ['speculative', 'plain']
  assert all(row['sequences'] >= 1200 for row in report['display'])
  for found in report['equal_seeds']:
    assert found['widest_margin'] <= 1e-4
  for key in ('versions', 'device', 'config', 'tokens_per_round', 'leak'):
    assert key in report
  assert (run / 'losslessness.png').stat().st_size > 10_000
  assert 'losslessness.png' in out


def test_a_point_mass_has_a_direction_and_no_draft_has_none(run):
  code, _, error, report = certify(run, '--drafter=ngram', '--sequences=0')
  assert code == 0, error
  assert report['display'] == [] and 0 < report['tv_of_draft'] < 1
  code, out, error, report = certify(run, '--drafter=none', '--sequences=0')
  assert code == 0, error
  assert report['detectable_leak'] == 'inf' and 'no leak would be caught' in out


def test_a_lossy_rule_is_labelled_and_does_not_pass(run):
  code, out, error, report = certify(run, '--verify=lenience')
  assert code == 1, error
  assert report['verdict'] == 'LOSSY' and out.endswith('LOSSY\n')
  assert 'lenience is lossy' in out


def test_a_wrong_rule_of_ones_own_fails(run):
  code, out, error, report = certify(
    run, '--verify=tests.faulty_rules:likeliest_last', '--sequences=0'
  )
  assert code == 1, error
  assert report['verdict'] == 'FAIL' and out.endswith('FAIL\n')
  assert any(test['rejected'] for test in report['tests'])


def test_a_mistake_is_one_line_and_code_2(run):
  here = f'--workdir={run}'
  cases = [
    (
      ['eval/generate.py', here, '--temperature=-1'],
      'temperature is -1',
    ),
    (
      ['eval/generate.py', here, '--k=-1'],
      '--k is -1: it must be',
    ),
    (
      ['eval/speedup.py', here, '--draft=other'],
      'no other yet: run `python train',
    ),
    (['eval/speedup.py', here, '--profile', '--draft=x'], '--draft=x has no'),
    (['eval/speedup.py', here, '--count=3'], '--count has no part here'),
    (['eval/losslessness.py', here, '--num_tokens=0'], '--num_tokens is 0'),
    (['eval/losslessness.py', here, '--sequences=-1'], '--sequences is -1'),
    (['eval/losslessness.py', here, '--branching=2,x'], "--branching is '2,x'"),
    (['eval/rules.py', here, '--ks='], "--ks is ''"),
    (['eval/losslessness.py', here, '--verify=x'], "there is no rule 'x'"),
    (
      ['eval/losslessness.py', here, '--k=-1'],
      '--k is -1: it must be',
    ),
    (
      ['eval/speedup.py', here, '--config.target.width=8'],
      'target.width: 32 -> 8',
    ),
  ]
  # Two at a time: as many as there are cores on a small machine.
  for first in range(0, len(cases), 2):
    pair = cases[first : first + 2]
    processes = [start(*arguments) for arguments, _ in pair]
    for process, (_, words) in zip(processes, pair, strict=True):
      code, _, error = finish(process)
      assert code == 2, error
      assert error.startswith('specjax: error: ')
      assert error.count('\n') == 1
      assert words in error

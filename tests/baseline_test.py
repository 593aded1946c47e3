"""Gains held against those of a report that was kept."""

import pytest
import scripts

from specjax import experiment, runs

baseline = scripts.load('eval/baseline.py')


def row(speedup, spread=0.1, k=4, tokens=2.5):
  ends = {'speedup_min': speedup - spread, 'speedup_max': speedup + spread}
  where = {'drafter': 'model', 'k': k, 'batch': 1, 'temperature': 1.0}
  return {**where, **ends, 'speedup': speedup, 'tokens_per_round': tokens}


@pytest.mark.parametrize(
  ('old', 'now', 'slower', 'said'),
  [
    (row(1.5), row(1.7), False, '+13%'),
    (row(2.0), row(1.84), False, '-8%'),  # their repeats overlap
    (row(2.0), row(1.7), True, 'SLOWER'),
    (row(2.0, 0.01), row(1.96, 0.01), False, '-2%'),  # too little to tell
    (row(2.0), row(2.0, k=5), True, '1 that were measured then are MISSING'),
  ],
)
def test_a_gain_is_held_against_what_it_was(old, now, slower, said, capsys):
  assert baseline.compare([old], [now]) == slower
  assert said in capsys.readouterr().out


def test_rows_of_tasks_are_told_apart(capsys):
  rows = [
    {**row(gain), 'task': task, 'drafter': 'ngram@4', 'rule': 'rejection'}
    for task, gain in (('qa', 1.0), ('rag', 2.0))
  ]
  for one in rows:
    del one['k']
  assert not baseline.compare(rows, rows[::-1])
  assert 'rag, ngram@4, rejection, batch 1, T = 1' in capsys.readouterr().out
  swapped = [
    {**one, 'task': task} for one, task in zip(rows, ('rag', 'qa'), strict=True)
  ]
  assert baseline.compare(rows, swapped)


def test_a_report_to_check_against_is_a_report(tmp_path):
  kept, output = tmp_path / 'kept.json', tmp_path / 'speedup.json'

  def read():
    return baseline.read(kept, output, 'sweep')

  with pytest.raises(FileNotFoundError, match='kept.json: --check'):
    read()
  other = {'rows': [row(2.0)], 'config': {}}
  none = {'sweep': [], 'config': {}}
  for wrong in ([], {}, other, none, {'sweep': [{}], 'config': {}}):
    runs.write_json(kept, wrong)
    with pytest.raises(ValueError, match='kept.json is no speedup.json'):
      read()
  damages = [
    ({'speedup': float('nan')}, 'a row has speedup, .*nan'),
    ({'speedup_min': -1.0}, 'a row has speedup, .*-1.0'),
    ({'speedup': True}, 'a row has speedup, .*True'),
    ({'tokens_per_round': '2'}, "a row has speedup, .*'2'"),
    ({'speedup': 0}, 'a row has speedup'),
    ({'drafter': ['x']}, 'a row has drafter'),
    ({'temperature': '1'}, 'a row has temperature'),
    ({'k': None}, 'a row has k None'),
  ]
  less = {name: value for name, value in row(2.0).items() if name != 'k'}
  for wrong, said in (
    *(([{**row(2.0), **damage}], said) for damage, said in damages),
    ([row(2.0)] * 2, 'two of its rows are of model, K = 4, batch 1, T = 1'),
    ([row(2.0), less], 'its rows are not of one kind'),
    ([3], 'a row lacks one of speedup'),
    (3, 'it has no rows'),
  ):
    runs.write_json(kept, {'sweep': wrong, 'config': {}})
    with pytest.raises(ValueError, match=f'no speedup.json .*: {said}'):
      read()
  for config in ([], {'target': 5}):
    runs.write_json(kept, {'sweep': [row(2.0)], 'config': config})
    with pytest.raises(ValueError, match='its configuration is none'):
      read()
  report = {'sweep': [row(2.0)], 'config': {}}
  runs.write_json(kept, report)
  assert read() == report
  kept.rename(output)
  with pytest.raises(ValueError, match='speedup.json is what this command'):
    baseline.read(output, output, 'sweep')


def test_what_is_not_measured_now_is_said_before_it_is():
  baseline.require_covered([row(2.0)], {'batch': (1, 4)}, 'kept.json')
  with pytest.raises(ValueError, match=r'kept.json has rows of batch 1, which'):
    baseline.require_covered([row(2.0)], {'batch': (4,)}, 'kept.json')
  with pytest.raises(ValueError, match='rows of drafter model, which'):
    baseline.require_covered([row(2.0)], {'drafter': ['ngram']}, 'kept.json')


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'draft': 'kl1'}, 'draft: draft -> kl1'),
    ({'device': 'another'}, 'device: this -> another'),
    ({'decode.max_new_tokens': 99}, 'decode.max_new_tokens: 8 -> 99'),
    ({'pretrain.steps': 99}, 'pretrain.steps: 4 -> 99'),
    ({}, None),
    ({'speedup.repeats': 99}, None),
  ],
)
def test_gains_of_different_things_are_not_compared(change, said):
  def report():
    page = scripts.ROOT / 'configs' / 'stdlib.py:tiny'
    config = experiment.load(page).to_dict()
    return {'draft': 'draft', 'device': 'this', 'config': config}

  before, now = runs.portable(report()), report()
  for path, value in change.items():
    section, _, name = path.rpartition('.')
    (now['config'][section] if section else now)[name] = value
  if said is None:
    baseline.require_same(before, now, 'kept.json')
  else:
    with pytest.raises(ValueError, match=f'kept.json .*{said}'):
      baseline.require_same(before, now, 'kept.json')

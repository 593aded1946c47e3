"""Run folders."""

import json
import os

import pytest

from specjax import runs

CONFIG = {
  'workdir': 'runs/x',
  'target': {'width': 64, 'weights': (1.0, float('inf'))},
  'draft': {'width': 8},
}


def test_json_round_trips(tmp_path):
  value = {'a': [1, 2.5, None], 'b': float('inf')}
  runs.write_json(tmp_path / 'new' / 'x.json', value)
  assert runs.read_json(tmp_path / 'new' / 'x.json') == value
  assert [p.name for p in (tmp_path / 'new').iterdir()] == ['x.json']


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path):
  path = tmp_path / 'x.json'
  runs.write_json(path, 1)
  with pytest.raises(TypeError):
    runs.write_json(path, {'a': object()})
  assert runs.read_json(path) == 1


def test_json_that_cannot_be_read_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='there is no file .*x.json'):
    runs.read_json(tmp_path / 'x.json')
  (tmp_path / 'x.json').write_text('{')
  with pytest.raises(ValueError, match='x.json is not JSON'):
    runs.read_json(tmp_path / 'x.json')


def test_the_newest_run_is_the_one_written_last(tmp_path):
  with pytest.raises(FileNotFoundError, match='no run under .*train/distill'):
    runs.newest(tmp_path)
  for time, name in enumerate(('b', 'c', 'a')):
    path = runs.open_run(tmp_path / name, CONFIG, ()) / 'config.json'
    os.utime(path, (time, time))
  (tmp_path / 'd').mkdir()
  assert runs.newest(tmp_path).name == 'a'
  os.utime(tmp_path / 'c' / 'config.json', (9, 9))
  assert runs.newest(tmp_path).name == 'c'


def test_an_unchanged_run_is_reopened(tmp_path):
  runs.open_run(tmp_path, CONFIG, ('target',))
  runs.open_run(tmp_path, CONFIG, ('target', 'draft'))


def test_a_changed_run_is_refused_and_left_alone(tmp_path):
  runs.open_run(tmp_path, CONFIG, ())
  target = {'width': 32, 'weights': (1.0,), 'depth': 2}
  with pytest.raises(ValueError) as raised:
    runs.open_run(tmp_path, {**CONFIG, 'target': target}, ('target',))
  message = str(raised.value)
  assert 'target.width: 64 -> 32' in message
  assert 'target.weights: [1.0, inf] -> [1.0]' in message
  assert 'target.depth: (absent) -> 2' in message
  assert '--workdir' in message
  assert '\n' not in message
  assert runs.read_json(tmp_path / 'config.json')['target']['width'] == 64


def test_an_empty_key_that_a_run_does_not_know_is_no_change(tmp_path):
  runs.open_run(tmp_path, CONFIG, ())
  later = {**CONFIG['target'], 'path': ''}
  runs.open_run(tmp_path, {**CONFIG, 'target': later}, ('target',))
  later['path'] = 'x'
  with pytest.raises(ValueError, match='target.path:  -> x'):
    runs.open_run(tmp_path, {**CONFIG, 'target': later}, ('target',))


def test_only_fresh_sections_are_replaced(tmp_path):
  runs.open_run(tmp_path, CONFIG, ())
  new = {'workdir': 'y', 'target': {'width': 1}, 'draft': {'width': 9}}
  runs.open_run(tmp_path, {**new, 'decode': {'k': 4}}, (), fresh=('draft',))
  expected = {**CONFIG, 'draft': {'width': 9}, 'decode': {'k': 4}}
  expected = runs.complete(json.loads(json.dumps(expected)))
  assert runs.read_json(tmp_path / 'config.json') == expected


def test_the_machine_is_described():
  assert {'python', 'jax', 'flax'} <= set(runs.versions())
  assert runs.device()['count'] >= 1
  json.dumps([runs.device(), runs.versions()])


def test_a_run_that_is_older_than_a_key_did_what_the_key_says(tmp_path):
  old, new = {'distill': {'steps': 4}}, {'distill': {'steps': 4, 'patience': 0}}
  runs.refuse_changes(tmp_path, old, new, ['distill'])
  runs.refuse_changes(tmp_path, new, old, ['distill'])
  new['distill']['patience'] = 2
  with pytest.raises(ValueError, match='distill.patience: 0 -> 2'):
    runs.refuse_changes(tmp_path, old, new, ['distill'])

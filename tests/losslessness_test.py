"""The script that certifies a run: what it writes, says and refuses."""

import json

import pytest
from eval_test import run  # noqa: F401
from scripts import finish, start

pytestmark = pytest.mark.slow  # a process each, and most of a second to start

SCRIPT = 'eval/losslessness.py'
SMALL = '--num_tokens=1500', '--sequences=1200'
# Loaded by name, as a rule of one's own is.
RULES = """
from specjax import verify

"""


def certify(run, *arguments, **environment):  # noqa: F811
  code, out, error = finish(
    start(SCRIPT, f'--workdir={run}', *SMALL, *arguments), 300
  )
  report = json.loads((run / 'losslessness.json').read_text())
  return code, out, error, report


def test_a_lossless_decoder_passes(run):  # noqa: F811
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


def test_a_point_mass_has_a_direction_and_no_draft_has_none(run):  # noqa: F811
  code, _, error, report = certify(run, '--drafter=ngram', '--sequences=0')
  assert code == 0, error
  assert report['display'] == [] and 0 < report['tv_of_draft'] < 1
  code, out, error, report = certify(run, '--drafter=none', '--sequences=0')
  assert code == 0, error
  assert report['detectable_leak'] == 'inf' and 'no leak would be caught' in out


def test_a_lossy_rule_is_labelled_and_does_not_pass(run):  # noqa: F811
  code, out, error, report = certify(run, '--verify=lenience')
  assert code == 1, error
  assert report['verdict'] == 'LOSSY' and out.endswith('LOSSY\n')
  assert 'lenience is lossy' in out


def test_a_wrong_rule_of_ones_own_fails(run):  # noqa: F811
  code, out, error, report = certify(
    run, '--verify=losslessness_test:unchecked', '--sequences=0'
  )
  assert code == 1, error
  assert report['verdict'] == 'FAIL' and out.endswith('FAIL\n')
  assert any(test['rejected'] for test in report['tests'])


@pytest.mark.parametrize(
  'argument, words',
  [
    ('--num_tokens=0', '--num_tokens is 0: the tests need at least'),
    ('--sequences=-1', '--sequences is -1'),
    ('--verify=nonsense', "there is no rule 'nonsense'"),
    ('--temperature=-1', 'temperature is -1'),
    ('--k=-1', 'the draft length is -1'),
  ],
)
def test_a_mistake_is_one_line_and_code_2(run, argument, words):  # noqa: F811
  code, _, error = finish(start(SCRIPT, f'--workdir={run}', argument))
  assert code == 2, error
  assert error.startswith('specjax: error: ') and error.count('\n') == 1
  assert words in error

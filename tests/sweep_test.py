"""A race: what is predicted, of what, and where it parts from the measured."""

import functools

import jax
import numpy as np
import pytest
import toys

from specjax import costs, pricing, sweep, verify
from specjax.drafters.model import ModelDrafter
from specjax.sweep import PLAIN, Arm

KS, NEW = (1, 2, 6), 24
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [2, 4, 6]]
FREE = Arm('adaptive', 4)


@functools.cache
def race():
  """All prompts in one group, which are the other prompts too."""
  target = toys.transformer()
  key = jax.random.key(3)
  near = jax.tree.map(
    lambda x: x + 0.15 * jax.random.normal(key, x.shape), target
  )
  drafter = ModelDrafter(near, 3)
  found = sweep.Race(
    target,
    drafter,
    name='model',
    ks=KS,
    ngram_k=2,
    rule=verify.rejection,
    groups=[PROMPTS],
    others=[PROMPTS],
    max_new_tokens=NEW,
    controllers=['adaptive'],
    controlled_k=4,
  )
  found.compiled(
    {
      name: low.compile(compiler_options=toys.QUICK)
      for name, low in found.lowered().items()
    }
  )
  return found


@pytest.fixture(scope='module')
def greedy():
  rows = race().run(0, 2, lambda: None)
  return {Arm(row['drafter'], row['k']): row for row in rows}, race().outlook(0)


@pytest.mark.slow  # a program for every arm
def test_one_greedy_decoding_tells_the_rounds_of_all_lengths(greedy):
  rows, outlook = greedy
  results = race().results[0]
  for arm, rounds in outlook.rounds.items():
    if arm != PLAIN:
      got = np.concatenate([r.stats.rounds for r in results[arm]])
      np.testing.assert_array_equal(rounds, got, err_msg=str(arm))
  longest, shortest = (outlook.rounds[Arm('model', k)] for k in (6, 1))
  assert (longest < shortest).any() and len(set(longest)) > 1


@pytest.mark.slow  # a program for every arm
def test_a_prediction_from_the_same_rounds_is_off_by_time_alone(greedy):
  rows, outlook = greedy
  cost = race().costs()
  for arm, row in rows.items():
    if arm == FREE:
      assert arm not in outlook.rounds
      continue
    got = sweep.predict(row, outlook, cost[arm.name], race().parts, NEW)
    # The batch waits for its slowest row, and so does the prediction.
    slowest = outlook.rounds[arm].max()
    assert got['expected_tokens_per_pass'] == pytest.approx(NEW / slowest)
    assert row['tokens_per_pass'] == pytest.approx(NEW / slowest)
    assert row['tokens_per_pass'] < row['tokens_per_round']
    assert got['off_by_tokens'] == pytest.approx(0)
    assert got['off'] == pytest.approx(got['off_by_time'])
    assert got['predicted_min'] <= got['predicted_max']
    assert got['draft_cost_ratio'] > 0


ROW = {
  'drafter': 'model',
  'temperature': 1.0,
  'batch': 2,
  'k': 4,
  'tokens_per_pass': 3.0,
  'rounds_per_call': 8.0,
  'plain_round_seconds': 0.010,
}
COST = pricing.Costs(
  seconds=0.010,
  c={4: 0.05},
  v={0: 1.0, 4: 1.6},
  passes={0: 0.9, 4: 1.2},
  call=0.5,
  start=2.5,
)
OUTLOOK = sweep.Outlook({Arm('model', 4): np.full(9, 8)}, alpha=0.7)


def predicted(row=ROW, outlook=OUTLOOK, **changes):
  as_costed = COST.speedup(4, 8, 24)
  seconds = 0.010 * (1.8 + 2.5 / 8)
  row = {**row, 'speedup': as_costed, 'round_seconds': seconds, **changes}
  return sweep.predict(row, outlook, COST, groups=2, new_tokens=24)


def test_a_machine_that_is_as_it_was_costed_is_predicted():
  got = predicted()
  assert got['off'] == got['off_by_tokens'] == got['off_by_time'] == 0
  assert got['predicted_min'] == got['predicted_max']
  assert got['predicted_speedup'] == pytest.approx(24.5 / (2.5 + 8 * 1.8))
  parts = got['round_parts']
  assert parts == pytest.approx(
    {
      'host': 0.010 * 0.5 / 8,
      'draft': 0.010 * (0.2 + 2.0 / 8),
      'verify': 0.010 * 1.2,
      'loop': 0.010 * 0.4,
    }
  )
  iid = costs.expected_tokens(0.7, 4)
  assert got['iid_speedup'] == pytest.approx(iid / 1.8)
  assert got['classical_speedup'] == pytest.approx(iid / 1.2)


def test_time_and_tokens_are_told_apart():
  half = ROW | {'rounds_per_call': 16.0, 'tokens_per_pass': 1.5}
  got = predicted(half, speedup=COST.speedup(4, 16, 24))
  assert got['off_by_time'] == pytest.approx(0)
  assert got['off'] == got['off_by_tokens'] > 0.5
  slow = predicted(speedup=COST.speedup(4, 8, 24) / 1.25)
  assert slow['off_by_tokens'] == 0 and slow['off'] == pytest.approx(0.25)


def test_prompts_that_differ_leave_an_interval():
  rounds = {Arm('model', 4): np.array([5, 6, 7, 9, 12, 14])}
  got = predicted(outlook=OUTLOOK._replace(rounds=rounds))
  low, high = got['predicted_min'], got['predicted_max']
  assert low < got['predicted_speedup'] < high


def test_lookup_has_no_formula():
  row = ROW | {'drafter': 'ngram'}
  got = predicted(row, sweep.Outlook({Arm('ngram', 4): np.full(9, 8)}, 0.7))
  assert got['iid_speedup'] is got['classical_speedup'] is None
  assert got['off'] == 0


def test_the_best_length_by_each_prediction():
  names = ('k', 'speedup', 'predicted_speedup')
  names += ('iid_speedup', 'classical_speedup')
  table = [(1, 1, 2, 1, 1), (2, 3, 2, 4, 1), (4, 2, 1, 3, 2)]
  rows = [dict(zip(names, row, strict=True)) for row in table]
  assert sweep.best_ks(rows) == {
    'speedup': 2,
    'predicted_speedup': 1,  # the shortest of equals
    'iid_speedup': 2,
    'classical_speedup': 4,
  }


@pytest.mark.slow
def test_a_controller_knows_what_rounds_cost_and_is_charged_for_its_own(greedy):
  row, cost = greedy[0][FREE], race().costs()['model']
  lengths = np.array(row['lengths'])
  assert set(np.flatnonzero(lengths)) <= {0, 1, 2, 4}
  assert lengths.sum() == row['rounds_per_call'] * race().parts
  got = sweep.modelled_speedup(row, cost)
  spent = sum(n * cost.round(k) for k, n in enumerate(lengths) if n)
  np.testing.assert_allclose(got, NEW / spent)
  told = race()._controllers[FREE].cost
  assert told[0] == 1 and len(set(told.tolist())) == 4

"""What a comparison makes of invented seconds, by hand."""

import numpy as np
import pytest

from specjax import comparison
from specjax.comparison import ALL, OURS, PLAIN, Arm, Condition, Text, Timed
from specjax.models.markov import Markov

DRAWN = Condition('float32', 0, 1, 1.0, 1.0)
GREEDY = DRAWN._replace(temperature=0.0)
THEIRS = 'theirs'
COUNT = 5

# After 0 comes 1, after 1 comes 2 and after 2 comes 0, by these margins.
MARGINS = 0.5, 1.25, 3.0
CYCLE = Markov(np.diag(MARGINS)[:, [2, 0, 1]])


class Machine:
  """Decodes at no speed but that of its own clock."""

  def __init__(self):
    self.now = 0.0
    self.calls = []

  def clock(self):
    return self.now

  def arm(self, name, first, each, passes=COUNT, wrong=None):
    """Takes `first` seconds, then `each` for a token; counts from the prompt.

    One new token may be a `wrong` one.
    """

    def decode(prompts, seed, count, room):
      self.calls.append((name, len(prompts), seed, count, room))
      self.now += first + each * (count - 1)
      tokens = [[(p[-1] + 1 + i) % 3 for i in range(count)] for p in prompts]
      if wrong is not None and count > wrong:
        tokens[0][wrong] = (tokens[0][wrong] + 1) % 3
      return Text(tokens, 1 if count == 1 else passes)

    return decode

  def arms(self, late=6.0, wrong=None):
    """We take 1 s a token, and drafting half; they take twice as long."""
    return {
      Arm(OURS, PLAIN): self.arm('a', 2, 1),
      Arm(THEIRS, PLAIN): self.arm('b', late, 2),
      Arm(OURS, 'ngram@2'): self.arm('c', 2, 0.5, passes=2),
      Arm(THEIRS, 'ngram@2'): self.arm('d', late, 1, passes=4, wrong=wrong),
    }

  def measure(self, arms, tasks, condition=DRAWN, repeats=2):
    return comparison.measure(
      CYCLE,
      arms,
      tasks,
      COUNT,
      condition,
      repeats=repeats,
      clock=self.clock,
    )


def column(rows, key):
  return [row[key] for row in rows]


def test_rates_and_ratios_are_of_what_comes_behind_the_first_token():
  machine = Machine()
  rows = machine.measure(machine.arms(), {'a task': [[[0]], [[1, 0]]]})
  assert [(row['peer'], row['way']) for row in rows] == [*machine.arms()]
  # Of two groups, 4 tokens each: 2 x 4 x 1 s, 2 x 4 x 2 s and half of either.
  assert column(rows, 'seconds') == [[8, 8], [16, 16], [4, 4], [8, 8]]
  assert column(rows, 'tokens_per_second') == [1, 0.5, 2, 1]
  assert column(rows, 'speedup') == [1, 0.5, 2, 1]
  assert column(rows, 'own_speedup') == [1, 1, 2, 2]
  assert column(rows, 'first_token_seconds') == [2, 6, 2, 6]
  assert column(rows, 'tokens_per_pass') == [1, 1, 2.5, 1.25]
  for row in rows:
    assert (row['task'], row['prompts'], row['prompt_tokens']) == (ALL, 2, 1.5)
    assert row['condition'] == DRAWN.label and row['mismatches'] is None
    assert row['speedup_min'] == row['speedup'] == row['speedup_max']


def test_a_first_token_that_comes_late_changes_no_rate_and_no_ratio():
  """Were it not taken off, theirs would be 1.97 times as slow as they are."""
  found = []
  for late in (6.0, 600.0):
    machine = Machine()
    rows = machine.measure(machine.arms(late), {'a task': [[[0]]]})
    keys = 'tokens_per_second', 'speedup', 'own_speedup', 'seconds'
    found.append([column(rows, key) for key in keys])
    assert column(rows, 'first_token_seconds') == [2, late, 2, late]
  assert found[0] == found[1]


def test_a_ratio_is_one_of_a_repeat_and_the_row_has_their_median():
  first = np.array([1.0, 1.0, 2.0])
  texts = [Text([[0, 1, 2, 0, 1], [0, 1, 2]], 3)]
  plain = Timed(first, np.array([5.0, 9.0, 10.0]), texts, None)  # 4, 8, 8
  other = Timed(first, np.array([3.0, 3.0, 6.0]), texts, None)  # 2, 2, 4
  arms = {Arm(OURS, PLAIN): plain, Arm(OURS, 'ngram@2'): other}
  _, row = comparison.compare('a', [[[1], [1, 2]]], arms, DRAWN)
  assert row['seconds'] == [2, 2, 4]
  # Medians of 8 and 2 would say 4.
  assert (row['speedup'], row['speedup_min'], row['speedup_max']) == (2, 2, 4)
  assert row['own_speedup'] == 2
  assert row['first_token_seconds'] == 1
  assert row['tokens_per_second'] == 6 / 2  # of 8 tokens 2 are first ones
  assert row['tokens_per_pass'] == 5 / 3  # as many passes as the longest has
  assert (row['prompts'], row['prompt_tokens']) == (2, 1.5)


def test_tasks_are_pooled_as_long_as_each_is():
  """A speedup of 4 in 4 s, and of 1 in 16 s, is one of 20 over 17."""
  text = Text([[0] * 5], 5)

  def timed(behind):
    return Timed(
      np.array([1.0, 3.0]), np.array([1.0, 3.0]) + behind, [text], []
    )

  plain, own = Arm(OURS, PLAIN), Arm(OURS, 'ngram@2')
  tasks = [
    {plain: timed(4.0), own: timed(1.0)},
    {plain: timed(16.0), own: timed(16.0)},
  ]
  whole = {
    arm: comparison.pool([found[arm] for found in tasks])
    for arm in (plain, own)
  }
  np.testing.assert_array_equal(whole[own].first, [2, 6])
  np.testing.assert_array_equal(whole[own].behind, [17, 17])
  assert whole[own].texts == [text, text]
  _, row = comparison.compare(ALL, [[[1]], [[1]]], whole, DRAWN)
  assert row['speedup'] == 20 / 17
  assert row['tokens_per_second'] == 8 / 17
  assert row['first_token_seconds'] == 4 / 2
  drawn = timed(1.0)._replace(mismatches=None)
  assert comparison.pool([drawn, drawn]).mismatches is None


def test_every_task_has_its_rows_and_all_tasks_come_last():
  machine = Machine()
  tasks = {'short': [[[0]]], 'long': [[[0]], [[0]], [[0]]]}
  rows = machine.measure(machine.arms(), tasks)
  names = ['short'] * 4 + ['long'] * 4 + [ALL] * 4
  assert column(rows, 'task') == names
  assert column(rows[8:], 'seconds') == [[16, 16], [32, 32], [8, 8], [16, 16]]
  assert column(rows[8:], 'prompts') == [4] * 4


def test_we_begin_in_every_buffer_and_others_once():
  machine = Machine()
  # Two groups fit into a buffer, and the third into a longer one.
  tasks = {'a': [[[0]], [[1]]], 'b': [[[0] * 300]]}
  rows = machine.measure(machine.arms(), tasks, repeats=1)
  # The first token alone is counted with plain decoding: 2 x (2 + 6), 6 + 14.
  assert column(rows[-4:], 'begin_seconds') == [16, 20, 8, 10]
  ours = [call for call in machine.calls if call[0] == 'a']
  assert {room for *_, room in ours} == {256, 512}
  # A seed for each group of a task.
  seeds = [(seed, room) for _, _, seed, new, room in ours[4:] if new == COUNT]
  assert sorted(seeds) == [(0, 256), (0, 512), (1, 256)]


def test_greedy_text_that_leaves_ours_is_said_where_and_by_how_much():
  machine = Machine()
  arms = machine.arms(wrong=1)
  rows = machine.measure(arms, {'a': [[[0]], [[2, 0, 1]]]}, GREEDY)
  *same, off = column(rows, 'mismatches')
  assert same == [[], [], []]
  # The second new token follows a 1 behind the first prompt, a 2 behind the
  # other.
  assert [(one['prompt'], one['position']) for one in off] == [(0, 1), (1, 1)]
  margins = [one['margin'] for one in off]
  np.testing.assert_allclose(margins, MARGINS[1:], atol=1e-6)


def test_a_text_that_takes_no_longer_than_its_first_token_is_refused():
  machine = Machine()
  arms = machine.arms() | {Arm(THEIRS, 'ngram@2'): machine.arm('d', 6, 0)}
  with pytest.raises(RuntimeError, match='theirs, ngram@2: a text took no'):
    machine.measure(arms, {'a': [[[0]]]})


def test_a_condition_says_what_it_is():
  assert DRAWN.label == 'T = 1, batch 1, float32'
  much = Condition('bfloat16', 1024, 4, 0.5, 0.95)
  assert much.label == 'T = 0.5, top-p 0.95, batch 4, bfloat16, context 1,024'
  logits = np.log([0.6, 0.3, 0.1])
  kept = np.isfinite(much._replace(temperature=1.0, top_p=0.8).warp(logits))
  assert kept.tolist() == [True, True, False]

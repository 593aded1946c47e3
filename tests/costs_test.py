"""The cost model against enumeration and the published formula."""

import itertools

import numpy as np
import pytest

from specjax import costs

# Speedup and draft length of arXiv 2211.17192, Theorem 3.8, by (α, c). At
# (.9, .01) the best length is above the 16 looked at; at (.5, .2) lengths 1 and
# 2 tie.
PUBLISHED = {
  0.5: {0.01: (1.88, 5), 0.05: (1.63, 3), 0.1: (1.46, 2), 0.2: (1.25, 2)},
  0.6: {0.01: (2.30, 7), 0.05: (1.92, 4), 0.1: (1.67, 3), 0.2: (1.40, 2)},
  0.7: {0.01: (2.97, 9), 0.05: (2.35, 6), 0.1: (1.98, 4), 0.2: (1.58, 3)},
  0.8: {0.01: (4.23, 14), 0.05: (3.09, 8), 0.1: (2.47, 6), 0.2: (1.87, 4)},
  0.9: {0.01: (7.18, 16), 0.05: (4.67, 13), 0.1: (3.43, 10), 0.2: (2.37, 7)},
}
PUBLISHED_DEAR = {
  0.6: (1.07, 1),
  0.7: (1.13, 1),
  0.8: (1.22, 2),
  0.9: (1.38, 3),
}


@pytest.mark.parametrize(
  ('alpha', 'c', 'factor', 'k'),
  [(a, c, *row[c]) for a, row in PUBLISHED.items() for c in row]
  + [(a, 0.5, *cell) for a, cell in PUBLISHED_DEAR.items()],
)
def test_best_k_and_speedup_are_the_published_ones(alpha, c, factor, k):
  got = float(costs.speedup(costs.expected_tokens(alpha, k), k, c))
  assert got == pytest.approx(factor, abs=0.005)
  best = costs.best_k(alpha, c)
  assert best == k or (alpha, c, best) == (0.5, 0.2, 1)
  closed = (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1))
  assert got == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize('k', [0, 1, 5])
def test_expected_tokens_where_the_closed_form_divides_by_zero(k):
  assert costs.expected_tokens(1.0, k) == k + 1
  assert costs.expected_tokens(0.0, k) == 1


def test_expected_tokens_by_enumeration_of_where_a_draft_breaks():
  alpha = np.array([0.9, 0.5, 0.7])
  want = 0.0
  for kept in range(4):
    ends = 1 - alpha[kept] if kept < 3 else 1.0
    want += (kept + 1) * np.prod(alpha[:kept]) * ends
  assert costs.expected_tokens(alpha, 3) == pytest.approx(want)
  # The mean rate would be another number.
  assert abs(costs.expected_tokens(alpha.mean(), 3) - want) > 0.05
  np.testing.assert_allclose(
    costs.tokens_by_k(alpha, 3)[:3], costs.tokens_by_k(alpha, 2)
  )


def test_no_draft_where_none_pays():
  assert costs.best_k(0.5, c=0.5) == 0
  assert costs.best_k(0.2, c=0.3) == 0  # pays only where α > c
  assert costs.best_k(0.3, c=0.2) == 1


def test_dear_verification_shortens_the_draft():
  v = 1 + 0.2 * np.arange(17)
  assert 0 < costs.best_k(0.8, 0.05, v) < costs.best_k(0.8, 0.05)


@pytest.mark.parametrize('alpha', [[0.9], [0.9, np.nan], [0.9, 1.1]])
def test_rates_that_are_missing_are_refused(alpha):
  with pytest.raises(ValueError, match='draft length 2'):
    costs.expected_tokens(alpha, 2)


def rounds_by_hand(row, k):
  """Rounds of k tokens: each ends with the first that fails, or one more."""
  text, rounds = list(row), 0
  while text:
    draft = text[:k]
    failed = draft.index(False) if False in draft else len(draft)
    text = text[failed + 1 :]
    rounds += 1
  return rounds


@pytest.mark.parametrize('k', range(5))
def test_rounds_needed_of_every_short_text(k):
  texts = [
    list(text)
    for n in range(1, 7)
    for text in itertools.product([False, True], repeat=n)
  ]
  want = [rounds_by_hand(text, k) for text in texts]
  assert costs.rounds_needed(texts, k).tolist() == want
  assert want != [rounds_by_hand(text, k + 1) for text in texts]


def test_rounds_needed_where_tests_are_independent():
  rng = np.random.default_rng(0)
  passed = rng.random((1, 40_000)) < 0.7
  for k in (1, 4):
    got = 40_000 / costs.rounds_needed(passed, k)[0]
    assert got == pytest.approx(costs.expected_tokens(0.7, k), rel=0.02)
  # Of the same rate, but in runs: now the formula promises too much.
  runs = np.sort(passed.reshape(-1, 100)).reshape(1, -1)
  assert 40_000 / costs.rounds_needed(runs, 4)[0] < 0.85 * got


@pytest.mark.parametrize('batch', [1, 2, 3, 5])
def test_the_slowest_over_all_choices(batch):
  rounds = [4, 9, 9, 1, 6]
  choices = itertools.combinations(rounds, batch)
  want = np.mean([max(choice) for choice in choices])
  assert costs.slowest(rounds, batch) == pytest.approx(want)


def test_a_batch_that_no_texts_speak_for_is_refused():
  with pytest.raises(ValueError, match='a batch of 3 .* from 2 texts'):
    costs.slowest([1, 2], 3)


def test_the_interval_is_that_of_both_samples():
  rounds = np.random.default_rng(0).normal(50, 10, 64)
  low, high = costs.rounds_interval(rounds, 1, 16)
  # Of a difference of two means: of 64 texts and of 16.
  half = 1.96 * np.std(rounds) * np.sqrt(1 / 64 + 1 / 16)
  assert low == pytest.approx(rounds.mean() - half, abs=1.0)
  assert high == pytest.approx(rounds.mean() + half, abs=1.0)
  assert costs.rounds_interval([7] * 9, 3, 2) == (7, 7)
  # The slowest of many lies above nearly all single ones.
  assert costs.rounds_interval(rounds, 16, 1)[0] > rounds.mean()

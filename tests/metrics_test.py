"""The measured numbers against enumeration and worked examples."""

import itertools
import math
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, losses, metrics


class Stats(NamedTuple):
  rounds: Any
  drafted: Any
  accepted: Any
  tested: Any
  passed: Any
  empty_residuals: Any


class Result(NamedTuple):
  length: Any
  prompt_length: Any
  stats: Stats


def run(masks, drafted=None):
  """One row whose rounds would accept `masks` if each token stood alone."""
  masks = np.asarray(masks, bool)
  drafted = np.asarray(drafted or [masks.shape[1]] * len(masks))
  inside = np.arange(masks.shape[1]) < drafted[:, None]
  passed = np.cumprod(masks & inside, 1).astype(bool)
  before = np.concatenate([np.ones((len(masks), 1), bool), passed[:, :-1]], 1)
  kept = passed.sum(1)
  return Result(
    length=np.array([3 + (kept + 1).sum()]),
    prompt_length=np.array([3]),
    stats=Stats(
      rounds=np.array([len(masks)]),
      drafted=np.array([drafted.sum()]),
      accepted=np.array([kept.sum()]),
      tested=(before & inside).sum(0)[None],
      passed=passed.sum(0)[None],
      empty_residuals=np.array([len(masks) % 2]),
    ),
  )


def accept(counts, k):
  return [[i < n for i in range(k)] for n in counts]


NOTHING = run(np.zeros((2, 0)))


def laws(seed, *shape):
  rng = np.random.default_rng(seed)
  return np.log(rng.dirichlet(np.ones(shape[-1]), shape[:-1]))


def test_acceptance_is_one_minus_total_variation():
  log_p, log_q = laws(0, 2, 3, 5), laws(1, 2, 3, 5)
  got = metrics.acceptance(jnp.asarray(log_p), jnp.asarray(log_q))
  want = 1 - 0.5 * np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_acceptance_keeps_the_target_whole_and_its_gradient_finite():
  p, q = jnp.array([0.5, 0.2, 0.3, 0.0]), jnp.array([0.0, 0.5, 0.5, 0.0])
  value, gradients = jax.value_and_grad(metrics.acceptance, (0, 1))(
    jnp.log(p), jnp.log(q)
  )
  assert value == pytest.approx(0.5)  # .9 if p were renormalised
  assert np.isfinite(gradients).all()


def test_kl_takes_the_target_first():
  log_p, log_q = laws(2, 4), laws(3, 4)
  want = (np.exp(log_p) * (log_p - log_q)).sum()
  got = metrics.kl(jnp.asarray(log_p), jnp.asarray(log_q))
  assert got == pytest.approx(want, rel=1e-5)


def test_block_efficiency_is_a_mean_of_products():
  # Runs that the draft knows alternate with runs that it does not.
  ratio = np.repeat([1.0, 0.1, 1.0, 0.1], 6)[None]
  k = 3
  products = [np.cumprod(ratio[0, t : t + k]).sum() for t in range(24 - k + 1)]
  want = 1 + np.mean(products)
  values, weight = metrics.block_efficiency(
    jnp.full(ratio.shape, -1.0),
    jnp.asarray(np.log(ratio) - 1),
    jnp.ones(ratio.shape, bool),
    k,
  )
  total, count = losses.weighted_sum(values, weight)
  assert total / count == pytest.approx(want, rel=1e-5)
  product_of_means = 1 + sum(ratio.mean() ** j for j in range(1, k + 1))
  assert abs(want - product_of_means) > 0.3


def test_block_efficiency_is_what_chain_rejection_emits():
  """Against all outcomes of a round on a two-token chain with memory."""
  p = np.array([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.3, 0.3, 0.4]])
  q = np.array([[0.4, 0.5, 0.1], [0.2, 0.2, 0.6], [0.0, 0.6, 0.4]])
  k, start = 2, 0
  emitted = 1.0
  for x, y in itertools.product(range(3), repeat=2):
    drawn = q[start, x] * q[x, y]
    pass_x = min(1, p[start, x] / q[start, x]) if q[start, x] else 0
    pass_y = min(1, p[x, y] / q[x, y]) if q[x, y] else 0
    emitted += drawn * pass_x * (1 + pass_y)
  expected = 0.0
  with np.errstate(divide='ignore'):
    log_p, log_q = np.log(p), np.log(q)
  for x, y in itertools.product(range(3), repeat=2):
    values, weight = metrics.block_efficiency(
      jnp.array([[log_p[start, x], log_p[x, y]]]),
      jnp.array([[log_q[start, x], log_q[x, y]]]),
      jnp.ones((1, 2), bool),
      k,
    )
    assert weight == 1
    expected += p[start, x] * p[x, y] * float(values[0, 0])
  assert expected == pytest.approx(emitted, rel=1e-5)


def test_block_efficiency_starts_only_where_k_tokens_are_valid():
  valid = jnp.array([[0, 1, 1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0, 1]], bool)
  # Outside there is whatever padding gives.
  log_p = jnp.where(valid, -1.0, -jnp.inf)
  log_q = jnp.where(valid, -1.0 - math.log(2), jnp.nan)
  values, weight = metrics.block_efficiency(log_p, log_q, valid, 2)
  np.testing.assert_array_equal(
    weight, [[0, 1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]]
  )
  total, count = losses.weighted_sum(values, weight)
  assert total / count == pytest.approx(1 + 0.5 + 0.25)


def test_block_efficiency_recovers_after_a_token_the_draft_cannot_say():
  log_q = jnp.array([[-1.0, -jnp.inf, -1.0, -1.0]])
  values, _ = metrics.block_efficiency(
    jnp.full((1, 4), -1.0), log_q, jnp.ones((1, 4), bool), 2
  )
  np.testing.assert_allclose(values, [[2, 1, 3]])


def test_block_efficiency_refuses_drafts_that_fit_nowhere():
  ones = jnp.ones((1, 4))
  with pytest.raises(ValueError, match='draft length 5'):
    metrics.block_efficiency(ones, ones, ones > 0, 5)


def some_laws(seed, n=4000, vocab=5):
  """Pairs from almost equal to almost disjoint, some with holes."""
  rng = np.random.default_rng(seed)
  p = rng.dirichlet(np.full(vocab, 0.3), n)
  q = rng.dirichlet(np.full(vocab, 0.3), n)
  near = rng.random((n, 1)) ** 3
  q = (1 - near) * q + near * p
  p[: n // 8, 0] = q[n // 16 : n // 4, 1] = 0
  with np.errstate(divide='ignore'):
    return tuple(
      jnp.asarray(np.log(x / x.sum(-1, keepdims=True))) for x in (p, q)
    )


def test_a_kl_is_infinite_where_the_draft_cannot_follow():
  log_p, log_q = some_laws(0)
  p, q = np.exp(np.float64(log_p)), np.exp(np.float64(log_q))
  with np.errstate(divide='ignore', invalid='ignore'):
    want = np.where(p > 0, p * np.log(p / q), 0).sum(-1)
  assert np.isinf(want).any() and np.isfinite(want).any()
  got = metrics.kl(log_p, log_q)
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


def test_the_floors_hold_at_each_position_and_for_means():
  log_p, log_q = some_laws(1)
  rate = np.asarray(metrics.acceptance(log_p, log_q))
  for kl in (metrics.kl(log_p, log_q), metrics.kl(log_q, log_p)):
    some = np.isfinite(kl) & (kl < 20)
    for floor in (0, 1):
      floors = np.asarray(metrics.floors(kl)[floor])
      assert (rate >= floors - 1e-6).all() and (floors >= 0).all()
      # Jensen: that of the mean holds as well, and lies lower.
      of_mean = metrics.floors(kl[some].mean())[floor]
      assert rate[some].mean() > floors[some].mean() > of_mean
      # A floor, and not one that always holds: half the KL would break it.
      assert (rate < np.asarray(metrics.floors(kl / 2)[floor])).any()


def test_the_higher_of_the_floors():
  kl = jnp.asarray([0, 0.05, 0.1, 0.2, 0.5, 1, 2, math.inf])
  pinsker, huber = metrics.floors(kl)
  want = [1, 0.84, 0.78, 0.68, 0.50, 0.29, 0.07, 0]
  np.testing.assert_allclose(np.maximum(pinsker, huber), want, atol=0.005)
  assert (pinsker > huber).tolist() == [0, 1, 1, 1, 1, 1, 0, 0]


def test_every_entropy_lies_in_one_bin():
  log_p, _ = some_laws(2)
  p = np.exp(np.float64(log_p))
  want = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
  np.testing.assert_allclose(metrics.entropy(log_p), want, atol=1e-5)
  nats = jnp.asarray([-1e-7, 0, 0.4, 0.5, 1.9, 2, 4, 9])
  bins = metrics.entropy_bins(nats)
  assert bins.argmax(0).tolist() == [0, 0, 0, 1, 2, 3, 4, 4]
  assert (bins.sum(0) == 1).all()


def test_bins_and_depths_that_hold_nothing_are_left_out():
  got = metrics.by_entropy(
    jnp.asarray([1.0, 0, 0, 0, 1]), jnp.asarray([4.0, 0, 0, 0, 2])
  )
  assert got == {
    'acceptance/entropy_0-0.5': 0.25,
    'tokens/entropy_0-0.5': 4,
    'acceptance/entropy_4-inf': 0.5,
    'tokens/entropy_4-inf': 2,
  }
  got = metrics.by_depth(jnp.asarray([2.0, 1, 0, 0]), jnp.full(4, 4.0))
  assert list(got.items()) == [
    ('acceptance/depth_1', 0.5),
    ('acceptance/depth_2', 0.5),
    ('acceptance/depth_3', 0),
  ]
  assert metrics.by_depth(jnp.zeros(2), jnp.zeros(2)) == {}


def test_perplexity_and_bits_are_of_sums():
  assert metrics.perplexity(4 * math.log(2) + math.log(32), 5) == (
    pytest.approx(2 ** (9 / 5))
  )
  assert metrics.bits_per_byte(9 * math.log(2), 6) == pytest.approx(1.5)
  assert metrics.perplexity(0, 0) is None
  assert metrics.bits_per_byte(0, 0) is None


def test_repetition_counts_within_rows():
  assert metrics.repetition([[1, 2, 3, 4, 5]]) == 0
  assert metrics.repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
  assert metrics.repetition([[7] * 10]) == pytest.approx(6 / 7)
  # Pooled: six repeats of seven and none of one, and not the mean of rates.
  assert metrics.repetition([[7] * 10, [1, 2, 3, 4]]) == pytest.approx(6 / 8)
  assert metrics.repetition([[1, 2, 1, 2, 1]], n=2) == pytest.approx(2 / 4)
  assert metrics.repetition([[1, 2, 3]]) is None


def test_nothing_counts_after_the_first_rejection():
  got = metrics.summarize(run([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]))
  assert (got['accepted'], got['tokens'], got['drafted']) == (6, 9, 12)
  assert got['acceptance_by_depth'] == [2 / 3, 1, 1 / 2, 1]


def test_with_and_without_the_bonus_and_by_depth():
  got = metrics.summarize(run(accept([3, 0, 2, 4], 4)))
  assert got['acceptance_rate'] == 9 / 16
  assert got['empty_residuals'] == 0
  assert got['tokens_per_round'] == 3.25
  assert got['accepted_per_round'] == 2.25
  by_depth = got['acceptance_by_depth']
  np.testing.assert_allclose(by_depth, [3 / 4, 1, 2 / 3, 1 / 2])
  np.testing.assert_allclose(np.cumprod(by_depth), [0.75, 0.75, 0.5, 0.25])


def test_short_drafts_count_what_they_drafted():
  got = metrics.summarize(run(accept([2, 3, 1], 4), drafted=[4, 4, 1]))
  assert got['acceptance_rate'] == 6 / 9
  # The third draft ended at depth 1, so depth 2 was tested twice.
  assert got['acceptance_by_depth'] == [1, 1, 1 / 2, 0]


def test_without_a_draft_rates_are_none():
  got = metrics.summarize(NOTHING)
  assert got['acceptance_rate'] is None
  assert got['acceptance_by_depth'] == []
  assert got['tokens_per_round'] == 1
  assert metrics.summarize()['tokens_per_round'] is None


def test_a_depth_never_reached_is_none():
  got = metrics.summarize(run(accept([1, 0], 3)))
  assert got['acceptance_by_depth'] == [1 / 2, 0, None]


def test_runs_are_combined_by_their_counts():
  three_of_four = run(accept([3], 4))
  for order in itertools.permutations([three_of_four, NOTHING]):
    assert metrics.summarize(*order)['acceptance_rate'] == 0.75
  # 3 of 4 and 0 of 8 are 3 of 12, and not the mean of .75 and 0.
  got = metrics.summarize(three_of_four, run(accept([0, 0, 0, 0], 2)))
  assert got['acceptance_rate'] == 3 / 12
  assert got['tokens_per_round'] == 8 / 5
  assert got['acceptance_by_depth'] == [1 / 5, 1, 1, 0]


def test_confidence_interval_is_students():
  mean, half = metrics.confidence_interval([0.1, 0.2, 0.3])
  assert mean == pytest.approx(0.2)
  assert half == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)
  assert metrics.confidence_interval([0.5]) == (0.5, math.inf)


def origins(text, tested, passed):
  """A result of rows with these origins, and counts at depths 1 and 2."""
  letters = {'a': decode.ACCEPTED, 'c': decode.CORRECTED, 'b': decode.BONUS}
  rows = [[decode.PROMPT] * 2 + [letters[x] for x in row] for row in text]
  size = max(map(len, rows)) + 3
  origin = np.array([row + [0] * (size - len(row)) for row in rows])
  stats = types.SimpleNamespace(
    origin=origin, tested=np.array([tested]), passed=np.array([passed])
  )
  return types.SimpleNamespace(
    prompt_length=np.full(len(rows), 2),
    length=np.array([len(row) for row in rows]),
    stats=stats,
  )


def test_passed_by_row_is_what_was_accepted():
  one = origins(['aacac', 'c'], tested=[4, 2], passed=[3, 2])
  two = origins(['ca'], tested=[2, 0], passed=[1, 0])
  got = [row.tolist() for row in metrics.passed_by_row(one, two, k=2)]
  assert got == [[1, 1, 0, 1, 0], [0], [0, 1]]


@pytest.mark.parametrize('share', [0, 0.25, 1])
def test_a_token_behind_a_whole_draft_passes_as_the_last_tested_do(share):
  text = ['aab' * 800]
  # The rate is that at depth k, and no other.
  result = origins(text, tested=[99, 400], passed=[50, int(400 * share)])
  (row,) = metrics.passed_by_row(result, k=2)
  assert row.reshape(-1, 3)[:, :2].all()
  assert row[2::3].mean() == pytest.approx(share, abs=0.06)
  again = metrics.passed_by_row(result, k=2)[0]
  np.testing.assert_array_equal(row, again)

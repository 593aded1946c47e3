"""The tests that decide, what they come to together, and what they can see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from specjax.certify.samples import CAP, Evidence

LEVEL = 0.01  # chance that a lossless decoder fails, over all tests and arms
POWER = 0.99
CELLS = 64  # of the G tests; 8 x 8 for pairs
# Share of tokens that float32 may move across the edge of a warp like top-p,
# where a pass over a block adds in another order than a pass over all.
ROUNDING = 1e-5


class Test(NamedTuple):
  """One test of one arm.

  Attributes:
    arm: what wrote the text.
    name: of the test.
    statistic: z for sums, D for KS, G for cells, a count for rare tokens.
    p_value: two-sided, or of a surplus.
    threshold: what Holm's procedure compares it with.
    rejected: whether it, and all smaller ones, lie at or below theirs.
  """

  arm: str
  name: str
  statistic: float
  p_value: float
  threshold: float
  rejected: bool

  @property
  def z(self) -> float:
    """The p-value as that of a two-sided normal test."""
    return float(stats.norm.isf(self.p_value / 2))


def decide(
  arms: Mapping[str, Evidence], lags: int, level: float = LEVEL
) -> list[Test]:
  """Tests the text of every arm against the law it should have.

  The text is lossless unless a test is rejected; over all arms that happens to
  lossless ones with probability at most `level`. (Holm 1979.)

  Args:
    arms: evidence by name: what is judged, and plain decoding as its control.
    lags: pairs of tokens up to this far apart are tested; K + 1 sees a round
      and its neighbour.
    level: of all tests together.

  Returns:
    Every test of every arm.

  Raises:
    ValueError: there is too little evidence for the tests of cells.
  """
  tests = [
    (arm, name, *result)
    for arm, evidence in arms.items()
    for name, result in _test(evidence, lags).items()
  ]
  thresholds, rejected = holm([test[-1] for test in tests], level)
  return [
    Test(*test, float(threshold), bool(reject))
    for test, threshold, reject in zip(tests, thresholds, rejected, strict=True)
  ]


def holm(
  p_values: Sequence[float], level: float
) -> tuple[np.ndarray, np.ndarray]:
  """Holm's step-down procedure.

  Args:
    p_values: `[m]`.
    level: chance of any false rejection.

  Returns:
    `[m]` thresholds, level / (m - rank), and `[m]` bool rejections.
  """
  p_values = np.asarray(p_values)
  order = np.argsort(p_values, kind='stable')
  steps = level / np.arange(len(order), 0, -1)
  thresholds, rejected = np.empty(len(order)), np.zeros(len(order), bool)
  thresholds[order] = steps
  rejected[order] = np.logical_and.accumulate(p_values[order] <= steps)
  return thresholds, rejected


def detectable_leak(
  evidence: Evidence,
  family: int,
  level: float = LEVEL,
  power: float = POWER,
) -> float:
  """The smallest leak of the draft into the output that is caught.

  If tokens follow (1 - ε) p + ε q, the draft-direction sum moves on average by
  n δ / √Σ p(A)(1 - p(A)), with δ the mean of ε TV(p, q) over the text.

  Args:
    evidence: of text like that to be judged; its size counts.
    family: tests in all, over all arms.
    level: of all tests together.
    power: chance to catch it, by this test at Holm's first step alone.

  Returns:
    δ, the mean total variation distance per token; inf without a direction.
  """
  spread = math.sqrt(_spread(evidence) / evidence.hit.size)
  z = stats.norm.isf(level / family / 2)
  return float((z + stats.norm.ppf(power)) * spread) or math.inf


def leak(evidence: Evidence, coverage: float = 0.95) -> tuple[float, float]:
  """How far the output moved towards the draft: an estimate of δ.

  Whatever the fault, the mean TV per token is at least the absolute value of
  what this estimates.

  Args:
    evidence: of the text.
    coverage: of the interval.

  Returns:
    The estimate, and the half-width of its interval under the exact law.
  """
  moved = np.mean(evidence.hit - evidence.p_hit.astype(float))
  half = math.sqrt(_spread(evidence) / evidence.hit.size)
  return float(moved), float(stats.norm.ppf((1 + coverage) / 2) * half)


def pit(evidence: Evidence, seed: int = 0) -> np.ndarray:
  """Randomised probability integral transform F(x-) + U p(x), `[R, N]`.

  Independent and uniform if every token has its law given those before it.
  (Smith 1985; Czado, Gneiting and Held 2009, equation 1.)
  """
  u = np.random.default_rng(seed).random(evidence.p.shape)
  return np.clip(evidence.below + u * evidence.p, 0.0, 1.0)


def _test(e: Evidence, lags: int) -> dict[str, tuple[float, float]]:
  """Statistic and p-value of every test.

  None of them looks at how a token came about: the accepted ones, or those at
  a depth of the draft, are selected and need not follow p.
  """
  u = pit(e)
  cells = np.minimum((u * CELLS).astype(int), CELLS - 1)
  coarse = cells // 8
  tests = {
    'PIT, KS': _ks(u),
    f'PIT, {CELLS} cells': _g(cells, 'tokens'),
    'draft direction': _indicators(e.hit, e.p_hit),
    'surprisal': _sum(e.surprise, e.expected, e.variance, CAP),
  }
  for lag in range(1, lags + 1):
    # Disjoint, so that a pair is independent of the others: of a stretch of
    # twice the lag, the first half with the second.
    first = np.arange(max(e.p.shape[1] - lag, 0))
    first = first[first // lag % 2 == 0]
    pairs = 8 * coarse[:, first] + coarse[:, first + lag]
    tests[f'PIT pairs, lag {lag}'] = _g(pairs, f'pairs at lag {lag}')
  tests['collisions of rows'] = _indicators(e.twin, e.p_twin)
  tests['rare tokens'] = _poisson(e.rare.sum(), e.p_rare.sum(dtype=float))
  impossible = (e.p == 0).sum()
  surplus = stats.poisson.sf(impossible - 1, ROUNDING * e.p.size)
  tests['tokens with p = 0'] = float(impossible), float(surplus)
  return tests


def _ks(u: np.ndarray) -> tuple[float, float]:
  u, n = np.sort(u, axis=None), u.size
  steps = np.arange(n + 1) / n
  d = max((steps[1:] - u).max(), (u - steps[:-1]).max())
  return float(d), float(stats.kstwo.sf(d, n))


def _g(cells: np.ndarray, what: str) -> tuple[float, float]:
  """G test of `CELLS` equal ones, with the correction of Williams (1976)."""
  count, n = np.bincount(cells.ravel(), minlength=CELLS), cells.size
  if n < 5 * CELLS:
    raise ValueError(
      f'{n} {what} are too few to test: at least {5 * CELLS}; ask for more or'
      ' longer rows'
    )
  g = 2 * special.xlogy(count, count * CELLS / n).sum()
  g /= 1 + (CELLS + 1) / (6 * n)
  return float(g), float(stats.chi2.sf(g, CELLS - 1))


def _indicators(hit: np.ndarray, p: np.ndarray) -> tuple[float, float]:
  p = np.clip(p.astype(float), 0.0, 1.0)
  return _sum(hit, p, p * (1 - p), 1.0)


def _sum(x, mean, variance, bound: float) -> tuple[float, float]:
  """z of a sum of differences from their conditional means, two-sided."""
  moved = float(np.sum(x - mean.astype(float)))
  total = float(np.sum(variance, dtype=float))
  z = moved / math.sqrt(total) if total > 0 else 0.0
  if total >= 25 * bound**2:
    return z, float(2 * stats.norm.sf(abs(z)))
  # A sum over few occasions is no normal one; Bernstein's inequality (for
  # martingales, Freedman 1975) holds for any.
  slack = 2 * (total + bound * abs(moved) / 3)
  return z, min(1.0, 2 * math.exp(-(moved**2) / slack)) if total > 0 else 1.0


def _poisson(count: float, mean: float) -> tuple[float, float]:
  """Of rare events. Approximate: for given rates the tails lie within the
  Poisson law's (Hoeffding 1956), and here the rates depend on the text."""
  tails = stats.poisson.sf(count - 1, mean), stats.poisson.cdf(count, mean)
  return float(count), float(min(1.0, 2 * min(tails)))


def _spread(evidence: Evidence) -> float:
  p = np.clip(evidence.p_hit.astype(float), 0.0, 1.0)
  return float(np.mean(p * (1 - p)))

"""The usual display, which decides nothing: how far two arms lie apart.

The plug-in KL between two samples of one law is never 0 but about
(cells - 1) / n, so distances are given less their mean under permuted labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special

CELLS = 64  # of a table, at most
FEWEST = 40  # sequences, of both arms together, that make a cell


def compare(
  one: np.ndarray,
  other: np.ndarray,
  *,
  grams: int = 3,
  cells: int = CELLS,
  repeats: int = 200,
  seed: int = 0,
) -> list[dict[str, Any]]:
  """Compares the tokens of two arms, KL(one || other) and TV.

  Every prompt and place has a table, whose cells are the most frequent outcomes
  in both arms together; the others share the cells that are left. The n-grams
  of neighbours cross the boundaries of rounds, wherever these fall. A law that
  really differs lies further off than is shown, by up to the null mean.

  Args:
    one: `[P, S, N]` tokens of S sequences for each of P prompts.
    other: `[P, S', N]` of the other arm.
    grams: longest n-gram.
    cells: of a table, at most.
    repeats: of label permutations within a prompt, and of the bootstrap.
    seed: of both.

  Returns:
    For each n: `n`; `tables`; `kl` in nats and `tv`, means over tables less
    those under permuted labels; `kl_low`, `kl_high`, `tv_low`, `tv_high`, 95 %
    bootstrap intervals over sequences; `p_value` of TV by permutation.
  """
  rng = np.random.default_rng(seed)
  both = np.concatenate([one, other], 1).astype(np.int64)
  first = _first(both, one.shape[1])
  permuted = [rng.permuted(first, axis=1) for _ in range(repeats)]
  resampled = [_resample(rng, first) for _ in range(repeats)]
  rows = []
  for n in range(1, min(grams, both.shape[2]) + 1):
    prompt, table = _tables(both, n, cells)

    def distances(*arms, prompt=prompt, table=table):
      return _distances(*(_counts(table, x[prompt], cells) for x in arms))

    seen = distances(first, ~first)
    null = np.array([distances(x, ~x) for x in permuted])
    draws = np.array([distances(*x) for x in resampled])
    # A resample is biased once more: what counts is how far it spreads.
    spread = np.quantile(draws - draws.mean(0), (0.025, 0.975), axis=0)
    value = seen - null.mean(0)
    row = {'n': n, 'tables': len(table)}
    for i, name in enumerate(('kl', 'tv')):
      row[name] = float(value[i])
      row[f'{name}_low'] = float(value[i] + spread[0, i])
      row[f'{name}_high'] = float(value[i] + spread[1, i])
    rows.append(row | {'p_value': _p_value(seen[1], null[:, 1])})
  return rows


def compare_log_probability(
  one: np.ndarray, other: np.ndarray, *, repeats: int = 200, seed: int = 0
) -> dict[str, float]:
  """Two-sample Kolmogorov-Smirnov test on sequence log-probability.

  Args:
    one: `[P, S]` log-probability of each sequence under the target.
    other: `[P, S']` of the other arm.
    repeats: of label permutations within a prompt.
    seed: theirs.

  Returns:
    `statistic`, the mean over prompts of the largest difference of the arms'
    distribution functions, and its `p_value`.
  """
  rng = np.random.default_rng(seed)
  both = np.concatenate([one, other], 1)
  first = _first(both, one.shape[1])
  order = np.argsort(both, 1, kind='stable')
  ranked = np.take_along_axis(both, order, 1)
  # The functions are compared behind all values that are equal.
  last = np.append(ranked[:, 1:] > ranked[:, :-1], first[:, :1], 1)

  def statistic(first):
    # In whole numbers, so that equal statistics are equal.
    step = np.where(first, other.shape[1], -one.shape[1])
    gap = np.cumsum(np.take_along_axis(step, order, 1), 1)
    gap = np.abs(np.where(last, gap, 0)).max(1).mean()
    return gap / one.shape[1] / other.shape[1]

  seen = statistic(first)
  null = [statistic(rng.permuted(first, axis=1)) for _ in range(repeats)]
  return {'statistic': float(seen), 'p_value': _p_value(seen, null)}


def _first(both: np.ndarray, split: int) -> np.ndarray:
  """`[P, S + S']` bool: of the first arm."""
  return np.broadcast_to(np.arange(both.shape[1]) < split, both.shape[:2])


def _resample(rng, first: np.ndarray) -> list[np.ndarray]:
  """How often each sequence is drawn, in either arm, `[P, S + S']` twice."""
  weights = []
  for arm in (first[0], ~first[0]):
    size = arm.sum()
    drawn = np.zeros(first.shape)
    drawn[:, arm] = rng.multinomial(size, np.full(size, 1 / size), len(first))
    weights.append(drawn)
  return weights


def _tables(
  tokens: np.ndarray, n: int, cells: int
) -> tuple[np.ndarray, np.ndarray]:
  """Prompt `[tables]` and cells `[tables, S]` of all n-grams of `[P, S, N]`."""
  prompts, tables, base = [], [], tokens.max() + 1
  for prompt, rows in enumerate(tokens):
    for start in range(rows.shape[1] - n + 1):
      powers = base ** np.arange(n)
      code = (rows[:, start : start + n] * powers).sum(1)
      _, outcome, count = np.unique(
        code, return_inverse=True, return_counts=True
      )
      order = np.argsort(-count, kind='stable')
      own = min(cells - 1, int((count >= FEWEST).sum()))
      # The others share what cells they can fill.
      others = int(count[order[own:]].sum()) // FEWEST
      own -= own > 0 and others == 0
      place = np.arange(len(count))
      place[own:] = own + place[own:] % np.clip(others, 1, cells - own)
      cell = np.empty(len(count), int)
      cell[order] = place
      prompts.append(prompt)
      tables.append(cell[outcome])
  return np.array(prompts), np.array(tables)


def _counts(table: np.ndarray, weight: np.ndarray, cells: int) -> np.ndarray:
  """Weighted sequences `[tables, cells]` in each cell."""
  index = table + cells * np.arange(len(table))[:, None]
  return np.bincount(
    index.ravel(), weight.ravel().astype(float), cells * len(table)
  ).reshape(-1, cells)


def _distances(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
  """KL and TV, means over tables."""
  # Half a sequence more in each cell that is used keeps the KL finite.
  half = 0.5 * (one + other > 0)
  p, q = (x + half for x in (one, other))
  p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
  kl = special.rel_entr(p, q).sum(1).mean()
  return kl, np.abs(p - q).sum(1).mean() / 2


def _p_value(seen: float, null: Sequence[float]) -> float:
  """Of a permutation test; its own value counts among the permuted."""
  return float((1 + np.sum(np.asarray(null) >= seen)) / (1 + len(null)))

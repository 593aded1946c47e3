"""What speculation should gain: theory, on the host, in plain numbers.

c is the time of drafting a token over that of a plain round, which drafts
nothing; v(K) is the time of all else that a round of K drafted tokens does. The
round then takes K c + v(K) plain ones. The classical formula has v = 1, and on
real machines v(K) often decides. `pricing` measures both.

It also has one acceptance rate for all tokens, while acceptance comes in runs
and differs from text to text; and it knows one row, while a batch waits for its
slowest. `rounds_needed` and `slowest` take both from texts that were decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def tokens_by_k(alpha: ArrayLike, max_k: int) -> NDArray[np.float64]:
  """Expected tokens per round, with the bonus, of every draft length.

  1 + Σ_{k≤K} Π_{j≤k} α_j. With one α this is (1 - α^(K+1)) / (1 - α), equation
  (1) of Leviathan et al. 2023 (arXiv 2211.17192); as a sum it holds at α = 1.

  Args:
    alpha: the acceptance rate, or `[N >= max_k]` of them, that at depth k given
      that the tokens before it passed (`acceptance_by_depth`).
    max_k: the longest draft.

  Returns:
    `[max_k + 1]`, for K = 0, 1, ..., max_k.

  Raises:
    ValueError: if alpha is too short, or not a probability at some depth.
  """
  alpha = np.asarray(alpha, np.float64)
  alpha = np.full(max_k, alpha) if alpha.ndim == 0 else alpha[:max_k]
  if len(alpha) < max_k or not np.all((alpha >= 0) & (alpha <= 1)):
    raise ValueError(
      f'draft length {max_k} needs a probability at each depth, got {alpha}'
    )
  return np.cumsum(np.cumprod(np.concatenate([[1.0], alpha])))


def expected_tokens(alpha: ArrayLike, k: int) -> float:
  """Expected tokens per round at draft length k; see `tokens_by_k`."""
  return float(tokens_by_k(alpha, k)[-1])


def speedup(
  tokens: ArrayLike, k: ArrayLike, c: float, v: ArrayLike = 1.0
) -> NDArray[np.float64]:
  """Predicted speedup tokens / (K c + v(K)); arguments broadcast.

  With v = 1 and one α, Theorem 3.8 of Leviathan et al. 2023 (arXiv 2211.17192).

  Args:
    tokens: tokens per round, with the bonus.
    k: draft length K.
    c: draft step / plain step.
    v: pass over K + 1 tokens / plain step.

  Returns:
    Tokens per second over those of plain decoding.
  """
  return np.asarray(tokens) / (np.asarray(k) * c + np.asarray(v))


def best_k(
  alpha: ArrayLike, c: float, v: ArrayLike = 1.0, max_k: int = 16
) -> int:
  """The draft length with the highest predicted speedup; the shortest of ties.

  Args:
    alpha: as in `tokens_by_k`.
    c: draft step / plain step.
    v: one number, or `[max_k + 1]` for K = 0, 1, ..., max_k.
    max_k: the longest draft considered.

  Returns:
    K in [0, max_k]; 0 where no draft pays.
  """
  k = np.arange(max_k + 1)
  return int(np.argmax(speedup(tokens_by_k(alpha, max_k), k, c, v)))


def rounds_needed(
  passed: Iterable[Sequence[bool]], k: int
) -> NDArray[np.int64]:
  """Rounds of k drafted tokens that each text takes.

  A round emits the tokens that pass, k at most, and one more. Whether a token
  passes is a matter of its place in the text and not of where a round began, so
  one decoding tells the rounds of every draft length: exactly where all is
  greedy, else in law. That is so under rules that test token by token; a rule
  that weighs a whole draft depends on its beginning too, a little.

  Args:
    passed: of each text, whether each token passes (`metrics.passed_by_row`).
    k: draft length K.

  Returns:
    `[texts]` rounds.
  """
  found = []
  for row in passed:
    at = rounds = 0
    while at < len(row):
      kept = 0
      while kept < k and at + kept < len(row) and row[at + kept]:
        kept += 1
      at += kept + 1
      rounds += 1
    found.append(rounds)
  return np.array(found, np.int64)


def slowest(rounds: ArrayLike, batch: int) -> float:
  """Rounds that a batch is expected to take: those of its slowest row.

  The mean of the largest over all choices of `batch` texts, without bias.

  Args:
    rounds: `[n]` that texts took, drawn as the batch's will be.
    batch: rows, at most n.

  Raises:
    ValueError: there are fewer texts than rows.
  """
  rounds = np.sort(np.asarray(rounds, np.float64))
  n = len(rounds)
  if not 1 <= batch <= n:
    raise ValueError(f'a batch of {batch} is not to be had from {n} texts')
  # C(i, batch) / C(n, batch): that none but the i fastest are chosen.
  i = np.arange(n + 1)[:, None]
  j = np.arange(batch)
  below = np.prod(np.maximum(i - j, 0) / (n - j), -1)
  return float(np.sum(rounds * np.diff(below)))


def rounds_interval(
  rounds: ArrayLike,
  batch: int,
  groups: int,
  level: float = 0.95,
  draws: int = 2000,
) -> tuple[float, float]:
  """Where the mean rounds of some batches will lie, as far as texts differ.

  A bootstrap (Efron 1979) of both: the texts that a prediction was made from
  are drawn again, and from them the groups that are decoded.

  Args:
    rounds: `[n]` that texts took.
    batch: rows of a group.
    groups: that the mean is taken over.
    level: coverage.
    draws: of the bootstrap, from a fixed seed.

  Returns:
    The least and the most.
  """
  rounds = np.asarray(rounds, np.float64)
  rng = np.random.default_rng(0)
  again = rng.choice(rounds, (draws, len(rounds)))
  chosen = rng.integers(len(rounds), size=(draws, groups * batch))
  decoded = np.take_along_axis(again, chosen, 1)
  means = decoded.reshape(draws, groups, batch).max(-1).mean(-1)
  low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
  return float(low), float(high)


def batch_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
  """A batch's rounds by draft length: those of the row that was live longest.

  Args:
    lengths: `[B, K + 1]` of each row (`decode.Stats.lengths`).

  Returns:
    `[K + 1]`.
  """
  lengths = np.asarray(lengths)
  return lengths[lengths.sum(-1).argmax()]


def modelled(lengths: ArrayLike, cost: Callable[[int], float]) -> float:
  """What rounds take by the cost model, in plain rounds.

  What a draft reads after a while of plain rounds is not counted.

  Args:
    lengths: `[K + 1]` rounds by draft length.
    cost: of a round of K tokens, K c + v(K).
  """
  counts = enumerate(np.asarray(lengths).tolist())
  return float(sum(count * cost(k) for k, count in counts if count))

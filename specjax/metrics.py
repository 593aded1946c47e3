"""What specjax measures: one definition of each number, used everywhere.

p is the target and q the draft, both after the warp that is used to decode.

acceptance rate α (exact)
  The mean over positions of Σ_x min(p(x), q(x)) = 1 - TV(p, q): how often a
  token drawn from q passes. The positions are those of text that the target
  wrote at the decode warp, because that is where decoding takes the draft. Of
  a drafter with several horizons it is that of the first token of a draft.
measured acceptance rate
  accepted / drafted over whole runs: drafted tokens that were emitted over all
  valid ones that an end token or a limit did not cut off. Those behind a
  rejection were drafted too, so it falls with K where α does not.
acceptance by depth
  At depth k, P(the test passes | it was made): the k-th token of a draft is
  only tested when the k - 1 before it passed. Running products of this give
  the probability that a draft survives to each depth.
accepted per round
  accepted / rounds: WITHOUT the token that the target adds.
tokens per round, or block efficiency
  emitted / rounds: WITH the token that ends a round, the correction or the
  bonus. Between 1 and K + 1; one more than accepted per round unless a round
  was cut inside its draft.
tokens per pass
  A row's tokens over the rounds that its batch took, those included in which it
  was done and waited. For one row that is tokens per round; for several the
  slowest decides, and it, not tokens per round, is what speed follows.
expected block efficiency at K
  1 + Σ_{k≤K} E Π_{j≤k} min(1, q(y_j) / p(y_j)) over the tokens y that the
  target wrote: what chain rejection with K drafted tokens gives (with the
  bonus) on that text, without decoding. It is a mean of products: acceptance
  is correlated along a text, and a product of means is another number.

expected acceptance by depth
  At depth k, the k-th of those means of products over the one before it: the
  same as acceptance by depth, exactly and without decoding.
acceptance by entropy
  α over the positions at which the entropy of p lies in a bin of fixed edges.
floors
  1 - √(KL / 2) (Pinsker) and 1 - √(1 - e^(-KL)) (Bretagnolle and Huber), of KL
  after the warp and of whole laws. Each holds at a position, where neither is
  below 0, and so does its mean over positions for the mean α, which is what is
  reported. Both are convex, so the floor of the mean KL holds too (Jensen), but
  lies lower.

A rate over nothing is None or left out, never NaN, and runs are combined by
adding counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from specjax import decode
from specjax.types import Array

if TYPE_CHECKING:
  from specjax import generation

ENTROPY_EDGES = 0.0, 0.5, 1.0, 2.0, 4.0, math.inf  # nats


def acceptance(log_p: Array, log_q: Array) -> Array:
  """Exact acceptance rate Σ_x min(p(x), q(x)) of each position.

  Args:
    log_p: `[..., V]` log-probabilities of the target; -inf is allowed.
    log_q: `[..., V]` log-probabilities of the draft. Where its support is
      smaller, p stays whole: what the draft cannot say is never accepted.

  Returns:
    `[...]` float32 in [0, 1].
  """
  log_p, log_q = log_p.astype(jnp.float32), log_q.astype(jnp.float32)
  return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), -1)


def kl(log_p: Array, log_q: Array) -> Array:
  """KL(p || q) in nats of whole laws: inf where p > 0 = q.

  Args:
    log_p: `[..., V]` log-probabilities of the target; -inf is allowed.
    log_q: `[..., V]` log-probabilities of the draft; likewise.

  Returns:
    `[...]` float32. Not for training: its gradient may be infinite.
  """
  p = jnp.exp(log_p.astype(jnp.float32))
  ratio = jnp.where(p > 0, log_p, 0) - jnp.where(p > 0, log_q, 0)
  return jnp.sum(jnp.where(p > 0, p * ratio, 0), -1)


def floors(kl: Array) -> tuple[Array, Array]:
  """What the acceptance rate cannot fall below at a KL, either way round.

  Args:
    kl: nats, of whole laws; `kl`.

  Returns:
    1 - √(KL / 2), or 0 if that is negative (Pinsker), and 1 - √(1 - e^(-KL))
    (Bretagnolle and Huber 1979), which is higher from KL ≈ 1.6 on.
  """
  kl = jnp.maximum(kl, 0.0)  # rounding
  pinsker = jnp.maximum(1 - jnp.sqrt(kl / 2), 0.0)
  return pinsker, 1 - jnp.sqrt(-jnp.expm1(-kl))


def entropy(log_p: Array) -> Array:
  """Entropy in nats, `[..., V]` to `[...]`; -inf is allowed."""
  p = jnp.exp(log_p)
  return -jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, log_p, 0), 0), -1)


def entropy_bins(nats: Array) -> Array:
  """In which bin of `ENTROPY_EDGES` an entropy lies.

  Args:
    nats: `[...]`; rounding below 0 counts as 0.

  Returns:
    `[5, ...]` bool, one of the five true; an edge belongs to the bin above it.
  """
  edges = jnp.array(ENTROPY_EDGES).reshape(-1, *[1] * nats.ndim)
  nats = jnp.maximum(nats, 0.0)
  return (edges[:-1] <= nats) & (nats < edges[1:])


def by_entropy(total: Array, weight: Array) -> dict[str, Array]:
  """Acceptance in each bin of entropy, and of how many tokens.

  Args:
    total: `[..., 5]` weighted sums.
    weight: `[..., 5]` what they weigh.

  Returns:
    `[...]` by name, without the bins that hold nothing.
  """
  values = {}
  for i, (low, high) in enumerate(itertools.pairwise(ENTROPY_EDGES)):
    if (np.asarray(weight[..., i]) > 0).all():
      name = f'entropy_{low:g}-{high:g}'
      values[f'acceptance/{name}'] = total[..., i] / weight[..., i]
      values[f'tokens/{name}'] = weight[..., i]
  return values


def by_depth(total: Array, weight: Array) -> dict[str, Array]:
  """Acceptance at each depth, given that the draft got there.

  Args:
    total: `[..., K]` weighted sums of `survival`.
    weight: `[..., K]` what they weigh.

  Returns:
    `[...]` by name, without the depths that no draft reaches.
  """
  reached = jnp.concatenate([weight[..., :1], total[..., :-1]], -1)
  return {
    f'acceptance/depth_{i + 1}': total[..., i] / reached[..., i]
    for i in range(total.shape[-1])
    if (np.asarray(reached[..., i]) > 0).all()
  }


def survival(
  log_p_y: Array, log_q_y: Array, valid: Array, k: int
) -> tuple[Array, Array]:
  """Probability that a round that starts before each token gets to each depth.

  A start counts when the K tokens from there on are all valid, so a text
  shorter than K has none.

  Args:
    log_p_y: `[B, T]` log-probability of token t under the target that wrote it.
    log_q_y: `[B, T]` the same under the draft; -inf is allowed. Or, for a draft
      whose laws depend on where it starts, `[K, B, T]`: under its law h, that
      of token t + h of a draft that starts before token t.
    valid: `[B, T]` bool, tokens that the target wrote. Neighbours that do not
      belong together need an invalid token between them, as the first token
      of a document's piece is in `Batch.weight`.
    k: draft length K, at most T.

  Returns:
    `[K, B, T - K + 1]` Π_{j≤k} min(1, q(y_j) / p(y_j)), and the float32 weight
    `[B, T - K + 1]` of a start.
  """
  starts = log_p_y.shape[1] - k + 1
  if k < 1 or starts < 1:
    raise ValueError(
      f'draft length {k} needs to be in [1, T]; T is {log_p_y.shape[1]}'
    )

  def ahead(x):
    return jnp.stack([x[:, j : j + starts] for j in range(k)])

  one_law = log_q_y.ndim == 2
  log_q = ahead(log_q_y) if one_law else log_q_y[:k, :, :starts]
  log_ratio = log_q.astype(jnp.float32) - ahead(log_p_y).astype(jnp.float32)
  # p = q = 0: a greedy choice that rounding turned; it would not pass.
  log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
  log_pass = jnp.where(ahead(valid), jnp.minimum(log_ratio, 0), -jnp.inf)
  inside = ahead(valid).all(0)
  return jnp.exp(jnp.cumsum(log_pass, 0)), inside.astype(jnp.float32)


def block_efficiency(
  log_p_y: Array, log_q_y: Array, valid: Array, k: int
) -> tuple[Array, Array]:
  """Expected block efficiency of a round that starts before each token.

  Args:
    log_p_y: as of `survival`, which this is a sum of.
    log_q_y: likewise.
    valid: likewise.
    k: draft length K, at most T.

  Returns:
    `[B, T - K + 1]` tokens per round in [1, K + 1], and its float32 weight.
    Reduce with `losses.weighted_sum`.
  """
  reached, weight = survival(log_p_y, log_q_y, valid, k)
  return 1 + reached.sum(0), weight


def expected_accepted(log_ratio: Array, jointly: bool = False) -> Array:
  """Tokens of a drafted chain that a rule is expected to accept, given it.

  Node by node, as `verify.rejection` does: Σ_k Π_{j≤k} min(1, r_j). Jointly, as
  `verify.block`: Σ_k w_k with w_k = min(1, w_{k-1} r_k), the probability that k
  tokens or more are accepted, averaged over the drafts that begin with them.
  (Sun et al. 2025, arXiv 2403.10444.)

  Args:
    log_ratio: `[..., K]` log r = log p - log q of each drafted token.
    jointly: which of the two.

  Returns:
    `[...]` in [0, K]; jointly it is never less.
  """
  if not jointly:
    return jnp.exp(jnp.cumsum(jnp.minimum(log_ratio, 0), -1)).sum(-1)

  def weigh(log_w, step):
    log_w = jnp.minimum(log_w + step, 0)
    return log_w, log_w

  start = jnp.zeros(log_ratio.shape[:-1], log_ratio.dtype)
  steps = jnp.moveaxis(log_ratio, -1, 0)
  return jnp.exp(jax.lax.scan(weigh, start, steps)[1]).sum(0)


def perplexity(nats: float, tokens: float) -> float | None:
  """exp(nats / tokens) of summed surprise; None when there were no tokens."""
  return math.exp(nats / tokens) if tokens else None


def bits_per_byte(nats: float, size: float) -> float | None:
  """Summed surprise over the bytes it pays for, in bits."""
  return nats / math.log(2) / size if size else None


def repetition(rows: Iterable[Sequence[int]], n: int = 4) -> float | None:
  """Share of n-grams that stood earlier in the same row, over all rows.

  Args:
    rows: tokens of each text; n-grams do not cross rows.
    n: n-gram length.

  Returns:
    0 when no n-gram recurs, near 1 for a loop, None when no row has n tokens.
  """
  total = distinct = 0
  for row in rows:
    grams = list(zip(*(row[i:] for i in range(n)), strict=False))
    total += len(grams)
    distinct += len(set(grams))
  return _ratio(total - distinct, total)


def summarize(*results: generation.Result) -> dict[str, Any]:
  """Counts and rates of one or several runs, ready for JSON.

  Args:
    *results: what `generate` returned. Their counts are added, so a long
      run weighs more than a short one and one without drafts changes no rate.

  Returns:
    The counts `rounds`, `tokens`, `drafted`, `accepted`, `empty_residuals`
    (rejections that rounding left without a residual), and the numbers
    defined above: `acceptance_rate` (measured), `acceptance_by_depth` (a list),
    `accepted_per_round`, `tokens_per_round`; None where nothing was counted.
  """
  runs = [result.stats for result in results]
  rounds, drafted, accepted, empty = (
    sum(int(np.sum(getattr(run, name))) for run in runs)
    for name in ('rounds', 'drafted', 'accepted', 'empty_residuals')
  )
  tokens = sum(
    int(np.sum(np.asarray(r.length) - np.asarray(r.prompt_length)))
    for r in results
  )
  tested = _by_depth(run.tested for run in runs)
  passed = _by_depth(run.passed for run in runs)
  return {
    'rounds': rounds,
    'tokens': tokens,
    'drafted': drafted,
    'accepted': accepted,
    'empty_residuals': empty,
    'acceptance_rate': _ratio(accepted, drafted),
    'acceptance_by_depth': [
      _ratio(a, b) for a, b in zip(passed, tested, strict=True)
    ],
    'accepted_per_round': _ratio(accepted, rounds),
    'tokens_per_round': _ratio(tokens, rounds),
  }


def passed_by_row(
  *results: generation.Result, k: int
) -> list[NDArray[np.bool_]]:
  """Whether each new token passed the draft's test, for `costs.rounds_needed`.

  The token behind a whole draft was not tested. It is drawn, from a fixed seed,
  to pass as often as those that stood last in a draft and were tested.

  Args:
    *results: of chains of one length.
    k: that length, at least 1.

  Returns:
    Of each row of each result, `[new tokens]`.
  """
  passed, tested = (
    sum(int(np.sum(getattr(r.stats, name)[:, k - 1])) for r in results)
    for name in ('passed', 'tested')
  )
  rng = np.random.default_rng(0)
  rows = []
  for result in results:
    for row, start, end in zip(
      result.stats.origin, result.prompt_length, result.length, strict=True
    ):
      origin = np.asarray(row[start:end])
      guess = rng.random(len(origin)) * tested < passed
      rows.append(
        (origin == decode.ACCEPTED) | ((origin == decode.BONUS) & guess)
      )
  return rows


def confidence_interval(
  values: Sequence[float], level: float = 0.95
) -> tuple[float, float]:
  """Mean and half-width of Student's interval, e.g. over seeds.

  For a paired comparison give the differences.

  Args:
    values: at least one number; the half-width of a single one is inf.
    level: coverage.

  Returns:
    The mean, and what to add and subtract.
  """
  n = len(values)
  mean = float(np.mean(values))
  if n < 2:
    return mean, math.inf
  quantile = scipy_stats.t.ppf((1 + level) / 2, n - 1)
  return mean, float(quantile * np.std(values, ddof=1) / math.sqrt(n))


def _ratio(part: int, whole: int) -> float | None:
  return part / whole if whole else None


def _by_depth(counts: Iterable[Any]) -> list[int]:
  """Sums `[B, N]` counts over rows and runs; N may differ from run to run."""
  sums = [np.sum(np.asarray(count), 0) for count in counts]
  total = np.zeros(max((len(s) for s in sums), default=0), np.int64)
  for s in sums:
    total[: len(s)] += s
  return total.tolist()

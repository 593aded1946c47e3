"""Rules that judge whole paths, and so accept more than node by node."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Array, Draft, Noise, Verdict
from specjax.verify import parts


def block(noise: Noise, draft: Draft, log_p: Array) -> Verdict:
  """Block verification: keeps the longest prefix whose test passes.

  All prefixes are tested, with probabilities that make the expected accepted
  length as long as any rule could that keeps the target's law; a failure does
  not end the search. (Sun et al. 2025, arXiv 2403.10444.)

  Args:
    noise: `log_u` is consumed, one uniform per node.
    draft: a chain, sampled ('single') or deterministic ('fixed').
    log_p: `[N + 1, V]` target log-probabilities, after the warp.

  Returns:
    The verdict.

  Raises:
    ValueError: at trace time, for a tree.
  """
  parts.require('block', draft, ('single', 'fixed'), chain=True)
  n, x, dtype = draft.tokens.shape[0], draft.tokens, log_p.dtype
  if n == 0:
    return parts.nothing(log_p)
  size = parts.valid(draft).sum()  # an invalid node ends the chain
  log_px = parts.at(log_p[:n], x)
  log_q, log_qx = parts.laws(draft, dtype)

  def weigh(log_w, terms):
    log_w = parts.accept_rate(log_w + terms[0], terms[1])
    return log_w, log_w

  zero = jnp.zeros((), dtype)
  _, log_w = jax.lax.scan(weigh, zero, (log_px, log_qx))
  log_w = jnp.concatenate([zero[None], log_w])  # [N + 1]
  before = log_w[:n, None] + log_p[:n]
  if log_q is None:
    left = jnp.exp(log_w[:n]) * -jnp.expm1(log_px)
  else:
    left = jnp.maximum(jnp.exp(before) - jnp.exp(log_q), 0).sum(-1)
  # What node i leads to is known of all nodes but the last.
  inner = _keep_rate(log_w[1:n], left[1:])
  node = 1 + jnp.arange(n)
  log_h = jnp.where(node < size, jnp.pad(inner, (0, 1)), log_w[1:])
  tested = node <= size
  passed = parts.passes(noise.log_u, log_h) & tested
  count = jnp.max(jnp.where(passed, node, 0), initial=0)
  whole = count == size
  row = jnp.minimum(count, n - 1)
  rows = None if log_q is None else log_q[row]
  gap = parts.excess(before[row], rows, x[row])
  residual, empty = parts.normalised(gap, log_p[row])
  accepted = node <= count
  nan = (jnp.isnan(log_h) & tested).any()
  law = jnp.where(whole, log_p[count], residual)
  fault = parts.fault(log_p, accepted, law, nan, ~whole & empty)
  outcomes = parts.outcomes(tested, passed, log_h)
  return Verdict(accepted, law, *outcomes, fault)


def traversal(noise: Noise, draft: Draft, log_p: Array) -> Verdict:
  """Traversal verification: `block`, on a tree.

  Leaves are tested first, with the weight of their whole path; a leaf that
  fails is deleted, and what p keeps behind it is handed to its next sibling or,
  with the last of them, to its parent, which is then a leaf itself. The output
  law is exactly p. (Weng et al. 2025, arXiv 2505.12398.)

  Args:
    noise: `log_u` is consumed, one uniform per node.
    draft: a chain, or a tree of any siblings but coupled ones.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.

  Returns:
    The verdict.

  Raises:
    ValueError: at trace time, for coupled siblings.
  """
  parts.require('traversal', draft, parts.UNCOUPLED, chain=False)
  n, dtype = draft.tokens.shape[0], log_p.dtype
  if n == 0:
    return parts.nothing(log_p)
  valid, parents = parts.valid(draft), parts.parents(draft)

  def visit(_, carry):
    row, found, laws, log_w, new, tested, log_tests, nan, bad = carry
    children = new & (parents == row)
    enter = children.any() & ~found
    # Either the next child is entered or the node itself, a leaf by now, is
    # tested and, if it fails, deleted.
    child = jnp.argmax(children).astype(jnp.int32)
    i = jnp.where(enter, child, jnp.maximum(row - 1, 0))
    test = ~enter & ~found & (row > 0)
    x, log_q, above = draft.tokens[i], parts.law(draft, i, dtype), parents[i]
    log_qx = jnp.zeros((), dtype) if log_q is None else log_q[x]
    scaled = log_w[above] + laws[above]
    weight = parts.accept_rate(scaled[x], log_qx)
    ok = test & parts.passes(noise.log_u[i], log_w[row])
    failed = test & ~ok

    made, log_test = parts.outcomes(test, ok, log_w[row])
    gap = parts.excess(scaled, log_q, x)
    rest, empty = parts.normalised(gap, laws[above])
    left = _keep_rate(log_w[above], jnp.exp(gap).sum())
    place = jnp.where(enter, i + 1, above)
    log_w = log_w.at[place].set(
      jnp.where(enter, weight, jnp.where(failed, left, log_w[place]))
    )
    laws = laws.at[above].set(jnp.where(failed, rest, laws[above]))
    row = jnp.where(enter, i + 1, jnp.where(failed, above, row))
    return (
      row,
      found | ok | ~(enter | test),  # the root is always kept
      laws,
      log_w,
      new.at[i].set(new[i] & ~enter),
      tested.at[i].set(tested[i] | made),
      log_tests.at[i].add(log_test),
      nan | (enter & jnp.isnan(weight)) | (failed & jnp.isnan(left)),
      bad.at[above].set(bad[above] | (failed & empty)),
    )

  start = (
    jnp.zeros((), jnp.int32),
    jnp.array(False),
    log_p,
    jnp.zeros(n + 1, dtype),
    valid,
    *parts.untested(log_p),
    jnp.array(False),
    jnp.zeros(n + 1, bool),
  )
  # Every node is entered and tested at most once.
  row, _, laws, _, _, *outcomes, nan, bad = jax.lax.fori_loop(
    0, 2 * n, visit, start
  )
  accepted = parts.path(draft, row)
  fault = parts.fault(log_p, accepted, laws[row], nan, bad[row])
  return Verdict(accepted, laws[row], *outcomes, fault)


def _keep_rate(log_w: Array, left: Array) -> Array:
  """Log of S / (S + 1 - w): to stay at a node of weight w, S being left of p.

  Where w = 1 and nothing is left, p and q are equal there, and every draft of
  it is kept: the rate is 1. A NaN is handed on, and no test passes at it.
  """
  short = -jnp.expm1(log_w)
  total = left + short
  rate = jnp.where(total == 0, 1.0, left / jnp.where(total == 0, 1, total))
  return jnp.log(rate)

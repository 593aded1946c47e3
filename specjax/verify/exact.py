"""Rules that decide node by node, and keep the target's law exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import draws, trees
from specjax.types import Array, Draft, Noise, Verdict
from specjax.verify import parts


def rejection(noise: Noise, draft: Draft, log_p: Array) -> Verdict:
  """Speculative sampling: keeps x with probability min(1, p(x) / q(x)).

  What fails is replaced by a draw from (p - q)+ normalised; where siblings are
  left, that residual is first offered to the next of them, whose own law is
  what it was really drawn from, given its earlier siblings. After the last
  node of a path one more token is drawn from p. Point masses are the case q =
  one-hot. The output law is exactly p. (Leviathan et al. 2023, arXiv
  2211.17192, Algorithm 1; Chen et al. 2023, arXiv 2302.01318, Algorithm 2;
  siblings: Miao et al. 2023, arXiv 2305.09781; without replacement: Jeon et
  al. 2024, arXiv 2402.14160, and Chen et al. 2024, arXiv 2402.12374.)

  Args:
    noise: `log_u` is consumed, one uniform per node.
    draft: a chain, or a tree of any siblings but coupled ones.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.

  Returns:
    The verdict.

  Raises:
    ValueError: at trace time, for coupled siblings.
  """
  parts.require('rejection', draft, parts.UNCOUPLED, chain=False)
  return reject(noise, draft, log_p, 0.0)


def k_seq(noise: Noise, draft: Draft, log_p: Array) -> Verdict:
  """Keeps one of k i.i.d. siblings: min(1, p(x) / (rho q(x))) for each in turn.

  rho is the least number for which what is left of p after k such tests is not
  negative; where all of them fail, that is drawn from. The output law is
  exactly p, and at least 1 - 1/e of what the best coupling accepts is accepted.
  (SpecTr: Sun et al. 2023, arXiv 2310.15141.)

  Args:
    noise: `log_u` is consumed, one uniform per node.
    draft: a chain, or a tree of i.i.d. siblings, of which a node's k is the
      number of valid ones. An equal sibling that was merged is still a draw.
      Point masses are verified as by `rejection`.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.

  Returns:
    The verdict.

  Raises:
    ValueError: at trace time, for other siblings.
  """
  parts.require('k_seq', draft, ('single', 'iid', 'fixed'), chain=False)
  if draft.logits is None:
    return reject(noise, draft, log_p, 0.0)
  n, dtype = draft.tokens.shape[0], log_p.dtype
  if n == 0:
    return parts.nothing(log_p)
  valid, parents = parts.valid(draft), parts.parents(draft)
  children = (parents == jnp.arange(n + 1)[:, None]) & valid
  k = children.sum(-1)
  logits = draft.logits[jnp.argmax(children, -1)].astype(dtype)
  log_q = jax.nn.log_softmax(logits)  # [N + 1, V] of each row's children
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  rho, beta, kept = jax.vmap(_least_rho)(p, q, k)
  x = draft.tokens
  log_alpha = parts.accept_rate(
    log_p[parents, x] - jnp.log(rho)[parents], log_q[parents, x]
  )
  passed = parts.passes(noise.log_u, log_alpha)

  def test(i, carry):
    row, accepted, tested, ok = carry
    here = valid[i] & (parents[i] == row)
    ok = ok.at[i].set(here & passed[i])
    # What hangs off equal siblings hangs off the first of them.
    same = jnp.argmax(children[row] & (x == x[i])).astype(jnp.int32)
    return (
      jnp.where(ok[i], same + 1, row).astype(jnp.int32),
      accepted.at[same].set(accepted[same] | ok[i]),
      tested.at[i].set(here),
      ok,
    )

  none = jnp.zeros(n, bool)
  row, accepted, tested, ok = jax.lax.fori_loop(
    0, n, test, (jnp.zeros((), jnp.int32), none, none, none)
  )
  left = p[row] - jnp.minimum(q[row], p[row] / rho[row]) * (
    kept[row] / jnp.where(beta[row] > 0, beta[row], 1)
  )
  left = jnp.log(jnp.maximum(left, 0))
  residual, empty = parts.normalised(left, log_p[row])
  law = jnp.where(k[row] > 0, residual, log_p[row])
  outcomes = parts.outcomes(tested, ok, log_alpha)
  nan = (tested & jnp.isnan(log_q[parents, x])).any()
  fault = parts.fault(log_p, accepted, law, nan, (k[row] > 0) & empty)
  return Verdict(accepted, law, *outcomes, fault)


def sampler_match(noise: Noise, draft: Draft, log_p: Array) -> Verdict:
  """Draws the target's own token at each depth; goes on where the draft has it.

  Exact whatever the draft's law, which it never reads: the output is the
  stream that plain decoding under this rule draws with the same keys, token for
  token, given the same `log_p`. It accepts less than `rejection`: for one
  sampled node, sum of p q instead of min(p, q), unless the draft is coupled to
  the same keys. That takes Gumbel-max, so the rule draws the token that ends
  the round itself.

  Args:
    noise: `draws` is consumed.
    draft: any chain or tree.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.

  Returns:
    The verdict; its `law` is a point mass. It makes no accept test.
  """
  n = draft.tokens.shape[0]
  valid, parents = parts.valid(draft), parts.parents(draft)
  depth = trees.depths(parts.ancestors(draft))
  wanted = jax.vmap(draws.gumbel)(noise.draws[depth], log_p)
  matching = valid & (draft.tokens == wanted[parents])

  def follow(i, carry):
    row, accepted = carry
    ok = matching[i] & (parents[i] == row)
    return jnp.where(ok, i + 1, row).astype(jnp.int32), accepted.at[i].set(ok)

  row, accepted = jnp.zeros((), jnp.int32), jnp.zeros(n, bool)
  if n:  # or there is nothing that could be traced
    row, accepted = jax.lax.fori_loop(0, n, follow, (row, accepted))
  no, drawn = jnp.array(False), jnp.arange(log_p.shape[1]) == wanted[row]
  law = jnp.where(drawn, 0.0, -jnp.inf).astype(log_p.dtype)
  fault = parts.fault(log_p, accepted, law, no, no)
  return Verdict(accepted, law, *parts.untested(log_p), fault)


def reject(noise, draft, log_p, log_factor: float | Array) -> Verdict:
  """`rejection` with q multiplied by a factor in the tests alone."""
  if not draft.tokens.shape[0]:
    return parts.nothing(log_p)
  if draft.parents is None:
    return _reject_chain(noise, draft, log_p, log_factor)
  return _reject_tree(noise, draft, log_p, log_factor)


def _reject_chain(noise, draft, log_p, log_factor) -> Verdict:
  """All tests at once, and one residual."""
  n, x, valid = log_p.shape[0] - 1, draft.tokens, parts.valid(draft)
  log_px = parts.at(log_p[:n], x)
  log_q, log_qx = parts.laws(draft, log_p.dtype)
  log_alpha = parts.accept_rate(log_px, log_qx + log_factor)
  passed = parts.passes(noise.log_u, log_alpha) & valid
  accepted = jnp.cumprod(passed).astype(bool)
  count = accepted.sum(dtype=jnp.int32)
  tested = (jnp.arange(n) <= count) & valid
  rejected = tested & ~accepted  # at most one node
  row = jnp.minimum(count, n - 1)
  gap = parts.excess(log_p[row], None if log_q is None else log_q[row], x[row])
  residual, empty = parts.normalised(gap, log_p[row])
  law = jnp.where(rejected.any(), residual, log_p[count])
  outcomes = parts.outcomes(tested, accepted, log_alpha)
  nan = (rejected & jnp.isnan(log_qx)).any()
  fault = parts.fault(log_p, accepted, law, nan, rejected.any() & empty)
  return Verdict(accepted, law, *outcomes, fault)


def _reject_tree(noise, draft, log_p, log_factor) -> Verdict:
  """Node by node, with what is left of p at the node that was reached."""
  n = draft.tokens.shape[0]
  valid, parents = parts.valid(draft), parts.parents(draft)

  def test(i, carry):
    row, law, accepted, tested, log_tests, nan, empty = carry
    here = valid[i] & (parents[i] == row)
    x, log_q = draft.tokens[i], parts.law(draft, i, log_p.dtype)
    log_qx = jnp.zeros((), log_p.dtype) if log_q is None else log_q[x]
    log_alpha = parts.accept_rate(law[x], log_qx + log_factor)
    ok = here & parts.passes(noise.log_u[i], log_alpha)
    rest, none = parts.normalised(parts.excess(law, log_q, x), law)
    failed = here & ~ok
    made, log_test = parts.outcomes(here, ok, log_alpha)
    return (
      jnp.where(ok, i + 1, row).astype(jnp.int32),
      jnp.where(ok, log_p[i + 1], jnp.where(failed, rest, law)),
      accepted.at[i].set(ok),
      tested.at[i].set(made),
      log_tests.at[i].set(log_test),
      nan | (failed & jnp.isnan(log_qx)),
      # A residual that the next sibling was offered counts as well.
      jnp.where(ok, False, empty | (failed & none)),
    )

  start = (
    jnp.zeros((), jnp.int32),
    log_p[0],
    jnp.zeros(n, bool),
    *parts.untested(log_p),
    jnp.array(False),
    jnp.array(False),
  )
  _, law, accepted, *outcomes, nan, empty = jax.lax.fori_loop(0, n, test, start)
  fault = parts.fault(log_p, accepted, law, nan, empty)
  return Verdict(accepted, law, *outcomes, fault)


def _least_rho(p: Array, q: Array, k: Array) -> tuple[Array, Array, Array]:
  """rho, sum of min(p / rho, q), and the probability that a test passes.

  Bisection that ends above the root: a larger rho is still exact, a smaller one
  would ask for more than p.
  """

  def rates(rho):
    beta = jnp.minimum(p / rho, q).sum()
    return beta, -jnp.expm1(k * jnp.log1p(-jnp.minimum(beta, 1)))

  def halve(_, ends):
    low, high = ends
    middle = (low + high) / 2
    beta, kept = rates(middle)
    enough = kept <= middle * beta
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  one = jnp.ones((), p.dtype)
  most = jnp.maximum(k.astype(p.dtype), one)
  steps = jnp.finfo(p.dtype).nmant + 2
  _, rho = jax.lax.fori_loop(0, steps, halve, (one, most))
  return rho, *rates(rho)

"""Verification rules: how much of a draft to keep, and what follows it.

A rule is a pure function of one sequence, `(Noise, Draft, log_p [N + 1, V]) ->
Verdict`. Row i of `log_p` is the target's law after the path that ends in node
i - 1 (row 0: after the pending token), so a draft of N tokens brings N + 1
rows. A rule returns the *law* of the token that ends the round and never the
token; `decode.step` draws it, in one place.

Everything is in log space and without epsilons: a token is accepted iff
`log u <= log p - log q` with u in (0, 1], a token with p = 0 never, and one
with p > 0 = q always.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import draws
from specjax.types import Array, Draft, Noise, Verdict

# Faults, as bits of `Verdict.fault`.
EMPTY_RESIDUAL = 1  # rejected although rounding left no p above q; p was used
NAN = 2  # a law that the rule needed is NaN


def rejection(noise: Noise, draft: Draft, log_p: Array) -> Verdict:
  """Speculative sampling: keeps x with probability min(1, p(x) / q(x)).

  The first token that fails is replaced by a draw from (p - q)+ normalised; if
  none fails one more is drawn from the last row of p. Point masses are the case
  q = one-hot. The output law is exactly p. (Leviathan et al. 2023, arXiv
  2211.17192, Algorithm 1; Chen et al. 2023, arXiv 2302.01318, Algorithm 2.)

  Args:
    noise: `log_u` is consumed, one uniform per node.
    draft: a chain, sampled ('single') or deterministic ('fixed').
    log_p: `[N + 1, V]` target log-probabilities, after the warp.

  Returns:
    The verdict.

  Raises:
    ValueError: at trace time, for a draft that is not a chain.
  """
  _require_chain('rejection', draft)
  n, vocab = log_p.shape[0] - 1, log_p.shape[1]
  if draft.logits is None:
    point = draft.tokens[:, None] == jnp.arange(vocab)
    log_q = jnp.where(point, 0.0, -jnp.inf).astype(log_p.dtype)
  else:
    log_q = jax.nn.log_softmax(draft.logits.astype(log_p.dtype))
  log_px, log_qx = _at(log_p[:n], draft.tokens), _at(log_q, draft.tokens)
  # p = q = 0 gives NaN here, which no comparison accepts.
  log_alpha = jnp.where(
    log_px > -jnp.inf, jnp.minimum(log_px - log_qx, 0.0), -jnp.inf
  )
  passed = (noise.log_u <= log_alpha) & (log_px > -jnp.inf)
  accepted, count, tested = _prefix(passed, draft)
  # Where p = 0 the uniform decides nothing: that is no test.
  log_tests = _log_tests(tested & (log_alpha > -jnp.inf), accepted, log_alpha)

  rejected = tested & ~accepted  # at most one node
  if n == 0:
    residual, empty = log_p[0], jnp.array(False)
  else:
    row = jnp.minimum(count, n - 1)
    residual, empty = _residual(log_p[row], log_q[row])
  law = jnp.where(rejected.any(), residual, log_p[count])
  # log_softmax makes a row all NaN or clean, so one column tells.
  broken = jnp.isnan(jnp.where(jnp.arange(n + 1) <= count, log_p[:, 0], 0.0))
  broken = broken.any() | (rejected & jnp.isnan(log_qx)).any()
  fault = EMPTY_RESIDUAL * (rejected.any() & empty) + NAN * broken
  return Verdict(accepted, law, log_tests, fault.astype(jnp.int32))


def sampler_match(noise: Noise, draft: Draft, log_p: Array) -> Verdict:
  """Draws the target's own token at each position; keeps the draft's if equal.

  Exact whatever the draft's law, which it never reads: the output is the
  stream that plain sampling draws with the same keys, token for token. It
  accepts less than `rejection`: sum of p q instead of min(p, q) for a sampled
  draft.

  Args:
    noise: `draws` is consumed.
    draft: any chain.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.

  Returns:
    The verdict; its `law` is a row of `log_p`, to be drawn from with the key of
    its position. `log_tests` are the probabilities of the matches.

  Raises:
    ValueError: at trace time, for a draft that is not a chain.
  """
  _require_chain('sampler_match', draft)
  n = log_p.shape[0] - 1
  wanted = jax.vmap(draws.gumbel)(noise.draws[:n], log_p[:n])
  accepted, count, tested = _prefix(wanted == draft.tokens, draft)
  log_tests = _log_tests(tested, accepted, _at(log_p[:n], draft.tokens))
  broken = jnp.isnan(jnp.where(jnp.arange(n + 1) <= count, log_p[:, 0], 0.0))
  fault = (NAN * broken.any()).astype(jnp.int32)
  return Verdict(accepted, log_p[count], log_tests, fault)


def _require_chain(rule: str, draft: Draft):
  if draft.parents is not None or draft.siblings not in ('single', 'fixed'):
    raise ValueError(
      f'{rule} verifies chains: got siblings={draft.siblings!r}'
      f' with {"no " if draft.parents is None else ""}parents'
    )


def _at(rows: Array, tokens: Array) -> Array:
  """`rows[i, tokens[i]]`, `[N]`."""
  return jnp.take_along_axis(rows, tokens[:, None], axis=-1)[:, 0]


def _prefix(passed: Array, draft: Draft) -> tuple[Array, Array, Array]:
  """The accepted prefix, its length, and which accept tests were made.

  An invalid node ends the draft without a test.
  """
  valid = jnp.ones_like(passed) if draft.valid is None else draft.valid
  accepted = jnp.cumprod(passed & valid).astype(bool)
  count = accepted.sum(dtype=jnp.int32)
  tested = (jnp.arange(passed.shape[0]) <= count) & valid
  return accepted, count, tested


def _log_tests(tested: Array, accepted: Array, log_alpha: Array) -> Array:
  outcome = jnp.where(accepted, log_alpha, jnp.log1p(-jnp.exp(log_alpha)))
  return jnp.where(tested, outcome, jnp.log(0.5).astype(log_alpha.dtype))


def _residual(log_p: Array, log_q: Array) -> tuple[Array, Array]:
  """Log of (p - q)+ normalised, or `log_p` if that is empty, and whether so."""
  gap = log_p + jnp.log1p(-jnp.exp(log_q - log_p))
  gap = jnp.where(log_p > log_q, gap, -jnp.inf)
  empty = jnp.max(gap) == -jnp.inf
  return jnp.where(empty, log_p, jax.nn.log_softmax(gap)), empty

"""What the rules have in common."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.types import Array, Draft, Verdict

# Faults, as bits of `Verdict.fault`.
EMPTY_RESIDUAL = 1  # rejected although rounding left no p above q; p was used
NAN = 2  # a law that the rule needed is NaN

UNCOUPLED = 'single', 'iid', 'distinct', 'independent', 'fixed'


def require(rule: str, draft: Draft, siblings: tuple[str, ...], chain: bool):
  """Refuses a draft that a rule is not meant for.

  Args:
    rule: its name.
    draft: what it was given.
    siblings: the kinds it accepts.
    chain: whether it must be a chain.

  Raises:
    ValueError: at trace time.
  """
  if chain and draft.parents is not None:
    raise ValueError(f'{rule} verifies chains: this draft has parents')
  if draft.siblings not in siblings:
    raise ValueError(
      f'{rule} is not made for siblings={draft.siblings!r}: it takes'
      f' {", ".join(map(repr, siblings))}'
    )


def valid(draft: Draft) -> Array:
  """`[N]` bool."""
  if draft.valid is None:
    return jnp.ones(draft.tokens.shape, bool)
  return draft.valid


def parents(draft: Draft) -> Array:
  """`[N]` block rows of the nodes' parents: 0 is the pending token."""
  if draft.parents is None:
    return jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
  return draft.parents.astype(jnp.int32) + 1


def law(draft: Draft, i: Array, dtype) -> Array | None:
  """`[V]` log-probabilities that node i was drawn from; None: a point mass."""
  if draft.logits is None:
    return None
  return jax.nn.log_softmax(draft.logits[i].astype(dtype))


def laws(draft: Draft, dtype) -> tuple[Array | None, Array]:
  """`law` of all nodes, `[N, V]` or None, and `[N]` log q of their tokens."""
  if draft.logits is None:
    return None, jnp.zeros(draft.tokens.shape, dtype)
  log_q = jax.nn.log_softmax(draft.logits.astype(dtype))
  return log_q, at(log_q, draft.tokens)


def at(rows: Array, tokens: Array) -> Array:
  """`rows[..., i, tokens[..., i]]`."""
  return jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]


def accept_rate(log_px: Array, log_qx: Array | float) -> Array:
  """Log of min(1, p / q); -inf where p = 0, whatever q is, NaN where one is."""
  # p = q = 0 gives NaN here, which is not looked at.
  ratio = jnp.minimum(log_px - log_qx, 0.0)
  return jnp.where(log_px == -jnp.inf, -jnp.inf, ratio)


def passes(log_u: Array, log_alpha: Array) -> Array:
  """Whether tests pass: never at -inf or NaN, even where `log_u` is -inf."""
  return (log_u <= log_alpha) & (log_alpha > -jnp.inf)


def excess(log_p: Array, log_q: Array | None, token: Array) -> Array:
  """Log of (p - q)+, not normalised.

  Args:
    log_p: `[..., V]`; need not be normalised.
    log_q: `[..., V]`, or None for a point mass on `token`.
    token: `[...]`.
  """
  if log_q is None:
    ids = jnp.arange(log_p.shape[-1])
    return jnp.where(ids == token[..., None], -jnp.inf, log_p)
  gap = log_p + jnp.log1p(-jnp.exp(log_q - log_p))
  # This way round a NaN stays one, and does not look like an empty residual.
  return jnp.where(log_p <= log_q, -jnp.inf, gap)


def normalised(gap: Array, log_p: Array) -> tuple[Array, Array]:
  """`gap` normalised, or `log_p` if it is empty, and whether it is; `[V]`."""
  empty = jnp.max(gap) == -jnp.inf
  return jnp.where(empty, log_p, jax.nn.log_softmax(gap)), empty


def outcomes(
  tested: Array, passed: Array, log_alpha: Array
) -> tuple[Array, Array]:
  """`Verdict.tested` and `log_tests`; one that could not pass was none."""
  tested &= log_alpha > -jnp.inf
  outcome = jnp.where(passed, log_alpha, jnp.log1p(-jnp.exp(log_alpha)))
  return tested, jnp.where(tested, outcome, 0.0)


def untested(log_p: Array) -> tuple[Array, Array]:
  """`Verdict.tested` and `log_tests` of a rule that makes no test."""
  n = log_p.shape[0] - 1
  return jnp.zeros(n, bool), jnp.zeros(n, log_p.dtype)


def nothing(log_p: Array) -> Verdict:
  """The verdict on an empty draft."""
  none, no = jnp.zeros(0, bool), jnp.array(False)
  fault_bits = fault(log_p, none, log_p[0], no, no)
  return Verdict(none, log_p[0], *untested(log_p), fault_bits)


def ancestors(draft: Draft) -> Array:
  """`[N + 1, N + 1]` bool: by block row, the rows of its path."""
  block = draft.parents
  if block is not None:
    block = trees.block_parents(block)[None]
  return trees.ancestors(block, draft.tokens.shape[0] + 1)[0]


def path(draft: Draft, row: Array) -> Array:
  """`[N]` bool: the nodes from the root to block row `row`."""
  n = draft.tokens.shape[0]
  if draft.parents is None:
    return jnp.arange(n) < row
  return ancestors(draft)[row, 1:]


def fault(
  log_p: Array, accepted: Array, law: Array, nan: Array, empty: Array
) -> Array:
  """`Verdict.fault`.

  Args:
    log_p: `[N + 1, V]`.
    accepted: `[N]` path, whose rows and the root's were needed.
    law: `[V]` of what follows.
    nan: whether anything else that was needed was NaN.
    empty: whether a residual was empty.
  """
  needed = jnp.concatenate([jnp.ones(1, bool), accepted])
  # log_softmax makes a row all NaN or clean, so one column tells.
  broken = jnp.isnan(jnp.where(needed, log_p[:, 0], 0.0)).any()
  broken |= jnp.isnan(law[0]) | nan
  return (EMPTY_RESIDUAL * empty + NAN * broken).astype(jnp.int32)

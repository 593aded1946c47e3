"""Lossy rules: they accept more than is lossless, and change the output law.

They are here to be compared with. Every report that uses one says so.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax import trees
from specjax.types import Array, Draft, Noise, Verdict
from specjax.verify import parts
from specjax.verify.exact import reject


def typical(
  noise: Noise,
  draft: Draft,
  log_p: Array,
  *,
  epsilon: float = 0.09,
  delta: float = 0.3,
) -> Verdict:
  """LOSSY. Typical acceptance: keeps x if p(x) > min(epsilon, delta e^-H(p)).

  Deterministic, so likely tokens come out too often. The longest accepted path
  is kept, and one more token drawn from p behind it. (Medusa: Cai et al. 2024,
  arXiv 2401.10774, section 2.3.)

  Args:
    noise: not used.
    draft: any chain or tree but a coupled one.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.
    epsilon: a probability that is always enough.
    delta: scales the bound where the entropy H is high.

  Returns:
    The verdict; it makes no accept test.
  """
  parts.require('typical', draft, parts.UNCOUPLED, chain=False)
  p = jnp.exp(log_p)
  entropy = -jnp.sum(p * jnp.where(p > 0, log_p, 0), -1)
  bound = jnp.minimum(jnp.log(epsilon), jnp.log(delta) - entropy)
  parents = parts.parents(draft)
  ok = log_p[parents, draft.tokens] > bound[parents]
  return _longest(draft, log_p, ok)


def top_k(noise: Noise, draft: Draft, log_p: Array, *, k: int = 2) -> Verdict:
  """LOSSY. Keeps x if it is among the target's k likeliest tokens.

  (Stern et al. 2018, arXiv 1811.03115, section 5.1.)

  Args:
    noise: not used.
    draft: any chain or tree but a coupled one.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.
    k: how many.

  Returns:
    The verdict; it makes no accept test.
  """
  parts.require('top_k', draft, parts.UNCOUPLED, chain=False)
  rows = log_p[parts.parents(draft)]
  log_px = parts.at(rows, draft.tokens)
  # Counting needs no sort of the vocabulary.
  above = (rows > log_px[:, None]).sum(-1)
  return _longest(draft, log_p, (above < k) & (log_px > -jnp.inf))


def distance(
  noise: Noise, draft: Draft, log_p: Array, *, epsilon: float = 2.0
) -> Verdict:
  """LOSSY. Keeps x if its id is within epsilon of the target's likeliest.

  Meant for vocabularies whose ids are magnitudes, such as the intensities of
  pixels. (Stern et al. 2018, arXiv 1811.03115, section 5.2.)

  Args:
    noise: not used.
    draft: any chain or tree but a coupled one.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.
    epsilon: the largest distance of ids.

  Returns:
    The verdict; it makes no accept test.
  """
  parts.require('distance', draft, parts.UNCOUPLED, chain=False)
  best = jnp.argmax(log_p, -1)[parts.parents(draft)]
  return _longest(draft, log_p, jnp.abs(draft.tokens - best) <= epsilon)


def lenience(
  noise: Noise, draft: Draft, log_p: Array, *, factor: float = 0.5
) -> Verdict:
  """LOSSY. `rejection` with tests that pass too often, min(1, p / (l q)).

  Nothing comes out with more than p(x) / l of probability by acceptance. What
  fails is replaced as by `rejection`. (Leviathan et al. 2023, arXiv 2211.17192,
  appendix A.5, on lenience.)

  Args:
    noise: `log_u` is consumed, one uniform per node.
    draft: as for `rejection`.
    log_p: `[N + 1, V]` target log-probabilities, after the warp.
    factor: l in (0, 1]; 1 is lossless.

  Returns:
    The verdict.
  """
  parts.require('lenience', draft, parts.UNCOUPLED, chain=False)
  return reject(noise, draft, log_p, jnp.log(factor))


def _longest(draft: Draft, log_p: Array, ok: Array) -> Verdict:
  """Keeps the longest path of nodes that are all `ok`, the first of equals."""
  ok &= parts.valid(draft)
  above = parts.ancestors(draft)
  ok = jnp.concatenate([jnp.ones(1, bool), ok])
  sound = (~above | ok).all(-1)
  row = jnp.argmax(jnp.where(sound, trees.depths(above), -1))
  accepted = above[row, 1:]
  # Every law behind such a path was looked at, not only that of the longest.
  nan = (sound & jnp.isnan(log_p[:, 0])).any()
  law, no = log_p[row], jnp.array(False)
  fault = parts.fault(log_p, accepted, law, nan, no)
  return Verdict(accepted, law, *parts.untested(log_p), fault)

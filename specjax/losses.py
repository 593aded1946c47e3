"""Losses of one position: unreduced, in float32, with finite gradients.

A loss maps logits of the draft `[..., V]` and what the target says to `[...]`.
A logit of -inf means that the draft cannot say this token. To reduce, take
`weighted_sum`, add both of its numbers over micro-batches and devices, and
divide once: a mean of means weighs a token by the company it is in.

A divergence is a loss `(logits [..., V], target_log_p [..., V]) -> [...]` of
the draft's law q and the target's law p, of which -inf is allowed as well:

| divergence | is | most |
|---|---|---|
| `forward_kl` | KL(p || q) | inf |
| `reverse_kl` | KL(q || p) | inf |
| `jsd` | β KL(p || m) + (1 - β) KL(q || m), m = β p + (1 - β) q | log 2 |
| `total_variation` | 1 - α, with α = Σ min(p, q) the acceptance rate | 1 |
| `neg_log_acceptance` | -log α | 87 |
| `hybrid` | λ KL(p || q) + (1 - λ) TV, λ = e^(-η α) | inf |

A KL renormalises its first law on the support of the second, since it would be
infinite otherwise; the others take both laws whole. Each is 0 where p = q. The
numbers β and η are keyword arguments and may be traced; `loss.beta` and
`loss.eta` of a configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import names
from specjax.types import Array

Divergence = Callable[[Array, Array], Array]


def cross_entropy(logits: Array, labels: Array) -> Array:
  """Surprise at a token, in nats.

  Args:
    logits: `[..., V]` of the draft, any float dtype.
    labels: `[...]` integers in `[0, V)`.

  Returns:
    `[...]` float32, `-log q(label)`; inf where the logit of the label is -inf,
    with the finite gradient `q - onehot(label)` there too.
  """
  # Upcast first: over a large vocabulary the floor of bfloat16 is about 2e-2.
  log_q = jax.nn.log_softmax(logits.astype(jnp.float32))
  return -jnp.take_along_axis(log_q, labels[..., None], -1)[..., 0]


def forward_kl(logits: Array, target_log_p: Array) -> Array:
  """KL(p || q) in nats, the target p renormalised on the support of q.

  Args:
    logits: `[..., V]` of the draft, any float dtype.
    target_log_p: `[..., V]` log-probabilities of the target; -inf is allowed.

  Returns:
    `[...]` float32; 0 where p has no mass on the support of q.
  """
  log_p, log_q = _laws(logits, target_log_p)
  shared = (log_q > -jnp.inf) & (log_p > -jnp.inf)
  # Over nothing a softmax is NaN, so there it is taken over everything.
  kept = shared | ~shared.any(-1, keepdims=True)
  log_p = jax.nn.log_softmax(log_p, where=kept)
  return _expected_log_ratio(jnp.where(shared, log_p, -jnp.inf), log_q)


def reverse_kl(logits: Array, target_log_p: Array) -> Array:
  """KL(q || p) in nats, the draft q renormalised on the support of p.

  So it says nothing about the mass of q outside, and where p is one-hot, as at
  temperature 0, nothing at all. (Gu et al. 2023, arXiv 2306.08543.)

  Args:
    logits: `[..., V]` of the draft, any float dtype.
    target_log_p: `[..., V]` log-probabilities of the target; -inf is allowed.

  Returns:
    `[...]` float32; 0 where q has no mass on the support of p.
  """
  log_p, log_q = _laws(logits, target_log_p)
  return forward_kl(log_p, log_q)


def jsd(logits: Array, target_log_p: Array, beta: float | Array = 0.5) -> Array:
  """Generalised Jensen-Shannon divergence in nats, of whole laws.

  Over β it approaches KL(p || q) as β goes to 0, over 1 - β it approaches
  KL(q || p) as β goes to 1. (Agarwal et al. 2024, arXiv 2306.13649, eq. 1.)

  Args:
    logits: `[..., V]` of the draft, any float dtype.
    target_log_p: `[..., V]` log-probabilities of the target; -inf is allowed.
    beta: the share of p in the mixture, inside (0, 1).

  Returns:
    `[...]` float32, at most the entropy of a coin of bias β.
  """
  log_p, log_q = _laws(logits, target_log_p)
  log_m = _logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
  of_p = _expected_log_ratio(log_p, log_m)
  of_q = _expected_log_ratio(log_q, log_m)
  return beta * of_p + (1 - beta) * of_q


def total_variation(logits: Array, target_log_p: Array) -> Array:
  """½ Σ |p - q| = 1 - α, of whole laws.

  Its gradient vanishes where q is far from p.

  Args:
    logits: `[..., V]` of the draft, any float dtype.
    target_log_p: `[..., V]` log-probabilities of the target; -inf is allowed.

  Returns:
    `[...]` float32 in [0, 1].
  """
  log_p, log_q = _laws(logits, target_log_p)
  return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), -1)


def neg_log_acceptance(logits: Array, target_log_p: Array) -> Array:
  """-log α, with α = Σ min(p, q) of whole laws; a one-hot p makes it CE.

  Its gradient is that of total variation over α, which does not vanish.

  Args:
    logits: `[..., V]` of the draft, any float dtype.
    target_log_p: `[..., V]` log-probabilities of the target; -inf is allowed.

  Returns:
    `[...]` float32; where nothing is shared, -log of the smallest float32.
  """
  common = jnp.minimum(*_laws(logits, target_log_p))
  some = (common > -jnp.inf).any(-1)
  # The log of nothing is replaced before it is taken: its gradient is NaN.
  common = jnp.where(some[..., None], common, 0.0)
  nothing = jnp.log(jnp.finfo(jnp.float32).tiny)
  log_alpha = jax.nn.logsumexp(common, -1)
  # Laws that are equal sum to one only within rounding.
  return -jnp.where(some, jnp.minimum(log_alpha, 0.0), nothing)


def hybrid(
  logits: Array, target_log_p: Array, eta: float | Array = 3.0
) -> Array:
  """λ KL(p || q) + (1 - λ) TV: KL where q is far from p, TV where it is near.

  λ = e^(-η α) position by position, and no gradient goes through it.

  Args:
    logits: `[..., V]` of the draft, any float dtype.
    target_log_p: `[..., V]` log-probabilities of the target; -inf is allowed.
    eta: η, 0 for KL alone.

  Returns:
    `[...]` float32.
  """
  tv = total_variation(logits, target_log_p)
  share = jnp.exp(-eta * jax.lax.stop_gradient(1 - tv))
  return share * forward_kl(logits, target_log_p) + (1 - share) * tv


DIVERGENCES = {
  divergence.__name__: divergence
  for divergence in (
    forward_kl,
    reverse_kl,
    jsd,
    total_variation,
    neg_log_acceptance,
    hybrid,
  )
}


# The keyword arguments that a configuration gives them. A function of your own
# keeps its defaults.
NUMBERS = {'jsd': ('beta',), 'hybrid': ('eta',)}


def find(name: str, **numbers: float) -> Divergence:
  """The divergence of a name.

  Args:
    name: a key of `DIVERGENCES`, or 'module:function' for one of your own.
    **numbers: values of its keyword arguments, of `NUMBERS`.

  Raises:
    ValueError: there is none.
  """
  divergence = names.function(name, DIVERGENCES, 'divergence')
  return functools.partial(divergence, **numbers) if numbers else divergence


def merges(divergence: Divergence) -> bool:
  """Whether it is one of `DIVERGENCES`, whatever its numbers.

  To these, tokens that the draft cannot say are as good as one token.
  """
  function = getattr(divergence, 'func', divergence)
  return function in DIVERGENCES.values()


def expected_length(surprise: Array, valid: Array, k: int) -> Array:
  """Minus the expected number of accepted tokens of a draft, at each start.

  -Σ_{i≤k} Π_{j≤i} α_j over the k positions from there on, where α = e^-surprise
  is the acceptance rate, as of `neg_log_acceptance`. Where the text ends sooner
  the draft is shorter.

  Args:
    surprise: `[B, T]` nats, 0 or more.
    valid: `[B, T]` bool; nothing passes where it is false.
    k: draft length, at least 1.

  Returns:
    `[B, T]` float32 in [-k, 0].
  """
  return -survival(jnp.where(valid, -surprise, -jnp.inf), k).sum(0)


def survival(log_pass: Array, k: int) -> Array:
  """How probably a draft survives to each depth, at each start.

  Args:
    log_pass: `[B, T]` log-probability that each token passes; -inf is allowed,
      and stands behind the end.
    k: draft length, at least 1.

  Returns:
    `[K, B, T]`, running products over the depth.
  """
  size = log_pass.shape[1]
  padded = jnp.pad(log_pass, ((0, 0), (0, k - 1)), constant_values=-jnp.inf)
  # Shifted copies and not differences of one running sum: that would be
  # -inf - -inf past the first token which the draft cannot say.
  ahead = jnp.stack([padded[:, j : j + size] for j in range(k)])
  return jnp.exp(jnp.cumsum(ahead, 0))


def weighted_sum(values: Array, weight: Array) -> tuple[Array, Array]:
  """The two numbers that a mean over tokens is made of.

  Args:
    values: any shape; what stands where `weight` is 0 is not looked at.
    weight: same shape, not negative.

  Returns:
    The sum of `weight * values`, and the sum of `weight`.
  """
  weight = weight.astype(jnp.float32)
  # Not a bare product: padding may hold inf, and 0 * inf is NaN.
  kept = jnp.where(weight > 0, values, 0).astype(jnp.float32)
  return jnp.sum(kept * weight), jnp.sum(weight)


def _laws(logits: Array, target_log_p: Array) -> tuple[Array, Array]:
  """log p and log q in float32."""
  log_q = jax.nn.log_softmax(logits.astype(jnp.float32))
  return target_log_p.astype(jnp.float32), log_q


def _expected_log_ratio(log_a: Array, log_b: Array) -> Array:
  """Σ a (log a - log b), the support of a inside that of b."""
  inside = log_a > -jnp.inf
  # Infinities are replaced before they are subtracted: a NaN made here would
  # not be used, but it would stop `jax_debug_nans`.
  ratio = jnp.where(inside, log_a, 0) - jnp.where(inside, log_b, 0)
  return jnp.sum(jnp.exp(log_a) * ratio, -1)


def _logaddexp(a: Array, b: Array) -> Array:
  """log(e^a + e^b), -inf where both are."""
  some = jnp.maximum(a, b) > -jnp.inf
  total = jnp.logaddexp(jnp.where(some, a, 0.0), jnp.where(some, b, 0.0))
  return jnp.where(some, total, -jnp.inf)

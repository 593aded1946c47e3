"""Losses of one position: unreduced, in float32, with finite gradients.

A loss maps logits of the draft `[..., V]` and what the target says to `[...]`.
A logit of -inf means that the draft cannot say this token. To reduce, take
`weighted_sum`, add both of its numbers over micro-batches and devices, and
divide once: a mean of means weighs a token by the company it is in.
"""

import jax
import jax.numpy as jnp

from specjax.types import Array


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
  log_q = jax.nn.log_softmax(logits.astype(jnp.float32))
  log_p = target_log_p.astype(jnp.float32)
  shared = (log_q > -jnp.inf) & (log_p > -jnp.inf)
  log_p = jax.nn.log_softmax(log_p, where=shared)  # -inf elsewhere
  # Infinities are replaced before they are subtracted: a NaN made here would
  # not be used, but it would stop `jax_debug_nans`.
  log_ratio = jnp.where(shared, log_p, 0) - jnp.where(shared, log_q, 0)
  return jnp.sum(jnp.exp(log_p) * log_ratio, -1)


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

"""Rules with faults, to be named on a command line."""

import jax.numpy as jnp

from specjax import verify


def likeliest_last(noise, draft, log_p):
  """`rejection` that ends a round with the likeliest token, undrawn."""
  right = verify.rejection(noise, draft, log_p)
  best = jnp.arange(log_p.shape[-1]) == right.law.argmax()
  return right._replace(law=jnp.where(best, 0.0, -jnp.inf))

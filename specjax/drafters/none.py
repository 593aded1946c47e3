"""No draft: plain autoregressive decoding is the same loop, an empty tree."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import Draft, pytree


@pytree
class NoDrafter:
  """Proposes nothing and remembers nothing."""

  def init(self, target, batch, size):
    """No memory."""
    return ()

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """An empty draft."""
    empty = jnp.zeros((tokens.shape[0], 0), jnp.int32)
    return Draft(empty, siblings='fixed'), memory

  def observe(self, target, memory, block, kept, output):
    """Nothing to learn."""
    return memory

  def at(self, k: int) -> NoDrafter:
    """Itself, whatever the length."""
    return self


def build(config, target, rngs) -> NoDrafter:
  """Needs no configuration."""
  return NoDrafter()

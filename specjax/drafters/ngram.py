"""Prompt lookup: what followed the last few tokens when they last occurred."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax.types import Array, Draft, pytree


@pytree
class NGram:
  """Copies the continuation of the longest, then latest, earlier match.

  The suffix of up to `n` tokens is looked for in prompt and output alike, all
  on the device. Where not even its last `least` tokens occurred before, the
  draft is empty and the round yields one ordinary token. A small n is prompt
  lookup (Saxena 2023); a large one matches suffixes as long as they go (Oliaro
  et al. 2024, SuffixDecoding, arXiv 2411.04975, whose trees and counts of
  continuations are not here: of equally long matches the latest is taken).

  Attributes:
    k: tokens to propose.
    n: longest suffix to look for; each token costs a pass over the buffer.
    least: shortest suffix that counts. A longer one is found less often, and
      is right more often.
    sure: likewise, where a controller chooses the length. A guess costs nothing
      in a pass that is of one length anyway; there it makes the pass longer.
  """

  k: int = dataclasses.field(metadata={'static': True})
  n: int = dataclasses.field(default=3, metadata={'static': True})
  least: int = dataclasses.field(default=1, metadata={'static': True})
  sure: int = dataclasses.field(default=2, metadata={'static': True})

  def __post_init__(self):
    """Refuses a negative length, and suffixes that are none."""
    if self.k < 0:
      raise ValueError(f'the draft length k is {self.k}: at least 0')
    if not 1 <= self.least <= self.n:
      raise ValueError(
        f'suffixes of {self.least} to {self.n} tokens: from at least 1, and up'
      )

  def init(self, target, batch, size):
    """No memory: the token buffer is all it needs."""
    return ()

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """Point masses, which leave no doubt; beyond the known text invalid."""
    least = self.least
    if limit is not None:
      least = max(least, min(self.sure, self.n))
    look_up = functools.partial(self._look_up, least=least)
    copied, valid = jax.vmap(look_up)(tokens, length)
    if limit is not None:
      valid &= jnp.arange(self.k) < limit.nodes
    return Draft(copied, valid=valid, siblings='fixed'), memory

  def observe(self, target, memory, block, kept, output):
    """Nothing to learn."""
    return memory

  def at(self, k: int) -> NGram:
    """The same lookup with `k` tokens."""
    return dataclasses.replace(self, k=k)

  def _look_up(
    self, tokens: Array, length: Array, least: int
  ) -> tuple[Array, Array]:
    """What is copied, and what of it counts."""
    place = jnp.arange(tokens.shape[0])
    # A match ends before the suffix's own last token.
    matching = place < length - 1
    longest = jnp.zeros_like(place)
    for i in range(self.n):
      # The token i before each place against the one i before the end. The
      # roll wraps, so a match may not begin before the start.
      wanted = tokens[jnp.maximum(length - 1 - i, 0)]
      matching &= (jnp.roll(tokens, i) == wanted) & (place >= i)
      longest += matching
    best = jnp.argmax(longest * tokens.shape[0] + place * (longest > 0))
    follow = best + 1 + jnp.arange(self.k)
    valid = (longest[best] >= least) & (follow < length)
    follow = jnp.minimum(follow, tokens.shape[0] - 1)
    return jnp.where(valid, tokens[follow], 0), valid


def build(config, target, rngs) -> NGram:
  """Reads `k`."""
  return NGram(config['k'])

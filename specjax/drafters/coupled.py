"""A draft model that draws with the target's keys, for `sampler_match`."""

from __future__ import annotations

import jax

from specjax import draws
from specjax.drafters import model
from specjax.types import pytree


@pytree
class CoupledDrafter(model.ModelDrafter):
  """Guesses the target's own draw at each position.

  Draft and target take the Gumbel-max of their laws with the same noise, so
  they agree with probability at least (1 - TV) / (1 + TV), instead of the sum
  of p q. The draft is a function of the target's keys, so every rule that looks
  at its law would be biased: only `sampler_match` takes it. (Daliri, Musco,
  Suresh 2024, arXiv 2408.07978.)
  """

  siblings = 'coupled'

  def _draw(self, keys, length):
    fold = jax.vmap(jax.random.fold_in)

    def draw(i, law):
      return jax.vmap(draws.gumbel)(fold(keys.target, length + i), law)

    return draw


def build(config, target, rngs) -> CoupledDrafter:
  """Reads what `model` reads."""
  plain = model.build(config, target, rngs)
  return CoupledDrafter(plain.model, plain.k)

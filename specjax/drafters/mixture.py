"""Prompt lookup where it finds something, a draft model elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.types import Array, Draft, Limit, pytree, taps


class MixtureMemory(NamedTuple):
  """What the mixture knows.

  Attributes:
    model: the draft model's memory.
    copied: `[B]` bool, rows whose draft of this round is the lookup's.
  """

  model: Any
  copied: Array


@pytree
class Mixture:
  """Copies in the rows where a match is found, samples in the others.

  Where every row, those that are done too, has a match the draft model is not
  run at all; what it then has not read it catches up on when it is asked again.
  Which of the two drafts depends on the text alone, and never on what would be
  drawn.

  Attributes:
    lookup: asked first. Its `least` says how long a match is to be trusted.
    model: a drafter of chains, of the same length.
  """

  lookup: NGram
  model: ModelDrafter

  def __post_init__(self):
    """Refuses parts of different lengths."""
    if self.lookup.k != self.model.k:
      raise ValueError(
        f'the lookup drafts {self.lookup.k} tokens and the model'
        f' {self.model.k}: they need one length'
      )
    if taps(self.model):
      raise ValueError(
        "a mixture's model drafts by itself, and this one reads the target's"
        ' streams'
      )

  def init(self, target, batch, size):
    """The draft model's memory; see `ModelDrafter.init`."""
    own = self.model.init(target, batch, size)
    return MixtureMemory(own, jnp.zeros(batch, bool))

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """A chain per row, either copied or sampled."""
    k = self.model.k
    if k == 0:
      draft, own = self.model.propose(
        target, cache, memory.model, keys, tokens, length, limit
      )
      return draft, MixtureMemory(own, jnp.zeros_like(memory.copied))
    # Its `least` says what to trust, whoever chooses the length.
    lookup = dataclasses.replace(self.lookup, sure=self.lookup.least)
    found, _ = lookup.propose(target, cache, (), keys, tokens, length, limit)
    copied = found.valid[:, 0]
    nodes = k if limit is None else limit.nodes

    def go_on(i, logits):
      more = ~copied
      if limit is not None and limit.go_on is not None:
        more &= limit.go_on(i, logits)
      return more

    rest = Limit(jnp.where(copied.all(), 0, nodes), go_on)
    drawn, own = self.model.propose(
      target, cache, memory.model, keys, tokens, length, rest
    )
    if drawn.parents is not None:
      raise ValueError('a mixture is of chains: its model drafts a tree')
    # A point mass as a law, 0 at its token and -inf elsewhere, which has no
    # rounding: the tests and residuals of the rules are those of a draft
    # without logits.
    point = found.tokens[..., None] == jnp.arange(drawn.logits.shape[-1])
    point = jnp.where(point, 0.0, -jnp.inf)
    draft = Draft(
      jnp.where(copied[:, None], found.tokens, drawn.tokens),
      logits=jnp.where(copied[:, None, None], point, drawn.logits),
      valid=jnp.where(copied[:, None], found.valid, drawn.valid),
      siblings=drawn.siblings,
    )
    return draft, MixtureMemory(own, copied)

  def observe(self, target, memory, block, kept, output):
    """The model has fed a copied row's pending token, and none of its nodes."""
    root = jnp.arange(kept.shape[1]) == 0
    own = self.model.observe(
      target,
      memory.model,
      block,
      kept & (root | ~memory.copied[:, None]),
      output,
    )
    return MixtureMemory(own, jnp.zeros_like(memory.copied))

  def at(self, k: int) -> Mixture:
    """The same parts with draft length `k`."""
    return Mixture(self.lookup.at(k), self.model.at(k))


def build(config, target, rngs) -> Mixture:
  """There is none to train.

  Raises:
    ValueError: always.
  """
  raise ValueError(
    'a mixture is not trained: distil a draft of draft.drafter=model, and'
    ' decode with --drafter=mixture'
  )

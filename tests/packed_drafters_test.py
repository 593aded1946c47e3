"""Every drafter with packed weights; apart, for a process maps few programs."""

import functools

import jax
import numpy as np
import pytest
import toys
from conformance_test import PROMPTS, every, examples, rule_for, with_warp

from specjax import generation, warps

LAYERS = 2


@functools.cache
def packable():
  """A target, and examples of which weights can be packed."""

  def make(**changes):
    return toys.transformer(vocab_size=128, width=128, hidden=96, **changes)

  target = make(layers=LAYERS, tied=False)
  return target, examples(target, make(seed=1, layers=1))


@every
@pytest.mark.usefixtures('quick_compilation')
def test_it_writes_the_same_text(name, i):
  """With a target that has a head of its own; tied ones stand elsewhere."""
  target, made = packable()
  drafter = with_warp(made[name][i], warps.Temperature(0.0))
  packed = generation.pack(target, drafter, batch=len(PROMPTS))
  if jax.default_backend() == 'cpu':  # four weights of a layer, and both ends
    tiles = [leaf for leaf in jax.tree.leaves(packed[0]) if leaf.ndim == 3]
    assert len(tiles) == 4 * LAYERS + 2

  def text(target, drafter):
    return generation.generate(
      target,
      drafter,
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=12,
      warp=warps.Temperature(0.0),
      verifier=rule_for(drafter),
    )

  found, wanted = text(*packed), text(target, drafter)
  assert found.new_tokens() == wanted.new_tokens()
  for mine, theirs in zip(found.stats, wanted.stats, strict=True):
    np.testing.assert_array_equal(mine, theirs)

"""Parts of a round: a part that is made dear is the one that is found dear."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import toys

from specjax import profiling, verify, warps
from specjax.drafters.model import ModelDrafter
from specjax.drafters.none import NoDrafter
from specjax.types import pytree


def burn(x):
  """Zero, after a while."""
  size = 256
  seed = jnp.full((size, size), 1e-3) + x.astype(jnp.float32) * 1e-9
  end = jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ y), seed)
  return end.sum() * 0


@pytree
class SlowRule:
  def __call__(self, noise, draft, log_p):
    verdict = verify.rejection(noise, draft, log_p)
    return verdict._replace(law=verdict.law + burn(log_p[0, 0]))


@pytree
class SlowDrafter(ModelDrafter):
  def propose(self, *args):
    draft, memory = super().propose(*args)
    tokens = draft.tokens + burn(draft.logits[0, 0, 0]).astype(jnp.int32)
    return dataclasses.replace(draft, tokens=tokens), memory


def shares(rule, drafter):
  target = toys.transformer()
  arguments = profiling.begin(
    target,
    drafter,
    rule,
    warps.UNCHANGED,
    batch=1,
    prompt_length=4,
    context=128,
  )
  found = profiling.parts(*arguments, rate=1e9, repeats=5)
  whole = found.pop(profiling.ROUND)
  return {name: part.seconds / whole.seconds for name, part in found.items()}


@pytest.mark.slow
def test_what_is_dear_is_found_so():
  rejection = verify.as_pytree(verify.rejection)
  draft = toys.transformer(1)
  assert shares(SlowRule(), NoDrafter())['warp and rule'] > 0.5
  assert shares(rejection, NoDrafter())['warp and rule'] < 0.5
  assert shares(rejection, SlowDrafter(draft, 2))['drafting'] > 0.5
  assert shares(rejection, NoDrafter())['drafting'] == 0


@pytest.mark.slow
def test_parts_and_floors_are_what_a_clock_says():
  target, draft = toys.transformer(), toys.transformer(1)
  rule = verify.as_pytree(verify.rejection)
  sizes = {'batch': 1, 'prompt_length': 4, 'context': 60}
  arguments = profiling.begin(
    target, ModelDrafter(draft, 2), rule, warps.UNCHANGED, **sizes
  )
  now = 0.0

  def clock():  # every call of a program takes as long
    nonlocal now
    now += 1.0
    return now

  found = profiling.parts(*arguments, rate=1e3, repeats=2, clock=clock)
  for name in (profiling.ROUND, *profiling.PARTS):
    assert found[name].seconds == 0  # as long as no turns take
  weights, drafts = (
    sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    for model in (target, draft)
  )
  cache = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[5].cache.rows))
  assert found['drafting'].floor == pytest.approx(2 * drafts / 1e3)
  assert found['scoring'].floor == pytest.approx((weights + cache) / 1e3)
  floors = sum(found[name].floor for name in profiling.PARTS)
  assert found[profiling.ROUND].floor == pytest.approx(floors)
  # Of others nothing is known.
  for drafter in (NoDrafter(), toys.heads(target.config.width, 2)):
    arguments = profiling.begin(target, drafter, rule, warps.UNCHANGED, **sizes)
    found = profiling.parts(*arguments, rate=1e3, repeats=1, clock=clock)
    assert found['drafting'].floor == 0


def test_a_text_that_has_ended_has_no_rounds():
  rule = verify.as_pytree(verify.rejection)
  arguments = profiling.begin(
    toys.transformer(),
    NoDrafter(),
    rule,
    warps.UNCHANGED,
    batch=2,
    prompt_length=4,
    context=5,
  )
  with pytest.raises(ValueError, match='no round is left in 5 tokens'):
    profiling.parts(*arguments, rate=1e9, repeats=1)

"""What a round will take is known before it is run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from jax.sharding import AbstractMesh

from specjax import decode, footprint, sharding, verify, warps
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram

V, K, B, T = 150_000, 8, 32, 128


def models():
  """Narrow ones of a large vocabulary, as shapes."""

  def make():
    return [
      toys.transformer(seed, vocab_size=V, width=8, heads=2) for seed in (0, 1)
    ]

  target, draft = jax.eval_shape(make)
  return target, ModelDrafter(draft, K)


def test_the_laws_of_a_research_vocabulary():
  target, drafter = models()
  plan = footprint.plan(target, drafter, B, T)
  assert plan.target_laws == B * (K + 1) * V * 4
  assert plan.draft_laws == B * K * V * 4
  assert 0.32e9 < plan.target_laws + plan.draft_laws < 0.33e9
  assert footprint.plan(target, NGram(K), B, T).draft_laws == 0
  assert '173 MB target laws, 154 MB draft laws' in str(plan)


def test_a_mesh_divides_what_is_planned():
  target, drafter = models()
  mesh = AbstractMesh((4, 1, 2), sharding.AXES)
  whole = footprint.plan(target, drafter, B, T)
  part = footprint.plan(target, drafter, B, T, mesh)
  assert 4 * part.target_laws == whole.target_laws
  assert 4 * part.draft_laws == whole.draft_laws
  assert part.caches < whole.caches / 3.9
  assert part.models < 0.51 * whole.models  # the embedding is in two parts
  with pytest.raises(ValueError, match='batch is 30, .* 4 parts'):
    footprint.plan(target, drafter, 30, T, mesh)


def test_what_fsdp_stores_in_parts_is_gathered():
  target, drafter = models()
  whole = footprint.plan(target, drafter, B, T)
  part, both = (
    footprint.plan(target, drafter, B, T, AbstractMesh(sizes, sharding.AXES))
    for sizes in ((1, 4, 1), (1, 4, 2))
  )
  assert whole.gathered == 0 and 'gathered' not in str(whole)
  leaves = jax.tree.leaves((target, drafter))
  norms = sum(4 * np.size(x) for x in leaves if np.ndim(x) < 2)
  assert part.gathered == whole.models - norms
  assert part.models == norms + part.gathered // 4
  assert both.gathered == part.gathered // 2


@pytest.mark.slow
def test_a_plan_is_what_the_compiler_says():
  target = toys.transformer()
  drafter = ModelDrafter(toys.transformer(1), 3)
  plan = footprint.plan(target, drafter, 4, 64)
  ints = jnp.ones(4, jnp.int32)
  rows = jax.random.split(jax.random.key(0), 4)
  tokens = np.ones((4, 64), np.int32)
  state = decode.prefill(target, drafter, tokens, ints, 9 * ints, ints, rows)
  rule = verify.as_pytree(verify.rejection)

  def one(target, drafter, state):
    eos = jnp.zeros(0, jnp.int32)
    args = target, drafter, rule, warps.UNCHANGED, eos, state
    return decode.step(*args)[0]

  compiled = jax.jit(one, donate_argnums=2).lower(target, drafter, state)
  found = compiled.compile().memory_analysis()
  apart = found.argument_size_in_bytes / plan.arguments
  assert 0.99 < apart < 1.02, apart
  assert 0.99 < found.output_size_in_bytes / plan.outputs < 1.05

"""Arms are timed in turns; what is timed is what decoding does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import generation, timing
from specjax.drafters.model import ModelDrafter
from specjax.types import Block, Keys


class Clock:
  """Tells the time that the arms advance."""

  def __init__(self):
    self.now = 0.0
    self.order = []

  def __call__(self):
    return self.now

  def arm(self, name, seconds):
    def run():
      self.order.append(name)
      self.now += seconds
      return name

    return run


def test_arms_alternate_and_their_parts_are_summed():
  clock = Clock()
  arms = {
    'a': [clock.arm('a0', 1), clock.arm('a1', 2)],
    'b': [clock.arm('b0', 4), clock.arm('b1', 8)],
  }
  turns = []
  seconds, results = timing.alternate(
    arms, 2, lambda: turns.append(0), clock=clock
  )
  assert seconds == {'a': [3, 3], 'b': [12, 12]}
  assert results == {'a': ['a0', 'a1'], 'b': ['b0', 'b1']}
  # Each leads as often as the other.
  assert clock.order == ['a0', 'b0', 'b1', 'a1', 'b0', 'a0', 'a1', 'b1']
  assert len(turns) == 4


def test_arms_of_different_length_are_refused():
  with pytest.raises(ValueError, match='different numbers of parts'):
    timing.alternate({'a': [int], 'b': [int, int]}, 1)


def test_a_ratio_is_taken_within_a_repeat():
  # The machine halved its speed half way: both arms slowed, no ratio changed.
  assert timing.ratio([2, 2, 4], [1, 1, 2]) == (2, 2, 2)
  assert timing.ratio([1, 4, 3], [1, 1, 1]) == (3, 1, 4)


def test_programs_compile_together_and_keep_their_names():
  x = jnp.arange(3.0)
  lowered = {n: jax.jit(lambda x, n=n: x * n).lower(x) for n in (1.0, 2.0, 3.0)}
  turns = []
  compiled = timing.compile_all(lowered, lambda: turns.append(0))
  assert {n: f(x)[1].item() for n, f in compiled.items()} == {1: 1, 2: 2, 3: 3}
  assert len(turns) == 3


@pytest.mark.parametrize('m', [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_pass_is_extend_unembed_and_commit_at_one_place(m):
  model = toys.transformer()
  cache = model.init_cache(2, 8)._replace(length=jnp.array([2, 4]))
  tokens = jnp.arange(2 * m, dtype=jnp.int32).reshape(2, m)
  expected, expected_cache = tokens, cache
  for _ in range(2):
    output, rows = model.extend(Block(expected), cache)
    expected_cache = model.commit(cache, rows, jnp.ones((2, m), bool))
    expected = jnp.argmax(model.unembed(output.features), -1)
  after, last = jax.jit(timing.passes)(model, cache, tokens, 2)
  np.testing.assert_array_equal(last, expected)
  np.testing.assert_array_equal(after.length, cache.length)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    after.rows,
    expected_cache.rows,
  )


@pytest.mark.slow
def test_a_proposal_is_made_at_one_place_and_leaves_nothing_behind():
  target = toys.transformer()
  drafter = ModelDrafter(toys.transformer(1), 3)
  key = jax.random.key(0)
  prompts = [[1, 2, 3, 4], [5, 6]]
  state = generation.start(target, drafter, prompts, key=key, max_new_tokens=8)
  tokens = state.tokens
  last = jnp.arange(2), state.length - 1
  for i in range(2):
    fold = jax.vmap(jax.random.fold_in, (0, None))
    draft, _ = drafter.propose(
      target,
      state.cache,
      state.memory,
      Keys(fold(state.row, i), state.row),
      tokens,
      state.length,
    )
    tokens = tokens.at[last].set(draft.tokens[:, 0])
  memory, got = jax.jit(timing.proposals)(target, drafter, state, 2)
  np.testing.assert_array_equal(got, tokens)
  assert (np.asarray(got) != state.tokens).any()
  np.testing.assert_array_equal(memory.cache.length, state.length - 1)

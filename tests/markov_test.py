"""The tabular model against look-ups in its table, one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import decode, verify, warps
from specjax.models.markov import Markov
from specjax.types import Block

V, SIZE = 4, 16

forward = toys.jit(Markov.forward)
extend = toys.jit(Markov.extend)
commit = toys.jit(Markov.commit, static_argnames='chain')


def look_up(model, chain):
  """Logits after a chain; what precedes its start counts as token 0."""
  table = np.asarray(model.logits[...])
  order = table.ndim - 1
  return table[tuple([*[0] * order, *chain][-order:])]


def random_tokens(seed, *shape):
  return np.random.default_rng(seed).integers(0, V, shape, np.int32)


orders = pytest.mark.parametrize('order', [1, 2, 3])


@orders
def test_forward_is_the_table(order):
  model = toys.markov(order=order, vocab=V)
  tokens = random_tokens(0, 2, 7)
  segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 2, 2, 2, 2, 2, 0]])
  features = forward(model, tokens, segments).features
  for row, t in np.ndindex(2, 7):
    same = segments[row, : t + 1] == segments[row, t]
    chain = tokens[row, : t + 1][same]
    np.testing.assert_array_equal(features[row, t], look_up(model, chain))
  np.testing.assert_array_equal(model.unembed(features), features)


@orders
def test_blocks_of_any_size_are_the_table(order):
  model = toys.markov(order=order, vocab=V)
  cache = model.init_cache(2, SIZE)
  chains = [[], []]
  for seed, (size, *kept) in enumerate([(2, 1, 0), (3, 3, 2), (1, 0, 1)] * 2):
    tokens = random_tokens(seed, 2, size)
    output, rows = extend(model, Block(jnp.asarray(tokens)), cache)
    for row, m in np.ndindex(2, size):
      np.testing.assert_array_equal(
        output.features[row, m],
        look_up(model, [*chains[row], *tokens[row, : m + 1]]),
      )
    keep = np.arange(size) < np.array(kept)[:, None]
    cache = commit(model, cache, rows, keep)
    chains = [
      [*chain, *line[:count]]
      for chain, line, count in zip(chains, tokens, kept, strict=True)
    ]
  np.testing.assert_array_equal(cache.length, [len(c) for c in chains])
  for row, chain in enumerate(chains):
    np.testing.assert_array_equal(cache.rows[row, 0, : len(chain), 0], chain)


@orders
def test_a_tree_is_each_of_its_paths(order):
  model = toys.markov(order=order, vocab=V)
  context, length = random_tokens(1, 2, 4), np.array([1, 4])
  cache = model.init_cache(2, SIZE)
  _, rows = extend(model, Block(jnp.asarray(context)), cache)
  cache = commit(model, cache, rows, np.arange(4) < length[:, None])
  nodes = random_tokens(2, 2, 6)
  parents = np.array([[-1, 0, 0, 1, 2, 4], [-1, 0, 1, 2, 3, 0]])
  block = Block(jnp.asarray(nodes), jnp.asarray(parents))
  output, rows = extend(model, block, cache)
  for row, m in np.ndindex(2, 6):
    path, node = [], m
    while node >= 0:
      path.append(nodes[row, node])
      node = parents[row, node]
    chain = [*context[row, : length[row]], *path[::-1]]
    np.testing.assert_array_equal(
      output.features[row, m], look_up(model, chain)
    )
  kept = np.zeros((2, 6), bool)
  kept[0, [0, 2, 4, 5]] = kept[1, [0, 5]] = True
  cache = commit(model, cache, rows, kept, chain=False)
  np.testing.assert_array_equal(cache.length, [5, 6])
  np.testing.assert_array_equal(
    cache.rows[0, 0, 1:5, 0], nodes[0, [0, 2, 4, 5]]
  )
  np.testing.assert_array_equal(cache.rows[1, 0, 4:6, 0], nodes[1, [0, 5]])


@pytest.mark.parametrize('shape', [(3,), (3, 4), (2, 2, 3)])
def test_a_table_with_unequal_axes_is_refused(shape):
  with pytest.raises(ValueError, match=str(shape)[1:-1]):
    Markov(jnp.zeros(shape))


def test_the_pending_token_judges_the_first_drafted_one():
  """After t comes t + 1 mod 10; drafts 5 6 7 and 5 9 7 behind a 4."""
  table = np.where(np.eye(10), 0.0, -np.inf)[:, (np.arange(10) - 1) % 10]
  model = Markov(jnp.asarray(table))
  tokens = np.full((2, 64), 4, np.int32)
  script = np.zeros((2, 64), np.int32)
  script[:, 1:4] = [[5, 6, 7], [5, 9, 7]]
  drafter = toys.Scripted(script, np.zeros((2, 64), bool), 3, 10)
  one = jnp.ones(2, jnp.int32)
  state = toys.jit(decode.prefill)(
    model,
    drafter,
    tokens,
    one,
    20 * one,
    one,
    jax.random.split(jax.random.key(0), 2),
  )
  state, seen = toys.jit(decode.step, static_argnums=2)(
    model, drafter, verify.rejection, warps.UNCHANGED, jnp.zeros(0, int), state
  )
  np.testing.assert_array_equal(seen.count, [4, 2])
  np.testing.assert_array_equal(state.tokens[0, 1:5], [5, 6, 7, 8])
  np.testing.assert_array_equal(state.tokens[1, 1:3], [5, 6])

"""What a drafter remembers describes a prefix of the text, whatever happened.

A stale or wrong memory costs acceptance and never correctness, so nothing else
would notice it. The draft has the weights of the target here: what is valid is
accepted, and a count is forced by marking the nodes behind it invalid.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import decode, verify, warps
from specjax.drafters.model import ModelDrafter
from specjax.types import Block, Drafter, Limit, pytree

V, T, B = 7, 512, 2
LENGTHS = (0, 1, 2, 4, 8)  # draft lengths
NEVER = V  # an end token that no row can emit


@pytree
class Forced:
  """A drafter of which only so many nodes per row are valid."""

  inner: Drafter
  counts: jax.Array
  limit: Limit | None = None

  def propose(self, *args):
    draft, memory = self.inner.propose(*args, self.limit)
    index = jnp.arange(draft.tokens.shape[1])
    valid = index < self.counts[:, None]
    if draft.valid is not None:
      valid &= draft.valid
    return dataclasses.replace(draft, valid=valid), memory

  def observe(self, *args):
    return self.inner.observe(*args)


compiled_step = toys.jit(decode.step, static_argnums=2)
prefill = toys.jit(decode.prefill)


def start(model, temperature):
  """Prompts of 1 and of 41 tokens; the second takes the draft two chunks."""
  warp = warps.Temperature(temperature)
  drafter = ModelDrafter(model, max(LENGTHS), warp)
  tokens = np.random.default_rng(2).integers(0, V, (B, T), np.int32)
  length = jnp.array([1, 41])
  # Keys that compile sooner; what they draw is of no interest.
  row = jax.random.split(jax.random.key(3, impl='rbg'), B)
  limit = jnp.full(B, T, jnp.int32)
  state = prefill(model, drafter, tokens, length, limit, length, row)
  return drafter, state


def step(drafter, k, counts, eos, state):
  drafter = drafter.at(k)
  return compiled_step(
    drafter.model,
    Forced(drafter, jnp.asarray(counts, jnp.int32)),
    verify.rejection,
    drafter.warp,
    jnp.array([eos]),
    state,
  )


def schedule(rng):
  """Every draft length with every count in every row, in random order.

  Yields `(k, counts [B], cuts [B], eos)`; a row's limit is so many tokens away
  (0: far).
  """
  rounds = [(0, np.zeros(B, int), np.zeros(B, int), NEVER)] * 8
  for k in LENGTHS:
    for n in range(k + 1):
      counts = (n + np.arange(B) * (k // 2)) % (k + 1)
      rounds.append((k, counts, np.zeros(B, int), NEVER))
      cuts = rng.integers(0, counts + 2)
      rounds.append((k, counts, cuts, int(rng.integers(V))))
  return [rounds[i] for i in rng.permutation(len(rounds))]


def require_prefix(m, rows, want):
  """That rows are right as far as `m` `[B]`."""
  live = (np.arange(T) < m[:, None])[:, None, :, None]
  for got, right in zip(
    jax.tree.leaves(rows), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(
      np.where(live, got[:, :, :T], 0),
      np.where(live, right, 0),
      rtol=1e-5,
      atol=1e-5,
    )


models = pytest.mark.parametrize(
  'model',
  [
    pytest.param(
      toys.transformer(vocab_size=V, width=8, heads=2, kv_heads=1, hidden=8),
      marks=pytest.mark.slow,
    ),
    toys.markov(order=2, vocab=V),
  ],
  ids=['transformer', 'markov'],
)


@models
def test_memory_describes_a_prefix(model):
  drafter, state = start(model, 1.0)
  rng = np.random.default_rng(4)
  seen, snapshots = set(), []
  for k, counts, cuts, eos in schedule(rng):
    before = np.asarray(state.length)
    old = np.asarray(state.memory.cache.length)
    # A row goes on where the last round cut it; now and then one rests.
    resting = rng.random(B) < 0.1
    stop = np.where(cuts > 0, before + cuts, T).astype(np.int32)
    state = state._replace(done=jnp.asarray(resting), stop=jnp.asarray(stop))
    state, seen_round = step(drafter, k, counts, eos, state)

    kept = np.asarray(seen_round.count)
    length, m = np.asarray(state.length), np.asarray(state.memory.cache.length)
    np.testing.assert_array_equal(length, before + kept)
    np.testing.assert_array_equal(kept == 0, resting)
    np.testing.assert_array_equal(state.cache.length, length - 1)
    assert (m <= length - 1).all()
    if k == 0:
      np.testing.assert_array_equal(m, old)  # it falls behind
    else:
      # Of a whole draft the last token was never fed; else all kept ones were.
      np.testing.assert_array_equal(m, length - 1 - (kept > k))
    if eos == NEVER and not cuts.any():
      for row in np.flatnonzero(~resting):
        assert kept[row] == counts[row] + 1
        seen.add((k, int(counts[row])))
    snapshots.append((m, jax.device_get(state.memory.cache.rows)))
  assert seen >= {(k, n) for k in LENGTHS for n in range(k + 1)}

  # Emitted tokens do not change, and rows depend only on what precedes them:
  # a cache built from nothing over the final text holds what each should be.
  _, want = model.extend(Block(state.tokens), model.init_cache(B, 1))
  for m, rows in snapshots:
    require_prefix(m, rows, want)


@pytree
class GoOn:
  """Stops the draft of each row at a length of its own."""

  counts: jax.Array

  def __call__(self, i, logits):
    return i < self.counts


@models
def test_memory_describes_a_prefix_whatever_the_limit(model):
  """Long plain stretches too, after which the draft has much to read."""
  drafter, state = start(model, 1.0)
  rng = np.random.default_rng(5)
  snapshots, seen = [], set()
  for turn in range(120):
    nodes = int(rng.choice(LENGTHS))
    if turn % 60 < 40:
      nodes = 0 if turn % 60 > 3 else nodes
    stops = rng.integers(0, 9, B)
    resting = rng.random(B) < 0.1
    state = state._replace(done=jnp.asarray(resting))
    limit = Limit(jnp.array(nodes), GoOn(jnp.asarray(stops)))
    state, found = compiled_step(
      model,
      Forced(drafter, jnp.full(B, 8, jnp.int32), limit),
      verify.rejection,
      drafter.warp,
      jnp.array([NEVER]),
      state,
    )
    # Both rows draft until all have stopped, and each no further than its own.
    wanted = np.minimum(nodes, stops)
    np.testing.assert_array_equal(found.draft.valid.sum(-1), wanted)
    kept = np.asarray(found.count)
    np.testing.assert_array_equal(kept, np.where(resting, 0, wanted + 1))
    seen |= {(nodes, n) for n in wanted}
    m = np.asarray(state.memory.cache.length)
    assert (m <= np.asarray(state.length) - 1).all()
    snapshots.append((m, jax.device_get(state.memory.cache.rows)))
  assert {(8, 0), (8, 8), (0, 0)} <= seen
  _, want = model.extend(Block(state.tokens), model.init_cache(B, 1))
  for m, rows in snapshots:
    require_prefix(m, rows, want)


@models
@pytest.mark.parametrize('k', LENGTHS[1:])
def test_a_draft_with_the_weights_of_the_target_is_always_right(model, k):
  """Greedy, so that one wrong memory shows as a rejection."""
  drafter, state = start(model, 0.0)
  for _ in range(50):
    state, _ = step(drafter, k, [k, k], NEVER, state)
  np.testing.assert_array_equal(state.stats.drafted, 50 * k)
  np.testing.assert_array_equal(state.stats.accepted, 50 * k)


@pytree
class Stale(ModelDrafter):
  """Claims to have read one token more than was kept of what it fed."""

  def observe(self, target, memory, block, kept, output):
    count = jnp.minimum(kept.sum(-1, dtype=jnp.int32) + 1, memory.fed)
    own = memory.cache._replace(length=memory.cache.length + count)
    return memory._replace(cache=own, fed=jnp.zeros_like(memory.fed))


@pytest.mark.parametrize('cls', [ModelDrafter, Stale])
def test_a_stale_memory_would_be_seen(cls):
  """Its entry behind a rejection is that of the token that was rejected."""
  model = toys.markov(order=2, vocab=V)
  tokens = jnp.zeros((B, T), jnp.int32)
  drafter = cls(model, 4)
  row = jax.random.split(jax.random.key(3), B)
  length = jnp.full(B, 3)
  limit = jnp.full(B, T)
  state = prefill(model, drafter, tokens, length, limit, length, row)
  wrong = 0
  for _ in range(20):
    state, _ = step(drafter, 4, [2, 4], NEVER, state)
    m = np.asarray(state.memory.cache.length)
    held = np.asarray(state.memory.cache.rows)[:, 0, :T, 0]
    fed = np.arange(T) < m[:, None]
    wrong += (held != np.asarray(state.tokens))[fed].sum()
  assert (wrong > 0) == (cls is Stale)

"""What a commit writes, and what attention reads, to the last bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import cache as caches
from specjax import decode
from specjax.drafters.model import ModelDrafter

B, HEADS, S, D, M = 3, 2, 12, 4, 4
LENGTH = np.array([5, 0, 8])  # the last block just fits

commit = toys.jit(caches.commit, static_argnames='chain')


def random(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def two_buffers(seed, size):
  return {
    'keys': random(seed, B, HEADS, size, D),
    'values': random(seed + 1, B, 1, size, D + 1),
  }


def committed(cache, rows, kept, row):
  """The row's buffer below its new length, written one node at a time."""
  nodes = np.flatnonzero(kept[row])
  old = cache[row, :, : LENGTH[row]]
  return np.concatenate([old, rows[row][:, nodes]], axis=1)


def check(kept, chain):
  buffers, rows = two_buffers(0, S), two_buffers(2, M)
  before = caches.Cache(jax.tree.map(jnp.asarray, buffers), LENGTH)
  after = commit(before, rows, kept, chain=chain)
  np.testing.assert_array_equal(after.length, LENGTH + kept.sum(1))
  for name, row in itertools.product(buffers, range(B)):
    np.testing.assert_array_equal(
      after.rows[name][row, :, : after.length[row]],
      committed(buffers[name], rows[name], kept, row),
    )


@pytest.mark.parametrize('chain', [True, False])
@pytest.mark.parametrize('counts', [(0, 0, 0), (4, 1, 0), (2, 4, 3), (4, 4, 4)])
def test_a_prefix_is_appended_to_each_row(counts, chain):
  check(np.arange(M) < np.array(counts)[:, None], chain)


def test_any_kept_nodes_are_packed():
  every = np.array(list(itertools.product([False, True], repeat=M)))
  for i in range(len(every)):
    check(np.stack([every[i], every[i - 5], every[i - 11]]), chain=False)


def test_rows_are_stored_in_the_dtype_of_the_cache():
  buffer = jnp.zeros((1, 1, S, D), jnp.bfloat16)
  rows = random(4, 1, 1, M, D)
  cache = caches.Cache(buffer, jnp.zeros(1, jnp.int32))
  after = commit(cache, rows, np.ones((1, M), bool), chain=True)
  assert after.rows.dtype == jnp.bfloat16
  np.testing.assert_array_equal(after.rows[:, :, :M], rows.astype(jnp.bfloat16))


def test_a_buffer_has_room_for_a_block_at_its_end():
  """A slice that starts too late is moved back, silently, over old entries."""
  buffer = jnp.arange(8)
  block = jnp.array([90, 91, 92, 93])
  np.testing.assert_array_equal(
    jax.lax.dynamic_update_slice(buffer, block, (6,)),
    [0, 1, 2, 3, 90, 91, 92, 93],
  )
  model = toys.markov(order=2)
  for k, size in itertools.product([1, 2, 7, 8, 64, 100], [63, 64, 65]):
    tokens = jax.ShapeDtypeStruct((2, size), jnp.int32)
    row = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    drafter = ModelDrafter(model, k)
    state = jax.eval_shape(
      decode.prefill, model, drafter, tokens, length, length, length, row
    )
    # The last block starts at the last position of the buffer.
    least = size - 1 + k + 1
    assert state.cache.rows.shape[2] >= least
    assert state.memory.cache.rows.shape[2] >= least


@pytest.mark.parametrize('heads, kv_heads', [(2, 2), (4, 2), (3, 1)])
def test_attention_is_one_softmax_over_cache_and_block(heads, kv_heads):
  query = random(5, B, heads, M, D)
  block = random(6, 2, B, kv_heads, M, D)
  cached = random(7, 2, B, kv_heads, S, D)
  visible = np.tri(M, dtype=bool)[None]
  live = (np.arange(S) < np.asarray(LENGTH)[:, None])[:, None]
  got = toys.jit(caches.attend)(
    query, tuple(block), visible, tuple(cached), live
  )
  assert got.dtype == jnp.float32 and got.shape == query.shape
  for b, h, m in itertools.product(range(B), range(heads), range(M)):
    kv = h * kv_heads // heads
    keys, values = (
      np.concatenate([c[b, kv, : LENGTH[b]], x[b, kv, : m + 1]])
      for c, x in zip(cached, block, strict=True)
    )
    weights = np.exp(keys.astype(np.float64) @ query[b, h, m] / np.sqrt(D))
    np.testing.assert_allclose(
      got[b, h, m], weights @ values / weights.sum(), rtol=1e-5, atol=1e-6
    )

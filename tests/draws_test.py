"""Draws: the right law, in float32, never outside the support."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from specjax import draws

DRAWS = [draws.gumbel, draws.inverse_cdf]


VOCAB, COUNT = 150, 20_000


@functools.partial(jax.jit, static_argnums=0)
def sample(draw, seed, logits):
  keys = jax.random.split(jax.random.key(seed), COUNT)
  return jax.vmap(draw, (0, None))(keys, logits)


@pytest.mark.parametrize('draw', DRAWS)
@pytest.mark.parametrize('support', [1, 3, 70, VOCAB])
def test_the_law_is_the_softmax(draw, support):
  logits = oracles.table(support, 0, VOCAB, 2.0)
  shut = np.random.default_rng(support).permutation(VOCAB)[support:]
  logits[shut] = -np.inf
  tokens = np.asarray(sample(draw, 1, logits))
  assert oracles.p_value(tokens[:, None], oracles.softmax(logits)) >= 1e-4
  assert tokens.dtype == np.int32


@pytest.mark.parametrize('draw', DRAWS)
def test_low_precision_logits_are_drawn_from_in_float32(draw):
  """Noise of low precision has few values, and ties favour low ids."""
  logits = jnp.zeros(VOCAB, jnp.bfloat16)
  tokens = np.asarray(sample(draw, 2, logits))
  exact = sample(draw, 2, logits.astype(jnp.float32))
  np.testing.assert_array_equal(tokens, exact)
  assert oracles.p_value(tokens[:, None], np.full(VOCAB, 1 / VOCAB)) >= 1e-4


def test_a_draw_in_low_precision_would_be_biased():
  """The negative twin: the library's own draw of bfloat16 logits."""
  keys = jax.random.split(jax.random.key(3), 2000)
  logits = jnp.zeros(4096, jnp.bfloat16)
  tokens = jax.vmap(draws.gumbel, (0, None))(keys, logits)
  assert abs(np.mean(tokens < 2048) - 0.5) < 4 * 0.5 / np.sqrt(2000)
  tokens = jax.vmap(jax.random.categorical, (0, None))(keys, logits)
  assert np.mean(tokens < 512) > 0.9


def test_inverse_cdf_never_leaves_the_support():
  """Sums of this length are not monotonic in float32, so zeros can rise."""
  rng = np.random.default_rng(0)
  weights = np.exp(3 * rng.normal(size=(500, 512))).astype(np.float32)
  weights[rng.random(weights.shape) < 0.5] = 0
  totals = np.asarray(jnp.cumsum(weights, -1))
  before = np.maximum.accumulate(totals, -1)[:, :-1]
  row, index = np.nonzero((weights[:, 1:] == 0) & (totals[:, 1:] > before))
  if not row.size:
    pytest.skip('this platform adds in order')
  # The uniform that would land in each step.
  mark = before[row, index].astype(np.float64) / totals[row, -1]
  for uniform in [mark, np.nextafter(mark, 1), np.nextafter(mark, 0)]:
    picked = jax.vmap(draws._pick)(uniform.astype(np.float32), weights[row])
    assert (weights[row, picked] > 0).all()


@pytest.mark.parametrize('uniform', [0.0, 0.5, 1 - 2**-24, 1.0])
def test_inverse_cdf_at_the_edges(uniform):
  weights = np.zeros((3, 64), np.float32)
  weights[0, 5] = 1
  weights[1, [7, 20]] = 1e-30, 1
  weights[2, [0, 63]] = 1, 1e-30
  picked = jax.vmap(draws._pick, (None, 0))(np.float32(uniform), weights)
  assert (weights[np.arange(3), picked] > 0).all()


@pytest.mark.parametrize('draw', DRAWS)
@pytest.mark.parametrize('bad', [np.nan, -np.inf])
def test_a_broken_law_still_gives_an_id_in_range(draw, bad):
  tokens = sample(draw, 0, np.full(VOCAB, bad, np.float32))
  assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_one_key_couples_two_laws():
  """Gumbel draws with one key agree at least (1 - TV) / (1 + TV) often."""
  p = np.random.default_rng(0).dirichlet(np.ones(VOCAB))
  q = np.roll(p, 1) * 0.3 + p * 0.7
  pair = [sample(draws.gumbel, 4, oracles.log(law)) for law in (p, q)]
  tv = np.abs(p - q).sum() / 2
  assert np.mean(np.equal(*pair)) >= (1 - tv) / (1 + tv) - 0.02

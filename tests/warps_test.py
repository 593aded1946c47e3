"""Warps against NumPy that sorts."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys
from hypothesis import strategies

from specjax import warps
from specjax.warps import UNCHANGED, Greedy, MinP, Temperature, TopK, TopP

ALL = [
  Greedy(),
  Temperature(0.0),
  Temperature(0.7),
  TopK(3),
  TopP(0.6),
  MinP(0.2),
  warps.compose(Temperature(0.7), TopK(4), TopP(0.8)),
]

P = np.array([0.45, 0.25, 0.2, 0.1])


@toys.jit
def apply(warp, logits):
  return warp(logits)


def law(warp, p):
  """Probabilities behind the warp."""
  return oracles.softmax(apply(warp, oracles.log(p)))


@pytest.mark.parametrize(
  'warp, p, expected',
  [
    # The token that crosses the threshold is kept; one that starts at it isn't.
    (TopP(0.6), P, [9 / 14, 5 / 14, 0, 0]),
    (TopP(0.7), P, [9 / 14, 5 / 14, 0, 0]),
    (TopP(0.71), P, [0.5, 5 / 18, 2 / 9, 0]),
    (TopP(1.0), P, P),
    (TopP(2.0), P, P),
    (TopP(1e-9), P, [1, 0, 0, 0]),
    (TopP(0.0), P, [1, 0, 0, 0]),
    # Equal tokens stay or go together.
    (TopP(0.5), [0.4, 0.25, 0.25, 0.1], [4 / 9, 5 / 18, 5 / 18, 0]),
    (TopK(1), P, [1, 0, 0, 0]),
    (TopK(2), P, [9 / 14, 5 / 14, 0, 0]),
    (TopK(2), [0.4, 0.25, 0.25, 0.1], [4 / 9, 5 / 18, 5 / 18, 0]),
    (TopK(4), P, P),
    (TopK(9), P, P),
    (MinP(0.2), [0.6, 0.25, 0.1, 0.05], [12 / 17, 5 / 17, 0, 0]),
    (MinP(0.0), P, P),
    (MinP(1.0), [0.4, 0.4, 0.1, 0.1], [0.5, 0.5, 0, 0]),
    (Greedy(), [0.2, 0.35, 0.35, 0.1], [0, 1, 0, 0]),
    (Temperature(0.0), [0.35, 0.35, 0.2, 0.1], [1, 0, 0, 0]),
    (Temperature(0.5), P, P**2 / (P**2).sum()),
  ],
)
def test_small_laws(warp, p, expected):
  np.testing.assert_allclose(law(warp, p), expected, atol=1e-6)


def test_temperature_zero_then_top_p():
  both = warps.compose(Temperature(0.0), TopP(0.9))
  out = apply(both, np.array([1.0, 1.0, 0.0], np.float32))
  assert out.tolist() == [0, -np.inf, -np.inf]


# Long ones are added by slices.
@pytest.mark.parametrize('vocab', [1, 7, 300, 5000])
@pytest.mark.parametrize('ties', [False, True])
def test_filters_keep_what_sorting_would(vocab, ties):
  rng = np.random.default_rng([vocab, ties])
  logits = rng.normal(size=(20, vocab)) * 3
  logits = (logits.round() if ties else logits).astype(np.float32)
  logits[rng.random(logits.shape) < 0.2] = -np.inf
  logits[:, 0] = 0.5
  p = oracles.softmax(logits)
  for value in [0.03, 0.41, 0.83, 0.97]:
    k = max(1, int(value * vocab))
    for warp, reference, number in [
      (TopK(k), oracles.top_k, k),
      (TopP(value), oracles.top_p, value),
      (MinP(value), oracles.min_p, value),
    ]:
      kept = np.asarray(apply(warp, logits))
      expected = np.stack([reference(row, number) for row in p])
      np.testing.assert_array_equal(kept > -np.inf, expected > 0)
      np.testing.assert_array_equal(kept[expected > 0], logits[expected > 0])


def test_ids_made_equal_by_rounding_are_a_tie():
  """The first wins, as everywhere."""
  logits = jnp.array([1.0, 40.0, 40.12, 2.0], jnp.bfloat16)
  for warp in (Greedy(), Temperature(0.0)):
    assert apply(warp, logits).tolist() == [-np.inf, 0, -np.inf, -np.inf]


def test_no_token_at_all_is_a_broken_law():
  """Not the first token: what says so would be a law as any other."""
  logits = jnp.full((2, 3), -jnp.inf).at[0, 1].set(0)
  for warp in (Greedy(), Temperature(0.0)):
    found = apply(warp, logits)
    assert found[0].tolist() == [-np.inf, 0, -np.inf]
    assert np.isnan(found[1]).any()


EXTREME = [-np.inf, -1e30, -1e4, -1.0, -0.0, 0.0, 1e-30, 2.5, 1e4, 1e37]


@pytest.mark.parametrize(
  'warp',
  [
    Greedy(),
    Temperature(0.0),
    Temperature(0.3),
    TopK(2),
    TopP(0.7),
    MinP(0.1),
    warps.compose(Temperature(1.7), TopK(3), TopP(0.9), MinP(0.01)),
  ],
)
@hypothesis.settings(max_examples=40)
@hypothesis.given(
  logits=strategies.lists(
    strategies.sampled_from(EXTREME) | strategies.floats(-9, 9, width=32),
    min_size=6,
    max_size=6,
  ).filter(lambda x: max(x) > -np.inf),
  order=strategies.permutations(range(6)),
)
def test_a_warp_of_extreme_logits_is_a_law_inside_the_support(
  warp, logits, order
):
  logits = np.array(logits, np.float32)
  out = np.asarray(apply(warp, logits))
  assert (out[logits == -np.inf] == -np.inf).all()
  assert not np.isnan(out).any() and out[np.argmax(logits)] > -np.inf
  np.testing.assert_allclose(oracles.softmax(out).sum(), 1, atol=1e-6)
  # What is kept keeps its order, and is not less likely than what is not.
  kept = out > -np.inf
  assert logits[kept].min() >= np.max(logits[~kept], initial=-np.inf)
  ranks = out[kept][np.argsort(logits[kept], kind='stable')]
  assert (np.diff(ranks) >= 0).all()
  if not isinstance(warp, Greedy) and warp != Temperature(0.0):
    order = np.array(order)  # where the first of equals has no privilege
    np.testing.assert_array_equal(apply(warp, logits[order]), out[order])


@pytest.mark.parametrize('warp', ALL)
def test_every_warp_is_float32_keeps_the_shut_out_and_shows_a_nan(warp):
  logits = oracles.table(0, 1, 8, 2.0)
  logits[:, 2] = -np.inf
  logits[3, 1] = np.nan
  out = np.asarray(apply(warp, jnp.asarray(logits, jnp.bfloat16)))
  assert out.dtype == np.float32
  assert (out[np.arange(8) != 3, 2] == -np.inf).all()
  normalised = np.asarray(jax.nn.log_softmax(out))
  assert np.isnan(normalised[3]).all()
  assert not np.isnan(np.delete(normalised, 3, 0)).any()
  # One row alone is what it is among the others, whatever the leading axes.
  np.testing.assert_array_equal(
    apply(warp, jnp.asarray(logits, jnp.bfloat16)[0]), out[0]
  )


def test_the_threshold_of_min_p_is_not_rounded():
  """It is -2.3076 here, and would be the last logit in bfloat16."""
  logits = jnp.array([0.0, -2.296875, -2.3125], jnp.bfloat16)
  kept = np.asarray(apply(MinP(0.0995), logits)) > -np.inf
  assert kept.tolist() == [True, True, False]


def test_numbers_are_leaves():
  """A sweep over them traces once, temperature 0 included."""
  traces = []

  @jax.jit
  def traced(warp, logits):
    traces.append(1)
    return warp(logits)

  logits = np.arange(4, dtype=np.float32)
  for t in [0.0, 0.5, 1.0]:
    for p in [0.1, 1.0]:
      warp = warps.compose(Temperature(t), TopK(int(1 + t)), TopP(p), MinP(p))
      traced(warp, logits)
  assert len(traces) == 1


def test_composition_goes_from_left_to_right():
  logits = np.array([2.0, 1.0, 0.5, 0.0], np.float32)
  warp = [Temperature(2.0), TopP(0.5)]
  chained = functools.reduce(lambda x, w: w(x), warp, logits)
  np.testing.assert_array_equal(warps.compose(*warp)(logits), chained)
  swapped = warps.compose(*reversed(warp))(logits)
  assert (np.asarray(swapped) > -np.inf).sum() < (chained > -np.inf).sum()
  np.testing.assert_array_equal(warps.compose()(logits), logits)
  np.testing.assert_array_equal(UNCHANGED(logits), logits)


@pytest.mark.parametrize('value', [-0.1, float('inf'), float('nan')])
def test_a_temperature_is_checked(value):
  with pytest.raises(ValueError, match=f'temperature is {value}'):
    warps.temperature(value)


def test_a_checked_temperature_is_the_warp():
  assert warps.temperature(0) == Temperature(0.0)


@pytest.mark.parametrize(
  ('warp', 'value'),
  [
    (TopK, 0),
    (TopK, -1),
    (TopK, 2.5),
    (TopP, -1.0),
    (TopP, float('nan')),
    (MinP, 2.0),
    (MinP, -1.0),
    (Temperature, -1.0),
    (Temperature, float('inf')),
    (Temperature, float('nan')),
    (Temperature, 1e-38),  # the reciprocal that XLA multiplies by is infinite
    (Temperature, 1e38),  # and of this 0, which makes NaN of -inf
    (Temperature, '1'),
    (TopK, 2**40),
    # As numbers of NumPy and of JAX.
    (Temperature, np.float32(-1)),
    (TopK, np.int32(0)),
    (TopP, jnp.float32('nan')),
    (MinP, jnp.float32(2)),
  ],
)
def test_numbers_that_are_none_are_refused(warp, value):
  with pytest.raises(ValueError, match=re.escape(str(value))):
    warp(value)


@pytest.mark.parametrize('value', [warps.LEAST, jnp.float32(warps.MOST)])
def test_temperatures_far_off_divide(value):
  logits = jnp.array([1.0, -2.0, 50.0, 50.0, -jnp.inf])
  law = np.asarray(jax.nn.softmax(Temperature(value)(logits)))
  even = [0, 0, 0.5, 0.5, 0] if value < 1 else [0.25, 0.25, 0.25, 0.25, 0]
  np.testing.assert_allclose(law, even, atol=1e-6)

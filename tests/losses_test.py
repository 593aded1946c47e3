"""Losses against float64 NumPy, finite differences, and infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import losses

INF = np.inf


def log_softmax(x):
  x = np.asarray(x, np.float64)
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(log_p, log_q):
  """Direct sum over the common support, p renormalised there."""
  keep = np.isfinite(log_p) & np.isfinite(log_q)
  p = np.where(keep, np.exp(log_p), 0)
  p = p / p.sum(-1, keepdims=True)
  logs = np.log(np.where(p > 0, p, 1)) - np.where(keep, log_q, 0)
  return (p * logs).sum(-1)


def random_pair(seed, *shape):
  rng = np.random.default_rng(seed)
  return 2 * rng.normal(size=shape), log_softmax(2 * rng.normal(size=shape))


def test_both_losses_equal_float64():
  logits, log_p = random_pair(0, 2, 3, 7)
  labels = np.arange(6).reshape(2, 3)
  got = losses.cross_entropy(jnp.asarray(logits), jnp.asarray(labels))
  want = -np.take_along_axis(log_softmax(logits), labels[..., None], -1)
  np.testing.assert_allclose(got, want[..., 0], rtol=1e-5)
  got = losses.forward_kl(jnp.asarray(logits), jnp.asarray(log_p))
  np.testing.assert_allclose(got, kl(log_p, log_softmax(logits)), rtol=1e-5)


def test_kl_is_not_its_reverse():
  logits, log_p = random_pair(1, 5)
  got = losses.forward_kl(jnp.asarray(logits), jnp.asarray(log_p))
  assert abs(got - kl(log_softmax(logits), log_p)) > 0.1


@pytest.mark.parametrize('outside_q', [(), (1,)])
def test_gradients_are_those_of_finite_differences(outside_q):
  # The reference in float64; the loss under test supplies the gradient.
  logits, log_p = random_pair(2, 6)
  logits[list(outside_q)] = -INF
  labels = jnp.asarray(3)
  cases = (
    (
      lambda z: losses.cross_entropy(z, labels),
      lambda z: -log_softmax(z)[3],
    ),
    (
      lambda z: losses.forward_kl(z, jnp.asarray(log_p)),
      lambda z: kl(log_p, log_softmax(z)),
    ),
  )
  for loss, reference in cases:
    gradient = jax.grad(loss)(jnp.asarray(logits))
    steps = 1e-5 * np.eye(6)
    slope = [
      (reference(logits + s) - reference(logits - s)) / 2e-5 for s in steps
    ]
    slope = np.where(np.isfinite(logits), slope, 0)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


@pytest.mark.parametrize(
  ('p', 'logits', 'value'),
  [
    ([0, 0.4, 0.6, 0], [0, 0, 0, 0], 0.713283),
    ([0, 0.4, 0.6, 0], [-INF, 0, 0, -INF], 0.020136),  # 0 log 0 - 0 log 0
    ([0.5, 0.2, 0.3, 0], [-INF, 0, 0, -INF], 0.020136),  # mass outside q
    ([1, 0, 0, 0], [-INF, 0, 0, -INF], 0),  # all of it
    ([0, 1, 0, 0], [-INF, 0, -INF, -INF], 0),
  ],
)
def test_infinities_leave_kl_and_every_gradient_finite(p, logits, value):
  log_p = jnp.log(jnp.asarray(p, jnp.float32))
  logits = jnp.asarray(logits, jnp.float32)
  got, gradients = jax.value_and_grad(losses.forward_kl, (0, 1))(logits, log_p)
  np.testing.assert_allclose(got, value, atol=1e-6)
  assert np.isfinite(gradients).all()
  assert np.all(np.asarray(gradients[0])[np.isinf(logits)] == 0)


def test_a_reduced_vocabulary_makes_no_nan_even_where_it_is_unused():
  log_p = jnp.log(jnp.array([0.5, 0.2, 0.3, 0.0]))
  logits = jnp.array([-INF, 0.0, 0.0, -INF])
  with jax.debug_nans(True):
    jax.grad(losses.forward_kl, (0, 1))(logits, log_p)


def test_an_impossible_label_is_infinitely_surprising_but_has_a_gradient():
  logits = jnp.array([-INF, 0.0, 0.0])
  value, gradient = jax.value_and_grad(losses.cross_entropy)(
    logits, jnp.array(0)
  )
  assert value == INF
  np.testing.assert_allclose(gradient, [-1, 0.5, 0.5], atol=1e-6)


def test_bfloat16_logits_lose_nothing_after_they_are_rounded():
  z = 10 * jax.random.normal(jax.random.key(3), (8, 32768))
  noise = jax.random.normal(jax.random.key(4), z.shape)
  student, teacher = (x.astype(jnp.bfloat16) for x in (z + 0.01 * noise, z))

  @jax.jit
  def loss(student):
    log_p = jax.nn.log_softmax(teacher.astype(jnp.float32))
    return losses.forward_kl(student, log_p)

  got = loss(student)
  assert got.dtype == jnp.float32
  want = [1.8353e-3, 2.239e-6, 2.120e-5, 4.62e-7]
  np.testing.assert_allclose(got[:4], want, rtol=0.01)
  np.testing.assert_allclose(loss(teacher), 0, atol=1e-6)
  labels = jnp.argmax(z, -1)
  got = losses.cross_entropy(student, labels)
  want = -log_softmax(student.astype(jnp.float32))[np.arange(8), labels]
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


def mean(values, weight):
  total, count = losses.weighted_sum(jnp.asarray(values), jnp.asarray(weight))
  return total / count


def test_padding_does_not_dilute_a_mean():
  for pad in (2, 6):
    values = np.array([0.2, 0.4, 0.6] + pad * [3.0])
    weight = np.array([1, 1, 1] + pad * [0])
    np.testing.assert_allclose(mean(values, weight), 0.4, rtol=1e-6)


def test_what_stands_on_padding_changes_no_bit():
  logits, log_p = random_pair(4, 2, 4, 5)
  weight = jnp.array([[1.0, 1, 0, 0], [1, 1, 1, 0]])
  labels = jnp.ones((2, 4), jnp.int32)

  @jax.jit
  @jax.value_and_grad
  def step(logits, log_p, labels):
    ce = losses.cross_entropy(logits, labels)
    return mean(ce + losses.forward_kl(logits, log_p), weight)

  before = step(jnp.asarray(logits), jnp.asarray(log_p), labels)
  pad = np.asarray(weight) == 0
  logits[pad], log_p[pad] = [-INF, 9, 9, 9, 9], [0, -INF, -INF, -INF, -INF]
  after = step(
    jnp.asarray(logits), jnp.asarray(log_p), jnp.where(pad, 0, labels)
  )
  for a, b in zip(before, after, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('length', [3, 6])
def test_a_mean_is_per_token_and_not_per_sequence(length):
  values = np.full((2, length), 0.1)
  np.testing.assert_allclose(mean(values, np.ones_like(values)), 0.1, rtol=1e-6)


@pytest.mark.parametrize(
  ('values', 'weight', 'want'),
  [
    ([[1.0, 1, 1, 1], [5, 0, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]], 1.8),
    ([[7.0, 7, 7], [1, 2, 3]], [[0, 0, 0], [1, 1, 1]], 2.0),  # an empty shard
    ([[4.0, 0, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 1]], 1.75),
  ],
)
def test_sums_over_shards_give_the_mean_over_tokens(values, weight, want):
  def shard(values, weight):
    total, count = losses.weighted_sum(values, weight)
    return jax.lax.psum(total, 'data') / jax.lax.psum(count, 'data')

  got = jax.vmap(shard, axis_name='data')(
    jnp.asarray(values), jnp.asarray(weight)
  )
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize('lengths', [(5, 2), (0, 4)])
def test_accumulated_gradients_equal_those_of_the_whole_batch(lengths):
  rng = np.random.default_rng(5)
  x = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32)
  labels = jnp.asarray(rng.integers(0, 4, (2, 5)))
  weight = (jnp.arange(5) < jnp.array(lengths)[:, None]).astype(jnp.float32)
  w = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)

  @jax.grad
  def gradient(w, rows):
    ce = losses.cross_entropy(x[rows] @ w, labels[rows])
    return losses.weighted_sum(ce, weight[rows])[0]

  count = weight.sum()
  whole = gradient(w, slice(None)) / count
  parts = [gradient(w, slice(i, i + 1)) for i in range(2)]
  np.testing.assert_allclose(sum(parts) / count, whole, atol=1e-6)
  if lengths[0] == 0:
    assert np.all(parts[0] == 0)  # exactly, and so it is finite
  else:
    means = [part / n for part, n in zip(parts, lengths, strict=True)]
    assert np.abs(sum(means) / 2 - whole).max() > 1e-2

"""Losses against float64 NumPy, finite differences, and infinities."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import losses, metrics

INF = np.inf
EVERY = pytest.mark.parametrize('name', losses.DIVERGENCES)


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


def alpha(log_p, log_q):
  return np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1)


def jsd(log_p, log_q, beta=0.5):
  p, q = np.exp(log_p), np.exp(log_q)
  with np.errstate(divide='ignore'):
    log_m = np.log(beta * p + (1 - beta) * q)
  return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def mixed(log_p, log_q, at):
  share = np.exp(-3 * at)  # a number: no slope of its own
  return share * kl(log_p, log_q) + (1 - share) * (1 - alpha(log_p, log_q))


# Of the target's law, the draft's, and the acceptance rate at the draft whose
# gradient is asked for.
ORACLES = {
  'forward_kl': lambda p, q, at: kl(p, q),
  'reverse_kl': lambda p, q, at: kl(q, p),
  'jsd': lambda p, q, at: jsd(p, q),
  'total_variation': lambda p, q, at: 0.5 * abs(np.exp(p) - np.exp(q)).sum(-1),
  'neg_log_acceptance': lambda p, q, at: -np.log(alpha(p, q)),
  'hybrid': mixed,
}


def random_pair(seed, *shape):
  rng = np.random.default_rng(seed)
  return 2 * rng.normal(size=shape), log_softmax(2 * rng.normal(size=shape))


def log(p):
  with np.errstate(divide='ignore'):
    return np.log(np.asarray(p, np.float64))


def holes(seed, *shape):
  """A pair of which neither says everything, and both say the first token."""
  logits, log_p = random_pair(seed, *shape)
  rng = np.random.default_rng(seed)
  for x in logits, log_p:
    x[..., 1:][rng.random((*shape[:-1], shape[-1] - 1)) < 0.3] = -INF
  return logits, log_softmax(log_p)


def test_every_function_of_two_laws_is_found_and_has_an_oracle():
  of_laws = [
    name
    for name, f in inspect.getmembers(losses, inspect.isfunction)
    if name[0] != '_'
    and [*inspect.signature(f).parameters][:2] == ['logits', 'target_log_p']
  ]
  assert sorted(of_laws) == sorted(losses.DIVERGENCES) == sorted(ORACLES)


def test_divergences_are_found_by_name():
  assert losses.find('reverse_kl') is losses.reverse_kl
  assert losses.find('specjax.losses:jsd') is losses.jsd
  for name in ('weighted_sum', 'specjax.losses:jds', 'no.such.module:loss'):
    with pytest.raises(ValueError, match='no divergence .* forward_kl, rev'):
      losses.find(name)


@functools.cache
def slope_of(name):
  """The gradient, compiled once for all tests."""
  return jax.jit(jax.grad(losses.find(name)))


@functools.cache
def value_and_slopes(name):
  """The value and the gradients by both laws."""
  return jax.value_and_grad(losses.find(name), (0, 1))


compiled_value_and_slopes = functools.cache(
  lambda name: jax.jit(value_and_slopes(name))
)


@EVERY
@pytest.mark.parametrize('pair', [random_pair, holes])
def test_a_divergence_equals_float64(name, pair):
  logits, log_p = pair(0, 2, 3, 7)
  log_q = log_softmax(logits)
  got = jax.jit(losses.find(name))(jnp.asarray(logits), jnp.asarray(log_p))
  want = ORACLES[name](log_p, log_q, alpha(log_p, log_q))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_cross_entropy_equals_float64():
  logits, _ = random_pair(0, 2, 3, 7)
  labels = np.arange(6).reshape(2, 3)
  got = losses.cross_entropy(jnp.asarray(logits), jnp.asarray(labels))
  want = -np.take_along_axis(log_softmax(logits), labels[..., None], -1)
  np.testing.assert_allclose(got, want[..., 0], rtol=1e-5)


@EVERY
def test_a_divergence_and_its_slope_vanish_at_equality_and_only_there(name):
  divergence = jax.jit(losses.find(name))
  logits = jnp.asarray(holes(1, 4, 6)[0])
  log_p = jax.nn.log_softmax(logits)
  # Bit for bit, since 1 - α and what is made of it have a kink there.
  slope = jax.grad(lambda z: losses.find(name)(z, log_p).sum())(logits)
  np.testing.assert_allclose(slope, 0, atol=1e-6)
  # Logits that another constant was added to are the same law.
  np.testing.assert_allclose(divergence(logits + 2, log_p), 0, atol=1e-6)
  other = jnp.where(jnp.isfinite(log_p), jnp.arange(6) / 3, -INF)
  assert (divergence(other, log_p) > 1e-3).all()


@EVERY
@pytest.mark.parametrize('outside', [((), ()), ((1,), ()), ((1, 2), (4, 1))])
def test_gradients_are_those_of_finite_differences(name, outside):
  # The reference in float64; the divergence under test supplies the gradient.
  logits, log_p = random_pair(2, 6)
  logits[list(outside[0])] = log_p[list(outside[1])] = -INF
  log_p = log_softmax(log_p)
  at = alpha(log_p, log_softmax(logits))

  def reference(z):
    return ORACLES[name](log_p, log_softmax(z), at)

  gradient = slope_of(name)(jnp.asarray(logits), jnp.asarray(log_p))
  steps = 1e-5 * np.eye(6)
  slope = [
    (reference(logits + s) - reference(logits - s)) / 2e-5 for s in steps
  ]
  slope = np.where(np.isfinite(logits), slope, 0)
  np.testing.assert_allclose(gradient, slope, atol=1e-6)
  assert np.abs(slope).max() > 1e-2


def test_the_gradient_of_cross_entropy_is_that_of_finite_differences():
  logits, _ = random_pair(2, 6)
  gradient = jax.grad(losses.cross_entropy)(jnp.asarray(logits), jnp.asarray(3))
  slope = [
    (log_softmax(logits - s)[3] - log_softmax(logits + s)[3]) / 2e-5
    for s in 1e-5 * np.eye(6)
  ]
  np.testing.assert_allclose(gradient, slope, atol=1e-6)


# A target and a draft that share something, all of one side, or nothing.
EXTREMES = [
  ([0, 0.4, 0.6, 0], [0.0, 0, 0, 0]),
  ([0.5, 0.2, 0.3, 0], [-INF, 0, 0, -INF]),
  ([0, 1, 0, 0], [0.3, 0.1, 0, -INF]),  # greedy
  ([0, 1, 0, 0], [-INF, 0, -INF, -INF]),
  ([1, 0, 0, 0], [-INF, 0, 0, -INF]),
  ([0.5, 0, 0, 0.5], [-INF, 0, 0, -INF]),
  ([0.3, 0.7, 0, 0], [-300.0, -300, 0, 0]),  # q underflows where p is
  ([1e-38, 1, 0, 0], [0.0, -90, -90, 300]),
]


@EVERY
@pytest.mark.parametrize(('p', 'logits'), EXTREMES)
@pytest.mark.parametrize('jit', [False, True])
def test_infinities_leave_every_value_and_gradient_finite(name, p, logits, jit):
  both = (compiled_value_and_slopes if jit else value_and_slopes)(name)
  log_p, logits = (jnp.asarray(x, jnp.float32) for x in (log(p), logits))
  with jax.debug_nans(True):  # not even where it is unused
    value, gradients = both(logits, log_p)
  assert np.isfinite(value) and value >= -1e-6
  assert np.isfinite(gradients).all()
  assert np.all(np.asarray(gradients[0])[np.isinf(logits)] == 0)


def test_a_kl_renormalises_its_first_law():
  inside = [-INF, 0, 0, -INF]
  half = log([0, 0.5, 0.5, 0])
  for p, value in (
    ([0, 0.4, 0.6, 0], 0.020136),  # 0 log 0 - 0 log 0
    ([0.5, 0.2, 0.3, 0], 0.020136),  # mass outside q
    ([1, 0, 0, 0], 0),  # all of it
  ):
    log_p = jnp.asarray(log(p), jnp.float32)
    got = losses.forward_kl(jnp.asarray(inside), log_p)
    np.testing.assert_allclose(got, value, atol=1e-6)
    got = losses.reverse_kl(log_p, jnp.asarray(half, jnp.float32))
    np.testing.assert_allclose(got, value, atol=1e-6)
  got = losses.forward_kl(jnp.zeros(4), jnp.asarray(log([0, 0.4, 0.6, 0])))
  np.testing.assert_allclose(got, 0.713283, atol=1e-6)


def test_acceptance_counts_what_the_draft_cannot_say():
  logits = jnp.asarray([-INF, 0, 0, -INF])
  log_p = jnp.asarray(log([0.5, 0.2, 0.3, 0]), jnp.float32)
  got = losses.total_variation(logits, log_p)
  np.testing.assert_allclose(got, 0.5, atol=1e-6)
  got = losses.neg_log_acceptance(logits, log_p)
  np.testing.assert_allclose(got, np.log(2), atol=1e-6)


@pytest.mark.parametrize('pair', [random_pair, holes])
def test_divergences_are_tied_to_each_other(pair):
  logits, log_p = (jnp.asarray(x, jnp.float32) for x in pair(3, 5, 7))
  log_q = jax.nn.log_softmax(logits)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  close(losses.reverse_kl(logits, log_p), losses.forward_kl(log_p, log_q))
  close(losses.jsd(logits, log_p), losses.jsd(log_p, log_q))
  close(losses.jsd(logits, log_p, 0.2), losses.jsd(log_p, log_q, 0.8))
  close(losses.jsd(logits, log_p, 0.2), jsd(log_p, log_q, 0.2))
  tv = losses.total_variation(logits, log_p)
  close(tv, 1 - metrics.acceptance(log_p, log_q))
  close(losses.neg_log_acceptance(logits, log_p), -np.log1p(-tv))
  close(losses.hybrid(logits, log_p, 0.0), losses.forward_kl(logits, log_p))
  close(losses.hybrid(logits, log_p, 1e4), tv)
  apart = losses.forward_kl(logits, log_p) - losses.reverse_kl(logits, log_p)
  assert np.abs(apart).max() > 0.1  # and a direction is a direction


def test_jsd_approaches_a_kl_at_either_end():
  logits, log_p = (jnp.asarray(x, jnp.float32) for x in random_pair(4, 5))
  for beta, near in ((1e-3, losses.forward_kl), (1 - 1e-3, losses.reverse_kl)):
    got = losses.jsd(logits, log_p, beta) / min(beta, 1 - beta)
    np.testing.assert_allclose(got, near(logits, log_p), rtol=0.05)


def test_of_a_one_hot_target_minus_log_acceptance_is_cross_entropy():
  logits, _ = random_pair(5, 6)
  log_p = jnp.where(jnp.arange(6) == 2, 0.0, -INF)
  label = jnp.asarray(2)
  got = jax.value_and_grad(losses.neg_log_acceptance)(
    jnp.asarray(logits), log_p
  )
  want = jax.value_and_grad(losses.cross_entropy)(jnp.asarray(logits), label)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_minus_log_acceptance_teaches_where_total_variation_has_given_up():
  logits = jnp.asarray([0.0, 200.0])
  log_p = jnp.asarray([0.0, -INF])
  value, slope = jax.value_and_grad(losses.neg_log_acceptance)(logits, log_p)
  assert value == pytest.approx(200)
  np.testing.assert_allclose(slope, [-1, 1])
  assert not jax.grad(losses.total_variation)(logits, log_p).any()


def test_the_numbers_of_a_divergence_are_traced():
  logits, log_p = (jnp.asarray(x, jnp.float32) for x in random_pair(6, 5))
  for loss, at in ((losses.jsd, 0.3), (losses.hybrid, 2.0)):
    many = jax.jit(jax.vmap(loss, (None, None, 0)))
    got = many(logits, log_p, jnp.asarray([at, 0.9]))
    want = [loss(logits, log_p, at), loss(logits, log_p, 0.9)]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert abs(got[0] - got[1]) > 1e-2


def slow_length(rates, valid, k):
  """The definition, start by start."""
  total = np.zeros(rates.shape)
  for b, t in np.ndindex(rates.shape):
    product = 1.0
    for j in range(t, min(t + k, rates.shape[1])):
      product *= rates[b, j] * valid[b, j]
      total[b, t] -= product
  return total


@pytest.mark.parametrize('k', [1, 3, 9])
def test_expected_length_and_its_slope_equal_the_definition(k):
  rng = np.random.default_rng(7)
  surprise, valid = rng.exponential(1, (2, 6)), rng.random((2, 6)) < 0.8
  weight = rng.normal(size=(2, 6))

  def reference(surprise):
    return (weight * slow_length(np.exp(-surprise), valid, k)).sum()

  def loss(surprise):
    return (weight * losses.expected_length(surprise, valid, k)).sum()

  got = losses.expected_length(jnp.asarray(surprise), jnp.asarray(valid), k)
  want = slow_length(np.exp(-surprise), valid, k)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  slope = np.zeros((2, 6))
  for at in np.ndindex(2, 6):
    step = np.zeros((2, 6))
    step[at] = 1e-5
    up, down = reference(surprise + step), reference(surprise - step)
    slope[at] = (up - down) / 2e-5
  np.testing.assert_allclose(
    jax.grad(loss)(jnp.asarray(surprise)), slope, atol=1e-5
  )
  assert not slope[~valid].any()


def test_expected_length_is_that_of_block_efficiency():
  # Where a text has K tokens ahead; at equality it is -K.
  log_q = jnp.asarray(-np.random.default_rng(8).exponential(1, (2, 7)))
  surprise = jnp.maximum(-1 - log_q, 0)  # of a target that finds all 1 nat
  every = jnp.ones((2, 7), bool)
  want, _ = metrics.block_efficiency(jnp.full((2, 7), -1.0), log_q, every, 3)
  got = losses.expected_length(surprise, every, 3)
  np.testing.assert_allclose(got[:, :5], 1 - want, rtol=1e-5)
  sure = losses.expected_length(jnp.zeros((1, 4)), every[:1, :4], 3)
  assert sure.tolist() == [[-3, -3, -2, -1]]


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


@EVERY
def test_what_stands_on_padding_changes_no_bit(name):
  logits, log_p = random_pair(4, 2, 4, 5)
  weight = jnp.array([[1.0, 1, 0, 0], [1, 1, 1, 0]])
  labels = jnp.ones((2, 4), jnp.int32)

  @jax.jit
  @jax.value_and_grad
  def step(logits, log_p, labels):
    ce = losses.cross_entropy(logits, labels)
    return mean(ce + losses.find(name)(logits, log_p), weight)

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

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

from specjax import distill, losses, optimizing, recipes, runs, warps
from specjax.drafters.model import ModelDrafter
from specjax.models.markov import Markov
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import Batch, pytree

V, T = 7, 45  # T is no multiple of the chunk


@functools.partial(jax.jit, static_argnums=1)
def transformer(seed, vocab=V):
  config = TransformerConfig(vocab, 8, 1, 2, 1, 16)
  return Transformer(config, nnx.Rngs(jax.random.key(seed)))


@jax.jit
def markov(seed, scale=1.5):
  return Markov(scale * jax.random.normal(jax.random.key(seed), (V, V)))


# One program each for all tests, whatever the weights of the loss.
distill_loss = toys.jit(
  distill.distill_loss, static_argnames=('divergence', 'horizon_decay')
)
measure = toys.jit(distill.measure, static_argnums=3)


def windows(seed=0, rows=3):
  rng = np.random.default_rng(seed)
  segments = np.sort(rng.integers(1, 4, (rows, T)), -1)
  segments[-1, 30:] = 0
  weight = np.zeros((rows, T), np.float32)
  weight[:, 1:] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
  tokens = rng.integers(0, V, (rows, T))
  return Batch(*map(jnp.asarray, (tokens, segments, weight)))


def log_softmax(x):
  x = np.asarray(x, np.float64)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def slow_loss(q, p, batch, weights):
  """Sums position by position, from logits `[B, T, V]` of both."""
  log_q, log_p = log_softmax(q), log_softmax(p)
  total = count = 0.0
  for b in range(len(batch.tokens)):
    for t in range(T - 1):
      weight = float(batch.weight[b, t + 1])
      kl = (np.exp(log_p[b, t]) * (log_p[b, t] - log_q[b, t])).sum()
      ce = -log_q[b, t, batch.tokens[b, t + 1]]
      total += weight * (weights.ce * ce + weights.divergence * kl)
      count += weight
  return total, count


@pytest.mark.parametrize('kl_weight', [0.0, 1.0, 3.0, float('inf')])
def test_the_loss_equals_a_sum_position_by_position(kl_weight):
  target, drafter = markov(0), ModelDrafter(transformer(1), 1)
  batch, weights = windows(), distill.objective(kl_weight)
  q, p = laws(drafter, target, batch)
  wanted = slow_loss(q, p, batch, weights)
  got = distill_loss(drafter, target, batch, weights)
  np.testing.assert_allclose(got, wanted, rtol=1e-5)
  plain = toys.jit(distill.language_loss)(drafter.model, batch)
  if kl_weight == 0:
    np.testing.assert_allclose(plain, wanted, rtol=1e-5)


@toys.jit
def laws(drafter, target, batch):
  """Logits `[B, T, V]` of both, all at once."""
  forward = drafter.model.forward(batch.tokens, batch.segments)
  theirs = target.forward(batch.tokens, batch.segments)
  return drafter.model.unembed(forward.features), theirs.features


def by_hand(values, batch):
  """The sum of `[B, T]` values over the tokens they predict."""
  return (np.asarray(values)[:, :-1] * np.asarray(batch.weight)[:, 1:]).sum()


@pytest.mark.parametrize('name', losses.DIVERGENCES)
def test_a_divergence_is_taken_at_every_position_of_the_decoded_laws(name):
  target, drafter = markov(0), ModelDrafter(transformer(1), 1)
  batch, weights = windows(), distill.objective(3.0)
  q, p = map(np.asarray, laws(drafter, target, batch))
  labels = np.roll(batch.tokens, -1, 1)
  ce = by_hand(losses.cross_entropy(q, labels), batch)
  for temperature, warped in ((1.0, False), (0.5, True)):
    config = {
      'loss': {'divergence': name, 'at_decode_warp': warped},
      'decode': {'temperature': 0.5},
    }
    loss = toys.jit(recipes.loss(runs.complete(config)))
    total, count = loss(drafter, target, batch, weights)
    divergence = toys.jit(losses.find(name))
    apart = divergence(q / temperature, log_softmax(p / temperature))
    wanted = weights.ce * ce + weights.divergence * by_hand(apart, batch)
    assert total == pytest.approx(wanted, rel=1e-4)
    assert count == batch.weight.sum()


def test_at_temperature_zero_the_draft_learns_the_maximum():
  # Its own maximum would have no gradient.
  target, drafter = markov(0), ModelDrafter(transformer(1), 1)
  batch = windows()
  q, p = laws(drafter, target, batch)
  loss = recipes.loss(
    runs.complete(
      {'loss': {'at_decode_warp': True}, 'decode': {'temperature': 0.0}}
    )
  )
  goal = distill.objective(float('inf'))
  total, _ = toys.jit(loss)(drafter, target, batch, goal)
  wanted = by_hand(losses.cross_entropy(q, p.argmax(-1)), batch)
  assert total == pytest.approx(wanted, rel=1e-5)


@pytree
class Heads:
  """One table per horizon, `[H, V, V]`."""

  tables: jax.Array

  def score(self, target, batch, output):
    return jnp.moveaxis(self.tables[:, batch.tokens], 0, 2)

  def unembed(self, target, features):
    return features


@pytest.mark.parametrize('decay', [0.0, 0.8])
def test_a_horizon_weighs_less_the_further_ahead_it_looks(decay):
  rng = np.random.default_rng(3)
  heads = Heads(jnp.asarray(rng.normal(size=(3, V, V)), jnp.float32))
  target, batch, weights = markov(0), windows(), distill.objective(1.0)
  tokens, segments, weight = map(np.asarray, batch)
  log_q, log_p = log_softmax(heads.tables), log_softmax(target.logits[...])
  total = count = 0.0
  for h, b, t in np.ndindex(3, len(tokens), T):
    ahead = t + 1 + h
    if ahead < T and segments[b, t] == segments[b, ahead]:
      q, p = log_q[h, tokens[b, t]], log_p[tokens[b, ahead - 1]]
      value = weights.ce * -q[tokens[b, ahead]]
      value += weights.divergence * (np.exp(p) * (p - q)).sum()
      total += decay**h * weight[b, ahead] * value
      count += decay**h * weight[b, ahead]
  got = distill_loss(heads, target, batch, weights, horizon_decay=decay)
  np.testing.assert_allclose(got, (total, count), rtol=1e-5)


def test_a_lookahead_is_the_length_of_drafts_within_a_document():
  target, drafter = markov(0), ModelDrafter(transformer(1), 1)
  batch, k = windows(), 3
  q, p = (np.exp(log_softmax(x)) for x in laws(drafter, target, batch))
  rates, weight = np.minimum(p, q).sum(-1), np.asarray(batch.weight)
  wanted = 0.0
  for b, t in np.ndindex(len(weight), T - 1):
    for end in range(t + 1, min(t + k, T - 1) + 1):
      if weight[b, t + 1 : end + 1].all():
        wanted -= rates[b, t:end].prod()
  config = {'divergence': 'neg_log_acceptance', 'lookahead': k}
  loss = recipes.loss(runs.complete({'loss': config}))
  goal = distill.objective(float('inf'))
  total, count = toys.jit(loss)(drafter, target, batch, goal)
  assert total == pytest.approx(wanted, rel=1e-5)
  assert count == weight.sum()
  with pytest.raises(ValueError, match='lookahead is 3 .* has 2 horizons'):
    loss(Heads(jnp.zeros((2, V, V))), target, batch, goal)


def test_weights_sum_to_one_and_infinity_is_kl_alone():
  for weight in (0, 0.1, 1, 3, 1e9):
    ce, kl = distill.objective(weight)
    assert ce + kl == 1
    assert kl == pytest.approx(weight * ce)
  assert distill.objective(float('inf')) == (0, 1)
  for bad in (-0.1, float('nan')):
    with pytest.raises(ValueError, match='kl_weight is'):
      distill.objective(bad)


def test_kl_alone_ignores_a_text_that_the_draft_finds_impossible():
  # 0 · inf would be NaN: a draft that cannot say the label at all.
  table = np.zeros((V, V), np.float32)
  table[:, 0] = -np.inf
  drafter = ModelDrafter(Markov(table), 1)
  batch = windows()
  assert bool((batch.tokens == 0).any())
  goal = distill.objective(float('inf'))
  total, _ = distill_loss(drafter, markov(0), batch, goal)
  assert jnp.isfinite(total)


def test_no_gradient_reaches_the_target():
  def loss(target, drafter):
    weights = distill.objective(1.0)
    return distill.distill_loss(drafter, target, windows(), weights)[0]

  drafter = ModelDrafter(transformer(1), 1)
  grads = toys.jit(jax.grad(loss, (0, 1)))(markov(0), drafter)
  of_target, of_drafter = map(jax.tree.leaves, grads)
  assert all(not leaf.any() for leaf in of_target)
  assert any(leaf.any() for leaf in of_drafter)


def test_padding_changes_neither_loss_nor_gradient():
  batch = windows()
  tokens, segments, _ = map(np.asarray, batch)
  junk = np.where(segments == 0, (tokens + 3) % V, tokens)
  assert (junk != tokens).any()

  @toys.jit
  @jax.value_and_grad
  def loss(drafter, batch):
    weights = distill.objective(1.0)
    return distill.distill_loss(drafter, markov(0), batch, weights)[0]

  drafter = ModelDrafter(transformer(1), 1)
  one, two = loss(drafter, batch), loss(drafter, batch._replace(tokens=junk))
  # The markov target looks at the last token only, so this is bit for bit.
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    np.testing.assert_array_equal(a, b)


def largest(loss, rows, length, vocab):
  """Elements of the largest array in the compiled gradient of a loss."""

  def shapes(make):
    return jax.eval_shape(make)

  batch = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  compiled = (
    jax.jit(jax.grad(lambda *args: loss(*args)[0]))
    .lower(
      ModelDrafter(shapes(lambda: transformer(1, vocab)), 1),
      shapes(lambda: transformer(0, vocab)),
      Batch(batch, batch, jax.ShapeDtypeStruct((rows, length), jnp.float32)),
      distill.objective(1.0),
    )
    .compile()
  )
  sizes = re.findall(r'\[([\d,]+)\]', compiled.as_text())
  most = max(math.prod(map(int, size.split(','))) for size in sizes)
  return most, compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize('name', ['forward_kl', 'jsd'])
def test_no_array_of_all_logits_exists(name):
  rows, length, vocab = 1, 256, 150_000
  loss = recipes.loss(runs.complete({'loss': {'divergence': name}}))
  most, temporary = largest(loss, rows, length, vocab)
  assert most == rows * distill.CHUNK * vocab  # a chunk's do
  assert temporary < rows * length * vocab * 4


def test_without_recomputation_all_logits_would_be_kept(monkeypatch):
  monkeypatch.setattr(jax, 'checkpoint', lambda f: f)
  most, temporary = largest(distill.distill_loss, 1, 256, 150_000)
  assert most >= 256 * 150_000
  assert temporary > 256 * 150_000 * 4


def test_every_kl_weight_runs_the_same_program():
  tx = optimizing.optimizer(1e-2, 10, 1)
  step = toys.jit(optimizing.make_step(distill.distill_loss, tx))
  state = optimizing.init(ModelDrafter(transformer(1), 1), tx)
  for weight in (0.0, 0.3, float('inf')):
    step(state, markov(0), windows(), distill.objective(weight))
  assert step._cache_size() == 1


def stack(trees):
  return jax.tree.map(lambda *x: np.stack(x), *trees)


def test_students_share_one_pass_of_the_target():
  config = TransformerConfig(V, 64, 2, 2, 1, 128)
  target, batch = Transformer(config, nnx.Rngs(0)), windows()

  def work(students, of_target):
    def loss(drafter, target, goal):
      return distill.distill_loss(drafter, target, batch, goal)[0]

    targets = stack([target] * students) if of_target == 0 else target
    drafters = stack([ModelDrafter(markov(1), 1)] * students)
    goals = stack([distill.objective(1.0)] * students)
    mapped = jax.jit(jax.vmap(loss, (0, of_target, 0)))
    return mapped.lower(drafters, targets, goals).cost_analysis()['flops']

  assert work(4, None) < 1.2 * work(1, None)
  assert work(4, 0) > 3 * work(1, 0)  # one for each would be seen


def test_students_trained_together_are_those_trained_alone():
  tx = optimizing.optimizer(1e-2, 10, 1)
  step = optimizing.make_step(distill.distill_loss, tx)
  target = markov(0)
  drafters = [ModelDrafter(transformer(seed), 1) for seed in (1, 2)]
  goals = [distill.objective(weight) for weight in (0.0, float('inf'))]
  together = toys.jit(jax.vmap(step, in_axes=(0, None, None, 0)))
  init = jax.jit(lambda model: optimizing.init(model, tx))
  state = jax.vmap(init)(stack(drafters))
  for i in range(3):
    state, _ = together(state, target, windows(i), stack(goals))
  alone = toys.jit(step)
  for i, (drafter, goal) in enumerate(zip(drafters, goals, strict=True)):
    single = init(drafter)
    for j in range(3):
      single, _ = alone(single, target, windows(j), goal)
    for a, b in zip(
      jax.tree.leaves(single.model), jax.tree.leaves(state.model), strict=True
    ):
      np.testing.assert_allclose(a, b[i], atol=1e-5)


def test_distilling_teaches_the_target_and_measure_sees_it():
  """A table can learn a table exactly, so acceptance must go to one."""
  target, drafter = markov(0), ModelDrafter(markov(1), 1)
  tx = optax.adam(0.1)
  step = toys.jit(optimizing.make_step(distill.distill_loss, tx))
  state = optimizing.init(drafter, tx)
  warp, batch = warps.temperature(0.7), windows()

  def measured(drafter):
    return distill.means([measure(drafter, target, warp, 2, batch)])

  before = measured(drafter)
  p = np.exp(log_softmax(target.logits[...] / 0.7))[batch.tokens]
  q = np.exp(log_softmax(drafter.model.logits[...] / 0.7))[batch.tokens]
  exact = np.minimum(p, q).sum(-1)[:, :-1]
  weight = np.asarray(batch.weight)[:, 1:]
  assert before['acceptance'] == pytest.approx(
    (exact * weight).sum() / weight.sum(), abs=1e-5
  )
  assert before['acceptance'] < 0.7
  for i in range(300):
    state, _ = step(state, target, windows(i), distill.objective(float('inf')))
  after = measured(state.model)
  assert after['acceptance'] > 0.97
  assert after['kl'] < 0.01 < before['kl']
  assert after['block_efficiency'] > 2.9 > before['block_efficiency']


@pytest.mark.parametrize('temperature', [0.0, 0.7])
def test_every_measurement_equals_float64(temperature):
  target, drafter = markov(0, scale=3), ModelDrafter(markov(1), 1)
  k, batches = 2, [windows(0), windows(1)]
  warp = warps.temperature(temperature)
  got = distill.means(
    measure(drafter, target, warp, k, batch) for batch in batches
  )

  def decoded(logits):
    if temperature:
      return np.exp(log_softmax(logits / temperature))
    return np.eye(V)[logits.argmax(-1)]

  models = target.logits[...], drafter.model.logits[...]
  p, q = (decoded(np.asarray(x, np.float64)) for x in models)
  raw_p, raw_q = map(log_softmax, models)
  with np.errstate(divide='ignore', invalid='ignore'):
    kl = np.where(p > 0, p * (np.log(p) - np.log(q)), 0).sum(-1)
    entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
  rate = np.minimum(p, q).sum(-1)
  of_token = {
    'acceptance': rate,
    'floor/pinsker': np.maximum(1 - np.sqrt(kl / 2), 0),
    'floor/bretagnolle_huber': 1 - np.sqrt(1 - np.exp(-kl)),
    'kl': (np.exp(raw_p) * (raw_p - raw_q)).sum(-1),
    'reverse_kl': (np.exp(raw_q) * (raw_q - raw_p)).sum(-1),
  }
  pairs = [
    (int(b.tokens[i, t]), int(b.tokens[i, t + 1]))
    for b in batches
    for i, t in np.ndindex(len(b.tokens), T - 1)
    if b.weight[i, t + 1]
  ]
  here, ahead = np.array(pairs).T
  want = {name: value[here].mean() for name, value in of_token.items()}
  want['nats'] = -raw_q[here, ahead].mean()
  want['target_nats'] = -raw_p[here, ahead].mean()
  want['perplexity'] = np.exp(want['nats'])
  want['target_perplexity'] = np.exp(want['target_nats'])
  for low, high in itertools.pairwise((0, 0.5, 1, 2, 4, np.inf)):
    inside = (low <= entropy[here]) & (entropy[here] < high)
    if inside.any():
      name = f'entropy_{low:g}-{high:g}'
      want[f'acceptance/{name}'] = rate[here][inside].mean()
      want[f'tokens/{name}'] = inside.sum()
  passes = np.where(p > 0, np.minimum(1, q / np.where(p > 0, p, 1)), q > 0)
  once, twice = [], []
  for b in batches:
    for i, t in np.ndindex(len(b.tokens), T - 2):
      if b.weight[i, t + 1] and b.weight[i, t + 2]:
        x, y, z = map(int, b.tokens[i, t : t + 3])
        once.append(passes[x, y])
        twice.append(passes[x, y] * passes[y, z])
  want['acceptance/depth_1'] = np.mean(once)
  want['acceptance/depth_2'] = np.mean(twice) / np.mean(once)
  want['block_efficiency'] = 1 + np.mean(once) + np.mean(twice)
  assert sorted(got) == sorted(want)
  for name, value in want.items():
    assert float(got[name]) == pytest.approx(value, rel=1e-4, abs=1e-5), name
  assert want['tokens/entropy_0-0.5'] < len(pairs) or not temperature


def test_drafts_measured_together_are_those_measured_alone():
  target, batch = markov(0), windows()
  mapped = jax.vmap(distill.measure, (0, None, None, None, None))
  drafters = [ModelDrafter(markov(seed), 1) for seed in (1, 2)]
  warp = warps.temperature(0.7)
  mapped = toys.jit(mapped, static_argnums=3)
  together = mapped(stack(drafters), target, warp, 2, batch)
  together = distill.means([together])
  for i, drafter in enumerate(drafters):
    alone = distill.means([measure(drafter, target, warp, 2, batch)])
    assert alone.keys() == together.keys()
    for name, value in alone.items():
      np.testing.assert_allclose(together[name][i], value, rtol=1e-5)


def test_a_horizon_looks_further_ahead_within_its_document():
  tokens = jnp.array([[5, 6, 1, 2, 3]])
  segments = jnp.array([[1, 1, 2, 2, 2]])
  weight = jnp.array([[0.0, 1, 0, 1, 1]])
  batch = Batch(tokens, segments, weight)
  labels, counted = distill._ahead(batch, 0)
  assert labels.tolist() == [[6, 1, 2, 3, 0]]
  assert counted.tolist() == [[1, 0, 1, 1, 0]]
  labels, counted = distill._ahead(batch, 1)
  assert labels.tolist() == [[1, 2, 3, 0, 0]]
  assert counted.tolist() == [[0, 0, 1, 0, 0]]

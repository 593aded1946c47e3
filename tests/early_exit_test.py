"""The target's first layers, drafting on the target's own cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import decode, distill, generation, losses, verify, warps
from specjax.drafters import early_exit
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.none import NoDrafter
from specjax.models.transformer import TransformerConfig
from specjax.types import Batch, Limit, pytree

V = 7
SIZES = dict(vocab_size=V, width=8, heads=2, kv_heads=1, hidden=8)
TARGET = toys.transformer(layers=2, **SIZES)
ADAPTER = jnp.asarray(np.random.default_rng(0).normal(0, 0.3, (8, 8)))
PROMPTS = [[3], [1, 2, 1], [0, 6, 5] * 5]
NEVER = jnp.zeros(0, jnp.int32)

pytestmark = pytest.mark.usefixtures('quick_compilation')
step = toys.jit(decode.step, static_argnums=2)


@pytree
class Limited:
  """A drafter under a limit of so many nodes, of which rows stop before."""

  inner: EarlyExit
  nodes: jax.Array
  stops: jax.Array

  def propose(self, *args):
    limit = Limit(self.nodes, lambda i, logits: i < self.stops)
    return self.inner.propose(*args, limit)

  def observe(self, *args):
    return self.inner.observe(*args)


def start(drafter, target=TARGET, new=45):
  return generation.start(
    target, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=new
  )


@toys.jit
def score(drafter, tokens):
  """Laws `[B, T, V]` of training, behind every token."""
  ones = jnp.ones_like(tokens)
  batch = Batch(tokens, ones, jnp.ones(tokens.shape))
  output = TARGET.forward(tokens, ones)
  features = drafter.score(TARGET, batch, output)
  return drafter.unembed(TARGET, features[:, :, 0])


@pytest.mark.parametrize(
  'adapter',
  [pytest.param(None, marks=pytest.mark.slow), ADAPTER],
  ids=['bare', 'adapter'],
)
def test_a_node_s_law_is_that_of_its_context(adapter):
  """Behind the committed tokens and the nodes above it, rejected ones never.

  So the target's cache is what it should be, and the rows of a round are too.
  """
  drafter = EarlyExit(1, 4, adapter)
  state, counts = start(drafter), set()
  for turn in range(16):
    before = state._replace(done=jnp.asarray([False, turn == 5, False]))
    rule, warp = verify.rejection, warps.UNCHANGED
    state, seen = step(TARGET, drafter, rule, warp, NEVER, before)
    text, length = np.array(before.tokens), np.asarray(before.length)
    for row in range(3):
      text[row, length[row] : length[row] + 4] = seen.draft.tokens[row]
    laws = score(drafter, text)
    for row in range(3):
      want = laws[row, length[row] - 1 : length[row] + 3]
      np.testing.assert_allclose(seen.draft.logits[row], want, atol=1e-4)
    counts |= set(np.asarray(seen.accepted).sum(-1).tolist())
  assert counts == {0, 1, 2, 3, 4}


def test_all_layers_are_always_right():
  """Greedy; and nothing but the draft's nodes is fed."""
  drafter = EarlyExit(2, 4, warp=warps.Greedy())
  result = generation.generate(
    TARGET,
    drafter,
    PROMPTS,
    key=jax.random.key(0),
    max_new_tokens=40,
    warp=warps.Greedy(),
  )
  assert result.stats.rounds.tolist() == [8] * 3
  assert result.stats.accepted.tolist() == [32] * 3


@pytest.mark.parametrize(
  'k', [pytest.param(k, marks=pytest.mark.slow) for k in (0, 1)] + [4]
)
def test_greedy_text_is_the_plain_one(k):
  """Ragged prompts and limits, and an end token wherever it comes."""

  def text(drafter):
    return generation.generate(
      TARGET,
      drafter,
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=[7, 20, 33],
      warp=warps.Greedy(),
      eos=2,
    ).new_tokens()

  assert text(EarlyExit(1, 4, ADAPTER).at(k)) == text(NoDrafter())


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours():
  keys = jax.random.split(jax.random.key(3), 3)

  def text(order):
    result = generation.generate(
      TARGET,
      EarlyExit(1, 4),
      [PROMPTS[i] for i in order],
      key=keys[np.array(order)],
      max_new_tokens=30,
    )
    return dict(zip(order, result.new_tokens(), strict=True))

  assert text([2, 1, 0]) == text([0, 1, 2])


def test_a_limit_is_heeded():
  """In one program, as are temperatures."""
  state = start(EarlyExit(1, 4))
  sizes = set()
  for nodes, stops, temperature in (
    (4, [4, 2, 0], 1.0),
    (2, [4, 1, 0], 0.5),
    (0, [4, 4, 4], 0.0),
    (4, [0, 0, 0], 1.0),
  ):
    warp = warps.Temperature(temperature)
    drafter = Limited(
      EarlyExit(1, 4, warp=warp), jnp.array(nodes), jnp.array(stops)
    )
    state, seen = step(TARGET, drafter, verify.rejection, warp, NEVER, state)
    wanted = np.minimum(nodes, stops)
    np.testing.assert_array_equal(seen.draft.valid.sum(-1), wanted)
    sizes.add(step._cache_size())
  assert len(sizes) == 1


@pytest.mark.slow
def test_the_adapter_learns_from_every_loss_and_the_target_does_not():
  tokens = np.random.default_rng(1).integers(0, V, (2, 9))
  ones = np.ones_like(tokens)
  batch = Batch(*map(jnp.asarray, (tokens, ones, ones.astype(np.float32))))

  def loss(drafter, target, name):
    total, count = distill.distill_loss(
      drafter,
      target,
      batch,
      distill.objective(3.0),
      divergence=losses.find(name),
    )
    return total / count

  @toys.jit
  def run(drafter):
    found = {}
    for name in losses.DIVERGENCES:
      value, gradients = jax.value_and_grad(loss, (0, 1))(drafter, TARGET, name)
      moved = drafter.adapter - 0.01 * gradients[0].adapter
      moved = dataclasses.replace(drafter, adapter=moved)
      found[name] = value, loss(moved, TARGET, name), gradients
    return found

  for before, after, (own, theirs) in run(
    EarlyExit(1, 4, jnp.zeros((8, 8)))
  ).values():
    assert after < before
    assert jnp.isfinite(own.adapter).all()
    assert not any(leaf.any() for leaf in jax.tree.leaves(theirs))


def test_a_configuration_builds_one_that_is_the_bare_exit():
  target = TransformerConfig(V, 8, 7, 1, 1, 8)
  config = {'k': 4}
  built = early_exit.build(config, target, None)
  assert (built.layers, built.k, built.adapter.shape) == (2, 4, (8, 8))
  assert not built.adapter.any()
  assert early_exit.build({**config, 'layers': 5}, target, None).layers == 5


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match='draft length k is -1'):
    EarlyExit(1, -1)
  for layers in (0, 3):
    with pytest.raises(ValueError, match='of a model that has 2'):
      start(EarlyExit(layers, 2))
  with pytest.raises(ValueError, match='Markov has none to leave early'):
    start(EarlyExit(1, 2), toys.markov(vocab=V))

"""Lookup in the rows that have a match, a draft model in the others."""

import dataclasses

import drafters_test
import jax
import jax.numpy as jnp
import law_test
import numpy as np
import oracles
import pytest
import toys

from specjax import decode, generation, verify, warps
from specjax.drafters.mixture import Mixture
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.tree import TreeDrafter
from specjax.models.markov import Markov
from specjax.types import Draft, Keys, Limit, Noise, pytree

V = 7
TABLE = oracles.table(0, 2, V, 2.0)
TARGET = Markov(TABLE)
NEAR = Markov(TABLE + oracles.table(1, 2, V, 1.0))
# Without a match, with one, and with one that is cut short.
PROMPTS = [[3], [0, 6, 5] * 5, [1, 2, 1]]
NEVER = jnp.zeros(0, jnp.int32)

pytestmark = pytest.mark.usefixtures('quick_compilation')


def mixture(k, model=NEAR, n=3, least=1, warp=warps.UNCHANGED):
  return Mixture(NGram(k, n, least), ModelDrafter(model, k, warp))


@pytest.mark.parametrize(
  'check',
  [
    drafters_test.test_a_proposal_is_a_chain_of_ids_in_range,
    drafters_test.test_a_proposal_ignores_the_batch_and_what_lies_behind,
    drafters_test.test_at_changes_only_the_length,
  ],
)
def test_it_is_a_drafter(check, monkeypatch):
  monkeypatch.setitem(drafters_test.DRAFTERS, 'mixture', mixture(8))
  check('mixture')


def draft(drafter, limit=None):
  """What it proposes behind the prompts, on a cold memory."""
  tokens = np.zeros((3, 48), np.int32)
  for row, prompt in zip(tokens, PROMPTS, strict=True):
    row[: len(prompt)] = prompt
  rows = jax.random.split(jax.random.key(0), 3)
  propose = toys.jit(lambda *args: drafter.propose(*args, limit))
  return propose(
    TARGET,
    TARGET.init_cache(3, 48),
    drafter.init(TARGET, 3, 112),
    Keys(rows, rows),
    tokens,
    jnp.array([len(p) for p in PROMPTS]),
  )[0]


def test_each_row_has_the_draft_of_the_part_that_found_it():
  both = mixture(4)
  mixed, copied, drawn = map(draft, (both, both.lookup, both.model))
  assert mixed.valid.sum(-1).tolist() == [4, 3, 2]
  np.testing.assert_array_equal(mixed.tokens[1:], copied.tokens[1:])
  np.testing.assert_array_equal(mixed.valid[1:], copied.valid[1:])
  np.testing.assert_array_equal(mixed.tokens[0], drawn.tokens[0])
  np.testing.assert_array_equal(mixed.logits[0], drawn.logits[0])
  point = np.where(np.arange(V) == copied.tokens[1:, :, None], 0, -np.inf)
  np.testing.assert_array_equal(mixed.logits[1:], point)


@pytest.mark.parametrize(
  ('nodes', 'stops', 'expected'),
  [
    (3, [1, 0, 0], [1, 3, 2]),  # a copy is cut, and stops for no law
    (1, [4, 4, 4], [1, 1, 1]),
    (0, [4, 4, 4], [0, 0, 0]),
  ],
)
def test_a_limit_is_heeded(nodes, stops, expected):
  limit = Limit(jnp.array(nodes), lambda i, _: i < jnp.array(stops))
  limited = draft(mixture(4), limit)
  assert limited.tokens.shape == (3, 4)
  assert limited.valid.sum(-1).tolist() == expected


@pytest.mark.parametrize('rule', ['rejection', 'block', 'traversal'])
def test_a_point_mass_with_logits_is_one_without(rule):
  """What lets both kinds of row share one draft."""
  rng = np.random.default_rng(0)
  rows, n = 200, 3
  log_p = oracles.log(rng.dirichlet(np.full(V, 0.3), (rows, n + 1)))
  log_p[rng.random(log_p.shape) < 0.1] = -np.inf
  log_p = np.array(jax.nn.log_softmax(log_p))
  likely = rng.random((rows, n)) < 0.8
  tokens = np.where(likely, log_p[:, :n].argmax(-1), rng.integers(V))
  tokens = jnp.asarray(tokens)
  point = jnp.where(jnp.arange(V) == tokens[..., None], 0.0, -jnp.inf)
  valid = jnp.asarray(np.arange(n) < rng.integers(0, n + 1, (rows, 1)))
  noise = Noise(
    jnp.log1p(-jnp.asarray(rng.random((rows, n), np.float32))),
    jax.random.split(jax.random.key(0), (rows, n + 1)),
  )
  run = toys.jit(jax.vmap(verify.RULES[rule]))
  got = run(noise, Draft(tokens, logits=point, valid=valid), log_p)
  want = run(noise, Draft(tokens, valid=valid, siblings='fixed'), log_p)
  np.testing.assert_array_equal(got.accepted, want.accepted)
  np.testing.assert_array_equal(got.fault, want.fault)
  np.testing.assert_allclose(got.law, want.law, atol=1e-6)
  np.testing.assert_allclose(got.log_tests, want.log_tests, atol=1e-6)
  assert 0.1 < got.accepted.mean() < 0.9


@pytree
class Misscored(Mixture):
  """Gives, if told so, what was copied the model's law."""

  wrong: bool = False

  def propose(self, target, cache, memory, keys, tokens, length):
    draft, memory = super().propose(target, cache, memory, keys, tokens, length)
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    before = jnp.concatenate([pending, draft.tokens[:, :-1]], 1)
    claimed = self.model.model.logits[...][before]
    logits = jnp.where(self.wrong, claimed, draft.logits)
    return dataclasses.replace(draft, logits=logits), memory


def p_value(rule, wrong=False):
  model = ModelDrafter(Markov(law_test.DRAFT), 3)
  drafter = Misscored(NGram(3), model, wrong)
  return law_test.p_value(
    Markov(law_test.TARGET), drafter, verify.as_pytree(rule)
  )


@pytest.mark.parametrize(
  'rule',
  [verify.rejection, pytest.param(verify.block, marks=pytest.mark.slow)],
)
def test_the_law_is_the_target_s(rule):
  assert p_value(rule) >= 1e-4


def test_a_copy_with_the_law_of_the_model_is_caught():
  assert p_value(verify.rejection, wrong=True) < 1e-4


@pytest.mark.parametrize('k', [0, 1, 4])
def test_greedy_text_is_the_plain_one(k):
  result = generation.generate(
    TARGET,
    mixture(k),
    PROMPTS,
    key=jax.random.key(0),
    max_new_tokens=[30, 7, 30],
    warp=warps.Greedy(),
  )
  assert result.new_tokens() == [
    oracles.greedy(TABLE, prompt, new)
    for prompt, new in zip(PROMPTS, (30, 7, 30), strict=True)
  ]


@pytree
class Unaware(Mixture):
  """Takes what was copied for what its model has fed."""

  def observe(self, target, memory, block, kept, output):
    own = self.model.observe(target, memory.model, block, kept, output)
    return memory._replace(model=own)

  def at(self, k):
    return Unaware(self.lookup.at(k), self.model.at(k))


@pytest.mark.slow
@pytest.mark.parametrize('cls', [Mixture, Unaware])
def test_the_model_s_memory_describes_what_was_committed(cls):
  """Through rounds of copying, of drawing, of neither and of rest."""
  step = toys.jit(decode.step, static_argnums=2)
  rng, parts = np.random.default_rng(0), mixture(8, n=4, least=2)
  drafter = cls(parts.lookup, parts.model)
  seen, wrong = set(), 0
  for seed in range(24):
    state = generation.start(
      TARGET, drafter, PROMPTS, key=jax.random.key(seed), max_new_tokens=60
    )
    size = state.tokens.shape[1]
    for _ in range(20):
      k = int(rng.choice([0, 4, 8]))
      resting = (rng.random(3) < 0.1) | (state.length >= state.stop)
      state, found = step(
        TARGET,
        drafter.at(k),
        verify.rejection,
        warps.Temperature(float(rng.choice([0.3, 1.0]))),
        NEVER,
        state._replace(done=jnp.asarray(resting)),
      )
      own, tokens = state.memory.model.cache, np.asarray(state.tokens)
      assert (own.length <= state.length - 1).all()
      fed = np.arange(size) < np.asarray(own.length)[:, None]
      held = np.asarray(own.rows)[:, 0, :size, 0]
      wrong += (held != tokens)[fed].sum()
      if k == 4:
        # Of a point mass the law rules out all tokens but one.
        points = (found.draft.logits[:, 0] > -np.inf).sum(-1) == 1
        counts = found.accepted.sum(-1)
        seen |= set(zip(points.tolist(), counts.tolist(), strict=True))
  assert (wrong > 0) == (cls is Unaware)
  assert seen >= {(p, n) for p in (True, False) for n in range(5)}, seen


def test_a_model_that_is_not_needed_is_not_run():
  """Its memory stays where it was while every row copies."""
  cycle = np.full((V, V), -9, np.float32)
  cycle[np.arange(V), (np.arange(V) + 1) % V] = 9
  target, drafter = Markov(cycle), mixture(4, Markov(cycle))
  state = generation.start(
    target,
    drafter,
    [[*range(V), 0, 1], [*range(V), 0]],
    key=jax.random.key(0),
    max_new_tokens=40,
  )
  step = toys.jit(decode.step, static_argnums=2)
  for _ in range(4):
    state, _ = step(
      target, drafter, verify.rejection, warps.Greedy(), NEVER, state
    )
    assert state.memory.model.cache.length.tolist() == [0, 0]
  assert (state.length > 15).all()


def test_a_row_does_not_depend_on_its_neighbours():
  keys = jax.random.split(jax.random.key(3), 3)

  def text(order):
    result = generation.generate(
      TARGET,
      mixture(4),
      [PROMPTS[i] for i in order],
      key=keys[np.array(order)],
      max_new_tokens=30,
    )
    return dict(zip(order, result.new_tokens(), strict=True))

  assert text([2, 1, 0]) == text([0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['fallback', 'adaptive', 'confidence'])
def test_a_controller_leaves_the_law_alone(name):
  model = ModelDrafter(Markov(law_test.DRAFT), 3)
  p_value = law_test.p_value(
    Markov(law_test.TARGET),
    Mixture(NGram(3), model),
    verify.as_pytree(verify.rejection),
    controller=law_test.CONTROLLERS[name],
  )
  assert p_value >= 1e-4


def test_parts_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match='3 tokens and the model 4'):
    Mixture(NGram(3), ModelDrafter(NEAR, 4))
  with pytest.raises(ValueError, match='of chains'):
    generation.generate(
      TARGET,
      Mixture(NGram(2), TreeDrafter(NEAR, 2)),
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=4,
    )

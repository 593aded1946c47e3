"""Drafters of trees, and the coupled one, in the whole loop."""

import jax
import jax.numpy as jnp
import law_test
import numpy as np
import oracles
import pytest
import toys

from specjax import decode, generation, verify, warps
from specjax.candidates import CandidateTree
from specjax.drafters.committee import Committee
from specjax.drafters.coupled import CoupledDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.drafters.tree import TreeDrafter
from specjax.models.markov import Markov
from specjax.types import Block, Keys

MODEL = Markov(law_test.DRAFT)
OTHER = Markov(oracles.table(55, 1, 3, 2.0))
DRAFTERS = {
  'iid': TreeDrafter(MODEL, 2, branching=(2, 2), replacement=True),
  'paths': TreeDrafter(MODEL, 3, branching=(3,), replacement=True),
  'distinct': TreeDrafter(MODEL, 2, branching=(2, 2)),
  'committee': Committee((ModelDrafter(MODEL, 2), ModelDrafter(OTHER, 2))),
  'candidates': CandidateTree(
    toys.heads(3, 3).heads, 3, paths=((0,), (2,), (0, 1), (2, 0), (0, 1, 0))
  ),
}
RULES = {
  'iid': ('rejection', 'traversal', 'k_seq', 'sampler_match'),
  'paths': ('k_seq',),
  'distinct': ('rejection', 'traversal', 'sampler_match'),
  'committee': ('rejection', 'traversal', 'sampler_match'),
  'candidates': ('rejection', 'traversal', 'sampler_match'),
}
SOONER = [('distinct', 'traversal')]
PAIRS = [
  pytest.param(
    name, rule, marks=[] if (name, rule) in SOONER else [pytest.mark.slow]
  )
  for name, rules in RULES.items()
  for rule in rules
]

V = 7
TABLE = oracles.table(0, 2, V, 2.0)
TARGET = Markov(TABLE)
NEAR = Markov(TABLE + oracles.table(1, 2, V, 1.0))
FAR = Markov(TABLE + oracles.table(2, 2, V, 2.0))
PROMPTS = [[3], [1, 2, 1], [0, 6, 5] * 5]
TREES = {
  'iid': TreeDrafter(NEAR, 3, branching=(3, 2, 1), replacement=True),
  'distinct': TreeDrafter(NEAR, 3, branching=(2, 2, 2)),
  'committee': Committee((ModelDrafter(NEAR, 3), ModelDrafter(FAR, 3))),
}
trees = pytest.mark.parametrize('name', TREES)
pytestmark = pytest.mark.usefixtures('quick_compilation')


@pytest.mark.parametrize(('name', 'rule'), PAIRS)
def test_the_law_is_the_target_s(name, rule):
  rule = jax.tree_util.Partial(verify.RULES[rule])
  target = Markov(law_test.TARGET)
  assert law_test.p_value(target, DRAFTERS[name], rule) >= 1e-4


@pytest.mark.parametrize(
  'rule',
  [
    'block',
    pytest.param('traversal', marks=pytest.mark.slow),
    pytest.param('k_seq', marks=pytest.mark.slow),
  ],
)
@pytest.mark.slow
def test_the_law_of_a_chain_is_the_target_s(rule):
  rule = jax.tree_util.Partial(verify.RULES[rule])
  target, drafter = Markov(law_test.TARGET), ModelDrafter(MODEL, 3)
  assert law_test.p_value(target, drafter, rule) >= 1e-4


@pytest.mark.slow
def test_siblings_scored_with_the_law_of_the_first_are_caught():
  @jax.tree_util.Partial
  def wrong(noise, draft, log_p):
    logits = draft.logits.at[1].set(draft.logits[0])
    scored = type(draft)(
      draft.tokens, draft.parents, logits, draft.valid, draft.siblings
    )
    return verify.rejection(noise, scored, log_p)

  target = Markov(law_test.TARGET)
  assert law_test.p_value(target, DRAFTERS['distinct'], wrong) < 1e-4


@trees
@pytest.mark.parametrize(
  'rule',
  [
    'rejection',
    pytest.param('traversal', marks=pytest.mark.slow),
    pytest.param('sampler_match', marks=pytest.mark.slow),
  ],
)
@pytest.mark.slow
def test_greedy_text_is_the_plain_one(name, rule):
  """Ragged prompts, limits, and an end token wherever it comes."""
  for eos in ((), (2,)):
    result = generation.generate(
      TARGET,
      TREES[name],
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=[7, 20, 33],
      min_new_tokens=[0, 3, 0],
      warp=warps.Greedy(),
      eos=eos,
      verifier=verify.RULES[rule],
    )
    assert result.new_tokens() == [
      oracles.greedy(TABLE, prompt, new, eos, least)
      for prompt, new, least in zip(
        PROMPTS, (7, 20, 33), (0, 3, 0), strict=True
      )
    ]
    assert (result.stats.accepted > 0).all()
    assert (result.stats.passed <= result.stats.tested).all()
    new = result.length - result.prompt_length
    assert (result.stats.accepted + result.stats.rounds >= new).all()


@pytest.mark.parametrize('name', [*TREES, 'coupled'])
@pytest.mark.slow
def test_sampler_match_draws_the_plain_stream(name):
  coupled = {'coupled': CoupledDrafter(NEAR, 4)}

  def text(drafter):
    return generation.generate(
      TARGET,
      drafter,
      PROMPTS,
      key=jax.random.key(5),
      max_new_tokens=30,
      verifier=verify.sampler_match,
    )

  plain, guessed = text(NoDrafter()), text((TREES | coupled)[name])
  assert guessed.new_tokens() == plain.new_tokens()
  assert (guessed.stats.rounds < 30).all()


@pytest.mark.slow
def test_a_coupled_draft_agrees_more_than_an_uncoupled_one():
  """At least (1 - TV) / (1 + TV) of its first tokens."""
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.ones(V), V)
  q = 0.7 * p + 0.3 * rng.dirichlet(np.ones(V), V)
  target, model = (Markov(oracles.log(x)) for x in (p, q))

  def rate(drafter):
    result = generation.generate(
      target,
      drafter,
      [[0], [3]],
      key=jax.random.key(0),
      max_new_tokens=1900,
      verifier=verify.sampler_match,
    )
    tested, passed = result.stats.tested.sum(0), result.stats.passed.sum(0)
    return passed[0] / tested[0]

  tv = 0.5 * abs(p - q).sum(-1).max()
  assert rate(CoupledDrafter(model, 1)) > (1 - tv) / (1 + tv) - 0.01
  assert rate(ModelDrafter(model, 1)) < (p * q).sum(-1).max() + 0.02


def test_coupled_drafts_are_refused_by_other_rules():
  with pytest.raises(ValueError, match="'coupled'"):
    generation.generate(
      TARGET,
      CoupledDrafter(NEAR, 2),
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=4,
    )


@pytest.mark.parametrize(
  'replacement', [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_a_perfect_tree_is_always_right(replacement):
  """Greedy, so that a memory that kept another branch would show."""
  drafter = TreeDrafter(
    TARGET, 3, warps.Greedy(), branching=(2, 2, 1), replacement=replacement
  )
  state = generation.start(
    TARGET, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=40
  )
  advance = toys.jit(decode.advance, static_argnums=2)
  eos = jnp.zeros(0, jnp.int32)
  state = advance(
    TARGET, drafter, verify.rejection, warps.Greedy(), eos, state, 99
  )
  assert state.stats.rounds.tolist() == [10] * 3
  assert state.stats.accepted.tolist() == [30] * 3


@trees
@pytest.mark.slow
def test_more_siblings_accept_more(name):
  """A tree's first depth is kept more often than a chain's."""

  def rate(drafter):
    result = generation.generate(
      TARGET,
      drafter,
      [[0], [3]],
      key=jax.random.key(0),
      max_new_tokens=1900,
    )
    return result.stats.passed.sum(0)[0] / result.stats.tested.sum(0)[0]

  assert rate(TREES[name]) > rate(ModelDrafter(NEAR, 3)) + 0.02


@pytest.mark.parametrize(
  'name',
  [
    'distinct',
    pytest.param('iid', marks=pytest.mark.slow),
    pytest.param('committee', marks=pytest.mark.slow),
  ],
)
def test_memory_holds_what_was_committed(name):
  """The oracle's cache holds tokens, so every entry can be read."""
  step = toys.jit(decode.step, static_argnums=2)
  eos, rng = jnp.array([2]), np.random.default_rng(0)
  drafter, counts = TREES[name], set()
  for seed in range(4):
    state = generation.start(
      TARGET, drafter, PROMPTS, key=jax.random.key(seed), max_new_tokens=40
    )
    for _ in range(25):
      k = int(rng.choice([0, 3, 3, 3]))
      going = state._replace(done=jnp.asarray(rng.random(3) < 0.1))
      going = going._replace(done=going.done | (state.length >= state.stop))
      before = going.length
      state, seen = step(
        TARGET, drafter.at(k), verify.rejection, warps.UNCHANGED, eos, going
      )
      counts |= set((np.asarray(state.length) - np.asarray(before)).tolist())
      tokens = np.asarray(state.tokens)
      memories = [state.memory] if name != 'committee' else state.memory
      for own in (memory.cache for memory in memories):
        assert (own.length <= state.length - 1).all()
        held = np.asarray(own.rows)[:, 0, : tokens.shape[1], 0]
        fed = np.arange(tokens.shape[1]) < np.asarray(own.length)[:, None]
        np.testing.assert_array_equal(held[fed], tokens[fed])
      np.testing.assert_array_equal(state.cache.length, state.length - 1)
  assert counts == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
  'replacement', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_memory_of_a_transformer_is_that_of_a_fresh_one(replacement):
  """Rows of the kept path were computed behind just that path."""
  model = toys.transformer(vocab_size=V, width=8, heads=2, kv_heads=1, hidden=8)
  drafter = TreeDrafter(model, 3, branching=(2, 2, 2), replacement=replacement)
  step = toys.jit(decode.step, static_argnums=2)
  state = generation.start(
    model, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=45
  )
  eos = jnp.zeros(0, jnp.int32)
  for _ in range(12):
    state, _ = step(
      model, drafter, verify.rejection, warps.UNCHANGED, eos, state
    )
  assert (state.stats.accepted > 12).all()  # the draft is the target
  size = state.tokens.shape[1]
  _, want = model.extend(Block(state.tokens), model.init_cache(3, 1))
  for cache in (state.cache, state.memory.cache):
    live = np.arange(size) < np.asarray(cache.length)[:, None]
    live = live[:, None, :, None]
    for got, right in zip(
      jax.tree.leaves(cache.rows), jax.tree.leaves(want), strict=True
    ):
      np.testing.assert_allclose(
        np.where(live, got[:, :, :size], 0),
        np.where(live, right, 0),
        rtol=1e-4,
        atol=1e-5,
      )


@pytest.mark.slow
def test_siblings_beyond_the_support_are_invalid():
  """Three children of a law of two tokens; a -inf logit is no token."""
  logits = np.full((V, V), -np.inf, np.float32)
  logits[:, :2] = 0
  drafter = TreeDrafter(Markov(logits), 2, branching=(3, 2))
  keys = jax.random.split(jax.random.key(0), 2)
  tokens = jnp.array([[1, 0, 0, 0], [0, 0, 0, 0]])
  cache = TARGET.init_cache(2, 8)
  draft, _ = toys.jit(drafter.propose)(
    TARGET,
    cache,
    drafter.init(TARGET, 2, 8),
    Keys(keys, keys),
    tokens,
    jnp.ones(2, jnp.int32),
  )
  assert draft.valid[:, :3].tolist() == [[True, True, False]] * 2
  for row in range(2):
    assert sorted(draft.tokens[row, :2].tolist()) == [0, 1]
    # What hangs off an invalid node is invalid.
    below = draft.parents[row] == 2
    assert below.sum() == 2 and not draft.valid[row][below].any()
  result = generation.generate(
    TARGET, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=10
  )
  assert (result.length - result.prompt_length == 10).all()


@pytest.mark.parametrize('k', [0, 1])
def test_the_shortest_trees(k):
  drafter = TreeDrafter(MODEL, k, branching=(2, 2))
  result = generation.generate(
    Markov(law_test.TARGET),
    drafter,
    [[0], [1, 2]],
    key=jax.random.key(0),
    max_new_tokens=5,
  )
  assert [len(row) for row in result.new_tokens()] == [5, 5]


def test_bad_shapes_are_refused():
  with pytest.raises(ValueError, match='at least 1 child'):
    TreeDrafter(MODEL, 2, branching=(2, 0))
  with pytest.raises(ValueError, match='need one length'):
    Committee((ModelDrafter(MODEL, 2), ModelDrafter(MODEL, 3)))


@pytest.mark.parametrize(
  'member',
  [CoupledDrafter(MODEL, 2), TreeDrafter(MODEL, 2), NGram(2)],
  ids=['coupled', 'tree', 'ngram'],
)
def test_a_committee_is_of_sampled_chains(member):
  """A coupled member would bias every rule that reads its law."""
  with pytest.raises(ValueError, match='a committee is of sampled chains'):
    generation.generate(
      Markov(law_test.TARGET),
      Committee((member, member)),
      [[0]],
      key=jax.random.key(0),
      max_new_tokens=4,
    )


@pytest.mark.slow
def test_more_children_than_tokens():
  """The law stays: those beyond the vocabulary are invalid."""
  rule = jax.tree_util.Partial(verify.rejection)
  drafter = TreeDrafter(MODEL, 1, branching=(5,))
  assert law_test.p_value(Markov(law_test.TARGET), drafter, rule) >= 1e-4

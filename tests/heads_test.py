"""Heads on the target's features: chains, trees, training, and the two kinds.

The conformance suites have them too; here is what only heads owe.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import law_test
import numpy as np
import optax
import oracles
import pytest
import recipes_test
import scripts
import toys
from flax import nnx

from specjax import (
  checkpoint,
  decode,
  distill,
  drafters,
  experiment,
  generation,
  metrics,
  optimizing,
  proposers,
  recipes,
  settings,
  verify,
  warps,
)
from specjax.candidates import CandidateTree, full_tree, sparse_tree
from specjax.heads import HeadsDrafter
from specjax.models.markov import Markov
from specjax.models.transformer import TransformerConfig
from specjax.types import Batch, Keys, Limit, pytree

pytestmark = pytest.mark.usefixtures('quick_compilation')

V, K = 7, 3
TABLE = oracles.table(0, 2, V, 2.0)
TARGET = Markov(TABLE)
PROMPTS = [[3], [1, 2, 1], [0, 6, 5] * 5]
NEVER = jnp.zeros(0, jnp.int32)
CHAIN = toys.heads(V, K)
DRAFTERS = {
  'chain': CHAIN,
  'full': CandidateTree(CHAIN.heads, K, paths=full_tree((3, 2), K)),
  'sparse': CandidateTree(
    CHAIN.heads, K, paths=((0,), (3,), (0, 2), (0, 0), (3, 1), (0, 2, 0))
  ),
}
SIZES = TransformerConfig(V, V, 1, 1, 1, 5, head_dim=2)


def sooner(first, *later):
  """One everyday, the others among the slow tests."""
  return [first, *(pytest.param(x, marks=pytest.mark.slow) for x in later)]


kinds = pytest.mark.parametrize('kind', ['medusa', 'blockwise'])
a_kind = pytest.mark.parametrize('kind', sooner('medusa', 'blockwise'))


def built(kind, k=K, seed=None, **c):
  """A drafter as its module builds it, or with random weights."""
  config = {'k': k, kind: {'heads': k, **c}}
  drafter = drafters.find(kind).build(config, SIZES, nnx.Rngs(0))
  if seed is None:
    return drafter
  rng = np.random.default_rng(seed)

  def lively(x):
    return x + jnp.asarray(rng.normal(0, 0.4, x.shape), x.dtype)

  return dataclasses.replace(drafter, heads=jax.tree.map(lively, drafter.heads))


measure = toys.jit(distill.measure, static_argnums=3)


@toys.jit
def score(drafter, batch):
  output = TARGET.forward(batch.tokens, batch.segments)
  return drafter.score(TARGET, batch, output)


@toys.jit
def unembed(drafter, features):
  return drafter.unembed(TARGET, features)


@toys.jit
def ahead(heads, features):
  return jnp.stack([head(features) for head in heads])


def logits(drafter, known):
  """`[H, V]` behind the tokens that precede the pending one, head by head."""
  features = oracles.following(TABLE, known) if known else np.zeros(V)
  return np.asarray(ahead(drafter.heads, jnp.asarray(features, jnp.float32)))


@toys.jit
def propose(drafter, state, limit):
  return drafter.propose(
    TARGET,
    state.cache,
    state.memory,
    Keys(state.row, state.row),
    state.tokens,
    state.length,
    *([] if limit is None else [limit]),
  )[0]


def proposal(drafter, prompts, limit=None):
  """What is proposed behind prompts."""
  state = generation.start(
    TARGET, drafter, prompts, key=jax.random.key(0), max_new_tokens=1
  )
  return propose(drafter, state, limit)


@pytest.mark.parametrize(
  'drafter',
  sooner(built('medusa', seed=1, layers=2), built('blockwise', seed=2), CHAIN),
  ids=['medusa', 'blockwise', 'linear'],
)
def test_a_chain_is_drawn_from_the_laws_of_training(drafter):
  """Those that `score` gives where the last token of a prompt is pending."""
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 6)))
  ones = np.ones(tokens.shape, np.int32)
  scored = score(drafter, Batch(tokens, ones, ones.astype(np.float32)))
  assert scored.shape == (2, 6, K, V)
  for t in range(6):
    draft = proposal(drafter, tokens[:, : t + 1].tolist())
    np.testing.assert_allclose(
      draft.logits, unembed(drafter, np.asarray(scored)[:, t]), atol=1e-5
    )
    for row in range(2):
      wanted = logits(drafter, tokens[row, :t].tolist())
      np.testing.assert_allclose(draft.logits[row], wanted, atol=1e-5)


def test_nothing_crosses_from_one_document_to_the_next():
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (1, 6)))
  segments = np.array([[1, 1, 2, 2, 2, 0]])
  batch = Batch(tokens, segments, np.ones(tokens.shape, np.float32))
  scored = np.asarray(score(CHAIN, batch))
  assert not scored[0, [0, 2, 5]].any() and scored[0, [1, 3, 4]].all()


@pytest.mark.slow
def test_the_first_token_of_a_draft_follows_the_pending_one():
  """Heads that know the target's law two tokens ahead are never wrong."""
  cycle = np.full((V, V), -9, np.float32)
  cycle[np.arange(V), (np.arange(V) + 1) % V] = 9
  turn = np.roll(np.eye(V, dtype=np.float32), 1, 1)
  power = [np.linalg.matrix_power(turn, 1 + h) for h in range(K)]
  heads = tuple(toys.LinearHead(jnp.asarray(w)) for w in power)
  result = generation.generate(
    Markov(cycle),
    HeadsDrafter(heads, K, warps.Greedy()),
    [[0, 1], [4, 5, 6]],
    key=jax.random.key(0),
    max_new_tokens=4 * (K + 1),
    warp=warps.Greedy(),
  )
  assert result.stats.rounds.tolist() == [4, 4]
  assert result.stats.accepted.tolist() == [4 * K] * 2


@pytest.mark.parametrize(
  'name', sooner('sparse', 'full', 'chain', 'medusa', 'blockwise')
)
@pytest.mark.parametrize('k', sooner(K, 1))
def test_greedy_text_is_the_plain_one(name, k):
  """Ragged prompts, limits, and an end token wherever it comes."""
  drafter = DRAFTERS.get(name) or built(name, seed=3)
  drafter = dataclasses.replace(drafter, k=k, warp=warps.Greedy())
  accepted = 0
  for eos in ((), (2,)):
    result = generation.generate(
      TARGET,
      drafter,
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=[7, 20, 33],
      min_new_tokens=[0, 3, 0],
      warp=warps.Greedy(),
      eos=eos,
    )
    assert result.new_tokens() == [
      oracles.greedy(TABLE, prompt, new, eos, least)
      for prompt, new, least in zip(
        PROMPTS, (7, 20, 33), (0, 3, 0), strict=True
      )
    ]
    accepted += result.stats.accepted.sum()
  assert accepted > 0


@pytest.mark.parametrize('name', sooner('sparse', 'full', 'chain'))
def test_memory_is_what_the_target_made_of_the_last_committed_token(name):
  """Under any schedule of lengths, cuts and rests; zeros before the first."""
  model = toys.transformer(vocab_size=V, width=8, heads=2, kv_heads=1, hidden=8)
  heads = toys.heads(8, K).heads
  drafter = dataclasses.replace(DRAFTERS[name], heads=heads)
  step = toys.jit(decode.step, static_argnums=2)
  forward = toys.jit(type(model).forward)
  rng, counts = np.random.default_rng(0), set()
  state = generation.start(
    model, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=60
  )
  for turn in range(40):
    if turn:
      resting = rng.random(3) < 0.1
      stop = state.length + rng.integers(1, 9, 3)
      going = state._replace(done=jnp.asarray(resting), stop=stop)
      own = drafter.at(int(rng.choice([0, K, K])))
      state, seen = step(
        model, own, verify.rejection, warps.UNCHANGED, jnp.array([2]), going
      )
      counts |= set(np.asarray(seen.count).tolist())
    tokens = state.tokens
    want = np.asarray(forward(model, tokens, jnp.ones_like(tokens)).features)
    memory = np.asarray(state.memory)
    for row, length in enumerate(state.length.tolist()):
      known = want[row, length - 2] if length > 1 else np.zeros(8)
      np.testing.assert_allclose(memory[row], known, atol=1e-5)
  assert counts >= {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize('name', DRAFTERS)
def test_a_row_alone_is_the_row_in_its_batch(name):
  keys = jax.random.split(jax.random.key(5), 3)

  def tokens(order):
    return generation.generate(
      TARGET,
      DRAFTERS[name],
      [PROMPTS[i] for i in order],
      key=keys[jnp.array(order)],
      max_new_tokens=20,
    ).new_tokens()

  alone = [tokens([i])[0] for i in range(3)]
  for order in [0, 1, 2], [2, 2, 0]:
    assert tokens(order) == [alone[i] for i in order]


@pytest.mark.parametrize('name', DRAFTERS)
def test_the_shortest_drafts(name):
  for k in (0, 1):
    draft = proposal(DRAFTERS[name].at(k), PROMPTS)
    width = {'chain': 1, 'full': 3, 'sparse': 2}[name] if k else 0
    assert draft.tokens.shape == (3, width)


@pytree
class GoOn:
  """Stops the draft of each row at a length of its own."""

  counts: jax.Array

  def __call__(self, i, logits):
    return i < self.counts


@pytest.mark.parametrize('nodes', [0, 2, K])
def test_a_limit_is_heeded_and_moves_no_other_token(nodes):
  whole = proposal(CHAIN, PROMPTS)
  assert whole.valid is None
  for counts in (None, jnp.array([0, 1, K])):
    go_on = None if counts is None else GoOn(counts)
    draft = proposal(CHAIN, PROMPTS, limit=Limit(jnp.array(nodes), go_on))
    wanted = np.minimum(nodes, K if counts is None else counts)
    np.testing.assert_array_equal(
      draft.valid, np.arange(K) < np.broadcast_to(wanted, 3)[:, None]
    )
    valid = np.asarray(draft.valid)
    np.testing.assert_array_equal(draft.tokens[valid], whole.tokens[valid])
    np.testing.assert_array_equal(draft.logits[valid], whole.logits[valid])
    assert draft.tokens.shape == whole.tokens.shape


@pytree
class FirstLaw(HeadsDrafter):
  """Claims, if told so, that every token was drawn from the first head's."""

  first: bool = True

  def propose(self, *args):
    draft, memory = super().propose(*args)
    claimed = jnp.broadcast_to(draft.logits[:, :1], draft.logits.shape)
    laws = jnp.where(self.first, claimed, draft.logits)
    return dataclasses.replace(draft, logits=laws), memory


@pytest.mark.slow
def test_a_chain_tested_with_the_law_of_another_head_is_caught():
  rule, heads = verify.as_pytree(verify.rejection), toys.heads(3, K).heads
  target = Markov(law_test.TARGET)
  for first in (False, True):
    got = law_test.p_value(target, FirstLaw(heads, K, first=first), rule)
    assert (got < 1e-4) == first


@pytest.mark.slow
def test_candidates_tested_as_if_they_had_been_drawn_are_caught():
  """Every rank against the whole of p, as if it were the first."""

  @jax.tree_util.Partial
  def wrong(noise, draft, log_p):
    laws = jnp.zeros((draft.tokens.shape[0], 3))
    drawn = dataclasses.replace(draft, logits=laws, siblings='distinct')
    return verify.rejection(noise, drawn, log_p)

  drafter = CandidateTree(toys.heads(3, 2).heads, 2, paths=full_tree((2,), 2))
  target = Markov(law_test.TARGET)
  right = verify.as_pytree(verify.rejection)
  assert law_test.p_value(target, drafter, right) >= 1e-4
  assert law_test.p_value(target, drafter, wrong) < 1e-4


def test_a_temperature_does_not_recompile():
  sizes = []
  for temperature in (1.0, 0.0, 0.6):
    warp = warps.Temperature(temperature)
    generation.generate(
      TARGET,
      dataclasses.replace(CHAIN, warp=warp),
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=6,
      warp=warp,
    )
    sizes.append(generation.advance._cache_size())
  assert len(set(sizes)) == 1


def test_candidates_are_the_likeliest_of_each_head():
  draft = proposal(DRAFTERS['sparse'], PROMPTS)
  assert draft.logits is None and draft.siblings == 'fixed'
  for row, prompt in enumerate(PROMPTS):
    order = np.argsort(-logits(CHAIN, prompt[:-1]), 1, kind='stable')
    found = {}
    for i, token in enumerate(draft.tokens[row].tolist()):
      parent = int(draft.parents[row, i])
      above = () if parent < 0 else found[parent][0]
      rank = int(np.flatnonzero(order[len(above)] == token)[0])
      found[i] = (*above, rank), token
    assert tuple(path for path, _ in found.values()) == DRAFTERS['sparse'].paths


def every_tree(heads, ranks, nodes):
  """All trees of so many nodes."""
  places = [
    path
    for size in range(1, heads + 1)
    for path in itertools.product(range(ranks), repeat=size)
  ]
  for tree in itertools.combinations(places, nodes):
    if all(path[:-1] in tree for path in tree if len(path) > 1):
      yield tree


def expected_accepted(accuracy, tree):
  return sum(
    np.prod([accuracy[h][rank] for h, rank in enumerate(path)]) for path in tree
  )


@pytest.mark.parametrize('seed', range(4))
def test_no_tree_is_better_than_the_greedy_one(seed):
  rng = np.random.default_rng(seed)
  heads, ranks = 3, 2
  accuracy = rng.dirichlet(np.ones(ranks + 1), heads)[:, :ranks]
  for nodes in (1, 2, 3, 5):
    tree = sparse_tree(accuracy, nodes)
    CandidateTree(toys.heads(V, heads).heads, heads, paths=tree)
    best = max(
      expected_accepted(accuracy, other)
      for other in every_tree(heads, ranks, nodes)
    )
    assert expected_accepted(accuracy, tree) == pytest.approx(best)
  assert len(sparse_tree(accuracy, 999)) == 2 + 4 + 8


def test_of_equal_nodes_the_shallower_come_first():
  assert sparse_tree(np.ones((2, 2)), 3) == ((0,), (1,), (0, 0))
  assert full_tree((2,), 2) == ((0,), (1,), (0, 0), (1, 0))


def windows(seed=0, rows=4, size=40):
  """Text of the target, two documents a row."""
  rng, text = np.random.default_rng(seed), np.zeros((2 * rows, 0), np.int32)
  for _ in range(size // 2):
    law = [oracles.softmax(oracles.following(TABLE, row)) for row in text]
    new = [rng.choice(V, p=p) for p in law]
    text = np.column_stack([text, np.array(new, np.int32)])
  segments = np.tile(1 + (np.arange(size) >= size // 2), (rows, 1))
  weight = (np.arange(size) % (size // 2) > 0).astype(np.float32)
  weight = np.tile(weight, (rows, 1))
  return Batch(*map(jnp.asarray, (text.reshape(rows, size), segments, weight)))


def by_hand(drafter, batch, k, temperature):
  """Yields ratios `[k]` of the tokens of each draft that fits in."""
  rows, size = batch.tokens.shape
  for b, t in np.ndindex(rows, size - k):
    if (batch.segments[b, t : t + k + 1] != batch.segments[b, t]).any():
      continue
    inside = np.flatnonzero(batch.segments[b, : t + 1] == batch.segments[b, t])
    text = batch.tokens[b, inside[0] :].tolist()
    here = t - inside[0]
    q, ratios = logits(drafter, text[:here]), []
    for h in range(k):
      y = text[here + 1 + h]
      p = oracles.softmax(
        oracles.following(TABLE, text[: here + 1 + h]) / temperature
      )
      ratios.append(oracles.softmax(q[h] / temperature)[y] / p[y])
    yield ratios


def test_the_h_th_horizon_is_measured_as_the_h_th_token_of_a_draft():
  batch = windows()
  got = distill.means(
    [measure(CHAIN, TARGET, warps.Temperature(0.7), 2, batch)]
  )
  ratios = np.array([*by_hand(CHAIN, jax.tree.map(np.asarray, batch), 2, 0.7)])
  passed = np.cumprod(np.minimum(ratios, 1), 1).mean(0)
  assert got['acceptance/depth_1'] == pytest.approx(passed[0], rel=1e-4)
  assert got['acceptance/depth_2'] == pytest.approx(
    passed[1] / passed[0], rel=1e-4
  )
  assert got['block_efficiency'] == pytest.approx(1 + passed.sum(), rel=1e-4)
  with pytest.raises(ValueError, match='length is 4, .* has 3 horizons'):
    distill.measure(CHAIN, TARGET, warps.UNCHANGED, 4, batch)


def test_ranks_are_counted_head_by_head():
  batch = windows()
  count = toys.jit(distill.rank_accuracy, static_argnums=2)
  sums, weights = count(CHAIN, TARGET, 2, batch)
  assert sums.shape == weights.shape == (K, 2)
  scored, batch = (
    np.asarray(score(CHAIN, batch)),
    Batch(*map(np.asarray, batch)),
  )
  rows, size = batch.tokens.shape
  wanted, counts = np.zeros((K, 2)), np.zeros((K, 1))
  for b, t, h in np.ndindex(rows, size, K):
    ahead = t + 1 + h
    if ahead < size and batch.segments[b, t] == batch.segments[b, ahead]:
      row = scored[b, t, h]
      rank = (row > row[batch.tokens[b, ahead]]).sum()
      counts[h] += 1
      wanted[h] += np.arange(2) == rank
  np.testing.assert_array_equal(weights, np.broadcast_to(counts, (K, 2)))
  np.testing.assert_array_equal(sums, wanted)


@pytest.mark.slow
@kinds
def test_training_raises_what_decoding_accepts(kind):
  drafter, tx = built(kind, k=2), optax.adam(0.03)
  step = jax.jit(optimizing.make_step(distill.distill_loss, tx))
  state = optimizing.init(drafter, tx)
  text = [windows(seed) for seed in range(4)]
  held_out = windows(9, rows=12)

  def rounds(drafter):
    result = generation.generate(
      TARGET, drafter, PROMPTS, key=jax.random.key(1), max_new_tokens=200
    )
    return metrics.summarize(result)['tokens_per_round']

  def measured(drafter):
    return distill.means(
      [measure(drafter, TARGET, warps.UNCHANGED, 2, held_out)]
    )

  before = measured(drafter)
  for i in range(60):
    state, _ = step(state, TARGET, text[i % 4], distill.objective(1.0))
  after = measured(state.model)
  assert after['acceptance'] > before['acceptance'] + 0.03
  assert after['block_efficiency'] > before['block_efficiency'] + 0.05
  assert rounds(state.model) > rounds(drafter) + 0.1


@kinds
def test_a_head_begins_as_the_target_s_own_unembedding(kind):
  features = jnp.asarray(np.random.default_rng(0).normal(size=(2, V)))
  for head in built(kind).heads:
    np.testing.assert_array_equal(head(features), features)


def test_a_page_says_what_the_heads_are_like():
  drafter = built('medusa', k=2, heads=3, layers=2)
  assert len(drafter.heads) == 3 and drafter.k == 2
  assert [w.shape for w in drafter.heads[0].weights] == [(V, V)] * 2
  assert type(drafter) is HeadsDrafter and drafter.at(3).k == 3
  assert built('medusa', branching=[2]).paths == full_tree((2,), K)
  assert built('medusa', paths=[[0], [0, 1]]).paths == ((0,), (0, 1))
  drafter = built('blockwise', hidden=6)
  assert drafter.heads[0].inner.shape == (6, V)
  assert built('blockwise').heads[0].inner.shape == (SIZES.hidden, V)


@pytest.mark.slow
def test_a_run_s_heads_are_distilled_and_decoded(tmp_path):
  draft = {'drafter': 'blockwise', 'blockwise': {'heads': 2}}
  run = recipes_test.workspace(tmp_path, draft=draft)
  target = run.new_target(0)
  checkpoint.save_model(
    run.folder / 'target', target, {'tokenizer': run.tokenizer.hash}
  )
  values = recipes.distil(run, target, 'draft')
  assert 1 < values['block_efficiency'] < 3
  drafter = run.drafter('draft')
  assert any(leaf.any() for leaf in jax.tree.leaves(drafter.heads))
  greedy = [
    generation.generate(
      target,
      proposers.make(run, way, 'draft', warps.Greedy()),
      [[1, 2, 3]],
      key=jax.random.key(0),
      max_new_tokens=12,
      warp=warps.Greedy(),
    ).new_tokens()
    for way in ('model', 'candidates', 'none')
  ]
  assert greedy[0] == greedy[1] == greedy[2]
  with pytest.raises(ValueError, match='made for draft models'):
    proposers.make(run, 'distinct', 'draft')


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: CHAIN.at(K + 1), 'k is 4, and the draft has 3 heads'),
    (lambda: CHAIN.at(-1), 'k is -1'),
    (lambda: toys.heads(V + 1, K).init(TARGET, 1, 9), 'width 8, .* have 7'),
    (
      lambda: CandidateTree(CHAIN.heads, K, paths=((0,), (1, 0))),
      r'\(1, 0\) hangs off \(1,\), which is not in the tree',
    ),
    (
      lambda: CandidateTree(CHAIN.heads, K, paths=((0,), (-1,))),
      'from 0',
    ),
    (
      lambda: CandidateTree(CHAIN.heads, K, paths=((V,),)).init(TARGET, 1, 9),
      'rank 7, from 0, and there are 7 tokens',
    ),
    (lambda: full_tree((2, 0), 2), 'at least 1 child'),
    (lambda: sparse_tree(np.ones((2, 2)), 0), 'at least 1'),
  ],
)
def test_what_makes_no_sense_is_refused_in_a_line(make, words):
  with pytest.raises(ValueError, match=words) as error:
    make()
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('kind', 'section', 'words'),
  [
    ('medusa', {'heads': 0}, 'draft.medusa.heads is 0: it must be 1'),
    ('medusa', {'layers': 0}, 'draft.medusa.layers is 0'),
    ('medusa', {'heads': 1}, 'k is 2, and the draft has 1 heads'),
    ('medusa', {}, 'draft.medusa.heads is missing'),
    ('medusa', {'heads': 2, 'branching': [0]}, 'at least 1 child'),
    ('medusa', {'heads': 2, 'paths': [[1, 1]]}, 'not in the tree'),
    ('blockwise', {'hidden': 0}, 'draft.blockwise.hidden is 0'),
    ('blockwise', {'heads': 1}, 'k is 2, and the draft has 1 heads'),
  ],
)
def test_a_page_that_makes_no_heads_is_refused(kind, section, words):
  page = experiment.load(scripts.ROOT / 'configs' / 'stdlib.py:tiny').to_dict()
  page['draft'] |= {'drafter': kind, kind: {'heads': 2}}
  settings.check(page)
  page['draft'] |= {kind: section}
  with pytest.raises(ValueError, match=words):
    settings.check(page)

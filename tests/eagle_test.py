"""EAGLE: a layer on the target's streams, as a chain and as a dynamic tree.

The conformance suites have it too; here is what only this drafter owes.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recipes_test
import scripts
import toys
from flax import nnx

from specjax import (
  checkpoint,
  data,
  decode,
  distill,
  draft_length,
  drafters,
  experiment,
  generation,
  losses,
  recipes,
  settings,
  verify,
  warps,
)
from specjax.drafters.none import NoDrafter
from specjax.types import Batch, Keys, Warp, pytree

pytestmark = pytest.mark.usefixtures('quick_compilation')

K = 4
TARGET = toys.transformer(layers=3)
V = TARGET.vocab_size
PROMPTS = [[3], np.random.default_rng(2).integers(0, V, 41).tolist()]
NEVER = jnp.zeros(0, jnp.int32)


def built(k=K, target=TARGET, seed=0, vocabulary=(), **c):
  """A drafter as its module builds it, with random weights."""
  c = {'hidden': 8, 'unroll': max(k, 1), **c}
  config = {'k': k, 'vocabulary': vocabulary, 'eagle': c}
  build = drafters.find('eagle').build
  drafter = build(config, target.config, nnx.Rngs(0)).begin(target)
  rng = np.random.default_rng(seed)

  def lively(x):
    return x + jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype)

  return dataclasses.replace(drafter, net=jax.tree.map(lively, drafter.net))


DRAFTER = built()
SOME = (1, 2, 4, 7, 11)
FORMS = {
  'chain': DRAFTER,
  'tree': DRAFTER.tree(nodes=6, beam=3),
  'few': built(vocabulary=SOME),
  'tree of few': built(vocabulary=SOME).tree(nodes=6, beam=3),
}
forms = pytest.mark.parametrize(
  'form',
  ['tree of few', pytest.param('few', marks=pytest.mark.slow)],
)


def start(drafter, new=1, controller=draft_length.FIXED):
  return generation.start(
    TARGET,
    drafter,
    PROMPTS,
    key=jax.random.key(0),
    max_new_tokens=new,
    controller=controller,
  )


@toys.jit
def propose(drafter, state):
  return drafter.propose(
    TARGET,
    state.cache,
    state.memory,
    Keys(state.row, state.row),
    state.tokens,
    state.length,
  )[0]


@toys.jit
def scored(drafter, tokens, segments):
  """Logits `[B, T, H, V]` of training windows."""
  batch = Batch(tokens, segments, jnp.ones(tokens.shape))
  output = TARGET.forward(tokens, segments, drafter.taps)
  return drafter.unembed(TARGET, drafter.score(TARGET, batch, output))


def behind(drafter, prompt, drafted, size=48):
  """`[len(drafted) + 1, V]` logits of a prompt's continuation, by training."""
  text = [*prompt, *drafted]
  tokens = np.zeros((1, size), np.int32)
  tokens[0, : len(text)] = text
  logits = scored(drafter, tokens, np.ones_like(tokens))
  return np.asarray(logits)[0, len(prompt) - 1, : len(drafted) + 1]


@pytest.mark.parametrize('form', ['chain', 'few'])
def test_a_chain_is_drawn_from_the_laws_of_training(form):
  """Of the pass h of the unrolling at the h-th token, behind any prompt."""
  drafter = FORMS[form]
  draft = propose(drafter, start(drafter))
  for row, prompt in enumerate(PROMPTS):
    drafted = np.asarray(draft.tokens)[row].tolist()
    wanted = behind(drafter, prompt, drafted[:-1])
    np.testing.assert_allclose(draft.logits[row], wanted, atol=2e-4)
    if form == 'few':
      assert set(drafted) <= set(SOME)
      outside = np.setdiff1d(np.arange(V), SOME)
      assert (np.asarray(draft.logits)[row][:, outside] == -np.inf).all()


def test_unrolling_sees_the_target_no_further_than_the_pending_token():
  """And pass by pass further back; what it has drafted it does see."""
  tokens = jnp.asarray(PROMPTS[1])[None, :8]
  ones = jnp.ones_like(tokens)

  @toys.jit
  def grad(t, h):
    streams = TARGET.forward(tokens, ones, DRAFTER.taps)
    batch = Batch(tokens, ones, jnp.ones(tokens.shape))

    def of(x):
      output = streams._replace(features=x)
      return DRAFTER.score(TARGET, batch, output)[0, t, h].sum()

    return jax.grad(of)(streams.features)

  for t, h in ((4, 0), (4, 1), (3, 3)):
    seen = np.abs(grad(t, h)[0]).sum(-1) > 0
    np.testing.assert_array_equal(seen, np.arange(8) < t)


def test_nothing_crosses_from_one_document_to_the_next():
  tokens = np.asarray(PROMPTS[1])[None, :10]
  segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])
  other = np.where(segments == 1, (tokens + 1) % V, tokens)
  one, two = (scored(DRAFTER, x, segments) for x in (tokens, other))
  alone = scored(DRAFTER, tokens[:, 4:9], np.ones((1, 5), int))
  for t, h in itertools.product(range(4, 9), range(K)):
    if t + h < 9:
      np.testing.assert_array_equal(one[0, t, h], two[0, t, h])
      np.testing.assert_allclose(one[0, t, h], alone[0, t - 4, h], atol=2e-4)
  assert np.isfinite(one).all()


def greedy(drafter):
  """Ragged prompts, limits, and an end token that comes or does not."""
  drafter = dataclasses.replace(drafter, warp=warps.Greedy())
  return generation.generate(
    TARGET,
    drafter,
    PROMPTS,
    key=jax.random.key(0),
    max_new_tokens=[20, 33],
    min_new_tokens=[0, 3],
    warp=warps.Greedy(),
    eos=(2,),
  )


@functools.cache
def plain():
  return greedy(Plain()).new_tokens()


@pytree
class Plain(NoDrafter):
  """Which has a warp to be replaced."""

  warp: Warp = warps.UNCHANGED


@forms
def test_greedy_text_is_the_plain_one(form):
  result = greedy(FORMS[form])
  assert result.new_tokens() == plain()
  assert result.stats.accepted.sum() > 0


step = toys.jit(decode.step, static_argnums=2)


@pytest.mark.slow
@pytest.mark.parametrize('form', ['chain', 'tree', 'ladder'])
def test_memory_is_made_of_the_streams_of_committed_tokens(form):
  """Under any schedule of lengths, rests and cuts, whatever was accepted."""
  controller = draft_length.FIXED
  if form == 'ladder':  # up and down, and at last to nothing
    rungs = 0, 1, 2, K
    controller = draft_length.Fallback(
      rungs, threshold=0.6, memory=0.3, first_wait=1
    )
  rng, largest = np.random.default_rng(0), FORMS.get(form, DRAFTER)
  # The law of the target, flattened, so that all counts come up.
  warp = warps.Temperature(3.0)
  state = start(largest, new=60, controller=controller)
  size = state.tokens.shape[1]
  accepted = set()
  while not state.done.all():
    drafter = largest
    if form != 'ladder':
      drafter = largest.at(int(rng.choice([0, 1, 2, K])))
    # Some rows rest; others end within a draft, and go on.
    resting = rng.random(2) < 0.1
    state = state._replace(done=jnp.asarray(resting))
    eos = jnp.array([rng.integers(V)])
    state, seen = step(
      TARGET, drafter, verify.rejection, warp, eos, state, controller
    )
    state = state._replace(done=state.length >= state.stop)
    accepted |= set(np.asarray(seen.accepted).sum(-1).tolist())
    memory, length = state.memory, state.length
    tokens = jnp.where(jnp.arange(size) < length[:, None], state.tokens, 0)
    output = TARGET.forward(tokens, jnp.ones_like(tokens), largest.taps)
    streams = largest.net.fused(output)
    known = np.arange(size) < (np.asarray(length) - 1)[:, None]
    np.testing.assert_array_equal(memory.features.length, length - 1)
    np.testing.assert_allclose(
      np.where(known[..., None], memory.features.rows[:, 0, :size], 0),
      np.where(known[..., None], streams, 0),
      atol=1e-4,
    )
    before = jnp.pad(streams[:, :-1], ((0, 0), (1, 0), (0, 0)))
    position = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    visible = jnp.tril(jnp.ones((1, size, size), bool))
    rows = largest.net(TARGET.embed(tokens), before, position, visible, None)[1]
    assert (memory.cache.length <= length - 1).all()
    read = np.arange(size) < np.asarray(memory.cache.length)[:, None]
    for got, right in zip(memory.cache.rows, rows, strict=True):
      np.testing.assert_allclose(
        np.where(read[:, None, :, None], got[:, :, :size], 0),
        np.where(read[:, None, :, None], right, 0),
        atol=1e-4,
      )
  assert {0, 1} <= accepted


def searched(drafter, prompt):
  """EAGLE-2 by the book: sorted `(path, value)` of the nodes that are kept."""
  beam, every = [((), 0.0)], []
  for _ in range(drafter.k):
    children = []
    for path, value in beam:
      law = jax.nn.log_softmax(behind(drafter, prompt, path)[len(path)])
      for token in np.argsort(-law, kind='stable')[: drafter.beam]:
        children.append(((*path, int(token)), value + float(law[token])))
    every += children
    beam = sorted(children, key=lambda x: -x[1])[: drafter.beam]
  return sorted(every, key=lambda x: -x[1])[: drafter.nodes]


def paths(draft, row):
  """The tokens along the path of each valid node."""
  found = []
  for token, parent in zip(
    np.asarray(draft.tokens)[row], np.asarray(draft.parents)[row], strict=True
  ):
    assert parent < len(found)
    found.append((*(found[parent] if parent >= 0 else ()), int(token)))
  return [p for p, ok in zip(found, draft.valid[row], strict=True) if ok]


@pytest.mark.parametrize(
  'k, nodes, beam',
  [
    pytest.param(K, 6, 3, marks=pytest.mark.slow),
    (2, 99, 2),
    pytest.param(1, 2, 4, marks=pytest.mark.slow),
  ],
)
def test_a_tree_is_where_the_draft_is_surest(k, nodes, beam):
  drafter = DRAFTER.at(k).tree(nodes, beam)
  draft = propose(drafter, start(drafter))
  for row, prompt in enumerate(PROMPTS):
    wanted = [path for path, _ in searched(drafter, prompt)]
    got = paths(draft, row)
    assert len(set(got)) == len(got) == len(wanted)
    assert set(got) == set(wanted)


def test_of_equals_the_shallower_is_kept():
  """A draft that is sure of every token: all values are 0 along one path."""
  drafter = DRAFTER.tree(nodes=3, beam=2).at(K)

  @pytree
  class Sure(type(drafter)):
    def unembed(self, target, features):
      flat = jnp.full((*features.shape[:-1], V), -jnp.inf)
      return flat.at[..., 5].set(0.0)

  own = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
  sure, state = Sure(**own), start(drafter)
  draft = propose(sure, state)
  for row in range(2):
    assert paths(draft, row) == [(5,), (5, 5), (5, 5, 5)]


def test_a_tree_of_few_tokens_has_no_more_children():
  drafter = built(vocabulary=(1, 2)).tree(nodes=9, beam=2)
  draft = propose(drafter, start(drafter))
  assert set(np.unique(draft.tokens)) <= {1, 2} and draft.valid.all()
  wide = built(vocabulary=(1, 2)).tree(nodes=9, beam=99)
  same = jax.tree.map(np.array_equal, propose(wide, start(wide)), draft)
  assert jax.tree.all(same)


def test_gradients_are_finite_with_a_part_of_the_vocabulary():
  """Whatever the labels that cannot be said; all losses are in conformance."""
  tokens = jnp.asarray(np.asarray(PROMPTS[1])[None, :12])
  batch = Batch(tokens, jnp.ones_like(tokens), jnp.ones(tokens.shape))

  @toys.jit
  def grad(drafter):
    def loss(drafter):
      total, weight = distill.distill_loss(
        drafter, TARGET, batch, distill.objective(1.0)
      )
      return total / weight

    return jax.value_and_grad(loss)(drafter)

  value, found = grad(FORMS['few'])
  assert np.isfinite(value)
  for leaf in jax.tree.leaves(found.net):
    assert np.isfinite(leaf).all()
  assert np.abs(found.net.head[...]).sum() > 0


@pytree
class Whole:
  """A draft of a part of the vocabulary, trained as if of all of it."""

  inner: drafters.find('eagle').Eagle

  def __getattr__(self, name):
    return getattr(self.inner, name)

  vocabulary = ()

  def score(self, *args):
    return self.inner.score(*args)

  def unembed(self, target, features):
    return self.inner.unembed(target, features)


@pytest.mark.slow
@pytest.mark.parametrize('greedy', [False, True])
def test_what_cannot_be_said_may_be_one_outcome_in_every_loss(greedy):
  tokens = jnp.asarray(np.asarray(PROMPTS[1])[None, :12])
  batch = Batch(tokens, jnp.ones_like(tokens), jnp.ones(tokens.shape))
  warp = warps.Temperature(0.0 if greedy else 0.7)

  @toys.jit
  def grads(drafter):
    def loss(drafter, divergence):
      return distill.distill_loss(
        drafter,
        TARGET,
        batch,
        distill.objective(2.0),
        divergence=divergence,
        warps=(warp, jax.nn.identity),
      )[0]

    return {
      name: jax.value_and_grad(loss)(drafter, divergence)
      for name, divergence in losses.DIVERGENCES.items()
    }

  few = FORMS['few']
  found, wanted = grads(few), grads(Whole(few))
  for name in losses.DIVERGENCES:
    (value, grad), (whole, reference) = found[name], wanted[name]
    np.testing.assert_allclose(value, whole, rtol=1e-5, err_msg=name)
    for x, y in zip(*map(jax.tree.leaves, (grad, reference)), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_training_unrolled_raises_acceptance_at_depth():
  """On the draft's own outputs; one pass alone knows only the first token."""
  rng = np.random.default_rng(0)
  text = jnp.asarray(rng.integers(0, V, (8, 24)))
  batch = Batch(text, jnp.ones_like(text), jnp.ones(text.shape))
  weights = distill.objective(float('inf'))

  def trained(drafter):
    tx = optax.adam(1e-2)

    @jax.jit
    def update(drafter, state):
      def loss(drafter):
        total, weight = distill.distill_loss(drafter, TARGET, batch, weights)
        return total / weight

      value, grads = jax.value_and_grad(loss)(drafter)
      changes, state = tx.update(grads, state)
      return optax.apply_updates(drafter, changes), state, value

    state = tx.init(drafter)
    for _ in range(60):
      drafter, state, value = update(drafter, state)
    return drafter

  @jax.jit
  def apart(drafter):
    whole = dataclasses.replace(drafter, unroll=K)
    output = TARGET.forward(text, batch.segments, drafter.taps)
    own = whole.unembed(TARGET, whole.score(TARGET, batch, output))
    log_p = jax.nn.log_softmax(TARGET.unembed(output.features))
    each = [
      losses.total_variation(own[:, : 24 - h, h], log_p[:, h:]).mean()
      for h in range(K)
    ]
    return jnp.stack(each)

  begun = built(unroll=K)
  before = apart(begun)
  unrolled = apart(trained(begun))
  once = apart(trained(dataclasses.replace(begun, unroll=1)))
  assert (unrolled < before - 0.05).all(), (before, unrolled)
  assert (unrolled[1:] < once[1:]).all(), (unrolled, once)


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(k=-1), 'the draft length k is -1'),
    (dict(unroll=0), 'unroll is 0: at least 1'),
    (dict(taps=(1,)), 'the weights fuse 3 streams'),
    (dict(nodes=0), 'nodes is 0: at least 1'),
    (dict(beam=0), 'beam is 0: at least 1'),
  ],
)
def test_bad_sizes_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(FORMS['tree'], **change)


def test_another_target_is_refused():
  other = toys.transformer(width=8, heads=2)
  with pytest.raises(ValueError, match='features of width 16.*have 8'):
    DRAFTER.init(other, 1, 64)


def test_a_head_of_its_own_begins_as_the_target_s():
  config = {'k': 1, 'vocabulary': SOME, 'eagle': {'unroll': 1}}
  build = drafters.find('eagle').build
  drafter = build(config, TARGET.config, nnx.Rngs(0)).begin(TARGET)
  features = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)))
  logits = drafter.unembed(TARGET, features)[:, jnp.array(SOME)]
  np.testing.assert_allclose(
    logits, TARGET.unembed(features)[:, jnp.array(SOME)], atol=1e-5
  )


@pytest.mark.slow
def test_a_run_s_draft_of_a_part_of_the_vocabulary(tmp_path):
  c = {'hidden': 8, 'unroll': 2}
  draft = {'drafter': 'eagle', 'vocab_size': 20, 'eagle': c}
  run = recipes_test.workspace(tmp_path, draft=draft)
  run.config['pretrain']['steps'] = 0  # the target is as good as trained
  target = run.new_target(0)
  checkpoint.save_model(
    run.folder / 'target', target, {'tokenizer': run.tokenizer.hash}
  )
  # Asked for shapes alone, it reads the target, and keeps what it has read.
  shapes = jax.eval_shape(lambda: run.new_drafter(0))
  assert shapes.net.head.shape == (20, target.config.width)
  jax.tree.map(np.testing.assert_array_equal, run.target(), target)
  values = recipes.distil(run, target, 'draft')
  assert 1 < values['block_efficiency'] < 3
  drafter = run.drafter('draft')
  assert (
    drafter.taps and drafter.unroll == drafter.k == run.config['decode']['k']
  )
  counts = np.bincount(run.ids('train'), minlength=target.vocab_size)
  fewest = counts[list(drafter.vocabulary)].min()
  assert len(drafter.vocabulary) == 20
  assert (np.delete(counts, drafter.vocabulary) <= fewest).all()
  texts = [
    generation.generate(
      target,
      way,
      [[1, 2, 3]],
      key=jax.random.key(0),
      max_new_tokens=12,
      warp=warps.Greedy(),
    ).new_tokens()
    for way in (drafter, drafter.tree(nodes=4, beam=2), NoDrafter())
  ]
  assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'drafter': 'model'}, "vocab_size is 9, and draft.drafter 'model'"),
    (
      {'eagle': {'unroll': 2, 'taps': (7,)}},
      'taps is 7: the target has 1 layers',
    ),
    ({'eagle': {'unroll': 2, 'nodes': 3}}, 'eagle.nodes is nothing'),
    ({'eagle': {'unroll': 1}}, 'unroll is 1, and the draft length 2'),
    ({'eagle': {}}, 'unroll is None, and the draft length 2'),
    ({'eagle': {'unroll': 13}}, 'unroll is 13: texts of .* are 12 long'),
    ({'vocab_size': 999}, 'vocab_size is 999: the tokenizer of .* has 500'),
    ({'eagle': {'unroll': 0}}, 'unroll is 0: it must be 1 or more'),
  ],
)
def test_a_page_that_makes_no_draft_is_refused(change, message):
  page = experiment.load(scripts.ROOT / 'configs' / 'eagle.py:tiny').to_dict()
  page['draft'] |= {'vocab_size': 9, **change}
  page['corpus'] |= {'tokenizer': 'bpe', 'vocab_size': 500}
  with pytest.raises(ValueError, match=message):
    settings.check(page)


def test_of_more_tokens_than_there_are_none_are_frequent():
  ids = np.array([3, 1, 1, 0, 3, 3])
  assert data.frequent(ids, 5, 2) == [1, 3]
  assert data.frequent(ids, 5, 4) == [0, 1, 2, 3]
  with pytest.raises(ValueError, match='vocab_size is 6: .* has 5 tokens'):
    data.frequent(ids, 5, 6)

"""Controllers of the draft length: what they choose, and what it saves.

That the law does not change with them is tested in `law_test`.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from specjax import costs, decode, draft_length, generation, verify, warps
from specjax.drafters.coupled import CoupledDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.drafters.tree import TreeDrafter
from specjax.models.markov import Markov
from specjax.types import Limit, Seen, pytree
from specjax.warps import Greedy

V, K = 7, 8
TABLE = oracles.table(0, 2, V, 2.0)
TARGET = Markov(jnp.asarray(TABLE))
NEAR = Markov(jnp.asarray(TABLE + oracles.table(1, 2, V, 1.0)))
PROMPTS = [[3], [1, 2, 1], [0, 6, 5] * 5]
RUNGS = draft_length.ladder(K)
C, BY_K = 0.05, 1 + 0.1 * np.arange(17)  # c and v as they are on a CPU


def round_cost(k):
  return k * C + BY_K[k]


CONTROLLERS = {
  'fallback': draft_length.Fallback(RUNGS, threshold=0.6, first_wait=2),
  'adaptive': draft_length.find('adaptive', K, round_cost),
  'confidence': draft_length.Confidence(RUNGS, bound=0.55),
}
DRAFTERS = {
  'model': (ModelDrafter(NEAR, K), verify.rejection),
  'block': (ModelDrafter(NEAR, K), verify.block),
  'coupled': (CoupledDrafter(NEAR, K), verify.sampler_match),
  'ngram': (NGram(K), verify.rejection),
}
NEVER = jnp.zeros(0, jnp.int32)
every = pytest.mark.parametrize('name', CONTROLLERS)
SHIPPED = {'advance': generation.advance, '_prefill': generation._prefill}

pytestmark = pytest.mark.usefixtures('quick_compilation')


def generate(drafter, controller, prompts, new, seed=0, **settings):
  return generation.generate(
    settings.pop('target', TARGET),
    drafter,
    prompts,
    key=jax.random.key(seed),
    max_new_tokens=new,
    controller=controller,
    **settings,
  )


def cost(result):
  """Plain rounds that a batch's rounds take."""
  return costs.modelled(costs.batch_lengths(result.stats.lengths), round_cost)


@pytest.mark.parametrize(
  ('name', 'drafter'),
  [
    ('fallback', 'model'),
    pytest.param('adaptive', 'model', marks=pytest.mark.slow),
    ('confidence', 'block'),
    pytest.param('adaptive', 'coupled', marks=pytest.mark.slow),
    pytest.param('fallback', 'ngram', marks=pytest.mark.slow),
  ],
)
def test_greedy_text_is_that_of_the_target(name, drafter):
  drafter, rule = DRAFTERS[drafter]
  result = generate(
    drafter, CONTROLLERS[name], PROMPTS, 40, warp=Greedy(), verifier=rule
  )
  assert result.new_tokens() == [
    oracles.greedy(TABLE, prompt, 40) for prompt in PROMPTS
  ]
  assert (result.stats.lengths.sum(-1) == result.stats.rounds).all()
  used = set(np.flatnonzero(result.stats.lengths.sum(0)))
  assert used <= set(RUNGS) and len(used) > 1


@pytest.mark.slow
@every
def test_a_row_that_is_done_has_no_say(name):
  """Its neighbour drafts as it would alone."""
  controller = CONTROLLERS[name]
  keys = jax.random.split(jax.random.key(5), 2)
  drafter = ModelDrafter(NEAR, K)
  alone, beside = (
    generation.generate(
      TARGET,
      drafter,
      prompts,
      key=key,
      max_new_tokens=new,
      controller=controller,
    )
    for prompts, key, new in (
      ([[3]], keys[1:], [60]),
      ([[0], [3]], keys, [0, 60]),
    )
  )
  assert beside.new_tokens()[1] == alone.new_tokens()[0]
  np.testing.assert_array_equal(beside.stats.lengths[1], alone.stats.lengths[0])


def foresight(drafter, controller):
  """Whether any node was drafted or not by the value it would have.

  One history, many futures: the keys of all rows are exchanged, and node i of a
  draft may depend on the nodes before it and on nothing else.
  """
  state = generation.start(
    TARGET,
    drafter,
    [[3]],
    key=jax.random.key(1),
    max_new_tokens=60,
    controller=controller,
  )
  arguments = TARGET, drafter, verify.as_pytree(verify.rejection)
  settings = warps.UNCHANGED, NEVER
  step = toys.jit(decode.step)
  for _ in range(6):  # some history
    state, _ = step(*arguments, *settings, state, controller)

  def draft(row):
    other = state._replace(row=row[None])
    _, seen = decode.step(*arguments, *settings, other, controller)
    return seen.draft.tokens[0], seen.draft.valid[0]

  rows = jax.random.split(jax.random.key(2), 3000)
  tokens, valid = toys.jit(jax.vmap(draft))(rows)
  tokens, valid = np.asarray(tokens), np.asarray(valid)
  for i in range(K):
    before = np.where(valid[:, :i], tokens[:, :i], -1)
    _, group = np.unique(before, axis=0, return_inverse=True)
    group = group.reshape(-1) if i else np.zeros(len(tokens), int)
    counts = np.bincount(group), np.bincount(group, valid[:, i])
    if ((counts[1] > 0) & (counts[1] < counts[0])).any():
      return True
  return False


@pytest.mark.slow
@every
def test_the_length_anticipates_nothing(name):
  assert not foresight(ModelDrafter(NEAR, K), CONTROLLERS[name])


@pytest.mark.slow
def test_foresight_would_be_seen():
  assert foresight(toys.Picky(NEAR, K), CONTROLLERS['confidence'])


def seen(passed, tested, k=K):
  """A round of one row in which the first tests passed."""
  index = np.arange(k)
  return Seen(
    jnp.array([index < passed]),
    jnp.array([index < tested]),
    jnp.array([tested]),
    jnp.array([True]),
  )


def lengths(controller, rounds):
  """Limits before each of the rounds and after the last."""
  control, found = controller.init(), []
  for passed, tested in rounds:
    found.append(int(controller.limit(control).nodes))
    control = controller.update(control, seen(passed, tested))
  return [*found, int(controller.limit(control).nodes)]


def test_fallback_by_hand():
  controller = draft_length.Fallback(RUNGS, first_wait=2, longest_wait=5)
  lost, plain, won = (0, 1), (0, 0), (1, 1)
  # Down a rung a round, two plain rounds, a probe; then twice as many, and
  # never more than the most.
  rounds = [lost] * 4 + ([plain] * 2 + [lost]) + ([plain] * 4 + [lost])
  rounds += [plain] * 5 + [lost] + [plain] * 5
  assert lengths(controller, rounds) == (
    [8, 4, 2, 1] + [0, 0, 1] + [0] * 4 + [1] + [0] * 5 + [1] + [0] * 5 + [1]
  )
  # A probe that passes leads all the way up, and the next wait is short.
  rounds = [lost] * 4 + [plain] * 2 + [won, (2, 2), (4, 4), (8, 8)]
  assert lengths(controller, rounds)[6:] == [1, 2, 4, 8, 8]


def test_fallback_shortens_a_draft_that_is_right_one_time_in_three():
  """Two in three of its first tokens fail; none of the others is reached."""
  k = K
  controller = draft_length.Fallback(RUNGS)
  control, found = controller.init(), []
  for turn in range(60):
    found.append(int(controller.limit(control).nodes))
    passed = min(found[-1], int(turn % 3 == 0))
    tested = min(found[-1], passed + 1)
    there = seen(passed, tested)._replace(drafted=jnp.array([found[-1]]))
    control = controller.update(control, there)
  assert found[0] == k and np.mean(found[10:]) < 2 and max(found[10:]) <= 2


def test_fallback_learns_nothing_from_a_draft_that_is_not_there():
  """As of a lookup that finds nothing."""
  controller = draft_length.Fallback(RUNGS, first_wait=2)
  nothing, lost = (0, 0), (0, 1)
  assert lengths(controller, [lost, *[nothing] * 3]) == [8, 4, 4, 4, 4]
  rounds = [lost] * 4 + [nothing] * 4 + [lost]
  # Its probe too goes on until there is something to test.
  assert lengths(controller, rounds)[4:] == [0, 0, 1, 1, 1, 0]


def test_fallback_stays_where_the_rate_is_at_its_threshold():
  controller = draft_length.Fallback(RUNGS, threshold=0.5, memory=1.0)
  assert lengths(controller, [(1, 2)] * 9) == [8] * 10
  assert lengths(controller, [(0, 1)]) == [8, 4]


def test_adaptive_takes_the_best_length_of_the_cost_model():
  """Where it has seen enough for its rates to be those of the draft."""
  alpha = np.linspace(0.9, 0.2, K)
  rng = np.random.default_rng(0)
  for c, slope in ((0.02, 0.02), (0.05, 0.1), (0.2, 0.3), (0.5, 1.0)):
    v = 1 + slope * np.arange(K + 1)
    cost = (np.arange(K + 1) * c + v)[list(RUNGS)]
    controller = draft_length.Adaptive(
      RUNGS, jnp.array(cost), memory=1.0, surprise=1e9
    )
    passed = np.cumprod(rng.random((3000, K)) < alpha, 1) > 0
    tested = np.hstack([np.ones((3000, 1), bool), passed[:, :-1]])
    one = np.ones((3000, 1), bool)
    rounds = passed[:, None], tested[:, None], tested.sum(-1)[:, None], one

    def update(control, x, controller=controller):
      return controller.update(control, Seen(*x)), None

    control = jax.lax.scan(update, controller.init(), rounds)[0]
    tokens = costs.tokens_by_k(alpha, K)[list(RUNGS)]
    best = RUNGS[np.argmax(costs.speedup(tokens, RUNGS, c, v[list(RUNGS)]))]
    assert int(controller.limit(control).nodes) == best


def test_adaptive_leaves_a_plain_round_when_it_has_forgotten():
  controller = CONTROLLERS['adaptive']
  found = lengths(controller, [(0, 1)] * 6 + [(0, 0)] * 60)
  assert found[6] == 0 and found[-1] > 0
  # At costs that no draft is worth it never tries.
  dear = draft_length.find('adaptive', K, lambda k: 1 + 9 * k)
  assert set(lengths(dear, [(0, 0)] * 60)) == {0}


def test_adaptive_forgets_what_would_be_a_surprise():
  """By hand: 30 rounds in which all eight tokens pass, then tests that fail."""
  controller = CONTROLLERS['adaptive']
  stubborn = dataclasses.replace(controller, surprise=jnp.inf)
  found, slow = (
    lengths(each, [(8, 8)] * 30 + [(0, 1)] * 12)[30:]
    for each in (controller, stubborn)
  )
  assert found[0] == slow[0] == 8
  assert found.index(0) < slow.index(0) if 0 in slow else 0 in found


def test_numbers_of_a_controller_are_leaves():
  programs, before = (generation.advance, generation._prefill), None
  for value in (0.25, 0.5):
    for name, change in (
      ('fallback', {'threshold': value}),
      ('adaptive', {'cost': (1 + value) * CONTROLLERS['adaptive'].cost}),
      ('confidence', {'bound': value}),
    ):
      controller = dataclasses.replace(CONTROLLERS[name], **change)
      # What other tests have compiled too.
      warp = Greedy() if name == 'confidence' else warps.UNCHANGED
      drafter = ModelDrafter(NEAR, K, warp)
      generate(drafter, controller, PROMPTS, 40, warp=Greedy())
    sizes = [program._cache_size() for program in programs]
    assert value == 0.25 or sizes == before
    before = sizes


def test_confidence_goes_by_the_entropy_of_the_draft():
  controller = draft_length.Confidence(RUNGS, gamma=0.2, bound=0.5)
  limit = controller.limit(controller.init())
  # 1 - sqrt(0.2 H) = 0.5 at H = 1.25 nats: about three and a half tokens.
  for tokens, sure in ((1, True), (3, True), (4, False), (7, False)):
    logits = jnp.where(jnp.arange(V) < tokens, 0.0, -jnp.inf)[None]
    assert bool(limit.go_on(1, logits)[0]) is sure
    assert bool(limit.go_on(0, logits)[0])  # the first always
  assert not np.isnan(limit.go_on(1, logits)).any()


def test_a_greedy_draft_may_be_in_doubt_too():
  """It goes by the draft's law and not by the one-hot that its warp makes."""
  drafter = ModelDrafter(NEAR, K, Greedy())
  controller = CONTROLLERS['confidence']
  result = generate(drafter, controller, PROMPTS, 40, warp=Greedy())
  assert len(np.flatnonzero(result.stats.lengths.sum(0))) > 1


def test_the_bound_of_confidence_follows_what_is_accepted():
  controller = draft_length.Confidence(RUNGS, bound=0.5, wanted=0.7)
  bounds = []
  for passed in (0, 8):
    control = controller.init()
    for _ in range(10):
      control = controller.update(control, seen(passed, 8))
    bounds.append(float(control.bound))
  assert bounds[0] > 0.5 > bounds[1]
  idle = controller.update(controller.init(), seen(0, 0))
  assert float(idle.rate) == float(controller.init().rate)


UNTRAINED = Markov(jnp.zeros((64, 64)))
LARGE = Markov(3 * jnp.asarray(oracles.table(2, 1, 64, 1.0)))
CLOSE = Markov(LARGE.logits[...] + jnp.asarray(oracles.table(3, 1, 64, 0.5)))


@pytest.mark.slow
def test_fallback_costs_next_to_nothing_behind_a_bad_draft():
  """Modelled, over 256 tokens and eight seeds.

  Before a probe the draft reads what was decoded without it, sixteen tokens in
  a pass, which counts as two steps.
  """
  drafter, new = ModelDrafter(UNTRAINED, K), 256
  extra, fixed = [], []
  for seed in range(8):
    for found, controller in (
      (extra, draft_length.Fallback(RUNGS)),
      (fixed, draft_length.FIXED),
    ):
      result = generate(drafter, controller, [[1]], new, seed, target=LARGE)
      plain = result.stats.lengths[0, 0]
      found.append((cost(result) + 2 * C * plain / 16) / new - 1)
  assert np.mean(extra) <= 0.03
  assert np.mean(fixed) > 0.3


@pytest.mark.slow
def test_fallback_comes_back_when_the_draft_is_exchanged():
  bad, good = ModelDrafter(UNTRAINED, K), ModelDrafter(CLOSE, K)
  controller = draft_length.Fallback(RUNGS)
  advance = toys.jit(decode.advance)
  rule = verify.as_pytree(verify.rejection)
  state = generation.start(
    LARGE,
    bad,
    [[1]],
    key=jax.random.key(0),
    max_new_tokens=3000,
    controller=controller,
  )
  settings = rule, warps.UNCHANGED, NEVER

  def run(drafter, state, rounds):
    before = np.asarray(state.stats.lengths[0])
    state = advance(LARGE, drafter, *settings, state, rounds, controller)
    return state, np.asarray(state.stats.lengths[0]) - before

  state, used = run(bad, state, 200)
  assert used[0] > 150
  size = state.memory.cache.rows.shape[2]
  state = state._replace(memory=good.init(LARGE, 1, size))
  state, _ = run(good, state, 256)  # the longest that it may wait
  state, used = run(good, state, 20)
  assert not state.done.all()
  assert used[K] >= 15


@pytree
class Always:
  """One length, as a number, so that all of them share a program."""

  k: int
  rungs: tuple = dataclasses.field(metadata={'static': True})

  def init(self):
    return ()

  def limit(self, control):
    return Limit(jnp.asarray(self.k))

  def update(self, control, seen):
    return control


def regimes(stay, vocab=16):
  """Tables that switch between an easy half of the tokens and a hard one.

  In the easy half the draft is nearly the target, in the hard one it is
  another law; on average a half is left after `stay` tokens.
  """
  rng, half = np.random.default_rng(0), vocab // 2
  p, q = rng.dirichlet(np.full(half, 0.5), (2, vocab))
  q[:half] = 0.97 * p[:half] + 0.03 * q[:half]
  switch = np.full((vocab, half), 1 / stay / half)

  def table(own):
    own = (1 - 1 / stay) * own
    top = np.hstack([own[:half], switch[:half]])
    bottom = np.hstack([switch[half:], own[half:]])
    return Markov(jnp.asarray(oracles.log(np.vstack([top, bottom]))))

  return table(p), table(q)


def of_the_regime(p, q, k):
  """What a token costs one that knows the regime, and its best length there.

  All of it follows from the tables: a round is a step of a chain on its last
  token.

  Returns:
    Cost of its rounds in each regime, over the tokens behind a token of it.
  """
  half = np.arange(len(p)) < len(p) // 2
  accepted = np.minimum(p, q)
  alive, ended, passed = np.eye(len(p)), 0 * p, 0 * p
  ends, visits = [], []
  for _ in range(k + 1):
    passed = passed + alive
    ends.append(ended + alive @ p)
    visits.append([passed[:, half].sum(1), passed[:, ~half].sum(1)])
    ended, alive = ended + alive @ (p - accepted), alive @ accepted
  best = np.inf, None
  for own in itertools.product(range(k + 1), repeat=2):
    took = np.where(half, own[0], own[1])
    chain = np.stack([ends[j][x] for x, j in enumerate(took)])
    often = np.linalg.matrix_power(chain, 1 << 16)[0]
    spent = often * np.array([round_cost(j) for j in took])
    tokens = often @ [np.array(visits[j])[:, x] for x, j in enumerate(took)]
    each = np.array([spent[half].sum(), spent[~half].sum()]) / tokens
    best = min(best, (spent.sum() / tokens.sum(), tuple(each)))
  return best[1]


@pytest.mark.slow
def test_adaptive_is_near_an_oracle_of_the_regime(monkeypatch):
  """And is better than any fixed length."""
  # So many rounds take longer than to compile them well.
  monkeypatch.setattr(generation, 'advance', SHIPPED['advance'])
  k, new, stay = 16, 4000, 400
  target, draft = regimes(stay)
  easy, hard = of_the_regime(
    *(oracles.softmax(np.asarray(x.logits[...])) for x in (target, draft)), k
  )
  assert easy < hard / 3

  def over(controller):
    """Cost against the oracle's in as many tokens of either regime."""
    ratios = []
    for seed in range(12):
      result = generate(
        ModelDrafter(draft, k), controller, [[0]], new, seed, target=target
      )
      before = np.array([0, *result.new_tokens()[0][:-1]])
      share = np.mean(before < 8)
      oracle = share * easy + (1 - share) * hard
      ratios.append(cost(result) / new / oracle)
    return np.mean(ratios)

  adaptive = over(draft_length.find('adaptive', k, round_cost))
  fixed = [over(Always(j, tuple(range(k + 1)))) for j in range(k + 1)]
  assert adaptive <= 1.05
  assert adaptive < min(fixed) - 0.1


def test_a_ladder_climbs_from_nothing():
  assert draft_length.ladder(1) == (0, 1)
  assert draft_length.ladder(6) == (0, 1, 2, 4, 6)
  assert draft_length.ladder(8) == (0, 1, 2, 4, 8)
  for rungs in ((), (0,), (1, 2), (0, 2, 1), (0, 1, 1)):
    with pytest.raises(ValueError, match='should climb from 0'):
      draft_length.Fallback(rungs)
  with pytest.raises(ValueError, match='needs one for each'):
    draft_length.Adaptive(RUNGS, jnp.ones(3))


def test_what_does_not_fit_is_refused():
  controller = CONTROLLERS['fallback']
  model = toys.transformer(vocab_size=V)
  for drafter, said in (
    (ModelDrafter(NEAR, 4), '4 tokens'),
    (NoDrafter(), '0 tokens'),
    (TreeDrafter(model, 2), 'a tree'),
  ):
    with pytest.raises(ValueError, match=f'proposes {said}'):
      generate(drafter, controller, [[1]], 8)
  for arguments, said in (
    (('longest', K), "no draft length 'longest'"),
    (('fallback', 0), 'fallback needs a longest draft of 1 or more, not 0'),
    (('adaptive', K), 'what rounds cost'),
    (('adaptive', K, lambda k: 1 - k), 'all must be positive'),
    (('adaptive', K, lambda k: np.nan), 'all must be positive'),
  ):
    with pytest.raises(ValueError, match=said):
      draft_length.find(*arguments)


def test_a_state_belongs_to_its_controller(monkeypatch):
  monkeypatch.setattr(generation, '_prefill', SHIPPED['_prefill'])
  rule = verify.as_pytree(verify.rejection)
  drafter = ModelDrafter(NEAR, K)
  for own, other in (
    (draft_length.FIXED, CONTROLLERS['fallback']),
    (CONTROLLERS['fallback'], draft_length.FIXED),
    (CONTROLLERS['adaptive'], draft_length.find('adaptive', 4, round_cost)),
  ):
    state = jax.eval_shape(
      lambda own=own: generation.start(
        TARGET,
        drafter,
        [[1]],
        key=jax.random.key(0),
        max_new_tokens=4,
        controller=own,
      )
    )
    arguments = TARGET, drafter, rule, warps.UNCHANGED, NEVER, state, other
    with pytest.raises(ValueError, match='prefill with the controller'):
      jax.eval_shape(decode.step, *arguments)

"""The law of the whole loop: generated tokens against the oracle's exact law.

Many rows with fixed keys, a chi-square test over all paths, p >= 1e-4. Each
planted fault must fail the same test (p < 1e-4) in the same compiled program,
where it is a number among the arguments.

On faults in the key scheme. Under `rejection` the accept noise of a chain could
be keyed by position and no law would show it: a test that was made ends in a
token emitted at its position, so no number is read twice. It is read twice by
block verification, which looks behind the first rejection, and draft noise is
by a drafter that looks at discarded nodes: so both are here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys
from flax import nnx

from specjax import decode, draft_length, draws, verify, warps
from specjax.drafters.coupled import CoupledDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.models.markov import Markov
from specjax.types import Draft, pytree

PROMPTS = [2], [0, 1, 2]  # ragged, and one is shorter than the order
STEPS = 4
ROWS = 16_000  # per prompt
TARGET = oracles.table(4, 2, 3, 1.5)
DRAFT = oracles.table(54, 1, 3, 2.0)
NEVER = (3,)  # an end id outside the vocabulary


@jax.jit
def run(target, drafter, rule, warp, eos, controller=draft_length.FIXED):
  """Tokens `[ROWS, prompts, STEPS]`; a batch of all prompts is mapped."""
  size = max(map(len, PROMPTS)) + STEPS
  tokens = np.array([p + [0] * (size - len(p)) for p in PROMPTS], np.int32)
  length = jnp.array([len(p) for p in PROMPTS])
  keys = jax.random.split(jax.random.key(0), (ROWS, len(PROMPTS)))
  start = decode.prefill(
    target,
    drafter,
    tokens,
    length,
    length + STEPS,
    length,
    keys[0],
    controller,
  )

  def one(row):
    state = start._replace(row=row)
    state = decode.advance(
      target, drafter, rule, warp, eos, state, 99, controller
    )
    index = length[:, None] + jnp.arange(STEPS)
    return jnp.take_along_axis(state.tokens, index, 1)

  return jax.vmap(one)(keys)


def narrowed(temperature, mass):
  """Temperature and top-p, as a warp and in NumPy."""

  def reference(logits):
    kept = oracles.top_p(oracles.softmax(logits / temperature), mass)
    return kept / kept.sum()

  pair = warps.Temperature(temperature), warps.TopP(mass)
  return warps.compose(*pair), reference


PLAIN = narrowed(1.0, 1.0)


def p_value(
  target,
  drafter,
  rule,
  warp=PLAIN,
  eos=NEVER,
  table=TARGET,
  controller=draft_length.FIXED,
):
  """The smallest p-value of the prompts; `rule` is a pytree."""
  eos_ids = jnp.array(eos)
  tokens = run(target, drafter, rule, warp[0], eos_ids, controller)
  tokens = np.asarray(tokens)
  return min(
    oracles.p_value(
      tokens[:, i], oracles.joint(table, prompt, STEPS, warp[1], eos)
    )
    for i, prompt in enumerate(PROMPTS)
  )


class Leaky(Markov):
  """Commits rejected nodes too, if it leaks."""

  def __init__(self, leaks):
    super().__init__(TARGET)
    self.leaks = nnx.Param(jnp.array(leaks))

  def commit(self, cache, rows, kept, chain=True):
    leaks = self.leaks[...] & (kept.shape[1] < decode.CHUNK)
    return super().commit(cache, rows, kept | leaks, chain)


@pytree
class Stale(ModelDrafter):
  """Claims, if stale, the model's law, whatever the warp it drew with."""

  stale: bool = False

  def propose(self, target, cache, memory, keys, tokens, length):
    draft, memory = super().propose(target, cache, memory, keys, tokens, length)
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    before = jnp.concatenate([pending, draft.tokens[:, :-1]], 1)
    claimed = self.model.logits[...][before]
    logits = jnp.where(self.stale, claimed, draft.logits)
    return dataclasses.replace(draft, logits=logits), memory


@pytree
class Faulty:
  """`rejection`, with its law replaced by that of a fault."""

  fault: int

  def __call__(self, noise, draft, log_p):
    verdict = verify.rejection(noise, draft, log_p)
    count = verdict.accepted.sum()
    whole = count == draft.tokens.shape[0]
    laws = [
      verdict.law,
      log_p[count],
      jnp.where(whole, log_p[count - 1], verdict.law),
    ]
    return verdict._replace(law=jnp.stack(laws)[self.fault])


NO_FAULT, NO_RESIDUAL, BONUS_FROM_THE_ROW_ABOVE = range(3)


def shipped(
  warp=PLAIN, eos=NEVER, fault=NO_FAULT, leaks=False, drawn=1.0, stale=False
):
  """p-value of rejection behind a draft model that draws at `drawn`."""
  drafter = Stale(Markov(DRAFT), 3, warps.Temperature(drawn), stale)
  return p_value(Leaky(leaks), drafter, Faulty(fault), warp, eos)


@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'warp': narrowed(0.7, 1.0)},
    {'warp': narrowed(0.7, 0.8)},
    {'warp': narrowed(1.0, 0.8), 'drawn': 0.5},
    {'drawn': 0.0},
    {'eos': (1,)},
  ],
)
def test_rejection_has_the_law_of_the_target(settings):
  assert shipped(**settings) >= 1e-4


@pytest.mark.parametrize(
  'fault',
  [
    {'fault': NO_RESIDUAL},
    {'fault': BONUS_FROM_THE_ROW_ABOVE},
    {'leaks': True},
    # The most probable token, tested as if it had been drawn.
    {'drawn': 0.0, 'stale': True},
    # Drawn at one temperature, tested at another.
    {'drawn': 0.5, 'stale': True},
    # The target is scored without the warp that was asked for.
    {'warp': (PLAIN[0], narrowed(0.7, 1.0)[1])},
    {'warp': (PLAIN[0], narrowed(1.0, 0.8)[1])},
  ],
)
def test_a_planted_fault_is_found(fault):
  assert shipped(**fault) < 1e-4


@pytest.mark.slow  # a program each
@pytest.mark.parametrize(
  'drafter',
  [
    NoDrafter(),
    NGram(2),
    ModelDrafter(Markov(DRAFT), 1),
  ],
)
def test_rejection_has_the_law_of_the_target_behind_any_drafter(drafter):
  assert p_value(Markov(TARGET), drafter, Faulty(NO_FAULT)) >= 1e-4


# Hasty ones: within a few tokens they go up, down, and back.
RUNGS = (0, 1, 3)
CONTROLLERS = {
  'fallback': draft_length.Fallback(
    RUNGS, threshold=0.6, memory=0.3, first_wait=1
  ),
  'adaptive': draft_length.Adaptive(
    RUNGS, jnp.array([1.0, 1.4, 2.2]), memory=0.5
  ),
  'confidence': draft_length.Confidence(RUNGS, bound=0.55, step=0.1),
}


@pytest.mark.parametrize(
  ('name', 'rule'),
  [
    ('adaptive', verify.rejection),
    ('fallback', verify.rejection),
    ('confidence', verify.rejection),
    ('confidence', verify.block),
  ],
)
@pytest.mark.slow
def test_a_draft_length_leaves_the_law_alone(name, rule):
  """Unless what it goes by is the token that it decides on."""

  def behind(picky):
    return p_value(
      Markov(TARGET),
      toys.Picky(Markov(DRAFT), 3, picky=picky),
      verify.as_pytree(rule),
      controller=CONTROLLERS[name],
    )

  assert behind(False) >= 1e-4
  assert behind(True) < 1e-4


@pytest.mark.parametrize(
  ('name', 'drafter', 'rule', 'settings'),
  [
    ('fallback', NGram(3), verify.rejection, {}),
    (
      'adaptive',
      CoupledDrafter(Markov(DRAFT), 3),
      verify.sampler_match,
      {'warp': narrowed(0.7, 0.8)},
    ),
    (
      'confidence',
      ModelDrafter(Markov(DRAFT), 3),
      verify.rejection,
      {'eos': (1,), 'warp': narrowed(0.7, 1.0)},
    ),
    pytest.param(
      'confidence',
      toys.heads(3, 3),
      verify.block,
      {},
      marks=pytest.mark.slow,
    ),
  ],
)
@pytest.mark.slow
def test_a_draft_length_leaves_the_law_of_any_drafter_alone(
  name, drafter, rule, settings
):
  rule, controller = verify.as_pytree(rule), CONTROLLERS[name]
  got = p_value(
    Markov(TARGET), drafter, rule, controller=controller, **settings
  )
  assert got >= 1e-4


@pytree
class Wary:
  """Drafts only where the draft it last lost there began with token 0.

  It may: what was discarded is history, as long as the new noise is fresh.
  """

  logits: jax.Array
  keyed: int

  def init(self, target, batch, size):
    return jnp.zeros((batch, 2), jnp.int32), jnp.zeros(batch, jnp.int32)

  def propose(self, target, cache, memory, keys, tokens, length):
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    node = jnp.broadcast_to(jnp.arange(2), (len(length), 2))
    position = length[:, None] + node
    apart = jax.vmap(jax.random.fold_in, (0, None))(keys.target, 1 << 20)
    choices = [
      fold(keys.draft, node),
      fold(apart, position),
      fold(keys.target, position),
    ]
    draw = jax.vmap(jax.vmap(draws.inverse_cdf, (0, None)), (0, None))
    drawn = draw(jnp.stack(choices)[self.keyed], self.logits)
    lost, start = memory
    i = (length - start)[:, None]
    lost = jnp.take_along_axis(lost, jnp.clip(i, 0, 1), 1)
    valid = jnp.broadcast_to((i > 1) | (lost == 0), drawn.shape)
    logits = jnp.broadcast_to(self.logits, (*drawn.shape, len(self.logits)))
    return Draft(drawn, logits=logits, valid=valid), (drawn, length)

  def observe(self, target, memory, block, kept, output):
    return memory


BY_ROUND, BY_POSITION, BY_TARGET = range(3)


@pytree
class Either:
  """`sampler_match` or `rejection`."""

  match: bool

  def __call__(self, *args):
    pair = verify.sampler_match(*args), verify.rejection(*args)
    return jax.tree.map(lambda a, b: jnp.where(self.match, a, b), *pair)


def wary(keyed, match=False):
  drafter = Wary(jnp.log(jnp.array([0.45, 0.1, 0.45])), keyed)
  return p_value(Markov(TARGET), drafter, Either(match))


def test_draft_noise_is_fresh_in_every_round():
  assert wary(BY_ROUND) >= 1e-4
  assert wary(BY_POSITION) < 1e-4


def test_only_sampler_match_may_share_the_key_of_draft_and_final_draw():
  """The recovery of `rejection` would draw with the noise that was rejected."""
  assert wary(BY_TARGET) < 1e-4
  assert wary(BY_TARGET, match=True) >= 1e-4
  assert wary(BY_ROUND, match=True) >= 1e-4


@pytree
class Block:
  """Block verification, which tests behind a failed test."""

  by_position: bool

  def __call__(self, noise, draft, log_p):
    own = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 7)))
    log_u = jnp.where(
      self.by_position, jnp.log1p(-own(noise.draws[:-1])), noise.log_u
    )
    return verify.block(noise._replace(log_u=log_u), draft, log_p)


@pytest.mark.slow
def test_accept_noise_is_fresh_in_every_round():
  drafter = ModelDrafter(Markov(DRAFT), 2)
  assert p_value(Markov(TARGET), drafter, Block(False)) >= 1e-4
  assert p_value(Markov(TARGET), drafter, Block(True)) < 1e-4


def everywhere(law):
  """The table of a law that depends on nothing."""
  return np.tile(oracles.log(law), (len(law), 1))


@pytree
class KeyedAlike(ModelDrafter):
  """Draws, if told so, with the key that the target draws with there."""

  alike: bool = False

  def _draw(self, keys, length):
    own = super()._draw(keys, length)

    def draw(i, law):
      shared = jax.vmap(jax.random.fold_in)(keys.target, length + i)
      shared = jax.vmap(draws.gumbel)(shared, law)
      return jnp.where(self.alike, shared, own(i, law))

    return draw


@pytree
class UniformTwice:
  """Draws the last token itself, if told so with the uniform that rejected."""

  twice: bool

  def __call__(self, noise, draft, log_p):
    verdict = verify.rejection(noise, draft, log_p)
    # With the noise that the drafter above may have used.
    key = noise.draws[verdict.accepted.sum()]
    law = verdict.law
    own = jnp.arange(log_p.shape[-1]) == draws.gumbel(key, law)
    below = jnp.cumsum(jnp.exp(law)) <= jnp.exp(noise.log_u[0])
    picked = jnp.arange(log_p.shape[-1]) == below.sum()
    again = self.twice & ~verdict.accepted[0]
    last = jnp.where(again, picked, own)
    return verdict._replace(law=jnp.where(last, 0.0, -jnp.inf))


@pytest.mark.parametrize(
  ('p', 'q', 'faults', 'wrong'),
  [
    # The losers of the draft's race lose again.
    ([0.2, 0.5, 0.3, 0], [0.6, 0.3, 0.1, 0], (1, 0), [3, 7, 5, 0]),
    # A replacement depends on how far the draft was rejected.
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], (0, 1), [1, 2, 2, 5]),
  ],
  ids=['gumbel', 'uniform'],
)
def test_a_recovery_with_noise_that_was_used_has_this_other_law(
  p, q, faults, wrong
):
  """Acceptance is as it should be, so that nothing else would show it."""

  def first_tokens(alike, twice):
    drafter = KeyedAlike(Markov(everywhere(q)), 1, alike=bool(alike))
    rule, eos = UniformTwice(bool(twice)), jnp.array((4,))
    tokens = run(Markov(everywhere(p)), drafter, rule, PLAIN[0], eos)
    return np.asarray(tokens)[:, 0, :1]

  p, wrong = np.array(p), np.array(wrong) / np.sum(wrong)
  assert oracles.p_value(first_tokens(0, 0), p) >= 1e-4
  assert oracles.p_value(first_tokens(*faults), p) < 1e-4
  assert oracles.p_value(first_tokens(*faults), wrong) >= 1e-4


@pytree
class Unwarped:
  """`rejection`, tested, if told so, with a law that skipped the warp."""

  law: jax.Array
  skips: bool

  def __call__(self, noise, draft, log_p):
    raw = log_p.at[:-1].set(self.law)
    return verify.rejection(noise, draft, jnp.where(self.skips, raw, log_p))


@pytest.mark.slow
def test_min_p_holds_for_verified_tokens_and_for_the_bonus():
  p, q = [0.6, 0.25, 0.1, 0.05], [0.4, 0.3, 0.2, 0.1]

  def reference(logits):
    kept = oracles.min_p(oracles.softmax(logits), 0.2)
    return kept / kept.sum()

  table, warp = everywhere(p), (warps.MinP(0.2), reference)
  np.testing.assert_allclose(reference(table[0]), [12 / 17, 5 / 17, 0, 0])

  def shipped_unless(skips):
    rule = Unwarped(oracles.log(p), skips)
    drafter = ModelDrafter(Markov(everywhere(q)), 2)
    return p_value(Markov(table), drafter, rule, warp, (4,), table)

  assert shipped_unless(False) >= 1e-4
  assert shipped_unless(True) < 1e-4

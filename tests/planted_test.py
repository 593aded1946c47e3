"""The certificate on transformers of a million parameters.

Every exact rule passes with every way to draft, with the power that it states;
each planted fault fails. The draft is the target with noise on its weights.
What can be a number among the arguments of a program is one, faults and rules
alike: the programs are what takes the time.
"""

import dataclasses

import certify_test
import jax
import jax.numpy as jnp
import pytest
import toys
from flax import nnx

from specjax import certify, decode, draws, verify
from specjax.certify import tiers
from specjax.drafters.committee import Committee
from specjax.drafters.coupled import CoupledDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.drafters.tree import TreeDrafter
from specjax.models.transformer import Transformer
from specjax.types import pytree

pytestmark = pytest.mark.slow

K, V = 3, 8
WARP = certify_test.warp(1.3, 0.95)
PROMPTS = [[7, 3, 0, 1], [5, 5, 2, 6], [3, 3, 4, 4], [1, 2, 3, 4]]
SIZES = dict(vocab_size=V, width=192, layers=3, heads=4, kv_heads=2, hidden=384)


class Target(Transformer):
  """A target that can keep the wrong rows."""

  def commit(self, cache, rows, kept, chain=True):
    decoding = kept.shape[1] < decode.CHUNK
    uncut = decoding & (self.fault[...] == certify_test.UNCUT)
    stale = decoding & (self.fault[...] == certify_test.STALE)
    behind = jnp.arange(kept.shape[1])[:, None] > 0
    rows = jax.tree.map(lambda x: jnp.where(stale & behind, 0, x), rows)
    return super().commit(cache, rows, kept | uncut, chain)


def weights(cls=Transformer, noise=0.0):
  """A lively transformer, and one near it."""
  model = toys.transformer(cls=cls, **SIZES)
  leaves, structure = jax.tree.flatten(model)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  # Flatter than the toys are: some three of eight tokens.
  leaves = [
    0.7 * (x + noise * x.std() * jax.random.normal(key, x.shape))
    for key, x in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, leaves)


DRAFT, OTHER = weights(noise=0.1), weights(noise=0.2)
FAR = weights(noise=1.2)  # mostly rejected, for faults of what follows
MODEL = ModelDrafter(DRAFT, K, WARP)
SHARP = certify_test.warp(0.5)  # too sure, for faults of siblings


def target(fault=0):
  """The target, with a fault in its cache or none."""
  model = weights(Target)
  model.fault = nnx.Param(jnp.array(fault))
  return model


TARGET = target()


@pytree
class Late:
  """A warp towards high ids, so that noise used twice leans one way."""

  def __call__(self, logits):
    return logits + jnp.arange(V)


@pytree
class Misled(ModelDrafter):
  """A drafter with faults; its chains may end early, with padding behind."""

  fault: int = 0
  short: bool = False

  def propose(self, target, cache, memory, keys, tokens, length):
    draft, memory = super().propose(target, cache, memory, keys, tokens, length)
    law = jax.nn.softmax(draft.logits)
    q = jnp.take_along_axis(law, draft.tokens[..., None], -1)[..., 0]
    dropped = (q <= 0.1) & (self.fault == certify_test.DROPPED)
    inside = jnp.arange(K) < (length % (K + 1))[:, None]
    valid = jnp.cumprod(~dropped, 1).astype(bool)
    valid &= inside | ~jnp.asarray(self.short)
    padded = jnp.where(inside | ~jnp.asarray(self.short), draft.tokens, 0)
    return dataclasses.replace(draft, tokens=padded, valid=valid), memory

  def _draw(self, keys, length):
    own = super()._draw(keys, length)

    def draw(i, law):
      key = jax.vmap(jax.random.fold_in)(keys.target, length + i)
      shared = jax.vmap(draws.inverse_cdf)(key, law)
      token = jnp.where(self.fault == certify_test.ONE_KEY, shared, own(i, law))
      likeliest = law.argmax(-1).astype(jnp.int32)
      return jnp.where(self.fault == certify_test.ARGMAX, likeliest, token)

    return draw


@pytree
class OneOf:
  """A rule by its number, so that several are one program."""

  number: int
  rules: tuple

  def __call__(self, noise, draft, log_p):
    def branch(rule):
      # What holds a leaf is not hashable, as a branch has to be.
      return lambda: rule(noise, draft, log_p)

    return jax.lax.switch(self.number, [*map(branch, self.rules)])


def each(*names, **more):
  """Rules by name."""
  rules = {name: verify.RULES[name] for name in names} | more
  rest = tuple(map(verify.as_pytree, rules.values()))
  return {name: OneOf(i, rest) for i, name in enumerate(rules)}


def decided(
  drafter=MODEL,
  rule=verify.rejection,
  target=TARGET,
  warp=WARP,
  batches=48,
):
  """The tests, and the smallest leak that they would catch."""
  key = jax.random.key(0)
  subject = tiers.Subject(target, drafter, rule, warp, MODEL, key)
  # Few rows, since a program writes each on its own and compiles longer.
  size = {'batches': batches, 'each': 2, 'max_new_tokens': 32}

  def text(arm, i):
    # Plain text has nothing of the drafter, nor of the rule.
    place = arm, id(target), id(warp), batches
    if arm == tiers.PLAIN and place in _PLAIN_TEXT:
      return _PLAIN_TEXT[place][0]
    found = subject.sample(arm, PROMPTS, i, **size)
    if arm == tiers.PLAIN:
      _PLAIN_TEXT[place] = found, target, warp  # kept, so that ids stay theirs
    return found

  direction = drafter if isinstance(drafter, ModelDrafter) else MODEL

  def evidence(arm, i):
    place = id(target), id(warp), batches, id(direction)
    if arm == tiers.PLAIN and place in _PLAIN_EVIDENCE:
      return _PLAIN_EVIDENCE[place]
    found = certify.observe(
      TARGET, text(arm, i), warp=WARP, direction=direction
    )
    if arm == tiers.PLAIN:
      _PLAIN_EVIDENCE[place] = found
    return found

  seen = {arm: evidence(arm, i) for i, arm in enumerate(tiers.ARMS)}
  tests = certify.decide(seen, K + 1)
  return tests, certify.detectable_leak(seen[tiers.PLAIN], len(tests))


_PLAIN_TEXT, _PLAIN_EVIDENCE = {}, {}


def rejected(tests):
  return {test.arm for test in tests if test.rejected}


CHAIN = ['rejection', 'block', 'traversal', 'k_seq', 'sampler_match']


def chain(stopped=False):
  """Rules for chains, among them block verification with a fault or none."""
  return each(
    *CHAIN,
    stopping=certify_test.UntilItFails(stopped),
  )


TREE, POINTS = each('rejection', 'traversal'), each('rejection', 'block')
IID = TreeDrafter(DRAFT, 2, WARP, branching=(2, 2), replacement=True)
DISTINCT = TreeDrafter(DRAFT, 2, WARP, branching=(2, 2))
COMMITTEE = Committee((MODEL, ModelDrafter(OTHER, K, WARP)))
SOUND = {'drafter': Misled(DRAFT, K, WARP), 'rule': certify_test.Rule()}
SHORT = Misled(DRAFT, K, WARP, short=True)

LOSSLESS = {
  **{name: (MODEL, chain()[name]) for name in CHAIN},
  'coupled': (CoupledDrafter(DRAFT, K, WARP), verify.sampler_match),
  **{f'iid, {name}': (IID, rule) for name, rule in TREE.items()},
  'iid, k_seq': (
    TreeDrafter(DRAFT, 2, WARP, branching=(3, 1), replacement=True),
    verify.k_seq,
  ),
  **{f'distinct, {name}': (DISTINCT, rule) for name, rule in TREE.items()},
  **{f'committee, {name}': (COMMITTEE, rule) for name, rule in TREE.items()},
  **{f'ngram, {name}': (NGram(K), rule) for name, rule in POINTS.items()},
  'none': (NoDrafter(), verify.rejection),
  # The clean twins of faults below.
  'no fault': tuple(SOUND.values()),
  'padding': (SHORT, certify_test.Rule()),
  'late': (Misled(DRAFT, K, Late()), certify_test.Rule()),
  'block, not stopped': (MODEL, chain()['stopping']),
  'siblings, well scored': (
    certify_test.Forgetful(FAR, 2, SHARP, branching=(3,)),
    verify.rejection,
  ),
}


@pytest.mark.parametrize('name', LOSSLESS)
def test_what_is_lossless_passes_with_power(name):
  drafter, rule = LOSSLESS[name]
  tests, delta = decided(drafter, rule)
  assert not rejected(tests)
  assert delta < 0.03


FAULTS = {
  'the residual is not used': dict(
    rule=certify_test.Rule(certify_test.NO_RESIDUAL)
  ),
  'the residual goes through a softmax': dict(
    rule=certify_test.Rule(certify_test.SOFTMAX_OF_RESIDUAL)
  ),
  'the bonus is from the row above': dict(
    rule=certify_test.Rule(certify_test.WRONG_ROW)
  ),
  'padding is accepted': dict(
    rule=certify_test.Rule(certify_test.PADDING), drafter=SHORT
  ),
  'an argmax draft is scored with its softmax': dict(
    drafter=Misled(DRAFT, K, WARP, certify_test.ARGMAX)
  ),
  'one key for draft and recovery': dict(
    drafter=Misled(DRAFT, K, Late(), certify_test.ONE_KEY)
  ),
  'tokens are dropped by their own value': dict(
    drafter=Misled(DRAFT, K, WARP, certify_test.DROPPED)
  ),
  'the warp of the target is not applied': dict(warp=certify_test.warp()),
  'the warp is applied in another order': dict(
    warp=certify_test.warp(1.0, 0.95, 1.3)
  ),
  'the block rule stops at its first failure': dict(
    rule=chain(stopped=True)['stopping'], drafter=MODEL
  ),
  'siblings without replacement are scored with the first law': dict(
    drafter=certify_test.Forgetful(FAR, 2, SHARP, branching=(3,), faulty=True),
    rule=verify.rejection,
  ),
  'rejected rows are committed': dict(target=target(certify_test.UNCUT)),
  'accepted rows are not committed': dict(target=target(certify_test.STALE)),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_every_planted_fault_fails(fault):
  tests, _ = decided(**SOUND | FAULTS[fault])
  # A wrong warp is wrong in both arms; else plain decoding is the clean twin.
  both = 'warp' in fault
  assert rejected(tests) == (set(tiers.ARMS) if both else {'speculative'})

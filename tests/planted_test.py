"""The certificate on transformers of a million parameters.

Every exact rule passes with every way to draft, with the power that it states;
each planted fault fails. The draft is the target with noise on its weights.
"""

import dataclasses

import certify_test
import jax
import jax.numpy as jnp
import law_test
import pytest
import toys

from specjax import certify, decode, draws, verify, warps
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
WARP = warps.compose(warps.Temperature(1.3), warps.TopP(0.95))
PROMPTS = [[7, 3, 0, 1], [5, 5, 2, 6], [3, 3, 4, 4], [1, 2, 3, 4]]
SIZES = dict(vocab_size=V, width=192, layers=3, heads=4, kv_heads=2, hidden=384)


class Faulty(Transformer):
  """A target that can keep the wrong rows; its fault is its class's."""

  fault = 0

  def commit(self, cache, rows, kept, chain=True):
    decoding = kept.shape[1] < decode.CHUNK
    if self.fault == certify_test.UNCUT and decoding:
      kept = kept.at[:].set(True)
    if self.fault == certify_test.STALE and decoding:
      first = jnp.arange(kept.shape[1])[:, None] == 0
      rows = jax.tree.map(lambda x: jnp.where(first, x, 0), rows)
    return super().commit(cache, rows, kept, chain)


class Uncut(Faulty):
  fault = certify_test.UNCUT


class Stale(Faulty):
  fault = certify_test.STALE


def weights(cls=Transformer, noise=0.0):
  """A lively transformer, and one near it."""
  model = toys.transformer(cls=cls, **SIZES)
  leaves, structure = jax.tree.flatten(model)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  # Flatter than the toys are: some thirty tokens, the likeliest at a quarter.
  leaves = [
    0.7 * (x + noise * x.std() * jax.random.normal(key, x.shape))
    for key, x in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, leaves)


TARGET, DRAFT, OTHER = weights(), weights(noise=0.1), weights(noise=0.2)
FAR = weights(noise=0.3)  # mostly rejected, for faults of what follows
MODEL = ModelDrafter(DRAFT, K, WARP)


@pytree
class Misled(ModelDrafter):
  """A drafter with a fault of its own."""

  fault: int = dataclasses.field(default=0, metadata={'static': True})

  def propose(self, target, cache, memory, keys, tokens, length):
    draft, memory = super().propose(target, cache, memory, keys, tokens, length)
    valid = jnp.ones(draft.tokens.shape, bool)
    if self.fault == certify_test.DROPPED:
      law = jax.nn.softmax(draft.logits)
      q = jnp.take_along_axis(law, draft.tokens[..., None], -1)[..., 0]
      valid = jnp.cumprod(q > 0.1, 1) > 0
    return dataclasses.replace(draft, valid=valid), memory

  def _draw(self, keys, length):
    def draw(i, law):
      if self.fault == certify_test.ARGMAX:
        return law.argmax(-1).astype(jnp.int32)
      key = jax.vmap(jax.random.fold_in)(keys.target, length + i)
      return jax.vmap(draws.gumbel)(key, law)

    if self.fault in (certify_test.ARGMAX, certify_test.ONE_KEY):
      return draw
    return super()._draw(keys, length)


class Short(Misled):
  """Chains that end early, so that there is padding behind them."""

  def propose(self, target, cache, memory, keys, tokens, length):
    draft, memory = super().propose(target, cache, memory, keys, tokens, length)
    valid = jnp.arange(K) < (length % (K + 1))[:, None]
    padded = jnp.where(valid, draft.tokens, 0)
    return dataclasses.replace(draft, tokens=padded, valid=valid), memory


SHORT, SOUND = pytree(Short)(DRAFT, K, WARP), Misled(DRAFT, K, WARP)


def decided(
  drafter=SOUND,
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

  seen = {
    arm: certify.observe(
      TARGET,
      text(arm, i),
      warp=WARP,
      direction=drafter if isinstance(drafter, ModelDrafter) else MODEL,
    )
    for i, arm in enumerate(tiers.ARMS)
  }
  tests = certify.decide(seen, K + 1)
  return tests, certify.detectable_leak(seen[tiers.PLAIN], len(tests))


_PLAIN_TEXT = {}


def rejected(tests):
  return {test.arm for test in tests if test.rejected}


LOSSLESS = {
  'rejection': (MODEL, verify.rejection),
  'block': (MODEL, verify.block),
  'traversal': (MODEL, verify.traversal),
  'k_seq': (MODEL, verify.k_seq),
  'sampler_match': (MODEL, verify.sampler_match),
  'coupled': (CoupledDrafter(DRAFT, K, WARP), verify.sampler_match),
  'iid, rejection': (
    TreeDrafter(DRAFT, 2, WARP, branching=(2, 2), replacement=True),
    verify.rejection,
  ),
  'iid, k_seq': (
    TreeDrafter(DRAFT, 2, WARP, branching=(3, 1), replacement=True),
    verify.k_seq,
  ),
  'iid, traversal': (
    TreeDrafter(DRAFT, 2, WARP, branching=(2, 2), replacement=True),
    verify.traversal,
  ),
  'distinct, rejection': (
    TreeDrafter(DRAFT, 2, WARP, branching=(2, 2)),
    verify.rejection,
  ),
  'distinct, traversal': (
    TreeDrafter(DRAFT, 2, WARP, branching=(2, 2)),
    verify.traversal,
  ),
  'committee, rejection': (
    Committee((MODEL, ModelDrafter(OTHER, K, WARP))),
    verify.rejection,
  ),
  'committee, traversal': (
    Committee((MODEL, ModelDrafter(OTHER, K, WARP))),
    verify.traversal,
  ),
  'ngram, rejection': (NGram(K), verify.rejection),
  'ngram, block': (NGram(K), verify.block),
  'padding': (SHORT, verify.rejection),
  'none': (NoDrafter(), verify.rejection),
  # The clean twins of faults below.
  'far, block': (ModelDrafter(FAR, K, WARP), verify.block),
  'block, not stopped': (MODEL, certify_test.UntilItFails(False)),
  'siblings, well scored': (
    certify_test.Forgetful(FAR, 2, WARP, branching=(3,)),
    verify.rejection,
  ),
}


@pytest.mark.parametrize('name', LOSSLESS)
def test_what_is_lossless_passes_with_power(name):
  drafter, rule = LOSSLESS[name]
  tests, delta = decided(drafter, rule)
  assert not rejected(tests)
  assert delta < 0.03


MORE = 480  # for faults of a few percent of TV, or fewer
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
    drafter=Misled(DRAFT, K, WARP, fault=certify_test.ARGMAX)
  ),
  'one key for draft and recovery': dict(
    drafter=Misled(FAR, K, WARP, fault=certify_test.ONE_KEY), batches=MORE
  ),
  'tokens are dropped by their own value': dict(
    drafter=Misled(DRAFT, K, WARP, fault=certify_test.DROPPED)
  ),
  'the warp of the target is not applied': dict(warp=warps.UNCHANGED),
  'the warp is applied in another order': dict(
    warp=warps.compose(warps.TopP(0.95), warps.Temperature(1.3))
  ),
  'accept noise is keyed by position under block': dict(
    drafter=ModelDrafter(FAR, K, WARP), rule=law_test.Block(True), batches=MORE
  ),
  'the block rule stops at its first failure': dict(
    rule=certify_test.UntilItFails(True)
  ),
  'siblings without replacement are scored with the first law': dict(
    drafter=certify_test.Forgetful(FAR, 2, WARP, branching=(3,), faulty=True),
    batches=MORE,
  ),
  'rejected rows are committed': dict(target=weights(Uncut)),
  'accepted rows are not committed': dict(target=weights(Stale)),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_every_planted_fault_fails(fault):
  tests, _ = decided(**FAULTS[fault])
  # A wrong warp is wrong in both arms; else plain decoding is the clean twin.
  both = 'warp' in fault
  assert rejected(tests) == (set(tiers.ARMS) if both else {'speculative'})

"""Contrastive decoding: its law by hand, and that decoding keeps it."""

import compiled_test
import jax
import jax.numpy as jnp
import law_test
import numpy as np
import oracles
import pytest
import toys

from specjax import decode, generation, verify, warps
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.models.contrastive import Contrastive
from specjax.models.markov import Markov
from specjax.types import Block, pytree

EXPERT, AMATEUR = Markov(law_test.TARGET), Markov(law_test.DRAFT)
CLOSE = law_test.TARGET + oracles.table(1, 2, 3, 0.5)
ALPHA, BETA = 0.3, 0.5
PROMPTS = [[2], [0, 1, 2], [1, 0] * 5]

forward = toys.jit(Contrastive.forward)
extend = toys.jit(Contrastive.extend)
commit = toys.jit(Contrastive.commit, static_argnames='chain')
unembed = toys.jit(Contrastive.unembed)
pytestmark = pytest.mark.usefixtures('quick_compilation')


def table(alpha, beta, amateur=law_test.DRAFT):
  """The law as the papers write it, from probabilities, in float64."""
  p = oracles.softmax(law_test.TARGET)
  q = oracles.softmax(amateur)  # of order 1: behind any token before the last
  scores = (1 + beta) * np.log(p) - beta * np.log(q)
  plausible = p >= alpha * p.max(-1, keepdims=True)
  law = np.where(plausible, np.exp(scores), 0)
  return oracles.log(law / law.sum(-1, keepdims=True))


@pytree
class Forgetful(Contrastive):
  """Forgets, if told so, what is implausible where one token is scored.

  So does a plain step that is written apart from the scoring of a block.
  """

  forgets: bool = False

  def extend(self, block, cache, taps=()):
    output, rows = super().extend(block, cache, taps)
    forgets = self.forgets & (block.tokens.shape[1] == 1)
    marks = jnp.broadcast_to(forgets, output.features[..., :1].shape)
    features = jnp.concatenate([output.features, marks], -1)
    return output._replace(features=features), rows

  def unembed(self, features):
    alpha = jnp.where(features[..., -1:] > 0, 0.0, self.alpha)
    free = Contrastive(self.expert, self.amateur, alpha, self.beta)
    return free.unembed(features[..., :-1])


def p_value(drafter, rule=verify.rejection, alpha=ALPHA, beta=BETA, **fault):
  return law_test.p_value(
    Forgetful(EXPERT, AMATEUR, alpha, beta, **fault),
    drafter,
    verify.as_pytree(rule),
    table=table(alpha, beta),
  )


@pytest.mark.parametrize(('alpha', 'beta'), [(ALPHA, BETA), (0.0, 2.0)])
def test_the_law_is_the_contrastive_one_whoever_drafts(alpha, beta):
  """The amateur itself; numbers are arguments of one program."""
  amateur = ModelDrafter(AMATEUR, 3)
  assert p_value(amateur, alpha=alpha, beta=beta) >= 1e-4


@pytest.mark.parametrize(
  ('drafter', 'rule'),
  [
    (NoDrafter(), verify.rejection),
    pytest.param(NGram(2), verify.rejection, marks=pytest.mark.slow),
    pytest.param(
      ModelDrafter(AMATEUR, 3), verify.block, marks=pytest.mark.slow
    ),
  ],
  ids=['none', 'ngram', 'block'],
)
def test_any_drafter_and_rule_will_do(drafter, rule):
  assert p_value(drafter, rule) >= 1e-4


def test_a_plain_step_that_forgets_the_mask_is_caught():
  assert p_value(NoDrafter(), forgets=True) < 1e-4


def test_another_contrast_is_caught():
  """The law of another β, and the expert's own."""
  drafter = ModelDrafter(AMATEUR, 3)
  rule = verify.as_pytree(verify.rejection)
  target = Forgetful(EXPERT, AMATEUR, ALPHA, BETA)
  for other in (table(ALPHA, 0.4), law_test.TARGET):
    assert law_test.p_value(target, drafter, rule, table=other) < 1e-4


def test_logits_are_those_of_the_papers():
  """Of two transformers, one of them narrower."""
  expert = toys.transformer(0)
  amateur = toys.transformer(1, width=8, layers=1, heads=2, kv_heads=1)
  tokens = np.random.default_rng(0).integers(0, 13, (2, 6))
  both = Contrastive(expert, amateur)
  features = forward(both, tokens, np.ones_like(tokens)).features
  law = toys.jit(lambda model, x: jax.nn.log_softmax(model.unembed(x)))
  pair = law(expert, features[..., :16]), law(amateur, features[..., 16:])
  p, q = map(np.asarray, pair)
  for alpha, beta in ((0.1, 0.5), (0.5, 0.1), (0.0, 1.0), (1.0, 2.0)):
    got = unembed(Contrastive(expert, amateur, alpha, beta), features)
    plausible = np.exp(p) >= alpha * np.exp(p).max(-1, keepdims=True)
    want = np.where(plausible, (1 + beta) * p - beta * q, -np.inf)
    np.testing.assert_allclose(
      oracles.softmax(got), oracles.softmax(want), rtol=1e-4, atol=1e-6
    )
  assert unembed._cache_size() == 1  # its numbers are leaves


@pytest.mark.parametrize('alpha', [0.0, 0.1])
def test_without_contrast_it_is_the_expert_bit_for_bit(alpha):
  """Among the plausible; also where both rule a token out."""
  shut = np.where(np.arange(3) == 2, -np.inf, law_test.TARGET)
  both = Contrastive(Markov(shut), Markov(shut[0]), alpha, 0.0)
  tokens = np.random.default_rng(1).integers(0, 3, (2, 40))
  segments = np.ones_like(tokens)
  plain = both.expert.forward(tokens, segments).features
  want = warps.MinP(alpha)(plain)
  got = unembed(both, forward(both, tokens, segments).features)
  np.testing.assert_array_equal(got, want)
  assert ((want == -np.inf).sum() > 80) == (alpha > 0)


def test_chains_trees_and_windows_agree():
  """The caches of both models move together."""
  both = Contrastive(
    toys.transformer(0, layers=1),
    toys.transformer(1, width=8, heads=2, layers=1),
  )
  tokens = np.random.default_rng(2).integers(0, 13, (2, 6))
  output, want = extend(both, Block(jnp.asarray(tokens)), both.init_cache(2, 1))
  whole = forward(both, tokens, np.ones_like(tokens)).features
  np.testing.assert_allclose(output.features, whole, atol=1e-4)
  cache = both.init_cache(2, 16)
  _, rows = extend(both, Block(jnp.asarray(tokens[:, :4])), cache)
  cache = commit(both, cache, rows, np.arange(4) < np.array([[4], [3]]))
  assert cache.length.tolist() == [4, 3]
  # A wrong sibling, the right one, and what hangs off that.
  rest = [[5, *tokens[0, 4:]], [5, *tokens[1, 3:5]]]
  tree = Block(jnp.array(rest), jnp.array([[-1, -1, 1]] * 2))
  output, rows = extend(both, tree, cache)
  kept = np.array([[False, True, True]] * 2)
  cache = commit(both, cache, rows, kept, chain=False)
  for row, end in enumerate((6, 5)):
    np.testing.assert_allclose(
      output.features[row, 1:], whole[row, end - 2 : end], atol=1e-4
    )
    for got, right in zip(
      jax.tree.leaves(cache.rows), jax.tree.leaves(want), strict=True
    ):
      np.testing.assert_allclose(
        got[row, :, :end], right[row, :, :end], atol=1e-4
      )
  assert both.embed(tree.tokens).shape == output.features.shape


def test_greedy_text_is_the_plain_one():
  drafter = ModelDrafter(Markov(CLOSE), 4, warps.Greedy())
  result = generation.generate(
    Contrastive(EXPERT, Markov(CLOSE), ALPHA, BETA),
    drafter,
    PROMPTS,
    key=jax.random.key(0),
    max_new_tokens=20,
    warp=warps.Greedy(),
  )
  assert result.new_tokens() == [
    oracles.greedy(table(ALPHA, BETA, CLOSE), prompt, 20) for prompt in PROMPTS
  ]
  assert (result.stats.accepted > 0).all()


def test_both_caches_hold_what_was_emitted():
  """In one program for every contrast."""
  drafter = ModelDrafter(Markov(CLOSE), 3)
  step = toys.jit(decode.step, static_argnums=2)
  eos = jnp.zeros(0, jnp.int32)
  for beta in (0.0, 0.5):
    target = Contrastive(EXPERT, Markov(CLOSE), ALPHA, beta)
    state = generation.start(
      target, drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=50
    )
    for _ in range(12):
      state, _ = step(
        target, drafter, verify.rejection, warps.UNCHANGED, eos, state
      )
    np.testing.assert_array_equal(state.cache.length, state.length - 1)
    tokens = np.asarray(state.tokens)
    fed = np.arange(tokens.shape[1]) < np.asarray(state.cache.length)[:, None]
    for rows in state.cache.rows:
      held = np.asarray(rows)[:, 0, : tokens.shape[1], 0]
      np.testing.assert_array_equal(held[fed], tokens[fed])
    assert (state.stats.accepted > 0).all()
  assert step._cache_size() == 1


def test_a_law_that_is_none_is_reported():
  """The amateur rules out what the expert says."""
  shut = law_test.DRAFT.copy()
  shut[:, 0] = -np.inf
  with pytest.raises(FloatingPointError, match='law is NaN'):
    generation.generate(
      Contrastive(EXPERT, Markov(shut), 0.0, 0.5),
      NoDrafter(),
      PROMPTS,
      key=jax.random.key(0),
      max_new_tokens=5,
    )


@pytest.mark.parametrize(
  ('numbers', 'words'),
  [
    ({'alpha': 1.5}, 'alpha is 1.5'),
    ({'alpha': float('nan')}, 'alpha is nan'),
    ({'beta': -0.1}, 'beta is -0.1'),
    ({'beta': float('inf')}, 'beta is inf'),
    ({'amateur': toys.markov(vocab=4)}, '3 tokens and the amateur 4'),
  ],
)
def test_what_makes_no_law_is_refused(numbers, words):
  with pytest.raises(ValueError, match=words):
    Contrastive(**{'expert': EXPERT, 'amateur': AMATEUR, **numbers})


@pytest.mark.parametrize('batch', [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_loop_copies_no_cache_of_either(batch):
  draft = toys.transformer(**{**compiled_test.SIZES, 'layers': 1, 'width': 6})
  target = Contrastive(toys.transformer(**compiled_test.SIZES), draft)
  drafter = ModelDrafter(draft, 4)
  text, state = compiled_test.advance_program(target, drafter, batch)
  assert len(jax.tree.leaves(state.cache.rows)) == 6
  assert not compiled_test.copies(text, state)

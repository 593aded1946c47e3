"""What every rule owes the loop, on extreme laws, any tree and any noise.

Hypothesis picks the kinds of the laws and a seed; each example is a batch of
one shape, so that every rule compiles once for chains and once for trees.
"""

import dataclasses
import functools

import hypothesis
import jax
import numpy as np
import pytest
import toys
from hypothesis import strategies
from scipy import special

from specjax import trees, verify
from specjax.types import Draft, Noise

B, N, V = 16, 5, 4
EXACT = sorted(set(verify.RULES) - verify.LOSSY)
CHAINS = tuple(sorted(verify.RULES))
TREES = tuple(name for name in CHAINS if name != 'block')
SIBLINGS = 'iid', 'distinct', 'independent', 'fixed'
SOME = 'iid', 'fixed'  # enough for rules that never ask
INF = np.float32(np.inf)


@functools.partial(toys.jit, static_argnames='rule')
def run(noise, draft, log_p, rule):
  return jax.vmap(verify.RULES[rule])(noise, draft, log_p)


def normal(rng, shape):
  return 3 * rng.normal(size=shape)


def shut(rng, shape):
  """Some tokens are impossible, but never all."""
  logits = np.where(rng.random(shape) < 0.5, -INF, normal(rng, shape))
  dead = (logits == -INF).all(-1)
  logits[..., 0] = np.where(dead, 0, logits[..., 0])
  return logits


def one_hot(rng, shape):
  best = rng.integers(0, shape[-1], shape[:-1])
  return np.where(np.arange(shape[-1]) == best[..., None], 0, -INF)


KINDS = {
  'normal': normal,
  'shut': shut,
  'one-hot': one_hot,
  'flat': lambda rng, shape: np.full(shape, 7.0),
  'spread': lambda rng, shape: rng.uniform(-1e4, 1e4, shape),
  'masked': lambda rng, shape: rng.choice([0, -1e30, 1.5, 88], shape),
  'huge': lambda rng, shape: rng.choice([3e38, -3e38, 0, 2.9e38], shape),
}
# log_u as drawn, its ends, and what only an enumeration uses.
NOISES = {
  'drawn': lambda rng, shape: np.log(1 - rng.random(shape, np.float32)),
  'one': lambda rng, shape: np.zeros(shape),
  'zero': lambda rng, shape: np.full(shape, -INF),
  'either': lambda rng, shape: rng.choice([-INF, INF], shape),
}
settings = strategies.fixed_dictionaries(
  {
    'seed': strategies.integers(0, 2**31),
    'p': strategies.sampled_from(sorted(KINDS)),
    'q': strategies.sampled_from([*sorted(KINDS), 'as p']),
    'noise': strategies.sampled_from(sorted(NOISES)),
  }
)
everything = hypothesis.settings(max_examples=6)


class Case:
  """A batch of drafts with their laws and noise, in NumPy."""

  def __init__(self, settings, siblings=None, nodes=N, vocab=V):
    """`siblings` of a tree; None is a chain."""
    rng = np.random.default_rng(settings['seed'])
    self.rng, self.siblings = rng, siblings
    chain = np.tile(np.arange(nodes) - 1, (B, 1))
    self.parents = chain
    if siblings:  # each node hangs off any earlier one
      self.parents = (rng.random((B, nodes)) * (chain + 2)).astype(int) - 1
    self.target = KINDS[settings['p']](rng, (B, nodes + 1, vocab))
    rows = np.arange(B)[:, None], self.parents + 1
    by_row = self.target
    if settings['q'] != 'as p':
      by_row = KINDS[settings['q']](rng, (B, nodes + 1, vocab))
    self.logits = by_row[rows]  # those of one node's children are the same
    if siblings == 'independent':
      second = KINDS[settings['p']](rng, (B, nodes, vocab))
      flip = rng.random((B, nodes, 1)) < 0.5
      self.logits = np.where(flip, second, self.logits)
    self.log_u = NOISES[settings['noise']](rng, (B, nodes))
    self.valid = rng.random((B, nodes)) < 0.85
    self.tokens = np.zeros((B, nodes), int)
    self.draw()

  def draw(self):
    """Tokens from their laws; without replacement what is left of them."""
    row = np.arange(B)
    for i in range(self.tokens.shape[1]):
      parent, logits = self.parents[:, i], self.logits[:, i]
      if self.siblings == 'distinct':
        for j in range(i):
          logits[row, self.tokens[:, j]] = np.where(
            self.parents[:, j] == parent, -INF, logits[row, self.tokens[:, j]]
          )
      above = (parent < 0) | self.valid[row, parent]
      self.valid[:, i] &= above & (logits > -INF).any(-1)
      noisy = logits + self.rng.gumbel(size=logits.shape)
      self.tokens[:, i] = np.argmax(noisy, -1)
    if self.siblings == 'iid':
      self.parents = np.asarray(merge(self.tokens, self.parents, self.valid))

  def draft(self, **changes):
    fields = dict(
      tokens=self.tokens.astype(np.int32),
      parents=self.parents.astype(np.int32) if self.siblings else None,
      logits=self.logits.astype(np.float32),
      valid=self.valid,
      siblings=self.siblings or 'single',
    )
    if self.siblings == 'fixed':
      fields['logits'] = None
    return Draft(**{**fields, **changes})

  @property
  def log_p(self):
    return np.array(log_softmax(self.target.astype(np.float32)))

  @property
  def noise(self):
    """The keys of a depth do not depend on how many depths follow."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = fold(jax.random.key(0), np.arange(B * 16)).reshape(B, 16)
    log_u = self.log_u.astype(np.float32)
    return Noise(log_u, keys[:, : log_u.shape[1] + 1])

  def verdict(self, rule, draft=None, log_p=None, noise=None):
    out = run(
      noise or self.noise,
      draft or self.draft(),
      self.log_p if log_p is None else log_p,
      rule,
    )
    return jax.tree.map(np.asarray, out)

  def row(self, accepted):
    """The row behind each accepted path, having checked that it is one."""
    out = []
    for b in range(B):
      at = -1
      for i in np.flatnonzero(accepted[b]):
        assert self.parents[b, i] == at and self.valid[b, i]
        at = i
      out.append(at + 1)
    return np.array(out)


log_softmax = toys.jit(jax.nn.log_softmax)
merge = toys.jit(trees.merge)


KINDS_OF_TREE = {
  'rejection': SIBLINGS,
  'traversal': SIBLINGS,
  'k_seq': ('iid',),
  'lenience': ('distinct', 'fixed'),
}
PAIRS = [
  *((rule, None) for rule in CHAINS),
  *((rule, s) for rule in TREES for s in KINDS_OF_TREE.get(rule, SOME)),
]


def pairs(without=(), kinds=(None, *SIBLINGS)):
  """Rules with what they take: a chain, None, or a tree of a kind."""
  kept = [(r, s) for r, s in PAIRS if r not in without and s in kinds]
  return pytest.mark.parametrize(('rule', 'siblings'), kept)


def require_equal_without(fault, got, want):
  require_equal(*(jax.tree.map(lambda x: x[~fault], v) for v in (got, want)))


def require_equal(got, want, atol=0.0):
  """Two verdicts, to the last bit or with laws that are almost equal."""
  np.testing.assert_array_equal(got.accepted, want.accepted)
  np.testing.assert_array_equal(got.fault, want.fault)
  if not atol:  # else one that all but never passes may underflow to none
    np.testing.assert_array_equal(got.tested, want.tested)
  for a, b in ((got.law, want.law), (got.log_tests, want.log_tests)):
    np.testing.assert_allclose(np.exp(a), np.exp(b), atol=atol)


OTHER_SIZES = [
  pytest.param(size, marks=pytest.mark.slow)
  for size in ((1, 1), (3, 2), (9, 40))
]


@pytest.mark.parametrize('size', [(N, V), *OTHER_SIZES])
@pairs()
@everything
@hypothesis.given(settings=settings)
def test_a_verdict_is_a_path_and_a_law(rule, siblings, size, settings):
  case = Case(settings, siblings, *size)
  log_p, verdict = case.log_p, case.verdict(rule)
  assert not (verdict.fault & verify.NAN).any()
  row = case.row(verdict.accepted)
  np.testing.assert_allclose(special.logsumexp(verdict.law, -1), 0, atol=1e-5)
  # What the target's law shuts out never comes out.
  assert (verdict.law[log_p[np.arange(B), row] == -INF] == -INF).all()
  if rule != 'distance':  # which may
    parent_rows = log_p[np.arange(B)[:, None], case.parents + 1]
    log_px = np.take_along_axis(parent_rows, case.tokens[..., None], -1)
    assert not (verdict.accepted & (log_px[..., 0] == -INF)).any()
  assert (verdict.log_tests <= 0).all()
  assert (verdict.log_tests[~verdict.tested] == 0).all()
  assert not (verdict.tested & ~case.valid).any()
  if settings['noise'] == 'drawn' and rule in EXACT:
    happened = verdict.log_tests[verdict.tested] > -INF
    assert happened.all()


# Probabilities that rounding cannot turn, in tests that compare two sums.
plain = strategies.fixed_dictionaries(
  {
    'seed': strategies.integers(0, 2**31),
    'p': strategies.sampled_from(['normal', 'shut', 'one-hot']),
    'q': strategies.sampled_from(['normal', 'shut', 'one-hot']),
    'noise': strategies.sampled_from(['drawn', 'either']),
  }
)


@pairs()
@everything
@hypothesis.given(settings=settings)
def test_what_is_invalid_is_not_read(rule, siblings, settings):
  """Not even where it is NaN, nor the rows of the target behind it."""
  case = Case(settings, siblings)
  gone, behind = ~case.valid, np.pad(~case.valid, ((0, 0), (1, 0)))
  log_p, noise = case.log_p, case.noise
  log_p[behind] = np.nan
  logits = case.draft().logits
  if logits is not None:
    logits[gone] = np.nan
  other = case.draft(
    tokens=np.where(gone, 3, case.tokens).astype(np.int32), logits=logits
  )
  log_u = np.where(gone, 0, noise.log_u)
  got = case.verdict(rule, other, log_p, noise._replace(log_u=log_u))
  require_equal(got, case.verdict(rule))


@pytest.mark.parametrize('rule', CHAINS)
@everything
@hypothesis.given(settings=settings)
def test_a_longer_draft_of_invalid_nodes_is_the_shorter_one(rule, settings):
  case = Case(settings)
  case.valid[:, N - 2 :] = False
  short = jax.tree.map(lambda x: x[:, : N - 2], case.draft())
  noise = case.noise
  noise = Noise(noise.log_u[:, : N - 2], noise.draws[:, : N - 1])
  want = case.verdict(rule, short, case.log_p[:, : N - 1], noise)
  got = case.verdict(rule)
  assert not got.accepted[:, N - 2 :].any() and not got.tested[:, N - 2 :].any()
  cut = got._replace(
    accepted=got.accepted[:, : N - 2],
    tested=got.tested[:, : N - 2],
    log_tests=got.log_tests[:, : N - 2],
  )
  require_equal(cut, want, 1e-6)


@pytest.mark.parametrize('rule', TREES)
@everything
@hypothesis.given(settings=settings)
def test_a_chain_may_name_its_parents(rule, settings):
  case = Case(settings)
  named = case.draft(parents=case.parents.astype(np.int32))
  require_equal(case.verdict(rule, named), case.verdict(rule), 1e-5)


@everything
@hypothesis.given(settings=plain)
def test_traversal_of_a_chain_is_block_verification(settings):
  case = Case(settings)
  got, block = case.verdict('traversal'), case.verdict('block')
  # It stops at the first test that passes, from the leaf upwards.
  assert not (got.tested & ~block.tested).any()
  log_tests = np.where(got.tested, block.log_tests, 0)
  want = block._replace(tested=got.tested, log_tests=log_tests)
  require_equal(got, want, 1e-4)


# But for distances of ids, and for the noise of a draw.
@pairs(without=('distance', 'sampler_match'))
@everything
@hypothesis.given(settings=plain)
def test_tokens_have_no_order(rule, siblings, settings):
  case = Case(settings, siblings)
  order = case.rng.permutation(V)
  where = np.argsort(order)  # the new id of each token
  draft = case.draft()
  logits = None if draft.logits is None else draft.logits[..., order]
  other = case.draft(tokens=where[case.tokens].astype(np.int32), logits=logits)
  got = case.verdict(rule, other, case.log_p[..., order])
  require_equal(got._replace(law=got.law[:, where]), case.verdict(rule), 1e-5)


@pairs(without=('k_seq',), kinds=(None, 'fixed'))
@everything
@hypothesis.given(settings=settings)
def test_a_point_mass_is_a_one_hot_law(rule, siblings, settings):
  case = Case(settings, siblings)
  hot = np.where(np.arange(V) == case.tokens[..., None], 0, -INF)
  kind = 'independent' if siblings else 'single'
  laws = case.draft(logits=hot.astype(np.float32), siblings=kind)
  masses = case.draft(logits=None, siblings='fixed')
  require_equal(case.verdict(rule, laws), case.verdict(rule, masses), 1e-6)


@pairs()
@everything
@hypothesis.given(
  settings=settings, bad=strategies.sampled_from([np.nan, np.inf])
)
def test_a_nan_that_is_needed_is_a_fault(rule, siblings, settings, bad):
  """Of the target: behind the root or an accepted node. One logit is enough."""
  case = Case(settings, siblings)
  clean = case.verdict(rule)
  broken = case.rng.random((B, N + 1)) < 0.3
  token = case.rng.integers(0, V, (B, N + 1))
  hit = broken[..., None] & (np.arange(V) == token[..., None])
  case.target = np.where(hit, bad, case.target)
  verdict = case.verdict(rule)
  case.row(verdict.accepted)
  needed = np.pad(verdict.accepted, ((0, 0), (1, 0)), constant_values=True)
  needed = (needed & broken).any(-1)
  fault = (verdict.fault & verify.NAN) > 0
  assert fault[needed].all() and not fault[~broken.any(-1)].any()
  if rule in ('rejection', 'k_seq', 'sampler_match', 'lenience'):
    # The others look at what they discard.
    np.testing.assert_array_equal(fault, needed)
  require_equal_without(fault, verdict, clean)


@pairs(kinds=(None, 'iid', 'distinct', 'independent'))
@everything
@hypothesis.given(settings=settings)
def test_a_draft_law_that_is_nan_changes_nothing_or_is_a_fault(
  rule, siblings, settings
):
  case = Case(settings, siblings)
  draft, clean = case.draft(), case.verdict(rule)
  broken = case.rng.random((B, N)) < 0.4
  logits = np.where(broken[..., None], np.nan, draft.logits)
  verdict = case.verdict(rule, dataclasses.replace(draft, logits=logits))
  case.row(verdict.accepted)
  fault = (verdict.fault & verify.NAN) > 0
  assert not fault[~broken.any(-1)].any()
  if rule in ('sampler_match', 'typical', 'top_k', 'distance'):
    assert not fault.any()  # they do not read it
  require_equal_without(fault, verdict, clean)

"""What every rule owes the loop, on extreme laws, any tree and any noise.

Hypothesis picks the kinds of the laws and a seed; each example is a batch of
one shape, so that every rule compiles once for chains and once for trees.
"""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
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
INF = np.float32(np.inf)


@functools.partial(toys.jit, static_argnames='rule')
def run(noise, draft, log_p, rule):
  return jax.vmap(verify.RULES[rule])(noise, draft, log_p)


def normal(rng, shape):
  return 3 * rng.normal(size=shape)


def shut(rng, shape):
  """Some tokens are impossible, but never all."""
  logits = np.where(rng.random(shape) < 0.5, -INF, normal(rng, shape))
  logits[..., 1] = np.where(rng.random(shape[:-1]) < 0.5, logits[..., 1], 0)
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
everything = hypothesis.settings(max_examples=25)


class Case:
  """A batch of drafts with their laws and noise, in NumPy."""

  def __init__(self, settings, siblings=None, nodes=N):
    """`siblings` of a tree; None is a chain."""
    rng = np.random.default_rng(settings['seed'])
    self.rng, self.siblings = rng, siblings
    chain = np.tile(np.arange(nodes) - 1, (B, 1))
    self.parents = chain
    if siblings:  # each node hangs off any earlier one
      self.parents = (rng.random((B, nodes)) * (chain + 2)).astype(int) - 1
    self.target = KINDS[settings['p']](rng, (B, nodes + 1, V))
    rows = np.arange(B)[:, None], self.parents + 1
    by_row = self.target
    if settings['q'] != 'as p':
      by_row = KINDS[settings['q']](rng, (B, nodes + 1, V))
    self.logits = by_row[rows]  # those of one node's children are the same
    if siblings == 'independent':
      second = KINDS[settings['p']](rng, (B, nodes, V))
      flip = rng.random((B, nodes, 1)) < 0.5
      self.logits = np.where(flip, second, self.logits)
    self.log_u = NOISES[settings['noise']](rng, (B, nodes))
    self.valid = rng.random((B, nodes)) < 0.85
    self.tokens = np.zeros((B, nodes), int)
    self.draw()

  def draw(self):
    """Tokens from their laws; without replacement what is left of them."""
    nodes = self.tokens.shape[1]
    for b in range(B):
      for i in range(nodes):
        parent = self.parents[b, i]
        above = parent < 0 or self.valid[b, parent]
        if self.siblings == 'distinct':
          earlier = self.parents[b, :i] == parent
          self.logits[b, i, self.tokens[b, :i][earlier]] = -INF
        self.valid[b, i] &= above & (self.logits[b, i] > -INF).any()
        if self.valid[b, i]:
          law = special.softmax(self.logits[b, i])
          self.tokens[b, i] = self.rng.choice(V, p=law)
    if self.siblings == 'iid':
      self.parents = np.asarray(
        trees.merge(self.tokens, self.parents, self.valid)
      )

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
    keys = fold(jax.random.key(0), np.arange(B * 8)).reshape(B, 8)
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


def takes(rule, siblings):
  return rule != 'k_seq' or siblings in (None, 'iid')


RULES_AND_SIBLINGS = [
  *((rule, None) for rule in CHAINS),
  *((r, s) for r in TREES for s in SIBLINGS if takes(r, s)),
]
every = pytest.mark.parametrize(('rule', 'siblings'), RULES_AND_SIBLINGS)


def require_equal(got, want, atol=0.0):
  """Two verdicts, to the last bit or with laws that are almost equal."""
  np.testing.assert_array_equal(got.accepted, want.accepted)
  np.testing.assert_array_equal(got.tested, want.tested)
  np.testing.assert_array_equal(got.fault, want.fault)
  for a, b in ((got.law, want.law), (got.log_tests, want.log_tests)):
    np.testing.assert_allclose(np.exp(a), np.exp(b), atol=atol)


@every
@everything
@hypothesis.given(settings=settings)
def test_a_verdict_is_a_path_and_a_law(rule, siblings, settings):
  case = Case(settings, siblings)
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

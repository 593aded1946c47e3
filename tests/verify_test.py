"""Rules for chains, enumerated exactly through the shipped code.

Every draft is weighted by q, and every outcome of the accept tests by the
probabilities that the rule itself reports, so there is no sampling error.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from specjax import verify
from specjax.types import Draft, Noise

ONE_HOT = np.array([0, 0, 1, 0, 0])
SHUT = np.array([0.5, 0.3, 0.2, 0, 0])
OPEN = np.array([0, 0, 0, 0.6, 0.4])
P5 = np.array([0.1, 0.2, 0.3, 0.15, 0.25])
Q5 = np.array([0.4, 0.1, 0.1, 0.3, 0.1])


@functools.partial(toys.jit, static_argnames='rule')
def run(log_u, draft, log_p, rule=verify.rejection):
  """The rule on a batch, compiled; keys matter to sampler_match only."""
  keys = jax.random.split(jax.random.key(0), log_p.shape[:2])
  return jax.vmap(rule)(Noise(log_u, keys), draft, log_p)


def one(p, q, tokens, u, **fields):
  """The verdict, in NumPy, on one sequence with given laws and uniforms."""
  logits = None if q is None else oracles.log(q)[None]
  draft = Draft(np.asarray(tokens, np.int32)[None], logits=logits, **fields)
  verdict = run(oracles.log(u)[None], draft, oracles.log(p)[None])
  return jax.tree.map(lambda x: np.asarray(x)[0], verdict)


def tables(kind, depth, seed=0):
  """Laws `[V] * d + [V]` for d below `depth`, dependent on the context."""
  rng = np.random.default_rng([seed, sum(kind.encode())])
  shapes = [(5,) * d for d in range(depth)]
  if kind == 'zeros':
    laws = [rng.dirichlet(np.ones(5), shape) for shape in shapes]
    laws = [np.where(rng.random(law.shape) < 0.4, 0, law) for law in laws]
    laws = [np.where(x.sum(-1, keepdims=True), x, P5) for x in laws]
    return [law / law.sum(-1, keepdims=True) for law in laws]
  if kind == 'one-hot':
    return [np.eye(5)[rng.integers(0, 5, shape)] for shape in shapes]
  return [rng.dirichlet(np.full(5, 0.6), shape) for shape in shapes]


def constant(law, depth):
  return [np.broadcast_to(law, (5,) * d + (5,)) for d in range(depth)]


def after(p, n):
  """Laws `[V] * (n + 1)` of tokens d to n given those before, for each d."""
  rest = [np.ones((p[0].shape[-1],) * (n + 1))]
  for d in reversed(range(n + 1)):
    rest.append(p[d].reshape(p[d].shape + (1,) * (n - d)) * rest[-1])
  return rest[::-1]


def enumerate_chain(p, q, n, valid=None):
  """Joint law `[V] * (n + 1)`, total weight, mean number accepted.

  Shorter rounds are completed by p. Without `q` the draft is deterministic:
  0, 1, 2, ...
  """
  vocab = p[0].shape[-1]
  if q is None:
    drafts = {tuple(range(n)): 1.0}
  else:
    drafts = {
      path: np.prod([q[d][path[: d + 1]] for d in range(n)])
      for path in itertools.product(range(vocab), repeat=n)
    }
  outcomes = itertools.product([-np.inf, np.inf], repeat=n)
  paths, log_u = zip(*itertools.product(drafts, outcomes), strict=True)

  def rows(laws, depth):
    at = [laws[d][path[:d]] for path in paths for d in range(depth)]
    return oracles.log(at).reshape(len(paths), depth, vocab)

  draft = Draft(
    np.array(paths, np.int32).reshape(len(paths), n),
    logits=None if q is None else rows(q, n),
    valid=None if valid is None else np.tile(valid, (len(paths), 1)),
    siblings='fixed' if q is None else 'single',
  )
  log_u = np.array(log_u, np.float32).reshape(len(paths), n)
  verdict = jax.device_get(run(log_u, draft, rows(p, n + 1)))

  rest = after(p, n)
  joint, total, mean = np.zeros((vocab,) * (n + 1)), 0.0, 0.0
  for path, accepted, law, log_tests in zip(paths, *verdict[:3], strict=True):
    weight = drafts[path] * np.exp(log_tests.astype(np.float64).sum())
    count = accepted.sum()
    if weight > 0:
      last = np.exp(law.astype(np.float64)).reshape(-1, *[1] * (n - count))
      joint[path[:count]] += weight * last * rest[count + 1][path[:count]]
      total += weight
      mean += weight * count
  return joint, total, mean


def accepted_on_average(p, q, n):
  """Sum over paths, up to each depth, of the product of min(p, q)."""
  mass, mean = np.ones(()), 0.0
  for d in range(n):
    mass = mass[..., None] * np.minimum(p[d], q[d])
    mean += mass.sum()
  return mean


PAIRS = {
  'random': lambda n: (tables('p', n + 1), tables('q', n)),
  'zeros in p': lambda n: (tables('zeros', n + 1), tables('q', n)),
  'zeros in q': lambda n: (tables('p', n + 1), tables('zeros', n)),
  'zeros in both': lambda n: (tables('zeros', n + 1), tables('zeros', n, 1)),
  'one-hot p': lambda n: (tables('one-hot', n + 1), tables('q', n)),
  'one-hot q': lambda n: (tables('p', n + 1), tables('one-hot', n)),
  'both one-hot': lambda n: (tables('one-hot', n + 1), tables('one-hot', n, 1)),
  'equal': lambda n: (tables('p', n + 1), tables('p', n)),
  'equal one-hot': lambda n: (constant(ONE_HOT, n + 1), constant(ONE_HOT, n)),
  'disjoint': lambda n: (constant(SHUT, n + 1), constant(OPEN, n)),
  'context-free': lambda n: (constant(P5, n + 1), constant(Q5, n)),
}


@pytest.mark.parametrize('n', [0, 1, 2, 3])
@pytest.mark.parametrize('pair', PAIRS)
def test_rejection_gives_the_joint_law_of_the_target(pair, n):
  p, q = PAIRS[pair](n)
  joint, total, mean = enumerate_chain(p, q, n)
  np.testing.assert_allclose(total, 1, atol=1e-6)
  np.testing.assert_allclose(joint, after(p, n)[0], atol=1e-6)
  np.testing.assert_allclose(mean, accepted_on_average(p, q, n), atol=1e-6)


@pytest.mark.parametrize('n', [1, 3])
@pytest.mark.parametrize('kind', ['p', 'zeros', 'one-hot'])
def test_point_masses_give_the_joint_law_of_the_target(kind, n):
  p = tables(kind, n + 1)
  joint, total, mean = enumerate_chain(p, None, n)
  q = [np.broadcast_to(np.eye(5)[d], (5,) * d + (5,)) for d in range(n)]
  np.testing.assert_allclose(total, 1, atol=1e-6)
  np.testing.assert_allclose(joint, after(p, n)[0], atol=1e-6)
  np.testing.assert_allclose(mean, accepted_on_average(p, q, n), atol=1e-6)


@pytest.mark.parametrize('valid', range(4))
@pytest.mark.parametrize('pair', ['random', 'one-hot p'])
def test_a_draft_cut_short_gives_the_joint_law_of_the_target(pair, valid):
  p, q = PAIRS[pair](3)
  mask = np.arange(3) < valid
  joint, total, mean = enumerate_chain(p, q, 3, mask)
  np.testing.assert_allclose(total, 1, atol=1e-6)
  np.testing.assert_allclose(joint, after(p, 3)[0], atol=1e-6)
  np.testing.assert_allclose(mean, accepted_on_average(p, q, valid), atol=1e-6)


def test_logits_of_low_precision_are_the_law_that_was_drawn_from():
  # In bfloat16 both are 40, so the draft was uniform.
  logits = jnp.asarray([40.0, 40.12], jnp.bfloat16)
  uniform = oracles.softmax(logits.astype(np.float32))
  np.testing.assert_allclose(uniform, [0.5, 0.5])
  out = 0
  for x, u in itertools.product(range(2), [0.0, np.inf]):
    draft = Draft(np.full((1, 1), x, np.int32), logits=logits[None, None])
    log_p = np.tile(oracles.log([0.3, 0.7]), (1, 2, 1))
    v = run(oracles.log([[u]]), draft, log_p)
    last = np.eye(2)[x] if v.accepted[0, 0] else np.exp(v.law[0])
    out += 0.5 * np.exp(v.log_tests[0, 0]) * last
  np.testing.assert_allclose(out, [0.3, 0.7], atol=1e-6)


@pytest.mark.parametrize(
  'p, q, token, u, accept, law',
  [
    # p = q: the ratio is exactly one.
    ([0.25, 0.5, 0.25], [0.25, 0.5, 0.25], 1, 0.999999, True, None),
    ([0.25, 0.5, 0.25], [0.25, 0.5, 0.25], 1, 1.0, True, None),
    ([0, 1, 0], [0, 1, 0], 1, 1.0, True, None),
    # The residual is divided by its sum, not passed through a softmax.
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], 0, 0.6, False, [0, 0, 1, 3]),
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], 0, 0.24, True, None),
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], 0, 0.26, False, [0, 0, 1, 3]),
    # The whole of q is subtracted, not only where the draft was.
    ([0.5, 0.3, 0.2], [0.2, 0.6, 0.2], 1, 0.75, False, [1, 0, 0]),
    # A deterministic draft is a point mass, whatever it was the maximum of.
    ([0.5, 0.3, 0.2], None, 0, 0.49, True, None),
    ([0.5, 0.3, 0.2], None, 0, 0.51, False, [0, 3, 2]),
    # p = 0 is refused even by u = 0; q = 0 < p is accepted even by u = 1.
    ([0, 1], [0.3, 0.7], 0, 0.0, False, [0, 1]),
    ([0, 1, 0], [0, 0.5, 0.5], 0, 0.0, False, [0, 1, 0]),
    ([0.5, 0.5], [0, 1], 0, 1.0, True, None),
    # A filtered token is always rejected, the residual is filtered too.
    ([0.6, 0.25, 0, 0], [0.4, 0.3, 0.2, 0.1], 2, 1e-9, False, [1, 0, 0, 0]),
    # Ids that only the target has.
    (
      [0.1, 0.2, 0.3, 0.1, 0.2, 0.1],
      [0.5, 0.3, 0.2, 0, 0, 0],
      0,
      0.5,
      False,
      [0, 0, 1, 1, 2, 1],
    ),
  ],
)
def test_one_decision(p, q, token, u, accept, law):
  p = np.array([p, p[::-1]]) / np.sum(p)
  siblings = 'fixed' if q is None else 'single'
  q = None if q is None else [q]
  verdict = one(p, q, [token], [u], siblings=siblings)
  expected = p[1] if law is None else np.array(law) / np.sum(law)
  assert verdict.accepted.tolist() == [accept]
  np.testing.assert_allclose(np.exp(verdict.law), expected, atol=1e-6)
  assert verdict.fault == 0


@pytest.mark.parametrize('shift', [0.0, -1e-6])
@pytest.mark.parametrize('law', [P5, SHUT, ONE_HOT])
def test_an_empty_residual_falls_back_to_p_and_says_so(law, shift):
  """Rounding can leave q >= p everywhere; only that row of a batch shows it."""
  token = int(np.argmax(law))
  log_p = np.tile(oracles.log(law) + np.float32(shift), (3, 2, 1))
  log_p[0] = log_p[2] = oracles.log(Q5)
  draft = Draft(
    np.full((3, 1), token, np.int32),
    logits=np.tile(oracles.log(law), (3, 1, 1)),
  )
  verdict = run(np.full((3, 1), np.inf, np.float32), draft, log_p)
  assert not verdict.accepted.any()
  assert verdict.fault.tolist() == [0, verify.EMPTY_RESIDUAL, 0]
  np.testing.assert_allclose(np.exp(verdict.law[1]), law, atol=1e-5)
  other = oracles.residual(Q5, law)
  np.testing.assert_allclose(np.exp(verdict.law[0]), other, atol=1e-5)


def test_invalid_nodes_are_never_read():
  """Padding of -1 would read the last id, which is certain here."""
  p = np.full((6, 4), 0.25)
  p[3:] = np.eye(4)[3]
  p[3] = [0.7, 0.1, 0.1, 0.1]
  q = np.full((5, 4), 0.25)
  for laws, siblings in [(q, 'single'), (None, 'fixed')]:
    verdict = one(
      p,
      laws,
      [1, 0, 1, -1, -1],
      [0.2] * 5,
      valid=np.array([[1, 1, 1, 0, 0]], bool),
      siblings=siblings,
    )
    assert verdict.accepted.tolist() == [True, True, True, False, False]
    np.testing.assert_allclose(np.exp(verdict.law), p[3], atol=1e-6)
    assert verdict.fault == 0


@pytest.mark.parametrize('broken', [0, 1, 2, 3])
@pytest.mark.parametrize('count', [0, 1, 2, 3])
@pytest.mark.parametrize('rule', [verify.rejection, verify.sampler_match])
def test_a_nan_row_is_a_fault_where_it_is_needed(rule, count, broken):
  """Rows up to the first rejection are; a NaN itself accepts nothing."""
  tokens = np.zeros((1, 3), np.int32)
  p = np.tile(np.eye(5)[0], (1, 4, 1))
  if count < 3:
    p[0, count] = np.eye(5)[1]
  log_p = oracles.log(p)
  log_p[0, broken] = np.nan
  draft = Draft(tokens, logits=np.zeros((1, 3, 5), np.float32))
  verdict = run(np.full((1, 3), -0.5, np.float32), draft, log_p, rule)
  assert bool(verdict.fault[0] & verify.NAN) == (broken <= count)
  if broken > count:
    assert verdict.accepted[0].sum() == count
  elif rule is verify.rejection:
    assert verdict.accepted[0].sum() == broken


def test_a_nan_draft_law_is_a_fault_where_it_is_needed():
  log_p = np.tile(oracles.log(P5), (2, 3, 1))
  log_p[1, 0] = oracles.log(ONE_HOT)  # rejects the first token
  logits = np.zeros((2, 2, 5), np.float32)
  logits[:, 1] = np.nan
  draft = Draft(np.zeros((2, 2), np.int32), logits=logits)
  verdict = run(np.full((2, 2), -9, np.float32), draft, log_p)
  assert verdict.accepted.tolist() == [[True, False], [False, False]]
  assert (verdict.fault & verify.NAN).tolist() == [verify.NAN, 0]


def test_sampler_match_draws_what_plain_sampling_would():
  """It accepts the target's own draws, and hands on the row that follows."""
  rng = np.random.default_rng(0)
  log_p = oracles.log(rng.dirichlet(np.ones(4), (64, 4)))
  keys = jax.random.split(jax.random.key(0), (64, 4))
  plain = np.array(jax.vmap(jax.vmap(jax.random.categorical))(keys, log_p))
  tokens = plain[:, :3].copy()
  wrong = np.arange(64) % 4  # the first depth that differs; 3 is none
  rows = np.flatnonzero(wrong < 3)
  tokens[rows, wrong[rows]] = (tokens[rows, wrong[rows]] + 1) % 4
  verdict = run(np.zeros((64, 3)), Draft(tokens), log_p, verify.sampler_match)
  np.testing.assert_array_equal(verdict.accepted.sum(-1), wrong)
  np.testing.assert_array_equal(verdict.law, log_p[np.arange(64), wrong])
  at = np.take_along_axis(log_p[:, :3], tokens[..., None], -1)[..., 0]
  np.testing.assert_allclose(
    np.where(verdict.accepted, verdict.log_tests, 0),
    np.where(verdict.accepted, at, 0),
  )


@pytest.mark.parametrize('rule', [verify.rejection, verify.sampler_match])
@pytest.mark.parametrize(
  'fields',
  [
    {'parents': np.zeros((1, 2), np.int32)},
    {'siblings': 'iid'},
    {'siblings': 'distinct'},
  ],
)
def test_trees_are_refused_at_trace_time(rule, fields):
  draft = Draft(np.zeros((1, 2), np.int32), **fields)
  with pytest.raises(ValueError, match=f'{rule.__name__} verifies chains'):
    run(np.zeros((1, 2)), draft, np.zeros((1, 3, 5)), rule)

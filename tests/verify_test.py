"""Rules, enumerated exactly through the shipped code.

See `specjax.enumeration`: there is no sampling error in any of the laws here.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from specjax import enumeration, verify
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


EXACT = 'rejection', 'block', 'traversal', 'k_seq'
TREES = [
  ('rejection', 'iid'),
  ('rejection', 'distinct'),
  ('rejection', 'independent'),
  ('traversal', 'iid'),
  ('traversal', 'distinct'),
  ('traversal', 'independent'),
  ('k_seq', 'iid'),
]


def require_exact(outcome, p, atol=1e-6):
  np.testing.assert_allclose(outcome.total, 1, atol=atol)
  np.testing.assert_allclose(outcome.joint, enumeration.joint(p), atol=atol)


@pytest.mark.parametrize('n', [0, 1, 2, 3])
@pytest.mark.parametrize('pair', PAIRS)
@pytest.mark.parametrize('rule', EXACT)
def test_a_chain_gives_the_joint_law_of_the_target(rule, pair, n):
  p, q = PAIRS[pair](n)
  ones = (1,) * n
  got = enumeration.enumerate_rule(verify.RULES[rule], p, q, ones, chain=True)
  require_exact(got, p)
  least = 1 + accepted_on_average(p, q, n)
  if rule in ('rejection', 'k_seq'):
    np.testing.assert_allclose(got.tokens_per_round, least, atol=1e-6)
  assert got.tokens_per_round >= least - 1e-6


@pytest.mark.parametrize('n', [1, 3])
@pytest.mark.parametrize('kind', ['p', 'zeros', 'one-hot'])
@pytest.mark.parametrize('rule', ['rejection', 'block', 'traversal'])
def test_point_masses_give_the_joint_law_of_the_target(rule, kind, n):
  p = tables(kind, n + 1)
  got = enumeration.enumerate_rule(
    verify.RULES[rule], p, None, (1,) * n, 'fixed', chain=True
  )
  require_exact(got, p)
  # The same as sampling from the point masses.
  q = [np.broadcast_to(np.eye(5)[0], (5,) * d + (5,)) for d in range(n)]
  sampled = enumeration.enumerate_rule(
    verify.RULES[rule], p, q, (1,) * n, chain=True
  )
  np.testing.assert_allclose(
    got.tokens_per_round, sampled.tokens_per_round, atol=1e-6
  )


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('branching', [(2,), (3, 1), (2, 2)])
@pytest.mark.parametrize(('rule', 'siblings'), TREES)
def test_a_tree_gives_the_joint_law_of_the_target(
  rule, siblings, branching, seed
):
  """With laws of few tokens, so that siblings run out of support."""
  rng = np.random.default_rng(seed)
  p = enumeration.random_laws(rng, 3, len(branching) + 1, 0.3 * (seed > 0))
  q = enumeration.random_laws(rng, 3, len(branching), 0.3 * (seed > 1))
  alone = siblings, False, False
  merged = siblings, False, siblings != 'distinct'
  for how in {alone, merged}:
    require_exact(
      enumeration.enumerate_rule(verify.RULES[rule], p, q, branching, *how), p
    )


@pytest.mark.parametrize('branching', [(3,), (2, 2)])
@pytest.mark.parametrize('rule', ['rejection', 'traversal'])
def test_a_tree_of_point_masses_gives_the_joint_law_of_the_target(
  rule, branching
):
  p = enumeration.random_laws(np.random.default_rng(0), 4, len(branching) + 1)
  got = enumeration.enumerate_rule(
    verify.RULES[rule], p, None, branching, 'fixed'
  )
  require_exact(got, p)


@pytest.mark.parametrize('seed', range(5))
def test_judging_whole_paths_never_accepts_less(seed):
  rng = np.random.default_rng(seed)
  p, q = (enumeration.random_laws(rng, 3, 3 - i) for i in range(2))

  def tokens(rule, *how):
    return enumeration.enumerate_rule(rule, p, q, *how).tokens_per_round

  chain = (1, 1), 'single', True
  node_by_node = tokens(verify.rejection, *chain)
  assert tokens(verify.block, *chain) >= node_by_node - 1e-6
  np.testing.assert_allclose(
    tokens(verify.block, *chain), tokens(verify.traversal, *chain), atol=1e-6
  )
  for siblings in ('iid', 'distinct'):
    tree = (2, 2), siblings
    assert tokens(verify.traversal, *tree) >= (
      tokens(verify.rejection, *tree) - 1e-6
    )


def test_block_verification_keeps_a_ninth_more_in_its_paper_s_example():
  """Sun et al. 2025, arXiv 2403.10444, section 2."""
  p, q = ([1 / 3, 2 / 3], [2 / 3, 1 / 3])
  p = [np.broadcast_to(p, (2,) * d + (2,)) for d in range(3)]
  q = [np.broadcast_to(q, (2,) * d + (2,)) for d in range(2)]
  for rule, accepted in ((verify.rejection, 10 / 9), (verify.block, 11 / 9)):
    got = enumeration.enumerate_rule(rule, p, q, (1, 1), chain=True)
    np.testing.assert_allclose(got.tokens_per_round, 1 + accepted, atol=1e-6)


def padded(law):
  """With impossible ids behind, so that one program serves all."""
  return np.pad(np.asarray(law, float), (0, 6 - len(law)))


def at_one_position(rule, p, q):
  """The law of a round's first token, and how often a draft is accepted."""
  tables = [padded(p), np.full((6, 6), 1 / 6)]
  drawn = None if q is None else [padded(q)]
  siblings = 'fixed' if q is None else 'single'
  got = enumeration.enumerate_rule(
    rule, tables, drawn, (1,), siblings, chain=True
  )
  np.testing.assert_allclose(got.total, 1, atol=1e-6)
  return got.joint.sum(1)[: len(p)], got.tokens_per_round - 1


@pytest.mark.parametrize('rule', EXACT)
@pytest.mark.parametrize(
  ('p', 'q', 'acceptance'),
  [
    ([0.25, 0.5, 0.25], [0.25, 0.5, 0.25], 1),
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], 0.6),
    ([0.5, 0.3, 0.2], [0.2, 0.6, 0.2], 0.7),
    ([0.2, 0.5, 0.3], [0.6, 0.3, 0.1], 0.6),
    # The sum of min(p, q), and not that of p q, which is 0.37.
    ([0.5, 0.25, 0.15, 0.1], [0.55, 0.3, 0.1, 0.05], 0.9),
    # Logits 2 1 0 and 1.5 1.5 0, both at temperature 0.5.
    (oracles.softmax([4, 2, 0]), oracles.softmax([3, 3, 0]), 0.621042),
    # One behind min-p; the other has what that shuts out.
    ([12 / 17, 5 / 17, 0, 0], [0.4, 0.3, 0.2, 0.1], 0.694118),
    ([0, 1], [0.3, 0.7], 0.7),
    # Ids that only the target has.
    ([0.1, 0.2, 0.3, 0.1, 0.2, 0.1], [0.5, 0.3, 0.2], 0.5),
    # A deterministic draft, of the first token.
    ([0.5, 0.3, 0.2], None, 0.5),
    ([0.45, 0.35, 0.2], None, 0.45),
  ],
)
def test_one_position(rule, p, q, acceptance):
  if rule == 'k_seq' and q is None:
    q = [1, 0]  # it takes no point masses, but their law
  law, rate = at_one_position(verify.RULES[rule], p, q)
  np.testing.assert_allclose(law, p, atol=1e-6)
  np.testing.assert_allclose(rate, acceptance, atol=1e-6)


def scored_with(law):
  """`rejection` that is told another law than was drawn from."""

  def rule(noise, draft, log_p):
    logits = None if law is None else oracles.log(padded(law))[None]
    told = dataclasses.replace(draft, logits=logits)
    return verify.rejection(noise, told, log_p)

  return rule


def replaced_from(weigh):
  """`rejection` with another law behind a rejection."""

  def rule(noise, draft, log_p):
    verdict = verify.rejection(noise, draft, log_p)
    p, q = jnp.exp(log_p[0]), jax.nn.softmax(draft.logits[0])
    weights = jnp.where(p > 0, weigh(p, q, draft.tokens[0]), 0)
    wrong = jnp.log(weights / weights.sum())
    law = jnp.where(verdict.accepted.any(), verdict.law, wrong)
    return verdict._replace(law=law)

  return rule


@pytest.mark.parametrize(
  ('rule', 'p', 'q', 'law', 'acceptance'),
  [
    # The residual went through a softmax instead of being normalised.
    (
      replaced_from(lambda p, q, x: jnp.exp(jnp.maximum(p - q, 0))),
      [0.1, 0.2, 0.3, 0.4],
      [0.4, 0.3, 0.2, 0.1],
      [0.189786, 0.289786, 0.299229, 0.221199],
      0.6,
    ),
    # Of the draft's law only the rejected token was subtracted.
    (
      replaced_from(lambda p, q, x: p.at[x].set(jnp.maximum(p[x] - q[x], 0))),
      [0.5, 0.3, 0.2],
      [0.2, 0.6, 0.2],
      [0.414286, 0.3, 0.285714],
      0.7,
    ),
    # The likeliest token, tested as if it had been drawn.
    (
      scored_with([0.7, 0.2, 0.1]),
      [0.5, 0.3, 0.2],
      [1, 0, 0],
      [0.714286, 0.142857, 0.142857],
      0.714286,
    ),
    (
      scored_with([0.45, 0.35, 0.2]),
      [0.45, 0.35, 0.2],
      [1, 0, 0],
      [1, 0, 0],
      1,
    ),
    # Drawn from bfloat16 logits, 40 and 40; tested with 40 and 40.12.
    (
      scored_with([0.470036, 0.529964]),
      [0.3, 0.7],
      [0.5, 0.5],
      [0.319124, 0.680876],
      0.819124,
    ),
    # Tested without its law: exact, and hardly ever accepted.
    (
      scored_with(None),
      [0.5, 0.25, 0.15, 0.1],
      [0.55, 0.3, 0.1, 0.05],
      [0.5, 0.25, 0.15, 0.1],
      0.37,
    ),
  ],
)
def test_a_fault_at_one_position_has_this_other_law(
  rule, p, q, law, acceptance
):
  """The negative twins: enumeration sees each, and how large it is."""
  got, rate = at_one_position(rule, p, q)
  np.testing.assert_allclose(got, law, atol=1e-5)
  np.testing.assert_allclose(rate, acceptance, atol=1e-5)


@pytest.mark.parametrize(
  ('p', 'q', 'count', 'acceptance'),
  [
    # The likeliest token alone, then the two likeliest: .45 + .55 * .35 / .55.
    ([0.45, 0.35, 0.2], None, 1, 0.45),
    ([0.45, 0.35, 0.2], None, 2, 0.8),
    # Only token 0 is ever rejected; then [0, 0, 1] meets [0, 3/4, 1/4].
    ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1], 1, 0.9),
    ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1], 2, 0.925),
  ],
)
def test_siblings_at_one_position(p, q, count, acceptance):
  tables = [np.array(p), np.full((3, 3), 1 / 3)]
  how = (None, (count,), 'fixed')
  if q:
    how = ([np.array(q)], (count,), 'distinct')
  got = enumeration.enumerate_rule(verify.rejection, tables, *how)
  require_exact(got, tables)
  np.testing.assert_allclose(got.tokens_per_round - 1, acceptance, atol=1e-6)


def test_siblings_scored_with_the_first_one_s_law_are_not_exact():
  """The negative twin: without replacement, q is another for each sibling."""

  def wrong(noise, draft, log_p):
    logits = jnp.broadcast_to(draft.logits[:1], draft.logits.shape)
    return verify.rejection(
      noise, dataclasses.replace(draft, logits=logits), log_p
    )

  p, q = [np.array([0.2, 0.5, 0.3])], [np.array([0.6, 0.3, 0.1])]
  p.append(np.full((3, 3), 1 / 3))
  got = enumeration.enumerate_rule(wrong, p, q, (2,), 'distinct')
  first = got.joint.sum(1)
  np.testing.assert_allclose(first, [0.2, 0.6, 0.2], atol=1e-6)
  got = enumeration.enumerate_rule(verify.rejection, p, q, (2,), 'distinct')
  require_exact(got, p)


def test_a_block_rule_that_stops_at_its_first_failure_is_not_exact():
  def stopped(noise, draft, log_p):
    verdict = verify.block(noise, draft, log_p)
    passed = noise.log_u == -jnp.inf
    prefix = jnp.cumprod(passed).astype(bool)
    count = prefix.sum()
    # The verdict on the draft as far as it went before it failed.
    valid = jnp.arange(prefix.shape[0]) <= count
    log_u = jnp.where(prefix, noise.log_u, jnp.inf)
    cut = verify.block(noise._replace(log_u=log_u), draft, log_p)
    del valid
    return cut._replace(tested=verdict.tested, log_tests=verdict.log_tests)

  rng = np.random.default_rng(0)
  p, q = (enumeration.random_laws(rng, 3, 4 - i) for i in range(2))
  got = enumeration.enumerate_rule(stopped, p, q, (1, 1, 1), chain=True)
  assert abs(got.joint - enumeration.joint(p)).max() > 1e-3


@pytest.mark.parametrize('rule', sorted(verify.LOSSY))
def test_lossy_rules_are_lossy(rule):
  rng = np.random.default_rng(0)
  p, q = (enumeration.random_laws(rng, 4, 3 - i) for i in range(2))
  got = enumeration.enumerate_rule(verify.RULES[rule], p, q, (1, 1), chain=True)
  np.testing.assert_allclose(got.joint.sum(), 1, atol=1e-6)
  assert 0.5 * abs(got.joint - enumeration.joint(p)).sum() > 0.01
  assert 'LOSSY' in verify.RULES[rule].__doc__


def test_lenience_of_one_is_lossless():
  rng = np.random.default_rng(0)
  p, q = (enumeration.random_laws(rng, 3, 3 - i) for i in range(2))
  rule = jax.tree_util.Partial(verify.lenience, factor=1.0)
  require_exact(enumeration.enumerate_rule(rule, p, q, (1, 1), chain=True), p)


@pytest.mark.parametrize('rule', EXACT)
@pytest.mark.parametrize('valid', range(4))
def test_a_draft_cut_short_is_the_shorter_draft(rule, valid):
  """What lies behind an invalid node is not looked at."""
  rng = np.random.default_rng(valid)
  size = 64
  p = rng.dirichlet(np.ones(5), (size, 4))
  q = rng.dirichlet(np.ones(5), (size, 3))
  tokens = rng.integers(0, 5, (size, 3)).astype(np.int32)
  log_u = np.log(rng.random((size, 3), np.float32))
  mask = np.broadcast_to(np.arange(3) < valid, (size, 3))
  whole = Draft(tokens, logits=oracles.log(q), valid=mask)
  short = Draft(tokens[:, :valid], logits=oracles.log(q[:, :valid]))
  rule = verify.RULES[rule]
  got = run(log_u, whole, oracles.log(p), rule)
  want = run(log_u[:, :valid], short, oracles.log(p[:, : valid + 1]), rule)
  np.testing.assert_array_equal(got.accepted[:, :valid], want.accepted)
  assert not got.accepted[:, valid:].any()
  np.testing.assert_allclose(np.exp(got.law), np.exp(want.law), atol=1e-6)


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


@pytest.mark.parametrize('rule', ['block', 'traversal'])
@pytest.mark.parametrize('part', ['p', 'q'])
def test_a_nan_further_on_accepts_nothing_where_whole_paths_are_judged(
  rule, part
):
  """It once made the rate of the node before it one, which nothing refuses."""
  log_p = np.tile(oracles.log(P5), (1, 4, 1))
  logits = np.tile(oracles.log(Q5), (1, 3, 1))
  (log_p if part == 'p' else logits)[:, 1] = np.nan
  for x, u in itertools.product(range(5), [1e-3, 0.5, 1.0]):
    tokens, log_u = np.array([[x, 1, 2]], np.int32), oracles.log([[u] * 3])
    draft = Draft(tokens, logits=logits)
    verdict = run(log_u, draft, log_p, verify.RULES[rule])
    assert verdict.fault[0] & verify.NAN


@pytest.mark.parametrize('rule', ['typical', 'top_k', 'distance'])
def test_a_nan_behind_a_path_that_is_not_the_longest_is_a_fault(rule):
  """Else it would have changed, unseen, which path is the longest."""
  log_p = np.tile(oracles.log(np.full(5, 0.2)), (1, 4, 1))
  parents = np.array([[-1, -1, 1]], np.int32)
  draft = Draft(np.array([[0, 1, 2]], np.int32), parents, siblings='distinct')
  rule = verify.RULES[rule]
  sound = run(np.zeros((1, 3)), draft, log_p, rule)
  assert sound.accepted.tolist() == [[False, True, True]]
  assert sound.fault == 0
  log_p[0, 1] = np.nan
  assert run(np.zeros((1, 3)), draft, log_p, rule).fault == verify.NAN


def test_sampler_match_draws_what_plain_sampling_would():
  """It accepts the target's own draws, and hands on the one that follows."""
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
  follows = np.arange(4) == plain[np.arange(64), wrong][:, None]
  np.testing.assert_array_equal(verdict.law, np.where(follows, 0, -np.inf))
  assert not verdict.tested.any()


@pytest.mark.parametrize('rule', sorted(set(verify.RULES) - {'sampler_match'}))
def test_coupled_drafts_are_refused_at_trace_time(rule):
  draft = Draft(np.zeros((1, 2), np.int32), siblings='coupled')
  with pytest.raises(ValueError, match=f"{rule} is not made for .*'coupled'"):
    run(np.zeros((1, 2)), draft, np.zeros((1, 3, 5)), verify.RULES[rule])


@pytest.mark.parametrize(
  ('rule', 'fields', 'words'),
  [
    ('block', {'parents': np.zeros((1, 2), np.int32)}, 'verifies chains'),
    ('block', {'siblings': 'iid'}, "not made for siblings='iid'"),
    ('k_seq', {'siblings': 'distinct'}, "not made for siblings='distinct'"),
  ],
)
def test_other_drafts_are_refused_at_trace_time(rule, fields, words):
  draft = Draft(np.zeros((1, 2), np.int32), **fields)
  with pytest.raises(ValueError, match=words):
    run(np.zeros((1, 2)), draft, np.zeros((1, 3, 5)), verify.RULES[rule])


def test_rules_are_found_by_name():
  assert verify.find('block') is verify.block
  assert verify.find('specjax.verify.joint:block') is verify.block
  for name in ('blok', 'specjax.verify:blok', 'no.such.module:rule'):
    with pytest.raises(ValueError, match='there is no rule'):
      verify.find(name)

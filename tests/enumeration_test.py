"""The exact tier at full strength, and that it would see a fault."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import enumeration, metrics, verify

CASES = enumeration.cases()


def name(case):
  return f'{case.rule}-{case.siblings}-{"x".join(map(str, case.branching))}'


@pytest.fixture
def tables(request):
  """How many of a case's tables: all take a quarter of an hour."""
  every = request.config.getoption('exhaustive')
  return lambda count: count if every else max(count // 20, 4)


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES, ids=map(name, CASES))
def test_every_rule_is_exact_in_float32(case, tables):
  got = enumeration.survey(case, tables(case.tables))
  assert got.tables == tables(case.tables)
  assert got.deviation < 1e-6


@pytest.mark.slow
def test_every_rule_is_exact_in_float64(tables):
  """In a process of its own: double precision is a global switch."""
  program = f"""if True:
    import jax
    jax.config.update('jax_enable_x64', True)
    from specjax import enumeration
    for case in enumeration.cases():
      deep = len(case.branching) > 2 and not case.chain
      tables = {tables(20)} // 5 if deep else {tables(50)}
      got = enumeration.survey(case, max(tables, 1), 'float64')
      assert got.deviation < 1e-12, got
    """
  subprocess.run([sys.executable, '-c', program], check=True)


WHOLE = [case for case in CASES if case.rule in ('block', 'traversal')]


@pytest.mark.slow
@pytest.mark.parametrize('case', WHOLE, ids=map(name, WHOLE))
def test_whole_paths_accept_at_least_as_much_on_every_table(case, tables):
  count = tables(10 if len(case.branching) > 2 and not case.chain else 100)
  least = enumeration.survey(case._replace(rule='rejection'), count)
  got = enumeration.survey(case, count)
  gain = np.subtract(got.tokens_per_round, least.tokens_per_round)
  assert (gain >= -1e-6).all()
  if case.chain and case.rule == 'block':
    same = enumeration.survey(case._replace(rule='traversal'), count)
    np.testing.assert_allclose(
      got.tokens_per_round, same.tokens_per_round, atol=1e-6
    )


# A chain of three is tested at its first node and in its middle as well.
QUICK = [
  case for case in CASES if len(case.branching) == (3 if case.chain else 2)
]


@pytest.mark.parametrize('case', QUICK, ids=map(name, QUICK))
def test_a_few_tables_of_every_case(case):
  assert enumeration.survey(case, 4).deviation < 1e-6


def unsure(law):
  """Whether a law has most of the entropy that it could."""
  terms = np.where(law > 0, law * np.log(np.where(law > 0, law, 1)), 0)
  return -terms.sum(-1) > 0.8 * np.log(law.shape[-1])


def picky(rule):
  """`rule` on drafts without the tokens that the draft thought improbable."""

  def verify_rest(noise, draft, log_p):
    log_q = jax.nn.log_softmax(draft.logits)
    drawn = jnp.take_along_axis(log_q, draft.tokens[:, None], 1)[:, 0]
    valid = draft.valid & (jnp.cumprod(drawn > np.log(0.2)) > 0)
    return rule(noise, dataclasses.replace(draft, valid=valid), log_p)

  return verify_rest


@pytest.mark.parametrize('rule', ['rejection', 'block', 'traversal', 'k_seq'])
def test_a_draft_may_stop_for_its_law_and_not_for_its_token(rule):
  worst = [0.0, 0.0]
  for seed in range(4):
    rng = np.random.default_rng(seed)
    p, q = (enumeration.random_laws(rng, 3, 4 - i) for i in range(2))
    for i, tried in enumerate((verify.RULES[rule], picky(verify.RULES[rule]))):
      got = enumeration.enumerate_rule(
        tried, p, q, (1, 1, 1), chain=True, stop=unsure
      )
      np.testing.assert_allclose(got.total, 1, atol=1e-6)
      off = abs(got.joint - enumeration.joint(p)).max()
      worst[i] = max(worst[i], off)
  assert worst[0] < 1e-6 < 0.01 < worst[1]


def test_a_wrong_law_shows():
  def wrong(noise, draft, log_p):
    verdict = verify.rejection(noise, draft, log_p)
    return verdict._replace(law=log_p[verdict.accepted.sum()])

  rng = np.random.default_rng(0)
  p, q = (enumeration.random_laws(rng, 3, 3 - i) for i in range(2))
  got = enumeration.enumerate_rule(wrong, p, q, (1, 1), chain=True)
  np.testing.assert_allclose(got.total, 1, atol=1e-6)
  assert abs(got.joint - enumeration.joint(p)).max() > 0.01


def test_a_test_of_probability_one_half_is_a_test():
  p, q = [np.array([0.25, 0.75])], [np.array([0.5, 0.5])]
  p.append(np.full((2, 2), 0.5))
  got = enumeration.enumerate_rule(verify.rejection, p, q, (1,), chain=True)
  np.testing.assert_allclose(got.joint, enumeration.joint(p), atol=1e-6)
  np.testing.assert_allclose(got.tokens_per_round, 1.75, atol=1e-6)


@pytest.mark.parametrize('rule', ['rejection', 'block'])
def test_expected_acceptance_is_that_of_the_enumerated_rule(rule):
  """The mean over drafts of what is expected of each."""
  rng = np.random.default_rng(0)
  p, q = (enumeration.random_laws(rng, 3, 4 - i) for i in range(2))
  got = enumeration.enumerate_rule(
    verify.RULES[rule], p, q, (1,) * 3, chain=True
  )
  mean = 0.0
  for path in np.ndindex(3, 3, 3):
    px, qx = (
      np.array([law[d][path[: d + 1]] for d in range(3)]) for law in (p, q)
    )
    ratio = jnp.asarray(np.log(px) - np.log(qx), jnp.float32)
    expected = metrics.expected_accepted(ratio, jointly=rule == 'block')
    mean += qx.prod() * float(expected)
  np.testing.assert_allclose(1 + mean, got.tokens_per_round, atol=1e-6)


def test_jointly_never_less_is_expected():
  ratio = 2 * jax.random.normal(jax.random.key(0), (1000, 6))
  apart, jointly = (metrics.expected_accepted(ratio, how) for how in (0, 1))
  assert (jointly >= apart - 1e-6).all() and (jointly > apart + 0.1).any()
  assert (jointly <= 6).all()

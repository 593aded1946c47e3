"""The parts of the certificate, each against a slow reference or a twin."""

import jax
import numpy as np
import oracles
import pytest
import toys
from scipy import stats

from specjax import certify, generation, verify, warps
from specjax.certify import tiers
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.models.markov import Markov

VOCAB, NEW = 7, 24
TARGET = oracles.table(1, 2, VOCAB, 2.0)
DRAFT = oracles.table(2, 1, VOCAB, 2.0)
PROMPTS = [3], [0, 1, 2]
WARP = warps.compose(warps.Temperature(0.7), warps.TopP(0.9))
DRAFTER = ModelDrafter(Markov(DRAFT), 2, WARP)

pytestmark = pytest.mark.usefixtures('quick_compilation')


def sample(drafter=DRAFTER, rule=verify.rejection, batches=2, **settings):
  settings = {'warp': WARP, 'max_new_tokens': NEW, 'each': 4} | settings
  return certify.sample(
    Markov(TARGET),
    drafter,
    PROMPTS,
    key=jax.random.key(5),
    verifier=rule,
    batches=batches,
    **settings,
  )


def observe(results, direction=DRAFTER, warp=WARP):
  return certify.observe(
    Markov(TARGET), results, warp=warp, direction=direction
  )


def law(table, history):
  kept = oracles.top_p(
    oracles.softmax(oracles.following(table, history) / 0.7), 0.9
  )
  return kept / kept.sum()


@pytest.mark.slow
def test_evidence_is_what_a_slow_reference_finds():
  results = sample()
  seen = observe(results)
  texts = [
    (row[:start].tolist(), row[start:end].tolist())
    for result in results
    for row, start, end in zip(
      result.tokens, result.prompt_length, result.length, strict=True
    )
  ]
  assert seen.p.shape == (len(texts), NEW)
  for r in (0, 5, 8, 15):
    prompt, text = texts[r]
    for t, x in enumerate(text):
      p, q = (law(table, prompt + text[:t]) for table in (TARGET, DRAFT))
      surprise = np.minimum(-oracles.log(p), 6)
      rare = (p > 0) & (p < 0.1 / VOCAB)
      mean = (p * surprise).sum()
      expected = dict(
        below=p[:x].sum(),
        p=p[x],
        surprise=surprise[x],
        expected=mean,
        variance=(p * (surprise - mean) ** 2).sum(),
        hit=q[x] > p[x],
        p_hit=p[q > p].sum(),
        tv=np.maximum(q - p, 0).sum(),
        rare=rare[x],
        p_rare=p[rare].sum(),
      )
      for name, value in expected.items():
        assert getattr(seen, name)[r, t] == pytest.approx(value, abs=2e-6)
      twin_prompt, twin = texts[r ^ 1]
      assert twin_prompt == prompt
      theirs = law(TARGET, prompt + twin[:t])
      assert seen.p_twin[r // 2, t] == pytest.approx(p @ theirs, abs=2e-6)
      assert seen.twin[r // 2, t] == (x == twin[t])


@pytest.mark.slow
def test_rows_are_all_different_and_the_same_under_any_drafter():
  first, second = sample()
  rows = [*first.new_tokens(), *second.new_tokens()]
  assert len({tuple(row) for row in rows}) == len(rows)
  # By the keys that `row_keys` names.
  for i, result in enumerate((first, second)):
    again = generation.generate(
      Markov(TARGET),
      DRAFTER,
      [prompt for prompt in PROMPTS for _ in range(4)],
      key=certify.row_keys(jax.random.key(5), i, 8),
      max_new_tokens=NEW,
      warp=WARP,
    )
    np.testing.assert_array_equal(result.tokens, again.tokens)


@pytest.mark.parametrize('drafter', [NGram(3), DRAFTER, NoDrafter()])
def test_replayed_is_what_the_drafter_proposes_at_each_place(drafter):
  results = sample(NGram(3))
  seen = observe(results, certify.Replayed(drafter))
  if isinstance(drafter, NoDrafter):
    assert not seen.hit.any() and not seen.p_hit.any() and not seen.tv.any()
    return
  assert 0 < seen.p_hit.mean() < 1
  if isinstance(drafter, ModelDrafter):
    return
  rows = [
    (row, n) for r in results for row, n in zip(r.tokens, r.length, strict=True)
  ]
  for r in (0, 7, 15):
    row, length = rows[r]
    for t in range(NEW):
      at = length - NEW + t
      found = oracles.lookup(row[:at].tolist(), 1, 3)
      p = law(TARGET, row[:at].tolist())
      inside = bool(found) and p[found[0]] < 1 - 1e-6
      expected = p[found[0]] if inside else 0.0
      assert seen.p_hit[r, t] == pytest.approx(expected, abs=2e-6)
      assert seen.hit[r, t] == (inside and row[at] == found[0])


def names(seen, lags=3):
  return {t.name for t in certify.decide({'': seen}, lags) if t.rejected}


def test_rows_that_share_a_key_collide():
  results = sample(batches=10)
  assert not names(observe(results))
  shared = []
  for result in results:
    tokens = result.tokens.copy()
    tokens[1::2] = tokens[::2]
    shared.append(result._replace(tokens=tokens))
  assert 'collisions of rows' in names(observe(shared))


def uniform(tokens, vocab):
  """Evidence of tokens whose law is uniform."""
  flat = np.full(tokens.shape, 1 / vocab)
  zero = np.zeros(tokens.shape)
  surprise = np.full(tokens.shape, np.log(vocab))
  pairs = tokens.reshape(-1, 2, tokens.shape[1])
  return certify.Evidence(
    below=tokens / vocab,
    p=flat,
    surprise=surprise,
    expected=surprise,
    variance=zero,
    hit=tokens < vocab / 4,
    p_hit=np.full(tokens.shape, 0.25),
    tv=np.full(tokens.shape, 0.5),
    rare=zero > 0,
    p_rare=zero,
    twin=pairs[:, 0] == pairs[:, 1],
    p_twin=np.full(pairs[:, 0].shape, 1 / vocab),
  )


def test_tokens_that_repeat_others_are_seen_at_their_lag():
  tokens = np.random.default_rng(0).integers(0, 8, (100, 48))
  assert not names(uniform(tokens, 8))
  for lag in (1, 2, 3):
    copied = tokens.copy()
    first = np.arange(48 - lag)
    first = first[first // lag % 2 == 0]
    copied[:, first + lag] = tokens[:, first]
    assert f'PIT pairs, lag {lag}' in names(uniform(copied, 8))


def test_a_few_impossible_tokens_are_rounding_and_many_are_not():
  seen = uniform(np.random.default_rng(0).integers(0, 8, (400, 50)), 8)
  for count, fails in ((1, False), (10, True)):
    p = seen.p.copy()
    p.flat[:count] = 0
    assert ('tokens with p = 0' in names(seen._replace(p=p))) == fails


def test_a_surplus_and_a_lack_of_rare_tokens_are_seen():
  rng = np.random.default_rng(0)
  seen = uniform(rng.integers(0, 8, (400, 50)), 8)
  for rate, fails in ((0.01, False), (0.015, True), (0.005, True)):
    rare = rng.random(seen.p.shape) < rate
    found = names(seen._replace(rare=rare, p_rare=np.full(rare.shape, 0.01)))
    assert ('rare tokens' in found) == fails


def test_p_values_are_those_of_the_textbook():
  seen = uniform(np.random.default_rng(3).integers(0, 8, (100, 40)), 8)
  tests = {t.name: t for t in certify.decide({'': seen}, 2)}
  assert tests['PIT, KS'].p_value == pytest.approx(
    stats.kstest(certify.pit(seen).ravel(), 'uniform').pvalue, rel=1e-6
  )
  cells = np.histogram(certify.pit(seen), 64, (0, 1))[0]
  g = stats.power_divergence(cells, lambda_='log-likelihood').statistic
  assert tests['PIT, 64 cells'].statistic == pytest.approx(g, rel=0.01)
  hits = int(seen.hit.sum())
  exact = stats.binomtest(hits, seen.hit.size, 0.25).pvalue
  assert tests['draft direction'].p_value == pytest.approx(exact, rel=0.05)
  assert tests['draft direction'].z == pytest.approx(
    abs(tests['draft direction'].statistic)
  )


@pytest.mark.parametrize('p, n', [(0.004, 1000), (0.996, 2000), (0.5, 40)])
def test_few_occasions_never_alarm_more_often_than_stated(p, n):
  """Where the normal law is wrong in the tails the p-value is still valid."""
  seen = uniform(np.random.default_rng(0).integers(0, 8, (400, 50)), 8)
  chances = np.zeros(seen.p.shape)
  chances.flat[:n] = p
  hits = np.arange(n + 1)
  found = []
  for count in hits:
    hit = np.zeros(chances.shape, bool)
    hit.flat[:count] = True
    tests = certify.decide({'': seen._replace(hit=hit, p_hit=chances)}, 0)
    found += [t.p_value for t in tests if t.name == 'draft direction']
    if count - n * p > 12 * np.sqrt(n * p * (1 - p)):
      break  # beyond, all are tiny
  mass = stats.binom.pmf(hits[: len(found)], n, p)
  for level in (0.05, 0.01, 0.001):
    assert mass[np.array(found) <= level].sum() <= level


def test_holm_is_the_step_down_procedure():
  thresholds, rejected = certify.holm([0.04, 0.001, 0.03, 0.013], 0.05)
  np.testing.assert_allclose(thresholds, [0.05, 0.0125, 0.025, 0.05 / 3])
  assert rejected.tolist() == [False, True, False, True]
  # What follows one that is not rejected is not either.
  _, rejected = certify.holm([0.001, 0.026, 0.027], 0.05)
  assert rejected.tolist() == [True, False, False]


def tokens(table, count, seed):
  """`[P, S, 4]` plain text."""
  results = certify.sample(
    Markov(table),
    NoDrafter(),
    PROMPTS,
    key=jax.random.key(seed),
    batches=count,
    each=16,
    max_new_tokens=4,
  )
  rows = np.array([result.new_tokens() for result in results])
  return rows.reshape(count, 2, 16, 4).swapaxes(0, 1).reshape(2, -1, 4)


def test_the_display_is_near_zero_for_one_law_and_near_the_truth_for_two():
  p, q = oracles.softmax(TARGET), oracles.softmax(DRAFT)
  other = oracles.log(0.7 * p + 0.3 * q)
  plain, again = tokens(TARGET, 160, 1), tokens(TARGET, 160, 2)
  for row in certify.compare(plain, again):
    for name in ('kl', 'tv'):
      assert row[f'{name}_low'] < 0 < row[f'{name}_high']
      assert abs(row[name]) < 0.01
    assert row['p_value'] > 0.01
  leaky = tokens(other, 160, 3)
  rows = certify.compare(plain, leaky)
  assert [row['n'] for row in rows] == [1, 2, 3]
  assert [row['tables'] for row in rows] == [8, 6, 4]
  laws = np.array(
    [
      [oracles.joint(x, prompt, 1) for x in (TARGET, other)]
      for prompt in PROMPTS
    ]
  )
  true = abs(laws[:, 0] - laws[:, 1]).sum(-1).mean() / 2
  (first,) = certify.compare(plain[:, :, :1], leaky[:, :, :1])
  # What is taken off, the mean distance of two samples of one law.
  law, n = laws.mean(1), plain.shape[1]
  null = np.sqrt(4 / np.pi * law * (1 - law) / n).sum(-1).mean() / 2
  assert first['tv_low'] < true < first['tv_high'] + null
  for row in rows:
    assert row['p_value'] < 0.01 and row['kl_low'] > 0 and row['tv_low'] > 0


def test_log_probability_of_sequences_is_compared_within_a_prompt():
  rng = np.random.default_rng(0)
  # Prompts differ by far more than arms could.
  one, other = rng.normal([[0], [9]], 1, (2, 2, 500))
  assert certify.compare_log_probability(one, other)['p_value'] > 0.01
  shifted = certify.compare_log_probability(one, other + 0.4)
  assert shifted['p_value'] < 0.01
  expected = [
    stats.ks_2samp(a, b + 0.4).statistic
    for a, b in zip(one, other, strict=True)
  ]
  assert shifted['statistic'] == pytest.approx(np.mean(expected))
  # Values that many sequences share are compared behind all of them.
  assert certify.compare_log_probability(one * 0, one * 0)['statistic'] == 0


@pytest.mark.parametrize(
  'rule, warp',
  [(verify.sampler_match, WARP), (verify.rejection, warps.Greedy())],
)
@pytest.mark.slow
def test_equal_seeds_give_equal_text(rule, warp):
  (plain,) = sample(NoDrafter(), rule, batches=1, warp=warp)
  (other,) = sample(DRAFTER, rule, batches=1, warp=warp)
  assert certify.first_mismatches(Markov(TARGET), plain, other) == []


@pytest.mark.slow
def test_text_of_equal_seeds_is_plain_text_under_its_rule():
  subject = tiers.Subject(
    Markov(TARGET), DRAFTER, verify.block, WARP, DRAFTER, jax.random.key(3)
  )
  found = tiers.with_equal_seeds(subject, PROMPTS, each=2, max_new_tokens=NEW)
  assert [row['kind'] for row in found] == ['greedy', 'sampler_match']
  for row in found:
    assert row['rows'] == 4 and row['mismatches'] == []


def test_a_mismatch_is_listed_with_the_margin_that_it_overrode():
  (plain,) = sample(NoDrafter(), verify.sampler_match, batches=1)
  wrong = plain.tokens.copy()
  wrong[3, 7] = (wrong[3, 7] + 1) % VOCAB
  keys = certify.row_keys(jax.random.key(5), 0, 8)
  (found,) = certify.first_mismatches(
    Markov(TARGET),
    plain,
    plain._replace(tokens=wrong),
    warp=WARP,
    keys=keys,
  )
  assert (found['row'], found['position']) == (3, 7)
  history = plain.tokens[3, :7].tolist()
  key = jax.random.fold_in(jax.random.fold_in(keys[3], 0), 7)
  scores = oracles.log(law(TARGET, history)) + jax.random.gumbel(key, (VOCAB,))
  assert plain.tokens[3, 7] == scores.argmax()  # the noise it was drawn with
  first, second = np.sort(scores)[[-1, -2]]
  assert found['margin'] == pytest.approx(first - second, abs=1e-5)


@pytest.mark.slow
def test_text_of_a_transformer_differs_at_near_ties_alone():
  target, draft = toys.transformer(), ModelDrafter(toys.transformer(1), 3)
  settings = dict(key=jax.random.key(0), batches=1, each=8, max_new_tokens=16)
  plain, other = (
    certify.sample(
      target, drafter, PROMPTS, verifier=verify.sampler_match, **settings
    )[0]
    for drafter in (NoDrafter(), draft)
  )
  found = certify.first_mismatches(
    target,
    plain,
    other,
    keys=certify.row_keys(jax.random.key(0), 0, 16),
  )
  assert all(row['margin'] < certify.NEAR_TIE for row in found)


def test_what_cannot_be_tested_is_refused():
  with pytest.raises(ValueError, match='with 3 rows of each prompt'):
    sample(each=3)
  with pytest.raises(ValueError, match='192 tokens are too few'):
    certify.decide({'': uniform(np.zeros((4, 48), int), 8)}, 1)
  with pytest.raises(ValueError, match='0 pairs at lag 3 are too few'):
    certify.decide({'': uniform(np.zeros((998, 3), int), 8)}, 3)
  results = sample(batches=1)
  uneven = results[0]._replace(length=results[0].length - np.arange(8) % 2)
  with pytest.raises(ValueError, match=r'rows of \[23, 24\] tokens'):
    observe([uneven])

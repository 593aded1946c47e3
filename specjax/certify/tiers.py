"""The parts of a certificate: whole pieces of work, with progress bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import enumeration, generation, logs, verify, warps
from specjax.certify import bits, decisions, display, samples
from specjax.draft_length import FIXED
from specjax.drafters.none import NoDrafter
from specjax.types import (
  Drafter,
  DraftLength,
  Key,
  LanguageModel,
  Trainable,
  Verifier,
  Warp,
)

SPECULATIVE, PLAIN = ARMS = 'speculative', 'plain'
ROUNDING = 1e-6  # of a probability on a table, in float32

Prompts = Sequence[Sequence[int]]


class Subject(NamedTuple):
  """What is certified.

  Attributes:
    target: the model whose law the output shall have.
    drafter: proposes.
    verifier: the rule.
    warp: the target's sampling transform.
    direction: the law to look for leaks of; see `samples.observe`.
    key: all text is drawn with keys made from it.
    controller: of the draft length.
  """

  target: LanguageModel
  drafter: Drafter
  verifier: Verifier
  warp: Warp
  direction: Trainable
  key: Key
  controller: DraftLength = FIXED

  def stream(self, number: int) -> Key:
    """The key of one sample; equal numbers give equal seeds."""
    return jax.random.fold_in(self.key, number)

  def sample(
    self, arm: str, prompts: Prompts, stream: int, **settings: Any
  ) -> list[generation.Result]:
    """Text of an arm; see `samples.sample`."""
    drafter, verifier = self.drafter, self.verifier
    controller = self.controller
    if arm == PLAIN:
      drafter, verifier, controller = NoDrafter(), verify.rejection, FIXED
    return samples.sample(
      self.target,
      drafter,
      prompts,
      key=self.stream(stream),
      verifier=verifier,
      warp=self.warp,
      controller=controller,
      **settings,
    )

  def observe(self, results, done) -> samples.Evidence:
    """What the target says of it; see `samples.observe`."""
    return samples.observe(
      self.target,
      results,
      warp=self.warp,
      direction=self.direction,
      done=done,
    )


class Certificate(NamedTuple):
  """What was found of a subject, and what it comes to.

  Attributes:
    verdict: 'PASS' or 'FAIL'; 'LOSSY' of a rule that is known to be.
    tests: those that decide, of both arms.
    seen: the evidence, by arm.
    text: likewise.
    equal: what `with_equal_seeds` found.
    tables: what `on_tables` found.
    level: chance that a lossless decoder fails the tests.
  """

  verdict: str
  tests: list[decisions.Test]
  seen: dict[str, samples.Evidence]
  text: dict[str, list[generation.Result]]
  equal: list[dict[str, Any]]
  tables: Sequence[Mapping[str, Any]]
  level: float

  def summary(self) -> dict[str, Any]:
    """The verdict and what it rests on, as JSON."""
    plain, other = self.seen[PLAIN], self.seen[SPECULATIVE]
    moved, half_width = decisions.leak(other)
    return {
      'verdict': self.verdict,
      'tokens': int(other.p.size),
      'level': self.level,
      'tests': [test._asdict() | {'z': test.z} for test in self.tests],
      'power': decisions.POWER,
      'detectable_leak': decisions.detectable_leak(
        plain, len(self.tests), self.level
      ),
      'tv_of_draft': float(plain.tv.mean()),
      'leak': moved,
      'leak_half_width': half_width,
      'tables': self.tables,
      'equal_seeds': self.equal,
    }


def certify(
  subject: Subject,
  rule: str,
  prompts: Prompts,
  *,
  tokens: int,
  depth: int,
  each: int,
  max_new_tokens: int,
  tables: Sequence[Mapping[str, Any]],
  float32: bool = True,
  seeds: bool = True,
  plain: Sequence[generation.Result] | None = None,
  level: float = decisions.LEVEL,
) -> Certificate:
  """All parts that decide.

  Args:
    subject: what to certify.
    rule: its name.
    prompts: to be continued.
    tokens: to test, of each arm, or a little more.
    depth: K, of a draft: the tests look at pairs of tokens up to K + 1 apart.
    each: rows of each prompt in a batch, even.
    max_new_tokens: of each row, or more if two rounds need that.
    tables: what `on_tables` found of the rule.
    float32: whether the target computes in it. Where it does not near-ties are
      common, and wide, so that equal seeds decide nothing.
    seeds: whether to compare text of equal seeds.
    plain: text of the plain arm from an earlier certificate of the same target,
      key and sizes, which need not be written again.
    level: chance that a lossless decoder fails.
  """
  # Rows with room for two rounds have pairs of tokens K + 1 apart.
  new = max(max_new_tokens, 2 * (depth + 1))
  rows = {'each': each, 'max_new_tokens': new}
  batches = -(-tokens // (len(prompts) * each * new))
  tests, seen, text = against_the_law(
    subject,
    prompts,
    lags=depth + 1,
    batches=batches,
    plain=plain,
    level=level,
    **rows,
  )
  equal = with_equal_seeds(subject, prompts, **rows) if seeds else []
  # Of a rule of one's own it is not known whether it reports its tests.
  decisive = tables if rule in verify.RULES else ()
  passed = exact(tests, equal if float32 else (), decisive)
  verdict = 'PASS' if passed else 'FAIL'
  if verify.is_lossy(rule):
    verdict = 'LOSSY'
  return Certificate(verdict, tests, seen, text, equal, tables, level)


def on_tables(name: str, rule: Verifier, tables: int) -> list[dict[str, Any]]:
  """The rule, enumerated on random tables: what law it gives without any luck.

  Args:
    name: of the rule. One that is not of `verify` is enumerated on chains; it
      has to report its tests for that to mean anything.
    rule: the rule.
    tables: for each case; trees of three levels, which take long, have fewer.

  Returns:
    For each case: `siblings`, `branching`, `vocab`, `tables`, `deviation` (the
    largest error of a probability), `tokens_per_round` (mean), and of a rule
    that judges whole paths `least_gain`, over `rejection` on any table. Nothing
    for `sampler_match`, which makes no test: its text is plain text under it.
  """
  cases = [case for case in enumeration.cases() if case.rule == name]
  if not cases and name != 'sampler_match':
    cases = [
      case._replace(rule=name)
      for case in enumeration.cases()
      if case.rule == 'rejection' and case.siblings == 'single'
    ]
  rows = []
  with logs.Progress(len(cases), 'tables', unit='cases') as bar:
    for case in cases:
      deep = len(case.branching) > 2 and not case.chain
      count = max(tables // 10, 1) if deep else tables
      got = enumeration.survey(case, count, rule=rule)
      row = {
        'siblings': case.siblings,
        'branching': case.branching,
        'vocab': case.vocab,
        'tables': got.tables,
        'deviation': got.deviation,
        'tokens_per_round': float(np.mean(got.tokens_per_round)),
      }
      if name in ('block', 'traversal'):
        least = enumeration.survey(case._replace(rule='rejection'), count)
        gain = np.subtract(got.tokens_per_round, least.tokens_per_round)
        row['least_gain'] = float(gain.min())
      rows.append(row)
      bar.advance()
  return rows


def against_the_law(
  subject: Subject,
  prompts: Prompts,
  *,
  lags: int,
  batches: int,
  each: int,
  max_new_tokens: int,
  plain: Sequence[generation.Result] | None = None,
  level: float = decisions.LEVEL,
) -> tuple[
  list[decisions.Test],
  dict[str, samples.Evidence],
  dict[str, list[generation.Result]],
]:
  """The tests that decide.

  Args:
    subject: what to certify.
    prompts: to be continued.
    lags: K + 1; see `decisions.decide`.
    batches: of each arm.
    each: rows of each prompt in a batch, even.
    max_new_tokens: of each row.
    plain: text of the plain arm, if it has been written before.
    level: of all tests together.

  Returns:
    The tests of both arms, and by arm the evidence and the text.
  """
  seen, text = {}, {}
  size = {'batches': batches, 'each': each, 'max_new_tokens': max_new_tokens}
  steps = (4 if plain is None else 3) * batches
  with logs.Progress(steps, 'tests', unit='batches') as bar:
    for i, arm in enumerate(ARMS):
      if arm == PLAIN and plain is not None:
        text[arm] = list(plain)
      else:
        text[arm] = subject.sample(arm, prompts, i, done=bar.advance, **size)
      seen[arm] = subject.observe(text[arm], bar.advance)
  return decisions.decide(seen, lags, level), seen, text


def with_equal_seeds(
  subject: Subject, prompts: Prompts, *, each: int, max_new_tokens: int
) -> list[dict[str, Any]]:
  """Greedy text, and that of `sampler_match`, against plain text of that rule.

  Args:
    subject: what to certify.
    prompts: to be continued.
    each: rows of each prompt, even.
    max_new_tokens: of each row.

  Returns:
    For both: `kind`, `rows`, `mismatches` and `widest_margin` among them, 0
    where there is none.
  """
  size = {'batches': 1, 'each': each, 'max_new_tokens': max_new_tokens}
  keys = samples.row_keys(subject.stream(0), 0, each * len(prompts))
  cases = {
    'greedy': (subject._replace(warp=warps.Temperature(0.0)), None),
    'sampler_match': (subject._replace(verifier=verify.sampler_match), keys),
  }
  found = []
  with logs.Progress(2 * len(cases), 'equal seeds', unit='batches') as bar:
    for kind, (case, keys) in cases.items():
      # `sampler_match` draws by itself, and so has plain text of its own.
      rule = verify.rejection if kind == 'greedy' else case.verifier
      plain = case._replace(
        drafter=NoDrafter(), verifier=rule, controller=FIXED
      )
      other, plain = (
        one.sample(SPECULATIVE, prompts, 0, done=bar.advance, **size)[0]
        for one in (case, plain)
      )
      mismatches = bits.first_mismatches(
        case.target, plain, other, warp=case.warp, keys=keys
      )
      found.append(
        {
          'kind': kind,
          'rows': len(plain.tokens),
          'mismatches': mismatches,
          'widest_margin': max((x['margin'] for x in mismatches), default=0.0),
        }
      )
  return found


def against_plain_text(
  subject: Subject,
  prompts: Prompts,
  *,
  batches: int,
  each: int,
  max_new_tokens: int,
) -> list[dict[str, Any]]:
  """The usual display, with plain against plain beside it.

  Args:
    subject: what to certify.
    prompts: a few, short ones.
    batches: of each arm.
    each: rows of each prompt in a batch, even.
    max_new_tokens: a few: every place has a table.

  Returns:
    For the speculative arm and for a second plain one: `arm`, `sequences`,
    `distances` as `compare` gives, and `log_probability` as
    `compare_log_probability` does.
  """
  size = {'batches': batches, 'each': each, 'max_new_tokens': max_new_tokens}

  def by_prompt(rows: np.ndarray) -> np.ndarray:
    """`[batches * P * each, ...]` to `[P, S, ...]`."""
    rows = rows.reshape(batches, len(prompts), each, *rows.shape[1:])
    rows = rows.swapaxes(0, 1)
    return rows.reshape(len(prompts), batches * each, *rows.shape[3:])

  text, scores = [], []
  with logs.Progress(6 * batches, 'display', unit='batches') as bar:
    for i, arm in enumerate((PLAIN, SPECULATIVE, PLAIN), 2):
      results = subject.sample(arm, prompts, i, done=bar.advance, **size)
      p = subject.observe(results, bar.advance).p
      text.append(by_prompt(np.concatenate([r.new_tokens() for r in results])))
      # A token of probability 0 may be a rounded one: it has the least.
      scores.append(by_prompt(np.log(np.maximum(p, 1e-38)).sum(1)))
  return [
    {
      'arm': name,
      'sequences': len(prompts) * batches * each,
      'distances': display.compare(text[0], text[i]),
      'log_probability': display.compare_log_probability(scores[0], scores[i]),
    }
    for i, name in ((1, SPECULATIVE), (2, PLAIN))
  ]


def exact(
  tests: Sequence[decisions.Test],
  equal: Sequence[Mapping],
  tables: Sequence[Mapping],
) -> bool:
  """Whether nothing was found.

  No test is rejected, no text differs but by near-ties, and no probability on
  a table by more than float32 rounds.
  """
  return (
    not any(test.rejected for test in tests)
    and all(row['widest_margin'] <= bits.NEAR_TIE for row in equal)
    and all(row['deviation'] <= ROUNDING for row in tables)
  )

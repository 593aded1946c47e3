"""A sweep: decoding with drafts of many lengths, against plain decoding.

Plain decoding is the same loop with an empty draft, from the same prefilled
state. Everything is compiled before anything is timed, temperatures share one
program, and all arms generate equally many tokens, since nothing ends a row
early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from specjax import (
  costs,
  decode,
  draft_length,
  drafters,
  generation,
  metrics,
  pricing,
  timing,
  verify,
  warps,
)
from specjax.certify import bits
from specjax.drafters.none import NoDrafter
from specjax.pricing import PLAIN, Arm
from specjax.types import Drafter, LanguageModel, Verifier

Prompts = Sequence[Sequence[int]]

FIRST_LOOKS = 3  # at what rounds cost, before anything is timed with it


class Outlook(NamedTuple):
  """What other prompts say about the rounds to come.

  Attributes:
    rounds: by arm, `[n]` those that each prompt took.
    alpha: of the drafter's tokens that were tested, the share that passed:
      acceptance as the i.i.d. formula knows it.
  """

  rounds: dict[Arm, NDArray[Any]]
  alpha: float


class Race:
  """All arms at one batch size: compiled, then timed.

  What a prediction needs is timed in turns with the arms, since they are
  compared with it.

  Attributes:
    batch: rows decoded at once.
    results: by temperature and arm, what the arm generated for the prompts.
  """

  def __init__(
    self,
    target: LanguageModel,
    drafter: Drafter,
    *,
    name: str,
    ks: Sequence[int],
    ngram_k: int,
    rule: Verifier = verify.rejection,
    groups: Sequence[Prompts],
    others: Sequence[Prompts],
    max_new_tokens: int,
    controllers: Sequence[str] = (),
    controlled_k: int = 8,
  ):
    """Prefills; then `lowered`, `compiled` and the rest.

    Args:
      target: the target.
      drafter: a distilled one, with a `warp`.
      name: of the drafter, in the table.
      ks: its draft lengths.
      ngram_k: that of prompt lookup.
      rule: verifies all drafts.
      groups: prompts to be decoded together, groups of one size, all of one
        length.
      others: groups of other prompts, on which acceptance is measured.
      max_new_tokens: of every row.
      controllers: of the draft length, by name, arms of their own. What they
        choose is counted, and not predicted.
      controlled_k: the longest draft that they may choose, at most the longest
        of `ks`.

    Raises:
      ValueError: the drafter grows trees.
    """
    if decode.shapes(target, drafter).parents is not None:
      raise ValueError(
        f'{name} drafts a tree, whose shape is fixed, and a sweep is over the'
        ' length of chains: `python eval/drafters.py --arms=model:FOLDER`'
        ' measures it as it is'
      )
    self.batch = len(groups[0])
    self.results = {}
    self._target = target
    self._rule = verify.as_pytree(rule)
    ks = sorted(set(ks))
    self._longest, self._lookup = Arm(name, ks[-1]), Arm('ngram', ngram_k)
    fixed: dict[Arm, Drafter] = {
      PLAIN: NoDrafter(),
      **{Arm(name, k): drafter.at(k) for k in ks},
      self._lookup: drafters.find('ngram').NGram(ngram_k),
    }
    # What rounds cost is known later, and no part of a program.
    self._controllers = {
      Arm(name, controlled_k): draft_length.find(
        name, controlled_k, lambda k: 1.0
      )
      for name in controllers
    }
    controlled = drafter.at(controlled_k)
    self._arms = fixed | dict.fromkeys(self._controllers, controlled)
    self._drafting = [arm for arm in self._arms if arm != PLAIN]
    most = max(arm.k for arm in self._arms)
    self._prompt_length = [len(prompt) for prompt in groups[0]]
    self._states, self._other_states = (
      [
        generation.start(
          target,
          drafter.at(most),  # serves every shorter draft
          group,
          key=jax.random.fold_in(jax.random.key(seed), i),
          max_new_tokens=max_new_tokens,
        )
        for i, group in enumerate(part)
      ]
      for seed, part in enumerate((groups, others))
    )
    self._programs = {}
    self._meter = pricing.Meter(
      target,
      fixed,
      self._rule,
      batch=self.batch,
      prompt_length=self._prompt_length[0],
      context=self._prompt_length[0] + max_new_tokens,
      split=True,
    )

  def lowered(self) -> dict[Any, jax.stages.Lowered]:
    """The programs, to be compiled and given to `compiled`."""
    lowered = self._meter.lowered() | {
      ('round', arm): jax.jit(decode.advance).lower(
        *self._arguments(arm, 1.0, self._states[0])
      )
      for arm in self._controllers
    }
    return {(self.batch, name): low for name, low in lowered.items()}

  def compiled(self, programs: Mapping[Any, jax.stages.Compiled]) -> None:
    """Takes the programs, and runs each a little: a first call is slower."""
    self._programs = {
      name: program
      for (batch, name), program in programs.items()
      if batch == self.batch
    }
    self._meter.compiled(self._programs)
    if any(arm.name == 'adaptive' for arm in self._controllers):
      self._tell_costs()
    for arm in self._controllers:
      jax.block_until_ready(
        self._programs['round', arm](
          *self._arguments(arm, 1.0, self._states[0], rounds=1)
        )
      )

  def _tell_costs(self):
    """Times rounds once more, for controllers that go by what they cost."""
    self._meter.run(warps.UNCHANGED, FIRST_LOOKS)
    cost = self._meter.costs(self._longest.name).round
    self._controllers = {
      arm: draft_length.find(arm.name, arm.k, cost) for arm in self._controllers
    }

  def costs(self) -> dict[str, pricing.Costs]:
    """By drafter, what rounds took, in turns with the arms of every `run`."""
    return {
      arm.name: self._meter.costs(arm.name)
      for arm in (self._longest, self._lookup)
    }

  def outlook(self, temperature: float) -> Outlook:
    """What the other prompts say.

    The longest draft tells the rounds of every shorter one, as far as a token
    passes wherever it stands in a draft: heads pass less the further ahead they
    look, so that shorter drafts of theirs take fewer rounds than this says.
    Prompt lookup drafts as many tokens as it finds, so its own rounds are
    counted.
    """
    longest, lookup = (
      [
        self._finish(self._decoding(arm, temperature, state)())
        for state in self._other_states
      ]
      for arm in (self._longest, self._lookup)
    )
    passed = metrics.passed_by_row(*longest, k=self._longest.k)
    rounds = {
      arm: costs.rounds_needed(passed, arm.k)
      for arm in self._arms
      if arm.name == self._longest.name
    }
    rounds[self._lookup] = np.concatenate([r.stats.rounds for r in lookup])
    tested, passing = (
      sum(int(getattr(result.stats, name).sum()) for result in longest)
      for name in ('tested', 'passed')
    )
    return Outlook(rounds, passing / max(tested, 1))

  def run(
    self, temperature: float, repeats: int, done: Callable[[], Any]
  ) -> list[dict[str, Any]]:
    """Times all arms in turns.

    Args:
      temperature: of target and draft.
      repeats: timings of each arm.
      done: called after each round of the arms, `parts * repeats` times.

    Returns:
      A row of the table for each arm with a draft.
    """
    calls = {
      arm: [self._decoding(arm, temperature, state) for state in self._states]
      for arm in self._arms
    }
    # What rounds cost depends not on the prompts but on the moment: they are
    # timed at as many as the arms.
    priced = self._meter.calls(warps.temperature(temperature))
    calls |= {name: [call] * self.parts for name, call in priced.items()}
    seconds, states = timing.alternate(calls, repeats, done)
    self._meter.add(seconds, {name: states[name] for name in priced})
    results = {
      arm: [self._finish(state) for state in states[arm]] for arm in self._arms
    }
    self.results[temperature] = results
    return [
      self._row(arm, temperature, seconds, results[arm])
      for arm in self._drafting
    ]

  @property
  def parts(self) -> int:
    """Groups of prompts, which are decoded one after the other."""
    return len(self._states)

  def greedy_mismatches(self, results: Mapping[Arm, Any]) -> list[dict]:
    """Where greedy speculative text first leaves greedy plain text.

    Args:
      results: those of temperature 0.

    Returns:
      For each row that differs: the arm, the prompt, the position, and the gap
      between the plain target's two highest logits there. A block's pass and a
      step's add in another order, so a gap of some 1e-5 may go either way.
    """
    return [
      {'drafter': arm.name, 'batch': self.batch, 'k': arm.k, **mismatch}
      for arm in self._drafting
      for mismatch in mismatches(self._target, results[PLAIN], results[arm])
    ]

  def _row(self, arm, temperature, seconds, results) -> dict[str, Any]:
    plain = self.results[temperature][PLAIN]
    return {
      'drafter': arm.name,
      'temperature': temperature,
      'batch': self.batch,
      'k': arm.k,
      **measured(seconds[arm], seconds[PLAIN], results, plain, arm.k),
    }

  def _decoding(self, arm, temperature, state):
    """A call that has nothing left to do on the host."""
    arguments = self._arguments(arm, temperature, state)
    return functools.partial(self._programs['round', arm], *arguments)

  def _arguments(self, arm, temperature, state, rounds=decode.FOREVER):
    return pricing.arguments(
      self._target,
      self._arms[arm],
      self._rule,
      warps.temperature(temperature),
      state,
      rounds,
      self._controllers.get(arm, draft_length.FIXED),
    )

  def _finish(self, state) -> generation.Result:
    return generation.finish(state, self._prompt_length)


def measured(
  seconds: Sequence[float],
  plain_seconds: Sequence[float],
  results: Sequence[generation.Result],
  plain: Sequence[generation.Result],
  depth: int,
) -> dict[str, Any]:
  """What a row of a table says of one way to decode, and of plain decoding.

  Args:
    seconds: of each repeat.
    plain_seconds: of plain decoding, in turns with it.
    results: of the groups of prompts.
    plain: of plain decoding.
    depth: of a draft.
  """
  spread = timing.ratio(plain_seconds, seconds)
  summary = metrics.summarize(*results)
  new = [tokens for result in results for tokens in result.new_tokens()]
  # The loop goes on until the slowest row of a batch is done.
  rounds, plain_rounds = (
    sum(int(result.stats.rounds.max()) for result in some)
    for some in (results, plain)
  )
  own, theirs = float(np.median(seconds)), float(np.median(plain_seconds))
  return {
    'speedup': spread.median,
    'speedup_min': spread.min,
    'speedup_max': spread.max,
    'tokens_per_second': summary['tokens'] / own,
    'baseline_tokens_per_second': summary['tokens'] / theirs,
    'tokens_per_pass': summary['tokens'] / len(results[0].length) / rounds,
    'round_seconds': own / rounds,
    'plain_round_seconds': theirs / plain_rounds,
    'rounds_per_call': rounds / len(results),
    'plain_rounds': plain_rounds,
    'lengths': np.sum(
      [costs.batch_lengths(r.stats.lengths) for r in results], 0
    ).tolist(),
    'repetition': metrics.repetition(new),
    'acceptance_by_depth': summary['acceptance_by_depth'][:depth],
    **{
      key: summary[key]
      for key in ('acceptance_rate', 'accepted_per_round', 'tokens_per_round')
    },
  }


def mismatches(
  target: LanguageModel,
  plain: Sequence[generation.Result],
  other: Sequence[generation.Result],
) -> list[dict[str, Any]]:
  """Where greedy text first leaves greedy plain text; `bits.first_mismatches`.

  Args:
    target: which wrote both.
    plain: of the groups of prompts.
    other: likewise.

  Returns:
    For each row that differs the number of its `prompt`, over all groups,
    `position` and `margin`.
  """
  found = []
  for part, pair in enumerate(zip(plain, other, strict=True)):
    for mismatch in bits.first_mismatches(target, *pair):
      prompt = part * len(pair[0].length) + mismatch.pop('row')
      found.append({'prompt': prompt, **mismatch})
  return found


def groups(prompts: Prompts, batch: int, count: int) -> list[Prompts]:
  """Groups of `batch` prompts, about `count` prompts in all, at least a group.

  Raises:
    ValueError: there are not enough prompts.
  """
  total = max(count // batch, 1) * batch
  if total > len(prompts):
    raise ValueError(f'batch {batch} needs {total} prompts, not {len(prompts)}')
  return [prompts[i : i + batch] for i in range(0, total, batch)]


def modelled_speedup(row: Mapping[str, Any], cost: pricing.Costs) -> float:
  """What a row of the table should have gained by the lengths that it had.

  Args:
    row: of the table.
    cost: of its drafter at its batch size.

  Returns:
    The rounds of plain decoding over what the row's own cost.
  """
  return row['plain_rounds'] / costs.modelled(row['lengths'], cost.round)


def predict(
  row: Mapping[str, Any],
  outlook: Outlook,
  cost: pricing.Costs,
  groups: int,
  new_tokens: int,
) -> dict[str, Any]:
  """The prediction that belongs to a row of the table, and where they part.

  Args:
    row: of the table.
    outlook: at its temperature.
    cost: of its drafter at its batch size.
    groups: of prompts that the row was measured on.
    new_tokens: of every prompt.

  Returns:
    c and v(K); tokens per pass and the speedup with the interval that prompts
    leave open; the i.i.d. formula's speedup with v(K) and with v = 1; how much
    too high the speedup is, as a share, and what of it comes from tokens and
    from time, which multiply; and the seconds of a measured round by part:
    `host` (what a call takes that does nothing), `draft` (the prompt's reading
    too), `verify` (bare passes) and `loop`, which is the rest: rule, warp,
    draw, commit, bookkeeping.
  """
  arm, batch = Arm(row['drafter'], row['k']), row['batch']
  k, rounds = arm.k, outlook.rounds[arm]
  expected = costs.slowest(rounds, batch)
  least, most = costs.rounds_interval(rounds, batch, groups)
  predicted, low, high, as_decoded = (
    cost.speedup(k, count, new_tokens)
    for count in (expected, most, least, row['rounds_per_call'])
  )
  reading = (cost.start - cost.call) / row['rounds_per_call']
  parts = {
    'host': cost.call / row['rounds_per_call'],
    'draft': k * cost.c[k] + reading,
    'verify': cost.passes[k],
  }
  seconds = {
    name: part * row['plain_round_seconds'] for name, part in parts.items()
  }
  # A point mass is no i.i.d. acceptance: lookup has it or has it not.
  iid = costs.expected_tokens(outlook.alpha, k)
  formulas = {
    name: None
    if arm.name == 'ngram'
    else float(costs.speedup(iid, k, cost.c[k], v))
    for name, v in (('iid_speedup', cost.v[k]), ('classical_speedup', 1.0))
  }
  return {
    'draft_cost_ratio': cost.c[k],
    'verify_cost': cost.v[k],
    'expected_tokens_per_pass': new_tokens / expected,
    'predicted_speedup': predicted,
    'predicted_min': low,
    'predicted_max': high,
    **formulas,
    'off': predicted / row['speedup'] - 1,
    'off_by_tokens': predicted / as_decoded - 1,
    'off_by_time': as_decoded / row['speedup'] - 1,
    'round_parts': seconds
    | {'loop': row['round_seconds'] - sum(seconds.values())},
  }


def best_ks(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
  """The best draft length by measurement and by each prediction.

  Args:
    rows: of one drafter, temperature and batch size, all predicted.
  """
  return {
    name: max(rows, key=lambda row: (row[name], -row['k']))['k']
    for name in (
      'speedup',
      'predicted_speedup',
      'iid_speedup',
      'classical_speedup',
    )
  }

"""A sweep: decoding with drafts of many lengths, against plain decoding.

Plain decoding is the same loop with an empty draft, from the same prefilled
state. Everything is compiled before anything is timed, temperatures share one
program, and all arms generate equally many tokens, since nothing ends a row
early.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import costs, decode, generation, metrics, timing, verify, warps
from specjax.certify import bits
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.types import Drafter, LanguageModel, Verifier, Warp

FOREVER = jnp.iinfo(jnp.int32).max
# Forward passes in a timed loop: enough for its start not to matter.
PASSES = {'target': 6, 'draft': 96}

Prompts = Sequence[Sequence[int]]


class Arm(NamedTuple):
  """One way to decode: a drafter by name, and its draft length."""

  name: str
  k: int


PLAIN = Arm('none', 0)


class Costs(NamedTuple):
  """What forward passes cost at one batch size.

  Attributes:
    target_step: seconds of a plain step of the target.
    draft_step: seconds of a step of the draft model.
    c: the latter over the former.
    v: by draft length K, a pass over K + 1 tokens over a plain step.
  """

  target_step: float
  draft_step: float
  c: float
  v: dict[int, float]


class Race:
  """All arms at one batch size: compiled, then timed.

  The forward passes that a prediction needs run in turns with the arms, since
  they are compared with them.

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
  ):
    """Prefills; then `lowered`, `compiled` and the rest.

    Args:
      target: the target.
      drafter: a distilled one, with a `warp` and a `model`.
      name: of the drafter, in the table.
      ks: its draft lengths.
      ngram_k: that of prompt lookup.
      rule: verifies all drafts.
      groups: prompts to be decoded together, groups of one size, all of one
        length.
      others: groups of other prompts, on which acceptance is measured.
      max_new_tokens: of every row.
    """
    self.batch = len(groups[0])
    self.results = {}
    self._target, self._name, self._drafter = target, name, drafter
    self._rule = verify.as_pytree(rule)
    ks = sorted(set(ks))
    self._arms = [PLAIN, *(Arm(name, k) for k in ks), Arm('ngram', ngram_k)]
    self._prompt_length = [len(prompt) for prompt in groups[0]]
    self._states, self._other_states = (
      [
        generation.start(
          target,
          drafter.at(max(*ks, ngram_k)),  # serves every shorter draft
          group,
          key=jax.random.fold_in(jax.random.key(seed), i),
          max_new_tokens=max_new_tokens,
        )
        for i, group in enumerate(part)
      ]
      for seed, part in enumerate((groups, others))
    )
    # A pass is timed in the middle of what is generated.
    self._caches = {
      kind: cache._replace(length=cache.length + max_new_tokens // 2)
      for kind, cache in (
        ('target', self._states[0].cache),
        ('draft', self._states[0].memory.cache),
      )
    }
    self._models = {'target': target, 'draft': drafter.model}
    self._widths = [('draft', 1)] + [
      ('target', 1 + k) for k in sorted({0, *ks, ngram_k})
    ]
    self._programs = {}
    self._pass_seconds = {width: [] for width in self._widths}

  def lowered(self) -> dict[Any, jax.stages.Lowered]:
    """The programs, to be compiled and given to `compiled`."""
    decoding = jax.jit(decode.advance)
    passing = jax.jit(timing.passes)
    loops = {
      (self.batch, arm): decoding.lower(
        *self._arguments(arm, warps.UNCHANGED, self._states[0], FOREVER)
      )
      for arm in self._arms
    }
    return loops | {
      (self.batch, width): passing.lower(*self._pass_arguments(width))
      for width in self._widths
    }

  def compiled(self, programs: Mapping[Any, jax.stages.Compiled]) -> None:
    """Takes the programs, and runs each a little: a first call is slower."""
    self._programs = {
      name: program
      for (batch, name), program in programs.items()
      if batch == self.batch
    }
    for arm in self._arms:
      self._decoding(arm, warps.UNCHANGED, self._states[0], rounds=1)()
    for width in self._widths:
      self._passing(width)()

  def costs(self) -> Costs:
    """What the forward passes took, in turns with the arms of every `run`."""
    seconds = self._pass_seconds
    step = seconds['target', 1]
    draft = seconds['draft', 1]
    return Costs(
      target_step=float(np.median(step)) / (PASSES['target'] * self.parts),
      draft_step=float(np.median(draft)) / (PASSES['draft'] * self.parts),
      c=timing.ratio(draft, step).median * PASSES['target'] / PASSES['draft'],
      v={
        m - 1: timing.ratio(seconds[kind, m], step).median
        for kind, m in self._widths
        if kind == 'target'
      },
    )

  def tokens_per_round(self, temperature: float) -> dict[Arm, float]:
    """Expected by each arm, from what was accepted on the other prompts.

    The longest draft tells the acceptance at each depth and so of every shorter
    one. Prompt lookup drafts as many tokens as it finds, so its own rounds are
    counted.
    """
    warp = warps.temperature(temperature)
    longest, ngram = self._arms[-2:]
    by_depth, lookup = (
      metrics.summarize(
        *(
          self._finish(self._decoding(arm, warp, state)())
          for state in self._other_states
        )
      )
      for arm in (longest, ngram)
    )
    # A depth that no draft survived to adds nothing, whatever stands there.
    alpha = [rate or 0.0 for rate in by_depth['acceptance_by_depth']]
    expected = costs.tokens_by_k(alpha, longest.k)
    return {arm: float(expected[arm.k]) for arm in self._arms[:-1]} | {
      ngram: lookup['tokens_per_round']
    }

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
    warp = warps.temperature(temperature)
    calls = {
      arm: [self._decoding(arm, warp, state) for state in self._states]
      for arm in self._arms
    } | {width: [self._passing(width)] * self.parts for width in self._widths}
    seconds, states = timing.alternate(calls, repeats, done)
    for width in self._widths:
      self._pass_seconds[width] += seconds[width]
    results = {
      arm: [self._finish(state) for state in states[arm]] for arm in self._arms
    }
    self.results[temperature] = results
    return [
      self._row(arm, temperature, seconds, results[arm])
      for arm in self._arms[1:]
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
    found = []
    for arm in self._arms[1:]:
      for part, (plain, other) in enumerate(
        zip(results[PLAIN], results[arm], strict=True)
      ):
        where = {'drafter': arm.name, 'batch': self.batch, 'k': arm.k}
        for mismatch in bits.first_mismatches(self._target, plain, other):
          prompt = part * self.batch + mismatch.pop('row')
          found.append({**where, 'prompt': prompt, **mismatch})
    return found

  def _row(self, arm, temperature, seconds, results) -> dict[str, Any]:
    spread = timing.ratio(seconds[PLAIN], seconds[arm])
    summary = metrics.summarize(*results)
    new = [tokens for result in results for tokens in result.new_tokens()]
    return {
      'drafter': arm.name,
      'temperature': temperature,
      'batch': self.batch,
      'k': arm.k,
      'speedup': spread.median,
      'speedup_min': spread.min,
      'speedup_max': spread.max,
      'tokens_per_second': summary['tokens'] / float(np.median(seconds[arm])),
      'baseline_tokens_per_second': summary['tokens']
      / float(np.median(seconds[PLAIN])),
      'repetition': metrics.repetition(new),
      'acceptance_by_depth': summary['acceptance_by_depth'][: arm.k],
      **{
        key: summary[key]
        for key in (
          'acceptance_rate',
          'accepted_per_round',
          'tokens_per_round',
        )
      },
    }

  def _arguments(self, arm: Arm, warp: Warp, state, rounds: int) -> tuple:
    if arm.name == self._name:
      drafter = dataclasses.replace(self._drafter.at(arm.k), warp=warp)
    else:
      drafter = NGram(arm.k) if arm.k else NoDrafter()
      state = state._replace(memory=())  # neither of them has one
    eos = generation.end_ids(self._target, ())
    return self._target, drafter, self._rule, warp, eos, state, rounds

  def _pass_arguments(self, width: tuple[str, int]) -> tuple:
    kind, m = width
    tokens = jnp.ones((self.batch, m), jnp.int32)
    return self._models[kind], self._caches[kind], tokens, PASSES[kind]

  def _decoding(self, arm, warp, state, rounds=FOREVER):
    """A call that has nothing left to do on the host."""
    arguments = self._arguments(arm, warp, state, rounds)
    return functools.partial(self._programs[arm], *arguments)

  def _passing(self, width):
    return functools.partial(
      self._programs[width], *self._pass_arguments(width)
    )

  def _finish(self, state) -> generation.Result:
    return generation.finish(state, self._prompt_length)


def groups(prompts: Prompts, batch: int, count: int) -> list[Prompts]:
  """Groups of `batch` prompts, about `count` prompts in all, at least a group.

  Raises:
    ValueError: there are not enough prompts.
  """
  total = max(count // batch, 1) * batch
  if total > len(prompts):
    raise ValueError(f'batch {batch} needs {total} prompts, not {len(prompts)}')
  return [prompts[i : i + batch] for i in range(0, total, batch)]


def predict(row: Mapping[str, Any], tokens: float, cost: Costs) -> dict:
  """The prediction that belongs to a row of the table.

  Args:
    row: of the table.
    tokens: per round, as expected.
    cost: at the row's batch size.

  Returns:
    c (0 for a drafter that does not compute), v(K) and the speedup.
  """
  k = row['k']
  c = cost.c if row['drafter'] != 'ngram' else 0.0
  return {
    'draft_cost_ratio': c,
    'verify_cost': cost.v[k],
    'expected_tokens_per_round': tokens,
    'predicted_speedup': float(costs.speedup(tokens, k, c, cost.v[k])),
  }

"""A contest: ways to draft and rules, on the same prompts with the same keys.

Plain decoding is the same loop with an empty draft. All arms generate equally
many tokens, from states that were prefilled before, with programs that were
compiled before, in turns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import (
  decode,
  generation,
  pricing,
  proposers,
  sweep,
  timing,
  verify,
  warps,
)
from specjax.draft_length import FIXED
from specjax.drafters.none import NoDrafter
from specjax.sweep import Prompts
from specjax.types import (
  Draft,
  Drafter,
  DraftLength,
  LanguageModel,
  Noise,
  Verifier,
)
from specjax.workspace import Workspace


class Arm(NamedTuple):
  """What drafts and what verifies, by name."""

  drafter: str
  rule: str


PLAIN = Arm('none', 'rejection')


class Way(NamedTuple):
  """A way to draft with what a run has; see `parse`.

  Attributes:
    kind: one of `proposers.KINDS`.
    draft: its folder in the run, several with commas, layers of an early exit,
      or nothing.
    k: draft length, or depth of a tree; None is as deep as it was trained for.
    nodes: of a tree of candidates.
    branching: of a tree that is sampled.
  """

  kind: str
  draft: str
  k: int | None
  nodes: int | None = None
  branching: tuple[int, ...] | None = None

  @property
  def name(self) -> str:
    """As it is written in full."""
    draft = self.draft.replace(',', '+')
    if self.branching:
      size = 'x'.join(map(str, self.branching))
    elif self.nodes:
      size = f'{self.nodes}/{self.k}' if self.k else f'{self.nodes}'
    else:
      size = f'{self.k}'
    return f'{self.kind}{":" * bool(draft)}{draft}@{size}'

  @property
  def folders(self) -> list[str]:
    """Of the drafts that have to be there."""
    return [] if self.kind in proposers.WITHOUT_DRAFT else self.draft.split(',')

  def drafter(self, workspace: Workspace, temperature: float) -> Drafter:
    """What drafts at a temperature, which a tree of candidates is chosen for.

    See `proposers.make`, also for what it raises.
    """
    config = workspace.config
    decoding = {**config['decode'], 'temperature': temperature}
    workspace = copy.copy(workspace)
    workspace.config = {**config, 'decode': decoding}
    return proposers.make(
      workspace,
      self.kind,
      self.draft,
      branching=self.branching,
      k=self.k,
      nodes=self.nodes,
    )


def require(workspace: Workspace, ways: Sequence[Way]) -> None:
  """Refuses ways whose drafts a run does not have.

  Raises:
    FileNotFoundError: there are such.
  """
  missing = workspace.missing([name for way in ways for name in way.folders])
  if missing:
    raise FileNotFoundError(
      f'{workspace.folder} has no draft {", ".join(missing)}: train it, or'
      ' leave it out of --arms'
    )


def parse(text: str, k: int) -> Way:
  """A way to draft, from its text `kind`, `kind:draft` or `kind:draft@size`.

  The size is what the target scores in a round: `@4`, a chain of 4 tokens or a
  tree of the 4 best candidates, `@16/4` one that is at most 4 deep. A sampled
  tree has the children of a node, by depth: `@3x2`. Members of a committee, of
  4 tokens each, stand as `committee:one+other@4`.

  Args:
    text: the text.
    k: the size where none is said, but for sampled trees.

  Raises:
    ValueError: it is none.
  """
  head, at, size = text.partition('@')
  kind, _, draft = head.partition(':')
  if kind not in proposers.KINDS or kind == 'none':
    raise ValueError(
      f'the arm {text!r} is of no kind: write kind:draft@size, with one of'
      f' {", ".join(name for name in proposers.KINDS if name != "none")}'
    )
  if bool(draft) == (kind in proposers.WITHOUT_DRAFT and kind != 'early_exit'):
    what = 'needs' if not draft else 'has'
    less = '' if draft else ", a folder of the run or an exit's layers"
    raise ValueError(f'the arm {text!r} {what} a draft behind the colon{less}')
  members = draft.split('+') if draft and kind != 'early_exit' else []
  bad = any(not name or name != name.strip() or ':' in name for name in members)
  if bad or (len(members) > 1 and kind != 'committee'):
    raise ValueError(
      f'the arm {text!r} names no draft: {draft!r} is no folder of a run; a'
      ' committee has several, as committee:one+other'
    )
  sampled = kind in ('iid', 'distinct')
  mark = 'x' if sampled else '/'
  numbers = size.split(mark) if at else proposers.BRANCHING if sampled else [k]
  numbers = [str(number) for number in numbers]
  most = {'candidates': 2}.get(kind, 1) if not sampled else len(numbers)
  if len(numbers) > most or not all(
    n.isdecimal() and 0 < int(n) < 2**31 for n in numbers
  ):
    form = {'candidates': '8 or 8/4'}.get(kind, '3x2' if sampled else '4')
    raise ValueError(
      f'the arm {text!r} has no size that can be: write it as {kind}@{form}'
    )
  sizes = tuple(map(int, numbers))
  draft = draft.replace('+', ',')
  if sampled:
    return Way(kind, draft, len(sizes), branching=sizes)
  if kind == 'candidates':
    return Way(kind, draft, sizes[1] if len(sizes) > 1 else None, sizes[0])
  return Way(kind, draft, sizes[0])


def refusal(rule: Verifier, draft: Draft, vocab: int) -> str | None:
  """Why a rule does not verify a draft, as it says when it is traced.

  Args:
    rule: the rule.
    draft: its shapes, as `decode.shapes` gives them.
    vocab: tokens.

  Returns:
    The reason; None where it does.
  """
  rows, nodes = draft.tokens.shape
  noise = Noise(
    jax.ShapeDtypeStruct((rows, nodes), np.float32),
    jax.eval_shape(
      lambda: jax.random.split(jax.random.key(0), (rows, nodes + 1))
    ),
  )
  log_p = jax.ShapeDtypeStruct((rows, nodes + 1, vocab), np.float32)
  try:
    jax.eval_shape(jax.vmap(rule), noise, draft, log_p)
  except ValueError as error:
    return str(error)
  return None


def pair(
  target: LanguageModel,
  drafters: Mapping[str, Drafter],
  rules: Mapping[str, Verifier],
) -> tuple[list[Arm], list[dict[str, str]]]:
  """Which rules verify which drafts.

  Args:
    target: which drafters may borrow from.
    drafters: by name.
    rules: by name.

  Returns:
    The arms; and what is left out: `drafter`, `rule` and `why`. On a chain
    `traversal` is `block`, and is left out beside it.

  Raises:
    ValueError: no rule verifies some drafter.
  """
  arms, left_out = [], []
  for name, drafter in drafters.items():
    draft = decode.shapes(target, drafter)
    own = []
    for rule, function in rules.items():
      why = refusal(function, draft, target.vocab_size)
      if rule == 'traversal' and draft.parents is None and 'block' in rules:
        why = 'on a chain it is block'
      if why:
        left_out.append({'drafter': name, 'rule': rule, 'why': why})
      else:
        own.append(Arm(name, rule))
    if not own:
      raise ValueError(f'no rule verifies {name}: {left_out[-1]["why"]}')
    arms += own
  return arms, left_out


def rivals(one: Way, other: Way) -> bool:
  """Whether one way is worth comparing with another at as many nodes.

  A tree and the chain of its draft, a mixture and its parts, and an early exit
  and a draft model are.
  """
  if one.kind in ('candidates', 'iid', 'distinct'):
    return other.kind == 'model' and one.draft == other.draft
  if one.kind == 'mixture':
    same = other.kind == 'model' and one.draft == other.draft
    return same or other.kind == 'suffix'
  return one.kind == 'early_exit' and other.kind == 'model'


class Contest:
  """Arms at one batch size and temperature, in front of one target.

  Attributes:
    batch: rows decoded at once.
    temperature: of target and drafts.
    seconds: by arm, of each repeat.
    results: by arm, of each group of prompts.
  """

  def __init__(
    self,
    target: LanguageModel,
    drafters: Mapping[str, Drafter],
    rules: Mapping[str, Verifier],
    arms: Sequence[Arm],
    *,
    groups: Sequence[Prompts],
    max_new_tokens: int,
    temperature: float,
    controllers: Mapping[str, DraftLength] | None = None,
    room: int = 0,
    done: Callable[[], Any] = lambda: None,
  ):
    """Prefills; then `lowered`, `compiled` and `run`.

    Args:
      target: the target.
      drafters: by name.
      rules: by name.
      arms: which of them go together.
      groups: prompts to be decoded together, groups of one size. If they differ
        in length, `room` must hold all of them.
      max_new_tokens: of every row.
      temperature: of target and drafts.
      controllers: of the draft length, by drafter; others' are fixed.
      room: tokens that buffers hold at least.
      done: called after each drafter.
    """
    self.batch = len(groups[0])
    self.temperature = temperature
    self.seconds: dict[Arm, list[float]] = {}
    self.results: dict[Arm, list[generation.Result]] = {}
    self._target = target
    self._controllers = controllers or {}
    self._drafters = {PLAIN.drafter: NoDrafter(), **drafters}
    self._rules = {
      name: verify.as_pytree(rule)
      for name, rule in {'rejection': verify.rejection, **rules}.items()
    }
    self._arms = [PLAIN, *arms]
    self._prompt_lengths = [[len(prompt) for prompt in g] for g in groups]
    self._programs: dict[Hashable, jax.stages.Compiled] = {}
    self._trees = {
      name: decode.shapes(target, drafter).parents is not None
      for name, drafter in self._drafters.items()
    }
    self._states, self._begun = {}, {}
    for name, drafter in self._drafters.items():
      self._states[name] = [
        generation.start(
          target,
          drafter,
          group,
          key=jax.random.fold_in(jax.random.key(0), i),
          max_new_tokens=max_new_tokens,
          room=room,
        )
        for i, group in enumerate(groups)
      ]
      done()

  def lowered(
    self,
    known: Container[Hashable] = (),
    done: Callable[[], Any] = lambda: None,
  ) -> dict[Hashable, jax.stages.Lowered]:
    """The programs, to be compiled and given to `compiled`.

    Contests that differ in temperature, or in a number of the target, share
    them.

    Args:
      known: the names of those that another contest has.
      done: called after each arm and each drafter.
    """
    self._begun = {name: x[0] for name, x in self._states.items()}
    cases = {
      self._program(arm): (
        decode.advance,
        self._arguments(arm, self._begun[arm.drafter]),
      )
      for arm in self._arms
    }
    cases |= {
      self._program(name): (timing.proposals, self._proposals(name))
      for name in self._drafting
    }
    found = {}
    for name, (function, arguments) in cases.items():
      if name not in known:
        found[name] = jax.jit(function).lower(*arguments)
      done()
    return found

  @property
  def programs(self) -> int:
    """How many there are."""
    return len(self._arms) + len(self._drafting)

  def compiled(self, programs: Mapping[Hashable, Any]) -> None:
    """Takes the programs, and runs each a little: a first call is slower."""
    self._programs = dict(programs)
    for arm in self._arms:
      first = self._states[arm.drafter][0]
      soon = first._replace(stop=first.length + 1)
      end = self._decoding(arm, soon)()
      # From here on a draft has no prompt to read.
      self._begun[arm.drafter] = end._replace(
        stop=first.stop,
        done=first.done,
        control=first.control,
        stats=first.stats,
      )
    for name in self._drafting:
      jax.block_until_ready(self._drafting_of(name)())

  def run(
    self, repeats: int, done: Callable[[], Any] = lambda: None
  ) -> list[dict[str, Any]]:
    """Times all arms in turns.

    Args:
      repeats: timings of each arm.
      done: called after each round of the arms, `parts * repeats` times.

    Returns:
      A row for each arm with a draft: what `sweep.measured` says; `drafter`,
      `rule`, `temperature`, `batch`; `nodes` that the target scores for a row
      in a round, and whether they are a `tree`; `acceptance`, the share of
      `tested` tokens that `passed`; `draft_cost`, the drafting of a round in
      plain rounds; `mismatches`, of temperature 0: where the text leaves that
      of plain decoding.
    """
    calls = {
      arm: [self._decoding(arm, state) for state in self._states[arm.drafter]]
      for arm in self._arms
    }
    calls |= {
      name: [self._drafting_of(name)] * self.parts for name in self._drafting
    }
    seconds, states = timing.alternate(calls, repeats, done)
    self.seconds = {arm: seconds[arm] for arm in self._arms}
    self.results = {
      arm: [
        generation.finish(state, lengths)
        for state, lengths in zip(
          states[arm], self._prompt_lengths, strict=True
        )
      ]
      for arm in self._arms
    }
    turns = self.parts * pricing.TURNS['draft']
    plain = sum(int(r.stats.rounds.max()) for r in self.results[PLAIN])
    drafting = {
      name: timing.ratio(seconds[name], seconds[PLAIN]).median * plain / turns
      for name in self._drafting
    }
    return [
      self._row(arm, drafting[arm.drafter])
      for arm in self._arms
      if arm != PLAIN
    ]

  def against(self, one: Arm, other: Arm) -> timing.Spread:
    """How much faster one arm was than another, repeat by repeat."""
    return timing.ratio(self.seconds[other], self.seconds[one])

  @property
  def parts(self) -> int:
    """Groups of prompts, which are decoded one after the other."""
    return len(self._states[PLAIN.drafter])

  @property
  def _drafting(self) -> list[str]:
    return [name for name in self._drafters if name != PLAIN.drafter]

  def _row(self, arm, drafting) -> dict[str, Any]:
    own, plain = self.results[arm], self.results[PLAIN]
    tested, passed = (
      sum(int(getattr(result.stats, name).sum()) for result in own)
      for name in ('tested', 'passed')
    )
    nodes = own[0].stats.tested.shape[1]
    mismatches = None
    if self.temperature == 0:
      mismatches = sweep.mismatches(self._target, plain, own)
    seconds = self.seconds[arm], self.seconds[PLAIN]
    return {
      **arm._asdict(),
      'temperature': self.temperature,
      'batch': self.batch,
      'nodes': nodes,
      'tree': self._trees[arm.drafter],
      'tested': tested,
      'passed': passed,
      'acceptance': passed / tested if tested else None,
      'draft_cost': drafting,
      'mismatches': mismatches,
      **sweep.measured(*seconds, own, plain, nodes),
    }

  def _program(self, what: Arm | str) -> Hashable:
    """The name of the program of an arm, or of a drafter alone."""
    drafter = self._drafters[getattr(what, 'drafter', what)]
    structure = jax.tree.structure((self._target, drafter))
    size = self._states[PLAIN.drafter][0].tokens.shape
    return what, size, structure

  def _decoding(self, arm, state):
    """A call that has nothing left to do on the host."""
    program = self._programs[self._program(arm)]
    return functools.partial(program, *self._arguments(arm, state))

  def _drafting_of(self, name):
    program = self._programs[self._program(name)]
    return functools.partial(program, *self._proposals(name))

  def _arguments(self, arm, state):
    return pricing.arguments(
      self._target,
      self._drafters[arm.drafter],
      self._rules[arm.rule],
      warps.temperature(self.temperature),
      state,
      decode.FOREVER,
      self._controllers.get(arm.drafter, FIXED),
    )

  def _proposals(self, name):
    state = self._begun[name]
    target, drafter, *_ = self._arguments(Arm(name, PLAIN.rule), state)
    return target, drafter, state, pricing.TURNS['draft']

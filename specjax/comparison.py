"""A comparison: several programs decode the same prompts, in turns.

Other programs do not say when their first token came. It is therefore timed
alone too, with the prompt's pass before it, plainly; what an arm took less that
of its own peer is the time of the tokens behind it, and rates and ratios are of
these.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax import benchmark, generation, logs, sweep, timing, warps
from specjax.sweep import Prompts
from specjax.types import LanguageModel, Warp

OURS, PLAIN, ALL = 'specjax', 'plain', benchmark.ALL


class Arm(NamedTuple):
  """Who decodes, and how: `PLAIN`, or the name of a `contest.Way`."""

  peer: str
  way: str


class Condition(NamedTuple):
  """Under which all arms decode; `context` 0 is prompts as they are."""

  dtype: str
  context: int
  batch: int
  temperature: float
  top_p: float

  @property
  def label(self) -> str:
    """For people."""
    parts = [f'T = {self.temperature:g}']
    if self.top_p < 1:
      parts.append(f'top-p {self.top_p:g}')
    parts += [f'batch {self.batch}', self.dtype]
    if self.context:
      parts.append(f'context {self.context:,}')
    return ', '.join(parts)

  @property
  def warp(self) -> Warp:
    """Of target and drafts."""
    kept = [warps.TopP(self.top_p)] if self.top_p < 1 else []
    return warps.compose(warps.temperature(self.temperature), *kept)


class Text(NamedTuple):
  """What one arm wrote behind a batch of prompts.

  Attributes:
    tokens: the new ones, of each.
    passes: of the target that gave them.
  """

  tokens: list[list[int]]
  passes: int


class Timed(NamedTuple):
  """What one arm took, and wrote, for some groups of prompts.

  Attributes:
    first: `[R]` seconds of each repeat until its peer's plain first tokens.
    whole: `[R]` seconds until its own last tokens.
    texts: of each group.
    mismatches: where greedy text leaves that of our plain decoding; None where
      text is drawn.
  """

  first: np.ndarray
  whole: np.ndarray
  texts: list[Text]
  mismatches: list[dict[str, Any]] | None

  @property
  def behind(self) -> np.ndarray:
    """`[R]` seconds of the tokens behind the first."""
    return self.whole - self.first


# Continues prompts, with a seed, by so many tokens each, in buffers that hold
# so many at least.
Decode = Callable[[Prompts, int, int, int], Text]


def measure(
  target: LanguageModel,
  arms: Mapping[Arm, Decode],
  tasks: Mapping[str, Sequence[Prompts]],
  count: int,
  condition: Condition,
  *,
  repeats: int,
  clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
  """Times all arms in turns, task by task.

  Args:
    target: ours, which says how near a tie greedy texts part.
    arms: what decodes; plain decoding of every peer among them, and ours.
    tasks: groups of prompts that are decoded at once, by task.
    count: new tokens of each, 2 or more.
    condition: that the arms decode under.
    repeats: timings of each.
    clock: gives the time in seconds.

  Returns:
    A row for each task, if there are several, and arm, and then one of `ALL`
    for each arm: the fields of `Arm` and `Condition`; `condition`, its label;
    `task`; `prompts`, and the mean of their `prompt_tokens`; medians over
    repeats of `first_token_seconds`, of a group, and `tokens_per_second` behind
    it; `tokens_per_pass` of the target, its prompt's pass among them; `seconds`
    behind the first tokens, of each repeat; `mismatches`; `speedup` over our
    plain decoding and `own_speedup` over the peer's, medians with `_min` and
    `_max`; and `begin_seconds` of the arm's first calls.

  Raises:
    RuntimeError: a text took no longer than its first token.
  """
  firsts = [
    Arm(peer, PLAIN) for peer in dict.fromkeys(arm.peer for arm in arms)
  ]
  wanted = [*((arm, 1) for arm in firsts), *((arm, count) for arm in arms)]

  def room(group):
    # The first token's too, or its pass would read another buffer.
    return benchmark.room(max(map(len, group)) + count)

  def calls(arm, new, groups):
    return [
      functools.partial(arms[arm], group, seed, new, room(group))
      for seed, group in enumerate(groups)
    ]

  # One of each room: others have no programs, and need but one of all.
  rooms = {room(group): group for groups in tasks.values() for group in groups}
  begin = dict.fromkeys(arms, 0.0)
  title = f'{condition.label}: begin'
  with logs.Progress(len(wanted), title, unit='arms') as progress:
    for arm, new in wanted:
      groups = list(rooms.values())[: None if arm.peer == OURS else 1]
      start = clock()
      for call in calls(arm, new, groups):
        call()
      begin[arm] += clock() - start
      progress.advance()
  total = repeats * sum(map(len, tasks.values()))
  title = f'{condition.label}: decode'
  found, rows = {}, []
  with logs.Progress(total, title, unit='turns') as progress:
    for task, groups in tasks.items():
      seconds, texts = timing.alternate(
        {(arm, new): calls(arm, new, groups) for arm, new in wanted},
        repeats,
        progress.advance,
        clock,
      )
      plain = texts[Arm(OURS, PLAIN), count]
      found[task] = {
        arm: Timed(
          np.array(seconds[Arm(arm.peer, PLAIN), 1]),
          np.array(seconds[arm, count]),
          texts[arm, count],
          mismatches(target, groups, plain, texts[arm, count])
          if condition.temperature == 0
          else None,
        )
        for arm in arms
      }
      if len(tasks) > 1:
        rows += compare(task, groups, found[task], condition)
  groups = [*itertools.chain(*tasks.values())]
  whole = {arm: pool([own[arm] for own in found.values()]) for arm in arms}
  rows += compare(ALL, groups, whole, condition)
  return [
    {**row, 'begin_seconds': begin[Arm(row['peer'], row['way'])]}
    for row in rows
  ]


def pool(parts: Sequence[Timed]) -> Timed:
  """What an arm took for all tasks, each as long as it is, repeat by repeat."""
  one, *rest = parts
  return Timed(
    *(
      None if start is None else sum((part[i] for part in rest), start=start)
      for i, start in enumerate(one)
    )
  )


def compare(
  task: str,
  groups: Sequence[Prompts],
  found: Mapping[Arm, Timed],
  condition: Condition,
) -> list[dict[str, Any]]:
  """The rows of a task, of the tokens behind the first; see `measure`.

  Args:
    task: its name.
    groups: its prompts.
    found: by arm, plain decoding of every peer among them, and ours.
    condition: that the arms decoded under.

  Raises:
    RuntimeError: a text took no longer than its first token.
  """
  lengths = [len(prompt) for group in groups for prompt in group]
  rows = []
  for arm, one in found.items():
    if one.behind.min() <= 0:
      raise RuntimeError(
        f'{arm.peer}, {arm.way}: a text took no longer than its first token:'
        ' the machine is too busy, or --tokens too few'
      )
    longest = [max(map(len, text.tokens)) for text in one.texts]
    new = sum(len(own) - 1 for text in one.texts for own in text.tokens)
    row: dict[str, Any] = {
      **arm._asdict(),
      **condition._asdict(),
      'condition': condition.label,
      'task': task,
      'prompts': len(lengths),
      'prompt_tokens': float(np.mean(lengths)),
      'first_token_seconds': float(np.median(one.first)) / len(groups),
      'tokens_per_second': new / float(np.median(one.behind)),
      'tokens_per_pass': sum(longest) / sum(text.passes for text in one.texts),
      'seconds': one.behind.tolist(),
      'mismatches': one.mismatches,
    }
    for key, peer in (('speedup', OURS), ('own_speedup', arm.peer)):
      ratio = timing.ratio(found[Arm(peer, PLAIN)].behind, one.behind)
      row |= {
        key: ratio.median,
        f'{key}_min': ratio.min,
        f'{key}_max': ratio.max,
      }
    rows.append(row)
  return rows


def mismatches(
  target: LanguageModel,
  groups: Sequence[Prompts],
  plain: Sequence[Text],
  other: Sequence[Text],
) -> list[dict[str, Any]]:
  """Where greedy texts leave our plain ones; `sweep.mismatches`.

  Args:
    target: ours.
    groups: of prompts.
    plain: what we wrote behind each group, plainly.
    other: what another arm wrote there.

  Returns:
    For each prompt that differs its number, `prompt`; the `position` among new
    tokens, from 0; and `margin`.
  """
  prompts = [*itertools.chain(*groups)]

  def results(texts):
    new = itertools.chain(*(text.tokens for text in texts))
    return [
      generation.Result(
        np.array([[*prompt, *tokens]], np.int32),
        np.array([len(prompt) + len(tokens)]),
        np.array([len(prompt)]),
        None,
      )
      for prompt, tokens in zip(prompts, new, strict=True)
    ]

  found = sweep.mismatches(target, results(plain), results(other))
  return [
    {**one, 'position': one['position'] - len(prompts[one['prompt']])}
    for one in found
  ]

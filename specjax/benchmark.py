"""Ways to draft on prompt files, task by task."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import contest, generation, logs, pricing, timing, verify, warps
from specjax.contest import Arm, Way
from specjax.sweep import Prompts
from specjax.workspace import Workspace

ROOM = 256  # tokens: buffers come in multiples of it, one set of programs each
ALL = 'all tasks'


def run(
  workspace: Workspace,
  tasks: Mapping[str, Prompts],
  ways: Sequence[Way],
  *,
  temperatures: Sequence[float],
  max_new_tokens: int,
  repeats: int,
) -> list[dict[str, Any]]:
  """Times ways to draft against plain decoding, prompt by prompt.

  Every prompt is decoded alone, behind a prefill that is not timed, with draft
  lengths as `config.decode.draft_length` says. Tasks whose longest prompts are
  about as long share their programs.

  Args:
    workspace: the run.
    tasks: token ids of prompts, by task.
    ways: of drafting.
    temperatures: of target and drafts.
    max_new_tokens: for every prompt.
    repeats: timings of each.

  Returns:
    Rows as `contest.Contest.run` gives them, with their `task`, its number of
    `prompts` and the mean of their `prompt_tokens`; and for each temperature
    and way one of all tasks.

  Raises:
    ValueError: a way is not made for its draft, or the rule or the draft length
      not for it; or a text is longer than the target was made for.
  """
  name = workspace.config['decode']['verify']
  rules = {name: verify.find(name)}
  target, rows = workspace.target(), []
  for task, prompts in tasks.items():
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    generation.require_positions(target, lengths, f'{task}: prompt')
  every = list(itertools.product(temperatures, ways))
  target, *made = generation.pack(
    target, *(way.drafter(workspace, t) for t, way in every)
  )
  drafters: dict[float, dict[str, Any]] = {t: {} for t in temperatures}
  for (t, way), drafter in zip(every, made, strict=True):
    drafters[t][way.name] = drafter
  arms, _ = contest.pair(target, drafters[temperatures[0]], rules)
  by_room: dict[int, list[str]] = {}
  for task, prompts in tasks.items():
    longest = max(map(len, prompts)) + max_new_tokens
    by_room.setdefault(room(longest), []).append(task)
  total = sum(map(len, tasks.values())) * len(temperatures) * repeats
  seconds: dict[tuple[float, Arm], list[np.ndarray]] = {}
  with logs.Progress(total, 'decode', unit='turns') as progress:
    for size, names in sorted(by_room.items()):
      controllers = {
        t: {
          way.name: workspace.controller(
            way.kind,
            target,
            pricing.with_warp(drafters[t][way.name], warps.temperature(t)),
            context=size,
          )
          for way in ways
        }
        for t in temperatures
      }
      programs: dict[Any, Any] = {}
      for task, t in itertools.product(names, temperatures):
        found = contest.Contest(
          target,
          drafters[t],
          rules,
          arms,
          groups=[[prompt] for prompt in tasks[task]],
          max_new_tokens=max_new_tokens,
          temperature=t,
          controllers=controllers[t],
          room=size,
        )
        programs |= timing.compile_all(found.lowered(programs))
        found.compiled(programs)
        about = {
          'task': task,
          'prompts': len(tasks[task]),
          'prompt_tokens': float(np.mean([*map(len, tasks[task])])),
        }
        timed = found.run(repeats, progress.advance)
        rows += [{**about, **row} for row in timed]
        for arm, took in found.seconds.items():
          seconds.setdefault((t, arm), []).append(np.array(took))
  return rows + _all_tasks(rows, seconds, temperatures, arms)


def room(tokens: int) -> int:
  """Tokens of a buffer for so many."""
  return -(-tokens // ROOM) * ROOM


def _all_tasks(rows, seconds, temperatures, arms) -> list[dict[str, Any]]:
  """For each arm a row of all tasks together, each as long as it took."""
  found = []
  for t, arm in itertools.product(temperatures, arms):
    own = [
      row
      for row in rows
      if row['temperature'] == t and Arm(row['drafter'], row['rule']) == arm
    ]
    times = [sum(seconds[t, one]) for one in (contest.PLAIN, arm)]
    spread = timing.ratio(*times)
    rounds = [row['rounds_per_call'] * row['prompts'] for row in own]
    tokens = [
      row['tokens_per_round'] * n for row, n in zip(own, rounds, strict=True)
    ]
    tested = [row['tested'] for row in own]
    passed = [row['passed'] for row in own]
    found.append(
      {
        'task': ALL,
        'prompts': sum(row['prompts'] for row in own),
        **arm._asdict(),
        'temperature': t,
        'batch': 1,
        'acceptance': sum(passed) / sum(tested) if sum(tested) else None,
        'tokens_per_round': sum(tokens) / sum(rounds),
        'draft_cost': float(np.median([row['draft_cost'] for row in own])),
        'nodes': own[0]['nodes'],
        'speedup': spread.median,
        'speedup_min': spread.min,
        'speedup_max': spread.max,
        'mismatches': [one for row in own for one in row['mismatches'] or ()]
        if t == 0
        else None,
      }
    )
  return found

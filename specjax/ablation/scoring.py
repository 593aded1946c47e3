"""What drafts of one shape are worth: measured on text, and timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax import (
  data,
  decode,
  distill,
  generation,
  metrics,
  pricing,
  timing,
  verify,
  warps,
)
from specjax.drafters.none import NoDrafter
from specjax.types import LanguageModel, Trainable
from specjax.workspace import Workspace

ROWS = 64  # of text times drafts, that are measured at once


def pick(trees: Any, i: int) -> Any:
  """Tree i of a stack of arrays `[P, ...]`."""
  return jax.tree.map(lambda x: x[i], trees)


def measure(
  workspace: Workspace,
  target: LanguageModel,
  drafters: Trainable,
  c: Mapping[str, Any],
) -> list[dict[str, Any]]:
  """What `distill.measure` says of each of `[P]` drafts, on held-out text.

  Args:
    workspace: the run.
    target: its target, which wrote the text.
    drafters: the drafts.
    c: how they are decoded: temperature and k.
  """
  count = jax.tree.leaves(drafters)[0].shape[0]
  text = workspace.rollouts(target, c['temperature'])
  warp = warps.temperature(c['temperature'])
  rows = min(max(ROWS // count, 1), len(text))
  found = distill.means(
    _measure(drafters, target, warp, c['k'], batch)
    for batch in data.in_order(text, rows)
  )
  found = {name: np.asarray(values) for name, values in found.items()}
  return [
    {name: values[i].tolist() for name, values in found.items()}
    for i in range(count)
  ]


def race(
  target: LanguageModel,
  drafters: Trainable,
  prompts: Sequence[Sequence[int]],
  c: Mapping[str, Any],
  repeats: int,
  done: Callable[[], Any] = lambda: None,
) -> list[dict[str, float]]:
  """Decodes with each of `[P]` drafts and without, in turns, at batch 1.

  Args:
    target: the target.
    drafters: the drafts. They share one program, and with those of their shape
      that were timed before.
    prompts: decoded one after the other.
    c: how: temperature, k, verify, max_new_tokens.
    repeats: timings of each.
    done: called after each prompt, `len(prompts) * repeats` times.

  Returns:
    Of each draft the `speedup` over plain decoding (the median, beside
    `speedup_min` and `speedup_max`) and what it was made of.
  """
  warp = warps.temperature(c['temperature'])
  rule = verify.as_pytree(verify.find(c['verify']))
  count = jax.tree.leaves(drafters)[0].shape[0]
  arms = {i: pick(drafters, i).at(c['k']) for i in range(count)}
  arms[_PLAIN] = NoDrafter()
  states = [
    generation.start(
      target,
      arms[0],  # its memory is empty, and will do for all
      [prompt],
      key=jax.random.fold_in(jax.random.key(0), i),
      max_new_tokens=c['max_new_tokens'],
    )
    for i, prompt in enumerate(prompts)
  ]

  def call(arm, state, rounds=decode.FOREVER):
    arguments = pricing.arguments(target, arms[arm], rule, warp, state, rounds)
    return functools.partial(_advance, *arguments)

  for arm in arms:  # a first call is slower
    jax.block_until_ready(call(arm, states[0], rounds=1)())
  calls = {arm: [call(arm, state) for state in states] for arm in arms}
  seconds, ends = timing.alternate(calls, repeats, done)
  return [
    _speed(seconds[_PLAIN], seconds[i], ends[i], prompts) for i in range(count)
  ]


_PLAIN = 'plain'
_advance = jax.jit(decode.advance)
_measure = jax.jit(
  jax.vmap(distill.measure, in_axes=(0, None, None, None, None)),
  static_argnums=3,
)


def _speed(plain, own, ends, prompts) -> dict[str, float]:
  """What the timings of a draft come to."""
  spread = timing.ratio(plain, own)
  summary = metrics.summarize(
    *(
      generation.finish(end, [len(prompt)])
      for end, prompt in zip(ends, prompts, strict=True)
    )
  )
  return {
    'speedup': spread.median,
    'speedup_min': spread.min,
    'speedup_max': spread.max,
    'tokens_per_second': summary['tokens'] / float(np.median(own)),
    'tokens_per_round': summary['tokens_per_round'],
  }

"""The training loop: resume, step, evaluate, log, save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax import files
from specjax.checkpoint import Checkpoints
from specjax.distill import TrainState
from specjax.logs import Logger, Progress
from specjax.types import Batch

LOG_EVERY = 10  # steps whose mean is logged


def fit(
  state: TrainState,
  step: Callable[[TrainState, Batch], tuple[TrainState, Mapping[str, Any]]],
  batches: Callable[[int, Any], Batch],
  evaluate: Callable[[Any], Mapping[str, float]],
  *,
  steps: int,
  every: int,
  folder: Path,
  log: Path,
  meta: Mapping[str, Any],
  score: Callable[[Mapping[str, float]], float],
  show: Sequence[str] = (),
  tokens: int = 1,
) -> TrainState:
  """Trains from the newest checkpoint, or from `state` where there is none.

  Batch i is a function of i and of the model before it, so the number of the
  next step is all the position there is, and a run that was killed goes on to
  the same bits. The
  scalars of the steps are logged as means over `LOG_EVERY` of them.

  Args:
    state: before the first step.
    step: one update, compiled; it may donate its state.
    batches: batch i, from i and the model before update i.
    evaluate: scalars of a model on held-out text.
    steps: updates in all.
    every: updates between evaluations, each of which is logged and saved.
    folder: of the checkpoints.
    log: of the scalars, without a suffix.
    meta: kept with every checkpoint.
    score: of the scalars; its highest value marks the best checkpoint.
    show: the scalars to show while it runs.
    tokens: in a batch, for the rate.

  Returns:
    The state after the last step.

  Raises:
    FloatingPointError: if the loss is not finite; the newest checkpoint is the
      last good one.
    RuntimeError: if another process trains into the folder.
  """
  checkpoints = Checkpoints(folder)
  with files.alone(folder):
    done = checkpoints.latest() or 0
    if done:
      saved = checkpoints.restore(
        done, {'model': state.model, 'opt': state.opt}
      )
      state = TrainState(**saved, step=state.step + done)
    if done >= steps:
      return state
    with (
      Logger(log, step=done or -1) as logger,
      Progress(
        steps, log.name, initial=done, unit='tokens', scale=tokens
      ) as progress,
    ):
      recent = []
      for i in progress:
        state, scalars = step(state, batches(i, state.model))
        recent.append(scalars)
        due = (i + 1) % every == 0 or i + 1 == steps
        if not due and len(recent) < LOG_EVERY:
          continue
        values = {
          name: float(np.mean([one[name] for one in recent]))
          for name in scalars
        }
        recent = []
        if not math.isfinite(values['loss']):
          raise FloatingPointError(
            f'the loss is {values["loss"]} by step {i + 1}: lower the learning'
            f' rate; {folder} keeps step {checkpoints.latest()}'
          )
        if due:
          values.update(evaluate(state.model))
        logger.write(i + 1, **values)
        progress.show(**{k: values[k] for k in ('loss', *show) if k in values})
        if not due:
          continue
        checkpoints.save(
          i + 1,
          {'model': state.model, 'opt': state.opt},
          meta,
          score=score(values),
        )
    return state

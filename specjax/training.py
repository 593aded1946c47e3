"""The training loop: resume, step, evaluate, log, save, stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import flops, footprint, processes, products, sharding
from specjax.checkpoint import Checkpoints
from specjax.logs import Logger, Progress
from specjax.optimizing import TrainState
from specjax.types import Batch

LOG_EVERY = 10  # steps whose mean is logged

Scalars = Mapping[str, Any]


def fit(
  state: TrainState,
  step: Callable[[TrainState, Batch], tuple[TrainState, Scalars]],
  batches: Callable[[int, Any], Batch],
  evaluate: Callable[[Any], Mapping[str, float]],
  *,
  steps: int,
  every: int,
  folder: Path,
  log: Path,
  meta: Mapping[str, Any],
  score: Callable[[Mapping[str, float]], float],
  like: Batch,
  show: Sequence[str] = (),
  operations: Callable[[TrainState, Batch], int] | None = None,
  dtype: str = 'float32',
  patience: int = 0,
  beside: Any = (),
) -> TrainState:
  """Trains from the newest checkpoint, or from `state` where there is none.

  A batch is a function of the number of its step and of the model then, so that
  number is all the position there is, in the data and in any stream of random
  numbers; a run that was killed goes on to the same bits. The host looks at the
  scalars of `LOG_EVERY` steps at a time, which are logged as means, and never
  waits for a single step.

  Where the process is asked to end, by SIGTERM, it saves the step that it is
  at, behind an evaluation if one is due, and ends; the same command goes on
  from there, on other devices too. Of many processes, which must make the same
  calls, all end at the same step.

  Args:
    state: before the first step.
    step: one update, compiled; it may donate its state. Where a scalar is not
      finite it must leave the state as it was.
    batches: maps the number of a step, from 0, and the model before it to its
      batch.
    evaluate: scalars of a model on held-out text.
    steps: updates in all.
    every: updates between evaluations, each of which is logged and saved.
    folder: of the checkpoints, which are written while the training goes on.
    log: of the scalars, without a suffix.
    meta: kept with every checkpoint.
    score: of the scalars; its highest value marks the best checkpoint.
    like: shapes and places of a batch `[B, T]`, as `data.described` has them:
      what a device will hold is said before the first is made.
    show: the scalars to show while it runs.
    operations: of the matrix products in a step, of a state and such shapes;
      asked for behind the last step, and compared with one large product, which
      is timed then. Without it their rate is not said.
    dtype: of the factors of these products.
    patience: evaluations in a row without a higher score after which it stops
      early; 0 is never. The checkpoints tell, so that a run that was killed
      stops where it would have.
    beside: what else a step is given, such as a target, to be counted.

  Returns:
    The state after the last step.

  Raises:
    FloatingPointError: if a loss, gradient or update is not finite; the message
      names the step, and the newest checkpoint is the last good one.
    OSError: if a checkpoint cannot be written; those before are intact.
    RuntimeError: if another process trains into the folder.
    SystemExit: after a SIGTERM, when what it had done was saved.
  """
  with (
    processes.alone(folder),
    processes.Preemption(log.name) as preemption,
    Checkpoints(folder) as checkpoints,
  ):
    done = processes.agreed(checkpoints.latest() or 0)
    best = _Best(checkpoints)
    over = processes.agreed(done >= steps or best.waited(done, every, patience))
    if done:
      wanted = {'model': state.model, 'opt': state.opt}
      if over and 'opt' not in checkpoints.items(done):
        del wanted['opt']  # a draft that an ablation chose
      saved = {'opt': state.opt, **checkpoints.restore(done, wanted)}
      state = TrainState(**saved, step=state.step + done)
    if over:
      return state
    print(f'{log.name}: {_footprint(state, like, beside)}')
    tokens = like.tokens.size
    speed = _Speed()
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
        ending = preemption.asked(i + 1)
        if not due and not ending and len(recent) < LOG_EVERY:
          continue
        recent = jax.device_get(recent)
        speed.add(len(recent))
        _refuse_unsound(recent, i + 1, checkpoints)
        values = {
          name: float(np.mean([one[name] for one in recent]))
          for name in scalars
        }
        recent = []
        if due:
          values.update(evaluate(state.model))
        logger.write(i + 1, **values)
        progress.show(**{k: values[k] for k in ('loss', *show) if k in values})
        if due or ending:
          items = {'model': state.model, 'opt': state.opt}
          found = score(values) if due else None
          checkpoints.save_async(i + 1, items, meta, score=found)
        if due:
          best.see(i + 1, score(values))
        if ending:
          progress.advance()
          return state  # the process ends when the step is on the disk
        speed.resume()
        if i + 1 < steps and best.waited(i + 1, every, patience):
          break
    if i + 1 < steps:
      print(
        f'{log.name}: stopped at step {i + 1}, as no evaluation was better than'
        f' that at {best.step} in {patience}'
      )
    if speed.steps:
      said = ''
      if operations:
        rate = speed.rate * operations(state, like)
        # A CPU's devices share its cores.
        each = jax.process_count() if products.on_cpu() else _devices(state)
        peak = flops.peak(dtype) * each
        said = (
          f'; {rate / 1e9:,.0f} GFLOP/s in matrix products, those made again'
          f' for the gradient too: {rate / peak:.0%} of the rate of one large'
          ' product'
        )
      print(
        f'{log.name}: {speed.rate * tokens:,.0f} tokens per second, evaluations'
        f' left out{said}'
      )
    return state


def _footprint(state: TrainState, like: Batch, beside: Any) -> str:
  """What each device holds, in words."""
  parts = {
    'parameters': state.model,
    'optimiser': state.opt,
    'target': beside,
    'text': like,
  }
  sizes = {name: sharding.bytes_each(x) for name, x in parts.items()}
  count = _devices(state)
  where = 'one device' if count == 1 else f'each of {count} devices'
  back = sizes['parameters'] + sizes['optimiser']
  return footprint.listed(where, sizes, 'a step', sum(sizes.values()), back)


def _devices(state: TrainState) -> int:
  return len(jax.tree.leaves(state)[0].sharding.device_set)


class _Best:
  """The best score so far; `Checkpoints.best` finds the same one on disk."""

  def __init__(self, checkpoints: Checkpoints):
    self.step = processes.agreed(checkpoints.best() or 0)
    self._score = checkpoints.score(self.step) if self.step else None

  def see(self, step: int, score: float) -> None:
    """Takes in an evaluation."""
    if self._score is None or score > self._score:
      self.step = step
      self._score = None if math.isnan(score) else score

  def waited(self, step: int, every: int, patience: int) -> bool:
    """Whether there was none better in so many evaluations."""
    return patience > 0 and step - self.step >= patience * every


class _Speed:
  """Steps per second, with their data, and nothing else.

  The first steps of a process are not counted, since they compile.
  """

  def __init__(self):
    self.steps = 0
    self._seconds, self._since = 0.0, None

  def add(self, steps: int) -> None:
    """Counts steps whose results are here."""
    if self._since is not None:
      self.steps += steps
      self._seconds += time.monotonic() - self._since

  def resume(self) -> None:
    """Goes on after what is not to be counted."""
    self._since = time.monotonic()

  @property
  def rate(self) -> float:
    """Steps per second."""
    return self.steps / self._seconds


def _refuse_unsound(
  recent: Sequence[Scalars], last: int, checkpoints: Checkpoints
) -> None:
  """Stops at the first step that is not finite, of those up to `last`."""
  for step, scalars in enumerate(recent, start=last - len(recent) + 1):
    for name in ('loss', 'gradient_norm', 'update_norm'):
      if name in scalars and not math.isfinite(scalars[name]):
        checkpoints.wait()
        kept = checkpoints.latest()
        raise FloatingPointError(
          f'{name} is {scalars[name]} at step {step}: lower the learning rate;'
          f' {checkpoints.directory} keeps step {kept or "0, where it began"}'
        )

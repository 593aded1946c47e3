"""What a long piece of work shows and records: progress and scalars."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import TextIO

import rich.console
import rich.progress
import tensorboardX

from specjax import files, processes


class Logger:
  """Scalars by step, as JSON lines and as TensorBoard event files.

  `<path>.jsonl` is the record; the event files in `<path>/` are made from it.
  When a run goes on from an earlier step than it had reached, what was logged
  after that step is dropped from both, so that no step appears twice. Of many
  processes the first writes.
  """

  def __init__(self, path: str | pathlib.Path, step: int | None = None):
    """Opens a log.

    Args:
      path: where, without a suffix; `run / 'logs' / 'pretrain'`.
      step: the last step whose scalars still hold; None keeps all, -1 none.
    """
    self._lines = self._events = None
    if not processes.first():
      return
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.with_name(path.name + '.jsonl')
    kept = [s for s in read(lines) if step is None or s['step'] <= step]
    with files.atomic(lines) as file:
      for scalars in kept:
        file.write((json.dumps(scalars) + '\n').encode())
    self._lines = lines.open('a')
    shutil.rmtree(path, ignore_errors=True)
    self._events = tensorboardX.SummaryWriter(str(path), flush_secs=10)
    for scalars in kept:
      self._event(scalars)

  def write(self, step: int, **scalars: float) -> None:
    """Records scalars: the line at once, the event within ten seconds."""
    if self._lines is None:
      return
    values = {name: float(value) for name, value in scalars.items()}
    line = {'step': int(step), 'time': time.time(), **values}
    self._lines.write(json.dumps(line) + '\n')
    self._lines.flush()
    self._event(line)

  def close(self) -> None:
    """Closes the files."""
    if self._lines is None or self._lines.closed:
      return
    try:
      self._lines.close()
    finally:
      writer = self._events.file_writer
      try:
        self._events.close()
      except OSError:
        # At exit tensorboardX would try again, and fail with a traceback.
        writer.event_writer = types.SimpleNamespace(close=int)
        raise

  def __enter__(self) -> Logger:
    """Opens nothing: the log is open."""
    return self

  def __exit__(self, kind, error, where) -> None:
    """Closes the files; what went wrong before is not hidden by what does now.

    On a full disk the events cannot be written either.
    """
    del error, where
    try:
      self.close()
    except OSError:
      if not kind:
        raise

  def _event(self, line: dict[str, float]) -> None:
    for name, value in line.items():
      if name not in ('step', 'time'):
        self._events.add_scalar(name, value, line['step'], line['time'])


def read(path: str | pathlib.Path) -> list[dict[str, float]]:
  """The lines of a JSON log; none where there is no file.

  A last line that was cut by a kill is left out.

  Args:
    path: the `.jsonl` file.

  Returns:
    One dictionary per line, with `step`, `time` and the scalars.

  Raises:
    ValueError: a whole line is not JSON.
  """
  path = pathlib.Path(path)
  lines = path.read_text().split('\n') if path.exists() else ['']
  found = []
  for number, line in enumerate(lines[:-1], 1):  # whole lines end in '\n'
    try:
      found.append(json.loads(line))
    except ValueError as error:
      raise ValueError(
        f'{path}, line {number}, is not JSON: remove the line, or the file'
      ) from error
  return found


class Progress:
  """Shows how far a loop is, how fast, how long it will take, and metrics.

      with Progress(1000, 'pretrain', unit='tokens', scale=4096) as progress:
        for step in progress:
          ...
          progress.show(loss=loss)

  A bar on a terminal; elsewhere a plain line now and then. The rate leaves out
  the first step, which compiles, and what an earlier process did. Of many
  processes the first shows it.
  """

  def __init__(
    self,
    total: int,
    description: str,
    initial: int = 0,
    *,
    unit: str = 'steps',
    scale: float = 1.0,
    every: float = 10.0,
    file: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Describes the work.

    Args:
      total: steps in all.
      description: what is being done, in a word or two.
      initial: steps done before.
      unit: what the rate counts.
      scale: how many of them a step does.
      every: seconds between plain lines.
      file: where to write, stderr by default.
      clock: gives the time in seconds.
    """
    self._total, self._done, self._scale = total, initial, scale
    self._description, self._unit = description, unit
    self._every, self._clock = every, clock
    self._file = sys.stderr if file is None else file
    self._metrics = {}
    self._start = self._printed = clock()
    self._first = None  # when the first step of this process was done, and how
    self._bar = None  # many there were then
    self._silent = not processes.first()
    if self._silent:
      return
    console = _console(getattr(self._file, 'rich_proxied_file', self._file))
    if console.is_terminal and not console.is_dumb_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn('{task.description}'),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.TextColumn('{task.fields[text]}'),
        console=console,
      )
      self._task = self._bar.add_task(
        description, total=total, completed=initial, text=self.text()
      )

  def __enter__(self) -> Progress:
    """Starts to draw."""
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, *_) -> None:
    """Draws for the last time and leaves the cursor on a new line."""
    self._draw(last=True)
    if self._bar:
      self._bar.stop()

  def __iter__(self) -> Iterator[int]:
    """The steps that are left, each counted as done when the next is asked."""
    for step in range(self._done, self._total):
      yield step
      self.advance()

  def show(self, **metrics: float) -> None:
    """Sets metrics to be shown from now on."""
    self._metrics.update(metrics)

  def advance(self, steps: int = 1, **metrics: float) -> None:
    """Counts steps as done."""
    self.show(**metrics)
    self._done += steps
    if self._first is None:
      self._first = self._clock(), self._done
    self._draw()

  def text(self) -> str:
    """Counts, rate, time taken, time left and metrics, in one line."""
    parts = [f'{self._done}/{self._total}']
    rate = self._rate()
    if rate:
      speed = rate * self._scale
      digits = 0 if speed >= 100 else 2
      parts.append(f'{speed:,.{digits}f} {self._unit}/s')
    parts.append(f'{_minutes(self._clock() - self._start)} gone')
    if rate:
      parts.append(f'{_minutes((self._total - self._done) / rate)} left')
    parts += [f'{name} {value:.4g}' for name, value in self._metrics.items()]
    return '  '.join(parts)

  def _rate(self) -> float | None:
    """Steps per second since the first, None before there are two."""
    if self._first is None:
      return None
    since, done = self._first
    seconds = self._clock() - since
    return (self._done - done) / seconds if seconds > 0 else None

  def _draw(self, last: bool = False) -> None:
    if self._silent:
      return
    if self._bar:
      self._bar.update(self._task, completed=self._done, text=self.text())
    elif last or self._clock() - self._printed >= self._every:
      self._printed = self._clock()
      print(self._description, self.text(), file=self._file, flush=True)


@functools.lru_cache(maxsize=1)
def _console(file: TextIO) -> rich.console.Console:
  """One for a file, so that a bar within another is drawn below it."""
  return rich.console.Console(file=file)


def _minutes(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  clock = f'{minutes:02}:{seconds:02}'
  return f'{hours}:{clock}' if hours else clock

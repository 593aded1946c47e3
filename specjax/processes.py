"""One process of several: which this is, who writes, when all must end.

All processes run one program and make the same calls; they see one run folder.
Where there is one process alone nothing here waits for anybody.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from specjax import files

PATIENCE = 300  # seconds, as JAX has


def join(where: str) -> None:
  """Makes this process one of many; before anything else asks for devices.

  Args:
    where: 'auto' leaves it to JAX to find out from the environment (TPU pods,
      SLURM, Open MPI, Kubernetes); or 'HOST:PORT,COUNT,NUMBER', the address of
      process 0, how many there are and which this one is.

  Raises:
    ValueError: it is neither, or the processes do not find one another.
  """
  found = re.fullmatch(r'([^,/]+:[1-9]\d{0,4}),(\d{1,6}),(\d{1,6})', where)
  if found and int(found[3]) >= int(found[2]):
    raise ValueError(
      f'--distributed is {where!r}: the number of a process is from 0 to'
      f' {int(found[2]) - 1} where there are {found[2]}'
    )
  if where != 'auto' and not found:
    raise ValueError(
      f'--distributed is {where!r}: give auto, or the address of process 0, how'
      ' many there are and the number of this one from 0, as in'
      ' 10.0.0.1:1234,2,0'
    )
  given = (found[1], int(found[2]), int(found[3])) if found else ()
  if given:
    _look_for(*given)
  try:
    jax.distributed.initialize(*given)
  except Exception as error:  # whatever an environment by halves provokes
    raise ValueError(
      f'--distributed={where}: this process does not find the others'
      f' ({error}); with HOST:PORT,COUNT,NUMBER nothing is left to be found out'
    ) from error


def _look_for(address: str, count: int, number: int) -> None:
  """Waits for process 0, or finds its port free: JAX would abort in minutes.

  Raises:
    ValueError: the address is none, is not answered, or is taken.
  """
  host, _, port = address.rpartition(':')
  try:
    if number == 0:
      with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(('', int(port)))
      print(
        f'waiting at {address} for the others of {count} processes, for five'
        ' minutes at most',
        file=sys.stderr,
      )
      return
    socket.getaddrinfo(host, int(port))
    end = time.monotonic() + PATIENCE
    while True:
      try:
        socket.create_connection((host, int(port)), 5).close()
        return
      except OSError:
        if time.monotonic() > end:
          raise
        time.sleep(0.5)
  except (OSError, OverflowError) as error:
    what = 'the port is not free' if number == 0 else 'process 0 is not there'
    raise ValueError(f'{address}: {what} ({error})') from error


def lost(error: BaseException) -> bool:
  """Whether it says that another process is gone."""
  return (
    jax.process_count() > 1
    and isinstance(error, jax.errors.JaxRuntimeError)
    and any(x in str(error) for x in ('Gloo', 'UNAVAILABLE', 'Connection'))
  )


def leave(code: int) -> NoReturn:
  """Ends one of several processes, though others may wait for it for good.

  JAX waits for them, too: those that end likewise are given a few seconds.
  """
  ending = threading.Thread(target=jax.distributed.shutdown, daemon=True)
  ending.start()
  ending.join(10)
  sys.stderr.flush()
  os._exit(code)


def first() -> bool:
  """Whether this is process 0, which writes what one process is to write."""
  return jax.process_index() == 0


def agreed(value: int) -> int:
  """What process 0 says, everywhere: of a file that others may not see yet."""
  if jax.process_count() == 1:
    return value
  return int(multihost_utils.broadcast_one_to_all(np.array(value)))


def by_first(action: Callable[[], Any], what: str) -> None:
  """Does something in process 0, for which all wait.

  Args:
    action: done there.
    what: it is, for the message.

  Raises:
    RuntimeError: it failed, and this is another process; the first has its own
      error.
  """
  with in_turn(what):
    if first():
      action()


@contextlib.contextmanager
def in_turn(what: str) -> Iterator[None]:
  """Process 0 goes through it first; the others then find what it made.

  Args:
    what: it is, for the message.

  Raises:
    RuntimeError: process 0 failed, and this is another.
  """
  if not first():
    if not agreed(True):
      raise RuntimeError(f'process 0 says why it failed: {what}')
    yield
    return
  try:
    yield
  except Exception:  # an interrupt goes to all, who then do not answer
    agreed(False)
    raise
  agreed(True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
  """`files.alone`, which process 0 holds for all.

  Raises:
    RuntimeError: another program holds it.
  """
  with contextlib.ExitStack() as stack:
    by_first(
      lambda: stack.enter_context(files.alone(folder)), f'locking {folder}'
    )
    yield


# Of calls in this process: JAX's runtime settles on one that is ahead of all.
_CALLS = itertools.count(1)


class Preemption:
  """Whether a scheduler wants the machine back; if so, the process ends."""

  def __init__(self, name: str):
    """Takes the name of what is saved then."""
    self._name, self._asked, self._step = name, False, None
    self._heeding, self._before = False, None

  def __enter__(self) -> Preemption:
    """Heeds SIGTERM from now on; of many processes, JAX's runtime does."""
    one = jax.process_count() == 1
    if one and threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGTERM, self._ask)
      self._heeding = True
    return self

  def __exit__(self, kind, *_) -> None:
    """Ends the process if that was asked, whether or not it was done anyway."""
    if self._heeding:
      # None is a handler that is not Python's.
      signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
    if self._asked and kind is None:
      if first():
        where = f' at step {self._step}' if self._step else ''
        print(
          f'{self._name} is saved{where}, and it ends as SIGTERM asks: the same'
          ' command goes on',
          file=sys.stderr,
        )
      raise SystemExit(128 + signal.SIGTERM)

  def asked(self, step: int) -> bool:
    """Whether to end behind this step, as all processes are told."""
    self._step = step
    if jax.process_count() > 1:
      self._asked |= multihost_utils.reached_preemption_sync_point(next(_CALLS))
    return self._asked

  def _ask(self, *_) -> None:
    self._asked = True

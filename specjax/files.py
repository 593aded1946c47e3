"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import BinaryIO

LOCK = '.lock'  # in a folder that one process writes to


@contextlib.contextmanager
def atomic(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a binary file that takes its name only once it is complete.

  A process that dies half way, or two that write the same file, never leave a
  reader with part of one. Missing parent folders are made.

  Args:
    path: where the file is to be; what stands there is replaced.

  Yields:
    The file to write to.

  Raises:
    OSError: it cannot be written, as on a full disk; what stood there still
      does.
  """
  path = pathlib.Path(path)
  # In the same folder, because a rename is atomic only within a filesystem.
  partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, 'wb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except OSError as error:
    raise OSError(f'{path} could not be written ({error})') from error
  finally:
    with contextlib.suppress(OSError):  # what went wrong before is told
      partial.unlink()


@contextlib.contextmanager
def whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """A folder to write into, which then takes another's name and place.

  What stood there is replaced. A process that dies half way leaves it as it
  was, or, between two renames, beside the new one under a hidden name; the next
  one clears up.

  Args:
    folder: where it is to be.

  Yields:
    The folder to write into.

  Raises:
    RuntimeError: another process writes it.
  """
  partial, old = (
    folder.with_name(f'.{folder.name}.{kind}') for kind in ('partial', 'old')
  )
  with alone(partial):
    for file in partial.iterdir():
      if file.name != LOCK:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    yield partial
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
      folder.rename(old)
    partial.rename(folder)
    (folder / LOCK).unlink()
    shutil.rmtree(old, ignore_errors=True)


def sha256(path: str | os.PathLike) -> str:
  """SHA-256 of a file, in hexadecimal.

  Raises:
    FileNotFoundError: there is none.
  """
  if not os.path.isfile(path):
    raise FileNotFoundError(f'there is no file {path}')
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
  """Keeps other processes out of a folder that one writes to.

  The lock goes with the process, however it ends.

  Args:
    folder: made if need be.

  Raises:
    RuntimeError: another process holds it.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / LOCK, 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise RuntimeError(
        f'another process is writing to {folder}: wait for it, or name another'
        ' folder'
      ) from error
    yield

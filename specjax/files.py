"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def atomic(path: str | os.PathLike) -> Iterator[BinaryIO]:
  """Opens a binary file that takes its name only once it is complete.

  A process that dies half way, or two that write the same file, never leave a
  reader with part of one. Missing parent folders are made.

  Args:
    path: where the file is to be; what stands there is replaced.

  Yields:
    The file to write to.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # In the same folder, because a rename is atomic only within a filesystem.
  partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  try:
    with open(partial, 'wb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)

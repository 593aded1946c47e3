"""Local text: documents from files, and which split each belongs to."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence

SPLITS = ('train', 'validation', 'test')
HELD_OUT = 0.05  # the share of the documents in each of the last two splits
ENOUGH = 20  # files, for each to stay one document
MAX_CHARACTERS = 16 * 1024  # of a document, where there are fewer

_NOT_LIBRARY = frozenset(
  ('test', 'tests', 'idle_test', 'site-packages', 'dist-packages')
)


@dataclasses.dataclass(frozen=True)
class Document:
  """A text and where it comes from."""

  name: str
  text: str


def stdlib() -> Iterator[Document]:
  """The source files of the running Python's standard library, sorted.

  Tests are left out, and what the build of this Python generated.
  """
  root = pathlib.Path(sysconfig.get_path('stdlib'))
  for path in sorted(root.rglob('*.py')):
    local = path.relative_to(root)
    # Its settings differ from machine to machine.
    generated = path.name.startswith('_sysconfigdata')
    if not generated and _NOT_LIBRARY.isdisjoint(local.parts):
      yield Document(local.as_posix(), _read(path))


def files(pattern: str) -> Iterator[Document]:
  """Local text files, sorted by path.

  Args:
    pattern: a glob; `~` and `**` are expanded.

  Yields:
    One document a file. Of fewer than `ENOUGH` files, pieces of at most
    `MAX_CHARACTERS`, cut at line ends where there are any, so that one large
    file has enough for three splits; pieces of one file may then lie in two.

  Raises:
    ValueError: no file matches.
  """
  found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
  paths = [path for path in found if os.path.isfile(path)]
  if not paths:
    raise ValueError(f'no file matches files:{pattern}')
  for path in paths:
    text = _read(path)
    pieces = [text] if len(paths) >= ENOUGH else _pieces(text)
    for i, piece in enumerate(pieces):
      yield Document(f'{path}#{i}', piece)


def assign(
  documents: Sequence[Document], test: Sequence[Document] = ()
) -> dict[str, list[Document]]:
  """Splits documents by a hash of their text.

  Args:
    documents: at least three, of distinct text.
    test: the last split, if it is not to be taken from them.

  Returns:
    The documents of each split, in the order given.
  """
  draws = {
    document: int.from_bytes(digest(document.text)[:8], 'big') / 2**64
    for document in documents
  }
  order = sorted(documents, key=draws.__getitem__)
  held = [sum(u < n * HELD_OUT for u in draws.values()) for n in (1, 2)]
  validation = max(1, held[0])
  split_of = dict.fromkeys(order, 'train')
  split_of |= dict.fromkeys(order[:validation], 'validation')
  if not test:
    count = max(1, held[1] - validation)
    split_of |= dict.fromkeys(order[validation:][:count], 'test')
  splits = {
    split: [d for d in documents if split_of[d] == split] for split in SPLITS
  }
  return {**splits, 'test': list(test)} if test else splits


def digest(text: str) -> bytes:
  """SHA-256 of a text."""
  return hashlib.sha256(text.encode()).digest()


def _pieces(text: str) -> Iterator[str]:
  start = 0
  while start < len(text):
    stop = start + MAX_CHARACTERS
    if stop < len(text):
      stop = text.rfind('\n', start, stop) + 1 or stop
    yield text[start:stop]
    start = stop


def _read(path: str | os.PathLike) -> str:
  return pathlib.Path(path).read_bytes().decode('utf-8', 'replace')

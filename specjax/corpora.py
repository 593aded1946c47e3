"""Corpora: documents in three splits, stored by tensorflow-datasets.

A corpus is chosen by a string:

- `stdlib`: the source of the running Python's standard library, without its
  tests. It is on every machine and its hash differs between Python versions.
- `files:GLOB`: local text files, such as `files:~/books/**/*.txt`.
- `tfds:NAME` or `NAME`: a set of the tensorflow-datasets catalogue that has a
  text field, such as `tfds:wiki40b/en`.
- `none`: no text, for a draft that learns on what its target writes.

TensorFlow is not needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import io
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

from specjax import documents

DATA_DIR = '~/.cache/specjax'

_FILES = 'files:'
NONE = 'none'
EMPTY = 4096  # documents in each of its splits: as many prompts there are

# Part of the corpus hash: raise it when documents are cut or split otherwise.
_VERSION = '1.0.0'


class Documents(Sequence[str]):
  """The texts of one split, read from disk when asked for."""

  def __init__(self, source: Sequence[Mapping[str, Any]], field: str):
    """Wraps a random-access source whose examples have a text `field`."""
    self._source = source
    self._field = field

  def __len__(self) -> int:
    """Number of documents."""
    return len(self._source)

  def __getitem__(self, index: int) -> str:
    """The text of document `index`."""
    if not 0 <= index < len(self):
      raise IndexError(f'document {index} of {len(self)}')
    text = self._source[index][self._field]
    # Sources on disk hold bytes, those that tfds mocks hold strings.
    return text if isinstance(text, str) else text.decode('utf-8', 'replace')


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Documents in three splits, none of them in two.

  Attributes:
    name: the string that chose it.
    hash: hexadecimal SHA-256 of the documents and their split; for a set of
      the catalogue, of its name, version, sizes and text field.
    directory: where what is derived from the corpus may be cached.
    splits: the documents of 'train', 'validation' and 'test'.
  """

  name: str
  hash: str
  directory: pathlib.Path
  splits: Mapping[str, Documents]

  def describe(self) -> dict[str, Any]:
    """Name, hash and number of documents by split, to be kept with a run."""
    counts = {split: len(texts) for split, texts in self.splits.items()}
    return {'name': self.name, 'hash': self.hash, 'documents': counts}


def load(
  name: str,
  *,
  data_dir: str = DATA_DIR,
  text_field: str | None = None,
  test: str | None = None,
) -> Corpus:
  """Opens a corpus, preparing it if no earlier call with this folder did.

  Args:
    name: `stdlib`, `files:GLOB`, `tfds:NAME` or `NAME`.
    data_dir: folder of prepared sets. Local corpora are keyed by hash there,
      so a file that changes makes a new corpus.
    text_field: field that holds the text of a catalogue set; needed only where
      there are several and none is called `text`.
    test: `files:GLOB` of the test split of local text, which is then not cut
      from the rest.

  Returns:
    The corpus. Local documents are split by a hash of their text, which does
    not depend on the other documents (a corpus too small for that has one
    document in each of the last two splits), and repeated ones are dropped. A
    catalogue set keeps its own splits; those it lacks are cut from the end of
    its train split by position, so texts that it repeats may be on both sides.

  Raises:
    ValueError: no file matches, the text is too little for three splits, a
      test split is given for what has its own, or the name, the field or the
      splits of a catalogue set are not there.
    RuntimeError: a catalogue set could not be downloaded or read.
  """
  root = pathlib.Path(data_dir).expanduser().absolute()
  local = name.startswith(_FILES)
  if test and not (local and test.startswith(_FILES)):
    raise ValueError(
      f'a test split of its own, {test!r}, is for local text: both it and the'
      f' corpus, {name!r}, must be {_FILES}GLOB'
    )
  if name == 'stdlib':
    return _local(name, documents.stdlib(), root)
  if local:
    apart = documents.files(test.removeprefix(_FILES)) if test else ()
    found = documents.files(name.removeprefix(_FILES))
    return _local(name, found, root, tuple(apart))
  if name == NONE:
    return _none(root)
  return _catalogue(name.removeprefix('tfds:'), root, text_field)


class SpecjaxText(tfds.core.GeneratorBasedBuilder):
  """Writes texts that are in memory as an `array_record` set."""

  VERSION = tfds.core.Version(_VERSION)

  def __init__(
    self,
    *,
    texts: Sequence[documents.Document],
    test: Sequence[documents.Document] = (),
    **kwargs,
  ):
    """Takes the documents to write, and what every builder takes."""
    self._texts, self._test = texts, test
    super().__init__(file_format='array_record', **kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description='Local text, one document an example.',
      features=tfds.features.FeaturesDict(
        {'name': tfds.features.Text(), 'text': tfds.features.Text()}
      ),
      # With integer keys, keeps the order of the documents.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager
    splits = documents.assign(self._texts, self._test)
    return {
      name: self._generate_examples(texts) for name, texts in splits.items()
    }

  def _generate_examples(
    self, texts: Sequence[documents.Document]
  ) -> Iterator[tuple[int, dict[str, str]]]:
    for i, text in enumerate(texts):
      yield i, dataclasses.asdict(text)


def _local(
  name: str,
  found: Iterable[documents.Document],
  root: pathlib.Path,
  test: Sequence[documents.Document] = (),
) -> Corpus:
  # Repeats go, so that no text is both trained on and held out.
  apart = {d.text: d for d in test if d.text.strip()}
  unique = {d.text: d for d in found if d.text.strip()}
  texts = [d for text, d in unique.items() if text not in apart]
  test = list(apart.values())
  if len(texts) < len(documents.SPLITS):
    raise ValueError(
      f'corpus {name!r} has {len(texts)} documents, which leaves a split empty:'
      ' give at least three files of different text, or one of more than '
      f'{3 * documents.MAX_CHARACTERS} characters'
    )
  hasher = hashlib.sha256(_VERSION.encode())
  for text in texts:
    hasher.update(documents.digest(text.text))
  if test:
    hasher.update(b'test')
    for text in test:
      hasher.update(documents.digest(text.text))
  directory = root / hasher.hexdigest()[:16]
  builder = SpecjaxText(data_dir=directory, texts=texts, test=test)
  _prepare(builder, quiet=True)
  splits = {
    split: Documents(builder.as_data_source(split), 'text')
    for split in documents.SPLITS
  }
  return Corpus(name, hasher.hexdigest(), directory, splits)


def _none(root: pathlib.Path) -> Corpus:
  digest = hashlib.sha256(f'{_VERSION} {NONE} {EMPTY}'.encode()).hexdigest()
  empty = Documents([{'text': ''}] * EMPTY, 'text')
  splits = dict.fromkeys(documents.SPLITS, empty)
  return Corpus(NONE, digest, root / digest[:16], splits)


def _catalogue(name: str, root: pathlib.Path, field: str | None) -> Corpus:
  # Without TensorFlow, tfds stops importing its builders before those of text.
  importlib.import_module('tensorflow_datasets.text')
  try:
    builder = tfds.builder(name, data_dir=root, file_format='array_record')
  except (
    tfds.core.registered.DatasetNotFoundError,
    ImportError,
    ValueError,
  ) as error:
    raise ValueError(
      f'tensorflow-datasets has no set {name!r} that it can build here: take '
      "another of its catalogue, 'stdlib' or 'files:GLOB' "
      f'({_first_line(error)})'
    ) from error
  field = _text_field(name, builder.info.features, field)
  try:
    _prepare(builder, quiet=False)
  except Exception as error:  # Whatever the script of the set may raise.
    raise RuntimeError(
      f'could not prepare {name!r} ({type(error).__name__}: '
      f'{_first_line(error)}): prepare it on a connected machine with `tfds '
      f'build {name} --data_dir=DIR --file_format=array_record` and copy DIR '
      f"to {root}, or use 'stdlib' or 'files:GLOB'"
    ) from error
  splits = {
    split: Documents(builder.as_data_source(part), field)
    for split, part in _slices(name, builder.info.splits).items()
  }
  counts = {split: len(texts) for split, texts in splits.items()}
  if not all(counts.values()):
    raise ValueError(f'{name!r} is too small for three splits: {counts}')
  identity = f'{builder.info.full_name} {field} {counts}'
  digest = hashlib.sha256(identity.encode()).hexdigest()
  return Corpus(name, digest, root / digest[:16], splits)


def _text_field(
  name: str, features: tfds.features.FeaturesDict, field: str | None
) -> str:
  texts = sorted(
    k for k, v in features.items() if isinstance(v, tfds.features.Text)
  )
  if field is None and len(texts) == 1:
    return texts[0]
  field = field or 'text'
  if field not in features:
    raise ValueError(
      f'{name!r} has no field {field!r}: choose text_field from '
      f'{texts or sorted(features)}'
    )
  return field


def _slices(name: str, available: Iterable[str]) -> dict[str, str]:
  # Held-out splits that the set lacks are cut from the end of its train split.
  if 'train' not in available:
    raise ValueError(f'{name!r} has no train split, only {sorted(available)}')
  parts = {split: split for split in documents.SPLITS}
  end, step = 100, round(100 * documents.HELD_OUT)
  for split in documents.SPLITS[1:]:
    if split not in available:
      parts[split] = f'train[{end - step}%:{end}%]'
      end -= step
  parts['train'] = f'train[:{end}%]'
  return parts


def _prepare(builder: tfds.core.DatasetBuilder, quiet: bool) -> None:
  # tfds writes beside the folder and renames it at the end, so a folder that
  # is there is whole, and another process may have got there first.
  tfds.display_progress_bar(not quiet)
  log = io.StringIO() if quiet else sys.stderr
  config = tfds.download.DownloadConfig(try_download_gcs=False)
  try:
    # It announces itself on standard output, which belongs to the program.
    with contextlib.redirect_stdout(log):
      builder.download_and_prepare(download_config=config)
  except OSError:
    if not builder.data_path.exists():
      raise
    builder.info.read_from_directory(builder.data_path)


def _first_line(error: Exception) -> str:
  return str(error).strip().partition('\n')[0]

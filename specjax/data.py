"""From a corpus to batches: ids, windows, shuffled batches, prompts.

Documents are joined in order, each ended by the end-of-document id, and cut
into windows of one length. A model must not attend across the segments of a
window: `Batch.segments` says which tokens belong together, and `Batch.weight`
which tokens have something of their own document before them to be predicted
from.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specjax import files, sharding
from specjax.corpora import Corpus
from specjax.tokenizers import Tokenizer
from specjax.types import Batch

_CHUNK = 256  # documents that are encoded in one parallel call


def encode_split(
  corpus: Corpus,
  split: str,
  tokenizer: Tokenizer,
  progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
  """Encodes a split, or maps into memory what an earlier call encoded.

  Args:
    corpus: the documents.
    split: 'train', 'validation' or 'test'.
    tokenizer: encodes each document; its `start` is put before each and its
      `eos_id` after.
    progress: called with the documents done and the documents there are.

  Returns:
    `[N]` read-only ids, as 16-bit integers if they fit.
  """
  name = f'{corpus.hash[:16]}-{tokenizer.hash[:16]}-{split}.npy'
  path = corpus.directory / 'ids' / name
  if not path.exists():
    documents = corpus.splits[split]
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    chunks = []
    for start in range(0, len(documents), _CHUNK):
      stop = min(start + _CHUNK, len(documents))
      texts = [documents[i] for i in range(start, stop)]
      for ids in tokenizer.encode_batch(texts):
        document = [*tokenizer.start, *ids, tokenizer.eos_id]
        chunks.append(np.array(document, dtype))
      if progress is not None:
        progress(stop, len(documents))
    with files.atomic(path) as file:
      np.save(file, np.concatenate(chunks))
  return np.load(path, mmap_mode='r')


class Windows(Sequence[Batch]):
  """Consecutive windows of a split, a random-access source of rows `[T]`.

  Every token is in exactly one window; the last is padded. The first token of
  a window has weight 0, since what precedes it is in another window, so one
  token in `T` is never predicted.
  """

  def __init__(self, ids: np.ndarray, eos_id: int, length: int):
    """Cuts ids into windows.

    Args:
      ids: `[N]` documents, each ended by `eos_id`.
      eos_id: where documents end.
      length: `T`, the tokens in a window.

    Raises:
      ValueError: no ids, or windows too short to predict anything in.
    """
    if length < 2:
      raise ValueError(f'windows of {length} tokens have nothing to predict')
    if not len(ids):
      raise ValueError('there are no tokens to cut into windows')
    self._ids = ids
    self._eos_id = eos_id
    self._length = length

  def __len__(self) -> int:
    """Number of windows."""
    return -(-len(self._ids) // self._length)

  def __getitem__(self, index: int) -> Batch:
    """Window `index`: tokens, segments and weight `[T]`."""
    if not 0 <= index < len(self):
      raise IndexError(f'window {index} of {len(self)}')
    start = index * self._length
    ids = np.asarray(self._ids[start : start + self._length], np.int32)
    tokens = np.zeros(self._length, np.int32)
    tokens[: len(ids)] = ids
    segments = np.zeros(self._length, np.int32)
    segments[0] = 1
    segments[1 : len(ids)] = 1 + np.cumsum(ids[:-1] == self._eos_id)
    return Batch(tokens, segments, _weight(segments))


class Rows:
  """An endless sequence of shuffled rows, reshuffled every epoch.

  Row `i` is a function of the windows, the seed and `i` alone. Every window is
  in each epoch exactly once.
  """

  def __init__(self, windows: Sequence[Batch], seed: int):
    """Takes a source of rows `[T]`, such as `Windows`."""
    source = grain.MapDataset.source(windows).seed(seed)
    self._dataset = source.shuffle().repeat()

  def __getitem__(self, index: int) -> Batch:
    """Row `index`, counted from 0 over all epochs: arrays `[T]`."""
    return self._dataset[index]


class Batches:
  """An endless sequence of batches of `Rows`.

  The state of an iteration is the number of the next batch: keep that in a
  checkpoint, and continue from it. Where the batch size does not divide the
  number of windows, a batch holds the end of one epoch and the start of the
  next.
  """

  def __init__(
    self,
    windows: Sequence[Batch],
    batch_size: int,
    seed: int,
    mesh: Mesh | None = None,
  ):
    """Takes a source of rows `[T]`, such as `Windows`, and where they go."""
    self._rows, self._size = Rows(windows, seed), batch_size
    self._mesh = mesh

  def __getitem__(self, index: int) -> Batch:
    """Batch `index`, counted from 0 over all epochs: arrays `[B, T]`."""
    start = index * self._size
    places = [(self._rows, i) for i in range(start, start + self._size)]
    return stack(Picked(places), self._mesh)


class Picked(Sequence[Batch]):
  """Rows of several sources, each read when it is asked for."""

  def __init__(self, places: Sequence[tuple[Any, int]]):
    """Takes sources, and the number of the row in each."""
    self._places = places

  def __len__(self) -> int:
    """Number of rows."""
    return len(self._places)

  def __getitem__(self, index: int) -> Batch:
    """Row `index`: arrays `[T]`."""
    source, number = self._places[index]
    return source[number]


def described(batch: int, window: int, mesh: Mesh | None = None) -> Batch:
  """Shapes, dtypes and places of what `stack` makes of rows `[window]`."""
  place = NamedSharding(mesh, sharding.ROWS) if mesh else None
  dtypes = Batch(np.int32, np.int32, np.float32)
  return jax.tree.map(
    lambda t: jax.ShapeDtypeStruct((batch, window), t, sharding=place), dtypes
  )


def stack(rows: Sequence[Batch], mesh: Mesh | None = None) -> Batch:
  """Rows `[T]` as one batch `[B, T]`, divided by rows.

  A process asks only for the rows of its own devices, and for each once.

  Args:
    rows: B of them, read when they are asked for.
    mesh: where the batch goes; None: NumPy arrays.
  """
  read = functools.cache(rows.__getitem__)
  if mesh is None:
    own = map(read, range(len(rows)))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *own)
  place = NamedSharding(mesh, sharding.ROWS)
  mine = place.addressable_devices_indices_map((len(rows),)).values()
  like = read(next(iter(mine))[0].start or 0)

  def field(name, one):
    def part(index):
      chosen = range(len(rows))[index[0]]
      return np.stack([getattr(read(i), name) for i in chosen])

    shape = len(rows), *np.shape(one)
    return jax.make_array_from_callback(shape, place, part)

  return Batch(*map(field, Batch._fields, like))


def in_order(windows: Sequence[Batch], batch_size: int) -> Iterator[Batch]:
  """Goes once through the windows, for evaluation.

  Args:
    windows: a source of rows `[T]`.
    batch_size: `B`.

  Yields:
    Batches `[B, T]`, all of one shape: the last is filled up with rows of
    padding, which have weight 0 throughout.
  """
  for start in range(0, len(windows), batch_size):
    stop = min(start + batch_size, len(windows))
    rows = [windows[i] for i in range(start, stop)]
    blank = jax.tree.map(np.zeros_like, rows[0])
    rows += [blank] * (batch_size - len(rows))
    yield stack(rows)


def pad(
  sequences: Sequence[Sequence[int]],
  prompt_lengths: Sequence[int],
  length: int | None = None,
) -> Batch:
  """Makes a batch of sequences whose weights cover only what was generated.

  Args:
    sequences: B lists of ids, each a prompt and its continuation.
    prompt_lengths: tokens of each that were given and not generated.
    length: `T`; the longest sequence by default.

  Returns:
    `[B, T]`, padded on the right. A token has weight 1 from its prompt's
    length to its sequence's end, except a first token, which nothing precedes.

  Raises:
    ValueError: a sequence is longer than `length` or shorter than its prompt.
  """
  lengths = np.array([len(sequence) for sequence in sequences])
  prompts = np.array(prompt_lengths)
  length = int(lengths.max()) if length is None else length
  if lengths.max() > length or prompts.shape != lengths.shape:
    raise ValueError(
      f'{len(prompts)} prompts and {len(lengths)} sequences of up to '
      f'{lengths.max()} tokens do not fit in rows of {length}'
    )
  if (prompts > lengths).any():
    raise ValueError(f'prompts of {prompts} tokens in sequences of {lengths}')
  position = np.arange(length)
  segments = (position < lengths[:, None]).astype(np.int32)
  tokens = np.zeros(segments.shape, np.int32)
  tokens[segments == 1] = np.concatenate(sequences)
  weight = _weight(segments) * (position >= prompts[:, None])
  return Batch(tokens, segments, weight.astype(np.float32))


def pack(
  sequences: Sequence[Sequence[int]],
  prompt_lengths: Sequence[int],
  length: int,
) -> list[Batch]:
  """Joins sequences into windows, as many into each as fit in their order.

  Args:
    sequences: lists of ids, each a prompt and its continuation.
    prompt_lengths: tokens of each that were given and not generated.
    length: `T`.

  Returns:
    Rows `[T]`, padded on the right. Every sequence is a segment of one row,
    weighed as in `pad`.

  Raises:
    ValueError: a sequence is longer than `length` or shorter than its prompt.
  """
  each = pad(sequences, prompt_lengths, length)
  rows, used, number = [], length, 0
  for size, *own in zip(map(len, sequences), *each, strict=True):
    if used + size > length:
      rows.append(jax.tree.map(np.zeros_like, Batch(*own)))
      used, number = 0, 0
    number += 1
    tokens, segments, weight = (x[:size] for x in own)
    own = tokens, segments * number, weight
    for x, values in zip(rows[-1], own, strict=True):
      x[used : used + size] = values
    used += size
  return rows


def prompts(
  ids: np.ndarray,
  eos_id: int,
  count: int,
  length: int,
  seed: int | Sequence[int],
) -> np.ndarray:
  """Takes prompts from documents.

  Args:
    ids: `[N]` documents, each ended by `eos_id`.
    eos_id: where documents end.
    count: `B`.
    length: `T`.
    seed: which documents are taken; one number or several.

  Returns:
    `[B, T]` int32, no two of which overlap: the starts of documents drawn
    without replacement, and only if there are too few of those, their second
    stretches of `T` tokens, and so on.

  Raises:
    ValueError: the documents have not enough such stretches.
  """
  ends = np.flatnonzero(ids == eos_id)
  starts = np.concatenate([[0], ends[:-1] + 1])
  sizes = (ends - starts) // length
  order = np.random.default_rng(seed).permutation(len(starts))
  # All starts come before all second stretches.
  every = (
    starts[i] + depth * length
    for depth in range(max(sizes, default=0))
    for i in order[sizes[order] > depth]
  )
  taken = list(itertools.islice(every, count))
  if len(taken) < count:
    raise ValueError(
      f'{count} prompts of {length} tokens were asked for, but {len(starts)} '
      f'documents of {len(ids)} tokens have only {len(taken)}'
    )
  return np.stack([ids[i : i + length] for i in taken]).astype(np.int32)


def require_as_many(count: int, vocab_size: int) -> None:
  """Refuses a draft of more tokens than its tokenizer has.

  Raises:
    ValueError: `count` is above `vocab_size`.
  """
  if count > vocab_size:
    raise ValueError(
      f'draft.vocab_size is {count}: the tokenizer has {vocab_size} tokens'
    )


def _weight(segments: np.ndarray) -> np.ndarray:
  # A token has something to be predicted from if its neighbour on the left is
  # of the same segment. Padding, segment 0, is not to be predicted.
  weight = np.zeros(segments.shape, np.float32)
  weight[..., 1:] = segments[..., 1:] == segments[..., :-1]
  return weight * (segments > 0)


def frequent(ids: np.ndarray, vocab_size: int, count: int) -> list[int]:
  """The most frequent tokens of a text, by id; of equals the lower ids.

  Args:
    ids: `[N]`.
    vocab_size: V.
    count: how many.

  Raises:
    ValueError: there are fewer.
  """
  require_as_many(count, vocab_size)
  times = np.bincount(ids, minlength=vocab_size)
  return np.sort(np.argsort(-times, kind='stable')[:count]).tolist()

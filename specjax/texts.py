"""Text that models write: many prompts, continued, and kept in files."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import files, generation, logs, runs, sharding, verify
from specjax.types import Drafter, Key, LanguageModel, Warp

AT_ONCE = 64  # rows decoded together; what memory they take does not grow
ROUNDS = 16  # between two looks at how far they are
# What NumPy raises for a file that is not whole.
_BROKEN = OSError, EOFError, TypeError, ValueError, zipfile.BadZipFile


class Text(NamedTuple):
  """Prompts of one length and what was written behind them.

  Attributes:
    tokens: `[B, S]` int32; a row's text is `tokens[b, :length[b]]`.
    length: `[B]`, prompt included.
    rounds: `[B]` passes of the writer that it took.
  """

  tokens: np.ndarray
  length: np.ndarray
  rounds: np.ndarray | None = None

  def sequences(self) -> list[list[int]]:
    """The rows without what lies behind their ends."""
    return [
      row[:end].tolist()
      for row, end in zip(self.tokens, self.length, strict=True)
    ]


def write(
  writer: LanguageModel,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  *,
  key: Key,
  max_new_tokens: int,
  warp: Warp,
  eos_id: int,
  title: str,
  mesh: Mesh | None = None,
) -> Text:
  """Continues many prompts of one length by rejection, and shows how far it is.

  Args:
    writer: whose law the text has.
    drafter: what proposes.
    prompts: B lists of ids.
    key: folded with a row's number.
    max_new_tokens: for all rows.
    warp: of the writer.
    eos_id: ends a row, and is part of it: what would follow is no text that the
      models are trained on.
    title: of the progress.
    mesh: on which the rows are divided, if any; the models lie there.

  Returns:
    The text; as `generation.generate` gives it, `AT_ONCE` rows at a time.
  """
  count = len(prompts)
  size = sharding.whole_parts(min(count, AT_ONCE), mesh)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(
    key, jnp.arange(-(-count // size) * size)
  )
  parts = []
  with logs.Progress(count * max_new_tokens, title, unit='tokens') as progress:
    for start in range(0, count, size):
      # The last rows are filled up, so that there is one program for all.
      some = [prompts[i % count] for i in range(start, start + size)]
      state = generation.start(
        writer,
        drafter,
        some,
        key=keys[start : start + size],
        max_new_tokens=max_new_tokens,
        mesh=mesh,
      )
      state = _advance(
        writer, drafter, warp, eos_id, state, progress, count - start, mesh
      )
      done = generation.finish(state, [len(prompt) for prompt in some])
      parts.append(Text(done.tokens, done.length, done.stats.rounds))
  return Text(*(np.concatenate(x)[:count] for x in zip(*parts, strict=True)))


def _advance(writer, drafter, warp, eos_id, state, progress, wanted, mesh):
  """To the end, a few rounds at a time; `wanted` of the rows are counted."""
  eos = generation.end_ids(writer, eos_id)
  rule = verify.as_pytree(verify.rejection)

  def look():
    # Copies: what they are read from is given away.
    return map(np.copy, sharding.fetch((state.length, state.done)))

  before, done = look()
  while not done.all():
    state = generation.advance(
      writer, drafter, rule, warp, eos, state, ROUNDS, mesh=mesh
    )
    length, done = look()
    progress.advance(int((length - before)[:wanted].sum()))
    before = length
  return state


def save(path: Path, text: Text) -> None:
  """Writes a file of text, whole or not at all."""
  with files.atomic(path) as file:
    np.savez(file, **{k: v for k, v in text._asdict().items() if v is not None})


def load(path: Path) -> Text:
  """Reads what `save` wrote.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is damaged.
  """
  if not path.exists():
    raise FileNotFoundError(f'there is no file {path}')
  try:
    return Text(**dict(np.load(path)))
  except _BROKEN as error:
    raise ValueError(
      f'{path} is damaged ({error}): delete it, it will be written again'
    ) from error


def save_made(
  path: Path,
  text: Text,
  made_from: Mapping[str, Any],
  measured: Mapping[str, float],
) -> None:
  """Saves a text and, as JSON beside it, where it comes from.

  Args:
    path: of the text.
    text: the text.
    made_from: all that it depends on, JSON values.
    measured: what it cost, for the record.
  """
  save(path, text)
  record = {
    'made_from': made_from,
    'content': fingerprint(text),
    **measured,
    'versions': runs.versions(),
  }
  runs.write_json(path.with_suffix('.json'), record)


def load_made(path: Path, made_from: Mapping[str, Any]) -> Text:
  """Loads what `save_made` wrote if it was made from that.

  Args:
    path: of the text.
    made_from: as it was given; a key that is left out may be anything.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged, or made from something else.
  """
  record = runs.read_json(path.with_suffix('.json'))
  text = load(path)
  # The record may be that of an earlier file, if a kill came between the two.
  if record['content'] != fingerprint(text):
    raise ValueError(f'{path} is not what its record says')
  old = dict(runs.leaves('', record['made_from']))
  differ = [
    f'{key[1:]}: {old.get(key, runs.ABSENT)} -> {value}'
    for key, value in runs.leaves('', made_from)
    if old.get(key, runs.ABSENT) != value
  ]
  if differ:
    what = '; '.join(differ)
    raise ValueError(f'{path} was made from something else ({what})')
  return text


def fingerprint(tree: Any) -> str:
  """SHA-256 of a pytree's arrays and of their names."""
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(sharding.fetch(leaf))
    name = jax.tree_util.keystr(path)
    digest.update(f'{name} {array.dtype} {array.shape}'.encode())
    digest.update(array.tobytes())
  return digest.hexdigest()

"""Where the rows of a draft's batches come from: corpus, target, draft.

A source is a function `source(step, model)` of the number of an update and of
the model before it. It gives rows `[T]` that may be read without end, and the
step since which they are the same. Two of them write: the target continues
prompts by speculative decoding, the draft in training its drafter from the
second time on, so its law is the target's whatever the draft and it costs less
the more the draft has learnt (DistillSpec, Zhou et al. 2024, arXiv 2310.08461);
or the draft continues them alone, and learns on text of its own (GKD, Agarwal
et al. 2024, arXiv 2306.13649).

Every `refresh` steps they write anew, with the model of that step. Hence a
batch is a function of the configuration, of its number and of that model. What
was written is kept: a run that is killed and goes on in between has that model
no longer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import data, logs, processes, texts, warps
from specjax.drafters.none import NoDrafter
from specjax.types import Batch, Drafter, LanguageModel

# Of the rows of a batch; the sources by name, in the order that they are in it.
CORPUS_ONLY = {'corpus': 1.0, 'target': 0.0, 'draft': 0.0}

Source = Callable[[int, Any], tuple[Sequence[Batch], int]]


class Writing(NamedTuple):
  """What is written, and how often.

  Attributes:
    refresh: steps between two generations.
    sequences: that one generation has.
    prompt_length: tokens of each that are given.
    tokens: that follow it at most.
    temperature: of the law they are drawn from.
  """

  refresh: int
  sequences: int
  prompt_length: int
  tokens: int
  temperature: float


class Corpus:
  """Shuffled windows of the corpus, whatever the model."""

  def __init__(self, windows: Sequence[Batch], seed: int):
    """Takes rows `[T]`."""
    self._rows = data.Rows(windows, seed)

  def __call__(self, step: int, model: Any) -> tuple[Sequence[Batch], int]:
    """The same rows at every step."""
    return self._rows, 0


class Mixture:
  """Batches whose rows are shared out among sources: a function of the step.

  Wherever a share is a whole number of rows, every batch has just that number;
  elsewhere rows are rounded over the run and not batch by batch.
  """

  def __init__(
    self,
    sources: Sequence[Source],
    shares: Sequence[float],
    batch: int,
    mesh: Mesh | None = None,
  ):
    """Takes sources, their shares, which sum to one, B, and where it goes."""
    self._sources, self._shares, self._batch = sources, shares, batch
    self._mesh = mesh

  def __call__(self, step: int, model: Any) -> Batch:
    """Batch `[B, T]` of an update, counted from 0, of what it starts from."""
    start, stop = self._before(step), self._before(step + 1)
    places = []
    for i, source in enumerate(self._sources):
      if self._shares[i]:  # even without a row in this batch: it may refresh
        text, since = source(step, model)
        first = self._before(since)[i]
        places += [(text, j - first) for j in range(start[i], stop[i])]
    return data.stack(data.Picked(places), self._mesh)

  def _before(self, step: int) -> list[int]:
    return counts(self._shares, step * self._batch)


def counts(shares: Sequence[float], rows: int) -> list[int]:
  """How many of the first `rows` rows each source gives.

  Each takes its part, rounded, of what those before it have left. Then no count
  ever falls as `rows` grows, as it might if each were rounded by itself.

  Args:
    shares: not negative; they sum to one.
    rows: of all sources.

  Returns:
    Numbers that sum to `rows`; of three sources each is at most one off.
  """
  found = []
  for i, share in enumerate(shares):
    left = rows - sum(found)
    part = left * share / sum(shares[i:]) if share else 0.0
    found.append(math.floor(part + 0.5))
  return found


def by_target(target: LanguageModel, drafter: Drafter, step: int):
  """The target writes, and the draft drafts for it once it has learnt."""
  return target, drafter if step else NoDrafter()


def by_draft(target: LanguageModel, drafter: Drafter, step: int):
  """The draft writes alone."""
  return drafter.model, NoDrafter()


class Written:
  """A source that writes, and keeps what it wrote.

  At `folder/step<n>-<name>.npz` is the text and beside it, as JSON, what it was
  made from. If that is not what would be written now, then at the step itself,
  whose model is at hand, it is written again, and later it is refused. What the
  target writes at step 0 no draft has a part in, so it lies in `shared`, and
  other drafts learn on it too.
  """

  def __init__(
    self,
    name: str,
    by: Callable[..., tuple[LanguageModel, Drafter]],
    target: LanguageModel,
    ids: np.ndarray,
    eos_id: int,
    writing: Writing,
    *,
    window: int,
    seed: int,
    folder: Path,
    shared: Path,
    log: Path,
    made_from: Mapping[str, Any],
    draft_from: Mapping[str, Any],
    mesh: Mesh | None = None,
  ):
    """Describes what is written.

    Args:
      name: of the source.
      by: `by_target` or `by_draft`: who writes, and who drafts for it.
      target: the target.
      ids: `[N]` documents to take prompts from, each ended by `eos_id`.
      eos_id: ends a document, and what is written.
      writing: how much, and how often.
      window: `T`, tokens of a row, into which sequences are packed.
      seed: of prompts, draws and order.
      folder: where text that a draft has a part in is kept.
      shared: where the target's own is.
      log: of tokens per round and seconds by step, without a suffix.
      made_from: what else the text depends on, as JSON.
      draft_from: what the draft depends on, as JSON.
      mesh: where the models lie, if on more than one device.
    """
    self._mesh = mesh
    self._name, self._by, self._target = name, by, target
    self._ids, self._eos_id, self._writing = ids, eos_id, writing
    self._window, self._seed = window, (seed, zlib.crc32(name.encode()))
    self._folder, self._shared, self._log = map(Path, (folder, shared, log))
    own = {'source': name, 'seed': seed, **writing._asdict()}
    own = {**own, 'target': texts.fingerprint(target), **made_from}
    self._made_from = json.loads(json.dumps(own))
    self._draft_from = json.loads(json.dumps({'window': window, **draft_from}))
    self._since = self._rows = None

  def __call__(self, step: int, model: Drafter) -> tuple[Sequence[Batch], int]:
    """The rows of the generation that step belongs to.

    Raises:
      ValueError: it lies in the past, and what is kept of it is not what was
        written then.
    """
    since = step - step % self._writing.refresh
    if since != self._since:
      text = self._kept_or_written(since, model, at_hand=step == since)
      rows = data.pack(
        text.sequences(),
        [self._writing.prompt_length] * len(text.length),
        self._window,
      )
      self._rows, self._since = data.Rows(rows, self._seed[0]), since
    return self._rows, since

  def _kept_or_written(
    self, since: int, model: Drafter, at_hand: bool
  ) -> texts.Text:
    old = self._folder / f'step0-{self._name}.npz'  # of an earlier version
    writer, drafter = self._by(self._target, model, since)
    alone = writer is self._target and isinstance(drafter, NoDrafter)
    if alone and not old.exists():
      at_hand = True
      made_from = {**self._made_from, 'refresh': None}
      spelt = json.dumps(made_from, sort_keys=True).encode()
      name = f'{hashlib.sha256(spelt).hexdigest()[:16]}-{self._name}.npz'
      path = self._shared / name
    else:
      path = self._folder / f'step{since}-{self._name}.npz'
      made_from = {**self._made_from, **self._draft_from, 'step': since}
      if at_hand:
        made_from['draft'] = texts.fingerprint(model)
    text = why = None
    try:
      text = texts.load_made(path, made_from)
    except (OSError, ValueError) as error:
      why = error
    if processes.agreed(text is not None):  # none writes alone
      if text is None:
        raise why
      return text
    if not at_hand:
      raise ValueError(
        f'training goes on in the middle of text that the draft of step {since}'
        f' had a part in, and {why}: begin the draft anew, under another name'
        ' or after deleting its folder'
      ) from why
    start = time.monotonic()
    text = self._write(since, model)
    seconds = time.monotonic() - start
    new = int((text.length - self._writing.prompt_length).sum())
    measured = {
      'tokens': new,
      'tokens_per_round': new / int(text.rounds.sum()),
      'seconds': seconds,
    }
    processes.by_first(
      lambda: texts.save_made(path, text, made_from, measured), f'{path}'
    )
    # Of a generation that was written twice only the last is on record.
    with logs.Logger(self._log, step=since - 1) as logger:
      logger.write(since, **measured)
    return text

  def _write(self, since: int, model: Drafter) -> texts.Text:
    c, warp = self._writing, warps.temperature(self._writing.temperature)
    # New arrays may go to any device, updated ones are tied to theirs; to JAX
    # that is two programs.
    model = jax.tree.map(_in_its_place, model)
    model = dataclasses.replace(model, warp=warp)
    writer, drafter = self._by(self._target, model, since)
    seed, number = self._seed
    key = jax.random.fold_in(jax.random.key(seed), number)
    return texts.write(
      writer,
      drafter,
      data.prompts(
        self._ids,
        self._eos_id,
        c.sequences,
        c.prompt_length,
        (seed, number, since),
      ),
      key=jax.random.fold_in(key, since),
      max_new_tokens=c.tokens,
      warp=warp,
      eos_id=self._eos_id,
      title=f'text by the {self._name}',
      mesh=self._mesh,
    )


def _in_its_place(x: Any) -> jax.Array:
  x = jnp.asarray(x)
  return jax.device_put(x, x.sharding)

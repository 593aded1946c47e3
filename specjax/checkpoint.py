"""Checkpoints: pytrees in, the same pytrees out, bit for bit.

A folder holds one Orbax checkpoint per step, `<step>/`, made of named items
(the model, the optimiser's state, a key, ...) and of a JSON record. Every item
is stored flat, one array per leaf under its path, so any pytree will do: NNX
modules, optax states, typed PRNG keys. What comes back is built on the pytree
the caller expects, and names, shapes and dtypes must agree with it exactly:
Orbax by itself casts a different dtype without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from specjax import processes, sharding, weights

Path = pathlib.Path


class Checkpoints:
  """The checkpoints of one training run: the newest and the best are kept.

  Orbax's own `BestN` may delete the newest, from which a run must go on, so
  the choice is made here. A checkpoint appears under its name in one rename
  when all of it is on disk, and others are removed only after that: a kill at
  any moment leaves the previous one loadable.

  Of many processes each writes the parts of arrays that it has, and all of them
  must make the same calls; they see one folder. An array may be read back onto
  another mesh.
  """

  def __init__(self, directory: str | Path):
    """Opens a folder, which need not exist before the first save."""
    self.directory = Path(directory).absolute()
    self._writing = None  # the step that is being written, and its end

  def __enter__(self) -> Checkpoints:
    """Opens nothing."""
    return self

  def __exit__(self, kind, *_) -> None:
    """Waits for what is being written."""
    if kind is None:
      self.wait()
    else:
      # The error may be this process's alone, and others would not answer: so
      # what is too many stays, until the next save.
      self._end_writing()

  def steps(self) -> list[int]:
    """Steps that were saved completely, in order."""
    names = (path.name for path in self.directory.glob('*'))
    return sorted(int(name) for name in names if name.isdigit())

  def latest(self) -> int | None:
    """The newest step, None where nothing was saved."""
    return max(self.steps(), default=None)

  def best(self) -> int | None:
    """The step with the highest score, the newest where none has a score."""
    scores = {step: self.score(step) for step in self.steps()}
    scored = {step: s for step, s in scores.items() if s is not None}
    return max(scored, key=scored.get) if scored else self.latest()

  def items(self, step: int) -> list[str]:
    """Names of what was saved with a step."""
    return sorted(self._record(step)['layout'])

  def meta(self, step: int) -> dict[str, Any]:
    """The JSON record that was saved with a step."""
    return self._record(step)['meta']

  def score(self, step: int) -> float | None:
    """The score that was saved with a step, None where it had none."""
    return self._record(step)['score']

  def save(
    self,
    step: int,
    items: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    score: float | None = None,
  ) -> None:
    """Saves a step as `save_async` does, and waits for it."""
    self.save_async(step, items, meta, score)
    self.wait()

  def save_async(
    self,
    step: int,
    items: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    score: float | None = None,
  ) -> None:
    """Begins to save a step; removes what is then neither newest nor best.

    It waits for the save before, and for this one only until the arrays are
    copied: their buffers may be donated when it returns. A step that is there
    already is left alone: within a run it is a function of its number.

    Args:
      step: the number of updates made.
      items: named pytrees of arrays.
      meta: what else a resumed run needs, as JSON: configuration, position in
        the data, metrics.
      score: higher is better; None or NaN is never the best.

    Raises:
      OSError: this save or the one before failed, as on a full disk; the
        checkpoints that were there are intact.
    """
    self.wait()
    if processes.agreed(step in self.steps()):
      return
    processes.by_first(self._clear, f'clearing {self.directory}')
    flat = {name: _flatten(item)[0] for name, item in items.items()}
    record = {
      'meta': dict(meta or {}),
      'score': None if score is None or math.isnan(score) else float(score),
      'layout': {name: _layout(leaves) for name, leaves in flat.items()},
    }
    path = self.directory / str(step)
    with self._failing(step):
      response = ocp.save_checkpointables_async(
        path, flat, custom_metadata=record
      )
    self._writing = step, response

  def wait(self) -> None:
    """Waits for the save that was begun, if any.

    Raises:
      OSError: it failed.
    """
    if self._end_writing():
      processes.by_first(self._thin, f'thinning {self.directory}')

  def _end_writing(self) -> bool:
    """Waits for this process's part of the save that was begun, if any was."""
    if self._writing is None:
      return False
    (step, response), self._writing = self._writing, None
    with self._failing(step):
      response.result()
    return True

  def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the named items of a step.

    Args:
      step: one of `steps()`.
      like: for each item wanted a pytree of its structure, of arrays or of
        `jax.ShapeDtypeStruct` (from `jax.eval_shape`); a leaf that has a
        sharding is loaded with it.

    Returns:
      The items, in the structure of `like`.

    Raises:
      FileNotFoundError: there is no such step.
      ValueError: an item is missing, has other leaves than expected, or cannot
        be read.
    """
    path = self.directory / str(step)
    layout = self._record(step)['layout']
    flat, trees = {}, {}
    for name, item in like.items():
      if name not in layout:
        raise ValueError(
          f'{path} holds no {name!r}, only {", ".join(sorted(layout))}'
        )
      flat[name], trees[name] = _flatten(item)
      _check_layout(path, name, layout[name], _layout(flat[name]))
    try:
      loaded = ocp.load_checkpointables(path, flat)
    except Exception as error:  # whatever a damaged file provokes below Orbax
      raise ValueError(_damaged(path, error)) from error
    return {
      name: jax.tree.unflatten(tree, [loaded[name][k] for k in flat[name]])
      for name, tree in trees.items()
    }

  def _clear(self) -> None:
    for kind in ('orbax-checkpoint-tmp', 'deleted'):
      for rest in self.directory.glob(f'*.{kind}'):
        shutil.rmtree(rest)  # of a save that was killed

  def _thin(self) -> None:
    for old in set(self.steps()) - {self.latest(), self.best()}:
      # Renamed first: half of a deleted checkpoint must not look like one.
      gone = self.directory / f'{old}.deleted'
      (self.directory / str(old)).rename(gone)
      shutil.rmtree(gone)

  @contextlib.contextmanager
  def _failing(self, step: int) -> Iterator[None]:
    try:
      yield
    except Exception as error:  # of Orbax, TensorStore or the system
      kept = ', '.join(map(str, self.steps())) or 'none'
      raise OSError(
        f'{self.directory / str(step)} could not be written ({_reason(error)});'
        f' checkpoints that are intact: {kept}. With room on the disk the same'
        ' command goes on from the newest'
      ) from error

  def _record(self, step: int) -> dict[str, Any]:
    path = self.directory / str(step)
    if not path.exists():
      steps = ', '.join(map(str, self.steps())) or 'none'
      raise FileNotFoundError(f'no checkpoint {path} (steps here: {steps})')
    try:
      record = ocp.checkpointables_metadata(path).custom_metadata
      return {key: record[key] for key in ('meta', 'score', 'layout')}
    except Exception as error:
      raise ValueError(_damaged(path, error)) from error


def save_model(
  directory: str | Path, model: Any, meta: Mapping[str, Any] | None = None
) -> None:
  """Saves a model that is not being trained, so that `load_model` finds it.

  Args:
    directory: where; it must hold no checkpoint yet.
    model: a pytree with a dataclass of JSON values as its `config`.
    meta: further records.

  Raises:
    FileExistsError: the folder already holds a checkpoint.
    ValueError: weights of the model are packed for decoding.
  """
  weights.require_whole(model, 'saved')
  checkpoints = Checkpoints(directory)
  if checkpoints.steps():
    raise FileExistsError(f'{directory} already holds a checkpoint')
  config = dataclasses.asdict(model.config)
  checkpoints.save(0, {'model': model}, {**(meta or {}), 'model': config})


def load_model(
  directory: str | Path,
  build: Callable[[dict[str, Any]], Any],
  step: int | None = None,
  mesh: Mesh | None = None,
) -> Any:
  """Rebuilds a model from its folder alone.

  Works on what `save_model` wrote and on a training run whose items include
  `model` and whose meta has the model's configuration under the same name.

  Args:
    directory: the folder of checkpoints.
    build: makes the model from its configuration; only traced, so it costs no
      memory.
    step: which checkpoint, the best where None.
    mesh: where it shall lie; see `sharding.placed`.

  Returns:
    The model.

  Raises:
    FileNotFoundError: there is no checkpoint.
    ValueError: the checkpoint holds no model, or another than `build` makes.
  """
  checkpoints = Checkpoints(directory)
  step = checkpoints.best() if step is None else step
  if step is None:
    raise FileNotFoundError(f'no checkpoint in {directory}')
  meta = checkpoints.meta(step)
  if 'model' not in meta:
    raise ValueError(f'{directory}/{step} does not say what model it holds')
  like = jax.eval_shape(lambda: build(meta['model']))
  like = sharding.described(like, mesh)
  return checkpoints.restore(step, {'model': like})['model']


def _flatten(tree: Any) -> tuple[dict[str, Any], Any]:
  """Leaves by path, and the structure that puts them together again."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  flat = {}
  for path, leaf in leaves:
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    # An NNX variable shows its only field in the path; that is its own affair.
    name = name.removesuffix('.value') or 'value'
    flat[name] = _array(leaf)
  return flat, treedef


def _array(leaf: Any) -> Any:
  """The array, or the description of one, that a leaf stands for."""
  if not isinstance(leaf, jax.ShapeDtypeStruct):
    return jnp.asarray(leaf)
  # Without a sharding Orbax would read the one of the machine that saved.
  place = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _layout(leaves: Mapping[str, Any]) -> dict[str, str]:
  return {name: f'{x.dtype}{list(x.shape)}' for name, x in leaves.items()}


def _check_layout(path: Path, item: str, saved: dict, wanted: dict) -> None:
  names = [*wanted, *(name for name in saved if name not in wanted)]
  differ = [name for name in names if saved.get(name) != wanted.get(name)]
  if differ:
    name = differ[0]
    more = f' (and {len(differ) - 1} more)' if len(differ) > 1 else ''
    raise ValueError(
      f'checkpoint of another {item}: {path} has '
      f'{saved.get(name, "nothing")} at {item}.{name}, expected '
      f'{wanted.get(name, "nothing")}{more}'
    )


def _damaged(path: Path, error: Exception) -> str:
  return (
    f'{path} is damaged ({_reason(error)}); remove that folder to go on from'
    ' an earlier checkpoint'
  )


def _reason(error: BaseException) -> str:
  while error.__cause__:  # what Orbax says last is only that something failed
    error = error.__cause__
  if isinstance(error, LookupError):  # only what was looked for
    return f'{type(error).__name__}: {error}'[:120]
  lines = (str(error).strip() or type(error).__name__).splitlines()
  return lines[0][:120]

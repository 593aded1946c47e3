"""An ablation: which drafts there are to train, and which train together.

An axis is a key of the configuration with the values to try. A *point* is one
member of their product, and one seed of initialisation. Points that differ in
nothing but the KL weight and the seed are *students* of one *group*: they see
the same batches behind one shared pass of the target. Keys that only matter to
what is measured, such as `decode.k`, make points and no further students.

<run>/ablation/
  config.json            what the students were made with, axes aside
  <group>/settings.json  all that the group's training depends on
  <group>/<i>/           students trained together: who, checkpoints, measures
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax import recipes, runs, settings
from specjax.ablation.axes import KL_WEIGHT, TRAINED, put
from specjax.checkpoint import Checkpoints


class Student(NamedTuple):
  """What sets a draft apart within its group.

  Attributes:
    kl_weight: λ of its loss.
    seed: of its initialisation, added to `distill.seed`.
  """

  kl_weight: float
  seed: int


class Point(NamedTuple):
  """One draft under one way to decode.

  Attributes:
    settings: the value of each axis.
    seed: as a student has it.
    config: the whole configuration with these values.
  """

  settings: dict[str, Any]
  seed: int
  config: dict[str, Any]

  @property
  def student(self) -> Student:
    """Who is measured here."""
    return Student(float(self.config['loss']['kl_weight']), self.seed)


class Group(NamedTuple):
  """Points whose students may train together.

  Attributes:
    name: of their folder, from all that their training depends on.
    points: in the order of the axes.
  """

  name: str
  points: list[Point]

  @property
  def config(self) -> dict[str, Any]:
    """That of the first point; others differ in no way that is trained."""
    return self.points[0].config

  @property
  def students(self) -> list[Student]:
    """Each once."""
    return list(dict.fromkeys(point.student for point in self.points))


def points(
  config: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]
) -> list[Point]:
  """Every member of the product of the axes, each with every seed.

  Raises:
    ValueError: one of them makes no sense.
  """
  found = []
  for values in itertools.product(*axes.values()):
    chosen = dict(zip(axes, values, strict=True))
    point = json.loads(json.dumps(config))  # a copy, in the types of a run's
    for key, value in chosen.items():
      put(point, key, value)
    _check(point)
    seeds = range(config['ablation']['seeds'])
    found += [Point(chosen, seed, point) for seed in seeds]
  return found


def groups(points: Iterable[Point]) -> list[Group]:
  """The points by what their training depends on."""
  found = {}
  for point in points:
    name = digest(trained_with(point.config))
    found.setdefault(name, Group(name, [])).points.append(point)
  return list(found.values())


def trained_with(config: Mapping[str, Any]) -> dict[str, Any]:
  """All that a training depends on, beside the run's target and its student.

  How it is decoded is part of it only where the loss asks for it: at what
  temperature text is written, `data` says itself.
  """
  made = recipes.made_with(config)
  loss = {k: v for k, v in made['loss'].items() if k != 'kl_weight'}
  return {**{name: made[name] for name in TRAINED}, 'loss': loss}


def trainings(
  folder: Path, group: Group, together: int
) -> list[tuple[Path, list[Student]]]:
  """Who trains with whom: what is there already, then what is missing.

  A training that was begun goes on if all of its students are still wanted, and
  one that is done is used for those of them that are. So another weight or seed
  trains nobody twice.

  Args:
    folder: the ablation's.
    group: the group.
    together: students in a training, at most. Those that learn from text of
      their own train alone.

  Returns:
    A folder, and its students, for each.
  """
  if group.config['data']['draft']:
    together = 1  # what a draft writes itself it shares with nobody
  wanted, found, last = dict.fromkeys(group.students), [], -1
  for path in sorted(
    (folder / group.name).glob('*/students.json'),
    key=lambda path: int(path.parent.name),
  ):
    last = int(path.parent.name)
    own = [Student(*student) for student in runs.read_json(path)]
    some = [student for student in own if student in wanted]
    if len(some) == len(own) or (some and is_done(path.parent, group)):
      found.append((path.parent, own))
      for student in some:
        del wanted[student]
  missing = list(wanted)
  for start in range(0, len(missing), together):
    last += 1
    some = missing[start : start + together]
    found.append((folder / group.name / str(last), some))
  return found


def is_done(folder: Path, group: Group) -> bool:
  """Whether a training has made its last step."""
  return Checkpoints(folder).latest() == group.config['distill']['steps']


def begin(
  folder: Path, config: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]
) -> None:
  """Records what all students have in common, or refuses another.

  Args:
    folder: the ablation's.
    config: the run's.
    axes: what may differ. What was an axis before may differ too.

  Raises:
    ValueError: students that are there were made with other values; the
      message lists them.
  """
  path = folder / 'config.json'
  free = set(axes)
  if any(folder.glob('*/*/students.json')):
    old = runs.read_json(path)
    free |= set(old['axes'])
    before = {**config, **runs.complete(old['config'])}
    runs.refuse_changes(
      folder, _common(before, free), _common(config, free), TRAINED
    )
  common = {name: config[name] for name in (*TRAINED, 'decode')}
  runs.write_json(path, {'axes': sorted(free), 'config': common})


def digest(value: Any) -> str:
  """A short name for JSON values: equal values, equal names."""
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def bytes_of(parameters: int, students: int) -> int:
  """Memory that float32 students take: weights, gradients, two moments."""
  return 4 * 4 * parameters * students


def _check(config: Mapping[str, Any]) -> None:
  """Refuses a point that could be trained and then not be measured."""
  settings.check(config)
  k, patience = config['decode']['k'], config['distill']['patience']
  if k < 1:
    raise ValueError(
      f'decode.k is {k}: an ablation measures drafts of at least one token'
    )
  if patience:
    raise ValueError(
      f'distill.patience is {patience}: drafts that are compared make equally'
      ' many steps, so it must be 0'
    )
  seeds = config['ablation']['seeds']
  if seeds > 1 and settings.begins_alike(config):
    name = config['draft']['drafter']
    raise ValueError(
      f'ablation.seeds is {seeds}, and this draft ({name}) begins alike for'
      ' every seed and sees the same batches: its interval would be empty, set'
      ' it to 1'
    )


def _common(
  config: Mapping[str, Any], free: Iterable[str]
) -> dict[str, dict[str, Any]]:
  """What students share: all that they are made with but some keys."""
  free = {*free, KL_WEIGHT}
  if 'decode.temperature' in free:
    free.add('loss.temperature')  # that of the decode warp
  found = json.loads(json.dumps(trained_with(config)))  # a copy to cut down
  for key in free:
    *path, last = key.split('.')
    section = found
    for name in path:
      section = section.get(name, {})
    section.pop(last, None)
  return found

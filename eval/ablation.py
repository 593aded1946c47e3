"""Acceptance and speed of drafts against how they were distilled.

    python eval/ablation.py --config configs/ablation_kl.py

Trains a draft for each point of `config.ablation.axes`, the product of its
values, and each of `config.ablation.seeds`; `--axis=draft.model.width=64,128`
adds an axis or replaces one, and a key of `decode` trains nothing further.
Drafts that differ in KL weight and seed alone train together, behind one shared
pass of the target and on the same batches, so that intervals are over
initialisations. (Text that the target writes is drafted by the first of those
that train together: its law does not depend on that, its tokens do.)
`--compare=20` trains nothing, and times twenty such steps against the same
steps one draft after the other.

Writes `ablation.html` (all of it in one file), `.csv`, `.json` and pictures
into the run, and makes the best draft the run's draft where it has none. The
same command goes on after an interruption, and an axis with another value
trains only what is new.
"""

import functools
import math
import shlex
import sys
import time

import jax
from absl import flags

from specjax import experiment, files, logs, printing, recipes, runs
from specjax.ablation import (
  axes,
  findings,
  planning,
  report,
  scoring,
  students,
)
from specjax.checkpoint import Checkpoints
from specjax.workspace import Workspace

AXIS = flags.DEFINE_multi_string(
  'axis', [], 'another axis, as draft.model.width=64,128; may be repeated'
)
COMPARE = flags.DEFINE_integer(
  'compare',
  0,
  'steps to time, together and one draft after the other',
  lower_bound=0,
)


def main(config, folder):
  """Trains the drafts, measures them, and says which is best."""
  config = config.to_dict()
  values = axes.find(config, AXIS.value)
  for key, some in values.items():
    axes.put(config['ablation']['axes'], key, some)
  points = planning.points(config, values)
  # Two at a time would plan the same folders for different drafts.
  with files.alone(folder / 'ablation'):
    ablate(config, folder, values, points)


def ablate(config, folder, values, points):
  """Goes through the points, from where an earlier call was stopped."""
  groups = planning.groups(points)
  planning.begin(folder / 'ablation', config, values)
  workspace = Workspace.create(folder, config)
  target = workspace.target()
  plan = [
    (group, *training)
    for group in groups
    for training in planning.trainings(
      folder / 'ablation', group, config['ablation']['together']
    )
  ]
  foretell(workspace, points, groups, plan)
  if COMPARE.value:
    compare(workspace, target, groups[0])
    return
  found, place = {}, {}
  clock = Clock(
    sum(not planning.is_done(path, group) for group, path, _ in plan)
  )
  for group, path, some in plan:
    drafters = trained(workspace, target, group, path, some, clock)
    for point, row in measured(workspace, target, group, path, some, drafters):
      found[id(point)], place[id(point)] = row, (group, path, some)
  rows = [found[id(point)] for point in points]
  result = report.Ablation(values, rows, config['decode'])
  show(workspace, result)
  if result.best is not None:
    rows = result.found[result.best].rows
    row = max(rows, key=lambda row: row['block_efficiency'])
    point = next(point for point in points if found[id(point)] is row)
    promote(workspace, point, row, *place[id(point)])


def foretell(workspace, points, groups, plan):
  """Says what will be trained, and what memory it takes."""
  todo = [
    (group, some)
    for group, path, some in plan
    if not planning.is_done(path, group)
  ]
  count = sum(len(group.students) for group in groups)
  left = sum(len(some) for _, some in todo)
  print(
    f'{len(points)} points: {count} drafts in {len(groups)} groups, of which'
    f' {left} are to be trained, in {len(todo)} trainings'
  )
  for group, some in todo:
    shapes = jax.eval_shape(
      functools.partial(of_group(workspace, group).new_drafter, 0)
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    held = planning.bytes_of(size, len(some))
    print(
      f'  {len(some)} drafts of {size:,} parameters{describe(group)}: weights,'
      f' gradients and optimiser take {held / 1e6:,.0f} MB'
    )


def describe(group):
  """What sets a group apart, for people."""
  own = [
    f'{findings.short(key)} {axes.label(value)}'
    for key, value in group.points[0].settings.items()
    if key.partition('.')[0] in axes.TRAINED and key != axes.KL_WEIGHT
  ]
  return f', {", ".join(own)}' if own else ''


def of_group(workspace, group, student=None):
  """The run, with the configuration of a group and one of its students.

  Nothing of it depends on the order of an axis: what is recorded with a
  training must be the same when it goes on.
  """
  c = group.config
  weight = (student or group.students[0]).kl_weight
  decode = dict(workspace.config['decode'])
  if c['loss']['at_decode_warp']:
    decode['temperature'] = c['decode']['temperature']
  own = {**c, 'loss': {**c['loss'], 'kl_weight': weight}, 'decode': decode}
  return Workspace(workspace.folder, own)


def trained(workspace, target, group, path, some, clock):
  """The drafts of a training, which is done if it is not yet."""
  own = of_group(workspace, group, some[0])
  if planning.is_done(path, group):
    return students.load(own, some, path)
  print(f'{clock.text()}: {len(some)} drafts{describe(group)}')
  runs.write_json(
    path.parent / 'settings.json', planning.trained_with(group.config)
  )
  name = f'{group.name}-{path.name}'
  drafters = students.train(own, target, some, path, name)
  clock.done()
  return drafters


def measured(workspace, target, group, path, some, drafters):
  """Points of a training with what was measured of each; kept in its folder."""
  own, c = of_group(workspace, group), workspace.config['ablation']
  for point in group.points:
    if point.student not in some:
      continue
    decode = point.config['decode']
    how = {name: decode[name] for name in ('k', 'temperature')}
    validation = point.config['validation']
    values = kept(
      path / 'measured',
      {**how, 'validation': validation},
      functools.partial(scoring.measure, own, target, drafters, decode),
    )
    i = some.index(point.student)
    row = {**point.settings, 'seed': point.seed, **values[i]}
    if c['timed_prompts']:
      spent = 'verify', 'max_new_tokens', 'prompt_length'
      timed = {
        **{name: decode[name] for name in spent},
        **{name: c[name] for name in ('timed_prompts', 'repeats')},
        'device': runs.device(),
      }
      row |= kept(
        path / 'timed',
        how | timed,
        functools.partial(race, own, target, drafters, decode, c),
      )[i]
    yield point, row


def race(workspace, target, drafters, decode, c):
  """Timings of the drafts of a training, in turns with plain decoding."""
  prompts = workspace.prompts(
    'test', c['timed_prompts'], decode['prompt_length']
  )
  total = len(prompts) * c['repeats']
  with logs.Progress(total, 'decode', unit='turns') as progress:
    return scoring.race(
      target, drafters, prompts, decode, c['repeats'], progress.advance
    )


def kept(folder, settings, make):
  """What was found with these settings, or is now."""
  path = folder / f'{planning.digest(settings)}.json'
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_json(path, {'settings': settings, 'values': make()})
  return runs.read_json(path)['values']


class Clock:
  """Tells how long the trainings that are left will take."""

  def __init__(self, total):
    """Starts."""
    self._total, self._done, self._start = total, 0, time.monotonic()

  def done(self):
    """Counts a training, with what was measured of the one before."""
    self._done += 1

  def text(self):
    """Which training this is, and what is left if all take as long."""
    place = f'training {self._done + 1} of {self._total}'
    if not self._done:
      return place
    each = (time.monotonic() - self._start) / self._done
    minutes = math.ceil((self._total - self._done) * each / 60)
    return f'{place}, about {minutes} minutes left'


def compare(workspace, target, group):
  """Times the students of the first group both ways."""
  some = group.students[: workspace.config['ablation']['together']]
  with logs.Progress(COMPARE.value, 'compare') as progress:
    found = students.compare(
      of_group(workspace, group),
      target,
      some,
      COMPARE.value,
      progress.advance,
    )
  print(
    f'{COMPARE.value} steps of {len(some)} drafts: together'
    f' {found["together_seconds"]:.2f} s, one after the other'
    f' {found["one_by_one_seconds"]:.2f} s: {found["ratio"]:.2f} of it; their'
    f' parameters differ by {found["difference"]:.1e} of the largest at most'
  )
  path = workspace.folder / 'ablation_compare.json'
  about = {
    'steps': COMPARE.value,
    'students': some,
    'versions': runs.versions(),
    'device': runs.device(),
  }
  runs.write_json(path, runs.portable(found | about))
  print(f'numbers: {path}')


def show(workspace, result):
  """Prints the table, and writes all there is to say."""
  columns, cells = result.table()
  widths = (
    max(map(len, column)) for column in zip(columns, *cells, strict=True)
  )
  console = printing.console(sum(width + 3 for width in widths))
  table = printing.table(
    numbers=columns, title='on held-out text that the target wrote'
  )
  for i, row in enumerate(cells):
    table.add_row(*row, style='bold' if i == result.best else None)
  console.print(table)
  command = shlex.join(['python', *sys.argv])
  page, *others = report.write(
    workspace.folder, result, workspace.config, command
  )
  print(f'report: {page}')
  print('beside it:', *(path.name for path in others))


def promote(workspace, point, row, group, path, some):
  """Makes a draft the run's own, unless it has one."""
  drafts = Checkpoints(workspace.folder / 'draft')
  chosen = {**point.settings, 'seed': point.seed}
  what = ', '.join(
    f'{findings.short(key)} {axes.label(value)}'
    for key, value in chosen.items()
  )
  if drafts.latest() is not None:
    print(f'best: {what}; {drafts.directory} stays as it is')
    return
  own = Workspace(workspace.folder, point.config)
  drafters = students.load(of_group(workspace, group, some[0]), some, path)
  drafter = scoring.pick(drafters, some.index(point.student))
  # The seed of its first weights; its batches were those of seed 0.
  c = point.config['distill']
  config = {**point.config, 'distill': {**c, 'seed': c['seed'] + point.seed}}
  drafts.save(
    c['steps'],
    {'model': drafter},
    {
      'model': own.draft_config,
      'tokenizer': workspace.tokenizer.hash,
      'config': recipes.made_with(config),
    },
    score=row['block_efficiency'],
  )
  print(f'best: {what}, saved as {workspace.folder / "draft"}')


if __name__ == '__main__':
  experiment.app(main, default='configs/stdlib.py', resumable=True)

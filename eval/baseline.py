"""Whether ways to draft gain what they did: `eval/speedup.py --check=FILE`."""

import math
from pathlib import Path

from specjax import printing, runs
from specjax.workspace import TARGET

# What a row is a row of, and what a report is of, as far as its kind says it.
KEYS = 'task', 'drafter', 'rule', 'k', 'batch', 'temperature'
NAMES = 'task', 'drafter', 'rule'  # the rest of them are numbers
ABOUT = 'device', 'draft', 'file', 'count'
SECTIONS = *TARGET, 'draft', 'decode'
FIGURES = 'speedup', 'speedup_min', 'speedup_max', 'tokens_per_round'
TOLERANCE = 0.05  # of a median; ranges of a few repeats are narrow


def read(path, output, rows):
  """A report that was kept.

  Args:
    path: of it.
    output: what this command writes.
    rows: the key of its rows.

  Raises:
    FileNotFoundError: it is not there.
    ValueError: it is no such report, or would be overwritten.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'there is no report {path}: --check names one')
  if path.resolve() == output.resolve():
    raise ValueError(
      f'{path} is what this command writes: keep a copy elsewhere, and check'
      ' against that'
    )
  try:
    report = runs.read_json(path)
    if not isinstance(report, dict):
      raise ValueError('it is no table of names')
    _require_rows(report[rows])
    config = report['config']
    if not isinstance(config, dict) or not all(
      isinstance(config.get(name, {}), dict) for name in SECTIONS
    ):
      raise ValueError('its configuration is none')
  except KeyError as error:
    raise ValueError(
      f'{path} is no {output.name} of this command: it has no {error}'
    ) from error
  except ValueError as error:
    raise ValueError(
      f'{path} is no {output.name} of this command: {error}'
    ) from error
  return report


def _require_rows(rows):
  """Refuses what `compare` could not compare."""
  if not isinstance(rows, list) or not rows:
    raise ValueError('it has no rows')
  for row in rows:
    if not isinstance(row, dict) or not {*FIGURES} <= {*row}:
      raise ValueError(f'a row lacks one of {", ".join(FIGURES)}')
    figures = [row[name] for name in FIGURES]
    if not all(type(x) in (int, float) and 0 < x < math.inf for x in figures):
      raise ValueError(f'a row has {", ".join(FIGURES)} of {figures}')
    for part, value in key(row):
      wanted = str if part in NAMES else (int, float)
      if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(f'a row has {part} {value!r}')
  seen = set()
  for row in rows:
    if key(row) in seen:
      raise ValueError(f'two of its rows are of {name(row)}')
    seen.add(key(row))
  if len({tuple(dict(key(row))) for row in rows}) > 1:
    raise ValueError('its rows are not of one kind')


def require_covered(before, wanted, path):
  """Refuses rows that will not be measured again, before any is.

  Args:
    before: rows of the report that was kept.
    wanted: by name of `KEYS` the values that will be measured.
    path: of the report.

  Raises:
    ValueError: a row has another value.
  """
  for part, values in wanted.items():
    found = dict.fromkeys(row[part] for row in before if part in row)
    gone = [str(value) for value in found if value not in values]
    if gone:
      raise ValueError(
        f'{path} has rows of {part} {", ".join(gone)}, which is not measured'
        f' now: only {", ".join(map(str, values))}'
      )


def require_same(before, now, path):
  """Refuses to compare gains of different things.

  Args:
    before: the report that was kept.
    now: the new one, or as much of it as is known before measuring: its
      'config', and what of `ABOUT` it has.
    path: of the report that was kept.

  Raises:
    ValueError: they differ; the message lists every value that does.
  """
  changes = [
    f'{name}: {before.get(name)} -> {now[name]}'
    for name in ABOUT
    if name in now and before.get(name) != now[name]
  ]
  changes += runs.differences(before['config'], now['config'], SECTIONS)
  if changes:
    raise ValueError(
      f'{path} was measured with something else ({"; ".join(changes)}), and so'
      ' its gains say nothing about these'
    )


def key(row):
  """What a row is of."""
  return tuple((name, row[name]) for name in KEYS if name in row)


def compare(before, now):
  """Prints what became of each way.

  A way is slower where its best repeat is slower than the worst one was, and
  its median by more than `TOLERANCE`.

  Args:
    before: rows of the report that was kept.
    now: rows that were measured now.

  Returns:
    Whether any is slower, or was not measured again.
  """
  before = {key(row): row for row in before}
  table = printing.table('way', numbers=('it was', 'it is', 'tokens/round', ''))
  slower = []
  rows = [row for row in now if key(row) in before]
  for row in rows:
    old = before[key(row)]
    lost = row['speedup_max'] < old['speedup_min']
    lost &= row['speedup'] < (1 - TOLERANCE) * old['speedup']
    said = 'SLOWER' if lost else f'{row["speedup"] / old["speedup"] - 1:+.0%}'
    if lost:
      slower.append(row)
    counts = (f'{x["tokens_per_round"]:.2f}' for x in (old, row))
    gains = printing.gain(old), printing.gain(row)
    table.add_row(name(row), *gains, ' -> '.join(counts), said)
  printing.console(96).print(table)
  missing = len(before) - len(rows)
  also = f'; {missing} that were measured then are MISSING' if missing else ''
  print(f'{len(slower)} of {len(rows)} ways are slower than they were{also}')
  return bool(slower or missing)


def name(row):
  """What a row is of, in words."""
  spelt = {'k': 'K = {}', 'batch': 'batch {}', 'temperature': 'T = {:g}'}
  return ', '.join(spelt.get(k, '{}').format(value) for k, value in key(row))

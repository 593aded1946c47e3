"""Whether ways to draft gain what they did: `eval/speedup.py --check=FILE`."""

from pathlib import Path

import rich.box
import rich.console
import rich.table

from specjax import runs

# What a row is a row of, as far as its kind of report says it.
KEYS = 'task', 'drafter', 'rule', 'k', 'batch', 'temperature'
SECTIONS = 'target', 'draft', 'decode'
TOLERANCE = 0.05  # of a median; ranges of a few repeats are narrow


def read(path, output, config):
  """The rows of a report that was kept.

  Args:
    path: of it.
    output: what this command writes.
    config: that is measured now.

  Raises:
    FileNotFoundError: it is not there.
    ValueError: it is no report, of something else, or would be overwritten.
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
    rows = {key(row): row for row in report[rows_of(output)]}
    for row in rows.values():
      row['speedup_min'] * row['speedup'] * row['tokens_per_round']
    before = report['config']
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{path} is no {output.name} of this command ({error!r})'
    ) from error
  changes = runs.differences(before, config, SECTIONS)
  if changes:
    raise ValueError(
      f'{path} was measured with another config ({"; ".join(changes)}): its'
      ' ratios are of something else'
    )
  return rows


def rows_of(output):
  """The key of the rows of a report."""
  return 'sweep' if output.name == 'speedup.json' else 'rows'


def key(row):
  """What a row is of."""
  return tuple((name, row[name]) for name in KEYS if name in row)


def compare(before, report, output):
  """Prints what became of each way.

  A way is slower where its best repeat is slower than the worst one was, and
  its median by more than `TOLERANCE`.

  Args:
    before: rows by what they are of.
    report: what was measured now.
    output: where it was written.

  Returns:
    Whether any is slower, or nothing could be compared.
  """
  console = rich.console.Console(highlight=False)
  console.width = max(console.width, 96)
  table = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
  )
  table.add_column('way', no_wrap=True)
  for column in ('it was', 'it is', 'tokens/round', ''):
    table.add_column(column, justify='right', no_wrap=True)
  slower = []
  rows = [row for row in report[rows_of(output)] if key(row) in before]
  for row in rows:
    old = before[key(row)]
    lost = row['speedup_max'] < old['speedup_min']
    lost &= row['speedup'] < (1 - TOLERANCE) * old['speedup']
    said = 'SLOWER' if lost else f'{row["speedup"] / old["speedup"] - 1:+.0%}'
    if lost:
      slower.append(row)
    counts = (f'{x["tokens_per_round"]:.2f}' for x in (old, row))
    table.add_row(name(row), gain(old), gain(row), ' -> '.join(counts), said)
  console.print(table)
  missing = len(before) - len(rows)
  also = f'; {missing} that were measured then are not now' if missing else ''
  print(f'{len(slower)} of {len(rows)} ways are slower than they were{also}')
  return bool(slower) or not rows


def name(row):
  """What a row is of, in words."""
  spelt = {'k': 'K = {}', 'batch': 'batch {}', 'temperature': 'T = {:g}'}
  return ', '.join(spelt.get(k, '{}').format(value) for k, value in key(row))


def gain(row):
  """A speedup and its range."""
  low, high = row['speedup_min'], row['speedup_max']
  return rf'{row["speedup"]:.2f}x \[{low:.2f}–{high:.2f}]'

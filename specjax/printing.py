"""What scripts print: tables without lines, and ratios with their ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table


def console(width: int = 0) -> rich.console.Console:
  """Standard output, for tables.

  Args:
    width: columns that there are at least: what is cut off cannot be read, and
      a narrow terminal wraps lines instead.
  """
  found = rich.console.Console(highlight=False)
  found.width = max(found.width, width)
  return found


def table(
  *text: str, numbers: Sequence[str] = (), title: str | None = None
) -> rich.table.Table:
  """An empty table, to be given rows and perhaps more columns.

  Args:
    text: headings of its first columns, which stand left.
    numbers: headings of those behind them, which stand right; see `add`.
    title: over it.
  """
  found = rich.table.Table(
    box=rich.box.SIMPLE_HEAD,
    pad_edge=False,
    padding=(0, 1, 0, 0),
    title=title,
    title_justify='left',
  )
  add(found, *text, justify='left')
  add(found, *numbers)
  return found


def add(
  table: rich.table.Table,
  *headings: str,
  justify: rich.console.JustifyMethod = 'right',
) -> None:
  """Adds columns, whose headings may have brackets."""
  for heading in headings:
    heading = rich.markup.escape(heading)
    table.add_column(heading, justify=justify, no_wrap=True)


def spread(median: float, low: float, high: float, unit: str = 'x') -> str:
  r"""A ratio and its range, `1.50x \[1.40–1.60]`, as `rich` reads brackets."""
  return rf'{median:.2f}{unit} \[{low:.2f}–{high:.2f}]'


def gain(row: Mapping[str, Any], key: str = 'speedup') -> str:
  """The `spread` of a row's ratio.

  Args:
    row: with the ratio, its `_min` and its `_max`.
    key: of the ratio.
  """
  return spread(row[key], row[f'{key}_min'], row[f'{key}_max'])

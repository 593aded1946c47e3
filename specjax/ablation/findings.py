"""What the points of an ablation come to: means, intervals, gains, lines."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax import files, metrics
from specjax.ablation import axes

Row = Mapping[str, Any]  # of a point: its settings, its seed, its measures


class Finding(NamedTuple):
  """Points that differ in nothing but their seed.

  Attributes:
    settings: the value of each axis.
    rows: by seed.
  """

  settings: dict[str, Any]
  rows: list[Row]

  def interval(self, name: str) -> tuple[float, float]:
    """Mean of a measure over seeds, and the half-width of its interval."""
    return metrics.confidence_interval([row[name] for row in self.rows])

  def gain(self, base: Finding, name: str) -> tuple[float, float]:
    """The same of what it is above another, seed by seed: these start alike."""
    pairs = zip(self.rows, base.rows, strict=True)
    return metrics.confidence_interval([a[name] - b[name] for a, b in pairs])


def find(rows: Sequence[Row], keys: Sequence[str]) -> list[Finding]:
  """Groups rows by what they were made with, in order.

  Args:
    rows: all points.
    keys: of the axes.
  """
  found = []
  for row in rows:
    settings = {key: row[key] for key in keys}
    same = [finding for finding in found if finding.settings == settings]
    if not same:
      found.append(Finding(settings, []))
    (same[0] if same else found[-1]).rows.append(row)
  return found


def main_axis(values: Mapping[str, Sequence[Any]]) -> str | None:
  """The axis to draw along: the KL weight, or that with most values."""
  varied = varying(values)
  if axes.KL_WEIGHT in varied:
    return axes.KL_WEIGHT
  return max(varied, key=lambda key: len(values[key]), default=None)


def varying(values: Mapping[str, Sequence[Any]]) -> list[str]:
  """The axes with more than one value."""
  return [key for key, some in values.items() if len(some) > 1]


def base_of(
  finding: Finding, findings: Sequence[Finding], axis: str
) -> Finding:
  """What stands at the start of the line that a finding is on.

  The smallest value of the axis, or the first where they are no numbers.
  """
  line = [
    one for one in findings if _others(one, axis) == _others(finding, axis)
  ]
  places = [one.settings[axis] for one in line]
  if all(isinstance(place, int | float) for place in places):
    return line[places.index(min(places))]
  return line[0]


def lines(
  findings: Sequence[Finding],
  axis: str,
  varied: Sequence[str],
  places: Sequence[Any],
  measures: Sequence[str],
) -> dict[str, dict[str, list[list[float]]]]:
  """Values along an axis, for `plots`.

  Args:
    findings: all of them.
    axis: to go along.
    varied: axes with several values, of which the label of a line is made.
    places: the values of the axis.
    measures: which.

  Returns:
    By label and measure `[S, X]`, a row per seed.
  """
  found = {}
  for finding in findings:
    name = ', '.join(
      f'{short(key)} {axes.label(finding.settings[key])}'
      for key in varied
      if key != axis
    )
    x = list(places).index(finding.settings[axis])
    own = found.setdefault(name, {})
    for measure in measures:
      blank = [[math.nan] * len(places) for _ in finding.rows]
      grid = own.setdefault(measure, blank)
      for values, row in zip(grid, finding.rows, strict=True):
        values[x] = row[measure]
  return found


def short(key: str) -> str:
  """The last part of a key, in words."""
  last = key.rpartition('.')[-1]
  return {'kl_weight': 'KL weight', 'k': 'K'}.get(last, last.replace('_', ' '))


def show(interval: tuple[float, float], sign: str = '', digits: int = 3) -> str:
  """Mean, and its 95 % interval where there are several values."""
  mean, half = interval
  wide = f' ± {half:.{digits}f}' if math.isfinite(half) else ''
  return f'{mean:{sign}.{digits}f}{wide}'


def write_csv(path: Path, rows: Sequence[Row]) -> None:
  """Writes a row per point; what was not measured of it is left empty.

  Args:
    path: the file.
    rows: whose keys may differ, as acceptance by depth does with K.
  """
  names = list(dict.fromkeys(itertools.chain(*rows)))
  text = io.StringIO()
  writer = csv.writer(text)
  writer.writerow(names)
  for row in rows:
    writer.writerow([_cell(row.get(name, '')) for name in names])
  with files.atomic(path) as file:
    file.write(text.getvalue().encode())


def _cell(value: Any) -> Any:
  return axes.label(value) if isinstance(value, Mapping) else value


def _others(finding: Finding, axis: str) -> dict[str, Any]:
  return {k: v for k, v in finding.settings.items() if k != axis}

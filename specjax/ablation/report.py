"""What an ablation leaves behind: table, CSV, JSON, pictures, one HTML file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax import report, runs
from specjax.ablation import axes, findings, plots
from specjax.ablation.findings import Finding, Row


class Measure(NamedTuple):
  """How a measure is shown.

  Attributes:
    name: in a table.
    digits: behind the point.
  """

  name: str
  digits: int


# Those of a point that are columns of the table, if they were measured.
MEASURES = {
  'acceptance': Measure('α', 3),
  'block_efficiency': Measure('tokens/round', 2),
  'kl': Measure('KL(p‖q)', 3),
  'reverse_kl': Measure('KL(q‖p)', 3),
  'perplexity': Measure('perplexity', 1),
  'speedup': Measure('speedup', 2),
}


@dataclasses.dataclass(frozen=True)
class Ablation:
  """All points, and how they are to be read.

  Attributes:
    values: of each axis, by key.
    rows: of each point: its settings by key, its `seed`, its measures.
    decode: `k` and `temperature` of the run.
  """

  values: Mapping[str, Sequence[Any]]
  rows: Sequence[Row]
  decode: Mapping[str, Any]

  @functools.cached_property
  def found(self) -> list[Finding]:
    """Means over seeds are taken within these."""
    return findings.find(self.rows, list(self.values))

  @property
  def axis(self) -> str | None:
    """The axis to go along; None where nothing varies."""
    return findings.main_axis(self.values)

  @property
  def varied(self) -> list[str]:
    """The axes that a point has to be told by."""
    return findings.varying(self.values)

  @property
  def measures(self) -> list[str]:
    """Those of `MEASURES` that there are."""
    return [name for name in MEASURES if name in self.rows[0]]

  @property
  def best(self) -> int | None:
    """The place in `found` with the highest block efficiency, over seeds.

    Of those that decode as the run does, since K bounds what a round can be;
    None where nobody does.
    """
    own = {f'decode.{name}': self.decode[name] for name in ('k', 'temperature')}
    tokens = {
      i: one.interval('block_efficiency')[0]
      for i, one in enumerate(self.found)
      if own == {key: one.settings.get(key, own[key]) for key in own}
    }
    return max(tokens, key=tokens.get, default=None)

  def gain(self, one: Finding, name: str) -> tuple[float, float] | None:
    """What a finding has above the start of its axis."""
    if self.axis is None:
      return None
    return one.gain(findings.base_of(one, self.found, self.axis), name)

  def table(self) -> tuple[list[str], list[list[str]]]:
    """Columns, and a row of cells for all seeds of a setting."""
    shown = {name: MEASURES[name] for name in self.measures}
    columns = [findings.short(key) for key in self.varied]
    columns += [measure.name for measure in shown.values()]
    columns += ['gain in α'] if self.axis else []
    cells = []
    for one in self.found:
      row = [axes.label(one.settings[key]) for key in self.varied]
      row += [
        findings.show(one.interval(name), digits=measure.digits)
        for name, measure in shown.items()
      ]
      if self.axis:
        base = findings.base_of(one, self.found, self.axis)
        gain = findings.show(one.gain(base, 'acceptance'), '+')
        row.append('' if one is base else gain)
      cells.append(row)
    return columns, cells


def write(
  folder: Path, result: Ablation, config: Mapping[str, Any], command: str
) -> list[Path]:
  """Writes `ablation.csv`, `.json`, `.html` and the pictures.

  Args:
    folder: of the run.
    result: what was found.
    config: of the run.
    command: that made it.

  Returns:
    The paths, the HTML file first.
  """
  about = {'command': command, 'versions': runs.versions()}
  about |= {'device': runs.device(), 'config': config}
  csv, json = folder / 'ablation.csv', folder / 'ablation.json'
  findings.write_csv(csv, result.rows)
  means = [
    {
      **one.settings,
      **{name: one.interval(name) for name in result.measures},
      'acceptance_gain': result.gain(one, 'acceptance'),
    }
    for one in result.found
  ]
  everything = {'axes': result.values, 'points': result.rows, 'means': means}
  runs.write_json(json, runs.portable(everything | about))
  pictures = draw(folder, result, config['decode']['temperature'])
  page = _page(folder, result, about, pictures)
  return [page, csv, json, *pictures]


def draw(folder: Path, result: Ablation, temperature: float) -> dict[Path, str]:
  """The pictures, with what each shows; none where nothing varies.

  Args:
    folder: of the pictures.
    result: what was found.
    temperature: of decoding, where that is no axis.
  """
  axis, values = result.axis, result.values
  if axis is None:
    return {}
  name = findings.short(axis)
  if axis == axes.KL_WEIGHT:
    name += ' (KL : cross entropy)'

  def lines(some):
    return findings.lines(
      some, axis, result.varied, values[axis], result.measures
    )

  path = folder / 'ablation.png'
  plots.by_axis(path, name, values[axis], lines(result.found))
  drawn = {path: f'Against {name}: means over seeds, 95 % intervals'}
  # The floors are of laws at temperature 1, as KL is taken.
  warm = [
    one
    for one in result.found
    if one.settings.get('decode.temperature', temperature) == 1.0
  ]
  if warm:
    path = folder / 'ablation_floors.png'
    plots.acceptance_by_kl(path, lines(warm))
    drawn[path] = 'Acceptance against KL, and the least that KL allows'
  return drawn


def _page(folder, result, about, pictures) -> Path:
  """One HTML file."""
  config = about['config']
  c, seeds = config['decode'], config['ablation']['seeds']
  columns, cells = result.table()
  tried = {
    key: ', '.join(axes.label(value) for value in some)
    for key, some in result.values.items()
  }
  device = {**about['device'], **about['versions']}
  parts = [
    report.paragraph(
      f'Drafts of {folder.name}, measured on held-out text that the target'
      f' wrote; K = {c["k"]} and temperature {c["temperature"]:g} where no axis'
      f' says otherwise. Seeds of initialisation: {seeds}, on the same batches.'
      ' The gain in α is over the start of the axis, seed by seed; tokens per'
      ' round count the one that the target adds, perplexity is of the draft on'
      ' that text, and KL is in nats, at temperature 1.'
    ),
    report.heading('What was tried'),
    report.values(tried),
    report.heading('What was found'),
    report.table(columns, cells, result.best),
    *(report.picture(path, caption) for path, caption in pictures.items()),
    report.heading('To do it again'),
    report.code(
      f'python train/pretrain.py --workdir={folder}\n{about["command"]}'
    ),
    report.values(device),
    report.folded('Configuration', config),
  ]
  title = f'Ablation of {", ".join(map(findings.short, result.values))}'
  return report.write(folder / 'ablation.html', title, parts)

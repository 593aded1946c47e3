"""Pictures of an ablation."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import metrics
from specjax.ablation import axes
from specjax.plots import (
  GREY,
  Path,
  label_axes,
  line_styles,
  new_figure,
  save_figure,
)

# Of two measures in turn, their names and what their axis says.
PANELS = {
  'acceptance': ('acceptance rate α', 'Σ min(p, q), mean over positions'),
  'block_efficiency': ('block efficiency', 'tokens per round, bonus too'),
  'kl': ('KL(p ‖ q)', 'nats, mean over positions'),
  'reverse_kl': ('KL(q ‖ p)', 'nats, mean over positions'),
  'perplexity': ('perplexity of the draft', 'on text that the target wrote'),
  'speedup': ('speedup, batch 1', 'over plain decoding (×)'),
}
_DODGE = 0.12  # between lines, in steps of the axis


def by_axis(
  path: Path,
  name: str,
  places: Sequence[Any],
  lines: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
  title: str = 'Ablation',
) -> pathlib.Path:
  """Measures against one axis, a panel each and a line per other settings.

  Args:
    path: the PNG to write.
    name: of the axis.
    places: its X values. Of numbers, those that span a factor of eight stand on
      a logarithmic axis, 0 and infinity apart from the rest; others, and what
      is no number, stand side by side.
    lines: by label and measure, of `PANELS`, `[S, X]` values, a row per seed;
      NaN where there is none.
    title: of the picture.

  Returns:
    The path.
  """
  measures = [
    measure for measure in PANELS if all(measure in m for m in lines.values())
  ]
  columns = math.ceil(len(measures) / 2)
  figure = new_figure(title, width=4.2 * max(columns, 2), height=7.4)
  panels = figure.subplots(2, columns, sharex=True, squeeze=False).ravel()
  x, joined = _places(places)
  order = np.argsort(x)
  step = float(np.diff(x[order]).min()) if len(x) > 1 else 1.0
  # Seeds stand beside their mean, which would hide them.
  beside = step * _DODGE / min(len(lines), 2)
  handles = []
  for i, (line, style) in enumerate(
    zip(lines.items(), line_styles(), strict=False)
  ):
    shift = step * _DODGE * (i - (len(lines) - 1) / 2)
    for panel, measure in zip(panels, measures, strict=False):
      values = np.asarray(line[1][measure], float)[:, order]
      _line(panel, x[order] + shift, values, joined[order], style, beside)
    if len(lines) > 1:
      handles += panels[0].plot([], [], label=line[0], **style)
  for panel, measure in zip(panels, measures, strict=False):
    label_axes(panel, PANELS[measure][0], name)
    panel.set_ylabel(PANELS[measure][1])
    panel.set_xticks(x[order], [_tick(places[j]) for j in order])
    panel.tick_params(labelbottom=True)
  for panel in panels[len(measures) :]:
    panel.remove()
  return save_figure(figure, path, handles + _seeds(panels[0], lines))


def acceptance_by_kl(
  path: Path,
  lines: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
  title: str = 'Acceptance, and what KL guarantees',
) -> pathlib.Path:
  """Every draft's acceptance against its KL, above the floors.

  The floors are α ≥ 1 - √(KL / 2) (Pinsker) and α ≥ 1 - √(1 - e^(-KL))
  (Bretagnolle and Huber); see `metrics.floors`. They are of laws
  compared at temperature 1: acceptance at another is not held to them.

  Args:
    path: the PNG to write.
    lines: by label, `kl` and `acceptance`, `[S, X]` each.
    title: of the picture.

  Returns:
    The path.
  """
  figure = new_figure(title, height=5.4)
  panel = figure.subplots()
  handles, most = [], 0.0
  for (label, line), style in zip(lines.items(), line_styles(), strict=False):
    kl, alpha = (np.ravel(line[name]) for name in ('kl', 'acceptance'))
    style = {**style, 'linestyle': '', 'alpha': 0.8}
    handles += panel.plot(kl, alpha, label=label or 'a draft', **style)
    most = max(most, np.nanmax(kl))
  kl = np.linspace(0, 1.15 * max(most, 1e-3), 400)
  for floor, dashes, label in zip(
    map(np.asarray, metrics.floors(kl)),
    ('--', ':'),
    ('1 − √(KL / 2)', '1 − √(1 − exp(−KL))'),
    strict=True,
  ):
    floor = np.where(floor > 0, floor, np.nan)
    line = {'color': GREY, 'linestyle': dashes, 'label': f'floor {label}'}
    handles += panel.plot(kl, floor, **line)
  panel.set_xlim(0, kl[-1])
  panel.set_ylim(0, 1.02)
  label_axes(panel, 'a mark per draft', 'KL(p ‖ q), nats')
  panel.set_ylabel('acceptance rate α')
  return save_figure(figure, path, handles)


def _line(panel, x, values, joined, style, beside):
  """Means with their intervals; what is apart from the axis hangs by dots."""
  mean, half = np.transpose([_interval(column) for column in values.T])
  panel.plot(x, mean, **{**style, 'linestyle': ':', 'marker': ''})
  whole = np.where(joined, mean, np.nan)
  panel.plot(x, whole, **{**style, 'marker': ''})
  panel.plot(x, mean, **{**style, 'linestyle': ''})
  bars = {'fmt': 'none', 'color': style['color'], 'capsize': 4}
  if np.isfinite(half).any():
    panel.errorbar(x, mean, np.where(np.isfinite(half), half, 0), **bars)
    seeds = {'color': style['color'], 'markersize': 4, 'alpha': 0.5}
    panel.plot(x + beside, values.T, '.', zorder=3, **seeds)


def _interval(column: np.ndarray) -> tuple[float, float]:
  found = column[np.isfinite(column)]
  return metrics.confidence_interval(found) if len(found) else (math.nan,) * 2


def _seeds(panel, lines):
  """What the legend says of intervals, where there are any."""
  count = max(len(rows) for line in lines.values() for rows in line.values())
  if count < 2:
    return []
  grey = {'color': GREY, 'marker': 'o', 'markersize': 6}
  label = f'mean of {count} seeds, 95 % interval'
  return panel.plot([], [], label=label, **grey)


def _places(values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
  """Where values stand, and which of them a line joins."""
  if not all(isinstance(value, int | float) for value in values):
    return np.arange(len(values), dtype=float), np.zeros(len(values), bool)
  numbers = np.asarray(values, float)
  inside = (numbers > 0) & np.isfinite(numbers)
  apart = (numbers == 0) | np.isinf(numbers)
  spread = numbers[inside].max() / numbers[inside].min() if inside.any() else 1
  if np.any(numbers < 0) or (spread < 8 and not np.isinf(numbers).any()):
    return numbers, np.ones(len(numbers), bool)
  logs = np.log10(numbers, where=inside, out=np.zeros_like(numbers))
  low, high = (
    (logs[inside].min(), logs[inside].max()) if inside.any() else (0, 0)
  )
  x = np.where(numbers == 0, low - 0.75, logs)
  return np.where(np.isinf(numbers), high + 0.75, x), ~apart


def _tick(value: Any) -> str:
  """A value under its place, a section's one key a line."""
  return axes.label(value).replace(' ', '\n')

"""Pictures of a run: plain numbers in, one PNG out.

Figures are made without pyplot, so nothing global is touched, and written to
a temporary name first, so that a reader never sees half of one.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from scipy import stats

# Okabe and Ito's palette, told apart with any colour vision; its yellow is too
# light for a line on white. The markers say the same without colour.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00')
_MARKERS = ('o', 's', '^', 'D', 'v', 'P')
_FILLS = 'full', 'none', 'left', 'right', 'top', 'bottom'
GREY = '#666666'
# Of a round, from the bottom of a bar, as `sweep.predict` names them.
PARTS = ('host', 'draft', 'verify', 'loop')
_LINE_HEIGHT = 0.065  # of a line of text, in heights of a panel
_RING = {
  'markersize': 13,
  'markerfacecolor': 'none',
  'markeredgewidth': 1.6,
}

Path = str | os.PathLike[str]


def speedup_by_k(
  path: Path,
  sweep: Iterable[Mapping[str, Any]],
  title: str = 'Speedup over plain decoding',
) -> pathlib.Path:
  """Measured and predicted speedup against draft length, a panel per batch.

  Args:
    path: the PNG to write.
    sweep: rows with `drafter`, `temperature`, `batch`, `k`, `speedup` (the
      median), `speedup_min`, `speedup_max`, and where there is a prediction
      `predicted_speedup`.
    title: of the picture.

  Returns:
    The path.
  """
  rows = sorted(sweep, key=lambda row: row['k'])
  batches = sorted({row['batch'] for row in rows})
  names = sorted({(row['drafter'], row['temperature']) for row in rows})
  figure = new_figure(title, width=4.2 * max(len(batches), 2))
  panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
  for panel, batch in zip(panels, batches, strict=True):
    panel.axhline(1, color=GREY, linewidth=1)
    lines = 0
    for name, style in zip(names, line_styles(), strict=False):
      line = [
        row
        for row in rows
        if row['batch'] == batch
        and (row['drafter'], row['temperature']) == name
      ]
      if line:
        _speedup_line(panel, line, style, place=lines)
        lines += 1
    panel.set_xscale('log', base=2)
    ticks = sorted({row['k'] for row in rows})
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([str(k) for k in ticks])
    label_axes(panel, f'batch {batch}', 'draft length K (tokens)')
  panels[0].set_ylabel('speedup over plain (×; median, min–max)')
  # Room above the data for a line of text per curve.
  top = max(panel.dataLim.y1 for panel in panels)
  panels[0].set_ylim(0, top / (0.95 - _LINE_HEIGHT * len(names)))
  handles = [
    panels[0].plot([], [], label=f'{drafter}, T = {t:g}', **style)[0]
    for (drafter, t), style in zip(names, line_styles(), strict=False)
  ]
  for label, style in (
    ('predicted', {'linestyle': '--'}),
    ('best K', {'linestyle': '', 'marker': 'o', **_RING}),
  ):
    handles += panels[0].plot([], [], color=GREY, label=label, **style)
  return save_figure(figure, path, handles)


def predictions(
  path: Path,
  sweep: Iterable[Mapping[str, Any]],
  title: str = 'Predicted against measured, and what a round is made of',
) -> pathlib.Path:
  """Speedup and the parts of a round by draft length, a column per case.

  Args:
    path: the PNG to write.
    sweep: rows of one drafter with what `sweep.Race.run` and `sweep.predict`
      say of each.
    title: of the picture.

  Returns:
    The path.
  """
  rows = sorted(sweep, key=lambda row: row['k'])
  cases = sorted({(row['temperature'], row['batch']) for row in rows})
  width = max(8.4, 3.6 * len(cases))
  figure = new_figure(title, width=width, height=7.6)
  panels = figure.subplots(2, len(cases), squeeze=False, sharey='row')
  styles = dict(
    zip(
      ('predicted', 'i.i.d., v(K)', 'i.i.d., v = 1'),
      line_styles(),
      strict=False,
    )
  )
  handles = []
  for column, case in zip(panels.T, cases, strict=True):
    line = [r for r in rows if (r['temperature'], r['batch']) == case]
    where = f'T = {case[0]:g}, batch {case[1]}'
    handles = _prediction_lines(column[0], line, styles)
    handles += _round_bars(column[1], line)
    label_axes(column[0], where, 'draft length K (tokens)')
    label_axes(column[1], f'{where}: a round', 'draft length K (tokens)')
    for panel in column:
      panel.set_xticks(range(len(line)), [str(row['k']) for row in line])
  panels[0, 0].set_ylabel('speedup over plain (×)')
  panels[0, 0].set_ylim(bottom=0)
  panels[1, 0].set_ylabel('milliseconds')
  return save_figure(figure, path, handles)


def acceptance_by_depth(
  path: Path,
  curves: Mapping[str, Sequence[float | None]],
  title: str = 'Acceptance by depth',
) -> pathlib.Path:
  """P(accepted | tested) at each place of a draft, and what survives to it.

  Args:
    path: the PNG to write.
    curves: `acceptance_by_depth` of `metrics.summarize` by label; None is a
      gap.
    title: of the picture.

  Returns:
    The path.
  """
  figure = new_figure(title)
  left, right = figure.subplots(1, 2, sharey=True, sharex=True)
  handles = []
  for (label, values), style in zip(
    curves.items(), line_styles(), strict=False
  ):
    rate = np.asarray(values, float)  # None becomes NaN, which is not drawn
    depth = np.arange(1, len(rate) + 1)
    handles += left.plot(depth, rate, label=label, **style)
    right.plot(depth, np.cumprod(rate), **style)
  label_axes(left, 'of the tokens tested', 'depth in the draft (tokens)')
  label_axes(right, 'of all drafts: survival', 'depth in the draft (tokens)')
  left.set_ylabel('share accepted')
  left.set_ylim(0, 1.02)
  left.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
  return save_figure(figure, path, handles)


def training_curves(
  path: Path,
  records: Iterable[Mapping[str, Any]],
  panels: Mapping[str, Sequence[str]],
  title: str = 'Training',
) -> pathlib.Path:
  """Logged scalars against the step, a panel per quantity.

  Args:
    path: the PNG to write.
    records: the JSON lines of a log: dicts with `step` and scalars, not all of
      them in every record.
    panels: the label of a panel's axis with its unit, to the keys drawn in it.
    title: of the picture.

  Returns:
    The path.
  """
  records = list(records)
  keys = list(dict.fromkeys(itertools.chain(*panels.values())))
  colours = dict(zip(keys, itertools.cycle(_COLOURS)))
  figure = new_figure(title, width=max(8.4, 4.2 * len(panels)))
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  handles = {}
  for axis, (label, names) in zip(axes, panels.items(), strict=True):
    for name in names:
      points = [(r['step'], r[name]) for r in records if name in r]
      steps, values = zip(*points, strict=True) if points else ((), ())
      few = len(points) <= 30
      handles[name] = axis.plot(
        steps,
        values,
        color=colours[name],
        label=name,
        marker='o' if few else '',
        markersize=4,
        linewidth=1.8 if few else 1.2,
      )[0]
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    label_axes(axis, label, 'step')
  return save_figure(figure, path, list(handles.values()))


def contest(
  path: Path,
  rows: Iterable[Mapping[str, Any]],
  title: str = 'Ways to draft',
) -> pathlib.Path:
  """Speedup against tokens per round, a panel per temperature and batch.

  Args:
    path: the PNG to write.
    rows: with `drafter`, `rule`, `temperature`, `batch`, `tokens_per_round`,
      `speedup`, `speedup_min` and `speedup_max`; those with a `beta` other than
      None are of another target, and left out. A drafter has a colour and a
      marker, a rule the way that it is filled.
    title: of the picture.

  Returns:
    The path.
  """
  rows = [row for row in rows if row.get('beta') is None]
  names, rules = (
    list(dict.fromkeys(row[key] for row in rows)) for key in ('drafter', 'rule')
  )
  looks = {
    # Twelve and more: colours come again with other markers.
    name: {
      'color': _COLOURS[i % 6],
      'marker': _MARKERS[(i + i // 6) % 6],
      'linestyle': '',
      'markersize': 7,
    }
    for i, name in enumerate(names)
  }
  fills = dict(zip(rules, itertools.cycle(_FILLS)))
  cases = sorted({(row['temperature'], row['batch']) for row in rows})
  columns = min(len(cases), 2)
  lines = -(-len(cases) // columns)
  legend = 0.25 * (-(-(len(names) + len(rules)) // 3))
  figure = new_figure(title, width=10, height=3.9 * lines + legend)
  panels = figure.subplots(lines, columns, squeeze=False).ravel()
  for panel, case in zip(panels, cases, strict=False):
    panel.axhline(1, color=GREY, linewidth=1)
    for row in rows:
      if (row['temperature'], row['batch']) == case:
        low, high = (
          abs(row[key] - row['speedup'])
          for key in ('speedup_min', 'speedup_max')
        )
        panel.errorbar(
          row['tokens_per_round'],
          row['speedup'],
          [[low], [high]],
          elinewidth=0.8,
          **looks[row['drafter']],
          fillstyle=fills[row['rule']],
        )
    label_axes(panel, f'T = {case[0]:g}, batch {case[1]}', 'tokens per round')
    panel.set_ylabel('speedup over plain (×)')
  for panel in panels[len(cases) :]:
    panel.set_axis_off()
  handles = [
    panels[0].plot([], [], label=name, **look)[0]
    for name, look in looks.items()
  ]
  rule = {'color': GREY, 'marker': 'o', 'linestyle': '', 'markersize': 7}
  handles += [
    panels[0].plot([], [], label=name, fillstyle=fill, **rule)[0]
    for name, fill in fills.items()
  ]
  return save_figure(figure, path, handles)


def by_task(
  path: Path,
  rows: Iterable[Mapping[str, Any]],
  title: str = 'Speedup over plain decoding, by task',
) -> pathlib.Path:
  """Speedup of ways to draft, a panel per temperature and a group per task.

  Args:
    path: the PNG to write.
    rows: with `task`, `drafter`, `temperature`, `speedup`, `speedup_min` and
      `speedup_max`.
    title: of the picture.

  Returns:
    The path.
  """
  rows = list(rows)
  tasks, names, cases = (
    list(dict.fromkeys(row[key] for row in rows))
    for key in ('task', 'drafter', 'temperature')
  )
  figure = new_figure(title, width=10, height=3.6 * len(cases) + 0.5)
  panels = figure.subplots(len(cases), 1, squeeze=False).ravel()
  width = 0.8 / len(names)
  for panel, t in zip(panels, sorted(cases), strict=True):
    panel.axhline(1, color=GREY, linewidth=1)
    for i, name in enumerate(names):
      own = {
        row['task']: row
        for row in rows
        if (row['drafter'], row['temperature']) == (name, t)
      }
      places = [
        at + width * (i - (len(names) - 1) / 2) for at in range(len(tasks))
      ]
      values = [own[task]['speedup'] for task in tasks]
      spread = [
        [abs(own[task][key] - own[task]['speedup']) for task in tasks]
        for key in ('speedup_min', 'speedup_max')
      ]
      panel.bar(
        places,
        values,
        width * 0.9,
        yerr=spread,
        color=_COLOURS[i % len(_COLOURS)],
        alpha=1 if i < len(_COLOURS) else 0.5,
        label=name,
        error_kw={'elinewidth': 0.8, 'ecolor': GREY},
      )
    label_axes(panel, f'T = {t:g}', '')
    panel.set_ylabel('speedup over plain (×)')
    panel.set_xticks(range(len(tasks)), tasks)
  handles, _ = panels[0].get_legend_handles_labels()
  return save_figure(figure, path, handles)


def peers(
  path: Path,
  rows: Iterable[Mapping[str, Any]],
  title: str = 'Beside other software',
) -> pathlib.Path:
  """Tokens per second of every peer's ways to decode, a panel per condition.

  Args:
    path: the PNG to write.
    rows: with `peer`, `way`, `condition`, `tokens_per_second`, `speedup` over
      the plain decoding of the first row's peer, `speedup_min` and
      `speedup_max`.
    title: of the picture.

  Returns:
    The path.
  """
  rows = list(rows)
  names = list(dict.fromkeys(row['peer'] for row in rows))
  ways = list(dict.fromkeys(row['way'] for row in rows))
  colours = dict(zip(names, itertools.cycle(_COLOURS)))
  conditions = list(dict.fromkeys(row['condition'] for row in rows))
  # Those of one way stand together.
  order = sorted(
    dict.fromkeys((row['way'], row['peer']) for row in rows),
    key=lambda bar: (ways.index(bar[0]), names.index(bar[1])),
  )
  across = min(len(conditions), 3)
  down = -(-len(conditions) // across)
  figure = new_figure(
    title,
    width=max(8.4, 4.8 * across),
    height=0.9 + (1 + 0.32 * len(order)) * down,
  )
  panels = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
  for panel in panels[len(conditions) :]:
    panel.set_visible(False)
  for panel, condition in zip(panels, conditions, strict=False):
    own = {
      (row['way'], row['peer']): row
      for row in rows
      if row['condition'] == condition
    }
    panel.axvline(1, color=GREY, linewidth=1)
    for bar, row in own.items():
      place, value = order.index(bar), row['speedup']
      low, high = value - row['speedup_min'], row['speedup_max'] - value
      panel.barh(
        place,
        value,
        xerr=[[low], [high]],
        color=colours[row['peer']],
        error_kw={'elinewidth': 1.0, 'capsize': 2},
      )
      panel.annotate(
        f'{row["tokens_per_second"]:.3g} tokens/s',
        (row['speedup_max'], place),
        xytext=(4, 0),
        textcoords='offset points',
        va='center',
        fontsize=8,
      )
    label_axes(panel, condition, f'over plain {names[0]} (×; min–max)')
    panel.grid(axis='y', visible=False)
    panel.set_xlim(0, 1.35 * max(row['speedup_max'] for row in own.values()))
  panels[0].set_yticks(range(len(order)), [way for way, _ in order])
  panels[0].invert_yaxis()
  handles = [
    panels[0].barh(0, 0, color=colour, label=name)
    for name, colour in colours.items()
  ]
  return save_figure(figure, path, handles)


def draft_size(
  path: Path,
  sizes: Iterable[Mapping[str, Any]],
  longest: int,
  title: str = 'How large a draft',
) -> pathlib.Path:
  """Acceptance, cost and speedup of drafts against their share of parameters.

  Args:
    path: the PNG to write.
    sizes: rows with `ratio` (parameters over the target's), `acceptance`,
      `draft_cost_ratio`, at the best K `k`, `speedup`, `speedup_min`,
      `speedup_max` and `predicted_speedup`, and `speedup_at_longest`.
    longest: the K of the latter.
    title: of the picture.

  Returns:
    The path.
  """
  rows = sorted(sizes, key=lambda row: row['ratio'])
  names = 'ratio', 'acceptance', 'draft_cost_ratio', 'speedup_at_longest'
  x, alpha, c, tail = (np.array([row[name] for row in rows]) for name in names)
  figure = new_figure(title, width=12.6)
  panels = figure.subplots(1, 3, sharex=True)
  one, two, three, four = itertools.islice(line_styles(), 4)
  panels[0].plot(x, alpha, **one)
  panels[1].plot(x, c, **two)
  proportional = {'color': GREY, 'linestyle': ':', 'label': 'c = share'}
  handles = panels[1].plot(x, x, **proportional)
  panels[2].axhline(1, color=GREY, linewidth=1)
  _speedup_line(panels[2], rows, three, x='ratio')
  panels[2].plot(x, tail, **four)
  for label, style in (
    ('measured at best K', three),
    ('predicted at best K', {'color': three['color'], 'linestyle': '--'}),
    (f'measured at K = {longest}', four),
    ('fastest', {'color': GREY, 'linestyle': '', 'marker': 'o', **_RING}),
  ):
    handles += panels[2].plot([], [], label=label, **style)
  panels[0].set_xscale('log')  # of all: they share it
  panels[0].xaxis.set_major_locator(FixedLocator(x))
  panels[0].xaxis.set_minor_locator(NullLocator())
  panels[0].set_xticklabels([f'1/{1 / ratio:.0f}' for ratio in x])
  for panel, name in zip(
    panels,
    ('acceptance rate α', 'cost c of a draft step', 'speedup'),
    strict=True,
  ):
    label_axes(panel, name, "share of the target's parameters")
  panels[0].set_ylabel('Σ min(p, q), mean over positions')
  panels[1].set_ylabel('draft step / plain step of the target')
  panels[1].set_ylim(0)
  panels[2].set_ylabel('speedup over plain (×; min–max)')
  panels[2].set_ylim(0, panels[2].dataLim.y1 / (0.95 - _LINE_HEIGHT))
  return save_figure(figure, path, handles)


def losslessness(
  path: Path,
  transforms: Mapping[str, np.ndarray],
  tests: Sequence[Mapping[str, Any]],
  display: Sequence[Mapping[str, Any]] = (),
  title: str = 'Losslessness',
) -> pathlib.Path:
  """The tests of a certificate, and the usual display beside them.

  Args:
    path: the PNG to write.
    transforms: probability integral transforms of each arm's tokens.
    tests: rows with `arm`, `name`, `z` and `rejected`, as `certify.decide`
      gives; the least `threshold` is drawn.
    display: rows with `arm` and `distances`, as `certify.compare` gives.
    title: of the picture.

  Returns:
    The path.
  """
  figure = new_figure(title, width=12.6 if display else 8.8)
  panels = figure.subplots(1, 3 if display else 2)
  styles = dict(zip(transforms, line_styles(), strict=False))
  handles = [
    panels[0].plot([], [], label=arm, **style)[0]
    for arm, style in styles.items()
  ]
  least = min(test['threshold'] for test in tests)
  _transform_curves(panels[0], transforms, styles, least)
  _test_points(panels[1], tests, styles, stats.norm.isf(least / 2))
  if display:
    handles += _distance_bars(panels[2], display)
  return save_figure(figure, path, handles)


def _transform_curves(panel, transforms, styles, level):
  """Deviation of each distribution function from the uniform one."""
  grid = np.linspace(0, 1, 257)
  for arm, values in transforms.items():
    ranks = np.searchsorted(np.sort(values, axis=None), grid, 'right')
    curve = math.sqrt(values.size) * (ranks / values.size - grid)
    panel.plot(grid, curve, **{**styles[arm], 'marker': '', 'linewidth': 1.2})
  for sign in (-1, 1):
    edge = sign * stats.kstwobign.isf(level)
    panel.axhline(edge, color=GREY, linestyle='--', linewidth=1)
  label_axes(panel, 'transforms of all tokens', 'uniform quantile')
  panel.set_ylabel('√n × (share below − quantile)')


def _test_points(panel, tests, styles, threshold):
  """|z| of every test, those beyond the axis at its end."""
  names = list(dict.fromkeys(test['name'] for test in tests))
  end = 2 * threshold
  for i, (arm, style) in enumerate(styles.items()):
    own = {test['name']: test for test in tests if test['arm'] == arm}
    z = [min(own[name]['z'], end) for name in names]
    place = np.arange(len(names)) + 0.15 * (1 - 2 * i)
    panel.plot(z, place, **{**style, 'linestyle': ''})
  panel.axvline(threshold, color=GREY, linestyle='--', linewidth=1)
  panel.set_yticks(range(len(names)), names, fontsize=9)
  panel.set_xlim(-0.1, 1.05 * end)
  panel.invert_yaxis()
  label_axes(panel, 'tests', f'|z| of the p-value (at most {end:.1f})')


def _distance_bars(panel, display):
  """TV of n-grams with intervals; returns what the legend should name."""
  handles, names = [], []
  for i, (row, style) in enumerate(
    zip(display, itertools.islice(line_styles(), 2, None), strict=False)
  ):
    found = row['distances']
    place = np.arange(len(found)) + 0.12 * (2 * i - len(display) + 1)
    value, low, high = (
      np.array([x[name] for x in found], float)
      for name in ('tv', 'tv_low', 'tv_high')
    )
    error = np.stack([value - low, high - value])
    style = {**style, 'linestyle': '', 'label': f'plain against {row["arm"]}'}
    handles.append(panel.errorbar(place, value, error, capsize=4, **style))
    names = [f'{x["n"]}-grams' for x in found]
  panel.axhline(0, color=GREY, linewidth=1)
  panel.set_xticks(range(len(names)), names)
  label_axes(panel, 'samples of short text', 'tokens taken together')
  panel.set_ylabel('TV less its null mean (95 % intervals)')
  return handles


def _speedup_line(
  panel: Axes,
  line: Sequence[Mapping[str, Any]],
  style: Mapping[str, Any],
  place: int = 0,
  x: str = 'k',
) -> None:
  k, places, median, low, high = (
    np.array([row[name] for row in line], float)
    for name in ('k', x, 'speedup', 'speedup_min', 'speedup_max')
  )
  error = np.stack([median - low, high - median])
  panel.errorbar(places, median, error, capsize=3, elinewidth=1.2, **style)
  predicted = [
    (row[x], row['predicted_speedup'])
    for row in line
    if row.get('predicted_speedup') is not None
  ]
  if predicted:
    panel.plot(*zip(*predicted, strict=True), '--', color=style['color'])
  best = int(np.argmax(median))
  ring = {'color': style['color'], 'marker': 'o', **_RING}
  panel.plot(places[best], median[best], **ring)
  panel.text(
    0.99,
    0.99 - _LINE_HEIGHT * place,
    f'{median[best]:.2f}× at K = {k[best]:.0f}',
    transform=panel.transAxes,
    ha='right',
    va='top',
    color=style['color'],
    fontweight='bold',
  )


def _prediction_lines(panel, line, styles):
  """Measured speedups in their 10 % band, and every prediction of them."""
  place = np.arange(len(line))
  measured = np.array([row['speedup'] for row in line])
  band = panel.fill_between(
    place, 0.9 * measured, 1.1 * measured, color='#dddddd', label='within 10 %'
  )
  mark = {'color': 'black', 'marker': 'o', 'markersize': 5, 'linewidth': 1.8}
  handles = [band, *panel.plot(place, measured, label='measured', **mark)]
  keys = ('predicted_speedup', 'iid_speedup', 'classical_speedup')
  for key, (label, style) in zip(keys, styles.items(), strict=True):
    values = np.array([row[key] for row in line])
    style = {**style, 'linestyle': '--', 'linewidth': 1.4, 'label': label}
    handles += panel.plot(place, values, **style)
  low, high = (
    np.array([row[key] for row in line])
    for key in ('predicted_min', 'predicted_max')
  )
  colour = styles['predicted']['color']
  panel.vlines(place, low, high, color=colour, linewidth=1.2)
  return handles


def _round_bars(panel, line):
  """The parts of a round on top of one another, those below zero left out."""
  place, bottom, handles = np.arange(len(line)), np.zeros(len(line)), []
  for part, colour in zip(PARTS, _COLOURS[2:], strict=False):
    seconds = np.array([row['round_parts'][part] for row in line])
    height = 1e3 * np.maximum(seconds, 0)
    handles.append(
      panel.bar(place, height, bottom=bottom, color=colour, label=part)
    )
    bottom += height
  return handles


def line_styles() -> Iterable[dict[str, Any]]:
  """Looks of lines that can be told apart in grey too, without end."""
  for colour, marker in itertools.cycle(zip(_COLOURS, _MARKERS, strict=True)):
    yield {
      'color': colour,
      'marker': marker,
      'markersize': 6,
      'linewidth': 1.8,
      'linestyle': '-',
    }


def new_figure(title: str, width: float = 8.4, height: float = 4.4) -> Figure:
  """A figure with its title; sizes are in inches."""
  figure = Figure(figsize=(width, height), dpi=150, layout='constrained')
  figure.suptitle(title, fontsize=14, fontweight='bold')
  return figure


def label_axes(axis: Axes, title: str, x: str) -> None:
  """Gives a panel its title, the name of its x axis, and a quiet grid."""
  axis.set_title(title, fontsize=12)
  axis.set_xlabel(x)
  axis.grid(axis='y', color='#dddddd', linewidth=0.8)
  axis.set_axisbelow(True)
  axis.spines[['top', 'right']].set_visible(False)


def save_figure(
  figure: Figure, path: Path, handles: Sequence[Any]
) -> pathlib.Path:
  """Writes a PNG, all of it or nothing, with a legend of some handles below."""
  if handles:
    longest = max(len(handle.get_label()) for handle in handles)
    # A line of the legend has some 13 characters to the inch.
    room = int(13 * figure.get_figwidth() / (longest + 8))
    columns = min(len(handles), 4, max(room, 1))
    figure.legend(
      handles=handles, loc='outside lower center', ncols=columns, frameon=False
    )
  path = pathlib.Path(path)
  partial = path.with_name(f'.{path.name}.partial')
  figure.savefig(partial, format='png')
  os.replace(partial, path)
  return path

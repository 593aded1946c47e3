"""Pictures: what is drawn stands where the numbers say."""

import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from specjax import plots
from specjax.ablation import plots as ablation_plots

SWEEP = [
  {
    'drafter': drafter,
    'temperature': t,
    'batch': batch,
    'k': k,
    'speedup': 1 + k * (5 - k) / 8 / batch,
    'speedup_min': 0.9 + k * (5 - k) / 8 / batch,
    'speedup_max': 1.2 + k * (5 - k) / 8 / batch,
    'predicted_speedup': 2.0 if drafter == 'model' else None,
  }
  for drafter in ('model', 'ngram')
  for t in (0.0, 1.0)
  for batch in (8, 1)
  for k in (4, 1, 2)
]
PREDICTED = [
  {
    'temperature': t,
    'batch': batch,
    'k': k,
    'speedup': 1 + k / 8,
    'predicted_speedup': 1.05 + k / 8,
    'predicted_min': 1 + k / 10,
    'predicted_max': 1.1 + k / 8,
    'iid_speedup': 1 + k / 9,
    'classical_speedup': 1 + k,
    'round_parts': {
      'host': 0.001,
      'draft': 0.001 * k,
      'verify': 0.004,
      'loop': 0.002 if k > 1 else -0.001,
    },
  }
  for t in (0.0, 1.0)
  for batch in (8, 1)
  for k in (4, 1, 2)
]
RECORDS = [{'step': s, 'loss': 3 / (s + 1)} for s in range(40)] + [
  {'step': 20, 'kl': 0.5},
  {'step': 40, 'kl': 0.4},
]
WEIGHTS = [math.inf, 0, 1, 0.1]  # not in order
ACCEPTANCE = np.array([[0.8, 0.5, 0.7, 0.6], [0.7, 0.6, 0.8, 0.6]])
LINES = {
  name: {
    'acceptance': ACCEPTANCE - less,
    'block_efficiency': 1 + ACCEPTANCE,
    'kl': 1 - ACCEPTANCE,
    'perplexity': 9 - ACCEPTANCE,
  }
  for name, less in (('T = 1', 0.0), ('T = 0.5', 0.1))
}

CERTIFICATE = [
  {'arm': arm, 'name': name, 'z': z, 'threshold': 0.001, 'rejected': z > 4}
  for arm, scores in (('speculative', (0.5, math.inf)), ('plain', (1.0, 0.2)))
  for name, z in zip(('KS', 'draft direction'), scores, strict=True)
]
TRANSFORMS = {
  'speculative': np.linspace(0, 1, 400) ** 1.5,
  'plain': np.linspace(0, 1, 500),
}
DISPLAY = [
  {
    'arm': arm,
    'distances': [
      {'n': n, 'tv': tv, 'tv_low': tv - 0.1, 'tv_high': tv + 0.1}
      for n in (1, 2)
    ],
  }
  for arm, tv in (('speculative', 0.3), ('plain', 0.0))
]

SIZES = [  # not in order
  {
    'ratio': ratio,
    'acceptance': 0.4 + ratio,
    'draft_cost_ratio': 2 * ratio,
    'k': k,
    'speedup': speedup,
    'speedup_min': speedup - 0.1,
    'speedup_max': speedup + 0.2,
    'predicted_speedup': speedup + 0.3,
    'speedup_at_longest': speedup - 0.5,
  }
  for ratio, k, speedup in ((0.5, 1, 0.8), (0.02, 8, 1.5), (0.1, 4, 1.9))
]

PEERS = [
  {
    'peer': peer,
    'way': way,
    'condition': condition,
    'tokens_per_second': 100 * speedup,
    'speedup': speedup,
    'speedup_min': speedup - 0.1,
    'speedup_max': speedup + 0.2,
  }
  for condition in ('T = 0, batch 1', 'T = 1, batch 1', 'T = 1, batch 4')
  for peer, way, speedup in (
    ('ours', 'plain', 1.0),
    ('theirs', 'plain', 0.8),
    ('ours', 'ngram@4', 1.5),
    ('theirs', 'ngram@4', 1.2),
    ('ours', 'early_exit:1@4', 1.3),
  )
]

PICTURES = {
  'peers': lambda path: plots.peers(path, PEERS),
  'draft size': lambda path: plots.draft_size(path, SIZES, longest=16),
  'losslessness': lambda path: plots.losslessness(
    path, TRANSFORMS, CERTIFICATE, DISPLAY
  ),
  'losslessness without display': lambda path: plots.losslessness(
    path, TRANSFORMS, CERTIFICATE
  ),
  'speedup': lambda path: plots.speedup_by_k(path, SWEEP),
  'predictions': lambda path: plots.predictions(path, PREDICTED),
  'depth': lambda path: plots.acceptance_by_depth(
    path, {'T = 0': [0.9, 0.8, 0.7], 'T = 1': [0.6, None]}
  ),
  'training': lambda path: plots.training_curves(
    path, RECORDS, {'loss (nats)': ['loss'], 'KL (nats)': ['kl', 'absent']}
  ),
  'ablation': lambda path: ablation_plots.by_axis(
    path, 'KL weight', WEIGHTS, LINES
  ),
  'ablation of names': lambda path: ablation_plots.by_axis(
    path, 'divergence', ['forward_kl', 'tv', 'jsd', {'a': 1}], LINES
  ),
  'floors': lambda path: ablation_plots.acceptance_by_kl(path, LINES),
}


@pytest.fixture
def figure(monkeypatch):
  """The figure that was last saved."""
  saved = []
  savefig = Figure.savefig

  def keep(self, *args, **kwargs):
    saved.append(self)
    savefig(self, *args, **kwargs)

  monkeypatch.setattr(Figure, 'savefig', keep)
  return lambda: saved[-1]


@pytest.mark.parametrize('name', PICTURES)
def test_a_readable_png_and_nothing_else(name, tmp_path):
  path = tmp_path / 'picture.png'
  assert PICTURES[name](path) == path
  assert [p.name for p in tmp_path.iterdir()] == ['picture.png']
  pixels = image.imread(path)
  assert pixels.shape[1] >= 800
  assert pixels[..., :3].std() > 0.05


@pytest.mark.parametrize('name', PICTURES)
def test_axes_are_labelled_and_the_legend_is_off_the_data(
  name, tmp_path, figure
):
  PICTURES[name](tmp_path / 'x.png')
  (legend,) = figure().legends
  box = legend.get_window_extent()
  for axis in figure().axes:
    assert axis.get_xlabel() and axis.get_title()
    assert not axis.get_window_extent().overlaps(box)


def test_a_failed_picture_leaves_the_old_one(tmp_path, monkeypatch):
  path = PICTURES['depth'](tmp_path / 'x.png')
  before = path.read_bytes()

  def fail(self, name, **kwargs):
    open(name, 'wb').close()
    raise OSError('disk full')

  monkeypatch.setattr(Figure, 'savefig', fail)
  with pytest.raises(OSError, match='disk full'):
    PICTURES['speedup'](path)
  assert path.read_bytes() == before


def test_weights_keep_their_values_whatever_their_order(tmp_path, figure):
  PICTURES['ablation'](tmp_path / 'x.png')
  alpha, efficiency, kl, perplexity = figure().axes
  for panel, values in (
    (alpha, [0.55, 0.6, 0.75, 0.75]),
    (efficiency, [1.55, 1.6, 1.75, 1.75]),
    (kl, [0.45, 0.4, 0.25, 0.25]),
    (perplexity, [8.45, 8.4, 8.25, 8.25]),
  ):
    x, y = panel.lines[0].get_data()
    assert np.all(np.diff(x) > 0.5)  # 0 and ∞ stand apart, in order
    names = [label.get_text() for label in panel.get_xticklabels()]
    assert names == ['0', '0.1', '1', '∞']
    np.testing.assert_allclose(y, values)
  assert [t.get_text() for t in figure().legends[0].texts] == [
    'T = 1',
    'T = 0.5',
    'mean of 2 seeds, 95 % interval',
  ]
  # Student's interval of two seeds: .8 and .7 at infinity.
  (whisker,) = alpha.containers[0].lines[2]
  low, high = np.sort([s[:, 1] for s in whisker.get_segments()][3])
  np.testing.assert_allclose(high - low, 12.7062 * 0.1, rtol=1e-4)


def test_numbers_stand_to_scale_and_names_side_by_side(tmp_path, figure):
  line = {'': {'acceptance': [[0.1, 0.2, 0.3]]}}
  for values, x in (
    ([3, 1, 2], [1, 2, 3]),
    ([1, 10, 100], [0, 1, 2]),
    (['b', 'a', 'c'], [0, 1, 2]),
  ):
    ablation_plots.by_axis(tmp_path / 'x.png', 'x', values, line)
    (panel,) = figure().axes
    drawn, y = panel.lines[0].get_data()
    np.testing.assert_allclose(drawn, x)
    order = np.argsort(values) if values[0] == 3 else [0, 1, 2]
    np.testing.assert_allclose(y, np.array([0.1, 0.2, 0.3])[order])
    assert not figure().legends


def test_a_seed_that_is_missing_is_a_gap(tmp_path, figure):
  line = {'': {'acceptance': [[0.1, math.nan], [0.3, math.nan]]}}
  ablation_plots.by_axis(tmp_path / 'x.png', 'x', [1, 2], line)
  (panel,) = figure().axes
  np.testing.assert_allclose(panel.lines[0].get_ydata(), [0.2, math.nan])


def test_floors_are_drawn_where_theory_has_them(tmp_path, figure):
  PICTURES['floors'](tmp_path / 'x.png')
  (panel,) = figure().axes
  drawn = {line.get_label(): line.get_data() for line in panel.lines}
  x, pinsker = drawn['floor 1 − √(KL / 2)']
  _, huber = drawn['floor 1 − √(1 − exp(−KL))']
  for kl, one, two in ((0.1, 0.7764, 0.6915), (0.5, 0.5, 0.3727)):
    np.testing.assert_allclose(np.interp(kl, x, pinsker), one, atol=2e-3)
    np.testing.assert_allclose(np.interp(kl, x, huber), two, atol=2e-3)
  kl, alpha = drawn['T = 1']
  np.testing.assert_allclose(np.sort(kl), np.sort((1 - ACCEPTANCE).ravel()))
  np.testing.assert_allclose(alpha, 1 - kl)


def test_the_best_k_of_each_curve_is_named(tmp_path, figure):
  PICTURES['speedup'](tmp_path / 'x.png')
  one, eight = figure().axes
  assert {t.get_text() for t in one.texts} == {'1.75× at K = 2'}
  assert {t.get_text() for t in eight.texts} == {'1.09× at K = 2'}
  assert len(one.texts) == 4
  # The text stands above every bar.
  top = max(row['speedup_max'] for row in SWEEP)
  renderer_box = one.texts[-1].get_window_extent()
  assert one.transData.inverted().transform(renderer_box)[0, 1] > top


def test_predictions_stand_in_the_band_and_parts_on_one_another(
  tmp_path, figure
):
  PICTURES['predictions'](tmp_path / 'x.png')
  axes = figure().axes
  assert [axis.get_title() for axis in axes[:4]] == [
    f'T = {t}, batch {batch}' for t in (0, 1) for batch in (1, 8)
  ]
  for lines, bars in zip(axes[:4], axes[4:], strict=True):
    assert [t.get_text() for t in lines.get_xticklabels()] == ['1', '2', '4']
    drawn = {line.get_label(): line.get_ydata() for line in lines.lines}
    np.testing.assert_allclose(drawn['measured'], [1.125, 1.25, 1.5])
    np.testing.assert_allclose(drawn['predicted'], [1.175, 1.3, 1.55])
    np.testing.assert_allclose(drawn['i.i.d., v = 1'], [2, 3, 5])
    edge = lines.collections[0].get_paths()[0].vertices[:, 1]
    assert edge.min() == pytest.approx(0.9 * 1.125)
    assert edge.max() == pytest.approx(1.1 * 1.5)
    tops = [
      [bar.get_y() + bar.get_height() for bar in part]
      for part in bars.containers
    ]
    want = [[1, 1, 1], [2, 3, 5], [6, 7, 9], [6, 9, 11]]  # ms; none below zero
    np.testing.assert_allclose(tops, want)


def test_sizes_stand_in_order_and_the_fastest_is_named(tmp_path, figure):
  PICTURES['draft size'](tmp_path / 'x.png')
  alpha, cost, speed = figure().axes
  for panel in figure().axes:
    assert panel.get_xscale() == 'log'
    names = [label.get_text() for label in panel.get_xticklabels()]
    assert names == ['1/50', '1/10', '1/2']
  np.testing.assert_allclose(alpha.lines[0].get_ydata(), [0.42, 0.5, 0.9])
  np.testing.assert_allclose(cost.lines[0].get_ydata(), [0.04, 0.2, 1.0])
  assert [t.get_text() for t in speed.texts] == ['1.90× at K = 4']
  drawn = [line.get_xydata().tolist() for line in speed.lines]
  assert [[0.1, 1.9]] in drawn  # the ring
  assert [[0.02, 1.0], [0.1, 1.4], [0.5, 0.8 - 0.5]] in drawn  # at K = 16


def test_a_way_stands_beside_that_of_others(tmp_path, figure):
  PICTURES['peers'](tmp_path / 'x.png')
  greedy, sampled, _ = figure().axes
  assert [panel.get_title() for panel in figure().axes] == [
    'T = 0, batch 1',
    'T = 1, batch 1',
    'T = 1, batch 4',
  ]
  assert [t.get_text() for t in greedy.get_yticklabels()] == [
    'plain',
    'plain',
    'ngram@4',
    'ngram@4',
    'early_exit:1@4',
  ]
  bars = {
    round(bar.get_y() + bar.get_height() / 2): bar.get_width()
    for bar in sampled.patches
    if bar.get_width()
  }
  assert bars == {0: 1.0, 1: 0.8, 2: 1.5, 3: 1.2, 4: 1.3}
  places = {t.get_text(): t.xy for t in greedy.texts}
  assert places['150 tokens/s'] == (pytest.approx(1.7), 2)
  assert [t.get_text() for t in figure().legends[0].texts] == ['ours', 'theirs']


def test_a_rejected_test_stands_beyond_the_threshold(tmp_path, figure):
  PICTURES['losslessness'](tmp_path / 'x.png')
  curves, points, bars = figure().axes
  curve, edge = curves.lines[-4].get_ydata(), curves.lines[-1].get_ydata()
  assert abs(curve).max() > edge[0] > 0  # a law that is not uniform
  speculative, plain, threshold = points.lines
  assert threshold.get_xdata()[0] == pytest.approx(3.29, abs=0.01)
  # What is infinite is drawn at the end of the axis.
  assert speculative.get_xdata()[1] == pytest.approx(2 * 3.29, abs=0.01)
  np.testing.assert_allclose(plain.get_xdata(), [1.0, 0.2])
  assert [t.get_text() for t in points.get_yticklabels()] == [
    'KS',
    'draft direction',
  ]
  assert [t.get_text() for t in bars.get_xticklabels()] == [
    '1-grams',
    '2-grams',
  ]


def test_importing_changes_no_backend():
  code = (
    'import sys, specjax.plots; sys.exit("matplotlib.pyplot" in sys.modules)'
  )
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0

"""Ablations: who trains with whom, to equal results, and what is kept."""

import json
import math
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripts
import toys

from specjax import (
  data,
  distill,
  experiment,
  optimizing,
  runs,
  settings,
  warps,
)
from specjax.ablation import (
  axes,
  findings,
  planning,
  report,
  scoring,
  students,
)
from specjax.ablation.planning import Student
from specjax.checkpoint import Checkpoints
from specjax.drafters.model import ModelDrafter
from specjax.workspace import Workspace

INF = math.inf

pytestmark = pytest.mark.usefixtures('quick_compilation')


def page(**values):
  """The tiny page as plain values, with some of them changed."""
  config = experiment.load(scripts.ROOT / 'configs/stdlib.py:tiny').to_dict()
  for key, value in values.items():
    axes.put(config, key.replace('__', '.'), value)
  return config


def planned(config, *given):
  points = planning.points(config, axes.find(config, given))
  return points, planning.groups(points)


def test_points_are_the_product_with_every_seed():
  config = page(ablation__seeds=2)
  points, _ = planned(config, 'decode.k=1,2', 'loss.kl_weight=0,1,inf')
  found = [
    (p.config['loss']['kl_weight'], p.config['decode']['k'], p.seed)
    for p in points
  ]
  wanted = [(w, k, s) for w in (0, 1, INF) for k in (1, 2) for s in (0, 1)]
  assert found == wanted
  assert points[0].config['draft'] == json.loads(json.dumps(config['draft']))
  assert config['decode']['k'] == 2  # the page's own stays as it is


@pytest.mark.parametrize(
  'axis, count',
  [
    ('loss.kl_weight=0,1', 1),
    ('decode.k=1,2', 1),
    ('decode.temperature=0,1', 1),
    ('draft.model.width=16,32', 2),
    ('loss.divergence=forward_kl,total_variation', 2),
    ('distill.learning_rate=0.1,0.2', 2),
  ],
)
def test_only_what_changes_the_training_makes_a_group(axis, count):
  points, groups = planned(page(ablation__seeds=3), axis)
  assert len(groups) == count
  assert sum(len(group.points) for group in groups) == len(points)
  for group in groups:
    assert len(set(group.students)) == len(group.students)


def test_temperature_makes_groups_where_the_loss_asks_for_it():
  config = page()
  config['loss']['at_decode_warp'] = True
  assert len(planned(config, 'decode.temperature=0,1')[1]) == 2
  config['loss']['at_decode_warp'] = False
  assert len(planned(config, 'decode.temperature=0,1')[1]) == 1


def test_a_section_is_an_axis_of_dictionaries():
  config = page()
  config['ablation']['axes']['draft'] = {
    'model': ({'width': 16, 'heads': 1}, {'layers': 2})
  }
  points, groups = planned(config)
  models = [group.config['draft']['model'] for group in groups]
  assert [m['width'] for m in models] == [16, 32]
  assert [m['layers'] for m in models] == [1, 2]
  assert axes.label(points[0].settings['draft.model']) == 'width=16 heads=1'


@pytest.mark.parametrize(
  'given, words',
  [
    (
      'draft.model.widht=8',
      'no config.draft.model.widht; did you mean draft.m',
    ),
    ('target.width=8', 'for another target make another run'),
    ('decode.prompt_length=8', 'for another target make another run'),
    ('draft.model.width=8,a', '--axis draft.model.width=a'),
    ('draft.model=8', 'is a section'),
    ('decode.k=1,1', 'decode.k has 1 twice'),
    ('decode.k=0', 'decode.k is 0'),
    ('decode.k=9', 'validation.tokens, which is 8'),
    ('loss.kl_weight=-1', 'loss.kl_weight is -1.0'),
    ('decode.verify=nope', "no rule 'nope'"),
    ('draft.model.width=0', 'draft.model.width is 0'),
    ('distill.patience=0,2', 'distill.patience is 2: .* it must be 0'),
    ('decode.verify=block,rejection', 'give ablation.timed_prompts'),
  ],
)
def test_a_mistake_in_an_axis_is_refused_before_anything_is_done(given, words):
  with pytest.raises(ValueError, match=words):
    planned(page(), given)


def test_seeds_that_make_no_difference_are_refused():
  """An interval over equal drafts would be empty."""
  heads = page(draft__drafter='medusa', draft__medusa={'heads': 2})
  planned(heads)
  heads['ablation']['seeds'] = 2
  with pytest.raises(ValueError, match='seeds is 2, .*medusa.* begins alike'):
    planned(heads)
  taken = page(draft__target_layers=(0,), ablation__seeds=2)
  with pytest.raises(ValueError, match='seeds is 2, .*model.* begins alike'):
    planned(taken)


def test_an_axis_within_an_axis_is_refused():
  config = page()
  config['ablation']['axes']['draft'] = {'model': ({'width': 16},)}
  with pytest.raises(ValueError, match='draft.model.heads is part of draft.m'):
    planned(config, 'draft.model.heads=1,2')


@pytest.mark.parametrize(
  'value, words',
  [
    ((), 'has no value'),
    (3.0, 'give a tuple'),
    (('a',), 'values of type float'),
    (({'x': 1},), 'values of type float'),
  ],
)
def test_a_page_is_checked_too(value, words):
  with pytest.raises(ValueError, match=words):
    axes.find(page(ablation__axes__loss__kl_weight=value))


def begun(folder, *members, done=None):
  """A training that somebody began, and ended if `done` is a step."""
  runs.write_json(folder / 'students.json', members)
  if done:
    (folder / str(done)).mkdir()


def test_nobody_is_trained_twice(tmp_path):
  config = page(ablation__seeds=2)
  _, (group,) = planned(config, 'loss.kl_weight=0,1,inf')
  at, steps = tmp_path / group.name, config['distill']['steps']

  def who(together=9):
    return [
      (path.name, some)
      for path, some in planning.trainings(tmp_path, group, together)
    ]

  assert who() == [('0', group.students)]
  assert [len(some) for _, some in who(4)] == [4, 2]
  begun(at / '0', (0.0, 0), (0.5, 0), done=steps)  # 0.5 is wanted no more
  begun(at / '1', (1.0, 0), (1.0, 1))  # was interrupted
  begun(at / '2', (0.5, 1), (INF, 0))  # so was this, with another in it
  assert who() == [
    ('0', [Student(0.0, 0), Student(0.5, 0)]),
    ('1', [Student(1.0, 0), Student(1.0, 1)]),
    ('3', [Student(0.0, 1), Student(INF, 0), Student(INF, 1)]),
  ]
  text = {'corpus': 0.5, 'target': 0.0, 'draft': 0.5}
  own = config | {'data': config['data'] | text}
  _, (alone,) = planned(own, 'loss.kl_weight=0,1,inf')
  found = planning.trainings(tmp_path, alone, 9)
  assert [len(some) for _, some in found] == [1] * 6
  assert planning.is_done(at / '0', group)
  assert not planning.is_done(at / '1', group)


def test_a_changed_configuration_is_refused_with_what_differs(tmp_path):
  config = page()
  values = axes.find(config)
  planning.begin(tmp_path, config, values)
  other = page(distill__steps=9, draft__model__width=64, decode__k=1)
  planning.begin(tmp_path, other, values)  # nothing was trained yet
  planning.begin(tmp_path, config, values)
  begun(tmp_path / 'group' / '0', (0.0, 0))
  with pytest.raises(ValueError) as refused:
    planning.begin(tmp_path, other, values)
  for words in ('distill.steps: 4 -> 9', 'draft.model.width: 32 -> 64'):
    assert words in str(refused.value)
  assert 'decode' not in str(refused.value)  # that is only measured
  assert 'kl_weight' not in str(refused.value)
  # What is an axis, or once was, may differ.
  wider = {**values, 'draft.model.width': (32, 64)}
  planning.begin(tmp_path, page(draft__model__width=64), wider)
  planning.begin(tmp_path, page(draft__model__width=64), values)


@pytest.fixture(scope='module')
def workspace(tmp_path_factory):
  """A tiny run that nobody trained."""
  folder = tmp_path_factory.mktemp('runs') / 'tiny'
  config = page()
  runs.open_run(folder, config, (), set(config))
  workspace = Workspace(folder, runs.read_json(folder / 'config.json'))
  sizes = settings.sizes(config['target'])
  sizes['vocab_size'] = workspace.tokenizer.vocab_size
  Checkpoints(folder / 'target').save(
    config['pretrain']['steps'],
    {'model': workspace.new_target(0)},
    {'model': sizes, 'tokenizer': workspace.tokenizer.hash},
  )
  return workspace


def test_together_is_one_after_the_other(workspace):
  some = [Student(w, seed) for w in (0.0, 1.0, INF) for seed in (0, 1)]
  found = students.compare(workspace, workspace.target(), some, steps=3)
  assert found['difference'] < 1e-4
  assert (
    0
    < found['ratio']
    == pytest.approx(found['together_seconds'] / found['one_by_one_seconds'])
  )


def test_the_memory_that_is_foretold_is_what_training_holds(workspace):
  some = [Student(0.0, 0), Student(1.0, 0), Student(INF, 0)]
  tx, _ = students.make_update(workspace.config)
  drafters = jax.eval_shape(lambda: students.untrained(workspace, some))
  state = jax.eval_shape(
    jax.vmap(lambda model: optimizing.init(model, tx)), drafters
  )
  held = [x.size * x.dtype.itemsize for x in jax.tree.leaves(state)]
  gradients = [x.size * x.dtype.itemsize for x in jax.tree.leaves(state.model)]
  one = sum(x.size for x in jax.tree.leaves(state.model)) // 3
  foretold = planning.bytes_of(one, 3)
  assert sum(held) + sum(gradients) == pytest.approx(foretold, rel=1e-2)


@pytest.mark.slow
def test_students_differ_by_their_weight_and_their_seed(workspace):
  # What the test above could not see if all were trained alike.
  some = [Student(0.0, 0), Student(INF, 0), Student(0.0, 1)]
  tx, update = students.make_update(workspace.config)
  drafters = students.untrained(workspace, some)
  first = [jax.tree.leaves(scoring.pick(drafters, i)) for i in range(3)]
  for a, b in zip(first[0], first[1], strict=True):
    np.testing.assert_array_equal(a, b)
  state = jax.vmap(lambda model: optimizing.init(model, tx))(drafters)
  step = students.mapped(update)
  text = students.batches(workspace, workspace.target(), 'ablation/test')
  for i in range(3):
    state, _ = step(
      state, workspace.target(), text(i, state.model), students.objectives(some)
    )
  found = students.stack([scoring.pick(state.model, i) for i in (0, 0, 0)])
  assert students._difference(state.model, found) > 1e-3
  for i in (1, 2):
    a, b = (jax.tree.leaves(scoring.pick(state.model, j))[0] for j in (0, i))
    assert float(jnp.abs(a - b).max()) > 1e-3


@pytest.mark.slow
def test_each_is_measured_as_if_alone(workspace):
  drafters = students.untrained(workspace, [Student(0.0, s) for s in (0, 1)])
  target, c = workspace.target(), {'temperature': 0.7, 'k': 2}
  found = scoring.measure(workspace, target, drafters, c)
  text = workspace.rollouts(target, 0.7)
  (batch,) = data.in_order(text, len(text))
  one = toys.jit(distill.measure, static_argnums=3)
  for i, values in enumerate(found):
    drafter, warp = scoring.pick(drafters, i), warps.temperature(0.7)
    alone = distill.means([one(drafter, target, warp, 2, batch)])
    assert values.keys() == alone.keys()
    floors = values['floor/pinsker'], values['floor/bretagnolle_huber']
    assert 0 <= max(floors) <= values['acceptance'] <= 1
    for name, value in values.items():
      np.testing.assert_allclose(value, alone[name], rtol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_draft_that_is_the_target_is_never_refused():
  target = toys.transformer(0)
  drafters = students.stack(
    [ModelDrafter(toys.transformer(seed), 5) for seed in (0, 1)]
  )
  c = {'temperature': 1.0, 'k': 2, 'verify': 'rejection', 'max_new_tokens': 12}
  turns = []
  found = scoring.race(
    target, drafters, [[1, 2], [3]], c, 2, lambda: turns.append(0)
  )
  assert len(turns) == 4
  same, other = found
  assert same['tokens_per_round'] == 3 > other['tokens_per_round'] >= 1
  for row in found:
    assert row['speedup_min'] <= row['speedup'] <= row['speedup_max']


ROWS = [
  {'loss.kl_weight': w, 'decode.k': k, 'seed': s, 'acceptance': w / 8 + s * k}
  for w in (4.0, 0.0)
  for k in (1, 2)
  for s in (0, 1, 2)
]


def test_means_and_gains_are_over_seeds():
  found = findings.find(ROWS, ['loss.kl_weight', 'decode.k'])
  assert [len(one.rows) for one in found] == [3] * 4
  mean, half = found[1].interval('acceptance')  # λ = 4, K = 2: .5, 2.5, 4.5
  assert mean == pytest.approx(2.5)
  assert half == pytest.approx(4.302653 * 2 / math.sqrt(3), rel=1e-5)
  base = findings.base_of(found[1], found, 'loss.kl_weight')
  assert base is found[3]  # the smallest, not the first
  # Pairs differ by .5 in each seed, whatever the seeds differ by.
  assert found[1].gain(base, 'acceptance') == pytest.approx((0.5, 0.0))


def test_lines_go_along_one_axis():
  values = {'loss.kl_weight': (4.0, 0.0), 'decode.k': (1, 2)}
  assert findings.main_axis(values) == 'loss.kl_weight'
  assert findings.main_axis({'a.b': (1,), 'a.c': (1, 2)}) == 'a.c'
  assert findings.main_axis({'a.b': (1,)}) is None
  found = findings.find(ROWS, list(values))
  lines = findings.lines(
    found, 'decode.k', list(values), (1, 2), ['acceptance']
  )
  assert list(lines) == ['KL weight 4', 'KL weight 0']
  np.testing.assert_allclose(
    lines['KL weight 4']['acceptance'], [[0.5, 0.5], [1.5, 2.5], [2.5, 4.5]]
  )


def result(*weights):
  rows = [
    {'loss.kl_weight': w, 'decode.k': 2, 'seed': s}
    | {'acceptance': 0.5 + w / 8 + s / 100, 'kl': 0.4}
    | {'block_efficiency': 2.0 + w / 8}
    for w in weights
    for s in (0, 1)
  ]
  values = {'loss.kl_weight': weights, 'decode.k': (2,)}
  decode = {'k': 2, 'temperature': 1.0}
  return report.Ablation(values, rows, decode)


def test_all_is_written_and_the_table_has_what_was_measured(tmp_path):
  found = result(1.0, 0.0, 2.0)
  columns, cells = found.table()
  names = ['KL weight', 'α', 'tokens/round', 'KL(p‖q)', 'gain in α']
  assert columns == names and found.best == 2
  assert [row[-1] for row in cells] == ['+0.125 ± 0.000', '', '+0.250 ± 0.000']
  half = 12.7062 * 0.01 / 2  # Student's quantile, of two seeds
  assert cells[1][1] == f'0.505 ± {half:.3f}'
  written = report.write(tmp_path, found, page(), 'python <it>')
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
    path.name for path in written
  )
  said = runs.read_json(tmp_path / 'ablation.json')
  assert said['points'] == found.rows
  assert said['means'][2]['acceptance'] == pytest.approx([0.755, half], 1e-4)
  html = (tmp_path / 'ablation.html').read_text()
  assert html.count('data:image/png;base64,') == 2
  assert 'python &lt;it&gt;' in html and '0.505 ± 0.064' in html


def test_the_best_is_decoded_as_the_run_is():
  rows = [
    {'decode.k': k, 'data': i, 'seed': s, 'block_efficiency': k + i + s * away}
    for k in (2, 8)
    for i, away in ((0, 9.0), (1, -1.0))
    for s in (0, 1)
  ]
  values = {'decode.k': (2, 8), 'data': (0, 1)}
  for k, best in ((2, 0), (8, 2), (4, None)):
    decode = {'k': k, 'temperature': 1.0}
    found = report.Ablation(values, rows, decode)
    assert found.best == best


def test_a_draft_that_diverges_is_named(workspace):
  some = [Student(0.0, 0), Student(INF, 3)]
  own = Workspace(
    workspace.folder, page(loss__divergence='ablation_test:nowhere')
  )
  folder = workspace.folder / 'diverges'
  with pytest.raises(FloatingPointError) as error:
    students.train(own, workspace.target(), some, folder, 'diverges')
  words = 'of the draft of KL weight inf and seed 3: loss is nan at step 1'
  assert str(error.value).startswith(words)


def nowhere(logits, target_log_p):
  """A divergence that is not finite; of weight zero it does no harm."""
  del target_log_p
  return jnp.full(logits.shape[:-1], jnp.nan)


def test_a_single_point_is_reported_without_pictures(tmp_path):
  written = report.write(tmp_path, result(1.0), page(), 'python it')
  suffixes = [path.suffix for path in written]
  assert suffixes == ['.html', '.csv', '.json']
  assert result(1.0).table()[0] == ['α', 'tokens/round', 'KL(p‖q)']


def test_the_page_is_eighteen_drafts_on_each_text():
  config = experiment.load(scripts.ROOT / 'configs/ablation_kl.py').to_dict()
  points, groups = planned(config)
  assert len(points) == 36
  assert [len(group.students) for group in groups] == [18, 18]
  assert [group.config['data']['target'] for group in groups] == [0, 1]


def test_csv_has_a_row_per_point_and_gaps_for_what_it_lacks(tmp_path):
  rows = [
    {'draft.model': {'width': 8}, 'seed': s, 'kl': INF, f'depth_{s}': 0.5}
    for s in (0, 1)
  ]
  findings.write_csv(tmp_path / 'x.csv', rows)
  assert (tmp_path / 'x.csv').read_text().splitlines() == [
    'draft.model,seed,kl,depth_0,depth_1',
    'width=8,0,inf,0.5,',
    'width=8,1,inf,,0.5',
  ]


SAME = 'loss.kl_weight', 'draft.model.width', 'decode.temperature', 'seed'
SAME += 'acceptance', 'block_efficiency', 'kl', 'reverse_kl', 'perplexity'
SAME += 'acceptance/depth_2', 'floor/pinsker', 'tokens_per_round'


@pytest.mark.slow
def test_a_killed_ablation_goes_on_to_equal_results(workspace, tmp_path):
  """Two groups, killed behind the first; then a weight more."""

  def command(folder, *more):
    return scripts.start(
      'eval/ablation.py',
      '--config=configs/ablation_kl.py:tiny',
      f'--workdir={folder}',
      '--axis=draft.model.width=16,32',
      *more,
    )

  def run(folder, *more):
    code, out, error = scripts.finish(command(folder, *more), 300)
    assert code == 0, error
    points = runs.read_json(folder / 'ablation.json')['points']
    return out, [{name: point[name] for name in SAME} for point in points]

  straight, broken = tmp_path / 'a', tmp_path / 'b'
  for folder in (straight, broken):
    copy(workspace.folder, folder)
  _, wanted = run(straight)
  assert len(wanted) == 2 * 2 * 2 * 2  # weights, widths, temperatures, seeds

  process = command(broken)
  while not list(broken.glob('ablation/*/0/measured/*.json')):
    assert process.poll() is None
    time.sleep(0.01)
  process.kill()
  process.communicate()
  first = {path: stamp(path) for path in broken.glob('ablation/*/0/4')}
  assert len(first) == 1
  _, found = run(broken)
  assert found == wanted
  out, again = run(broken)
  assert again == wanted and 'of which 0 are to be trained' in out
  assert {path: stamp(path) for path in first} == first

  out, more = run(broken, '--axis=loss.kl_weight=0,1,inf')
  assert 'of which 4 are to be trained, in 2 trainings' in out
  assert [p for p in more if p['loss.kl_weight'] != 1.0] == wanted
  assert len(more) == len(wanted) * 3 // 2
  html = (broken / 'ablation.html').read_text()
  assert html.count('data:image/png;base64,') == 2
  assert '--axis=loss.kl_weight=0,1,inf' in html
  rows = (broken / 'ablation.csv').read_text().splitlines()
  assert len(rows) == len(more) + 1

  code, _, error = scripts.finish(command(broken, '--config.distill.batch=3'))
  assert code == 2 and 'distill.batch: 2 -> 3' in error
  assert error.count('\n') == 1

  code, out, error = scripts.finish(command(broken, '--compare=2'))
  assert code == 0, error
  assert '2 steps of 4 drafts: together' in out
  said = runs.read_json(broken / 'ablation_compare.json')
  assert said['difference'] < 1e-4


def copy(run, folder):
  """A run with the same target."""
  shutil.copytree(run, folder, ignore=shutil.ignore_patterns('ablation'))


def stamp(path):
  return path.stat().st_mtime_ns

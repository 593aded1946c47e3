"""Acceptance against the KL weight: one draft per weight and seed.

    python eval/ablation.py --config configs/stdlib.py

All drafts are trained together, on the same batches and behind one shared pass
of the target. Writes `ablation.json` and a plot into the run, and makes the
best draft the run's draft where it has none. The same command goes on after an
interruption.
"""

import math

import jax
import jax.numpy as jnp
import rich
import rich.table

from specjax import (
  data,
  distill,
  experiment,
  metrics,
  plots,
  runs,
  training,
  warps,
)
from specjax.checkpoint import Checkpoints
from specjax.workspace import Workspace

SECTIONS = ('corpus', 'target', 'pretrain')
OWN = ('draft', 'distill', 'ablation')


def main(config, folder):
  """Trains the drafts, measures them, and says which is best."""
  config = config.to_dict()
  students = [
    (weight, seed)
    for weight in config['ablation']['kl_weights']
    for seed in range(config['ablation']['seeds'])
  ]
  objectives = [distill.objective(weight) for weight, _ in students]
  begun = Checkpoints(folder / 'ablation')
  if begun.latest() is not None:
    old = begun.meta(begun.latest())['config']
    runs.refuse_changes(begun.directory, old, config, OWN)
  runs.open_run(folder, config, SECTIONS, set(config) - {'workdir', *SECTIONS})
  workspace = Workspace(folder, runs.read_json(folder / 'config.json'))
  target = workspace.target()
  trained, scores = train(workspace, target, students, stack(objectives))
  points = [
    {'kl_weight': weight, 'seed': seed}
    | {name: float(value[i]) for name, value in scores.items()}
    for i, (weight, seed) in enumerate(students)
  ]
  report(workspace, points)
  best = max(range(len(points)), key=lambda i: points[i]['block_efficiency'])
  promote(workspace, jax.tree.map(lambda x: x[best], trained), points[best])


def train(workspace: Workspace, target, students, objectives):
  """Trains `[P]` drafts at once; returns them and their measurements `[P]`."""
  c, decode = workspace.config['distill'], workspace.config['decode']
  tx = distill.optimizer(
    c['learning_rate'], c['steps'], c['warmup'], c['weight_decay'], c['clip']
  )
  drafters = stack([workspace.new_drafter(seed) for _, seed in students])
  state = jax.vmap(lambda model: distill.init(model, tx))(drafters)
  # The target and the batch are not mapped, so they are computed on once.
  update = jax.jit(
    jax.vmap(
      distill.make_step(distill.distill_loss, tx), in_axes=(0, None, None, 0)
    ),
    donate_argnums=0,
  )
  measure = jax.jit(
    jax.vmap(distill.measure, in_axes=(0, None, None, None, None)),
    static_argnums=3,
  )
  rollouts = workspace.rollouts(target, decode['temperature'])
  warp = warps.temperature(decode['temperature'])

  def step(state, batch):
    state, scalars = update(state, target, batch, objectives)
    return state, {name: value.max() for name, value in scalars.items()}

  def scores(drafters):
    return distill.means(
      measure(drafters, target, warp, decode['k'], batch)
      for batch in data.in_order(rollouts, 16)
    )

  def evaluate(drafters):
    measured = scores(drafters)
    each = {
      f'{name}/kl_weight={weight:g}/seed={seed}': float(values[i])
      for name, values in measured.items()
      for i, (weight, seed) in enumerate(students)
    }
    return {**each, 'acceptance': float(measured['acceptance'].max())}

  state = training.fit(
    state,
    step,
    data.Batches(workspace.windows('train'), c['batch'], c['seed']),
    evaluate,
    steps=c['steps'],
    every=c['eval_every'],
    folder=workspace.folder / 'ablation',
    log=workspace.folder / 'logs' / 'ablation',
    meta={'config': {key: workspace.config[key] for key in OWN}},
    score=lambda values: values['acceptance'],
    show=('acceptance',),
    tokens=c['batch'] * workspace.config['corpus']['window'],
  )
  return state.model, scores(state.model)


def report(workspace: Workspace, points):
  """Writes the table, the JSON file and the plot."""
  k = workspace.config['decode']['k']
  weights = list(workspace.config['ablation']['kl_weights'])
  rows = [[p for p in points if p['kl_weight'] == w] for w in weights]
  base = rows[weights.index(min(weights))]
  table = rich.table.Table(title='on held-out text that the target wrote')
  for column in ('KL weight', 'acceptance', f'block efficiency, K = {k}'):
    table.add_column(column, justify='right')
  table.add_column('KL, nats', justify='right')
  table.add_column(f'gain over KL weight {min(weights):g}', justify='right')
  gains = {}
  for weight, row in zip(weights, rows, strict=True):
    cells = [interval([p[name] for p in row]) for name in COLUMNS]
    # Drafts of one seed start alike and see the same batches.
    pairs = zip(row, base, strict=True)
    gain = [p['acceptance'] - b['acceptance'] for p, b in pairs]
    gains[f'{weight:g}'] = metrics.confidence_interval(gain)
    table.add_row(f'{weight:g}', *cells, interval(gain, '+'))
  rich.print(table)
  path = workspace.folder / 'ablation.json'
  runs.write_json(
    path,
    {
      'k': k,
      'temperature': workspace.config['decode']['temperature'],
      'points': points,
      'acceptance_gain': gains,
      'versions': runs.versions(),
      'device': runs.device(),
    },
  )

  def grid(name):
    return jnp.array([[p[name] for p in row] for row in rows]).T

  picture = plots.acceptance_by_kl_weight(
    workspace.folder / 'acceptance_by_kl_weight.png',
    weights,
    grid('acceptance'),
    grid('block_efficiency'),
    k,
  )
  print(f'table: {path}\npicture: {picture}')


COLUMNS = ('acceptance', 'block_efficiency', 'kl')


def interval(values, sign='') -> str:
  """Mean, and its 95 % interval where there are several values."""
  mean, half = metrics.confidence_interval(values)
  wide = f' ± {half:.3f}' if math.isfinite(half) else ''
  return f'{mean:{sign}.3f}{wide}'


def promote(workspace: Workspace, drafter, point):
  """Makes a draft the run's own, unless it has one."""
  drafts = Checkpoints(workspace.folder / 'draft')
  what = f'KL weight {point["kl_weight"]:g}, seed {point["seed"]}'
  if drafts.latest() is not None:
    print(f'best: {what}; {drafts.directory} stays as it is')
    return
  config = {key: workspace.config[key] for key in ('draft', 'distill')}
  drafts.save(
    workspace.config['distill']['steps'],
    {'model': drafter},
    {
      'model': workspace.draft_config,
      'tokenizer': workspace.tokenizer.hash,
      'config': config | {'loss': {'kl_weight': point['kl_weight']}},
    },
    score=point['block_efficiency'],
  )
  print(f'best: {what}, saved as {workspace.folder / "draft"}')


def stack(trees):
  """One tree of arrays `[P, ...]` from P trees."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


if __name__ == '__main__':
  experiment.app(main, default='configs/stdlib.py', resumable=True)

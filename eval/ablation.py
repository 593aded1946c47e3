"""Acceptance against the KL weight: one draft per weight and seed.

    python eval/ablation.py --config configs/stdlib.py

The drafts of a seed start alike, see the same batches and are trained together
behind one shared pass of the target; another seed changes both. Each is
measured after its last step. Writes `ablation.json` and a plot into the run,
and makes the best draft the run's draft where it has none. The same command
goes on after an interruption.
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
  optimizing,
  plots,
  recipes,
  runs,
  training,
  warps,
)
from specjax.checkpoint import Checkpoints
from specjax.workspace import Workspace

OWN = ('draft', 'distill', 'validation')


def main(config, folder):
  """Trains the drafts, measures them, and says which is best."""
  config = config.to_dict()
  weights = list(config['ablation']['kl_weights'])
  objectives = stack([distill.objective(weight) for weight in weights])
  begun = Checkpoints(folder / 'ablation' / 'seed0')
  if begun.latest() is not None:
    old = begun.meta(begun.latest())['config']
    new = {**config, 'kl_weights': weights}
    runs.refuse_changes(folder / 'ablation', old, new, (*OWN, 'kl_weights'))
  workspace = Workspace.create(folder, config)
  target = workspace.target()
  points, best = [], None
  for seed in range(config['ablation']['seeds']):
    drafters, scores = train(workspace, target, weights, objectives, seed)
    for i, weight in enumerate(weights):
      measured = {name: float(value[i]) for name, value in scores.items()}
      points.append({'kl_weight': weight, 'seed': seed, **measured})
      score = measured['block_efficiency']
      if best is None or score > best[0]['block_efficiency']:
        best = points[-1], jax.tree.map(lambda x, i=i: x[i], drafters)
  report(workspace, weights, points)
  promote(workspace, *best)


def train(workspace: Workspace, target, weights, objectives, seed):
  """Trains `[P]` drafts at once; returns them and their measurements `[P]`."""
  c, decode = workspace.config['distill'], workspace.config['decode']
  name = f'seed{seed}'
  tx, update = recipes.optimization(c, distill.distill_loss, batch=1)
  drafters = stack([workspace.new_drafter(c['seed'] + seed)] * len(weights))
  state = jax.vmap(lambda model: optimizing.init(model, tx))(drafters)
  # The target and the batch are not mapped, so they are computed on once.
  update = jax.jit(
    jax.vmap(update, in_axes=(0, None, None, 0)),
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
      f'{name}/kl_weight={weight:g}': float(values[i])
      for name, values in measured.items()
      for i, weight in enumerate(weights)
    }
    return each | {
      name: float(measured[name].max())
      for name in ('acceptance', 'block_efficiency')
    }

  config = {key: workspace.config[key] for key in OWN}
  batches = data.Batches(
    workspace.windows('train'), c['batch'], c['seed'] + seed
  )
  state = training.fit(
    state,
    step,
    lambda i, model: batches[i],
    evaluate,
    steps=c['steps'],
    every=c['eval_every'],
    folder=workspace.folder / 'ablation' / name,
    log=workspace.folder / 'logs' / 'ablation' / name,
    meta={'config': {**config, 'kl_weights': weights}},
    score=lambda values: values['block_efficiency'],
    show=('acceptance', 'block_efficiency'),
    tokens=c['batch'] * workspace.config['corpus']['window'],
  )
  return state.model, scores(state.model)


def report(workspace: Workspace, weights, points):
  """Writes the table, the JSON file and the plot."""
  k = workspace.config['decode']['k']
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
    runs.portable(
      {
        'k': k,
        'temperature': workspace.config['decode']['temperature'],
        'points': points,
        'acceptance_gain': gains,
        'versions': runs.versions(),
        'device': runs.device(),
      }
    ),
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


def promote(workspace: Workspace, point, drafter):
  """Makes a draft the run's own, unless it has one."""
  drafts = Checkpoints(workspace.folder / 'draft')
  what = f'KL weight {point["kl_weight"]:g}, seed {point["seed"]}'
  if drafts.latest() is not None:
    print(f'best: {what}; {drafts.directory} stays as it is')
    return
  config = {key: workspace.config[key] for key in OWN}
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

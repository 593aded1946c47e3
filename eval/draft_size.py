"""How large should a draft be? One draft per size, distilled alike and timed.

    python eval/draft_size.py --config configs/stdlib.py

The drafts of `config.draft_sizes` are distilled from the run's target with the
steps, batches and KL weight of its draft, then each decodes in turns with plain
decoding, at batch 1 where `config.speedup.batches` has it, at every K of
`config.speedup.ks`. Writes `draft_size.json` and a plot into the run. Five
drafts cost about twenty minutes on two busy CPU cores, fewer on quiet ones, and
their timing as many again at most. The same command goes on after an
interruption, and said once more it only measures again.
"""

import jax

from specjax import (
  experiment,
  logs,
  plots,
  printing,
  recipes,
  runs,
  settings,
  sweep,
  timing,
  verify,
)
from specjax.workspace import Workspace


def main(config, folder):
  """Trains the drafts, measures them, and says which is fastest."""
  config = config.to_dict()
  if 'draft_sizes' not in config:
    raise ValueError(
      "the run's configuration has no draft_sizes: name a page that has them,"
      ' as --config configs/stdlib.py'
    )
  settings.check(config)
  settings.require_language_model(
    config['draft'], 'and draft_sizes are those of models: take another'
  )
  for name, own in configs(config).items():
    recipes.refuse_other_draft(folder / name, own)
  run = Workspace.create(folder, config)
  target = run.target()
  spaces = {
    name: Workspace(folder, own) for name, own in configs(run.config).items()
  }
  scores = {
    name: recipes.distil(own, target, name) for name, own in spaces.items()
  }
  sizes = []
  for name, own in spaces.items():
    drafter = own.drafter(name)
    found = describe(own, target, drafter) | scores[name]
    sizes.append({'draft': name} | found | race(own, target, drafter, name))
  report = {
    'device': runs.device(),
    'versions': runs.versions(),
    'temperature': config['decode']['temperature'],
    'batch': min(config['speedup']['batches']),
    'verify': config['decode']['verify'],
    'target_parameters': parameters(target),
    'longest_k': max(config['speedup']['ks']),
    'sizes': sizes,
    'config': run.config,
  }
  path = folder / 'draft_size.json'
  runs.write_json(path, runs.portable(report))
  picture = plots.draft_size(
    folder / 'draft_size.png', sizes, report['longest_k']
  )
  show(report)
  print(f'table: {path}\npicture: {picture}')


def configs(config) -> dict:
  """The run's configuration as each draft has it, by the draft's folder.

  All of it is the run's own but the sizes of the model and its learning rate:
  one rate for all would show which size it suits, not which size is best.
  """
  columns, found = config['draft_sizes'], {}
  for row in zip(*columns.values(), strict=True):
    sizes = dict(zip(columns, row, strict=True))
    rate = {'learning_rate': sizes.pop('learning_rate')}
    draft = config['draft']
    found[f'sizes/{sizes["width"]}x{sizes["layers"]}'] = {
      **config,
      'draft': {**draft, 'model': {**draft['model'], **sizes}},
      'distill': {**config['distill'], **rate},
    }
  return found


def describe(workspace: Workspace, target, drafter) -> dict:
  """What a draft is, beside what the target is."""
  model, count = workspace.config['draft']['model'], parameters(drafter.model)
  return {
    'model': model,
    'learning_rate': workspace.config['distill']['learning_rate'],
    'parameters': count,
    # Tied, it counts once.
    'of_them_embedding': workspace.tokenizer.vocab_size * model['width'],
    'ratio': count / parameters(target),
  }


def race(workspace: Workspace, target, drafter, name) -> dict:
  """Costs of a draft, and its speed at every K in turns with plain decoding."""
  c, decode = workspace.config['speedup'], workspace.config['decode']
  batch, size = min(c['batches']), decode['prompt_length']
  count = max(c['prompts'], *c['batches'])
  # Of one split, so that they differ by nothing but chance.
  total = count + c['others']
  prompts = workspace.prompts('test', total, size)
  timed = sweep.groups(prompts, batch, c['prompts'])
  others = sweep.groups(prompts[count:], batch, total - count)
  kind, temperature = (
    workspace.config['draft']['drafter'],
    decode['temperature'],
  )
  arms = sweep.Race(
    target,
    drafter,
    name=kind,
    ks=c['ks'],
    ngram_k=decode['k'],
    rule=verify.find(decode['verify']),
    groups=timed,
    others=others,
    max_new_tokens=decode['max_new_tokens'],
  )
  lowered = arms.lowered()
  with logs.Progress(
    len(lowered), f'compile {name}', unit='programs'
  ) as progress:
    arms.compiled(timing.compile_all(lowered, progress.advance))
  outlook = arms.outlook(temperature)
  with logs.Progress(
    c['repeats'] * arms.parts, f'decode {name}', unit='turns'
  ) as progress:
    rows = arms.run(temperature, c['repeats'], progress.advance)
  rows = [row for row in rows if row['drafter'] == kind]
  costs, new = arms.costs()[kind], decode['max_new_tokens']
  for row in rows:
    row |= sweep.predict(row, outlook, costs, arms.parts, new)
  return fastest(rows) | {'costs': costs._asdict(), 'sweep': rows}


def fastest(rows) -> dict:
  """The best K of a draft as measured and as predicted, and the longest K."""
  best = max(rows, key=lambda row: row['speedup'])
  predicted = max(rows, key=lambda row: row['predicted_speedup'])
  longest = max(rows, key=lambda row: row['k'])
  return {
    **{
      key: best[key] for key in ('k', 'speedup', 'speedup_min', 'speedup_max')
    },
    'draft_cost_ratio': best['draft_cost_ratio'],
    'verify_cost': best['verify_cost'],
    'predicted_k': predicted['k'],
    'predicted_speedup': predicted['predicted_speedup'],
    'speedup_at_longest': longest['speedup'],
  }


def parameters(model) -> int:
  """Numbers in a model, the embedding counted."""
  return sum(leaf.size for leaf in jax.tree.leaves(model))


def show(report):
  """Prints the table, and what it comes to."""
  console = printing.console(96)
  console.print(
    f'\nT = {report["temperature"]:g}, batch {report["batch"]}; the target has'
    f' {report["target_parameters"]:,} parameters, its embedding counted'
  )
  numbers = 'draft', 'parameters', 'share', 'α', 'c', 'K', 'speedup [min–max]'
  longest = f'K = {report["longest_k"]}'
  table = printing.table(numbers=(*numbers, 'predicted', longest))
  best = max(report['sizes'], key=lambda row: row['speedup'])
  for row in report['sizes']:
    table.add_row(
      row['draft'].rpartition('/')[-1],
      f'{row["parameters"]:,}',
      f'{row["ratio"]:.3f}',
      f'{row["acceptance"]:.3f}',
      f'{row["draft_cost_ratio"]:.3f}',
      f'{row["k"]}',
      printing.gain(row),
      f'{row["predicted_speedup"]:.2f}x, K = {row["predicted_k"]}',
      f'{row["speedup_at_longest"]:.2f}x',
      style='bold' if row is best else None,
    )
  console.print(table)
  print(conclusion(report))


def conclusion(report) -> str:
  """Where the optimum falls, and what shorter and longest drafts give there."""
  sizes, longest = report['sizes'], report['longest_k']
  best = max(sizes, key=lambda row: row['speedup'])
  near = [
    row['draft']
    for row in sizes
    if row is not best and row['speedup_max'] >= best['speedup_min']
  ]
  text = (
    f'fastest: {best["draft"]}, 1/{1 / best["ratio"]:.3g} of the target,'
    f' {best["speedup"]:.2f}x at K = {best["k"]}'
  )
  if near:
    text += f' (min–max does not tell it from {", ".join(near)})'
  # 4 to 8, where the longest is 16.
  speeds = {
    row['k']: f'{row["speedup"]:.2f}x at K = {row["k"]}'
    for row in best['sweep']
    if longest <= 4 * row['k'] <= 2 * longest or row['k'] == longest
  }
  return f'{text}; of that draft, {", ".join(speeds.values())}'


if __name__ == '__main__':
  experiment.app(main, default='configs/stdlib.py', resumable=True)

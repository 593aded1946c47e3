"""Trains a target on text.

    python train/pretrain.py --config configs/stdlib.py

The same command goes on after an interruption.
"""

import functools
import math

import jax
import numpy as np

from specjax import (
  data,
  distill,
  experiment,
  flops,
  metrics,
  recipes,
  sharding,
  training,
)
from specjax.workspace import TARGET, Workspace


def main(config, folder):
  """Opens the run and trains its target."""
  pretrain(recipes.open_to_train(folder, config.to_dict(), 'pretrain'))


def pretrain(workspace: Workspace):
  """Trains the target of a run, from its newest checkpoint if it has one.

  One that `config.target.path` names is loaded instead.
  """
  path = workspace.config['target']['path']
  if path:
    workspace.adopt_target()
    size = sum(leaf.size for leaf in jax.tree.leaves(workspace.target()))
    print(f'target: {size:,} parameters, from {path}')
    return
  c, mesh = workspace.config['pretrain'], workspace.mesh
  workspace.prepare()
  windows = workspace.windows('train')
  held_out = workspace.windows('validation')
  print(
    f'{workspace.corpus.name}: {len(windows):,} windows to train on,'
    f' {len(held_out):,} held out; a unigram model of the tokens needs'
    f' {unigram(workspace):.3f} bits per byte'
  )
  tx, step = recipes.optimization(c, distill.language_loss, batch=0)
  batches = data.Batches(windows, c['batch'], c['seed'], mesh)
  model = workspace.new_target(c['seed'])
  sharding.require_divided(model, mesh, 'target')
  state = recipes.begin(model, tx, mesh)
  update = sharding.step(step, state)
  size = sum(leaf.size for leaf in jax.tree.leaves(state.model))
  print(f'target: {size:,} parameters')
  training.fit(
    state,
    update,
    lambda i, model: batches[i],
    functools.partial(evaluate, workspace=workspace),
    steps=c['steps'],
    every=c['eval_every'],
    folder=workspace.folder / 'target',
    log=workspace.folder / 'logs' / 'pretrain',
    meta={
      'model': workspace.target_config,
      'tokenizer': workspace.tokenizer.hash,
      'config': {key: workspace.config[key] for key in TARGET},
    },
    score=lambda values: -values['nats'],
    show=('bits_per_byte',),
    like=data.described(c['batch'], workspace.config['corpus']['window'], mesh),
    operations=lambda *like: flops.products(update, *like),
    dtype=c['dtype'],
  )
  final = evaluate(workspace.target(), workspace)
  print(
    f'target: {final["nats"]:.3f} nats per token, {final["bits_per_byte"]:.3f}'
    ' bits per byte on held-out text'
  )


def evaluate(target, workspace: Workspace) -> dict[str, float]:
  """Loss on held-out text."""
  total = weight = count = 0.0
  for batch in held_out(workspace):
    nats, tokens = _language_loss(
      target, sharding.by_rows(batch, workspace.mesh)
    )
    total, weight = total + float(nats), weight + float(tokens)
    count += bytes_in(workspace, batch)
  return {
    'nats': total / weight,
    'bits_per_byte': metrics.bits_per_byte(total, count),
  }


def unigram(workspace: Workspace) -> float:
  """Bits per byte of the tokens' own frequencies, on the same text."""
  ids = workspace.ids('train')
  counts = 1 + np.bincount(ids, minlength=workspace.tokenizer.vocab_size)
  nats = math.log(counts.sum()) - np.log(counts)
  total = size = 0.0
  for batch in held_out(workspace):
    total += float((nats[batch.tokens] * batch.weight).sum())
    size += bytes_in(workspace, batch)
  return metrics.bits_per_byte(total, size)


def held_out(workspace: Workspace):
  """A fixed sample of held-out windows."""
  windows = workspace.windows('validation')
  count = workspace.config['pretrain']['eval_windows']
  stride = max(1, len(windows) // count)
  sample = [windows[i] for i in range(0, len(windows), stride)][:count]
  size = workspace.config['pretrain']['batch']
  return data.in_order(sample, sharding.whole_parts(size, workspace.mesh))


def bytes_in(workspace: Workspace, batch) -> float:
  """Bytes of the tokens that are predicted."""
  lengths = workspace.tokenizer.byte_lengths[batch.tokens]
  return float((lengths * batch.weight).sum())


_language_loss = jax.jit(distill.language_loss)

if __name__ == '__main__':
  experiment.app(
    main, default='configs/stdlib.py', resumable=True, distributed=True
  )

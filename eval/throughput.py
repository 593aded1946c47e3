"""How fast a draft is distilled, beside PyTorch and beside the machine's limit.

    python eval/throughput.py --config configs/stdlib.py

One step is the target's pass and an update of the draft, on windows of random
tokens; nothing is trained and nothing written. Its multiplications, with those
that are made again to save memory, are compared with what the machine does at
best, in one large product. Where
PyTorch is installed (`pip install '.[torch]'`), the same step is timed there in
eager mode, in turns with ours, from the same weights; that both compute the
same loss is checked first.
"""

import importlib.util

import jax
import numpy as np
from absl import flags
from flax import nnx

from specjax import (
  distill,
  drafters,
  experiment,
  flops,
  optimizing,
  recipes,
  settings,
  timing,
)
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import Batch

REPEATS = flags.DEFINE_integer('repeats', 9, 'timings of each, in turns')
STEPS = flags.DEFINE_integer('steps', 4, 'steps in a timing')


def main(config, folder):
  """Times both, and prints what they come to."""
  config = config.to_dict()
  settings.check(config)
  settings.require_language_model(
    config['draft'], 'and what is timed here is the training of models'
  )
  if REPEATS.value < 1 or STEPS.value < 1:
    raise ValueError(
      f'--repeats is {REPEATS.value} and --steps {STEPS.value}: give at least 1'
    )
  c, size = config['distill'], config['corpus']['vocab_size']
  target = Transformer(
    TransformerConfig(vocab_size=size, **settings.sizes(config['target'])),
    nnx.Rngs(0),
  )
  draft = {**config['draft'], 'k': config['decode']['k']}
  build = drafters.find(draft['drafter']).build
  drafter = build(draft, target.config, nnx.Rngs(1))
  tokens = np.random.default_rng(0).integers(
    0, size, (c['batch'], config['corpus']['window'])
  )
  call, operations = ours(config, target, drafter, tokens.astype(np.int32))
  arms = {'specjax': call}
  if importlib.util.find_spec('torch'):
    import torch_distill

    weights = distill.objective(config['loss']['kl_weight'])
    arms['PyTorch eager'] = torch_distill.training(
      target, drafter.model, tokens, weights, c['learning_rate'], STEPS.value
    )
    first = [float(arms[name]()[0]) for name in ('specjax', 'PyTorch eager')]
    if not np.isclose(*first, rtol=1e-3):
      raise RuntimeError(
        f'the same step has a loss of {first[0]} here and {first[1]} in PyTorch'
      )
  else:
    print("PyTorch is not installed (pip install '.[torch]'): timed alone")
  for call in arms.values():
    jax.block_until_ready(call())
  seconds, _ = timing.alternate(
    {name: [call] for name, call in arms.items()}, REPEATS.value
  )
  report(seconds, tokens.size, operations, c['dtype'])


def ours(config, target, drafter, tokens):
  """A call that makes `STEPS` updates, and the operations of each of them."""
  tx, step = recipes.optimization(
    {**config['distill'], 'weight_decay': 0.0},
    recipes.loss(config),
    batch=1,
  )
  batch = Batch(tokens, np.ones_like(tokens), np.ones(tokens.shape, np.float32))
  weights = distill.objective(config['loss']['kl_weight'])
  step = jax.jit(step, donate_argnums=0)
  state = optimizing.init(drafter, tx)
  operations = flops.products(step, state, target, batch, weights)

  def call():
    nonlocal state
    found = []
    for _ in range(STEPS.value):
      state, scalars = step(state, target, batch, weights)
      found.append(scalars['loss'])
    return jax.block_until_ready(found)

  return call, operations


def report(seconds, tokens, operations, dtype):
  """Prints rates, the ratio and the share of the machine's best.

  Args:
    seconds: of each arm and repeat.
    tokens: of a step.
    operations: of ours.
    dtype: of its products.
  """
  rates = {
    name: STEPS.value / float(np.median(taken))
    for name, taken in seconds.items()
  }
  for name, rate in rates.items():
    print(f'{name}: {rate * tokens:,.0f} tokens/s')
  peak, done = flops.peak(dtype), rates['specjax'] * operations
  print(
    f'specjax does {done / 1e9:,.0f} GFLOP/s in matrix products,'
    f' {done / peak:.0%} of the {peak / 1e9:,.0f} of one large product'
  )
  if len(seconds) > 1:
    ratio = timing.ratio(seconds['PyTorch eager'], seconds['specjax'])
    print(
      f'specjax is {ratio.median:.2f} times as fast as PyTorch eager'
      f' [{ratio.min:.2f}-{ratio.max:.2f}]'
    )


if __name__ == '__main__':
  experiment.app(main, default='configs/stdlib.py')

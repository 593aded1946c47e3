"""How fast a draft is distilled, beside PyTorch and beside the machine's limit.

    python eval/throughput.py --config configs/stdlib.py

One step is the target's pass and an update of the draft, on windows of random
tokens; nothing is trained and nothing written. Its multiplications are counted
and compared with what the machine does at best, in one large product. Where
PyTorch is installed (`pip install '.[torch]'`), the same step is timed there in
eager mode, in turns with ours, from the same weights; that both compute the
same loss is checked first.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
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

SIZE = 2048  # of the square matrices whose product is the machine's best


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
  arms = {
    'specjax': ours(config, target, drafter, tokens.astype(np.int32)),
    'product': product(),
  }
  if importlib.util.find_spec('torch'):
    from peers import torch_distill

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
  each = flops.distillation(
    target.config, drafter.model.config, tokens.shape[1]
  )
  report(seconds, tokens.size * STEPS.value, each)


def ours(config, target, drafter, tokens):
  """A call that makes `STEPS` updates, the first from the same weights."""
  tx, step = recipes.optimization(
    {**config['distill'], 'weight_decay': 0.0},
    recipes.loss(config),
    batch=1,
  )
  batch = Batch(tokens, np.ones_like(tokens), np.ones(tokens.shape, np.float32))
  weights = distill.objective(config['loss']['kl_weight'])
  step = jax.jit(step, donate_argnums=0)
  state = optimizing.init(drafter, tx)

  def call():
    nonlocal state
    found = []
    for _ in range(STEPS.value):
      state, scalars = step(state, target, batch, weights)
      found.append(scalars['loss'])
    return jax.block_until_ready(found)

  return call


def product():
  """A call of one large product of float32 matrices."""
  a = jnp.ones((SIZE, SIZE), jnp.float32)
  return functools.partial(jax.jit(jnp.matmul), a, a)


def report(seconds, tokens, each):
  """Prints rates, ratios and the share of the machine's best."""
  peak = 2 * SIZE**3 / float(np.median(seconds.pop('product')))
  print(f'one product of {SIZE} x {SIZE} matrices: {peak / 1e9:,.0f} GFLOP/s')
  for name, taken in seconds.items():
    rate = tokens / float(np.median(taken))
    print(
      f'{name}: {rate:,.0f} tokens/s, {rate * each / peak:.0%} of that'
      f' ({each / 1e6:,.1f} MFLOP a token)'
    )
  if len(seconds) > 1:
    ratio = timing.ratio(seconds['PyTorch eager'], seconds['specjax'])
    print(
      f'specjax is {ratio.median:.2f} times as fast as PyTorch eager'
      f' [{ratio.min:.2f}-{ratio.max:.2f}]'
    )


if __name__ == '__main__':
  experiment.app(main, default='configs/stdlib.py')

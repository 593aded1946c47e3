"""The same work on any mesh, for sharding_test: what came out goes to a file.

python mesh_program.py OUT DATA FSDP TENSOR [HOST:PORT,COUNT,NUMBER]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toys

from specjax import (
  data,
  distill,
  footprint,
  generation,
  optimizing,
  processes,
  recipes,
  sharding,
  verify,
  warps,
)
from specjax.drafters.model import ModelDrafter
from specjax.types import Batch

V, ROWS, T = 16, 8, 12
SIZES = dict(vocab_size=V, layers=2, heads=4, kv_heads=2, qkv_bias=True)
HALF = SIZES | {'vocab_size': 256, 'dtype': 'bfloat16'}


def texts(mesh):
  """Tokens by sampling, of an oracle, and by greedy choice, of a model."""

  def pair(sizes):
    return (
      toys.transformer(**sizes),
      toys.transformer(seed=1, **sizes | {'layers': 1}),
    )

  oracle = toys.markov(vocab=V), toys.markov(seed=1, vocab=V)
  for name, (target, draft), warp in (
    ('oracle', oracle, warps.UNCHANGED),
    ('model', pair(SIZES), warps.temperature(0.0)),
    ('half', pair(HALF), warps.temperature(0.0)),
  ):
    target, draft = sharding.spread((target, draft), mesh)
    drafter = ModelDrafter(draft, 3, warp)
    prompts = [[1 + i % 7] * (1 + i % 3) for i in range(ROWS)]
    result = generation.generate(
      target,
      drafter,
      prompts,
      key=jax.random.key(0),
      max_new_tokens=[20 + i for i in range(ROWS)],
      warp=warp,
      mesh=mesh,
    )
    if name == 'model':
      yield 'planned', planned(target, drafter, prompts, warp, mesh)
    yield name, result.tokens
    yield f'{name}/accepted', result.stats.accepted


def planned(target, drafter, prompts, warp, mesh):
  """Bytes that go into a call and come out, as planned and as compiled."""
  options = dict(key=jax.random.key(0), max_new_tokens=40, mesh=mesh)
  state = generation.start(target, drafter, prompts, **options)
  if mesh:
    rows, heads, *_ = (
      jax.tree.leaves(state.cache.rows)[0].addressable_shards[0].data.shape
    )
    assert rows == ROWS // sharding.parts(mesh)
    assert heads == SIZES['kv_heads'] // mesh.shape['tensor']
  rule = verify.as_pytree(verify.rejection)
  args = target, drafter, rule, warp, jnp.zeros(0, jnp.int32), state, 9
  program = generation.advance.lower(*args, mesh=mesh).compile()
  found = program.memory_analysis()
  size = state.tokens.shape[1]
  plan = footprint.plan(target, drafter, ROWS, size, mesh)
  return np.array(
    [
      [plan.arguments, found.argument_size_in_bytes],
      [plan.outputs, found.output_size_in_bytes],
    ]
  )


def read(asked):
  """Rows of random text, which note that they were asked for."""

  class Noted:
    def __getitem__(self, index):
      asked.append(index)
      tokens = np.random.default_rng(index).integers(0, V, T, np.int32)
      return Batch(tokens, np.ones(T, np.int32), np.ones(T, np.float32))

  return data.Picked([(Noted(), i) for i in range(ROWS)])


def trained(mesh):
  """Logits of a model on a batch, and what one step makes of a draft."""
  asked = []
  batch = data.stack(read(asked), mesh)
  target = sharding.spread(toys.transformer(**SIZES), mesh)

  @jax.jit
  def logits(model, batch):
    features = model.forward(batch.tokens, batch.segments).features
    return model.unembed(features)

  draft = ModelDrafter(toys.transformer(seed=1, **SIZES | {'layers': 1}), 3)
  # By momentum: AdamW's first step is the sign of the gradient, which rounding
  # turns where it is almost zero.
  tx = optax.sgd(0.1, momentum=0.9)
  update = optimizing.make_step(distill.distill_loss, tx, batch=1)
  state = recipes.begin(draft, tx, mesh)
  weights = distill.objective(3.0)
  state, scalars = sharding.step(update, state)(state, target, batch, weights)
  if mesh:
    places = jax.tree.leaves(sharding.placed(state, mesh))
    leaves = jax.tree.leaves(state)
    for leaf, place in zip(leaves, places, strict=True):
      assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    matrices = sum(x.ndim == 2 for x in jax.tree.leaves(state.model))
    divided = sum(x.sharding.shard_shape(x.shape) != x.shape for x in leaves)
    assert divided >= 2 * matrices  # and their momentum
  yield 'logits', logits(target, batch)
  yield 'loss', scalars['loss']
  for i, leaf in enumerate(jax.tree.leaves(state)):
    yield f'state/{i}', leaf
  yield f'asked/{jax.process_index()}', jnp.array(sorted(asked))


def main(out, data, fsdp, tensor, where=None):
  """Does it."""
  if where:
    processes.join(where)
  mesh = sharding.make(int(data), int(fsdp), int(tensor))
  found = {}
  for part in (texts, trained):
    found |= {name: sharding.fetch(value) for name, value in part(mesh)}
  np.savez(f'{out}{jax.process_index()}.npz', **found)


if __name__ == '__main__':
  main(*sys.argv[1:])

"""One pure step of training: the gradient of a loss, and AdamW.

A loss returns the two numbers of a mean over tokens, its weighted sum and its
weight. They are added over micro-batches and divided once, so that an
accumulated step is the step of the whole batch, however its tokens are spread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax import products, weights
from specjax.types import Array


class TrainState(NamedTuple):
  """What a step carries.

  Attributes:
    model: a pytree; all of it is trained.
    opt: the optimiser's state.
    step: int32 scalar, updates made.
  """

  model: Any
  opt: Any
  step: Array


def optimizer(
  learning_rate: float,
  steps: int,
  warmup: int,
  weight_decay: float = 0.0,
  clip: float = 1.0,
) -> optax.GradientTransformation:
  """AdamW with a linear warm-up and a cosine to zero.

  Args:
    learning_rate: its peak.
    steps: updates in all.
    warmup: of which these are warm-up.
    weight_decay: of matrices only, not of norms.
    clip: largest norm of a gradient.

  Raises:
    ValueError: if the warm-up is longer than the training.
  """
  if not 0 <= warmup < steps:
    raise ValueError(
      f'warmup is {warmup}, of {steps} steps: it must be shorter'
    )
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, learning_rate, warmup, steps
  )
  matrices = functools.partial(jax.tree.map, lambda leaf: jnp.ndim(leaf) > 1)
  return optax.chain(
    optax.clip_by_global_norm(clip),
    # A short memory of squared gradients, as for short runs.
    optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=matrices),
  )


def init(model: Any, tx: optax.GradientTransformation) -> TrainState:
  """The state before the first step.

  Raises:
    ValueError: if a parameter is of low precision, in which small updates
      would be lost, or packed for decoding.
  """
  weights.require_whole(model, 'trained')
  # Strong types, as they are after a step: else the step compiles twice.
  model = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), model)
  low = {str(x.dtype) for x in jax.tree.leaves(model)} - {'float32'}
  if low:
    raise ValueError(
      f'parameters of type {", ".join(sorted(low))} cannot be trained: set'
      " the model's dtype to 'float32'; that of the training may be 'bfloat16'"
    )
  return TrainState(model, tx.init(model), jnp.zeros((), jnp.int32))


def make_step(
  loss: Callable[..., tuple[Array, Array]],
  tx: optax.GradientTransformation,
  *,
  batch: int = 0,
  accumulate: int = 1,
  dtype: str = 'float32',
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
  """Makes one update of a loss.

  A step whose loss, gradient or update is not finite leaves the state as it
  was; the scalars tell.

  Args:
    loss: `loss(model, *args)` returns the two numbers of a mean over tokens,
      their weighted sum and their weight.
    tx: the optimiser.
    batch: which of `args` has the batch, arrays `[B, ...]`. Only a step that
      accumulates looks at it.
    accumulate: micro-batches of `B / accumulate` rows that are gone through one
      after the other in the one program. What a loss keeps for its gradient
      then takes that part of the memory, and the sum of the gradients takes one
      copy of the parameters more.
    dtype: of the factors of matrix products, forward and backward, in a loss's
      other models too; see `products`. Parameters, gradients, the optimiser and
      every sum are float32 all the same.

  Returns:
    `step(state, *args) -> (state, scalars)`, to be jitted or mapped.

  Raises:
    ValueError: there is no such dtype; or, when it is traced, the rows of a
      batch cannot be divided.
  """
  products.of(dtype)  # refused before it is traced

  def gradient(model, *args):
    with products.of(dtype):
      return jax.value_and_grad(loss, has_aux=True)(model, *args)

  def accumulated(model, *args):
    def add(sums, rows):
      part = gradient(model, *args[:batch], rows, *args[batch + 1 :])
      return jax.tree.map(jnp.add, sums, part), None

    zero = jnp.zeros(())
    zeros = (zero, zero), jax.tree.map(jnp.zeros_like, model)
    return jax.lax.scan(add, zeros, _split(args[batch], accumulate))[0]

  def step(state, *args):
    sums = gradient if accumulate == 1 else accumulated
    (total, weight), grads = sums(state.model, *args)
    # A batch without a counted token has no loss, and no NaN either.
    count = jnp.maximum(weight, 1.0)
    grads = jax.tree.map(lambda g: g / count, grads)
    updates, opt = tx.update(grads, state.opt, state.model)
    model = optax.apply_updates(state.model, updates)
    scalars = {
      'loss': total / count,
      'gradient_norm': optax.tree.norm(grads),
      'update_norm': optax.tree.norm(updates),
      'tokens': weight,
    }
    sound = jnp.isfinite(sum(scalars.values()))
    after = TrainState(model, opt, state.step + 1)
    after = jax.tree.map(lambda a, b: jnp.where(sound, a, b), after, state)
    return after, scalars

  return step


def _split(rows: Any, count: int) -> Any:
  """`[count, B / count, ...]` from `[B, ...]`."""
  size = jax.tree.leaves(rows)[0].shape[0]
  if size % count:
    raise ValueError(
      f'a batch of {size} rows does not divide into {count} micro-batches: the'
      ' batch must be a multiple'
    )
  # Every so manieth row, so that rows on a mesh stay where they are.
  return jax.tree.map(
    lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), rows
  )

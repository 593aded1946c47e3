"""Training: what is minimised, and one pure step of it.

The draft is trained to minimise `CE(labels) + λ KL(p || q)`, its weights scaled
to sum to one, so that the KL weight λ is their ratio, a sweep over λ compares
losses of one size, and λ = ∞ is distillation alone. They are leaves: one
compiled step serves every λ, and a `vmap` over states and weights trains many
students behind one shared pass of the target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax import losses, metrics
from specjax.types import Array, Batch, LanguageModel, Trainable, Warp

CHUNK = 32  # positions whose logits exist at a time


class Objective(NamedTuple):
  """Weights of the losses, which sum to one.

  Attributes:
    ce: of cross entropy with the text.
    kl: of KL(p || q) from the target.
  """

  ce: float | Array
  kl: float | Array


def objective(kl_weight: float) -> Objective:
  """The objective in which KL weighs `kl_weight` times as much as CE.

  Args:
    kl_weight: λ, from 0 (cross entropy alone) to infinity (KL alone).

  Raises:
    ValueError: if it is negative or NaN.
  """
  if not kl_weight >= 0:
    raise ValueError(
      f'kl_weight is {kl_weight}: it must be 0 or more; inf is KL alone'
    )
  ce = 1 / (1 + kl_weight)
  return Objective(ce, 1 - ce)


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
      would be lost.
  """
  # Strong types, as they are after a step: else the step compiles twice.
  model = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), model)
  low = {str(x.dtype) for x in jax.tree.leaves(model)} - {'float32'}
  if low:
    raise ValueError(
      f'parameters of type {", ".join(sorted(low))} cannot be trained: set'
      " dtype to 'float32'"
    )
  return TrainState(model, tx.init(model), jnp.zeros((), jnp.int32))


def make_step(
  loss: Callable[..., tuple[Array, Array]],
  tx: optax.GradientTransformation,
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
  """Makes one update of a loss.

  Args:
    loss: `loss(model, *args)` returns the two numbers of a mean over tokens,
      their weighted sum and their weight.
    tx: the optimiser.

  Returns:
    `step(state, *args) -> (state, metrics)`, to be jitted or mapped.
  """

  def mean(model, *args):
    total, weight = loss(model, *args)
    # A batch without a counted token has no loss, and no NaN either.
    return total / jnp.maximum(weight, 1.0), weight

  def step(state, *args):
    (value, weight), grads = jax.value_and_grad(mean, has_aux=True)(
      state.model, *args
    )
    updates, opt = tx.update(grads, state.opt, state.model)
    model = optax.apply_updates(state.model, updates)
    scalars = {
      'loss': value,
      'gradient_norm': optax.tree.norm(grads),
      'tokens': weight,
    }
    return TrainState(model, opt, state.step + 1), scalars

  return step


def language_loss(model: LanguageModel, batch: Batch) -> tuple[Array, Array]:
  """Cross entropy of a model on text: the sum over tokens, and their weight."""
  features = model.forward(batch.tokens, batch.segments).features
  labels, weight = _ahead(batch, 0)

  def surprise(features, labels):
    return losses.cross_entropy(model.unembed(features), labels)

  nats = _by_chunks(surprise, features, labels)
  return losses.weighted_sum(nats, weight)


def distill_loss(
  drafter: Trainable, target: LanguageModel, batch: Batch, weights: Objective
) -> tuple[Array, Array]:
  """The draft's loss: the sum over tokens and horizons, and their weight.

  Args:
    drafter: what is trained.
    target: gives the law p; no gradient reaches it.
    batch: windows.
    weights: of the losses.
  """
  target = jax.lax.stop_gradient(target)
  output = target.forward(batch.tokens, batch.segments)
  scored = drafter.score(target, batch, output)

  def position(own, theirs, labels):
    logits = drafter.unembed(target, own)
    log_p = jax.nn.log_softmax(target.unembed(theirs))
    ce = losses.cross_entropy(logits, labels)
    # A weight of zero switches a loss off even where it is infinite.
    ce = jnp.where(weights.ce > 0, weights.ce * ce, 0.0)
    return ce + weights.kl * losses.forward_kl(logits, log_p)

  total, count = jnp.zeros(()), jnp.zeros(())
  for h in range(scored.shape[2]):
    labels, weight = _ahead(batch, h)
    theirs = _shift(output.features, h)
    values = _by_chunks(position, scored[:, :, h], theirs, labels)
    part = losses.weighted_sum(values, weight)
    total, count = total + part[0], count + part[1]
  return total, count


def measure(
  drafter: Trainable, target: LanguageModel, warp: Warp, k: int, batch: Batch
) -> dict[str, tuple[Array, Array]]:
  """What `metrics` defines, on a batch of text that the target wrote.

  Args:
    drafter: the draft; its first horizon is measured.
    target: the target.
    warp: the decode warp, applied to both.
    k: draft length of the block efficiency.
    batch: windows whose weight marks what the target wrote.

  Returns:
    For `acceptance` and `block_efficiency`, of the laws after the warp, and
    for `kl`, `nats` (of the draft) and `target_nats`, of those before it: a
    weighted sum and its weight, to be added over batches.
  """
  output = target.forward(batch.tokens, batch.segments)
  own = drafter.score(target, batch, output)[:, :, 0]
  labels, weight = _ahead(batch, 0)

  def position(own, theirs, labels):
    q, p = drafter.unembed(target, own), target.unembed(theirs)
    log_q, log_p = jax.nn.log_softmax(warp(q)), jax.nn.log_softmax(warp(p))
    return {
      'acceptance': metrics.acceptance(log_p, log_q),
      'kl': metrics.kl(jax.nn.log_softmax(p), jax.nn.log_softmax(q)),
      'nats': losses.cross_entropy(q, labels),
      'target_nats': losses.cross_entropy(p, labels),
      'log_p': _pick(log_p, labels),
      'log_q': _pick(log_q, labels),
    }

  values = _by_chunks(position, own, output.features, labels)
  log_p, log_q = values.pop('log_p'), values.pop('log_q')
  sums = {
    name: losses.weighted_sum(value, weight) for name, value in values.items()
  }
  sums['block_efficiency'] = losses.weighted_sum(
    *metrics.block_efficiency(log_p, log_q, weight > 0, k)
  )
  return sums


def means(
  parts: Iterable[dict[str, tuple[Array, Array]]],
) -> dict[str, Array]:
  """Divides once what `measure` gave for several batches.

  Args:
    parts: a sum and its weight by name, one dictionary per batch.

  Returns:
    The means, and the draft's own `perplexity`, exp of its mean nats.
  """
  total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
  mean = {
    name: value / jnp.maximum(weight, 1.0)
    for name, (value, weight) in total.items()
  }
  return {**mean, 'perplexity': jnp.exp(mean['nats'])}


def _pick(law: Array, labels: Array) -> Array:
  return jnp.take_along_axis(law, labels[..., None], -1)[..., 0]


def _ahead(batch: Batch, horizon: int) -> tuple[Array, Array]:
  """The tokens `1 + horizon` ahead and their weight, 0 in another document."""
  shift = functools.partial(_shift, by=1 + horizon)
  same = shift(batch.segments) == batch.segments
  return shift(batch.tokens), jnp.where(same, shift(batch.weight), 0.0)


def _shift(x: Array, by: int) -> Array:
  """`x[:, t + by]` at t, zeros behind the end."""
  if not by:
    return x
  pad = [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x[:, by:], pad)


def _by_chunks(f: Callable[..., Any], *arrays: Array) -> Any:
  """`f` of `[B, T, ...]` arrays, a chunk of T at a time.

  The logits of a chunk are made again for the gradient, so that no array of
  size `[B, T, V]` ever exists.
  """
  batch, size = arrays[0].shape[:2]
  count = -(-size // CHUNK)

  def split(x):
    pad = [(0, 0), (0, count * CHUNK - size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(batch, count, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def join(y):
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(batch, count * CHUNK, *y.shape[3:])[:, :size]

  chunks = jax.lax.map(
    lambda xs: jax.checkpoint(f)(*xs), tuple(map(split, arrays))
  )
  return jax.tree.map(join, chunks)

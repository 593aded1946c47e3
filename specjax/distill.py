"""Distillation: what is minimised, and what is measured.

The draft is trained to minimise `CE(labels) + λ D(p, q)`, D a divergence of
`losses`, KL(p || q) by default. The weights are scaled to sum to one, so that
the KL weight λ is their ratio, a sweep over λ compares losses of one size, and
λ = ∞ is distillation alone. They are leaves: one compiled step serves every λ,
and a `vmap` over states and weights trains many students behind one shared pass
of the target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import losses, metrics
from specjax.types import Array, Batch, LanguageModel, Trainable, Warp, taps

CHUNK = 32  # positions whose logits exist at a time


class Objective(NamedTuple):
  """Weights of the losses, which sum to one.

  Attributes:
    ce: of cross entropy with the text.
    divergence: of the divergence from the target.
  """

  ce: float | Array
  divergence: float | Array


def objective(kl_weight: float) -> Objective:
  """The objective whose divergence weighs `kl_weight` times as much as CE.

  Args:
    kl_weight: λ, from 0 (cross entropy alone) to infinity (the divergence
      alone).

  Raises:
    ValueError: if it is negative or NaN.
  """
  if not kl_weight >= 0:
    raise ValueError(
      f'kl_weight is {kl_weight}: it must be 0 or more; inf is the'
      ' divergence alone'
    )
  ce = 1 / (1 + kl_weight)
  return Objective(ce, 1 - ce)


def language_loss(model: LanguageModel, batch: Batch) -> tuple[Array, Array]:
  """Cross entropy of a model on text: the sum over tokens, and their weight."""
  features = model.forward(batch.tokens, batch.segments).features
  labels, weight = _ahead(batch, 0)

  def surprise(features, labels):
    return losses.cross_entropy(model.unembed(features), labels)

  nats = _by_chunks(surprise, features, labels)
  return losses.weighted_sum(nats, weight)


def distill_loss(
  drafter: Trainable,
  target: LanguageModel,
  batch: Batch,
  weights: Objective,
  *,
  divergence: losses.Divergence = losses.forward_kl,
  warps: tuple[Warp, Warp] = (jax.nn.identity, jax.nn.identity),
  horizon_decay: float | Array = 1.0,
  lookahead: int = 0,
) -> tuple[Array, Array]:
  """The draft's loss: the sum over tokens and horizons, and their weight.

  Args:
    drafter: what is trained.
    target: gives the law p; no gradient reaches it.
    batch: windows.
    weights: of the losses.
    divergence: of the draft's law from the target's.
    warps: what the target's and the draft's logits go through on the way to
      the divergence, so that it may be that of the laws which are decoded.
      Cross entropy is taken of the draft's own law.
    horizon_decay: horizon h, the token `1 + h` ahead, weighs decay^h.
    lookahead: K, or 0 for a loss position by position. From 1 on the divergence
      of a start is the `losses.expected_length` of K tokens, whose surprise
      is `divergence`: take `neg_log_acceptance`.

  Raises:
    ValueError: if a lookahead is asked of a drafter of several horizons.
  """
  target = jax.lax.stop_gradient(target)
  output = target.forward(batch.tokens, batch.segments, taps(drafter))
  scored = drafter.score(target, batch, output)
  horizons = scored.shape[2]
  if lookahead and horizons > 1:
    raise ValueError(
      f'the lookahead is {lookahead} and the drafter has {horizons} horizons:'
      ' it is along a text, for one horizon; set it to 0'
    )

  ids = ()
  if hasattr(drafter, 'unembed_vocabulary') and losses.merges(divergence):
    ids = drafter.vocabulary

  def position(own, theirs, labels):
    log_p = jax.nn.log_softmax(warps[0](target.unembed(theirs)))
    if ids:
      logits = drafter.unembed_vocabulary(own)
      log_p, labels, logits = _narrowed(log_p, labels, logits, ids)
    else:
      logits = drafter.unembed(target, own)
    log_p = jnp.broadcast_to(log_p[:, :, None], logits.shape)
    labels = jnp.broadcast_to(labels[..., None], logits.shape[:-1])
    ce = losses.cross_entropy(logits, labels)
    # A draft of a part of the vocabulary cannot learn to say the others: their
    # cross entropy counts 0, and the divergence tells its law from p as it is.
    ce = jnp.where(ce == jnp.inf, 0.0, ce)
    return ce, divergence(warps[1](logits), log_p)

  # What all horizons say of one token stands where the target says it, whose
  # law is the dearest there is and so is made once.
  own = [_shift(scored[:, :, h], -h) for h in range(horizons)]
  labels, _ = _ahead(batch, 0)
  found = _by_chunks(
    position, jnp.stack(own, 2), output.features, labels, each=horizons
  )
  total, count = jnp.zeros(()), jnp.zeros(())
  for h in range(horizons):
    weight = _shift(_ahead(batch, h)[1], -h)
    ce, apart = (x[:, :, h] for x in found)
    if lookahead:
      apart = losses.expected_length(apart, weight > 0, lookahead)
    values = _weigh(weights.ce, ce) + _weigh(weights.divergence, apart)
    part = losses.weighted_sum(values, weight * horizon_decay**h)
    total, count = total + part[0], count + part[1]
  return total, count


def measure(
  drafter: Trainable, target: LanguageModel, warp: Warp, k: int, batch: Batch
) -> dict[str, tuple[Array, Array]]:
  """What `metrics` defines, on a batch of text that the target wrote.

  Args:
    drafter: the draft. Where it has several horizons the h-th of them drafts
      token h, so that survival is of them all; the rest is of the first.
    target: the target.
    warp: the decode warp, applied to both.
    k: draft length of the block efficiency.
    batch: windows whose weight marks what the target wrote.

  Returns:
    Weighted sums and their weights, to be added over batches and divided by
    `means`. Of the laws after the warp: `acceptance`, its floors, the same
    `by_entropy` of the target (`[5]` bins) and the `survival` of a draft to
    each depth (`[K]`). Of those before it: both KL and the nats of both.

  Raises:
    ValueError: the drafter has several horizons, and fewer than k.
  """
  output = target.forward(batch.tokens, batch.segments, taps(drafter))
  scored = drafter.score(target, batch, output)
  horizons = scored.shape[2]
  if 1 < horizons < k:
    raise ValueError(
      f'the draft length is {k}, and the drafter has {horizons} horizons, one'
      ' for each token: it cannot be longer'
    )
  labels, weight = _ahead(batch, 0)

  def position(own, theirs, labels):
    q, p = drafter.unembed(target, own), target.unembed(theirs)
    log_q, log_p = jax.nn.log_softmax(warp(q)), jax.nn.log_softmax(warp(p))
    pinsker, huber = metrics.floors(metrics.kl(log_p, log_q))
    raw_q, raw_p = jax.nn.log_softmax(q), jax.nn.log_softmax(p)
    return {
      'acceptance': metrics.acceptance(log_p, log_q),
      'floor/pinsker': pinsker,
      'floor/bretagnolle_huber': huber,
      'entropy': metrics.entropy(log_p),
      'kl': metrics.kl(raw_p, raw_q),
      'reverse_kl': metrics.kl(raw_q, raw_p),
      'nats': losses.cross_entropy(q, labels),
      'target_nats': losses.cross_entropy(p, labels),
      'log_p': _pick(log_p, labels),
      'log_q': _pick(log_q, labels),
    }

  def likelihood(own, labels):
    return _pick(jax.nn.log_softmax(warp(drafter.unembed(target, own))), labels)

  values = _by_chunks(position, scored[:, :, 0], output.features, labels)
  log_q = values.pop('log_q')
  if horizons > 1:
    further = [
      _by_chunks(likelihood, scored[:, :, h], _ahead(batch, h)[0])
      for h in range(1, k)
    ]
    log_q = jnp.stack([log_q, *further])
  survival, starts = metrics.survival(values.pop('log_p'), log_q, weight > 0, k)
  bins = metrics.entropy_bins(values.pop('entropy'))  # [5, B, T]
  summed = jax.vmap(losses.weighted_sum, in_axes=(None, 0))
  return {
    'by_entropy': summed(values['acceptance'], weight * bins),
    'survival': jax.vmap(losses.weighted_sum, (0, None))(survival, starts),
    **{name: losses.weighted_sum(x, weight) for name, x in values.items()},
  }


def rank_accuracy(
  drafter: Trainable, target: LanguageModel, ranks: int, batch: Batch
) -> tuple[Array, Array]:
  """How often the next tokens are the likeliest of each horizon, by rank.

  Args:
    drafter: the draft.
    target: the target.
    ranks: R, how many of the likeliest are looked at.
    batch: windows whose weight marks what the target wrote.

  Returns:
    Weighted sums and their weights, `[H, R]` each, to be added over batches and
    divided: what `candidates.sparse_tree` wants to know.
  """
  output = target.forward(batch.tokens, batch.segments, taps(drafter))
  scored = drafter.score(target, batch, output)

  def hits(own, labels):
    logits = drafter.unembed(target, own)
    above = logits > _pick(logits, labels)[..., None]
    return above.sum(-1)[..., None] == jnp.arange(ranks)

  found = []
  for h in range(scored.shape[2]):
    labels, weight = _ahead(batch, h)
    hit = _by_chunks(hits, scored[:, :, h], labels)
    found.append(jax.vmap(losses.weighted_sum, (2, None))(hit, weight))
  sums, weights = map(jnp.stack, zip(*found, strict=True))
  return sums, weights


def means(
  parts: Iterable[dict[str, tuple[Array, Array]]],
) -> dict[str, Array]:
  """Divides once what `measure` gave for several batches.

  Args:
    parts: a sum and its weight by name, one dictionary per batch. Several
      drafts measured together have an axis in front.

  Returns:
    The means; `block_efficiency`; `perplexity` of the draft and
    `target_perplexity`, exp of their mean nats; and, unless nothing was
    counted there, `acceptance/depth_1` to K, `acceptance/entropy_0-0.5` and so
    on, with `tokens/entropy_0-0.5` that it is a mean over.
  """
  total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)
  by_entropy, survival = total.pop('by_entropy'), total.pop('survival')
  mean = {name: _ratio(*pair) for name, pair in total.items()}
  return {
    **mean,
    'block_efficiency': 1 + _ratio(*survival).sum(-1),
    'perplexity': jnp.exp(mean['nats']),
    'target_perplexity': jnp.exp(mean['target_nats']),
    **metrics.by_depth(*survival),
    **metrics.by_entropy(*by_entropy),
  }


def _ratio(total: Array, weight: Array) -> Array:
  return total / jnp.maximum(weight, 1.0)


def _narrowed(
  log_p: Array, labels: Array, logits: Array, ids: Sequence[int]
) -> tuple[Array, Array, Array]:
  """Laws and labels in which all that a draft cannot say is one outcome.

  No divergence of `losses` tells these outcomes apart, nor has any of them a
  gradient, and most of a vocabulary is among them.

  Args:
    log_p: `[..., V]` of the target.
    labels: `[...]`.
    logits: `[..., N]` of the draft.
    ids: the N tokens that it may say.

  Returns:
    The same, `[..., N + 1]`, `[...]` and `[..., N + 1]`: the last is all else.
  """
  where = jnp.array(ids)
  size, vocab = len(ids), log_p.shape[-1]
  place = jnp.full(vocab, size).at[where].set(jnp.arange(size))
  rest = jax.nn.logsumexp(log_p, -1, keepdims=True, where=place == size)
  never = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
  return (
    jnp.concatenate([log_p[..., where], rest], -1),
    place[labels],
    jnp.concatenate([logits, never], -1),
  )


def _weigh(weight: Array, loss: Array) -> Array:
  """A weight of zero switches a loss off even where it is infinite."""
  return jnp.where(weight > 0, weight * loss, 0.0)


def _pick(law: Array, labels: Array) -> Array:
  return jnp.take_along_axis(law, labels[..., None], -1)[..., 0]


def _ahead(batch: Batch, horizon: int) -> tuple[Array, Array]:
  """The tokens `1 + horizon` ahead and their weight, 0 in another document."""
  shift = functools.partial(_shift, by=1 + horizon)
  same = shift(batch.segments) == batch.segments
  return shift(batch.tokens), jnp.where(same, shift(batch.weight), 0.0)


def _shift(x: Array, by: int) -> Array:
  """`x[:, t + by]` at t, zeros beyond the ends."""
  size = x.shape[1]
  pad = [(0, 0), (max(-by, 0), max(by, 0))] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, pad)[:, max(by, 0) :][:, :size]


def _by_chunks(f: Callable[..., Any], *arrays: Array, each: int = 1) -> Any:
  """`f` of `[B, T, ...]` arrays, a chunk of T at a time.

  The logits of a chunk are made again for the gradient, so that no array of
  size `[B, T, V]` ever exists.

  Args:
    f: of the arrays' chunks.
    *arrays: alike in B and T.
    each: logits that `f` makes of a position: a chunk has fewer the more.
  """
  batch, size = arrays[0].shape[:2]
  chunk = -(-CHUNK // each)
  count = -(-size // chunk)

  def split(x):
    pad = [(0, 0), (0, count * chunk - size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(batch, count, chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def join(y):
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(batch, count * chunk, *y.shape[3:])[:, :size]

  chunks = jax.lax.map(
    lambda xs: jax.checkpoint(f)(*xs), tuple(map(split, arrays))
  )
  return jax.tree.map(join, chunks)

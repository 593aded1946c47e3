"""Sampling transforms: logits to logits, alike for every row that counts.

A warp is a callable pytree. Its numbers are leaves, so a sweep over them traces
once; which warps are composed is structure. Every warp returns float32, keeps
-inf ("outside the support") and lets a NaN through, so that the rules see it.
Nothing here sorts the vocabulary.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax.types import Array, Warp, pytree


@pytree
class Greedy:
  """All mass on the first maximum: the same rules then match exactly."""

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to 0 at the first maximum and -inf elsewhere."""
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, -1, keepdims=True)
    chosen = jnp.arange(logits.shape[-1]) == best
    broken = jnp.isnan(logits).any(-1, keepdims=True)
    return jnp.where(chosen, jnp.where(broken, jnp.nan, 0.0), -jnp.inf)


@pytree
class Temperature:
  """Divides logits by a scalar `temperature`; at 0 it is `Greedy`.

  Zero is not a small number: ties would then be drawn at random. It is the
  other branch, in the same compiled program.
  """

  temperature: float | Array = 1.0

  def __post_init__(self):
    """Refuses what is no temperature."""
    t = self.temperature
    if isinstance(t, int | float) and not 0 <= t < math.inf:
      raise ValueError(f'temperature is {t}: it must be 0 (greedy) or positive')

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to `[..., V]`."""
    temperature = jnp.asarray(self.temperature, jnp.float32)
    return jax.lax.cond(
      temperature == 0,
      Greedy(),
      lambda logits: logits.astype(jnp.float32) / temperature,
      logits,
    )


# The model's own law; also the default where a warp is asked for.
UNCHANGED = Temperature(1.0)


@pytree
class TopK:
  """Keeps the `k` largest logits, and all that tie with the smallest kept."""

  k: int | Array

  def __post_init__(self):
    """Refuses to keep nothing."""
    if isinstance(self.k, int | float) and not self.k >= 1:
      raise ValueError(f'top-k keeps {self.k} tokens: at least 1')

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to `[..., V]`."""
    order = _order(logits)

    def enough(threshold):
      return (order >= threshold).sum(-1, keepdims=True) >= self.k

    # The largest threshold that still keeps k.
    return _keep(logits, order >= _last(enough, order))


@pytree
class TopP:
  """Keeps each token whose strictly more probable tokens hold less than `p`.

  So the token that crosses the threshold is kept, equal tokens stay or go
  together, the most probable ones always stay, and `p >= 1` keeps everything. A
  mass within 1e-6 of `p` counts as
  having reached it, which makes round figures mean what they say.
  (Holtzman et al. 2020, arXiv 1904.09751.)
  """

  p: float | Array

  def __post_init__(self):
    """Refuses what is no mass."""
    if isinstance(self.p, int | float) and not self.p >= 0:
      raise ValueError(f'top-p keeps a mass of {self.p}: 0 to 1')

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to `[..., V]`."""
    order = _order(logits)
    mass = jax.nn.softmax(logits.astype(jnp.float32))

    def reached(threshold):
      above = jnp.where(order > threshold, mass, 0.0).sum(-1, keepdims=True)
      return (above > 0) & (above >= self.p - 1e-6)

    # Above the last threshold that reaches p, every token is wanted.
    nucleus = order > _last(reached, order)
    return _keep(logits, nucleus | (jnp.asarray(self.p) >= 1))


@pytree
class MinP:
  """Keeps tokens at least `p` times as probable as the most probable one.

  (Nguyen et al. 2024, arXiv 2407.01082.)
  """

  p: float | Array

  def __post_init__(self):
    """Refuses to keep nothing."""
    if isinstance(self.p, int | float) and not 0 <= self.p <= 1:
      raise ValueError(f'min-p is {self.p}: 0 to 1')

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to `[..., V]`."""
    logits = logits.astype(jnp.float32)
    floor = jnp.max(logits, -1, keepdims=True) + jnp.log(self.p)
    return _keep(logits, logits >= floor)


@pytree
class _Composed:
  warps: tuple[Warp, ...]

  def __call__(self, logits: Array) -> Array:
    for warp in self.warps:
      logits = warp(logits)
    return logits


def compose(*warps: Warp) -> Warp:
  """Applies `warps` from left to right."""
  return _Composed(tuple(warps))


def temperature(value: float) -> Warp:
  """`Temperature(value)`, checked; 0 is greedy.

  Raises:
    ValueError: if `value` is negative, infinite or NaN.
  """
  return Temperature(float(value))


def _keep(logits: Array, kept: Array) -> Array:
  logits = logits.astype(jnp.float32)
  return jnp.where(kept | jnp.isnan(logits), logits, -jnp.inf)


def _order(logits: Array) -> Array:
  """int32 with the order of the float32 logits, so that bisection is exact."""
  logits = logits.astype(jnp.float32)
  logits = jnp.where(logits == 0, 0.0, logits)  # -0 ties with 0
  bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _last(holds, order: Array) -> Array:
  """The largest int32 threshold `[..., 1]` at which a falling test holds.

  Bisection in 32 passes over the vocabulary instead of a sort. The smallest
  int32 stands for "nowhere"; no float maps to it.
  """
  info = jnp.iinfo(jnp.int32)
  low = jnp.full_like(order[..., :1], info.min)
  high = jnp.full_like(low, info.max)

  def halve(_, bounds):
    low, high = bounds
    # The midpoint, rounded up, without overflow.
    middle = (low | high) - ((low ^ high) >> 1)
    good = holds(middle)
    return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

  return jax.lax.fori_loop(0, 32, halve, (low, high))[0]

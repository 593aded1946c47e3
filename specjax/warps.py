"""Sampling transforms: logits to logits, alike for every row that counts.

A warp is a callable pytree. Its numbers are leaves, so a sweep over them traces
once; which warps are composed is structure. Every warp returns float32, keeps
-inf ("outside the support") and lets a NaN through, so that the rules see it.
Nothing here sorts the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import products
from specjax.types import Array, Warp, pytree

LEAST, MOST = 2.0**-100, 2.0**100  # of temperatures; exact in float32


def _number(value: Any) -> int | float | None:
  """What is to be checked, for which it waits; a tracer is not."""
  if isinstance(value, str):
    raise ValueError(f'{value!r} is no number of a warp')
  kinds = int | float | np.number | np.ndarray | jax.Array
  if isinstance(value, jax.core.Tracer) or not isinstance(value, kinds):
    return None
  if np.ndim(value) or not getattr(value, 'is_fully_addressable', True):
    return None
  return value if isinstance(value, int | float) else value.item()


@pytree
class Greedy:
  """All mass on the first maximum: the same rules then match exactly."""

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to 0 at the first maximum and -inf elsewhere."""
    logits = logits.astype(jnp.float32)
    top = logits.max(-1, keepdims=True)  # NaN where one is
    best = jnp.argmax(logits, -1, keepdims=True)
    chosen = jnp.arange(logits.shape[-1]) == best
    broken = jnp.isnan(top) | (top == -jnp.inf)  # no token is possible
    sure = jnp.where(broken, jnp.nan, jnp.zeros_like(top))
    return jnp.where(chosen, sure, -jnp.inf)


@pytree
class Temperature:
  """Divides logits by a scalar `temperature`; at 0 it is `Greedy`.

  Zero is not a small number: ties would then be drawn at random. It is the
  other branch, in the same compiled program. Else it is `LEAST` at least and
  `MOST` at most, within which quotients of float32 logits are sound.
  """

  temperature: float | Array = 1.0

  def __post_init__(self):
    """Refuses what is no temperature."""
    t = _number(self.temperature)
    if t is not None and t != 0 and not LEAST <= t <= MOST:
      raise ValueError(
        f'temperature is {t}: it must be 0 (greedy), or from {LEAST:.0e} to'
        f' {MOST:.0e}'
      )

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to `[..., V]`."""
    temperature = jnp.asarray(self.temperature, jnp.float32)
    return jax.lax.cond(
      temperature == 0,
      Greedy(),
      lambda logits: logits.astype(jnp.float32) / temperature,
      logits,
    )


_LONG = 4096  # tokens, from which on sums go by slices
_SLICES = 8, 32  # so many of the axis, then so many of what is left

# The model's own law; also the default where a warp is asked for.
UNCHANGED = Temperature(1.0)


@pytree
class TopK:
  """Keeps the `k` largest logits, and all that tie with the smallest kept."""

  k: int | Array

  def __post_init__(self):
    """Refuses to keep nothing."""
    k = _number(self.k)
    if k is not None and not (isinstance(k, int) and 1 <= k < 2**31):
      raise ValueError(f'top-k keeps {k} tokens: a whole number, at least 1')

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to `[..., V]`."""
    logits = logits.astype(jnp.float32)
    logits = jnp.where(logits == 0, 0.0, logits)  # -0 ties with 0
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    # int32 in the order of the logits, so that bisection is exact.
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    info = jnp.iinfo(jnp.int32)
    padded = _padded(order, info.min)

    def enough(threshold):
      return _total((padded >= threshold).astype(jnp.int32)) >= self.k

    # The largest threshold that still keeps k.
    least = _last(enough, info.min, info.max, logits)
    return _keep(logits, order >= least)


@pytree
class TopP:
  """Keeps each token whose strictly more probable tokens hold less than `p`.

  So the token that crosses the threshold is kept, tokens of equal float32
  probability stay or go together, the most probable ones always stay, and `p >=
  1` keeps everything. A mass within 1e-6 of `p` counts as having reached it,
  which makes round figures mean what they say.
  (Holtzman et al. 2020, arXiv 1904.09751.)
  """

  p: float | Array

  def __post_init__(self):
    """Refuses what is no mass."""
    p = _number(self.p)
    if p is not None and not p >= 0:
      raise ValueError(f'top-p keeps a mass of {p}: at least 0; from 1 on, all')

  def __call__(self, logits: Array) -> Array:
    """Maps `[..., V]` to `[..., V]`."""
    mass = jax.nn.softmax(logits.astype(jnp.float32))
    padded = _padded(mass, 0.0)

    def reached(threshold):
      above = _total(jnp.where(padded > _float(threshold), padded, 0.0))
      return (above > 0) & (above >= self.p - 1e-6)

    # Above the last threshold that reaches p, every token is wanted. Floats
    # that are not negative have the order of their bits.
    last = _last(reached, -1, 0x3F800000, logits)  # nowhere; 1.0
    outside = (last >= 0) & (mass <= _float(last)) & (jnp.asarray(self.p) < 1)
    return _keep(logits, ~outside)


@pytree
class MinP:
  """Keeps tokens at least `p` times as probable as the most probable one.

  (Nguyen et al. 2024, arXiv 2407.01082.)
  """

  p: float | Array

  def __post_init__(self):
    """Refuses to keep nothing."""
    p = _number(self.p)
    if p is not None and not 0 <= p <= 1:
      raise ValueError(f'min-p is {p}: 0 to 1')

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
    ValueError: if `value` is none of a `Temperature`.
  """
  return Temperature(float(value))


def _keep(logits: Array, kept: Array) -> Array:
  logits = logits.astype(jnp.float32)
  return jnp.where(kept | jnp.isnan(logits), logits, -jnp.inf)


def _float(bits: Array) -> Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _last(holds, low: int, high: int, logits: Array) -> Array:
  """The largest int32 threshold `[..., 1]` at which a falling test holds.

  Bisection in some 30 passes over the vocabulary instead of a sort. `low` means
  "nowhere".
  """
  bounds = (jnp.full_like(logits[..., :1], x, jnp.int32) for x in (low, high))

  def halve(_, bounds):
    low, high = bounds
    # The midpoint, rounded up, without overflow.
    middle = (low | high) - ((low ^ high) >> 1)
    good = holds(middle)
    return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

  steps = (high - low).bit_length()
  return jax.lax.fori_loop(0, steps, halve, tuple(bounds))[0]


def _by_slices(x: Array) -> bool:
  return x.shape[-1] >= _LONG and products.on_cpu()


def _padded(x: Array, value: float) -> Array:
  """The last axis, made a multiple of what `_total` asks for."""
  if not _by_slices(x):
    return x
  behind = -x.shape[-1] % math.prod(_SLICES)
  return jnp.pad(
    x, [(0, 0)] * (x.ndim - 1) + [(0, behind)], constant_values=value
  )


def _total(x: Array) -> Array:
  """The sum over the last axis, which stays.

  XLA on CPUs adds a long axis number by number. Slices of it are added as
  vectors, in less than half the time; barriers keep the steps apart.
  """
  if _by_slices(x):
    for count in _SLICES:
      first, *others = jnp.split(x, count, -1)
      x = jax.lax.optimization_barrier(sum(others, first))
  return x.sum(-1, keepdims=True)

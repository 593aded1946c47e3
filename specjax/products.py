"""Matrix products of bfloat16 factors and float32 sums.

`with products.of('bfloat16'):` sets JAX's default precision, which accelerators
heed in every product and CPUs in none. The models here therefore round the
factors themselves; then a CPU multiplies in bfloat16 too, in the products of
the gradient as well, and what is kept for those takes half the memory. The
gradient of a product is float32, never rounded before it is added to others.
"""

from __future__ import annotations

import contextlib
import functools
import re

import jax
import jax.numpy as jnp

from specjax.types import Array

DTYPES = 'float32', 'bfloat16'
_ROUNDED = 'BF16_BF16_F32'


def on_cpu() -> bool:
  """Whether programs are for CPUs; what XLA does badly there asks this."""
  return jax.default_backend() == 'cpu'


def of(dtype: str) -> contextlib.AbstractContextManager:
  """Within it, factors of products are rounded to one of `DTYPES`.

  Raises:
    ValueError: there is no such dtype.
  """
  if dtype not in DTYPES:
    raise ValueError(f'dtype is {dtype!r}: use {" or ".join(DTYPES)}')
  if dtype == 'float32':
    return contextlib.nullcontext()
  return jax.default_matmul_precision(_ROUNDED)


def rounded() -> bool:
  """Whether this is within `of('bfloat16')`; a part of JAX's tracing caches."""
  return jax.config.jax_default_matmul_precision == _ROUNDED


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(subscripts: str, x: Array, y: Array) -> Array:
  """The `einsum` of two arrays, rounded first; every index is in two terms."""
  return _forward(subscripts, x, y)[0]


def _einsum(subscripts, x, y):
  return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _forward(subscripts, x, y):
  low = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
  # Empty arrays, to remember the dtypes by.
  return _einsum(subscripts, *low), (*low, x[:0], y[:0])


def _backward(subscripts, kept, g):
  x, y, *like = kept
  a, b, c = re.split(',|->', subscripts)
  g = g.astype(jnp.bfloat16)
  grads = _einsum(f'{c},{b}->{a}', g, y), _einsum(f'{a},{c}->{b}', x, g)
  return tuple(d.astype(z.dtype) for d, z in zip(grads, like, strict=True))


product.defvjp(_forward, _backward)

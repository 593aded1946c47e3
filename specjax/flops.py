"""The arithmetic of a program: that of its matrix products, which is most."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax import timing


def products(function: Callable[..., Any], *args: Any) -> int:
  """Operations of the matrix products in a call, two for a multiplication.

  What is computed again to save memory counts again, masked scores count too, a
  `scan` counts as often as it turns, a `while_loop` once and of branches the
  dearest.

  Args:
    function: what is called; it is traced and not run.
    *args: its arguments; shapes and dtypes will do.
  """
  return _count(jax.make_jaxpr(function)(*args).jaxpr)


def peak(dtype: str = 'float32') -> float:
  """Operations per second in one large product, the best of a few.

  Args:
    dtype: of the factors; sums are float32.
  """
  size = 1024 if jax.default_backend() == 'cpu' else 8192
  a = jnp.ones((size, size), dtype)
  product = jax.jit(
    functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
  )
  return 2 * size**3 / timing.best(lambda: product(a, a))


def _count(jaxpr: Any) -> int:
  total = 0
  for equation in jaxpr.eqns:
    inner = [_count(inner) for inner in _inner(equation.params)]
    if equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      shape = equation.invars[0].aval.shape
      depth = math.prod(shape[axis] for axis in contracted)
      total += 2 * math.prod(equation.outvars[0].aval.shape) * depth
    elif equation.primitive.name == 'scan':
      total += equation.params['length'] * sum(inner)
    elif equation.primitive.name == 'cond':
      total += max(inner)
    else:
      total += sum(inner)
  return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
  """The programs within an equation."""
  for value in params.values():
    for one in value if isinstance(value, tuple | list) else [value]:
      one = getattr(one, 'jaxpr', one)  # of a closed one
      if hasattr(one, 'eqns'):
        yield one

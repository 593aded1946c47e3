"""Drawing a chain token by token, as far as it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import draws
from specjax.types import Array, Draft, Key, Limit, Warp

Draw = Callable[[Array, Array], Array]


def by_slot(keys: Key) -> Draw:
  """Draws node i with key i of each row's.

  Args:
    keys: `[B]`; folded, never consumed.

  Returns:
    A function of a node's number and its law `[B, V]` to tokens `[B]`.
  """
  fold = jax.vmap(jax.random.fold_in, (0, None))
  return lambda i, law: jax.vmap(draws.inverse_cdf)(fold(keys, i), law)


def grow(
  step: Callable[[Array, Array, Any], tuple[Array, Any]],
  carry: Any,
  token: Array,
  *,
  k: int,
  draw: Draw,
  warp: Warp,
  limit: Limit | None = None,
  first: Callable[[], Array] | None = None,
) -> tuple[Draft, Array, Any]:
  """A loop, not an unrolled chain: one compiled step for every k.

  Args:
    step: of a node's number, the tokens `[B]` in front of it and what the last
      step carried to the node's logits `[B, V]` and what is carried on.
    carry: what the first step is given.
    token: `[B]` in front of the first node.
    k: the longest chain, at least 1.
    draw: of a node's number and its law `[B, V]`, after the warp, to `[B]`.
    warp: applied to the logits.
    limit: how far to go; see `types.Limit`. Nodes beyond are invalid.
    first: the logits of node 0, where they take no step.

  Returns:
    The draft, how many nodes were drawn in any row, and what was carried last.
  """
  most = k if limit is None else limit.nodes
  batch = token.shape[0]

  def choose(i, logits, active):
    if limit is not None and limit.go_on is not None:
      active &= limit.go_on(i, logits)
    law = warp(logits)
    return draw(i, law), law, active

  def going(state):
    i, *_, active = state
    return (i < most) & active.any()

  def once(state):
    i, carry, token, chain, laws, count, active = state
    logits, carry = step(i, token, carry)
    token, law, active = choose(i, logits, active)
    chain, laws = chain.at[:, i].set(token), laws.at[:, i].set(law)
    return i + 1, carry, token, chain, laws, count + active, active

  active, begun = jnp.ones(batch, bool), first is not None
  if begun:

    def begin(active):
      return choose(0, first(), active)

    if limit is None:
      token, law, active = begin(active)
    else:
      shapes = jax.eval_shape(begin, active)
      nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      token, law, active = jax.lax.cond(
        most > 0, begin, lambda _: nothing, active
      )
  else:
    law = jax.eval_shape(lambda: choose(0, step(0, token, carry)[0], active)[1])
  chain = jnp.zeros((batch, k), jnp.int32)
  laws = jnp.zeros((batch, k, law.shape[-1]), law.dtype)
  count = jnp.zeros(batch, jnp.int32)
  if begun:
    chain, laws = chain.at[:, 0].set(token), laws.at[:, 0].set(law)
    count = active.astype(jnp.int32)
  start = int(begun), carry, token, chain, laws, count, active
  drawn, carry, _, chain, laws, count, _ = jax.lax.while_loop(
    going, once, start
  )
  valid = None if limit is None else jnp.arange(k) < count[:, None]
  draft = Draft(chain, logits=laws, valid=valid)
  return draft, jnp.minimum(drawn, most), carry

"""Chains: reading what is new, then drawing token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import draws
from specjax.types import Array, Draft, Key, Limit, Warp

Draw = Callable[[Array, Array], Array]


def by_slot(keys: Key) -> Draw:
  """How nodes are drawn with keys of their own, by number.

  Args:
    keys: `[B]`; a node's number is folded in.

  Returns:
    A function of a node's number and its law `[B, V]` to tokens `[B]`.
  """
  fold = jax.vmap(jax.random.fold_in, (0, None))
  return lambda i, law: jax.vmap(draws.inverse_cdf)(fold(keys, i), law)


def catch_up(
  feed: Callable[[Any, int], tuple[Array, Any]],
  cache: Any,
  length: Array,
  pieces: Sequence[tuple[int, int]],
  wanted: bool | Array,
) -> tuple[Any, Array]:
  """Reads what a cache does not describe yet, as far as the pending token.

  Args:
    feed: of a cache and a static size: reads so many tokens behind what it
      describes, and returns features `[B, size, D]` and the cache, in which no
      row goes beyond its length.
    cache: with a `length` `[B]`.
    length: `[B]` as far as it shall reach.
    pieces: pairs `(more, size)`, one after the other: pieces of `size` are read
      while some row is `more` tokens behind. The last has more = 0.
    wanted: scalar; without it nothing is read.

  Returns:
    The cache, and features `[B, 1, D]` of the last token.
  """

  def reading(size, carry):
    cache, features = carry
    last = (length - cache.length - 1)[:, None, None]
    new, cache = feed(cache, size)
    here = jnp.take_along_axis(new, jnp.clip(last, 0, size - 1), 1)
    # Rows that are done reading wait for the others.
    return cache, jnp.where((last >= 0) & (last < size), here, features)

  def behind(more, carry):
    return wanted & jnp.any(length - carry[0].length > more)

  shape = jax.eval_shape(lambda cache: feed(cache, 1)[0], cache)
  carry = cache, jnp.zeros(shape.shape, shape.dtype)
  for more, size in pieces:
    carry = jax.lax.while_loop(
      functools.partial(behind, more), functools.partial(reading, size), carry
    )
  return carry


def if_any(limit: Limit | None, draw: Callable[[Any], Any], x: Any) -> Any:
  """`draw(x)`, or zeros of its shapes where a limit asks for no nodes."""
  if limit is None:
    return draw(x)
  shapes = jax.eval_shape(draw, x)
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.cond(limit.nodes > 0, draw, lambda _: nothing, x)


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
  """Draws a chain, or as much of it as is asked for.

  It is a loop and not unrolled, so that one step is compiled for every k.

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

    token, law, active = if_any(limit, begin, active)
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

"""Timing programs against one another.

What is compared runs in turns and within seconds of each other, because a
machine's speed drifts by more than most differences of interest.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.decode import DecodeState
from specjax.types import Array, Block, Drafter, Keys, LanguageModel, taps

Name = TypeVar('Name', bound=Hashable)


class Spread(NamedTuple):
  """A ratio over repeats."""

  median: float
  min: float
  max: float


def compile_all(
  lowered: Mapping[Name, jax.stages.Lowered],
  done: Callable[[], Any] = lambda: None,
  workers: int = 2,
  seconds: dict[Name, float] | None = None,
) -> dict[Name, jax.stages.Compiled]:
  """Compiles several programs at once; XLA lets go of the interpreter.

  Args:
    lowered: what `jax.jit(f).lower(...)` returned.
    done: called after each program.
    workers: programs at a time.
    seconds: takes what each program took, others being compiled beside it.

  Returns:
    The compiled programs. They take `f`'s arguments without the static ones.
  """

  def compile_one(name):
    start = time.perf_counter()
    program = lowered[name].compile()
    if seconds is not None:
      seconds[name] = time.perf_counter() - start
    return program

  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    futures = {pool.submit(compile_one, name): name for name in lowered}
    for _ in concurrent.futures.as_completed(futures):
      done()
  return {name: future.result() for future, name in futures.items()}


def alternate(
  arms: Mapping[Name, Sequence[Callable[[], Any]]],
  repeats: int,
  done: Callable[[], Any] = lambda: None,
  clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[Name, list[float]], dict[Name, list[Any]]]:
  """Runs several arms in turns, forwards and then backwards.

  Args:
    arms: the parts of each arm, equally many. All arms do their first part,
      then all do their second, so that each is spread over the whole time. A
      part returns arrays, which are waited for.
    repeats: how often to run all of it.
    done: called after each round of one part.
    clock: gives the time in seconds.

  Returns:
    Seconds of each arm in each repeat, summed over its parts, and what its
    parts returned in the last.
  """
  names = list(arms)
  parts = {len(arm) for arm in arms.values()}
  if len(parts) != 1:
    raise ValueError(f'arms of different numbers of parts: {sorted(parts)}')
  seconds = {name: [0.0] * repeats for name in names}
  results = {name: [None] * max(parts) for name in names}
  for repeat in range(repeats):
    for part in range(max(parts)):
      # A steady drift then favours nobody.
      for name in names[:: -1 if (repeat + part) % 2 else 1]:
        start = clock()
        results[name][part] = jax.block_until_ready(arms[name][part]())
        seconds[name][repeat] += clock() - start
      done()
  return seconds, results


def best(call: Callable[[], Any], tries: int = 5) -> float:
  """Seconds of the fastest of some calls, behind one that may compile.

  Args:
    call: returns arrays, which are waited for.
    tries: how often.
  """
  jax.block_until_ready(call())
  seconds = []
  for _ in range(tries):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
  """The ratio of two arms, taken within each repeat."""
  ratios = [a / b for a, b in zip(over, under, strict=True)]
  return Spread(statistics.median(ratios), min(ratios), max(ratios))


def passes(
  model: LanguageModel, cache: Any, tokens: Array, count: int | Array
) -> tuple[Any, Array]:
  """A loop of forward passes, to be compiled and timed.

  A pass is what decoding needs of a model: `extend`, logits of all rows and
  `commit`. Every pass stands at the same place, so the cache needs room for one
  block only, and reads what the one before it wrote.

  Args:
    model: the model.
    cache: its cache.
    tokens: `[B, M]` the first block.
    count: passes.

  Returns:
    The cache and the last tokens, so that nothing is optimised away.
  """
  kept = jnp.ones(tokens.shape, bool)

  def once(_, carry):
    cache, tokens = carry
    output, rows = model.extend(Block(tokens), cache)
    tokens = jnp.argmax(model.unembed(output.features), -1).astype(jnp.int32)
    written = model.commit(cache, rows, kept)
    return written._replace(length=cache.length), tokens

  return jax.lax.fori_loop(0, count, once, (cache, tokens))


def proposals(
  target: LanguageModel,
  drafter: Drafter,
  state: DecodeState,
  count: int | Array,
) -> tuple[Any, Array]:
  """A loop of drafts, to be compiled and timed.

  Each is what a round pays for its draft: `propose`, with what it catches up
  on, and `observe`. Nothing of a draft is kept, so every one stands at the
  same place, behind another pending token: the first one drafted before.

  Args:
    target: which the drafter may borrow from.
    drafter: proposes a token or more.
    state: where to stand, with the drafter's memory. What that has not read
      yet, as a prompt, is part of the first draft's time.
    count: drafts.

  Returns:
    The memory and the tokens, so that nothing is optimised away.
  """
  fold = jax.vmap(jax.random.fold_in, (0, None))
  pending = jax.vmap(lambda row, at, token: row.at[at].set(token))

  def once(i, carry):
    memory, tokens = carry
    keys = Keys(fold(state.row, i), state.row)
    draft, memory = drafter.propose(
      target, state.cache, memory, keys, tokens, state.length
    )
    first = draft.tokens[:, :1]
    parents = draft.parents
    if parents is not None:
      parents = trees.block_parents(parents)
    block = Block(jnp.concatenate([first, draft.tokens], 1), parents)
    output, _ = jax.eval_shape(
      lambda *args: target.extend(*args, taps(drafter)), block, state.cache
    )
    output = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), output)
    kept = jnp.zeros(block.tokens.shape, bool)
    memory = drafter.observe(target, memory, block, kept, output)
    return memory, pending(tokens, state.length - 1, first[:, 0])

  return jax.lax.fori_loop(0, count, once, (state.memory, state.tokens))

"""Where the time of a round goes, part by part, beside what it must take.

Every part is a loop of its own, in one program, and is timed in turns with
whole rounds; what the parts leave of a round is its rest. The floor of a part
is the time in which the bytes that it reads and writes come from memory, at the
rate of a large product with one vector. What fits into the processor's caches
may be faster.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, drafters, generation, pricing, timing
from specjax.decode import DecodeState
from specjax.types import (
  Array,
  Draft,
  Drafter,
  DraftLength,
  Keys,
  LanguageModel,
  Verifier,
  Warp,
  taps,
)

ROUND, REST = 'round', 'rest'
PARTS = 'drafting', 'scoring', 'warp and rule', 'commit'
TURNS = 16  # of a timed loop


class Part(NamedTuple):
  """A part of a round.

  Attributes:
    seconds: that it takes.
    floor: seconds that it takes to move its bytes; 0 where nothing is known.
  """

  seconds: float
  floor: float


def parts(
  target: LanguageModel,
  drafter: Drafter,
  rule: Verifier,
  warp: Warp,
  eos: Array,
  state: DecodeState,
  rounds: int,
  controller: DraftLength,
  *,
  rate: float,
  repeats: int = 9,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Part]:
  """Times a round and its parts.

  Args:
    target: as all that follow what `begin` gives.
    drafter: proposes.
    rule: verifies.
    warp: of target and drafter.
    eos: ids that end a row.
    state: where to stand, with room for `rounds`.
    rounds: turns of a timed loop.
    controller: of the draft length.
    rate: bytes per second, as `bandwidth` finds it.
    repeats: timings of each.
    clock: gives the time in seconds.

  Returns:
    Medians of the round, of `PARTS` and of the rest, which is negative where
    parts by themselves took longer than together. The floor of the round is the
    sum of those that are known.

  Raises:
    ValueError: there is no round left in the state.
  """
  batch = len(state.length)
  keys = Keys(*jax.random.split(jax.random.key(0), (2, batch)))
  draft = jax.jit(_draft)(target, drafter, state, keys)
  block, nodes = decode.block_of(state, draft), draft.tokens.shape[1]
  output, rows = jax.jit(_extend)(target, drafter, block, state.cache)
  logits = jax.jit(lambda target, x: target.unembed(x))(target, output.features)
  loops = {
    ROUND: (
      lambda *args: decode.advance(*args, controller),
      (target, drafter, rule, warp, eos, state),
    ),
    'drafting': (timing.proposals, (target, drafter, state)),
    'scoring': (_score, (target, drafter, block, state.cache)),
    'warp and rule': (_judge, (rule, warp, logits, draft, keys, state.length)),
    'commit': (
      functools.partial(_commit, block.parents is None),
      (target, state.cache, rows),
    ),
  }
  if not nodes:
    del loops['drafting']
  programs = {}
  for name, (function, own) in loops.items():
    program = jax.jit(function)
    # A loop of no turns has what is no part of one; a first call compiles.
    for count in (0, rounds):
      call = functools.partial(program, *own, count)
      jax.block_until_ready(call())
      programs[name, count] = [call]
  seconds, results = timing.alternate(programs, repeats, clock=clock)
  # Fewer, where the text came to its end.
  ended = results[ROUND, rounds][0].stats.rounds - state.stats.rounds
  turns = dict.fromkeys(loops, rounds) | {ROUND: int(np.max(ended))}
  if not turns[ROUND]:
    raise ValueError(
      f'no round is left in {int(state.stop.max())} tokens: give more'
      ' max_new_tokens'
    )
  took = {'drafting': 0.0} | {
    name: float(np.median(np.subtract(seconds[name, rounds], seconds[name, 0])))
    / turns[name]
    for name in loops
  }
  floors = {
    'drafting': _drafted(drafter, draft),
    'scoring': _read(target) + _bytes(state.cache.rows),
    'warp and rule': _bytes(logits) + _bytes(draft.logits),
    'commit': 2 * _bytes(rows),
  }
  found = {name: Part(took[name], floors[name] / rate) for name in PARTS}
  left = took[ROUND] - sum(part.seconds for part in found.values())
  floor = sum(part.floor for part in found.values())
  return {ROUND: Part(took[ROUND], floor), **found, REST: Part(left, 0.0)}


def begin(
  target: LanguageModel,
  drafter: Drafter,
  rule: Verifier,
  warp: Warp,
  *,
  batch: int,
  prompt_length: int,
  context: int,
) -> tuple[Any, ...]:
  """Arguments of `decode.advance`, behind a prompt that both have read.

  Args:
    target: the target.
    drafter: proposes.
    rule: verifies; a pytree.
    warp: of target and drafter.
    batch: rows.
    prompt_length: tokens of the prompts, which are arbitrary ones.
    context: tokens that the buffers are for; a few rounds must fit in behind
      the prompts.

  Returns:
    The arguments, with as many rounds as a timed loop turns.
  """
  text = np.arange(batch * prompt_length) * 7919 % target.vocab_size
  state = generation.start(
    target,
    drafter,
    text.reshape(batch, -1).tolist(),
    key=jax.random.key(0),
    max_new_tokens=context - prompt_length,
  )
  arguments = pricing.arguments(target, drafter, rule, warp, state, 1)
  state = jax.jit(decode.advance)(*arguments)
  return *arguments[:5], state, TURNS, arguments[-1]


def bandwidth() -> float:
  """Bytes per second that are read at best: of a matrix, by one vector."""
  size = 8192 if jax.default_backend() == 'cpu' else 16384
  matrix, vector = jnp.ones((size, size)), jnp.ones(size)
  product = jax.jit(jnp.matmul)
  return matrix.nbytes / timing.best(lambda: product(matrix, vector))


def trace(folder: str, arguments: tuple[Any, ...]) -> None:
  """Writes what a profiler sees of some rounds, for Perfetto or TensorBoard.

  Args:
    folder: to write into.
    arguments: as `begin` gives them.
  """
  program = jax.jit(decode.advance)
  jax.block_until_ready(program(*arguments))
  with jax.profiler.trace(folder, create_perfetto_trace=True):
    jax.block_until_ready(program(*arguments))


def _draft(target, drafter, state, keys) -> Draft:
  return drafter.propose(
    target, state.cache, state.memory, keys, state.tokens, state.length
  )[0]


def _extend(target, drafter, block, cache):
  return target.extend(block, cache, taps(drafter))


def _score(target, drafter, block, cache, count):
  """Passes over a block, each behind the one before it."""

  def once(_, tokens):
    own = block._replace(tokens=tokens)
    output, _ = _extend(target, drafter, own, cache)
    top = jnp.max(target.unembed(output.features))
    return tokens + (top > jnp.inf)  # never, but nobody knows

  return jax.lax.fori_loop(0, count, once, block.tokens)


def _judge(rule, warp, logits, draft, keys, length, count):
  """Verdicts on a draft, and draws of what follows it."""
  n = draft.tokens.shape[1]
  fold = jax.vmap(jax.random.fold_in, (0, None))

  def once(i, logits):
    noise = decode.noise_of(
      fold(keys.draft, i), fold(keys.target, i), length, n
    )
    verdict = jax.vmap(rule)(noise, draft, jax.nn.log_softmax(warp(logits)))
    last = decode.draw_last(noise, verdict.accepted.sum(-1), verdict.law)
    return logits.at[:, 0, 0].add(1e-9 * last)

  return jax.lax.fori_loop(0, count, once, logits)


def _commit(chain, target, cache, rows, count):
  """Writes of a block's rows, at one place."""
  kept = jnp.ones(jax.tree.leaves(rows)[0].shape[::2][:2], bool)

  def once(i, written):
    # Else it would be written once.
    new = jax.tree.map(lambda x: x + i.astype(x.dtype), rows)
    return target.commit(cache._replace(rows=written), new, kept, chain).rows

  return jax.lax.fori_loop(0, count, once, cache.rows)


def _drafted(drafter: Drafter, draft: Draft) -> int:
  """Bytes that a chain of a draft model reads; of others nothing is known."""
  if type(drafter) is not drafters.find('model').ModelDrafter:
    return 0
  return draft.tokens.shape[1] * _read(drafter.model)


def _read(model: LanguageModel) -> int:
  """Bytes that a pass reads: an embedding that is no head is looked up."""
  tied = getattr(getattr(model, 'config', None), 'tied', True)
  return _bytes(model) - (0 if tied else _bytes(model.embedding))


def _bytes(tree: Any) -> int:
  return sum(jnp.asarray(x).nbytes for x in jax.tree.leaves(tree))

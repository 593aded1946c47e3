"""Where the time of a round goes, part by part, beside what it must take.

Every part is a loop of its own, in one program, and is timed in turns with
whole rounds; what the parts leave of a round is its rest. The floor of a part
is the time in which the bytes that it cannot do without are read or written at
the rate of a large product with one vector.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, draws, generation, pricing, timing
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
TRIES = 5


class Part(NamedTuple):
  """A part of a round.

  Attributes:
    seconds: that it takes.
    floor: seconds that it must take; 0 where nothing is known.
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
    repeats: timings of each.
    clock: gives the time in seconds.

  Returns:
    Medians of the round, of `PARTS` and of the rest.
  """
  batch = len(state.length)
  keys = Keys(*jax.random.split(jax.random.key(0), (2, batch)))
  draft = jax.jit(_draft)(target, drafter, state, keys)
  block = decode._block(state, draft)
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
    'commit': (_commit, (target, state.cache, rows, block.parents is None)),
  }
  nodes = draft.tokens.shape[1]
  if not nodes:
    del loops['drafting']
  programs = {}
  for name, (function, own) in loops.items():
    static = (3,) if name == 'commit' else ()
    program = jax.jit(function, static_argnums=static)
    for count in (0, rounds):
      # A first call compiles; a loop of no turns has what is no part of one.
      jax.block_until_ready(program(*own, count))
      programs[name, count] = [
        lambda program=program, own=own, count=count: program(*own, count)
      ]
  seconds, results = timing.alternate(programs, repeats, clock=clock)
  turns = dict.fromkeys(loops, rounds)
  ended = results[ROUND, rounds][0].stats.rounds - state.stats.rounds
  turns[ROUND] = max(int(np.max(np.asarray(ended))), 1)
  took = {
    name: float(
      np.median(
        np.subtract(seconds[name, rounds], seconds[name, 0]) / turns[name]
      )
    )
    for name in loops
  }
  took.setdefault('drafting', 0.0)
  rate = bandwidth()
  floors = {
    'drafting': _bytes(drafter) * nodes,
    'scoring': _bytes(_read(target)) + _bytes(state.cache.rows),
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
  size = 8192 if jax.default_backend() == 'cpu' else 32768
  matrix, vector = jnp.ones((size, size)), jnp.ones(size)
  product = jax.jit(jnp.matmul)
  jax.block_until_ready(product(matrix, vector))
  seconds = []
  for _ in range(TRIES):
    start = time.perf_counter()
    jax.block_until_ready(product(matrix, vector))
    seconds.append(time.perf_counter() - start)
  return matrix.nbytes / min(seconds)


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
    noise = decode._noise(fold(keys.draft, i), keys.target, length, n)
    verdict = jax.vmap(rule)(noise, draft, jax.nn.log_softmax(warp(logits)))
    at = verdict.accepted.sum(-1)
    last = jax.vmap(lambda key, i, law: draws.inverse_cdf(key[i], law))(
      noise.draws, at, verdict.law
    )
    return logits.at[:, 0, 0].add(1e-9 * last)

  return jax.lax.fori_loop(0, count, once, logits)


def _commit(target, cache, rows, chain, count):
  """Writes of a block's rows, at one place."""
  kept = jnp.ones(jax.tree.leaves(rows)[0].shape[::2][:2], bool)

  def once(i, written):
    # Else it would be written once.
    new = jax.tree.map(lambda x: x + i.astype(x.dtype), rows)
    return target.commit(cache._replace(rows=written), new, kept, chain).rows

  return jax.lax.fori_loop(0, count, once, cache.rows)


def _read(target: LanguageModel) -> Any:
  """What a pass reads whole: an embedding that is no head is looked up."""
  config = getattr(target, 'config', None)
  leaves = jax.tree_util.tree_leaves_with_path(target)
  return [
    leaf
    for path, leaf in leaves
    if getattr(config, 'tied', True)
    or not jax.tree_util.keystr(path).startswith('.embedding')
  ]


def _bytes(tree: Any) -> int:
  return sum(jnp.asarray(x).nbytes for x in jax.tree.leaves(tree))

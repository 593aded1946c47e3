"""The decoding loop: draft, score, verify, commit, all on the device.

`step` is one round. `advance` is a `lax.while_loop` of rounds, one compiled
program without a host transfer inside; rows advance raggedly and a row's law
never depends on its neighbours. Plain autoregressive decoding is the same loop
with `NoDrafter`.

Keys. A row's key is given by the caller and never split. The token at position
t that ends a round, or is drawn plainly, uses TARGET(t) = fold_in(fold_in(row,
0), t). Draft and accept noise use ROUND = fold_in(fold_in(row, 1), length at
the start of the round), which is fresh every round because every live round
emits a token. Noise keyed by position instead would be read twice: once by the
draft that was discarded there, and again.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import draws, trees
from specjax.draft_length import FIXED
from specjax.types import (
  Array,
  Block,
  Draft,
  Drafter,
  DraftLength,
  Key,
  Keys,
  LanguageModel,
  Limit,
  Noise,
  Output,
  Seen,
  Verifier,
  Warp,
  taps,
)
from specjax.verify import EMPTY_RESIDUAL, NAN

CHUNK = 64  # prompt tokens fed at a time
FOREVER = jnp.iinfo(jnp.int32).max  # rounds, until every row is done

# Values of `Stats.origin`.
PROMPT, ACCEPTED, CORRECTED, BONUS = range(4)


class Stats(NamedTuple):
  """What is observed and never fed back; counts per row.

  Attributes:
    rounds: `[B]` rounds in which the row was live.
    drafted: `[B]` valid nodes proposed.
    accepted: `[B]` drafted tokens that were emitted.
    tested: `[B, N]` rounds that put a valid node at this depth to the test.
    passed: `[B, N]` rounds that accepted it.
    lengths: `[B, N + 1]` rounds by the draft length that the target scored.
    empty_residuals: `[B]` rejections that rounding left without a residual.
    origin: `[B, T]` int8: PROMPT, ACCEPTED, CORRECTED (follows a rejection) or
      BONUS (follows a whole draft; a plain token's draft is empty).
  """

  rounds: Array
  drafted: Array
  accepted: Array
  tested: Array
  passed: Array
  lengths: Array
  empty_residuals: Array
  origin: Array


class DecodeState(NamedTuple):
  """Everything the loop carries.

  Attributes:
    tokens: `[B, T]` int32; `tokens[length - 1]` is pending.
    length: `[B]` int32.
    stop: `[B]` length at which the row ends.
    earliest: `[B]` first position that may hold an end token.
    done: `[B]` bool.
    row: `[B]` keys.
    cache: the target's cache; describes `tokens[:length - 1]`.
    memory: the drafter's.
    control: the draft length's.
    fault: `[B]` int32, `verify.NAN` where a law was; that ends a row.
    stats: counts.
  """

  tokens: Array
  length: Array
  stop: Array
  earliest: Array
  done: Array
  row: Key
  cache: Any
  memory: Any
  control: Any
  fault: Array
  stats: Stats


class Scored(NamedTuple):
  """What the target's pass over a block came to; nothing is written yet.

  Attributes:
    output: of the block, `[B, N + 1, ...]`.
    rows: likewise, for the cache.
    accepted: `[B, N]` nodes that the rule accepted.
    law: `[B, V]` of the token that follows them.
    fault: `[B]`.
  """

  output: Output
  rows: Any
  accepted: Array
  law: Array
  fault: Array


class Round(NamedTuple):
  """What one round did; `[B]` unless noted.

  Attributes:
    draft: the proposal.
    accepted: `[B, N]` nodes that the rule accepted, before any cut.
    tokens: `[B, N + 1]` accepted tokens along their path and the one that
      follows.
    count: how many of them were emitted.
  """

  draft: Draft
  accepted: Array
  tokens: Array
  count: Array


def step(
  target: LanguageModel,
  drafter: Drafter,
  verify: Verifier,
  warp: Warp,
  eos: Array,
  state: DecodeState,
  controller: DraftLength = FIXED,
) -> tuple[DecodeState, Round]:
  """One round for every row.

  Args:
    target: scores.
    drafter: proposes.
    verify: the rule, for one sequence.
    warp: the target's sampling transform.
    eos: `[E]` ids that end a sequence; E may be 0.
    state: where every row stands.
    controller: of the draft length.

  Returns:
    The next state, in which a row that was done is unchanged, and what was
    seen.

  Raises:
    ValueError: at trace time, for a draft that is longer than the state was
      made for, that the rule does not verify, or that the controller does not
      fit.
  """
  s = state
  _require_own(controller, s.control)
  fold = jax.vmap(jax.random.fold_in, (0, None))
  round_key = jax.vmap(jax.random.fold_in)(fold(s.row, 1), s.length)
  keys = Keys(draft=fold(round_key, 0), target=fold(s.row, 0))
  propose = functools.partial(
    drafter.propose, target, s.cache, s.memory, keys, s.tokens, s.length
  )
  score = functools.partial(_score, target, taps(drafter), verify, warp, eos, s)
  limit = controller.limit(s.control)
  limits = () if limit is None else (_of_live_rows(limit, ~s.done),)
  draft, memory = propose(*limits)
  n, tree = draft.tokens.shape[1], draft.parents is not None
  noise = noise_of(fold(round_key, 1), keys.target, s.length, n)
  if limit is None:
    scored, scored_length = score(draft, noise), n
  else:
    scored, scored_length = _score_on_ladder(
      controller.rungs, score, draft, noise, ~s.done
    )

  index = jnp.arange(n + 1)
  position = s.length[:, None] + index
  accepted = scored.accepted.sum(-1, dtype=jnp.int32)
  drafted = draft.tokens
  if tree:  # the accepted path, brought to the front
    order = trees.pack(scored.accepted)
    drafted = jnp.take_along_axis(drafted, order, 1)
  drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
  last = draw_last(noise, accepted, scored.law)
  tokens = jnp.where(index < accepted[:, None], drafted, last[:, None])
  ends = jnp.isin(tokens, eos)
  inside = ends & (index < accepted[:, None])
  ended = jnp.cumsum(inside, -1) - inside > 0  # behind an accepted end token
  room = (position < s.stop[:, None]) & ~s.done[:, None]
  emitted = (index <= accepted[:, None]) & ~ended & room
  count = emitted.sum(-1, dtype=jnp.int32)
  broken = jnp.where(s.done, 0, scored.fault)
  done = s.done | (emitted & ends).any(-1) | (s.length + count >= s.stop)
  done |= broken >= NAN  # what follows would mean nothing

  # A cut row keeps what was emitted but its last token, the new pending one,
  # so that it could go on; a row that was done keeps nothing.
  rank = jnp.cumsum(scored.accepted, -1)
  kept = scored.accepted & (rank < count[:, None])
  kept = jnp.concatenate([count[:, None] > 0, kept], 1)
  valid = jnp.ones((), bool) if draft.valid is None else draft.valid
  block = block_of(s, draft)
  slot = jnp.broadcast_to(_depths(block), kept.shape)[:, 1:] - 1
  counted = valid & jnp.take_along_axis(room & ~ended, slot, 1)
  seen = _see(draft.parents, slot, counted, emitted, scored.accepted, ~s.done)
  write = functools.partial(_write, at=s.length, keep=emitted)
  rejected = accepted < seen.tested.sum(-1)
  origin = jnp.where(
    index < accepted[:, None],
    ACCEPTED,
    jnp.where(rejected, CORRECTED, BONUS)[:, None],
  )
  stats = _count(s.stats, seen, broken, scored_length)
  state = DecodeState(
    tokens=write(s.tokens, tokens),
    length=s.length + count,
    stop=s.stop,
    earliest=s.earliest,
    done=done,
    row=s.row,
    cache=target.commit(s.cache, scored.rows, kept, chain=not tree),
    memory=drafter.observe(target, memory, block, kept, scored.output),
    control=controller.update(s.control, seen),
    fault=s.fault | (broken & NAN),
    stats=stats._replace(origin=write(stats.origin, origin)),
  )
  return state, Round(draft, scored.accepted, tokens, count)


def advance(
  target: LanguageModel,
  drafter: Drafter,
  verify: Verifier,
  warp: Warp,
  eos: Array,
  state: DecodeState,
  max_rounds: int | Array,
  controller: DraftLength = FIXED,
) -> DecodeState:
  """Rounds until every row is done, or `max_rounds`; `step`'s arguments.

  Call it under `jax.jit`, the rule as a pytree, again and again with the state
  donated, to stream. Over several devices call it under `sharding.over_rows`,
  as `generation` does: each then has a loop of its own, and waits for no other.
  """

  def going(carry):
    state, rounds = carry
    return ~state.done.all() & (rounds < max_rounds)

  def once(carry):
    state, rounds = carry
    state, _ = step(target, drafter, verify, warp, eos, state, controller)
    return state, rounds + 1

  return jax.lax.while_loop(going, once, (state, 0))[0]


def prefill(
  target: LanguageModel,
  drafter: Drafter,
  tokens: Array,
  length: Array,
  stop: Array,
  earliest: Array,
  row: Key,
  controller: DraftLength = FIXED,
) -> DecodeState:
  """Feeds the prompts, in chunks, and builds the state the loop starts from.

  One program serves every prompt length within a buffer, and no logits are
  computed: the last prompt token is left pending.

  Args:
    target: whose cache is filled.
    drafter: which observes the same chunks. The state serves it and its
      shorter kin `at(k)`.
    tokens: `[B, T]` int32, prompts from the left, T at least every `stop`.
    length: `[B]` prompt lengths, at least 1.
    stop: `[B]` length at which a row ends, T at the latest.
    earliest: `[B]` first position that may hold an end token.
    row: `[B]` keys.
    controller: of the draft length.

  Returns:
    The state.
  """
  batch, size = tokens.shape
  stop = jnp.minimum(stop, size)
  room = -(-size // CHUNK) * CHUNK  # whole chunks, else a slice would clamp
  nodes = shapes(target, drafter, batch, room).tokens.shape[1]
  # One block may be written from the last position on.
  space = room + max(nodes + 1, CHUNK)
  cache = target.init_cache(batch, space)
  memory = drafter.init(target, batch, space)
  padded = jnp.pad(tokens, ((0, 0), (0, room - size)))

  def left(carry):
    return jnp.any(carry[0] < length - 1)

  def feed(carry):
    start, cache, memory, broken = carry
    chunk = jax.lax.dynamic_slice_in_dim(padded, start, CHUNK, 1)
    block = Block(chunk)
    output, rows = target.extend(block, cache, taps(drafter))
    kept = start + jnp.arange(CHUNK) < length[:, None] - 1
    cache = target.commit(cache, rows, kept)
    memory = drafter.observe(target, memory, block, kept, output)
    # No rule sees these laws, and a cache of zeros would be as good as another.
    broken |= (kept & jnp.isnan(output.features).any(-1)).any(-1)
    return start + CHUNK, cache, memory, broken

  begin = 0, cache, memory, jnp.zeros(batch, bool)
  _, cache, memory, broken = jax.lax.while_loop(left, feed, begin)
  zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
  return DecodeState(
    tokens=tokens,
    length=length,
    stop=stop,
    earliest=earliest,
    done=(length >= stop) | broken,
    row=row,
    cache=cache,
    memory=memory,
    control=controller.init(),
    fault=jnp.where(broken, NAN, zeros(batch)),
    stats=Stats(
      rounds=zeros(batch),
      drafted=zeros(batch),
      accepted=zeros(batch),
      tested=zeros((batch, nodes)),
      passed=zeros((batch, nodes)),
      lengths=zeros((batch, nodes + 1)),
      empty_residuals=zeros(batch),
      origin=jnp.zeros((batch, size), jnp.int8),
    ),
  )


def shapes(
  target: LanguageModel, drafter: Drafter, batch: int = 1, size: int = CHUNK
) -> Draft:
  """What a drafter proposes, by tracing it: shapes and dtypes for arrays.

  Args:
    target: which the drafter may borrow from.
    drafter: proposes.
    batch: rows.
    size: of the token buffer.
  """

  def propose():
    cache = target.init_cache(batch, size)
    memory = drafter.init(target, batch, size)
    rows = jax.random.split(jax.random.key(0), batch)
    tokens = jnp.zeros((batch, size), jnp.int32)
    length = jnp.ones(batch, jnp.int32)
    keys = Keys(rows, rows)
    return drafter.propose(target, cache, memory, keys, tokens, length)[0]

  return jax.eval_shape(propose)


def _require_own(controller: DraftLength, control: Any):
  """Refuses another controller's state, which would mean something else."""
  own = jax.eval_shape(controller.init)
  shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(own)]
  given = [(x.shape, x.dtype) for x in jax.tree.leaves(control)]
  same = jax.tree.structure(own) == jax.tree.structure(control)
  if not same or shapes != given:
    raise ValueError(
      f'the state is not one of {type(controller).__name__}: prefill with the'
      ' controller that it is advanced with'
    )


def _of_live_rows(limit: Limit, live: Array) -> Limit:
  """A row that is done does not keep the others drafting."""
  if limit.go_on is None:
    return limit
  return Limit(limit.nodes, lambda i, logits: limit.go_on(i, logits) & live)


def block_of(state: DecodeState, draft: Draft) -> Block:
  """The pending tokens and what was drafted behind them."""
  pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)
  parents = draft.parents
  if parents is not None:
    parents = trees.block_parents(parents)
  return Block(jnp.concatenate([pending, draft.tokens], 1), parents)


def _depths(block: Block) -> Array:
  """`[B or 1, N + 1]`, 0 for the pending token."""
  return trees.depths(trees.ancestors(block.parents, block.tokens.shape[1]))


def noise_of(
  accept_keys: Key, target_keys: Key, length: Array, n: int
) -> Noise:
  """What rules may use of a draft of `n` nodes.

  Args:
    accept_keys: `[B]`, fresh in every round.
    target_keys: `[B]`, the rows'.
    length: `[B]` at the start of the round.
    n: nodes.

  Returns:
    `[B, n]` and `[B, n + 1]`.
  """
  draw_keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(
    target_keys, length[:, None] + jnp.arange(n + 1)
  )
  log_u = jax.vmap(lambda key: jnp.log1p(-jax.random.uniform(key, (n,))))(
    accept_keys
  )
  return Noise(log_u, draw_keys)


def draw_last(noise: Noise, accepted: Array, law: Array) -> Array:
  """The tokens `[B]` that follow the `accepted` `[B]` ones, of laws `[B, V]`.

  Drawn with the keys of their positions.
  """
  draw = jax.vmap(lambda key, i, law: draws.inverse_cdf(key[i], law))
  return draw(noise.draws, accepted, law)


def _score(target, layers, verify, warp, eos, state, draft, noise) -> Scored:
  """The target's pass over a draft, and the rule."""
  block = block_of(state, draft)
  output, rows = target.extend(block, state.cache, layers)
  position = state.length[:, None] + _depths(block)
  early = position < state.earliest[:, None]
  log_p = _law(target, warp, eos, output.features, early)
  verdict = jax.vmap(verify)(noise, draft, log_p)
  return Scored(output, rows, verdict.accepted, verdict.law, verdict.fault)


def _score_on_ladder(rungs, score, draft, noise, live) -> tuple[Scored, Array]:
  """`score` on the least rung that holds the draft, and that rung's length.

  The branches only read the cache, and return rows for one write behind them:
  a switch that passed the cache on would copy it in every branch.
  """
  n = draft.tokens.shape[1]
  if draft.parents is not None or draft.valid is None or rungs[-1] != n:
    what = 'a tree' if draft.parents is not None else f'{n} tokens'
    raise ValueError(
      f'the draft lengths {rungs} are for chains of up to {rungs[-1]} tokens,'
      f' and the drafter proposes {what}: use a fixed length'
    )
  whole = jax.eval_shape(score, draft, noise)

  def on(length):
    def padded(x, like):
      more = [(0, b - a) for a, b in zip(x.shape, like.shape, strict=True)]
      return jnp.pad(x, more)

    cut = jax.tree.map(lambda x: x[:, :length], draft)
    noise_cut = Noise(noise.log_u[:, :length], noise.draws[:, : length + 1])
    return jax.tree.map(padded, score(cut, noise_cut), whole)

  width = jnp.max(jnp.where(live, draft.valid.sum(-1), 0))
  rung = jnp.searchsorted(jnp.asarray(rungs), width)
  branches = [functools.partial(on, length) for length in rungs]
  return jax.lax.switch(rung, branches), jnp.asarray(rungs)[rung]


def _law(target, warp, eos, features, too_early) -> Array:
  """Target log-probabilities `[B, M, V]` as they will be sampled."""
  logits = target.unembed(features).astype(jnp.float32)
  if eos.shape[0]:
    banned = jnp.zeros(logits.shape[-1], bool).at[eos].set(True)
    logits = jnp.where(too_early[..., None] & banned, -jnp.inf, logits)
  return jax.nn.log_softmax(warp(logits))


def _see(parents, slot, counted, emitted, path, live) -> Seen:
  """What there is to learn from a round.

  Args:
    parents: `[B, N]`, or None for a chain.
    slot: `[B, N]` depth of each node, from 0.
    counted: `[B, N]` valid nodes that no end and no limit cuts off.
    emitted: `[B, N + 1]` of the accepted path and the token behind it.
    path: `[B, N]` accepted nodes.
    live: `[B]`.
  """
  n = counted.shape[1]
  accepted = path.sum(-1, dtype=jnp.int32)[:, None]
  at_depth = slot[:, None] == jnp.arange(n)[:, None]  # [B, depth, node]
  reached = slot <= accepted
  if parents is not None:  # and hangs off the accepted path
    above = jnp.take_along_axis(path, jnp.maximum(parents, 0), 1)
    reached = (parents < 0) | above
  return Seen(
    passed=emitted[:, :n] & (jnp.arange(n) < accepted),
    tested=(at_depth & (counted & reached)[:, None]).any(-1),
    drafted=counted.sum(-1, dtype=jnp.int32),
    live=live,
  )


def _count(stats: Stats, seen: Seen, fault, scored_length) -> Stats:
  n, depths = seen.tested.shape[1], stats.tested.shape[1]
  if n > depths:
    raise ValueError(
      f'a draft of {n} nodes, but the state was made for {depths}'
    )
  return stats._replace(
    rounds=stats.rounds + seen.live,
    drafted=stats.drafted + seen.drafted,
    accepted=stats.accepted + seen.passed.sum(-1, dtype=jnp.int32),
    tested=stats.tested.at[:, :n].add(seen.tested),
    passed=stats.passed.at[:, :n].add(seen.passed),
    lengths=stats.lengths.at[:, scored_length].add(seen.live),
    empty_residuals=stats.empty_residuals + (fault & EMPTY_RESIDUAL),
  )


def _write(buffer: Array, new: Array, at: Array, keep: Array) -> Array:
  """Writes `new[b, i]` at `at[b] + i` where `keep[b, i]`."""
  index = at[:, None] + jnp.arange(new.shape[1])
  index = jnp.where(keep, index, buffer.shape[1])
  into = jax.vmap(lambda row, i, value: row.at[i].set(value, mode='drop'))
  return into(buffer, index, new.astype(buffer.dtype))

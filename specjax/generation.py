"""Decoding from the host: prompts in, checked; tokens and counts out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from numpy.typing import ArrayLike

from specjax import decode, sharding, verify, warps, weights
from specjax.draft_length import FIXED
from specjax.types import (
  Drafter,
  DraftLength,
  Key,
  LanguageModel,
  Verifier,
  Warp,
)

BUCKET = 64  # buffers come in multiples of this, one program each


class Result(NamedTuple):
  """What was generated, on the host.

  Attributes:
    tokens: `[B, T]` int32; a row's text is `tokens[b, :length[b]]`.
    length: `[B]`, prompt included.
    prompt_length: `[B]`.
    stats: `decode.Stats` as NumPy arrays.
  """

  tokens: np.ndarray
  length: np.ndarray
  prompt_length: np.ndarray
  stats: decode.Stats

  def new_tokens(self) -> list[list[int]]:
    """Each row's tokens behind its prompt."""
    return [
      row[start:end].tolist()
      for row, start, end in zip(
        self.tokens, self.prompt_length, self.length, strict=True
      )
    ]


def generate(
  target: LanguageModel,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  *,
  key: Key,
  max_new_tokens: int | Sequence[int],
  verifier: Verifier = verify.rejection,
  warp: Warp = warps.UNCHANGED,
  eos: int | Sequence[int] | None = (),
  min_new_tokens: int | Sequence[int] = 0,
  controller: DraftLength = FIXED,
  mesh: Mesh | None = None,
) -> Result:
  """Continues `prompts` by speculative decoding.

  Args:
    target: the model whose law the output has.
    drafter: what proposes; `NoDrafter()` is plain decoding.
    prompts: token ids, at least one each, of any lengths.
    key: one key, folded with the row's number, or `[B]` keys, one per row: a
      row's tokens depend on its own key and not on its neighbours.
    max_new_tokens: for all rows or one per row; 0 generates nothing.
    verifier: the rule.
    warp: the sampling transform of the target.
    eos: id or ids that end a row, if any; the end token is part of its output.
    min_new_tokens: end tokens are forbidden before so many others.
    controller: of the draft length; `FIXED` drafts the drafter's own, always.
      On a mesh each part of the rows has a state of it.
    mesh: on which the rows are divided, if any; see `sharding`. The models lie
      on it already.

  Returns:
    The result.

  Raises:
    ValueError: for an empty prompt, an id outside the vocabulary, a negative
      limit, a text longer than the target was made for, limits or keys of
      another number than the prompts, or prompts that the mesh cannot divide,
      or models that do not lie there.
    FloatingPointError: if a law became NaN, naming the rows.
  """
  state = start(
    target,
    drafter,
    prompts,
    key=key,
    max_new_tokens=max_new_tokens,
    min_new_tokens=min_new_tokens,
    controller=controller,
    mesh=mesh,
  )
  eos = end_ids(target, eos)
  rule = verify.as_pytree(verifier)
  state = advance(
    target, drafter, rule, warp, eos, state, decode.FOREVER, controller, mesh
  )
  return finish(state, [len(p) for p in prompts])


def start(
  target: LanguageModel,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  *,
  key: Key,
  max_new_tokens: int | Sequence[int],
  min_new_tokens: int | Sequence[int] = 0,
  controller: DraftLength = FIXED,
  room: int = 0,
  mesh: Mesh | None = None,
) -> decode.DecodeState:
  """Checks the prompts and prefills; see `generate`.

  Buffers have `room` for so many tokens at least, so that prompts of several
  lengths may share a program.
  """
  length = np.array([len(p) for p in prompts], np.int32)
  if not len(length):
    raise ValueError('there are no prompts: give at least one')
  if not length.all():
    raise ValueError(
      f'prompt {int(np.argmin(length))} is empty: give at least one token,'
      ' such as the end-of-document id'
    )
  new = _per_row('max_new_tokens', max_new_tokens, len(length))
  least = _per_row('min_new_tokens', min_new_tokens, len(length))
  if new.min() < 0 or least.min() < 0:
    raise ValueError(
      f'max_new_tokens is {max_new_tokens} and min_new_tokens'
      f' {min_new_tokens}: neither may be negative'
    )
  require_positions(target, length + new)
  size = -(-max(room, int((length + new).max())) // BUCKET) * BUCKET
  tokens = np.zeros((len(length), size), np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt)] = prompt
  _require_ids('prompt token', tokens, target.vocab_size)
  if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
    raise ValueError(f'key is {key.dtype}{list(key.shape)}: use jax.random.key')
  rows = key if key.ndim else _row_keys(key, len(length))
  if rows.shape != length.shape:
    raise ValueError(f'{rows.shape[0]} keys for {len(length)} prompts')
  sharding.require_rows(mesh, len(length), 'the number of prompts')
  sharding.require_placed(target, mesh, 'target')
  sharding.require_placed(drafter, mesh, 'drafter')
  texts = tokens, length, length + new, length + least, rows
  return _prefill(
    target, drafter, *sharding.by_rows(texts, mesh), controller, mesh=mesh
  )


def pack(
  target: LanguageModel, *drafters: Drafter, batch: int = 1
) -> tuple[Any, ...]:
  """A target and drafters, laid out for decoding; see `weights.pack`.

  Args:
    target: the target.
    drafters: for it; without any it decodes plainly.
    batch: rows that are decoded at once.

  Returns:
    The target, then the drafters.
  """
  most = max((scored_rows(target, x, batch) for x in drafters), default=batch)
  return weights.pack((target, *drafters), most)


def scored_rows(target: LanguageModel, drafter: Drafter, batch: int) -> int:
  """Rows of the target's products in a round, B (K + 1)."""
  return batch * (1 + decode.shapes(target, drafter).tokens.shape[1])


def require_positions(
  target: LanguageModel, lengths: ArrayLike, what: str = 'prompt'
) -> None:
  """Refuses texts longer than a model was made for, if it says so.

  Args:
    target: its `positions`, if it has such, are those of the longest text.
    lengths: `[B]` tokens of the texts, new ones included.
    what: these are, for the message.

  Raises:
    ValueError: one is longer.
  """
  most, lengths = getattr(target, 'positions', None), np.asarray(lengths)
  if most is not None and lengths.max() > most:
    raise ValueError(
      f'{what} {int(lengths.argmax())} and its new tokens are'
      f' {int(lengths.max())}, and the target was made for {most}: cut the'
      ' prompt, or ask for fewer'
    )


def end_ids(
  target: LanguageModel, eos: int | Sequence[int] | None
) -> jax.Array:
  """`[E]` ids, checked."""
  eos = np.asarray(() if eos is None else eos, np.int32).reshape(-1)
  _require_ids('eos', eos, target.vocab_size)
  return jnp.asarray(eos)


def finish(state: decode.DecodeState, prompt_length) -> Result:
  """Fetches a state and raises the faults that the loop recorded."""
  fault, tokens, length, stats = sharding.fetch(
    (state.fault, state.tokens, state.length, state.stats)
  )
  broken = np.flatnonzero(fault & verify.NAN)
  if broken.size:
    raise FloatingPointError(
      f'rows {broken.tolist()}: a target or draft law is NaN, so their tokens'
      ' mean nothing; check the weights and the warp'
    )
  return Result(tokens, length, np.asarray(prompt_length), stats)


@functools.partial(jax.jit, static_argnames='mesh')
def _prefill(target, drafter, *texts, mesh=None):
  """`decode.prefill`, compiled; behind the texts stands the controller."""
  if mesh is None:
    return decode.prefill(target, drafter, *texts)

  def part(*args):
    return _apart(decode.prefill(*args))

  whole, rows = PartitionSpec(), sharding.ROWS
  ins = (whole, whole, *[rows] * 5, whole)
  return sharding.over_rows(part, mesh, ins, rows)(target, drafter, *texts)


@functools.partial(jax.jit, donate_argnums=5, static_argnames='mesh')
def advance(
  target,
  drafter,
  verify,
  warp,
  eos,
  state,
  max_rounds,
  controller=FIXED,
  mesh=None,
):
  """`decode.advance`, compiled; the rule is a pytree, the state is donated."""
  args = target, drafter, verify, warp, eos, state, max_rounds, controller
  if mesh is None:
    return decode.advance(*args)

  def part(*args):
    state = args[5]
    control = jax.tree.map(lambda x: x[0], state.control)
    args = *args[:5], state._replace(control=control), *args[6:]
    return _apart(decode.advance(*args))

  ins = [PartitionSpec()] * len(args)
  ins[5] = sharding.ROWS
  return sharding.over_rows(part, mesh, tuple(ins), sharding.ROWS)(*args)


def _apart(state):
  """What a controller knows is of the rows of a part: one row of its own."""
  control = jax.tree.map(lambda x: x[None], state.control)
  return state._replace(control=control)


def _per_row(name: str, value: int | Sequence[int], rows: int) -> np.ndarray:
  array = np.asarray(value)
  if (array >= 2**31).any():
    raise ValueError(f'{name} is {array.max()}: less than 2147483648')
  array = array.astype(np.int32)
  if array.shape not in ((), (rows,)):
    raise ValueError(
      f'{name} has shape {list(array.shape)}: give one number, or one for each'
      f' of the {rows} prompts'
    )
  return np.broadcast_to(array, (rows,))


def _row_keys(key: Key, batch: int) -> Key:
  return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))


def _require_ids(what: str, ids: np.ndarray, vocab_size: int):
  bad = ids[(ids < 0) | (ids >= vocab_size)]
  if bad.size:
    raise ValueError(
      f'{what} {int(bad[0])} is outside the vocabulary 0..{vocab_size - 1}'
    )

"""Evidence: text from a decoder, and what the exact law says of each token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, generation, verify, warps
from specjax.draft_length import FIXED
from specjax.types import (
  Array,
  Batch,
  Block,
  Drafter,
  DraftLength,
  Key,
  Keys,
  LanguageModel,
  Trainable,
  Verifier,
  Warp,
  pytree,
  taps,
)

RARE = 0.1  # tokens below this share of 1 / V are rare
CAP = 6.0  # nats: bounded, so that few tokens cannot rule a sum


class Evidence(NamedTuple):
  """What the target says of each emitted token, `[R, N]` unless noted.

  p is the target's law at a place given all that stands before it, q the
  draft's. Rows 2i and 2i + 1 continue one prompt.

  Attributes:
    below: mass of the ids below the token, F(x-).
    p: p(x).
    surprise: -log p(x), at most `CAP`.
    expected: its mean under p.
    variance: its variance under p.
    hit: bool, x lies in A = {q > p}.
    p_hit: p(A).
    tv: q(A) - p(A), the total variation distance of p and q.
    rare: bool, x is rare: 0 < p(x) < RARE / V.
    p_rare: p of the rare tokens.
    twin: `[R / 2, N]` bool, a pair of rows emitted the same token.
    p_twin: `[R / 2, N]` its probability, Σ p p' of their two laws.
  """

  below: np.ndarray
  p: np.ndarray
  surprise: np.ndarray
  expected: np.ndarray
  variance: np.ndarray
  hit: np.ndarray
  p_hit: np.ndarray
  tv: np.ndarray
  rare: np.ndarray
  p_rare: np.ndarray
  twin: np.ndarray
  p_twin: np.ndarray


@pytree
class Replayed:
  """The direction of a drafter without a law to score: what it proposes.

  A = {the first token that it proposes there} where p gives it less than all.
  It walks through a text as plain decoding would, so any drafter will do.

  Attributes:
    drafter: the drafter.
  """

  drafter: Drafter

  def score(self, target: LanguageModel, batch: Batch, output: Any) -> Array:
    """`[B, T, 1, 1]` the token proposed after each, -1 for none."""
    drafter = self.drafter.at(1)
    rows, size = batch.tokens.shape
    room = size + decode.CHUNK
    row_keys = jax.random.split(jax.random.key(0), rows)
    kept = jnp.ones((rows, 1), bool)

    def one(carry, t):
      cache, memory = carry
      keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, t)
      length = jnp.full(rows, t + 1, jnp.int32)
      draft, memory = drafter.propose(
        target, cache, memory, Keys(keys, row_keys), batch.tokens, length
      )
      block = Block(jax.lax.dynamic_slice_in_dim(batch.tokens, t, 1, 1))
      output, new = target.extend(block, cache, taps(drafter))
      memory = drafter.observe(target, memory, block, kept, output)
      if draft.tokens.shape[1]:
        token = draft.tokens[:, 0]
        if draft.valid is not None:
          token = jnp.where(draft.valid[:, 0], token, -1)
      else:
        token = jnp.full(rows, -1, jnp.int32)
      return (target.commit(cache, new, kept), memory), token

    start = target.init_cache(rows, room), drafter.init(target, rows, room)
    tokens = jax.lax.scan(one, start, jnp.arange(size))[1]
    return tokens.T[:, :, None, None]

  def unembed(self, target: LanguageModel, features: Array) -> Array:
    """Logits `[..., V]` of a point mass; all -inf, and A empty, for none."""
    point = jnp.arange(target.vocab_size) == features
    return jnp.where(point, 0.0, -jnp.inf)


def row_keys(key: Key, batch: int, rows: int) -> Key:
  """The keys `[rows]` with which `sample` decodes its batch number `batch`."""
  return jax.random.split(jax.random.fold_in(key, batch), rows)


def sample(
  target: LanguageModel,
  drafter: Drafter,
  prompts: Sequence[Sequence[int]],
  *,
  key: Key,
  batches: int,
  each: int,
  max_new_tokens: int,
  verifier: Verifier = verify.rejection,
  warp: Warp = warps.UNCHANGED,
  controller: DraftLength = FIXED,
  done: Callable[[], Any] = lambda: None,
) -> list[generation.Result]:
  """Continues every prompt many times.

  Prompts are fed once and all batches share one program. Nothing ends a row
  early: a pair of tokens that exists only if the first was no end token would
  be selected by its value.

  Args:
    target: the model whose law the text shall have.
    drafter: proposes; `NoDrafter()` for the control.
    prompts: token ids.
    key: rows have own keys made from it, the same for every drafter and rule.
    batches: how many.
    each: rows of each prompt in a batch; even, because rows are compared in
      pairs.
    max_new_tokens: N, of every row.
    verifier: the rule, a function or a callable pytree.
    warp: the sampling transform of the target.
    controller: of the draft length.
    done: called after each batch.

  Returns:
    A result per batch, whose rows are `each` of the first prompt, `each` of the
    second, and so on.

  Raises:
    ValueError: for an odd `each`, fewer than one batch, and as `generate` does.
    FloatingPointError: as `generate` does.
  """
  if each < 2 or each % 2 or batches < 1:
    raise ValueError(
      f'{batches} batches with {each} rows of each prompt: at least one, with'
      ' an even number of rows'
    )
  repeated = [prompt for prompt in prompts for _ in range(each)]
  length = [len(prompt) for prompt in repeated]
  state = generation.start(
    target,
    drafter,
    repeated,
    key=key,
    max_new_tokens=max_new_tokens,
    controller=controller,
  )
  verifier = verify.as_pytree(verifier)
  results = []
  for i in range(batches):
    keys = row_keys(key, i, len(repeated))
    end = _decode(target, drafter, verifier, warp, controller, state, keys)
    results.append(generation.finish(end, length))
    done()
  return results


def observe(
  target: LanguageModel,
  results: Sequence[generation.Result],
  *,
  warp: Warp = warps.UNCHANGED,
  direction: Trainable,
  done: Callable[[], Any] = lambda: None,
) -> Evidence:
  """Feeds the target all that was emitted and compares, token by token.

  Laws are float32 and taken a place at a time; only scalars leave the device.

  Args:
    target: the model; its `forward`, which has no cache, is what counts.
    results: from `sample`.
    warp: the sampling transform that the text should have been drawn with.
    direction: gives q, with the same warp: a drafter that is `Trainable`, or
      `Replayed(drafter)`. Whatever it says, the tests stay exact: it only has
      to be a function of what precedes a token.
    done: called after each batch.

  Returns:
    The evidence, rows in the order of `results`.

  Raises:
    ValueError: for rows of different numbers of tokens.
  """
  parts = []
  for result in results:
    new = np.unique(result.length - result.prompt_length)
    if len(new) != 1:
      raise ValueError(f'rows of {new.tolist()} tokens: all need equally many')
    tokens = result.tokens[:, : result.length.max()]
    start = result.prompt_length.astype(np.int32)
    facts = _observe(target, direction, warp, tokens, start, int(new[0]))
    parts.append(jax.device_get(facts))
    done()
  return Evidence(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@jax.jit
def _decode(target, drafter, verifier, warp, controller, state, keys):
  state = state._replace(row=keys)
  eos = jnp.zeros(0, jnp.int32)
  return decode.advance(
    target, drafter, verifier, warp, eos, state, decode.FOREVER, controller
  )


@functools.partial(jax.jit, static_argnums=5)
def _observe(target, direction, warp, tokens, start, new) -> Evidence:
  segments = jnp.ones_like(tokens)
  batch = Batch(tokens, segments, segments.astype(jnp.float32))
  output = target.forward(tokens, segments, taps(direction))
  theirs, own = output.features, direction.score(target, batch, output)

  def one(t):
    at = jax.vmap(lambda row, i: row[i])
    token, place = at(tokens, start + t), start + t - 1
    logits = target.unembed(at(theirs, place))
    guess = direction.unembed(target, at(own[:, :, 0], place))
    log_p, log_q = (jax.nn.log_softmax(warp(x)) for x in (logits, guess))
    return _facts(log_p, jnp.exp(log_q), token)

  return jax.tree.map(lambda x: x.T, jax.lax.map(one, jnp.arange(new)))


def _facts(log_p: Array, q: Array, token: Array) -> Evidence:
  """All of one place, from `[B, V]` laws and `[B]` tokens."""
  p, vocab = jnp.exp(log_p), log_p.shape[-1]
  surprise = jnp.minimum(-log_p, CAP)

  def drawn(x):
    return jnp.take_along_axis(x, token[:, None], -1)[:, 0]

  def mass(tokens, law=p):
    return jnp.where(tokens, law, 0.0).sum(-1)

  # Where there is no guess q is NaN, and nothing is above p.
  above, rare = q > p, (p > 0) & (p < RARE / vocab)
  expected = (p * surprise).sum(-1)
  pairs, pair = p.reshape(-1, 2, vocab), token.reshape(-1, 2)
  return Evidence(
    below=mass(jnp.arange(vocab) < token[:, None]),
    p=drawn(p),
    surprise=drawn(surprise),
    expected=expected,
    variance=(p * (surprise - expected[:, None]) ** 2).sum(-1),
    hit=drawn(above),
    p_hit=mass(above),
    tv=mass(above, q) - mass(above),
    rare=drawn(rare),
    p_rare=mass(rare),
    twin=pair[:, 0] == pair[:, 1],
    p_twin=(pairs[:, 0] * pairs[:, 1]).sum(-1),
  )

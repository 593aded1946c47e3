"""What every drafter owes the loop, and the rule of prompt lookup."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from specjax import decode, generation, verify
from specjax.drafters.coupled import CoupledDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.models.markov import Markov
from specjax.types import Draft, Keys, Limit
from specjax.warps import Greedy

V = 7
TABLE = oracles.table(0, 2, V, 2.0)
TARGET = Markov(jnp.asarray(TABLE))
NEAR = Markov(jnp.asarray(TABLE + oracles.table(1, 2, V, 1.0)))
PROMPTS = [[3], [1, 2, 1], [0, 6, 5] * 5]
DRAFTERS = {
  'none': NoDrafter(),
  'ngram': NGram(8),
  'suffix': NGram(8, n=16, least=2),
  'model': ModelDrafter(NEAR, 8),
  'coupled': CoupledDrafter(NEAR, 8),
  'heads': toys.heads(V, 8),
}

every = pytest.mark.parametrize('name', DRAFTERS)


@toys.jit
def propose(drafter, tokens, length, seed=0, limit=None):
  """What `drafter` proposes on a cold memory."""
  batch, size = tokens.shape
  rows = jax.random.split(jax.random.key(seed), batch)
  return drafter.propose(
    TARGET,
    TARGET.init_cache(batch, size),
    drafter.init(TARGET, batch, size + 64),
    Keys(rows, rows),
    tokens,
    length,
    *(() if limit is None else (limit,)),
  )[0]


def padded(rows, size=48):
  tokens = np.zeros((len(rows), size), np.int32)
  for tokens_row, row in zip(tokens, rows, strict=True):
    tokens_row[: len(row)] = row
  return tokens, np.array([len(row) for row in rows], np.int32)


@every
def test_a_proposal_is_a_chain_of_ids_in_range(name):
  drafter = DRAFTERS[name]
  draft = propose(drafter, *padded(PROMPTS))
  batch, n = draft.tokens.shape
  assert draft.parents is None and draft.siblings in (
    'single',
    'fixed',
    'coupled',
  )
  assert draft.tokens.dtype == jnp.int32
  assert ((draft.tokens >= 0) & (draft.tokens < V)).all()
  if draft.logits is not None:
    assert draft.logits.shape == (batch, n, V)
    assert draft.logits.dtype == jnp.float32
    held = np.take_along_axis(draft.logits, draft.tokens[..., None], -1)
    assert (held > -np.inf).all()
  if draft.valid is not None:
    # What follows an invalid node is invalid.
    assert (np.diff(draft.valid.astype(int), axis=1) <= 0).all()


@every
def test_a_proposal_ignores_the_batch_and_what_lies_behind(name):
  drafter = DRAFTERS[name]
  tokens, length = padded(PROMPTS)
  draft = propose(drafter, tokens, length)
  behind = np.arange(tokens.shape[1]) >= length[:, None]
  other = propose(drafter, np.where(behind, 5, tokens), length)
  jax.tree.map(np.testing.assert_array_equal, draft, other)
  order = np.array([1, 1, 0])
  moved = propose(drafter, tokens[order], length[order])
  if draft.logits is None:
    np.testing.assert_array_equal(moved.tokens, draft.tokens[order])
  else:  # the first law; tokens are drawn with the slot's key
    np.testing.assert_array_equal(moved.logits[:, 0], draft.logits[order, 0])


@every
def test_at_changes_only_the_length(name):
  drafter = DRAFTERS[name]
  arguments = padded(PROMPTS)
  whole = propose(drafter, *arguments)
  short = propose(drafter.at(3), *arguments)
  n = min(3, whole.tokens.shape[1])
  cut = jax.tree.map(lambda x: x[:, :n], whole)
  jax.tree.map(np.testing.assert_array_equal, short, cut)
  assert propose(drafter.at(0), *arguments).tokens.shape == (3, 0)


@pytest.mark.slow
def test_one_memory_serves_any_schedule_of_lengths():
  """It always describes what was committed, and the text stays the greedy one.

  Every count of accepted nodes comes up at every length up to four.
  """
  step = toys.jit(decode.step, static_argnums=2)
  drafter, eos = DRAFTERS['model'], jnp.zeros(0, jnp.int32)
  rng, seen = np.random.default_rng(0), set()
  for seed in range(8):
    state = generation.start(
      TARGET, drafter, PROMPTS, key=jax.random.key(seed), max_new_tokens=40
    )
    size = state.tokens.shape[1]
    while not state.done.all():
      k = int(rng.choice([0, 1, 2, 4, 8]))
      state, seen_in = step(
        TARGET, drafter.at(k), verify.rejection, Greedy(), eos, state
      )
      seen |= {(k, n) for n in np.asarray(seen_in.accepted).sum(-1).tolist()}
      own, tokens = state.memory.cache, np.asarray(state.tokens)
      assert (own.length <= state.length - 1).all()
      fed = np.arange(size) < np.asarray(own.length)[:, None]
      # The cache of the oracle holds the tokens themselves.
      held = np.asarray(own.rows)[:, 0, :size, 0]
      np.testing.assert_array_equal(held[fed], tokens[fed])
    result = generation.finish(state, [len(p) for p in PROMPTS])
    assert result.new_tokens() == [
      oracles.greedy(TABLE, prompt, 40) for prompt in PROMPTS
    ]
  assert seen >= {(k, n) for k in (0, 1, 2, 4) for n in range(k + 1)}, seen


def look_up(rows, k, n, size=48, least=1, limit=None):
  """The valid part of each row's proposal."""
  draft = propose(NGram(k, n, least), *padded(rows, size), limit=limit)
  if limit is None:
    assert (np.asarray(draft.tokens)[~np.asarray(draft.valid)] == 0).all()
  pairs = zip(np.asarray(draft.tokens), np.asarray(draft.valid), strict=True)
  return [row[valid].tolist() for row, valid in pairs]


@pytest.mark.parametrize(
  'tokens, n, expected',
  [
    # The latest of two matches; the suffix never matches itself.
    ([5, 1, 2, 3, 6, 1, 2, 4, 0, 1, 2], 2, [4, 0, 1, 2]),
    ([5, 1, 2, 3, 6, 1, 2, 4, 0, 1, 2], 3, [4, 0, 1, 2]),
    # A longer match wins over a later one.
    ([3, 1, 2, 5, 4, 2, 6, 3, 1, 2], 3, [5, 4, 2, 6, 3]),
    ([3, 1, 2, 5, 4, 2, 6, 3, 1, 2], 1, [6, 3, 1, 2]),
    # Only what is known is copied, though the match may overlap the end.
    ([4, 4, 4], 3, [4]),
    ([4, 5, 4, 5, 4], 3, [5, 4]),
    # Nothing to copy.
    ([1, 2, 3, 4, 5], 3, []),
    ([1], 3, []),
    ([0], 3, []),
    # Shorter than the suffix; the buffer's other end is no text.
    ([0, 0], 3, [0]),
    ([6, 0, 6], 3, [0, 6]),
  ],
)
def test_lookup_by_hand(tokens, n, expected):
  assert look_up([tokens], 5, n) == [expected]
  assert oracles.lookup(tokens, 5, n) == expected


@pytest.mark.parametrize(
  ('n', 'least'), [(1, 1), (2, 1), (3, 1), (3, 3), (16, 2)]
)
def test_lookup_against_a_plain_search(n, least):
  """Buffers that are full to the end too, where a roll would wrap."""
  rng = np.random.default_rng(n)
  rows = [rng.integers(0, 3, rng.integers(1, 13)).tolist() for _ in range(300)]
  rows += [rng.integers(0, 2, 12).tolist() for _ in range(100)]
  expected = [oracles.lookup(row, 5, n, least) for row in rows]
  assert look_up(rows, 5, n, size=12, least=least) == expected
  assert {len(row) for row in expected} == set(range(6))
  # A length that is chosen wants two tokens, where it looks for so many.
  chosen = [
    oracles.lookup(row, 5, n, max(least, min(2, n)))[:3] for row in rows
  ]
  cut = look_up(rows, 5, n, size=12, least=least, limit=Limit(jnp.array(3)))
  assert cut == chosen


@pytest.mark.parametrize(
  ('n', 'expected'), [(3, [5, 0]), (4, [6, 15]), (16, [6, 15])]
)
def test_a_long_suffix_wins_over_the_latest_place(n, expected):
  whole = [*range(18)]
  tokens = np.array([[*whole, 6, 15, 16, 17, 5, *whole]])
  draft = propose(NGram(2, n), tokens, np.array([tokens.shape[1]]))
  assert draft.tokens.tolist() == [expected]


def test_suffixes_that_are_none_are_refused():
  for n, least in ((0, 0), (2, 3), (3, 0)):
    with pytest.raises(ValueError, match=f'suffixes of {least} to {n} tokens'):
      NGram(2, n, least)


def test_a_row_without_a_match_takes_one_plain_step_a_round():
  """Next to a row that has one; what was never drafted is not counted."""
  cycle = np.full((V, V), -9, np.float32)
  cycle[np.arange(V), (np.arange(V) + 1) % V] = 9
  result = generation.generate(
    Markov(jnp.asarray(cycle)),
    NGram(4),
    [[0], [0, 1, 2, 3, 4, 5, 6, 0]],
    key=jax.random.key(0),
    max_new_tokens=6,
    warp=Greedy(),
  )
  assert result.new_tokens() == [[1, 2, 3, 4, 5, 6]] * 2
  assert result.stats.rounds.tolist() == [6, 2]
  assert result.stats.drafted.tolist() == [0, 5]
  assert result.stats.accepted.tolist() == [0, 5]
  assert result.stats.tested[0].tolist() == [0] * 4


def test_no_drafter_drafts_nothing():
  draft = propose(NoDrafter(), *padded(PROMPTS))
  assert isinstance(draft, Draft) and draft.tokens.shape == (3, 0)
  assert NoDrafter().at(5) == NoDrafter()

"""The decoding loop on the oracle, where everything can be compared exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from specjax import decode, generation, metrics, verify
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.models.markov import Markov
from specjax.types import Draft, pytree
from specjax.warps import Temperature

V = 11
TABLE = oracles.table(0, 2, V, 2.0)
# Agrees with the target about half the time.
NEAR = TABLE + oracles.table(1, 2, V, 1.0)
# Counts, so that a block holds each token once.
CYCLE = np.full((V, V, V), -5, np.float32)
CYCLE[:, np.arange(V), (np.arange(V) + 1) % V] = 5
PROMPTS = [[3], [1, 2], [4, 4, 4], [0, 9, 8, 7, 6, 5, 4, 3, 2, 1], [7] * 30]
NEVER = (V - 1, V - 1)  # two end ids that no law of a barred table holds


SHIPPED = {'advance': generation.advance, '_prefill': generation._prefill}

pytestmark = pytest.mark.usefixtures('quick_compilation')


@pytest.fixture
def shipped(monkeypatch):
  """Puts the programs back that users get."""
  for name, program in SHIPPED.items():
    monkeypatch.setattr(generation, name, program)


def barred(table):
  """The table without its last id."""
  table = table.copy()
  table[..., -1] = -np.inf
  return table


def model(table):
  return Markov(jnp.asarray(table))


def drafting(table, k, temperature=0.0):
  return ModelDrafter(model(table), k, Temperature(temperature))


def generate(
  drafter, prompts=PROMPTS, *, table=TABLE, temperature=0.0, seed=0, **options
):
  options = {'max_new_tokens': 12, 'eos': NEVER, **options}
  return generation.generate(
    model(table),
    drafter,
    prompts,
    key=jax.random.key(seed),
    warp=Temperature(temperature),
    **options,
  )


# Each length is a program to compile; the everyday suite has these.
EVERYDAY = (1, 4)


@pytest.mark.parametrize(
  'k',
  [
    pytest.param(k, marks=[pytest.mark.slow] if k not in EVERYDAY else [])
    for k in range(1, 9)
  ],
)
@pytest.mark.parametrize('batch', [1, 5])
def test_greedy_is_plain_greedy(k, batch):
  """Any draft, ragged prompts; end tokens and limits anywhere in a block."""
  prompts = PROMPTS[-batch:] if k % 2 else PROMPTS[:batch]

  def check(table, draft, new=12, eos=NEVER, least=0):
    result = generate(
      drafting(draft, k),
      prompts,
      table=table,
      max_new_tokens=new,
      eos=eos,
      min_new_tokens=least,
    )
    new = np.broadcast_to(new, batch)
    assert result.new_tokens() == [
      oracles.greedy(table, prompt, n, eos, least)
      for prompt, n in zip(prompts, new, strict=True)
    ]

  quiet, near = barred(TABLE), barred(NEAR)
  for draft in [quiet, near, np.zeros_like(quiet)]:
    check(quiet, draft)
  for end in range(V):
    check(TABLE, NEAR, eos=(end, end))
    check(TABLE, NEAR, eos=(end, (end + 3) % V))
    check(TABLE, NEAR, eos=(end, end), least=3)
  for n in range(11):
    check(quiet, quiet, new=n)
  check(quiet, near, new=[4, 0, 7, 1, 10][:batch])
  check(quiet, near, new=[64 - len(p) for p in prompts])  # fills the buffer


@pytest.mark.slow
def test_greedy_without_end_ids_and_with_ties():
  tied = np.round(TABLE)
  plain = [oracles.greedy(tied, prompt, 12) for prompt in PROMPTS]
  drafters = [NoDrafter(), NGram(3), drafting(np.round(NEAR), 4)]
  for drafter in drafters:
    assert generate(drafter, table=tied, eos=()).new_tokens() == plain


@pytest.mark.parametrize('position', range(6))
def test_an_end_token_stops_wherever_it_is_in_the_block(position):
  """All of a block of four and its bonus is right; what is behind is cut."""
  end = (7 + position) % V
  drafter = drafting(CYCLE, 4)
  result = generate(drafter, [[5, 6]], table=CYCLE, eos=(end, end))
  assert result.new_tokens() == [[(7 + i) % V for i in range(position + 1)]]
  assert result.stats.rounds == [1 + (position == 5)]
  assert result.stats.drafted == result.stats.accepted


@pytest.mark.parametrize(
  'eos, ids',
  [
    (3, [3]),
    (np.int32(3), [3]),
    ((2, 3), [2, 3]),
    ([3, 2], [3, 2]),
    (np.array([2, 3]), [2, 3]),
    ((), []),
    (None, []),
  ],
)
def test_end_ids_come_in_any_form(eos, ids):
  assert generation.end_ids(model(TABLE), eos).tolist() == ids


DRAFTERS = [drafting(NEAR, 2, 1.0), drafting(NEAR, 5, 1.0), NGram(3)]


@pytest.mark.parametrize('drafter', DRAFTERS, ids=['k=2', 'k=5', 'ngram'])
def test_sampler_match_is_plain_sampling_bit_for_bit(drafter):
  for seed in range(5):
    settings = dict(temperature=1.0, seed=seed, max_new_tokens=30)
    settings['verifier'] = verify.sampler_match
    plain, other = (
      generate(NoDrafter(), **settings),
      generate(drafter, **settings),
    )
    assert other.new_tokens() == plain.new_tokens()


def test_a_row_alone_is_the_row_in_its_batch():
  """In any slot, next to any neighbour."""
  keys = jax.random.split(jax.random.key(5), 5)

  def tokens(order):
    return generation.generate(
      model(TABLE),
      drafting(NEAR, 4, 1.0),
      [PROMPTS[i] for i in order],
      key=keys[jnp.array(order)],
      max_new_tokens=20,
      warp=Temperature(1.0),
      eos=NEVER,
    ).new_tokens()

  alone = [tokens([i])[0] for i in range(5)]
  for order in [0, 1, 2, 3, 4], [2, 4, 1, 0, 3], [3, 3, 3, 1, 1]:
    assert tokens(order) == [alone[i] for i in order]
  assert alone != tokens([1, 0, 2, 3, 4])


def test_a_seed_decides():
  def tokens(seed):
    drafter = drafting(NEAR, 4, 1.0)
    return generate(drafter, temperature=1.0, seed=seed).new_tokens()

  assert tokens(7) == tokens(7)
  assert tokens(7) != tokens(8)


def begin(drafter, new, prompts=PROMPTS, table=TABLE, least=0):
  return generation.start(
    model(table),
    drafter,
    prompts,
    key=jax.random.key(0),
    max_new_tokens=new,
    min_new_tokens=least,
  )


def advance(drafter, state, rounds, table=TABLE, eos=NEVER, temperature=0.0):
  """A copy of `state`, advanced."""
  return generation.advance(
    model(table),
    drafter,
    verify.as_pytree(verify.rejection),
    Temperature(temperature),
    jnp.array(eos),
    jax.tree.map(jnp.copy, state),
    rounds,
  )


@pytest.mark.parametrize('draft', [TABLE, NEAR], ids=['perfect', 'near'])
def test_a_row_that_was_cut_goes_on_as_if_it_had_not_been(draft):
  """Neither cache keeps what was cut: the text and the acceptance agree."""
  quiet, drafter = barred(TABLE), drafting(barred(draft), 4)
  state = begin(drafter, 12, table=quiet)
  whole = generation.finish(advance(drafter, state, 99, quiet), state.length)
  for cut in range(1, 12):
    first = state._replace(stop=state.length + cut)
    first = advance(drafter, first, 99, quiet)
    np.testing.assert_array_equal(first.length, state.length + cut)
    np.testing.assert_array_equal(first.cache.length, first.length - 1)
    again = first._replace(stop=state.stop, done=jnp.zeros(5, bool))
    again = advance(drafter, again, 99, quiet)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    if draft is TABLE:
      np.testing.assert_array_equal(again.stats.passed, again.stats.tested)


def test_a_row_that_is_done_does_not_change():
  """One round at a time, rows with different ends."""

  def seen(state):
    """What counts of each row; a draft may still read the prompt it missed."""
    keys = jax.random.key_data(state.row)
    s = jax.device_get(state._replace(row=keys, memory=()))
    rows = []
    for b, length in enumerate(s.cache.length):
      cache = s.cache.rows[:, :, :length], s.cache.length
      kept = jax.tree.leaves(s._replace(cache=cache))
      rows.append([x[b].tolist() for x in kept])
    return rows

  drafter = drafting(NEAR, 4, 1.0)
  state = begin(drafter, [1, 20, 5, 0, 9])
  rounds = np.zeros(5, int)
  while not (done := np.asarray(state.done)).all():
    before = seen(state)
    state = advance(drafter, state, 1, temperature=1.0)
    after = seen(state)
    for b in range(5):
      assert (before[b] == after[b]) == done[b]
    rounds += ~done
    assert (state.memory.cache.length <= state.length - 1).all()
  np.testing.assert_array_equal(state.stats.rounds, rounds)
  assert len(set(rounds)) > 2


@pytree
class Scripted:
  """On `CYCLE`: right and valid where told; remembers its keys."""

  right: jax.Array
  valid: jax.Array

  def init(self, target, batch, size):
    return (jnp.zeros((batch, 2), jnp.uint32),) * 2

  def propose(self, target, cache, memory, keys, tokens, length):
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, 1)
    node = jnp.arange(self.right.shape[1])
    tokens = (pending + 1 + node + ~self.right) % V
    draft = Draft(tokens, valid=self.valid, siblings='fixed')
    return draft, tuple(map(jax.random.key_data, keys))

  def observe(self, target, memory, block, kept, output):
    return memory


FOUR = np.ones((3, 4), bool)


def play(right=FOUR, valid=FOUR, new=20, eos=NEVER, rounds=1, least=0):
  """Plays a script on three rows of 5, 9 and 7 tokens."""
  prompts = [[0] * 5, [0] * 9, [0] * 7]
  drafter = Scripted(jnp.array(right, bool), jnp.array(valid, bool))
  state = begin(drafter, new, prompts, CYCLE, least)
  return advance(drafter, state, rounds, CYCLE, eos)


def new_origins(state):
  pairs = zip(np.asarray(state.stats.origin), state.length, strict=True)
  return [row[:end][row[:end] > 0].tolist() for row, end in pairs]


A, C, B = decode.ACCEPTED, decode.CORRECTED, decode.BONUS


def test_only_an_unbroken_prefix_counts():
  state = play(right=[[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
  assert state.length.tolist() == [5 + 3, 9 + 1, 7 + 5]
  assert state.cache.length.tolist() == [7, 9, 11]
  stats = state.stats
  assert stats.rounds.tolist() == [1, 1, 1]
  assert stats.drafted.tolist() == [4, 4, 4]
  assert stats.accepted.tolist() == [2, 0, 4]
  assert stats.tested.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
  assert stats.passed.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
  assert new_origins(state) == [[A, A, C], [C], [A, A, A, A, B]]
  assert (np.asarray(stats.origin)[0, :5] == decode.PROMPT).all()


def test_only_valid_nodes_count():
  state = play(valid=[[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
  assert (state.length - jnp.array([5, 9, 7])).tolist() == [4, 1, 2]
  assert state.stats.drafted.tolist() == [3, 0, 1]
  assert state.stats.accepted.tolist() == [3, 0, 1]
  assert state.stats.tested.sum(-1).tolist() == [3, 0, 1]
  assert new_origins(state) == [[A, A, A, B], [B], [A, B]]


def test_nodes_past_the_limit_do_not_count():
  state = play(new=[2, 0, 4], right=[[1] * 4, [1] * 4, [1, 1, 1, 0]])
  assert (state.length - jnp.array([5, 9, 7])).tolist() == [2, 0, 4]
  assert state.stats.rounds.tolist() == [1, 0, 1]
  assert state.stats.drafted.tolist() == [2, 0, 4]
  assert state.stats.accepted.tolist() == [2, 0, 3]
  assert new_origins(state) == [[A, A], [], [A, A, A, C]]


def test_nodes_behind_an_end_token_do_not_count():
  """Not even one that was rejected there."""
  state = play(eos=(2, 4), right=[[1, 1, 1, 0], [1, 0, 1, 1], [1] * 4])
  assert (state.length - jnp.array([5, 9, 7])).tolist() == [2, 2, 2]
  assert state.done.all()
  assert state.stats.drafted.tolist() == [2, 4, 2]
  assert state.stats.accepted.tolist() == [2, 1, 2]
  assert state.stats.tested.tolist() == [[1, 1, 0, 0]] * 3
  assert state.stats.passed.tolist() == [
    [1, 1, 0, 0],
    [1, 0, 0, 0],
    [1, 1, 0, 0],
  ]
  assert new_origins(state) == [[A, A], [A, C], [A, A]]


@pytest.mark.parametrize('least', [2, 3])
@pytest.mark.parametrize('end', range(1, 6))
def test_a_drafted_end_token_waits_for_enough_others(end, least):
  """The block holds 1 2 3 4 and 5, so that `end` would be the end-th token."""
  state = play(eos=(end, end), least=least)
  assert state.done.tolist() == [end > least] * 3
  np.testing.assert_array_equal(state.length, np.array([5, 9, 7]) + end)
  drafted = min(end - (end <= least), 4)
  np.testing.assert_array_equal(state.stats.accepted, drafted)
  last = np.asarray(state.tokens)[np.arange(3), state.length - 1]
  assert ((last == end) == (end > least)).all()


def test_what_is_counted_is_what_is_delivered():
  """Eight of two whole blocks; then an end token, second in the second."""
  for eos, count in ((NEVER, 8), ((7, 7), 7)):
    state = play(new=8, eos=eos, rounds=99)
    result = generation.finish(state, [5, 9, 7])
    assert result.new_tokens() == [list(range(1, count + 1))] * 3
    assert (result.stats.rounds == 2).all()
    assert list(map(len, new_origins(state))) == [count] * 3
    bonus = (result.stats.origin == decode.BONUS).sum(-1)
    np.testing.assert_array_equal(result.stats.accepted + bonus, count)
    assert metrics.summarize(result)['tokens'] == 3 * count


def test_every_row_counts_its_own_rounds():
  right = [[1] * 4, [0] * 4, [1] * 4]
  state = play(right, new=[5, 5, 9], rounds=99)
  assert state.stats.rounds.tolist() == [1, 5, 2]
  assert state.stats.drafted.tolist() == [4, 4 + 4 + 3 + 2 + 1, 4 + 4]
  assert state.stats.accepted.tolist() == [4, 0, 8]


def test_the_keys_are_those_of_the_scheme():
  """Draft keys are those of the round, target keys those of the row."""
  right = [[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
  one, two = play(right, rounds=1), play(right, rounds=2)
  length = np.array([5, 9, 7])
  fold = jax.random.fold_in
  for state, starts in [(one, length), (two, one.length)]:
    for b, row in enumerate(one.row):
      draft = fold(fold(fold(row, 1), starts[b]), 0)
      for got, key in zip(state.memory, [draft, fold(row, 0)], strict=True):
        np.testing.assert_array_equal(got[b], jax.random.key_data(key))
  assert len({tuple(row) for row in np.asarray(one.memory[1]).tolist()}) == 3


def test_what_lies_behind_a_prompt_does_not_matter():
  drafter = NGram(3)
  results = []
  for padding in [0, 9]:
    tokens = np.full((5, generation.BUCKET), padding, np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
      row[: len(prompt)] = prompt
    length = np.array([len(p) for p in PROMPTS], np.int32)
    rows = jax.random.split(jax.random.key(0), 5)
    state = generation._prefill(
      model(TABLE), drafter, tokens, length, length + 20, length, rows
    )
    state = advance(drafter, state, 99)
    results.append(generation.finish(state, length).new_tokens())
  assert results[0] == results[1]
  assert results[0] == [oracles.greedy(TABLE, p, 20, NEVER) for p in PROMPTS]


def test_a_nan_law_ends_its_row_and_is_named():
  table = TABLE.copy()
  table[1, 2] = np.nan
  with pytest.raises(FloatingPointError, match=r'rows \[1\]: .* NaN'):
    generate(drafting(NEAR, 4), table=table)
  drafter = drafting(NEAR, 4)
  state = advance(drafter, begin(drafter, 12, table=table), 99, table)
  assert state.done.all()
  assert state.stats.rounds[1] == 1
  assert ((state.tokens >= 0) & (state.tokens < V)).all()
  whole = generate(drafting(NEAR, 4))
  rows = np.array([0, 2, 3, 4])
  np.testing.assert_array_equal(state.tokens[rows], whole.tokens[rows])


def test_a_nan_within_a_prompt_ends_its_row_and_is_named():
  """No rule sees the laws there, and what follows would look like any text."""
  target = toys.transformer(tied=False)
  target.embedding[...] = target.embedding[...].at[5].set(jnp.nan)
  options = dict(key=jax.random.key(0), max_new_tokens=2)
  prompts = [[1, 2, 3], [1, 5, 2, 3], [5] + [1] * 70]
  with pytest.raises(FloatingPointError, match=r'rows \[1, 2\]: .* NaN'):
    generation.generate(target, NGram(2), prompts, **options)
  generation.generate(target, NGram(2), prompts[:1], **options)


@pytest.mark.slow
def test_wide_integers_change_nothing():
  """Under `jax_enable_x64` sums of booleans would be of 64 bits."""
  with jax.enable_x64(True):
    for drafter in (NGram(3), drafting(NEAR, 2)):
      wide = generate(drafter, PROMPTS[:2])
      assert wide.stats.accepted.dtype == np.int32
      with jax.enable_x64(False):
        narrow = generate(drafter, PROMPTS[:2])
      np.testing.assert_array_equal(wide.tokens, narrow.tokens)


by_number = toys.jit(
  generation.advance.__wrapped__, donate_argnums=5, static_argnames='mesh'
)


@pytree
class OneOf:
  """All rules in one program, of which one counts."""

  index: int

  def __call__(self, *args):
    verdicts = [rule(*args) for rule in verify.RULES.values()]
    return jax.tree.map(lambda *x: jnp.stack(x)[self.index], *verdicts)


@pytest.mark.parametrize('part', ['target', 'draft'])
@pytest.mark.parametrize('rule', verify.RULES)
def test_a_nan_logit_is_an_error_under_any_rule(rule, part, monkeypatch):
  """And never an id; a rule that does not read the draft's law goes on."""
  monkeypatch.setattr(generation, 'advance', by_number)
  tables = {'target': TABLE.copy(), 'draft': NEAR.copy()}
  tables[part][3, :, 2] = np.nan  # behind the first token that is drafted

  def run():
    return generate(
      drafting(tables['draft'], 3, 1.0),
      [[0, 3], [1, 3]],
      table=tables['target'],
      temperature=1.0,
      verifier=OneOf(list(verify.RULES).index(rule)),
    )

  blind = 'sampler_match', 'typical', 'top_k', 'distance'
  if part == 'target' or rule not in blind:
    with pytest.raises(FloatingPointError, match=r'rows \[0, 1\]: .* NaN'):
      run()
  else:
    tokens = run().tokens
    assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.parametrize(
  'change, message',
  [
    ({'prompts': []}, 'there are no prompts'),
    ({'prompts': [[1], []]}, 'prompt 1 is empty'),
    ({'prompts': [[1, V]]}, f'prompt token {V} is outside .* 0..{V - 1}'),
    ({'prompts': [[-1]]}, 'prompt token -1 is outside'),
    ({'eos': (V,)}, f'eos {V} is outside'),
    ({'max_new_tokens': -1}, 'max_new_tokens is -1'),
    ({'min_new_tokens': [0, -2]}, r'min_new_tokens \[0, -2\]'),
    ({'seed': [1, 2, 3]}, '3 keys for 2 prompts'),
    ({'drafter': drafting(TABLE[:5, :5, :5], 2)}, 'has 5 tokens and the .* 11'),
  ],
)
def test_a_mistake_is_one_clear_line(change, message):
  change = {'drafter': NoDrafter(), 'prompts': [[1], [2]], **change}
  seed = change.pop('seed', 0)
  key = jax.vmap(jax.random.key)(jnp.array(seed)) if seed else None
  with pytest.raises(ValueError, match=message) as error:
    if key is None:
      generate(**change)
    else:
      generation.start(
        model(TABLE), *change.values(), key=key, max_new_tokens=1
      )
  assert '\n' not in str(error.value)


def test_no_text_is_longer_than_its_target_was_made_for():
  def lengths(new):
    result = generation.generate(
      toys.transformer(positions=20),
      NoDrafter(),
      [[1], [2, 3]],
      key=jax.random.key(0),
      max_new_tokens=new,
    )
    return [*map(len, result.new_tokens())]

  assert lengths(18) == [18, 18]
  with pytest.raises(ValueError, match='prompt 1 and its .* 21, .* for 20'):
    lengths(19)


def test_a_longer_draft_than_the_state_was_made_for_is_refused():
  state = begin(NGram(2), 9)
  with pytest.raises(ValueError, match='a draft of 3 nodes, .* made for 2'):
    advance(NGram(3), state, 1)


def test_numbers_do_not_recompile(shipped):
  programs = SHIPPED.values()
  drafter = functools.partial(drafting, NEAR, 4)
  generate(drafter())
  sizes = [program._cache_size() for program in programs]
  for temperature, seed, end, prompt, new in [
    (0.7, 1, 3, [1] * 5, 9),
    (0.0, 2, 4, [1] * 6, 0),
    (1.3, 3, 5, [1] * 33, 30),
  ]:
    generate(
      drafter(temperature=temperature),
      [prompt] * 5,
      temperature=temperature,
      seed=seed,
      eos=(end, end + 1),
      max_new_tokens=new,
      min_new_tokens=seed,
    )
  assert sizes == [program._cache_size() for program in programs]


def test_the_loop_moves_nothing_between_host_and_device(shipped):
  drafter = drafting(NEAR, 4)
  state = begin(drafter, 12)
  args = jax.device_put((drafter, Temperature(0.0), jnp.array(NEVER), 99))
  drafter, warp, eos, rounds = args
  target, rule = model(TABLE), verify.as_pytree(verify.rejection)
  with jax.transfer_guard('disallow'):
    state = generation.advance(target, drafter, rule, warp, eos, state, rounds)
    jax.block_until_ready(state)
    with pytest.raises(Exception, match='[Dd]isallowed'):
      jnp.add(state.length, np.ones(5, np.int32))
  assert state.done.all()

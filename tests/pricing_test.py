"""What rounds cost, by a clock that the programs themselves advance."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import decode, generation, pricing, verify, warps
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.pricing import PLAIN, Arm

KS = (1, 2, 4)
CALL, PLAIN_ROUND, READING = 7.0, 2.0, 5.0


def drafting(k):
  return 0.1 + 0.2 * k


def round_of(k):
  return PLAIN_ROUND * (1 + k**2 / 8) + (drafting(k) if k else 0.0)


def pair():
  return toys.transformer(), ModelDrafter(toys.transformer(1), 4)


def meter(monkeypatch, drift=lambda: 1.0):
  """A meter of fake programs, and the clock that they advance."""
  clock = types.SimpleNamespace(now=0.0)
  target, drafter = pair()
  drafters = {PLAIN: NoDrafter()}
  drafters |= {Arm('model', k): drafter.at(k) for k in KS}
  found = pricing.Meter(
    target,
    drafters,
    verify.as_pytree(verify.rejection),
    batch=2,
    prompt_length=5,
    context=40,
    split=True,
  )
  first = found._first

  def program(name):
    kind, arm = name

    def run(*arguments):
      turns = arguments[6 if kind == 'round' else -1]
      if kind == 'round':
        state = arguments[5]
        turns = min(turns, 4 if arm.k else 30)  # drafts end the text early
        fresh = state.memory and state.memory.cache.length[0] == 0
        seconds = CALL + turns * round_of(arm.k) + READING * bool(fresh)
        rounds = jnp.full(2, turns) - jnp.array([0, 1])
        result = state._replace(stats=state.stats._replace(rounds=rounds))
        if result.memory:
          cache = result.memory.cache._replace(length=first.length)
          result = result._replace(memory=result.memory._replace(cache=cache))
      elif kind == 'draft':
        seconds, result = turns * drafting(arm.k), None
      else:
        seconds = CALL + turns * PLAIN_ROUND * (0.5 + arm.k / 10)
        result = None
      clock.now += seconds * drift()
      return result

    return run

  names = found.lowered()
  found.compiled({name: program(name) for name in names})
  return found, clock


@pytest.mark.slow
@pytest.mark.parametrize('parts', [1, 3])
def test_costs_are_what_the_clock_says(monkeypatch, parts):
  """On a machine that doubles its speed with every repeat."""
  speed = types.SimpleNamespace(factor=1.0)
  found, clock = meter(monkeypatch, lambda: speed.factor)
  calls = {
    name: [call] * parts for name, call in found.calls(warps.UNCHANGED).items()
  }

  def alternate_once():
    seconds, results = pricing.timing.alternate(
      calls, 1, clock=lambda: clock.now
    )
    found.add(seconds, results)
    speed.factor /= 2

  for _ in range(3):
    alternate_once()
  got = found.costs('model')
  assert got.seconds == pytest.approx(PLAIN_ROUND / 2)  # the median repeat
  assert got.call == pytest.approx(CALL / PLAIN_ROUND)
  assert got.start == pytest.approx((CALL + READING) / PLAIN_ROUND)
  assert got.v == pytest.approx({k: 1 + k**2 / 8 for k in (0, *KS)})
  assert got.c == pytest.approx({k: drafting(k) / k / PLAIN_ROUND for k in KS})
  assert got.passes == pytest.approx({k: 0.5 + k / 10 for k in (0, *KS)})
  for k in (0, *KS):
    assert got.round(k) == pytest.approx(round_of(k) / PLAIN_ROUND)


def test_a_pause_of_the_machine_makes_no_round_free(monkeypatch):
  found, clock = meter(monkeypatch)
  seconds, results = pricing.timing.alternate(
    {name: [call] for name, call in found.calls(warps.UNCHANGED).items()},
    3,
    clock=lambda: clock.now,
  )
  seconds['call', PLAIN] = [1e3] * 3
  found.add(seconds, results)
  got = found.costs('model')
  assert got.seconds > 0
  assert min(got.c.values()) > 0 and min(got.passes.values()) > 0
  assert all(got.round(k) > 0 for k in got.v)


COSTS = pricing.Costs(
  seconds=0.01,
  c={2: 0.1, 4: 0.05},
  v={0: 1.0, 2: 1.3, 4: 1.8},
  passes={},
  call=0.5,
  start=2.0,
)


def test_between_lengths_a_round_is_a_straight_line():
  assert COSTS.round(0) == 1
  assert COSTS.round(2) == pytest.approx(1.5)
  assert COSTS.round(3) == pytest.approx((1.5 + 2.0) / 2)
  for k in (-1, 5):
    with pytest.raises(ValueError, match=f'draft length {k}: .*0, 2, 4'):
      COSTS.round(k)


def test_a_speedup_is_of_whole_calls():
  # 0.5 + 30 plain rounds against 2 + 10 rounds of 1.5.
  assert COSTS.speedup(2, rounds=10, new_tokens=30) == pytest.approx(30.5 / 17)


@pytest.mark.slow
def test_the_programs_decode():
  """One round of the meter's own program is one of `decode.step`."""
  target, drafter = pair()
  rule = verify.as_pytree(verify.rejection)
  arm = Arm('model', 4)
  found = pricing.Meter(
    target,
    {PLAIN: NoDrafter(), arm: drafter},
    rule,
    batch=2,
    prompt_length=5,
    context=40,
  )
  low = {
    name: jax.jit(decode.advance) if name[0] == 'round' else lambda *a: None
    for name in found.lowered()
  }
  found.compiled(low)
  # A token has been written, and does not count.
  begun = found.calls(warps.UNCHANGED)['call', PLAIN]()
  assert begun.length.tolist() == [6, 6]
  assert not begun.done.any() and begun.stats.rounds.tolist() == [0, 0]
  end = found.calls(warps.UNCHANGED)['round', arm]()
  want = generation.start(
    target,
    drafter,
    np.asarray(begun.tokens)[:, :6].tolist(),
    key=jax.random.key(0),
    max_new_tokens=40,
  )
  for _ in range(pricing.TURNS['round']):
    want, _ = decode.step(
      target, drafter, rule, warps.UNCHANGED, jnp.zeros(0, jnp.int32), want
    )
  for b, length in enumerate(end.length):
    assert length <= 40
    np.testing.assert_array_equal(
      end.tokens[b, :length], want.tokens[b, :length]
    )


def test_lookup_has_no_memory_and_is_priced(monkeypatch):
  target, drafter = pair()
  state = generation.start(
    target, drafter, [[1, 2]], key=jax.random.key(0), max_new_tokens=4
  )
  rule = verify.as_pytree(verify.rejection)

  def memory(drafter):
    return pricing.arguments(target, drafter, rule, warps.Greedy(), state, 1)[
      5
    ].memory

  assert memory(NGram(2)) == () == memory(NoDrafter())
  assert memory(drafter) is state.memory
  assert pricing.with_warp(drafter, warps.Greedy()).warp == warps.Greedy()


WHERE = dict(batch=2, context=40)


@pytest.fixture
def measured(monkeypatch):
  """Counts what is measured; every measurement is another."""
  asked = []

  def measure(target, drafter, *, ks, **rest):
    asked.append(sorted(set(ks)))
    v = {0: 1.0} | {k: 1.0 + len(asked) for k in ks if k}
    return COSTS._replace(v=v, c={k: 0.1 for k in ks if k})

  monkeypatch.setattr(pricing, 'measure', measure)
  return asked


def test_what_is_kept_is_not_measured_again(tmp_path, measured):
  target, drafter = pair()
  path = tmp_path / 'run' / 'costs.json'

  def ask(ks, drafter=drafter, **changes):
    return pricing.load_or_measure(
      path, target, drafter, ks=ks, **{**WHERE, **changes}
    )

  first = ask([1, 4])
  assert ask([4]) == ask([0, 1, 4]) == first
  # A buffer of 64 serves both, any length of draft and any temperature.
  assert ask([1], drafter.at(9), context=64) == first
  assert ask([1], warp=warps.Temperature(0.3)) == first
  assert measured == [[1, 4]]
  more = ask([2])
  assert measured[1:] == [[0, 1, 2, 4]] and more != first
  assert ask([1, 2, 4]) == more
  others = [
    ask([1, 4], batch=3),
    ask([1, 4], context=65),
    ask([1, 4], rule=verify.block),
    ask([1, 4], warp=warps.Greedy()),
    ask([1, 4], dataclasses.replace(drafter, model=toys.transformer(width=32))),
    ask([1, 4], NGram(2)),
  ]
  assert len(measured) == 2 + len(others)
  assert ask([1, 2, 4]) == more  # all live beside one another
  # Other weights of the same sizes cost the same.
  again = dataclasses.replace(drafter, model=toys.transformer(seed=5))
  assert ask([1], again) == more
  assert [p.name for p in path.parent.iterdir()] == ['costs.json']


@pytest.mark.parametrize(
  'change', [{'dtype': 'bfloat16'}, {'heads': 2}, {'layers': 1}]
)
def test_a_target_of_another_size_or_dtype_is_another(change):
  _, drafter = pair()
  places = [
    pricing.key(
      model, drafter, verify.rejection, warps.UNCHANGED, batch=1, context=64
    )
    for model in (toys.transformer(), toys.transformer(**change))
  ]
  assert places[0] != places[1]
  assert places == json.loads(json.dumps(places))


@pytest.mark.parametrize(
  'damage', ['[{', '7', '[7]', '[{"batch": 1}]', '[{"costs": {"v": 3}}]']
)
def test_a_damaged_file_is_one_clear_line(damage, tmp_path, measured):
  path = tmp_path / 'costs.json'
  path.write_text(damage)
  with pytest.raises(ValueError, match='delete it') as error:
    pricing.load_or_measure(path, *pair(), ks=[1], **WHERE)
  assert '\n' not in str(error.value) and str(path) in str(error.value)
  with pytest.raises(ValueError, match='delete it'):
    pricing.save(path, {}, COSTS)
  assert path.read_text() == damage
  assert not measured


@pytest.mark.slow
def test_measuring_takes_turns_and_returns_positive_costs():
  got = pricing.measure(*pair(), ks=[2, 0, 1], repeats=2, **WHERE)
  assert sorted(got.v) == [0, 1, 2] and sorted(got.c) == [1, 2]
  assert got.v[0] == 1 and got.seconds > 0 and min(got.c.values()) > 0
  with pytest.raises(ValueError, match='a draft length or more from 1'):
    pricing.measure(*pair(), ks=[0], **WHERE)

"""How many tokens to draft: a number, or a rule that goes by what happened.

A controller decides before a round how many nodes may be drafted, and may stop
the draft early. It may look at all earlier rounds, at the draft's laws and at
tokens that the draft keeps, never at the token whose drafting it decides on:
dropping a token for its own value would bend the output law.

The whole batch has one length per round, so a row's tokens depend on the rows
beside it; its law does not. Drafting takes as many steps as it takes; the
target's pass is compiled once per rung of a short ladder of lengths, and every
draft is scored on the least rung that holds it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Array, DraftLength, Limit, Seen, pytree


def ladder(k: int) -> tuple[int, ...]:
  """0, 1, 2, 4, ... and k: draft lengths that are worth a compiled pass."""
  return tuple(sorted({0, k, *(1 << i for i in range(k.bit_length()))}))


@pytree
class Fixed:
  """Whole drafts, always."""

  rungs = ()

  def init(self) -> tuple:
    """Nothing to remember."""
    return ()

  def limit(self, control: Any) -> None:
    """No limit, which is known at trace time."""
    return

  def update(self, control: Any, seen: Seen) -> tuple:
    """Nothing to learn."""
    return control


FIXED = Fixed()


class FallbackState(NamedTuple):
  """Scalars.

  Attributes:
    passed: drafted tokens that were accepted, older ones counting less.
    drafted: all of them, likewise.
    rung: of the next round.
    waited: plain rounds since the last probe.
    wait: how many there are to be before the next.
  """

  passed: Array
  drafted: Array
  rung: Array
  waited: Array
  wait: Array


@pytree
class Fallback:
  """Drafts less while too little is accepted, and at last plainly decodes.

  After every round the length moves one rung: down where the running share of
  drafted tokens that are accepted is under the threshold, up where neither that
  nor the round's own is. (By the share of tests that pass, which does not fall
  with K, a draft could stay long that is right one time in three.) At 0 it
  waits, then drafts one token: it goes on from there if that passes, and else
  waits twice as long.

  Attributes:
    rungs: the ladder; its first is 0.
    threshold: on accepted / drafted tokens.
    memory: weight of a round against the one that follows it.
    first_wait: plain rounds before a probe, until one fails.
    longest_wait: before any.
  """

  rungs: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  threshold: float | Array = 0.3
  memory: float | Array = 0.9
  first_wait: int | Array = 16
  longest_wait: int | Array = 256

  def __post_init__(self):
    """Refuses a ladder that it cannot climb."""
    _require_ladder(self.rungs)

  def init(self) -> FallbackState:
    """At the top, and in doubt: the first draft decides."""
    top = jnp.array(len(self.rungs) - 1, jnp.int32)
    zero = jnp.zeros((), jnp.int32)
    return FallbackState(*self._doubt(), top, zero, self._least_wait())

  def limit(self, control: FallbackState) -> Limit:
    """The rung's length."""
    return Limit(jnp.asarray(self.rungs, jnp.int32)[control.rung])

  def update(self, control: FallbackState, seen: Seen) -> FallbackState:
    """Moves a rung."""
    new_passed, new_drafted = seen.passed.sum(), seen.drafted.sum()
    # A lookup may find nothing to draft, of which there is nothing to learn.
    any_new = new_drafted > 0
    fade = jnp.where(any_new, self.memory, 1.0)
    passed = control.passed * fade + new_passed
    drafted = control.drafted * fade + new_drafted
    low = passed < self.threshold * drafted
    # Luck long ago is no reason to draft more.
    lately_low = new_passed < self.threshold * new_drafted
    step = jnp.where(low, -1, jnp.where(lately_low, 0, 1))
    step = jnp.where(any_new, step, 0)
    top = len(self.rungs) - 1
    rung = jnp.clip(control.rung + step, 0, top).astype(jnp.int32)
    plain = control.rung == 0
    waited = jnp.where(plain, control.waited + 1, 0)
    probe = plain & (waited >= control.wait)
    rung = jnp.where(plain, probe.astype(jnp.int32), rung)
    # A probe begins in doubt again, or what was long ago would outweigh it.
    passed, drafted = (
      jnp.where(probe, fresh, old)
      for fresh, old in zip(self._doubt(), (passed, drafted), strict=True)
    )
    longer = jnp.minimum(2 * control.wait, self.longest_wait)
    wait = jnp.where(probe, longer, control.wait)
    wait = jnp.where(rung > 1, self._least_wait(), wait).astype(jnp.int32)
    return FallbackState(passed, drafted, rung, waited, wait)

  def _doubt(self) -> tuple[Array, Array]:
    """One token, the share at its threshold."""
    one = jnp.ones((), jnp.float32)
    return self.threshold * one, one

  def _least_wait(self) -> Array:
    return jnp.array(self.first_wait, jnp.int32)


class AdaptiveState(NamedTuple):
  """Running counts of one row, `[K]` by depth; older rounds count less.

  Attributes:
    passed: tests that passed.
    tested: all of them.
    lately_passed: the same, of the last few tests only.
    lately_tested: likewise.
  """

  passed: Array
  tested: Array
  lately_passed: Array
  lately_tested: Array


@pytree
class Adaptive:
  """Takes the length whose predicted speedup is highest.

  That is (1 + Σ_{k≤K} Π_{j≤k} α_j) / (K c + v(K)) with the running acceptance
  rate α at every depth, which leans on the rate over all depths where it has
  seen little, as that leans on a hopeful one. When the last few tests would be
  a surprise at the running rate, all before them are forgotten. What was seen
  fades while nothing is drafted, so it tries again by itself.

  Attributes:
    rungs: the ladder.
    cost: `[rungs]` K c + v(K), what a round of K tokens takes, in plain rounds.
    memory: weight of a round against the one that follows it.
    lately: weight of a test against the one that follows it, among the last
      few; of any against a round that drafts nothing.
    surprise: log-likelihood ratio, in nats, at which the past is forgotten.
    hope: acceptance rate to begin with.
    weight: of that, in tests.
    lean: weight of the rate over all depths, in tests.
  """

  rungs: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  cost: Array
  memory: float | Array = 0.97
  lately: float | Array = 0.85
  surprise: float | Array = 2.0
  hope: float | Array = 0.7
  weight: float | Array = 0.2
  lean: float | Array = 2.0

  def __post_init__(self):
    """Refuses costs that do not belong to the ladder."""
    _require_ladder(self.rungs)
    if jnp.shape(self.cost) != (len(self.rungs),):
      raise ValueError(
        f'costs of shape {list(jnp.shape(self.cost))}: the ladder {self.rungs}'
        ' needs one for each of its lengths'
      )

  def init(self) -> AdaptiveState:
    """Nothing seen."""
    k = self.rungs[-1]
    return AdaptiveState(*(jnp.zeros(k, jnp.float32) for _ in range(4)))

  def limit(self, control: AdaptiveState) -> Limit:
    """The best rung's length."""
    overall = self._rate(control.passed, control.tested)
    alpha = control.passed + self.lean * overall
    alpha /= control.tested + self.lean
    tokens = jnp.concatenate([jnp.ones(1), 1 + jnp.cumsum(jnp.cumprod(alpha))])
    k = jnp.asarray(self.rungs, jnp.int32)
    return Limit(k[jnp.argmax(tokens[k] / self.cost)])

  def update(self, control: AdaptiveState, seen: Seen) -> AdaptiveState:
    """Counts a round, as one row's whatever the batch."""
    rows = jnp.maximum(seen.live.sum(), 1)
    passed, tested = seen.passed.sum(0) / rows, seen.tested.sum(0) / rows
    # A round that drafts nothing counts as a test here.
    fade = self.lately ** jnp.maximum(tested.sum(), 1)
    lately_passed = control.lately_passed * fade + passed
    lately_tested = control.lately_tested * fade + tested
    memory = jnp.where(tested.sum() > 0, self.memory, self.lately)
    passed += control.passed * memory
    tested += control.tested * memory
    before = self._rate(passed, tested)
    now = self._rate(lately_passed, lately_tested)
    kl = jax.scipy.special.rel_entr(now, before)
    kl += jax.scipy.special.rel_entr(1 - now, 1 - before)
    forget = kl * lately_tested.sum() > self.surprise
    return AdaptiveState(
      jnp.where(forget, lately_passed, passed),
      jnp.where(forget, lately_tested, tested),
      lately_passed,
      lately_tested,
    )

  def _rate(self, passed: Array, tested: Array) -> Array:
    """Over all depths."""
    hope = self.weight * self.hope
    return (hope + passed.sum()) / (self.weight + tested.sum())


class ConfidenceState(NamedTuple):
  """Scalars: the bound, and the running share of drafted tokens accepted."""

  bound: Array
  rate: Array


@pytree
class Confidence:
  """Stops a draft where the draft model is in doubt.

  A next token is drafted while 1 - √(γ H) is at least a bound, H the entropy of
  the draft's law in nats, at temperature 1; the first always is. The bound goes
  up while less than a wanted share of the drafted tokens is accepted, and down
  else. (After AdaEDL: Agrawal et al. 2024, arXiv 2410.18351.)

  Attributes:
    rungs: the ladder.
    gamma: γ.
    bound: to begin with; may reach 1, where only a sure draft goes on.
    wanted: share of drafted tokens accepted.
    step: by which the bound moves in a round.
    memory: weight of the running share against a round's.
  """

  rungs: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  gamma: float | Array = 0.2
  bound: float | Array = 0.3
  wanted: float | Array = 0.7
  step: float | Array = 0.02
  memory: float | Array = 0.9

  def __post_init__(self):
    """Refuses a ladder that has no step."""
    _require_ladder(self.rungs)

  def init(self) -> ConfidenceState:
    """As wanted, so far."""
    return ConfidenceState(
      jnp.array(self.bound, jnp.float32),
      jnp.array(self.wanted, jnp.float32),
    )

  def limit(self, control: ConfidenceState) -> Limit:
    """As long as the draft is sure."""

    def go_on(i, logits):
      log_q = jax.nn.log_softmax(logits.astype(jnp.float32))
      # A token that is impossible adds nothing.
      terms = jnp.where(log_q > -jnp.inf, jnp.exp(log_q) * log_q, 0)
      sure = 1 - jnp.sqrt(self.gamma * -terms.sum(-1))
      return (i == 0) | (sure >= control.bound)

    return Limit(jnp.asarray(self.rungs[-1], jnp.int32), go_on)

  def update(self, control: ConfidenceState, seen: Seen) -> ConfidenceState:
    """Moves the bound."""
    drafted = seen.drafted.sum()
    share = seen.passed.sum() / jnp.maximum(drafted, 1)
    rate = self.memory * control.rate + (1 - self.memory) * share
    rate = jnp.where(drafted > 0, rate, control.rate)
    bound = control.bound + self.step * jnp.sign(self.wanted - rate)
    return ConfidenceState(jnp.clip(bound, 0, 1), rate)


CONTROLLERS = ('fixed', 'fallback', 'adaptive', 'confidence')


def find(
  name: str, k: int, cost: Callable[[int], float] | None = None
) -> DraftLength:
  """A controller with its usual settings.

  Args:
    name: one of `CONTROLLERS`.
    k: the longest draft.
    cost: what a round of K tokens takes, in plain rounds; for 'adaptive'.

  Returns:
    The controller.

  Raises:
    ValueError: there is none of that name, or it needs more than that.
  """
  if name not in CONTROLLERS:
    raise ValueError(
      f'there is no draft length {name!r}: take one of {", ".join(CONTROLLERS)}'
    )
  if name == 'fixed':
    return FIXED
  if k < 1:
    raise ValueError(f'{name} needs a longest draft of 1 or more, not {k}')
  if name == 'fallback':
    return Fallback(ladder(k))
  if name == 'confidence':
    return Confidence(ladder(k))
  if cost is None:
    raise ValueError('adaptive needs to know what rounds cost: give `cost`')
  costs = [cost(n) for n in ladder(k)]
  if not all(0 < value < math.inf for value in costs):
    raise ValueError(f'rounds cost {costs}: all must be positive')
  return Adaptive(ladder(k), jnp.array(costs, jnp.float32))


def _require_ladder(rungs: tuple[int, ...]):
  """Refuses what is no ladder.

  Raises:
    ValueError: it does not climb from 0 to a draft.
  """
  if len(rungs) < 2 or rungs[0] != 0 or list(rungs) != sorted(set(rungs)):
    raise ValueError(
      f'the ladder {rungs} should climb from 0, as {ladder(8)} does'
    )

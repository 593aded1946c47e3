"""What rounds of decoding cost on the device at hand, measured and kept.

All of it is timed where decoding stands, behind a prompt that has been read,
and with the programs that decode: a round is one of `decode.advance` with the
real drafter, so that the rule, the warp, the draw and all bookkeeping are in
its price. Its drafting, c, is timed alone; v is what remains of the round.
Timed apart, a bare pass of the target and a bare draft make up less than a
round, and predictions from them promise too much.

Costs depend neither on the tokens nor on how many are accepted: shapes are
fixed, and attention reads the whole buffer however much of it is filled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import (
  decode,
  draft_length,
  generation,
  runs,
  timing,
  verify,
  warps,
)
from specjax.drafters.none import NoDrafter
from specjax.types import (
  Drafter,
  DraftLength,
  LanguageModel,
  Verifier,
  Warp,
)

# Turns of a timed loop: enough for its start, when the weights have yet to come
# into the processor's caches, not to matter. Plain rounds are the shortest, and
# all else is divided by them: 16 measured 13 % dearer each than 128.
TURNS = {'plain': 64, 'round': 32, 'pass': 16, 'draft': 24}


class Arm(NamedTuple):
  """One way to decode: a drafter by name, and its longest draft."""

  name: str
  k: int


PLAIN = Arm('none', 0)


class Costs(NamedTuple):
  """What the rounds of one drafter cost, in plain rounds.

  Attributes:
    seconds: of a plain round, which drafts nothing.
    c: by draft length K, the drafting of K tokens over K plain rounds.
    v: by draft length K from 0, all else that a round of K tokens does.
    passes: by draft length K from 0, the part of v that is the target's bare
      pass over K + 1 tokens; empty where it was not asked for.
    call: a call of the compiled loop that decodes nothing: the host's share.
    start: what a call takes beyond its rounds: the same, and what the drafter
      reads of the prompt.
  """

  seconds: float
  c: dict[int, float]
  v: dict[int, float]
  passes: dict[int, float]
  call: float
  start: float

  def round(self, k: int) -> float:
    """Plain rounds that a round of k tokens takes: k c(k) + v(k).

    Between the lengths that were measured it is a straight line.

    Raises:
      ValueError: k is longer than any that was measured.
    """
    lengths = sorted(self.v)
    if not 0 <= k <= lengths[-1]:
      raise ValueError(f'draft length {k}: costs were measured at {lengths}')
    cost = [n * self.c.get(n, 0.0) + self.v[n] for n in lengths]
    return float(np.interp(k, lengths, cost))

  def speedup(self, k: int, rounds: float, new_tokens: int) -> float:
    """Over plain decoding, of a batch that takes some rounds of k tokens.

    Args:
      k: draft length.
      rounds: that the batch takes.
      new_tokens: of every row.
    """
    plain = self.call + new_tokens
    return plain / (self.start + rounds * self.round(k))


class Meter:
  """Times rounds and their parts, a little at a time, at one batch size.

  Whoever decodes runs its `calls` in turns with what the costs are for, since a
  machine's speed drifts.
  """

  def __init__(
    self,
    target: LanguageModel,
    drafters: Mapping[Arm, Drafter],
    rule: Verifier,
    *,
    batch: int,
    prompt_length: int,
    context: int,
    split: bool = False,
  ):
    """Prefills; then `lowered`, `compiled` and the rest.

    Args:
      target: the target.
      drafters: by arm, `PLAIN` among them; those with a memory are one drafter
        at several lengths.
      rule: verifies.
      batch: rows.
      prompt_length: tokens of a prompt, which are arbitrary ones.
      context: tokens of prompt and output that the buffers are for.
      split: whether the bare passes of the target are timed too.
    """
    self._target, self._drafters, self._rule = target, drafters, rule
    self._arms = sorted(drafters, key=lambda arm: arm.k)
    remembers = [
      arm for arm in self._arms if _has_memory(target, drafters[arm])
    ]
    self._longest = (remembers or self._arms)[-1]
    text = np.arange(batch * prompt_length) * 7919 % target.vocab_size
    self._first = self._begun = generation.start(
      target,
      # Its memory serves every shorter draft, and its counts every arm's.
      drafters[self._longest].at(self._arms[-1].k),
      text.reshape(batch, -1).tolist(),
      key=jax.random.key(0),
      max_new_tokens=context - prompt_length,
    )
    self._widths = sorted({arm.k for arm in self._arms}) if split else []
    self._samples: dict[Hashable, list[float]] = {}
    self._programs: dict[Hashable, jax.stages.Compiled] = {}

  def lowered(self) -> dict[Hashable, jax.stages.Lowered]:
    """The programs, to be compiled and given to `compiled`.

    Those named ('round', arm) are `decode.advance` and serve to decode.
    """
    found = {}
    for name, arguments in self._arguments(warps.UNCHANGED).items():
      function = {
        'round': decode.advance,
        'draft': timing.proposals,
        'pass': timing.passes,
      }.get(name[0])
      if function:
        found[name] = jax.jit(function).lower(*arguments)
    return found

  def compiled(self, programs: Mapping[Hashable, Any]) -> None:
    """Takes the programs, and runs each once: a first call is slower."""
    self._programs = dict(programs)
    first = self._first
    soon = first._replace(stop=first.length + 1)
    end = self._programs['round', self._longest](
      *self._loop(self._longest, soon, decode.FOREVER)
    )
    # From here on a draft has no prompt to read: that is timed as a start.
    self._begun = end._replace(
      stop=first.stop, done=first.done, stats=first.stats
    )
    for call in self.calls(warps.UNCHANGED).values():
      jax.block_until_ready(call())

  def calls(self, warp: Warp) -> dict[Hashable, Callable[[], Any]]:
    """What to time, by name."""
    found = {}
    for name, arguments in self._arguments(warp).items():
      kind, arm = name
      program = ('round', arm) if kind in ('call', 'start') else name
      found[name] = functools.partial(self._programs[program], *arguments)
    return found

  def run(
    self,
    warp: Warp,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
  ) -> None:
    """Runs its calls in turns with nothing else, and takes the timings."""
    calls = {name: [call] for name, call in self.calls(warp).items()}
    self.add(*timing.alternate(calls, repeats, clock=clock))

  def add(
    self,
    seconds: Mapping[Hashable, Sequence[float]],
    results: Mapping[Hashable, Sequence[Any]],
  ) -> None:
    """Takes timings.

    Args:
      seconds: by name, those of each repeat, as `timing.alternate` gives them;
        other names are passed over.
      results: by name, what its calls within a repeat returned.
    """
    for name in self._arguments(warps.UNCHANGED):
      turns = TURNS.get(name[0], 1)
      if name[0] == 'round':  # fewer where the text came to its end
        turns = int(np.max(np.asarray(results[name][0].stats.rounds)))
      turns *= len(results[name])
      samples = np.asarray(seconds[name])
      # A call copies the cache in, once: that is no part of a round. It is much
      # less than so many rounds, unless the machine paused in it.
      if name[0] in ('round', 'pass'):
        call = np.asarray(seconds['call', PLAIN])
        samples = np.maximum(samples - call, samples / 2)
      samples = samples / turns
      self._samples.setdefault(name, []).extend(samples.tolist())

  def costs(self, name: str) -> Costs:
    """Those of the drafter of a name, from all timings so far."""
    samples = {name: np.asarray(x) for name, x in self._samples.items()}
    plain = samples['round', PLAIN]
    own = [arm for arm in self._arms if arm.name == name]
    drafts = [arm for arm in own if ('draft', arm) in samples]
    # A chain grows by the same step, so two lengths tell the others.
    timed = np.stack([samples['draft', arm] for arm in drafts], -1)
    lengths = [arm.k for arm in drafts]
    c, v = {}, {0: 1.0}
    for arm in own:
      draft = np.array([np.interp(arm.k, lengths, row) for row in timed])
      drafting = float(np.median(draft / plain))
      c[arm.k] = drafting / arm.k
      v[arm.k] = float(np.median(samples['round', arm] / plain)) - drafting
    start = samples['start', own[-1]] - samples['round', own[-1]]
    return Costs(
      seconds=float(np.median(plain)),
      c=c,
      v=v,
      passes={
        k: float(np.median(samples['pass', Arm('target', k)] / plain))
        for k in self._widths
      },
      call=float(np.median(samples['call', PLAIN] / plain)),
      start=float(np.median(start / plain)),
    )

  def _loop(self, arm, state, rounds, warp=warps.UNCHANGED):
    return arguments(
      self._target, self._drafters[arm], self._rule, warp, state, rounds
    )

  def _arguments(self, warp: Warp) -> dict[Hashable, tuple]:
    found = {
      ('round', arm): self._loop(
        arm, self._begun, TURNS['round' if arm.k else 'plain'], warp
      )
      for arm in self._arms
    }
    found['call', PLAIN] = self._loop(PLAIN, self._begun, 0, warp)
    for name in dict.fromkeys(arm.name for arm in self._arms if arm.k):
      own = [arm for arm in self._arms if arm.name == name]
      for arm in dict.fromkeys((own[0], own[-1])):
        target, drafter, *_, state, _, _ = self._loop(arm, self._begun, 0, warp)
        found['draft', arm] = target, drafter, state, TURNS['draft']
      found['start', own[-1]] = self._loop(own[-1], self._first, 1, warp)
    for k in self._widths:
      tokens = jnp.ones((len(self._begun.length), k + 1), jnp.int32)
      loop = self._target, self._begun.cache, tokens, TURNS['pass']
      found['pass', Arm('target', k)] = loop
    return found


def measure(
  target: LanguageModel,
  drafter: Drafter,
  *,
  batch: int,
  context: int,
  ks: Sequence[int],
  rule: Verifier = verify.rejection,
  warp: Warp = warps.UNCHANGED,
  repeats: int = 9,
  clock: Callable[[], float] = time.perf_counter,
) -> Costs:
  """Compiles and times rounds of some draft lengths, in turns.

  Args:
    target: the target.
    drafter: what proposes.
    batch: rows decoded at once.
    context: tokens of prompt and output, half of them each.
    ks: draft lengths; 0 is always among them.
    rule: verifies.
    warp: of target and drafter.
    repeats: timings of each.
    clock: gives the time in seconds.

  Returns:
    The costs.

  Raises:
    ValueError: there is no draft length above 0, or the context is too short.
  """
  ks = sorted(set(ks) - {0})
  if not ks or ks[0] < 1 or context < 2 or batch < 1:
    raise ValueError(
      f'ks are {ks}, the batch {batch} and the context {context}: give a draft'
      ' length or more from 1, rows and at least 2 tokens'
    )
  drafters = {PLAIN: NoDrafter()}
  drafters |= {Arm('draft', k): drafter.at(k) for k in ks}
  meter = Meter(
    target,
    drafters,
    verify.as_pytree(rule),
    batch=batch,
    prompt_length=context // 2,
    context=context,
  )
  meter.compiled(timing.compile_all(meter.lowered()))
  meter.run(warp, repeats, clock)
  return meter.costs('draft')


def load_or_measure(
  path: str | pathlib.Path,
  target: LanguageModel,
  drafter: Drafter,
  *,
  batch: int,
  context: int,
  ks: Sequence[int],
  rule: Verifier = verify.rejection,
  warp: Warp = warps.UNCHANGED,
  repeats: int = 9,
) -> Costs:
  """The costs kept in a file, if they are there; else `measure`, and keep.

  Args:
    path: of the file, as `<run>/costs.json`.
    target: see `measure`, as for all others.
    drafter: of any length.
    batch: rows.
    context: tokens.
    ks: draft lengths that must be there.
    rule: verifies.
    warp: of target and drafter.
    repeats: timings of each.

  Raises:
    ValueError: the file is damaged; see `measure` too.
  """
  place = key(target, drafter, rule, warp, batch, context)
  kept = load(path, place)
  if kept and set(ks) <= set(kept.v):
    return kept
  found = measure(
    target,
    drafter,
    batch=batch,
    context=context,
    ks=[*ks, *(kept.v if kept else ())],
    rule=rule,
    warp=warp,
    repeats=repeats,
  )
  save(path, place, found)
  return found


def key(
  target: LanguageModel,
  drafter: Drafter,
  rule: Verifier,
  warp: Warp,
  batch: int,
  context: int,
) -> dict[str, Any]:
  """What costs depend on, as JSON: device, models, rule, warp, shapes.

  A context is rounded up to what buffers come in. The numbers of a rule or a
  warp, as the temperature, and the drafter's `k` do not count.
  """
  rule = verify.as_pytree(rule)
  named = rule.func if isinstance(rule, jax.tree_util.Partial) else type(rule)
  bucket = generation.BUCKET
  return {
    'device': runs.device(),
    'jax': runs.versions()['jax'],
    'target': _describe(target),
    'drafter': _describe(with_warp(drafter, warp)),
    'rule': f'{named.__module__}:{named.__qualname__}',
    'warp': str(jax.tree.structure(warp)),
    'batch': batch,
    'context': -(-context // bucket) * bucket,
  }


def load(path: str | pathlib.Path, place: Mapping[str, Any]) -> Costs | None:
  """What a file keeps of a place; None if it does not, or there is no file.

  Raises:
    ValueError: the file is damaged.
  """
  found = [costs for where, costs in _entries(path) if where == place]
  return found[-1] if found else None


def check(path: str | pathlib.Path) -> None:
  """Refuses a damaged file, before any work.

  Raises:
    ValueError: it does not hold costs.
  """
  _entries(path)


def save(
  path: str | pathlib.Path, place: Mapping[str, Any], costs: Costs
) -> None:
  """Keeps costs beside those of other places, in place of older ones.

  Raises:
    ValueError: the file is damaged; nothing is written then.
  """
  kept = [entry for entry in _entries(path) if entry[0] != place]
  entries = [*kept, (place, costs)]
  runs.write_json(path, [{**k, 'costs': c._asdict()} for k, c in entries])


def arguments(
  target: LanguageModel,
  drafter: Drafter,
  rule: Verifier,
  warp: Warp,
  state: decode.DecodeState,
  rounds: int,
  controller: DraftLength = draft_length.FIXED,
) -> tuple:
  """Those of `decode.advance`, for a state that may be another drafter's."""
  if not _has_memory(target, drafter):
    state = state._replace(memory=())
  state = state._replace(control=controller.init())
  drafter, eos = with_warp(drafter, warp), generation.end_ids(target, ())
  return target, drafter, rule, warp, eos, state, rounds, controller


def with_warp(drafter: Drafter, warp: Warp) -> Drafter:
  """The drafter with the target's warp wherever it, or a part, has one."""
  if isinstance(drafter, tuple):
    return tuple(with_warp(part, warp) for part in drafter)
  if hasattr(drafter, 'warp'):
    return dataclasses.replace(drafter, warp=warp)
  parts = {
    name: with_warp(part, warp) for name, part in _parts(drafter).items()
  }
  return dataclasses.replace(drafter, **parts) if parts else drafter


def _parts(drafter: Any) -> dict[str, Any]:
  """The drafters, or tuples of them, that a drafter is made of."""
  fields = dataclasses.fields(drafter) if _is_pytree(drafter) else ()
  found = {field.name: getattr(drafter, field.name) for field in fields}
  return {
    name: value
    for name, value in found.items()
    if all(
      hasattr(part, 'propose')
      for part in (value if isinstance(value, tuple) and value else [value])
    )
  }


def _is_pytree(x: Any) -> bool:
  return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _has_memory(target, drafter) -> bool:
  memory = jax.eval_shape(lambda: drafter.init(target, 1, 1))
  return bool(jax.tree.leaves(memory))


def _describe(model: Any) -> dict[str, Any]:
  """A model's or a drafter's class, sizes and fixed numbers, as JSON."""
  leaves = jax.tree.leaves(model)
  shapes = [f'{jnp.result_type(x)}{list(np.shape(x))}' for x in leaves]
  fields = dataclasses.fields(model) if _is_pytree(model) else ()
  fixed = {
    field.name: repr(getattr(model, field.name))
    for field in fields
    if field.metadata.get('static') and field.name != 'k'
  }
  inner = getattr(model, 'model', model)
  parts = {
    name: [_describe(x) for x in (part if isinstance(part, tuple) else [part])]
    for name, part in _parts(model).items()
  }
  return {
    'class': f'{type(model).__module__}:{type(model).__qualname__}',
    'parameters': sum(int(np.size(leaf)) for leaf in leaves),
    'dtypes': sorted({str(jnp.result_type(leaf)) for leaf in leaves}),
    'sizes': hashlib.sha256(str(shapes).encode()).hexdigest()[:16],
    'config': repr(getattr(inner, 'config', None)),
    'fixed': fixed,
    **({'parts': parts} if parts else {}),
  }


def _entries(path) -> list[tuple[dict[str, Any], Costs]]:
  if not pathlib.Path(path).exists():
    return []
  try:
    return [_entry(entry) for entry in runs.read_json(path)]
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(
      f'{path} does not hold costs ({error!r}): delete it, and they are'
      ' measured again'
    ) from error


def _entry(entry: Mapping[str, Any]) -> tuple[dict[str, Any], Costs]:
  entry = dict(entry)
  kept = entry.pop('costs')
  by_k = {
    name: {int(k): float(x) for k, x in kept[name].items()}
    for name in ('c', 'v', 'passes')
  }
  alone = {name: float(kept[name]) for name in ('seconds', 'call', 'start')}
  found = Costs(**alone, **by_k)
  rounds = [found.round(k) for k in found.v]
  if found.c.keys() != found.v.keys() - {0}:
    raise ValueError('c and v of different draft lengths')
  if not all(0 < cost < math.inf for cost in (found.seconds, *rounds)):
    raise ValueError('a round that costs nothing, or no number')
  return entry, found

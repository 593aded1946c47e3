"""Decoding with specjax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specjax import decode, generation, pricing, runs, verify, weights
from specjax.comparison import Condition, Decode, Text
from specjax.contest import Way
from specjax.drafters.none import NoDrafter
from specjax.models.transformer import Transformer
from specjax.types import Drafter
from specjax.workspace import Workspace


class Decoder:
  """A target, and drafters for it.

  Attributes:
    target: the target.
    drafts: models of the ways that draft with one, which others may load.
  """

  def __init__(
    self,
    target: Transformer,
    drafters: Mapping[float, Mapping[Way, Drafter]],
  ):
    """Takes what decodes.

    Args:
      target: the target.
      drafters: by temperature, and by way.
    """
    self.target = target
    self.drafts: dict[Way, Transformer] = {}
    for by_way in drafters.values():  # the models are those of any temperature
      for way, drafter in by_way.items():
        if _has_model(way, drafter):
          self.drafts.setdefault(way, drafter.model)
    self._drafters = drafters

  @functools.cached_property
  def _packed(self) -> Transformer:
    return weights.pack(self.target, 1)

  def arm(self, way: Way | None, condition: Condition) -> Decode:
    """What decodes in a way, or plainly."""
    drafter = NoDrafter()
    if way is not None:
      drafter = self._drafters[condition.temperature][way]
    warp = condition.warp
    rows = generation.scored_rows(self.target, drafter, condition.batch)
    target = self._packed if weights.worth_packing(rows) else self.target
    drafter = pricing.with_warp(weights.pack(drafter, rows), warp)
    return functools.partial(_decode, target, drafter, warp)

  def versions(self) -> dict[str, str]:
    """What a measurement depends on."""
    return runs.versions()


def load(workspace: Workspace, ways: Sequence[Way], dtype: str) -> Decoder:
  """Opens a run's models, with weights and caches of a dtype.

  Draft models follow; heads and other drafts stay as they were trained.

  Args:
    workspace: the run.
    ways: to draft.
    dtype: one of `products.DTYPES`.

  Raises:
    ValueError: a way is not made for its draft.
  """
  drafters: dict[float, dict[Way, Any]] = {}
  for t in workspace.config['speedup']['temperatures']:
    drafters[t] = {way: way.drafter(workspace, t) for way in ways}
    for way, drafter in drafters[t].items():
      if _has_model(way, drafter):
        model = drafter.model.cast(dtype)
        drafters[t][way] = dataclasses.replace(drafter, model=model)
  return Decoder(workspace.target().cast(dtype), drafters)


def _has_model(way, drafter) -> bool:
  return way.kind == 'model' and hasattr(drafter, 'model')


def _decode(target, drafter, warp, prompts, seed, count, room) -> Text:
  state = generation.start(
    target,
    drafter,
    prompts,
    key=jax.random.key(seed),
    max_new_tokens=count,
    room=room,
  )
  state = generation.advance(
    target,
    drafter,
    verify.as_pytree(verify.rejection),
    warp,
    generation.end_ids(target, ()),  # nothing ends a text early
    state,
    decode.FOREVER,
  )
  result = generation.finish(state, [*map(len, prompts)])
  return Text(result.new_tokens(), int(result.stats.rounds.max()))

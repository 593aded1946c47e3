"""What a round of decoding keeps in memory, before anything is run.

Everything is known from shapes. Most rules weigh the draft's law of every node
against the target's, so a round has laws `[B, N, V]` and `[B, N + 1, V]` of
float32: at V = 150 000, K = 8 and B = 32 that is .33 GB in two arrays. A draft
of point masses has none of its own, and rows divided over devices divide both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from specjax import decode, sharding
from specjax.cache import Cache
from specjax.draft_length import FIXED
from specjax.types import Drafter, DraftLength, LanguageModel


class Plan(NamedTuple):
  """Bytes on each device.

  Attributes:
    models: parameters of the target and of the drafter, as they are stored.
    gathered: the copy of them that the loop has where a mesh has `fsdp`.
    caches: of the target, and what the drafter remembers.
    texts: tokens, counts and keys.
    target_laws: `[B, N + 1, V]` of a round.
    draft_laws: `[B, N, V]`, 0 where drafts are point masses. Rules that do not
      read them, as 'sampler_match' and 'typical', have none made.
  """

  models: int
  gathered: int
  caches: int
  texts: int
  target_laws: int
  draft_laws: int

  @property
  def arguments(self) -> int:
    """What goes into a round."""
    return self.models + self.caches + self.texts

  @property
  def outputs(self) -> int:
    """What comes out, in the place of what went in."""
    return self.caches + self.texts

  def __str__(self) -> str:
    """In one line."""
    goes = 'a round', self.arguments, self.outputs
    return listed('each device', self._asdict(), *goes).replace('_', ' ')


def plan(
  target: LanguageModel,
  drafter: Drafter,
  batch: int,
  size: int,
  mesh: Mesh | None = None,
  controller: DraftLength = FIXED,
) -> Plan:
  """What rounds take; nothing is allocated.

  Args:
    target: arrays, or their shapes.
    drafter: likewise.
    batch: rows.
    size: tokens of a row, prompt included.
    mesh: on which parameters and rows are divided.
    controller: of the draft length.

  Raises:
    ValueError: the mesh cannot divide the rows.
  """
  sharding.require_rows(mesh, batch, 'batch')
  rows = batch // sharding.parts(mesh)
  models = sharding.described((target, drafter), mesh)
  draft = None

  def begin(target, drafter):
    nonlocal draft
    ints = jnp.ones(rows, jnp.int32)
    tokens = jnp.zeros((rows, size), jnp.int32)
    keys = jax.random.split(jax.random.key(0), rows)
    draft = decode.shapes(target, drafter, rows, size)
    texts = tokens, ints, ints, ints, keys
    return decode.prefill(target, drafter, *texts, controller)

  state = jax.eval_shape(begin, target, drafter)
  own, nodes = draft.logits, draft.tokens.shape[1]
  kept = state.cache, state.memory
  return Plan(
    models=sharding.bytes_each(models),
    gathered=_gathered(models, mesh),
    caches=_held(kept, mesh),
    texts=sharding.bytes_each(state) - sharding.bytes_each(kept),
    target_laws=4 * rows * (nodes + 1) * target.vocab_size,
    draft_laws=0 if own is None else 4 * math.prod(own.shape),
  )


def _gathered(models: Any, mesh: Mesh | None) -> int:
  """Bytes of what is gathered over `fsdp`, which `tensor` still divides."""
  if mesh is None:
    return 0
  whole = AbstractMesh(
    (mesh.shape['data'], 1, mesh.shape['tensor']), sharding.AXES
  )
  pairs = zip(
    jax.tree.leaves(models),
    jax.tree.leaves(sharding.described(models, whole)),
    strict=True,
  )
  sizes = (tuple(map(sharding.bytes_each, pair)) for pair in pairs)
  return sum(again for stored, again in sizes if again != stored)


def _held(tree: Any, mesh: Mesh | None) -> int:
  """Bytes of caches, whose heads `tensor` divides where it can."""
  parts = mesh.shape['tensor'] if mesh else 1
  nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Cache))
  caches = [node.rows for node in nodes if isinstance(node, Cache)]
  divided = sum(
    sharding.bytes_each(x)
    for x in jax.tree.leaves(caches)
    if x.shape[1] % parts == 0
  )
  return sharding.bytes_each(tree) - divided * (parts - 1) // parts


def listed(
  where: str, parts: Mapping[str, int], what: str, into: int, out: int
) -> str:
  """Bytes of parts by name, and of what goes into a program and comes out."""
  held = {name: size for name, size in parts.items() if size}
  each = ', '.join(f'{said(size)} {name}' for name, size in held.items())
  total = sum(parts.values())
  together = f', together {said(total)}' if total != into else ''
  return (
    f'on {where} {each}{together}: into {what} go {said(into)}, of which'
    f' {said(out)} are replaced'
  )


def said(count: int) -> str:
  """Bytes, in words."""
  power = next((p for p in (9, 6, 3) if count >= 10**p), 0)
  unit = {9: 'GB', 6: 'MB', 3: 'kB', 0: 'B'}[power]
  return f'{count / 10**power:.3g} {unit}'

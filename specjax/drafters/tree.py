"""A draft model that proposes several continuations at once, as a tree."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draws, trees
from specjax.drafters import model
from specjax.types import Array, Block, Draft, pytree


class TreeMemory(NamedTuple):
  """What the draft model knows.

  Attributes:
    cache: the draft model's own cache, describing a prefix of the tokens.
    rows: the cache rows of the current tree's inner nodes, for `observe` to
      write those that came true.
    fed: `[B]` bool, whether the pending token and those nodes were fed.
  """

  cache: Any
  rows: Any
  fed: Array


@pytree
class TreeDrafter(model.ModelDrafter):
  """Samples a tree from a draft model; `k` is its depth.

  Siblings are i.i.d. draws, so that `(3, 1, 1)` is three independent paths of
  three tokens that share how they begin, or, without replacement, distinct ones
  by Gumbel top-k (Kool et al. 2019, arXiv 1903.06059), each with its law given
  its earlier siblings. Where a law has
  fewer tokens than a node has children, the rest are invalid.

  Attributes:
    branching: children of every node at depth 0, 1, ...; 1 beyond its end.
    replacement: whether siblings may be equal.
  """

  branching: tuple[int, ...] = dataclasses.field(
    default=(2, 2), metadata={'static': True}
  )
  replacement: bool = dataclasses.field(
    default=False, metadata={'static': True}
  )

  def __post_init__(self):
    """Refuses a node without children."""
    super().__post_init__()
    object.__setattr__(self, 'branching', tuple(map(int, self.branching)))
    if any(count < 1 for count in self.branching):
      raise ValueError(
        f'branching is {self.branching}: every depth needs at least 1 child'
      )

  def init(self, target, batch, size):
    """An empty cache; see `ModelDrafter.init`."""
    cache = super().init(target, batch, size).cache
    inner, rows = sum(self._widths[:-1]), ()
    if inner:
      block = Block(jnp.zeros((batch, inner), jnp.int32))
      shapes = jax.eval_shape(self.model.extend, block, cache)[1]
      rows = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return TreeMemory(cache, rows, jnp.zeros(batch, bool))

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """A sampled tree, level by level, and the laws it was drawn from."""
    batch = tokens.shape[0]
    if self.k == 0:
      empty = jnp.zeros((batch, 0), jnp.int32)
      nothing = memory._replace(fed=jnp.zeros_like(memory.fed))
      return Draft(empty, siblings='fixed'), nothing

    own, features = self.catch_up(memory.cache, tokens, length)
    parents = jnp.asarray(self._parents)
    nodes, rows, levels = jnp.zeros((batch, 0), jnp.int32), memory.rows, []
    for depth, width in enumerate(self._widths):
      if depth:
        # What was drawn above is scored again: its rows are in no cache yet.
        block = Block(nodes, jnp.tile(parents[: nodes.shape[1]], (batch, 1)))
        output, rows = self.model.extend(block, own)
        features = output.features[:, -self._widths[depth - 1] :]
      logits = self.warp(self.model.unembed(features))
      level = self._siblings(keys, nodes.shape[1], logits, width)
      levels.append(level)
      nodes = jnp.concatenate([nodes, level[0]], 1)
    drawn, laws, valid = (
      jnp.concatenate(part, 1) for part in zip(*levels, strict=True)
    )
    valid &= self._reachable(valid)
    grown = jnp.tile(parents, (batch, 1))
    if self.replacement:
      grown = trees.merge(drawn, grown, valid)
    draft = Draft(
      drawn,
      parents=grown,
      logits=laws,
      valid=valid,
      siblings='iid' if self.replacement else 'distinct',
    )
    own = own._replace(length=length - 1)
    return draft, TreeMemory(own, rows, jnp.ones(batch, bool))

  def observe(self, target, memory, block, kept, output):
    """Writes the kept nodes that were fed; the rest it catches up on."""
    inner = sum(self._widths[:-1])
    if block.tokens.shape[1] != 1 + sum(self._widths):  # a prompt's chunk
      return memory
    known = kept & memory.fed[:, None]
    own = memory.cache
    own = own._replace(length=own.length + known[:, 0])
    if inner:
      own = self.model.commit(
        own, memory.rows, known[:, 1 : 1 + inner], chain=False
      )
    return TreeMemory(own, memory.rows, jnp.zeros_like(memory.fed))

  @property
  def _widths(self) -> tuple[int, ...]:
    """Nodes at each depth."""
    children = (self.branching + (1,) * self.k)[: self.k]
    return tuple(int(n) for n in np.cumprod(children))

  @property
  def _parents(self) -> np.ndarray:
    """`[N]`, level by level."""
    parents, above = [], [-1]
    for width in self._widths:
      start = len(parents)
      parents += np.repeat(above, width // len(above)).tolist()
      above = range(start, len(parents))
    return np.array(parents, np.int32)

  def _siblings(self, keys, start, logits, width):
    """The children of a level.

    Args:
      keys: of the round.
      start: number of the first child.
      logits: `[B, W, V]` of the level's nodes.
      width: children in all.

    Returns:
      Tokens `[B, width]`, the laws they were drawn from `[B, width, V]`, and
      which of them could be drawn `[B, width]`.
    """
    batch, above, vocab = logits.shape
    count = width // above
    index = start + jnp.arange(width)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    each = fold(keys.draft, index)  # [B, width]
    if self.replacement:
      laws = jnp.repeat(logits, count, 1)
      tokens = jax.vmap(jax.vmap(draws.inverse_cdf))(each, laws)
      return tokens, laws, jnp.ones((batch, width), bool)

    def distinct(key, logits):
      noise = jax.random.gumbel(key, (vocab,))
      most = min(count, vocab)  # the others are invalid
      best, tokens = jax.lax.top_k(logits.astype(jnp.float32) + noise, most)
      best = jnp.pad(best, (0, count - most), constant_values=-jnp.inf)
      tokens = jnp.pad(tokens, (0, count - most))
      # A sibling is drawn from what its earlier siblings have left.
      taken = jnp.zeros((count, vocab), bool)
      taken = taken.at[jnp.arange(count), tokens].set(True)
      gone = jnp.cumsum(taken, 0) - taken > 0
      return tokens, jnp.where(gone, -jnp.inf, logits), best > -jnp.inf

    tokens, laws, valid = jax.vmap(jax.vmap(distinct))(each[:, ::count], logits)
    return (
      tokens.reshape(batch, width).astype(jnp.int32),
      laws.reshape(batch, width, vocab),
      valid.reshape(batch, width),
    )

  def _reachable(self, valid: Array) -> Array:
    """`[B, N]` whether all that a node hangs off is valid."""
    above = trees.ancestors(jnp.asarray(self._parents)[None], valid.shape[1])
    return (~above | valid[:, None]).all(-1)


def build(config, target, rngs) -> TreeDrafter:
  """Reads what `model` reads, `branching` and `replacement`."""
  plain = model.build(config, target, rngs)
  return TreeDrafter(
    plain.model,
    plain.k,
    branching=tuple(config.get('branching', (2, 2))),
    replacement=config.get('replacement', False),
  )

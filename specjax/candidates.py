"""Trees of the likeliest tokens of every head, of a fixed shape."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.heads import HeadsDrafter
from specjax.types import Draft, pytree

Paths = tuple[tuple[int, ...], ...]


@pytree
class CandidateTree(HeadsDrafter):
  """Proposes the likeliest tokens of every head at once; `k` is the depth.

  A node is named by the ranks along its path: (0, 2) is the third likeliest
  token of head 1, behind the likeliest of head 0. The tokens are a function of
  the context, point masses: one is accepted as often as the target draws it,
  whatever the heads' laws, and `warp` has no say. (Medusa: Cai et al. 2024,
  arXiv 2401.10774, section 2.1.2.)

  Attributes:
    paths: the nodes, in any order; those deeper than `k` are left out.
  """

  paths: Paths = dataclasses.field(default=((0,),), metadata={'static': True})

  def __post_init__(self):
    """Puts parents before children; refuses what is no tree."""
    super().__post_init__()
    paths = {tuple(map(int, path)) for path in self.paths}
    for path in paths:
      if not path or min(path) < 0:
        raise ValueError(
          f'the path {path} names no node: it takes one rank or more, from 0'
        )
      if len(path) > 1 and path[:-1] not in paths:
        raise ValueError(
          f'the path {path} hangs off {path[:-1]}, which is not in the tree'
        )
    ordered = sorted(paths, key=lambda path: (len(path), path))
    object.__setattr__(self, 'paths', tuple(ordered))

  def init(self, target, batch, size):
    """No features yet; see `HeadsDrafter.init`."""
    most = max((path[-1] for path in self.paths), default=0)
    if most >= target.vocab_size:
      raise ValueError(
        f'the tree asks for the token of rank {most}, from 0, and there are'
        f' {target.vocab_size} tokens'
      )
    return super().init(target, batch, size)

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """The tree, which is not drawn but looked up."""
    nodes = [path for path in self.paths if len(path) <= self.k]
    if not nodes:
      empty = jnp.zeros((len(length), 0), jnp.int32)
      return Draft(empty, siblings='fixed'), memory
    depth = np.array([len(path) - 1 for path in nodes])
    rank = np.array([path[-1] for path in nodes])
    number = {path: i for i, path in enumerate(nodes)}
    parents = np.array([number.get(path[:-1], -1) for path in nodes], np.int32)
    logits = self._logits(target, memory)
    _, best = jax.lax.top_k(logits, int(rank.max()) + 1)
    draft = Draft(
      best[:, depth, rank],
      parents=jnp.tile(parents, (len(length), 1)),
      siblings='fixed',
    )
    return draft, memory


def full_tree(branching: Sequence[int], depth: int) -> Paths:
  """Every node of so many children at depth 0, 1, ...; 1 beyond their end.

  Args:
    branching: numbers of children, each at least 1.
    depth: of the tree.

  Returns:
    Its paths of ranks, as `CandidateTree` takes them.

  Raises:
    ValueError: a node has no children.
  """
  if any(count < 1 for count in branching):
    raise ValueError(
      f'branching is {tuple(branching)}: every depth needs at least 1 child'
    )
  counts = (*branching, *[1] * depth)[:depth]
  return tuple(
    path
    for size in range(1, depth + 1)
    for path in itertools.product(*map(range, counts[:size]))
  )


def sparse_tree(accuracy: np.ndarray, nodes: int) -> Paths:
  """The tree of so many nodes with the most expected accepted tokens.

  A node is expected to be accepted with the product of the accuracies along its
  path. That never rises along a path, so the nodes of the largest products are
  a tree, and none is better. (Medusa: Cai et al. 2024, arXiv 2401.10774,
  section 2.3.3.)

  Args:
    accuracy: `[H, R]`, how often the token of rank r of head h is the target's;
      see `distill.rank_accuracy`.
    nodes: how many, at least 1; fewer if there are no more.

  Returns:
    Paths of ranks, as `CandidateTree` takes them; of equals the shallower, then
    the one of lower ranks.

  Raises:
    ValueError: no node is asked for.
  """
  if nodes < 1:
    raise ValueError(f'a tree of {nodes} nodes: at least 1')
  heads, ranks = np.shape(accuracy)
  chosen, frontier = [], [(-1.0, 0, ())]
  while frontier and len(chosen) <= nodes:
    value, depth, path = heapq.heappop(frontier)
    chosen.append(path)
    if depth < heads:
      for rank in range(ranks):
        child = value * float(accuracy[depth][rank]), depth + 1, (*path, rank)
        heapq.heappush(frontier, child)
  return tuple(chosen[1:])  # without the pending token

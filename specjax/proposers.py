"""Ways to draft with what a run has, by name."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import certify, data, distill, drafters, warps
from specjax.candidates import CandidateTree, full_tree, sparse_tree
from specjax.drafters.none import NoDrafter
from specjax.heads import HeadsDrafter
from specjax.types import Drafter, Trainable, Warp
from specjax.workspace import Workspace

# Ways to draft that `make` knows.
KINDS = (
  'model',
  'coupled',
  'iid',
  'distinct',
  'candidates',
  'committee',
  'mixture',
  'early_exit',
  'ngram',
  'suffix',
  'none',
)
_NO_TREE = 'they are of heads, or of a draft with a method `tree`'
# Tokens: the longest match that 'suffix' and 'mixture' look for, and the least
# that 'mixture' trusts more than its model.
SUFFIX, TRUSTED = 16, 3
BRANCHING = 2, 2  # of a tree that says nothing else
RANKS = 10  # of a head's tokens, the likeliest that a sparse tree chooses from
WITHOUT_DRAFT = 'ngram', 'suffix', 'none', 'early_exit'


def make(
  workspace: Workspace,
  kind: str,
  draft: str,
  warp: Warp = warps.UNCHANGED,
  branching: Sequence[int] | None = None,
  *,
  k: int | None = None,
  nodes: int | None = None,
) -> Drafter:
  """Any way to draft with what the run has.

  Args:
    workspace: the run.
    kind: one of `KINDS`: 'model' is the distilled drafter as it is;
      'coupled' draws with the target's keys; 'iid' and 'distinct' are trees
      of it; 'candidates' is a tree of what the draft finds likeliest;
      'committee' has several; 'mixture' copies what followed a long match,
      and asks the draft elsewhere; 'early_exit' is the target's first layers
      as they are; 'ngram', 'suffix' (which looks for longer matches) and
      'none' need nothing either.
    draft: its folder in the run, or several with commas, for a committee; of
      an early exit the number of layers.
    warp: what it samples with.
    branching: children of a node of a tree, by depth. Without it and `nodes`
      candidates have the tree that they were trained with, if any.
    k: draft length, or depth of a tree (else `config.decode.k`).
    nodes: of a tree of candidates, in place of branching. That of heads is
      the best for `rank_accuracy`; k is its greatest depth, and without one
      that which the draft was trained for.

  Raises:
    FileNotFoundError: the run has no such draft.
    ValueError: there is no such kind, or it is not made for this draft.
  """
  given, k = k, workspace.config['decode']['k'] if k is None else k
  if kind not in KINDS:
    raise ValueError(
      f'there is no drafter {kind!r}: take one of {", ".join(KINDS)}'
    )
  if nodes is not None and kind != 'candidates':
    raise ValueError(
      f'{kind} has no number of nodes: that is for candidates, here give k or'
      ' branching'
    )
  if kind == 'none':
    return NoDrafter()
  if kind in ('ngram', 'suffix'):
    lookup = drafters.find('ngram').NGram
    return lookup(k) if kind == 'ngram' else lookup(k, SUFFIX)
  if kind == 'early_exit':
    return _early_exit(workspace, draft, k, warp)
  if nodes is not None and nodes < 1:
    raise ValueError(f'a tree of {nodes} nodes: at least 1')
  names = draft.split(',')
  if len(names) > 1 and kind != 'committee':
    raise ValueError(f'{kind} takes one draft, not {draft}')
  if kind == 'candidates':
    trained = workspace.drafter(draft, warp)
    if nodes is not None:
      depth = trained.k if given is None else given
      return _sized_tree(workspace, draft, trained.at(depth), nodes)
    return _full_tree(draft, trained.at(k), branching)
  members = [workspace.drafter(name, warp).at(k) for name in names]
  if kind == 'model':
    return members[0]
  if not all(hasattr(member, 'model') for member in members):
    raise ValueError(f'{kind} is made for draft models, which {draft} is not')
  if kind == 'committee':
    return drafters.find(kind).Committee(tuple(members))
  if kind == 'mixture':
    lookup = drafters.find('ngram').NGram(k, SUFFIX, TRUSTED)
    return drafters.find(kind).Mixture(lookup, members[0])
  model = members[0].model
  if kind == 'coupled':
    return drafters.find(kind).CoupledDrafter(model, k, warp)
  branching = tuple(branching or BRANCHING)
  return drafters.find('tree').TreeDrafter(
    model, k, warp, branching=branching, replacement=kind == 'iid'
  )


def direction(
  workspace: Workspace, kind: str, draft: str, warp: Warp = warps.UNCHANGED
) -> Trainable:
  """Whose law to look for leaks of, in the text of a `proposer`.

  Args:
    workspace: the run.
    kind: of the drafter.
    draft: its folder, or several, of which the first counts.
    warp: what it samples with.

  Returns:
    The draft, or what stands for one that has no law to score.
  """
  if kind == 'early_exit':
    return make(workspace, kind, draft, warp)
  if kind in WITHOUT_DRAFT:
    return certify.Replayed(make(workspace, kind, '', warp))
  return workspace.drafter(draft.split(',')[0], warp)


def rank_accuracy(workspace: Workspace, draft: str) -> np.ndarray:
  """How often a head's likeliest tokens are the target's, by rank.

  It is measured on held-out text that the target wrote at
  `config.decode.temperature`.

  Args:
    workspace: the run.
    draft: the draft's folder.

  Returns:
    `[H, R]`, as `candidates.sparse_tree` takes it.
  """
  target, drafter = workspace.target(), workspace.drafter(draft)
  text = workspace.rollouts(target, workspace.config['decode']['temperature'])
  ranks = min(RANKS, target.vocab_size)
  parts = [
    _rank_hits(drafter, target, ranks, batch)
    for batch in data.in_order(text, 16)
  ]
  hits, weight = (sum(part) for part in zip(*parts, strict=True))
  return np.asarray(hits / jnp.maximum(weight, 1.0))


def _sized_tree(
  workspace: Workspace, draft: str, drafter: Drafter, nodes: int
) -> Drafter:
  """A tree of so many nodes of what a draft finds likeliest."""
  if isinstance(drafter, HeadsDrafter):
    accuracy = rank_accuracy(workspace, draft)[: drafter.k]
    paths = sparse_tree(accuracy, nodes)
    return CandidateTree(drafter.heads, drafter.k, drafter.warp, paths=paths)
  if not hasattr(drafter, 'tree'):
    raise ValueError(f'candidates make no tree of {draft}: {_NO_TREE}')
  return drafter.tree(nodes)


def _early_exit(
  workspace: Workspace, layers: str, k: int, warp: Warp
) -> Drafter:
  most = workspace.target_sizes.layers
  if not layers.isdecimal() or not 1 <= int(layers) <= most:
    raise ValueError(
      f'an early exit is named by the layers of the target that it takes, 1'
      f' to {most}, not {layers!r}'
    )
  make = drafters.find('early_exit').EarlyExit
  return make(int(layers), k, warp=warp)


_rank_hits = jax.jit(distill.rank_accuracy, static_argnums=2)


def _full_tree(
  draft: str, drafter: Drafter, branching: Sequence[int] | None
) -> CandidateTree:
  """Candidates of every head: as many as is said, or as it was trained."""
  if not isinstance(drafter, HeadsDrafter):
    sized = 'give a number of nodes' if hasattr(drafter, 'tree') else _NO_TREE
    raise ValueError(f'candidates make no full tree of {draft}: {sized}')
  if isinstance(drafter, CandidateTree) and not branching:
    return drafter
  paths = full_tree(branching or BRANCHING, drafter.k)
  return CandidateTree(drafter.heads, drafter.k, drafter.warp, paths=paths)

"""The vocabulary: what the parts of specjax hand to one another.

Throughout, p is the target and q the draft; `B` is batch, `T` the length of a
token buffer or a training window, `N` draft nodes, `M = N + 1` block nodes,
`V` vocabulary, `D` width, `H` horizon. A *round* is draft, score, verify,
commit. The *pending* token has been emitted but is in no cache yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, dataclass_transform

import jax

Array = jax.Array
T = TypeVar('T')
Key = jax.Array
Warp = Callable[[Array], Array]  # logits -> logits; a pytree with scalar leaves


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
  """Makes a frozen dataclass whose fields are leaves, or structure if `static`.

  Like `jax.tree_util.register_dataclass`, under which however two classes with
  equally many fields have equal structures (in jax 0.10 and 0.12): a cache of
  compiled programs may then hand one class the program of another. Here the
  class is part of the structure.

  Args:
    cls: its fields are pytrees of leaves, or have `metadata={'static': True}`
      and are hashable and part of the structure.
  """
  cls = dataclasses.dataclass(frozen=True)(cls)
  fields = dataclasses.fields(cls)
  static = [f.name for f in fields if f.metadata.get('static')]
  leaves = [f.name for f in fields if not f.metadata.get('static')]
  keys = [jax.tree_util.GetAttrKey(name) for name in leaves]

  def structure(x):
    return cls, tuple(getattr(x, name) for name in static)

  def flatten(x):
    return [getattr(x, name) for name in leaves], structure(x)

  def flatten_with_keys(x):
    children, aux = flatten(x)
    return list(zip(keys, children, strict=True)), aux

  def unflatten(aux, children):
    # Not by `cls(...)`: what takes a leaf's place in JAX need not be valid.
    x = object.__new__(cls)
    values = [*aux[1], *children]
    for name, value in zip([*static, *leaves], values, strict=True):
      object.__setattr__(x, name, value)
    return x

  jax.tree_util.register_pytree_with_keys(
    cls, flatten_with_keys, unflatten, flatten
  )
  return cls


class Block(NamedTuple):
  """What the target scores in one pass: pending tokens and what hangs off them.

  Attributes:
    tokens: `[B, M]` int32, parents before children.
    parents: `[B, M]` int32, -1 for the root; None is a chain, which needs
      neither a tree mask nor a gather.
  """

  tokens: Array
  parents: Array | None = None


@pytree
class Draft:
  """A proposal: a chain or tree of tokens and the laws they were drawn from.

  Attributes:
    tokens: `[B, N]` int32; an invalid node still holds an id in range.
    parents: `[B, N]` int32, -1 is a child of the pending token, siblings stand
      in draw order; None is a chain.
    logits: `[B, N, V]` float32, the law each token was really drawn from, given
      its earlier siblings; None when the tokens are a deterministic function of
      the context (point masses).
    valid: `[B, N]` bool; descendants of an invalid node are invalid; None means
      all are valid.
    siblings: what a rule may assume of the children of one node: 'single' (it
      has one at most), 'iid', 'distinct' (drawn without replacement),
      'independent' (each from a law of its own), 'fixed' (point masses) or
      'coupled' (drawn with the target's keys).
  """

  tokens: Array
  parents: Array | None = None
  logits: Array | None = None
  valid: Array | None = None
  siblings: str = dataclasses.field(default='single', metadata={'static': True})


class Output(NamedTuple):
  """What a model's pass returns.

  Attributes:
    features: `[B, M, D]` after the final norm. Logits are
      `model.unembed(features)`, taken only for the rows that need them.
    taps: residual streams `[B, M, D]` of the layers asked for.
  """

  features: Array
  taps: tuple[Array, ...] = ()


class Noise(NamedTuple):
  """The randomness a rule may use, for one sequence.

  Attributes:
    log_u: `[N]` logs of uniforms in (0, 1], one per accept test.
    draws: `[N + 1]` keys: the target key of the position at each depth. The
      token that ends the round is drawn with the same keys.
  """

  log_u: Array
  draws: Key


class Verdict(NamedTuple):
  """What a rule decides, for one sequence.

  Attributes:
    accepted: `[N]` bool, a path from the root.
    law: `[V]` normalised log-probabilities of the token that follows the path;
      a point mass where the rule drew it.
    tested: `[N]` bool, which accept tests were made.
    log_tests: `[N]` log-probability of the outcome of each, 0 where none was
      made. Both make a rule enumerable; elsewhere they are compiled away.
    fault: scalar int32, the sum of `verify.EMPTY_RESIDUAL` and `verify.NAN`
      where they occurred.
  """

  accepted: Array
  law: Array
  tested: Array
  log_tests: Array
  fault: Array


# One sequence: noise, draft without its batch axis, target log-probabilities
# `[N + 1, V]`. `decode` maps it over rows.
Verifier = Callable[[Noise, Draft, Array], Verdict]


class Keys(NamedTuple):
  """Keys a drafter may draw with, one per row.

  Attributes:
    draft: `[B]`; fold in a node's index. Fresh every round.
    target: `[B]`; fold in a position's index to get the key with which the
      target's token there is drawn. Only a coupled drafter may use it, and
      only under `sampler_match`.
  """

  draft: Key
  target: Key


class Limit(NamedTuple):
  """How far a draft may go this round.

  Attributes:
    nodes: scalar int32, at most the drafter's length; 0 asks for no work.
    go_on: maps a node's number and the draft's logits `[B, V]` there, before
      any warp, to which rows draw it, `[B]` bool; None: all do. A row that has
      stopped stays so.
  """

  nodes: Array
  go_on: Callable[[Array, Array], Array] | None = None


class Seen(NamedTuple):
  """What a controller learns from a round; rows that were done count nothing.

  Attributes:
    passed: `[B, N]` bool, by depth, whether a token there was accepted.
    tested: `[B, N]` bool, by depth, whether one was put to the test.
    drafted: `[B]` valid nodes.
    live: `[B]` bool, rows that were not done before.
  """

  passed: Array
  tested: Array
  drafted: Array
  live: Array


class Batch(NamedTuple):
  """Training windows.

  Attributes:
    tokens: `[B, T]` int32.
    segments: `[B, T]` int32 document numbers within the window, 0 is padding;
      nothing attends across them.
    weight: `[B, T]` float32 loss weight of predicting `tokens[t]` from what
      precedes it; 0 for the first token of a document's piece and for padding.
  """

  tokens: Array
  segments: Array
  weight: Array


class LanguageModel(Protocol):
  """A pytree whose leaves are parameters and whose methods are pure."""

  vocab_size: int

  def init_cache(self, batch: int, size: int) -> Any:
    """An empty cache for `batch` rows of at most `size` tokens."""

  def extend(
    self, block: Block, cache: Any, taps: tuple[int, ...] = ()
  ) -> tuple[Output, Any]:
    """Scores a block; reads the cache and returns the block's own rows."""

  def commit(
    self, cache: Any, rows: Any, kept: Array, chain: bool = True
  ) -> Any:
    """Writes the rows of the kept nodes `[B, M]`; a chain's are a prefix."""

  def forward(
    self, tokens: Array, segments: Array, taps: tuple[int, ...] = ()
  ) -> Output:
    """Scores whole windows `[B, T]` for training; equals `extend`."""

  def embed(self, tokens: Array) -> Array:
    """Embeddings `[..., D]` of tokens `[...]`."""

  def unembed(self, features: Array) -> Array:
    """Float32 logits `[..., V]` of features `[..., D]`."""


class Drafter(Protocol):
  """A pytree that proposes; it may borrow from the target it is given.

  One that reads the target's streams names their layers in an attribute `taps`
  (a static tuple); what the target makes of a text then comes with them.

  On entry to `propose`, memory describes exactly `tokens[:, :m]` with
  `m <= length - 1`, per row. `propose` catches up on `tokens[m:length]`;
  `observe` raises `m` only over kept nodes that were fed with that prefix.
  """

  def init(self, target: LanguageModel, batch: int, size: int) -> Any:
    """Empty memory for `batch` rows of at most `size` tokens."""

  def propose(
    self,
    target: LanguageModel,
    cache: Any,
    memory: Any,
    keys: Keys,
    tokens: Array,
    length: Array,
    limit: Limit | None = None,
  ) -> tuple[Draft, Any]:
    """Proposes what follows `tokens[:, :length]`; the cache is read-only.

    Under a limit a chain keeps its shape, and the nodes beyond are invalid.
    Trees need not heed it: they are refused where one is set.
    """

  def observe(
    self,
    target: LanguageModel,
    memory: Any,
    block: Block,
    kept: Array,
    output: Output,
  ) -> Any:
    """Learns which nodes of `block` were kept `[B, M]`, and their features."""

  def at(self, k: int) -> Drafter:
    """The same drafter with draft length `k`."""


def taps(drafter: Drafter | Trainable) -> tuple[int, ...]:
  """Layers of the target whose streams a drafter reads, or none."""
  return getattr(drafter, 'taps', ())


class DraftLength(Protocol):
  """A pytree that decides how much to draft; see `draft_length`."""

  rungs: tuple[int, ...]

  def init(self) -> Any:
    """Its state before the first round."""

  def limit(self, control: Any) -> Limit | None:
    """Of the next round; None: whole drafts, known at trace time."""

  def update(self, control: Any, seen: Seen) -> Any:
    """Its state after a round."""


class Trainable(Protocol):
  """A drafter with parameters of its own to distil."""

  def score(self, target: LanguageModel, batch: Batch, output: Output) -> Array:
    """Features `[B, T, H, D']` that predict token `t + 1 + h` from `<= t`."""

  def unembed(self, target: LanguageModel, features: Array) -> Array:
    """Float32 logits `[..., V]` of those features."""

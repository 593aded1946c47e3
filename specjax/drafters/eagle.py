"""EAGLE: one decoder layer on the target's own streams, as the drafter.

The layer reads what the target made of the tokens before (the outputs of a low,
a middle and a high layer, fused), beside the embeddings of the tokens that came
of it, and draws with the target's head. Behind the pending token, of which the
target has made nothing yet, it reads its own outputs instead; training unrolls
it on these, so that it meets in training what it meets in decoding. (Li et al.
2025, EAGLE-3, arXiv 2503.01840, section 3.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as caches
from specjax import chains, sharding, trees, warps, weights
from specjax.models import transformer
from specjax.types import Array, Draft, Output, Warp, pytree

# Tokens read at a time: most rounds bring no more, and a prompt is read in
# larger pieces.
_NEW, _MANY = 4, 32


class EagleNet(nnx.Module):
  """The weights: fusion, one layer, and a head if it has one of its own.

  Args:
    config: sizes of the layer; `width` is the target's.
    streams: how many are fused.
    vocabulary: of a head of its own; 0 is the target's head.
    rngs: source of the initial weights.
  """

  def __init__(
    self,
    config: transformer.TransformerConfig,
    streams: int,
    vocabulary: int,
    rngs: nnx.Rngs,
  ):
    """Initialises the weights: at first the last features pass as they are."""
    width = config.width
    small = 0.02 * jax.random.normal(rngs.params(), (width, width))
    others = jnp.zeros((width, (streams - 1) * width))
    self.config = config
    self.fuse = weights.Weight(jnp.concatenate([others, jnp.eye(width)], 1))
    self.join = weights.Weight(jnp.concatenate([small, jnp.eye(width)], 1))
    self.token_norm = nnx.Param(jnp.ones(width))
    self.layer = transformer.Layer(config, rngs)
    if vocabulary:
      self.head = weights.Weight(jnp.zeros((vocabulary, width)))

  def __call__(self, embedded, features, positions, visible, cache, chain=None):
    """One pass over `[B, M]` tokens, each beside what came before it.

    Args:
      embedded: `[B, M, D]` of the tokens.
      features: `[B, M, D]` of the tokens in front of them: fused streams of the
        target, or outputs of this.
      positions: `[B, M]` of the tokens.
      visible: `[B or 1, M, R]` which nodes they see.
      cache: of what all of them see, or None.
      chain: rows of other nodes and the place of these among them, or None.

    Returns:
      `[B, M, D]` and rows, of these nodes or of all R.
    """
    scale, eps = self.token_norm[...], self.config.norm_eps
    tokens = transformer.norm(embedded, scale, eps)
    both = jnp.concatenate([tokens, features], -1)
    x = weights.dot(both, self.join[...])
    angles = transformer.rotations(self.config, positions)
    cached = (cache.rows, caches.live(cache)) if cache else (None, None)
    return self.layer(x, angles, visible, *cached, chain)

  def fused(self, output: Output) -> Array:
    """`[B, M, D]` of the target's streams and its last features."""
    one, eps = jnp.ones(()), self.config.norm_eps
    # Streams grow from layer to layer.
    streams = [transformer.norm(x, one, eps) for x in output.taps]
    every = jnp.concatenate([*streams, output.features], -1)
    return weights.dot(every, self.fuse[...])


class EagleMemory(NamedTuple):
  """What the drafter knows.

  Attributes:
    cache: the layer's, describing a prefix of the tokens.
    features: fused streams of the committed tokens, `[B, 1, S, D]` rows.
    fed: `[B]` bool, whether the pending token was read in this round.
  """

  cache: caches.Cache
  features: caches.Cache
  fed: Array


@pytree
class Eagle:
  """Samples a chain of `k` tokens.

  Only rows of committed tokens are ever kept, and all of them are made of the
  target's own streams: after a round the accepted path is read again.

  Attributes:
    net: the weights.
    k: draft length.
    taps: layers of the target whose outputs are fused with its last features.
    unroll: passes of the training-time test, each on the outputs of the one
      before: the horizons of `score`.
    vocabulary: ids that may be drafted, the rest being impossible; () is all.
    warp: applied to the draft's logits; see `ModelDrafter`.
  """

  net: EagleNet
  k: int = dataclasses.field(metadata={'static': True})
  taps: tuple[int, ...] = dataclasses.field(
    default=(), metadata={'static': True}
  )
  unroll: int = dataclasses.field(default=1, metadata={'static': True})
  vocabulary: tuple[int, ...] = dataclasses.field(
    default=(), metadata={'static': True}
  )
  warp: Warp = warps.UNCHANGED

  def __post_init__(self):
    """Refuses a negative length, and weights for other streams."""
    if self.k < 0:
      raise ValueError(f'the draft length k is {self.k}: at least 0')
    if self.unroll < 1:
      raise ValueError(f'unroll is {self.unroll}: at least 1')
    streams = self.net.fuse.shape[1] // self.net.config.width
    if streams != len(self.taps) + 1:
      raise ValueError(
        f'taps are {self.taps}: the weights fuse {streams} streams, the last'
        ' features among them'
      )

  def init(self, target, batch, size):
    """Nothing read yet.

    Raises:
      ValueError: if it was made for features of another width.
    """
    width, wanted = _width(target), self.net.config.width
    if width != wanted:
      raise ValueError(
        f'the draft reads features of width {wanted}, and those of the target'
        f' have {width}: it was made for another, or for one of two models'
      )
    none = jnp.zeros(batch, jnp.int32)
    # Behind the last token there is room for all that is read at a time.
    rows = self._rows(batch, size + _MANY)
    features = jnp.zeros((batch, 1, size, width))
    return EagleMemory(
      caches.Cache(rows, none),
      caches.Cache(features, jnp.zeros_like(none)),
      jnp.zeros(batch, bool),
    )

  def begin(self, target) -> Eagle:
    """With the rows of the target's head, if it has a head of its own."""
    if not self.vocabulary:
      return self
    net = nnx.clone(self.net)
    whole = target.unembed(jnp.eye(_width(target)))
    net.head[...] = whole[:, jnp.array(self.vocabulary)].T
    return dataclasses.replace(self, net=net)

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """A sampled chain and the laws it was drawn from."""
    if self.k == 0:
      return self._nothing(tokens), self._proposed(memory, memory.cache, 0)
    most = self.k if limit is None else limit.nodes
    own, output = self._catch_up(target, memory, tokens, length, most > 0)
    slots = max(1, self.k - 1)  # the last node is never read

    def first():
      return self.unembed(target, output[:, 0])

    def step(i, token, carry):
      output, rows = carry
      visible = (jnp.arange(slots) < i)[None, None]
      output, rows = self.net(
        target.embed(token[:, None]),
        output,
        (length + i - 1)[:, None],
        visible,
        own,
        (rows, i - 1),
      )
      return self.unembed(target, output[:, 0]), (output, rows)

    draft, _, _ = chains.grow(
      step,
      (output, self._rows(len(length), slots)),
      jnp.zeros_like(length),
      k=self.k,
      draw=chains.by_slot(keys.draft),
      warp=self.warp,
      limit=limit,
      first=first,
    )
    return draft, self._proposed(memory, own, most)

  def observe(self, target, memory, block, kept, output):
    """Keeps what the target made of the nodes that came true."""
    fresh = self.net.fused(output)[:, None]
    features = caches.commit(
      memory.features, fresh, kept, chain=block.parents is None
    )
    count = (memory.fed & kept[:, 0]).astype(jnp.int32)
    own = memory.cache._replace(length=memory.cache.length + count)
    return EagleMemory(own, features, jnp.zeros_like(memory.fed))

  def at(self, k: int) -> Eagle:
    """The same weights with draft length `k`."""
    return dataclasses.replace(self, k=k)

  def tree(self, nodes: int, beam: int | None = None) -> EagleTree:
    """The same weights as a tree of `nodes`, `k` deep at most.

    Args:
      nodes: see `EagleTree`.
      beam: likewise; else the root of `nodes`.
    """
    same = {f.name: getattr(self, f.name) for f in dataclasses.fields(Eagle)}
    beam = beam or math.isqrt(max(nodes - 1, 0)) + 1
    same['k'] = min(self.k, nodes)  # a deeper one would have passes for nothing
    return EagleTree(**same, nodes=nodes, beam=beam)

  def score(self, target, batch, output):
    """Features `[B, T, unroll, D]`: horizon h is pass h of the unrolling.

    Where t is pending, pass h has read the tokens t + 1 to t + h, each beside
    the output of the pass before, and what lies before them as it was then.
    """
    size, same = batch.tokens.shape[1], batch.segments[:, None]
    same = same == batch.segments[..., None]
    positions = trees.depths(trees.ancestors(None, size) & same)
    embedded = target.embed(batch.tokens)
    back = jnp.arange(size)[:, None] - jnp.arange(size)  # from row to column
    features, rows, scored = self.net.fused(output), None, []
    for h in range(self.unroll):
      features = jnp.pad(features[:, :-1], ((0, 0), (1, 0), (0, 0)))
      features = jnp.where(positions[..., None] > 0, features, 0.0)
      # Of the first pass all that is h tokens back or more; of a later one the
      # token that was drafted in it.
      seen = [back >= h, *(back == h - p for p in range(1, h + 1))]
      visible = jnp.concatenate([same & mask for mask in seen], -1)
      if rows is None:
        rows = self._rows(len(same), 0)
      rows = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, size), (0, 0))), rows
      )
      features, rows = self.net(
        embedded, features, positions, visible, None, (rows, h * size)
      )
      # The pass h of a draft stands h tokens behind the pending one.
      ahead = jnp.pad(features[:, h:], ((0, 0), (0, h), (0, 0)))
      scored.append(ahead)
    return jnp.stack(scored, 2)

  def unembed(self, target, features):
    """Logits `[..., V]`, -inf outside the vocabulary."""
    if not self.vocabulary:
      return target.unembed(features)
    shape = *features.shape[:-1], target.vocab_size
    ids = jnp.array(self.vocabulary)
    own = self.unembed_vocabulary(features)
    return jnp.full(shape, -jnp.inf).at[..., ids].set(own)

  def unembed_vocabulary(self, features):
    """Logits `[..., N]` of the ids of `vocabulary` alone."""
    return sharding.gathered(weights.dot(features, self.net.head[...]))

  def _nothing(self, tokens: Array) -> Draft:
    return Draft(jnp.zeros((tokens.shape[0], 0), jnp.int32))

  def _rows(self, batch: int, count: int) -> tuple[Array, Array]:
    """Keys and values of so many nodes, to be filled."""
    c = self.net.config
    shape = batch, c.kv_heads, count, c.head_size
    # Distinct buffers, since a donated state may not alias.
    return tuple(sharding.by_heads(jnp.zeros(shape, c.dtype)) for _ in range(2))

  def _proposed(self, memory, cache, nodes) -> EagleMemory:
    """The memory after a proposal, cut in front of the pending token.

    Only `observe` learns that the token was committed.
    """
    fed = jnp.broadcast_to(jnp.asarray(nodes) > 0, cache.length.shape)
    cache = cache._replace(length=cache.length - fed)
    return memory._replace(cache=cache, fed=fed)

  def _catch_up(self, target, memory, tokens, length, wanted):
    """The cache of `tokens[:length]`, and the last output `[B, 1, D]`."""
    known = memory.features.rows[:, 0]

    def feed(cache, size):
      index = cache.length[:, None] + jnp.arange(size)
      inside = jnp.minimum(index, tokens.shape[1] - 1)
      before = jnp.maximum(inside - 1, 0)[..., None]
      features = jnp.take_along_axis(known, before, 1)
      new, rows = self.net(
        target.embed(jnp.take_along_axis(tokens, inside, 1)),
        jnp.where(index[..., None] > 0, features, 0.0),
        index,
        trees.ancestors(None, size),
        cache,
      )
      rows, kept = caches.after(new, rows), index < length[:, None]
      return new, caches.commit(cache, rows, kept, chain=True)

    pieces = (2 * _NEW, _MANY), (0, _NEW)
    return chains.catch_up(feed, memory.cache, length, pieces, wanted)


@pytree
class EagleTree(Eagle):
  """Grows a tree where the draft is surest; `k` is its depth.

  A node's value is the draft's probability of the path that leads to it. Depth
  by depth the `beam` nodes of the highest values are each given their `beam`
  likeliest children; of all of these the `nodes` of the highest values are
  proposed, of equals the shallower. They are a function of the context, point
  masses, and `warp` has no say. (Li et al. 2024, EAGLE-2, arXiv 2406.16858,
  section 4.)

  Attributes:
    nodes: how many are proposed, at most.
    beam: how many are expanded at each depth, at most the vocabulary.
  """

  nodes: int = dataclasses.field(default=8, metadata={'static': True})
  beam: int = dataclasses.field(default=4, metadata={'static': True})

  def __post_init__(self):
    """Refuses trees without nodes."""
    super().__post_init__()
    for name in ('nodes', 'beam'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} is {getattr(self, name)}: at least 1')

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """The tree, which is not drawn but searched for."""
    if self.k == 0:
      return self._nothing(tokens), self._proposed(memory, memory.cache, 0)
    own, output = self._catch_up(target, memory, tokens, length, True)
    (children, values), parents = self._search(target, own, output, length)
    count = min(self.nodes, values.shape[1])
    # Of equals the first, which is the shallower: a child never has a higher
    # value than its parent, so that what is kept is a tree.
    _, kept = jax.lax.top_k(values, count)
    kept = jnp.sort(kept, 1)
    take = functools.partial(jnp.take_along_axis, indices=kept, axis=1)
    above = take(parents)
    place = jax.vmap(jnp.searchsorted)(kept, above).astype(jnp.int32)
    draft = Draft(
      take(children),
      parents=jnp.where(above < 0, -1, place),
      valid=take(values) > -jnp.inf,
      siblings='fixed',
    )
    return draft, self._proposed(memory, own, self.k)

  def _search(self, target, own, output, length):
    """All nodes that are considered, depth by depth.

    Returns:
      Tokens and values `[B, C]`, and parents `[B, C]` among them, or -1.
    """
    vocab = len(self.vocabulary) or target.vocab_size
    batch, w = len(length), min(self.beam, vocab)

    def expand(features, values):
      """Children `[B, W, w]` of W nodes."""
      law = jax.nn.log_softmax(self.unembed(target, features))
      best, tokens = jax.lax.top_k(law, w)
      return tokens.astype(jnp.int32), values[..., None] + best

    tokens, values = expand(output, jnp.zeros((batch, 1)))
    first = tokens[:, 0], values[:, 0]
    slots = max(1, self.k - 1) * w
    beam = (
      *first,
      jnp.tile(output, (1, w, 1)),  # what lies in front of each
      jnp.zeros((batch, w, slots), bool),  # rows of those above
      jnp.tile(jnp.arange(w), (batch, 1)),  # numbers among all nodes
    )

    def deeper(carry, depth):
      rows, (tokens, values, features, paths, numbers) = carry
      at = depth * w
      paths |= jnp.arange(slots) == at + jnp.arange(w)[:, None]
      position = jnp.broadcast_to(length[:, None] + depth, (batch, w))
      features, rows = self.net(
        target.embed(tokens), features, position, paths, own, (rows, at)
      )
      children, theirs = expand(features, values)
      flat = children.reshape(batch, -1), theirs.reshape(batch, -1)
      parents = jnp.repeat(numbers, w, 1)
      values, chosen = jax.lax.top_k(flat[1], w)

      def of_parent(x):
        index = (chosen // w).reshape(batch, w, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, 1)

      beam = (
        jnp.take_along_axis(flat[0], chosen, 1),
        values,
        of_parent(features),
        of_parent(paths),
        w + depth * w * w + chosen,
      )
      return (rows, beam), (*flat, parents)

    carry = self._rows(batch, slots), beam
    _, more = jax.lax.scan(deeper, carry, jnp.arange(self.k - 1))
    root = jnp.full((batch, w), -1, jnp.int32)
    children, values, parents = (
      jnp.concatenate([x, jnp.moveaxis(y, 0, 1).reshape(batch, -1)], 1)
      for x, y in zip((*first, root), more, strict=True)
    )
    return (children, values), parents


def build(config, target, rngs) -> Eagle:
  """Reads `k` and, under `eagle`, what the layer is like.

  `unroll` (passes of the training-time test, k or more), `heads`, `kv_heads`
  and `hidden` (else the target's) and `taps` (layers of the target, from 0;
  else a sixth and half of the way up). Beside it `vocabulary`, the ids that may
  be drafted, else all.

  Raises:
    ValueError: it asks for what there is not, or not for enough passes.
  """
  c = dict(config.get('eagle', {}))
  unroll = c.pop('unroll', None)
  taps = c.pop('taps', sorted({target.layers // 6, target.layers // 2}))
  sizes = {
    key: c.pop(key) for key in ('heads', 'kv_heads', 'hidden') if key in c
  }
  if c:
    raise ValueError(f'draft.eagle.{min(c)} is nothing that EAGLE has')
  if unroll is None or unroll < config['k']:
    raise ValueError(
      f'draft.eagle.unroll is {unroll}, and the draft length {config["k"]}: a'
      ' draft is trained as far as it is unrolled'
    )
  for tap in taps:
    if not -1 <= tap < target.layers:
      raise ValueError(
        f'draft.eagle.taps is {tap}: the target has {target.layers} layers,'
        ' from 0, and -1 is its embedding'
      )
  vocabulary = tuple(config.get('vocabulary', ()))
  same = {
    'layers': 1,
    'dtype': 'float32',
    'remat': False,
    'attention_window': None,  # it looks back at all
  }
  layer = dataclasses.replace(target, **same, **sizes)
  net = EagleNet(layer, len(taps) + 1, len(vocabulary), rngs)
  return Eagle(net, config['k'], tuple(taps), unroll, vocabulary)


def _width(target) -> int:
  return jax.eval_shape(target.embed, jnp.zeros(1, jnp.int32)).shape[-1]

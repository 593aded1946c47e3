"""A decoder-only transformer of the Llama family.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. One stack of layers
serves decoding and training: `forward` is `extend` on a block that is the whole
window, with no cache behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as caches
from specjax import sharding, trees, weights
from specjax.types import Array, Block, Output


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Sizes of a `Transformer`.

  Attributes:
    vocab_size: V.
    width: D, of the residual stream.
    layers: number of layers.
    heads: query heads.
    kv_heads: key/value heads; divides `heads`.
    hidden: width of the feed-forward layer.
    head_dim: width of a head; None is `width // heads`.
    rope_theta: base of the rotary frequencies.
    rope_factor: by which these are divided, so that a model reads further than
      it was first trained to.
    rope_band: None divides all of them. (low, high): those that turn more than
      `high` times in `rope_context` tokens stay, those that turn less than
      `low` times are divided, and between the two it is blended. (Llama 3.1,
      Grattafiori et al. 2024, arXiv 2407.21783)
    rope_context: tokens that the model was first trained on.
    qkv_bias: whether queries, keys and values have biases, as in Qwen2.
    qk_norm: whether each head's query and key are normed, as in Qwen3.
    attention_window: tokens that one looks back at, itself among them, as in
      Mistral; None is all.
    tied: whether the embedding is also the head.
    dtype: 'float32' or 'bfloat16', of weights and caches. The residual stream
      and every sum stay float32.
    norm_eps: added to the mean square.
    remat: whether training keeps only what enters each layer, and computes the
      rest again for the gradient: less memory, a third more work.
    positions: tokens of the longest text that it was made for; None is
      unknown. Nothing longer is decoded.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  hidden: int
  head_dim: int | None = None
  rope_theta: float = 1e4
  rope_factor: float = 1.0
  rope_band: tuple[float, float] | None = None
  rope_context: int = 8192
  qkv_bias: bool = False
  qk_norm: bool = False
  attention_window: int | None = None
  tied: bool = True
  dtype: str = 'float32'
  norm_eps: float = 1e-5
  remat: bool = False
  positions: int | None = None

  def __post_init__(self):
    """Refuses sizes that do not fit together."""
    if self.rope_band is not None:  # a list, where it was read from a file
      object.__setattr__(self, 'rope_band', tuple(self.rope_band))
    if self.heads % self.kv_heads:
      raise ValueError(
        f'{self.heads} heads cannot share {self.kv_heads} kv_heads: '
        'heads must be a multiple'
      )
    if self.head_dim is None and self.width % self.heads:
      raise ValueError(
        f'width {self.width} does not divide into {self.heads} heads: '
        'choose a multiple or set head_dim'
      )
    if self.head_size % 2:
      raise ValueError(
        f'heads of width {self.head_size} cannot be rotated: it must be even'
      )
    if self.attention_window is not None and self.attention_window < 1:
      raise ValueError(
        f'attention_window is {self.attention_window}: at least 1, or None'
      )
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(f"dtype is {self.dtype!r}: use 'float32' or 'bfloat16'")

  @property
  def head_size(self) -> int:
    """Width of one head."""
    return self.head_dim or self.width // self.heads


class Layer(nnx.Module):
  """Attention and feed-forward, each behind a norm and on a residual."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    """Initialises the weights from `rngs.params`."""
    c, size = config, config.head_size
    # Outputs into the residual stream start smaller the deeper the model is.
    out = 0.02 / math.sqrt(2 * c.layers)
    self.config = c
    # Fused here, once: slicing a fused weight inside a loop would copy it, but
    # slicing what it produces is free.
    outputs = (c.heads + 2 * c.kv_heads) * size
    self.qkv = _weight(rngs, c, (outputs, c.width))
    if c.qkv_bias:
      self.qkv_bias = nnx.Param(jnp.zeros(outputs))
    if c.qk_norm:
      self.query_norm = nnx.Param(jnp.ones(size))
      self.key_norm = nnx.Param(jnp.ones(size))
    self.proj = _weight(rngs, c, (c.width, c.heads * size), out)
    self.gate_up = _weight(rngs, c, (2 * c.hidden, c.width))
    self.down = _weight(rngs, c, (c.width, c.hidden), out)
    self.attention_norm = nnx.Param(jnp.ones(c.width))
    self.hidden_norm = nnx.Param(jnp.ones(c.width))

  def __call__(self, x, angles, visible, cached, live, chain=None):
    """One layer on `[B, M, D]`; returns it and the block's keys and values.

    `visible` and `live` are those of `cache.attend`. With `chain`, the rows of
    a chain and a place in it, what is new is written there first, and is looked
    back from over all of them.
    """
    c, size = self.config, self.config.head_size
    y = norm(x, self.attention_norm[...], c.norm_eps)
    qkv = weights.dot(y, self.qkv[...])
    if c.qkv_bias:
      qkv += self.qkv_bias[...]
    qkv = sharding.gathered(qkv).reshape(*x.shape[:2], -1, size)
    qkv = qkv.transpose(0, 2, 1, 3)
    turning, values = pieces(qkv, [c.heads + c.kv_heads], 1)
    if c.qk_norm:
      queries, keys = pieces(turning, [c.heads], 1)
      queries = norm(queries, self.query_norm[...], c.norm_eps)
      keys = norm(keys, self.key_norm[...], c.norm_eps)
      turning = jnp.concatenate([queries, keys], 1)
    queries, keys = pieces(_rotate(turning, angles), [c.heads], 1)
    keys = sharding.by_heads(keys.astype(c.dtype))
    values = sharding.by_heads(values.astype(c.dtype))
    if chain is not None:
      write = functools.partial(
        jax.lax.dynamic_update_slice_in_dim, start_index=chain[1], axis=2
      )
      keys, values = map(write, chain[0], (keys, values))
    mixed = caches.attend(queries, (keys, values), visible, cached, live)
    mixed = mixed.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    x = x + weights.dot(mixed, self.proj[...])
    y = weights.dot(
      norm(x, self.hidden_norm[...], c.norm_eps), self.gate_up[...]
    )
    gate, up = pieces(sharding.gathered(y), 2, -1)
    return x + weights.dot(jax.nn.silu(gate) * up, self.down[...]), (
      keys,
      values,
    )


class Transformer(nnx.Module):
  """The model; see `types.LanguageModel` for its methods.

  Args:
    config: the sizes.
    rngs: source of the initial weights.
  """

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    """Initialises the weights from `rngs.params`."""
    self.config = config
    self.embedding = _weight(rngs, config, (config.vocab_size, config.width))
    self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
    self.norm = nnx.Param(jnp.ones(config.width))
    if not config.tied:
      self.head = _weight(rngs, config, (config.vocab_size, config.width))

  @property
  def vocab_size(self) -> int:
    """V."""
    return self.config.vocab_size

  @property
  def positions(self) -> int | None:
    """Tokens of the longest text, if it is known."""
    return self.config.positions

  def init_cache(self, batch: int, size: int) -> caches.Cache:
    """An empty cache of `size` positions."""
    c = self.config
    shape = (batch, c.kv_heads, size, c.head_size)
    # Distinct buffers, since a donated state may not alias.
    rows = tuple(
      tuple(sharding.by_heads(jnp.zeros(shape, c.dtype)) for _ in range(2))
      for _ in range(c.layers)
    )
    return caches.Cache(rows, jnp.zeros(batch, jnp.int32))

  def extend(
    self, block: Block, cache: caches.Cache, taps: tuple[int, ...] = ()
  ) -> tuple[Output, tuple]:
    """Scores a block behind the cached tokens, which it only reads.

    Args:
      block: `[B, M]` tokens, a chain or a tree.
      cache: what precedes them.
      taps: layers whose outputs to return; -1 is the embedding.

    Returns:
      Output `[B, M, D]` and the block's rows, for `commit`.
    """
    visible = trees.ancestors(block.parents, block.tokens.shape[1])
    positions = cache.length[:, None] + trees.depths(visible)
    output, rows = self._run(block.tokens, positions, visible, cache, taps)
    return output, caches.after(output.features, rows)

  def follow(
    self, tokens: Array, cache: caches.Cache, rows: tuple, at: Array
  ) -> tuple[Output, tuple]:
    """Scores one node of a chain, given the rows of those before it.

    What `extend` gives for the last node of a block, for a caller that draws
    the block node by node and may not write to the cache.

    Args:
      tokens: `[B, 1]` of the node.
      cache: what precedes the chain; it is only read.
      rows: of the chain, `[B, heads, K, D]`, the first `at` of them known.
      at: scalar int32, the node's place.

    Returns:
      Output `[B, 1, D]`, and the rows with the node's own.
    """
    size = jax.tree.leaves(rows)[0].shape[2]
    visible = (jnp.arange(size) <= at)[None, None]
    positions = cache.length[:, None] + jnp.arange(size)
    own = cache.length[:, None] + at
    return self._run(tokens, own, visible, cache, (), (rows, at), positions)

  def cast(self, dtype: str) -> Transformer:
    """The model with its weights in another dtype; see `TransformerConfig`."""
    weights.require_whole(self, 'cast')
    config = dataclasses.replace(self.config, dtype=dtype)
    shapes = jax.eval_shape(lambda: type(self)(config, nnx.Rngs(0)))
    wanted, structure = jax.tree.flatten(shapes)
    leaves = zip(wanted, jax.tree.leaves(self), strict=True)
    return structure.unflatten([x.astype(like.dtype) for like, x in leaves])

  def subset(self, layers: Sequence[int]) -> Transformer:
    """Some of the layers as a model of their own, which shares all weights.

    Args:
      layers: their numbers from 0, in the order in which they run. The first L
        read the first L pairs of a cache's rows.

    Raises:
      ValueError: there are not these layers, or none is asked for.
    """
    layers = list(layers)
    if not layers or not set(layers) <= set(range(self.config.layers)):
      raise ValueError(
        f'layers {layers} of a model that has {self.config.layers}: give at'
        f' least one of 0 to {self.config.layers - 1}'
      )
    config = dataclasses.replace(self.config, layers=len(layers))
    shapes = jax.eval_shape(lambda: type(self)(config, nnx.Rngs(0)))
    weights = dict(jax.tree_util.tree_leaves_with_path(self))

    def shared(path, _):
      # The only numbers in a path are those of layers.
      mine = [
        jax.tree_util.SequenceKey(layers[key.idx])
        if isinstance(key, jax.tree_util.SequenceKey)
        else key
        for key in path
      ]
      return weights[tuple(mine)]

    return jax.tree_util.tree_map_with_path(shared, shapes)

  def commit(
    self, cache: caches.Cache, rows: tuple, kept: Array, chain: bool = True
  ) -> caches.Cache:
    """Writes the rows of the kept nodes `[B, M]`; see `cache.commit`."""
    return caches.commit(cache, rows, kept, chain)

  def forward(
    self, tokens: Array, segments: Array, taps: tuple[int, ...] = ()
  ) -> Output:
    """Scores whole windows; nothing crosses from one segment to another.

    Args:
      tokens: `[B, T]` int32.
      segments: `[B, T]` int32, constant within a document.
      taps: layers whose outputs to return; -1 is the embedding.

    Returns:
      Output `[B, T, D]`.
    """
    size = tokens.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    visible = trees.ancestors(None, size) & same
    positions = trees.depths(visible)
    return self._run(tokens, positions, visible, None, taps)[0]

  def embed(self, tokens: Array) -> Array:
    """Embeddings `[..., D]`, float32."""
    return weights.rows(self.embedding[...], tokens)

  def unembed(self, features: Array) -> Array:
    """Float32 logits `[..., V]`."""
    head = self.embedding if self.config.tied else self.head
    return sharding.gathered(weights.dot(features, head[...]))

  def _run(
    self, tokens, positions, visible, cache, taps, chain=None, around=None
  ):
    """All layers; `around` has the positions of what `visible` is about."""
    c, angles = self.config, rotations(self.config, positions)
    live = caches.live(cache) if cache else None
    if c.attention_window:
      around = positions if around is None else around
      visible &= _near(positions, around, c.attention_window)
      if cache:
        slots = jnp.arange(live.shape[-1])[None]
        live &= _near(positions, slots, c.attention_window)
    x = self.embed(tokens)
    streams, rows = [x], []
    call = jax.checkpoint(Layer.__call__) if c.remat else Layer.__call__
    for i, layer in enumerate(self.layers):
      cached = cache.rows[i] if cache else None
      earlier = chain and (chain[0][i], chain[1])
      x, row = call(layer, x, angles, visible, cached, live, earlier)
      streams.append(x)
      rows.append(row)
    features = norm(x, self.norm[...], c.norm_eps)
    tapped = tuple(streams[t + 1] for t in taps)
    return Output(features, tapped), tuple(rows)


def _weight(rngs, config, shape, scale=0.02):
  values = scale * jax.random.normal(rngs.params(), shape)
  return weights.Weight(values.astype(config.dtype))


def pieces(x: Array, at: int | Sequence[int], axis: int) -> Iterator[Array]:
  """`jnp.split`, each piece whole; see `sharding.gathered`."""
  return map(sharding.gathered, jnp.split(x, at, axis))


def norm(x: Array, scale: Array, eps: float) -> Array:
  """RMSNorm of `[..., D]`. (Zhang & Sennrich 2019, arXiv 1910.07467)"""
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotations(config: TransformerConfig, positions: Array) -> Array:
  """Angles `[B, 1, M, head_dim / 2]` at positions `[B, M]`."""
  frequencies = _frequencies(config) / frequency_divisors(config)
  return positions[:, None, :, None] * frequencies


def frequency_divisors(config: TransformerConfig) -> Array:
  """What each rotary frequency is divided by, to read further: `[D / 2]`."""
  if config.rope_band is None:
    return jnp.full(config.head_size // 2, config.rope_factor)
  turns = _frequencies(config) * (config.rope_context / (2 * math.pi))
  low, high = config.rope_band
  kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return 1 / (kept + (1 - kept) / config.rope_factor)


def _frequencies(config: TransformerConfig) -> Array:
  half = config.head_size // 2
  return config.rope_theta ** (-jnp.arange(half) / half)


def _near(positions: Array, others: Array, window: int) -> Array:
  """`[B, M, R]` whether others `[B, R]` are less far behind `[B, M]`."""
  return others[:, None, :] > positions[..., None] - window


def _rotate(x: Array, angles: Array) -> Array:
  """Rotary positions on pairs (i, i + D / 2). (Su et al., arXiv 2104.09864)"""
  a, b = jnp.split(x, 2, -1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

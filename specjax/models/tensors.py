"""The weights of a `Transformer` by the names that other software gives them.

Elsewhere each projection is a matrix of its own; here those that read the same
input are one. One table says which, and both directions go by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import weights
from specjax.models.transformer import Transformer, TransformerConfig

Shapes = Mapping[str, tuple[int, ...]]

# By the last part of a leaf's name: of what it is made in the layout of Hugging
# Face, and what that is called in GGUF. `{}` is the number of a layer.
_NAMES = {
  'embedding': {'model.embed_tokens.weight': 'token_embd.weight'},
  'norm': {'model.norm.weight': 'output_norm.weight'},
  'head': {'lm_head.weight': 'output.weight'},
  'attention_norm': {
    'model.layers.{}.input_layernorm.weight': 'blk.{}.attn_norm.weight'
  },
  'qkv': {
    'model.layers.{}.self_attn.q_proj.weight': 'blk.{}.attn_q.weight',
    'model.layers.{}.self_attn.k_proj.weight': 'blk.{}.attn_k.weight',
    'model.layers.{}.self_attn.v_proj.weight': 'blk.{}.attn_v.weight',
  },
  'qkv_bias': {
    'model.layers.{}.self_attn.q_proj.bias': 'blk.{}.attn_q.bias',
    'model.layers.{}.self_attn.k_proj.bias': 'blk.{}.attn_k.bias',
    'model.layers.{}.self_attn.v_proj.bias': 'blk.{}.attn_v.bias',
  },
  'query_norm': {
    'model.layers.{}.self_attn.q_norm.weight': 'blk.{}.attn_q_norm.weight'
  },
  'key_norm': {
    'model.layers.{}.self_attn.k_norm.weight': 'blk.{}.attn_k_norm.weight'
  },
  'proj': {
    'model.layers.{}.self_attn.o_proj.weight': 'blk.{}.attn_output.weight'
  },
  'hidden_norm': {
    'model.layers.{}.post_attention_layernorm.weight': 'blk.{}.ffn_norm.weight'
  },
  'gate_up': {
    'model.layers.{}.mlp.gate_proj.weight': 'blk.{}.ffn_gate.weight',
    'model.layers.{}.mlp.up_proj.weight': 'blk.{}.ffn_up.weight',
  },
  'down': {'model.layers.{}.mlp.down_proj.weight': 'blk.{}.ffn_down.weight'},
}
_ROWS = 'embedding', 'head'  # one for each id
OF_VOCABULARY = tuple(name for own in _ROWS for name in _NAMES[own])
# Of a model which is written, if nobody said: rotations have no end.
POSITIONS = 8192
_LISTED = 8  # names of a kind in one error
_PADDING = 1024  # rows that an embedding may have beyond its tokenizer's ids


def parts(config: TransformerConfig, gguf: bool = False) -> dict[str, Shapes]:
  """What each leaf of a `Transformer` is made of.

  Args:
    config: its sizes.
    gguf: whether by the names of GGUF, else by those of Hugging Face.

  Returns:
    By a leaf's name, as 'layers.0.qkv', the shapes of its parts by theirs, in
    the order in which they are joined.
  """
  size = config.head_size
  kv = config.kv_heads * size
  joined = {
    'qkv': (config.heads * size, kv, kv),
    'gate_up': (config.hidden, config.hidden),
  }
  joined['qkv_bias'] = joined['qkv']
  found = {}
  for name, leaf in _leaves(config):
    last = name.rpartition('.')[-1]
    names = _NAMES[last].values() if gguf else _NAMES[last]
    number = name.split('.')[1] if '.' in name else ''
    outputs = joined.get(last, leaf.shape[:1])
    shapes = [(count, *leaf.shape[1:]) for count in outputs]
    named = zip(names, shapes, strict=True)
    found[name] = {part.format(number): shape for part, shape in named}
  return found


def check(
  config: TransformerConfig, found: Shapes, path: str, gguf: bool = False
) -> None:
  """Refuses a checkpoint that is not of the model that it says.

  Args:
    config: the sizes that it says.
    found: shapes of its tensors, by name.
    path: of the checkpoint, for the message.
    gguf: whether these are the names of GGUF, else those of Hugging Face.

  Raises:
    ValueError: tensors are missing, or nobody's, or of another shape.
  """
  wanted: dict[str, tuple[int, ...]] = {}
  for part in parts(config, gguf).values():
    wanted |= part
  wrong = {
    'missing': [name for name in wanted if name not in found],
    'not known': [name for name in found if name not in wanted],
    'of another shape': [
      f'{name} {found[name]}, not {shape}'
      for name, shape in wanted.items()
      if name in found and found[name] != shape
    ],
  }
  said = []
  for kind, names in wrong.items():
    more = f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''
    if names:
      said.append(f'{kind}: {", ".join(names[:_LISTED])}{more}')
  if said:
    raise ValueError(f'{path} has tensors {"; ".join(said)}')


def assemble(
  config: TransformerConfig, weights: Callable[[str], np.ndarray]
) -> Transformer:
  """A model of weights that are read one after the other.

  Args:
    config: its sizes.
    weights: gives a leaf by its name, as 'layers.0.qkv'. No two are held at a
      time, except in the model itself and in its dtype.
  """
  like = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  found = [
    jnp.asarray(weights(name), leaf.dtype) for name, leaf in _leaves(config)
  ]
  return jax.tree.unflatten(jax.tree.structure(like), found)


def join(
  config: TransformerConfig,
  read: Callable[[str], np.ndarray],
  gguf: bool = False,
  vocab_size: int | None = None,
) -> Transformer:
  """A model of weights in another layout.

  Args:
    config: its sizes.
    read: gives a matrix `[outputs, inputs]`, or a vector, by its name there.
    gguf: whether these are the names of GGUF, else those of Hugging Face.
    vocab_size: ids that its tokenizer has, all where it is None. What the
      embedding has behind them is padding, which no text has and none should:
      it is left out.

  Raises:
    ValueError: there are fewer rows than ids, or far more.
  """
  layout = parts(config, gguf)
  padding = config.vocab_size - (vocab_size or config.vocab_size)
  if not 0 <= padding <= _PADDING:
    raise ValueError(
      f'the tokenizer has {vocab_size} ids and the model {config.vocab_size}:'
      ' it is the tokenizer of another model'
    )
  count = vocab_size or config.vocab_size

  def weights(name):
    arrays = [read(part) for part in layout[name]]
    whole = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    return whole[:count] if name in _ROWS else whole

  return assemble(dataclasses.replace(config, vocab_size=count), weights)


def split(
  model: Transformer, gguf: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
  """The weights in another layout, one after the other.

  Args:
    model: whose they are.
    gguf: whether by the names of GGUF, else by those of Hugging Face.

  Yields:
    A name, and a matrix `[outputs, inputs]` or a vector.
  """
  weights.require_whole(model, 'exported')
  layout = parts(model.config, gguf)
  for (name, _), leaf in zip(
    _leaves(model.config), jax.tree.leaves(model), strict=True
  ):
    whole = np.asarray(leaf)
    ends = np.cumsum([shape[0] for shape in layout[name].values()])
    for part, array in zip(
      layout[name], np.split(whole, ends[:-1]), strict=True
    ):
      yield part, np.ascontiguousarray(array)


def halves(rows: np.ndarray, size: int) -> np.ndarray:
  """Reorders rows of queries or keys for rotation by halves.

  Elsewhere the rows (2 i, 2 i + 1) of a head are rotated together, here the
  rows (i, i + size / 2). Queries and keys are reordered alike, which leaves
  their products as they are.

  Args:
    rows: `[heads * size, D]`.
    size: of a head.
  """
  paired = rows.reshape(-1, size // 2, 2, rows.shape[-1])
  return paired.swapaxes(1, 2).reshape(rows.shape)


def pairs(rows: np.ndarray, size: int) -> np.ndarray:
  """Reorders rows of queries or keys for rotation by pairs: undoes `halves`.

  Args:
    rows: `[heads * size, D]`.
    size: of a head.
  """
  halved = rows.reshape(-1, 2, size // 2, rows.shape[-1])
  return halved.swapaxes(1, 2).reshape(rows.shape)


def _leaves(config: TransformerConfig):
  """Names and shapes of a model's leaves, in the order of the pytree."""
  like = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  for path, leaf in jax.tree_util.tree_leaves_with_path(like):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    yield name.removesuffix('.value'), leaf

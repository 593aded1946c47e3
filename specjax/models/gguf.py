"""Checkpoints in GGUF, the format of llama.cpp: weights and tokenizer in one.

Llama, Qwen2 and Qwen3, in F32, F16, BF16, Q8_0, Q4_0 and Q4_1. What is
quantised is read as the numbers that it stands for. Written is F32, and no
tokenizer.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import types
from typing import Any

import numpy as np

from specjax import extras, files, tokenizers
from specjax.models import tensors
from specjax.models.transformer import (
  Transformer,
  TransformerConfig,
  frequency_divisors,
)
from specjax.tokenizers import Pretrained

# What each has beyond Llama. That llama.cpp rotates the rows of Llama's heads
# in pairs, and those of the others in halves, is of its own making.
ARCHITECTURES = {
  'llama': {},
  'qwen2': {'qkv_bias': True},
  'qwen3': {'qk_norm': True},
}
_TYPES = 'F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1'
_DIVISORS = 'rope_freqs.weight'
# Llama 3.1 and later are written with these, and not all of them are kept.
_BAND, _CONTEXT = (1.0, 4.0), 8192
# How a text is cut into words, by `tokenizer.ggml.pre`.
_BYTES = {
  'type': 'ByteLevel',
  'add_prefix_space': False,
  'trim_offsets': True,
  'use_regex': False,
}
_GPT2 = {**_BYTES, 'use_regex': True}
_LETTERS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_DIGITS = {'type': 'Digits', 'individual_digits': True}


def _words(digits: str) -> list[dict[str, Any]]:
  pattern = {'Regex': _LETTERS % digits}
  split = {'pattern': pattern, 'behavior': 'Isolated', 'invert': False}
  return [{'type': 'Split', **split}, _BYTES]


_BEGUN = 'llama-bpe', 'llama3', 'llama-v3'  # whose documents begin with a token
_WORDS = {
  'gpt-2': [_GPT2],
  'smollm': [_DIGITS, _GPT2],
  'llama-bpe': _words('{1,3}'),
  'llama3': _words('{1,3}'),
  'llama-v3': _words('{1,3}'),
  'qwen2': _words(''),
}
# Types of tokens: of text, unknown, control, of the user, unused, bytes.
_TEXT, _CONTROL, _OWN, _UNUSED = 1, (2, 3), 4, 5


class File:
  """An open file: its fields and its tensors, read when they are asked for."""

  def __init__(self, path: str | os.PathLike):
    """Maps the file into memory.

    Raises:
      FileNotFoundError: there is none.
      ImportError: `gguf` is not installed.
      ValueError: it is no GGUF, or not all of one.
    """
    self.path = pathlib.Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f'there is no checkpoint {path}')
    self._gguf = extras.require('gguf', 'hf')
    try:
      reader = self._gguf.GGUFReader(self.path)
    except Exception as error:  # whatever the library meets in it
      raise ValueError(
        f'{path} is no GGUF, or not all of one ({error})'
      ) from error
    self._fields = reader.fields
    self.tensors = {tensor.name: tensor for tensor in reader.tensors}

  def get(self, name: str, default: Any = None) -> Any:
    """A field's value."""
    field = self._fields.get(name)
    return default if field is None else field.contents()

  def need(self, name: str) -> Any:
    """A field's value.

    Raises:
      ValueError: it is not there.
    """
    if name not in self._fields:
      raise ValueError(f'{self.path} does not say {name}')
    return self.get(name)

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """`[outputs, inputs]` of each tensor."""
    return {
      name: tuple(int(n) for n in reversed(tensor.shape))
      for name, tensor in self.tensors.items()
    }

  def read(self, name: str) -> np.ndarray:
    """A tensor in float32."""
    tensor = self.tensors[name]
    dequantize = self._gguf.quants.dequantize
    return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def read_config(file: File, dtype: str = 'float32') -> TransformerConfig:
  """The sizes of a model.

  Args:
    file: of it.
    dtype: of the weights; see `TransformerConfig`.

  Raises:
    ValueError: it is of another architecture, or has something of its own.
  """
  kind = file.need('general.architecture')
  if kind not in ARCHITECTURES:
    raise ValueError(
      f'{file.path} is of the architecture {kind}: known are'
      f' {", ".join(ARCHITECTURES)}'
    )

  def need(name):
    return file.need(f'{kind}.{name}')

  def get(name, default=None):
    return file.get(f'{kind}.{name}', default)

  shapes = file.shapes()
  heads = int(need('attention.head_count'))
  size = get('attention.key_length') or need('embedding_length') // heads
  if get('rope.dimension_count', size) != size:
    raise ValueError(
      f'{file.path} rotates {get("rope.dimension_count")} of the {size} numbers'
      ' of a head: only all is known'
    )
  config = TransformerConfig(
    vocab_size=shapes.get('token_embd.weight', (0, 0))[0],
    width=int(need('embedding_length')),
    layers=int(need('block_count')),
    heads=heads,
    kv_heads=int(get('attention.head_count_kv', heads)),
    hidden=int(need('feed_forward_length')),
    head_dim=int(size),
    rope_theta=float(get('rope.freq_base', 1e4)),
    **_stretched(file, kind, int(size)),
    **ARCHITECTURES[kind],
    attention_window=get('attention.sliding_window') or None,
    tied='output.weight' not in shapes,
    dtype=dtype,
    norm_eps=float(need('attention.layer_norm_rms_epsilon')),
    positions=int(get('context_length', 0)) or None,
  )
  if _DIVISORS in shapes:
    wanted = np.asarray(frequency_divisors(config))
    if not np.allclose(file.read(_DIVISORS), wanted, rtol=1e-3):
      raise ValueError(
        f'{file.path} stretches its positions in a way that is not known'
      )
  return config


def load(
  file: File, dtype: str = 'float32', vocab_size: int | None = None
) -> Transformer:
  """Reads a model.

  Args:
    file: of it.
    dtype: of the weights; see `TransformerConfig`.
    vocab_size: ids that its tokenizer has; see `tensors.join`.

  Raises:
    ValueError: it is not what it should be.
  """
  config = read_config(file, dtype)
  found = {n: s for n, s in file.shapes().items() if n != _DIVISORS}
  tensors.check(config, found, f'{file.path}', gguf=True)
  kinds = {file.tensors[name].tensor_type.name for name in found}
  if kinds - {*_TYPES}:
    raise ValueError(
      f'{file.path} has weights of type {", ".join(sorted(kinds - {*_TYPES}))}:'
      f' known are {", ".join(_TYPES)}'
    )
  paired = file.need('general.architecture') == 'llama'

  def read(name):
    rows = file.read(name)
    if paired and _is_rotated(name):
      return tensors.halves(rows, config.head_size)
    return rows

  return tensors.join(config, read, gguf=True, vocab_size=vocab_size)


def save(model: Transformer, path: str | os.PathLike) -> None:
  """Writes a model that llama.cpp can load, without its tokenizer.

  Token ids go into it and come out. Matrices are in the model's dtype.

  Args:
    model: the model.
    path: of the file.

  Raises:
    ImportError: `gguf` is not installed.
    ValueError: llama.cpp has no architecture for it.
  """
  c, library = model.config, extras.require('gguf', 'hf')
  own = {'qkv_bias': c.qkv_bias, 'qk_norm': c.qk_norm}
  has = {name: True for name, value in own.items() if value}
  kind = next((k for k, more in ARCHITECTURES.items() if more == has), None)
  if kind is None or c.attention_window:
    raise ValueError(
      'no architecture of llama.cpp has what this model has: biases'
      f' {c.qkv_bias}, normed heads {c.qk_norm}, window {c.attention_window}'
    )
  with files.atomic(path) as file:
    writer = library.GGUFWriter(file.name, kind)
    _describe(writer, library, c)
    halved = c.dtype == 'bfloat16'
    for part in tensors.parts(c, gguf=True).values():
      for name, shape in part.items():
        _announce(writer, library, name, shape, halved and len(shape) > 1)
    if c.rope_band:
      _announce(writer, library, _DIVISORS, (c.head_size // 2,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, array in tensors.split(model, gguf=True):
      if kind == 'llama' and _is_rotated(name):
        array = tensors.pairs(array, c.head_size)
      keep = halved and array.ndim > 1
      array = np.ascontiguousarray(array, None if keep else np.float32)
      writer.write_tensor_data(array.view(np.uint16) if keep else array)
    if c.rope_band:
      divisors = np.asarray(frequency_divisors(c), np.float32)
      writer.write_tensor_data(divisors)
    writer.close()


def load_tokenizer(
  file: File, start: str | None = None, end: str = ''
) -> Pretrained:
  """Reads the tokenizer of a model.

  Args:
    file: of it.
    start: what stands before a document; see `tokenizers.Pretrained`.
    end: the token that ends one; empty is what the file says.

  Raises:
    ValueError: it is of a kind that is not known.
  """
  kind = file.need('tokenizer.ggml.model')
  tokens = file.need('tokenizer.ggml.tokens')
  types = file.get('tokenizer.ggml.token_type', [_TEXT] * len(tokens))
  # What pads a vocabulary is no token.
  while types[len(tokens) - 1] == _UNUSED:
    tokens = tokens[:-1]
  types = types[: len(tokens)]
  if kind == 'gpt2':
    model = _byte_level(file, tokens)
  elif kind == 'llama':
    model = _sentence_piece(file, tokens, types)
  else:
    raise ValueError(
      f'{file.path} has a tokenizer of kind {kind!r}: known are gpt2 and llama'
    )
  model['added_tokens'] = [
    tokenizers.added(i, token, special=types[i] != _OWN)
    for i, token in enumerate(tokens)
    if types[i] in (*_CONTROL, _OWN)
  ]
  named = {
    f'{name}_token': tokens[file.get(f'tokenizer.ggml.{name}_token_id')]
    for name in ('bos', 'eos')
    if file.get(f'tokenizer.ggml.{name}_token_id') is not None
  }
  ids = (file.get(f'tokenizer.ggml.{name}_token_id') for name in ('eos', 'eot'))
  ends = [end] if end else [tokens[i] for i in ids if i is not None]
  if start is None:
    # What llama.cpp takes where nothing is said.
    usual = kind == 'llama' or file.get('tokenizer.ggml.pre') in _BEGUN
    begins = file.get('tokenizer.ggml.add_bos_token', usual)
    start = named.get('bos_token', '') if begins else ''
  try:
    return Pretrained(
      json.dumps(model),
      end=[*dict.fromkeys(ends)],
      start=start,
      template=file.get('tokenizer.chat_template'),
      names=named,
    )
  except ValueError as error:
    raise ValueError(f'{file.path}: {error}') from error


def _is_rotated(name: str) -> bool:
  return '.attn_q.' in name or '.attn_k.' in name


def _announce(
  writer: Any,
  library: types.ModuleType,
  name: str,
  shape: tuple[int, ...],
  halved: bool = False,
) -> None:
  """Says of a tensor what stands before the tensors: in BF16 if `halved`."""
  dtype = np.dtype(np.uint16 if halved else np.float32)
  raw = library.GGMLQuantizationType.BF16 if halved else None
  writer.add_tensor_info(
    name, shape, dtype, dtype.itemsize * math.prod(shape), raw
  )


def _describe(writer: Any, library: types.ModuleType, c: TransformerConfig):
  """The fields of a model."""
  kinds = library.LlamaFileType
  halved = c.dtype == 'bfloat16'
  writer.add_file_type(kinds.MOSTLY_BF16 if halved else kinds.ALL_F32)
  writer.add_tokenizer_model('none')
  writer.add_vocab_size(c.vocab_size)
  writer.add_context_length(c.positions or tensors.POSITIONS)
  writer.add_embedding_length(c.width)
  writer.add_block_count(c.layers)
  writer.add_feed_forward_length(c.hidden)
  writer.add_head_count(c.heads)
  writer.add_head_count_kv(c.kv_heads)
  writer.add_key_length(c.head_size)
  writer.add_value_length(c.head_size)
  writer.add_layer_norm_rms_eps(c.norm_eps)
  writer.add_rope_dimension_count(c.head_size)
  writer.add_rope_freq_base(c.rope_theta)
  if c.rope_factor != 1 and not c.rope_band:
    writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(c.rope_factor)


def _stretched(file: File, kind: str, size: int) -> dict[str, Any]:
  """What a file says of longer contexts."""
  if _DIVISORS in file.tensors:
    last = float(file.read(_DIVISORS)[size // 2 - 1])
    return {'rope_factor': last, 'rope_band': _BAND, 'rope_context': _CONTEXT}
  scaling = file.get(f'{kind}.rope.scaling.type', 'none')
  if scaling == 'none':
    return {}
  if scaling == 'linear':
    return {'rope_factor': float(file.need(f'{kind}.rope.scaling.factor'))}
  raise ValueError(
    f"{file.path} has rope.scaling.type {scaling!r}: only 'linear' is known"
  )


def _byte_level(file: File, tokens: list[str]) -> dict[str, Any]:
  """A byte-level BPE as the `tokenizers` library stores it."""
  pre = file.get('tokenizer.ggml.pre', 'no name')
  if pre not in _WORDS:
    raise ValueError(
      f'{file.path} cuts words as {pre!r} does: known are {", ".join(_WORDS)}'
    )
  merges = [m.split(' ', 1) for m in file.need('tokenizer.ggml.merges')]
  return {
    'version': '1.0',
    'normalizer': {'type': 'NFC'} if pre == 'qwen2' else None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': _WORDS[pre]},
    'post_processor': None,
    'decoder': _BYTES,
    'model': {
      'type': 'BPE',
      'vocab': {token: i for i, token in enumerate(tokens)},
      'merges': merges,
      # Words of its vocabulary are whole there, whatever merges would make.
      'ignore_merges': pre in _BEGUN,
    },
  }


def _sentence_piece(
  file: File, tokens: list[str], types: list[int]
) -> dict[str, Any]:
  """A BPE by scores as the `tokenizers` library stores it."""
  return tokenizers.by_scores(
    tokens,
    file.need('tokenizer.ggml.scores'),
    merged=[i for i, kind in enumerate(types) if kind == _TEXT],
    unknown=file.get('tokenizer.ggml.unknown_token_id', 0),
    space=file.get('tokenizer.ggml.add_space_prefix', True),
  )

"""Checkpoints of llama2.c: a Llama in one `.bin`, its tokenizer in another.

A checkpoint (version 0) is seven int32, then float32 weights:

  dim hidden_dim n_layers n_heads n_kv_heads vocab_size seq_len

A negative vocab_size says that the classifier is not the embedding. See
`run.c` of github.com/karpathy/llama2.c.
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax import tokenizers
from specjax.models import tensors
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.tokenizers import Pretrained

_VERSIONED = 0x616B3432  # begins a file of a later version
# The first ids, under whatever names: what is unknown, and what begins and ends
# a document.
_CONTROL = '<unk>', '<s>', '</s>'


class Header(NamedTuple):
  """The sizes of a checkpoint.

  Attributes:
    dim: width D of the residual stream.
    hidden_dim: width F of the feed-forward layer.
    n_layers: L.
    n_heads: query heads.
    n_kv_heads: key/value heads.
    vocab_size: V.
    seq_len: tokens that it was trained on at once.
    tied: whether the embedding is also the classifier.
  """

  dim: int
  hidden_dim: int
  n_layers: int
  n_heads: int
  n_kv_heads: int
  vocab_size: int
  seq_len: int
  tied: bool

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """What follows the header, by the names of `run.c` and in its order."""
    d, f, n = self.dim, self.hidden_dim, self.n_layers
    size = d // self.n_heads
    q, kv = self.n_heads * size, self.n_kv_heads * size
    shapes = {
      'token_embedding_table': (self.vocab_size, d),
      'rms_att_weight': (n, d),
      'wq': (n, q, d),
      'wk': (n, kv, d),
      'wv': (n, kv, d),
      'wo': (n, d, q),
      'rms_ffn_weight': (n, d),
      'w1': (n, f, d),
      'w2': (n, d, f),
      'w3': (n, f, d),
      'rms_final_weight': (d,),
      'freq_cis_real': (self.seq_len, size // 2),
      'freq_cis_imag': (self.seq_len, size // 2),
    }
    return shapes if self.tied else {**shapes, 'wcls': (self.vocab_size, d)}


def read_header(path: str | os.PathLike) -> Header:
  """Reads the sizes, and refuses what is not as long as they say.

  Args:
    path: of the checkpoint.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no checkpoint of version 0, or not all of one.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'there is no checkpoint {path}')
  with open(path, 'rb') as file:
    start = file.read(28)
  if len(start) < 28:
    raise ValueError(
      f'{path} has {len(start)} bytes: no checkpoint of llama2.c'
    )
  if struct.unpack('<I', start[:4])[0] == _VERSIONED:
    raise ValueError(
      f'{path} is of version {struct.unpack("<i", start[4:8])[0]} of the'
      ' format of llama2.c: export it again with `export.py --version 0`'
    )
  *sizes, vocab, length = struct.unpack('<7i', start)
  header = Header(*sizes, abs(vocab), length, vocab > 0)
  if min(header[:7]) < 1 or header.dim % header.n_heads:
    said = ', '.join(f'{k} {v}' for k, v in header._asdict().items())
    raise ValueError(f'{path} is no checkpoint of llama2.c: it says {said}')
  wanted = 28 + 4 * sum(map(math.prod, header.shapes().values()))
  found = path.stat().st_size
  if found != wanted:
    raise ValueError(
      f'{path} has {found:,} bytes where its header asks for {wanted:,}:'
      f' {"it was cut short" if found < wanted else "it has something behind"},'
      ' or it is no checkpoint of llama2.c'
    )
  return header


def read_config(
  path: str | os.PathLike, dtype: str = 'float32'
) -> TransformerConfig:
  """The sizes in a model's own words; see `read_header` for what it raises."""
  header = read_header(path)
  return TransformerConfig(
    vocab_size=header.vocab_size,
    width=header.dim,
    layers=header.n_layers,
    heads=header.n_heads,
    kv_heads=header.n_kv_heads,
    hidden=header.hidden_dim,
    tied=header.tied,
    dtype=dtype,
    positions=header.seq_len,
  )


def load(path: str | os.PathLike, dtype: str = 'float32') -> Transformer:
  """Reads a checkpoint.

  Args:
    path: a `.bin` of version 0.
    dtype: of the weights; see `TransformerConfig`.

  Returns:
    The model.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not what it should be; see `read_header`.
  """
  header, config = read_header(path), read_config(path, dtype)
  weights = _by_name(_read(path, header), header)
  return tensors.assemble(config, weights.__getitem__)


def load_tokenizer(
  path: str | os.PathLike, model: str | os.PathLike | None = None
) -> Pretrained:
  """Reads a tokenizer: its longest piece, then score, length, bytes of each.

  In its files a space is a space; here U+2581 stands for it, as in other files
  of the kind, so that a text's own U+2581 becomes one.

  Args:
    path: of the tokenizer.
    model: of the checkpoint that it should belong to.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no such file, or not all of one, or another model's.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'there is no tokenizer {path}')
  data, at = path.read_bytes(), 4
  pieces, scores = [], []
  try:
    longest = struct.unpack_from('<I', data)[0]
    while at < len(data):
      score, length = struct.unpack_from('<fi', data, at)
      at += 8 + length
      # A file of another kind has lengths that are out of the question.
      if not 0 <= length <= longest or at > len(data):
        raise ValueError('the next goes on behind the end')
      pieces.append(data[at - length : at])
      scores.append(score)
    tokenizer = _tokenizer(pieces, scores)
  except (struct.error, ValueError) as error:
    raise ValueError(
      f'{path} is no tokenizer of llama2.c, or not all of one:'
      f' {len(pieces)} pieces were read ({error})'
    ) from error
  wanted = len(pieces) if model is None else read_header(model).vocab_size
  if len(pieces) != wanted:
    raise ValueError(
      f'{path} has {len(pieces)} pieces and {model} a vocabulary of {wanted}:'
      ' it is the tokenizer of another model'
    )
  return tokenizer


def _tokenizer(pieces: Sequence[bytes], scores: Sequence[float]) -> Pretrained:
  """A tokenizer from the bytes and the score of each id."""
  own = [piece.decode().replace(' ', '\u2581') for piece in pieces]
  tokens = [*_CONTROL, *own[len(_CONTROL) :]]
  (token, times), *_ = collections.Counter(tokens).most_common(1)
  if times > 1:
    raise ValueError(f'the piece {token!r} stands there {times} times')
  single = [f'<0x{byte:02X}>' for byte in range(256)]
  absent = set(single) - set(tokens)
  if absent:
    raise ValueError(f'the tokenizer has no piece {min(absent)}')
  kept = {*_CONTROL, *single}
  model = tokenizers.by_scores(
    tokens,
    scores,
    merged=[i for i, token in enumerate(tokens) if token not in kept],
  )
  model['added_tokens'] = [
    tokenizers.added(i, token) for i, token in enumerate(_CONTROL)
  ]
  _, begin, end = _CONTROL
  return Pretrained(
    json.dumps(model),
    end=(end, begin),  # a new beginning ends what was said, as in run.c
    start=begin,
    names={'bos_token': begin, 'eos_token': end},
  )


def tokenizer_beside(path: str | os.PathLike) -> pathlib.Path:
  """The tokenizer that lies beside a checkpoint: the only `tok*.bin` there.

  Raises:
    ValueError: there is none, or more than one.
  """
  path = pathlib.Path(path)
  found = sorted(path.parent.glob('tok*.bin'))
  if len(found) != 1:
    names = ', '.join(file.name for file in found) or 'none'
    raise ValueError(
      f'beside {path} there should be one tokenizer, tok*.bin, and there is'
      f' {names}: name one with target.tokenizer_path'
    )
  return found[0]


def _read(path: str | os.PathLike, header: Header) -> dict[str, np.ndarray]:
  data = np.fromfile(path, '<f4', offset=28)
  shapes = header.shapes()
  ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
  parts = zip(shapes.items(), np.split(data, ends[:-1]), strict=True)
  return {name: part.reshape(shape) for (name, shape), part in parts}


def _by_name(w: dict[str, np.ndarray], header: Header) -> dict:
  """The weights by the names of `Transformer`."""

  size = header.dim // header.n_heads
  named = {
    'embedding': w['token_embedding_table'],
    'norm': w['rms_final_weight'],
  }
  if not header.tied:
    named['head'] = w['wcls']
  for i in range(header.n_layers):
    q, k = (tensors.halves(w[name][i], size) for name in ('wq', 'wk'))
    layer = {
      'qkv': np.concatenate([q, k, w['wv'][i]]),
      'proj': w['wo'][i],
      'gate_up': np.concatenate([w['w1'][i], w['w3'][i]]),
      'down': w['w2'][i],
      'attention_norm': w['rms_att_weight'][i],
      'hidden_norm': w['rms_ffn_weight'][i],
    }
    named |= {f'layers.{i}.{name}': value for name, value in layer.items()}
  return named

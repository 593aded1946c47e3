"""Models that were trained elsewhere, whatever they lie in.

A path is a folder or a name on the hub (`huggingface`), a `.gguf` (`gguf`), or
else a checkpoint of llama2.c (`llama2c`).
"""

from __future__ import annotations

import functools
from pathlib import Path

from specjax import files
from specjax.models import card, gguf, huggingface, llama2c
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.tokenizers import Tokenizer


def local(path: str) -> Path:
  """Where a model lies, fetched from the hub if it is a name there.

  Raises:
    FileNotFoundError: it is neither there nor on the hub.
  """
  if huggingface.is_hub_name(path):
    return huggingface.fetch(path)
  if not Path(path).exists():
    raise FileNotFoundError(f'there is no model {path}')
  return Path(path)


def content_hash(path: str) -> str:
  """SHA-256 of what is read of a model."""
  place = local(path)
  return (
    huggingface.content_hash(place) if place.is_dir() else files.sha256(place)
  )


def read_config(path: str) -> TransformerConfig:
  """The sizes of a model; those of its embedding with padding."""
  place = local(path)
  if place.is_dir():
    return huggingface.read_config(place)
  if place.suffix == '.gguf':
    return gguf.read_config(_gguf(place))
  return llama2c.read_config(place)


def licence(path: str) -> str:
  """What is known of a model's licence."""
  place = local(path)
  if place.is_dir():
    return huggingface.licence(place)
  if place.suffix == '.gguf':
    return _gguf(place).get('general.license', card.UNKNOWN)
  return card.UNKNOWN


def load(
  path: str, dtype: str = 'float32', vocab_size: int | None = None
) -> Transformer:
  """Reads a model.

  Args:
    path: see above.
    dtype: of its weights; see `TransformerConfig`.
    vocab_size: ids that its tokenizer has; see `tensors.join`.

  Raises:
    FileNotFoundError: it is not there.
    ImportError: a package that reads it is not.
    ValueError: it is not what it should be.
  """
  place = local(path)
  if place.is_dir():
    return huggingface.load(place, dtype, vocab_size)
  if place.suffix == '.gguf':
    return gguf.load(_gguf(place), dtype, vocab_size)
  return llama2c.load(place, dtype)


def load_tokenizer(
  path: str, beside: str = '', start: str = '', end: str = ''
) -> Tokenizer:
  """Reads the tokenizer of a model.

  Args:
    path: of the model.
    beside: where the tokenizer is if it is not where the model's own would be.
    start: what stands before a document, special tokens included; empty is what
      the model's own files say.
    end: the token that ends one; likewise.

  Raises:
    FileNotFoundError: it is not there.
    ImportError: a package that reads it is not.
    ValueError: it is not what it should be.
  """
  place = local(path)
  if place.is_dir():
    folder = local(beside) if beside else place
    return huggingface.load_tokenizer(folder, start or None, end)
  if place.suffix == '.gguf':
    if beside:
      raise ValueError(
        f'target.tokenizer_path is {beside}, but {path} has its own: leave it'
        ' empty'
      )
    return gguf.load_tokenizer(_gguf(place), start or None, end)
  if start or end:
    raise ValueError(
      'target.document_start and target.document_end are for tokenizers with'
      f' special tokens, which that of {path} has not'
    )
  return llama2c.load_tokenizer(beside or llama2c.tokenizer_beside(path), path)


def _gguf(place: Path) -> gguf.File:
  """An open file; its index alone takes seconds, so the last one is kept."""
  return _opened(place, place.stat().st_mtime_ns)


@functools.lru_cache(1)
def _opened(place: Path, modified: int) -> gguf.File:
  del modified  # of a file that was written anew
  return gguf.File(place)

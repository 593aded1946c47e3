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


class Source:
  """Where a model lies: found once, and read when it is asked for.

  Attributes:
    path: as it was given.
    place: of the file or the folder.
  """

  def __init__(self, path: str):
    """Finds it, and fetches it if it is a name on the hub.

    Raises:
      FileNotFoundError: it is neither there nor on the hub.
    """
    self.path = path
    if huggingface.is_hub_name(path):
      self.place = huggingface.fetch(path)
    else:
      self.place = Path(path)
    if not self.place.exists():
      raise FileNotFoundError(f'there is no model {path}')

  @property
  def hash(self) -> str:
    """SHA-256 of what is read of it."""
    if self.place.is_dir():
      return huggingface.content_hash(self.place)
    return files.sha256(self.place)

  def read_config(self) -> TransformerConfig:
    """Its sizes; those of its embedding with padding."""
    if self.place.is_dir():
      return huggingface.read_config(self.place)
    if self._is_gguf:
      return gguf.read_config(self._gguf)
    return llama2c.read_config(self.place)

  def licence(self) -> str:
    """What is known of its licence."""
    if self.place.is_dir():
      return huggingface.licence(self.place)
    if self._is_gguf:
      return self._gguf.get('general.license', card.UNKNOWN)
    return card.UNKNOWN

  def load(
    self, dtype: str = 'float32', vocab_size: int | None = None
  ) -> Transformer:
    """Reads the model.

    Args:
      dtype: of its weights; see `TransformerConfig`.
      vocab_size: ids that its tokenizer has; see `tensors.join`.

    Raises:
      ImportError: a package that reads it is not there.
      ValueError: it is not what it should be.
    """
    if self.place.is_dir():
      return huggingface.load(self.place, dtype, vocab_size)
    if self._is_gguf:
      return gguf.load(self._gguf, dtype, vocab_size)
    return llama2c.load(self.place, dtype)

  def load_tokenizer(
    self, beside: str = '', start: str = '', end: str = ''
  ) -> Tokenizer:
    """Reads its tokenizer.

    Args:
      beside: where the tokenizer is if it is not where the model's own would
        be.
      start: what stands before a document, special tokens included; empty is
        what the model's own files say.
      end: the token that ends one; likewise.

    Raises:
      FileNotFoundError: it is not there.
      ImportError: a package that reads it is not.
      ValueError: it is not what it should be.
    """
    if self.place.is_dir():
      folder = Source(beside).place if beside else self.place
      return huggingface.load_tokenizer(folder, start or None, end)
    if self._is_gguf:
      if beside:
        raise ValueError(
          f'target.tokenizer_path is {beside}, but {self.path} has its own:'
          ' leave it empty'
        )
      return gguf.load_tokenizer(self._gguf, start or None, end)
    if start or end:
      raise ValueError(
        'target.document_start and target.document_end are for other files than'
        f' {self.path}: what begins and ends a document is settled in llama2.c'
      )
    beside = beside or llama2c.tokenizer_beside(self.place)
    return llama2c.load_tokenizer(beside, self.place)

  @property
  def _is_gguf(self) -> bool:
    return self.place.suffix == '.gguf'

  @functools.cached_property
  def _gguf(self) -> gguf.File:
    return gguf.File(self.place)  # whose index alone takes seconds

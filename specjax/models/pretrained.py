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
      ValueError: it is a file of no kind that is read.
    """
    self.path = path
    if huggingface.is_hub_name(path):
      # Refused before its weights come, if it is of no kind that is known.
      huggingface.read_config(huggingface.fetch(path, weights=False))
      self.place = huggingface.fetch(path)
    else:
      self.place = Path(path).expanduser()
    if not self.place.exists():
      raise FileNotFoundError(f'there is no model {path}')
    if self.place.is_file():
      _require_kind(self.place)

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


def _require_kind(file: Path) -> None:
  """Refuses files that would be taken for something else."""
  with open(file, 'rb') as opened:
    start = opened.read(64)
  why = None
  if file.suffix == '.safetensors':
    why = f'is the weights alone: name the folder, {file.parent}'
  elif start.startswith(b'version https://git-lfs'):
    why = 'stands for a file that was not fetched: run `git lfs pull` there'
  elif start.startswith(b'GGUF') and file.suffix != '.gguf':
    why = 'is a GGUF: give it a name that ends in .gguf'
  elif start.startswith((b'PK', b'\x80')):
    why = 'is pickled, which is not read: take safetensors or GGUF'
  if why:
    raise ValueError(f'{file} {why}')

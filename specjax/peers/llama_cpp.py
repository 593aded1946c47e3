"""Decoding with llama.cpp, by its bindings llama-cpp-python."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from specjax import drafters, extras
from specjax.comparison import Condition, Decode, Text
from specjax.contest import Way
from specjax.models import gguf
from specjax.peers import own
from specjax.tokenizers import Tokenizer

NEEDS = 'llama_cpp', 'gguf'
ROOM = 256  # positions come in multiples of this


def place(folder: Path) -> Path:
  """Where the target of a run is."""
  return folder / 'peers' / 'target.gguf'


def export(
  folder: Path, ours: own.Decoder, tokenizer: Tokenizer
) -> dict[Way, Path]:
  """Writes the target.

  Args:
    folder: of the run.
    ours: with what we decode.
    tokenizer: of its target; token ids go in here and come out.

  Returns:
    Nothing: the bindings take no draft models.

  Raises:
    ValueError: llama.cpp has no architecture for it.
  """
  del tokenizer
  gguf.save(ours.target, place(folder))
  return {}


class Decoder:
  """A target, and the ways to draft for it that the bindings have."""

  def __init__(
    self,
    path: Path,
    dtype: str,
    threads: int,
    size: int,
    drafts: Mapping[Way, Path] | None = None,
  ):
    """Opens a GGUF.

    Args:
      path: of the file.
      dtype: of its weights; beside 'bfloat16' the cache is as it is by default.
      threads: of every pass.
      size: tokens of the longest text, drafts included.
      drafts: of these the bindings take none.

    Raises:
      ImportError: llama-cpp-python is not installed.
    """
    del drafts
    self._library = extras.require('llama_cpp', 'peers')
    cached = self._library.GGML_TYPE_F32 if dtype == 'float32' else None
    self._open = functools.partial(
      _counted(self._library.Llama),
      str(path),
      n_ctx=-(-size // ROOM) * ROOM,
      n_threads=threads,
      n_threads_batch=threads,
      type_k=cached,
      type_v=cached,
      verbose=False,
    )
    self._models = {}

  def arm(self, way: Way | None, condition: Condition) -> Decode | None:
    """What decodes in a way, or plainly.

    The bindings take one prompt, and cut the law before they divide by the
    temperature.
    """
    other_law = condition.top_p < 1 and condition.temperature != 1
    other_way = way is not None and way.kind != 'ngram'
    if condition.batch > 1 or other_law or other_way:
      return None
    if way not in self._models:
      # Behind a draft it keeps all logits, and has room for them only if told.
      self._models[way] = self._open(
        draft_model=way and _lookup(way), logits_all=way is not None
      )
    t, p = condition.temperature, condition.top_p
    return functools.partial(_decode, self._models[way], t, p)

  def versions(self) -> dict[str, str]:
    """What a measurement depends on."""
    system = self._library.llama_print_system_info().decode()
    return {
      'llama-cpp-python': self._library.__version__,
      'llama.cpp': ' '.join(system.split()),
    }


def _lookup(way):
  drafting = extras.require('llama_cpp.llama_speculative', 'peers')
  size = drafters.find('ngram').NGram(way.k).n
  return drafting.LlamaPromptLookupDecoding(size, way.k)


def _counted(llama):
  """A class of models that count their passes."""

  class Counted(llama):
    passes = 0

    def eval(self, tokens):
      self.passes += 1
      super().eval(tokens)

  return Counted


def _decode(model, temperature, top_p, prompts, seed, count, room) -> Text:
  del room
  model.reset()  # else the prompt is remembered, and its time saved
  model.set_seed(seed)
  model.passes = 0
  (prompt,) = prompts
  text = model.generate(
    prompt, temp=temperature, top_k=0, top_p=top_p, min_p=0.0
  )
  tokens = [token for _, token in zip(range(count), text, strict=False)]
  text.close()
  return Text([tokens], model.passes)

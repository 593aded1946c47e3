"""Decoding with `transformers`, as its users do: `generate`, eager."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax import drafters, extras
from specjax.comparison import Condition, Decode, Text
from specjax.contest import Way
from specjax.models import huggingface
from specjax.peers import own
from specjax.tokenizers import Tokenizer

NEEDS = 'torch', 'transformers', 'safetensors'

# Drafts are as long as they are told to be, and not as its heuristics say.
FIXED = {
  'num_assistant_tokens_schedule': 'constant',
  'assistant_confidence_threshold': 0.0,
}


def place(folder: Path) -> Path:
  """Where the target of a run is."""
  return folder / 'peers' / 'target'


def export(
  folder: Path, ours: own.Decoder, tokenizer: Tokenizer
) -> dict[Way, Path]:
  """Writes the target and the models that draft for it, anew.

  Args:
    folder: of the run.
    ours: with what we decode.
    tokenizer: of its target.

  Returns:
    Folders of the draft models.

  Raises:
    ValueError: a model or the tokenizer has no form that others read.
  """
  huggingface.save(ours.target, place(folder), tokenizer)
  drafts = {way: folder / 'peers' / way.draft for way in ours.drafts}
  for way, path in drafts.items():
    huggingface.save(ours.drafts[way], path, tokenizer)
  return drafts


class Decoder:
  """A target, and the ways to draft for it that this library has."""

  def __init__(
    self,
    path: Path,
    dtype: str,
    threads: int,
    size: int,
    drafts: Mapping[Way, Path] | None = None,
  ):
    """Loads a model.

    Args:
      path: of its folder.
      dtype: of weights and caches.
      threads: of every pass, in this process.
      size: of the longest text; buffers grow here, so that it is not needed.
      drafts: folders of draft models.

    Raises:
      ImportError: PyTorch or `transformers` is not installed.
    """
    del size
    self._torch = extras.require('torch', 'peers')
    self._library = extras.require('transformers', 'peers')
    self._torch.set_num_threads(threads)
    self._library.logging.set_verbosity_error()
    self._library.logging.disable_progress_bar()
    self._dtype = getattr(self._torch, dtype)
    self._target = self._load(path)
    self._paths, self._drafts = drafts or {}, {}
    self._passes = 0
    # An early exit passes through the target too, but not so far.
    last = self._target.model.layers[-1]
    last.register_forward_hook(self._count)

  def arm(self, way: Way | None, condition: Condition) -> Decode | None:
    """What decodes in a way, or plainly; it drafts for one prompt at a time."""
    if way is not None and condition.batch > 1:
      return None
    options = self._options(way)
    if options is None:
      return None
    sampling = _sampling(condition.temperature, condition.top_p)
    return functools.partial(self._decode, options | sampling)

  def versions(self) -> dict[str, str]:
    """What a measurement depends on."""
    modules = self._library, self._torch
    return {module.__name__: module.__version__ for module in modules}

  def _options(self, way: Way | None) -> dict[str, Any] | None:
    """Those of `_decode` that draft."""
    if way is None:
      return {}
    if way.kind == 'ngram':
      size = drafters.find('ngram').NGram(way.k).n
      return {
        'prompt_lookup_num_tokens': way.k,
        'max_matching_ngram_size': size,
      }
    if way.kind == 'early_exit':
      return {'k': way.k, 'assistant_early_exit': int(way.draft)}
    if way in self._paths:
      path = self._paths[way]
      if path not in self._drafts:
        self._drafts[path] = self._load(path)
      return {'k': way.k, 'assistant_model': self._drafts[path]}
    return None

  def _decode(self, options, prompts, seed, count, room) -> Text:
    """Continues prompts; `k` of the options is that of a model that drafts."""
    del room
    options = dict(options)
    k = options.pop('k', None)
    if k is not None:
      assistant = options.get('assistant_model', self._target)
      assistant.generation_config.update(num_assistant_tokens=k, **FIXED)
    self._torch.manual_seed(seed)
    self._passes = 0
    ids = self._torch.tensor(prompts)
    text = self._target.generate(
      ids,
      attention_mask=self._torch.ones_like(ids),
      max_new_tokens=count,
      **options,
    )
    return Text(text[:, ids.shape[1] :].tolist(), self._passes)

  def _count(self, *_):
    self._passes += 1

  def _load(self, path):
    model = self._library.AutoModelForCausalLM.from_pretrained(
      path, dtype=self._dtype
    )
    # Nothing ends a text early, here as with the others.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _sampling(temperature: float, top_p: float) -> dict[str, Any]:
  if not temperature:
    return {'do_sample': False}
  return {
    'do_sample': True,
    'temperature': temperature,
    'top_k': 0,  # no more than the other two
    'top_p': top_p,
  }

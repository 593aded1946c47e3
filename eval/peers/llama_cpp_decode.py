"""Decoding with llama.cpp, by its bindings llama-cpp-python."""

import functools

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from specjax import drafters

ROOM = 256  # positions come in multiples of this


class Decoder:
  """A target, and the ways to draft for it that the bindings have."""

  def __init__(self, path, dtype, threads, size):
    """Opens a GGUF.

    Args:
      path: of the file.
      dtype: of its weights; beside 'bfloat16' the cache is as it is by default.
      threads: of every pass.
      size: tokens of the longest text, drafts included.
    """
    cached = llama_cpp.GGML_TYPE_F32 if dtype == 'float32' else None
    self._open = functools.partial(
      _Counted,
      str(path),
      n_ctx=-(-size // ROOM) * ROOM,
      n_threads=threads,
      n_threads_batch=threads,
      type_k=cached,
      type_v=cached,
      verbose=False,
    )
    self._models = {}

  def options(self, way, condition, folder=None):
    """What `decode` needs to draft in a way of ours.

    Args:
      way: a `contest.Way`; None is plain decoding.
      condition: to decode under; the bindings take one prompt, and cut the
        law before they divide by the temperature.
      folder: of its draft model; the bindings take none.

    Returns:
      Keyword arguments of `decode`; None if the bindings have no such way.
    """
    other_law = condition.top_p < 1 and condition.temperature != 1
    if condition.batch > 1 or other_law:
      return None
    if way is not None and way.kind != 'ngram':
      return None
    if way not in self._models:
      lookup = way and LlamaPromptLookupDecoding(
        drafters.find('ngram').NGram(way.k).n, way.k
      )
      # Behind a draft it keeps all logits, and has room for them only if told.
      self._models[way] = self._open(
        draft_model=lookup, logits_all=lookup is not None
      )
    return {'model': self._models[way]}

  def versions(self):
    """What a measurement depends on."""
    system = llama_cpp.llama_print_system_info().decode()
    return {
      'llama-cpp-python': llama_cpp.__version__,
      'llama.cpp': ' '.join(system.split()),
    }

  def decode(self, prompts, count, temperature, top_p, seed, model):
    """Continues a prompt.

    Args:
      prompts: token ids of one.
      count: new tokens.
      temperature: 0 is greedy.
      top_p: probability that is kept.
      seed: of what is drawn.
      model: with its draft, from `options`.

    Returns:
      Its new tokens, and how often the target was asked for them.
    """
    model.reset()  # else the prompt is remembered, and its time saved
    model.set_seed(seed)
    model.passes = 0
    (prompt,) = prompts
    text = model.generate(
      prompt, temp=temperature, top_k=0, top_p=top_p, min_p=0.0
    )
    tokens = [token for _, token in zip(range(count), text, strict=False)]
    text.close()
    return [tokens], model.passes


class _Counted(llama_cpp.Llama):
  """Counts its passes."""

  passes = 0

  def eval(self, tokens):
    """A pass."""
    self.passes += 1
    super().eval(tokens)

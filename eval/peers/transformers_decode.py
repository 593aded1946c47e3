"""Decoding with `transformers`, as its users do: `generate`, eager."""

import torch
import transformers

from specjax import drafters

# Drafts are as long as they are told to be, and not as its heuristics say.
FIXED = {
  'num_assistant_tokens_schedule': 'constant',
  'assistant_confidence_threshold': 0.0,
}


class Decoder:
  """A target, and the ways to draft for it that this library has."""

  def __init__(self, folder, dtype, threads):
    """Loads the model of a folder, with weights of a dtype."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    self._dtype = getattr(torch, dtype)
    self._target = _load(folder, self._dtype)
    self._drafts = {}
    self._passes = 0
    # An early exit passes through the target too, but not so far.
    last = self._target.model.layers[-1]
    last.register_forward_hook(self._count)

  def options(self, way, condition, folder=None):
    """What `decode` needs to draft in a way of ours.

    Args:
      way: a `contest.Way`; None is plain decoding.
      condition: to decode under; it drafts for one prompt at a time.
      folder: of its draft model, if it has one.

    Returns:
      Keyword arguments of `decode`; None if the library has no such way.
    """
    if way is None:
      return {}
    if condition.batch > 1:
      return None
    if way.kind == 'ngram':
      size = drafters.find('ngram').NGram(way.k).n
      return {
        'prompt_lookup_num_tokens': way.k,
        'max_matching_ngram_size': size,
      }
    if way.kind == 'early_exit':
      return {'k': way.k, 'assistant_early_exit': int(way.draft)}
    if folder is not None:
      if folder not in self._drafts:
        self._drafts[folder] = _load(folder, self._dtype)
      return {'k': way.k, 'assistant_model': self._drafts[folder]}
    return None

  def versions(self):
    """What a measurement depends on."""
    modules = transformers, torch
    return {module.__name__: module.__version__ for module in modules}

  def decode(self, prompts, count, temperature, top_p, seed, k=None, **options):
    """Continues prompts.

    Args:
      prompts: token ids of each, equally many.
      count: new tokens.
      temperature: 0 is greedy.
      top_p: probability that is kept.
      seed: of what is drawn.
      k: tokens of a draft, by a model.
      **options: further ones of `generate`.

    Returns:
      The new tokens of each, and how often the target was asked for them.
    """
    if k is not None:
      assistant = options.get('assistant_model', self._target)
      assistant.generation_config.update(num_assistant_tokens=k, **FIXED)
    if temperature:
      options |= {'do_sample': True, 'temperature': temperature}
      options |= {'top_k': 0, 'top_p': top_p}  # no more than that
    else:
      options['do_sample'] = False
    torch.manual_seed(seed)
    self._passes = 0
    ids = torch.tensor(prompts)
    text = self._target.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=count,
      **options,
    )
    return text[:, ids.shape[1] :].tolist(), self._passes

  def _count(self, *_):
    self._passes += 1


def _load(folder, dtype):
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
  # Nothing ends a text early, here as with the others.
  model.generation_config.eos_token_id = None
  model.generation_config.pad_token_id = 0
  return model.eval()

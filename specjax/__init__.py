"""Speculative decoding in JAX: exact decoding, and drafts distilled for it.

This list is the public interface.
"""

from specjax import drafters as _drafters
from specjax.candidates import CandidateTree
from specjax.decode import DecodeState, Round, Stats, advance, prefill, step
from specjax.draft_length import FIXED, Adaptive, Confidence, Fallback, ladder
from specjax.generation import Result, generate, pack
from specjax.heads import HeadsDrafter
from specjax.models.markov import Markov
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import (
  Batch,
  Block,
  Draft,
  Drafter,
  DraftLength,
  Keys,
  LanguageModel,
  Limit,
  Noise,
  Output,
  Seen,
  Trainable,
  Verdict,
  Verifier,
  Warp,
  pytree,
)
from specjax.verify import (
  block,
  k_seq,
  rejection,
  sampler_match,
  traversal,
)
from specjax.warps import Greedy, MinP, Temperature, TopK, TopP, compose

__version__ = '0.1.0'

# Read when they are asked for, so that each file can be left out.
_DRAFTERS = {
  'Committee': 'committee',
  'CoupledDrafter': 'coupled',
  'Eagle': 'eagle',
  'EagleTree': 'eagle',
  'EarlyExit': 'early_exit',
  'Mixture': 'mixture',
  'ModelDrafter': 'model',
  'NGram': 'ngram',
  'NoDrafter': 'none',
  'TreeDrafter': 'tree',
}


def __getattr__(name):
  if _DRAFTERS.get(name) in _drafters.names():
    return getattr(_drafters.find(_DRAFTERS[name]), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return [*globals(), *_DRAFTERS]


__all__ = [
  'Adaptive',
  'advance',
  'Batch',
  'Block',
  'block',
  'CandidateTree',
  'Committee',
  'compose',
  'Confidence',
  'CoupledDrafter',
  'DecodeState',
  'Draft',
  'Drafter',
  'DraftLength',
  'Eagle',
  'EagleTree',
  'EarlyExit',
  'Fallback',
  'FIXED',
  'generate',
  'Greedy',
  'HeadsDrafter',
  'k_seq',
  'Keys',
  'ladder',
  'LanguageModel',
  'Limit',
  'Markov',
  'MinP',
  'Mixture',
  'ModelDrafter',
  'NGram',
  'NoDrafter',
  'Noise',
  'Output',
  'pack',
  'prefill',
  'pytree',
  'rejection',
  'Result',
  'Round',
  'sampler_match',
  'Seen',
  'Stats',
  'step',
  'Temperature',
  'TopK',
  'TopP',
  'Trainable',
  'Transformer',
  'TransformerConfig',
  'traversal',
  'TreeDrafter',
  'Verdict',
  'Verifier',
  'Warp',
]

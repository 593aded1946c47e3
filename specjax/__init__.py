"""Speculative decoding in JAX: exact decoding, and drafts distilled for it.

This list is the public interface.
"""

from specjax.candidates import CandidateTree
from specjax.decode import DecodeState, Round, Stats, advance, prefill, step
from specjax.draft_length import FIXED, Adaptive, Confidence, Fallback, ladder
from specjax.drafters.committee import Committee
from specjax.drafters.coupled import CoupledDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGram
from specjax.drafters.none import NoDrafter
from specjax.drafters.tree import TreeDrafter
from specjax.generation import Result, generate
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

__all__ = [
  'Batch',
  'Block',
  'CandidateTree',
  'Committee',
  'CoupledDrafter',
  'DecodeState',
  'Draft',
  'Drafter',
  'Greedy',
  'HeadsDrafter',
  'Keys',
  'LanguageModel',
  'Markov',
  'MinP',
  'ModelDrafter',
  'NGram',
  'NoDrafter',
  'Noise',
  'Output',
  'Result',
  'Round',
  'Stats',
  'Temperature',
  'TopK',
  'TopP',
  'Trainable',
  'Transformer',
  'TransformerConfig',
  'TreeDrafter',
  'Verdict',
  'Verifier',
  'Warp',
  'advance',
  'block',
  'compose',
  'generate',
  'k_seq',
  'prefill',
  'pytree',
  'rejection',
  'sampler_match',
  'step',
  'traversal',
  'FIXED',
  'Adaptive',
  'Confidence',
  'Fallback',
  'ladder',
  'DraftLength',
  'Limit',
  'Seen',
]

"""What the values of a configuration must be, checked before anything is done.

A configuration page says what is there and of which type; this says which
values make sense, so that a mistake costs a line and not a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from specjax import (
  corpora,
  draft_length,
  drafters,
  losses,
  products,
  runs,
  sources,
  tokenizers,
  verify,
)
from specjax.models.transformer import TransformerConfig
from specjax.types import Drafter

# The least value of what counts something, by the last part of its name.
_LEAST = {
  'accumulate': 1,
  'batch': 1,
  'batches': 1,
  'controlled_k': 1,
  'eval_every': 1,
  'eval_windows': 1,
  'fsdp': 1,
  'heads': 1,
  'hidden': 1,
  'k': 0,
  'ks': 1,
  'kv_heads': 1,
  'layers': 1,
  'lookahead': 0,
  'max_new_tokens': 1,
  'others': 1,
  'patience': 0,
  'prompt_length': 1,
  'prompts': 1,
  'refresh': 1,
  'repeats': 1,
  'seed': 0,
  'seeds': 1,
  'sequences': 1,
  'steps': 1,
  'tensor': 1,
  'timed_prompts': 0,
  'together': 1,
  'tokens': 1,
  'unroll': 1,
  'warmup': 0,
  'vocab_size': 0,
  'width': 1,
  'window': 2,
}
_POSITIVE = 'clip', 'learning_rate'
_NOT_NEGATIVE = (
  'betas',
  'eta',
  'horizon_decay',
  'temperature',
  'temperatures',
  'weight_decay',
)
# Of the target, but no sizes of it.
_ADOPTED = (
  'path',
  'tokenizer_path',
  'document_start',
  'document_end',
  'sha256',
)
_MAY_BE_EMPTY = (
  'controllers',
  'betas',
  'contrastive_arms',
  'taps',
  'target_layers',
)
_WEIGHTS = ('kl_weight',)  # which may be infinite


def check(config: Mapping[str, Any]) -> None:
  """Refuses values that no command could use.

  Args:
    config: the sections of a page, plain values.

  Raises:
    ValueError: naming the value and what it must be.
  """
  values = (runs.leaves(name, section) for name, section in config.items())
  for path, value in itertools.chain.from_iterable(values):
    name = path.rpartition('.')[-1]
    if (
      isinstance(value, list | tuple)
      and not value
      and name not in _MAY_BE_EMPTY
    ):
      raise ValueError(f'{path} is empty: give at least one value')
    for one in value if isinstance(value, list | tuple) else [value]:
      wanted = _wanted(name, one)
      if wanted:
        raise ValueError(f'{path} is {one}: it must be {wanted}')
  for section in ('pretrain', 'distill'):
    if config.get(section):
      _check_training(section, config[section])
  dtype = config.get('target', {}).get('dtype', 'float32')
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(
      f"target.dtype is {dtype!r}: it must be 'float32' or 'bfloat16'"
    )
  if 'target' in config and not config['target']['path']:
    if 'width' not in config['target']:
      raise ValueError('target.path is empty, and target has no sizes either')
    TransformerConfig(vocab_size=2, **sizes(config['target']))
  if config.get('corpus', {}).get('name') == corpora.NONE:
    _check_without_text(config)
  unroll = 1
  if 'draft' in config:
    k = config['decode']['k'] if 'decode' in config else 1
    drafter = _build(config['draft'], k, config.get('target'))
    unroll = getattr(drafter, 'unroll', 1)
    horizons = max(unroll, len(getattr(drafter, 'heads', ())))
    lookahead = config.get('loss', {}).get('lookahead', 0)
    if lookahead and horizons > 1:
      raise ValueError(
        f'loss.lookahead is {lookahead} and draft.drafter'
        f' {config["draft"]["drafter"]!r} has {horizons} horizons: a lookahead'
        ' is along a text, for one horizon; set it to 0'
      )
    count = config['draft'].get('vocab_size', 0)
    corpus = config.get('corpus', {})
    if config.get('target', {}).get('path'):
      corpus = {}  # whose tokenizer is not used
    most = corpus.get('vocab_size', count)
    if corpus.get('tokenizer') == 'bytes':
      most = tokenizers.Bytes().vocab_size
    if count > most:
      raise ValueError(
        f'draft.vocab_size is {count}: the tokenizer of corpus.tokenizer has'
        f' {most} tokens'
      )
    for name in ('path', 'target_layers'):
      if config['draft'].get(name):
        require_language_model(
          config['draft'], f'which begins as no model: leave draft.{name} empty'
        )
    layers = config['draft'].get('target_layers') or (0,)
    if not all(isinstance(n, int) and n >= 0 for n in layers):
      raise ValueError(
        f'draft.target_layers is {layers}: it takes numbers from 0'
      )
    if config['draft'].get('path') and config['draft'].get('target_layers'):
      raise ValueError(
        'draft.path and draft.target_layers both say what the draft begins as:'
        ' leave one empty'
      )
  if 'data' in config:
    _check_data(config)
  if 'loss' in config and config['loss']['lookahead']:
    _check_lookahead(config['loss'])
  if 'decode' in config and 'validation' in config:
    k, tokens = config['decode']['k'], config['validation']['tokens']
    if k > tokens:
      raise ValueError(
        f'decode.k is {k}: drafts are measured on texts of validation.tokens,'
        f' which is {tokens}, and must fit in'
      )
    window = config['corpus']['window'] if 'corpus' in config else unroll
    most = min(window, config['validation']['prompt_length'] + tokens)
    if unroll > most:
      raise ValueError(
        f'draft.eagle.unroll is {unroll}: texts of corpus.window, and of'
        f' validation.prompt_length + validation.tokens, are {most} long'
      )
  if 'draft_sizes' in config:
    _check_sizes(config['draft_sizes'], config['draft']['model'])
  if 'loss' in config:
    losses.find(config['loss']['divergence'])
  if 'decode' in config:
    _check_draft_lengths(config)
    verify.find(config['decode']['verify'])


def _check_data(config: Mapping[str, Any]) -> None:
  """Refuses shares that are none, and text that cannot be written."""
  wanted = config['data']
  shares = {f'data.{name}': wanted[name] for name in sources.CORPUS_ONLY}
  for path, share in shares.items():
    if not 0 <= share < math.inf:
      raise ValueError(f'{path} is {share}: it must be 0 or positive')
  total = sum(shares.values())
  if not math.isclose(total, 1, abs_tol=1e-6):
    raise ValueError(
      f'{", ".join(shares)} sum to {total:g}: they are shares of the rows of a'
      ' batch, and must sum to 1'
    )
  size, new = wanted['prompt_length'], wanted['tokens']
  window = config['corpus']['window']
  if shares['data.corpus'] < 1 and size + new > window:
    raise ValueError(
      f'data.prompt_length + data.tokens is {size} + {new}: it must fit in'
      f' corpus.window, which is {window}'
    )
  if wanted['draft']:
    require_language_model(
      config['draft'], 'which writes no text alone: data.draft must be 0'
    )


def require_language_model(draft: Mapping[str, Any], why: str) -> None:
  """Refuses a drafter that has no law without the target.

  Args:
    draft: the section of a page.
    why: what follows "draft.drafter is ...," in the message.

  Raises:
    ValueError: it is no draft model.
  """
  if not hasattr(_build(draft, 1), 'model'):
    raise ValueError(f'draft.drafter is {draft["drafter"]!r}, {why}')


def begins_alike(config: Mapping[str, Any]) -> bool:
  """Whether drafts of all seeds begin with the same weights.

  Args:
    config: the sections of a page.
  """
  if config['draft'].get('target_layers') or config['draft'].get('path'):
    return True
  build = _builder(config['draft'], config['decode']['k'], config['target'])
  one, other = (jax.tree.leaves(build(seed)) for seed in (0, 1))
  return all(map(np.array_equal, one, other))


def _build(
  draft: Mapping[str, Any], k: int, target: Mapping[str, Any] | None = None
) -> Drafter:
  """The shapes of a drafter; refuses what makes none."""
  build, count = _builder(draft, k, target), draft.get('vocab_size', 0)
  drafter = jax.eval_shape(lambda: build(0))
  if count and not getattr(drafter, 'vocabulary', ()):
    raise ValueError(
      f'draft.vocab_size is {count}, and draft.drafter {draft["drafter"]!r}'
      ' drafts of the whole vocabulary: it must be 0'
    )
  return drafter


def _builder(
  draft: Mapping[str, Any], k: int, target: Mapping[str, Any] | None
) -> Callable[[int], Drafter]:
  """Makes a drafter from a seed.

  Where the target is not described, as one from a file is not, it is one that
  most drafts fit; what does not fit the real one is refused with it.
  """
  build = drafters.find(draft['drafter']).build
  wanted = TransformerConfig(
    2, width=768, layers=48, heads=12, kv_heads=12, hidden=768, head_dim=64
  )
  if target and not target['path']:
    wanted = TransformerConfig(vocab_size=2, **sizes(target))
  vocabulary = range(draft.get('vocab_size', 0))
  config = {**draft, 'k': k, 'vocabulary': vocabulary}
  return lambda seed: build(config, wanted, nnx.Rngs(seed))


def _check_training(section: str, training: Mapping[str, Any]) -> None:
  """Refuses a training that could not be done."""
  if training['warmup'] >= training['steps']:
    raise ValueError(
      f'{section}.warmup is {training["warmup"]}: it must be less than'
      f' {section}.steps, which is {training["steps"]}'
    )
  if training['batch'] % training['accumulate']:
    raise ValueError(
      f'{section}.batch is {training["batch"]}: it must be a multiple of'
      f' {section}.accumulate, which is {training["accumulate"]}'
    )
  if training['dtype'] not in products.DTYPES:
    raise ValueError(
      f'{section}.dtype is {training["dtype"]!r}: use'
      f' {" or ".join(products.DTYPES)}'
    )


def sizes(target: Mapping[str, Any]) -> dict[str, Any]:
  """The section `target` without what says where else it comes from."""
  return {key: value for key, value in target.items() if key not in _ADOPTED}


def _check_without_text(config: Mapping[str, Any]) -> None:
  """Refuses to train on text, or to ask for prompts of it, where none is."""
  none = f'corpus.name is {corpora.NONE!r}'
  if not config['target']['path']:
    raise ValueError(
      f'{none}: a target cannot be trained on that, name one with target.path'
    )
  if config['data']['corpus']:
    raise ValueError(
      f'{none}: data.corpus must be 0, and data.target or data.draft the rest'
    )


def _check_lookahead(loss: Mapping[str, Any]) -> None:
  """Refuses a lookahead along what is no log-probability of passing."""
  name = loss['divergence']
  if name in losses.DIVERGENCES and name != 'neg_log_acceptance':
    raise ValueError(
      f'loss.lookahead is {loss["lookahead"]} and loss.divergence {name!r}: a'
      " lookahead is for 'neg_log_acceptance'"
    )


def _check_draft_lengths(config: Mapping[str, Any]) -> None:
  """Refuses controllers that there are not, and what they cannot have."""
  decode, speedup = config['decode'], config.get('speedup', {})
  name = decode['draft_length']
  for known in (name, *speedup.get('controllers', ())):
    draft_length.find(known, 1, lambda k: 1.0)
  if name != 'fixed' and decode['k'] < 1:
    raise ValueError(
      f'decode.draft_length is {name!r} and decode.k, the longest draft,'
      f' {decode["k"]}: it must be 1 or more'
    )
  if 'fixed' in speedup.get('controllers', ()):
    raise ValueError(
      "speedup.controllers has 'fixed': speedup.ks are the fixed lengths"
    )


def _check_sizes(columns: Mapping[str, Any], base: Mapping[str, Any]) -> None:
  """Refuses sizes of drafts that are no models, or share a folder."""
  lengths = {name: len(column) for name, column in columns.items()}
  if len(set(lengths.values())) > 1:
    counts = ', '.join(f'{name} {count}' for name, count in lengths.items())
    raise ValueError(
      f'draft_sizes has columns of different lengths ({counts}): each draft'
      ' needs a value in each'
    )
  for row in zip(*columns.values(), strict=True):
    sizes = {**base, **dict(zip(columns, row, strict=True))}
    sizes.pop('learning_rate', None)  # which is no size
    try:
      TransformerConfig(vocab_size=2, **sizes)
    except ValueError as error:
      raise ValueError(f'draft_sizes: {error}') from error
  names = list(zip(columns['width'], columns['layers'], strict=True))
  for width, layers in names:
    if names.count((width, layers)) > 1:
      raise ValueError(
        f'draft_sizes has two drafts of width {width} and {layers} layers: one'
        ' of the two must differ'
      )


def _wanted(name: str, value: Any) -> str | None:
  """What a value should be, if it is not that."""
  if name in _LEAST and not value >= _LEAST[name]:
    return f'{_LEAST[name]} or more'
  if name in _LEAST and value >= 2**31:
    return 'less than 2147483648'
  if name in _POSITIVE and not 0 < value < math.inf:
    return 'positive'
  if name in _NOT_NEGATIVE and not 0 <= value < math.inf:
    return '0 or positive'
  if name == 'beta' and not 0 < value < 1:
    return 'inside (0, 1): at its ends the divergence is 0'
  if name in _WEIGHTS and not value >= 0:
    return '0 or more; inf is the divergence alone'
  return None

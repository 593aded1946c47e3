"""Checkpoints in the layout of Hugging Face: config.json and safetensors.

Llama 1 to 3, SmolLM2, TinyLlama, Mistral, Qwen2, Qwen2.5 and Qwen3: whatever
says that it is one of `ARCHITECTURES`. Weights that are pickled are never read,
since that runs what is in them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax import extras, files, runs, tokenizers
from specjax.models import card, tensors
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.tokenizers import Pretrained, Tokenizer

Path = pathlib.Path

# What each has beyond Llama.
ARCHITECTURES = {
  'LlamaForCausalLM': {},
  'MistralForCausalLM': {},
  'Qwen2ForCausalLM': {'qkv_bias': True},
  'Qwen3ForCausalLM': {'qk_norm': True},
}
# Values that would make another model of it; what is absent has the first.
_ONLY = {
  'hidden_act': ('silu', 'swish'),
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'partial_rotary_factor': (1.0, 1),
  'quantization_config': (None,),
}
_OURS = {'exported_by': 'specjax'}  # in the config.json of what is saved here
_READ_BESIDE = (
  'tokenizer.json',
  'tokenizer_config.json',
  'chat_template.jinja',
  'generation_config.json',
)
_DESCRIBED = '*.json', '*.jinja', 'README.md'  # of a model, but its weights
_WEIGHTS = ('*.safetensors',)
_SLIDING = 'sliding_attention'  # what a layer with a window is called
_FILES = '.gguf', '.bin', '.safetensors'
_HUB_NAME = re.compile(r'[\w.-]+/[\w.-]+(@[\w./-]+)?')


def is_hub_name(path: str) -> bool:
  """Whether a path that is not there may be a model's name on the hub."""
  file = path.startswith('.') or Path(path).suffix in _FILES
  return not (file or Path(path).exists()) and bool(_HUB_NAME.fullmatch(path))


def fetch(name: str, weights: bool = True) -> Path:
  """Downloads a model from the hub, unless it was before.

  Args:
    name: 'owner/model', or 'owner/model@revision'.
    weights: whether they come too, and not only what describes the model.

  Returns:
    The folder, in the hub's own cache.

  Raises:
    ImportError: `huggingface_hub` is not installed.
    FileNotFoundError: it cannot be had.
  """
  hub = extras.require('huggingface_hub', 'hf')
  repository, _, revision = name.partition('@')
  try:
    return Path(
      hub.snapshot_download(
        repository,
        revision=revision or None,
        allow_patterns=[*_DESCRIBED, *(_WEIGHTS if weights else ())],
        ignore_patterns=('*/*', 'consolidated*'),  # the same weights again
      )
    )
  except Exception as error:  # the library raises those of its own network too
    reason = str(error).strip().partition('\n')[0]
    raise FileNotFoundError(
      f'there is no folder {name}, and it cannot be fetched from the hub'
      f' ({type(error).__name__}: {reason})'
    ) from error


def read_config(
  path: str | os.PathLike, dtype: str = 'float32'
) -> TransformerConfig:
  """Reads the sizes of a model.

  Args:
    path: its folder.
    dtype: of the weights; see `TransformerConfig`.

  Raises:
    FileNotFoundError: there is no config.json.
    ValueError: it is of another architecture, or has something of its own.
  """
  file = Path(path) / 'config.json'
  c = runs.read_json(file)
  names = c.get('architectures') or ['none']
  if names[0] not in ARCHITECTURES:
    raise ValueError(
      f'{file} is of the architecture {names[0]}: known are'
      f' {", ".join(ARCHITECTURES)}'
    )
  rope = {**(c.get('rope_scaling') or {}), **(c.get('rope_parameters') or {})}
  for name, allowed in _ONLY.items():
    value = {**rope, **c}.get(name, allowed[0])
    if value not in allowed:
      raise ValueError(
        f'{file} has {name} {value!r}: only {allowed[0]!r} is known'
      )
  try:
    return TransformerConfig(
      vocab_size=c['vocab_size'],
      width=c['hidden_size'],
      layers=c['num_hidden_layers'],
      heads=c['num_attention_heads'],
      kv_heads=c.get('num_key_value_heads') or c['num_attention_heads'],
      hidden=c['intermediate_size'],
      head_dim=c.get('head_dim'),
      rope_theta=float(rope.get('rope_theta') or c.get('rope_theta') or 1e4),
      **_stretched(rope, c),
      **ARCHITECTURES[names[0]],
      attention_window=_window(names[0], c),
      tied=c.get('tie_word_embeddings', False),
      dtype=dtype,
      norm_eps=c.get('rms_norm_eps', 1e-6),
      positions=c.get('max_position_embeddings'),
    )
  except KeyError as error:
    raise ValueError(f'{file} does not say {error.args[0]}') from error
  except ValueError as error:
    raise ValueError(f'{file}: {error}') from error


def load(
  path: str | os.PathLike, dtype: str = 'float32', vocab_size: int | None = None
) -> Transformer:
  """Reads a model.

  Args:
    path: its folder.
    dtype: of the weights; see `TransformerConfig`.
    vocab_size: ids that its tokenizer has. What the embedding has behind them
      is padding, which no text has and none should: it is left out.

  Raises:
    FileNotFoundError: there are no safetensors.
    ImportError: `safetensors` is not installed.
    ValueError: it is not the model that its config.json describes, or its
      tokenizer has more ids than it.
  """
  path = Path(path)
  config = read_config(path, dtype)
  with contextlib.ExitStack() as stack:
    open_file = extras.require('safetensors', 'hf').safe_open
    holders = {}
    for file in weight_files(path):
      try:
        holder = stack.enter_context(open_file(file, framework='numpy'))
      except Exception as error:  # an exception of the library's own
        raise ValueError(f'{file} is not whole: {error}') from error
      holders |= dict.fromkeys(holder.keys(), holder)
    shapes = {
      name: tuple(holder.get_slice(name).get_shape())
      for name, holder in holders.items()
      if not _is_derived(name, config)
    }
    tensors.check(config, shapes, f'{path}')
    return tensors.join(
      config,
      lambda name: holders[name].get_tensor(name),
      vocab_size=vocab_size,
    )


def weight_files(path: str | os.PathLike) -> list[Path]:
  """The files that hold a model's weights.

  Raises:
    FileNotFoundError: there are none, or some of them are missing.
  """
  path = Path(path)
  index = path / 'model.safetensors.index.json'
  if index.exists():
    names = sorted({*runs.read_json(index)['weight_map'].values()})
  else:
    names = ['model.safetensors']
  missing = [name for name in names if not (path / name).is_file()]
  if missing:
    pickled = ' (pickled weights are not read)' if _pickled(path) else ''
    ggufs = sorted(file.name for file in path.glob('*.gguf'))
    if ggufs:
      pickled += f', or name one file there: {", ".join(ggufs)}'
    raise FileNotFoundError(
      f'{path} has no {", ".join(missing)}: weights must be safetensors'
      + pickled
    )
  return [path / name for name in names]


def load_tokenizer(
  path: str | os.PathLike, start: str | None = None, end: str = ''
) -> Pretrained:
  """Reads the tokenizer of a model.

  Args:
    path: its folder.
    start: what stands before a document; see `tokenizers.Pretrained`.
    end: the token that ends one; empty is what the model's files say.

  Raises:
    FileNotFoundError: there is no tokenizer.json.
    ValueError: it cannot be read, or does not say what ends a text.
  """
  path = Path(path)
  file = path / 'tokenizer.json'
  if not file.is_file():
    raise FileNotFoundError(
      f'{path} has no tokenizer.json: save it once with'
      ' `AutoTokenizer.from_pretrained(...).save_pretrained(...)`'
    )
  model = runs.read_json(file)
  said = _json_if_there(path / 'tokenizer_config.json')
  special = {
    name: value['content'] if isinstance(value, dict) else value
    for name, value in said.items()
    if name in ('bos_token', 'eos_token') and value
  }
  template = said.get('chat_template')
  if isinstance(template, list):  # several, by name
    named = {one['name']: one['template'] for one in template}
    template = named.get('default')
  beside = path / 'chat_template.jinja'
  if beside.is_file():
    template = beside.read_text()
  ends = [end] if end else _ends(path, model, special.get('eos_token'))
  try:
    return Pretrained(
      json.dumps(model),
      end=ends,
      start=start,
      template=template,
      names=special,
    )
  except ValueError as error:
    raise ValueError(f'{file}: {error}') from error


def licence(path: str | os.PathLike) -> str:
  """What the card of a model says that its licence is."""
  file = Path(path) / 'README.md'
  return card.licence(file.read_text()) if file.is_file() else card.UNKNOWN


def save(
  model: Transformer,
  path: str | os.PathLike,
  tokenizer: Tokenizer,
  vocab_size: int | None = None,
) -> None:
  """Writes a model that `transformers` and what reads its layout can load.

  Args:
    model: the model.
    path: its folder, made if need be.
    tokenizer: its tokenizer.
    vocab_size: rows of its embedding, where its target's was padded; None is
      no padding. Servers compare the two. Such rows are zeros, so their logit
      is 0; what is drafted of them is refused.

  Raises:
    ImportError: `safetensors` is not installed.
    ValueError: its tokenizer has no form that others read.
  """
  path, c = Path(path), model.config
  numpy = extras.require('safetensors.numpy', 'hf')
  spelt, settings = tokenizers.portable(tokenizer)
  padding = max((vocab_size or 0) - c.vocab_size, 0)
  ends = {
    'eos_token_id': tokenizer.end_ids,
    'bos_token_id': (tokenizer.start or [None])[0],
  }
  config = {**describe(c, padding), **ends, **_OURS}
  path.mkdir(parents=True, exist_ok=True)
  weights = {}
  for name, array in tensors.split(model):
    if name in tensors.OF_VOCABULARY:
      array = np.pad(array, ((0, padding), (0, 0)))
    weights[name] = array
  with files.atomic(path / 'model.safetensors') as file:
    file.write(numpy.save(weights, {'format': 'pt'}))
  runs.write_json(path / 'config.json', config)
  runs.write_json(path / 'generation_config.json', ends)
  runs.write_json(path / 'tokenizer.json', spelt)
  runs.write_json(path / 'tokenizer_config.json', settings)


def is_ours(path: str | os.PathLike) -> bool:
  """Whether `save` wrote a folder, which then may be written again."""
  return _OURS.items() <= _json_if_there(Path(path) / 'config.json').items()


def content_hash(path: str | os.PathLike) -> str:
  """SHA-256 of what a model is made of, its tokenizer and template included."""
  path = Path(path)
  others = (path / name for name in _READ_BESIDE)
  every = [path / 'config.json', *weight_files(path)]
  every += [file for file in others if file.exists()]
  named = ''.join(f'{file.name} {files.sha256(file)}\n' for file in every)
  return hashlib.sha256(named.encode()).hexdigest()


def describe(c: TransformerConfig, padding: int = 0) -> dict[str, Any]:
  """A configuration in the words of Hugging Face.

  Args:
    c: the sizes.
    padding: rows more that the embedding shall have.

  Raises:
    ValueError: no architecture has what the model has.
  """
  own = {'qkv_bias': c.qkv_bias, 'qk_norm': c.qk_norm}
  own = {key: value for key, value in own.items() if value}
  if own not in ARCHITECTURES.values():
    raise ValueError(
      'no architecture of Hugging Face has both biases of queries and normed'
      ' heads'
    )
  names = [name for name, has in ARCHITECTURES.items() if has == own]
  name = names[-1 if c.attention_window else 0]  # Mistral behind Llama
  window = {'sliding_window': c.attention_window}
  if own:
    layers = 0 if c.attention_window else c.layers
    window |= {'use_sliding_window': layers == 0, 'max_window_layers': layers}
  rope = {'rope_type': 'default', 'rope_theta': c.rope_theta}
  if c.rope_band:
    rope |= {
      'rope_type': 'llama3',
      'factor': c.rope_factor,
      'low_freq_factor': c.rope_band[0],
      'high_freq_factor': c.rope_band[1],
      'original_max_position_embeddings': c.rope_context,
    }
  elif c.rope_factor != 1:
    rope |= {'rope_type': 'linear', 'factor': c.rope_factor}
  # Readers of before `rope_parameters` want these two.
  scaling = rope if rope['rope_type'] != 'default' else None
  return {
    'architectures': [name],
    'model_type': name.removesuffix('ForCausalLM').lower(),
    'vocab_size': c.vocab_size + padding,
    'hidden_size': c.width,
    'num_hidden_layers': c.layers,
    'num_attention_heads': c.heads,
    'num_key_value_heads': c.kv_heads,
    'intermediate_size': c.hidden,
    'head_dim': c.head_size,
    'hidden_act': 'silu',
    'max_position_embeddings': c.positions or tensors.POSITIONS,
    'rope_parameters': rope,
    'rope_theta': c.rope_theta,
    'rope_scaling': scaling,
    **window,
    'rms_norm_eps': c.norm_eps,
    'tie_word_embeddings': c.tied,
    'torch_dtype': c.dtype,
  }


def _stretched(rope: Mapping[str, Any], c: Mapping[str, Any]) -> dict[str, Any]:
  """What a configuration says of longer contexts."""
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  if kind == 'default':
    return {}
  if kind == 'linear':
    return {'rope_factor': float(rope['factor'])}
  if kind == 'llama3':
    return {
      'rope_factor': float(rope['factor']),
      'rope_band': (rope['low_freq_factor'], rope['high_freq_factor']),
      'rope_context': rope['original_max_position_embeddings'],
    }
  raise ValueError(
    f"rope_type is {kind!r}: 'default', 'linear' and 'llama3' are known"
  )


def _window(name: str, c: Mapping[str, Any]) -> int | None:
  """The attention window of an architecture, if all layers have it."""
  if name == 'LlamaForCausalLM':
    return None  # which looks at no such value
  window, layers = c.get('sliding_window', 4096), c['num_hidden_layers']
  if name != 'MistralForCausalLM' and not c.get('use_sliding_window', False):
    return None
  first = 0 if name == 'MistralForCausalLM' else c.get('max_window_layers', 28)
  kinds = [_SLIDING if i >= first else 'full' for i in range(layers)]
  kinds = c.get('layer_types') or kinds
  if not window or _SLIDING not in kinds:
    return None
  if set(kinds) != {_SLIDING}:
    raise ValueError(
      f'some layers have a window of {window} and others none, which is not'
      ' known'
    )
  return window


def _ends(path: Path, model: Mapping[str, Any], eos: str | None) -> list[str]:
  """Tokens that end a text, that of the tokenizer first."""
  ids = []
  for name in ('generation_config.json', 'config.json'):
    found = _json_if_there(path / name).get('eos_token_id')
    ids += found if isinstance(found, list) else [found]
  by_id = {one['id']: one['content'] for one in model.get('added_tokens', ())}
  every = [eos, *(by_id.get(i) for i in ids)]
  return [*dict.fromkeys(token for token in every if token)]


def _json_if_there(path: Path) -> dict[str, Any]:
  return runs.read_json(path) if path.is_file() else {}


def _is_derived(name: str, config: TransformerConfig) -> bool:
  """Whether a tensor follows from what else there is."""
  return name.endswith('rotary_emb.inv_freq') or (
    config.tied and name == 'lm_head.weight'
  )


def _pickled(path: Path) -> bool:
  return any(next(path.glob(kind), None) for kind in ('*.bin', '*.pt', '*.pth'))

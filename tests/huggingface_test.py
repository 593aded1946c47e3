"""Checkpoints of Hugging Face against `transformers` itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generation, warps
from specjax.drafters.none import NoDrafter
from specjax.models import huggingface

transformers = pytest.importorskip('transformers', reason='no transformers')
torch = pytest.importorskip('torch', reason='no torch')

VOCAB, SEED = 80, 3
SIZES = {
  'vocab_size': VOCAB,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 256,
  'initializer_range': 0.2,  # so that no two logits are near one another
  'bos_token_id': None,
  'eos_token_id': None,
}
LLAMA3 = {
  'rope_type': 'llama3',
  'rope_theta': 500.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
LINEAR = {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 4.0}
# By name: the class of the configuration and what is its own.
FAMILIES = {
  'llama': ('LlamaConfig', {}),
  'llama-linear': ('LlamaConfig', {'rope_parameters': LINEAR}),
  'llama3': (
    'LlamaConfig',
    {'rope_parameters': LLAMA3, 'tie_word_embeddings': True},
  ),
  'mistral': ('MistralConfig', {'sliding_window': 8, 'head_dim': 12}),
  'qwen2': ('Qwen2Config', {'tie_word_embeddings': True}),
  'qwen2-window': (
    'Qwen2Config',
    {'use_sliding_window': True, 'sliding_window': 8, 'max_window_layers': 0},
  ),
  'qwen3': ('Qwen3Config', {'head_dim': 16}),
}


def made(family, folder, **save):
  """A random model of a family, and where it was saved."""
  kind, own = FAMILIES[family]
  torch.manual_seed(SEED)
  config = getattr(transformers, kind)(**{**SIZES, **own})
  model = transformers.AutoModelForCausalLM.from_config(config)
  for name, parameter in model.named_parameters():
    if 'norm' in name or name.endswith('bias'):  # else ones and zeros
      torch.nn.init.normal_(parameter, 1.0 if 'norm' in name else 0.0, 0.3)
  model.save_pretrained(folder, **save)
  return model.eval()


def logits(model, ids):
  tokens = jnp.asarray(ids)
  output = model.forward(tokens, jnp.zeros_like(tokens))
  return np.asarray(model.unembed(output.features))


def greedy(model, prompt, count):
  return generation.generate(
    model,
    NoDrafter(),
    [prompt],
    key=jax.random.key(0),
    max_new_tokens=count,
    warp=warps.temperature(0.0),
  ).new_tokens()[0]


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_and_greedy_text_are_those_of_transformers(family, tmp_path):
  theirs = made(family, tmp_path)
  ours = huggingface.load(tmp_path)
  ids = np.random.default_rng(0).integers(0, VOCAB, (2, 48))
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids)).logits.numpy()
  assert np.abs(wanted).max() > 0.5
  np.testing.assert_allclose(logits(ours, ids), wanted, atol=1e-3, rtol=0)
  prompt = ids[:1, :20]
  text = theirs.generate(
    torch.tensor(prompt), max_new_tokens=64, do_sample=False
  )
  assert greedy(ours, prompt[0].tolist(), 64) == text[0, 20:].tolist()


@pytest.mark.parametrize(
  'family,field,value',
  [
    ('llama-linear', 'rope_factor', 1.0),
    ('llama3', 'rope_band', None),
    ('mistral', 'attention_window', 9),
    ('qwen3', 'rope_theta', 1e3),
  ],
)
def test_what_a_family_has_of_its_own_is_seen(family, field, value, tmp_path):
  # The negative twin: without it the logits are others.
  import dataclasses

  theirs = made(family, tmp_path)
  ours = huggingface.load(tmp_path)
  assert getattr(ours.config, field) != value
  other = dataclasses.replace(ours.config, **{field: value})
  ours.config = other
  for layer in ours.layers:
    layer.config = other
  ids = np.random.default_rng(0).integers(0, VOCAB, (1, 48))
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids)).logits.numpy()
  assert np.abs(logits(ours, ids) - wanted).max() > 1e-2

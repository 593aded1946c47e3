"""Checkpoints of Hugging Face against `transformers` itself."""

import dataclasses
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import tokenizers
from specjax.models import huggingface, tensors

safetensors = pytest.importorskip('safetensors', reason='no safetensors')
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
  """A random model of a family, saved, to compute with in float64."""
  kind, own = FAMILIES[family]
  torch.manual_seed(SEED)
  config = getattr(transformers, kind)(**{**SIZES, **own})
  model = transformers.AutoModelForCausalLM.from_config(config)
  for name, parameter in model.named_parameters():
    if 'norm' in name or name.endswith('bias'):  # else ones and zeros
      torch.nn.init.normal_(parameter, 1.0 if 'norm' in name else 0.0, 0.3)
  model.save_pretrained(folder, **save)
  # What float32 comes to is decided by the machine: fused attention of PyTorch
  # was seen to be off by 5e-3 of a real model's logits on one of three.
  return model.double().eval()


def logits(model, ids):
  tokens = jnp.asarray(ids)
  output = model.forward(tokens, jnp.zeros_like(tokens))
  return np.asarray(model.unembed(output.features))


@pytest.mark.parametrize('family', FAMILIES)
def test_logits_and_greedy_text_are_those_of_transformers(family, tmp_path):
  theirs = made(family, tmp_path)
  ours = huggingface.load(tmp_path)
  ids = np.random.default_rng(0).integers(0, VOCAB, (2, 48))
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids)).logits.numpy()
  assert np.abs(wanted).max() > 0.5
  np.testing.assert_allclose(logits(ours, ids), wanted, atol=1e-4, rtol=0)
  prompt = ids[:1, :20]
  text = theirs.generate(
    torch.tensor(prompt), max_new_tokens=64, do_sample=False
  )
  assert toys.greedy(ours, prompt[0].tolist(), 64) == text[0, 20:].tolist()


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


@pytest.mark.parametrize('family', FAMILIES)
def test_what_is_saved_loads_with_equal_logits(family, tmp_path):
  theirs = made(family, tmp_path / 'theirs')
  ours = huggingface.load(tmp_path / 'theirs')
  huggingface.save(ours, tmp_path / 'ours', tokenizers.Bytes())
  again = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'ours', dtype=torch.float64
  )
  ids = np.random.default_rng(0).integers(0, VOCAB, (1, 48))
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids)).logits.numpy()
    found = again.eval()(torch.tensor(ids)).logits.numpy()
  np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
  back = huggingface.load(tmp_path / 'ours')
  leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(back), strict=True)
  assert all((a == b).all() for a, b in leaves)


def test_shards_bfloat16_and_padding(tmp_path):
  theirs = made('llama', tmp_path / 'whole')
  theirs.to(torch.bfloat16).save_pretrained(
    tmp_path / 'parts', max_shard_size='20KB'
  )
  assert len(huggingface.weight_files(tmp_path / 'parts')) > 2
  ids = np.random.default_rng(0).integers(0, 70, (1, 40))
  again = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'parts', dtype=torch.float64
  )
  with torch.no_grad():
    wanted = again(torch.tensor(ids)).logits.numpy()
  ours = huggingface.load(tmp_path / 'parts', vocab_size=70)
  assert ours.config.vocab_size == 70 and ours.embedding.dtype == jnp.float32
  np.testing.assert_allclose(logits(ours, ids), wanted[..., :70], atol=1e-4)
  narrow = huggingface.load(tmp_path / 'parts', 'bfloat16')
  assert narrow.embedding.dtype == narrow.layers[0].qkv.dtype == jnp.bfloat16
  assert narrow.norm.dtype == jnp.float32
  huggingface.save(ours, tmp_path / 'padded', tokenizers.Bytes(), 80)
  found = huggingface.read_config(tmp_path / 'padded')
  assert found.vocab_size == 80 and found.positions == 256
  with pytest.raises(ValueError, match='has 81 ids and the model 80'):
    huggingface.load(tmp_path / 'parts', vocab_size=81)


def test_only_one_weight_is_held_beside_the_model(tmp_path, monkeypatch):
  made('llama', tmp_path)
  alive, most = [], 0
  join = tensors.join

  class Counted(np.ndarray):
    """Which can be watched, and is no buffer that JAX could take over."""

  def watched(config, read, **more):
    def counting(name):
      nonlocal most
      array = read(name).astype(np.float64).view(Counted)
      alive.append(weakref.ref(array))
      most = max(most, sum(ref() is not None for ref in alive))
      return array

    return join(config, counting, **more)

  monkeypatch.setattr(tensors, 'join', watched)
  huggingface.load(tmp_path)
  assert len(alive) == 30 and most == 3  # queries, keys and values


def edit(folder, **values):
  path = folder / 'config.json'
  config = json.loads(path.read_text())
  path.write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
  'values,message',
  [
    ({'architectures': ['GPT2LMHeadModel']}, 'architecture GPT2LMHeadModel'),
    ({'hidden_act': 'gelu'}, "hidden_act 'gelu'"),
    ({'attention_bias': True}, 'attention_bias True'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config'),
    ({'rope_parameters': {'rope_type': 'yarn'}}, "rope_type is 'yarn'"),
    (
      {'intermediate_size': 40},
      r'another shape: .*gate_proj.*, not \(40, 32\)',
    ),
    ({'num_hidden_layers': 4}, r'missing: model.layers.3.*and 1 more'),
    ({'num_hidden_layers': 2}, r'not known: model.layers.2'),
    (
      {'tie_word_embeddings': True, 'vocab_size': 81},
      'another shape: model.emb',
    ),
    ({'num_attention_heads': 5}, '5 heads cannot share 2 kv_heads'),
  ],
)
def test_what_is_not_known_is_one_clear_line(values, message, tmp_path):
  made('llama', tmp_path)
  edit(tmp_path, **values)
  with pytest.raises(ValueError, match=message) as caught:
    huggingface.load(tmp_path)
  assert str(tmp_path) in str(caught.value)


def test_files_that_are_not_there_or_not_whole(tmp_path):
  made('llama', tmp_path)
  weights = tmp_path / 'model.safetensors'
  whole = weights.read_bytes()
  weights.write_bytes(whole[:-7])
  with pytest.raises(ValueError, match='is not whole'):
    huggingface.load(tmp_path)
  weights.rename(tmp_path / 'pytorch_model.bin')
  with pytest.raises(FileNotFoundError, match='pickled weights are not read'):
    huggingface.load(tmp_path)
  (tmp_path / 'config.json').unlink()
  with pytest.raises(FileNotFoundError, match='config.json'):
    huggingface.load(tmp_path)

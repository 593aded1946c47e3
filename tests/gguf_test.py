"""GGUF: what is written is what was there."""

import dataclasses

import hf_files
import jax
import llama2c_files
import numpy as np
import pytest
import toys

from specjax import tokenizers
from specjax.models import gguf, tensors

pytest.importorskip('gguf', reason='no gguf')

LLAMA3 = {
  'rope_factor': 8.0,
  'rope_band': (1.0, 4.0),
  'rope_theta': 5e5,
  'head_dim': 16,
}
# By name: the architecture, and what is its own.
FAMILIES = {
  'llama': ('llama', {}),
  'untied': ('llama', {'tied': False, 'head_dim': 6, 'rope_theta': 5e4}),
  'linear': ('llama', {'rope_factor': 4.0}),
  'llama3': ('llama', LLAMA3),
  'qwen2': ('qwen2', {'qkv_bias': True}),
  'qwen3': ('qwen3', {'qk_norm': True, 'norm_eps': 1e-6}),
}


@pytest.mark.parametrize('family', FAMILIES)
def test_what_is_saved_loads_as_it_was(family, tmp_path):
  architecture, own = FAMILIES[family]
  model = toys.transformer(**own, positions=96)
  path = tmp_path / 'model.gguf'
  gguf.save(model, path)
  assert list(tmp_path.iterdir()) == [path]
  assert gguf.File(path).get('general.architecture') == architecture
  back = gguf.load(gguf.File(path))
  for key, value in dataclasses.asdict(model.config).items():
    if key == 'head_dim':  # the file always says it
      value = model.config.head_size
    found = getattr(back.config, key)
    assert found == (pytest.approx(value) if key == 'norm_eps' else value)
  jax.tree.map(np.testing.assert_array_equal, leaves(back), leaves(model))


def test_halved_weights_are_saved_as_such(tmp_path):
  model = toys.transformer().cast('bfloat16')
  path = tmp_path / 'model.gguf'
  gguf.save(model, path)
  back = gguf.load(gguf.File(path), 'bfloat16')
  jax.tree.map(np.testing.assert_array_equal, leaves(back), leaves(model))
  whole = tmp_path / 'whole.gguf'
  gguf.save(toys.transformer(), whole)
  assert path.stat().st_size < 0.7 * whole.stat().st_size


def leaves(model):
  return jax.tree.leaves(model)


def test_rows_of_a_head_are_paired_as_llama_cpp_pairs_them():
  rows = np.arange(2 * 6 * 3).reshape(12, 3)
  paired = tensors.pairs(rows, 6)
  # Of each head the rows 0, 3, 1, 4, 2, 5.
  order = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
  np.testing.assert_array_equal(paired, rows[order])
  np.testing.assert_array_equal(tensors.halves(paired, 6), rows)


@pytest.mark.parametrize(
  'changes',
  [{'attention_window': 8}, {'qkv_bias': True, 'qk_norm': True}],
)
def test_what_llama_cpp_has_no_architecture_for_is_refused(changes, tmp_path):
  with pytest.raises(ValueError, match='no architecture of llama.cpp'):
    gguf.save(toys.transformer(**changes), tmp_path / 'model.gguf')
  assert not list(tmp_path.iterdir())


QUANTISED = {'F16': 1e-2, 'BF16': 1e-1, 'Q8_0': 0.1, 'Q4_0': 2.0, 'Q4_1': 1.0}


def writer_of(path, kind='llama'):
  library = pytest.importorskip('gguf')
  return library, library.GGUFWriter(path, kind)


def close(writer):
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize('kind', QUANTISED)
def test_what_is_quantised_is_read_as_what_it_stands_for(kind, tmp_path):
  model = toys.transformer(width=64, head_dim=32, hidden=32)
  c, path = model.config, tmp_path / 'model.gguf'
  library, writer = writer_of(path)
  gguf._describe(writer, library, c)
  kept = {}
  for name, array in tensors.split(model, gguf=True):
    if gguf._is_rotated(name):
      array = tensors.pairs(array, c.head_size)
    array, stored = np.float32(array), library.GGMLQuantizationType.F32
    if array.ndim > 1:
      stored = library.GGMLQuantizationType[kind]
    data = library.quants.quantize(array, stored)
    kept[name] = library.quants.dequantize(data, stored)
    writer.add_tensor(name, data, raw_dtype=stored)
  close(writer)
  back = gguf.load(gguf.File(path))
  found = dict(tensors.split(back, gguf=True))
  for name, wanted in kept.items():
    if gguf._is_rotated(name):
      wanted = tensors.halves(wanted, c.head_size)
    np.testing.assert_array_equal(found[name], np.float32(wanted))
  assert any((np.float32(found[n]) != x).any() for n, x in exact(model))


def exact(model):
  return dict(tensors.split(model, gguf=True)).items()


def tokenizer_file(path, kind, tokens, types, **fields):
  _, writer = writer_of(path)
  writer.add_tokenizer_model(kind)
  writer.add_token_list(tokens)
  writer.add_token_types(types)
  for name, value in fields.items():
    getattr(writer, f'add_{name}')(value)
  close(writer)
  return gguf.load_tokenizer(gguf.File(path))


TEXTS = (
  'You are a helpful assistant named user!',
  "  It's 2024, isn't it?\n\n\tdef f(x):  # 日本 é\r\n",
  '<|im_start|>',
  '',
)


def test_a_byte_level_tokenizer_is_that_of_its_words_and_merges(tmp_path):
  wanted = hf_files.tokenizer()
  spelt, _ = tokenizers.portable(wanted)
  vocab = spelt['model']['vocab']
  tokens = sorted(vocab, key=vocab.get)
  special = {one['content'] for one in spelt['added_tokens']}
  types = [3 if token in special else 1 for token in tokens]
  merges = [' '.join(pair) for pair in spelt['model']['merges']]
  fields = {
    'tokenizer_pre': 'gpt-2',
    'token_merges': merges,
    'eos_token_id': wanted.eos_id,
    'eot_token_id': wanted.end_ids[1],
    'chat_template': hf_files.TEMPLATE,
  }
  # Behind them one that is never cut, and what pads a vocabulary.
  tokens += ['<tool call>', '[PAD0]', '[PAD1]']
  types += [4, 5, 5]
  found = tokenizer_file(tmp_path / 'a', 'gpt2', tokens, types, **fields)
  assert found.vocab_size == wanted.vocab_size + 1
  assert found.pieces == (*wanted.pieces, b'<tool call>')
  assert (found.start, found.end_ids) == ([], wanted.end_ids)
  for text in TEXTS:
    assert found.encode(text) == wanted.encode(text)
  chat = [{'role': 'user', 'content': TEXTS[0]}]
  assert found.chat(chat) == wanted.chat(chat)
  whole = [wanted.vocab_size]
  assert found.encode_special('<tool call>') == whole

  # Llama 3 cuts numbers into threes, and its documents begin with a token.
  begun = fields | {'tokenizer_pre': 'llama-bpe', 'bos_token_id': 0}
  found = tokenizer_file(tmp_path / 'b', 'gpt2', tokens, types, **begun)
  assert found.start == [0]
  assert found.decode(found.encode(TEXTS[1])) == TEXTS[1]
  begun['add_bos_token'] = False
  found = tokenizer_file(tmp_path / 'c', 'gpt2', tokens, types, **begun)
  assert found.start == []
  fields['tokenizer_pre'] = 'of its own'
  with pytest.raises(ValueError, match="cuts words as 'of its own' does"):
    tokenizer_file(tmp_path / 'd', 'gpt2', tokens, types, **fields)


def test_pieces_with_scores_are_merged_as_llama2c_does(tmp_path):
  scored = llama2c_files.pieces()
  pieces, scores = zip(*scored, strict=True)
  tokens = [piece.decode().replace(' ', '\u2581') for piece in pieces]
  types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
  found = tokenizer_file(
    tmp_path / 'a',
    'llama',
    tokens,
    types,
    token_scores=list(scores),
    bos_token_id=1,
    eos_token_id=2,
  )
  assert found.start == [1] and found.end_ids == [2]
  assert found.pieces[3:259] == tuple(bytes([byte]) for byte in range(256))
  assert found.pieces[259:] == pieces[259:]
  for text in (*TEXTS, 'the then there', 'a  b'):
    assert found.encode(text) == llama2c_files.merged(text, scored)

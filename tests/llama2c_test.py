"""Checkpoints of llama2.c against a forward pass written after `run.c`."""

import functools
import json
import pathlib
import struct
import tempfile

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import llama2c_files
import numpy as np
import pytest
import scripts

from specjax import checkpoint, experiment, tokenizers
from specjax.models import llama2c
from specjax.workspace import Workspace

TOKENS = [1, 7, 250, 7, 3, 299, 42, 0, 11]


def norm(x, weight):
  return weight * x / np.sqrt((x * x).mean() + 1e-5)


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def logits(w, tokens, dim, heads, kv_heads, layers):
  """Token by token in float64, as `run.c` goes; `[T, V]`."""
  w = {name: array.astype(np.float64) for name, array in w.items()}
  size = dim // heads
  keys = [[] for _ in range(layers)]
  values = [[] for _ in range(layers)]
  found = []
  for position, token in enumerate(tokens):
    x = w['embedding'][token]
    for i in range(layers):
      y = norm(x, w['att_norm'][i])
      q, k, v = (w[name][i] @ y for name in ('wq', 'wk', 'wv'))
      for vector in (q, k):  # neighbours are a pair
        for j in range(0, len(vector), 2):
          angle = position / 10000.0 ** ((j % size) / size)
          a, b = vector[j], vector[j + 1]
          vector[j] = a * np.cos(angle) - b * np.sin(angle)
          vector[j + 1] = a * np.sin(angle) + b * np.cos(angle)
      keys[i].append(k)
      values[i].append(v)
      mixed = np.zeros(dim)
      for h in range(heads):
        own = slice(h * size, (h + 1) * size)
        g = h // (heads // kv_heads)
        shared = slice(g * size, (g + 1) * size)
        scores = [q[own] @ k[shared] / np.sqrt(size) for k in keys[i]]
        weights = softmax(np.array(scores))
        mixed[own] = weights @ np.array([v[shared] for v in values[i]])
      x = x + w['wo'][i] @ mixed
      y = norm(x, w['ffn_norm'][i])
      gate = w['w1'][i] @ y
      x = x + w['w2'][i] @ (gate / (1 + np.exp(-gate)) * (w['w3'][i] @ y))
    found.append(w['classifier'] @ norm(x, w['final_norm']))
  return np.array(found)


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_a_checkpoint_gives_the_logits_of_run_c(tied, kv_heads, tmp_path):
  path = tmp_path / 'model.bin'
  weights = llama2c_files.checkpoint(path, tied=tied, kv_heads=kv_heads)
  model = llama2c.load(path)
  tokens = jnp.array([TOKENS])
  output = model.forward(tokens, jnp.ones_like(tokens))
  wanted = logits(weights, TOKENS, 24, 4, kv_heads, 2)
  found = np.asarray(model.unembed(output.features))[0]
  np.testing.assert_allclose(found, wanted, atol=1e-5)
  # The pairs do matter: rotated as they lie, it is another model.
  unpaired = {**weights, 'wq': weights['wq'][:, ::-1]}
  assert np.abs(found - logits(unpaired, TOKENS, 24, 4, kv_heads, 2)).max() > 1


def test_it_is_for_texts_of_its_length(tmp_path):
  llama2c_files.checkpoint(tmp_path / 'model.bin', seq_len=24)
  assert llama2c.load(tmp_path / 'model.bin').positions == 24


def test_weights_may_be_bfloat16(tmp_path):
  llama2c_files.checkpoint(tmp_path / 'model.bin')
  half = llama2c.load(tmp_path / 'model.bin', 'bfloat16')
  full = llama2c.load(tmp_path / 'model.bin')
  assert half.embedding[...].dtype == jnp.bfloat16
  for x, y in zip(jax.tree.leaves(half), jax.tree.leaves(full), strict=True):
    np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=1 / 128)


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path):
  good, bad = tmp_path / 'good.bin', tmp_path / 'bad.bin'
  llama2c_files.checkpoint(good)
  data = good.read_bytes()
  zero_heads = data[:12] + struct.pack('<i', 0) + data[16:]
  for content, words in (
    (data[:20], 'has 20 bytes: no checkpoint'),
    (data[:-4], 'has .* bytes where its header asks for .* was cut short'),
    (data + b'more', 'has something behind'),
    (zero_heads, 'no checkpoint of llama2.c: it says dim 24, .*n_heads 0'),
    (b'Once upon a time, there was a text.', 'no checkpoint of llama2.c'),
    (struct.pack('<Ii', 0x616B3432, 2) + data, 'version 2 .*--version 0'),
  ):
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
      llama2c.load(bad)
    assert 'bad.bin' in str(error.value) and '\n' not in str(error.value)
  with pytest.raises(FileNotFoundError, match='no checkpoint .*none.bin'):
    llama2c.load(tmp_path / 'none.bin')


def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path):
  good, bad = tmp_path / 'good.bin', tmp_path / 'bad.bin'
  pieces = llama2c_files.pieces()
  llama2c_files.tokenizer(good, pieces)
  assert llama2c.load_tokenizer(good).vocab_size == len(pieces) == 300
  data = good.read_bytes()
  llama2c_files.tokenizer(bad, pieces[:100] + pieces[101:])
  for content, words in (
    (bad.read_bytes(), 'no piece <0x61>'),
    (data[:-3], '299 pieces were read'),
    (data[:3], '0 pieces were read'),
    (b'Once upon a time, there was a text.', 'no tokenizer of llama2.c'),
  ):
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
      llama2c.load_tokenizer(bad)
    assert 'bad.bin' in str(error.value) and '\n' not in str(error.value)
  llama2c_files.checkpoint(tmp_path / 'model.bin', vocab_size=301)
  with pytest.raises(ValueError, match='300 pieces .* vocabulary of 301'):
    llama2c.load_tokenizer(good, tmp_path / 'model.bin')
  with pytest.raises(FileNotFoundError, match='no tokenizer .*none.bin'):
    llama2c.load_tokenizer(tmp_path / 'none.bin')


def test_the_tokenizer_is_the_one_that_lies_beside(tmp_path):
  model = tmp_path / 'model.bin'
  with pytest.raises(ValueError, match='there is none: .*tokenizer_path'):
    llama2c.tokenizer_beside(model)
  (tmp_path / 'tok300.bin').touch()
  assert llama2c.tokenizer_beside(model).name == 'tok300.bin'
  (tmp_path / 'tokenizer.bin').touch()
  with pytest.raises(ValueError, match='tok300.bin, tokenizer.bin'):
    llama2c.tokenizer_beside(model)


@functools.cache
def tokenizer(apart=True):
  pieces = llama2c_files.pieces()
  if not apart:  # a piece that goes on behind a word
    pieces.append((b'a t', 1.0))
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'tok.bin'
    llama2c_files.tokenizer(path, pieces)
    return llama2c.load_tokenizer(path), pieces


@hypothesis.given(
  st.booleans(),
  # U+2581 is a space there.
  st.text(st.sampled_from('then adirgé \n𝒳'), max_size=30)
  | st.text(st.characters(exclude_characters='\u2581', codec='utf-8')),
)
def test_scores_decide_what_is_merged(apart, text):
  found, pieces = tokenizer(apart)
  ids = found.encode(text)
  assert ids == llama2c_files.merged(text, pieces)
  assert found.decode(ids) == (f' {text}' if text else '')
  assert not {0, 1, 2} & set(ids)


def test_a_merge_within_a_word_may_be_of_any_score():
  # ' the' is the union of ' t' (-1) and 'he' (-2): 'the' has no way to be
  # made, though of a higher score, since both its parts are merged before.
  found, _ = tokenizer()
  names = [found.pieces[i] for i in found.encode('the other')]
  assert names == [b' the', b' ', b'o', b'ther']


def test_a_tokenizer_goes_through_a_file(tmp_path):
  found, _ = tokenizer()
  found.save(tmp_path / 'tokenizer.json')
  again = tokenizers.load(tmp_path / 'tokenizer.json')
  assert again.hash == found.hash and again.pieces == found.pieces
  text = 'and the other thing é𝒳'
  assert again.encode(text) == found.encode(text)
  assert again.start == [1] and again.eos_id == 2 and again.end_ids == [2, 1]
  assert tokenizer(False)[0].hash != found.hash


def page(path):
  config = experiment.load(scripts.ROOT / 'configs' / 'stories260k.py:tiny')
  flags = [f'--config.target.path={path}']
  return experiment.override(config, flags).to_dict()


def files(folder):
  folder.mkdir()
  llama2c_files.checkpoint(folder / 'model.bin')
  llama2c_files.tokenizer(folder / 'tok300.bin', llama2c_files.pieces())
  return folder / 'model.bin'


def test_a_run_adopts_a_target_and_keeps_it(tmp_path):
  path, folder = files(tmp_path / 'files'), tmp_path / 'run'
  run = Workspace.create(folder, page(path))
  with pytest.raises(FileNotFoundError, match='no target yet: run `python'):
    run.target()
  run.adopt_target()
  assert isinstance(run.tokenizer, tokenizers.Pretrained)
  assert len(run.config['target']['sha256']) == 64
  own, theirs = (
    jax.tree.leaves(run.target()),
    jax.tree.leaves(llama2c.load(path)),
  )
  for x, y in zip(own, theirs, strict=True):
    np.testing.assert_array_equal(x, y)
  prompts = run.prompts('test', 3, 1)
  assert prompts == [[1]] * 3  # without text, the token that begins one

  # Again, whatever order: nothing is written a second time.
  Workspace.create(folder, page(path)).adopt_target()
  assert checkpoint.Checkpoints(folder / 'target').steps() == [0]
  other = tmp_path / 'files' / 'other.bin'
  llama2c_files.checkpoint(other, seed=1)
  with pytest.raises(ValueError, match='target.path: .*other.bin'):
    Workspace.create(folder, page(other))
  path.write_bytes(other.read_bytes())
  with pytest.raises(ValueError, match='target.sha256: '):
    Workspace.create(folder, page(path))
  # What the run has serves without the file.
  path.unlink()
  Workspace.create(folder, page(path)).adopt_target()
  assert checkpoint.Checkpoints(folder / 'target').steps() == [0]
  with pytest.raises(FileNotFoundError, match='no model .*model.bin'):
    Workspace.create(tmp_path / 'new', page(path))
  seen = Workspace.look_at(folder, page(path))
  assert seen.target().config.width == 24
  kept = json.loads((folder / 'config.json').read_text())
  Workspace.look_at(folder, kept)


def test_a_wrong_tokenizer_leaves_room_for_the_right_one(tmp_path):
  path, folder = files(tmp_path / 'files'), tmp_path / 'run'
  right = path.with_name('tok300.bin')
  wrong = path.with_name('wrong.bin')
  llama2c_files.tokenizer(wrong, llama2c_files.pieces()[:-1])
  config = page(path)
  config['target']['tokenizer_path'] = str(wrong)
  with pytest.raises(ValueError, match='tokenizer of another model'):
    Workspace.create(folder, config).adopt_target()
  config['target']['tokenizer_path'] = str(right)
  Workspace.create(folder, config).adopt_target()


@pytest.mark.parametrize(
  ('section', 'key', 'value', 'words'),
  [
    ('target', 'path', '', 'has no sizes either'),
    ('data', 'corpus', 1.0, 'data.corpus must be 0'),
    ('decode', 'prompt_length', 2, 'decode.prompt_length is 2, .* has 1 tok'),
    ('validation', 'prompt_length', 2, 'without text prompts must be that'),
  ],
)
def test_a_run_without_text_is_refused_what_needs_some(
  section, key, value, words, tmp_path
):
  config = page(files(tmp_path / 'files'))
  config[section][key] = value
  with pytest.raises(ValueError, match=words):
    Workspace.create(tmp_path / 'run', config).adopt_target()


def test_a_target_is_not_trained_on_no_text(tmp_path):
  config = experiment.load(
    scripts.ROOT / 'configs' / 'stdlib.py:tiny'
  ).to_dict()
  config['corpus']['name'] = 'none'
  with pytest.raises(ValueError, match='cannot be trained .*target.path'):
    Workspace.create(tmp_path / 'run', config)

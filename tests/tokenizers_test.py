import functools
import json

import hypothesis
import llama2c_files
import numpy as np
import pytest
from hypothesis import strategies as st

from specjax import tokenizers

TEXT = 'def main(argv):\n  print("naïve café", argv)\n' * 20


@functools.cache
def _bpe():
  return tokenizers.BPE.train([TEXT], 300)


@pytest.fixture(params=['bytes', 'bpe'])
def tokenizer(request):
  return tokenizers.Bytes() if request.param == 'bytes' else _bpe()


_BOTH = st.sampled_from([tokenizers.Bytes, _bpe])


@hypothesis.settings(deadline=None)  # The first example trains the BPE.
@hypothesis.given(_BOTH, st.text())
def test_any_text_round_trips_and_ends_no_document(make, text):
  tokenizer = make()
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.eos_id not in ids
  assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@hypothesis.settings(deadline=None)
@hypothesis.given(_BOTH, st.lists(st.integers(0, 256)))
def test_any_ids_decode_and_stream_alike(make, ids):
  tokenizer = make()
  text = tokenizer.decode(ids)
  joined = b''.join(tokenizer.pieces[i] for i in ids)
  assert text == joined.decode('utf-8', 'replace')
  stream = tokenizer.stream()
  assert ''.join(stream.push(i) for i in ids) + stream.flush() == text


def test_library_decodes_what_the_table_of_pieces_does():
  library = tokenizers.hf.Tokenizer.from_str(_bpe().serialised)
  ids = [i for i in range(_bpe().vocab_size) if i != _bpe().eos_id]
  for i in ids:
    assert library.decode([i]) == _bpe().decode([i])
  assert library.decode(ids) == _bpe().decode(ids)


def test_quoting_the_special_token_does_not_end_the_document(tokenizer):
  ids = tokenizer.encode(f'a{tokenizers.EOS}b')
  assert tokenizer.eos_id not in ids
  assert tokenizer.decode(ids) == f'a{tokenizers.EOS}b'
  assert tokenizer.decode([*ids, tokenizer.eos_id]) == f'a{tokenizers.EOS}b'


def test_stream_holds_back_half_a_character(tokenizer):
  stream = tokenizer.stream()
  shown = [stream.push(i) for i in tokenizer.encode('😀')]
  assert shown == [''] * (len(shown) - 1) + ['😀'] and len(shown) > 1
  assert stream.flush() == ''
  stream.push(tokenizer.encode('😀')[0])
  assert stream.flush() == '\ufffd'


def test_batch_equals_one_by_one(tokenizer):
  texts = ['', 'one', 'zwei €', '\x00\r\n']
  assert tokenizer.encode_batch(texts) == [tokenizer.encode(t) for t in texts]


def test_save_and_load_keep_hash_and_ids(tokenizer, tmp_path):
  tokenizer.save(tmp_path / 'a' / 'tokenizer.json')
  loaded = tokenizers.load(tmp_path / 'a' / 'tokenizer.json')
  assert loaded.hash == tokenizer.hash
  assert loaded.pieces == tokenizer.pieces
  assert loaded.encode(TEXT + tokenizers.EOS) == tokenizer.encode(
    TEXT + tokenizers.EOS
  )
  assert [p.name for p in (tmp_path / 'a').iterdir()] == ['tokenizer.json']
  tokenizers.require_same(loaded, tokenizer)


def test_training_is_deterministic_and_merges():
  texts = ['the cat sat', 'the hat', *TEXT.splitlines()]
  first = tokenizers.BPE.train(texts, 290)
  again = tokenizers.BPE.train(texts, 290)
  assert first.serialised == again.serialised
  assert first.vocab_size == 290
  assert len(first.encode(TEXT)) < len(TEXT.encode())
  # Every byte is there, whatever was in the training text, and no id is lost.
  singles = {piece for piece in first.pieces if len(piece) == 1}
  assert len(singles) == 256
  np.testing.assert_array_equal(
    np.flatnonzero(first.byte_lengths == 0), [first.eos_id]
  )


def test_vocabularies_are_compared_by_content():
  target = _bpe()
  with pytest.raises(ValueError, match='257 ids and that of the target 285'):
    tokenizers.require_same(tokenizers.Bytes(), target)
  # Another file of the same vocabulary will do, another order will not.
  portable, _ = tokenizers.portable(target)
  same = tokenizers.Pretrained(json.dumps(portable), end=[tokenizers.EOS])
  assert same.hash != target.hash
  tokenizers.require_same(same, target)
  vocab = portable['model']['vocab']
  a, b = [token for token, i in vocab.items() if i in (20, 21)]
  vocab[a], vocab[b] = vocab[b], vocab[a]
  swapped = tokenizers.Pretrained(json.dumps(portable), end=[tokenizers.EOS])
  with pytest.raises(ValueError, match='id 20 is '):
    tokenizers.require_same(swapped, same)


def test_errors_name_what_is_wrong(tmp_path):
  with pytest.raises(ValueError, match='vocab_size 256 is below 257'):
    tokenizers.BPE.train(['text'], 256)
  for text in ('not json', '[1]', '{"model": {"type": "Unigram"}}'):
    (tmp_path / 't.json').write_text(text)
    with pytest.raises(ValueError, match='t.json is not a tokenizer'):
      tokenizers.load(tmp_path / 't.json')
  with pytest.raises(ValueError, match='no end-of-document token'):
    tokenizers.BPE(tokenizers.hf.Tokenizer(tokenizers.hf.models.BPE()).to_str())


@functools.cache
def _scored(apart=True):
  pieces = llama2c_files.pieces()
  if not apart:
    pieces.append((b'a t', 1.0))
  return tokenizers.ScoredBPE(*zip(*pieces, strict=True))


def _merged(text, pieces, scores):
  """All neighbours of the whole text, over and over, best first."""
  ids = {piece: i for i, piece in enumerate(pieces) if i > 2}
  found = []
  for character in f' {text}' if text else '':
    raw = character.encode()
    names = [f'<0x{byte:02X}>'.encode() for byte in raw]
    found += [raw] if raw in ids else names
  while True:
    pairs = [
      (-scores[ids[a + b]], i)
      for i, (a, b) in enumerate(zip(found, found[1:], strict=False))
      if a + b in ids
    ]
    if not pairs:
      return [ids[piece] for piece in found]
    _, i = min(pairs)
    found[i : i + 2] = [found[i] + found[i + 1]]


@hypothesis.given(
  st.booleans(),
  st.text(st.sampled_from('then adirgé \n𝒳'), max_size=30) | st.text(),
)
def test_scores_decide_what_is_merged(apart, text):
  tokenizer = _scored(apart)
  ids = tokenizer.encode(text)
  model = json.loads(tokenizer.serialised)['model']
  raw = [piece.encode('latin-1') for piece in model['pieces']]
  assert ids == _merged(text, raw, model['scores'])
  assert tokenizer.decode(ids) == (f' {text}' if text else '')
  assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_a_merge_within_a_word_may_be_of_any_score():
  # ' the' is the union of ' t' (-1) and 'he' (-2): 'the' has no way to be
  # made, though of a higher score, since both its parts are merged before.
  tokenizer = _scored()
  names = [tokenizer.pieces[i] for i in tokenizer.encode('the other')]
  assert names == [b' the', b' ', b'o', b'ther']


def test_scored_pieces_round_trip_through_a_file(tmp_path):
  tokenizer = _scored()
  tokenizer.save(tmp_path / 'tokenizer.json')
  again = tokenizers.load(tmp_path / 'tokenizer.json')
  assert again.hash == tokenizer.hash and again.pieces == tokenizer.pieces
  text = 'and the other thing é𝒳'
  assert again.encode(text) == tokenizer.encode(text)
  assert again.start == [1] and tokenizers.Bytes().start == []
  assert _scored(False).hash != tokenizer.hash

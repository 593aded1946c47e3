import functools
import json

import hypothesis
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

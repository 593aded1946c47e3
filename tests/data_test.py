import json
import subprocess
import sys

import numpy as np
import pytest

from specjax import corpora, data, tokenizers
from specjax.types import Batch

EOS = 9


def _windows(documents, length):
  ids = [i for document in documents for i in (*document, EOS)]
  return data.Windows(np.array(ids, np.uint16), EOS, length)


def _numbered(count):
  """A source of `count` windows, each of which holds its own number."""
  return data.Windows(np.repeat(np.arange(count), 2), EOS + count, 2)


def _seen(batches, indices):
  return [batches[i].tokens[:, 0].tolist() for i in indices]


def _corpus(folder, count=100):
  for i in range(count):
    text = ''.join(f'{i} times {j} is {i * j}\n' for j in range(1 + i % 7))
    (folder / f'{i:03}.txt').write_text(text)
  return corpora.load(f'files:{folder}/*.txt', data_dir=folder / 'cache')


def _assert_batch(batch, tokens, segments, weight):
  np.testing.assert_array_equal(batch.tokens, tokens)
  np.testing.assert_array_equal(batch.segments, segments)
  np.testing.assert_array_equal(batch.weight, weight)
  assert batch.tokens.dtype == batch.segments.dtype == np.int32
  assert batch.weight.dtype == np.float32


class Started(tokenizers.Bytes):
  start = (7,)


def test_documents_begin_as_the_tokenizer_has_it(tmp_path):
  corpus = _corpus(tmp_path)
  plain = data.encode_split(corpus, 'test', tokenizers.Bytes())
  tokenizer = Started()
  tokenizer.serialised = 'another'
  started = data.encode_split(corpus, 'test', tokenizer)
  begins = np.concatenate([[True], started[:-1] == tokenizer.eos_id])
  assert (started[begins] == 7).all()
  np.testing.assert_array_equal(started[~begins], plain)
  first = data.prompts(started, tokenizer.eos_id, 2, 1, seed=0)
  np.testing.assert_array_equal(first, [[7], [7]])


def test_two_documents_and_padding_in_one_window():
  (window,) = _windows([[1, 2], [3]], 6)
  _assert_batch(
    window, [1, 2, EOS, 3, EOS, 0], [1, 1, 1, 2, 2, 0], [0, 1, 1, 0, 1, 0]
  )


def test_a_document_goes_on_in_the_next_window():
  first, second = _windows([[1, 2, 3, 4, 5]], 4)
  _assert_batch(first, [1, 2, 3, 4], [1, 1, 1, 1], [0, 1, 1, 1])
  _assert_batch(second, [5, EOS, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0])


def test_a_window_that_ends_with_a_document():
  first, second = _windows([[1], [2, 3, 4]], 2)[0], _windows([[1], [2]], 2)[1]
  _assert_batch(first, [1, EOS], [1, 1], [0, 1])
  _assert_batch(second, [2, EOS], [1, 1], [0, 1])


@pytest.mark.parametrize('length', [2, 3, 7, 50])
def test_windows_hold_every_token_once_and_weigh_by_document(length):
  rng = np.random.default_rng(length)
  documents = [rng.integers(0, EOS, n) for n in rng.integers(1, 12, 30)]
  windows = list(_windows(documents, length))
  kept = [window.tokens[window.segments > 0] for window in windows]
  expected = np.concatenate([[*document, EOS] for document in documents])
  np.testing.assert_array_equal(np.concatenate(kept), expected)
  # A slow reference: the document of each token, and its left neighbour's.
  owner = np.repeat(range(30), [len(document) + 1 for document in documents])
  for start, window in zip(range(0, 10**6, length), windows, strict=False):
    owners = owner[start : start + length]
    weight = [
      int(t > 0 and owners[t] == owners[t - 1])
      for t in range(length)
      if t < len(owners)
    ]
    np.testing.assert_array_equal(window.weight[: len(owners)], weight)
    assert not window.weight[len(owners) :].any()
    same = (
      window.segments[: len(owners), None] == window.segments[: len(owners)]
    )
    np.testing.assert_array_equal(same, owners[:, None] == owners)


def test_windows_are_a_sequence_with_an_end():
  windows = _numbered(3)
  assert len(windows) == 3 and len(list(windows)) == 3
  with pytest.raises(IndexError):
    windows[3]
  with pytest.raises(ValueError, match='windows of 1 tokens'):
    data.Windows(np.zeros(5), EOS, 1)
  with pytest.raises(ValueError, match='no tokens'):
    data.Windows(np.zeros(0), EOS, 4)


def test_every_window_once_an_epoch_and_each_epoch_in_another_order():
  seen = np.ravel(_seen(data.Batches(_numbered(20), 2, seed=0), range(40)))
  epochs = seen.reshape(4, 20).tolist()
  assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
  assert len(set(map(tuple, [*epochs, range(20)]))) == 5


def test_no_window_is_dropped_where_batches_cross_epochs():
  seen = np.ravel(_seen(data.Batches(_numbered(7), 3, seed=1), range(14)))
  assert all(
    sorted(epoch) == list(range(7)) for epoch in seen.reshape(6, 7).tolist()
  )


def test_a_split_smaller_than_a_batch_still_fills_it():
  batch = data.Batches(_numbered(3), 8, seed=0)[0]
  assert isinstance(batch, Batch)
  assert batch.tokens.shape == batch.segments.shape == (8, 2)
  counts = np.bincount(batch.tokens[:, 0], minlength=3)
  assert counts.min() >= 2 and counts.max() <= 3


def test_order_is_a_function_of_the_seed():
  def order(seed):
    return _seen(data.Batches(_numbered(20), 2, seed), range(20))

  assert order(0) == order(0) != order(1)
  # The second epoch of one seed is not the first of the next.
  assert order(0)[10:] != order(1)[:10]


def test_resuming_in_a_new_process_neither_repeats_nor_skips():
  code = """if True:
    import json, numpy as np
    from specjax import data
    windows = data.Windows(np.repeat(np.arange(20), 2), 99, 2)
    batches = data.Batches(windows, 2, seed=0)
    print(json.dumps([batches[i].tokens[:, 0].tolist() for i in range(5, 20)]))
  """
  batches = data.Batches(_numbered(20), 2, seed=0)
  whole = _seen(batches, range(20))
  command = [sys.executable, '-c', code]
  rest = subprocess.run(command, capture_output=True, text=True, check=True)
  stopped = _seen(batches, range(5))
  assert stopped + json.loads(rest.stdout) == whole
  assert (np.bincount(np.ravel(whole)) == 2).all()


def test_two_epochs_of_training_never_touch_what_is_held_out(tmp_path):
  corpus = _corpus(tmp_path)
  tokenizer = tokenizers.Bytes()
  ids = data.encode_split(corpus, 'train', tokenizer)
  windows = data.Windows(ids, tokenizer.eos_id, 16)
  batches = data.Batches(windows, 4, seed=0)
  starts = {tuple(window.tokens): i for i, window in enumerate(windows)}
  seen = []
  for i in range(2 * len(windows) // 4):
    seen += [starts[tuple(row)] for row in batches[i].tokens]
  assert set(seen) == set(starts.values())
  text = tokenizer.decode(ids)
  for split in ('validation', 'test'):
    for document in corpus.splits[split]:
      assert document not in corpus.splits['train']
  for document in corpus.splits['train']:
    assert document in text


def test_in_order_has_each_window_once_and_one_shape():
  batches = list(data.in_order(_numbered(7), 3))
  assert [batch.tokens.shape for batch in batches] == [(3, 2)] * 3
  tokens = np.concatenate([batch.tokens for batch in batches])
  np.testing.assert_array_equal(tokens[:7, 0], range(7))
  assert sum(batch.weight.sum() for batch in batches) == 7
  assert not batches[-1].segments[1:].any()


def test_pad_weighs_the_generated_span_and_nothing_else():
  _assert_batch(
    data.pad([[4, 5, 6, 7, 8, 9], [1], [2, 3]], [3, 1, 0], length=8),
    [[4, 5, 6, 7, 8, 9, 0, 0], [1, *[0] * 7], [2, 3, *[0] * 6]],
    [[1, 1, 1, 1, 1, 1, 0, 0], [1, *[0] * 7], [1, 1, *[0] * 6]],
    # The first token has nothing before it, even where no prompt was given.
    [[0, 0, 0, 1, 1, 1, 0, 0], [0] * 8, [0, 1, *[0] * 6]],
  )
  assert data.pad([[1, 2, 3], []], [1, 0]).tokens.shape == (2, 3)


def test_pad_refuses_what_does_not_fit():
  with pytest.raises(ValueError, match='rows of 2'):
    data.pad([[1, 2, 3]], [1], length=2)
  with pytest.raises(ValueError, match='prompts of'):
    data.pad([[1, 2, 3]], [4])
  with pytest.raises(ValueError, match='2 prompts and 1 sequences'):
    data.pad([[1, 2, 3]], [1, 1])


def test_pack_joins_what_fits_and_weighs_the_generated_spans():
  first, second, third = data.pack(
    [[1, 2, 3], [4, 5, 6, EOS], [7, 8], [1, 2, 3, 4, 5, 6, 7]], [2, 1, 0, 3], 7
  )
  _assert_batch(
    first, [1, 2, 3, 4, 5, 6, EOS], [1] * 3 + [2] * 4, [0, 0, 1, 0, 1, 1, 1]
  )
  _assert_batch(second, [7, 8, *[0] * 5], [1, 1, *[0] * 5], [0, 1, *[0] * 5])
  _assert_batch(third, [1, 2, 3, 4, 5, 6, 7], [1] * 7, [0, 0, 0, 1, 1, 1, 1])
  with pytest.raises(ValueError, match='rows of 2'):
    data.pack([[1, 2, 3]], [1], 2)


@pytest.mark.parametrize('length', [9, 10, 17, 40])
def test_pack_keeps_every_sequence_whole_and_in_order(length):
  rng = np.random.default_rng(length)
  sequences = [rng.integers(0, EOS, n).tolist() for n in rng.integers(1, 9, 50)]
  given = [rng.integers(0, len(s) + 1) for s in sequences]
  rows = data.pack(sequences, given, length)
  found, weights = [], []
  for row in rows:
    assert row.tokens.shape == (length,)
    for segment in range(1, row.segments.max() + 1):
      found.append(row.tokens[row.segments == segment].tolist())
      weights.append(row.weight[row.segments == segment].tolist())
    assert not row.weight[row.segments == 0].any()
  assert found == sequences
  for weight, start in zip(weights, given, strict=True):
    assert weight == [int(t >= max(start, 1)) for t in range(len(weight))]
  sizes = [int((row.segments > 0).sum()) for row in rows]
  firsts = [int((row.segments == 1).sum()) for row in rows]
  # None of them could have gone into the row before.
  assert all(a + b > length for a, b in zip(sizes, firsts[1:], strict=False))


def test_rows_are_those_of_batches_whatever_their_size():
  rows = data.Rows(_numbered(7), seed=1)
  batches = data.Batches(_numbered(7), 3, seed=1)
  flat = np.ravel(_seen(batches, range(14)))
  np.testing.assert_array_equal([rows[i].tokens[0] for i in range(42)], flat)


def test_ids_are_cached_by_tokenizer_and_end_each_document(tmp_path):
  corpus = _corpus(tmp_path)
  done = []
  tokenizer = tokenizers.BPE.train(corpus.splits['train'], 280)
  first = data.encode_split(
    corpus, 'train', tokenizer, lambda *a: done.append(a)
  )
  total = len(corpus.splits['train'])
  assert done == [(total, total)]
  ends = np.flatnonzero(first == tokenizer.eos_id)
  assert first.dtype == np.uint16 and len(ends) == total
  pieces = np.split(first, ends + 1)
  assert [tokenizer.decode(p) for p in pieces[:-1]] == list(
    corpus.splits['train']
  )
  again = data.encode_split(
    corpus, 'train', tokenizer, lambda *a: done.append(a)
  )
  np.testing.assert_array_equal(first, again)
  assert len(done) == 1  # Read, not encoded a second time.
  other = data.encode_split(corpus, 'train', tokenizers.Bytes())
  assert len(other) > len(first)


def test_a_failed_encoding_leaves_nothing_that_is_used(tmp_path):
  corpus = _corpus(tmp_path)

  def interrupt(done, total):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    data.encode_split(corpus, 'test', tokenizers.Bytes(), interrupt)
  assert not list((corpus.directory).rglob('*.npy*'))
  assert len(data.encode_split(corpus, 'test', tokenizers.Bytes()))


def test_prompts_are_starts_of_distinct_documents():
  documents = [[i % 8, *[8] * (i % 4)] for i in range(40)]
  ids = np.concatenate([[*document, EOS] for document in documents])
  starts = {tuple(d[:3]) for d in documents if len(d) >= 3}
  prompts = data.prompts(ids, EOS, 20, 3, seed=0)
  assert prompts.shape == (20, 3) and prompts.dtype == np.int32
  assert {tuple(prompt) for prompt in prompts.tolist()} <= starts
  np.testing.assert_array_equal(prompts, data.prompts(ids, EOS, 20, 3, seed=0))
  assert (prompts != data.prompts(ids, EOS, 20, 3, seed=1)).any()
  # A smaller count is a prefix, so that results for some prompts stay valid.
  np.testing.assert_array_equal(
    prompts[:5], data.prompts(ids, EOS, 5, 3, seed=0)
  )


def test_prompts_go_on_inside_documents_only_when_starts_run_out():
  ids = np.array([0, 1, 2, 3, 4, EOS, 5, 6, EOS, 7, EOS])
  prompts = data.prompts(ids, EOS, 3, 2, seed=3).tolist()
  assert sorted(prompts[:2]) == [[0, 1], [5, 6]] and prompts[2] == [2, 3]
  with pytest.raises(ValueError, match='4 prompts of 2 tokens.*only 3'):
    data.prompts(ids, EOS, 4, 2, seed=3)
  with pytest.raises(ValueError, match='only 0'):
    data.prompts(ids, EOS, 1, 9, seed=0)

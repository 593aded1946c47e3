import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from specjax import corpora, documents


class SpecjaxTrainOnly(tfds.core.GeneratorBasedBuilder):
  """A catalogue set with one text field and no held-out split."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {'body': tfds.features.Text(), 'stars': tfds.features.Scalar(np.int32)}
      ),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples()}

  def _generate_examples(self):
    for i in range(40):
      yield i, {'body': f'text {i} é', 'stars': i}


class SpecjaxTwoTexts(SpecjaxTrainOnly):
  def _info(self):
    text = tfds.features.Text()
    features = tfds.features.FeaturesDict({'title': text, 'body': text})
    return tfds.core.DatasetInfo(builder=self, features=features)


class SpecjaxOffline(SpecjaxTrainOnly):
  def _split_generators(self, dl_manager):
    raise ConnectionError('no route to host\nand a long story')


def _write(folder, count):
  for i in range(count):
    (folder / f'{i:03}.txt').write_text(f'document {i}\nof the corpus\n')
  return f'files:{folder}/*.txt'


def _texts(corpus):
  return {split: list(texts) for split, texts in corpus.splits.items()}


def _run(code, *arguments):
  command = [sys.executable, '-c', code, *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_document_is_in_one_split_and_in_order(tmp_path):
  name = _write(tmp_path, 100)
  corpus = corpora.load(name, data_dir=tmp_path / 'cache')
  texts = _texts(corpus)
  assert list(texts) == ['train', 'validation', 'test']
  everything = [t for split in texts.values() for t in split]
  expected = [f'document {i}\nof the corpus\n' for i in range(100)]
  assert sorted(everything) == sorted(expected)
  for split in texts.values():
    assert split and split == [t for t in expected if t in split]
  assert corpus.describe() == {
    'name': name,
    'hash': corpus.hash,
    'documents': {s: len(t) for s, t in texts.items()},
  }
  assert len(texts['train']) > 80


def test_repeated_documents_are_kept_once_and_blank_ones_not_at_all(tmp_path):
  name = _write(tmp_path, 20)
  before = corpora.load(name, data_dir=tmp_path / 'cache')
  for i in range(5):
    copy = (tmp_path / f'00{i}.txt').read_text()
    (tmp_path / f'copy{i}.txt').write_text(copy)
  (tmp_path / 'blank.txt').write_text(' \n')
  after = corpora.load(name, data_dir=tmp_path / 'cache')
  assert sorted(sum(_texts(after).values(), [])) == sorted(
    sum(_texts(before).values(), [])
  )


def test_one_large_file_has_three_splits(tmp_path):
  lines = [f'line {i} of a long book\n' for i in range(4000)]
  (tmp_path / 'book.txt').write_text(''.join(lines))
  corpus = corpora.load(f'files:{tmp_path}/book.txt', data_dir=tmp_path / 'c')
  assert all(corpus.describe()['documents'].values())


def test_same_text_is_prepared_once_and_changed_text_again(tmp_path):
  name = _write(tmp_path, 10)
  first = corpora.load(name, data_dir=tmp_path / 'cache')
  written = {p: p.stat().st_mtime_ns for p in first.directory.rglob('*_*')}
  again = corpora.load(name, data_dir=tmp_path / 'cache')
  assert again.hash == first.hash and _texts(again) == _texts(first)
  assert all(p.stat().st_mtime_ns == t for p, t in written.items())
  (tmp_path / '000.txt').write_text('another text')
  changed = corpora.load(name, data_dir=tmp_path / 'cache')
  assert changed.hash != first.hash
  assert 'another text' in sum(_texts(changed).values(), [])


def test_a_killed_preparation_leaves_nothing_that_is_used(tmp_path):
  name = _write(tmp_path, 50)
  code = """if True:
    import os, signal, sys
    from specjax import corpora
    generate = corpora.SpecjaxText._generate_examples
    def dies(self, texts):
      for i, example in generate(self, texts):
        if i == 2:
          os.kill(os.getpid(), signal.SIGKILL)
        yield i, example
    corpora.SpecjaxText._generate_examples = dies
    corpora.load(sys.argv[1], data_dir=sys.argv[2])
  """
  killed = _run(code, name, tmp_path / 'cache')
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert list((tmp_path / 'cache').rglob('*incomplete*'))
  corpus = corpora.load(name, data_dir=tmp_path / 'cache')
  assert sum(corpus.describe()['documents'].values()) == 50


def test_another_process_sees_the_same_corpus(tmp_path):
  name = _write(tmp_path, 100)
  code = """if True:
    import json, sys
    from specjax import corpora
    corpus = corpora.load(sys.argv[1], data_dir=sys.argv[2])
    splits = {split: list(texts) for split, texts in corpus.splits.items()}
    print(json.dumps([corpus.hash, splits]))
  """
  here = corpora.load(name, data_dir=tmp_path / 'here')
  there = _run(code, name, tmp_path / 'there')
  # Standard output holds the answer alone: preparing says nothing there.
  assert json.loads(there.stdout) == [here.hash, _texts(here)], there.stderr


def test_losing_the_race_to_prepare_is_no_error(tmp_path, monkeypatch):
  name = _write(tmp_path, 10)
  builder = corpora.SpecjaxText
  original = builder._split_generators

  def overtaken(self, dl_manager):
    monkeypatch.setattr(builder, '_split_generators', original)
    corpora.load(name, data_dir=tmp_path / 'cache')
    return original(self, dl_manager)

  monkeypatch.setattr(builder, '_split_generators', overtaken)
  corpus = corpora.load(name, data_dir=tmp_path / 'cache')
  assert len(sum(_texts(corpus).values(), [])) == 10


def test_a_set_without_held_out_splits_is_sliced(tmp_path):
  corpus = corpora.load('tfds:specjax_train_only', data_dir=tmp_path)
  texts = _texts(corpus)
  counts = {split: len(members) for split, members in texts.items()}
  assert counts == {'train': 36, 'validation': 2, 'test': 2}
  everything = sorted(sum(texts.values(), []))
  assert everything == sorted(f'text {i} é' for i in range(40))
  assert corpora.load('specjax_train_only', data_dir=tmp_path).hash == (
    corpus.hash
  )


def test_a_set_of_the_catalogue_is_found_without_tensorflow(tmp_path):
  # What a prepared set has beside its records, which the mock stands in for.
  folder = tmp_path / 'wiki40b' / 'en' / '1.3.0'
  folder.mkdir(parents=True)
  splits = [
    {'name': name, 'shardLengths': ['20'], 'numBytes': '1'}
    for name in documents.SPLITS
  ]
  info = {'name': 'wiki40b', 'version': '1.3.0', 'splits': splits}
  (folder / 'dataset_info.json').write_text(json.dumps(info))
  with tfds.testing.mock_data(num_examples=20, data_dir=tmp_path):
    corpus = corpora.load('tfds:wiki40b/en', data_dir=tmp_path)
    texts = _texts(corpus)
  assert all(len(members) == 20 for members in texts.values())
  assert all(isinstance(text, str) and text for text in texts['train'])


def test_errors_are_one_line_that_names_what_to_do(tmp_path):
  def message(kind, name, **kwargs):
    with pytest.raises(kind) as error:
      corpora.load(name, data_dir=tmp_path / 'cache', **kwargs)
    assert '\n' not in str(error.value)
    return str(error.value)

  nothing = f'files:{tmp_path}/*.none'
  assert message(ValueError, nothing) == f'no file matches {nothing}'
  (tmp_path / 'a.txt').write_text('short')
  one = message(ValueError, f'files:{tmp_path}/a.txt')
  assert 'has 1 documents' in one and 'a.txt' in one
  unknown = message(ValueError, 'tfds:no_such_set')
  assert "'no_such_set'" in unknown and "'stdlib'" in unknown
  unknown = message(ValueError, 'wiki40b/xx')
  assert "'wiki40b/xx'" in unknown
  several = message(ValueError, 'specjax_two_texts')
  assert "no field 'text'" in several and "['body', 'title']" in several
  typo = message(ValueError, 'specjax_two_texts', text_field='titel')
  assert "no field 'titel'" in typo
  offline = message(RuntimeError, 'specjax_offline')
  assert 'no route to host' in offline and 'tfds build' in offline
  assert 'a long story' not in offline


def test_a_test_split_of_its_own_has_nothing_that_is_trained_on(tmp_path):
  name = _write(tmp_path, 30)
  (tmp_path / 'test').mkdir()
  (tmp_path / 'test' / 'a.txt').write_text('document 7\nof the corpus\n')
  (tmp_path / 'test' / 'b.txt').write_text('another\n')
  test, cache = f'files:{tmp_path}/test/*.txt', tmp_path / 'cache'
  corpus = corpora.load(name, data_dir=cache, test=test)
  texts = _texts(corpus)
  assert texts['test'] == ['document 7\nof the corpus\n', 'another\n']
  assert not set(texts['test']) & {*texts['train'], *texts['validation']}
  assert len(texts['train']) + len(texts['validation']) == 29
  # Without it, and with less in it, they are other corpora.
  (tmp_path / 'test' / 'b.txt').unlink()
  less = corpora.load(name, data_dir=cache, test=test)
  plain = corpora.load(name, data_dir=cache)
  assert len({corpus.hash, less.hash, plain.hash}) == 3
  for one, other in (('stdlib', test), (name, 'stdlib')):
    with pytest.raises(ValueError, match='test split of its own'):
      corpora.load(one, data_dir=cache, test=other)


def test_no_text_is_a_corpus_too(tmp_path):
  texts = _texts(corpora.load('none', data_dir=tmp_path))
  assert texts == dict.fromkeys(documents.SPLITS, [''] * corpora.EMPTY)

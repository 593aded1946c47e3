from specjax import documents


def test_the_split_of_a_document_does_not_depend_on_the_others():
  def split_of(count):
    given = [documents.Document(f'{i}', f'text {i}') for i in range(count)]
    splits = documents.assign(given).items()
    return {d.text: split for split, members in splits for d in members}

  few, many = split_of(300), split_of(3000)
  assert all(many[text] == split for text, split in few.items())
  share = sum(split == 'train' for split in many.values()) / len(many)
  assert abs(share - (1 - 2 * documents.HELD_OUT)) < 0.02


def test_a_renamed_document_stays_in_its_split():
  def texts(name):
    given = [documents.Document(f'{name}{i}', f'{i}') for i in range(100)]
    splits = documents.assign(given)
    return {
      split: [d.text for d in members] for split, members in splits.items()
    }

  assert texts('before') == texts('after')


def test_three_documents_make_three_splits():
  given = [documents.Document(f'{i}', f'text {i}') for i in range(3)]
  assert [len(d) for d in documents.assign(given).values()] == [1, 1, 1]


def test_a_test_split_of_its_own_leaves_the_others_as_they_were():
  given = [documents.Document(f'{i}', f'text {i}') for i in range(100)]
  apart = [documents.Document('apart', 'text 1000')]
  alone, beside = documents.assign(given), documents.assign(given, apart)
  assert beside['test'] == apart
  assert beside['validation'] == alone['validation']
  both = sorted(alone['train'] + alone['test'], key=given.index)
  assert beside['train'] == both


def test_one_large_file_is_cut_at_line_ends_and_loses_nothing(tmp_path):
  lines = [f'line {i} of a long book\n' for i in range(4000)]
  (tmp_path / 'book.txt').write_text(''.join(lines))
  (tmp_path / 'one_line.txt').write_text('é' * 20_000)
  found = list(documents.files(f'{tmp_path}/*.txt'))
  assert ''.join(d.text for d in found) == ''.join(lines) + 'é' * 20_000
  assert max(len(d.text) for d in found) <= documents.MAX_CHARACTERS
  assert all(d.text.endswith('\n') for d in found if 'book' in d.name)


def test_files_that_are_not_utf8_are_read(tmp_path):
  (tmp_path / 'a.txt').write_bytes(b'caf\xe9\r\n')
  (found,) = documents.files(f'{tmp_path}/*.txt')
  assert found.text == 'caf\ufffd\r\n'


def test_stdlib_has_the_library_and_not_its_tests():
  names = {document.name for document in documents.stdlib()}
  assert {'argparse.py', 'json/decoder.py'} <= names
  assert not {n for n in names if {'test', 'tests'} & set(n.split('/'))}
  assert not {n for n in names if 'site-packages' in n}

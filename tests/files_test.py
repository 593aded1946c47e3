import errno
import hashlib

import pytest

from specjax import files


def test_a_file_appears_whole_or_not_at_all(tmp_path):
  path = tmp_path / 'new' / 'file'
  with files.atomic(path) as file:
    file.write(b'first')
    file.flush()
    assert not path.exists()
  assert path.read_bytes() == b'first'
  with pytest.raises(KeyboardInterrupt), files.atomic(path) as file:
    file.write(b'half of the sec')
    raise KeyboardInterrupt
  assert path.read_bytes() == b'first'
  assert list(path.parent.iterdir()) == [path]


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path):
  (tmp_path / 'file').write_bytes(b'bytes' * 10**5)
  wanted = hashlib.sha256(b'bytes' * 10**5).hexdigest()
  assert files.sha256(tmp_path / 'file') == wanted
  with pytest.raises(FileNotFoundError, match='there is no file'):
    files.sha256(tmp_path / 'none')


def test_a_disk_without_room_is_one_clear_line(tmp_path):
  path = tmp_path / 'file'
  path.write_bytes(b'first')
  with pytest.raises(OSError, match='file could not be written .*No space'):
    with files.atomic(path):
      raise OSError(errno.ENOSPC, 'No space left on device')
  assert path.read_bytes() == b'first'
  assert list(tmp_path.iterdir()) == [path]
  with pytest.raises(OSError, match='file/below could not be written'):
    with files.atomic(path / 'below'):
      pass


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
  folder = tmp_path / 'new' / 'folder'
  with files.whole(folder) as partial:
    (partial / 'a').write_text('first')
    assert not folder.exists()
  assert [file.name for file in folder.iterdir()] == ['a']
  with pytest.raises(KeyboardInterrupt), files.whole(folder) as partial:
    (partial / 'a').write_text('half')
    (partial / 'below').mkdir()
    raise KeyboardInterrupt
  assert (folder / 'a').read_text() == 'first'
  # What was left half done is no part of the next.
  with files.whole(folder) as partial:
    (partial / 'b').write_text('second')
    with pytest.raises(RuntimeError, match='another process is writing'):
      with files.whole(folder):
        pass
  assert [file.name for file in folder.iterdir()] == ['b']
  assert list(folder.parent.iterdir()) == [folder]

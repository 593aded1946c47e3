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

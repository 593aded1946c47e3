"""Progress and scalars."""

import atexit
import io
import re
import struct
import unittest.mock

import pytest

from specjax import logs


def events(path):
  """Scalars of all event files in a folder: (step, name, value)."""
  from tensorboardX.proto import event_pb2

  found = []
  for file in sorted(path.iterdir()):
    data = file.read_bytes()
    while data:  # length, its checksum, the record, its checksum
      (length,) = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      for value in event.summary.value:
        found.append((event.step, value.tag, value.simple_value))
  return sorted(found)


def test_scalars_are_in_both_records(tmp_path):
  with logs.Logger(tmp_path / 'logs' / 'train') as logger:
    logger.write(1, loss=2.0, accuracy=0.5)
    logger.write(2, loss=1.0)
    lines = logs.read(tmp_path / 'logs' / 'train.jsonl')
    assert [line['step'] for line in lines] == [1, 2], 'a kill would lose lines'
    assert lines[0]['accuracy'] == 0.5
  assert events(tmp_path / 'logs' / 'train') == [
    (1, 'accuracy', 0.5),
    (1, 'loss', 2.0),
    (2, 'loss', 1.0),
  ]


@pytest.mark.parametrize(
  'step, kept', [(None, [1, 2, 3]), (2, [1, 2]), (9, [1, 2, 3]), (-1, [])]
)
def test_a_resumed_log_has_every_step_once(tmp_path, step, kept):
  path = tmp_path / 'train'
  with logs.Logger(path) as logger:
    for i in (1, 2, 3):
      logger.write(i, loss=float(i))
  with open(tmp_path / 'train.jsonl', 'a') as file:
    file.write('{"step": 4, "lo')  # a kill came here
  with logs.Logger(path, step) as logger:
    logger.write(4, loss=4.0)
  steps = [line['step'] for line in logs.read(tmp_path / 'train.jsonl')]
  assert steps == [*kept, 4]
  assert [s for s, _, _ in events(path)] == [*kept, 4]


def test_no_log_has_no_lines(tmp_path):
  assert logs.read(tmp_path / 'none.jsonl') == []


def test_a_line_that_is_no_json_is_named(tmp_path):
  path = tmp_path / 'log.jsonl'
  path.write_text('{"step": 1}\ngarbage\n{"step": 3}\n')
  with pytest.raises(
    ValueError, match='log.jsonl, line 2, is not JSON: remove'
  ):
    logs.read(path)


class Clock:
  """Time that passes only when told to."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def test_progress_away_from_a_terminal():
  clock, file = Clock(), io.StringIO()
  progress = logs.Progress(
    30, 'pretrain', 10, unit='tokens', scale=256, file=file, clock=clock
  )
  seen = []
  with progress:
    for step in progress:
      seen.append(step)
      # The first step compiles; the others take 2 s each.
      clock.now += 100 if step == 10 else 2
      progress.show(loss=4.5)
  assert seen == list(range(10, 30))
  lines = file.getvalue().splitlines()
  assert file.getvalue().endswith('\n')
  assert lines[0] == 'pretrain 11/30  01:40 gone  loss 4.5'
  middle = 'pretrain 16/30  128 tokens/s  01:50 gone  00:28 left  loss 4.5'
  assert lines[1] == middle
  assert lines[-1].startswith('pretrain 30/30')
  assert '00:00 left' in lines[-1]
  assert len(lines) == 5  # every 10 s and at the end


def test_progress_ends_its_line_when_interrupted():
  file = io.StringIO()
  with pytest.raises(KeyboardInterrupt):
    with logs.Progress(5, 'x', file=file) as progress:
      progress.advance()
      raise KeyboardInterrupt
  assert re.fullmatch(r'x 1/5  00:00 gone\n', file.getvalue())


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_progress_on_a_terminal(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '100')
  for name in ('NO_COLOR', 'FORCE_COLOR', 'TTY_COMPATIBLE'):
    monkeypatch.delenv(name, raising=False)
  file = Terminal()
  with logs.Progress(3, 'distil', unit='tokens', file=file) as progress:
    for _ in progress:
      progress.show(loss=1.25)
  assert 'distil' in file.getvalue()
  assert '3/3' in file.getvalue()
  assert 'loss 1.25' in file.getvalue()
  assert file.getvalue().rstrip('\x1b[?25h').endswith('\n')


def test_long_times_are_in_hours():
  clock = Clock()
  progress = logs.Progress(10, 'x', file=io.StringIO(), clock=clock)
  progress.advance()
  clock.now = 3600.0
  progress.advance()
  assert '1:00:00 gone' in progress.text()
  assert '8:00:00 left' in progress.text()


def test_a_bar_within_another_is_drawn_on_the_same_console(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  file = Terminal()
  with logs.Progress(2, 'outer', file=file) as outer:
    outer.advance()
    with logs.Progress(3, 'inner', file=file) as inner:
      inner.advance(3)
      # Bars of two consoles would each move the cursor as if it were alone.
      assert inner._bar.console is outer._bar.console
    outer.advance()
  text = file.getvalue()
  assert 'inner' in text and text.rindex('outer') > text.rindex('inner')
  assert '3/3' in text and '2/2' in text


def test_what_went_wrong_is_not_hidden_by_closing_the_log(
  tmp_path, monkeypatch
):
  def full():
    raise OSError('No space left on device')

  logger = logs.Logger(tmp_path / 'train')
  close = logger.close
  monkeypatch.setattr(logger, 'close', full)
  with pytest.raises(ValueError, match='first'), logger:
    raise ValueError('first')
  with pytest.raises(OSError, match='No space'), logger:
    pass
  close()


@pytest.mark.parametrize('where', ['events', 'lines', 'both'])
def test_a_full_disk_is_not_met_again_at_exit(tmp_path, monkeypatch, where):
  exits = []
  monkeypatch.setattr(atexit, 'register', exits.append)

  def full():
    raise OSError('No space left on device')

  with pytest.raises(OSError, match='No space'), logs.Logger(tmp_path) as log:
    if where != 'lines':
      events = log._events.file_writer.event_writer
      monkeypatch.setattr(events, 'close', full)
    if where != 'events':
      log._lines = unittest.mock.Mock(closed=False, close=full)
  (leave,) = exits
  leave()

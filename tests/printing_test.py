"""Tables for people: nothing of a line is lost."""

import io

import rich.console

from specjax import printing


def lines(table):
  """A table as it is printed."""
  file = io.StringIO()
  rich.console.Console(file=file, width=200).print(table)
  return [line.split() for line in file.getvalue().splitlines()]


def test_a_ratio_has_its_range_and_headings_keep_their_brackets():
  row = {'speedup': 1.5, 'speedup_min': 1.4, 'speedup_max': 1.604}
  row |= {'own': float('nan'), 'own_min': float('nan'), 'own_max': 2.0}
  table = printing.table('way', numbers=('x [min–max]', 'own [95 %]'))
  printing.add(table, 'off')
  table.add_row(
    'ngram',
    printing.gain(row),
    printing.gain(row, 'own'),
    printing.spread(1, 0.5, 2, unit=''),
  )
  head, _, found, *_ = (line for line in lines(table) if line)
  assert head == ['way', 'x', '[min–max]', 'own', '[95', '%]', 'off']
  assert found == [
    *('ngram', '1.50x', '[1.40–1.60]', 'nanx', '[nan–2.00]'),
    *('1.00', '[0.50–2.00]'),
  ]


def test_text_stands_left_and_numbers_right():
  table = printing.table('way', numbers=('tokens',), title='a title')
  kinds = [column.justify for column in table.columns]
  assert kinds == ['left', 'right']
  assert all(column.no_wrap for column in table.columns)
  assert lines(table)[0] == ['a', 'title']


def test_a_console_is_as_wide_as_it_must_be(monkeypatch):
  monkeypatch.setenv('COLUMNS', '100')
  assert printing.console().width == 100
  assert printing.console(96).width == 100
  assert printing.console(132).width == 132

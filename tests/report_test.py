"""The HTML report: whole, alone, and safe to show any text."""

import base64
import html.parser
import re

import pytest

from specjax import report

# The smallest PNG there is.
PNG = base64.b64decode(
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQ'
  'AAAABJRU5ErkJggg=='
)
VOID = {'meta', 'img'}


class Reader(html.parser.HTMLParser):
  """Collects tags and text, and checks that tags close in order."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.text = [], [], []
    self.feed(text)
    assert self.open == []

  def handle_starttag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


@pytest.fixture
def page(tmp_path):
  (tmp_path / 'x.png').write_bytes(PNG)
  parts = [
    report.heading('A < B'),
    report.paragraph('a & b'),
    report.table(['name', 'x'], [['one', 1], ['<two>', 2]], best=1),
    report.picture(tmp_path / 'x.png', 'a "quoted" caption'),
    report.code('python x --y="<z>"'),
    report.values({'jax': '0.10'}),
    report.folded('all', {'weight': float('inf'), 'k': (1, 2)}),
  ]
  path = report.write(tmp_path / 'x.html', 'T <1>', parts)
  assert path == tmp_path / 'x.html'
  return path.read_text(encoding='utf-8')


def test_tags_close_and_text_comes_back(page):
  reader = Reader(page)
  text = ''.join(reader.text)
  for words in (
    'T <1>',
    'A < B',
    'a & b',
    '<two>',
    'python x --y="<z>"',
    '"weight": "inf"',
  ):
    assert words in text
  (image,) = [found for tag, found in reader.tags if tag == 'img']
  assert image['alt'] == 'a "quoted" caption'
  rows = [found for tag, found in reader.tags if tag == 'tr']
  assert [row.get('class') for row in rows] == [None, None, 'best', None, None]


def test_the_picture_is_in_the_page(page):
  (data,) = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
  assert base64.b64decode(data) == PNG


def test_nothing_is_fetched_from_elsewhere(page):
  for tag, attributes in Reader(page).tags:
    assert tag not in ('script', 'link', 'iframe')
    assert 'href' not in attributes
    assert attributes.get('src', 'data:').startswith('data:')
  assert 'url(' not in page and '@import' not in page


def test_it_follows_the_reader_into_the_dark(page):
  assert 'color-scheme: light dark' in page
  assert 'prefers-color-scheme: dark' in page


def test_a_row_of_another_length_is_refused():
  with pytest.raises(ValueError, match='row 1 has 1 cells.* 2 columns'):
    report.table(['a', 'b'], [[1, 2], [3]])


def test_a_failed_page_leaves_the_old_one(tmp_path):
  path = report.write(tmp_path / 'x.html', 'old', [])
  before = path.read_bytes()

  def broken():
    yield 'a'
    raise OSError('disk full')

  with pytest.raises(OSError, match='disk full'):
    report.write(path, 'new', broken())
  assert path.read_bytes() == before
  assert [p.name for p in tmp_path.iterdir()] == ['x.html']

"""Reports: one HTML file that needs nothing else, read by day and by night.

    parts = [report.table(columns, rows), report.picture(path, 'What it shows')]
    report.write('report.html', 'Title', parts)

Every function returns HTML; text is escaped.
"""

from __future__ import annotations

import base64
import html
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specjax import files, runs

Path = str | os.PathLike[str]

# Pictures have a white ground of their own, which a dark page frames.
_STYLE = """
:root { color-scheme: light dark; --line: #ccc; --soft: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  :root { --line: #555; --soft: #2a2a2a; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; background: white; padding: .5rem;
  border-radius: .4rem; box-sizing: border-box; }
figcaption { margin-top: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.best { font-weight: bold; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto;
  border-radius: .4rem; }
""".strip()


def write(path: Path, title: str, parts: Iterable[str]) -> pathlib.Path:
  """Writes a page: all of it or, if interrupted, nothing.

  Args:
    path: the file.
    title: of the page.
    parts: what the other functions return, in order.

  Returns:
    The path.
  """
  body = '\n'.join(parts)
  page = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n'
    f'</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n'
  )
  with files.atomic(path) as file:
    file.write(page.encode())
  return pathlib.Path(path)


def heading(text: str) -> str:
  """A heading of a part."""
  return f'<h2>{html.escape(text)}</h2>'


def paragraph(text: str) -> str:
  """A paragraph."""
  return f'<p>{html.escape(text)}</p>'


def picture(path: Path, caption: str) -> str:
  """A PNG, in the page itself.

  Args:
    path: of the file.
    caption: what it shows, below it and for those who do not see it.
  """
  data = base64.b64encode(pathlib.Path(path).read_bytes()).decode()
  text = html.escape(caption)
  return (
    f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
    f'<figcaption>{text}</figcaption></figure>'
  )


def table(
  columns: Sequence[str],
  rows: Iterable[Sequence[Any]],
  best: int | None = None,
) -> str:
  """A table.

  Args:
    columns: their names.
    rows: cells, shown as `str` shows them.
    best: the row to print in bold.

  Raises:
    ValueError: a row has more cells than there are columns, or fewer.
  """
  lines = [f'<tr>{_cells("th", columns)}</tr>']
  for i, row in enumerate(rows):
    if len(row) != len(columns):
      raise ValueError(
        f'row {i} has {len(row)} cells, and there are {len(columns)} columns'
      )
    mark = ' class="best"' if i == best else ''
    lines.append(f'<tr{mark}>{_cells("td", row)}</tr>')
  inside = '\n'.join(lines)
  return f'<div class="wide"><table>\n{inside}\n</table></div>'


def code(text: str) -> str:
  """Commands, or other text to be copied."""
  return f'<pre>{html.escape(text)}</pre>'


def values(mapping: Mapping[str, Any]) -> str:
  """Names and values, a line each."""
  return table(('', ''), list(mapping.items()))


def folded(summary: str, value: Any) -> str:
  """A long JSON value, such as a configuration, behind one line.

  Args:
    summary: the line.
    value: shown as JSON.
  """
  text = json.dumps(runs.portable(value), indent=2)
  return (
    f'<details><summary>{html.escape(summary)}</summary>{code(text)}</details>'
  )


def _cells(tag: str, cells: Iterable[Any]) -> str:
  return ''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)

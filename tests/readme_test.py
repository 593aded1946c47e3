import pathlib
import re

import jax
import numpy as np
import pytest

import specjax

ROOT = pathlib.Path(__file__).parents[1]
README, EXTENDING = ROOT / 'README.md', ROOT / 'docs' / 'extending.md'
PAGES = README, *sorted((ROOT / 'docs').glob('*.md'))


def block(page):
  """Its one example in Python."""
  (code,) = re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL)
  return code


def anchor(heading):
  """What a heading is called in links."""
  return re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_what_pages_name_is_there(page):
  text = page.read_text()
  links = re.findall(r'\]\((?!http)([^)#]*)#?([^)]*)\)', text)
  for path, part in links:
    found = (page.parent / path).resolve() if path else page
    assert found.exists(), path
    if part:
      headings = re.findall(r'^#+ (.*)$', found.read_text(), re.MULTILINE)
      assert part in map(anchor, headings), part
  files = re.findall(r'\b(?:configs|train|eval|specjax)/\w+\.py', text)
  for path in files:
    assert (ROOT / path).exists(), path
  assert len(links) + len(files) > 3


def test_the_example_runs(capsys):
  code = block(README)
  assert 15 <= len(code.strip().splitlines()) <= 25
  exec(compile(code, str(README), 'exec'), {})
  tokens, acceptance = capsys.readouterr().out.strip().split('\n')
  assert tokens.count(',') == 31
  assert 0 < float(acceptance) <= 1


def test_the_recipe_s_drafter_is_one():
  """Behind a text of period two it is always right."""
  code = block(EXTENDING)
  names = {'__name__': 'recipe'}
  exec(compile(code, str(EXTENDING), 'exec'), names)
  turn = specjax.Markov(9.0 * np.eye(4)[[1, 0, 3, 2]])
  results = [
    specjax.generate(
      turn,
      drafter,
      [[0, 1], [3, 2, 3]],
      key=jax.random.key(0),
      max_new_tokens=10,
      warp=specjax.Greedy(),
    )
    for drafter in (names['Periodic'](4), specjax.NoDrafter())
  ]
  one, plain = (result.new_tokens() for result in results)
  assert one == plain and results[0].stats.rounds.tolist() == [2, 2]

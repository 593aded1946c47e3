import pathlib
import re

import jax
import numpy as np

import specjax

README = pathlib.Path(__file__).parents[1] / 'README.md'


def blocks():
  return re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)


def test_the_example_runs(capsys):
  code = blocks()[0]
  assert 15 <= len(code.strip().splitlines()) <= 25
  exec(compile(code, str(README), 'exec'), {})
  tokens, acceptance = capsys.readouterr().out.strip().split('\n')
  assert tokens.count(',') == 31
  assert 0 < float(acceptance) <= 1


def test_the_recipe_s_drafter_is_one():
  """Behind a text of period two it is always right."""
  _, code = blocks()
  names = {'__name__': 'recipe'}
  exec(compile(code, str(README), 'exec'), names)
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

import pathlib
import re


def test_the_example_runs(capsys):
  readme = pathlib.Path(__file__).parents[1] / 'README.md'
  (code,) = re.findall(r'```python\n(.*?)```', readme.read_text(), re.DOTALL)
  assert 15 <= len(code.strip().splitlines()) <= 25
  exec(compile(code, str(readme), 'exec'), {})
  tokens, acceptance = capsys.readouterr().out.strip().split('\n')
  assert tokens.count(',') == 31
  assert 0 < float(acceptance) <= 1

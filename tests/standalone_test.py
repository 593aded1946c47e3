"""Each way to draft is a file that can be left out."""

import ast
import pathlib

import pytest
import scripts

import specjax
from specjax import drafters

# What is made of another drafter needs it. `none` is plain decoding, which
# everything is measured against.
NEEDS = {
  'committee': {'model'},
  'coupled': {'model'},
  'mixture': {'model', 'ngram'},
  'tree': {'model'},
}
SOURCES = sorted(
  path
  for folder in ('specjax', 'eval', 'train')
  for path in (scripts.ROOT / folder).rglob('*.py')
)


def imported(path):
  """The files of drafters that are read when this one is."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      names = [node.module, *(f'{node.module}.{x.name}' for x in node.names)]
    elif isinstance(node, ast.Import):
      names = [x.name for x in node.names]
    else:
      continue
    found |= {
      specjax._DRAFTERS.get(name.removeprefix('specjax.')) for name in names
    }
    for name in names:
      parts = name.split('.')
      if parts[:2] == ['specjax', 'drafters'] and len(parts) > 2:
        found.add(parts[2])
  return found & set(drafters.names()) - {'none'}


@pytest.mark.parametrize(
  'path', SOURCES, ids=lambda path: str(path.relative_to(scripts.ROOT))
)
def test_no_other_file_is_made_of_it(path):
  own = path.stem if path.parent.name == 'drafters' else None
  assert imported(path) <= NEEDS.get(own, set()), path


@pytest.mark.slow
@pytest.mark.parametrize(
  'left', [('model',), ('ngram',), ('eagle', 'model', 'tree')]
)
def test_what_is_left_works_without_the_rest(left):
  """Everything imports, its page is accepted, and it decodes."""
  others = set(drafters.names()) - {'none', *left}
  program = f"""
import importlib, pkgutil, jax, specjax
for module in pkgutil.walk_packages(specjax.__path__, 'specjax.'):
  if module.name not in gone:
    importlib.import_module(module.name)
from specjax import drafters, experiment, settings
for name in {sorted(set(left) & {'model', 'eagle'})}:
  page = 'configs/' + {{'model': 'stdlib', 'eagle': 'eagle'}}[name] + '.py:tiny'
  settings.check(experiment.load(page).to_dict())
from flax import nnx
sizes = specjax.TransformerConfig(5, 8, 1, 1, 1, 8)
target = specjax.Transformer(sizes, nnx.Rngs(0))
name = {left}[0]
if name == 'ngram':
  drafter = specjax.NGram(2)
else:
  model = dict(width=8, layers=1, heads=1, kv_heads=1, hidden=8)
  page = {{'k': 2, 'model': model, 'eagle': {{'unroll': 2}}}}
  drafter = drafters.find(name).build(page, sizes, nnx.Rngs(0))
found = specjax.generate(
  target, drafter, [[1, 2]], key=jax.random.key(0), max_new_tokens=3
)
print(found.new_tokens())
"""
  out = scripts.execute(program, {f'specjax.drafters.{x}' for x in others})
  assert len(ast.literal_eval(out)[0]) == 3


def test_an_import_would_be_seen(tmp_path):
  path = pathlib.Path(tmp_path / 'other.py')
  path.write_text('from specjax.drafters import tree\n')
  assert imported(path) == {'tree'}
  path.write_text('import specjax.drafters.eagle as e\n')
  assert imported(path) == {'eagle'}

"""GGUF: what is written is what was there."""

import dataclasses

import jax
import numpy as np
import pytest
import toys

from specjax.models import gguf, tensors

pytest.importorskip('gguf', reason='no gguf')

LLAMA3 = {
  'rope_factor': 8.0,
  'rope_band': (1.0, 4.0),
  'rope_theta': 5e5,
  'head_dim': 16,
}
# By name: the architecture, and what is its own.
FAMILIES = {
  'llama': ('llama', {}),
  'untied': ('llama', {'tied': False, 'head_dim': 6, 'rope_theta': 5e4}),
  'linear': ('llama', {'rope_factor': 4.0}),
  'llama3': ('llama', LLAMA3),
  'qwen2': ('qwen2', {'qkv_bias': True}),
  'qwen3': ('qwen3', {'qk_norm': True, 'norm_eps': 1e-6}),
}


@pytest.mark.parametrize('family', FAMILIES)
def test_what_is_saved_loads_as_it_was(family, tmp_path):
  architecture, own = FAMILIES[family]
  model = toys.transformer(**own)
  path = tmp_path / 'model.gguf'
  gguf.save(model, path)
  assert list(tmp_path.iterdir()) == [path]
  assert gguf.File(path).get('general.architecture') == architecture
  back = gguf.load(path)
  for key, value in dataclasses.asdict(model.config).items():
    if key == 'head_dim':  # the file always says it
      value = model.config.head_size
    found = getattr(back.config, key)
    assert found == (pytest.approx(value) if key == 'norm_eps' else value)
  jax.tree.map(np.testing.assert_array_equal, leaves(back), leaves(model))


def leaves(model):
  return jax.tree.leaves(model)


def test_rows_of_a_head_are_paired_as_llama_cpp_pairs_them():
  rows = np.arange(2 * 6 * 3).reshape(12, 3)
  paired = tensors.pairs(rows, 6)
  # Of each head the rows 0, 3, 1, 4, 2, 5.
  order = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
  np.testing.assert_array_equal(paired, rows[order])
  np.testing.assert_array_equal(tensors.halves(paired, 6), rows)


@pytest.mark.parametrize(
  'changes',
  [{'attention_window': 8}, {'qkv_bias': True, 'qk_norm': True}],
)
def test_what_llama_cpp_has_no_architecture_for_is_refused(changes, tmp_path):
  with pytest.raises(ValueError, match='no architecture of llama.cpp'):
    gguf.save(toys.transformer(**changes), tmp_path / 'model.gguf')
  assert not list(tmp_path.iterdir())

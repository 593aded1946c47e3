"""What all tests share."""

import hypothesis
import jax
import pytest
import toys

from specjax import decode, generation

# The same examples every time: a failure is a change of the code, never luck.
hypothesis.settings.register_profile(
  'specjax', deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile('specjax')


def pytest_addoption(parser):
  """Says what `make test-exhaustive` adds."""
  parser.addoption(
    '--exhaustive',
    action='store_true',
    help='enumerate rules on all tables instead of every tenth',
  )


@pytest.fixture(scope='module')
def quick_compilation():
  """For programs that run a few times only."""
  advance = toys.jit(decode.advance, donate_argnums=5)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(generation, 'advance', advance)
    patch.setattr(generation, '_prefill', toys.jit(decode.prefill))
    yield


@pytest.fixture(autouse=True, scope='module')
def few_programs():
  """A process may map so many compiled programs, and no more."""
  yield
  jax.clear_caches()

"""What all tests share."""

import hypothesis
import jax
import pytest
import toys

from specjax import generation, weights
from specjax.certify import samples

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
    help='enumerate rules on all tables instead of every twentieth',
  )


@pytest.fixture(scope='module')
def quick_compilation():
  """For programs that run a few times only."""
  mesh = {'static_argnames': 'mesh'}
  with pytest.MonkeyPatch.context() as patch:
    for module, name, options in (
      (generation, 'advance', {'donate_argnums': 5, **mesh}),
      (generation, '_prefill', mesh),
      (samples, '_decode', {}),
      (samples, '_observe', {'static_argnums': 5}),
    ):
      function = getattr(module, name).__wrapped__
      patch.setattr(module, name, toys.jit(function, **options))
    yield


@pytest.fixture(autouse=True, scope='module')
def few_programs():
  """A process may map so many compiled programs, and no more."""
  yield
  jax.clear_caches()


@pytest.fixture(autouse=True, scope='session')
def packed_where_asked():
  """Weights are packed on every CPU, also where that does not pay."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(weights, 'tiles_pay', lambda: True)
    yield

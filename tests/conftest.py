"""What all tests share."""

import hypothesis

# The same examples every time: a failure is a change of the code, never luck.
hypothesis.settings.register_profile(
  'specjax', deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile('specjax')

"""Is the output law the target's? Tests with known error rates.

    results = certify.sample(target, drafter, prompts, ...)
    evidence = certify.observe(target, results, direction=drafter)
    tests = certify.decide({'speculative': evidence, ...}, lags=k + 1)

The target says, without a cache and in float32, what law every emitted token
should have had given all before it. Under a lossless decoder each statistic
then has a known law, so one sample suffices and plain decoding is only a
control that goes through the same tests:

- the probability integral transforms of the tokens are uniform (a
  Kolmogorov-Smirnov and a G test), also in pairs up to `lags` tokens apart;
- tokens fall as often as they should into the set that the draft favours, A =
  {q > p}, which is the set that sees a leak of the draft best;
- their surprise is the entropy on average;
- two rows of one prompt collide as often as independent ones: what they may
  share is no key;
- rare tokens are as rare as they should be, and impossible ones do not occur.

All of them together, over both arms, fail a lossless decoder with probability
`LEVEL` at most, as far as the G and z tests have their limiting laws (Holm; of
500 null runs of 2 048 tokens 6 failed: .0044 to .0259 with 95 % confidence).
`detectable_leak` says what they catch. What they do not: a fault whose mean
total variation per token is well below that, such as one that is large but
strikes one token in a thousand; one that cancels in every sum above; one that
needs other prompts, longer text or an end token, since nothing here ends a row
early. Lossy rules should fail, and `leak` estimates by how much.

`compare` is the display that papers show, and decides nothing. With equal seeds
some text must be equal token for token: `first_mismatches`.
"""

from specjax.certify.bits import NEAR_TIE, first_mismatches
from specjax.certify.decisions import (
  LEVEL,
  POWER,
  Test,
  decide,
  detectable_leak,
  holm,
  leak,
  pit,
)
from specjax.certify.display import compare, compare_log_probability
from specjax.certify.samples import (
  Evidence,
  Replayed,
  observe,
  row_keys,
  sample,
)

__all__ = [
  'LEVEL',
  'NEAR_TIE',
  'POWER',
  'Evidence',
  'Replayed',
  'Test',
  'compare',
  'compare_log_probability',
  'decide',
  'detectable_leak',
  'first_mismatches',
  'holm',
  'leak',
  'observe',
  'pit',
  'row_keys',
  'sample',
]

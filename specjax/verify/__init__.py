"""Verification rules: how much of a draft to keep, and what follows it.

A rule is a pure function of one sequence, `(Noise, Draft, log_p [N + 1, V]) ->
Verdict`. Row i of `log_p` is the target's law after the path that ends in node
i - 1 (row 0: after the pending token), so a draft of N tokens brings N + 1
rows. A rule returns the *law* of the token that ends the round and not the
token; `decode.step` draws it, in one place. (`sampler_match`, whose point is
which token is drawn, returns a point mass.)

Everything is in log space and without epsilons: a token is accepted iff
`log u <= log alpha` with u in (0, 1], a token with p = 0 never, and one with
p > 0 = q always. Rules compute in the dtype of `log_p`.

| rule | exact for | reads q |
|---|---|---|
| `rejection` | chains and trees, all but 'coupled' | yes |
| `block` | chains | yes |
| `traversal` | chains and trees, all but 'coupled' | yes |
| `k_seq` | chains, trees of 'iid' siblings | yes |
| `sampler_match` | everything | no |
| `typical`, `top_k`, `distance` | nothing: lossy | no |
| `lenience` | nothing: lossy | yes |

A rule with numbers takes them as keyword arguments;
`jax.tree_util.Partial(lenience, factor=0.5)` is a rule whose number is a leaf.
"""

from __future__ import annotations

import jax

from specjax import names
from specjax.types import Verifier
from specjax.verify.exact import k_seq, rejection, sampler_match
from specjax.verify.joint import block, traversal
from specjax.verify.lossy import distance, lenience, top_k, typical
from specjax.verify.parts import EMPTY_RESIDUAL, NAN

RULES = {
  rule.__name__: rule
  for rule in (
    rejection,
    block,
    traversal,
    k_seq,
    sampler_match,
    typical,
    top_k,
    distance,
    lenience,
  )
}
LOSSY = frozenset({'typical', 'top_k', 'distance', 'lenience'})

__all__ = [
  'EMPTY_RESIDUAL',
  'LOSSY',
  'NAN',
  'RULES',
  'as_pytree',
  'block',
  'distance',
  'find',
  'is_lossy',
  'k_seq',
  'lenience',
  'rejection',
  'sampler_match',
  'top_k',
  'traversal',
  'typical',
]


def find(name: str) -> Verifier:
  """The rule of a name.

  Args:
    name: a key of `RULES`, or 'module:function' for one of your own.

  Raises:
    ValueError: there is none.
  """
  return names.function(name, RULES, 'rule')


def is_lossy(name: str) -> bool:
  """Whether the rule of a name is one of `LOSSY`, however it is spelt."""
  return find(name) in [RULES[lossy] for lossy in LOSSY]


def as_pytree(rule: Verifier) -> Verifier:
  """The rule as an argument of a jitted function; its numbers are leaves."""
  # A function has no leaves and is not a pytree; everything else is one.
  if jax.tree_util.all_leaves([rule]):
    return jax.tree_util.Partial(rule)
  return rule

"""Rules, enumerated exactly on small tables: the law they really give.

A table is a language model over very few tokens, with a law of its own behind
every context. Every draft it could give is weighted by its probability, every
outcome of the accept tests by what the rule itself reports, and every round is
completed by the target: the sum is the joint law of the tokens, without any
sampling error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax import trees, verify
from specjax.types import Draft, Noise, Verifier

# Verdicts at a time: drafts, and outcomes of one draft.
CHUNK, GROUP = 512, 8

Laws = Sequence[np.ndarray]  # `[V] * d + [V]` for depths d = 0, 1, ...


class Outcome(NamedTuple):
  """What a rule comes to.

  Attributes:
    joint: `[V] * (depth + 1)` law of the first tokens.
    total: the sum of all weights, 1 if the rule reports its tests rightly.
    tokens_per_round: mean number of accepted tokens, plus one.
  """

  joint: np.ndarray
  total: float
  tokens_per_round: float


def random_laws(
  rng: np.random.Generator, vocab: int, depth: int, zeros: float = 0.0
) -> list[np.ndarray]:
  """A random table.

  Args:
    rng: source.
    vocab: V.
    depth: how many depths.
    zeros: share of tokens that are impossible behind a context, about.
  """
  laws = []
  for d in range(depth):
    law = rng.dirichlet(np.full(vocab, 0.6), (vocab,) * d)
    gone = rng.random(law.shape) < zeros
    law = np.where(gone & ~gone.all(-1, keepdims=True), 0, law)
    total = law.sum(-1, keepdims=True)
    laws.append(np.where(total > 0, law / np.where(total > 0, total, 1), 1))
    laws[-1] /= laws[-1].sum(-1, keepdims=True)
  return laws


def joint(p: Laws) -> np.ndarray:
  """`[V] * len(p)` joint law of a table."""
  law = np.ones(())
  for conditional in p:
    law = law[..., None] * conditional
  return law


def enumerate_rule(
  rule: Verifier,
  p: Laws,
  q: Laws | None,
  branching: Sequence[int],
  siblings: str = 'single',
  chain: bool = False,
  merge: bool = False,
  dtype: str = 'float32',
  stop: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Outcome:
  """The joint law of a rule on a tree in which every node branches alike.

  Args:
    rule: the rule; it may be lossy.
    p: the target's laws, one depth more than the tree has.
    q: the draft's; None drafts the first tokens of the vocabulary, as point
      masses. For 'independent' siblings the second draws from q reversed, the
      third from q again, and so on.
    branching: children of every node, by depth.
    siblings: as in `Draft`.
    chain: without parents; every number in `branching` is 1.
    merge: what hangs off equal siblings, by `trees.merge`.
    dtype: that the rule computes in; 'float64' needs `jax_enable_x64`.
    stop: maps laws `[D, V]` to where a draft ends instead of drawing, `[D]`.
  """
  vocab, parents, depth = p[0].shape[-1], _parents(branching), len(branching)
  level = _levels(parents)
  n = len(parents)
  tokens, weights, log_q = _drafts(q, vocab, parents, level, siblings, stop)
  log_p = np.stack(
    [p[0] + np.zeros((len(tokens), vocab))]
    + [p[level[i]][tuple(tokens[:, _path(parents, i)].T)] for i in range(n)],
    1,
  )
  with np.errstate(divide='ignore'):
    log_p = np.log(log_p)
  run = functools.partial(
    _run,
    rule,
    None if chain else np.array(parents, np.int32),
    merge,
    siblings,
    tokens,
    None if q is None else log_q.astype(dtype),
    log_p.astype(dtype),
  )
  rest = _rest(p)
  law, total, mean = np.zeros((vocab,) * (depth + 1)), 0.0, 0.0
  for draft, accepted, last, log_tests in run(n):
    mass = weights[draft] * np.exp(log_tests.sum(-1))
    count = accepted.sum(-1)
    total, mean = total + mass.sum(), mean + (mass * count).sum()
    for c in range(depth + 1):
      here = (count == c) & (mass > 0)
      if here.any():
        order = np.argsort(~accepted[here], axis=-1, kind='stable')[:, :c]
        path = tuple(np.take_along_axis(tokens[draft[here]], order, 1).T)
        shape = (-1, vocab) + (1,) * (depth - c)
        value = np.exp(last[here]).reshape(shape) * rest[c + 1][path]
        value = mass[here].reshape(-1, *[1] * (depth - c + 1)) * value
        if path:
          np.add.at(law, path, value)
        else:
          law += value.sum(0)
  return Outcome(law, total, 1 + mean)


def _parents(branching: Sequence[int]) -> list[int]:
  """Level by level, -1 for a child of the pending token."""
  parents, above = [], [-1]
  for count in branching:
    start = len(parents)
    parents += [node for node in above for _ in range(count)]
    above = range(start, len(parents))
  return parents


def _levels(parents: Sequence[int]) -> list[int]:
  level = []
  for parent in parents:
    level.append(1 if parent < 0 else level[parent] + 1)
  return level


def _path(parents: Sequence[int], node: int) -> list[int]:
  """The nodes from the root to `node`."""
  path = []
  while node >= 0:
    path.append(node)
    node = parents[node]
  return path[::-1]


def _rest(p: Laws) -> list[np.ndarray]:
  """By depth d, laws `[V] * len(p)` of tokens d, ... given those before."""
  rest = [np.ones((p[0].shape[-1],) * len(p))]
  for law in reversed(p):
    shape = law.shape + (1,) * (len(p) - law.ndim)
    rest.append(law.reshape(shape) * rest[-1])
  return rest[::-1]


def _drafts(q, vocab, parents, level, siblings, stop):
  """Tokens `[D, N]`, weights `[D]` and log-laws `[D, N, V]` of all drafts."""
  n = len(parents)
  earlier = [
    [j for j in range(i) if parents[j] == parents[i]] for i in range(n)
  ]
  if q is None:
    tokens = np.array([[len(earlier[i]) for i in range(n)]], np.int32)
    return tokens, np.ones(1), None
  tokens = np.zeros((1, 0), np.int32)
  weights, laws = np.ones(1), np.zeros((1, 0, vocab))
  for i in range(n):
    path = _path(parents, i)[:-1]
    law = q[level[i] - 1][tuple(tokens[:, path].T)]
    law = np.broadcast_to(law, (len(tokens), vocab)).copy()
    if siblings == 'independent' and len(earlier[i]) % 2:
      law = law[:, ::-1]
    if siblings == 'distinct':
      for j in earlier[i]:
        law[np.arange(len(law)), tokens[:, j]] = 0
      total = law.sum(-1, keepdims=True)
      law = np.where(total > 0, law / np.where(total > 0, total, 1), 0)
    if stop is not None:
      law[stop(law)] = 0
    laws = np.concatenate([laws, law[:, None]], 1)
    # A node that nothing is left for is invalid: -1 for now, in one branch.
    spent = law.sum(-1) == 0
    choices = np.concatenate([law, spent[:, None]], 1)
    draft, token = np.nonzero(choices)
    weights = weights[draft] * choices[draft, token]
    token = np.where(token == vocab, -1, token).astype(np.int32)
    tokens = np.concatenate([tokens[draft], token[:, None]], 1)
    laws = laws[draft]
  with np.errstate(divide='ignore'):
    return tokens, weights, np.log(laws)


def _run(rule, parents, merge, siblings, tokens, log_q, log_p, n):
  """Verdicts on all drafts, for all outcomes of the tests that are made.

  Beginning with all tests failed, each that was made and failed passes next:
  so every outcome is come to, one pass at a time in the order of the tests.

  Yields:
    For a chunk: numbers of drafts, and of their verdicts `accepted`, `law` and
    `log_tests`, in float64.
  """
  invalid = tokens < 0
  for i, parent in enumerate(() if parents is None else parents):
    if parent >= 0:
      invalid[:, i] |= invalid[:, parent]
  tokens = np.where(invalid, 0, tokens)
  if parents is not None:
    parents = np.tile(parents, (len(tokens), 1))
    if merge:
      parents = np.asarray(trees.merge(tokens, parents, ~invalid))
  bits = 1 << np.arange(n, dtype=np.int64)
  todo = np.arange(len(tokens), dtype=np.int64) << n  # draft, then outcomes
  tried, seen = todo, todo[:0]
  while len(todo):
    # What a draft alone decides is computed once for some of its outcomes.
    draft = todo >> n
    place = np.arange(len(todo)) - np.searchsorted(draft, draft)
    first = np.flatnonzero(place % GROUP == 0)
    group = np.cumsum(place % GROUP == 0) - 1
    slot = place % GROUP
    codes = np.tile(todo[first, None], GROUP)
    codes[group, slot] = todo
    verdicts = []
    for start in range(0, len(codes), CHUNK):
      full = np.resize(codes[start:], (CHUNK, GROUP))  # one shape to compile
      draft, passed = full[:, 0] >> n, (full[..., None] & bits) > 0
      verdict = _verdicts(
        verify.as_pytree(rule),
        siblings,
        np.where(passed, -np.inf, np.inf).astype(log_p.dtype),
        tokens[draft],
        None if parents is None else parents[draft],
        None if log_q is None else log_q[draft],
        ~invalid[draft],
        log_p[draft],
      )
      verdicts.append([np.asarray(x) for x in verdict[:4]])
    accepted, law, tested, log_tests = (
      np.concatenate(parts)[group, slot]
      for parts in zip(*verdicts, strict=True)
    )
    # What a test would have said that was not made makes no other outcome.
    made = tested @ bits
    code = todo & (made | -(1 << n))
    _, first = np.unique(code, return_index=True)
    new = first[~np.isin(code[first], seen)]
    seen = np.concatenate([seen, code[new]])
    float64 = (x[new].astype(np.float64) for x in (law, log_tests))
    yield code[new] >> n, accepted[new], *float64
    failed = tested[new] & ((code[new][:, None] & bits) == 0)
    turned = np.sort((code[new][:, None] | bits)[failed])
    turned = turned[np.diff(turned, prepend=-1) > 0]
    todo = turned[~np.isin(turned, tried, assume_unique=True)]
    tried = np.concatenate([tried, todo])


@functools.partial(jax.jit, static_argnums=1)
def _verdicts(rule, siblings, log_u, tokens, parents, log_q, valid, log_p):
  def one(log_u, tokens, parents, log_q, valid, log_p):
    draft = Draft(tokens, parents, log_q, valid, siblings)
    # A rule that draws with keys is not enumerated.
    keys = jax.random.split(jax.random.key(0), len(tokens) + 1)
    return rule(Noise(log_u, keys), draft, log_p)

  outcomes = jax.vmap(one, (0, *[None] * 5))
  return jax.vmap(outcomes)(log_u, tokens, parents, log_q, valid, log_p)


class Case(NamedTuple):
  """A rule on drafts of one shape.

  Attributes:
    rule: its name.
    siblings: as in `Draft`.
    branching: children of every node, by depth.
    vocab: V.
    tables: how many at full strength.
    chain: as in `enumerate_rule`.
    merge: as in `enumerate_rule`.
    points: whether the draft is deterministic.
  """

  rule: str
  siblings: str
  branching: tuple[int, ...]
  vocab: int
  tables: int
  chain: bool = False
  merge: bool = False
  points: bool = False


def cases() -> list[Case]:
  """What every exact rule of specjax is enumerated on."""
  found = []
  for rule in ('rejection', 'block', 'traversal', 'k_seq'):
    for k in (1, 2, 3):
      found.append(Case(rule, 'single', (1,) * k, 5, 200, chain=True))
    if rule != 'k_seq':
      points = Case(rule, 'fixed', (1, 1, 1), 5, 200, chain=True, points=True)
      found.append(points)
  for rule in ('rejection', 'traversal', 'k_seq'):
    kinds = ('iid',) if rule == 'k_seq' else ('iid', 'distinct', 'independent')
    for kind in kinds:
      merge = kind != 'distinct'
      found.append(Case(rule, kind, (2, 2), 3, 200, merge=merge))
      if kind != 'independent':
        found.append(Case(rule, kind, (2, 2, 2), 2, 50, merge=merge))
    if rule != 'k_seq':
      found.append(Case(rule, 'fixed', (2, 2), 3, 200, points=True))
  return found


class Survey(NamedTuple):
  """What a case came to over all tables.

  Attributes:
    case: which.
    tables: how many.
    deviation: largest difference of any probability from the target's.
    tokens_per_round: of each table.
  """

  case: Case
  tables: int
  deviation: float
  tokens_per_round: list[float]


def survey(
  case: Case,
  tables: int,
  dtype: str = 'float32',
  rule: Verifier | None = None,
) -> Survey:
  """Enumerates a case on random tables, the same for every rule.

  Args:
    case: which.
    tables: how many, at most as many as the case has.
    dtype: 'float32', or 'float64' under `jax_enable_x64`.
    rule: instead of the case's.
  """
  tables = min(tables, case.tables)
  worst, tokens = 0.0, []
  depth = len(case.branching)
  for seed in range(tables):
    rng = np.random.default_rng(seed)
    # Every other table has impossible tokens, on either side.
    zeros = 0.3 * (seed % 2)
    p = random_laws(rng, case.vocab, depth + 1, zeros)
    q = random_laws(rng, case.vocab, depth, zeros * (seed % 4 > 1))
    got = enumerate_rule(
      rule or verify.RULES[case.rule],
      p,
      None if case.points else q,
      case.branching,
      case.siblings,
      case.chain,
      case.merge,
      dtype,
    )
    off = abs(got.joint - joint(p)).max()
    worst = max(worst, off, abs(got.total - 1))
    tokens.append(got.tokens_per_round)
  return Survey(case, tables, float(worst), tokens)

"""Slow references in NumPy and float64: what the tests compare with."""

import collections
import itertools

import numpy as np
from scipy import stats


def softmax(logits):
  """Probabilities `[..., V]`; -inf is zero."""
  logits = np.asarray(logits, np.float64)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def log(p):
  """Float32 logarithms, -inf where p = 0."""
  with np.errstate(divide='ignore'):
    return np.log(np.asarray(p, np.float64)).astype(np.float32)


def residual(p, q):
  """(p - q)+ normalised; p where that is empty."""
  left = np.maximum(np.asarray(p, np.float64) - q, 0)
  return left / left.sum() if left.sum() else np.asarray(p, np.float64)


def top_k(p, k):
  """Keeps what is at least the k-th largest of `[V]`."""
  return np.where(p >= np.sort(p)[-min(k, len(p))], p, 0)


def top_p(p, mass):
  """Keeps what has less than `mass` strictly above it in `[V]`."""
  above = np.array([p[p > x].sum() for x in p])
  return np.where((above < mass - 1e-6) | (mass >= 1), p, 0)


def min_p(p, share):
  """Keeps what is at least `share` of the largest of `[V]`."""
  return np.where(p >= share * p.max(), p, 0)


def table(seed, order, vocab, scale):
  """Random logits `[V] * order + [V]` of a Markov model."""
  shape = (vocab,) * (order + 1)
  logits = np.random.default_rng(seed).normal(size=shape) * scale
  return logits.astype(np.float32)


def following(logits, history):
  """The row `[V]` of a Markov table after `history`, 0 before its start."""
  order = logits.ndim - 1
  return logits[tuple(([0] * order + list(history))[-order:])]


def joint(logits, prompt, steps, warp=softmax, eos=()):
  """Law `[V] * steps` of what follows; 0 stands behind an end token.

  `warp` maps logits `[V]` to probabilities.
  """
  vocab = logits.shape[-1]
  law = np.zeros((vocab,) * steps)
  for path in itertools.product(range(vocab), repeat=steps):
    mass, ended = 1.0, False
    for i, token in enumerate(path):
      if ended:
        mass *= token == 0
      else:
        mass *= warp(following(logits, [*prompt, *path[:i]]))[token]
      ended |= token in eos
    law[path] = mass
  return law


def greedy(logits, prompt, new, eos=(), least=0):
  """The tokens that greedy decoding adds, the first maximum winning."""
  out = []
  while len(out) < new:
    row = following(logits, [*prompt, *out]).copy()
    if len(out) < least:
      row[list(eos)] = -np.inf
    out.append(int(np.argmax(row)))
    if out[-1] in eos:
      break
  return out


def lookup(tokens, k, n, least=1):
  """Prompt lookup: what followed the longest, then latest, earlier match."""
  for size in range(min(n, len(tokens)), least - 1, -1):
    suffix = tokens[-size:]
    for end in range(len(tokens) - 1, size - 1, -1):
      if tokens[end - size : end] == suffix:
        return tokens[end : end + k]
  return []


def p_value(samples, law):
  """Chi-square p-value of `samples` `[N, steps]` against `law`.

  Cells expected fewer than ten times are pooled; what the law forbids refutes
  it outright.
  """
  counts = collections.Counter(map(tuple, np.asarray(samples).tolist()))
  seen = np.zeros(law.shape)
  for path, count in counts.items():
    seen[path] = count
  if seen[law == 0].any():
    return 0.0
  order = np.argsort(law, axis=None)
  seen, expected = seen.ravel()[order], law.ravel()[order] * len(samples)
  # The fewest of the rarest cells that are expected ten times together.
  rare = max((expected < 10).sum(), (np.cumsum(expected) < 10).sum() + 1)
  pooled = [np.append(x[rare:], x[:rare].sum()) for x in (seen, expected)]
  if len(pooled[0]) == 1:
    return 1.0
  return stats.chisquare(*pooled).pvalue

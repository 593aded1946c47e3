"""Medusa: residual heads on the features of a frozen target.

Medusa-1 of Cai et al. 2024, arXiv 2401.10774. Its heads have an unembedding
each, which begins as the target's; here all share the target's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import weights
from specjax.candidates import CandidateTree, full_tree
from specjax.heads import HeadsDrafter, section
from specjax.types import Array, pytree


@pytree
class ResidualHead:
  """x + SiLU(W x), once or several times in a row.

  Attributes:
    weights: `[D, D]` each. Zeros change nothing: the head then says of its
      token what the target said of the pending one.
  """

  weights: tuple[Array, ...]

  @property
  def width(self) -> int:
    """D."""
    return self.weights[0].shape[-1]

  def __call__(self, features: Array) -> Array:
    """`[..., D]` to `[..., D]`."""
    for weight in self.weights:
      features = features + jax.nn.silu(weights.dot(features, weight))
    return features


def build(config, target, rngs) -> HeadsDrafter:
  """Reads `k` and, under `medusa`, what the heads and perhaps a tree are like.

  There are `heads` of them, of `layers` (1) each. They draft a chain, or a tree
  of `branching` or of `paths`; see `CandidateTree`.
  Nothing is random: all seeds begin alike.
  """
  c = section(config, 'medusa')
  shape = target.width, target.width
  heads = tuple(
    # Arrays of their own, since a donated state may not alias.
    ResidualHead(tuple(jnp.zeros(shape) for _ in range(c.get('layers', 1))))
    for _ in range(c['heads'])
  )
  paths = c.get('paths')
  if 'branching' in c:
    paths = full_tree(c['branching'], config['k'])
  if paths is None:
    return HeadsDrafter(heads, config['k'])
  return CandidateTree(heads, config['k'], paths=paths)

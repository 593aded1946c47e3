"""Blockwise parallel decoding: feed-forward heads on the target's features.

The target is frozen, and the pass that verifies a block brings the features
that the next one is drafted from. At temperature 0 a draft is each head's
likeliest token, kept as far as it is the target's; at others `rejection` or
`block` keep the target's law. The paper's relaxed acceptances are the lossy
rules `top_k` and `distance`. (Stern et al. 2018, arXiv 1811.03115.)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax import weights
from specjax.heads import HeadsDrafter, section
from specjax.types import Array, pytree


@pytree
class FeedForwardHead:
  """x + W ReLU(U x).

  Attributes:
    inner: U, `[hidden, D]`.
    outer: W, `[D, hidden]`. Zeros change nothing: the head then says of its
      token what the target said of the pending one.
  """

  inner: Array
  outer: Array

  @property
  def width(self) -> int:
    """D."""
    return self.outer.shape[-2]

  def __call__(self, features: Array) -> Array:
    """`[..., D]` to `[..., D]`."""
    inner = jax.nn.relu(weights.dot(features, self.inner))
    return features + weights.dot(inner, self.outer)


def build(config, target, rngs) -> HeadsDrafter:
  """Reads `k` and, under `blockwise`, what the heads are like.

  There are `heads` of them, with `hidden` units each (as many as the target's
  layers have).
  """
  c = section(config, 'blockwise')
  width, hidden = target.width, c.get('hidden', target.hidden)
  heads = tuple(
    FeedForwardHead(
      # The features are normalised, and so is what comes of this.
      jax.random.normal(rngs.params(), (hidden, width)) / math.sqrt(width),
      jnp.zeros((width, hidden)),
    )
    for _ in range(c['heads'])
  )
  return HeadsDrafter(heads, config['k'])

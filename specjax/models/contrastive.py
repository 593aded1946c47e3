"""Contrastive decoding as a target law, of two models that share a text."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import warps
from specjax.cache import Cache
from specjax.types import Array, Block, LanguageModel, Output, pytree


@pytree
class Contrastive:
  """What an expert says more than an amateur, among what it finds plausible.

  The logits are (1 + β) log p - β log q, with p the expert's law and q the
  amateur's, where p(x) >= α max p, and -inf elsewhere. (O'Brien and Lewis 2023,
  arXiv 2309.09117; Li et al. 2022, arXiv 2210.15097, which is β -> ∞ up to a
  temperature of β.) With β = 0 and α = 0 it is the expert, bit for bit.

  It is a target like any other: a drafter in front of it, the amateur too, and
  every rule keep this law. A pass is one of both models, and a round's price
  holds the amateur's, also where the amateur has drafted: the token behind a
  whole draft needs what it says there, and its cache moves only by what is
  kept.

  Features are those of the expert, then those of the amateur; taps are the
  expert's. Where the amateur rules out what the expert finds plausible, the law
  is NaN unless β is 0, and decoding says so. It is NaN too where nothing is
  plausible but end tokens and `min_new_tokens` bans them: the mask comes first.

  Attributes:
    expert: p.
    amateur: q, of the same vocabulary.
    alpha: α in [0, 1]: the least share of the largest probability that is
      plausible; 0 is all, 1 the expert's own choice.
    beta: β, from 0: the strength of the contrast. Both are leaves.
  """

  expert: LanguageModel
  amateur: LanguageModel
  alpha: float | Array = 0.1
  beta: float | Array = 0.5

  def __post_init__(self):
    """Refuses two vocabularies, and numbers that make no law."""
    sizes = self.expert.vocab_size, self.amateur.vocab_size
    if len(set(sizes)) > 1:
      raise ValueError(
        f'the expert has {sizes[0]} tokens and the amateur {sizes[1]}: they'
        ' must share one vocabulary'
      )
    alpha, beta = self.alpha, self.beta
    if isinstance(alpha, int | float) and not 0 <= alpha <= 1:
      raise ValueError(f'alpha is {alpha}: it must be from 0 to 1')
    if isinstance(beta, int | float) and not 0 <= beta < jnp.inf:
      raise ValueError(f'beta is {beta}: it must be 0 or positive')

  @property
  def vocab_size(self) -> int:
    """V."""
    return self.expert.vocab_size

  @property
  def positions(self) -> int | None:
    """Tokens of the longest text that both were made for, if it is known."""
    both = (getattr(x, 'positions', None) for x in (self.expert, self.amateur))
    return min((x for x in both if x is not None), default=None)

  def init_cache(self, batch: int, size: int) -> Cache:
    """Empty caches of `size` tokens; both are always equally long."""
    expert, amateur = (m.init_cache(batch, size) for m in self._models)
    return Cache((expert.rows, amateur.rows), expert.length)

  def extend(
    self, block: Block, cache: Cache, taps: tuple[int, ...] = ()
  ) -> tuple[Output, tuple]:
    """Scores a block with both; see `LanguageModel.extend`."""
    expert, amateur = self._split(cache)
    output, own = self.expert.extend(block, expert, taps)
    other, theirs = self.amateur.extend(block, amateur)
    return _join(output, other), (own, theirs)

  def commit(
    self, cache: Cache, rows: tuple, kept: Array, chain: bool = True
  ) -> Cache:
    """Writes the rows of the kept nodes into both caches."""
    parts = zip(self._models, self._split(cache), rows, strict=True)
    expert, amateur = (m.commit(c, r, kept, chain) for m, c, r in parts)
    return Cache((expert.rows, amateur.rows), expert.length)

  def forward(
    self, tokens: Array, segments: Array, taps: tuple[int, ...] = ()
  ) -> Output:
    """Scores whole windows `[B, T]` with both."""
    output = self.expert.forward(tokens, segments, taps)
    return _join(output, self.amateur.forward(tokens, segments))

  def embed(self, tokens: Array) -> Array:
    """Embeddings of both, side by side."""
    return jnp.concatenate([m.embed(tokens) for m in self._models], -1)

  def unembed(self, features: Array) -> Array:
    """The contrastive logits `[..., V]`, float32, up to a constant."""
    token = jnp.zeros((), jnp.int32)
    width = jax.eval_shape(self.expert.embed, token).shape[-1]
    p = self.expert.unembed(features[..., :width])
    q = self.amateur.unembed(features[..., width:])
    # Logits differ from log-probabilities by a constant, which any law ignores.
    plausible = warps.MinP(self.alpha)(p)
    # Not 0 * inf, where both rule a token out.
    more = jnp.where(self.beta > 0, self.beta * (plausible - q), 0.0)
    return jnp.where(plausible == -jnp.inf, -jnp.inf, plausible + more)

  @property
  def _models(self) -> tuple[LanguageModel, LanguageModel]:
    return self.expert, self.amateur

  def _split(self, cache: Cache) -> list[Cache]:
    return [cache._replace(rows=rows) for rows in cache.rows]


def _join(expert: Output, amateur: Output) -> Output:
  both = expert.features, amateur.features
  return expert._replace(features=jnp.concatenate(both, -1))

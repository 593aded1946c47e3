"""Small models with lively weights, for tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import generation, warps
from specjax.drafters.model import ModelDrafter
from specjax.drafters.none import NoDrafter
from specjax.heads import HeadsDrafter
from specjax.models.markov import Markov
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import Draft, pytree

# Compiles in half the time; the instructions are the same, and slower.
QUICK = {'xla_backend_optimization_level': 0}
jit = functools.partial(jax.jit, compiler_options=QUICK)


def transformer(seed=0, cls=Transformer, **changes):
  """A tiny transformer in which every weight matters.

  The usual initialisation leaves attention and logits almost flat and the
  norms at one, so that most faults would hide below any tolerance.
  """
  sizes = dict(
    vocab_size=13, width=16, layers=2, heads=4, kv_heads=2, hidden=24
  )
  config = TransformerConfig(**{**sizes, **changes})
  shapes = jax.eval_shape(lambda: cls(config, nnx.Rngs(0)))
  rng = np.random.default_rng(seed)

  def livelier(leaf):
    if leaf.ndim == 1:
      return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
    return jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype)

  return jax.tree.map(livelier, shapes)


def greedy(model, prompt, count):
  """The tokens that plain greedy decoding puts behind a prompt."""
  return generation.generate(
    model,
    NoDrafter(),
    [prompt],
    key=jax.random.key(0),
    max_new_tokens=count,
    warp=warps.temperature(0.0),
  ).new_tokens()[0]


def top_two_margin(model, text, at):
  """Of the target's law of `text[at]`, and what rounding may turn round."""
  features = forward(model, text[None], np.ones_like(text)[None]).features
  second, first = np.sort(model.unembed(features[0, at - 1]))[-2:]
  if model.config.dtype == 'float32':
    return first - second, 1e-4
  # Two units in the last place of bfloat16: 0.25 of a logit from 16 to 32.
  return first - second, 2 * 2.0 ** (np.floor(np.log2(abs(first))) - 7)


forward = jit(lambda model, *windows: model.forward(*windows))


def markov(seed=0, order=1, vocab=5, scale=1.0):
  """A random table."""
  rng = np.random.default_rng(seed)
  return Markov(scale * rng.normal(size=(vocab,) * (order + 1)))


@pytree
class LinearHead:
  """The simplest head: x W."""

  weight: jax.Array

  @property
  def width(self):
    return self.weight.shape[-1]

  def __call__(self, features):
    return features @ self.weight


def heads(width, k, seed=0, scale=1.0):
  """A drafter of `k` random heads."""
  rng = np.random.default_rng(seed)
  weights = rng.normal(0, scale / np.sqrt(width), (k, width, width))
  weights = jnp.asarray(weights, jnp.float32)
  return HeadsDrafter(tuple(map(LinearHead, weights)), k)


@pytree
class Scripted:
  """Proposes a known text, with a wrong token in some places.

  Attributes:
    text: `[B, T]` what to propose.
    wrong: `[B, T]` where to propose the id after it instead.
    k: draft length.
    vocab: ids wrap here.
  """

  text: jax.Array
  wrong: jax.Array
  k: int = dataclasses.field(metadata={'static': True})
  vocab: int = dataclasses.field(metadata={'static': True})

  def init(self, target, batch, size):
    return ()

  def propose(self, target, cache, memory, keys, tokens, length):
    at = length[:, None] + jnp.arange(self.k)
    at = jnp.minimum(at, self.text.shape[1] - 1)
    take = jax.vmap(lambda row, i: row[i])
    tokens = take(jnp.asarray(self.text), at)
    tokens = (tokens + take(jnp.asarray(self.wrong), at)) % self.vocab
    return Draft(tokens.astype(jnp.int32), siblings='fixed'), memory

  def observe(self, target, memory, block, kept, output):
    return memory


@pytree
class Picky(ModelDrafter):
  """Drops, if picky, a drawn token that it thought improbable: a fault."""

  picky: bool = True

  def propose(self, *args):
    draft, memory = super().propose(*args)
    log_q = jax.nn.log_softmax(draft.logits)
    drawn = jnp.take_along_axis(log_q, draft.tokens[..., None], -1)[..., 0]
    fine = (drawn > jnp.log(0.2)) | ~jnp.asarray(self.picky)
    fine = jnp.cumprod(fine, 1).astype(bool)
    valid = fine if draft.valid is None else draft.valid & fine
    return dataclasses.replace(draft, valid=valid), memory

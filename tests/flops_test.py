"""Operations, against what XLA counts in the compiled program."""

import jax
import numpy as np
import pytest
import toys

from specjax import distill, flops
from specjax.drafters.model import ModelDrafter
from specjax.types import Batch

# Wide enough for products to be most of it.
SIZES = dict(vocab_size=1024, width=128, heads=4, kv_heads=2, hidden=256)
WINDOW = 2 * distill.CHUNK


def counted(f, *args):
  return jax.jit(f).lower(*args).compile().cost_analysis()['flops'] / WINDOW


def test_a_pass_and_a_step_are_what_xla_counts():
  target = toys.transformer(layers=3, **SIZES)
  draft = toys.transformer(layers=2, **SIZES)
  ones = np.ones((1, WINDOW), np.int32)
  batch = Batch(ones, ones, ones.astype(np.float32))

  def features(model):
    return model.forward(batch.tokens, batch.segments).features

  got = flops.body(target.config, WINDOW)
  assert counted(features, target) == pytest.approx(got, rel=0.05)
  got += flops.head(target.config)
  logits = counted(lambda model: model.unembed(features(model)), target)
  assert logits == pytest.approx(got, rel=0.05)

  def loss(drafter):
    weights = distill.objective(1.0)
    return distill.distill_loss(drafter, target, batch, weights)[0]

  got = flops.distillation(target.config, draft.config, WINDOW)
  # Of a loop over two chunks of logits XLA counts one turn, and in it those of
  # both models twice.
  heads = [flops.head(model.config) for model in (target, draft)]
  got += sum(heads) - (2 * heads[0] + 4 * heads[1]) / 2
  step = counted(jax.value_and_grad(loss), ModelDrafter(draft, 2))
  assert step == pytest.approx(got, rel=0.05)

"""Operations, against what XLA counts and what can be counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import distill, flops
from specjax.drafters.model import ModelDrafter
from specjax.types import Batch

# Wide enough for products to be most of it.
SIZES = dict(vocab_size=1024, width=128, heads=4, kv_heads=2, hidden=256)


def test_a_pass_and_its_gradient_are_what_xla_counts():
  model, draft = toys.transformer(layers=3, **SIZES), toys.transformer(**SIZES)
  # One chunk of logits, for XLA counts one turn of a loop.
  ones = np.ones((2, distill.CHUNK), np.int32)
  batch = Batch(ones, ones, ones.astype(np.float32))

  def logits(model):
    output = model.forward(batch.tokens, batch.segments)
    return model.unembed(output.features)

  def loss(drafter):
    weights = distill.objective(1.0)
    return distill.distill_loss(drafter, model, batch, weights)[0]

  for function, argument in (
    (logits, model),
    (jax.value_and_grad(loss), ModelDrafter(draft, 2)),
  ):
    lowered = jax.jit(function).lower(argument)
    wanted = lowered.cost_analysis()['flops']
    got = flops.products(function, argument)
    assert got == pytest.approx(wanted, rel=0.05)


def test_loops_and_branches_count_as_they_turn():
  x = jnp.ones((4, 4))
  one = flops.products(lambda x: jnp.einsum('ab,cb->ac', x, x), x)
  assert one == 2 * 4 * 4 * 4
  batched = jnp.ones((3, 4, 4))
  assert flops.products(jnp.matmul, batched, batched) == 3 * one

  def thrice(x):
    return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=3)[0]

  def either(x):
    return jax.lax.cond(x[0, 0] > 0, thrice, jnp.tanh, x)

  assert flops.products(thrice, x) == flops.products(either, x) == 3 * one
  assert flops.products(jax.jit(lambda x: thrice(either(x))), x) == 6 * one
  again = jax.grad(lambda x: jax.checkpoint(thrice)(x).sum())
  # Forward, forward once more, and two products for each of the gradient.
  assert flops.products(again, x) in (11 * one, 12 * one)


def test_the_rate_of_a_product_is_a_rate():
  assert 1e8 < flops.peak() < 1e16

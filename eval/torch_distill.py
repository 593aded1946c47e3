"""A distillation step in PyTorch, eager: the same models, loss and optimiser.

Written as PyTorch users write it, with `scaled_dot_product_attention`, whole
logits and `AdamW`; no chunking, which eager mode gains nothing from.
"""

import numpy as np
import torch
import torch.nn.functional as F


def training(target, draft, tokens, weights, learning_rate, steps):
  """A call that makes some updates and returns their losses.

  Args:
    target: a specjax `Transformer`, whose weights are copied.
    draft: likewise, trained.
    tokens: `[B, T]` NumPy integers, one document each.
    weights: of cross entropy and of KL(p || q).
    learning_rate: of AdamW.
    steps: updates in a call.
  """
  torch.manual_seed(0)
  teacher, student = Model(target), Model(draft)
  teacher.requires_grad_(False)
  optimizer = torch.optim.AdamW(
    student.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.0
  )
  tokens = torch.from_numpy(np.asarray(tokens, np.int64))
  ahead = tokens[:, 1:]

  def update():
    with torch.no_grad():
      log_p = F.log_softmax(teacher(tokens)[:, :-1], -1)
    log_q = F.log_softmax(student(tokens)[:, :-1], -1)
    ce = F.nll_loss(log_q.flatten(0, 1), ahead.flatten())
    kl = F.kl_div(log_q, log_p, reduction='none', log_target=True)
    loss = weights.ce * ce + weights.divergence * kl.sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    return loss.detach()

  return lambda: [float(update()) for _ in range(steps)]


class Model(torch.nn.Module):
  """specjax's transformer: RMSNorm, rotary positions, GQA, SwiGLU, tied."""

  def __init__(self, model):
    """Copies the weights of a `Transformer`."""
    super().__init__()
    self.config = model.config
    self.embedding = _parameter(model.embedding)
    self.norm = _parameter(model.norm)
    self.layers = torch.nn.ModuleList([Layer(x) for x in model.layers])

  def forward(self, tokens):
    """Logits `[B, T, V]` of tokens `[B, T]`."""
    half = self.config.head_size // 2
    frequencies = self.config.rope_theta ** (-torch.arange(half) / half)
    angles = torch.arange(tokens.shape[1])[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    x = F.embedding(tokens, self.embedding)
    for layer in self.layers:
      x = layer(x, cos, sin)
    return _norm(x, self.norm, self.config) @ self.embedding.T


class Layer(torch.nn.Module):
  """Attention and feed-forward."""

  def __init__(self, layer):
    """Copies the weights of a specjax `Layer`."""
    super().__init__()
    self.config = layer.config
    for name in ('qkv', 'proj', 'gate_up', 'down'):
      setattr(self, name, _parameter(getattr(layer, name)))
    self.attention_norm = _parameter(layer.attention_norm)
    self.hidden_norm = _parameter(layer.hidden_norm)

  def forward(self, x, cos, sin):
    """One layer on `[B, T, D]`."""
    c = self.config
    qkv = _norm(x, self.attention_norm, c) @ self.qkv.T
    qkv = qkv.unflatten(-1, (-1, c.head_size)).transpose(1, 2)
    q, k, v = qkv.split((c.heads, c.kv_heads, c.kv_heads), 1)
    mixed = F.scaled_dot_product_attention(
      _rotate(q, cos, sin),
      _rotate(k, cos, sin),
      v,
      is_causal=True,
      enable_gqa=True,
    )
    x = x + mixed.transpose(1, 2).flatten(2) @ self.proj.T
    gate, up = (_norm(x, self.hidden_norm, c) @ self.gate_up.T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ self.down.T


def _parameter(weight):
  return torch.nn.Parameter(torch.from_numpy(np.array(weight[...])))


def _norm(x, scale, config):
  return F.rms_norm(x, x.shape[-1:], scale, config.norm_eps)


def _rotate(x, cos, sin):
  a, b = x.chunk(2, -1)
  return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

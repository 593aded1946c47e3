"""Writes files as llama2.c does: for tests that need a target from outside."""

import struct

import numpy as np

SIZES = {'dim': 24, 'hidden': 20, 'layers': 2, 'heads': 4, 'kv_heads': 2}


def checkpoint(path, vocab_size=300, seq_len=128, tied=True, seed=0, **changes):
  """A random model; returns its weights by the names of `run.c`."""
  c = {**SIZES, **changes}
  d, f, n = c['dim'], c['hidden'], c['layers']
  kv = d // c['heads'] * c['kv_heads']
  rng = np.random.default_rng(seed)

  def some(*shape):
    return rng.normal(0, 0.3, shape).astype(np.float32)

  def near_one(*shape):
    return rng.uniform(0.5, 1.5, shape).astype(np.float32)

  weights = {
    'embedding': some(vocab_size, d),
    'att_norm': near_one(n, d),
    'wq': some(n, d, d),
    'wk': some(n, kv, d),
    'wv': some(n, kv, d),
    'wo': some(n, d, d),
    'ffn_norm': near_one(n, d),
    'w1': some(n, f, d),
    'w2': some(n, d, f),
    'w3': some(n, f, d),
    'final_norm': near_one(d),
    'frequencies': np.zeros((2, seq_len, d // c['heads'] // 2), np.float32),
    'classifier': some(vocab_size, d),
  }
  if tied:
    weights['classifier'] = weights['embedding']
  written = list(weights.values())[: -1 if tied else None]
  sizes = (d, f, n, c['heads'], c['kv_heads'])
  signed = vocab_size if tied else -vocab_size
  with open(path, 'wb') as file:
    file.write(struct.pack('<7i', *sizes, signed, seq_len))
    for array in written:
      file.write(array.tobytes())
  return weights


def pieces():
  """300 pieces by id, with their scores: bytes, letters and some words."""
  control = [(b'<unk>', 0.0), (b'\n<s>\n', 0.0), (b'\n</s>\n', 0.0)]
  raw = [(f'<0x{byte:02X}>'.encode(), 0.0) for byte in range(256)]
  words = [b'the', b' t', b'he', b'in', b' the', b' a', b'an', b'and', b' and']
  words += [chr(c).encode() for c in range(97, 123)] + [b' ', 'é'.encode()]
  words += [b'er', b'ther', b'th', b'ing']
  return control + raw + [(word, -float(i)) for i, word in enumerate(words)]


def tokenizer(path, pieces):
  """Writes pieces and their scores."""
  with open(path, 'wb') as file:
    file.write(struct.pack('<I', max(len(piece) for piece, _ in pieces)))
    for piece, score in pieces:
      file.write(struct.pack('<fi', score, len(piece)) + piece)


def merged(text, pieces):
  """Ids of a text: all its neighbours over and over, the best first."""
  ids = {piece: i for i, (piece, _) in enumerate(pieces) if i > 2}
  found = []
  for character in f' {text}' if text else '':
    raw = character.encode()
    names = [f'<0x{byte:02X}>'.encode() for byte in raw]
    found += [raw] if raw in ids else names
  while True:
    pairs = [
      (-pieces[ids[a + b]][1], i)
      for i, (a, b) in enumerate(zip(found, found[1:], strict=False))
      if a + b in ids
    ]
    if not pairs:
      return [ids[piece] for piece in found]
    _, i = min(pairs)
    found[i : i + 2] = [found[i] + found[i + 1]]

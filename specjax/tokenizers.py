"""Tokenizers: raw bytes, a BPE trained on the corpus, one that came along.

Every id stands for a fixed string of bytes, and the end-of-document id for
none. Decoding is joining them, so a stream of ids can be printed as it comes
and no sequence of ids is an error, whatever a model samples.
"""

from __future__ import annotations

import abc
import codecs
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers as hf

from specjax import extras, files

EOS = '<|endoftext|>'
_REFUSES = 'the chat template refuses:'


class Tokenizer(abc.ABC):
  """Text to ids and back.

  Attributes:
    serialised: the JSON text that `save` writes; it determines the tokenizer.
    pieces: the bytes of each id; empty for `eos_id`.
    eos_id: ends a document. No text encodes to it.
    template: of a chat, if there is one.
  """

  serialised: str
  pieces: tuple[bytes, ...]
  eos_id: int
  template: str | None = None

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes several texts, in parallel where that helps."""

  def encode(self, text: str) -> list[int]:
    """The ids of `text`, without an end of document."""
    return self.encode_batch([text])[0]

  @property
  def start(self) -> list[int]:
    """What stands before the ids of a document: nothing, if not said."""
    return []

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
    pieces = b''.join(self.pieces[i] for i in ids)
    return pieces.decode('utf-8', 'replace')

  def stream(self) -> Stream:
    """A decoder for ids that arrive one at a time."""
    return Stream(self.pieces)

  def save(self, path: str | os.PathLike) -> None:
    """Writes one JSON file, whole or not at all."""
    with files.atomic(path) as file:
      file.write(self.serialised.encode())

  @property
  def end_ids(self) -> list[int]:
    """Ids that end what a model says."""
    return [self.eos_id]

  @property
  def spelling(self) -> Sequence[bytes | str]:
    """What each id stands for, special tokens by their names."""
    named = list(self.pieces)
    named[self.eos_id] = EOS
    return named

  @property
  def vocab_size(self) -> int:
    """Number of ids, `eos_id` among them."""
    return len(self.pieces)

  @functools.cached_property
  def hash(self) -> str:
    """SHA-256 of the serialised form, in hexadecimal."""
    return hashlib.sha256(self.serialised.encode()).hexdigest()

  @functools.cached_property
  def byte_lengths(self) -> np.ndarray:
    """`[V]` int32 bytes per id: what turns nats per token into per byte."""
    return np.array([len(piece) for piece in self.pieces], np.int32)


class Stream:
  """Decodes ids as they come, holding back incomplete characters.

  What `push` returned, joined, plus `flush` equals `Tokenizer.decode` of all
  the ids.
  """

  def __init__(self, pieces: Sequence[bytes]):
    """Starts at a character boundary; `pieces` are the bytes of each id."""
    self._pieces = pieces
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

  def push(self, token: int) -> str:
    """The characters that `token` completes, possibly none."""
    return self._decoder.decode(self._pieces[token])

  def flush(self) -> str:
    """What is left: U+FFFD if a character was cut short."""
    return self._decoder.decode(b'', final=True)


class Bytes(Tokenizer):
  """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

  serialised = json.dumps({'model': {'type': 'Bytes'}})
  pieces = (*(bytes([i]) for i in range(256)), b'')
  eos_id = 256

  @classmethod
  def parse(cls, serialised: str) -> Bytes:
    """The inverse of `serialised`, which has nothing to configure."""
    del serialised
    return cls()

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes several texts."""
    return [list(text.encode()) for text in texts]


class BPE(Tokenizer):
  """Byte-level byte-pair encoding, as the `tokenizers` library stores it."""

  def __init__(self, serialised: str):
    """Reads the library's JSON.

    Args:
      serialised: a byte-level BPE with the special token `EOS`.

    Raises:
      ValueError: the JSON is another kind of tokenizer.
    """
    self.serialised = serialised
    self._model = hf.Tokenizer.from_str(serialised)
    # Else a document that quotes the special token would end in the middle.
    self._model.encode_special_tokens = True
    vocab = self._model.get_vocab()
    if EOS not in vocab:
      raise ValueError(f'the tokenizer has no end-of-document token {EOS!r}')
    self.eos_id = vocab.pop(EOS)
    pieces = [b''] * (len(vocab) + 1)
    table = _byte_of_character()
    try:
      for token, i in vocab.items():
        pieces[i] = bytes(table[character] for character in token)
    except (KeyError, IndexError) as error:
      raise ValueError('the tokenizer is not a byte-level BPE') from error
    self.pieces = tuple(pieces)

  @classmethod
  def train(cls, texts: Iterable[str], vocab_size: int) -> BPE:
    """Trains on `texts`: the same texts give the same tokenizer.

    Args:
      texts: the documents of the train split, and of no other.
      vocab_size: at most this many ids; fewer if the texts have no more pairs
        to merge.

    Returns:
      A tokenizer of any text: all 256 bytes are in its vocabulary.

    Raises:
      ValueError: fewer ids than the bytes and the end of document need.
    """
    if vocab_size < 257:
      raise ValueError(
        f'vocab_size {vocab_size} is below 257: 256 bytes and {EOS}'
      )
    model = hf.Tokenizer(hf.models.BPE())
    model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=[EOS],
      initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return cls(model.to_str())

  @classmethod
  def parse(cls, serialised: str) -> BPE:
    """The inverse of `serialised`."""
    return cls(serialised)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes several texts in parallel."""
    encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


class Pretrained(Tokenizer):
  """The tokenizer of a model that was trained elsewhere.

  Special tokens have no bytes. A text that quotes one is encoded as text; in a
  chat they count, also in what a message quotes, as they do elsewhere.
  """

  def __init__(
    self,
    model: str,
    *,
    end: Sequence[str],
    start: str | None = None,
    template: str | None = None,
    names: Mapping[str, str] | None = None,
  ):
    """Takes what its files say.

    Args:
      model: the JSON of the `tokenizers` library.
      end: tokens that end what the model says; the first ends a document too.
      start: what stands before a document, special tokens included; None is
        what the tokenizer itself puts there.
      template: of a chat, in Jinja.
      names: other texts that the template uses, as `bos_token`.

    Raises:
      ValueError: it is of a kind whose ids have no bytes, or has not these
        tokens.
    """
    self.serialised = json.dumps(
      {
        'model': {
          'type': 'Pretrained',
          'tokenizer': json.loads(model),
          'end': list(end),
          'start': start,
          'template': template,
          'names': dict(names or {}),
        }
      }
    )
    self.template, self.names = template, dict(names or {})
    try:
      self._special = hf.Tokenizer.from_str(model)
    except Exception as error:  # the library has no class of its own
      raise ValueError(f'the tokenizer cannot be read: {error}') from error
    self._plain = hf.Tokenizer.from_str(model)
    # Else a document that quotes a special token would end in the middle.
    self._plain.encode_special_tokens = True
    for either in (self._special, self._plain):
      either.no_padding()
      either.no_truncation()
    vocab = self._special.get_vocab()
    absent = [token for token in end if token not in vocab]
    if absent:
      raise ValueError(f'the tokenizer has no end token {", ".join(absent)}')
    if not end:
      raise ValueError(
        'nothing says what ends a document: give target.document_end'
      )
    self._ends = [vocab[token] for token in end]
    self.eos_id = self._ends[0]
    if start is None:
      encoding = self._special.encode('')
      self._start = [i for i in encoding.ids if i not in self._ends]
    else:
      self._start = self.encode_special(start)
    self.pieces = _pieces(self._special)

  @classmethod
  def parse(cls, serialised: str) -> Pretrained:
    """The inverse of `serialised`."""
    model = dict(json.loads(serialised)['model'])
    del model['type']
    return cls(json.dumps(model.pop('tokenizer')), **model)

  @property
  def start(self) -> list[int]:
    """What stands before the ids of a document."""
    return self._start

  @property
  def end_ids(self) -> list[int]:
    """Ids that end what the model says."""
    return self._ends

  @property
  def spelling(self) -> Sequence[bytes | str]:
    """What each id stands for, special tokens by their names."""
    named = list(self.pieces)
    for i, token in self._special.get_added_tokens_decoder().items():
      named[i] = token.content
    return named

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes several texts in parallel."""
    encodings = self._plain.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]

  def encode_special(self, text: str) -> list[int]:
    """Encodes a text whose special tokens are meant, as a template's."""
    return self._special.encode(text, add_special_tokens=False).ids

  def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Encodes a chat that it is the model's turn in.

    Args:
      messages: each with a 'role', as 'user', and its 'content'.

    Raises:
      ImportError: `jinja2` is not installed.
      ValueError: the tokenizer has no template, or it refuses.
    """
    if not self.template:
      raise ValueError('the tokenizer has no chat template')
    sandbox = extras.require('jinja2.sandbox', 'hf')
    environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=['jinja2.ext.loopcontrols'],
    )

    def refuse(message):
      raise ValueError(f'{_REFUSES} {message}')

    environment.globals['raise_exception'] = refuse
    environment.globals['strftime_now'] = time.strftime
    environment.filters['tojson'] = functools.partial(
      json.dumps, ensure_ascii=False
    )
    try:
      text = environment.from_string(self.template).render(
        messages=list(messages), add_generation_prompt=True, **self.names
      )
    except Exception as error:  # a template is somebody's program
      if str(error).startswith(_REFUSES):
        raise ValueError(f'{error}') from error
      raise ValueError(
        f'the chat template fails: {type(error).__name__}: {error}'
      ) from error
    return self.encode_special(text)


def _pieces(model: hf.Tokenizer) -> tuple[bytes, ...]:
  """The bytes of each id of a byte-level or a byte-fallback tokenizer."""
  added = model.get_added_tokens_decoder()
  vocab = model.get_vocab()
  decoder = json.loads(model.to_str()).get('decoder') or {}
  kinds = {decoder.get('type')} | {
    part['type'] for part in decoder.get('decoders', ())
  }
  if 'ByteLevel' in kinds:
    table = _byte_of_character()

    def spell(token):
      return bytes(table[character] for character in token)
  elif kinds & {'ByteFallback', 'Metaspace'}:

    def spell(token):
      byte = _BYTE_PIECE.fullmatch(token)
      if byte:
        return bytes([int(byte[1], 16)])
      return token.replace('\u2581', ' ').encode()
  else:
    raise ValueError(
      'the tokenizer is neither byte-level nor has it a piece for each byte:'
      f' its decoder is {", ".join(sorted(map(str, kinds)))}'
    )
  pieces = [b''] * (max(vocab.values()) + 1)
  try:
    for token, i in vocab.items():
      if i not in added:
        pieces[i] = spell(token)
      elif not added[i].special:
        pieces[i] = token.encode()
  except KeyError as error:
    raise ValueError(
      f'the tokenizer has a token {token!r}, no bytes'
    ) from error
  return tuple(pieces)


_BYTE_PIECE = re.compile('<0x([0-9A-F]{2})>')


def load(path: str | os.PathLike) -> Tokenizer:
  """Reads what `Tokenizer.save` wrote.

  Args:
    path: a JSON file.

  Returns:
    A tokenizer of the same hash.

  Raises:
    ValueError: the file holds no tokenizer that this module knows.
  """
  with open(path, encoding='utf-8', newline='') as file:
    serialised = file.read()
  try:
    parse = _PARSERS[json.loads(serialised)['model']['type']]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{path} is not a tokenizer of one of the kinds {sorted(_PARSERS)}'
    ) from error
  return parse(serialised)


def require_same(draft: Tokenizer, target: Tokenizer) -> None:
  """Refuses a draft whose ids mean something else than the target's.

  What they mean is compared, and not how texts are cut: two files of one
  vocabulary will do.

  Raises:
    ValueError: they differ; the message names the first id that does.
  """
  if draft.vocab_size != target.vocab_size:
    raise ValueError(
      f'its tokenizer has {draft.vocab_size} ids and that of the target'
      f' {target.vocab_size}: a draft needs the vocabulary of its target'
    )
  for i, pair in enumerate(zip(draft.spelling, target.spelling, strict=True)):
    if pair[0] != pair[1]:
      raise ValueError(
        f'id {i} is {pair[0]!r} in its tokenizer and {pair[1]!r} in that of the'
        ' target: a draft needs the vocabulary of its target'
      )


def _byte_of_character() -> dict[str, int]:
  # Byte-level BPE writes each byte as one visible character: a byte that is
  # visible in Latin-1 as itself, the others in order from U+0100 on.
  visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
  hidden = [byte for byte in range(256) if byte not in visible]
  return {chr(byte): byte for byte in visible} | {
    chr(256 + i): byte for i, byte in enumerate(hidden)
  }


def added(i: int, token: str, special: bool = True) -> dict[str, Any]:
  """A token that is never cut, as the `tokenizers` library stores it."""
  off = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
  return {'id': i, 'content': token, 'special': special, **off}


def by_scores(
  tokens: Sequence[str],
  scores: Sequence[float],
  merged: Sequence[int],
  unknown: int = 0,
  space: bool = True,
) -> dict[str, Any]:
  """A BPE by scores as the `tokenizers` library stores it.

  The pair whose union scores highest is merged first, as SentencePiece does.

  Args:
    tokens: by id, U+2581 being a space and '<0x0A>' a byte.
    scores: of each.
    merged: ids that may come of a merge: neither control tokens nor bytes.
    unknown: the id of what has no other.
    space: whether one is put in front of a text.
  """
  ids = {token: i for i, token in enumerate(tokens)}
  merges = []
  for i in merged:
    token = tokens[i]
    cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
    known = [(ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
    merges += [(-scores[i], i, *pair) for pair in sorted(known)]
  merges.sort()
  text, piece = {'String': ' '}, {'String': '\u2581'}
  normalizers = [{'type': 'Prepend', 'prepend': '\u2581'}] if space else []
  normalizers += [{'type': 'Replace', 'pattern': text, 'content': '\u2581'}]
  back = {'type': 'Replace', 'pattern': piece, 'content': ' '}
  return {
    'version': '1.0',
    'normalizer': {'type': 'Sequence', 'normalizers': normalizers},
    'pre_tokenizer': None,
    'post_processor': None,
    'decoder': {
      'type': 'Sequence',
      'decoders': [back, {'type': 'ByteFallback'}, {'type': 'Fuse'}],
    },
    'model': {
      'type': 'BPE',
      'vocab': ids,
      'merges': [[a, b] for *_, a, b in merges],
      'unk_token': tokens[unknown],
      'fuse_unk': True,
      'byte_fallback': True,
    },
  }


def _begins_with(token: str, ids: list[int]) -> dict[str, Any]:
  """Puts a token before a text, as the `tokenizers` library stores it."""
  begin = {'SpecialToken': {'id': token, 'type_id': 0}}
  first, second = (
    {'Sequence': {'id': name, 'type_id': i}} for i, name in enumerate('AB')
  )
  return {
    'type': 'TemplateProcessing',
    'single': [begin, first],
    'pair': [begin, first, second],
    'special_tokens': {token: {'id': token, 'ids': ids, 'tokens': [token]}},
  }


def portable(tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
  """A tokenizer as others read it.

  Args:
    tokenizer: any of this module.

  Returns:
    What goes into tokenizer.json, and into tokenizer_config.json.
  """
  settings = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'clean_up_tokenization_spaces': False,
  }
  model = json.loads(tokenizer.serialised)
  if isinstance(tokenizer, Pretrained):
    model = model['model']
    end = {'eos_token': model['end'][0]}
    if model['template']:
      settings['chat_template'] = model['template']
    spelt, begin = model['tokenizer'], model['names'].get('bos_token')
    if begin and model['start'] == begin and not spelt['post_processor']:
      spelt['post_processor'] = _begins_with(begin, tokenizer.start)
    return spelt, {**settings, **model['names'], **end}
  if isinstance(tokenizer, Bytes):
    characters = {byte: name for name, byte in _byte_of_character().items()}
    whole = hf.Tokenizer(
      hf.models.BPE({characters[i]: i for i in range(256)}, [])
    )
    whole.pre_tokenizer = hf.pre_tokenizers.ByteLevel(False, use_regex=False)
    whole.decoder = hf.decoders.ByteLevel()
    model = json.loads(whole.to_str())
    model['added_tokens'] = [added(tokenizer.eos_id, EOS)]
  return model, {**settings, 'eos_token': EOS}


_PARSERS = {
  'Bytes': Bytes.parse,
  'BPE': BPE.parse,
  'Pretrained': Pretrained.parse,
}

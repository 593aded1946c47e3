"""A run: its folder, and the objects that its configuration describes.

runs/<name>/
  config.json  corpus.json  tokenizer.json
  target/  draft/        checkpoints, by step
  rollouts/              held-out text that the target wrote
  written/               text that drafts are trained on: what the target wrote
                         alone, and by draft and step what a draft had a part in
  logs/                  JSON lines and TensorBoard events
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from specjax import (
  checkpoint,
  corpora,
  data,
  decode,
  draft_length,
  drafters,
  pricing,
  processes,
  runs,
  settings,
  sharding,
  texts,
  tokenizers,
  verify,
  warps,
)
from specjax.drafters.none import NoDrafter
from specjax.models import pretrained
from specjax.models.transformer import Transformer, TransformerConfig
from specjax.types import Batch, Drafter, DraftLength, Warp

# What the target was made from; a draft belongs to all of it.
TARGET = ('corpus', 'target', 'pretrain')
UNTRAINED = 'untrained'  # a draft that every run has


class Workspace:
  """What the scripts share.

  Attributes:
    folder: of the run.
    config: its configuration, plain nested dictionaries.
    mesh: where its models lie; None: on one device.
  """

  def __init__(
    self, folder: Path, config: Mapping[str, Any], mesh: Mesh | None = None
  ):
    """Opens a run; nothing is read before it is needed."""
    self.folder = Path(folder)
    self.config = config
    self.mesh = mesh
    self._told: set[str] = set()  # once is enough

  @classmethod
  def create(
    cls, folder: Path, config: Mapping[str, Any], mesh: Mesh | None = None
  ) -> Workspace:
    """Opens a run to train in, and makes it if it is new.

    Args:
      folder: of the run.
      config: its configuration. What the run already has must have been made
        with the same values; the other sections are recorded anew.
      mesh: where to train; None: on one device.

    Raises:
      ValueError: it makes no sense, or differs from what the run was made
        with; nothing is written then.
    """
    with processes.in_turn(f'opening {folder}'):
      run = cls._create(folder, config)
    run.mesh = mesh
    return run

  @classmethod
  def _create(cls, folder, config) -> Workspace:
    settings.check(config)
    if config['decode']['k'] < 1:
      raise ValueError(
        f'decode.k is {config["decode"]["k"]}: a draft is trained for at least'
        ' one token'
      )
    frozen = ()
    if checkpoint.Checkpoints(folder / 'target').latest() is not None:
      frozen = TARGET
    elif (folder / 'corpus.json').exists():
      frozen = ('corpus',)
    config = {**config, 'workdir': str(folder)}
    source = None
    if config['target']['path'] and frozen != TARGET:
      source = pretrained.Source(config['target']['path'])
      cls(folder, config)._require_adoptable(source)
    if config['target']['path']:
      # Another file under the same name is another target.
      path = config['target']['path']
      hashed = source.hash if source else _hash_of_target(folder, path)
      config['target'] = {**config['target'], 'sha256': hashed}
    if processes.first():
      runs.open_run(folder, config, frozen, set(config) - set(frozen))
    run = cls(folder, runs.read_config(folder / 'config.json'))
    if source:
      run.__dict__['_source'] = source  # it need not be looked for again
    return run

  @classmethod
  def look_at(
    cls,
    folder: Path,
    config: Mapping[str, Any],
    k: int | None = None,
    mesh: Mesh | None = None,
  ) -> Workspace:
    """Opens a run that exists, to measure it.

    Args:
      folder: of the run.
      config: its configuration, of which the sections that do not belong to
        what was trained may have changed.
      k: draft length to decode with, in place of `decode.k`. The page's own
        draft need not go so far: another may be decoded with.
      mesh: where its models shall lie; None: on one device.

    Raises:
      FileNotFoundError: there is no run.
      ValueError: its target was made from something else, or k is negative.
    """
    path = Path(folder) / 'config.json'
    if not path.exists():
      raise FileNotFoundError(
        f'there is no run in {folder}: make one with `python train/distill.py'
        f' --workdir {folder}`'
      )
    config = runs.complete(copy.deepcopy(dict(config)))
    settings.check(config)
    began = runs.read_json(path)
    if 'sha256' in began['target']:
      # The run has what was in the file, which may be gone.
      found = {**config['target'], 'sha256': began['target']['sha256']}
      config = {**config, 'target': found}
    runs.refuse_changes(folder, began, config, TARGET)
    if k is not None:
      if k < 0:
        raise ValueError(f'--k is {k}: it must be 0 or more')
      config['decode']['k'] = k
    return cls(folder, config, mesh)

  @functools.cached_property
  def corpus(self) -> corpora.Corpus:
    """The corpus, prepared if need be.

    Raises:
      ValueError: it is not the one that the run began with.
    """
    wanted = self.config['corpus']
    corpus = corpora.load(
      wanted['name'],
      text_field=wanted['text_field'] or None,
      test=wanted['test'] or None,
    )
    record = self.folder / 'corpus.json'
    if not record.exists():
      runs.write_json(record, corpus.describe())
    began = runs.read_json(record).get('hash')
    if not began:
      raise ValueError(f'{record} is damaged: it has no hash; delete it')
    if corpus.hash != began:
      raise ValueError(
        f'corpus {corpus.name!r} has changed since {self.folder} began (hash'
        f' {began[:12]}, now {corpus.hash[:12]}): start another run with'
        ' --workdir'
      )
    return corpus

  def prepare(self) -> None:
    """Makes what is trained on, if need be: corpus, tokenizer and ids.

    In one process, where there are several.
    """
    with processes.in_turn('the corpus'):
      if self.corpus.name != corpora.NONE:
        for split in ('train', 'validation'):
          self.ids(split)

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    """The run's tokenizer, trained or read if there is none."""
    path = self.folder / 'tokenizer.json'
    if not path.exists():
      self._new_tokenizer().save(path)
    return tokenizers.load(path)

  def ids(self, split: str) -> np.ndarray:
    """`[N]` ids of a split."""
    return data.encode_split(self.corpus, split, self.tokenizer)

  def windows(self, split: str) -> data.Windows:
    """The split's training windows."""
    window = self.config['corpus']['window']
    return data.Windows(self.ids(split), self.tokenizer.eos_id, window)

  def prompts(self, split: str, count: int, length: int) -> list[list[int]]:
    """Starts of held-out documents."""
    eos = self.tokenizer.eos_id
    return data.prompts(self.ids(split), eos, count, length, seed=0).tolist()

  def new_target(self, seed: int) -> Transformer:
    """An untrained target."""
    sizes = TransformerConfig(**self.target_config)
    with sharding.on_host(self.mesh):
      return Transformer(sizes, nnx.Rngs(seed))

  @property
  def target_config(self) -> dict[str, Any]:
    """All that is needed to build the target again, if it is trained here."""
    sizes = settings.sizes(self.config['target'])
    return {**sizes, 'vocab_size': self.tokenizer.vocab_size}

  @property
  def target_sizes(self) -> TransformerConfig:
    """What a drafter is built for.

    Raises:
      FileNotFoundError: the target is to be taken from a file, and was not yet.
    """
    if not self.config['target']['path']:
      return TransformerConfig(**self.target_config)
    self._require_target()
    checkpoints = checkpoint.Checkpoints(self.folder / 'target')
    sizes = checkpoints.meta(checkpoints.best())['model']
    return TransformerConfig(**sizes)

  def adopt_target(self) -> None:
    """Makes the model at `target.path` the run's target, if it has none yet.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not what it should be, nor is its tokenizer.
    """
    folder, wanted = self.folder / 'target', self.config['target']
    if checkpoint.Checkpoints(folder).latest() is not None:
      return
    with processes.alone(folder):
      if checkpoint.Checkpoints(folder).latest() is not None:
        return  # another process was first
      source = self._source
      if source.hash != wanted['sha256']:
        raise ValueError(
          f'{wanted["path"]} has changed since it was looked at: try again'
        )
      tokenizer = self._require_adoptable(source)
      with sharding.on_host(self.mesh):
        target = source.load(wanted['dtype'], tokenizer.vocab_size)
      record = {
        'tokenizer': tokenizer.hash,
        'vocab_size': source.read_config().vocab_size,
        'licence': source.licence(),
      }
      # One that lies there is of a model that could not be loaded.
      path = self.folder / 'tokenizer.json'
      processes.by_first(lambda: tokenizer.save(path), f'{path}')
      self.__dict__.pop('tokenizer', None)
      target = sharding.spread(target, self.mesh)
      checkpoint.save_model(folder, target, record)

  @functools.cached_property
  def _source(self) -> pretrained.Source:
    """Of the target; a name on the hub may stand for something else later."""
    return pretrained.Source(self.config['target']['path'])

  def _require_adoptable(
    self, source: pretrained.Source
  ) -> tokenizers.Tokenizer:
    """Refuses what can be seen to be wrong without the weights.

    Returns:
      The tokenizer of the target.

    Raises:
      FileNotFoundError: a model or its tokenizer is not there.
      ValueError: it is not what it should be, or nothing begins its texts, or
        the draft cannot begin as `config.draft` says.
    """
    wanted, draft = self.config['target'], self.config.get('draft', {})
    sizes = source.read_config()
    tokenizer = source.load_tokenizer(
      wanted['tokenizer_path'],
      wanted['document_start'],
      wanted['document_end'],
    )
    self._require_start(tokenizer)
    if draft.get('path'):
      _require_own(draft['path'], tokenizer)
    _require_layers(draft.get('target_layers') or (), sizes)
    return tokenizer

  def _require_start(self, tokenizer: tokenizers.Tokenizer) -> None:
    """Refuses prompts other than what begins a text, where there is no text."""
    if self.config['corpus']['name'] != corpora.NONE:
      return
    count = len(tokenizer.start)
    if not count:
      raise ValueError(
        "corpus.name is 'none' and nothing begins a text of this model: give"
        ' target.document_start'
      )
    for section in ('data', 'validation', 'decode'):
      length = self.config.get(section, {}).get('prompt_length', count)
      if length != count:
        raise ValueError(
          f'{section}.prompt_length is {length}, and what begins a text has'
          f' {count} tokens: without text prompts must be that'
        )

  def new_drafter(self, seed: int) -> Drafter:
    """An untrained drafter, as `config.draft` describes it.

    Where `config.draft.target_layers` names layers of the target, its model
    begins as these, with the target's embedding, norm and head; where
    `config.draft.path` names a model, as that one. Where it has a `begin`, that
    is given the target.

    Raises:
      ValueError: it has nothing to train, or is not of the target's sizes.
    """
    config, sizes = self.draft_config, self.target_sizes
    with sharding.on_host(self.mesh):
      drafter = _build_drafter(config, sizes, nnx.Rngs(seed))
    if not jax.tree.leaves(drafter):
      raise ValueError(
        f'draft.drafter is {self.config["draft"]["drafter"]!r}, which has'
        ' nothing to train: it needs no distilling'
      )
    layers = self.config['draft'].get('target_layers')
    if layers:
      drafter = _begin_as(drafter, self.target().subset(layers))
    elif self.config['draft'].get('path'):
      drafter = _begin_as(drafter, self._pretrained_draft())
    if hasattr(drafter, 'begin'):
      drafter = drafter.begin(self.target())
    return drafter

  @property
  def draft_config(self) -> dict[str, Any]:
    """All that is needed to build the drafter again."""
    config = {**self.config['draft'], 'k': self.config['decode']['k']}
    if config.get('target_layers'):
      like = self.target_sizes
      _require_layers(config['target_layers'], like)
      like = dataclasses.replace(like, layers=len(config['target_layers']))
      config['model'] = _sizes_of(like, config['model'])
    elif config.get('path'):
      like = pretrained.Source(config['path']).read_config()
      config['model'] = _sizes_of(like, config['model'])
    if config.get('vocab_size'):
      size = self.tokenizer.vocab_size
      data.require_as_many(config['vocab_size'], size)  # before text is written
      if self.corpus.name == corpora.NONE:
        ids = np.concatenate(self._text('train').sequences())
      else:
        ids = self.ids('train')
      config['vocabulary'] = data.frequent(ids, size, config['vocab_size'])
    return config

  def target(self) -> Transformer:
    """The trained target.

    Raises:
      FileNotFoundError: the run has none yet.
      ValueError: it is not trained to the end.
    """
    return self._target

  @functools.cached_property
  def _target(self) -> Transformer:
    folder, command = self.folder / 'target', self._require_target()
    done = checkpoint.Checkpoints(folder).latest()
    adopted = self.config['target']['path']
    steps = 0 if adopted else self.config['pretrain']['steps']
    if done < steps:
      raise ValueError(
        f'the target in {folder} is at step {done} of {steps}: `{command}` goes'
        ' on with it'
      )
    # Where somebody asks for shapes alone, this is kept for those who do not.
    with jax.ensure_compile_time_eval():
      target = checkpoint.load_model(
        folder,
        lambda c: Transformer(TransformerConfig(**c), nnx.Rngs(0)),
        mesh=self.mesh,
      )
    sharding.require_divided(target, self.mesh, 'target')
    return target

  def drafter(self, name: str, warp: Warp = warps.UNCHANGED) -> Drafter:
    """A distilled drafter, the best checkpoint of it.

    Args:
      name: its folder within the run, 'draft' unless it was named otherwise;
        'untrained', where there is no such folder, is one that knows nothing.
      warp: what it samples with; the target's makes it accepted most.

    Raises:
      FileNotFoundError: the run has none yet.
      ValueError: it was trained with another tokenizer.
    """
    folder = self.folder / name
    if name == UNTRAINED and not folder.exists():
      drafter = sharding.spread(self.new_drafter(0), self.mesh)
      return dataclasses.replace(drafter, warp=warp)
    if name == 'target':
      raise ValueError('target is what is drafted for: name a draft of the run')
    command = f'python train/distill.py --workdir {self.folder} --draft={name}'
    self._require(folder, 'draft' if name == 'draft' else name, command)
    half = _half_trained(folder)
    if half and half not in self._told:
      print(f'{half}: `{command}` goes on with it', file=sys.stderr)
      self._told.add(half)
    sizes = self.target_sizes
    drafter = checkpoint.load_model(
      folder, lambda c: _build_drafter(c, sizes, nnx.Rngs(0)), mesh=self.mesh
    )
    return dataclasses.replace(drafter, warp=warp)

  def missing(self, names: Sequence[str]) -> list[str]:
    """Which of these drafts the run does not have."""
    return [
      name
      for name in names
      if name != UNTRAINED
      and checkpoint.Checkpoints(self.folder / name).latest() is None
    ]

  def controller(
    self,
    kind: str,
    target: Transformer,
    drafter: Drafter,
    batch: int = 1,
    context: int | None = None,
  ) -> DraftLength:
    """What `config.decode` says of the draft length.

    Args:
      kind: of the drafter, as in `proposer`.
      target: the run's target.
      drafter: what proposes, with the warp that it is decoded with.
      batch: rows. What rounds of so many cost is looked up in the run, or
        measured, where it matters.
      context: tokens, of which likewise; None is those of `config.decode`.

    Raises:
      ValueError: the drafter grows trees, whose length is fixed; or it goes by
        costs, which are not measured on a mesh.
    """
    c = self.config['decode']
    name = c['draft_length']
    if name == 'fixed' or kind == 'none':
      return draft_length.FIXED
    if kind in ('iid', 'distinct', 'candidates', 'committee'):
      raise ValueError(
        f'{kind} drafts trees, whose length is fixed: leave --draft_length, or'
        ' decode.draft_length, at fixed'
      )
    if name == 'adaptive' and kind == 'mixture':
      raise ValueError(
        'what a round of a mixture costs depends on the text, of which adaptive'
        ' lengths know nothing: take another --draft_length'
      )
    if name == 'adaptive' and self.mesh:
      raise ValueError(
        'adaptive lengths go by what rounds cost on one device: on a mesh take'
        ' another --draft_length'
      )
    k = decode.shapes(target, drafter).tokens.shape[1]
    cost = None
    if name == 'adaptive':
      cost = pricing.load_or_measure(
        self.folder / 'costs.json',
        target,
        drafter,
        batch=batch,
        context=context or c['prompt_length'] + c['max_new_tokens'],
        ks=draft_length.ladder(k)[1:],
        rule=verify.find(c['verify']),
      ).round
    return draft_length.find(name, k, cost)

  def rollouts(self, target: Transformer, temperature: float) -> list[Batch]:
    """Held-out text that the target wrote, kept for the next call.

    Args:
      target: the run's target.
      temperature: of the decode warp.

    Returns:
      Rows `[T]` whose weight marks what the target wrote.
    """
    wanted = self.config['validation']
    count, size = wanted['sequences'], wanted['prompt_length']
    rows = self._text('validation', target, temperature).sequences()
    batch = data.pad(rows, [size] * count, size + wanted['tokens'])
    return [Batch(*row) for row in zip(*batch, strict=True)]

  def _text(
    self,
    split: str,
    target: Transformer | None = None,
    temperature: float = 1.0,
  ) -> texts.Text:
    """As much text as is held out, on prompts of a split."""
    wanted = self.config['validation']
    count, size = wanted['sequences'], wanted['prompt_length']
    step = checkpoint.Checkpoints(self.folder / 'target').best()
    held_out = split == 'validation'
    name = f'step{step}-T{temperature:g}-{count}x{size}+{wanted["tokens"]}'
    name += '' if held_out else f'-{split}'
    path = self.folder / 'rollouts' / f'{name}.npz'
    if not processes.agreed(path.exists()):
      text = texts.write(
        target or self.target(),
        NoDrafter(),
        self.prompts(split, count, size),
        key=jax.random.key(0 if held_out else 1),
        max_new_tokens=wanted['tokens'],
        warp=warps.temperature(temperature),
        eos_id=self.tokenizer.eos_id,
        title=f'{"held-out " * held_out}text by the target',
        mesh=self.mesh,
      )
      processes.by_first(lambda: texts.save(path, text), f'{path}')
    return texts.load(path)

  def _new_tokenizer(self) -> tokenizers.Tokenizer:
    target, wanted = self.config['target'], self.config['corpus']
    if target['path']:
      self._require_target()
    kind = wanted['tokenizer']
    if kind == 'bytes':
      return tokenizers.Bytes()
    if kind == 'bpe':
      texts = self.corpus.splits['train']
      return tokenizers.BPE.train(texts, wanted['vocab_size'])
    raise ValueError(f"corpus.tokenizer is {kind!r}: use 'bpe' or 'bytes'")

  def _pretrained_draft(self) -> Transformer:
    """The model at `draft.path`, whose ids must mean what the target's do."""
    source = _require_own(self.config['draft']['path'], self.tokenizer)
    with sharding.on_host(self.mesh):
      return source.load(vocab_size=self.tokenizer.vocab_size)

  def _require_target(self) -> str:
    """Refuses that there is none; returns the command that trains it."""
    command = f'python train/pretrain.py --workdir {self.folder}'
    self._require(self.folder / 'target', 'target', command)
    return command

  def _require(self, folder: Path, what: str, command: str):
    """Refuses what is absent or was trained with another tokenizer."""
    checkpoints = checkpoint.Checkpoints(folder)
    if checkpoints.latest() is None:
      raise FileNotFoundError(
        f'{self.folder} has no {what} yet: run `{command}`'
      )
    trained = checkpoints.meta(checkpoints.best())['tokenizer']
    if trained != self.tokenizer.hash:
      raise ValueError(
        f'{folder} was trained with tokenizer {trained[:12]} and the run has'
        f' {self.tokenizer.hash[:12]}: train it again in another --workdir'
      )


def _hash_of_target(folder: Path, path: str) -> str:
  """That of the file, or of what the run took from it if it is gone."""
  began = folder / 'config.json'
  if not Path(path).exists() and began.exists():
    target = runs.read_json(began)['target']
    if target.get('path') == path:
      return target['sha256']
  return pretrained.Source(path).hash


def _require_own(
  path: str, tokenizer: tokenizers.Tokenizer
) -> pretrained.Source:
  """The model at `draft.path`, if its ids mean what the target's do."""
  source = pretrained.Source(path)
  try:
    tokenizers.require_same(source.load_tokenizer(), tokenizer)
  except ValueError as error:
    raise ValueError(f'draft.path is {path}: {error}') from error
  return source


def _require_layers(wanted: Sequence[int], sizes: TransformerConfig) -> None:
  """Refuses layers that a target does not have."""
  if wanted and max(wanted) >= sizes.layers:
    raise ValueError(
      f'draft.target_layers is {wanted}: the target has {sizes.layers} layers,'
      ' from 0'
    )


def _half_trained(folder: Path) -> str | None:
  """What there is to say of a draft whose training was broken off."""
  drafts = checkpoint.Checkpoints(folder)
  done = drafts.latest()
  made = drafts.meta(done).get('config', {}).get('distill', {})
  # One that lost patience has fewer steps and is whole.
  if done < made.get('steps', 0) and not made.get('patience'):
    return f'{folder} is at step {done} of {made["steps"]}'
  return None


def _build_drafter(
  config: Mapping[str, Any], target: TransformerConfig, rngs: nnx.Rngs
) -> Drafter:
  return drafters.find(config['drafter']).build(config, target, rngs)


def _sizes_of(
  like: TransformerConfig, given: Mapping[str, Any]
) -> dict[str, Any]:
  """The sizes of a draft that begins as a model; its own dtype and remat."""
  sizes = dataclasses.asdict(like)
  del sizes['vocab_size']
  return sizes | {key: given[key] for key in ('dtype', 'remat')}


def _begin_as(drafter: Drafter, model: Transformer) -> Drafter:
  """The drafter, with a copy of a model's weights, in its own dtype."""
  if not hasattr(drafter, 'model'):
    raise ValueError(
      'draft.target_layers and draft.path are for draft models, with'
      ' draft.drafter=model'
    )
  # Copies, for a training state is donated.
  leaves, structure = jax.tree.flatten(drafter.model)
  weights = zip(jax.tree.leaves(model), leaves, strict=True)
  copies = [jnp.array(x, y.dtype) for x, y in weights]
  model = jax.tree.unflatten(structure, copies)
  return dataclasses.replace(drafter, model=model)

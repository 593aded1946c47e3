"""How a run's draft is distilled: what several scripts do alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from specjax import (
  data,
  distill,
  flops,
  losses,
  optimizing,
  runs,
  settings,
  sharding,
  sources,
  training,
  warps,
)
from specjax.checkpoint import Checkpoints
from specjax.types import Array, Batch, LanguageModel, Trainable
from specjax.workspace import Workspace

# What a draft was made from, beside its target. Validation too, or the scores
# of its checkpoints could not be compared.
DRAFT_SECTIONS = ('draft', 'distill', 'loss', 'data', 'validation')
# Folders of a run that hold something else.
NO_DRAFTS = (
  'target',
  'logs',
  'rollouts',
  'written',
  'ablation',
  'exported',
  'peers',
)


def loss(config: Mapping[str, Any]) -> Callable[..., tuple[Array, Array]]:
  """`distill.distill_loss` as the section `loss` of a configuration has it.

  At decode temperature 0 the target's law is one-hot at the decode warp, and
  the draft's is left as it is: the choice of a maximum has no gradient.

  Args:
    config: the sections of a page.

  Returns:
    A function of drafter, target, batch and weights.
  """
  c = _loss_section(config)
  theirs = own = jax.nn.identity
  if c['at_decode_warp']:
    theirs = warps.temperature(c['temperature'])
    own = theirs if c['temperature'] else own
  numbers = {name: c[name] for name in losses.NUMBERS.get(c['divergence'], ())}
  return functools.partial(
    distill.distill_loss,
    divergence=losses.find(c['divergence'], **numbers),
    warps=(theirs, own),
    horizon_decay=c['horizon_decay'],
    lookahead=c['lookahead'],
  )


def refuse_draft_name(name: str) -> None:
  """Refuses to keep a draft outside its run, or where something else is.

  Raises:
    ValueError: it is not the name of a folder that a draft may have.
  """
  parts = PurePosixPath(name).parts
  if not parts or {'/', '..'} & {*parts} or parts[0] in NO_DRAFTS:
    raise ValueError(
      f'--draft={name}: a draft is kept in a folder of its run, as --draft=kl1'
      f' or --draft=sizes/128x2, and not in {", ".join(NO_DRAFTS)}'
    )


def refuse_other_draft(
  folder: Path, config: Mapping[str, Any], flag: str = '--workdir'
) -> None:
  """Refuses to go on with a draft that was begun with other values.

  Args:
    folder: of the draft, which need not exist.
    config: what it shall be distilled with.
    flag: the option that would name another folder.

  Raises:
    ValueError: they differ; the message lists every value that does.
  """
  drafts = Checkpoints(folder)
  if drafts.latest() is not None:
    old = runs.complete(drafts.meta(drafts.latest())['config'])
    # A draft from before losses were warped has no temperature.
    old['loss'].setdefault('temperature', 1.0)
    old['data'] = _data_section(old)
    new, sections = made_with(config), DRAFT_SECTIONS
    if 'decode' in old and drafts.latest() < config['distill']['steps']:
      # Scores at another K or temperature could not be compared either.
      sections = (*sections, 'decode')
    runs.refuse_changes(folder, old, new, sections, flag)


def made_with(config: Mapping[str, Any]) -> dict[str, Any]:
  """The sections that a draft depends on, for the record."""
  return {
    **{key: config[key] for key in DRAFT_SECTIONS},
    'loss': _loss_section(config),
    'data': _data_section(config),
    'decode': {name: config['decode'][name] for name in ('k', 'temperature')},
  }


def optimization(
  c: Mapping[str, Any], loss: Callable[..., Any], batch: int
) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
  """The optimiser and the step that `pretrain` or `distill` of a run describes.

  Args:
    c: the section.
    loss: what is minimised.
    batch: which of its arguments after the model has the batch.
  """
  tx = optimizing.optimizer(
    c['learning_rate'], c['steps'], c['warmup'], c['weight_decay'], c['clip']
  )
  return tx, optimizing.make_step(
    loss, tx, batch=batch, accumulate=c['accumulate'], dtype=c['dtype']
  )


def begin(
  model: Any, tx: optax.GradientTransformation, mesh: Mesh | None
) -> optimizing.TrainState:
  """The state before the first step, where it shall lie.

  The model is there before the optimiser's state is made, which so is never
  whole on one device.
  """
  state = optimizing.init(sharding.spread(model, mesh), tx)
  return sharding.spread(state, mesh)  # scalars too


def open_to_train(
  folder: Path, config: Mapping[str, Any], *sections: str
) -> Workspace:
  """`Workspace.create`, on the mesh that the configuration has.

  Args:
    folder: of the run.
    config: its configuration.
    sections: of what is trained, 'pretrain' where the target may be there, and
      'distill'.

  Raises:
    ValueError: as `Workspace.create`; or there is no such mesh, or it cannot
      divide the rows of a batch. Nothing is written then.
  """
  settings.check(config)
  mesh = sharding.make(**config.get('mesh', {}))
  for section in sections:
    if section == 'distill' or not _has_target(folder, config):
      _require_rows(mesh, config, section)
  return Workspace.create(folder, config, mesh)


def _has_target(folder: Path, config: Mapping[str, Any]) -> bool:
  """Whether no target is left to be trained."""
  steps = Checkpoints(folder / 'target').latest() or 0
  return bool(config['target']['path']) or steps >= config['pretrain']['steps']


def _require_rows(mesh: Mesh | None, config: Mapping[str, Any], section: str):
  c = config[section]
  what = f'{section}.batch'
  if c['accumulate'] > 1:
    what += f' ({c["batch"]}) over accumulate ({c["accumulate"]})'
  sharding.require_rows(mesh, c['batch'] // c['accumulate'], what)


def distil(
  workspace: Workspace, target: LanguageModel, name: str
) -> dict[str, float]:
  """Distils a draft, from its newest checkpoint if it has one.

  Args:
    workspace: the run; its configuration describes the draft and the training.
    target: the run's target.
    name: the draft's folder in the run.

  Returns:
    What `measure` says of the best of its checkpoints.
  """
  c = workspace.config['distill']
  weights = distill.objective(workspace.config['loss']['kl_weight'])
  tx, step = optimization(c, loss(workspace.config), batch=1)
  mesh = workspace.mesh
  workspace.prepare()
  evaluate = functools.partial(
    measure,
    compiled=jax.jit(distill.measure, static_argnums=3),
    target=target,
    workspace=workspace,
  )
  # Bound to the device of a target that was read, as it is after a step: else
  # the step is traced and compiled twice.
  state = begin(workspace.new_drafter(c['seed']), tx, mesh)
  if mesh is None:
    state = jax.device_put(state, jax.tree.leaves(target)[0].sharding)
  update = sharding.step(step, state)
  training.fit(
    state,
    lambda state, batch: update(state, target, batch, weights),
    batches(workspace, target, name),
    evaluate,
    steps=c['steps'],
    every=c['eval_every'],
    folder=workspace.folder / name,
    log=workspace.folder / 'logs' / name,
    meta={
      'model': workspace.draft_config,
      'tokenizer': workspace.tokenizer.hash,
      'config': made_with(workspace.config),
    },
    score=lambda values: values['block_efficiency'],
    show=('acceptance', 'block_efficiency'),
    like=data.described(c['batch'], workspace.config['corpus']['window'], mesh),
    operations=lambda state, like: flops.products(
      update, state, target, like, weights
    ),
    dtype=c['dtype'],
    patience=c['patience'],
    beside=target,
  )
  return evaluate(workspace.drafter(name))


def batches(
  workspace: Workspace,
  target: LanguageModel,
  name: str,
) -> Callable[[int, Trainable], Batch]:
  """The batches of a draft's training, mixed as `config.data` says.

  Args:
    workspace: the run.
    target: its target.
    name: the draft's folder in the run; what is written for it is kept in
      `written/<name>/`, and what the target writes alone in `written/`.

  Returns:
    `batches(step, drafter)`, as `training.fit` takes it.
  """
  config = workspace.config
  c, wanted, made = config['distill'], _data_section(config), made_with(config)

  def written(source, by):
    return sources.Written(
      source,
      by,
      target,
      # Never of what is held out: that is what the draft is measured on.
      workspace.ids('train'),
      workspace.tokenizer.eos_id,
      sources.Writing(**{key: wanted[key] for key in sources.Writing._fields}),
      window=config['corpus']['window'],
      seed=c['seed'],
      folder=workspace.folder / 'written' / name,
      shared=workspace.folder / 'written',
      log=workspace.folder / 'logs' / 'written' / name / source,
      made_from={
        'corpus': workspace.corpus.hash,
        'tokenizer': workspace.tokenizer.hash,
      },
      draft_from={
        'k': config['decode']['k'],
        # How a draft is scored does not change what it learns from.
        'config': {key: made[key] for key in DRAFT_SECTIONS},
      },
      mesh=workspace.mesh,
    )

  found = {'corpus': sources.Corpus(workspace.windows('train'), c['seed'])}
  for source, by in (
    ('target', sources.by_target),
    ('draft', sources.by_draft),
  ):
    if wanted[source]:
      found[source] = written(source, by)
  shares = [wanted[source] for source in found]
  texts = list(found.values())
  return sources.Mixture(texts, shares, c['batch'], workspace.mesh)


def measure(
  drafter: Trainable, compiled, target: LanguageModel, workspace: Workspace
) -> dict[str, float]:
  """What `distill.measure` measures, on held-out text by the target.

  Args:
    drafter: the draft.
    compiled: `distill.measure`, jitted.
    target: the run's target.
    workspace: the run.
  """
  c, mesh = workspace.config['decode'], workspace.mesh
  rollouts = workspace.rollouts(target, c['temperature'])
  warp = warps.temperature(c['temperature'])
  parts = (
    compiled(drafter, target, warp, c['k'], sharding.by_rows(batch, mesh))
    for batch in data.in_order(rollouts, sharding.whole_parts(16, mesh))
  )
  found = {name: float(x) for name, x in distill.means(parts).items()}
  # What a draft of a part of the vocabulary cannot say at all has no mean.
  return {name: x for name, x in found.items() if x != math.inf}


def _loss_section(config: Mapping[str, Any]) -> dict[str, Any]:
  """All values that the loss depends on."""
  c = dict(config['loss'])
  # Numbers of another divergence make no difference.
  for name in {'beta', 'eta'} - {*losses.NUMBERS.get(c['divergence'], ())}:
    c.pop(name)
  warped = c['at_decode_warp']
  temperature = config['decode']['temperature'] if warped else 1.0
  return {**c, 'temperature': temperature}


def _data_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Where nothing is written, how it would be makes no difference."""
  c = config['data']
  return dict(c if c['target'] or c['draft'] else sources.CORPUS_ONLY)

"""Students: drafts of one shape that train, and are measured, together.

A `vmap` over students leaves the target and the batch as they are, so that both
are computed on once for all. Students of one group see the same batches, and a
seed changes the initialisation alone: intervals over seeds say nothing of the
order in which the text is read.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import data, distill, flops, optimizing, recipes, runs, training
from specjax.ablation.planning import Student
from specjax.ablation.scoring import measure, pick
from specjax.checkpoint import Checkpoints
from specjax.types import Batch, LanguageModel, Trainable
from specjax.workspace import Workspace


def stack(trees: Sequence[Any]) -> Any:
  """One tree of arrays `[P, ...]` from P trees."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def untrained(workspace: Workspace, students: Sequence[Student]) -> Trainable:
  """Drafts `[P, ...]` before their first step; those of a seed are alike."""
  base = workspace.config['distill']['seed']
  by_seed = {
    seed: workspace.new_drafter(base + seed)
    for seed in {student.seed for student in students}
  }
  return stack([by_seed[student.seed] for student in students])


def objectives(students: Sequence[Student]) -> distill.Objective:
  """What each minimises, `[P]`."""
  return stack([distill.objective(student.kl_weight) for student in students])


def make_update(config: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
  """The optimiser, and one update of one student.

  Args:
    config: of its group.

  Returns:
    The optimiser, and `step(state, target, batch, objective)`.
  """
  return recipes.optimization(config['distill'], recipes.loss(config), batch=1)


def mapped(update: Callable[..., Any]) -> Callable[..., Any]:
  """The update of `[P]` students on one batch, compiled; it takes the state."""
  return jax.jit(jax.vmap(update, in_axes=(0, None, None, 0)), donate_argnums=0)


def batches(
  workspace: Workspace, target: LanguageModel, name: str
) -> Callable[[int, Trainable], Batch]:
  """The text of a training, by step and its `[P]` drafts before that.

  What the target writes has its law whoever drafts; the first student does.
  """
  text = recipes.batches(workspace, target, name)
  return lambda step, drafters: text(step, pick(drafters, 0))


def train(
  workspace: Workspace,
  target: LanguageModel,
  students: Sequence[Student],
  folder: Path,
  name: str,
  say: Callable[[str], Any] = print,
) -> Trainable:
  """Trains students at once, from their newest checkpoint if they have one.

  Args:
    workspace: the run, with the configuration of their group.
    target: the run's target.
    students: who.
    folder: theirs.
    name: of the log, within that of the ablation.
    say: told what memory a step takes beside the students.

  Returns:
    The drafts `[P, ...]` after their last step.

  Raises:
    FloatingPointError: a loss, gradient or update of one of them is not finite;
      the message names the step and the student.
  """
  c = workspace.config['distill']
  text = batches(workspace, target, f'ablation/{name}')
  tx, update = make_update(workspace.config)
  state = jax.vmap(lambda model: optimizing.init(model, tx))(
    untrained(workspace, students)
  )
  weights = objectives(students)
  like = data.described(c['batch'], workspace.config['corpus']['window'])
  program = mapped(update).lower(state, target, like, weights).compile()
  say(_memory(program))
  sound = jnp.ones(len(students), bool)

  def step(state, batch):
    nonlocal sound
    state, scalars = program(state, target, batch, weights)
    now = jnp.isfinite(sum(scalars.values()))
    sound = jnp.where(sound.all(), now, sound)  # who was the first
    return state, {name: value.max() for name, value in scalars.items()}

  def evaluate(drafters):
    found = measure(workspace, target, drafters, workspace.config['decode'])
    each = {
      f'{name}/kl_weight={student.kl_weight:g},seed={student.seed}': value
      for student, values in zip(students, found, strict=True)
      for name, value in values.items()
      if '/' not in name  # by depth and entropy would be too many
    }
    best = {
      name: max(values[name] for values in found)
      for name in ('acceptance', 'block_efficiency')
    }
    return each | best

  runs.write_json(folder / 'students.json', list(students))
  try:
    state = training.fit(
      state,
      step,
      text,
      evaluate,
      steps=c['steps'],
      every=c['eval_every'],
      folder=folder,
      log=workspace.folder / 'logs' / 'ablation' / name,
      meta={},
      score=lambda values: values['block_efficiency'],
      show=('acceptance', 'block_efficiency'),
      like=like,
      beside=target,
      operations=lambda state, like: flops.products(
        mapped(update), state, target, like, weights
      ),
      dtype=c['dtype'],
    )
  except FloatingPointError as error:
    if sound.all():
      raise  # of text that was to be written
    who = ', '.join(
      f'KL weight {one.kl_weight:g} and seed {one.seed}'
      for one, fine in zip(students, sound.tolist(), strict=True)
      if not fine
    )
    raise FloatingPointError(f'of the draft of {who}: {error}') from error
  return state.model


def load(
  workspace: Workspace, students: Sequence[Student], folder: Path
) -> Trainable:
  """The drafts `[P, ...]` of a training that is done."""
  like = jax.eval_shape(lambda: untrained(workspace, students))
  checkpoints = Checkpoints(folder)
  return checkpoints.restore(checkpoints.latest(), {'model': like})['model']


def compare(
  workspace: Workspace,
  target: LanguageModel,
  students: Sequence[Student],
  steps: int,
  done: Callable[[], Any] = lambda: None,
) -> dict[str, float]:
  """Times steps of students that train together and one after the other.

  Every step is made both ways in turn, from the same beginning, on the same
  batches. Nothing is kept, and compiling is left out.

  Args:
    workspace: the run, with the configuration of their group.
    target: the run's target.
    students: who.
    steps: to be timed.
    done: called after each.

  Returns:
    `together_seconds` and `one_by_one_seconds` of all steps, their `ratio`, and
    `difference`: the largest between two parameters that should be equal, as a
    share of the largest parameter.
  """
  text = batches(workspace, target, 'ablation/compare')
  tx, update = make_update(workspace.config)
  models, weights = untrained(workspace, students), objectives(students)
  each = [pick(weights, i) for i in range(len(students))]
  init = functools.partial(optimizing.init, tx=tx)
  alone = [init(pick(models, i)) for i in range(len(students))]
  state = jax.vmap(init)(models)
  programs = mapped(update), jax.jit(update, donate_argnums=0)
  together = one_by_one = 0.0
  for i in range(-1, steps):
    batch = jax.tree.map(jnp.asarray, text(max(i, 0), state.model))
    start = time.perf_counter()
    state, _ = programs[0](state, target, batch, weights)
    jax.block_until_ready(state)
    middle = time.perf_counter()
    for j in range(len(students)):
      alone[j], _ = programs[1](alone[j], target, batch, each[j])
      jax.block_until_ready(alone[j])
    end = time.perf_counter()
    if i >= 0:  # the first of all compiles
      together += middle - start
      one_by_one += end - middle
      done()
  return {
    'together_seconds': together,
    'one_by_one_seconds': one_by_one,
    'ratio': together / one_by_one,
    'difference': _difference(state.model, stack([s.model for s in alone])),
  }


def _difference(a, b) -> float:
  pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
  largest = max(float(jnp.abs(x).max()) for x, _ in pairs)
  return max(float(jnp.abs(x - y).max()) for x, y in pairs) / largest


def _memory(program: jax.stages.Compiled) -> str:
  """What a compiled step says that it needs."""
  found = program.memory_analysis()
  if found is None:
    return 'a step: this device does not say what memory it takes'
  return (
    f'a step takes {found.temp_size_in_bytes / 1e6:,.0f} MB beside'
    f' {found.argument_size_in_bytes / 1e6:,.0f} MB of target and students'
  )

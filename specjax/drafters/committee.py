"""Several draft models, each of which proposes a chain of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.drafters import model
from specjax.types import Block, Draft, pytree, taps


@pytree
class Committee:
  """Hangs the chains of its members off the pending token.

  Siblings are independent and every node has the law of the member that drew
  it. Chains that begin alike share their beginning.

  Attributes:
    members: drafters of chains, all of one length.
  """

  members: tuple[model.ModelDrafter, ...]

  def __post_init__(self):
    """Refuses chains of different lengths, and none at all."""
    lengths = [member.k for member in self.members]
    if len(set(lengths)) != 1:
      raise ValueError(
        f'the members draft {lengths} tokens: they need one length'
      )
    if any(map(taps, self.members)):
      raise ValueError(
        "members of a committee draft by themselves: one reads the target's"
        ' streams'
      )

  def init(self, target, batch, size):
    """The memories of the members."""
    return tuple(m.init(target, batch, size) for m in self.members)

  def propose(self, target, cache, memory, keys, tokens, length, limit=None):
    """The members' chains, side by side."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    drafts, memories = [], []
    for i, (member, own) in enumerate(zip(self.members, memory, strict=True)):
      mine = keys._replace(draft=fold(keys.draft, i))
      draft, own = member.propose(target, cache, own, mine, tokens, length)
      drafts.append(draft)
      memories.append(own)
    k = drafts[0].tokens.shape[1]
    if k == 0:
      return drafts[0], tuple(memories)
    for draft in drafts:
      if draft.parents is not None or draft.siblings != 'single':
        raise ValueError(
          f'a committee is of sampled chains: a member drafts'
          f' siblings={draft.siblings!r}'
        )
    chain = jnp.arange(-1, k - 1)
    parents = [
      jnp.where(chain < 0, -1, chain + i * k) for i in range(len(drafts))
    ]
    parents = jnp.tile(jnp.concatenate(parents), (tokens.shape[0], 1))
    drawn = jnp.concatenate([draft.tokens for draft in drafts], 1)
    return (
      Draft(
        drawn,
        parents=trees.merge(drawn, parents),
        logits=jnp.concatenate([draft.logits for draft in drafts], 1),
        siblings='independent',
      ),
      tuple(memories),
    )

  def observe(self, target, memory, block, kept, output):
    """Every member learns which nodes of its own chain were kept."""
    size = block.tokens.shape[1]
    k = self.members[0].k
    learned = []
    for i, (member, own) in enumerate(zip(self.members, memory, strict=True)):
      # A prompt's chunk is everybody's.
      nodes = jnp.arange(size)
      if size == 1 + k * len(self.members):
        nodes = jnp.concatenate([nodes[:1], 1 + i * k + jnp.arange(k)])
      mine = Block(block.tokens[:, nodes])
      learned.append(member.observe(target, own, mine, kept[:, nodes], output))
    return tuple(learned)

  def at(self, k: int) -> Committee:
    """The same members with chains of `k` tokens."""
    return Committee(tuple(member.at(k) for member in self.members))


def build(config, target, rngs) -> Committee:
  """There is none to train.

  Raises:
    ValueError: always.
  """
  raise ValueError(
    'a committee is not trained: distil drafts of draft.drafter=model, and'
    ' decode with --drafter=committee --draft=one,other'
  )

"""Real decoding of a few held-out prompts while a drafter is being trained."""

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax import generation, loading, sharding
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.errors import InputError
from eagle_jax.loading import LoadedTarget
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request
from eagle_jax.training.data import Packed


def first_prompts(packed: Packed, count: int) -> list[list[int]]:
  """What comes before the first answer of a row's first document.

  tokens  a b c d e 0      mask  0 0 1 1 0 0      prompt  a b
  """
  prompts = []
  for r in range(len(packed)):
    row = packed.take(np.array([r]))
    tokens, mask = row["tokens"][0], row["mask"][0]
    length = int(np.argmax(mask))
    if mask.any() and length:
      prompts.append(tokens[:length].tolist())
    if len(prompts) == count:
      break
  return prompts


class Decoder:
  """Greedy answers with the default tree; compiled once, at the first call.

  Args:
    drafter: as it starts; its trained entries come with each call.
    mesh: both models lie on it as in training.
  """

  def __init__(
    self,
    target: LoadedTarget,
    drafter: LoadedDrafter,
    mesh: Mesh,
    packed: Packed,
    prompts: int,
    tokens: int,
  ):
    spec = generation.tree_spec("dynamic")
    if spec.branch > drafter.config.draft_vocab_size:
      raise InputError(
        f"decode_every needs a draft_vocab_size of {spec.branch} or more, the"
        f" default tree's branch, not {drafter.config.draft_vocab_size}"
      )
    self.requests = [
      Request(ids, tokens) for ids in first_prompts(packed, prompts)
    ]
    if not self.requests:
      raise InputError(
        "decode_every finds no held-out prompt before an answer: set it to 0"
      )
    m = loading.models(target, drafter, spec, mesh=mesh, place=False)
    everywhere = sharding.replicated(mesh)
    m = m.replace(
      vocabulary=jax.device_put(drafter.vocabulary, everywhere),
      ends=jax.device_put(np.asarray(m.ends), everywhere),
    )
    longest = max(len(r.prompt_ids) for r in self.requests)
    context = min(longest + tokens, target.config.max_positions)
    rows = mesh.shape["data"]
    rows *= -(-len(self.requests) // rows)
    self.engine = Engine(m, rows, context)

  def __call__(self, drafter_params: dict) -> dict:
    """tau over all prompts (tokens kept a verify pass) and tokens decoded."""
    models = self.engine.models
    self.engine.models = models.replace(drafter_params=drafter_params)
    results = self.engine.generate(self.requests)
    cycles = sum(len(r.accept_lengths) for r in results)
    tokens = sum(len(r.token_ids) for r in results)
    figures = {"tokens": tokens}
    if cycles:  # else each answer ended with its first token
      figures["tau"] = (tokens - len(results)) / cycles
    return figures

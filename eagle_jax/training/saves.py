"""Checkpoints of a run: the best by held-out tau, and the last few.

One holds all that the run needs to go on as if nothing had happened: trained
parameters, optimizer, step, noise key, position in the data, and what must be
the same again: the chat template and the tokenizer.
"""

import hashlib
import json
import pathlib

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from eagle_jax.errors import InputError
from eagle_jax.training.step import TrainState


def fingerprint(tokenizer) -> str:
  """Of a tokenizer's ids: a digest of (token, id), all of them."""
  table = json.dumps(sorted(tokenizer.get_vocab().items()))
  return hashlib.sha256(table.encode()).hexdigest()[:16]


class Saves:
  """Saves run beside the training; leaving the context completes them.

  Args:
    facts: must be equal on resume; values that JSON keeps.
  """

  def __init__(self, folder: pathlib.Path, keep_last: int, facts: dict):
    self.facts = facts
    self.manager = ocp.CheckpointManager(
      folder,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=managers.AnyPreservationPolicy(
          [
            managers.LatestN(keep_last),
            managers.BestN(
              get_metric_fn=lambda metrics: metrics["tau"],
              n=1,
              keep_checkpoints_without_metrics=False,
            ),
          ]
        ),
        enable_async_checkpointing=True,
      ),
    )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.manager.close()

  def save(
    self,
    step: int,
    state: TrainState,
    position: dict,
    best_tau: float,
    tau: float | None,
  ) -> None:
    """Copy the state and write it while training goes on.

    Args:
      position: state of the data iterator. best_tau: so far.
      tau: held out at this very step, if measured.
    """
    self.manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        run=ocp.args.JsonSave(
          {"position": position, "best_tau": best_tau, "facts": self.facts}
        ),
      ),
      metrics=None if tau is None else {"tau": tau},
    )

  def restore(self, state: TrainState) -> tuple[TrainState, dict, float] | None:
    """The latest (state, data position, best tau), laid out like `state`.

    Args:
      state: shapes with shardings, of any mesh.

    Raises:
      InputError: a run that read other tokens.
    """
    step = self.manager.latest_step()
    if step is None:
      return None
    run = self.manager.restore(
      step, args=ocp.args.Composite(run=ocp.args.JsonRestore())
    )["run"]
    other = [n for n in self.facts if run["facts"].get(n) != self.facts[n]]
    if other:
      raise InputError(
        f"the run in {self.manager.directory.parent} was trained with another"
        f" {' and '.join(other)}: give another --config.out"
      )
    state = self.manager.restore(
      step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state))
    )["state"]
    return state, run["position"], run["best_tau"]

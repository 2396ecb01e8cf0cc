"""`--tree auto`: the tree that gives most tokens a second on this device.

  tokens a second = tau(tree) / (verify(M) + head + drafting(L, branch) + walk)

tau comes from the drafter's saved calibration, or from a few answers decoded
on the spot at the temperature that is asked for; the costs are timed on the
device, greedy or sampling. Choice and costs are kept in the user's cache
folder. The choice can change the speed and never a token.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import costs, generation, loading, machine, text
from eagle_jax.bench import suites
from eagle_jax.checkpoints import gguf_target, tensors
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import Sampling
from eagle_jax.files import write_whole
from eagle_jax.loading import LoadedTarget
from eagle_jax.speculation.requests import Request
from eagle_jax.speculation.tree import TreeSpec
from eagle_jax.training import acceptance

# M whose verify pass is timed; loading.FEW_NODES, where the head's cost bends,
# is among them, and so are 2 and 3: 2 nodes may cost a CPU more than 3
NODES = (1, 2, 3, 4, 8, 16, 32, 60)
ANSWERS, LENGTH = 12, 64  # decoded where no calibration is saved
_VERSION = 6  # of what is kept; raise it when the rule changes


@dataclasses.dataclass(frozen=True)
class Choice:
  """A tree by name, and what is expected of it.

  tau: tokens a pass. tokens_per_s, plain_tokens_per_s: of each row of the
  batch, prefill not counted. costs: what was timed.
  """

  tree: str
  tau: float
  tokens_per_s: float
  plain_tokens_per_s: float
  costs: costs.Costs

  def line(self) -> str:
    ratio = self.tokens_per_s / self.plain_tokens_per_s
    return (
      f"tree auto: {self.tree}, expected tau {self.tau:.2f},"
      f" {self.tokens_per_s:.1f} tokens/s, {ratio:.2f}x plain"
    )


def best(taus: dict[str, float], c: costs.Costs) -> tuple[str, float]:
  """(tree, tokens a second) of the fastest among `taus`; fewer nodes win
  ties. Trees larger than the largest timed pass are left out."""
  found = []
  for name, tau in taus.items():
    spec = generation.named_tree(name)
    if spec.num_nodes <= max(c.verify):
      found.append((tau / c.cycle(spec, tau), -spec.num_nodes, name))
  rate, _, name = max(found)
  return name, rate


def drafter_fingerprint(drafter: LoadedDrafter) -> str:
  """Tells drafters apart that share a name, whatever dtype they run in."""
  config = dataclasses.replace(
    drafter.config, draft_noise=0.0, dtype="bfloat16"
  )
  digest = hashlib.sha256(repr(config).encode())
  for path, leaf in sorted(tensors.flatten(drafter.params).items()):
    kept = np.asarray(leaf[:1].astype(jnp.bfloat16))  # as drafters are stored
    digest.update(path.encode() + kept.tobytes())
  return digest.hexdigest()[:16]


def save_acceptance(
  folder: pathlib.Path,
  drafter: LoadedDrafter,
  seen: acceptance.Observed,
  temperature: float,
  draft_noise: float,
  warm: acceptance.Observed,
) -> None:
  """Write acceptance.json beside a drafter: what its trees are worth.

  Args:
    seen: of greedy answers.
    warm: of answers at `temperature`, drafted with that shared noise; left out
      where they were too short to tell.
  """
  worth = lambda o: {
    n: round(t, 4) for n, t in acceptance.tokens_a_pass(o).items()
  }
  found = {
    "drafter": drafter_fingerprint(drafter),
    "contexts": len(seen.rank),
    "by_rank": seen.by_rank().round(4).tolist(),
    "tau": worth(seen),
  }
  if len(warm.rank):
    found["sampled"] = {
      "temperature": temperature,
      "draft_noise": draft_noise,
      "contexts": len(warm.rank),
      "tau": worth(warm),
    }
  write_whole(folder / loading.ACCEPTANCE, json.dumps(found) + "\n")


def estimate(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  sampling: Sampling,
  prompts: Sequence[Sequence[int]],
  length: int,
) -> acceptance.Observed:
  """What drafts are worth on the target's own answers to these prompts,
  decoded here; above temperature 0 drafts use the noise they were drawn with.

  Args:
    sampling: of which cuts and penalties are ignored.
    prompts: ids of each. length: tokens of an answer at most.
  """
  plain = generation.Generator(target, None, "plain", None, len(prompts)).engine
  requests = [
    Request(p, length, Sampling(sampling.temperature), number=i)
    for i, p in enumerate(prompts)
  ]
  results = plain.generate(requests)
  drawn = None
  if sampling.temperature > 0:
    drawn = acceptance.Drawn(
      sampling.temperature,
      sampling.strength(drafter.config.draft_noise),
      plain.seeds_of(requests),
    )
  return acceptance.of_answers(
    target, drafter, prompts, [r.token_ids for r in results], drawn
  )


def _saved(drafter: LoadedDrafter, sampling: Sampling) -> dict | None:
  """Tokens a pass by tree that calibrate found for this drafter: between
  temperature 0 and the one it sampled at, what lies between the two; above
  that one, what it found there."""
  saved = drafter.notes.get("acceptance")
  if not saved or saved["drafter"] != drafter_fingerprint(drafter):
    return None
  if sampling.temperature <= 0:
    return saved["tau"]
  sampled = saved.get("sampled")
  strength = sampling.strength(drafter.config.draft_noise)
  if not sampled or sampled["draft_noise"] != strength:
    return None
  share = min(sampling.temperature / sampled["temperature"], 1.0)
  warm = sampled["tau"]
  return {
    name: (1 - share) * tau + share * warm[name]
    for name, tau in saved["tau"].items()
    if name in warm
  }


def taus_of(
  target: LoadedTarget, drafter: LoadedDrafter, sampling: Sampling, say
) -> dict[str, float] | None:
  """Tokens a pass by tree: saved with the drafter, else estimated; None where
  the target's answers are too short to tell."""
  saved = _saved(drafter, sampling)
  if saved:
    return saved
  if not getattr(target.tokenizer, "chat_template", None):
    say("tree auto: without a chat template acceptance cannot be estimated")
    return None
  say(
    f"tree auto: estimating acceptance on {ANSWERS} answers at temperature"
    f" {sampling.temperature:g} (once; calibrate saves it with the drafter)"
  )
  prompts = [
    text.encode_messages(target.tokenizer, text.with_system(q.turns[0], None))
    for q in suites.read(suites.SHIPPED, ANSWERS)
  ]
  seen = estimate(target, drafter, sampling, prompts, LENGTH)
  if not len(seen.rank):
    say("tree auto: the answers are too short to estimate acceptance on")
    return None
  return acceptance.tokens_a_pass(seen)


def _digest(value) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _file(kind: str, key: dict) -> pathlib.Path:
  return gguf_target.cache_dir() / kind / f"{_digest(key)}.json"


def _keep(file: pathlib.Path, found: dict) -> None:
  file.parent.mkdir(parents=True, exist_ok=True)
  write_whole(file, json.dumps(found) + "\n")


def branches(drafter: LoadedDrafter) -> list[int]:
  """Of which drafting is timed: one child a node, and the most there are."""
  widest = min(max(acceptance.BRANCHES), drafter.config.draft_vocab_size)
  return sorted({1, widest})


def _timed(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  timed_for: dict,
  sampling: Sampling,
  most: float,
  say,
) -> costs.Costs:
  """Costs by `timed_for`, kept or timed; again where larger trees than those
  that were timed may pay now (`most`, as in `costs.measure`)."""
  file = _file("costs", timed_for)
  if file.exists():
    kept = json.loads(file.read_text())
    found = _costs(kept["costs"])
    if most <= kept["most"] or max(NODES) in found.verify:
      return found
  drawing = "sampling" if timed_for["sampled"] else "greedy"
  say(
    f"tree auto: timing verify and draft passes (once for these models,"
    f" {drawing})"
  )
  found = costs.measure(
    target,
    drafter,
    timed_for["batch_size"],
    NODES,
    branches(drafter),
    most,
    sampling.temperature,
    sampling.strength(drafter.config.draft_noise),
  )
  kept = {"most": most, "costs": dataclasses.asdict(found)}
  _keep(file, timed_for | kept)
  return found


def choose(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  batch_size: int,
  sampling: Sampling,
  say,
) -> Choice | None:
  """The choice for these models on this device, kept or made anew; None
  where nothing is known of the acceptance.

  Args:
    sampling: what requests will ask for. Its temperature and its shared noise
      count; cuts and penalties are neither estimated nor timed.
  """
  warm = sampling.temperature > 0
  strength = sampling.strength(drafter.config.draft_noise) if warm else 0.0
  sampling = Sampling(sampling.temperature, draft_noise=strength)
  timed_for = {
    "version": _VERSION,
    "device": machine.device(),
    "jax": jax.__version__,
    "target": target.fingerprint(),
    "drafter": drafter_fingerprint(drafter),
    "batch_size": batch_size,
    "sampled": warm,
    "noise": strength > 0,
  }
  key = timed_for | {
    "temperature": round(sampling.temperature, 2),
    "draft_noise": strength,
    # another calibration may choose another tree
    "saved": _digest(_saved(drafter, sampling)),
  }
  file = _file("trees", key)
  if file.exists():
    kept = json.loads(file.read_text())["choice"]
    return Choice(**kept | {"costs": _costs(kept["costs"])})
  taus = taus_of(target, drafter, sampling, say)
  if taus is None:
    return None
  most = max(taus.values())
  timed = _timed(target, drafter, timed_for, sampling, most, say)
  name, rate = best(taus, timed)
  made = Choice(name, taus[name], rate, 1 / timed.plain(), timed)
  _keep(file, key | {"choice": dataclasses.asdict(made)})
  return made


def _costs(kept: dict) -> costs.Costs:
  """JSON has texts for keys."""
  number = lambda table: {int(k): v for k, v in table.items()}
  return costs.Costs(
    **{k: number(v) if isinstance(v, dict) else v for k, v in kept.items()}
  )


def spec(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  batch_size: int,
  sampling: Sampling,
  say,
  verbose: bool,
) -> TreeSpec:
  """The chosen tree, ready to use."""
  made = choose(target, drafter, batch_size, sampling, say)
  if made is None:
    say("tree auto: the default tree serves")
    return generation.tree_spec("dynamic")
  if verbose:
    say(made.line())
  return generation.named_tree(made.tree)

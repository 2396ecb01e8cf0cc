"""`--tree auto`: the tree that gives most tokens a second on this device.

  tokens a second = tau(tree) / (verify(M) + head + drafting(L, branch) + walk)

tau comes from the drafter's saved calibration, or from a few answers decoded
on the spot with the sampling that is asked for; the costs are timed on the
device, greedy or sampling. Both are kept in the user's cache folder, by device,
models and batch size. The choice can change the speed and never a token.
"""

import dataclasses
import hashlib
import json
import pathlib

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
from eagle_jax.speculation.sampling import row_seed
from eagle_jax.speculation.tree import TreeSpec
from eagle_jax.training import acceptance

# M whose verify pass is timed; loading.FEW_NODES, where the head's cost bends,
# is among them
NODES = (1, 4, 8, 16, 32, 60)
ANSWERS, LENGTH = 12, 64  # decoded where no calibration is saved
_VERSION = 4  # of what is kept; raise it when the rule changes


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
    seen: at temperature 0. warm: at `temperature`, with that shared noise.
  """
  worth = lambda o: {
    n: round(t, 4) for n, t in acceptance.tokens_a_pass(o).items()
  }
  found = {
    "drafter": drafter_fingerprint(drafter),
    "contexts": len(seen.rank),
    "by_rank": seen.by_rank().round(4).tolist(),
    "tau": worth(seen),
    "sampled": {
      "temperature": temperature,
      "draft_noise": draft_noise,
      "contexts": len(warm.rank),
      "tau": worth(warm),
    },
  }
  write_whole(folder / loading.ACCEPTANCE, json.dumps(found) + "\n")


def _strength(drafter: LoadedDrafter, s: Sampling) -> float:
  """Of the shared noise in drafting; 0 where nothing is drawn."""
  given = s.draft_noise
  used = drafter.config.draft_noise if given is None else given
  return used if s.temperature > 0 else 0.0


def estimate(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  how: Sampling,
  answers: int,
  length: int,
) -> acceptance.Observed:
  """What drafts are worth on the target's own answers to the shipped prompts,
  decoded here; above temperature 0 drafts use the noise they were drawn with.

  Args:
    answers: at most as many as there are prompts. length: tokens of each.
  """
  questions = suites.read(suites.SHIPPED, answers)
  prompts = [
    text.encode_messages(target.tokenizer, text.with_system(q.turns[0], None))
    for q in questions
  ]
  plain = generation.Generator(target, None, "plain", None, len(prompts))
  results = plain.engine.generate(
    [Request(p, length, how, number=i) for i, p in enumerate(prompts)]
  )
  drawn = None
  if how.temperature > 0:
    seeds = [np.asarray(row_seed(0, i, 0)) for i in range(len(prompts))]
    drawn = acceptance.Drawn(
      how.temperature, _strength(drafter, how), np.stack(seeds)
    )
  return acceptance.of_answers(
    target, drafter, prompts, [r.token_ids for r in results], drawn
  )


def _saved(drafter: LoadedDrafter, how: Sampling) -> dict | None:
  """Tokens a pass by tree that calibrate found for this drafter; between
  temperature 0 and the one it sampled at, what lies between the two."""
  saved = drafter.notes.get("acceptance")
  if not saved or saved["drafter"] != drafter_fingerprint(drafter):
    return None
  if how.temperature <= 0:
    return saved["tau"]
  sampled = saved.get("sampled")
  if not sampled or sampled["draft_noise"] != _strength(drafter, how):
    return None
  share = min(how.temperature / sampled["temperature"], 1.0)
  warm = sampled["tau"]
  return {
    name: (1 - share) * tau + share * warm[name]
    for name, tau in saved["tau"].items()
    if name in warm
  }


def taus_of(
  target: LoadedTarget, drafter: LoadedDrafter, how: Sampling, say
) -> dict[str, float] | None:
  """Tokens a pass by tree: saved with the drafter, else estimated; None where
  the target's answers are too short to tell."""
  saved = _saved(drafter, how)
  if saved:
    return saved
  if not getattr(target.tokenizer, "chat_template", None):
    say("tree auto: without a chat template acceptance cannot be estimated")
    return None
  say(
    f"tree auto: estimating acceptance on {ANSWERS} answers (once; calibrate"
    " saves it with the drafter)"
  )
  seen = estimate(target, drafter, how, ANSWERS, LENGTH)
  if not len(seen.rank):
    say("tree auto: the answers are too short to estimate acceptance on")
    return None
  return acceptance.tokens_a_pass(seen)


def _file(kind: str, key: dict) -> pathlib.Path:
  digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
  return gguf_target.cache_dir() / kind / f"{digest}.json"


def _keep(file: pathlib.Path, found: dict) -> None:
  file.parent.mkdir(parents=True, exist_ok=True)
  write_whole(file, json.dumps(found) + "\n")


def choose(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  batch_size: int,
  how: Sampling,
  say,
) -> Choice | None:
  """The choice for these models on this device, kept or made anew; None
  where nothing is known of the acceptance.

  Args:
    how: what most requests will ask for. Of it, timing depends only on
      whether tokens are drawn, and drafts ranked by the noise.
  """
  strength = _strength(drafter, how)
  models = {
    "version": _VERSION,
    "device": machine.device(),
    "jax": jax.__version__,
    "target": target.fingerprint(),
    "drafter": drafter_fingerprint(drafter),
    "batch_size": batch_size,
    "sampled": how.temperature > 0,
    "noise": strength > 0,
  }
  key = models | {
    "temperature": round(how.temperature, 2),
    "draft_noise": strength,
  }
  file = _file("trees", key)
  if file.exists():
    kept = json.loads(file.read_text())["choice"]
    return Choice(**kept | {"costs": _costs(kept["costs"])})
  taus = taus_of(target, drafter, how, say)
  if taus is None:
    return None
  costs_file = _file("costs", models)
  if costs_file.exists():
    timed = _costs(json.loads(costs_file.read_text())["costs"])
  else:
    say("tree auto: timing verify and draft passes (once for these models)")
    W = drafter.config.draft_vocab_size
    timed = costs.measure(
      target,
      drafter,
      batch_size,
      NODES,
      sorted({1, min(max(acceptance.BRANCHES), W)}),
      max(taus.values()),
      how.temperature,
      strength,
    )
    _keep(costs_file, models | {"costs": dataclasses.asdict(timed)})
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
  how: Sampling,
  say,
  verbose: bool,
) -> TreeSpec:
  """The chosen tree, ready to use."""
  made = choose(target, drafter, batch_size, how, say)
  if made is None:
    say("tree auto: the default tree serves")
    return generation.tree_spec("dynamic")
  if verbose:
    say(made.line())
  return generation.named_tree(made.tree)

"""python -m eagle_jax.bench.replay --suite FILE --trees dynamic:60:6:10

The tau of many trees for the price of drafting. EAGLE's answer is plain
decoding's answer, so its tokens are known beforehand: they are decoded once
(plainly, in a batch), the target reads them in one pass, and each cycle then
only grows a tree and walks it by the known tokens. No node is verified, and
all prompts of a suite go side by side. Accept lengths are those of real
decoding, up to rounding of near-equal draft scores.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from eagle_jax import generation, loading, script, text
from eagle_jax.bench import measure, suites
from eagle_jax.bench.measure import Row
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.generation import Generator
from eagle_jax.loading import LoadedTarget
from eagle_jax.models import masks
from eagle_jax.speculation import decoding, verify
from eagle_jax.speculation import state as states
from eagle_jax.speculation.requests import Request
from eagle_jax.speculation.state import DecodeState, Models
from eagle_jax.speculation.tree import TreeSpec


@dataclasses.dataclass(frozen=True)
class Known:
  """Plain answers: [rows] requests and their new tokens."""

  requests: list[Request]
  answers: list[list[int]]


def _extended(
  m: Models, state: DecodeState, features, next_tokens, last, length
) -> DecodeState:
  """The state after `decoding.extend`, with `length` tokens committed."""
  cache, (feature, tokens, scores) = decoding.extend(
    m, state, features, next_tokens, last, length
  )
  return state.replace(
    length=length,
    draft_cache=cache,
    root_feature=feature,
    child_tokens=tokens,
    child_scores=scores,
    finished=state.finished | (length + 1 >= state.limit),
  )


def _cycle(
  m: Models, state: DecodeState, features: jax.Array
) -> tuple[DecodeState, jax.Array]:
  """`decoding.cycle` with the target's tokens and features known.

  Args:
    state: its tokens are the whole known sequences.
    features: [B, width, ·], what the drafter reads of each token.

  Returns:
    the new state, accept_length int32[B].
  """
  L, V = m.spec.levels, m.ends.shape[0]
  B = state.length.shape[0]
  live = ~state.finished
  tree = decoding.grow(m, state)

  def logits_at(node):
    level = tree.level[jnp.arange(B), node]
    at = state.length + level + 1
    known = jnp.take_along_axis(state.tokens, at[:, None], axis=1)[:, 0]
    return jax.nn.one_hot(known, V)

  greedy = jax.tree.map(jnp.zeros_like, state.sampling).replace(
    repetition_penalty=jnp.ones(B)
  )
  accepted = verify.walk(
    tree,
    L,
    logits_at,
    state.seen,
    greedy,
    state.seeds,
    state.length,
    state.limit - state.length - 1,
    m.ends,
    live,
  )
  length = state.length + jnp.where(live, accepted.length + 1, 0)
  window = jax.vmap(lambda a, n: jax.lax.dynamic_slice_in_dim(a, n, L + 1))
  state = _extended(
    m,
    state,
    window(features, state.length),
    window(state.tokens, state.length + 1),
    accepted.length,
    length,
  )
  return state, accepted.length


@functools.partial(jax.jit, static_argnames="prompt_width")
def _replay(m: Models, state, features, prompt_lengths, prompt_width: int):
  """Drafter prefill, then all cycles; (accept_lengths, cycles) [B, width]."""
  state = _extended(
    m,
    state,
    features[:, :prompt_width],
    state.tokens[:, 1 : prompt_width + 1],
    prompt_lengths - 1,
    prompt_lengths,
  )

  def body(carry):
    i, state, accepts, cycles = carry
    live = ~state.finished
    state, accept = _cycle(m, state, features)
    accepts = accepts.at[:, i].set(jnp.where(live, accept, 0))
    return i + 1, state, accepts, cycles + live

  B, width = state.tokens.shape
  _, _, accepts, cycles = jax.lax.while_loop(
    lambda carry: ~jnp.all(carry[1].finished),
    body,
    (
      jnp.zeros((), jnp.int32),
      state,
      jnp.zeros((B, width), jnp.int32),
      jnp.zeros(B, jnp.int32),
    ),
  )
  return accepts, cycles


@jax.jit
def _read(m: Models, tokens):
  """What the drafter reads of one sequence [1, width]."""
  out, _ = m.target.apply(
    {"params": m.target_params},
    tokens,
    jnp.arange(tokens.shape[1])[None],
    masks.Attend(own=masks.Causal()),
    None,
  )
  return decoding.drafter_reads(m, out)


def replay(
  target: LoadedTarget,
  drafter: LoadedDrafter,
  known: Known,
  specs: dict[str, TreeSpec],
  batch_size: int,
) -> dict[str, list[Row]]:
  """Rows (without seconds) of each tree, for `measure.tau`."""
  rows: dict[str, list[Row]] = {name: [] for name in specs}
  for at in range(0, len(known.requests), batch_size):
    requests = known.requests[at : at + batch_size]
    answers = known.answers[at : at + batch_size]
    B = len(requests)
    prompts = np.array([len(r.prompt_ids) for r in requests], np.int32)
    ends = prompts + np.array([len(a) for a in answers], np.int32)
    # Room for a prefill of the longest prompt and a cycle behind any row.
    deepest = max(s.levels for s in specs.values())
    width = -(-int(ends.max() + deepest + 2) // 64) * 64
    tokens = np.zeros((B, width), np.int32)
    for b, (r, a) in enumerate(zip(requests, answers, strict=True)):
      tokens[b, : ends[b]] = [*r.prompt_ids, *a]
    models = {n: loading.models(target, drafter, s) for n, s in specs.items()}
    first = next(iter(models.values()))
    features = jnp.concatenate([_read(first, t[None]) for t in tokens])
    for name, m in models.items():
      generator = Generator(target, drafter, "eagle", m.spec, B)
      engine = generator.engine
      state = states.init_state(m, B, width, width)
      state = state.replace(
        tokens=jnp.asarray(tokens),
        sampling=jax.tree.map(jnp.asarray, engine.sampling_of(requests)),
        seeds=jnp.asarray(engine.seeds_of(requests)),
        limit=jnp.asarray(ends),
        finished=jnp.zeros(B, bool),
        cache=(),
      )
      accepts, cycles = jax.device_get(
        _replay(m, state, features, prompts, int(prompts.max()))
      )
      rows[name] += [
        Row(a, accepts[b, : cycles[b]].tolist(), 0.0, None)
        for b, a in enumerate(answers)
      ]
  return rows


def plain_answers(
  target: LoadedTarget,
  questions,
  sampling: Sampling,
  max_new_tokens: int,
  seed: int,
  batch_size: int,
  folder: pathlib.Path,
) -> Known:
  """First turns answered by plain decoding; kept in `folder` for later."""
  requests = [
    Request(
      text.encode_messages(
        target.tokenizer, text.with_system(q.turns[0], None)
      ),
      max_new_tokens,
      sampling,
      seed,
      q.number,
    )
    for q in questions
  ]
  key = json.dumps(
    [target.fingerprint(), max_new_tokens, seed]
    + [[*r.prompt_ids] for r in requests]
    + [v for k, v in vars(sampling).items() if k != "draft_noise"]
    + [q.number for q in questions]
  )
  digest = hashlib.sha256(key.encode()).hexdigest()[:16]
  file = folder / f"answers-{digest}.json"
  if file.exists():
    answers = json.loads(file.read_text())
  else:
    engine = Generator(target, None, "plain", None, batch_size).engine
    answers = [r.token_ids for r in engine.generate(requests)]
    file.write_text(json.dumps(answers) + "\n")
  return Known(requests, answers)


def parse_tree(name: str) -> TreeSpec:
  """kind[:nodes[:levels[:branch]]], a part left empty where it is default."""
  kind, *sizes = name.split(":")
  try:
    numbers = [int(s) if s else None for s in sizes]
    return generation.tree_spec(kind, *numbers)
  except (ValueError, TypeError) as e:
    raise InputError(f"tree {name!r}: {e}") from None


def _run(f) -> None:
  say = lambda line: print(line, file=sys.stderr, flush=True)
  specs = {name: parse_tree(name) for name in f.trees}
  if not specs:
    raise InputError("--trees is empty: name one, such as dynamic:60:6:10")
  if f.batch_size < 1 or f.limit < 0 or f.max_new_tokens < 1:
    raise InputError("batch_size, max_new_tokens from 1 and limit from 0")
  files = [pathlib.Path(s) for s in f.suite] or [suites.SHIPPED]
  asked = {p.stem: suites.read(p, f.limit) for p in files}
  noises = [float(n) for n in f.draft_noise] or [None]
  samplings = {
    n: Sampling(f.temperature, top_p=f.top_p, draft_noise=n) for n in noises
  }
  generation.use_compilation_cache()
  target = loading.load_target(f.target, loading.default_dtype(), say)
  drafter = loading.load_drafter(f.drafter, target, say)
  out = pathlib.Path(f.out)
  out.mkdir(parents=True, exist_ok=True)
  figures = {}
  for suite, questions in asked.items():
    for noise, sampling in samplings.items():
      known = plain_answers(
        target,
        questions,
        sampling,
        f.max_new_tokens,
        f.seed,
        f.batch_size,
        out,
      )
      rows = replay(target, drafter, known, specs, f.batch_size)
      for name, mine in rows.items():
        label = name if noise is None else f"{name} noise {noise}"
        entry = {
          "tau": measure.tau(mine),
          "tau_without_loops": measure.tau(mine, loops=False),
          "accept_by_depth": measure.accept_by_depth(mine),
          "prompts": len(mine),
        }
        figures.setdefault(label, {})[suite] = entry
        depth = " ".join(f"{a:.2f}" for a in entry["accept_by_depth"])
        print(
          f"{suite:>12} {label:<24} tau {entry['tau']:.3f}, without loops"
          f" {entry['tau_without_loops']:.3f}; by depth {depth}",
          flush=True,
        )
  for label, by_suite in figures.items():
    for field in ("tau", "tau_without_loops"):
      by_suite[f"mean_{field}"] = float(
        np.mean([e[field] for e in by_suite.values() if isinstance(e, dict)])
      )
    print(
      f"{'mean':>12} {label:<24} tau {by_suite['mean_tau']:.3f}, without loops"
      f" {by_suite['mean_tau_without_loops']:.3f}"
    )
  facts = {n: f[n].value for n in ("target", "drafter", "temperature", "seed")}
  (out / "replay.json").write_text(
    json.dumps(facts | {"trees": figures}, indent=1) + "\n"
  )


if __name__ == "__main__":
  flags.DEFINE_multi_string("suite", [], "question.jsonl; default: shipped.")
  flags.DEFINE_list("trees", ["dynamic:60:6:10"], "kind:nodes:levels:branch.")
  flags.DEFINE_integer("limit", 0, "First prompts of each suite; 0 = all.")
  flags.DEFINE_integer("max_new_tokens", 256, "Of each answer.")
  flags.DEFINE_float("temperature", 0.0, "0 = greedy.")
  flags.DEFINE_float("top_p", 1.0, "Keep this much probability; 1 = off.")
  flags.DEFINE_list("draft_noise", [], "Strengths to try; default: its own.")
  flags.DEFINE_integer("seed", 0, "Of the sampling noise.")
  flags.DEFINE_integer("batch_size", 30, "Prompts side by side.")
  flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
  flags.DEFINE_string("drafter", loading.DEFAULT_DRAFTER, "As in decode.py.")
  flags.DEFINE_string("out", "replay_out", "Folder of answers and figures.")
  script.run("replay", _run)

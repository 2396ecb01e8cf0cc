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
import itertools
import json
import pathlib
import sys
from collections.abc import Hashable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from eagle_jax import generation, loading, machine, script, text
from eagle_jax.bench import measure, suites
from eagle_jax.bench.measure import Row
from eagle_jax.bench.suites import Question
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError, check_least
from eagle_jax.files import make_folder, read_kept, write_whole
from eagle_jax.generation import Generator
from eagle_jax.loading import LoadedTarget
from eagle_jax.models import masks
from eagle_jax.speculation import decoding, engine
from eagle_jax.speculation import state as states
from eagle_jax.speculation.requests import Request, check_seed
from eagle_jax.speculation.state import DecodeState, Models
from eagle_jax.speculation.tree import Tree, TreeSpec
from eagle_jax.training import chats

Name = TypeVar("Name", bound=Hashable)  # of a drafting, a text or several

READ_ROWS = 4  # of known sequences that the target reads together
READ_TOKENS = 512  # of all prompts that the drafter reads together


@dataclasses.dataclass(frozen=True)
class Known:
  """Plain answers: [rows] requests and their new tokens."""

  requests: list[Request]
  answers: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Drafting:
  """How known answers are drafted.

  draft_noise: strength of the shared noise; None = as each request has it.
  """

  drafter: LoadedDrafter
  spec: TreeSpec
  draft_noise: float | None = None


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


def _accept(
  m: Models, state: DecodeState, tree: Tree, live: jax.Array
) -> jax.Array:
  """accept_length int32[B] of the walk along the known tokens.

  `verify.walk` with the target's decisions known, so that no logits are made:

    known after the root   7 9 4      tree  7 - 9      accept_length 2
                                            8
  """
  rows = jnp.arange(live.shape[0])
  node, length = 0 * state.length, 0 * state.length
  room = state.limit - state.length - 1
  for step in range(m.spec.levels):
    token = state.tokens[rows, state.length + step + 1]
    child = (
      (tree.parent == node[:, None])
      & (tree.tokens == token[:, None])
      & tree.valid
    )
    child = child.at[:, 0].set(False)  # the root is its own parent
    live &= child.any(-1) & ~m.ends[token] & (step + 1 < room)
    node = jnp.where(live, jnp.argmax(child, -1), node)
    length += live
  return length


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
  L = m.spec.levels
  live = ~state.finished
  accept = _accept(m, state, decoding.grow(m, state), live)
  length = state.length + jnp.where(live, accept + 1, 0)
  window = jax.vmap(lambda a, n: jax.lax.dynamic_slice_in_dim(a, n, L + 1))
  state = _extended(
    m,
    state,
    window(features, state.length),
    window(state.tokens, state.length + 1),
    accept,
    length,
  )
  return state, accept


def _replay(m: Models, state, features, prompt_lengths, prompt_width: int):
  """Drafter prefill, then all cycles; (accept_lengths, cycles) [B, width]."""
  for at in range(0, prompt_width, READ_TOKENS):
    to = min(at + READ_TOKENS, prompt_width)
    new = _extended(
      m,
      state,
      features[:, at:to],
      state.tokens[:, at + 1 : to + 1],
      jnp.clip(prompt_lengths - 1 - at, 0, to - at - 1),
      jnp.minimum(prompt_lengths, to),
    )
    # A prompt that ended before has its root already; what this writes into
    # its cache lies behind its length.
    ended = (prompt_lengths <= at)[:, None]
    made = ("root_feature", "child_tokens", "child_scores")
    state = new.replace(
      **{n: jnp.where(ended, getattr(state, n), getattr(new, n)) for n in made}
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


@functools.partial(jax.jit, static_argnums=(1, 2))
def _empty(m: Models, B: int, width: int) -> DecodeState:
  """A state without a cache of the target, which runs no pass, and without
  ids for a penalty: the known tokens decide. In a jit, which never makes what
  is left out."""
  return states.init_state(m, B, width, width).replace(cache=(), seen=())


def _read(m: Models, tokens):
  """(what the drafter reads, final features) of sequences [B, width]."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  out, _ = m.target.apply(
    {"params": m.target_params},
    tokens,
    positions,
    masks.Attend(own=masks.Causal()),
    None,
  )
  return decoding.drafter_reads(m, out), out.feature


@functools.cache
def _compiled(which: str):
  """A jitted function under the compiler options of decoding."""
  made, static = {"replay": (_replay, "prompt_width"), "read": (_read, None)}[
    which
  ]
  return jax.jit(
    made,
    static_argnames=static,
    compiler_options=engine.compiler_options(jax.default_backend()),
  )


def read(m: Models, tokens: np.ndarray) -> tuple[jax.Array, jax.Array]:
  """`_read` of a few rows at a time: attention holds [rows, N, width, width].

  Args:
    tokens: int32[B, width], the rows right-padded.
  """
  B = len(tokens)
  padded = np.pad(tokens, ((0, -B % READ_ROWS), (0, 0)))
  parts = [
    _compiled("read")(m, padded[i : i + READ_ROWS])
    for i in range(0, len(padded), READ_ROWS)
  ]
  return tuple(jnp.concatenate(p)[:B] for p in zip(*parts, strict=True))


def replay(
  target: LoadedTarget,
  draftings: dict[Name, Drafting],
  known: Known,
  batch_size: int,
) -> dict[Name, list[Row]]:
  """Rows (without seconds) of each drafting, for `measure.tau`.

  Answers go side by side with others of about their length, since a batch
  runs until its last row ends. The target reads a batch once for all drafters
  that read the same layers of it. Each tree is compiled once: all batches have
  the width of the longest row, and a short last one is filled with rows that
  are finished from the start.
  """
  n = len(known.requests)
  rows: dict[Name, list] = {name: [None] * n for name in draftings}
  B = min(batch_size, n)
  engines = {
    name: Generator(target, d.drafter, "eagle", d.spec, B).engine
    for name, d in draftings.items()
  }
  deepest = max(d.spec.levels for d in draftings.values())
  order = sorted(range(n), key=lambda i: -len(known.answers[i]))
  asked = [len(r.prompt_ids) for r in known.requests]
  whole = [p + len(a) for p, a in zip(asked, known.answers, strict=True)]
  # room for a prefill of the longest prompt and a cycle behind any row
  width = _rounded(max(whole) + deepest + 2)
  prompt_width = min(_rounded(max(asked)), width - 1)
  bar = tqdm.tqdm(total=-(-n // B) * len(engines), unit="replay", leave=False)
  for at in range(0, n, B):
    chosen = order[at : at + B]
    prompts, ends = np.ones(B, np.int32), np.ones(B, np.int32)
    tokens = np.zeros((B, width), np.int32)
    for b, i in enumerate(chosen):
      prompts[b], ends[b] = asked[i], whole[i]
      tokens[b, : ends[b]] = [*known.requests[i].prompt_ids, *known.answers[i]]
    features: dict[tuple[int, ...], jax.Array] = {}
    for name, one in engines.items():
      words = name if isinstance(name, tuple) else (name,)
      bar.set_description(f"{' '.join(map(str, words))}, {at + 1} on")
      m, noise = one.models, draftings[name].draft_noise
      if m.target.taps not in features:
        features[m.target.taps], _ = read(m, tokens)
      requests = [known.requests[i] for i in chosen]
      if noise is not None:
        requests = [drawn_with(r, noise) for r in requests]
      state = _empty(m, B, width).replace(
        tokens=jnp.asarray(tokens),
        sampling=jax.tree.map(jnp.asarray, one.sampling_of(requests)),
        seeds=jnp.asarray(one.seeds_of(requests)),
        limit=jnp.asarray(ends),
        finished=jnp.arange(B) >= len(chosen),
      )
      accepts, cycles = jax.device_get(
        _compiled("replay")(
          m, state, features[m.target.taps], prompts, prompt_width
        )
      )
      for b, i in enumerate(chosen):
        accept_lengths = accepts[b, : cycles[b]].tolist()
        rows[name][i] = Row(
          known.answers[i], accept_lengths, 0.0, None, i, 0.0, asked[i]
        )
      bar.update()
  bar.close()
  return rows


def drawn_with(request: Request, draft_noise: float) -> Request:
  """The request with this strength of the shared noise."""
  return dataclasses.replace(
    request,
    sampling=dataclasses.replace(request.sampling, draft_noise=draft_noise),
  )


def _rounded(n: int) -> int:
  """The next multiple of 64: few shapes serve all lengths."""
  return -(-n // 64) * 64


def first_turn(
  target: LoadedTarget,
  question: Question,
  sampling: Sampling,
  max_new_tokens: int,
  seed: int,
  history: Sequence[dict] = (),
) -> Request:
  """The request of a question's first turn, after earlier messages."""
  messages = [*history, *text.with_system(question.turns[0], None)]
  return Request(
    text.encode_messages(target.tokenizer, messages),
    max_new_tokens,
    sampling,
    seed,
    question.number,
  )


def earlier_turns(
  target: LoadedTarget, before: Sequence[list[dict]], question, tokens: int
) -> list[dict]:
  """The first whole chats that make a prompt of at most `tokens` tokens; none
  where the question alone is longer.

  Args:
    before: chats' messages; where they are too few, the prompt is shorter.
  """
  history: list[dict] = []
  length = lambda messages: len(
    text.encode_messages(
      target.tokenizer, messages + text.with_system(question.turns[0], None)
    )
  )
  for chat in before:
    if length(history + chat) > tokens:
      break
    history += chat
  return history


def plain_answers(
  target: LoadedTarget,
  questions,
  sampling: Sampling,
  max_new_tokens: int,
  seed: int,
  batch_size: int,
  folder: pathlib.Path,
  histories: Sequence[Sequence[dict]] | None = None,
) -> Known:
  """First turns answered by plain decoding; kept in `folder` for later.

  Args:
    histories: messages before each question.
  """
  requests = [
    first_turn(target, q, sampling, max_new_tokens, seed, history)
    for q, history in zip(
      questions, histories or [()] * len(questions), strict=True
    )
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
    answers = read_kept(file)
  else:
    plain = Generator(target, None, "plain", None, batch_size).engine
    answers = [r.token_ids for r in plain.generate(requests)]
    write_whole(file, json.dumps(answers) + "\n")
  return Known(requests, answers)


def _messages(file: pathlib.Path) -> list[list[dict]]:
  """The chats of a file, their system turns left out; those in which user and
  assistant do not take turns to the end are passed over."""
  found = []
  for where, row in chats.read_jsonl(file):
    try:
      chat = chats.read_chat(row, where)
    except chats.BadRow as e:
      raise InputError(f"{where}: {e}") from None
    turns = [m for m in chat.messages if m["role"] != "system"]
    roles = [m["role"] for m in turns]
    if roles == ["user", "assistant"] * (len(roles) // 2):
      found.append(turns)
  if not found:
    raise InputError(f"{file}: no chat of user and assistant turns alone")
  return found


def rotated(items: list, by: int) -> list:
  """The items from number `by` on, then those before it."""
  by %= len(items)
  return items[by:] + items[:by]


def _numbers(flag: str, given: Sequence[str], kind: type) -> list:
  try:
    return [kind(n) for n in given]
  except ValueError:
    raise InputError(
      f"{flag} {','.join(given)!r} must be numbers with commas between"
    ) from None


def _line(suite: str, label: str, entry: dict[str, float | None]) -> str:
  """- stands for the tau of answers that end at their first token."""
  taus = (entry["tau"], entry["tau_without_loops"])
  tau, without = ("-" if t is None else f"{t:.3f}" for t in taus)
  return f"{suite:>12} {label:<24} tau {tau}, without loops {without}"


def _run(f) -> None:
  say = lambda line: print(line, file=sys.stderr, flush=True)
  specs = {name: generation.named_tree(name) for name in f.trees}
  if not specs:
    raise InputError("--trees is empty: name one, such as dynamic:60:6:10")
  check_seed(f.seed)
  # an answer's first token comes from its prefill, with no cycle
  check_least(f, batch_size=1, limit=0, max_new_tokens=2)
  asked = suites.read_all(f.suite, f.limit)
  if bool(f.history) != bool(f.contexts):
    raise InputError("--history and --contexts go together: give both")
  contexts = sorted(set(_numbers("contexts", f.contexts, int))) or [None]
  before = _messages(pathlib.Path(f.history)) if f.history else []
  noises = _numbers("draft_noise", f.draft_noise, float) or [None]
  loading.check_window(f.drafter_window)
  sampling = Sampling(f.temperature, top_p=f.top_p)
  for noise in noises:
    dataclasses.replace(sampling, draft_noise=noise)  # refuses bad ones
  generation.use_compilation_cache()
  target, drafter = loading.load_pair(
    f.target, f.drafter, None, say, f.drafter_window
  )
  most = target.config.max_positions - f.max_new_tokens
  for context in contexts:
    if context is not None and not 1 <= context <= most:
      raise InputError(
        f"contexts: {context} must be from 1 to {most}, the target's"
        f" {target.config.max_positions} positions less max_new_tokens"
      )
  draftings = {
    name if noise is None else f"{name} noise {noise}": Drafting(
      drafter, spec, noise
    )
    for noise in noises
    for name, spec in specs.items()
  }
  out = make_folder(f.out)
  figures = {}
  for suite, context in itertools.product(asked, contexts):
    questions, histories = asked[suite], None
    if context is not None:
      histories = [
        earlier_turns(target, rotated(before, i), q, context)
        for i, q in enumerate(questions)
      ]
      suite = f"{suite} at {context}"
    known = plain_answers(
      target,
      questions,
      sampling,
      f.max_new_tokens,
      f.seed,
      f.batch_size,
      out,
      histories,
    )
    for label, mine in replay(target, draftings, known, f.batch_size).items():
      entry = {
        "tau": measure.tau(mine),
        "tau_without_loops": measure.tau(mine, loops=False),
        "prompt_tokens": float(np.mean([r.prompt_tokens for r in mine])),
        "accept_by_depth": measure.accept_by_depth(mine),
        "prompts": len(mine),
      }
      figures.setdefault(label, {})[suite] = entry
      depth = " ".join(f"{a:.2f}" for a in entry["accept_by_depth"])
      print(f"{_line(suite, label, entry)}; by depth {depth}", flush=True)
  for label, by_suite in figures.items() if contexts == [None] else ():
    entries, mean = list(by_suite.values()), {}
    for field in ("tau", "tau_without_loops"):
      known = [e[field] for e in entries if e[field] is not None]
      mean[field] = float(np.mean(known)) if known else None
      by_suite[f"mean_{field}"] = mean[field]
    print(_line("mean", label, mean))
  names = ("target", "drafter", "drafter_window", "history", "contexts")
  names += ("temperature", "top_p", "seed", "limit", "max_new_tokens")
  said = {n: f[n].value for n in names}
  said["drafter"] = f.drafter or loading.DEFAULT_DRAFTER
  facts = machine.facts() | said | {"trees": figures}
  write_whole(out / "replay.json", json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
  flags.DEFINE_multi_string("suite", [], "question.jsonl; default: shipped.")
  flags.DEFINE_list("trees", ["dynamic:60:6:10"], "kind:nodes:levels:branch.")
  flags.DEFINE_string(
    "history", None, "Chats, JSONL, that stand before each prompt."
  )
  flags.DEFINE_list(
    "contexts",
    [],
    "Tokens of a prompt with its history, such as 256,1024,4096; long ones need"
    " a small --batch_size.",
  )
  flags.DEFINE_integer("drafter_window", None, "As in decode.py.")
  flags.DEFINE_integer("limit", 0, "First prompts of each suite; 0 = all.")
  flags.DEFINE_integer("max_new_tokens", 256, "Of each answer.")
  flags.DEFINE_float("temperature", 0.0, "0 = greedy.")
  flags.DEFINE_float("top_p", 1.0, "Keep this much probability; 1 = off.")
  flags.DEFINE_list("draft_noise", [], "Strengths to try; default: its own.")
  flags.DEFINE_integer("seed", 0, "Of the sampling noise.")
  flags.DEFINE_integer("batch_size", 30, "Prompts side by side.")
  flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
  flags.DEFINE_string("drafter", None, "As in decode.py.")
  flags.DEFINE_string(
    "out", "replay_out", "Folder: answers are kept, replay.json is made anew."
  )
  script.run("replay", _run)

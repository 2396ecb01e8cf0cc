"""What `decode.py` does, without flags: importable and testable."""

import contextlib
import dataclasses
import difflib
import importlib.util
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator, Sequence

from eagle_jax import drawing, generation, loading, prompts, text
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.generation import Answer, Generator
from eagle_jax.speculation.engine import Request


@dataclasses.dataclass
class DecodeOptions:
  """The flags of `decode.py`, by name; their help texts explain them."""

  target: str = loading.DEFAULT_TARGET
  drafter: str | None = None
  prompt: str | None = None
  prompts_file: str | None = None
  prompt_ids: str | None = None
  max_new_tokens: int = 512
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  seed: int = 0
  num_samples: int = 1
  draft_noise: float | None = None
  system: str | None = None
  raw: bool = False
  stop: Sequence[str] = ()
  method: str = "eagle"
  tree: str = "dynamic"
  tree_nodes: int | None = None
  tree_levels: int | None = None
  tree_branch: int | None = None
  batch_size: int = 1
  context: int | None = None
  ignore_eos: bool = False
  dtype: str | None = None
  output: str | None = None
  compare: bool = False
  show: bool = False
  verbose: bool = False


def read_config(file: str) -> dict:
  """Field values of a configs/*.py file: what its get_config() returns."""
  path = pathlib.Path(file)
  if not path.is_file():
    raise InputError(f"config {file!r} is not a file")
  spec = importlib.util.spec_from_file_location("decode_config", path)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    values = dict(module.get_config())
  except Exception as e:
    raise InputError(
      f"config {file!r} cannot be read ({type(e).__name__}: {e}): it needs a"
      " get_config() that returns a dict of decode.py's flags"
    ) from None
  known = [f.name for f in dataclasses.fields(DecodeOptions)]
  known.remove("verbose")
  for name in values:
    if name not in known:
      near = difflib.get_close_matches(name, known, 1)
      hint = f": did you mean {near[0]}?" if near else ""
      raise InputError(f"config {file!r}: unknown field {name!r}{hint}")
  return values


def from_flags(flags, verbose: bool) -> DecodeOptions:
  """Flags of the command line over the config file over the defaults."""
  given = {}
  for field in dataclasses.fields(DecodeOptions):
    if field.name in flags and flags[field.name].present:
      given[field.name] = flags[field.name].value
  config = read_config(flags.config) if flags.config else {}
  for name, value in config.items():
    config[name] = _fitting(flags, name, value)
  return DecodeOptions(**config | given | {"verbose": verbose})


def _fitting(flags, name: str, value):
  """A config file's value, refused where the flag would refuse it."""
  flag = flags[name]
  if value is None and flag.default is None:
    return None
  try:
    if not isinstance(flag.default, list):
      return flag.parser.parse(value)
    if not isinstance(value, list | tuple):
      raise TypeError
    return [flag.parser.parse(v) for v in value]
  except (TypeError, ValueError):
    raise InputError(
      f"config {flags.config!r}: {name} {value!r} must be of type"
      f" {flag.flag_type()}"
    ) from None


def say(line: str) -> None:
  """Progress goes to stderr: stdout holds answers."""
  print(line, file=sys.stderr, flush=True)


def _inputs(o: DecodeOptions) -> list[str | list[dict] | list[int]] | None:
  """The prompts as text, messages or ids; None = chat."""
  given = [
    n
    for n in ("prompt", "prompts_file", "prompt_ids")
    if getattr(o, n) is not None
  ]
  if len(given) > 1:
    raise InputError(f"--{given[0]} and --{given[1]} exclude each other")
  if o.prompt_ids is not None:
    if o.system is not None or o.raw:
      raise InputError(
        "--prompt_ids are taken as they are: leave out --system and --raw"
      )
    return [prompts.parse_ids(o.prompt_ids)]
  if o.prompts_file is not None:
    return prompts.read(pathlib.Path(o.prompts_file))
  if o.prompt is not None:
    if not o.prompt:
      raise InputError("--prompt is empty: give it a text")
    return [o.prompt]
  return None


def _check(o: DecodeOptions) -> None:
  """Refuses bad values before any weight is read."""
  if o.dtype not in (None, "float32", "bfloat16"):
    raise InputError(f"dtype {o.dtype!r} must be float32 or bfloat16")
  for name in ("num_samples", "max_new_tokens", "batch_size"):
    if getattr(o, name) < 1:
      raise InputError(f"{name} {getattr(o, name)} must be at least 1")
  if o.method not in generation.METHODS:
    raise InputError(
      f"method {o.method!r} is unknown: use one of"
      f" {', '.join(generation.METHODS)}"
    )
  if o.method == "plain" and o.compare:
    raise InputError("--compare compares with plain: use --method eagle")
  if o.show and o.batch_size > 1:
    raise InputError("--show draws one row: use --batch_size 1")
  if o.show and o.method == "plain":
    raise InputError("--show draws drafts: use --method eagle")
  if not 0 <= o.seed < 2**32:
    raise InputError(f"seed {o.seed} must be from 0 to {2**32 - 1}")
  if o.system is not None and o.raw:
    raise InputError("--system needs the chat template: leave out --raw")
  if o.output is not None:
    folder = pathlib.Path(o.output).absolute().parent
    if not folder.is_dir():
      raise InputError(f"output folder {folder} does not exist: make it first")
    if os.path.isdir(o.output):
      raise InputError(f"output {o.output!r} is a folder: name a file")


CHAT_LACKS = ("raw", "num_samples", "batch_size", "output", "compare", "show")


def _check_chat(o: DecodeOptions) -> None:
  """Refuses what a chat would ignore."""
  for name in CHAT_LACKS:
    if getattr(o, name) != getattr(DecodeOptions, name):
      raise InputError(
        f"chat takes no --{name}: give a prompt with --prompt or --prompts_file"
      )


class Session:
  """The loaded models and what is decoded with them."""

  def __init__(self, o: DecodeOptions):
    self.o = o
    self.sampling = Sampling(
      o.temperature,
      o.top_k,
      o.top_p,
      o.min_p,
      o.repetition_penalty,
      o.draft_noise,
    )
    spec = generation.tree_spec(
      o.tree, o.tree_nodes, o.tree_levels, o.tree_branch
    )
    drafter = o.drafter
    default = loading.is_default(o.target)
    if o.method == "eagle" and drafter is None and not default:
      raise InputError(
        f"no drafter for target {o.target!r}: give --drafter, or --method plain"
      )
    generation.use_compilation_cache()
    target = loading.load_target(
      o.target, o.dtype or loading.default_dtype(), say
    )
    found = None
    if o.method == "eagle":
      found = loading.load_drafter(
        drafter or loading.DEFAULT_DRAFTER, target, say
      )
    make = lambda method: Generator(
      target, found, method, spec, o.batch_size, o.context, o.ignore_eos
    )
    self.generator = make(o.method)
    self.plain = make("plain") if o.compare else None
    self.tokenizer = target.tokenizer
    self.piece = lambda i: (
      str(i)
      if target.tokenizer is None
      else target.tokenizer.decode([i], skip_special_tokens=False)
    )

  def request(self, prompt, number: int, sample: int) -> tuple[Request, str]:
    """A request and the prompt's name in the output."""
    o = self.o
    if isinstance(prompt, str):
      if o.raw:
        ids = text.encode_raw(self.tokenizer, prompt)
      else:
        ids = text.encode_messages(
          self.tokenizer, text.with_system(prompt, o.system)
        )
      name = prompt
    elif isinstance(prompt[0], dict):
      if o.raw:
        raise InputError("--raw takes plain prompts, the file has messages")
      system = [{"role": "system", "content": o.system}] if o.system else []
      if system and prompt[0]["role"] == "system":
        raise InputError(
          "--system is given, and the file's messages have a system turn"
        )
      ids = text.encode_messages(self.tokenizer, system + prompt)
      name = prompt[-1]["content"]
    else:
      ids, name = prompt, ",".join(map(str, prompt))
    return (
      Request(ids, o.max_new_tokens, self.sampling, o.seed, number, sample),
      name,
    )


def _record(answer: Answer) -> dict:
  r = answer.result
  return {
    "prompt": answer.prompt,
    "sample": answer.request.sample,
    "text": answer.text,
    "token_ids": r.token_ids,
    "accept_lengths": r.accept_lengths,
    "tau": r.tau,
    "tokens_per_s": answer.tokens_per_s,
    "seconds": r.seconds,
    "finish_reason": r.finish_reason,
  }


@dataclasses.dataclass
class Totals:
  """Sums over rows, for the closing line."""

  rows: int = 0
  tokens: int = 0
  cycles: int = 0
  seconds: float = 0.0
  plain_tokens: int = 0
  plain_seconds: float = 0.0
  identical: int = 0
  near_ties: int = 0

  def line(self, compare: bool, compile_seconds: float) -> str:
    rate = self.tokens / self.seconds if self.seconds else 0.0
    parts = [f"{self.tokens} token{'s' if self.tokens != 1 else ''}"]
    if self.rows > 1:
      parts[0] += f" in {self.rows} rows"
    if self.cycles:
      tau = (self.tokens - self.rows) / self.cycles
      parts.append(f"tau {tau:.2f}")
    parts.append(f"{rate:.1f} tokens/s")
    if compare and self.plain_seconds:
      plain = self.plain_tokens / self.plain_seconds
      same = (
        "same tokens"
        if self.identical == self.rows
        else f"{self.identical} of {self.rows} rows same tokens,"
        f" {self.near_ties} near ties"
      )
      parts.append(f"{rate / plain:.2f}x plain ({plain:.1f} tokens/s), {same}")
    return f"{', '.join(parts)}; compiled in {compile_seconds:.1f} s"


def run(o: DecodeOptions) -> None:
  """Decode what the options say; answers to stdout, the rest to stderr."""
  _check(o)
  wanted = _inputs(o)
  if wanted is None:
    _check_chat(o)
    chat(Session(o))
    return
  session = Session(o)
  pairs = [
    session.request(p, number, sample)
    for number, p in enumerate(wanted)
    for sample in range(o.num_samples)
  ]
  for request, _ in pairs:
    session.generator.engine.check(request)
  totals = Totals()
  with contextlib.ExitStack() as stack:
    sink = None
    if o.output:
      try:
        sink = stack.enter_context(open(o.output, "w", encoding="utf-8"))
      except OSError as e:
        raise InputError(
          f"output {o.output!r} cannot be written ({e.strerror})"
        ) from None
    for at in range(0, len(pairs), o.batch_size):
      group = pairs[at : at + o.batch_size]
      _group(session, group, len(pairs) > 1, totals, sink)
  engines = [g.engine for g in (session.generator, session.plain) if g]
  say(totals.line(o.compare, sum(e.compile_seconds for e in engines)))
  if o.verbose:
    for engine in engines:
      for name in engine.programs:
        say(f"compiled {name}")


def _group(session: Session, group, headed: bool, totals: Totals, sink) -> None:
  """Decode one batch, print its answers, write its rows."""
  o = session.o
  requests = [r for r, _ in group]
  names = [n for _, n in group]
  single = len(group) == 1 and o.batch_size == 1
  trees = []

  def emit(_row, new, _ids):
    print(new, end="", flush=True)

  if single and headed:
    print(f"\n>>> {names[0]}", flush=True)
  answers = session.generator.run(
    requests,
    names,
    o.stop,
    emit if single and not o.show else None,
    watch_trees=(lambda t, out: trees.append((t, out))) if o.show else None,
  )
  plain = [None] * len(group)
  if session.plain:
    plain = session.plain.run(requests, names, o.stop)
  for answer, base in zip(answers, plain, strict=True):
    _print_answer(session, answer, single, trees)
    row = _record(answer)
    totals.rows += 1
    totals.tokens += len(answer.result.token_ids)
    totals.cycles += len(answer.result.accept_lengths)
    if base:
      found = generation.divergence(session.plain, base, answer)
      row |= {
        "identical": found is None,
        "ratio": answer.tokens_per_s / base.tokens_per_s,
        "near_ties": [] if found is None else [dataclasses.asdict(found)],
      }
      totals.identical += found is None
      totals.near_ties += found is not None and found.excused
      totals.plain_tokens += len(base.result.token_ids)
      if found is not None:
        say(
          f"row {answer.request.number}: tokens differ at {found.at}, gap"
          f" {found.gap:.2g} (allowed {found.allowed:.2g}):"
          f" {'a near tie' if found.excused else 'NOT a near tie'}"
        )
    if sink:
      sink.write(json.dumps(row, ensure_ascii=False) + "\n")
      sink.flush()
  # rows of a batch share its clock
  totals.seconds += answers[0].result.seconds
  if session.plain:
    totals.plain_seconds += plain[0].result.seconds


def _print_answer(session: Session, answer: Answer, single, trees) -> None:
  o = session.o
  if not single:
    print(f"\n>>> {answer.prompt}\n{answer.text}", flush=True)
  elif o.show:
    r = answer.result
    print(
      drawing.marked(
        r.token_ids, r.accept_lengths, session.piece, sys.stdout.isatty()
      )
    )
    if trees:
      drafted, out = trees[-1]
      given = out.tokens[0, : out.count[0]].tolist()
      drawn = drawing.Drawn(
        drafted.tokens[0],
        drafted.parent[0],
        drafted.scores[0],
        drafted.valid[0],
        given,
      )
      print("\n" + drawing.tree(drawn, session.piece))
  else:
    print()


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
  """Ctrl-C sets a flag instead of raising: donated buffers stay whole."""
  pressed: list[bool] = []
  before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
  try:
    yield pressed
  finally:
    signal.signal(signal.SIGINT, before)


def chat(session: Session) -> None:
  """Turn after turn until the input ends; Ctrl-C stops an answer."""
  o = session.o
  say("chat with the target; Ctrl-C stops an answer, Ctrl-D ends")
  messages = [{"role": "system", "content": o.system}] if o.system else []
  turn = 0
  while True:
    try:
      line = input("\n> ")
    except EOFError:
      print()
      return
    except KeyboardInterrupt:
      print()
      continue
    if not line.strip():
      continue
    messages.append({"role": "user", "content": line})
    request = Request(
      text.encode_messages(session.tokenizer, messages),
      o.max_new_tokens,
      session.sampling,
      o.seed,
      turn,
    )
    try:
      session.generator.engine.check(request)
    except InputError as e:
      say(f"{e}; this turn is dropped")
      messages.pop()
      continue
    with interruptible() as pressed:

      def emit(_row, new, _ids, pressed=pressed):
        print(new, end="", flush=True)
        return bool(pressed)

      compiled = session.generator.engine.compile_seconds
      answer = session.generator.run(
        [request], [line], o.stop, emit, reuse=True
      )[0]
    print()
    r = answer.result
    totals = Totals(1, len(r.token_ids), len(r.accept_lengths), r.seconds)
    compiled = session.generator.engine.compile_seconds - compiled
    say(totals.line(False, compiled))
    messages.append({"role": "assistant", "content": answer.text})
    turn += 1

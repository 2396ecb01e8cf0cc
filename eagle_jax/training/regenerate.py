"""python -m eagle_jax.training.regenerate --data chats.jsonl --out mine.jsonl

The target answers a file of chats itself: a drafter that learns from the
target's own answers drafts better ones. Each assistant turn is written anew,
after the turns written anew before it:

  in    u1 a1 u2 a2        out   u1 A1 u2 A2     A2 follows u1 A1 u2

Rows are `chats.read_chat` rows, or {"turns": [texts]} with the user's turns.
Rows are decoded `--batch_size` at a time, long ones first; one that ends makes
room for the next at once. The noise of an answer is keyed by the seed, the
row's line in the file and its turn, so that it depends on no batch. A row is
appended to `--out` when its last answer is there; a run that was killed goes
on with the rows that are missing.
"""

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import numpy as np
import tqdm
from absl import flags

from eagle_jax import generation, loading, script, text
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError, differences
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request, Result, check_seed
from eagle_jax.training import chats
from eagle_jax.training.chats import BadRow

CYCLES = 4  # between two looks at the rows


@dataclasses.dataclass(frozen=True)
class Options:
  """What, with the target and the data, decides every answer.

  temperatures: (temperature, weight), drawn per row. The other sampling
  fields are those of `Sampling`, the same for all rows.
  """

  seed: int
  max_new_tokens: int  # a turn
  temperatures: tuple[tuple[float, float], ...]
  top_k: int
  top_p: float
  min_p: float

  def sampling(self, line: int) -> Sampling:
    """The sampling of a row."""
    values, weights = zip(*self.temperatures, strict=True)
    rng = np.random.default_rng([self.seed, line])
    temperature = rng.choice(values, p=np.asarray(weights) / sum(weights))
    return Sampling(float(temperature), self.top_k, self.top_p, self.min_p)


def parse_temperatures(given: str) -> tuple[tuple[float, float], ...]:
  """Of 0:2,0.7:1,1 ((0, 2), (0.7, 1), (1, 1)): a weight left out is 1."""
  try:
    pairs = [[*p.split(":"), "1"][:2] for p in given.split(",")]
    found = tuple((float(t), float(w)) for t, w in pairs)
  except ValueError:
    raise InputError(
      f"temperatures {given!r} must read temperature:weight,..., such as"
      " 0:2,0.7:1,1:1"
    ) from None
  for temperature, weight in found:
    Sampling(temperature)
    if not 0 < weight < float("inf"):
      raise InputError(f"weight {weight} in {given!r} must be above 0")
  return found


@dataclasses.dataclass
class Talk:
  """A row under way.

  line: its number in the file, from 1. row: what it holds beside the turns.
  messages: so far. asked: the messages before each answer still to come.
  """

  line: int
  row: dict
  messages: list[dict]
  asked: list[list[dict]]
  turn: int = 0
  finish_reason: str = "stop"


def read_talk(row: dict, line: int) -> Talk:
  """What is to be answered in a row.

  Raises:
    BadRow: no user turn, or turns of tools, whose results would no longer fit
      the calls.
  """
  if "turns" in row:
    turns = row["turns"]
    fit = isinstance(turns, list) and turns
    if not fit or not all(isinstance(t, str) and t.strip() for t in turns):
      raise BadRow("'turns' must be a list of texts")
    asked = [[{"role": "user", "content": t}] for t in turns]
  else:
    chat = chats.read_chat(row, str(line))
    if chat.tools or any(m["role"] == "tool" for m in chat.messages):
      raise BadRow("a chat with tools cannot be answered anew")
    asked = [[]]
    for m in chat.messages:
      if m["role"] != "assistant":
        asked[-1].append({"role": m["role"], "content": m["content"]})
      elif asked[-1]:
        asked.append([])
    asked = [a for a in asked if a]
  if not any(m["role"] == "user" for m in asked[0]):
    raise BadRow("no user turn before the first answer")
  kept = {
    k: v
    for k, v in row.items()
    if k not in ("messages", "conversations", "turns", "finish_reason")
  }
  return Talk(line, kept, [], asked)


class Output:
  """The rows written so far, and the file that takes more.

  A row is one write of one line, so what a kill may leave is one broken last
  line, which is cut off. `FILE.run.json` holds what decided the answers; a
  run that would decide them otherwise is refused.
  """

  def __init__(self, file: pathlib.Path, decides: dict):
    facts = file.with_name(file.name + ".run.json")
    decides = json.loads(json.dumps(decides))
    try:
      if facts.exists():
        before = json.loads(facts.read_text())
        changes = differences(before, decides, decides)
        if changes:
          raise InputError(
            f"{file} holds answers made otherwise ({changes}): give another"
            " --out, or what was given then"
          )
      elif file.exists():
        raise InputError(
          f"{file} exists and was not made here: give another --out"
        )
      else:
        facts.write_text(json.dumps(decides, indent=1) + "\n")
      self._sink = file.open("ab+")
    except OSError as e:
      raise InputError(f"{file}: cannot be written ({e.strerror})") from None
    self._sink.seek(0)
    whole = self._sink.read()
    end = whole.rfind(b"\n") + 1
    self._sink.truncate(end)
    self.lines = {json.loads(x)["line"] for x in whole[:end].splitlines()}

  def write(self, row: dict) -> None:
    self._sink.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    self._sink.flush()
    os.fsync(self._sink.fileno())

  def close(self) -> None:
    self._sink.close()


class Work:
  """Talks as requests: hands out what is ready, takes the answers."""

  def __init__(
    self,
    engine: Engine,
    tokenizer,
    talks: Iterator[Talk],
    options: Options,
    done,
    drop,
  ):
    """done(talk), drop(talk, reason): called as rows end."""
    self.engine, self.tokenizer, self.options = engine, tokenizer, options
    self.decode = text.decoder(tokenizer)
    self.talks, self.done, self.drop = talks, done, drop
    self.ready: collections.deque[Talk] = collections.deque()
    self.open: dict[int, Talk] = {}

  def next(self) -> Request | None:
    """The next turn of a talk under way, else the first of a new one."""
    while True:
      talk = self.ready.popleft() if self.ready else next(self.talks, None)
      if talk is None:
        return None
      try:
        request = self._request(talk)
      except InputError as e:
        # A later turn that does not fit ends the talk with what there is.
        if talk.turn:
          self.done(talk)
        else:
          self.drop(talk, str(e))
        continue
      self.open[talk.line] = talk
      return request

  def _request(self, talk: Talk) -> Request:
    request = Request(
      text.encode_messages(self.tokenizer, talk.messages + talk.asked[0]),
      self.options.max_new_tokens,
      self.options.sampling(talk.line),
      self.options.seed,
      talk.line,
      talk.turn,
    )
    self.engine.check(request)
    return request

  def take(self, request: Request, result: Result) -> None:
    talk = self.open.pop(request.number)
    answer = self.decode(result.token_ids)
    talk.messages += talk.asked.pop(0)
    talk.messages.append({"role": "assistant", "content": answer})
    talk.turn += 1
    talk.finish_reason = result.finish_reason
    # What follows a cut answer would follow what no chat contains.
    if talk.asked and result.finish_reason == "stop":
      self.ready.append(talk)
    else:
      self.done(talk)


def run(
  engine: Engine,
  tokenizer,
  data: pathlib.Path,
  out: pathlib.Path,
  options: Options,
  target: str,
  say,
) -> dict[str, float]:
  """Answer what `out` lacks.

  Args:
    target: tells targets apart, for `out`.

  Returns:
    rows, prompt_tokens read and tokens written in this call, seconds (without
    compilation), the rows that were there before, and dropped ones.

  Raises:
    InputError: a file that cannot be used, or answers of another run in `out`.
  """
  rows = list(chats.json_lines(data))
  digest = hashlib.sha256(data.read_bytes()).hexdigest()[:16]
  decides = {"data": digest, "target": target, "context": engine.context}
  output = Output(out, decides | dataclasses.asdict(options))
  figures = {
    "rows": 0,
    "prompt_tokens": 0,
    "tokens": 0,
    "before": len(output.lines),
    "dropped": 0,
  }

  def drop(where: str, reason: str) -> None:
    figures["dropped"] += 1
    say(f"{where}: {reason}; dropped")

  def talks() -> Iterator[Talk]:
    # All rows of a batch pay for the longest: like with like, and at the end,
    # when rows stay empty, the short ones.
    for where, row in sorted(rows, key=lambda r: -len(str(r[1]))):
      line = int(where.rsplit(":", 1)[1])
      if line in output.lines:
        continue
      try:
        if isinstance(row, BadRow):
          raise row
        yield read_talk(row, line)
      except BadRow as e:
        drop(where, str(e))

  def done(talk: Talk) -> None:
    output.write(
      talk.row
      | {
        "line": talk.line,
        "messages": talk.messages,
        "temperature": options.sampling(talk.line).temperature,
        "finish_reason": talk.finish_reason,
      }
    )
    figures["rows"] += 1
    bar.update()

  work = Work(
    engine,
    tokenizer,
    talks(),
    options,
    done,
    lambda talk, reason: drop(f"{data}:{talk.line}", reason),
  )
  compiled = lambda: engine.compile_seconds + engine.single.compile_seconds
  before, began = compiled(), time.perf_counter()
  seconds = lambda: time.perf_counter() - began - (compiled() - before)
  bar = tqdm.tqdm(
    total=len(rows),
    initial=len(output.lines),
    unit="row",
    mininterval=1.0 if sys.stderr.isatty() else 60.0,
  )
  try:
    for request, result in engine.serve(work.next, CYCLES):
      figures["prompt_tokens"] += len(request.prompt_ids)
      figures["tokens"] += len(result.token_ids)
      bar.set_postfix_str(f"{figures['tokens'] / seconds():.0f} tok/s", False)
      work.take(request, result)
  finally:
    bar.close()
    output.close()
  return figures | {"seconds": seconds()}


def _run(f) -> None:
  if not f.data or not f.out:
    raise InputError("--data and --out are needed: chats, and where to write")
  check_seed(f.seed)
  if f.max_new_tokens < 1:
    raise InputError(f"max_new_tokens {f.max_new_tokens} must be at least 1")
  options = Options(
    f.seed,
    f.max_new_tokens,
    parse_temperatures(f.temperatures),
    f.top_k,
    f.top_p,
    f.min_p,
  )
  options.sampling(0)  # refuses bad values before any weight is read
  say = lambda line: tqdm.tqdm.write(line, file=sys.stderr)
  generation.use_compilation_cache()
  dtype = f.dtype or loading.default_dtype()
  target = loading.load_target(f.target, dtype, say)
  if not getattr(target.tokenizer, "chat_template", None):
    raise InputError(f"target {f.target!r} has no chat template")
  drafter = f.drafter and loading.load_drafter(f.drafter, target, say)
  generator = generation.Generator(
    target,
    drafter,
    "eagle" if drafter else "plain",
    batch_size=f.batch_size,
    context=f.context,
  )
  figures = run(
    generator.engine,
    target.tokenizer,
    pathlib.Path(f.data),
    pathlib.Path(f.out),
    options,
    target.fingerprint(),
    say,
  )
  written, seconds = figures["tokens"], figures["seconds"]
  every = written + figures["prompt_tokens"]
  print(
    f"{figures['rows']} rows written ({figures['before']} were there,"
    f" {figures['dropped']} dropped): {written} tokens in {seconds:.0f} s,"
    f" {written / seconds:.1f} tokens/s; with the {figures['prompt_tokens']}"
    f" of the prompts {every / seconds:.1f} tokens/s"
  )


if __name__ == "__main__":
  flags.DEFINE_string("data", None, "Chats, JSONL.")
  flags.DEFINE_string("out", None, "Answered chats, JSONL; appended to.")
  flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
  flags.DEFINE_string("drafter", None, "Speculate with it; else plain.")
  flags.DEFINE_integer("batch_size", 64, "Rows decoded together.")
  flags.DEFINE_integer("context", None, "Most tokens of a row, in all.")
  flags.DEFINE_integer("max_new_tokens", 1024, "Most tokens of an answer.")
  flags.DEFINE_string(
    "temperatures", "0", "temperature:weight,..., drawn per row."
  )
  flags.DEFINE_integer("top_k", 0, "As in decode.py.")
  flags.DEFINE_float("top_p", 1.0, "As in decode.py.")
  flags.DEFINE_float("min_p", 0.0, "As in decode.py.")
  flags.DEFINE_integer("seed", 0, "Of the noise and the temperatures.")
  flags.DEFINE_string("dtype", None, "As in decode.py.")
  script.run("regenerate", _run)

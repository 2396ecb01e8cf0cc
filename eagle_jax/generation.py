"""Text in, text out: what notebooks, scripts and the bench call."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from eagle_jax import loading, text
from eagle_jax.checkpoints import gguf_target
from eagle_jax.checkpoints.drafters import LoadedDrafter
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.loading import LoadedTarget
from eagle_jax.speculation import audit, sampling, tree
from eagle_jax.speculation.engine import CHUNK, Engine, WatchTrees
from eagle_jax.speculation.requests import Request, Result
from eagle_jax.speculation.tree import TreeSpec

STREAM_CYCLES = 4  # between two prints
METHODS = ("eagle", "plain")
TREES = ("dynamic", "static", "uniform", "chain")


def tree_spec(
  kind: str,
  nodes: int | None = None,
  levels: int | None = None,
  branch: int | None = None,
) -> TreeSpec:
  """A tree by name; sizes left out are the defaults of the backend.

  Defaults: M=60, L=6, branch 10 on accelerators, where a verify pass of 60
  rows costs about what one row costs; the best of a measured grid on CPU.

  Raises:
    InputError: sizes that do not fit the kind or each other.
  """
  cpu = jax.default_backend() == "cpu"
  given = {"nodes": nodes, "levels": levels, "branch": branch}
  takes = {
    "dynamic": ("nodes", "levels", "branch"),
    "static": (),
    "uniform": ("nodes", "branch"),
    "chain": ("levels",),
  }
  if kind not in takes:
    raise InputError(f"tree {kind!r} is unknown: use one of {', '.join(TREES)}")
  for name, value in given.items():
    if value is not None and name not in takes[kind]:
      why = "its 26 nodes are fixed" if kind == "static" else "its shape is set"
      raise InputError(
        f"tree_{name} {value} does not apply to the {kind} tree ({why}): leave"
        " it out"
      )
  pick = lambda value, on_cpu, otherwise: (
    value if value is not None else (on_cpu if cpu else otherwise)
  )
  try:
    if kind == "dynamic":
      return tree.dynamic(
        pick(nodes, 6, 60), pick(levels, 3, 6), pick(branch, 3, 10)
      )
    if kind == "static":
      return tree.eagle1()
    if kind == "uniform":
      return tree.uniform(pick(nodes, 8, 60), pick(branch, 2, 3))
    if levels is not None and levels < 1:
      raise ValueError(f"tree_levels {levels} must be at least 1")
    return tree.chain(pick(levels, 3, 6))
  except ValueError as e:
    raise InputError(str(e)) from None


def named_tree(name: str) -> TreeSpec:
  """kind[:nodes[:levels[:branch]]], a part left empty where it is default."""
  kind, *sizes = name.split(":")
  if len(sizes) > 3 or not all(s.isdecimal() for s in sizes if s):
    raise InputError(
      f"tree {name!r} must be kind[:nodes[:levels[:branch]]] in whole numbers"
    )
  try:
    return tree_spec(kind, *(int(s) if s else None for s in sizes))
  except ValueError as e:
    raise InputError(f"tree {name!r}: {e}") from None


def check_method(method: str) -> None:
  if method not in METHODS:
    raise InputError(
      f"method {method!r} is unknown: use one of {', '.join(METHODS)}"
    )


@dataclasses.dataclass(frozen=True)
class Answer:
  """One decoded row: the request, its text and its figures."""

  prompt: str
  text: str
  request: Request
  result: Result

  @property
  def tokens_per_s(self) -> float:
    return len(self.result.token_ids) / self.result.seconds


class Generator:
  """A target, a drafter and one way to decode with them.

  Args:
    method: "eagle" or "plain". spec: the tree ("eagle").
    batch_size: rows decoded together. context: most tokens a row may have,
      prompt included; None = the target's limit.
    mesh: decode sharded over it (`sharding.make_mesh`).
  """

  def __init__(
    self,
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    method: str = "eagle",
    spec: TreeSpec | None = None,
    batch_size: int = 1,
    context: int | None = None,
    ignore_eos: bool = False,
    mesh: Mesh | None = None,
  ):
    check_method(method)
    plain = method == "plain"
    if not plain and drafter is None:
      raise InputError("method 'eagle' needs a drafter: give one")
    spec = tree.plain() if plain else spec or tree_spec("dynamic")
    if spec.levels and spec.branch > drafter.config.draft_vocab_size:
      raise InputError(
        f"tree_branch {spec.branch} is more than the drafter's vocabulary of"
        f" {drafter.config.draft_vocab_size}"
      )
    self.target = target
    self.models = loading.models(
      target, None if plain else drafter, spec, ignore_eos, mesh
    )
    self.engine = Engine(self.models, batch_size, context)
    self.decode = text.decoder(target.tokenizer)

  def encode(self, prompt: str | Sequence[dict], raw: bool = False):
    """Prompt ids of a text or of chat messages."""
    if isinstance(prompt, str):
      if raw:
        return text.encode_raw(self.target.tokenizer, prompt)
      prompt = text.with_system(prompt, None)
    return text.encode_messages(self.target.tokenizer, prompt)

  def run(
    self,
    requests: Sequence[Request],
    prompts: Sequence[str],
    stops: Sequence[str] = (),
    emit: Callable[[int, str, list[int]], bool | None] | None = None,
    reuse: bool = False,
    watch_trees: WatchTrees | None = None,
  ) -> list[Answer]:
    """Decode requests.

    Args:
      prompts: what to call each request in its answer.
      stops: stop strings; an answer ends before the first one.
      emit: called as (row, new text, all ids) while text comes; True stops
        the row.
      reuse, watch_trees: see `Engine.generate`.
    """
    streams = [text.TextStream(self.decode, stops) for _ in requests]

    def watch(row: int, ids: list[int]) -> int | None:
      new, keep = streams[row].push(ids)
      wish = emit(row, new, ids) if emit else None
      return len(ids) if keep is None and wish else keep

    results = self.engine.generate(
      requests,
      watch if stops or emit else None,
      STREAM_CYCLES if emit else CHUNK,
      reuse,
      watch_trees,
    )
    answers = []
    for row, (request, result) in enumerate(
      zip(requests, results, strict=True)
    ):
      rest = streams[row].finish(result.token_ids)
      if emit and rest:
        emit(row, rest, result.token_ids)
      answers.append(Answer(prompts[row], streams[row].text, request, result))
    return answers

  def stream(
    self,
    prompt: str | Sequence[dict],
    max_new_tokens: int = 512,
    seed: int = 0,
    raw: bool = False,
    stops: Sequence[str] = (),
    **sampling_fields,
  ) -> Iterator[str]:
    """Pieces of the answer to one prompt, as they come; as in `generate`."""
    pieces: queue.Queue = queue.Queue()
    sampling = Sampling(**sampling_fields)
    request = Request(self.encode(prompt, raw), max_new_tokens, sampling, seed)
    self.engine.check(request)
    stopped = threading.Event()

    def emit(_row, new, _ids):
      pieces.put(new)
      return stopped.is_set()

    def work():
      try:
        self.run([request], [""], stops, emit)
        pieces.put(None)
      except BaseException as e:
        pieces.put(e)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
      while (piece := pieces.get()) is not None:
        if isinstance(piece, BaseException):
          raise piece
        yield piece
    finally:
      stopped.set()
      worker.join()

  def generate(
    self,
    prompts: Sequence[str | Sequence[dict]],
    max_new_tokens: int = 512,
    seed: int = 0,
    raw: bool = False,
    stops: Sequence[str] = (),
    **sampling_fields,
  ) -> list[Answer]:
    """Answers to several prompts.

    Args:
      prompts: texts, or messages {"role", "content"} each.
      raw: texts go in as they are, without the chat template.
      stops: an answer ends before the first of these.
      sampling_fields: of `Sampling`.
    """
    sampling = Sampling(**sampling_fields)
    requests = [
      Request(self.encode(p, raw), max_new_tokens, sampling, seed, i)
      for i, p in enumerate(prompts)
    ]
    names = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
    return self.run(requests, names, stops)


def divergence(
  plain: Generator, a: Answer, b: Answer
) -> audit.Divergence | None:
  """The audit of `b` against plain decoding's answer `a`; None = identical."""
  r = a.request
  engine = plain.engine
  one = engine.sampling_of([r])
  return audit.audit(
    plain.models,
    r.prompt_ids,
    a.result.token_ids,
    b.result.token_ids,
    jax.tree.map(lambda x: x[:1], one),
    np.asarray(sampling.row_seed(r.seed, r.number, r.sample))[None],
  )


def use_compilation_cache() -> None:
  """Keep compiled programs on disk, so that a second start takes seconds."""
  folder = gguf_target.cache_dir() / "xla"
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

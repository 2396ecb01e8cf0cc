"""Models loaded by name or for a set of options, and figures of their work."""

import dataclasses
import functools
import sys
from collections.abc import Sequence

from eagle_jax import choice, generation, loading, sharding, text
from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.generation import Generator
from eagle_jax.options import DecodeOptions
from eagle_jax.speculation.requests import Request
from eagle_jax.speculation.tree import TreeSpec


def say(line: str) -> None:
  """Progress goes to stderr: stdout holds answers."""
  print(line, file=sys.stderr, flush=True)


def load(
  target: str = loading.DEFAULT_TARGET,
  drafter: str | None = None,
  method: str = "eagle",
  spec: TreeSpec | str | None = None,
  batch_size: int = 1,
  dtype: str | None = None,
  mesh: Sequence[int] | None = None,
  say=print,
) -> Generator:
  """A generator by names: the built-in target and drafter by default.

  Args:
    target, drafter: built-in names, folders or hub names.
    method: "eagle" or "plain".
    spec: a tree (`tree_spec`), its name such as "dynamic:8:3:4", or "auto",
      which times passes once and takes the fastest tree for greedy decoding;
      None = the default tree of the backend.
    batch_size: rows decoded together.
    dtype: "float32" or "bfloat16"; None = float32 on a CPU, else bfloat16.
    mesh: data, fsdp and tensor devices to decode over; None = one device.
    say: gets lines of progress.
  """
  over = None if mesh is None else sharding.decode_mesh(mesh, batch_size)
  generation.check_method(method)
  if method == "plain" and spec is not None:
    raise InputError(f"spec {spec!r}: method 'plain' has no tree, leave it out")
  if spec == "auto" and over is not None:
    raise InputError("spec 'auto' times passes on one device: name a tree")
  if isinstance(spec, str) and spec != "auto":
    spec = generation.named_tree(spec)
  generation.use_compilation_cache()
  loaded, found = loading.load_for(
    method, target, drafter, dtype, say, mesh=over
  )
  if spec == "auto":
    spec = choice.spec(loaded, found, batch_size, Sampling(), say, False)
  return Generator(loaded, found, method, spec, batch_size, mesh=over)


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
    sizes = (o.tree_nodes, o.tree_levels, o.tree_branch)
    given = any(s is not None for s in sizes)
    self.auto = o.tree == "auto" and not given and o.method == "eagle"
    kind = "dynamic" if o.tree == "auto" else o.tree
    self.spec = None if self.auto else generation.tree_spec(kind, *sizes)
    self.mesh = None
    if o.mesh is not None:
      sizes = sharding.mesh_sizes(o.mesh)
      self.mesh = sharding.decode_mesh(sizes, o.batch_size)
    generation.use_compilation_cache()
    self.target, self.drafter = loading.load_for(
      *(o.method, o.target, o.drafter, o.dtype, say, o.drafter_window),
      self.mesh,
    )
    self.tokenizer = self.target.tokenizer
    self.piece = text.piece(self.target.tokenizer)
    plain = self._generator("plain", None)
    self.check = plain.engine.check  # needs no tree, so comes before its choice
    self.plain = plain if o.compare else None

  def _generator(self, method: str, spec: TreeSpec | None) -> Generator:
    o = self.o
    return Generator(
      self.target,
      self.drafter,
      method,
      spec,
      o.batch_size,
      o.context,
      o.ignore_eos,
      self.mesh,
    )

  @functools.cached_property
  def generator(self) -> Generator:
    """What answers; `--tree auto` times passes at the first use."""
    o, spec = self.o, self.spec
    if self.auto and self.mesh is not None:
      say("tree auto: a mesh is not timed, the default tree serves")
      spec = generation.tree_spec("dynamic")
    elif self.auto:
      spec = choice.spec(
        self.target,
        self.drafter,
        o.batch_size,
        self.sampling,
        say,
        o.verbose,
      )
    return self._generator(o.method, spec)

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

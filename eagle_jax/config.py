"""Networks and sampling settings as values: plain dataclasses.

Every size and switch that shapes a network is a named field here; nothing in
the maths carries a default of its own.
"""

import dataclasses
from collections.abc import Sequence

from eagle_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Rotary frequency scaling, by the names of Hugging Face configs.

  kind: "linear", "llama3" or "yarn"; the other fields belong to the kind
  that reads them (`models.layers.rope_frequencies`).
  """

  kind: str
  factor: float
  original_max_positions: int = 0
  low_freq_factor: float = 0.0
  high_freq_factor: float = 0.0
  beta_fast: float = 0.0
  beta_slow: float = 0.0
  attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class LayerConfig:
  """What one decoder layer needs to know; targets and drafters share it."""

  hidden_size: int  # D
  mlp_size: int  # F
  num_heads: int  # N
  num_kv_heads: int  # K
  head_size: int  # H
  norm_eps: float
  rope_theta: float
  max_positions: int
  rope_scaling: RopeScaling | None = None
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  dtype: str = "float32"  # of the arithmetic; softmax and scores are float32

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads {self.num_heads} is not a multiple of num_kv_heads"
        f" {self.num_kv_heads}: query heads share kv heads evenly"
      )
    if self.head_size % 2:
      raise ValueError(
        f"head_size {self.head_size} is odd: rotary pairs need an even one"
      )


@dataclasses.dataclass(frozen=True)
class TargetConfig(LayerConfig):
  """A target of the Llama shape (Llama, SmolLM2, Mistral, Qwen2, Qwen3), or one
  with experts (Mixtral, Qwen3-MoE).

  num_experts: E, each an mlp of `mlp_size`; 0 = one mlp for all tokens.
  experts_per_token: k, those a token goes through. norm_expert_weights: their
  weights are scaled to sum to 1.
  """

  family: str = dataclasses.field(kw_only=True)
  vocab_size: int = dataclasses.field(kw_only=True)  # V
  num_layers: int = dataclasses.field(kw_only=True)
  tied_head: bool = dataclasses.field(kw_only=True)
  num_experts: int = 0
  experts_per_token: int = 0
  norm_expert_weights: bool = False

  def __post_init__(self):
    super().__post_init__()
    E, k = self.num_experts, self.experts_per_token
    if not (0 < k <= E or E == k == 0):
      raise ValueError(
        f"experts_per_token {k} must be from 1 to num_experts {E}"
      )


INPUTS = ("feature+token", "feature+unshifted", "feature", "token")
SWITCHES = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


def check_switches(kind: str, on: Sequence[str]) -> None:
  """Refuses variants of a drafter (`SWITCHES`) that its kind cannot have."""
  if on and kind != "eagle3":
    raise InputError(
      f"switches {', '.join(on)} are variants of kind 'eagle3', not of {kind!r}"
    )
  if {"fc_norm", "norm_before_fc"} <= set(on):
    raise InputError(
      "switches fc_norm and norm_before_fc exclude each other: drop one"
    )


@dataclasses.dataclass(frozen=True)
class DrafterConfig(LayerConfig):
  """A drafter: one decoder layer over (feature, token) pairs.

  kind "eagle": reads the feature after the target's final norm, scores with
    the target's head (EAGLE-1/2).
  kind "eagle3": reads the inputs of the target layers `taps`, fused by one
    matrix, and has a norm and a head of its own (EAGLE-3).
  target_hidden_size: width of the target's features, where it is not D; such
    a drafter has a token table and a head of its own.
  own_embedding: the token table is stored with the drafter; else the target's.
  fc_norm: each tap has an RMSNorm before the fusion (EAGLE-3.1).
  norm_before_fc: one RMSNorm over all taps before it (speculators).
  norm_before_residual: the residual starts after `hidden_norm` (speculators).
  norm_output: rows are fed back after the final norm (EAGLE-3.1).
  draft_noise: strength s of the shared Gumbel noise in drafting, calibrated
    after training (`training.calibrate`); 0 drafts by probability alone.
  inputs: what each row reads, one of INPUTS (`models.drafter`); all but the
    first are ablations.
  """

  kind: str = dataclasses.field(kw_only=True)
  vocab_size: int = dataclasses.field(kw_only=True)  # V
  draft_vocab_size: int = dataclasses.field(kw_only=True)  # W
  taps: tuple[int, ...] = ()
  fc_bias: bool = False
  target_hidden_size: int | None = None
  own_embedding: bool = False
  fc_norm: bool = False
  norm_before_fc: bool = False
  norm_before_residual: bool = False
  norm_output: bool = False
  draft_noise: float = 0.0
  inputs: str = "feature+token"

  @property
  def read_size(self) -> int:
    """Width of what the drafter reads of the target a token."""
    width = self.target_hidden_size or self.hidden_size
    return width * max(len(self.taps), 1)

  def __post_init__(self):
    super().__post_init__()
    if self.inputs not in INPUTS:
      raise ValueError(
        f"drafter inputs {self.inputs!r} are unknown: use one of"
        f" {', '.join(INPUTS)}"
      )
    if self.kind not in ("eagle", "eagle3"):
      raise ValueError(
        f"drafter kind {self.kind!r} is unknown: use 'eagle' or 'eagle3'"
      )
    if (self.kind == "eagle3") != bool(self.taps):
      raise ValueError(
        f"taps {self.taps} do not fit kind {self.kind!r}: 'eagle3' reads"
        " tapped layers, 'eagle' reads the final feature only"
      )
    if (
      list(self.taps) != sorted(set(self.taps)) or min(self.taps, default=0) < 0
    ):
      raise ValueError(
        f"taps {self.taps} must be layer numbers, each once, ascending"
      )
    if not 0 < self.draft_vocab_size <= self.vocab_size:
      raise ValueError(
        f"draft_vocab_size {self.draft_vocab_size} is outside 1.."
        f"{self.vocab_size}, the target's vocabulary"
      )
    check_switches(self.kind, [n for n in SWITCHES if getattr(self, n)])
    other = self.target_hidden_size not in (None, self.hidden_size)
    if self.kind == "eagle" and other:
      raise ValueError(
        f"target_hidden_size {self.target_hidden_size}: only kind 'eagle3' has"
        " it"
      )
    if other and not self.own_embedding:
      raise ValueError(
        f"hidden_size {self.hidden_size} is not the target's"
        f" {self.target_hidden_size}: such a drafter needs its own embedding"
      )


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How one request draws its tokens.

  draft_noise: strength of the shared noise in drafting, None = the drafter's
  calibrated one; it never changes the output.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  draft_noise: float | None = None

  def strength(self, calibrated: float) -> float:
    """Of the shared noise in drafting; `calibrated`: the drafter's own."""
    return calibrated if self.draft_noise is None else self.draft_noise

  def __post_init__(self):
    noise = self.draft_noise
    for ok, name, rule in (
      (0 <= self.temperature < float("inf"), "temperature", "0 or more"),
      (self.top_k >= 0, "top_k", "0 (off) or more"),
      (0 < self.top_p <= 1, "top_p", "above 0, up to 1 (off)"),
      (0 <= self.min_p < 1, "min_p", "0 (off) up to below 1"),
      (
        0 < self.repetition_penalty < float("inf"),
        "repetition_penalty",
        "above 0; 1 is off",
      ),
      (noise is None or 0 <= noise <= 1, "draft_noise", "from 0 (off) to 1"),
    ):
      if not ok:
        raise InputError(f"{name} {getattr(self, name)} must be {rule}")

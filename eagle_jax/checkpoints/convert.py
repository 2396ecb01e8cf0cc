"""python -m eagle_jax.checkpoints.convert --drafter IN --to vllm --out OUT

Reads a drafter of any published layout (as `decode.py --drafter` does) and
writes it in another one; the weights stay bit for bit what they were.

  --to         for                       kinds   names of the layer
  original     SafeAILab/EAGLE           both    layers.0.*, midlayer.*
  vllm         vLLM                      both    the same
  sglang       SGLang, SpecForge         both    the same
  speculators  vllm-project/speculators  eagle3  layers.0.*
  eagle_jax    this project              both    the original's

--target is the model that the drafter was trained for: its config says what
has to fit, and a drafter that scores with the target's own rows gets them
written where the layout wants a head. A drafter that a layout has no place
for is refused. Training notes and the calibrated draft noise only have a
place in our own layout.
"""

import pathlib
import shutil
import tempfile

import jax.numpy as jnp
import numpy as np
from absl import flags

from eagle_jax import loading, script
from eagle_jax.checkpoints import drafter_configs, drafters
from eagle_jax.checkpoints.drafters import StoredDrafter
from eagle_jax.config import SWITCHES, DrafterConfig
from eagle_jax.errors import InputError

LAYOUTS = ("original", "vllm", "sglang", "speculators", "eagle_jax")


def lacks(stored: StoredDrafter, num_layers: int, to: str) -> list[str]:
  """What a drafter has that a layout has no place for."""
  if to == "eagle_jax":
    return []
  config = stored.config
  eagle = config.kind == "eagle"
  cut = config.draft_vocab_size != config.vocab_size
  square = config.num_heads * config.head_size == config.hidden_size
  everywhere = {
    "q/k norms": config.qk_norm,
    "a sliding window": bool(config.sliding_window),
    f"inputs {config.inputs}": config.inputs != "feature+token",
    "an EAGLE-1 drafter with a draft vocabulary of its own": eagle and cut,
    "an EAGLE-1 drafter with a head of its own": eagle
    and "lm_head/kernel" in stored.weights,
    "q/k/v biases in an EAGLE-3 drafter": config.qkv_bias and not eagle,
  }
  bias3 = {"an fc bias in an EAGLE-3 drafter": config.fc_bias and not eagle}
  own = {
    "original": bias3
    | {n: getattr(config, n) for n in SWITCHES}
    | {
      f"taps {config.taps}": not eagle
      and not drafter_configs.are_official(config.taps, num_layers),
      "rotary scaling": config.rope_scaling is not None,
      f"head_dim {config.head_size} in an EAGLE-1 drafter": eagle
      and not square,
    },
    "vllm": {"an fc bias": config.fc_bias},
    "sglang": {
      n: getattr(config, n) for n in ("norm_before_fc", "norm_before_residual")
    },
    "speculators": bias3
    | {
      "an EAGLE-1 drafter": eagle,
      "fc_norm": config.fc_norm,
      "another width than the target's": bool(config.target_hidden_size),
    },
  }
  if to == "speculators":  # a qwen3 layer has them
    del everywhere["q/k norms"]
  return [n for n, has in (everywhere | own[to]).items() if has]


def _flat_config(config: DrafterConfig, to: str, dtype: str) -> dict:
  """config.json for the original code, vLLM or SGLang."""
  raw = drafter_configs.flat(config, dtype)
  if config.kind == "eagle":
    del raw["draft_vocab_size"]
    if to == "sglang":
      family = "Qwen2" if config.qkv_bias else "Llama"
      raw["architectures"] = [f"{family}ForCausalLMEagle"]
    return raw
  switches = {n: True for n in SWITCHES if getattr(config, n)}
  if to == "vllm":
    raw["architectures"] = ["Eagle3LlamaForCausalLM"]
    raw["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
  if to == "sglang":  # which counts outputs of layers
    raw["eagle_config"] = {
      "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.taps],
      "use_aux_hidden_state": True,
    }
  return raw | switches


def _speculators_config(
  config: DrafterConfig, dtype: str, target: str, architecture: str, U: int
) -> dict:
  """config.json as speculators writes it."""
  flat = drafter_configs.flat(config, dtype)
  layer = {
    "model_type": "qwen3" if config.qk_norm else "llama",
    "attention_bias": False,
    "mlp_bias": False,
  }
  for name in (
    "hidden_act",
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "tie_word_embeddings",
  ):
    layer[name] = flat[name]
  return {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": config.draft_vocab_size,
    "norm_before_residual": config.norm_before_residual,
    "norm_before_fc": config.norm_before_fc,
    "norm_output": config.norm_output,
    "eagle_aux_hidden_state_layer_ids": list(config.taps),
    "transformer_layer_config": layer,
    "speculators_config": {
      "algorithm": "eagle3",
      "default_proposal_method": "greedy",
      "proposal_methods": [
        {"proposal_type": "greedy", "speculative_tokens": U}
      ],
      "verifier": {"name_or_path": target, "architectures": [architecture]},
    },
    "torch_dtype": dtype,
  }


def _with_head(stored: StoredDrafter, target: str, say) -> StoredDrafter:
  """A drafter that scores with the target's rows gets them as its own."""
  if stored.config.kind == "eagle" or "lm_head/kernel" in stored.weights:
    return stored
  loaded = loading.load_target(target, "float32", say)
  rows = drafters.target_rows(loaded.config, loaded.params, stored.vocabulary)
  dtype = stored.weights["fc/kernel"].dtype
  head = np.asarray(jnp.asarray(rows["kernel"]).astype(dtype))
  return StoredDrafter(
    stored.config,
    stored.weights | {"lm_head/kernel": head},
    stored.vocabulary,
    stored.notes,
  )


def convert(
  drafter: str,
  target: str,
  to: str,
  out: pathlib.Path,
  norm_output: bool | None,
  speculative_tokens: int,
  say,
) -> StoredDrafter:
  """Write a drafter in another layout; returns what was written.

  Args:
    drafter, target: built-in names, folders or hub names.
    norm_output: what that flag means, where the layout leaves it open.
    speculative_tokens: drafted a pass, which speculators' config states.

  Raises:
    InputError: a drafter that cannot be read, or not be written like that;
      `out` is then as it was.
  """
  if to not in LAYOUTS:
    raise InputError(
      f"layout {to!r} is unknown: use one of {', '.join(LAYOUTS)}"
    )
  if out.exists():
    raise InputError(f"{out} exists already: give a folder that is to be made")
  raw, aimed = loading.target_config(target, say)
  folder = loading.drafter_folder(drafter)
  stored = drafters.read(folder, aimed, norm_output)
  config = stored.config
  missing = lacks(stored, aimed.num_layers, to)
  if missing:
    raise InputError(
      f"{drafter} cannot be written for {to}, which has no place for"
      f" {', '.join(missing)}: use another --to"
    )
  if to != "eagle_jax":
    stored = _with_head(stored, target, say)
  dtype = str(stored.weights["fc/kernel"].dtype)
  if to == "eagle_jax":
    raw = drafters.own_config(config, stored.notes, dtype)
  elif to == "speculators":
    architecture = (raw.get("architectures") or ["LlamaForCausalLM"])[0]
    raw = _speculators_config(
      config, dtype, target, architecture, speculative_tokens
    )
  else:
    raw = _flat_config(config, to, dtype)
  eagle3 = config.kind == "eagle3" and to != "speculators"
  out.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=out.parent) as part:
    made = pathlib.Path(part) / out.name
    drafters.write(
      made,
      raw,
      stored.weights,
      stored.vocabulary,
      config.vocab_size,
      "midlayer" if eagle3 else "layers.0",
    )
    shutil.move(made, out)
  say(
    f"{out}: {config.kind}, {len(stored.weights)} tensors in {dtype},"
    f" {config.draft_vocab_size} of {config.vocab_size} ids, for {to}"
  )
  return stored


def _run(f: flags.FlagValues) -> None:
  given = {n: f[n].value for n in ("drafter", "to", "out")}
  for name, value in given.items():
    if not value:
      raise InputError(f"--{name} is missing")
  convert(
    f.drafter,
    f.target,
    f.to,
    pathlib.Path(f.out),
    {None: None, "fed_back": True, "head_only": False}[f.norm_output],
    f.speculative_tokens,
    print,
  )


if __name__ == "__main__":
  flags.DEFINE_string("drafter", None, "Drafter folder, hub or built-in name.")
  flags.DEFINE_string("target", loading.DEFAULT_TARGET, "As in decode.py.")
  flags.DEFINE_enum("to", None, LAYOUTS, "Whose layout to write.")
  flags.DEFINE_string("out", None, "Folder to make.")
  flags.DEFINE_enum(
    "norm_output",
    None,
    ("fed_back", "head_only"),
    "What norm_output true in a SpecForge or SGLang config.json means.",
  )
  flags.DEFINE_integer(
    "speculative_tokens", 5, "Drafted a pass; speculators' config states it."
  )
  script.run("convert", _run)

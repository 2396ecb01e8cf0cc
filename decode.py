"""Decode with EAGLE: python decode.py --prompt "Why is the sky blue?"

Without --prompt, --prompts_file or --prompt_ids it chats. See --help.
"""

from absl import flags

from eagle_jax import command, options, script

F = flags.FLAGS
flags.DEFINE_string(
  "target",
  "smollm2-135m-instruct",
  "Model folder, hub name, or the built-in target.",
)
flags.DEFINE_string(
  "drafter",
  None,
  "Drafter folder, hub name, or a built-in one; default: the built-in"
  " drafter of the built-in target.",
)
flags.DEFINE_string("prompt", None, "One prompt.")
flags.DEFINE_string(
  "prompts_file",
  None,
  "A prompt a line, or JSONL with prompt, messages or turns.",
)
flags.DEFINE_string(
  "prompt_ids", None, "Comma-separated token ids: no tokenizer is needed."
)
flags.DEFINE_integer(
  "drafter_window",
  None,
  "The drafter sees only so many of the last committed tokens (for contexts"
  " far longer than it was trained on); default: all.",
)
flags.DEFINE_integer("max_new_tokens", 512, "Exact upper bound of an answer.")
flags.DEFINE_float("temperature", 0.0, "0 = greedy.")
flags.DEFINE_integer("top_k", 0, "Keep the k best tokens; 0 = off.")
flags.DEFINE_float("top_p", 1.0, "Keep this much probability; 1 = off.")
flags.DEFINE_float("min_p", 0.0, "Cut below this share of the best; 0 = off.")
flags.DEFINE_float("repetition_penalty", 1.0, "On seen ids; 1 = off.")
flags.DEFINE_integer("seed", 0, "Of the sampling noise.")
flags.DEFINE_integer("num_samples", 1, "Answers a prompt.")
flags.DEFINE_float(
  "draft_noise",
  None,
  "Strength of the shared noise in drafting, 0 (off) to 1; default: the"
  " drafter's calibrated one. Never changes the output.",
)
flags.DEFINE_string("system", None, "A system turn before each prompt.")
flags.DEFINE_bool("raw", False, "Plain text, no chat template.")
flags.DEFINE_multi_string("stop", [], "End an answer before this text.")
flags.DEFINE_string("method", "eagle", "eagle or plain.")
flags.DEFINE_string(
  "tree",
  "auto",
  "auto (measured once: the fastest on this device; a size flag makes it"
  " dynamic), dynamic, static, uniform or chain.",
)
flags.DEFINE_integer(
  "tree_nodes",
  None,
  "Node budget M, the root counted (dynamic, uniform); default: by tree.",
)
flags.DEFINE_integer(
  "tree_levels",
  None,
  "Levels L: how deep drafts go (dynamic, chain); default: by tree.",
)
flags.DEFINE_integer(
  "tree_branch",
  None,
  "Children of an expanded node (dynamic, uniform); default: by tree.",
)
flags.DEFINE_integer("batch_size", 1, "Prompts decoded together.")
flags.DEFINE_integer(
  "context",
  None,
  "Most tokens of a prompt and its answer; default: the target's limit.",
)
flags.DEFINE_bool("ignore_eos", False, "Go on past end-of-turn tokens.")
flags.DEFINE_list(
  "mesh",
  None,
  "Decode over the devices of this host: data,fsdp,tensor numbers of them, 0 ="
  " what is left (1,1,0 cuts every matrix); default: one device.",
)
flags.DEFINE_string("dtype", None, "float32 or bfloat16; default: by device.")
flags.DEFINE_string(
  "config", None, "A configs/*.py file whose get_config() sets these flags."
)
flags.DEFINE_string(
  "output",
  None,
  "Write one JSON object an answer to this file: text, token_ids,"
  " accept_lengths, tau, tokens_per_s and more.",
)
flags.DEFINE_bool(
  "compare", False, "Run plain decoding too: same tokens? How much faster?"
)
flags.DEFINE_bool("show", False, "Mark accepted drafts and draw the last tree.")


def run(values: flags.FlagValues) -> None:
  command.run(options.from_flags(values, verbose=values.verbosity > 0))


if __name__ == "__main__":
  script.run("decode.py", run)

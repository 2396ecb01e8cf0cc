"""transformers' generate as a method to measure: the baseline people know.

The same weights and prompts, torch on all cores, SDPA attention, a key/value
cache. Needs the parity extra (torch).
"""

import importlib.util
import os
import time
from collections.abc import Sequence

from eagle_jax import loading, text
from eagle_jax.errors import InputError
from eagle_jax.generation import Answer
from eagle_jax.loading import LoadedTarget
from eagle_jax.speculation.requests import Request, Result


class Transformers:
  """`run` of transformers: one row at a time, greedy or sampled."""

  def __init__(self, target: LoadedTarget, say):
    if importlib.util.find_spec("torch") is None:
      raise InputError(
        "method 'transformers' needs torch, which is not installed: pip"
        ' install ".[parity]"'
      )
    import torch
    from transformers import AutoModelForCausalLM

    self.torch, self.target = torch, target
    torch.set_num_threads(os.cpu_count())
    self.model = AutoModelForCausalLM.from_pretrained(
      loading.target_folder(target.name, say),
      dtype=getattr(torch, target.config.dtype),
      attn_implementation="sdpa",
    ).eval()
    self.decode = text.decoder(target.tokenizer)

  def run(
    self, requests: Sequence[Request], prompts: Sequence[str]
  ) -> list[Answer]:
    return [self._one(r, p) for r, p in zip(requests, prompts, strict=True)]

  def _one(self, request: Request, prompt: str) -> Answer:
    from transformers import GenerationConfig

    s, torch = request.sampling, self.torch
    n = len(request.prompt_ids)
    ends = list(self.target.ends)
    sampled = (
      {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k}
      if s.temperature
      else {}
    )
    config = GenerationConfig(
      max_length=min(
        n + request.max_new_tokens, self.target.config.max_positions
      ),
      do_sample=bool(s.temperature),
      use_cache=True,
      eos_token_id=ends or None,
      pad_token_id=ends[0] if ends else 0,
      **sampled,
    )
    torch.manual_seed(request.seed * 1_000_003 + request.number)
    ids = torch.tensor([list(request.prompt_ids)])
    began = time.perf_counter()
    with torch.inference_mode():
      out = self.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config
      )
    seconds = time.perf_counter() - began
    tokens = out[0, n:].tolist()
    reason = "stop" if tokens[-1] in ends else "length"
    # No cycles: it keeps one token a pass and is not asked for tau.
    result = Result(tokens, [], reason, seconds, seconds)
    return Answer(prompt, self.decode(tokens), request, result)

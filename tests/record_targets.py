"""python tests/record_targets.py [NAME ...]: tiny targets and their logits.

Writes what transformers gives for all families of test_target.py, or for the
named ones, to tests/goldens/targets/NAME/ (config.json, model.safetensors in
half precision, expected.npy), so that parity is tested where torch is not
installed. Needs the extra `parity`.
"""

import json
import pathlib
import sys

import numpy as np

GOLDENS = pathlib.Path(__file__).parent / "goldens" / "targets"
SMALL = {
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "vocab_size": 32,
}
IDS = np.array([[3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7, 9]])


def slug(name: str) -> str:
  return name.replace(",", "").replace("/", "").replace(" ", "_")


def main(names: list[str]) -> None:
  import torch
  import transformers
  from test_target import COMMON, FAMILIES

  for name, (kind, fields, _) in FAMILIES.items():
    if names and name not in names:
      continue
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**COMMON | SMALL | fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
      for p in model.parameters():  # not the buffers: rope stays float32
        p.copy_(p.half().float())
      logits = model.eval()(torch.tensor(IDS)).logits.numpy()
    folder = GOLDENS / slug(name)
    model.half().save_pretrained(folder)  # by the names that the hub has
    (folder / "generation_config.json").unlink()
    raw = {k: v for k, v in config.to_dict().items() if v is not None}
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    np.save(folder / "expected.npy", logits.astype(np.float32))


if __name__ == "__main__":
  main(sys.argv[1:])

"""Chat-like sampling for decode.py:

  python decode.py --config configs/decode_chat.py --prompt "Tell me a story."

Any flag of decode.py may stand here; flags on the command line win.
"""


def get_config() -> dict:
  return {
    "temperature": 0.7,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "max_new_tokens": 256,
  }

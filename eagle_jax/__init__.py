"""EAGLE speculative decoding in JAX.

Shape letters, everywhere in this package:

  B batch              D width (hidden size)      V target vocabulary
  T query length       N query heads              W draft vocabulary
  S cache slots        K kv heads, G = N / K      L tree levels
  M tree nodes         H head size                U unrolled training steps
  Q wanted rows        F mlp width                E experts

    import eagle_jax
    model = eagle_jax.load()
    for piece in model.stream("Why is the sky blue?"):
      print(piece, end="", flush=True)
"""

from eagle_jax.config import Sampling
from eagle_jax.errors import InputError
from eagle_jax.generation import Answer, Generator, tree_spec
from eagle_jax.session import load
from eagle_jax.speculation.requests import Request

__version__ = "0.1.0"
__all__ = [
  "Answer",
  "Generator",
  "InputError",
  "Request",
  "Sampling",
  "load",
  "tree_spec",
]

"""The networks of a cycle, alone: the very products of the cycle."""

import math

import engines
import jax
import pytest
import tiny

from eagle_jax import loading
from eagle_jax.bench import overhead
from eagle_jax.speculation import decoding, tree
from eagle_jax.speculation import state as states


def products(jaxpr) -> list[tuple]:
  """(m, k, n) with its batch of every matrix product, sorted."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      (left, right), (batch, _) = eqn.params["dimension_numbers"]
      a, b = (v.aval.shape for v in eqn.invars)
      shared = [a[i] for i in batch]
      found.append(
        (
          math.prod(shared),
          math.prod(a) // math.prod(shared) // math.prod(a[i] for i in left),
          math.prod(a[i] for i in left),
          math.prod(b) // math.prod(shared) // math.prod(b[i] for i in right),
        )
      )
    for inner in jax.tree.leaves(
      list(eqn.params.values()),
      is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        found += products(inner)
  return sorted(found)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize(
  "spec", [tree.dynamic(3, 2, 2), tree.dynamic(10, 3, 2), tree.chain(1)]
)
def test_products_are_those_of_the_cycle(spec, kind, lazy):
  target = engines.target()
  m = loading.models(target, tiny.drafter(target, kind), spec)
  m = m.replace(lazy_head=lazy)
  state = states.init_state(m, 1, 64, 64)
  # with a lazy head, the cycle's walk has its step once, in a loop
  alone = jax.make_jaxpr(lambda m, s: overhead.networks(m, s, 1))(m, state)
  whole = jax.make_jaxpr(decoding.cycle)(m, state)
  assert products(alone.jaxpr) == products(whole.jaxpr)

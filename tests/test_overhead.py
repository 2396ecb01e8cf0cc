"""The networks of a cycle, alone: the very products of the cycle."""

import math
import re

import engines
import jax
import jax.numpy as jnp
import pytest
import tiny

from eagle_jax import loading
from eagle_jax.bench import overhead
from eagle_jax.speculation import decoding, engine, tree
from eagle_jax.speculation import state as states
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request

SPECS = [tree.dynamic(3, 2, 2), tree.dynamic(10, 3, 2), tree.chain(1)]


def products(jaxpr) -> list[tuple]:
  """(batch, m, k, n) of every matrix product, sorted."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      (left, right), (batch, _) = eqn.params["dimension_numbers"]
      a, b = (v.aval.shape for v in eqn.invars)
      shared = math.prod(a[i] for i in batch)
      inner = math.prod(a[i] for i in left)
      outer = math.prod(b[i] for i in right)
      found.append(
        (
          shared,
          math.prod(a) // shared // inner,
          inner,
          math.prod(b) // shared // outer,
        )
      )
    for inside in jax.tree.leaves(
      list(eqn.params.values()),
      is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
    ):
      inside = getattr(inside, "jaxpr", inside)
      if hasattr(inside, "eqns"):
        found += products(inside)
  return sorted(found)


def pair(spec, kind, B=1, lazy=None):
  target = engines.target()
  m = loading.models(target, tiny.drafter(target, kind), spec)
  if lazy is not None:
    m = m.replace(lazy_head=lazy)
  return m, states.init_state(m, B, 64, 64)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("spec", SPECS)
def test_products_are_those_of_the_cycle(spec, kind, lazy):
  m, state = pair(spec, kind, 2, lazy)
  accepts = jnp.ones(4, jnp.int32)
  alone = jax.make_jaxpr(overhead.networks)(m, state, accepts)
  whole = jax.make_jaxpr(decoding.cycle)(m, state)
  assert products(alone.jaxpr) == products(whole.jaxpr)


@pytest.mark.parametrize("spec", SPECS)
def test_the_compiler_keeps_every_product(spec, monkeypatch):
  """As it decodes on a CPU: a head in blocks, q, k and v side by side."""
  monkeypatch.setattr(loading, "WIDE_HEAD", tiny.V - 1)
  m, state = pair(spec, "eagle3")
  assert m.target.on_cpu
  options = engine.compiler_options("cpu")
  dots = lambda f, *args: len(
    re.findall(r" dot\(", jax.jit(f).lower(*args).compile(options).as_text())
  )
  alone = dots(overhead.networks, m, state, jnp.ones(4, jnp.int32))
  assert alone == dots(decoding.cycle, m, state) > 8 * 7


def test_sizes_of_the_cache_are_those_of_the_engine(monkeypatch):
  monkeypatch.setattr(engine, "SMALLEST_CAPACITY", 16)
  target = engines.target()
  e = Engine(
    loading.models(target, tiny.drafter(target, "eagle"), SPECS[1]), 1, None
  )
  ran, program = [], e._program

  def spy(name, capacity, *static):
    compiled = program(name, capacity, *static)
    if name != "chunk":
      return compiled

    def run(*args):
      state, out = compiled(*args)
      ran.extend([capacity] * int(out.cycles[0]))
      return state, out

    return run

  monkeypatch.setattr(e, "_program", spy)
  (result,) = e.generate([Request(engines.prompt(3, 6), 90)])
  assert ran == overhead.capacities(e, 6, result.accept_lengths)
  assert len(set(ran)) == 3


@pytest.mark.parametrize("answers", [2, 3])
def test_too_few_answers_tell_nothing(answers):
  target = engines.target()
  e = Engine(
    loading.models(target, tiny.drafter(target), tree.chain(1)), 1, None
  )
  found = overhead.of_answers(
    e, [Request(engines.prompt(i, 4), 6) for i in range(answers)]
  )
  assert (found is None) == (answers < overhead.LEAST)

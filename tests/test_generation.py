"""Text in, text out, on a tiny model in a folder."""

import json

import folders
import jax
import pytest

from eagle_jax import generation, session
from eagle_jax.errors import InputError
from eagle_jax.speculation import tree


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  return folders.pair(tmp_path_factory.mktemp("generation"))


@pytest.fixture(scope="module")
def generator(models):
  with pytest.MonkeyPatch.context() as patch:
    folders.share_programs(patch)
    yield session.load(models.target, models.drafter, say=lambda _: None)


def test_stream_joined_is_generate(generator):
  text = generator.generate(["hello"], 24, temperature=0.9, seed=5)[0].text
  pieces = list(generator.stream("hello", 24, temperature=0.9, seed=5))
  assert text
  assert "".join(pieces) == text
  assert sum(map(bool, pieces)) > 1  # it came in pieces


def test_a_stream_may_be_left_early(generator):
  before = generator.generate(["hello"], 24)[0]
  stream = generator.stream("hello", 200)
  next(stream)
  stream.close()
  after = generator.generate(["hello"], 24)[0]
  assert after.text == before.text
  assert after.result.token_ids == before.result.token_ids


def test_a_stream_refuses_like_generate(generator):
  with pytest.raises(InputError, match="max_new_tokens 0"):
    next(generator.stream("hello", 0))
  with pytest.raises(InputError, match="top_p 2"):
    generator.generate(["hello"], top_p=2.0)


def test_prompts_as_text_or_messages(generator):
  end = [folders.END, folders.ASSISTANT]
  user = [folders.USER, *folders.ids_of("hi"), *end]
  assert generator.encode("hi") == user
  assert generator.encode([{"role": "user", "content": "hi"}]) == user
  assert generator.encode("hi", raw=True) == folders.ids_of("hi")
  a, b = generator.generate(
    ["hi", [{"role": "user", "content": "hi"}]], max_new_tokens=4
  )
  assert (a.prompt, a.text) == (b.prompt, b.text)
  assert a.tokens_per_s == len(a.result.token_ids) / a.result.seconds


def test_tree_spec_defaults(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert generation.tree_spec("dynamic") == tree.dynamic(6, 3, 3)
  assert generation.tree_spec("chain") == tree.chain(3)
  assert generation.tree_spec("uniform") == tree.uniform(8, 2)
  assert generation.tree_spec("static") == tree.eagle1()
  assert generation.tree_spec("dynamic", 9, 3, 2) == tree.dynamic(9, 3, 2)
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert generation.tree_spec("dynamic") == tree.dynamic(60, 6, 10)
  assert generation.tree_spec("chain") == tree.chain(6)
  assert generation.tree_spec("dynamic", nodes=20) == tree.dynamic(20, 6, 10)


@pytest.mark.parametrize(
  ("sizes", "word"),
  [
    (("dynamc",), "dynamic, static, uniform, chain"),
    (("static", 26), "tree_nodes 26 does not apply to the static tree"),
    (("uniform", None, 3), "tree_levels 3 does not apply to the uniform tree"),
    (("chain", None, None, 2), "tree_branch 2 does not apply to the chain"),
    (("chain", None, 0), "tree_levels 0 must be at least 1"),
    (("chain", None, -1), "tree_levels -1 must be at least 1"),
    (("dynamic", 4, 4), "4 nodes are fewer than one path of 4 levels"),
    (("dynamic", 99, 2, 3), "give at most 13 nodes"),
    (("dynamic", 8, 0), "at least one level"),
    (("uniform", 1), "2 or more nodes"),
    (("uniform", 4, None, 0), "of branch 0"),
  ],
)
def test_tree_spec_refuses(sizes, word):
  with pytest.raises(InputError, match=word):
    generation.tree_spec(*sizes)


def test_load_refuses(models, tmp_path):
  quiet = {"say": lambda _: None}
  with pytest.raises(InputError, match="no drafter for target"):
    session.load(models.target, **quiet)
  with pytest.raises(InputError, match=r"target './none' is not a folder"):
    session.load("./none", method="plain", **quiet)
  with pytest.raises(InputError, match=r"drafter './none' is not a folder"):
    session.load(models.target, "./none", **quiet)
  with pytest.raises(InputError, match="method 'fast' is unknown"):
    session.load(models.target, models.drafter, "fast", **quiet)
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
  with pytest.raises(InputError, match="model_type 'gpt2' is not supported"):
    session.load(str(tmp_path), method="plain", **quiet)


def test_load_takes_trees_by_name_and_meshes(models):
  quiet = {"say": lambda _: None}
  pair = (models.target, models.drafter)
  named = session.load(*pair, spec="dynamic:5:2:2", **quiet)
  assert named.models.spec == tree.dynamic(5, 2, 2)
  with pytest.raises(InputError, match="tree 'oak:3': tree 'oak' is unknown"):
    session.load(*pair, spec="oak:3", **quiet)
  with pytest.raises(InputError, match="method 'plain' has no tree"):
    session.load(models.target, method="plain", spec="auto", **quiet)
  with pytest.raises(InputError, match="spec 'auto' times passes on one"):
    session.load(*pair, spec="auto", mesh=(1, 1, 1), **quiet)
  with pytest.raises(InputError, match=r"mesh .* does not fit 1 devices"):
    session.load(*pair, mesh=(2, 1, 1), **quiet)
  on_mesh = session.load(*pair, spec="dynamic:5:2:2", mesh=(1, 1, 1), **quiet)
  assert on_mesh.models.mesh.shape == {"data": 1, "fsdp": 1, "tensor": 1}
  a, b = (g.generate(["hi"], 8)[0].text for g in (named, on_mesh))
  assert a == b


def test_raw_and_stops_reach_the_engine(generator):
  (chat,) = generator.generate(["hello"], 24)
  (raw,) = generator.generate(["hello"], 24, raw=True)
  assert raw.request.prompt_ids == folders.ids_of("hello")
  assert chat.request.prompt_ids != raw.request.prompt_ids
  stop = raw.text[4:6]
  (cut,) = generator.generate(["hello"], 24, raw=True, stops=[stop])
  assert cut.text == raw.text[: raw.text.index(stop)]
  assert cut.result.finish_reason == "stop"
  pieces = generator.stream("hello", 24, raw=True, stops=[stop])
  assert "".join(pieces) == cut.text


def test_a_method_needs_its_parts(generator):
  with pytest.raises(InputError, match="needs a drafter"):
    generation.Generator(generator.target, None)
  with pytest.raises(InputError, match="batch_size 0"):
    generation.Generator(generator.target, None, "plain", batch_size=0)

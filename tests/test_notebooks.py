"""The Colab notebooks run top to bottom, on a tiny model."""

import ast
import importlib.util
import pathlib
import re

import folders
import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  return folders.pair(tmp_path_factory.mktemp("notebooks"), ends=())


@pytest.fixture
def execute(tmp_path, monkeypatch):
  """execute(name, **parameters): everything it printed.

  Parameters stand behind the defaults of the cell tagged so.
  """
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

  def run(name: str, **parameters) -> str:
    book = nbformat.read(ROOT / "tpu" / name, as_version=4)
    (cell,) = [
      c for c in book.cells if "parameters" in c.metadata.get("tags", [])
    ]
    defaults = {
      t.id
      for node in ast.parse(cell.source).body
      if isinstance(node, ast.Assign)
      for t in node.targets
    }
    assert set(parameters) <= defaults
    cell.source += "".join(f"\n{k} = {v!r}" for k, v in parameters.items())
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, resources=where).execute()
    return "".join(
      o.get("text", "") for c in book.cells for o in c.get("outputs", [])
    )

  return run


def test_demo(execute, models):
  said = execute(
    "eagle_demo.ipynb",
    TARGET=models.target,
    DRAFTER=models.drafter,
    PROMPT="why?",
    MAX_NEW_TOKENS=9,
  )
  assert "cycle 1: " in said
  assert "└─ " in said
  assert "then the target's own" in said
  assert ", same tokens\n" in said
  assert said.endswith("same tokens: True\n")


def test_train_drafter(execute, models):
  said = execute(
    "train_drafter.ipynb",
    TARGET=models.target,
    TOPICS=["a", "b", "c", "d"],
    QUESTIONS=["{}?", "{}!"],
    MAX_NEW_TOKENS=24,
    BATCH=4,
    CONFIG={
      "kind": "eagle",
      "features": "online",
      "draft_vocab_size": 32,
      "row_length": 64,
      "unroll_steps": 2,
      "anchor_rows": 16,
      "epochs": 2,
      "warmup_steps": 1,
      "eval_every": 2,
      "eval_rows": 1,
      "save_every": 100,
    },
  )
  assert "best drafter: " in said
  assert re.search(r"step +\d+: alpha ", said)
  assert said.endswith("x plain decoding, same tokens\n")


@pytest.mark.parametrize("name", ["eagle_demo.ipynb", "train_drafter.ipynb"])
def test_imports_public_names_only(name):
  """No leading underscore, no module of the tests, and each one is there."""
  book = nbformat.read(ROOT / "tpu" / name, as_version=4)
  code = "\n".join(c.source for c in book.cells if c.cell_type == "code")
  for node in ast.walk(ast.parse(code)):
    if isinstance(node, ast.Attribute):
      assert not node.attr.startswith("_")
    if isinstance(node, ast.ImportFrom):
      assert importlib.util.find_spec(node.module)
      assert not any(a.name.startswith("_") for a in node.names)
  assert not any(c.get("outputs") for c in book.cells)

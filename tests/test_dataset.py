"""Sources of chats, what is dropped from them, and what is kept on disk."""

import json
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
import test_data
from refusals import refused

from eagle_jax.training import chats, data, dataset
from eagle_jax.training.dataset import Report

tokenizer = test_data.tokenizer


def row(*turns) -> dict:
  return {
    "messages": [
      {"role": ("user", "assistant")[i % 2], "content": text}
      for i, text in enumerate(turns)
    ]
  }


@pytest.fixture
def file(tmp_path) -> pathlib.Path:
  """Two good rows, three bad ones."""
  file = tmp_path / "chats.jsonl"
  lines = [
    json.dumps(row("hi", "one", "b", "two")),
    json.dumps(row("hi")),
    json.dumps(row("é", "three")),
    "{",
    json.dumps(row("again")),
  ]
  file.write_text("\n".join(lines))
  return file


def test_what_is_kept_is_what_was_read(file, tokenizer, tmp_path):
  want = list(dataset.documents_of([str(file)], tokenizer, Report()))
  corpus = dataset.prepare([file], tokenizer, tmp_path / "kept", 3)
  assert len(corpus.source) == len(want) == 2
  for d, w in zip(corpus.source, want, strict=True):
    assert (d.ids == w.ids).all()
    assert (d.mask == w.mask).all()
    assert d.mask.dtype == bool
  assert corpus.lengths.tolist() == [len(d.ids) for d in want]
  ids = np.concatenate([d.ids[d.mask] for d in want])
  assert (corpus.counts == np.bincount(ids, minlength=len(tokenizer))).all()
  assert "tensorflow" not in sys.modules


def test_batches_come_from_disk(file, tokenizer, tmp_path):
  want = list(dataset.documents_of([str(file)], tokenizer, Report()))
  packed = dataset.prepare([file], tokenizer, tmp_path / "kept", 3).pack(
    100, 10, "cut", 0
  )
  batch = next(data.iterator(packed, 1, 0, 0, 1, 1))
  found = [
    batch["tokens"][0][batch["documents"][0] == number].tolist()
    for number in (1, 2)
  ]
  assert sorted(found) == sorted(d.ids.tolist() for d in want)


def test_bad_rows_are_counted_and_listed(file, tokenizer, tmp_path):
  report = dataset.prepare([file], tokenizer, tmp_path / "kept", 3).report
  assert (report.rows, report.bad_rows) == (5, 3)
  assert report.bad == [
    [f"{file}:2", "no assistant turn"],
    [f"{file}:4", "not valid JSON (Expecting property name enclosed in double"
     " quotes)"],
    [f"{file}:5", "no assistant turn"],
  ]  # fmt: skip
  assert report.reasons["no assistant turn"] == 2
  assert sum(report.reasons.values()) == 3


def test_two_processes_prepare_the_same(file, tokenizer, tmp_path, monkeypatch):
  """The one that is late finds the other's and keeps it."""
  kept, real = tmp_path / "kept", dataset._write

  def late(sources, tokenizer, folder):
    real(sources, tokenizer, folder)
    with monkeypatch.context() as patch:
      patch.setattr(dataset, "_write", real)
      patch.setattr(dataset.os, "getpid", lambda: 0)
      dataset.prepare([file], tokenizer, kept, 3)

  monkeypatch.setattr(dataset, "_write", late)
  assert len(dataset.prepare([file], tokenizer, kept, 3).source) == 2
  assert len(list(kept.iterdir())) == 1


def test_kept_chats_are_not_read_again(file, tokenizer, tmp_path, monkeypatch):
  kept = tmp_path / "kept"
  first = dataset.prepare([file], tokenizer, kept, 3)
  with monkeypatch.context() as patch:
    patch.setattr(chats, "tokenize", None)
    again = dataset.prepare([file], tokenizer, kept, 3)
  assert again.report == first.report
  file.write_text(json.dumps(row("other", "text")))
  assert len(dataset.prepare([file], tokenizer, kept, 0).source) == 1
  assert len(list(kept.iterdir())) == 2  # and nothing half-made


def test_a_broken_write_leaves_nothing(file, tokenizer, tmp_path, monkeypatch):
  real = chats.tokenize

  def dies(tokenizer, chat):
    if "é" in chat.messages[0]["content"]:
      raise KeyboardInterrupt
    return real(tokenizer, chat)

  monkeypatch.setattr(chats, "tokenize", dies)
  with pytest.raises(KeyboardInterrupt):
    dataset.prepare([file], tokenizer, tmp_path / "kept", 3)
  assert not list((tmp_path / "kept").iterdir())


def test_refusals(file, tokenizer, tmp_path):
  kept = tmp_path / "kept"
  with refused("3 of 5 rows", f"{file}:2: no assistant turn", "max_bad_rows"):
    dataset.prepare([file], tokenizer, kept, 2)
  with refused("none.jsonl", "cannot be read"):
    dataset.prepare([tmp_path / "none.jsonl"], tokenizer, kept, 0)
  empty = tmp_path / "empty.jsonl"
  empty.write_text("\n\n")
  with refused("empty.jsonl: no row can be used", "no rows"):
    dataset.prepare([empty], tokenizer, kept, 0)


@pytest.mark.parametrize(
  ("template", "words"),
  [
    # the mask of every row is empty, or full: said with a decoded sample
    ("{{ messages[0].content }}", ["no token is marked", "'hi'"]),
    (
      "{% for m in messages if m.role == 'assistant' %}{{ m.content }}"
      "{% endfor %}",
      ["every token is marked", "'onetwo'"],
    ),
  ],
)
def test_a_template_without_masks_is_a_loud_failure(
  file, tokenizer, tmp_path, monkeypatch, template, words
):
  monkeypatch.setattr(tokenizer, "chat_template", template)
  with refused("no row can be used", f"{file}:1", *words):
    dataset.prepare([file], tokenizer, tmp_path / "kept", 1000)


def test_counts_over_the_targets_vocabulary(file, tokenizer, tmp_path):
  corpus = dataset.prepare([file], tokenizer, tmp_path / "kept", 3)
  n = len(tokenizer)
  assert corpus.counts_of(n + 5).tolist() == [*corpus.counts, 0, 0, 0, 0, 0]
  with refused(f"token id {n - 1}", "ends at 99"):  # the end of turn
    corpus.counts_of(100)


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
  """A TFDS data set with both shapes of chats, in ArrayRecord files."""
  import tensorflow_datasets as tfds

  class Talk(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
      features = {
        "turns": tfds.features.Sequence(
          {"from": tfds.features.Text(), "value": tfds.features.Text()}
        ),
        "question": tfds.features.Text(),
        "answer": tfds.features.Text(),
      }
      return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict(features),
        disable_shuffling=True,
      )

    def _split_generators(self, dl_manager):
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      for i, (q, a) in enumerate([("é?", "one"), ("b", "two")]):
        turns = [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
        yield i, {"turns": turns, "question": q, "answer": a}

  folder = tmp_path_factory.mktemp("tfds")
  builder = Talk(data_dir=folder, file_format="array_record")
  builder.download_and_prepare()
  return builder.data_path


@pytest.mark.parametrize(
  "mapping", ["messages=turns", "user=question,assistant=answer"]
)
def test_tfds_is_a_source(tfds_folder, tokenizer, tmp_path, mapping):
  source = f"tfds:{tfds_folder}:train:{mapping}"
  corpus = dataset.prepare([source], tokenizer, tmp_path / "kept", 0)
  texts = [tokenizer.decode(d.ids) for d in corpus.source]
  assert texts == [
    f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n"
    for q, a in (("é?", "one"), ("b", "two"))
  ]


@pytest.mark.parametrize(
  ("line", "words"),
  [
    ("tfds:x", ["must read tfds:NAME_OR_FOLDER:SPLIT:messages=FEATURE"]),
    ("tfds:x:train:user=a", ["must read"]),
    ("tfds:FOLDER:train:messages=text", ["no feature 'text'", "turns"]),
    ("tfds:FOLDER:test:messages=turns", ["cannot be read", "test"]),
    ("tfds:none_such:train:messages=turns", ["cannot be read", "tfds build"]),
  ],
)
def test_refused_tfds_lines(tfds_folder, tokenizer, tmp_path, line, words):
  with refused(*words):
    dataset.prepare(
      [line.replace("FOLDER", str(tfds_folder))], tokenizer, tmp_path, 0
    )


def test_tfds_of_another_format_names_what_to_do(
  tfds_folder, tokenizer, tmp_path
):
  import shutil

  folder = tmp_path / "1.0.0"
  shutil.copytree(tfds_folder, folder)
  info = folder / "dataset_info.json"
  info.write_text(info.read_text().replace("array_record", "tfrecord"))
  with refused("not stored as ArrayRecord", "--file_format=array_record"):
    dataset.prepare(
      [f"tfds:{folder}:train:messages=turns"], tokenizer, tmp_path, 0
    )


def test_the_tool(file, tokenizer, tmp_path):
  tokenizer.save_pretrained(tmp_path / "target")
  done = subprocess.run(
    [
      *(sys.executable, "-m", "eagle_jax.training.dataset"),
      *(f"--data={file}", f"--target={tmp_path / 'target'}", "--list"),
      "--row_length=40",
    ],
    capture_output=True,
    text=True,
    cwd=pathlib.Path(__file__).parents[1],
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0] == f"{file}:2: no assistant turn"
  assert lines[3] == "5 rows read, 3 dropped"
  assert lines[4].split() == ["2", "no", "assistant", "turn"]
  assert (
    "1 documents longer than 40 tokens: split into 2 windows" in done.stdout
  )
  assert "rows of 40 tokens: padding" in lines[-1]


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ({"data": []}, ["--data is needed"]),
    ({"row_length": 2}, ["row_length 2"]),
    ({}, ["has no chat template"]),
  ],
)
def test_what_the_tool_refuses(tokenizer, tmp_path, flags, words):
  tokenizer.save_pretrained(tmp_path)
  for file in tmp_path.glob("*.jinja"):
    file.unlink()
  given = {"data": ["x"], "row_length": 8, "target": str(tmp_path)}
  with refused(*words):
    dataset._run(types.SimpleNamespace(**given | flags))


def test_a_slow_tokenizer_is_refused(file, tmp_path):
  with refused("not a fast one"):
    dataset.prepare([file], types.SimpleNamespace(is_fast=False), tmp_path, 0)

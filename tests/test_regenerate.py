"""The target answers a chat file: each row as alone, none twice, none lost."""

import dataclasses
import json
import types

import engines
import folders
import pytest
import tiny
from refusals import refused

from eagle_jax import loading
from eagle_jax.config import Sampling
from eagle_jax.speculation import engine as engines_module
from eagle_jax.speculation import tree
from eagle_jax.speculation.engine import Engine
from eagle_jax.speculation.requests import Request
from eagle_jax.training import chats, regenerate
from eagle_jax.training.regenerate import Options


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  """A tiny target with a tokenizer; its end id comes up now and then."""
  folder = tmp_path_factory.mktemp("tokenizer")
  folders.tokenizer(folder)
  made = tiny.target(num_layers=1, ends=(folders.END,))
  return dataclasses.replace(made, tokenizer=loading.load_tokenizer(folder))


@pytest.fixture(scope="module", params=[None, "eagle"])
def engine(request, target):
  """Three rows, plain and speculating; compiled once for the file."""
  drafter = request.param and tiny.drafter(target, request.param)
  spec = tree.chain(2) if drafter else tree.plain()
  return Engine(loading.models(target, drafter, spec), 3, 160)


OPTIONS = Options(7, 30, ((0.0, 1.0), (1.0, 1.0), (1.5, 2.0)), 0, 1.0, 0.0)


def run(engine, target, data, out, options=OPTIONS, said=None):
  return regenerate.run(
    engine,
    target.tokenizer,
    data,
    out,
    options,
    "tiny",
    (said if said is not None else []).append,
  )


def read(file) -> dict[int, dict]:
  rows = [json.loads(x) for x in file.read_text().splitlines()]
  assert len({r["line"] for r in rows}) == len(rows)
  return {r["line"]: r for r in rows}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """Nine rows of one to three turns in three forms, two bad ones."""
  file = tmp_path_factory.mktemp("data") / "chats.jsonl"
  said = lambda role, text: {"role": role, "content": text}
  lines = [
    {
      "id": f"t{i}",
      "turns": [f"question {i}", "why?", "and then?"][: i % 3 + 1],
    }
    for i in range(6)
  ]
  lines += [
    {"messages": [said("user", "hi"), said("assistant", "old"),
                  said("user", "again"), said("assistant", "older")]},
    {"conversations": [{"from": "system", "value": "be brief"},
                       {"from": "human", "value": "hello"}]},
    {"messages": [said("system", "alone")]},
    {"messages": [said("user", "a"), said("tool", "b")]},
    {"turns": ["x" * 158]},  # leaves no room for an answer
  ]  # fmt: skip
  file.write_text("\n".join(map(json.dumps, lines)))
  return file


def one_by_one(engine, target, talk):
  """A row answered turn after turn, each request alone."""
  decode = target.tokenizer.decode
  messages = []
  for turn, asked in enumerate(talk.asked):
    messages = messages + asked
    text = target.tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True
    )
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) >= engine.context:
      return messages[:-1], "stop"
    sampling = OPTIONS.sampling(talk.line)
    request = Request(ids, 30, sampling, 7, talk.line, turn)
    result = engine.generate([request])[0]
    answer = decode(result.token_ids, skip_special_tokens=True)
    messages = [*messages, {"role": "assistant", "content": answer}]
    if result.finish_reason == "length":
      break
  return messages, result.finish_reason


def test_rows_are_what_they_are_alone(engine, target, data, tmp_path):
  said = []
  out = tmp_path / "out.jsonl"
  figures = run(engine, target, data, out, said=said)
  assert (figures["rows"], figures["dropped"]) == (8, 3)
  assert [s.split(":")[1] for s in sorted(said)] == ["10", "11", "9"]
  rows = read(out)
  for where, row in chats.json_lines(data):
    line = int(where.rsplit(":", 1)[1])
    if line > 8:
      assert line not in rows
      continue
    talk = regenerate.read_talk(row, line)
    messages, reason = one_by_one(engine, target, talk)
    assert rows[line]["messages"] == messages
    assert rows[line]["finish_reason"] == reason
    assert rows[line]["temperature"] == OPTIONS.sampling(line).temperature
    assert rows[line].get("id") == row.get("id")
  # the case is not too easy: turns follow turns, ends of both kinds
  assert {r["finish_reason"] for r in rows.values()} == {"stop", "length"}
  assert max(len(r["messages"]) for r in rows.values()) >= 4
  assert len({r["temperature"] for r in rows.values()}) > 1


def test_long_rows_come_first(engine, target, tmp_path, monkeypatch):
  data, asked = tmp_path / "data.jsonl", []
  rows = [{"turns": ["word " * n]} for n in (2, 9, 1, 5)]
  data.write_text("\n".join(map(json.dumps, rows)))
  real = regenerate.read_talk
  monkeypatch.setattr(
    regenerate,
    "read_talk",
    lambda row, line: asked.append(line) or real(row, line),
  )
  run(engine, target, data, tmp_path / "out.jsonl")
  assert asked == [2, 4, 1, 3]


class Killed(BaseException):
  pass


def test_killed_and_resumed_gives_the_same_rows(
  engine, target, data, tmp_path, monkeypatch
):
  straight = tmp_path / "straight.jsonl"
  run(engine, target, data, straight)
  out = tmp_path / "out.jsonl"
  real, left = regenerate.Work.take, [5]

  def dies(self, request, result):
    left[0] -= 1
    if not left[0]:
      raise Killed
    real(self, request, result)

  with monkeypatch.context() as patch:
    patch.setattr(regenerate.Work, "take", dies)
    with pytest.raises(Killed):
      run(engine, target, data, out)
  whole = out.read_bytes()
  before = len(whole.splitlines())
  assert 0 < before < 8
  out.write_bytes(whole + b'{"line": 3, "mess')  # killed while writing
  figures = run(engine, target, data, out)
  assert (figures["before"], figures["rows"]) == (before, 8 - before)
  assert out.read_bytes().startswith(whole)
  assert read(out) == read(straight)
  # nothing is left to do
  assert run(engine, target, data, out)["rows"] == 0


def test_another_run_is_refused(engine, target, data, tmp_path):
  out = tmp_path / "out.jsonl"
  run(engine, target, data, out)
  other = dataclasses.replace(OPTIONS, seed=8)
  with refused("seed 7 there, 8 here", "another --out"):
    run(engine, target, data, out, other)
  mine = tmp_path / "mine.jsonl"
  mine.write_text('{"line": 1}\n')
  with refused("not made here"):
    run(engine, target, data, mine)
  assert mine.read_text() == '{"line": 1}\n'
  with refused("cannot be written"):
    run(engine, target, data, tmp_path / "none" / "out.jsonl")


def test_requests_are_served_as_they_come(engine):
  """More requests than rows, some made of answers, one of a single token."""
  waiting = [
    Request(engines.prompt(i, 5 + 9 * i), 3 + 7 * i, Sampling(1.0), 1, i)
    for i in range(6)
  ]
  waiting.insert(0, Request([1, 2], 1, Sampling(), 1, 99))
  wanted = {r.number: r for r in waiting}
  found = {}
  source = lambda: waiting.pop(0) if waiting else None
  for request, result in engine.serve(source, 2):
    found[request.number] = result
    if request.number == 99:
      follows = Request([1, 2, *result.token_ids, 3], 20, Sampling(), 1, 100)
      waiting.insert(0, follows)
      wanted[100] = follows
  assert found.keys() == wanted.keys()
  for number, request in wanted.items():
    alone = engine.generate([request])[0]
    assert found[number].token_ids == alone.token_ids
    assert found[number].accept_lengths == alone.accept_lengths
    assert found[number].finish_reason == alone.finish_reason


@pytest.mark.parametrize(
  "lengths",
  [
    [(100, 9), (10, 40), (10, 3), (20, 30), (5, 30)],
    [(100, 5), (10, 40), (10, 30)],  # nobody comes for the long row
  ],
)
def test_the_caches_shrink_when_the_long_rows_have_ended(
  lengths, target, monkeypatch
):
  """The rows that stay give what they give alone, those that come too."""
  monkeypatch.setattr(engines_module, "SMALLEST_CAPACITY", 64)
  drafter = tiny.drafter(target, "eagle")
  engine = Engine(loading.models(target, drafter, tree.chain(2)), 3, 160)
  waiting = [
    Request(engines.prompt(i, n), new, Sampling(1.0), 1, i)
    for i, (n, new) in enumerate(lengths)
  ]
  wanted = list(waiting)
  source = lambda: waiting.pop(0) if waiting else None
  found = {r.number: result for r, result in engine.serve(source, 2)}
  assert ("resize", 128, 64) in engine.programs
  assert (("stop", 128) in engine.programs) == (len(lengths) == 3)
  for request in wanted:
    alone = engine.generate([request])[0]
    assert found[request.number].token_ids == alone.token_ids


def test_temperatures():
  parse = regenerate.parse_temperatures
  assert parse("0:2,0.7:1,1") == ((0.0, 2.0), (0.7, 1.0), (1.0, 1.0))
  for text in ("", "a", "0:b", "1,,2"):
    with refused("temperature:weight"):
      parse(text)
  with refused("temperature -1.0"):
    parse("-1")
  with refused("weight 0.0"):
    parse("1:0")
  drawn = [OPTIONS.sampling(line).temperature for line in range(400)]
  assert drawn == [OPTIONS.sampling(line).temperature for line in range(400)]
  assert 60 < drawn.count(0.0) < 140
  assert 150 < drawn.count(1.5) < 250


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    ({"out": None}, ["--data and --out are needed"]),
    ({"seed": -1}, ["seed -1"]),
    ({"max_new_tokens": 0}, ["max_new_tokens 0"]),
    ({"top_p": 0.0}, ["top_p 0.0"]),
    ({}, ["has no chat template"]),
  ],
)
def test_what_the_tool_refuses(target, monkeypatch, flags, words):
  bare = dataclasses.replace(target, tokenizer=None)
  monkeypatch.setattr(loading, "load_target", lambda *_: bare)
  folders.share_programs(monkeypatch)
  given = {"data": "x", "out": "y", "seed": 0, "max_new_tokens": 5}
  given |= {"temperatures": "0", "top_k": 0, "top_p": 1.0, "min_p": 0.0}
  given |= {"dtype": None, "target": "tiny"}
  with refused(*words):
    regenerate._run(types.SimpleNamespace(**given | flags))


def test_a_later_turn_that_does_not_fit_ends_the_chat(engine, target, tmp_path):
  data = tmp_path / "data.jsonl"
  # the answer of the first one ends by itself
  rows = [{"turns": [f"question {i}", "x" * 150]} for i in range(6)]
  data.write_text("\n".join(map(json.dumps, rows)))
  figures = run(engine, target, data, tmp_path / "out.jsonl")
  assert (figures["rows"], figures["dropped"]) == (6, 0)
  found = read(tmp_path / "out.jsonl").values()
  assert all(len(r["messages"]) == 2 for r in found)
  assert "stop" in {r["finish_reason"] for r in found}

"""decode.py on a tiny model: what it prints, writes and refuses."""

import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import folders
import pytest

from eagle_jax import chat as chatting
from eagle_jax import command, generation, options, session, text
from eagle_jax.errors import InputError
from eagle_jax.options import DecodeOptions
from eagle_jax.speculation.engine import Engine

ROOT = pathlib.Path(__file__).parents[1]
# Every row of --output; sample tells the answers of --num_samples apart.
FIELDS = [
  *("prompt", "sample", "text", "token_ids", "accept_lengths", "tau"),
  *("tokens_per_s", "seconds", "finish_reason"),
]
COMPARED = ["identical", "ratio", "near_ties"]
FIGURES = (
  r"\d+ tokens?( in \d+ rows)?(, tau \d\.\d\d)?, \d+\.\d tokens/s"
  r"(, \d+\.\d\dx plain \(\d+\.\d tokens/s\),"
  r" (same tokens|\d+ of \d+ rows same tokens, \d+ near ties))?;"
  r" compiled in \d+\.\d s"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  return folders.pair(tmp_path_factory.mktemp("command"))


@pytest.fixture(scope="module")
def decode():
  return folders.script("decode")


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
  folders.share_programs(monkeypatch)


@pytest.fixture
def run(decode, models, capsys, tmp_path):
  """Runs decode.py in process: (stdout, rows of --output, figures line)."""

  def go(*args: str, target=models.target, drafter=models.drafter):
    out = tmp_path / "rows.jsonl"
    out.unlink(missing_ok=True)
    # a fixed tree, since auto depends on the clock; tests may name another
    given = ["--target", target, "--output", str(out), "--tree=dynamic"]
    given += ["--drafter", drafter] if drafter else []
    code = folders.call(
      decode, "decode.py", *given, "--max_new_tokens=24", *args
    )
    stdout, stderr = capsys.readouterr()
    assert code == 0, stderr
    assert re.fullmatch(FIGURES, stderr.splitlines()[-1]), stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return stdout, rows, stderr.splitlines()[-1]

  return go


def tokens(rows) -> list[list[int]]:
  return [r["token_ids"] for r in rows]


# Good runs ------------------------------------------------------------------


def test_a_prompt(run):
  stdout, rows, figures = run("--prompt", "hello there")
  (row,) = rows
  assert list(row) == FIELDS
  assert stdout == row["text"] + "\n"
  assert row["prompt"] == "hello there"
  assert len(row["token_ids"]) <= 24
  assert sum(a + 1 for a in row["accept_lengths"]) == len(row["token_ids"]) - 1
  assert row["tau"] == pytest.approx(
    (len(row["token_ids"]) - 1) / len(row["accept_lengths"])
  )
  assert row["tokens_per_s"] == pytest.approx(
    len(row["token_ids"]) / row["seconds"]
  )
  assert figures.startswith(f"{len(row['token_ids'])} tokens, tau ")


def test_finish_reasons_and_a_list_of_end_ids(run, models, tmp_path):
  whole = run("--prompt", "hello", "--ignore_eos")[1][0]
  assert whole["finish_reason"] == "length"
  assert len(whole["token_ids"]) == 24
  at = 6
  end = whole["token_ids"][at]
  at = whole["token_ids"].index(end)
  shutil.copytree(models.target, tmp_path / "t")
  config = json.loads((tmp_path / "t" / "config.json").read_text())
  config["eos_token_id"] = [end, folders.END]
  (tmp_path / "t" / "config.json").write_text(json.dumps(config))
  cut = run("--prompt", "hello", target=str(tmp_path / "t"))[1][0]
  assert cut["finish_reason"] == "stop"
  assert cut["token_ids"] == whole["token_ids"][: at + 1]


def test_plain_needs_no_drafter_and_gives_the_same(run):
  sampled = ["--prompt", "hello", "--temperature", "0.8", "--top_p", "0.9"]
  plain = run(*sampled, "--method", "plain", drafter=None)[1]
  assert set(plain[0]["accept_lengths"]) == {0}
  assert plain[0]["tau"] == 1.0
  assert tokens(run(*sampled)[1]) == tokens(plain)


def test_seeds(run):
  sampled = ["--prompt", "hello", "--temperature", "1", "--num_samples", "2"]
  stdout, rows, _ = run(*sampled)
  assert [r["sample"] for r in rows] == [0, 1]
  assert rows[0]["token_ids"] != rows[1]["token_ids"]
  assert stdout.count("\n>>> hello\n") == 2
  assert tokens(run(*sampled)[1]) == tokens(rows)
  other = run(*sampled, "--seed", "1")[1]
  assert not set(map(tuple, tokens(other))) & set(map(tuple, tokens(rows)))


def test_prompts_file_plain_and_batches(run, tmp_path):
  file = tmp_path / "p.txt"
  file.write_text("one\n\ntwo two\nthree\n")
  args = ["--prompts_file", str(file), "--temperature", "0.7"]
  stdout, alone, figures = run(*args)
  assert [r["prompt"] for r in alone] == ["one", "two two", "three"]
  for r in alone:
    assert f"\n>>> {r['prompt']}\n{r['text']}\n" in stdout
  assert " in 3 rows, " in figures
  batched_stdout, batched, _ = run(*args, "--batch_size", "2")
  assert tokens(batched) == tokens(alone)
  assert [r["accept_lengths"] for r in batched] == [
    r["accept_lengths"] for r in alone
  ]
  assert batched_stdout == stdout


def test_prompts_file_jsonl(run, tmp_path):
  turn = {"role": "user", "content": "hi"}
  chat = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
  ]
  file = tmp_path / "p.jsonl"
  given = [
    *({"prompt": "hi"}, {"messages": [turn]}, {"turns": ["hi", "more"]}),
    {"messages": chat},
  ]
  file.write_text("\n".join(map(json.dumps, given)))
  _, rows, _ = run("--prompts_file", str(file), "--max_new_tokens", "6")
  assert [r["prompt"] for r in rows] == ["hi", "hi", "hi", "c"]
  assert rows[0]["token_ids"] == rows[1]["token_ids"] == rows[2]["token_ids"]


def test_prompt_ids_without_tokenizer(run, models, tmp_path):
  target = tmp_path / "t"
  shutil.copytree(models.target, target)
  for file in target.glob("tokenizer*"):
    file.unlink()
  ids = [folders.USER, *folders.ids_of("hello"), folders.END, folders.ASSISTANT]
  listed = ",".join(map(str, ids))
  stdout, rows, _ = run("--prompt_ids", listed, target=str(target))
  assert rows[0]["prompt"] == listed
  assert stdout == " ".join(map(str, rows[0]["token_ids"])) + "\n"
  assert tokens(rows) == tokens(run("--prompt", "hello")[1])


def test_compare(run):
  stdout, rows, figures = run("--prompt", "hello", "--compare")
  (row,) = rows
  assert list(row) == FIELDS + COMPARED
  assert row["identical"] is True
  assert row["near_ties"] == []
  assert row["ratio"] > 0
  assert stdout == row["text"] + "\n"
  assert "x plain (" in figures
  assert "same tokens" in figures


def test_compare_reports_a_difference(run, monkeypatch):
  """A divergence (made up here) is told, and counted against the run."""
  found = generation.audit.Divergence(2, 5, 6, 0.25, 1e-4, False)
  monkeypatch.setattr(generation, "divergence", lambda *_: found)
  _, rows, figures = run("--prompt", "hello", "--compare")
  assert rows[0]["identical"] is False
  assert rows[0]["near_ties"][0]["gap"] == 0.25
  assert "0 of 1 rows same tokens, 0 near ties" in figures


def test_show(run):
  args = ["--prompt", "hello there", "--ignore_eos"]
  accepts = run(*args)[1][0]["accept_lengths"]
  assert any(accepts), "no draft accepted: the case shows nothing"
  # end with the last cycle that accepted drafts: its tree is drawn
  while not accepts[-1]:
    accepts.pop()
  n = 1 + sum(a + 1 for a in accepts)
  stdout, rows, _ = run(*args, "--show", "--max_new_tokens", str(n))
  ids = rows[0]["token_ids"]
  assert rows[0]["accept_lengths"] == accepts
  piece = lambda i: [*folders.SPECIAL, *folders.LETTERS][i]
  answer, drawn = stdout.rsplit("\n\n", 1)
  # ‹drafted› pieces by position
  wanted, drafted = "", [False]
  for a in accepts:
    drafted += [True] * a + [False]
  for i, d in zip(ids, drafted, strict=True):
    wanted += f"‹{piece(i)}›" if d else piece(i)
  assert answer == wanted
  marked = [m[1] for m in re.finditer(r"─ (.*) \d\.\d\d \*$", drawn, re.M)]
  last = accepts[-1]
  assert last > 0
  assert marked == [repr(piece(i)) for i in ids[len(ids) - 1 - last : -1]]
  assert re.search(
    rf"accepted {last} of \d+ drafts; then the target's own", drawn
  )


def test_stop_cuts_the_answer(run):
  whole = run("--prompt", "hello", "--ignore_eos")[1][0]
  stop = whole["text"][5:7]
  stdout, (row,), _ = run("--prompt", "hello", "--ignore_eos", "--stop", stop)
  assert row["text"] == whole["text"][: whole["text"].index(stop)]
  assert stdout == row["text"] + "\n"
  assert row["finish_reason"] == "stop"
  n = len(row["token_ids"])
  assert n < 24
  assert row["token_ids"] == whole["token_ids"][:n]
  assert sum(a + 1 for a in row["accept_lengths"]) == n - 1


def test_system_raw_and_templates(models):
  make = lambda **o: session.Session(
    DecodeOptions(target=models.target, method="plain", **o)
  )
  ids = folders.ids_of
  end = [folders.END, folders.ASSISTANT]
  made = make(system="be kind")
  system = [folders.SYSTEM, *ids("be kind"), folders.END]
  user = [folders.USER, *ids("hi"), *end]
  request, name = made.request("hi", 3, 1)
  assert (list(request.prompt_ids), name) == ([*system, *user], "hi")
  assert (request.number, request.sample) == (3, 1)
  messages = [{"role": "user", "content": "hi"}]
  assert made.request(messages, 0, 0)[0].prompt_ids == [*system, *user]
  with pytest.raises(InputError, match="have a system turn"):
    made.request([{"role": "system", "content": "x"}, *messages], 0, 0)
  made = make(raw=True)
  assert made.request("hi", 0, 0)[0].prompt_ids == ids("hi")
  with pytest.raises(InputError, match="--raw takes plain prompts"):
    made.request(messages, 0, 0)


def test_config_file(run, tmp_path):
  file = tmp_path / "c.py"
  file.write_text(
    "def get_config():\n"
    "  return dict(prompt='hi', max_new_tokens=5, ignore_eos=True, stop=[],\n"
    "              temperature=1, draft_noise=None, drafter='unused')\n"
  )
  # `run` gives --drafter and --max_new_tokens 24: explicit flags win
  row = run("--config", str(file))[1][0]
  assert row["prompt"] == "hi"
  assert len(row["token_ids"]) == 24
  o = options.from_flags(_flags("--config", str(file), "--top_k", "3"), False)
  assert (o.max_new_tokens, o.temperature, o.top_k) == (5, 1.0, 3)
  o = options.from_flags(
    _flags("--config", str(file), "--max_new_tokens=3", "--noignore_eos"), True
  )
  assert (o.max_new_tokens, o.ignore_eos, o.verbose) == (3, False, True)


def _flags(*args):
  module = folders.script("decode")
  module.F(["decode.py", *args])
  return module.F


def test_options_are_the_flags():
  module = folders.script("decode")
  module.F(["decode.py"])
  o = options.from_flags(module.F, False)
  assert o == DecodeOptions()
  names = set(DecodeOptions.__dataclass_fields__) - {"verbose"}
  assert names | {"config", "verbosity", "v"} == set(module.F)


# Chat -----------------------------------------------------------------------


@pytest.fixture
def chat(models, monkeypatch, capsys):
  """Runs a scripted chat: (stdout, stderr, requests, answers' token ids)."""

  def go(lines: str, **options):
    asked, given = [], []
    generate = Engine.generate

    def spy(self, requests, *args, **kw):
      results = generate(self, requests, *args, **kw)
      asked.append(requests[0])
      given.append(results[0].token_ids)
      return results

    with monkeypatch.context() as patch:
      patch.setattr(Engine, "generate", spy)
      patch.setattr(sys, "stdin", io.StringIO(lines))
      command.run(
        DecodeOptions(
          target=models.target,
          drafter=models.drafter,
          **{"max_new_tokens": 12, "tree": "dynamic"} | options,
        )
      )
    return *capsys.readouterr(), asked, given

  return go


def test_chat_keeps_the_context(chat):
  stdout, stderr, asked, given = chat("hello\n\nbye\n", system="kind")
  assert len(asked) == 2  # the blank line is no turn
  first, second = (list(r.prompt_ids) for r in asked)
  said = [i for i in given[0] if i >= len(folders.SPECIAL)]
  assert second[: len(first) + len(said)] == first + said
  assert second[len(first) + len(said) :] == [
    *(folders.END, folders.USER, *folders.ids_of("bye")),
    *(folders.END, folders.ASSISTANT),
  ]
  lines = stderr.splitlines()
  assert lines[0].startswith("chat with the target; /new starts over")
  assert len(lines) == 3
  assert all(re.fullmatch(FIGURES, line) for line in lines[1:])
  assert stdout.startswith("\n> ")


def test_new_starts_the_conversation_over(chat):
  _, stderr, asked, _ = chat("hello\n/new\nhello\n", system="kind")
  assert "a new conversation" in stderr
  first, second = (list(r.prompt_ids) for r in asked)
  assert first == second


def test_chat_reuses_the_cache_without_a_trace(chat, run):
  """The second answer is what its whole prompt gives from nothing."""
  _, _, asked, given = chat("hello\nbye\n", max_new_tokens=24)
  listed = ",".join(map(str, asked[1].prompt_ids))
  assert tokens(run("--prompt_ids", listed)[1]) == [given[1]]


def test_chat_drops_a_turn_that_does_not_fit(chat):
  _, stderr, asked, _ = chat(f"{'a' * 400}\nhi\n")
  assert len(asked) == 1
  assert "; this turn is dropped" in stderr
  assert asked[0].prompt_ids == [
    *(folders.USER, *folders.ids_of("hi"), folders.END, folders.ASSISTANT)
  ]


def test_ctrl_c_stops_the_answer_not_the_program(chat, monkeypatch):
  before = signal.getsignal(signal.SIGINT)
  push = text.TextStream.push
  pressed = []

  def press(self, ids):
    if not pressed:
      pressed.append(os.kill(os.getpid(), signal.SIGINT))
    return push(self, ids)

  monkeypatch.setattr(text.TextStream, "push", press)
  stdout, _, asked, given = chat(
    "hello\nbye\n", max_new_tokens=100, ignore_eos=True
  )
  assert len(asked) == 2
  assert len(given[0]) < 30
  assert len(given[1]) == 100  # the second answer was left alone
  assert stdout.count("\n> ") == 3
  assert signal.getsignal(signal.SIGINT) is before


def test_interruptible():
  before = signal.getsignal(signal.SIGINT)
  with chatting.interruptible() as pressed:
    assert not pressed
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
      if pressed:
        break
    assert pressed == [True]
  assert signal.getsignal(signal.SIGINT) is before


# Refused input --------------------------------------------------------------


@pytest.fixture
def refused(decode, models, capsys, tmp_path):
  """Runs decode.py in process and returns its one line of complaint."""

  def go(*args: str, target=models.target, drafter=models.drafter, **kw):
    out = tmp_path / "rows.jsonl"
    given = ["--target", target, "--output", str(out)]
    given += ["--drafter", drafter] if drafter else []
    code = folders.call(decode, "decode.py", *given, *args)
    stdout, stderr = capsys.readouterr()
    assert (code, stdout) == (2, "")
    assert stderr.startswith("decode.py: ")
    assert stderr.count("\n") == 1, stderr
    assert stderr.endswith("\n")
    assert not out.exists()
    return stderr

  return go


HI = ("--prompt", "hi")


@pytest.mark.parametrize(
  ("args", "words"),
  [
    (["--promt", "hi"], ["promt", "Did you mean", "prompt"]),
    (["--temperature", "hot"], ["temperature", "hot"]),
    (["hello"], ["'hello' is not a flag", "decode.py --help"]),
    ([*HI, "--prompt_ids", "1"], ["--prompt and --prompt_ids exclude"]),
    ([*HI, "--prompts_file", "x"], ["--prompt and --prompts_file exclude"]),
    (["--prompt", ""], ["--prompt is empty"]),
    (["--prompts_file", "none.txt"], ["none.txt: cannot be read"]),
    (["--prompt_ids", "1,b"], ["prompt_ids '1,b'", "comma-separated"]),
    (["--prompt_ids", ""], ["prompt_ids ''", "comma-separated"]),
    (["--prompt_ids", "1,64"], ["prompt id 64", "vocabulary 0..63"]),
    (["--prompt_ids=-1"], ["prompt id -1", "vocabulary 0..63"]),
    (["--prompt_ids", "1", "--raw"], ["--prompt_ids are taken as they are"]),
    (["--prompt", "a" * 300], ["303 tokens", "context holds 256", "shorten"]),
    ([*HI, "--context", "5"], ["5 tokens", "context holds 5"]),
    ([*HI, "--context", "1"], ["context 1 must be from 2 to"]),
    ([*HI, "--context", "999"], ["context 999 must be from 2 to"]),
    ([*HI, "--temperature=-0.5"], ["temperature -0.5 must be 0 or more"]),
    ([*HI, "--temperature=nan"], ["temperature nan must be 0 or more"]),
    ([*HI, "--top_k=-1"], ["top_k -1 must be 0 (off) or more"]),
    ([*HI, "--top_p=0"], ["top_p 0.0 must be above 0, up to 1"]),
    ([*HI, "--top_p=1.5"], ["top_p 1.5 must be above 0, up to 1"]),
    ([*HI, "--min_p=1"], ["min_p 1.0 must be 0 (off) up to below 1"]),
    ([*HI, "--repetition_penalty=0"], ["repetition_penalty 0.0 must be above"]),
    ([*HI, "--draft_noise=2"], ["draft_noise 2.0 must be from 0 (off) to 1"]),
    ([*HI, "--max_new_tokens=0"], ["max_new_tokens 0 must be at least 1"]),
    ([*HI, "--batch_size=0"], ["batch_size 0 must be at least 1"]),
    ([*HI, "--num_samples=0"], ["num_samples 0 must be at least 1"]),
    ([*HI, "--seed=-1"], ["seed -1 must be from 0"]),
    ([*HI, "--method=fast"], ["method 'fast'", "eagle, plain"]),
    (
      [*HI, "--tree=big"],
      ["tree 'big'", "auto, dynamic, static, uniform, chain"],
    ),
    ([*HI, "--dtype=int8"], ["dtype 'int8' must be float32 or bfloat16"]),
    (
      [*HI, "--tree=static", "--tree_nodes=26"],
      ["tree_nodes 26 does not apply to the static tree", "leave it out"],
    ),
    (
      [*HI, "--tree=uniform", "--tree_levels=2"],
      ["tree_levels 2 does not apply to the uniform tree"],
    ),
    (
      [*HI, "--tree=chain", "--tree_branch=2"],
      ["tree_branch 2 does not apply to the chain tree"],
    ),
    ([*HI, "--tree=chain", "--tree_levels=0"], ["tree_levels 0 must be at"]),
    (
      [*HI, "--tree_nodes=4", "--tree_levels=4"],
      ["4 nodes are fewer than one path of 4 levels", "at least 5 nodes"],
    ),
    (
      [*HI, "--tree_nodes=99", "--tree_levels=2", "--tree_branch=3"],
      ["99 nodes are more than the 12 candidates", "at most 13 nodes"],
    ),
    (
      [*HI, "--tree_nodes=60", "--tree_branch=49"],
      ["tree_branch 49 is more than the drafter's vocabulary of 48"],
    ),
    ([*HI, "--show", "--batch_size=2"], ["--show draws one row"]),
    ([*HI, "--show", "--method=plain"], ["--show draws drafts"]),
    ([*HI, "--compare", "--method=plain"], ["--compare compares with plain"]),
    ([*HI, "--system=x", "--raw"], ["--system needs the chat template"]),
    ([*HI, "--target=./none"], ["target './none' is not a folder"]),
    ([*HI, "--drafter=./none"], ["drafter './none' is not a folder"]),
    ([*HI, "--output=./no/such/rows"], ["output folder", "does not exist"]),
    ([*HI, "--output=."], ["output '.' is a folder"]),
    ([*HI, f"--output={'x' * 300}"], ["cannot be written"]),
    ([*HI, "--config=none.py"], ["config 'none.py' is not a file"]),
    ([*HI, "--drafter_window=0"], ["drafter_window 0 must be at least 1"]),
    ([], ["chat takes no --output"]),
  ],
)
def test_refused(refused, args, words):
  line = refused(*args)
  for word in words:
    assert word in line


@pytest.mark.parametrize(
  ("content", "words"),
  [
    ("", ["no prompts"]),
    ('{"prompt": "a"}\n{"prompt"', [":2: not valid JSON"]),
    ('{"text": "a"}', [":1: neither prompt, messages nor turns", '"text"']),
    (
      '{"messages": [{"role": "assistant", "content": "x"}]}',
      [":1: begins with an assistant turn"],
    ),
  ],
)
def test_refused_prompts_files(refused, tmp_path, content, words):
  file = tmp_path / "p.jsonl"
  file.write_text(content)
  line = refused("--prompts_file", str(file))
  for word in [str(file), *words]:
    assert word in line


@pytest.mark.parametrize(
  ("body", "words"),
  [
    (
      "return dict(temprature=1)",
      ["'temprature'", "did you mean temperature?"],
    ),
    ("return dict(colour=1)", ["unknown field 'colour'\n"]),
    ("return dict(verbose=True)", ["unknown field 'verbose'"]),
    ("return dict(temperature='hot')", ["temperature 'hot'", "type float"]),
    ("return dict(max_new_tokens=2.5)", ["max_new_tokens 2.5", "type int"]),
    ("return dict(stop='x')", ["stop 'x'", "type"]),
    ("return dict(max_new_tokens=None)", ["max_new_tokens None", "type int"]),
    ("return dict(top_p=7)", ["top_p 7.0 must be"]),
    ("return 5", ["cannot be read (TypeError", "get_config()"]),
    ("return (", ["cannot be read (SyntaxError", "get_config()"]),
  ],
)
def test_refused_config_files(refused, tmp_path, body, words):
  file = tmp_path / "c.py"
  file.write_text(f"def get_config():\n  {body}\n")
  line = refused("--prompt", "hi", "--config", str(file))
  for word in words:
    assert word in line


def test_refused_chats(refused, tmp_path):
  # --output stands for all that a chat would ignore
  assert "give a prompt" in refused()
  for name, value in (("raw", True), ("batch_size", 2), ("show", True)):
    with pytest.raises(InputError, match=f"chat takes no --{name}"):
      command.run(DecodeOptions(**{name: value}))


def test_refused_models(refused, models, tmp_path):
  hi = ("--prompt", "hi")

  def copy(source: str, name: str, **changes) -> str:
    folder = tmp_path / name
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)

  line = refused(*hi, drafter=copy(models.drafter, "d16", hidden_size=16))
  assert "hidden_size 16 does not fit the target's 32" in line
  line = refused(*hi, drafter=copy(models.drafter, "d65", vocab_size=65))
  assert "vocab_size 65 does not fit the target's 64" in line
  assert "another model" in line

  for kind in ("target", "drafter"):
    cut = copy(getattr(models, kind), f"cut_{kind}")
    file = pathlib.Path(cut) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    line = refused(*hi, **{kind: cut})
    assert str(file) in line
    assert "truncated" in line

  line = refused(*hi, drafter=None)
  assert "no drafter for target" in line
  assert "--drafter" in line
  bare = copy(models.target, "bare")
  for file in pathlib.Path(bare).glob("tokenizer*"):
    file.unlink()
  assert "no tokenizer: give prompt_ids" in refused(*hi, target=bare)


# The script itself ----------------------------------------------------------


def script(*args: str, stdin: str = "", **env) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "decode.py", *args],
    cwd=ROOT,
    input=stdin,
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
    capture_output=True,
    text=True,
    timeout=300,
  )


def test_script_refuses_with_one_line():
  done = script("--prompt", "hi", "--top_p", "1.5")
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.startswith("decode.py: top_p 1.5 must be")
  assert done.stderr.count("\n") == 1
  shown = script("--prompt", "hi", "--top_p", "1.5", "-v", "1")
  assert shown.returncode != 0
  assert "Traceback" in shown.stderr  # asked for


def test_script_chats_and_ends_with_the_input(models, tmp_path):
  done = script(
    *("--target", models.target, "--method", "plain", "--max_new_tokens", "4"),
    stdin="hi\n",
    XDG_CACHE_HOME=str(tmp_path),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("\n> ")
  said, figures = done.stderr.splitlines()
  assert said.startswith("chat with")
  assert re.fullmatch(FIGURES, figures)

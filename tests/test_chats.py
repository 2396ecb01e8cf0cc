"""Forms of chats, and the masks of real chat templates."""

import json
import pathlib

import pytest
import test_data

from eagle_jax.training import chats
from eagle_jax.training.chats import BadRow

tokenizer = test_data.tokenizer
TEMPLATES = pathlib.Path(__file__).parent / "templates"


def with_template(tokenizer, template: str, special=(), **tokens):
  """The character tokenizer with another template and special tokens."""
  made = type(tokenizer)(
    tokenizer_object=tokenizer.backend_tokenizer,
    chat_template=template,
    **tokens,
  )
  made.add_special_tokens({"additional_special_tokens": list(special)})
  return made


def chat(*turns, cut=False, system=None, **fields):
  roles = ("user", "assistant")
  messages = [
    {"role": roles[i % 2], "content": text} for i, text in enumerate(turns)
  ]
  if system:
    messages.insert(0, {"role": "system", "content": system})
  return chats.Chat(messages, cut, "here:1", **fields)


def marked(tokenizer, document) -> str:
  """The document's text, with loss between ⟦ and ⟧."""
  text, on = "", False
  runs: list[int] = []
  for i, m in zip([*document.ids, None], [*document.mask, False], strict=True):
    if m != on or i is None:
      text += tokenizer.decode(runs)
      if m != on:
        text += "⟦" if m else "⟧"
      runs, on = [], m
    if i is not None:
      runs.append(int(i))
  return text


SMOLLM2_SYSTEM = (
  "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by"
  " Hugging Face<|im_end|>\n"
)
QWEN2_SYSTEM = (
  "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a"
  " helpful assistant.<|im_end|>\n"
)
CHATML = {
  "bos_token": "<|im_start|>",
  "eos_token": "<|im_end|>",
}
SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA3 = {
  "bos_token": "<|begin_of_text|>",
  "eos_token": "<|eot_id|>",
  "special": ("<|start_header_id|>", "<|end_header_id|>"),
}
# template -> (its tokens, the marked documents of "a" "one" "b é" "two")
TWO_TURNS = {
  "smollm2": (
    CHATML,
    [
      SMOLLM2_SYSTEM + "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
      "⟦one<|im_end|>⟧\n"
      "<|im_start|>user\nb é<|im_end|>\n<|im_start|>assistant\n"
      "⟦two<|im_end|>⟧\n"
    ],
  ),
  "llama3": (
    LLAMA3,
    [
      "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\n⟦one<|eot_id|>⟧"
      "<|start_header_id|>user<|end_header_id|>\n\nb é<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\n⟦two<|eot_id|>⟧"
    ],
  ),
  "qwen2_5": (
    CHATML,
    [
      QWEN2_SYSTEM + "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
      "⟦one<|im_end|>⟧\n"
      "<|im_start|>user\nb é<|im_end|>\n<|im_start|>assistant\n"
      "⟦two<|im_end|>⟧\n"
    ],
  ),
  # the last turn has a reasoning block, earlier ones lose theirs
  "qwen3": (
    CHATML,
    [
      "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
      "⟦<think>\n\n</think>\n\none<|im_end|>⟧\n",
      "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
      "<|im_start|>user\nb é<|im_end|>\n<|im_start|>assistant\n"
      "⟦<think>\n\n</think>\n\ntwo<|im_end|>⟧\n",
    ],
  ),
  "vicuna": (
    SENTENCEPIECE,
    ["<s>USER: a\nASSISTANT:⟦ one</s>⟧\nUSER: b é\nASSISTANT:⟦ two</s>⟧\n"],
  ),
  "mistral": (
    SENTENCEPIECE,
    ["<s>[INST] a [/INST]⟦one</s>⟧[INST] b é [/INST]⟦two</s>⟧"],
  ),
}


@pytest.fixture(scope="module")
def real(tokenizer):
  """name -> a tokenizer with that model's template and special tokens."""
  return lambda name: with_template(
    tokenizer, (TEMPLATES / f"{name}.jinja").read_text(), **TWO_TURNS[name][0]
  )


@pytest.mark.parametrize("name", TWO_TURNS)
def test_masks_of_real_templates(real, name):
  made = real(name)
  found = chats.tokenize(made, chat("a", "one", "b é", "two"))
  assert [marked(made, d) for d in found] == TWO_TURNS[name][1]


@pytest.mark.parametrize("name", TWO_TURNS)
def test_a_cut_answer_has_no_end_of_turn(real, name):
  made = real(name)
  found = chats.tokenize(made, chat("a", "one", "b", "tw", cut=True))
  assert marked(made, found[-1]).endswith("tw⟧")
  assert marked(made, found[0]).count("⟦") + len(found) == 3


def test_qwen3_keeps_the_reasoning_of_the_turn_that_is_trained(real):
  made = real("qwen3")
  found = chats.tokenize(
    made,
    chat("a", "<think>\nhm\n</think>\n\none", "b", "<think>\nso\n</think>two"),
  )
  assert [marked(made, d) for d in found] == [
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    "⟦<think>\nhm\n</think>\n\none<|im_end|>⟧\n",
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    "⟦<think>\nso\n</think>\n\ntwo<|im_end|>⟧\n",
  ]


def test_qwen3_tool_calls_share_a_document(real):
  """Reasoning stays while the calls after one question go on."""
  made = real("qwen3")
  row = {
    "messages": [
      {"role": "user", "content": "a"},
      {
        "role": "assistant",
        "content": [
          {"type": "reasoning", "value": "hm"},
          {
            "type": "tool_call",
            "value": '{"name": "f", "arguments": {"x": 1}}',
          },
        ],
      },
      {"role": "tool", "content": "7"},
      {"role": "assistant", "content": "one"},
    ],
    "tools": '[{"type": "function"}]',
  }
  found = chats.tokenize(made, chats.read_chat(row, "here:1"))
  assert len(found) == 1
  text = marked(made, found[0])
  assert text.startswith("<|im_start|>system\n# Tools")
  assert text.endswith(
    "<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\n<tool_call>\n"
    '{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>⟧\n'
    "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n⟦<think>\n\n</think>\n\none<|im_end|>⟧\n"
  )


def test_generation_marks_decide_where_they_are(tokenizer):
  """Here the marks leave the end of turn and a fixed opening out."""
  made = with_template(
    tokenizer,
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}So: "
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    **SENTENCEPIECE,
  )
  (found,) = chats.tokenize(made, chat("a", "one", "b", "two"))
  assert marked(made, found) == (
    "[user]a</s>[assistant]So: ⟦one⟧</s>[user]b</s>[assistant]So: ⟦two⟧</s>"
  )


def test_turns_after_the_last_answer_are_left_out(tokenizer):
  (found,) = chats.tokenize(tokenizer, chat("a", "one", "b"))
  (want,) = chats.tokenize(tokenizer, chat("a", "one"))
  assert marked(tokenizer, found) == marked(tokenizer, want)


def test_weight_0_carries_no_loss(tokenizer):
  row = {"messages": chat("a", "one", "b", "two").messages}
  row["messages"][1] = {**row["messages"][1], "weight": 0}
  (found,) = chats.tokenize(tokenizer, chats.read_chat(row, "here:1"))
  text = marked(tokenizer, found)
  assert "\none<|im_end|>" in text
  assert text.endswith("⟦two<|im_end|>⟧\n")
  row["messages"][3] = {**row["messages"][3], "weight": 0}
  with pytest.raises(BadRow, match="weight 0"):
    chats.tokenize(tokenizer, chats.read_chat(row, "here:1"))


MARKS = "{% for m in messages %}{{ m.content }}.{% endfor %}"


@pytest.mark.parametrize(
  ("template", "given", "word"),
  [
    (None, chat("only a question"), "no assistant turn"),
    (None, chat("a", "<|im_end|>"), "holds the special token '<|im_end|>'"),
    (None, chat("a", "b", tools=[{}]), "no place for tools"),
    ("", chat("a", "b"), "no token is marked .* renders as ''"),
    (
      "{{ messages | length }}",
      chat("a", "b"),
      "an answer apart from its prompt",
    ),
    # marks that are never reached: all zero, with a sample
    (
      MARKS + "{% if 0 %}{% generation %}{% endgeneration %}{% endif %}",
      chat("quite so", "one"),
      "no token is marked .* renders as 'quite so.one.'",
    ),
    (
      "{% for m in messages if m.role == 'assistant' %}{{ m.content }}"
      "{% endfor %}",
      chat("a", "one"),
      "every token is marked .* renders as 'one'",
    ),
  ],
)
def test_rows_without_a_usable_mask(tokenizer, template, given, word):
  made = tokenizer
  if template is not None:
    made = with_template(tokenizer, template, **CHATML)
  with pytest.raises(BadRow, match=word) as e:
    chats.tokenize(made, given)
  assert "\n" not in str(e.value)


def test_templates_that_refuse_a_row(real):
  with pytest.raises(BadRow, match=r"refuses it .*must alternate"):
    chats.tokenize(real("mistral"), chat("a", "b", system="be brief"))


def test_sharegpt_is_openai_with_other_names():
  row = {
    "conversations": [
      {"from": "system", "value": "s"},
      {"from": "human", "value": "a"},
      {"from": "function_call", "value": '{"name": "f", "arguments": "{}"}'},
      {"from": "observation", "value": "7"},
      {"from": "gpt", "value": "one"},
    ]
  }
  call = {"type": "function", "function": {"name": "f", "arguments": {}}}
  found = chats.read_chat(row, "here:1")
  assert found.messages == [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "one"},
  ]


def turn(role="user", content="x", **more):
  return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
  ("row", "word"),
  [
    ({"text": "x"}, "'messages' must be a list"),
    ({"messages": []}, "'messages' must be a list"),
    ({"messages": ["x"]}, 'needs a role of .*found "x"'),
    ({"messages": [turn("bot")]}, "needs a role of .*bot"),
    ({"messages": [{"content": "x"}]}, "needs a role of"),
    ({"messages": [turn(content=7)]}, "must be text; found 7"),
    ({"messages": [turn(content=None)]}, "must be text; found null"),
    ({"messages": [turn(content=" \n")]}, "an empty user turn"),
    ({"messages": [turn(), turn("gpt", "")]}, "an empty assistant turn"),
    ({"messages": [turn("assistant")]}, "begins with an assistant turn"),
    ({"messages": [turn(content="\ud83d")]}, "half a surrogate"),
    ({"messages": [turn(weight=2)]}, "weight 2"),
    (
      {"messages": [turn(content=[{"type": "image_url", "image_url": "x"}])]},
      "no text, of type 'image_url'",
    ),
    (
      {"messages": [turn(), turn("function_call", "{")]},
      "tool call without name",
    ),
    (
      {"messages": [turn(), turn("assistant", None, tool_calls=[{"id": 1}])]},
      "tool call without name",
    ),
    ({"messages": [turn()], "tools": "["}, "'tools' is not valid JSON"),
    ({"messages": [turn()], "tools": {"a": 1}}, "'tools' must be a list"),
  ],
)
def test_bad_rows(row, word):
  with pytest.raises(BadRow, match=word) as e:
    chats.read_chat(row, "here:1")
  assert "\n" not in str(e.value)


def test_lines_of_a_file(tmp_path):
  """A line separator in a text splits no row; bad lines are told apart."""
  file = tmp_path / "chats.jsonl"
  row = {"messages": [turn(content="a\u2028b")]}
  file.write_bytes(
    b"\xef\xbb\xbf"
    + json.dumps(row, ensure_ascii=False).encode()
    + b"\n\n{\n[1]\n\xff\n"
  )
  found = list(chats.json_lines(file))
  assert found[0] == (f"{file}:1", row)
  assert [(w.split(":")[-1], str(r)[:14]) for w, r in found[1:]] == [
    ("3", "not valid JSON"),
    ("4", "a JSON object "),
    ("5", "cannot be read"),
  ]


def test_other_schemas_found_in_the_wild(shared, real):
  """Parts, reasoning and tool calls of real files; one has broken JSON."""
  file = shared / "data/chats/other_schemas.jsonl"
  reasons = []
  for where, row in chats.json_lines(file):
    try:
      found = chats.tokenize(real("qwen3"), chats.read_chat(row["row"], where))
      assert all(d.mask.any() for d in found)
    except BadRow as e:
      reasons.append(str(e))
  assert len(reasons) == 1
  assert reasons[0].startswith("a tool call without name and JSON arguments")

"""Turn after turn on a terminal."""

import contextlib
import signal
from collections.abc import Iterator

from eagle_jax import text
from eagle_jax.errors import InputError
from eagle_jax.session import Session, Totals, say
from eagle_jax.speculation.requests import Request


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
  """Ctrl-C sets a flag instead of raising: donated buffers stay whole."""
  pressed: list[bool] = []
  before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
  try:
    yield pressed
  finally:
    signal.signal(signal.SIGINT, before)


def chat(session: Session) -> None:
  """Turn after turn until the input ends; Ctrl-C stops an answer."""
  o = session.o
  engine = session.generator.engine  # chooses the tree before the first turn
  say(
    "chat with the target; /new starts over, Ctrl-C stops an answer, Ctrl-D"
    " ends"
  )
  opening = [{"role": "system", "content": o.system}] if o.system else []
  messages = list(opening)
  turn = 0
  while True:
    try:
      line = input("\n> ")
    except EOFError:
      print()
      return
    except KeyboardInterrupt:
      print()
      continue
    if not line.strip():
      continue
    if line.strip() == "/new":
      messages = list(opening)
      say("a new conversation")
      continue
    messages.append({"role": "user", "content": line})
    request = Request(
      text.encode_messages(session.tokenizer, messages),
      o.max_new_tokens,
      session.sampling,
      o.seed,
      turn,
    )
    try:
      engine.check(request)
    except InputError as e:
      say(f"{e}; this turn is dropped (/new starts over)")
      messages.pop()
      continue
    with interruptible() as pressed:

      def emit(_row, new, _ids, pressed=pressed):
        print(new, end="", flush=True)
        return bool(pressed)

      compiled = engine.compile_seconds
      answer = session.generator.run(
        [request], [line], o.stop, emit, reuse=True
      )[0]
    print()
    r = answer.result
    totals = Totals(1, len(r.token_ids), len(r.accept_lengths), r.seconds)
    compiled = engine.compile_seconds - compiled
    say(totals.line(False, compiled))
    messages.append({"role": "assistant", "content": answer.text})
    turn += 1

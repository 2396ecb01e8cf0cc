"""What `decode.py` does, without flags: importable and testable."""

import contextlib
import dataclasses
import json
import sys

from eagle_jax import drawing, generation, options
from eagle_jax.chat import chat
from eagle_jax.errors import InputError
from eagle_jax.generation import Answer
from eagle_jax.options import DecodeOptions
from eagle_jax.session import Session, Totals, say


def _record(answer: Answer) -> dict:
  r = answer.result
  return {
    "prompt": answer.prompt,
    "sample": answer.request.sample,
    "text": answer.text,
    "token_ids": r.token_ids,
    "accept_lengths": r.accept_lengths,
    "tau": r.tau,
    "tokens_per_s": answer.tokens_per_s,
    "seconds": r.seconds,
    "finish_reason": r.finish_reason,
  }


def run(o: DecodeOptions) -> None:
  """Decode what the options say; answers to stdout, the rest to stderr."""
  options.check(o)
  wanted = options.inputs(o)
  if wanted is None:
    options.check_chat(o)
    chat(Session(o))
    return
  session = Session(o)
  pairs = [
    session.request(p, number, sample)
    for number, p in enumerate(wanted)
    for sample in range(o.num_samples)
  ]
  for request, _ in pairs:
    session.check(request)
  engines = [g.engine for g in (session.generator, session.plain) if g]
  totals = Totals()
  with contextlib.ExitStack() as stack:
    sink = None
    if o.output:
      try:
        sink = stack.enter_context(open(o.output, "w", encoding="utf-8"))
      except OSError as e:
        raise InputError(
          f"output {o.output!r} cannot be written ({e.strerror})"
        ) from None
    for at in range(0, len(pairs), o.batch_size):
      group = pairs[at : at + o.batch_size]
      _group(session, group, len(pairs) > 1, totals, sink)
  say(totals.line(o.compare, sum(e.compile_seconds for e in engines)))
  if o.verbose:
    for engine in engines:
      for name in engine.programs:
        say(f"compiled {name}")


def _group(session: Session, group, headed: bool, totals: Totals, sink) -> None:
  """Decode one batch, print its answers, write its rows."""
  o = session.o
  requests = [r for r, _ in group]
  names = [n for _, n in group]
  single = len(group) == 1 and o.batch_size == 1
  trees = []

  def emit(_row, new, _ids):
    print(new, end="", flush=True)

  if single and headed:
    print(f"\n>>> {names[0]}", flush=True)
  answers = session.generator.run(
    requests,
    names,
    o.stop,
    emit if single and not o.show else None,
    watch_trees=(lambda t, out: trees.append((t, out))) if o.show else None,
  )
  plain = [None] * len(group)
  if session.plain:
    # with as many looks as the run it is compared to
    quiet = (lambda *_: None) if single else None
    plain = session.plain.run(requests, names, o.stop, quiet)
  for answer, base in zip(answers, plain, strict=True):
    _print_answer(session, answer, single, trees)
    row = _record(answer)
    totals.rows += 1
    totals.tokens += len(answer.result.token_ids)
    totals.cycles += len(answer.result.accept_lengths)
    if base:
      found = generation.divergence(session.plain, base, answer)
      row |= {
        "identical": found is None,
        "ratio": answer.tokens_per_s / base.tokens_per_s,
        "near_ties": [] if found is None else [dataclasses.asdict(found)],
      }
      totals.identical += found is None
      totals.near_ties += found is not None and found.excused
      totals.plain_tokens += len(base.result.token_ids)
      if found is not None:
        say(
          f"row {answer.request.number}: tokens differ at {found.at}, gap"
          f" {found.gap:.2g} (allowed {found.allowed:.2g}):"
          f" {'a near tie' if found.excused else 'NOT a near tie'}"
        )
    if sink:
      sink.write(json.dumps(row, ensure_ascii=False) + "\n")
      sink.flush()
  # rows of a batch share its clock
  totals.seconds += answers[0].result.seconds
  if session.plain:
    totals.plain_seconds += plain[0].result.seconds


def _print_answer(session: Session, answer: Answer, single, trees) -> None:
  o = session.o
  if not single:
    print(f"\n>>> {answer.prompt}\n{answer.text}", flush=True)
  elif o.show:
    r = answer.result
    print(
      drawing.marked(
        r.token_ids, r.accept_lengths, session.piece, sys.stdout.isatty()
      )
    )
    if trees:
      drawn = drawing.of_cycle(*trees[-1])
      print("\n" + drawing.tree(drawn, session.piece))
  else:
    print()

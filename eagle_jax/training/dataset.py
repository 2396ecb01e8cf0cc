"""python -m eagle_jax.training.dataset --data chats.jsonl

What a run would train on: rows read and dropped with reasons, tokens, the
supervised share, padding. The same code prepares the data of a run: chat
files are tokenised once into a TFDS data set of ArrayRecord files (no
TensorFlow needed), which Grain reads by number.

A source is a JSONL file of chats (`chats.read_chat` has its forms), or a TFDS
data set with its features mapped on one line:

  tfds:NAME_OR_FOLDER:SPLIT:messages=FEATURE
  tfds:NAME_OR_FOLDER:SPLIT:user=FEATURE,assistant=FEATURE[,system=FEATURE]
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

from eagle_jax import loading, script
from eagle_jax.errors import InputError
from eagle_jax.training import chats, data
from eagle_jax.training.chats import BadRow, Document

# Kept data sets of another version are made anew.
VERSION = "1.0.0"
SPLIT = "documents"
LISTED = 10000  # bad rows named one by one at most; all are counted


@dataclasses.dataclass
class Report:
  """What reading found.

  bad: (file:line, reason) of the first ones. reasons: rows by reason, the
  values in it left out, so that like ones count together.
  """

  rows: int = 0
  bad_rows: int = 0
  bad: list[list[str]] = dataclasses.field(default_factory=list)
  reasons: dict[str, int] = dataclasses.field(default_factory=dict)

  def refuse(self, where: str, reason: str) -> None:
    self.bad_rows += 1
    short = reason.split(": ")[0].split("; ")[0]
    self.reasons[short] = self.reasons.get(short, 0) + 1
    if len(self.bad) < LISTED:
      self.bad.append([where, reason])


@dataclasses.dataclass
class Corpus:
  """Tokenised chats.

  fingerprint: of the data, tokenizer and template. source: documents by number.
  lengths: int32[n], their tokens. counts: int64[V], how often each id carries
  loss.
  """

  fingerprint: str
  source: Sequence[Document]
  lengths: np.ndarray
  counts: np.ndarray
  report: Report

  def counts_of(self, V: int) -> np.ndarray:
    """int64[V]: the counts over the target's vocabulary."""
    if self.counts[V:].any():
      raise InputError(
        f"the data has token id {np.flatnonzero(self.counts)[-1]}, but the"
        f" target's vocabulary ends at {V - 1}: tokenizer and target differ"
      )
    return np.pad(self.counts, (0, max(V - len(self.counts), 0)))[:V]

  def pack(self, T: int, window: int, long: str, most: int) -> data.Packed:
    """Rows of the first `most` documents (0 = all)."""
    lengths = self.lengths[: most or None]
    return data.pack_windows(self.source, lengths.tolist(), T, window, long)

  def lines(self) -> list[str]:
    """What was read, for people."""
    r, tokens = self.report, int(self.lengths.sum())
    supervised = int(self.counts.sum())
    return [
      f"{r.rows} rows read, {r.bad_rows} dropped",
      *(
        f"  {count:5} {reason}"
        for reason, count in sorted(
          r.reasons.items(), key=lambda item: -item[1]
        )
      ),
      f"{len(self.lengths)} documents, {tokens} tokens, {supervised} supervised"
      f" ({supervised / tokens:.1%})",
    ]


# Sources -------------------------------------------------------------------


def rows_of(source: str) -> Iterator[tuple[str, dict | BadRow]]:
  """(where, row) of a source."""
  if source.startswith("tfds:"):
    yield from _tfds_rows(source)
  else:
    yield from chats.json_lines(pathlib.Path(source))


def _tfds_source(source: str):
  """(data source, {field: feature}, builder) of a tfds: line."""
  import tensorflow_datasets as tfds

  try:
    _, name, split, mapping = source.split(":")
    features = dict(pair.split("=") for pair in mapping.split(","))
    if not ({"messages"} == features.keys()) and not (
      {"user", "assistant"} <= features.keys() <= {*chats.ROLES}
    ):
      raise ValueError
  except ValueError:
    raise InputError(
      f"data {source!r} must read tfds:NAME_OR_FOLDER:SPLIT:messages=FEATURE or"
      " ...:user=FEATURE,assistant=FEATURE"
    ) from None
  try:
    folder = pathlib.Path(name).expanduser()
    builder = (
      tfds.builder_from_directory(folder)
      if folder.is_dir()
      else tfds.builder(name)
    )
    found = builder.as_data_source(split=split)
  except NotImplementedError:
    raise InputError(
      f"data {source!r} is not stored as ArrayRecord: prepare it again with"
      " `tfds build --file_format=array_record` (needs pip install tensorflow)"
    ) from None
  except (tfds.core.DatasetNotFoundError, AssertionError, ValueError) as e:
    why = " ".join(str(e).split())[:160]
    raise InputError(
      f"data {source!r} cannot be read ({why}): prepare it with `tfds build`,"
      " or name its folder"
    ) from None
  missing = [f for f in features.values() if f not in builder.info.features]
  if missing:
    raise InputError(
      f"data {source!r}: no feature {missing[0]!r}; there are"
      f" {', '.join(builder.info.features)}"
    )
  return found, features, builder


def _tfds_rows(source: str) -> Iterator[tuple[str, dict]]:
  found, features, _ = _tfds_source(source)
  for i in range(len(found)):
    where, row = f"{source}:{i}", found[i]
    if "messages" in features:
      yield where, {"messages": _turns(row[features["messages"]])}
    else:
      order = [r for r in ("system", "user", "assistant") if r in features]
      yield (
        where,
        {
          "messages": [
            {"role": r, "content": _text(row[features[r]])} for r in order
          ]
        },
      )


def _text(value):
  return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _turns(value) -> list[dict]:
  """A TFDS sequence of dicts, which comes as a dict of sequences."""
  if isinstance(value, dict):
    rows = zip(*value.values(), strict=True)
    value = [dict(zip(value, row, strict=True)) for row in rows]
  return [{k: _text(v) for k, v in turn.items()} for turn in value]


def documents_of(
  sources: Sequence[str], tokenizer, report: Report
) -> Iterator[Document]:
  """Read, tokenise and check; what cannot be used is listed in `report`."""
  for source in sources:
    for where, row in rows_of(source):
      report.rows += 1
      try:
        if isinstance(row, BadRow):
          raise row
        yield from chats.tokenize(tokenizer, chats.read_chat(row, where))
      except BadRow as e:
        report.refuse(where, str(e))


# On disk -------------------------------------------------------------------


@functools.cache
def _builder_class():
  """The TFDS builder; made when first used, since the import takes a second."""
  import tensorflow_datasets as tfds

  class TokenizedChats(tfds.core.GeneratorBasedBuilder):
    """Documents in the order they were read, keyed by their number."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, documents: Iterator[Document], **kwargs):
      self._documents = documents
      super().__init__(**kwargs)

    def _info(self):
      features = tfds.features.FeaturesDict(
        {
          "ids": tfds.features.Tensor(shape=(None,), dtype=np.int32),
          "mask": tfds.features.Tensor(shape=(None,), dtype=np.bool_),
        }
      )
      return tfds.core.DatasetInfo(
        builder=self, features=features, disable_shuffling=True
      )

    def _split_generators(self, dl_manager):
      return {SPLIT: self._generate_examples()}

    def _generate_examples(self):
      for i, d in enumerate(self._documents):
        yield i, {"ids": d.ids, "mask": d.mask}

  return TokenizedChats


class Stored(Sequence[Document]):
  """Documents in ArrayRecord files, by number."""

  def __init__(self, folder: pathlib.Path):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(folder)
    self._records = builder.as_data_source(split=SPLIT)

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, number: int) -> Document:
    if not 0 <= number < len(self):
      raise IndexError(number)  # what ends an iteration
    record = self._records[number]
    return Document(record["ids"], record["mask"])


def _write(sources: Sequence[str], tokenizer, folder: pathlib.Path) -> None:
  """Tokenise into `folder`: ArrayRecord files, lengths, counts, the report."""
  import tensorflow_datasets as tfds

  report, lengths = Report(), []
  counts = np.zeros(len(tokenizer), np.int64)

  def counted():
    for d in documents_of(sources, tokenizer, report):
      lengths.append(len(d.ids))
      np.add.at(counts, d.ids[d.mask], 1)
      yield d

  documents = counted()
  first = next(documents, None)
  folder.mkdir(parents=True)
  if first is not None:  # TFDS writes no empty split
    tfds.disable_progress_bar()
    builder = _builder_class()(
      itertools.chain([first], documents),
      data_dir=folder,
      file_format="array_record",
    )
    with contextlib.redirect_stdout(io.StringIO()):  # of a download, it says
      builder.download_and_prepare()
  np.savez(
    folder / "facts.npz", lengths=np.asarray(lengths, np.int32), counts=counts
  )
  (folder / "report.json").write_text(json.dumps(dataclasses.asdict(report)))


def fingerprint(sources: Sequence[str], tokenizer) -> str:
  """Tells apart what is kept on disk: the data, tokenizer and template."""
  digest = hashlib.sha256(VERSION.encode())
  digest.update(tokenizer.backend_tokenizer.to_str().encode())
  digest.update(json.dumps(tokenizer.chat_template).encode())
  for source in sources:
    digest.update(source.encode())
    if source.startswith("tfds:"):
      found, _, builder = _tfds_source(source)
      digest.update(f"{builder.info.full_name} {len(found)}".encode())
      continue
    try:
      with open(source, "rb") as f:
        digest.update(hashlib.file_digest(f, "sha256").digest())
    except OSError as e:
      raise InputError(f"{source}: cannot be read ({e.strerror})") from None
  return digest.hexdigest()[:16]


def prepare(
  sources: Sequence[str],
  tokenizer,
  folder: pathlib.Path,
  max_bad_rows: int,
) -> Corpus:
  """Tokenised chats, made once and kept in `folder`.

  Several processes may prepare the same: each writes a folder of its own, and
  the first one done gives it its name.

  Raises:
    InputError: a source that cannot be read, more than `max_bad_rows` rows
      that cannot be used, or none that can.
  """
  if not tokenizer.is_fast:
    raise InputError(
      "the tokenizer is not a fast one, so where a token lies in the text is"
      " not known: give a tokenizer.json"
    )
  sources = [str(s) for s in sources]
  place = folder / fingerprint(sources, tokenizer)
  if not place.exists():
    partly = place.with_name(f"{place.name}.{platform.node()}.{os.getpid()}")
    shutil.rmtree(partly, ignore_errors=True)  # of a killed run of this id
    try:
      _write(sources, tokenizer, partly)
      partly.rename(place)
    except OSError as e:
      if not place.exists():  # else another process was first
        raise InputError(
          f"{folder}: cannot be written ({e.strerror})"
        ) from None
    finally:
      shutil.rmtree(partly, ignore_errors=True)
  facts = np.load(place / "facts.npz")
  report = Report(**json.loads((place / "report.json").read_text()))
  named = ", ".join(sources)
  first = ": ".join(report.bad[0]) if report.bad else "no rows"
  if not len(facts["lengths"]):
    raise InputError(f"{named}: no row can be used, the first since {first}")
  if report.bad_rows > max_bad_rows:
    raise InputError(
      f"{named}: {report.bad_rows} of {report.rows} rows cannot be used, the"
      f" first since {first}: mend them, or allow more with max_bad_rows (now"
      f" {max_bad_rows}); python -m eagle_jax.training.dataset lists them"
    )
  return Corpus(
    place.name,
    Stored(place / "tokenized_chats" / VERSION),
    facts["lengths"],
    facts["counts"],
    report,
  )


# The tool ------------------------------------------------------------------


def long_line(lengths: np.ndarray, T: int, long: str) -> str | None:
  """What becomes of documents longer than T, or None where there are none."""
  longer = lengths[lengths > T]
  if not len(longer):
    return None
  kept = data.pieces(longer.tolist(), T, long)
  lost = int(longer.sum()) - sum(p.stop - p.start for p in kept)
  done = f"split into {len(kept)} windows" if long == "split" else "cut"
  return (
    f"{len(longer)} documents longer than {T} tokens: {done}, {lost} tokens"
    " lost"
  )


def _run(f) -> None:
  if not f.data:
    raise InputError("--data is needed: chat files, or tfds: lines")
  if f.row_length < data.SHORTEST:
    raise InputError(f"row_length {f.row_length} must be at least 3")
  say = lambda line: print(line, file=sys.stderr, flush=True)
  folder = loading.target_folder(f.target, say)
  tokenizer = loading.load_tokenizer(folder)
  if getattr(tokenizer, "chat_template", None) is None:
    raise InputError(f"target {f.target!r} has no chat template")
  with tempfile.TemporaryDirectory() as kept:
    corpus = prepare(
      f.data, tokenizer, pathlib.Path(f.keep or kept), f.max_bad_rows
    )
    for where, reason in corpus.report.bad if f.list else ():
      print(f"{where}: {reason}")
    for line in corpus.lines():
      print(line)
    T = f.row_length
    packed = corpus.pack(T, f.pack_window, f.long_chats, 0)
    if (line := long_line(corpus.lengths, T, f.long_chats)) is not None:
      print(line)
    print(
      f"{len(packed)} rows of {T} tokens: padding {packed.padding:.1%} packed,"
      f" {data.bucket_waste(packed):.1%} in length buckets"
    )


if __name__ == "__main__":
  flags.DEFINE_multi_string("data", [], "Chats, JSONL, or a tfds: line.")
  flags.DEFINE_string("target", loading.DEFAULT_TARGET, "Its tokenizer.")
  flags.DEFINE_integer("row_length", 512, "Tokens of a packed row.")
  flags.DEFINE_integer("pack_window", 1100, "Documents packed together.")
  flags.DEFINE_string("long_chats", "split", "split, or cut.")
  flags.DEFINE_integer("max_bad_rows", 1000, "Most rows that may be dropped.")
  flags.DEFINE_boolean("list", False, "Name every dropped row.")
  flags.DEFINE_string("keep", None, "Folder for the tokenised chats.")
  script.run("dataset", _run)

"""The report's plots: plain dictionaries in, SVG out."""

import importlib.util
import io
import logging

import numpy as np

from eagle_jax.errors import InputError

BLUE, ORANGE, GREEN, RED, GREY = (
  *("#2563a8", "#d9822b", "#2e8b57", "#b03a48"),
  "#8a8f98",
)
CYCLE = (BLUE, ORANGE, GREEN, RED, "#7a5ba6", "#4aa3a2", GREY, "#a08a3c")


def check() -> None:
  """Refuses to begin where matplotlib is missing."""
  if importlib.util.find_spec("matplotlib") is None:
    raise InputError(
      "the report's plots need matplotlib, which is not installed: pip install"
      ' ".[report]"'
    )


def _new(width=7.2, height=3.1, columns=1):
  import matplotlib

  logging.getLogger("matplotlib").setLevel(logging.WARNING)
  matplotlib.use("svg")
  import matplotlib.pyplot as plt

  plt.rcParams.update(
    {
      "font.family": "DejaVu Sans",
      "font.size": 9,
      "axes.spines.top": False,
      "axes.spines.right": False,
      "axes.edgecolor": GREY,
      "axes.grid": True,
      "grid.color": "#e6e8eb",
      "axes.axisbelow": True,
      "axes.prop_cycle": plt.cycler(color=CYCLE),
      "legend.frameon": False,
      "svg.hashsalt": "eagle_jax",  # the same data gives the same file
    }
  )
  return plt.subplots(1, columns, figsize=(width, height), squeeze=False)


def _svg(figure) -> str:
  import matplotlib.pyplot as plt

  figure.tight_layout()
  out = io.StringIO()
  figure.savefig(out, format="svg", metadata={"Date": None})
  plt.close(figure)
  text = out.getvalue()
  return text[text.index("<svg") :]


def _error(entry: dict, name: str) -> tuple[float, float]:
  """Distances below and above, as matplotlib wants them."""
  value = entry[name]
  return max(value - entry["low"], 0), max(entry["high"] - value, 0)


def _bars(ax, names, entries, name, colour=BLUE) -> None:
  """Horizontal bars with intervals, the first name on top."""
  at = np.arange(len(names))[::-1]
  errors = np.array([_error(e, name) for e in entries]).T
  values = [e[name] for e in entries]
  ax.barh(at, values, xerr=errors, color=colour, height=0.6, ecolor="#333")
  ax.set_yticks(at, names)
  ax.grid(axis="y", visible=False)


def entropy(data: dict) -> str:
  names = list(data["by_category"])
  height = max(3.0, 0.28 * len(names) + 1)
  figure, ((left, right),) = _new(height=height, columns=2)
  edges = np.array(data["histogram"]["edges"])
  left.bar(edges[:-1], data["histogram"]["share"], np.diff(edges), align="edge")
  left.axvline(data["bits"]["value"], color=RED, lw=1.2)
  left.set_xlabel("entropy of the next token, bits")
  left.set_ylabel("share of positions")
  left.set_title("red: the mean", fontsize=8, loc="right")
  _bars(right, names, [data["by_category"][n]["bits"] for n in names], "value")
  right.set_xlabel("mean entropy, bits (95%)")
  return _svg(figure)


def smoothness(data: dict, explained: dict, names: dict[str, str]) -> str:
  figure, ((left, right),) = _new(columns=2)
  for kind, colour in (("feature", BLUE), ("embedding", ORANGE)):
    h = data[kind]["histogram"]
    left.stairs(h["share"], h["edges"], label=kind, color=colour, lw=1.6)
  left.set_xlabel("cosine of neighbours")
  left.set_ylabel("share of positions")
  left.legend(loc="upper left")
  _bars(right, [names[n] for n in explained], list(explained.values()), "r2")
  right.set_xlabel("held-out R² of the next feature (95%)")
  right.set_xlim(min(0, *(e["low"] for e in explained.values())), 1)
  return _svg(figure)


def accept_chain(chains: dict[str, dict]) -> str:
  figure, ((ax,),) = _new()
  for i, (name, c) in enumerate(chains.items()):
    steps = np.arange(1, len(c["measured"]) + 1)
    colour = CYCLE[i % len(CYCLE)]
    ax.plot(steps, c["measured"], "o-", color=colour, label=name, ms=4)
    ax.plot([1, c["levels"]], [c["cut_p"]] * 2, ":", color=colour, lw=1.2)
  ax.set_xlabel("step of the accept chain")
  ax.set_ylabel("accepted, given all before")
  ax.set_ylim(0, 1)
  ax.xaxis.get_major_locator().set_params(integer=True)
  ax.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
  ax.set_title("dotted: one p for all steps", fontsize=8, loc="right")
  return _svg(figure)


def inputs(data: dict[str, dict[str, dict]]) -> str:
  """data: input -> tree -> figures."""
  figure, ((ax,),) = _new(height=2.8)
  names, trees = list(data), list(next(iter(data.values())))
  at = np.arange(len(names))[::-1]
  for i, name in enumerate(trees):
    entries = [data[n][name] for n in names]
    errors = np.array([_error(e, "tau") for e in entries]).T
    ax.barh(
      at + 0.19 - 0.38 * i,
      [e["tau"] - 1 for e in entries],
      0.36,
      left=1,
      xerr=errors,
      label=name,
      ecolor="#333",
    )
  ax.set_yticks(at, names)
  ax.grid(axis="y", visible=False)
  ax.set_xlim(1)
  ax.set_xlabel("tau, tokens a verify pass (95%), from plain decoding's 1")
  ax.legend(loc="lower right", fontsize=8)
  return _svg(figure)


def trees(by_kind: dict[str, list[dict]]) -> str:
  """by_kind: kind -> figures by budget."""
  figure, ((left, right),) = _new(columns=2)
  for i, (kind, entries) in enumerate(by_kind.items()):
    nodes = [e["nodes"] for e in entries]
    colour = CYCLE[i % len(CYCLE)]
    mark = "o-" if len(entries) > 1 else "s"
    errors = np.array([_error(e, "tau") for e in entries]).T
    taus = [e["tau"] for e in entries]
    left.errorbar(
      nodes, taus, errors, fmt=mark, color=colour, label=kind, ms=4, capsize=2
    )
    right.plot(
      nodes, [e["mean_accepted"] for e in entries], mark, color=colour, ms=4
    )
    right.plot(
      *(nodes, [e["deepest_accepted"] for e in entries]),
      ":" if len(entries) > 1 else "x",
      color=colour,
    )
  for ax, label in (
    (left, "tau, tokens a verify pass (95%)"),
    (right, "drafts accepted a pass"),
  ):
    ax.set_xlabel("node budget M, the root counted")
    ax.set_ylabel(label)
  left.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
  right.set_title("solid: mean, dotted or x: deepest", fontsize=8, loc="right")
  return _svg(figure)


def calibration(data: dict[str, dict]) -> str:
  figure, ((left, right),) = _new(columns=2)
  left.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--")
  for i, (name, c) in enumerate(data.items()):
    x = [b["confidence"] for b in c["bins"]]
    y = [b["accepted"] for b in c["bins"]]
    low = [max(b["accepted"] - b["low"], 0) for b in c["bins"]]
    high = [max(b["high"] - b["accepted"], 0) for b in c["bins"]]
    colour = CYCLE[i % len(CYCLE)]
    left.errorbar(
      x, y, (low, high), fmt="o-", ms=3, color=colour, label=name, capsize=2
    )
  left.set_xlabel("drafter's confidence in a child")
  left.set_ylabel("share accepted (95%)")
  left.set(xlim=(0, 1), ylim=(0, 1))
  left.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
  names = list(data)
  at = np.arange(len(names))[::-1]
  for i, (key, label) in enumerate(
    (("first_child_accepted", "first"), ("any_child_accepted", "any"))
  ):
    entries = [data[n][key] for n in names]
    errors = np.array([_error(e, "value") for e in entries]).T
    right.barh(
      *(at + 0.19 - 0.38 * i, [e["value"] for e in entries], 0.36),
      xerr=errors,
      label=label,
      ecolor="#333",
    )
  right.set_yticks(at, names)
  right.grid(axis="y", visible=False)
  right.set_xlim(0, 1)
  right.set_xlabel("the target's token is this child (95%)")
  right.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=2)
  return _svg(figure)


def noise(data: dict[str, dict]) -> str:
  """data: "suite, T, tree" -> difference of tau, noise on less off."""
  figure, ((ax,),) = _new(height=max(2.2, 0.3 * len(data) + 1))
  _bars(ax, list(data), list(data.values()), "value")
  ax.axvline(0, color=GREY, lw=1)
  ax.set_xlabel("tau with shared noise less tau without (95%, paired)")
  return _svg(figure)


def speed(methods: dict[str, dict], costs: dict) -> str:
  figure, ((left, right),) = _new(columns=2)
  nodes = sorted(int(k) for k in costs["verify"])
  per = [costs["verify"][str(k)] * 1e3 for k in nodes]
  left.plot(nodes, per, "o-", ms=4)
  left.set(ylim=(0, None))
  left.set_xlabel("node budget M, the root counted")
  left.set_ylabel("verify(M), ms")
  known = {n: f for n, f in methods.items() if "verify_ms" in f}
  at = np.arange(len(known))[::-1]
  start = np.zeros(len(known))
  for part, colour in (("draft", ORANGE), ("verify", BLUE)):
    values = np.array([f[f"{part}_ms"] for f in known.values()])
    right.barh(at, values, 0.6, left=start, color=colour, label=f"{part} alone")
    start += values
  whole = [f["cycle_ms"] for f in known.values()]
  right.plot(whole, at, "|", color="black", ms=16, mew=2, label="cycle")
  right.set_yticks(at, list(known))
  right.grid(axis="y", visible=False)
  right.set_xlabel("ms")
  right.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3)
  return _svg(figure)

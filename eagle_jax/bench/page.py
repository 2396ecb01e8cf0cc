"""The report as one HTML file and one Markdown file."""

import dataclasses
import html
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Claim:
  """One link of the argument and what was measured.

  holds: True, False, or None where the interval holds both.
  """

  text: str
  holds: bool | None
  detail: str

  def verdict(self) -> str:
    return {True: "holds", False: "does NOT hold", None: "undecided"}[
      self.holds
    ]


@dataclasses.dataclass
class Section:
  """One plot with its numbers.

  name: of the plot and of the entry in report.json. why: what the section is
  for. caption: units, n, seed. plots: SVG texts. tables: (header, rows).
  drawing: monospaced text, "" where none.
  """

  name: str
  title: str
  why: str
  claims: Sequence[Claim]
  plots: Sequence[str]
  tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]
  caption: str
  drawing: str = ""


_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
  color: #1d2127; background: #fff; max-width: 860px; margin: 2.5em auto;
  padding: 0 1.2em; }
h1 { font-size: 1.7em; margin: 0 0 .2em; }
h2 { font-size: 1.2em; margin: 2.4em 0 .3em; padding-top: .6em;
  border-top: 1px solid #e1e4e8; }
.facts { color: #59616b; font-size: .88em; }
figure { margin: .8em 0; } figure svg { width: 100%; height: auto; }
figcaption, .caption { color: #59616b; font-size: .85em; }
table { border-collapse: collapse; font-size: .86em; margin: .8em 0;
  font-variant-numeric: tabular-nums; }
th, td { padding: .22em .7em; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e9ebee; }
th:first-child, td:first-child { text-align: left; white-space: normal; }
th { color: #59616b; font-weight: 600; border-bottom-color: #b9bfc7; }
.wide { overflow-x: auto; }
ul.claims { list-style: none; padding: 0; }
ul.claims li { display: flex; gap: .9em; margin: .4em 0; }
.v { flex: 0 0 8.4em; height: 1.6em; line-height: 1.6em; margin-top: .15em;
  border-radius: 3px; font-size: .82em; text-align: center; }
.yes { background: #dff1e4; color: #1c6b38; }
.no { background: #f8dfe0; color: #97232f; }
.open { background: #eceef1; color: #4a525c; }
pre { background: #f6f7f9; padding: .8em 1em; overflow-x: auto;
  font: 12.5px/1.4 "DejaVu Sans Mono", monospace; }
"""


def _claims(claims: Sequence[Claim]) -> str:
  style = {True: "yes", False: "no", None: "open"}
  return "".join(
    f'<li><span class="v {style[c.holds]}">{c.verdict()}</span>'
    f"<div>{html.escape(c.text)}"
    f" <span class=facts>{html.escape(c.detail)}</span></div></li>"
    for c in claims
  )


def _table(header, rows) -> str:
  row = lambda cells, tag: (
    "<tr>"
    + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells)
    + "</tr>"
  )
  body = "".join(row(r, "td") for r in rows)
  return (
    f"<div class=wide><table><thead>{row(header, 'th')}</thead>"
    f"<tbody>{body}</tbody></table></div>"
  )


def as_html(
  title: str, facts: Sequence[str], sections: Sequence[Section]
) -> str:
  """The whole report, with its plots inside: it needs no other file."""
  every = [c for s in sections for c in s.claims]
  parts = [
    "<!doctype html><html lang=en><head><meta charset=utf-8>"
    '<meta name=viewport content="width=device-width">'
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
    f"<h1>{html.escape(title)}</h1>",
    *(f"<div class=facts>{html.escape(f)}</div>" for f in facts),
    "<h2>The argument, link by link</h2>",
    f"<ul class=claims>{_claims(every)}</ul>",
  ]
  for s in sections:
    parts.append(f"<h2 id={s.name}>{html.escape(s.title)}</h2>")
    parts.append(f"<p>{html.escape(s.why)}</p>")
    for plot in s.plots:
      parts.append(f"<figure>{plot}</figure>")
    parts.append(f"<p class=caption>{html.escape(s.caption)}</p>")
    parts += [_table(*t) for t in s.tables]
    if s.claims:
      parts.append(f"<ul class=claims>{_claims(s.claims)}</ul>")
    if s.drawing:
      parts.append(f"<pre>{html.escape(s.drawing)}</pre>")
  return "\n".join([*parts, "</body></html>\n"])


def plot_files(sections: Sequence[Section]) -> dict[str, str]:
  """SVG texts by the file names that the Markdown file links to."""
  return {
    f"{s.name}{f'_{i}' if i else ''}.svg": plot
    for s in sections
    for i, plot in enumerate(s.plots)
  }


def as_markdown(
  title: str, facts: Sequence[str], sections: Sequence[Section], plots: str
) -> str:
  """The same, with links to `plot_files` in the folder `plots`."""
  tell = lambda c: f"- **{c.verdict()}**: {c.text} {c.detail}"
  lines = [f"# {title}", "", *(f"{f}  " for f in facts), ""]
  lines += ["## The argument, link by link", ""]
  lines += [tell(c) for s in sections for c in s.claims]
  cell = lambda c: str(c).replace("|", "\\|")
  for s in sections:
    lines += ["", f"## {s.title}", "", s.why, ""]
    for file in plot_files([s]):
      lines += [f"![{s.title}]({plots}/{file})", ""]
    lines.append(s.caption)
    for header, rows in s.tables:
      lines += ["", "| " + " | ".join(map(cell, header)) + " |"]
      lines += ["|---" + "|---:" * (len(header) - 1) + "|"]
      lines += ["| " + " | ".join(map(cell, r)) + " |" for r in rows]
    if s.drawing:
      lines += ["", "```", s.drawing, "```"]
  return "\n".join(lines) + "\n"

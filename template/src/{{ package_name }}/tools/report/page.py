"""A page in one file of at most a megabyte, without scripts, that loads nothing from the internet.

Texts of runs are not trusted: `make` escapes HTML, and `clean` removes secrets and escapes control
characters.
"""

import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO
from itertools import groupby
from operator import itemgetter

from matplotlib.figure import Figure
from PIL import Image

from ...engine.errors import printable_lines, without_secrets
from ..text import local_time, short
from .curves import Group
from .picture import draw

ROOM = 950_000  # bytes for all parts; the rest of a megabyte is for the head and its list of names
RESERVE = 200_000  # bytes of ROOM that curves leave free for the text after them
MADE = "Made at %Y-%m-%d %H:%M; all times are %Z (%z)."
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { --ink: #1f2933; --soft: #62707f; --line: #dfe4ea; --pale: #f5f7f9; color-scheme: light; }
* { box-sizing: border-box; print-color-adjust: exact; }
body { margin: 0 auto; padding: 2rem clamp(1rem, 4vw, 3rem); max-width: 1400px; color: var(--ink);
  background: #fff; font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
body, section { display: grid; gap: .75rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
body > *, section > * { grid-column: 1 / -1; margin: 0; min-width: 0; overflow-wrap: anywhere; }
body > figure, section > figure { grid-column: auto; } figure, tr { break-inside: avoid; }
h1 { font-size: 1.7rem; line-height: 1.25; }
[id] { border-top: 1px solid var(--line); } [id] > summary { font-size: 1.15rem; font-weight: 600; }
h3 { font-size: 1.05rem; margin-top: 1.25rem; break-after: avoid; }
img { display: block; max-width: 100%; height: auto; } figure.curve img { width: 100%; }
figcaption, small, .soft { color: var(--soft); font-size: .85rem; }
.status { display: inline-block; padding: .05rem .65rem; border-radius: 1rem; font-size: .9rem;
  font-weight: 600; white-space: nowrap; color: #fff; background: #8a6100; vertical-align: middle; }
.finished { background: #18794e; } .running { background: #1b62b5; }
.failed, .lost, .stuck { background: #b42318; }
.numbers { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 165px), 1fr)); }
.numbers div, pre { padding: .6rem .8rem; border-radius: .5rem; background: var(--pale); }
.numbers b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
tr { border-bottom: 1px solid var(--line); } th { color: var(--soft); }
.facts th { width: min(12rem, 30vw); } .wide { overflow-x: auto; overflow-wrap: normal; }
th, td { padding: .35rem .8rem .35rem 0; text-align: left; vertical-align: top; }
pre { margin: 0; font-size: .78rem; line-height: 1.45; } td, pre { white-space: pre-wrap; }
.legend span { display: inline-block; margin-right: 1.4rem; }
.legend i { display: inline-block; width: 1.6rem; height: .25rem; margin: 0 .4rem .2rem 0; }
@media (max-width: 640px) {
  body { padding: 1rem; } .runs tr { display: block; padding: .5rem 0; overflow-wrap: anywhere; }
  .runs td { display: flex; gap: 1rem; justify-content: space-between; padding: 0; }
  .runs td:empty, .runs th { display: none; }
  .runs td::before { content: attr(title); color: var(--soft); }
}
@media print {
  body { padding: 0; font-size: 11px; } body, section { grid-template-columns: 1fr 1fr; }
  ::details-content { content-visibility: visible; }
}
</style>
"""


class Html(str):
    """Text that is HTML."""


class Page:
    """Collects parts while there is room, and the names of the parts that had no room.

    Attributes:
        place: the place of the next part: the number of its run, and a number that sorts the parts
            of the run. Except in run 0, all parts but the first are folded.
    """

    def __init__(self, title: str, *more: str) -> None:
        self.title, self.room, self.place = title, ROOM, (0, 0)
        self.parts, self.left_out = list[tuple[tuple[int, int], str]](), list[str]()
        self.top: str = make("h1", f"{short(title)} ", *more)
        self.top += make("p", local_time(time.time(), MADE), class_="soft")

    def add(self, name: str, *elements: Html, spare: int = 0) -> None:
        """Add elements if there is room for all of them and `spare` bytes; else add their name."""
        text = "".join(elements)
        size = len(text.encode())
        if size > self.room - spare:
            self.left_out.append(short(name, 80))
        else:
            self.room -= size
            self.parts.append((self.place, text))

    def add_picture(self, name: str, png: bytes, caption: str = "", spare: int = 0) -> None:
        """Add a picture if it leaves `spare` bytes of room. Pictures of curves have no caption."""
        alt, data = escape(clean(short(name, 80))), b64encode(png).decode()
        shown = Html(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
        below, kind = ([make("figcaption", caption)], "figure") if caption else ([], "curve")
        self.add(name, make("figure", shown, *below, class_=kind), spare=spare)

    def add_panel(
        self,
        name: str,
        groups: Sequence[Group],
        metrics: Sequence[str],
        x: str = "step",
        stops: Sequence[float] = (),
        spans: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Add a panel of curves.

        Args:
            name: name of the part: the panel's title, or RUN: TITLE.
            groups, metrics, x: as for `draw` in picture.py.
            stops: values of x to mark with a line.
            spans: ranges of x to shade.
        """
        whole, small = BytesIO(), BytesIO()
        if self.room > RESERVE:  # otherwise there is no room for it
            drawn = Figure(figsize=(5.3, 3.2), layout="constrained")
            axes = drawn.add_subplot(title=short(name.rpartition(": ")[2], 50))
            axes.spines[["right", "top"]].set_visible(False)
            draw(axes, groups, metrics, x)
            for begin, end in spans:
                axes.axvspan(begin, end, color="#8895a7", alpha=0.15, linewidth=0)
            for stop in stops:
                axes.axvline(stop, color="#b42318", linestyle=":", linewidth=1.2)
            drawn.savefig(whole, dpi=160)
            # A palette of 64 colours takes a quarter of the bytes and looks the same.
            Image.open(whole).convert("RGB").quantize(64).save(small, "png", optimize=True)
        self.add_picture(name, small.getvalue(), spare=RESERVE)

    def text(self) -> str:
        """Return the page as HTML."""
        body: str = self.top
        if self.left_out:
            names = f"{len(self.left_out)} parts: {short(', '.join(self.left_out), 2000)}"
            body += make("p", f"Left out, to stay below a megabyte, {names}", class_="soft")
        in_order = sorted(self.parts, key=itemgetter(0))
        for run, parts in groupby(in_order, lambda part: part[0][0]):
            first, *others = (text for _, text in parts)
            inner = f"{first}<section>{''.join(others)}</section>"
            body += (
                f'<details id="run-{run}">{inner}</details>' if run else "".join([first, *others])
            )
        title = make("title", self.title)
        return f"{HEAD}{title}</head>\n<body>\n{body}</body></html>\n"


def make(tag: str, *content: str, **attributes: str) -> Html:
    """Return an HTML element. Content that is not `Html` is escaped."""
    inner = "".join(each if isinstance(each, Html) else escape(clean(each)) for each in content)
    named = (f' {n.rstrip("_")}="{escape(clean(value))}"' for n, value in attributes.items())
    return Html(f"<{tag}{''.join(named)}>{inner}</{tag}>")


def clean(text: str) -> str:
    """Return a text without secrets, and with control characters escaped."""
    return printable_lines(without_secrets(text))


def facts(values: Mapping[str, str]) -> Html:
    """Return a table of names and values, without those that are empty."""
    known = {short(name, 80): short(value, 1000) for name, value in values.items() if value}
    rows = (make("tr", make("th", n), make("td", v)) for n, v in known.items())
    return make("table", *rows, class_="facts")

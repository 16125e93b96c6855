"""A page in one file of at most a megabyte: no script, nothing that is loaded from elsewhere.

All text is foreign: xml.etree escapes it, and control characters and secrets do not get here.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from ...engine.errors import printable, printable_lines, without_secrets
from ..plot.curves import Group
from ..plot.panels import draw

Element = ElementTree.Element

MOST_BYTES = 1_000_000
MOST_NAMED = 60  # of the parts that are left out
MOST_PANELS = 24
MOST_POINTS = 600  # of the curves of a panel
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { --ink: #1f2933; --soft: #62707f; --line: #dfe4ea; --pale: #f5f7f9; color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem clamp(1rem, 4vw, 3rem); max-width: 1400px; color: var(--ink);
  background: #fff; font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  display: grid; gap: .75rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
body > * { grid-column: 1 / -1; margin: 0; min-width: 0; overflow-wrap: anywhere; }
body > figure { grid-column: auto; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.35rem; margin-top: 2.5rem;
  padding-top: 1.25rem; border-top: 3px solid var(--line); }
h3 { font-size: 1.05rem; margin-top: 1.25rem; }
img { display: block; max-width: 100%; height: auto; } figure.curve img { width: 100%; }
figcaption, small, .soft { color: var(--soft); font-size: .85rem; }
.status { display: inline-block; padding: .05rem .65rem; border-radius: 1rem; font-size: .9rem;
  font-weight: 600; white-space: nowrap; color: #fff; background: #8a6100; vertical-align: middle; }
.finished { background: #18794e; } .running { background: #1b62b5; }
.failed, .lost, .stuck { background: #b42318; }
.numbers { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 150px), 1fr)); }
.numbers div { padding: .6rem .8rem; border-radius: .5rem; background: var(--pale); }
.numbers b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .35rem .8rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } thead th { white-space: nowrap; }
table.facts th { width: 12rem; }
pre { margin: 0; padding: .8rem; border-radius: .5rem; background: var(--pale); font-size: .78rem;
  line-height: 1.45; white-space: pre-wrap; }
summary { cursor: pointer; padding: .3rem 0; } a { color: inherit; }
i { display: inline-block; width: 1.6rem; height: .25rem; margin: 0 .4rem .2rem 0; }
.legend span { display: inline-block; margin-right: 1.4rem; }
@media (max-width: 640px) {
  body { padding: 1rem; } table.facts th { width: 7.5rem; }
  .runs thead { display: none; }
  .runs td { display: flex; gap: 1rem; justify-content: space-between; border: 0; padding: 0; }
  .runs td:first-child { font-weight: 600; border-top: 1px solid var(--line); padding-top: .6rem; }
  .runs td:empty { display: none; }
  .runs td:not(:first-child)::before { content: attr(data-name); flex: none; color: var(--soft); }
}
@media print {
  body { padding: 0; font-size: 11px; grid-template-columns: 1fr 1fr; }
  figure, tr, .numbers div { break-inside: avoid; } h1, h2, h3 { break-after: avoid; }
  pre, .numbers div, .status { print-color-adjust: exact; }
}
"""


class Marks(NamedTuple):
    """The x axis of a panel, and what is marked on it: stops, and spans of training."""

    x: str = "step"
    stops: Sequence[float] = ()
    spans: Sequence[tuple[float, float]] = ()


class Page:
    """Collects parts, the important ones first, as long as there is room.

    Attributes:
        left_out: the names of the parts that found no room.
    """

    def __init__(self, title: str) -> None:
        self.parts: list[tuple[tuple[int, ...], str]] = []
        self.title, self.left_out = title, list[str]()
        self.room = MOST_BYTES - len(self.text().encode()) - MOST_NAMED * 1000

    def add(self, place: tuple[int, ...], name: str, *elements: Element) -> bool:
        """Add elements if there is room for all; return whether there was.

        Args:
            place: on the page, by order. name: for the reader, if it is left out.
        """
        text = "".join(ElementTree.tostring(x, "unicode", method="html") for x in elements)
        if len(text.encode()) > self.room:
            self.left_out.append(short(name, 80))
            return False
        self.room -= len(text.encode())
        self.parts.append((place, text))
        return True

    def add_panel(
        self,
        place: tuple[int, ...],
        name: str,
        groups: Sequence[Group],
        metrics: Sequence[str],
        marks: Marks,
    ) -> None:
        """Add curves as a picture that is sharp at any size, up to MOST_PANELS of them.

        Args:
            place: whose last number counts the panels. name: the panel's title.
        """
        if place[-1] >= MOST_PANELS:
            self.left_out.append(short(name, 80))
            return
        file = BytesIO()
        look = matplotlib.rc_context(
            {
                "axes.spines.right": False,
                "axes.spines.top": False,
                "axes.titlesize": 10,
                "font.size": 9,
                "svg.fonttype": "none",  # a third smaller than with the outlines of letters
                "text.parse_math": False,
            }
        )
        with look:
            drawn = Figure(figsize=(4.8, 2.9), layout="constrained")
            axes = drawn.add_subplot(title=short(name, 50))
            draw(axes, groups, metrics, marks.x, most=max(MOST_POINTS // len(groups), 10))
            for begin, end in marks.spans:
                axes.axvspan(begin, end, color="#8895a7", alpha=0.15, linewidth=0)
            for stop in marks.stops:
                axes.axvline(stop, color="#b42318", linestyle=":", linewidth=1.2)
            drawn.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
        shown = picture(file.getvalue(), "svg+xml", short(name, 80))
        self.add(place, name, make("figure", shown, class_="curve"))

    def text(self) -> str:
        """Return the page as HTML."""
        head = make(
            "head",
            make("meta", charset="utf-8"),
            make("meta", http_equiv="Content-Security-Policy", content=POLICY),
            make("meta", name="viewport", content="width=device-width, initial-scale=1"),
            make("title", self.title),
            make("style", STYLE),
        )
        body = "".join(text for _, text in sorted(self.parts, key=lambda part: part[0]))
        if self.left_out:
            more = len(self.left_out) - MOST_NAMED
            named = ", ".join(self.left_out[:MOST_NAMED])
            named += f" and {more} more" if more > 0 else ""
            note = make("p", f"Left out, to stay below a megabyte: {named}.", class_="soft")
            body += ElementTree.tostring(note, "unicode", method="html")
        top = ElementTree.tostring(head, "unicode", method="html")
        return f"<!doctype html>\n<html lang='en'>{top}<body>\n{body}</body></html>\n"


def make(tag: str, *content: Element | str, **attributes: str) -> Element:
    """Return an element; texts are shown as they are."""
    made = Element(tag)
    for name, value in attributes.items():  # class and http-equiv are no names in Python
        made.set(name.rstrip("_").replace("_", "-"), printable(value))
    for each in content:
        if isinstance(each, Element):
            made.append(each)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + clean(each)
        else:
            made.text = (made.text or "") + clean(each)
    return made


def clean(text: str) -> str:
    """Return a text without secrets, and with control characters escaped."""
    return printable_lines(without_secrets(text))


def short(value: object, most: int = 300) -> str:
    """Return a value as text, a float with five digits, without the middle if it is long."""
    text = "?"
    with suppress(ValueError):  # an integer of thousands of digits
        text = f"{value:.5g}" if isinstance(value, float) else without_secrets(str(value))
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def picture(content: bytes, kind: str, alt: str = "") -> Element:
    """Return an element that holds a picture."""
    made = make("img", alt=alt)
    made.set("src", f"data:image/{kind};base64,{b64encode(content).decode()}")
    return made


def facts(values: Mapping[str, object]) -> Element:
    """Return a table of names and values, without those that are empty."""
    rows = [
        make("tr", make("th", short(name, 80)), make("td", short(value)))
        for name, value in values.items()
        if value not in (None, "")
    ]
    return make("table", *rows, class_="facts")

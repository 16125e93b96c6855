"""Record a real `copier copy` of this template, as a moving picture for README.md.

    .venv/bin/python scripts/record.py docs/copy.svg

tests/slurm/test_docs.py records a job on a cluster with it. The keys are pressed in a shell that
runs in a pseudo-terminal. This file decides only how long each screen is shown. The picture is an
SVG with CSS animations, without JavaScript and without fonts. A reader who asks the browser for
less motion sees the last screen.
"""

import os
import sys
import tempfile
import time
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pexpect

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from renderer import copy_template
from terminal import CLEAR, COLUMNS, DOWN, END_OF_TEXT, ENTER, LINES, Terminal, head

KEY, READ, LONG, END = 0.05, 0.8, 2.5, 5.0  # seconds for a key, a question, a page, the last screen
QUIET = 0.1  # seconds without output after which a screen is complete
PROMPT = "$ "
# The quick questions in their order, and the keys that answer them.
ANSWERS = {
    "setup": [ENTER],
    "project_name": [*"Digits", ENTER],
    "launch_modes": [ENTER],
    "gpus_per_node": [ENTER],
    "time_limit": [CLEAR, *"12:00:00", ENTER],
    "partition": [*"gpu", ENTER],
    "account": [*"proj-0042", ENTER],
    "modules": [*"python/3.12", ENTER, END_OF_TEXT],
    "trackers": [DOWN, " ", ENTER],
    "example": [ENTER],
}
LOOK = ("cd my-project", "ls", "grep '^#SBATCH' slurm/train_multi_node.sbatch")

CELL, ROW, MARGIN, BASE = 8.4, 18, 16, 13  # of a character in pixels; BASE is its baseline
WIDTH = COLUMNS * CELL + 2 * MARGIN
WHITE, COLOURS = "#e6edf3", {"brightblack": "#8b949e", "green": "#56d364", "brown": "#e3b341"}
PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" \
width="{width:g}" height="{height:g}">
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;\
white-space:pre}}
[class]{{animation:{seconds:g}s step-end infinite}}
{styles}@media(prefers-reduced-motion:reduce){{[class]{{animation:none!important}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="#161b22"/>
<svg x="{margin}" y="{margin}">
{body}<rect class="cursor" width="{cell}" height="{row}" fill="#e6edf3" opacity=".5"/>
</svg>
</svg>
"""


class Screen(NamedTuple):
    """The second at which a screen appears, its lines as SVG, its cursor's column and line."""

    start: float
    lines: list[str]
    cursor: tuple[int, int]


class Recorder(Terminal):
    """A terminal that keeps its screens, and how long (in seconds) each is to be shown."""

    def __init__(self, *command: object) -> None:
        super().__init__(*command)
        self.screens: list[Screen] = []
        self.now = 0.0

    def keep(self, seconds: float) -> None:
        """Show the screen as it is for a time."""
        cursor = self.screen.cursor
        place = (-9, 0) if cursor.hidden else (cursor.x, cursor.y)
        self.screens.append(Screen(self.now, [*map(self.draw_line, range(LINES))], place))
        self.now += seconds

    def draw_line(self, number: int) -> str:
        """Return a line of the screen as SVG: a text for neighbouring characters of one colour."""
        drawn, column = "", 0
        cells = [self.screen.buffer[number][each] for each in range(COLUMNS)]
        # Copier's microphone has two columns, and so a text of its own.
        for (colour, _), group in groupby(cells, lambda cell: (cell.fg, cell.data.isascii())):
            data = [cell.data for cell in group]
            text = "".join(data).rstrip()
            width = CELL * (len(data) if data[-1].strip() else len(text))
            place = (
                f'x="{CELL * column:g}" textLength="{width:g}" fill="{COLOURS.get(colour, WHITE)}"'
            )
            drawn += f"<text {place}>{escape(text, quote=False)}</text>" if text else ""
            column += len(data)
        return drawn

    def settle(self, seconds: float) -> None:
        """Show what is printed, five screens a second, and what is there at the end for a time."""
        kept = time.monotonic()
        while True:
            try:
                self.stream.feed(self.child.read_nonblocking(4096, timeout=QUIET))
            except pexpect.TIMEOUT:
                return self.keep(seconds)
            if time.monotonic() - kept > 0.2:
                self.keep(0.1)
                kept = time.monotonic()

    def press(self, *keys: str) -> None:
        """Press keys one after the other, each of which changes the screen."""
        for key in keys:
            self.type(key)
            self.read()
            self.settle(KEY)

    def run(self, command: str, seconds: float = READ) -> None:
        """Type a command, and show for a time what it prints."""
        self.press(*command)
        self.type(ENTER)
        self.read()
        self.settle(seconds)


def record(folder: Path) -> list[Screen]:
    """Copy the template to a new folder, make a project from it there, and return the screens."""
    copy_template(folder / "copier-slurm-ddp")
    (folder / "settings.yml").write_text("{}\n")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    user = {"PATH": programs, "PS1": PROMPT, "COPIER_SETTINGS_PATH": folder / "settings.yml"}
    variables = [f"{name}={value}" for name, value in user.items()]
    terminal = Recorder("env", f"--chdir={folder}", *variables, "bash", "--norc", "--noprofile")
    terminal.wait_for(PROMPT)
    terminal.settle(READ)
    terminal.press(*"copier copy copier-slurm-ddp my-project")
    terminal.type(ENTER)
    for name, keys in ANSWERS.items():
        terminal.wait_for(head(name))
        terminal.settle(READ)
        terminal.press(*keys[:-1])
        terminal.settle(READ / 3)
        terminal.type(keys[-1])
    terminal.wait_for("create ")
    terminal.settle(0)
    terminal.wait_for(f"\n{PROMPT}")
    terminal.settle(LONG)
    for command in LOOK:
        terminal.run(command)
    terminal.child.close()
    return terminal.screens


def moving(name: str, moves: list[tuple[float, str]], seconds: float) -> str:
    """Return CSS that moves something at some seconds, and leaves it at the last place."""
    steps = "".join(f"{at / seconds:.2%}{{transform:translate({to})}}" for at, to in moves)
    last = f"transform:translate({moves[-1][1]})"
    return f"@keyframes {name}{{{steps}}}.{name}{{animation-name:{name};{last}}}\n"


def draw(screens: list[Screen]) -> str:
    """Return screens as an SVG, which begins with the last one for those who look for a moment.

    A line of the screen is a window onto a column of all texts that it ever shows. The animation
    moves the column, so a text is drawn once, however many screens show it.
    """
    moved = [screen._replace(start=screen.start + END) for screen in screens]
    screens = [screens[-1]._replace(start=0.0), *moved]
    seconds = screens[-1].start + END
    used = 1 + max(number for screen in screens for number in range(LINES) if screen.lines[number])
    styles = body = ""
    for number in range(used):
        column: dict[str, int] = {}
        moves: list[tuple[float, str]] = []
        for screen in screens:
            place = column.setdefault(screen.lines[number], len(column))
            if not moves or moves[-1][1] != f"0,{-ROW * place}px":
                moves.append((screen.start, f"0,{-ROW * place}px"))
        styles += moving(f"l{number}", moves, seconds)
        window = f'<svg y="{ROW * number}" width="{WIDTH:g}" height="{ROW}"><g class="l{number}">'
        for line, at in column.items():
            window += line.replace("<text", f'<text y="{ROW * at + BASE}"')
        body += f"{window}</g></svg>\n"
    cursors = [f"{CELL * x:g}px,{ROW * y}px" for _, _, (x, y) in screens]
    starts = [screen.start for screen in screens]
    styles += moving("cursor", [*zip(starts, cursors, strict=True)], seconds)
    sizes = {"width": WIDTH, "height": used * ROW + 2 * MARGIN, "margin": MARGIN}
    sizes |= {"cell": CELL, "row": ROW}
    return PICTURE.format(seconds=seconds, styles=styles, body=body, **sizes)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: expected: record.py FILE")
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).write_text(draw(record(Path(scratch))), "utf-8")

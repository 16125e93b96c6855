"""Commands and files in Markdown pages, for the tests that run them."""

import re
from dataclasses import dataclass
from pathlib import Path

from renderer import TEMPLATE

BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The complete examples of docs/own-model.md, and flags for a small one.
EXAMPLES = {
    "A GAN": ("--width=16", "--max-steps=200"),
    "Fine-tuning with transformers": ("--width=8", "--max-steps=80"),
    "Segmentation": ("--channels=4", "--max-steps=80"),
}


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        line: as it is typed.
        needs: what it needs that the tests lack, as in "(needs a GPU)"; else empty.
    """

    line: str
    needs: str = ""


def commands(text: str) -> list[Command]:
    """Return the commands of a page's ```bash blocks, in their order."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", "").splitlines():
            command, _, comment = re.sub(r"(^|\s+)# ", "\0", line, count=1).partition("\0")
            needs = re.search(r"\(needs (.+?)\)", comment)
            if command:
                found.append(Command(" ".join(command.split()), needs[1] if needs else ""))
    return found


def links(text: str) -> list[str]:
    """Return where a page's links point to, but for those to other sites."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not target.startswith("https://")]


def anchors(text: str) -> set[str]:
    """Return the names of a page's headings, as links have them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def put_example(project: Path, title: str) -> Path:
    """Write the files of an example of a page to a project `demo`, and return it."""
    _, part = (TEMPLATE / "docs/own-model.md").read_text("utf-8").split(f"\n### {title}\n")
    for name, block in BLOCK.findall(re.split("^##", part, flags=re.MULTILINE)[0]):
        path = project / name.replace("<package>", "demo")
        above, below, _ = path.read_text().partition("\ndataset:")
        path.write_text(f"{above}\n{block}" if below and path.suffix == ".yaml" else block)
    return project

"""Reads commands and files from Markdown pages, for the tests that run them."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The complete examples of docs/examples.md, and flags for a small one.
EXAMPLES = {
    "A GAN": ("--width=16", "--max-steps=200"),
    "Fine-tuning with transformers": ("--width=8", "--max-steps=80"),
    "Segmentation": ("--channels=4", "--max-steps=80"),
}


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        line: the command as a user types it.
        needs: what it needs and the tests lack, such as "a GPU" from "(needs a GPU)", or "".
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
    """Return the targets of a page's links, without links to other sites."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not target.startswith("https://")]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, title: str) -> str:
    """Return the text of a page below a heading of the second level."""
    _, part = page.read_text("utf-8").split(f"\n## {title}\n")
    return part.partition("\n## ")[0]


def put_hook(project: Path) -> Path:
    """Add the hook in a project's docs/hooks.md to its model.py; return the project."""
    page = section(project / "docs/hooks.md", "An example")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    imports, method = example.split("\n\nclass Model(Learner):\n    ...\n")
    (path,) = project.glob("src/*/model.py")
    above, below = path.read_text().split("class Model(Learner):\n")
    above = above.replace("from .learner import", f"{imports}from .learner import")
    path.write_text(f"{above}class Model(Learner):\n{method}\n{below}")
    return project


def put_example(project: Path, title: str) -> Path:
    """Write the files of an example in a project's page to the project; return the project."""
    for name, block in BLOCK.findall(section(project / "docs/examples.md", title)):
        path = project / name
        above, below, _ = path.read_text().partition("\ndataset:")
        path.write_text(f"{above}\n{block}" if below and path.suffix == ".yaml" else block)
    return project


# The import that docs/recipes.md asks for.
HOOKS = "from .engine import Training\n"


@dataclass(frozen=True)
class Recipe:
    """A section of a project's docs/recipes.md or docs/data.md.

    Attributes:
        text: text of the section without its heading.
        project: the project `demo` that contains the page.
    """

    text: str
    project: Path

    def blocks(self, language: str) -> list[str]:
        """Return the code blocks in a language, in their order."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)

    def put_code(self, number: int = 0) -> None:
        """Write a block of Python to model.py, as the start of the page says."""
        path = self.project / "src/demo/model.py"
        path.write_text(with_code(path.read_text(), HOOKS + self.blocks("python")[number]))

    def put_data(self, old: str = "", new: str = "") -> None:
        """Write the blocks to data.py and settings.py, and change a text of `load`."""
        data, settings = (self.project / "src/demo" / name for name in ("data.py", "settings.py"))
        for block in self.blocks("python"):
            first, _, code = block.partition("\n")
            if first.endswith("settings.py"):
                text = settings.read_text()
                before, line, after = text.partition("    dataset: str")
                settings.write_text(f"{before}{code}{line}{after}")
            else:
                imports, _, code = ("\n" + block).rpartition("\n\n\n")
                text = data.read_text().replace("import Dataset\n", "import Dataset, Subset\n")
                above, below = text.split("\n\ndef load(")
                above = above.replace("from . import mnist", f"{imports}\nfrom . import mnist")
                data.write_text(f"{above}\n\n{code}\n\ndef load({below}")
        text = data.read_text()
        assert old in text, old
        data.write_text(text.replace(old, new))


def recipe(project: Path, heading: str, page: str = "recipes") -> Recipe:
    """Return a recipe of a project."""
    return Recipe(section(project / f"docs/{page}.md", heading), project)


def with_code(module: str, block: str) -> str:
    """Return a model.py with a block added: methods go into `Model`, other code goes above it."""
    methods, rest = {}, []
    for node in ast.parse(block).body:
        text = ast.get_source_segment(block, node) or ""
        if isinstance(node, ast.FunctionDef) and node.args.args[0].arg == "self":
            methods[node.name] = "\n" + re.sub("(?m)^(?=.)", "    ", text)
        else:
            rest.append(text)
    lines = module.splitlines()
    (model,) = (node for node in ast.parse(module).body if getattr(node, "name", "") == "Model")
    for node in reversed(model.body):
        if isinstance(node, ast.FunctionDef) and node.name in methods:
            del lines[node.lineno - 1 : node.end_lineno]
    lines[model.lineno - 1 : model.lineno - 1] = [*rest, ""]
    return "\n".join([*lines, *methods.values(), ""])

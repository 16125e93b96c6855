"""Write the installed versions to constraints.txt. `make setup` then installs the same versions.

Local versions, such as +cpu, are left out, so that the file fits every build of PyTorch. Packages
of conda are left out too, because pip must not replace them.
"""

import json
import re
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

FILE = Path("constraints.txt")
HEAD = """\
# The installed versions, written by `make lock`. `make setup` installs the same versions.
# To update them, empty this file and run `make clean-env setup lock`.
"""
# They come with Python, not with the project.
TOOLS = {"pip", "setuptools", "wheel"}


def installed() -> dict[str, str]:
    """Return the versions of packages that pip or uv installed, by name, without the project."""
    versions = {}
    for package in distributions(path=list({*map(sysconfig.get_path, ("purelib", "platlib"))})):
        installer = (package.read_text("INSTALLER") or "").strip()
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        if installer != "conda" and name not in TOOLS and not origin.get("dir_info"):
            versions[name] = package.version.partition("+")[0]
    return versions


if __name__ == "__main__":
    lines = [f"{name}=={version}\n" for name, version in sorted(installed().items())]
    FILE.write_text(HEAD + "".join(lines), encoding="utf-8")
    print(f"{FILE}: {len(lines)} packages")

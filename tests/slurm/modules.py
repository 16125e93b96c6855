"""Both module systems on the test cluster, from Debian's packages, with modules for the tests.

A module system is mounted over /usr and /etc, only in the namespaces of the cluster. Over this, a
folder with modules is mounted where the module system looks by default.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .cluster import Cluster
from .conftest import MakeProject
from .jobs import Job, Project

SYSTEMS = Path("/var/lib/module-systems")  # from scripts/install-modules.sh
TCL = {
    "demo-tool/1.0": "conflict demo-tool\nprepend-path PATH /etc/tools/1.0",
    "demo-tool/2.0": "conflict demo-tool\nprepend-path PATH /etc/tools/2.0",
    "python/3.12": "setenv DEMO_PYTHON 3.12\nprepend-path PYTHONPATH /no/packages",
    # It loads another module before it fails.
    "broken/1.0": 'module load python/3.12\nputs stderr "no licence today"\nexit 1',
    "rival/1.0": "conflict demo-tool",
    "needy/1.0": "prereq absent-tool/1.0",
    "kept/1.0": "module-tag sticky kept\nsetenv DEMO_KEPT yes",
}
LUA = {
    "demo-tool/1.0": 'prepend_path("PATH", "/etc/tools/1.0")',
    "demo-tool/2.0": 'prepend_path("PATH", "/etc/tools/2.0")',
    "kept/1.0": 'add_property("lmod", "sticky")\nsetenv("DEMO_KEPT", "yes")',
}
# Instead of a project's Python: it prints what a rank finds.
PROBE = """#!/bin/bash
[[ $1 == --version ]] && exec echo Python 3.12.1
echo "found $(hostname) $(demo-tool) ${LOADEDMODULES:-none} kept=$DEMO_KEPT" \\
    "packages=${PYTHONPATH#$CODE_DIR/} scratch=$SCRATCH"
"""


def missing(system: str) -> str | None:
    """Return why a module system can't be tested here, or None if it can."""
    found = (SYSTEMS / system).is_dir()
    return None if found else f"{system} is needed: run scripts/install-modules.sh"


def write(folder: Path, files: Mapping[str, str], ending: str = "") -> None:
    """Write modulefiles: in Lua if the ending is .lua, or else in Tcl."""
    for name, text in files.items():
        path = folder / f"{name}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" if ending else f"#%Module1.0\n{text}\n")


@contextmanager
def installed(cluster: Cluster, system: str, folder: Path) -> Iterator[None]:
    """Install a module system on all nodes of a cluster, with the modules of the tests."""
    site = folder / "etc"
    write(site / system / "modules", TCL)
    if system == "lmod":
        write(site / system / "modules", LUA, ".lua")
    for version in ("1.0", "2.0"):
        tool = site / "tools" / version / "demo-tool"
        tool.parent.mkdir(parents=True)
        tool.write_text(f"#!/bin/sh\necho demo-tool {version}\n")
        tool.chmod(0o755)
    usr, etc = (f"{SYSTEMS / system}/{top}:/{top}" for top in ("usr", "etc"))
    everywhere(
        cluster,
        f"mount -t overlay overlay -o lowerdir={usr} /usr",
        f"mount -t overlay overlay -o lowerdir={site}:{etc} /etc",
        f"mount --bind {cluster.folder}/hosts /etc/hosts",
    )
    try:
        yield
    finally:
        everywhere(cluster, "umount --lazy /etc /usr")


def everywhere(cluster: Cluster, *commands: str) -> None:
    """Run commands on the login node, and then on all other nodes."""
    shell = ("bash", "-euc", "\n".join(commands))
    cluster.run(*shell)
    cluster.run("srun", f"--nodes={len(cluster.nodes)}", "--ntasks-per-node=1", *shell)


def probe(make_project: MakeProject, names: str, **answers: object) -> Project:
    """Render a project that loads some modules, whose ranks only print what they find."""
    project = make_project(modules=names, **answers)
    python = project.root / ".venv/bin/python"
    python.unlink()
    python.write_text(PROBE)
    python.chmod(0o755)
    return project


def found_by_ranks(job: Job) -> list[str]:
    """Return what the ranks of a probe print, in the order of their nodes."""
    assert job.wait().state == "COMPLETED", job.log
    return sorted(re.findall(r"^\d: found (.*)$", job.log, re.MULTILINE))

"""The commands in the page for support teams, in a login shell with modules."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from renderer import TEMPLATE, copy_template

from . import modules
from .cluster import Cluster

PAGE = TEMPLATE / "docs/for-support-teams.md"
SITE = "/software/slurm-ddp"
ADDRESSES = ("gh:OWNER/copier-slurm-ddp", "https://github.com/OWNER/copier-slurm-ddp")
COPY = "copier copy $SLURM_DDP_TEMPLATE "


def released(folder: Path) -> str:
    """Make a repository of the template, with three versions; return its address."""
    copy_template(folder)
    git = ("git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-C", str(folder))
    subprocess.run([*git, "init", "--quiet"], check=True)
    for version in ("1.0.0", "1.1.0", "1.2.0"):
        with (folder / "template/LICENSE.jinja").open("a") as file:
            file.write(f"\nSo it is in version {version}.\n")
        subprocess.run([*git, "add", "--all"], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", version], check=True)
        subprocess.run([*git, "tag", f"v{version}"], check=True)
    return str(folder)


@pytest.mark.shows(
    "python3 probe_cluster.py --site *",
    "python3 -m venv /software/*",
    "mkdir /software/*",
    "ln -s *",
    "chmod -R *",
    "module use /software/*",
    "module load slurm-ddp",
    "copier copy $SLURM_DDP_TEMPLATE my-project",
    "git clone --bare *",
    "git -C *",
)
@pytest.mark.parametrize(
    "system", ["environment-modules", pytest.param("lmod", marks=pytest.mark.slow)]
)
def test_the_commands_of_the_page(cluster: Cluster, system: str, tmp_path: Path) -> None:
    if reason := modules.missing(system):
        pytest.skip(reason)
    site, mirror = tmp_path / "ddp", tmp_path / "ddp/template.git"
    address = released(tmp_path / "template")
    # The tests have Copier already, and nobody is here to answer.
    copier = shutil.which("copier", path=str(Path(sys.executable).parent))
    changed = {
        f"{SITE}/copier/bin/pip install copier": f"ln -s {copier} {SITE}/copier/bin/copier",
        "python3 -m venv": f"{sys.executable} -m venv --without-pip",
        "python3 probe": f"{sys.executable} {TEMPLATE}/hooks/probe",
        COPY: f"{COPY}--defaults --quiet ",
        SITE: str(site),
        **dict.fromkeys(ADDRESSES, address),
    }

    def type(text: str, *arguments: object) -> str:
        """Return what lines print in a login shell."""
        for old, new in changed.items():
            text = text.replace(old, new)
        command = ("bash", "-elc", text, "bash", *map(str, arguments))
        done = cluster.run(*command, cwd=tmp_path, check=False)
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        return done.stdout

    def recorded(project: str) -> dict[str, object]:
        return yaml.safe_load((tmp_path / project / ".copier-answers.yml").read_text())

    use = f"module use {SITE}/modulefiles\nmodule load slurm-ddp\n"
    folder = tmp_path / "system"
    folder.mkdir()
    with modules.installed(cluster, system, folder):
        blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        for block in blocks:
            # tests/slurm/test_acceptance.py has those of a project.
            own = [line for line in block.splitlines() if not line.startswith("make ")]
            lines = [line for line in own if "(needs " not in line]
            at_a_tag = [line for line in lines if line.startswith("git -C")]
            type("\n".join(line for line in lines if line not in at_a_tag))
            for line in at_a_tag:
                # Users of a mirror get its version, and the next when it comes there.
                for module in (site / "modulefiles/slurm-ddp").iterdir():
                    module.write_text(module.read_text().replace(address, str(mirror)))
                type(f"{use}{COPY}mirrored")
                commit = "git -c user.name=T -c user.email=t@example.org commit --quiet -m First"
                type(f"cd mirrored\ngit init --quiet\ngit add --all\n{commit}")
                before = recorded("mirrored")
                # What is recorded comes before what the site answers now.
                settings = (site / "settings.yml").read_text()
                given = yaml.safe_load(settings)["defaults"]
                (site / "settings.yml").write_text(
                    settings.replace('"01:00:00"', '"02:00:00"') + "  reservation: course\n"
                )
                type(line)
                type(f"{use}cd mirrored\ncopier update --defaults --quiet")
                after = recorded("mirrored")
                assert (before["_commit"], after["_commit"]) == ("v1.0.0", "v1.1.0")
                assert {**before, "_commit": "v1.1.0"} == after
                assert "version 1.1.0." in (tmp_path / "mirrored/LICENSE").read_text()
    assert recorded("mirrored")["_src_path"] == str(mirror)
    theirs = recorded("my-project")
    assert (theirs["_commit"], theirs["_src_path"]) == ("v1.2.0", address)
    changed_since = yaml.safe_load((site / "settings.yml").read_text())["defaults"]
    assert changed_since == {**given, "time_limit": "02:00:00", "reservation": "course"}
    assert {name: theirs[name] for name in given if name in theirs} == {
        name: value for name, value in given.items() if name in theirs
    }
    assert given["memory_scope"] == "cpu"  # not the template's own default

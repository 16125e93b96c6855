"""The probe with the output of other versions of Slurm.

The files in tests/recorded have the answers of real clusters with these versions and slurmdbd.
Lines of the configuration that the probe does not read were removed. Version 20.11 is from Debian
11, 24.11 from Debian 13, and 26.05 from Debian unstable.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from renderer import TEMPLATE, Renderer, copy_template

PROBE = TEMPLATE / "hooks" / "probe_cluster.py"
RECORDED = TEMPLATE / "tests" / "recorded"
# Prints what was recorded of exactly this command.
REPLAY = r"""#!/bin/sh
awk -v asked="$ ${0##*/} $*" '/^\$ /{on = $0 == asked; known += on; next} on
END{exit !known}' "$RECORDED"
"""
EXPECTED = {
    "launch_modes": ["cpu", "single_node", "multi_node"],
    "partition": "gpu",
    "cpu_partition": "",
    "gpus_per_node": 4,
    "gpu_type": "a100",
    "cpus_per_task": 16,
    "memory": "",
    "time_limit": "01:00:00",
    "account": "physics",
    "qos": "gpu",
    "requeue": True,
    "site_script": "",
}
SLINGSHOT = "export NCCL_SOCKET_IFNAME=hsn"
Ask = Callable[..., tuple[str, dict[str, object]]]


def run(folder: Path, path: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the probe in a folder, as the user ada."""
    return subprocess.run(
        [sys.executable, PROBE, *arguments],
        cwd=folder,
        env={"HOME": str(folder), "PATH": path, "LOGNAME": "ada"} | env,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Return what runs the probe on a recording, and returns the file and its answers.

    The recording can be changed: `changes` are pairs of an old and a new text.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sinfo", "scontrol", "sacctmgr", "sbatch", "srun"):
        (tools / name).write_text(REPLAY)
        (tools / name).chmod(0o755)

    def ask_recording(
        release: str, *changes: tuple[str, str], **env: str
    ) -> tuple[str, dict[str, object]]:
        text = (RECORDED / f"slurm-{release}.txt").read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        recording = tmp_path / "recording"
        recording.write_text(text)
        path = f"{tools}:/usr/bin:/bin:/usr/sbin"
        done = run(tmp_path, path, "cluster.yml", RECORDED=str(recording), **env)
        assert done.returncode == 0, done.stderr
        written = (tmp_path / "cluster.yml").read_text()
        answers = yaml.safe_load(written)
        # These are of this machine, not of the recording.
        return written, {k: v for k, v in answers.items() if k not in ("modules", "environment")}

    return ask_recording


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Renders the template, or raises ValueError where it refuses an answer."""
    return Renderer(copy_template(tmp_path_factory.mktemp("copy") / "template"))


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("probe_cluster", PROBE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("release", ["20.11", "24.11", "26.05"])
def test_every_version_gives_the_same_answers(ask: Ask, release: str, render: Renderer) -> None:
    written, answers = ask(release)
    assert answers == EXPECTED
    for fact in (
        f"Slurm {release}.",
        "cpu*       7-00:00:00  4 node(s), 2 up   48 CPUs",
        "gpu_debug  00:30:00    1 node(s)         124 CPUs     500 GiB       4 a100\n",
        "for the groups lab42)",
        "1 a100 or parts of GPUs                      (not for you: hidden)",
        "accounts hero, QOS ALL)",
        "# gpu: up to 2-00:00:00, MaxCPUsPerNode 96\n",
        "in gpu: 60000 MiB\n",
        "# 2 CPUs are",
        "# JobRequeue 0, PreemptType preempt/partition_prio, PreemptMode REQUEUE\n",
    ):
        assert fact in written
    script = render(answers)["slurm/train_multi_node.sbatch"]
    for line in ("partition=gpu", "account=physics", "qos=gpu", "gres=gpu:a100:4"):
        assert f"#SBATCH --{line}\n" in script


GPU = "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=gpu,long"


@pytest.mark.parametrize(
    ("changes", "expected", "fact"),
    [
        # The partition does not take the user: the next is one whose jobs are stopped for others'.
        (
            [(GPU, GPU.replace("gpu,long", "long"))],
            {"partition": "scavenge", "qos": ""},
            "GraceTime 60 s, ",
        ),
        # One that refuses jobs of several nodes, of one node, or of all of a node's CPUs.
        (
            [("State=UP TotalCPUs=704", "State=DOWN TotalCPUs=704"), ("scavenge\n", "")],
            {"launch_modes": ["cpu", "single_node"], "partition": "gpu_debug"}
            | {"gpu_type": None, "qos": "", "time_limit": "00:30:00"},
            "gpu_debug: up to 00:30:00, MaxNodes 1",
        ),
        (
            [
                ("MinNodes=0 LLN=NO MaxCPUsPerNode=96", "MinNodes=3 LLN=NO MaxCPUsPerNode=20"),
                *[("scavenge\n", ""), ("gpu_debug\n", "")],
            ],
            {"launch_modes": ["cpu", "multi_node"], "nodes": 3, "cpus_per_task": 4},
            "MinNodes 3",
        ),
        (
            [
                ("MaxNodes=UNLIMITED MaxTime=2-00:00:00", "MaxNodes=1 MaxTime=2-00:00:00"),
                ("scavenge\n", ""),
            ],
            {"launch_modes": ["cpu", "single_node"]},
            "gpu: up to 2-00:00:00, MaxNodes 1",
        ),
        # One with less time, but whose jobs nobody stops.
        ([("MaxTime=2-00:00:00", "MaxTime=12:00:00")], {}, "allows up to 12:00:00"),
        # Of a node that is up again, the reason is still there, with words like a fact's.
        (
            [("State=IDLE+DRAIN", "State=IDLE")],
            {},
            "cpu*       7-00:00:00  4 node(s), 3 up    48 CPUs      185 GiB       no GPU\n",
        ),
        # A default of little memory, for jobs without a GPU, or for all.
        (
            [("DefMemPerCPU=3800", "DefMemPerCPU=100")],
            {"memory": "3900M", "memory_scope": "cpu"},
            "without a GPU: 1600 MiB",
        ),
        # The nodes without GPUs take only another QOS of the user.
        (
            [(GPU, GPU.replace("gpu,long", "gpu,normal")), ("AllowQos=ALL", "AllowQos=gpu")],
            {},
            "yours: gpu, normal; ",
        ),
        # Slurm's own value of a node whose memory nobody wrote down.
        (
            [("RealMemory=190000", "RealMemory=1"), ("DefMemPerCPU=3800", "DefMemPerCPU=100")],
            {"memory": ""},
            "know the memory",
        ),
        # Limits of a node.
        (
            [("MaxMemPerNode=UNLIMITED", "MaxMemPerNode=9600"), ("PerCPU=3800", "PerCPU=100")],
            {"memory": "100M", "memory_scope": "cpu"},
            "MaxMemPerNode 9600",
        ),
        (
            [("PerNode=96 MaxCPUsPerSocket=UNLIMITED", "PerNode=96 MaxCPUsPerSocket=16")],
            {"cpus_per_task": 8},
            "MaxCPUsPerNode 96, MaxCPUsPerSocket 16",
        ),
        # Nodes with two types of GPUs, and with other names for parts of GPUs.
        (
            [("Gres=gpu:a100:4(S:0-1)", "Gres=gpu:v100:1(S:0-1),gpu:a100:3(S:0-1)")],
            {"gpus_per_node": 8, "gpu_type": "h100", "cpus_per_task": 12},
            "of each type",
        ),
        (
            [
                ("Gres=gpu:a100:4(S:0-1)", "Gres=gpu:v100:1(S:0-1),gpu:a100:5(S:0-1)"),
                ("gpu:a100_1g.5gb:7", "gpu:A100-MIG-40GB:7"),
            ],
            {"gpus_per_node": 5, "gpu_type": "a100"},
            "1 a100 or parts",
        ),
        ([("CR_CORE_MEMORY", "CR_CORE")], {}, "not count memory"),
        # A time limit of minutes, and no accounting.
        (
            [("MaxTime=2-00:00:00", "MaxTime=00:02:00"), ("scavenge\n", ""), ("gpu_debug\n", "")],
            {"time_limit": "00:02:00"},
            "allows up to 00:02:00",
        ),
        (
            [("$ sacctmgr", "$ nothing"), ("preempt/partition_prio", "preempt/none")],
            {"account": None, "qos": None},
            "PreemptType preempt/none",
        ),
        # Names that the questionnaire refuses.
        (
            [("a100", "3090")],
            {"gpu_type": None},
            "the name 3090\n",
        ),
        (
            [("physics", "phy$ics")],
            {"account": None},
            "the name phy$ics\n",
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else "",
)
def test_odd_sites(
    ask: Ask,
    changes: list[tuple[str, str]],
    expected: dict[str, object],
    fact: str,
    render: Renderer,
) -> None:
    written, answers = ask("24.11", *changes)
    wanted = {k: v for k, v in (EXPECTED | expected).items() if v is not None}
    assert answers == wanted, written
    assert fact in written
    render(answers)  # none is refused


def test_an_old_python_without_modules(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text('PATH="$HOME/old:$PATH"\necho "welcome: python/3.12"\n')
    python = tmp_path / "old" / "python3"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho Python 3.9.2\n")
    python.chmod(0o755)
    written, _ = ask("26.05")
    assert "python3 without a module: 3.9\n" in written and '\nmodules: ""\n' in written
    assert "no Python 3.10" in written


def test_a_user_whom_the_accounting_does_not_know(ask: Ask) -> None:
    written, answers = ask("26.05", LOGNAME="bob")
    assert "account" not in answers
    assert "sacctmgr lists none" in written


def test_a_user_whom_the_system_does_not_know(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert probe.user_name() == "4000000"


INTERFACES = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: eth0    inet 10.1.0.4/16 brd 10.1.255.255 scope global eth0\\       valid_lft forever
5: hsn0    inet 10.253.1.4/16 metric 1000 brd 10.253.255.255 scope global hsn0\\       valid_lft
6: hsn1    inet 10.253.1.5/16 metric 1000 brd 10.253.255.255 scope global hsn1\\       valid_lft
"""


@pytest.mark.parametrize(
    ("shown", "interfaces", "script"),
    [
        (INTERFACES, "eth0 10.1.0.4, hsn0 10.253.1.4, hsn1 10.253.1.5", SLINGSHOT),
        (INTERFACES.replace("hsn", "ib"), "eth0 10.1.0.4, ib0 10.253.1.4, ib1 10.253.1.5", ""),
        (INTERFACES.partition("2:")[0], "none but loopback", ""),
    ],
)
def test_the_network_of_nccl(
    ask: Ask, tmp_path: Path, render: Renderer, shown: str, interfaces: str, script: str
) -> None:
    ip = tmp_path / "bin/ip"
    ip.write_text(f"#!/bin/sh\ncat <<'END'\n{shown}END\n")
    ip.chmod(0o755)
    written, answers = ask("24.11")
    assert f"of this node: {interfaces}\n" in written
    assert f'\nsite_script: "{script}"\n' in written
    assert answers["site_script"] == script
    assert script in render(answers)["slurm/site.sh"]


def test_the_network_without_ip(ask: Ask, tmp_path: Path) -> None:
    """As where it is not in the PATH of users."""
    ip = tmp_path / "bin/ip"
    ip.write_text("#!/bin/sh\nexit 127\n")
    ip.chmod(0o755)
    written, _ = ask("24.11")
    found = re.search("of this node: (.*)\n", written)
    up = [
        path.name
        for path in Path("/sys/class/net").iterdir()
        if path.name != "lo" and (path / "operstate").read_text() != "down\n"
    ]
    assert found and found[1] == (", ".join(sorted(up)) or "none but loopback")


def test_an_empty_value_does_not_swallow_the_next_line(ask: Ask) -> None:
    written, _ = ask("24.11", ("\nPreemptMode", "\nPowerPlugin             = \nPreemptMode"))
    assert "PreemptMode REQUEUE" in written


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu", {"": 1}),
        ("gpu:a100:4(S:0-1),shard:8", {"a100": 4}),
        ("lustre:1,gpu:tesla:2(S:0),gpu:kepler:2(S:0,1)", {"tesla": 2, "kepler": 2}),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", {"nvidia_h100_80gb_hbm3": 8}),
        ("gpu:a100_1g.5gb:7,gpu:a100:1", {"a100": 1}),
        ("gpu:1g.5gb:7", {}),
        ("gpu:tesla:no_consume:2", {"tesla": 2}),
    ],
)
def test_gpus_of_a_node(probe: ModuleType, gres: str, gpus: dict[str, int]) -> None:
    assert probe.gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("limit", "minutes"), [("2-00:30:00", 2910), ("00:30:00", 30), ("UNLIMITED", float("inf"))]
)
def test_limits_of_time(probe: ModuleType, limit: str, minutes: float) -> None:
    assert probe.minutes(limit) == minutes


def test_a_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "cluster.yml").write_text("mine\n")
    done = run(tmp_path, os.environ["PATH"])
    assert done.returncode == 1
    assert "cluster.yml exists" in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "cluster.yml").read_text() == "mine\n"


def test_without_slurm(tmp_path: Path) -> None:
    done = run(tmp_path, str(tmp_path))
    assert done.returncode == 1
    assert "scontrol is missing" in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_slurms_controller(tmp_path: Path) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    done = run(tmp_path, f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 1
    assert "shows no nodes" in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tool]


def test_an_old_python_can_read_it() -> None:
    ast.parse(PROBE.read_text(), feature_version=(3, 6))


OF_A_SITE = """\
# Answers about a cluster.
# Change what you know better. If you delete an answer, Copier asks or takes its default.

author_name: |-
  Ada

  Lovelace
# The partition that has GPUs.
partition: gpu # the fast one

# yours: physics
# Slurm requires an account here
account: "physics"

# yours: gpu; the default is not set
qos: "gpu"
constraint: a100
modules:
- cuda/12.4
trackers: [mlflow,
  aim]
"""
SETTINGS = """\
defaults:
  setup: quick # `copier copy --data setup=full` asks all questions
  # Answers about a cluster.

  # The partition that has GPUs.
  partition: gpu # the fast one

  constraint: a100
  modules:
  - cuda/12.4
  trackers: [mlflow,
    aim]
"""


def test_settings_of_a_site_leave_out_what_belongs_to_a_person(tmp_path: Path) -> None:
    (tmp_path / "answers.yml").write_text(OF_A_SITE)
    done = run(tmp_path, "/nowhere", "--site", "shared/ddp", "answers.yml")
    assert (done.returncode, done.stderr) == (0, "")
    site = tmp_path / "shared/ddp"
    assert f"wrote {site}: " in done.stdout
    text = (site / "settings.yml").read_text()
    assert SETTINGS in text and text.endswith("user: author_name, account, qos\n")
    assert yaml.safe_load(text) == {
        "defaults": {
            "setup": "quick",
            "partition": "gpu",
            "constraint": "a100",
            "modules": ["cuda/12.4"],
            "trackers": ["mlflow", "aim"],
        }
    }
    for end in ("", ".lua"):
        module = (site / f"modulefiles/slurm-ddp/1.0{end}").read_text()
        assert f'"{site}/settings.yml"' in module and "SLURM_DDP_TEMPLATE" not in module
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.yml", "shared"]


BLOCKS = """\
---
mail_type:
# those that matter
- END
reservation: course
shared_root: /scratch/ada
site_script: |+ # kept
  export A='x~~
   y' && B=$(ls *.sh)~
  # yours: what a comment says


  account: &p of the text

modules: |
  gcc

""".replace("~", " ")  # spaces at the ends of lines


def test_blocks_of_text_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "answers.yml").write_text(BLOCKS)
    done = run(tmp_path, "/nowhere", "--site", "new", "answers.yml")
    assert (done.returncode, done.stderr) == (0, "")
    written = (tmp_path / "new/settings.yml").read_text()
    given = yaml.safe_load(BLOCKS)
    kept = {name: given[name] for name in ("site_script", "modules")}
    assert yaml.safe_load(written)["defaults"] == {"setup": "quick", **kept}
    assert written.endswith("user: mail_type, reservation, shared_root\n")


@pytest.mark.parametrize("preset", sorted(TEMPLATE.glob("sites/*.yml")), ids=lambda p: p.stem)
def test_each_preset_becomes_settings(tmp_path: Path, preset: Path) -> None:
    done = run(tmp_path, "/nowhere", "--site", "site", str(preset))
    assert done.returncode == 0, done.stderr
    defaults = yaml.safe_load((tmp_path / "site/settings.yml").read_text())["defaults"]
    assert defaults == {"setup": "quick", **yaml.safe_load(preset.read_text())}


def test_a_site_is_probed_without_a_file_of_answers(ask: Ask, tmp_path: Path) -> None:
    written, _ = ask("24.11")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin:/usr/sbin"
    done = run(tmp_path, path, "--site", "site", RECORDED=str(tmp_path / "recording"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "cluster.yml").write_text(f"setup: full\n{written}")
    text = (tmp_path / "site/settings.yml").read_text()
    assert "physics" not in text and "copier copy --data-file" not in text
    defaults = yaml.safe_load(text)["defaults"]
    assert (defaults["partition"], defaults["setup"]) == ("gpu", "quick")
    assert not {"account", "qos"} & set(defaults)
    # The answers may have a wish of their own.
    run(tmp_path, path, "--site", "full", "cluster.yml")
    full = yaml.safe_load((tmp_path / "full/settings.yml").read_text())["defaults"]
    assert full == {**defaults, "setup": "full"}


@pytest.mark.parametrize(
    ("answers", "arguments", "error"),
    [
        ("a: 1\n", ("--site", "there"), "/there exists"),
        ("a: 1\n", ("--site", "a:b"), "/a:b': expected UTF-8"),
        ("a: 1\n", ("--site", "a\udcff"), r"/a\udcff': expected UTF-8"),
        ("a: 1\n", ("--site", ""), "--site: expected the name"),
        ("a: 1\n", ("--site", "new", "--template", "a\nb"), "--template 'a\\nb': expected"),
        ("a: 1\n", ("--site", "new", "--template", "\udcff"), r"--template '\udcff': expected"),
        *(
            (text, ("--site", "new"), f"answers.yml, line {line}: expected {expected}")
            for text, line, expected in (
                ("{a: 1}\n", 1, "NAME: ANSWER, found {a: 1}"),
                ("a: 1\n---\n", 2, "NAME: ANSWER, found ---"),
                (" account: x\n partition: y\n", 1, "NAME: ANSWER, found account: x"),
                ("# About\n- a\n", 2, "NAME: ANSWER, found - a"),
                ("account:\tx\n", 1, "no tab"),
                ("qos: x\npartition: a\0b\n", 2, "no tab"),
                ("partition: a\vb\n", 1, "no tab"),
                ("account: &p gpu\npartition: *p\n", 1, "no anchor (&) and no alias (*)"),
                ("partition: *p\n", 1, "no anchor (&) and no alias (*)"),
                ("modules:\n  - *p\n", 2, "no anchor (&) and no alias (*)"),
                ("trackers: [*p]\n", 1, "no anchor (&) and no alias (*)"),
                ("site_script: |\n  a\n# b\n\n  c\n", 5, "NAME: ANSWER, found c"),
            )
        ),
        (None, ("--site", "new"), "can't read answers.yml (No such file"),
        ("\udcff", ("--site", "new"), "can't read answers.yml (not UTF-8)"),
        ("a: 1\n", ("--site", "file/new"), "/file/new (Not a directory)"),
        ("a: 1\n", ("--template", "x"), "--template needs --site DIR"),
    ],
)
def test_a_site_is_written_whole_or_not_at_all(
    tmp_path: Path, answers: str | None, arguments: tuple[str, ...], error: str
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    if answers is not None:
        (tmp_path / "answers.yml").write_bytes(answers.encode(errors="surrogateescape"))
    before = sorted(tmp_path.rglob("*"))
    done = run(tmp_path, "/nowhere", *arguments, "answers.yml")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert error in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_part_of_a_site(tmp_path: Path) -> None:
    (tmp_path / "answers.yml").write_text("partition: gpu\n")
    probe = (sys.executable, PROBE, "--site", "new", "answers.yml")
    done = subprocess.run(
        # A limit of the size of files stands in for the disk.
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *probe],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    said = f"error: can't write {tmp_path}/new (File too large): name another folder\n"
    assert done.stderr == said
    assert [path.name for path in tmp_path.iterdir()] == ["answers.yml"]

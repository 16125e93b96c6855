#!/usr/bin/env python3
"""Ask a Slurm cluster for the answers to the template's questions.

Run it on a login node, with Python 3.6 or newer. It asks Slurm and the module system, writes one
file, and changes nothing else:

    python3 probe_cluster.py cluster.yml
    copier copy --data-file cluster.yml <address of the template> my-project

Above each answer, the file has the facts that led to it. Copier asks for each answer that was not
found. In the new project, `make doctor` checks the answers.

With --site, it writes to a new folder what all users of a cluster need: Copier's settings, and an
environment module that names them:

    python3 probe_cluster.py --site /software/slurm-ddp cluster.yml
"""

import argparse
import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

TIMEOUT = 60  # seconds for each command
GIB = 1024  # MiB; Slurm counts memory in MiB
MIN_MEMORY = 4 * GIB  # of a rank: PyTorch and a batch of data may not fit in less
MAX_CPUS = 16  # of a rank: more CPUs seldom make data loading faster
UNLIMITED = 10**9
NETWORK = "/sys/class/net"
# Part of a GPU (MIG), such as "1g.5gb" or "a100_2g.20gb". A rank of DDP needs a whole GPU.
MIG = re.compile(r"\d+g\.\d+gb|(?i:mig)")
UNUSABLE = {"DOWN", "DRAIN", "FAIL", "FAILING", "ERROR", "FUTURE", "UNKNOWN", "INVALID_REG"}
VENDORS = {"amd": r"mi\d{2,3}[a-z]?\Z", "intel": r"pvc|max[-_]?1\d{3}"}  # by the type of a GPU
# Answers that differ between the users of a cluster.
PERSONAL = {"account", "mail_user", "author_name", "author_email", "project_name", "package_name"}
PERSONAL |= {"mail_type", "reservation", "shared_root"}
# In a file of answers: characters that YAML does not allow everywhere; an anchor or an alias,
# because the answer with the anchor may be left out; the start of a block of text.
UNPLAIN = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
ALIAS = re.compile(r"(^|: |- |\[|, ?) *[&*]\w")
BLOCK = re.compile(r"(:|-) +[|>][0-9+-]* *( #.*)?$")
# Names that copier.yml accepts. Other names are written as comments.
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/=%-]*\Z"
PATTERNS = dict.fromkeys(["partition", "cpu_partition", "account", "qos"], NAME)
PATTERNS["gpu_type"] = r"(?=[0-9_.-]*[A-Za-z])[A-Za-z0-9][A-Za-z0-9_.-]*\Z"
MODULES = {
    "Python": "(cray-)?python3?",
    "conda": "(ana|mini)conda[23]?|mini(forge|mamba)[23]?|micromamba",
    "CUDA (PyTorch brings its own; only for what you compile)": "cuda(toolkit)?",
    "PyTorch (with venv: make setup SITE_PACKAGES=1)": "(py)?torch([-_]?(gpu|cuda|rocm|lmod))?",
    "containers": "apptainer|singularity(-?ce|pro)?",
}
NEXT = [
    "# Change what you know better. If you delete an answer, Copier asks or takes its default.",
    "# Then: copier copy --data-file <this file> <address of the template> my-project",
]

Facts = Dict[str, str]  # the KEY=VALUE words that scontrol prints
Accounts = Dict[str, Tuple[List[str], str]]  # by account: each QOS, and the default QOS


class Answer(NamedTuple):
    """An answer and the facts that led to it. The value is None if Copier has to ask."""

    question: str
    value: Any
    facts: List[str]


# -- what Slurm says ------------------------------------------------------------------------------


def ask(*command: str) -> Optional[str]:
    """Return the output of a command; None if it is missing, fails or takes too long."""
    # Users filter and format the output of Slurm's commands with variables.
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SINFO_", "SCONTROL_"))}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            errors="backslashreplace",
            timeout=TIMEOUT,
            env={**own, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def user_name() -> str:
    """Return the user's name; the number if the system does not know the user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def ask_accounts(cluster: str) -> Optional[Accounts]:
    """Return the user's accounts, the default account first; None if sacctmgr does not answer."""
    show = ("show", "user", user_name(), "withassoc", "cluster=" + cluster)
    columns = "format=defaultaccount,account,qos,defaultqos"
    shown = ask("sacctmgr", "--noheader", "--parsable2", *show, columns)
    if shown is None:
        return None
    rows = [row.split("|") for row in shown.splitlines() if row.count("|") == 3]
    accounts = {}
    for _, account, listed, default in sorted(rows, key=lambda row: (row[0] != row[1], row)):
        names = sorted(name for name in listed.split(",") if name)
        accounts[account] = (names, default or ("normal" if "normal" in names else ""))
    return accounts


def ask_partitions(config: Facts, accounts: Optional[Accounts]) -> List["Partition"]:
    """Return the partitions that have nodes: the default one, then the others by name."""
    scontrol = ("scontrol", "--all", "--oneliner", "show")
    shown = [pairs(line) for line in (ask(*scontrol, "nodes") or "").splitlines()]
    nodes = [Node(facts) for facts in shown if "NodeName" in facts]
    shown = [pairs(line) for line in (ask(*scontrol, "partitions") or "").splitlines()]
    visible = ask("sinfo", "--noheader", "--format=%R")
    found = []
    for facts in shown:
        own = [node for node in nodes if facts.get("PartitionName") in node.partitions]
        if own:
            hidden = visible is not None and facts["PartitionName"] not in visible.split()
            partition = Partition(facts, own, accounts, hidden)
            partition.preempted_by = partition.preempted(shown, config)
            found.append(partition)
    return sorted(found, key=lambda each: (not each.default, each.name))


def pairs(line: str) -> Facts:
    """Return the KEY=VALUE words of a line. The first of two counts: free text comes last."""
    return dict(reversed(re.findall(r"(?<!\S)(\w+)=(\S*)", line)))


def number(facts: Facts, field: str, default: int = 0) -> int:
    """Return the number that a value begins with; the default for 0, UNLIMITED or no value."""
    digits = re.match(r"\d+", facts.get(field, ""))
    return int(digits.group()) if digits and int(digits.group()) else default


def minutes(limit: str) -> float:
    """Return the minutes of a time limit such as 2-00:00:00 or UNLIMITED."""
    found = re.match(r"(?:(\d+)-)?(\d+):(\d+):(\d+)\Z", limit)
    if not found:
        return float("inf")
    days, hours, mins, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins + seconds / 60


def gpus_of(gres: str) -> Dict[str, int]:
    """Return the whole GPUs of a node by type, from a text such as `gpu:a100:4(S:0-1),gpu:2`."""
    found: Dict[str, int] = {}
    for entry in re.findall(r"(?<![\w-])gpu((?::[^:,(]+)*)", gres):
        words = entry.split(":")[1:]
        count = int(words.pop()) if words and words[-1].isdigit() else 1
        kind = words[0] if words else ""
        if not MIG.search(kind):
            found[kind] = found.get(kind, 0) + count
    return found


def most_common(values: Iterable[Any]) -> Any:  # noqa: ANN401 - of any kind
    """Return the most common value; the greatest one if several are as common."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


# -- nodes and partitions -------------------------------------------------------------------------


class Node:
    """What jobs can use of a node: memory in MiB, GPUs by type ("" if Slurm names no type)."""

    def __init__(self, facts: Facts) -> None:
        # Slurm may reserve CPUs and memory for itself.
        reserved = number(facts, "CoreSpecCount") * number(facts, "ThreadsPerCore", 1)
        self.cpus = number(facts, "CPUEfctv") or number(facts, "CPUTot") - reserved
        self.memory = number(facts, "RealMemory") - number(facts, "MemSpecLimit")
        self.gpus = gpus_of(facts.get("Gres", ""))
        self.up = not UNUSABLE & set(re.findall(r"[A-Z_]+", facts.get("State", "")))
        self.partitions = facts.get("Partitions", "").split(",")
        self.facts = facts


class Partition:
    """A partition and its nodes.

    Args:
        facts: facts about it from scontrol.
        nodes: its nodes. Nodes that are not up are ignored, unless no node is up.
        accounts: the user's accounts.
        hidden: whether sinfo does not show it to the user.
    """

    preempted_by = ""  # the jobs that may stop its jobs

    def __init__(
        self, facts: Facts, nodes: List[Node], accounts: Optional[Accounts], hidden: bool
    ) -> None:
        self.facts, self.name = facts, facts.get("PartitionName", "")
        self.default = facts.get("Default") == "YES"  # for jobs that name no partition
        self.minutes = minutes(facts.get("MaxTime", ""))
        self.total = len(nodes)
        self.nodes = [node for node in nodes if node.up] or nodes
        # The type with the most GPUs, their most common number on a node, and those nodes.
        gpus = [item for node in self.nodes for item in node.gpus.items()] or [("", 0)]
        counts = {kind: [count for each, count in gpus if each == kind] for kind, _ in gpus}
        kind = max(counts, key=lambda each: (sum(counts[each]), len(counts[each]), each))
        count = most_common(counts[kind])
        self.gpu_type, self.gpus = str(kind), int(count)
        self.gpu_nodes = [node for node in self.nodes if node.gpus.get(kind, 0) >= count > 0]
        # Each account with each QOS ("" for the default) that the partition accepts.
        self.accounts = [
            (account, "" if qos == default else qos)
            for account, (names, default) in (accounts or {"": ([], "")}).items()
            if not accounts or self._allows("Accounts", account)
            for qos in [default] + [name for name in names if name != default]
            if not accounts or self._allows("Qos", qos)
        ]

        self.refusal = self._refusal(hidden)

    def _allows(self, field: str, name: str) -> bool:
        allowed = self.facts.get("Allow" + field, "ALL")
        denied = self.facts.get("Deny" + field, "").split(",")
        return (allowed in ("ALL", "N/A") or name in allowed.split(",")) and name not in denied

    def _refusal(self, hidden: bool) -> str:
        """Return why it accepts no jobs of this user, or "" if it seems to accept them."""
        facts = self.facts
        allowed = f"for the accounts {facts.get('AllowAccounts')}, QOS {facts.get('AllowQos')}"
        reasons = [
            (facts.get("State", "UP") != "UP", facts.get("State", "").lower()),
            (facts.get("Hidden") == "YES", "hidden"),
            (hidden, "for the groups " + facts.get("AllowGroups", "?")),
            (facts.get("RootOnly") == "YES", "for root"),
            (facts.get("ReqResv") == "YES", "for reservations"),
            (not self.accounts, allowed),
        ]
        return next((reason for applies, reason in reasons if applies), "")

    def preempted(self, others: List[Facts], config: Facts) -> str:
        """Return which jobs may preempt its jobs, or "" if no jobs may."""
        preempt = config.get("PreemptType", "preempt/none")
        if preempt.endswith(("none", "(null)")) or self.facts.get("PreemptMode") == "OFF":
            return ""
        if preempt.endswith("qos"):
            return "jobs of a higher QOS"
        tier = number(self.facts, "PriorityTier")
        above = {p.get("PartitionName") for p in others if number(p, "PriorityTier") > tier}
        names = sorted({name for node in self.nodes for name in node.partitions} & above)
        return "jobs in " + ", ".join(names) if names else ""

    def gpu_modes(self) -> List[str]:
        """Return the launch modes on GPUs that it accepts and has nodes for."""
        least = number(self.facts, "MinNodes", 1)
        most = min(number(self.facts, "MaxNodes", UNLIMITED), len(self.gpu_nodes))
        one, several = least == 1 <= most, max(2, least) <= most
        return ["single_node"] * one + ["multi_node"] * several

    def typical_node(self) -> Node:
        """Return a node of the most common size, without GPUs if there is one."""
        nodes = [node for node in self.nodes if not node.gpus] or self.nodes
        size = most_common((node.cpus, node.memory) for node in nodes)
        return next(node for node in nodes if (node.cpus, node.memory) == size)

    def cpus_of(self, node: Node) -> int:
        """Return how many CPUs of a node a job can use."""
        sockets = number(node.facts, "Sockets", 1)
        limit = number(self.facts, "MaxCPUsPerSocket", UNLIMITED) * sockets
        return min(node.cpus, limit, number(self.facts, "MaxCPUsPerNode", UNLIMITED))

    def memory_of(self, node: Node, config: Facts) -> int:
        """Return how many MiB of a node a job can use."""
        limits = [number(each, "MaxMemPerNode", UNLIMITED) for each in (self.facts, config)]
        return min(node.memory, *limits)

    def limits(self) -> str:
        """Return its limits for one job."""
        said = [f"{self.name}: up to {self.facts.get('MaxTime', '?')}"]
        fields = ["DefaultTime", "MinNodes", "MaxNodes", "MaxCPUsPerNode", "MaxCPUsPerSocket"]
        for field in [*fields, "MaxMemPerNode", "MaxMemPerCPU"]:
            limit = self.facts.get(field, "")
            said += [f"{field} {limit}"] * bool(re.search("[1-9]", limit))
        return ", ".join(said)


def choose(found: List[Partition], gpu: bool) -> Optional[Partition]:
    """Return the best partition for jobs with GPUs, or for jobs without; None if there is none.

    The default partition is best if it has nodes for all launch modes and allows an hour. Then
    come partitions whose jobs are not preempted, with more time (up to a day), with more nodes.
    """

    def merit(partition: Partition) -> Tuple[Any, ...]:
        only_cpus = [node for node in partition.nodes if not node.gpus]
        return (
            len(partition.gpu_modes()) if gpu else bool(only_cpus),
            any(node.up for node in partition.nodes),
            partition.minutes >= 60,
            partition.default,
            not partition.preempted_by,
            min(partition.minutes, 24 * 60),
            len(partition.gpu_nodes if gpu else only_cpus),
        )

    fit = [p for p in found if (p.gpu_modes() if gpu else number(p.facts, "MinNodes", 1) == 1)]
    return max(fit, key=merit, default=None)


# -- answers --------------------------------------------------------------------------------------


def job_answers(
    found: List[Partition], config: Facts, accounts: Optional[Accounts]
) -> List[Answer]:
    """Return the answers about partitions, GPUs, CPUs, memory, time, accounts and requeueing."""
    overview = ["Partitions (* is the default):"] + ["  " + line for line in table(found)]
    own = [partition for partition in found if not partition.refusal]
    main = choose(own, gpu=True) or choose(own, gpu=False)
    if not main:
        return [Answer("partition", None, [*overview, "None of them takes your jobs."])]
    # All scripts have the same account and QOS: best are those that nodes without GPUs take, too.
    for account, qos in [*main.accounts, main.accounts[0]]:
        cpu = choose([each for each in own if (account, qos) in each.accounts], gpu=False)
        if cpu and any(not node.gpus for node in cpu.nodes):
            break
    modes = ["cpu"] * bool(cpu) + main.gpu_modes()
    answers = [
        Answer("launch_modes", modes, overview),
        Answer("partition", "" if main.default else main.name, [main.limits()]),
    ]
    if main.gpus and cpu:
        answers.append(Answer("cpu_partition", "" if cpu.default else cpu.name, [cpu.limits()]))
    if main.gpus:
        answers += gpu_answers(main)
    cpus = cpus_answer(main, cpu)
    answers += [cpus, *memory_answers(main, cpu, cpus.value, config)]
    shortest = min([main, cpu or main], key=lambda each: each.minutes)
    most = max(int(min(shortest.minutes, 60)), 1)
    said = f"{shortest.name} allows up to {shortest.facts.get('MaxTime', '?')}"
    answers.append(Answer("time_limit", f"{most // 60:02}:{most % 60:02}:00", [said]))
    answers += account_answers(account, qos, config, accounts)
    return [*answers, requeue_answer(main, config)]


def table(found: List[Partition]) -> List[str]:
    """Return a line for each partition, in columns."""
    rows = []
    for each in found:
        kinds = {
            " + ".join(f"{count} {kind or 'GPU'}" for kind, count in sorted(node.gpus.items()))
            for node in each.nodes
        } - {""}
        parts = any(MIG.search(node.facts.get("Gres", "")) for node in each.nodes)
        up = sum(node.up for node in each.nodes)
        row = [
            each.name + ("*" if each.default else ""),
            each.facts.get("MaxTime", "?"),
            f"{each.total} node(s)" + (f", {up} up" if up < each.total else ""),
            span(node.cpus for node in each.nodes) + " CPUs",
            span(node.memory // GIB for node in each.nodes) + " GiB",
            " or ".join(sorted(kinds) + ["parts of GPUs"] * parts) or "no GPU",
            f"(not for you: {each.refusal})" if each.refusal else "",
        ]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def span(values: Iterable[int]) -> str:
    """Return the smallest and the largest value as text."""
    ends = sorted(set(values))
    return str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"


def gpu_answers(partition: Partition) -> List[Answer]:
    """Return the answers about the GPUs of a partition."""
    kind = partition.gpu_type
    said = f"{len(partition.gpu_nodes)} node(s) of {partition.name} have {partition.gpus} {kind}"
    answers = [Answer("gpus_per_node", min(partition.gpus, 16), [said.strip()])]
    for vendor, pattern in VENDORS.items():
        if re.match(pattern, kind.lower()):
            answers.append(Answer("accelerator", vendor, []))
    kinds = Counter(name for node in partition.nodes for name in node.gpus)
    if len(kinds) > 1:
        said = ", ".join(f"{name or 'no name'} on {count}" for name, count in kinds.most_common())
        said = f"nodes of each type: {said}; a job on several nodes needs one type"
        answers.append(Answer("gpu_type", kind, [said]))
    least = number(partition.facts, "MinNodes", 1)
    return answers + [Answer("nodes", least, [])] * (least > 2)


def cpus_answer(main: Partition, cpu: Optional[Partition]) -> Answer:
    """Return the CPUs of a rank: the share of a GPU, and at most half of a node without GPUs."""
    shares = [main.cpus_of(node) // sum(node.gpus.values()) for node in main.gpu_nodes]
    facts = [f"{min(shares)} CPUs are the share of a GPU"] if shares else []
    if cpu:
        node = cpu.typical_node()
        facts.append(f"{node.cpus} CPUs on a node of {cpu.name}, where two ranks run without GPUs")
        shares.append(cpu.cpus_of(node) // 2)
    threads = number((main.gpu_nodes or [main.typical_node()])[0].facts, "ThreadsPerCore", 1)
    facts += [f"{threads} CPUs are one core"] * (threads > 1)
    share = min(*shares, MAX_CPUS if main.gpus else 4)
    return Answer("cpus_per_task", max(share // threads * threads, 1), facts)


def memory_answers(
    main: Partition, cpu: Optional[Partition], cpus: int, config: Facts
) -> List[Answer]:
    """Return the answers about memory: none if Slurm does not count it or has a good default."""
    if "memory" not in config.get("SelectTypeParameters", "memory").lower():
        return [Answer("memory", "", ["Slurm does not count memory here"])]
    jobs = [(main, main.gpus)] * bool(main.gpus) + ([(cpu, 0)] if cpu else [])
    defaults = [default_memory(partition, gpus, cpus, config) for partition, gpus in jobs]
    facts = [
        f"default of a rank in {partition.name}{'' if gpus else ', without a GPU'}: {mib} MiB"
        for (partition, gpus), mib in zip(jobs, defaults)
    ]
    if min(defaults) >= MIN_MEMORY:
        return [Answer("memory", "", facts)]
    mib = min(memory_per_cpu(partition, gpus, cpus, config) for partition, gpus in jobs)
    if not mib:  # RealMemory=1 is Slurm's own value
        return [Answer("memory", "", [*facts, "Slurm does not know the memory of the nodes"])]
    facts.append(f"{mib} MiB are the share of a CPU")
    amount = f"{mib // 100 * 100 or mib}M"
    return [Answer("memory", amount, facts), Answer("memory_scope", "cpu", [])]


def default_memory(partition: Partition, gpus: int, cpus: int, config: Facts) -> int:
    """Return the MiB of a rank if its job asks for none; 0 if only a whole node has a default."""
    sources = [
        dict(facts, **pairs(facts.get("JobDefaults", "").replace(",", " ")))
        for facts in (partition.facts, config)
    ]
    for field, factor in (("DefMemPerGPU", bool(gpus)), ("DefMemPerCPU", cpus)):
        for source in sources:
            if number(source, field) and factor:
                return number(source, field) * factor
    return 0


def memory_per_cpu(partition: Partition, gpus: int, cpus: int, config: Facts) -> int:
    """Return the MiB for each CPU of a rank: its share of a node, up to the limit of Slurm."""
    node = partition.typical_node()
    mib = partition.memory_of(node, config) // partition.cpus_of(node)
    if gpus:
        shares = [
            partition.memory_of(node, config) // sum(node.gpus.values())
            for node in partition.gpu_nodes
        ]
        mib = min(shares) // cpus
    return min(mib, *(number(f, "MaxMemPerCPU", mib) for f in (partition.facts, config)))


def account_answers(
    account: str, qos: str, config: Facts, accounts: Optional[Accounts]
) -> List[Answer]:
    """Return the answers about the account and the quality of service."""
    if not accounts:
        said = "sacctmgr does not answer" if accounts is None else "sacctmgr lists none of yours"
        return [Answer("account", None, [said + ": ask your site whether jobs need an account"])]
    required = "associations" in config.get("AccountingStorageEnforce", "")
    facts = ["yours: " + ", ".join(accounts)] + ["Slurm requires an account here"] * required
    names, default = accounts[account]
    said = f"yours: {', '.join(names) or 'none'}; the default is {default or 'not set'}"
    return [Answer("account", account, facts), Answer("qos", qos, [said])]


def requeue_answer(partition: Partition, config: Facts) -> Answer:
    """Return the answer about requeueing stopped jobs."""
    names = ("JobRequeue", "PreemptType", "PreemptMode")
    facts = [", ".join(f"{name} {config.get(name, '?')}" for name in names)]
    if partition.preempted_by:
        mode, grace = partition.facts.get("PreemptMode", "?"), number(partition.facts, "GraceTime")
        said = f"{partition.preempted_by} may stop jobs in {partition.name}"
        wait = number(config, "KillWait", 30)
        facts.append(f"{said} (mode {mode}; to save: GraceTime {grace} s, KillWait {wait} s)")
    return Answer("requeue", True, facts)


def environment_answers() -> List[Answer]:
    """Return the answers about modules and Python."""
    # `module` prints to stderr.
    listing = login_shell("type module >/dev/null 2>&1 && module --terse avail 2>&1")
    words = {re.sub(r"[(<].*", "", line).strip() for line in listing.splitlines()}
    names = sorted(word for word in words if re.match(r"[A-Za-z0-9_.][\w.+/@=-]*(?<!/)\Z", word))
    found = {
        title: [name for name in names if re.search(rf"(^|/)({pattern})(/|$)", name.lower())]
        for title, pattern in MODULES.items()
    }
    own, best = python_version(), best_python(found["Python"])
    facts = ["python3 without a module: " + (".".join(map(str, own)) or "none")]
    if listing:
        facts += [f"modules of {t}: {', '.join(like) or 'none found'}" for t, like in found.items()]
    else:
        facts.append("no modules were found")
    if best:
        facts.append(f"{best} loads Python {'.'.join(map(str, python_version(best)))}")
    answers = [Answer("modules", best, facts)]
    if not best and own < (3, 10):
        tool = next((name for name in ("uv", "conda") if shutil.which(name)), None)
        said = "no Python 3.10 or newer was found; uv and conda bring one"
        answers.append(Answer("environment", tool, [said]))
    return answers


def best_python(modules: List[str]) -> str:
    """Return the newest module that loads a Python that PyTorch and the trackers support, or ""."""

    def version(module: str) -> Tuple[int, ...]:
        found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", module)
        return tuple(int(part or 0) for part in found.groups()) if found else ()

    fit = [module for module in modules if (3, 10) <= version(module) < (4,)]
    # Aim has no builds for Python 3.13 and newer.
    fit.sort(key=lambda name: (version(name) < (3, 13), version(name), -len(name)), reverse=True)
    return next((module for module in fit[:3] if python_version(module) >= (3, 10)), "")


def python_version(module: str = "") -> Tuple[int, ...]:
    """Return the version of Python in a job, with a module or without; () if there is none."""
    load = '[ -z "$0" ] || module load "$0" >/dev/null 2>&1 || exit 1; '
    shown = login_shell(load + "python3 --version", module)
    found = re.search(r"^Python (\d+)\.(\d+)", shown, re.MULTILINE)
    return tuple(map(int, found.groups())) if found else ()


def login_shell(script: str, argument: str = "") -> str:
    """Return the output of a login shell. It has the command `module`, but no module is loaded."""
    purge = "type module >/dev/null 2>&1 && module purge >/dev/null 2>&1; "
    return ask("bash", "-lc", purge + script, argument) or ""


def network_answer() -> Answer:
    """Return the answer `site_script`, from the network interfaces of this node that are up."""
    shown = ask("ip", "-o", "-4", "addr", "show", "up")
    if shown is None:
        found = [(name, "") for name in sorted(os.listdir(NETWORK)) if name != "lo" and is_up(name)]
    else:
        found = re.findall(r"^\d+: (\S+)\s+inet ((?!127\.)[\d.]+)", shown, re.MULTILINE)
    said = ", ".join(" ".join(each).strip() for each in found) or "none but loopback"
    facts = [f"network interfaces of this node: {said}", "those of compute nodes may be others"]
    slingshot = any(name.startswith("hsn") for name, _ in found)
    # As the pages of LUMI and Frontier say; NCCL takes all interfaces whose names begin with hsn.
    return Answer("site_script", "export NCCL_SOCKET_IFNAME=hsn" if slingshot else "", facts)


def is_up(interface: str) -> bool:
    """Return whether a network interface is up, or may be up: some kinds do not report it."""
    with open(os.path.join(NETWORK, interface, "operstate")) as state:
        return state.read().strip() in ("up", "unknown")


# -- the file -------------------------------------------------------------------------------------


def site_notes(config: Facts) -> List[str]:
    """Return lines about what the site added to Slurm."""
    lines = [
        f"{name} = {config[name]}: it may refuse or change jobs by rules of this site"
        for name in ("CliFilterPlugins", "JobSubmitPlugins")
        if config.get(name, "(null)") not in ("", "(null)", "none")
    ]
    if "--container-image" in (ask("srun", "--help") or ""):
        lines.append("srun has --container-image: `container: pyxis` is a choice")
    return lines


def text(about: str, answers: List[Answer], notes: List[str]) -> str:
    """Return the file: each answer below the facts that led to it."""
    lines = [f"# Answers about {about}.", *NEXT]
    for question, value, facts in answers:
        lines += ["", *("# " + fact for fact in facts)]
        if value is None:
            lines.append(f"# {question}: not found")
        elif value and not re.match(PATTERNS.get(question, ""), str(value)):
            lines.append(f"# {question}: the template does not accept the name {value}")
        else:
            lines.append(f"{question}: {json.dumps(value)}")
    return "\n".join([*lines, "", *("# " + note for note in notes)]) + "\n"


def probe() -> str:
    """Ask everything, and return the file.

    Raises:
        SystemExit: Slurm is not here, or does not answer.
    """
    if not shutil.which("scontrol"):
        sys.exit("error: scontrol is missing: run this on a login node of a Slurm cluster")
    shown = ask("scontrol", "show", "config") or ""
    found = re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", shown, re.MULTILINE)
    config = dict(reversed(found))  # the first of two counts
    cluster, release = config.get("ClusterName", ""), config.get("SLURM_VERSION", "?")
    accounts = ask_accounts(cluster)
    partitions = ask_partitions(config, accounts)
    if not partitions:
        sys.exit("error: Slurm shows no nodes: try again later, or ask your site if slurmctld runs")
    answers = job_answers(partitions, config, accounts) + environment_answers()
    answers.append(network_answer())
    about = f"the cluster {cluster}, asked on {socket.gethostname()}, Slurm {release}"
    return text(about, answers, site_notes(config))


# -- a module for all users -----------------------------------------------------------------------


def settings(answers: str, source: str) -> str:
    """Return Copier's settings for all users: the answers without those that differ between users.

    A QOS is left out if the accounting lists it for this user. The QOS of a preset stays.

    Args:
        answers: a YAML mapping. Each key begins a line, because there is no parser of YAML here.
        source: the name of the file, for errors.

    Raises:
        SystemExit: a line does not have that form.
    """
    lines = ["# Copier's settings for all users: Copier does not ask these questions.", "defaults:"]
    if not re.search("^setup:", answers, re.MULTILINE):
        lines.append("  setup: quick # `copier copy --data setup=full` asks all questions")
    own: List[str] = []
    name = ""
    left_out = in_block = ended = False  # ended: a comment at the left ends a block of text
    for number, line in enumerate(re.sub(r"\n\Z", "", answers).split("\n"), 1):
        if line in NEXT or (line.rstrip() == "---" and not name):
            continue
        found = re.match(r"(?P<name>\w+):(\s|$)|(?P<comment>#)|(?P<more> |- )|$", line)
        more = bool(found and found.group("more") and line.strip())
        inside = in_block and line[:1] in ("", " ")
        expected = wrong_characters(line, inside)
        if not found or (more and (not name or (ended and line[0] == " "))):
            expected = "NAME: ANSWER, found " + ascii(line.strip())[1:-1]
        if not found or expected:
            sys.exit(f"error: {source}, line {number}: expected {expected}")
        # A line that is neither a name nor a comment continues the answer above.
        if found.group("name"):
            name = found.group("name")
            left_out = name in PERSONAL or lines[-1].startswith("  # yours: ")
            own += [name] * left_out
            while left_out and lines[-1].startswith("  #"):  # the facts that led to it
                lines.pop()
        if found.group("comment"):
            ended, in_block = ended or in_block, False
        elif line and not inside:
            ended, in_block = False, bool(BLOCK.search(line))
        if inside and not left_out:
            lines.append("  " + line if line else "")
        elif not line.strip():
            lines += [""] * bool(lines[-1])
        elif found.group("comment") or not left_out:
            lines.append("  " + line.rstrip())
    if left_out or not in_block:  # in a block of text, empty lines may count
        lines = [*"\n".join(lines).rstrip().split("\n"), *[""] * bool(own)]
    lines += ["  # Left to each user: " + ", ".join(own)] * bool(own)
    return "\n".join(lines) + "\n"


def wrong_characters(line: str, in_block: bool) -> str:
    """Return what is not allowed in a line of a file of answers, or "" if the line is fine."""
    if UNPLAIN.search(line):
        return "no tab and no control character"
    free = in_block or line.startswith("#")
    return "" if free or not ALIAS.search(line) else "no anchor (&) and no alias (*)"


def modulefiles(site: str, template: str) -> Dict[str, str]:
    """Return the modulefiles for Lmod and Environment Modules, by their paths in the folder."""

    def lua(word: str) -> str:
        return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'

    def tcl(word: str) -> str:
        return '"' + re.sub(r'(["\\$\[\]])', r"\\\1", word) + '"'

    address = "$SLURM_DDP_TEMPLATE" if template else "<address of the template>"
    advice = f"To create a project, type: copier copy {address} my-project"
    commands = [
        ("whatis", "Description: projects that train PyTorch models on this cluster. " + advice),
        ("setenv", "COPIER_SETTINGS_PATH", os.path.join(site, "settings.yml")),
        ("prepend_path", "PATH", os.path.join(site, "bin")),
    ]
    commands += [("setenv", "SLURM_DDP_TEMPLATE", template)] if template else []
    in_lua = [f"help({lua(advice)})"]
    in_tcl = ["#%Module1.0", f"proc ModulesHelp {{}} {{ puts stderr {tcl(advice)} }}"]
    for command, *words in commands:
        in_lua.append(f"{command}({', '.join(map(lua, words))})")
        name = {"whatis": "module-whatis"}.get(command, command.replace("_", "-"))
        in_tcl.append(" ".join([name, *map(tcl, words)]))
    files = {".lua": in_lua, "": in_tcl}
    return {f"modulefiles/slurm-ddp/1.0{end}": "\n".join(t) + "\n" for end, t in files.items()}


def read(file: str) -> str:
    """Return the text of a file of answers.

    Raises:
        SystemExit: it cannot be read.
    """
    try:
        with open(file, encoding="utf-8-sig") as source:
            return source.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "not UTF-8")
        sys.exit(f"error: can't read {file} ({reason}): name a file of answers")


def is_plain(name: str) -> bool:
    """Return whether a name is UTF-8, in any locale, and has no control characters."""
    try:
        os.fsencode(name).decode("utf-8")
    except UnicodeError:
        return False
    return not re.search("[\0-\x1f]", name)


def write_site(site: str, template: str, file: str) -> None:
    """Write the settings and the module to a new folder; after an error, write nothing.

    Raises:
        SystemExit: the name or the address has bad characters, the folder exists or cannot be
            written, or the answers cannot be read.
    """
    if not site:
        sys.exit("error: --site: expected the name of a new folder")
    site = os.path.abspath(site)
    if os.path.lexists(site):
        sys.exit(f"error: {site} exists: name another folder, or remove it")
    if ":" in site or not is_plain(site):
        sys.exit(
            f"error: {site!a}: expected UTF-8, no colon and no line break: name another folder"
        )
    if not is_plain(template):
        sys.exit(f"error: --template {template!a}: expected an address in UTF-8, on one line")
    template = os.path.abspath(template) if os.path.isdir(template) else template
    answers = probe() if not file else read(file)
    files = dict(modulefiles(site, template), **{"settings.yml": settings(answers, file)})
    part = f"{site}.{os.getpid()}"
    try:
        os.makedirs(os.path.join(part, "modulefiles", "slurm-ddp"))
        for name, content in files.items():
            with open(os.path.join(part, name), "wb") as out:
                out.write(content.encode("utf-8", "surrogateescape"))
        os.rename(part, site)
    except OSError as error:
        sys.exit(f"error: can't write {site} ({error.strerror}): name another folder")
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"wrote {site}: check its settings.yml, then type: module use {site}/modulefiles")


def main() -> None:
    """Write a file of answers, or the settings and the module of a site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about = "file to write (cluster.yml); with --site, file of answers to read; none: ask Slurm"
    parser.add_argument("file", nargs="?", default="", help=about)
    about = "write Copier's settings, and a module that names them, to this new folder"
    parser.add_argument("--site", metavar="DIR", help=about)
    about = "with --site: address of the template; the module sets SLURM_DDP_TEMPLATE to it"
    parser.add_argument("--template", metavar="ADDRESS", default="", help=about)
    given = parser.parse_args()
    if given.site is not None:
        return write_site(given.site, given.template, given.file)
    if given.template:
        sys.exit("error: --template needs --site DIR, the new folder of the module")
    file = given.file or "cluster.yml"
    if os.path.lexists(file):
        sys.exit(f"error: {file} exists: name another file, or remove it")
    answers = probe()
    try:
        with open(file, "x", encoding="ascii") as out:
            out.write(answers)
    except OSError as error:
        sys.exit(f"error: can't write {file} ({error.strerror}): name another file")
    print(f"wrote {file}: read it, then give it to copier copy --data-file")


if __name__ == "__main__":
    main()

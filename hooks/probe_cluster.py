#!/usr/bin/env python3
"""Ask a Slurm cluster for the answers to the template's questions.

Run it on a login node. It needs nothing but Python 3.6, asks Slurm, the module system and the node
itself, writes one file, and changes nothing else:

    python3 probe_cluster.py cluster.yml
    copier copy --data-file cluster.yml <address of the template> my-project

With --job it also asks a compute node, by a job of a minute, and waits for it.

Each answer in the file has the facts beside it that it was chosen by. What was not found is said
there too, and left for Copier to ask.
"""

import argparse
import contextlib
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

PATIENCE = 60  # seconds for an answer
GIB = 1024  # of MiB, in which Slurm counts memory
ENOUGH = 4 * GIB  # for a rank: with less, PyTorch and a batch of data may not fit
MOST_CPUS = 16  # for a rank: more seldom make its data loading faster
MANY = 10**6
# Parts of a GPU (MIG), as "1g.5gb" or "a100_2g.20gb": a rank of DDP needs a whole one.
SLICE = re.compile(r"\d+g\.\d+gb")
OUT_OF_USE = {"DOWN", "DRAIN", "FAIL", "FAILING", "ERROR", "FUTURE", "UNKNOWN", "INVALID_REG"}
SHARED = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|weka|panfs|orangefs|pvfs|gluster|quobyte")
# What copier.yml lets through; another name is only told.
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/=%-]*\Z"
PATTERNS = dict.fromkeys(["partition", "cpu_partition", "account", "qos"], NAME)
PATTERNS["gpu_type"] = r"(?=[0-9_.-]*[A-Za-z])[A-Za-z0-9][A-Za-z0-9_.-]*\Z"
# Options that plugins of Slurm's add to srun, and the answers that use them.
PLUGINS = {
    "--container-image": "container: pyxis, and container_image",
    "--uenv": "sbatch_options or srun_options: --uenv=NAME",
    "--auto-resume": "srun_options: --auto-resume=1",
}
MAKERS = {"amd": r"mi\d{2,3}[a-z]?\Z", "intel": r"pvc|max[-_]?1\d{3}"}  # by the type of a GPU
PATH = re.compile(r"(?:/[A-Za-z0-9_.@+=-]+)+\Z")

Facts = Dict[str, str]  # the KEY=VALUE words of scontrol's
Services = Dict[str, Tuple[List[str], str]]  # by account: the QOS, and the usual one


class Node(NamedTuple):
    """A node: what jobs can have of it. Memory in MiB, GPUs by type ("" where Slurm has none)."""

    up: bool
    cpus: int
    memory: int
    gpus: Dict[str, int]
    facts: Facts


class Partition(NamedTuple):
    """A partition. A way into it is an account and a QOS ("" for the usual one)."""

    name: str
    default: bool  # jobs go here that name no partition
    minutes: float  # the longest time of a job
    facts: Facts
    nodes: List[Node]  # those that are up; all if none is
    total: int
    ways: List[Tuple[str, str]]
    refused: str  # why it takes no jobs of this user
    rivals: str  # for whose jobs its own may be stopped


class Gpus(NamedTuple):
    """The GPUs that most nodes of a partition have: type, count on a node, and those nodes."""

    kind: str
    number: int
    nodes: List[Node]


class Answer(NamedTuple):
    """An answer with the facts behind it; where the value is None, Copier is to ask."""

    question: str
    value: Any
    facts: List[str]


# -- asking ---------------------------------------------------------------------------------------


def ask(*command: str) -> Optional[str]:
    """Return what a command prints, None if it is not here, fails, or does not answer."""
    own = re.compile("(SINFO|SACCTMGR|SCONTROL)_")  # options of the user's
    env = {name: value for name, value in os.environ.items() if not own.match(name)}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            errors="backslashreplace",
            timeout=PATIENCE,
            env=dict(env, LC_ALL="C"),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def pairs(line: str) -> Facts:
    """Return the KEY=VALUE words of a line. Of two the first counts: free text comes last."""
    return dict(reversed(re.findall(r"(?<!\S)(\w+)=(\S*)", line)))


def number(facts: Facts, field: str, otherwise: int = 0) -> int:
    """Return the number that a fact begins with, and something else for 0, UNLIMITED or none."""
    digits = re.match(r"\d+", facts.get(field, ""))
    return int(digits.group()) if digits and int(digits.group()) else otherwise


def minutes(limit: str) -> float:
    """Return a time limit of Slurm's, as 2-00:00:00 or UNLIMITED, in minutes."""
    found = re.match(r"(?:(\d+)-)?(\d+):(\d+):(\d+)\Z", limit)
    if not found:
        return float("inf")
    days, hours, mins, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins + seconds / 60


def gpus_of(gres: str) -> Dict[str, int]:
    """Return the whole GPUs of a node by type, from `gpu:a100:4(S:0-1),gpu:2` and the like."""
    found: Dict[str, int] = {}
    for entry in re.findall(r"(?<![\w-])gpu((?::[^:,(]+)*)", gres):
        words = entry.split(":")[1:]
        count = int(words.pop()) if words and words[-1].isdigit() else 1
        kind = words[0] if words else ""
        if not SLICE.search(kind):
            found[kind] = found.get(kind, 0) + count
    return found


def node_of(facts: Facts) -> Node:
    """Return a node; what Slurm keeps for itself is taken off."""
    kept = number(facts, "CoreSpecCount") * number(facts, "ThreadsPerCore", 1)
    cpus = number(facts, "CPUEfctv") or number(facts, "CPUTot") - kept
    memory = number(facts, "RealMemory") - number(facts, "MemSpecLimit")
    up = not OUT_OF_USE & set(re.findall(r"[A-Z_]+", facts.get("State", "")))
    return Node(up, cpus, memory, gpus_of(facts.get("Gres", "")), facts)


def ask_slurm(config: Facts, services: Optional[Services]) -> List[Partition]:
    """Return the partitions that have nodes: the default one, then the others by name."""
    scontrol = ("scontrol", "--all", "--oneliner", "show")
    shown = [pairs(line) for line in (ask(*scontrol, "nodes") or "").splitlines()]
    nodes = [node_of(facts) for facts in shown if "NodeName" in facts]
    shown = [pairs(line) for line in (ask(*scontrol, "partitions") or "").splitlines()]
    visible = ask("sinfo", "--noheader", "--format=%R")
    found = []
    for facts in shown:
        name, default = facts.get("PartitionName", ""), facts.get("Default") == "YES"
        own = [node for node in nodes if name and name in members(node)]
        up = [node for node in own if node.up] or own
        ways = ways_of(facts, services)
        refused = refusal(facts, ways, visible is None or name in visible.split())
        rivals = rivals_of(facts, own, shown, config)
        limit = minutes(facts.get("MaxTime", ""))
        if own:
            each = Partition(name, default, limit, facts, up, len(own), ways, refused, rivals)
            found.append(each)
    return sorted(found, key=lambda each: (not each.default, each.name))


def members(node: Node) -> List[str]:
    """Return the partitions that a node is in."""
    return node.facts.get("Partitions", "").split(",")


def ask_accounts(cluster: str) -> Optional[Services]:
    """Return the user's accounts, the default one first; None if nobody knows."""
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser()]
    command += ["withassoc"] + (["cluster=" + cluster] if cluster else [])
    shown = ask(*command, "format=defaultaccount,account,qos,defaultqos")
    if shown is None:
        return None
    rows = [row.split("|") for row in shown.splitlines() if row.count("|") == 3]
    services = {}
    for _, account, listed, usual in sorted(rows, key=lambda row: (row[0] != row[1], row)):
        names = sorted(name for name in listed.split(",") if name)
        services[account] = (names, usual or ("normal" if "normal" in names else ""))
    return services


# -- judging --------------------------------------------------------------------------------------


def ways_of(facts: Facts, services: Optional[Services]) -> List[Tuple[str, str]]:
    """Return the user's accounts and QOS that a partition takes; the usual ones first."""

    def allows(field: str, name: str) -> bool:
        allowed = facts.get("Allow" + field, "ALL")
        denied = facts.get("Deny" + field, "").split(",")
        return (allowed in ("ALL", "N/A") or name in allowed.split(",")) and name not in denied

    if not services:
        return [("", "")]
    return [
        (account, "" if qos == usual else qos)
        for account, (names, usual) in services.items()
        if allows("Accounts", account)
        for qos in [usual] + [name for name in names if name != usual]
        if allows("Qos", qos)
    ]


def refusal(facts: Facts, ways: List[Tuple[str, str]], visible: bool) -> str:
    """Return why a partition takes no jobs of this user, nothing if it seems to."""
    reasons = [
        (facts.get("State", "UP") != "UP", facts.get("State", "").lower()),
        (facts.get("Hidden") == "YES", "hidden"),
        (not visible, "for the groups " + facts.get("AllowGroups", "?")),
        (facts.get("RootOnly") == "YES", "for root"),
        (facts.get("ReqResv") == "YES", "for reservations"),
        (not ways, f"for the accounts {facts.get('AllowAccounts')}, QOS {facts.get('AllowQos')}"),
    ]
    return next((said for holds, said in reasons if holds), "")


def rivals_of(facts: Facts, nodes: List[Node], others: List[Facts], config: Facts) -> str:
    """Return for whose jobs those of a partition may be stopped, nothing if for nobody's."""
    preempt = config.get("PreemptType", "preempt/none")
    if preempt.endswith(("none", "(null)")) or facts.get("PreemptMode") == "OFF":
        return ""
    if preempt.endswith("qos"):
        return "jobs of a higher QOS"
    tier = number(facts, "PriorityTier")
    above = {each.get("PartitionName") for each in others if number(each, "PriorityTier") > tier}
    names = sorted({name for node in nodes for name in members(node)} & above)
    return "jobs in " + ", ".join(names) if names else ""


def most_common(values: Iterable[Any]) -> Any:  # noqa: ANN401 - of any kind
    """Return what occurs most often; of several, the greatest."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def main_gpus(partition: Partition) -> Gpus:
    """Return the GPUs that most nodes have; without any, the count is 0."""
    if not any(node.gpus for node in partition.nodes):
        return Gpus("", 0, [])
    kind, count = most_common(item for node in partition.nodes for item in node.gpus.items())
    return Gpus(kind, count, [n for n in partition.nodes if n.gpus.get(kind, 0) >= count])


def gpu_modes(partition: Partition) -> List[str]:
    """Return the launch modes on GPUs that a partition has nodes for, and takes."""
    least, most = number(partition.facts, "MinNodes", 1), number(partition.facts, "MaxNodes", MANY)
    gpus = main_gpus(partition)
    several = max(2, least) <= min(most, len(gpus.nodes))
    return ["single_node"] * bool(least == 1 and gpus.nodes) + ["multi_node"] * several


def choose(found: List[Partition], gpu: bool) -> Optional[Partition]:
    """Return the partition for jobs with GPUs, or without; None if there is none.

    That is the default one, if it has nodes for all modes, and time for a run. Else the one whose
    jobs nobody stops, that has the most time, up to a day, and the most nodes.
    """

    def merit(partition: Partition) -> Tuple[Any, ...]:
        nodes = [node for node in partition.nodes if "gpu" not in node.facts.get("Gres", "")]
        return (
            len(gpu_modes(partition)) if gpu else bool(nodes),
            any(node.up for node in partition.nodes),
            partition.minutes >= 60,
            partition.default,
            not partition.rivals,
            min(partition.minutes, 24 * 60),
            len(main_gpus(partition).nodes if gpu else nodes),
        )

    takes = [p for p in found if (gpu_modes(p) if gpu else number(p.facts, "MinNodes", 1) == 1)]
    return max(takes, key=merit, default=None)


def typical(partition: Partition) -> Node:
    """Return a node of the most common size, without GPUs where possible."""
    nodes = [node for node in partition.nodes if not node.gpus] or partition.nodes
    size_ = most_common((node.cpus, node.memory) for node in nodes)
    return next(node for node in nodes if (node.cpus, node.memory) == size_)


def hardware(found: List[Partition], config: Facts, services: Optional[Services]) -> List[Answer]:
    """Return the answers about partitions, GPUs, cores, memory, time, accounts and stops."""
    overview = ["Partitions (* is the default):"] + ["  " + line for line in table(found)]
    own = [partition for partition in found if not partition.refused]
    main = choose(own, gpu=True) or choose(own, gpu=False)
    if not main:
        return [Answer("partition", None, [*overview, "None of them takes your jobs."])]
    gpus = main_gpus(main)
    way = main.ways[0]
    cpu = choose([each for each in own if way in each.ways], gpu=False)
    modes = ["cpu"] * bool(cpu) + gpu_modes(main)
    answers = [
        Answer("launch_modes", modes, overview),
        Answer("partition", "" if main.default else main.name, [limits(main)]),
    ]
    if gpus.nodes and cpu:
        answers.append(Answer("cpu_partition", "" if cpu.default else cpu.name, [limits(cpu)]))
    if gpus.nodes:
        answers += gpu_answers(main, gpus)
        answers += feature_answers(main) if cpu is main else []
    cpus = cpus_of_rank(main, cpu, gpus)
    shortest = min([main, cpu or main], key=lambda each: each.minutes)
    answers += [cpus, *memory_answers(main, cpu, gpus, cpus.value, config)]
    answers += [*time_answers(shortest), *account_answers(*way, config, services)]
    return [*answers, requeue_answer(main, config)]


def table(found: List[Partition]) -> List[str]:
    """Return the partitions as lines to read."""
    rows = []
    for each in found:
        kinds = {
            " + ".join(f"{count} {kind or 'GPU'}" for kind, count in sorted(node.gpus.items()))
            for node in each.nodes
        } - {""}
        slices = any(SLICE.search(node.facts.get("Gres", "")) for node in each.nodes)
        up = sum(node.up for node in each.nodes)
        row = [
            each.name + ("*" if each.default else ""),
            each.facts.get("MaxTime", "?"),
            f"{each.total} node(s)" + (f", {up} up" if up < each.total else ""),
            span(node.cpus for node in each.nodes) + " CPUs",
            span(node.memory // GIB for node in each.nodes) + " GiB",
            " or ".join(sorted(kinds) + ["parts of GPUs"] * slices) or "no GPU",
            f"(not for you: {each.refused})" if each.refused else "",
        ]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def span(values: Iterable[int]) -> str:
    """Return the least and the greatest."""
    ends = sorted(set(values))
    return str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}"


def limits(partition: Partition) -> str:
    """Return what a partition limits a job to."""
    facts = partition.facts
    said = [f"{partition.name}: up to {facts.get('MaxTime', '?')}"]
    for field in ("DefaultTime", "MinNodes", "MaxNodes", "MaxCPUsPerNode"):
        said += [f"{field} {facts[field]}"] * bool(re.search("[1-9]", facts.get(field, "")))
    disk = min((number(node.facts, "TmpDisk") for node in partition.nodes), default=0) // GIB
    said += [f"TmpDisk {disk} GiB on each node"] * bool(disk)
    # From 26.05 on, Slurm calls it Exclusive.
    whole = facts.get("OverSubscribe") == "EXCLUSIVE" or facts.get("Exclusive") == "NODE"
    said += ["jobs get whole nodes"] * whole
    return ", ".join(said)


def gpu_answers(partition: Partition, gpus: Gpus) -> List[Answer]:
    """Return the answers about the GPUs of a partition."""
    kinds = Counter(kind for node in partition.nodes for kind in node.gpus)
    features = {node.facts.get("AvailableFeatures", "") for node in gpus.nodes} - {"", "(null)"}
    facts = [
        f"{len(gpus.nodes)} node(s) of {partition.name} have {gpus.number} {gpus.kind}".strip()
    ]
    facts += ["their features, for a constraint: " + " or ".join(sorted(features))] * bool(features)
    answers = [Answer("gpus_per_node", min(gpus.number, 16), facts)]
    for maker, pattern in MAKERS.items():
        if re.match(pattern, gpus.kind.lower()):
            answers.append(Answer("accelerator", maker, []))
    if len(kinds) > 1:
        said = ", ".join(f"{kind or 'no name'} on {count}" for kind, count in kinds.most_common())
        said = f"types on nodes: {said}; a job of several nodes wants one"
        answers.append(Answer("gpu_type", gpus.kind, [said]))
    least = number(partition.facts, "MinNodes", 1)
    return answers + [Answer("nodes", least, [])] * (least > 2)


def feature_answers(partition: Partition) -> List[Answer]:
    """Return the features by which jobs with GPUs, and those without, find nodes of their kind."""

    def only(nodes: List[Node], others: List[Node]) -> List[str]:
        own, theirs = [
            [set(node.facts.get("AvailableFeatures", "").split(",")) for node in group]
            for group in (nodes, others)
        ]
        found = set.intersection(*own) - set().union(*theirs) - {"(null)"}
        return sorted(name for name in found if re.match(r"\w[\w.:-]*\Z", name))

    gpu = [node for node in partition.nodes if node.gpus]
    cpu = [node for node in partition.nodes if "gpu" not in node.facts.get("Gres", "")]
    if not (gpu and cpu and only(gpu, cpu) and only(cpu, gpu)):
        return []
    said = f"{partition.name} has {len(cpu)} node(s) without GPUs, too; features tell them apart"
    return [
        Answer("constraint", only(gpu, cpu)[0], [said]),
        Answer("cpu_sbatch_options", "--constraint=" + only(cpu, gpu)[0], []),
    ]


def cpus_of_rank(main: Partition, cpu: Optional[Partition], gpus: Gpus) -> Answer:
    """Return the answer about CPUs: a GPU's share of its node. Two ranks without GPUs fit too."""
    shares = [node.cpus // sum(node.gpus.values()) for node in gpus.nodes]
    shares.append(number(main.facts, "MaxCPUsPerNode", MANY) // (gpus.number or 2))
    facts = [f"the share of a GPU is {min(shares)}"] * bool(gpus.nodes)
    if cpu:
        node = typical(cpu)
        facts.append(f"{node.cpus} CPUs on a node of {cpu.name}, where two ranks run without GPUs")
        shares.append(min(node.cpus, number(cpu.facts, "MaxCPUsPerNode", MANY)) // 2)
    threads = number((gpus.nodes or [typical(main)])[0].facts, "ThreadsPerCore", 1)
    facts += [f"{threads} CPUs are one core"] * (threads > 1)
    share = min(*shares, MOST_CPUS if gpus.nodes else 4)
    return Answer("cpus_per_task", max(share // threads * threads, 1), facts)


def default_memory(partition: Partition, config: Facts, cpus: int, gpus: int) -> Optional[int]:
    """Return the MiB of a rank whose job asks for none, None if that is all of the node's."""
    sources = [
        dict(facts, **pairs(facts.get("JobDefaults", "").replace(",", " ")))
        for facts in (partition.facts, config)
    ]
    for field, times in (
        ("DefMemPerGPU", bool(gpus)),
        ("DefMemPerCPU", cpus),
        ("DefMemPerNode", 1),
    ):
        for source in sources:
            value = number(source, field) * times
            if value:
                return value // (gpus or 2) if field == "DefMemPerNode" else value
    return None


def memory_answers(
    main: Partition, cpu: Optional[Partition], gpus: Gpus, cpus: int, config: Facts
) -> List[Answer]:
    """Return the answers about memory: none where Slurm counts none, or has a good default."""
    if "memory" not in config.get("SelectTypeParameters", "memory").lower():
        return [Answer("memory", "", ["Slurm does not share out memory here"])]
    defaults = {main.name: default_memory(main, config, cpus, gpus.number)}
    without = default_memory(cpu, config, cpus, 0) if cpu else None
    if cpu:
        defaults[f"{cpu.name}, without a GPU"] = without
    facts = [
        f"default of a rank in {name}: " + ("all of its node's" if mib is None else f"{mib} MiB")
        for name, mib in defaults.items()
    ]
    if all(mib is not None and mib >= ENOUGH for mib in defaults.values()):
        return [Answer("memory", "", facts)]
    if gpus.nodes:
        rank = min(node.memory // sum(node.gpus.values()) for node in gpus.nodes)
        facts.append(f"the share of a GPU is {size(rank)}")
    else:
        rank = typical(main).memory * cpus // typical(main).cpus
    for source in (main.facts, config):
        rank = min(rank, number(source, "MaxMemPerCPU", MANY) * cpus)
        rank = min(rank, number(source, "MaxMemPerNode", rank * MANY) // (gpus.number or 2))
    # An amount per GPU leaves jobs without one to the default.
    if gpus.nodes and (without is None or without >= ENOUGH):
        return [Answer("memory", size(rank), facts), Answer("memory_scope", "gpu", [])]
    each = rank // cpus
    if cpu:
        each = min(each, typical(cpu).memory // typical(cpu).cpus)
        each = min(each, number(cpu.facts, "MaxMemPerCPU", each))
    return [Answer("memory", size(each), facts), Answer("memory_scope", "cpu", [])]


def size(mib: int) -> str:
    """Return an amount of memory as Slurm takes it, rounded down."""
    return f"{mib // GIB}G" if mib >= 16 * GIB else f"{mib // 100 * 100 or mib}M"


def time_answers(partition: Partition) -> List[Answer]:
    """Return the answers about time: an hour, or what there is."""
    most = int(min(partition.minutes, 60))
    facts = [f"{partition.name} allows up to {partition.facts.get('MaxTime', '?')}"]
    answers = [Answer("time_limit", f"{most // 60:02}:{most % 60:02}:00", facts)]
    return answers + [Answer("signal_lead_seconds", 30, [])] * (most <= 2)


def account_answers(
    account: str, qos: str, config: Facts, services: Optional[Services]
) -> List[Answer]:
    """Return the answers about accounts and qualities of service."""
    if not services:
        said = "sacctmgr does not answer" if services is None else "sacctmgr knows none of yours"
        return [Answer("account", None, [said + ": ask your site whether jobs need one"])]
    enforced = "associations" in config.get("AccountingStorageEnforce", "")
    facts = [
        "yours: " + ", ".join(services),
        "Slurm insists on one here" if enforced else "Slurm does not insist on one here",
    ]
    names, usual = services.get(account, ([], ""))
    said = f"yours: {', '.join(names) or 'none'}; the usual one is {usual or 'not set'}"
    return [Answer("account", account, facts), Answer("qos", qos, [said])]


def options_of(mode: str, answers: List[Answer]) -> List[str]:
    """Return the options with which a project of these answers asks for a launch mode."""
    chosen = {question: value for question, value, _ in answers if value}
    gpu = mode != "cpu"
    alone = chosen["launch_modes"] == ["cpu"]
    ranks = chosen["gpus_per_node"] if gpu else 2
    per = "-per-cpu" if chosen.get("memory_scope") == "cpu" else ""
    wanted = {
        "partition": chosen.get("partition" if gpu or alone else "cpu_partition"),
        "account": chosen.get("account"),
        "qos": chosen.get("qos"),
        "constraint": chosen.get("constraint") if gpu else None,
        "time": chosen["time_limit"],
        "nodes": chosen.get("nodes", 2) if mode == "multi_node" else 1,
        "ntasks-per-node": ranks,
        "cpus-per-task": chosen["cpus_per_task"],
        "gres": ":".join(["gpu", *filter(None, [chosen.get("gpu_type")]), str(ranks)])
        if gpu
        else None,
        "mem" + per: chosen.get("memory") if chosen.get("memory_scope") != "gpu" else None,
    }
    options = [f"--{name}={value}" for name, value in wanted.items() if value]
    return options if gpu else options + chosen.get("cpu_sbatch_options", "").split()


def verdicts(answers: List[Answer]) -> List[str]:
    """Return what Slurm and the site's filters say of such jobs; none is submitted."""
    lines = []
    for mode in modes_of(answers):
        script = 'sbatch --test-only "$@" --wrap=true 2>&1 || true'
        said = ask("sh", "-c", script, "sh", *options_of(mode, answers)) or ""
        for verdict, pattern in (("refuses", "error: (.*)"), ("takes", r"(Job \d+ to start.*)")):
            found = re.search(f"^sbatch: {pattern}$", said, re.MULTILINE)
            if found:
                lines.append(f"sbatch --test-only {verdict} {mode}: {found.group(1)}")
                break
    return lines


def modes_of(answers: List[Answer]) -> List[str]:
    """Return the launch modes that were chosen."""
    return next((value for question, value, _ in answers if question == "launch_modes"), [])


def rules(config: Facts) -> List[str]:
    """Return lines about what the site added to Slurm."""
    names = [name for name in ("CliFilterPlugins", "JobSubmitPlugins") if config.get(name)]
    lines = [
        f"{name} = {config[name]}: it may refuse or change jobs by rules of this site"
        for name in names
        if config[name] not in ("(null)", "none")
    ]
    known = ask("srun", "--help") or ""
    return lines + [
        f"srun has {option}, of a plugin; the answers that use it: {answer}"
        for option, answer in PLUGINS.items()
        if option in known
    ]


def requeue_answer(partition: Partition, config: Facts) -> Answer:
    """Return the answer about jobs that are stopped and come back."""
    if not config:
        said = "scontrol does not say whether requeue and preemption are on"
        return Answer("requeue", True, [said])
    on = config.get("JobRequeue") == "1"
    facts = ["requeue is on" if on else "requeue is off for jobs that do not ask; these do"]
    kind = config.get("PreemptType", "").split("/")[-1]
    if kind in ("", "none", "(null)"):
        return Answer("requeue", True, [*facts, "preemption is off"])
    facts.append(f"preemption is on, by {kind}, mode {config.get('PreemptMode', '?')}")
    said = f"jobs in {partition.name} may be stopped for {partition.rivals or 'nobody'}"
    if partition.rivals:
        mode = partition.facts.get("PreemptMode", "?")
        said += f" (mode {mode}, after {number(partition.facts, 'GraceTime')} s)"
    return Answer("requeue", True, [*facts, said])


# -- the node itself ------------------------------------------------------------------------------


def login_shell(script: str, argument: str = "") -> str:
    """Return what a line says where `module` is known, and no module loaded, as in a job."""
    purge = "type module >/dev/null 2>&1 && module purge >/dev/null 2>&1; "
    return ask("bash", "-lc", purge + script, argument) or ""


def python(module: str = "") -> Tuple[int, ...]:
    """Return the version of the Python that a job gets, with a module or without; () for none."""
    load = '[ -z "$0" ] || module load "$0" >/dev/null 2>&1 || exit 1; '
    shown = login_shell(load + "python3 --version", module)
    found = re.search(r"^Python (\d+)\.(\d+)", shown, re.MULTILINE)
    return tuple(map(int, found.groups())) if found else ()


def version(module: str) -> Tuple[int, ...]:
    """Return the version in a module's name: of Python/3.12.4-GCC-13, that is (3, 12, 4)."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", module)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def environment() -> List[Answer]:
    """Return the answers about modules and Python: one that PyTorch and the trackers support."""
    own = python()
    facts = ["python3 without a module: " + (".".join(map(str, own)) or "none")]
    # `module` prints to stderr.
    listing = login_shell("type module >/dev/null 2>&1 && module --terse avail 2>&1")
    words = {re.sub(r"[(<].*", "", line).strip() for line in listing.splitlines()}
    names = sorted(word for word in words if re.match(r"[A-Za-z0-9_.][\w.+/@=-]*(?<!/)\Z", word))
    best = ""
    for title, pattern in (
        ("Python", "(cray-)?python3?"),
        ("conda", "(ana|mini)conda[23]?|mini(forge|mamba)[23]?|micromamba"),
        ("CUDA (PyTorch brings its own; only for what you compile)", "cuda(toolkit)?"),
        (
            "PyTorch (with venv: make setup SITE_PACKAGES=1)",
            "(py)?torch([-_]?(gpu|cuda|rocm|lmod))?",
        ),
        ("containers", "apptainer|singularity(-?ce|pro)?"),
    ):
        like = [name for name in names if re.search(rf"(^|/)({pattern})(/|$)", name.lower())]
        facts.append(f"modules of {title}: " + (", ".join(like) or "none found"))
        if title == "Python":
            right = [name for name in like if (3, 10) <= version(name) < (4,)]
            # Aim has no builds for Python 3.13 and newer.
            right.sort(key=lambda name: (version(name) < (3, 13), version(name), -len(name)))
            best = next((name for name in right[:-4:-1] if python(name) >= (3, 10)), "")
    if best:
        facts.append(f"{best} loads, and brings Python {'.'.join(map(str, python(best)))}")
    answers = [Answer("modules", best, facts if listing else [facts[0], "no modules were found"])]
    if not best and own < (3, 10):
        tool = next((name for name in ("uv", "conda") if shutil.which(name)), None)
        said = "no Python 3.10 or newer was found; uv and conda bring one"
        answers.append(Answer("environment", tool, [said + ("" if tool else ", but are not here")]))
    return answers


def containers() -> str:
    """Return a line about what runs containers."""
    found = next((name for name in ("apptainer", "singularity") if shutil.which(name)), None)
    if not found:
        return "Containers: apptainer was not found on this node; a module may bring it."
    said = " ".join((ask(found, "--version") or found).split())
    built = "" if found == "apptainer" else ", with container_image, as apptainer alone builds one"
    return f"Containers: {said} is here: `container: apptainer` is a choice{built}."


def interfaces() -> str:
    """Return this node's network interfaces, with their addresses."""
    virtual = re.compile("lo |(docker|virbr|veth|br-|cni|tun|tailscale|podman)")
    listing = ask("ip", "-o", "-4", "address", "show") or ""
    rows = [" ".join(row) for row in re.findall(r"^\d+: (\S+)\s+inet (\S+)", listing, re.MULTILINE)]
    return ", ".join(row for row in rows if not virtual.match(row)) or "none found"


def way_to(node: Facts) -> List[str]:
    """Return lines about the way to a node."""
    lines = []
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(node.get("NodeAddr", ""))
        way = re.search(r" dev (\S+)", ask("ip", "-o", "route", "get", address) or "")
        if way:
            lines = [
                f"  {node['NodeName']} is reached through {way.group(1)}. If ranks can't reach each"
                " other, name the nodes' own in",
                f"  slurm/site.sh, such as: export GLOO_SOCKET_IFNAME={way.group(1)}",
            ]
    return lines


def folders() -> List[str]:
    """Return lines about folders for runs and data that this user may write to."""
    found = {os.getcwd(): "this folder", os.environ.get("HOME", "/"): "$HOME"}
    for name, value in sorted(os.environ.items()):
        if re.search("SCRATCH|WORK|PROJECT|STORE|DATA|FAST", name):
            found.setdefault(value.rstrip("/"), "$" + name)
    for root in ("/scratch", "/work", "/lustre", "/data", "/projects", "/fs"):
        found.setdefault(f"{root}/{getpass.getuser()}", "")
        found.setdefault(root, "")
    lines, scratch = [], []
    for path, name in found.items():
        if PATH.match(path) and os.path.isdir(path) and os.access(path, os.W_OK):
            shown = ask("df", "--output=fstype,avail", "--block-size=1G", path) or "unknown ?"
            kind, free = shown.split()[-2:]
            shared = SHARED.search(kind)
            reach = "shared by nodes" if shared else "do all nodes share it?"
            lines.append(f"  {path}{name and f' ({name})'}: {kind}, {free} GiB free, {reach}")
            scratch += [path] * bool(shared and name not in ("this folder", "$HOME"))
    hint = "to keep runs and trackers in one: shared_root: " + scratch[0] if scratch else ""
    return [
        "Folders that you can write to:",
        *lines,
        "  " + (hint or "no shared scratch was found"),
    ]


def ask_a_node(answers: List[Answer]) -> List[str]:
    """Return lines about a compute node, of a job that is like the trainings but for its time."""
    modes = [mode for mode in reversed(modes_of(answers)) if mode != "multi_node"]
    if not modes:
        return []
    waiting = "Waiting for a job of a minute on a compute node; Ctrl-C goes on without it."
    # Of an option that comes twice, srun takes the last.
    command = ["srun", "--quiet", *options_of(modes[0], answers)]
    command += ["--ntasks=1", "--ntasks-per-node=1", "--time=1"]
    asked = [*command, "python3", os.path.abspath(__file__), "--this-node"]
    try:
        print(waiting, file=sys.stderr)
        done = subprocess.run(
            asked, stdout=subprocess.PIPE, encoding="ascii", errors="backslashreplace"
        )
    except (OSError, KeyboardInterrupt):
        return ["No compute node was asked."]
    if done.returncode:
        return [f"No compute node answered: {' '.join(command)} ended with {done.returncode}."]
    return done.stdout.splitlines()


def this_node() -> List[str]:
    """Return lines about the node that this runs on, for a project's ranks."""
    lines = [f"The compute node {socket.gethostname()}:"]
    lines += [f"  python3 is {'.'.join(map(str, sys.version_info[:3]))} without a module"]
    lines += ["  network interfaces: " + interfaces()]
    proxy = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY")
    try:
        socket.create_connection(("github.com", 443), 5).close()
        lines.append("  it reaches the internet")
    except OSError as error:
        said = ", but it has a proxy (https_proxy)" if proxy else ": trackers must log offline"
        lines.append(f"  it does not reach the internet ({error}){said}")
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        path = os.environ.get(name)
        shown = path and ask("df", "--output=fstype,avail", "--block-size=1G", path)
        about = "{}, {} GiB free".format(*shown.split()[-2:]) if shown else "not a folder here"
        lines.append(f"  ${name}: " + (f"{path} ({about})" if path else "not set"))
    driver = ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if driver:
        lines.append("  its first GPU and driver: " + driver.splitlines()[0])
    return lines


# -- writing --------------------------------------------------------------------------------------


def text(about: str, answers: List[Answer], notes: List[str]) -> str:
    """Return the file: each answer below the facts that it was chosen by."""
    lines = [
        f"# Answers about {about}.",
        "# Change what you know better; delete a line, and Copier asks or takes its default. Then:",
        "#   copier copy --data-file <this file> <address of the template> my-project",
    ]
    for question, value, facts in answers:
        lines += ["", *("# " + fact for fact in facts)]
        if value is None:
            lines.append(f"# {question}: not found")
        elif value and not re.match(PATTERNS.get(question, ""), str(value)):
            lines.append(f"# {question}: {value} is a name that the template does not take")
        else:
            lines.append(f"{question}: {json.dumps(value)}")
    return "\n".join([*lines, "", *("# " + note for note in notes)]) + "\n"


def probe(job: bool) -> str:
    """Ask everything, and return the file.

    Args:
        job: whether a compute node is asked, too.

    Raises:
        SystemExit: Slurm is not here, or does not answer.
    """
    if not shutil.which("scontrol"):
        sys.exit("error: there is no scontrol here: run this on a login node of a Slurm cluster")
    shown = ask("scontrol", "show", "config") or ""
    found = re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", shown, re.MULTILINE)
    config = dict(reversed(found))
    cluster, release = config.get("ClusterName", ""), config.get("SLURM_VERSION", "?")
    services = ask_accounts(cluster)
    partitions = ask_slurm(config, services)
    if not partitions:
        sys.exit("error: Slurm shows no nodes: is its controller up? Try again, or ask your site")
    answers = hardware(partitions, config, services) + environment()
    notes = [
        *verdicts(answers),
        *rules(config),
        containers(),
        "Network interfaces of this node: " + interfaces(),
        *way_to(partitions[0].nodes[0].facts),
        *folders(),
        *(ask_a_node(answers) if job else ["With --job, a compute node is asked, too."]),
    ]
    about = f"the cluster {cluster}, asked on {socket.gethostname()}, Slurm {release}"
    return text(about, answers, notes)


def main() -> None:
    """Write the answers file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default="cluster.yml", help="what to write; - prints it")
    parser.add_argument(
        "--job", action="store_true", help="ask a compute node, too, by a short job"
    )
    parser.add_argument("--this-node", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.this_node:
        print("\n".join(this_node()))
        return
    file = args.file
    if file != "-" and os.path.lexists(file):
        sys.exit(f"error: {file} exists: name another file, or remove it")
    answers = probe(args.job)
    if file == "-":
        print(answers, end="")
        return
    try:
        with open(file, "x", encoding="ascii") as out:
            out.write(answers)
    except OSError as error:
        sys.exit(f"error: {file} cannot be written ({error.strerror}): name another file")
    print(f"{file} is written: read it, then give it to copier copy --data-file")


if __name__ == "__main__":
    main()

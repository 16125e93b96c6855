"""The record of a site: what works there, without names, paths, accounts and hosts.

A record has only the fields below, and their values have only words that match a pattern from end
to end. So nothing else can get into it, whatever Slurm, a driver or an answer says. In the
template, scripts/site_record.py reads records with the same patterns.
"""

import re
from collections.abc import Iterable, Mapping

VERSION = r"\d{1,4}(\.\d{1,6}){1,2}((a|b|rc|\.post|\.dev)\d{1,8})?(-\d(rc\d)?)?"
# As in "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3" or "Intel(R) Data Center GPU Max 1550".
GPU = (
    r"NVIDIA|AMD|Intel(\(R\))?|Tesla|Quadro|GeForce|RTX|GTX|Instinct|Radeon|Data|Center|GPU|Max|PRO"
    r"|Ada|Generation|Blackwell|Server|Edition|PCIe|NVL|MIG|\d{3,4}|\d{1,3}GB|HBM\d[eE]?"
    r"|\dg\.\d{1,3}gb|(G?[ABHLPRTV]|MI)\d{1,4}[A-Z]?(-(SXM\d?|PCIE|\d{1,3}GB))*"
)
FIELDS: Mapping[str, str] = {
    "date": r"20\d\d-\d\d-\d\d",
    "template": rf"v?{VERSION}(-\d{{1,4}}-g[0-9a-f]{{7,40}})?|[0-9a-f]{{7,40}}",
    "slurm": VERSION,
    "python": VERSION,
    "torch": rf"{VERSION}(\+(cpu|xpu|cu\d{{2,3}}|rocm\d[\d.]{{0,5}}|(git)?[0-9a-f]{{7,40}}))?",
    "cuda": VERSION,
    "hip": rf"{VERSION}(-[0-9a-f]{{7,12}})?",
    "nccl": VERSION,
    "driver": VERSION,
    "backend": "gloo|nccl|xccl",
    "gpu": GPU,
    "gpus_per_node": r"\d{1,2}",
    "launch_modes": "cpu|single_node|multi_node",
    "launcher": "srun|torchrun",
    "gpu_request": "gres|gpus_per_node|gpus|gpus_per_task|none",
    "environment": "venv|uv|conda",
    "container": "none|apptainer|pyxis",
}
CHECK: Mapping[str, str] = {
    "name": "image|doctor|here|on|nodes|check-comm|train|cpu|single_node|multi_node|stop|and|resume"
    "|requeue|trackers",
    "result": "pass|FAIL",
    "seconds": r"\d{1,6}",
}
"""The fields of a check."""


def build(facts: Mapping[str, object], checks: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Return a record of what is known about a site, and of the results of its checks."""
    return {**allowed(facts, FIELDS), "checks": [allowed(each, CHECK) for each in checks]}


def allowed(values: Mapping[str, object], patterns: Mapping[str, str]) -> dict[str, str]:
    """Return the values that have a pattern, as text of the words that match it."""
    kept = {}
    for name, pattern in patterns.items():
        value = values.get(name)
        words = value if isinstance(value, list) else str(value).split()
        found = [each for each in map(str, words) if re.fullmatch(pattern, each, re.ASCII)]
        if found:
            kept[name] = " ".join(found)
    return kept

"""DDP and FSDP train alike, and each goes on from the other's checkpoints."""

import enum
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from metrics import reproducible
from renderer import render_project
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from .conftest import QUICK, Job, spawn, srun, tasks

# The same samples at each step on any number of ranks; a learning rate that knows no end.
SAME = (
    *("--global-batch-size=96", "--lr=0.002", "--schedule=constant", "--warmup=0"),
    # 4,001 test samples: of two ranks, one has a batch more than the other.
    *("--test-batch-size=500", "--log-every=1", "--max-steps=24"),
    # The norm of parts is summed in another order, and clipping would pass on its last digit.
    "--clip-norm=None",
)

# Of a kind that FSDP is made for: blocks, no running statistics. One parameter is too small to have
# a part for each rank.
NETWORK = '''

class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Blocks(nn.Module):
    """A stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(28 * 28, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.outlet = nn.Linear(48, 10)
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.full((1,), 0.1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.inlet(images.flatten(1) - self.mean)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) * self.temperature


class Model(Model):
    """Digits by blocks."""

    def build(self) -> nn.Module:
        return Blocks()

    def optimizers(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(network.parameters(), lr=self.settings.lr)
'''


@pytest.fixture(scope="module")
def blocks(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a network of blocks; `demo` stays the other one's for imports here."""
    folder = render_project(tmp_path_factory.mktemp("blocks") / "demo", launcher="torchrun")
    with (folder / "src" / "demo" / "model.py").open("a") as file:
        file.write(NETWORK)
    return folder


@pytest.fixture(scope="module")
def sharded(blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of FSDP on two ranks with checkpoints at steps 10, 20 and 24."""
    flags = ("--strategy=fsdp", "--checkpoint-every=10", *SAME)
    return srun(blocks, tmp_path_factory.mktemp("sharded") / "run", 2, *flags).wait()


def losses(job: Job, steps: int = 24) -> list[float]:
    """Return the losses of the steps, and then the gradient's norms."""
    lines = [line for line in job.metrics() if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return [line[name] for name in ("train/loss", "train/gradient_norm") for line in lines]


def tensors(state: object, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors in nested dictionaries, by name."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else ()
    return {n: t for key, each in items for n, t in tensors(each, f"{name}/{key}").items()}


def test_both_strategies_give_the_same_parameters(
    blocks: Path, sharded: Job, tmp_path: Path
) -> None:
    """On two ranks bit for bit: a sum of two is the same in any order."""
    copied = srun(blocks, tmp_path / "run", 2, "--checkpoint-every=10", *SAME).wait()
    assert sharded.summary["parameters_sha256"] == copied.summary["parameters_sha256"]
    assert sharded.summary["test_loss"] == copied.summary["test_loss"]
    assert losses(sharded) == pytest.approx(losses(copied), rel=1e-5)

    # Read whole, on no rank, what one wrote as a file and the other in shards is the same too.
    from demo.engine.checkpoint_files import load

    name = "checkpoints/step-00000020.pt"
    one, other = (tensors(load(job.run_dir / name)) for job in (copied, sharded))
    assert len(one) == 4 * 23 + 1 and one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert other["/networks/network/inlet.weight"].shape == (48, 784)
    sizes = [(job.run_dir / name).stat().st_size for job in (copied, sharded)]
    assert sizes[1] < sizes[0] / 4


@pytest.mark.slow
def test_a_stopped_run_in_bf16_with_fsdp_ends_where_the_uninterrupted_one_does(
    blocks: Path, sharded: Job, tmp_path: Path
) -> None:
    flags = (*SAME, "--strategy=fsdp", "--precision=bf16", "--checkpoint-every=4")
    more = ("--histograms-every=8", "--trackers=tensorboard")
    whole = srun(blocks, tmp_path / "whole", 2, *flags, *more).wait()
    assert losses(whole) == pytest.approx(losses(sharded), rel=0.1)
    assert whole.summary["parameters_sha256"] != sharded.summary["parameters_sha256"]

    job = srun(blocks, tmp_path / "run", 2, *flags, "--keep-checkpoints=2", "--max-steps=2000")
    job.stop(10, number=signal.SIGUSR2)
    stopped_at = max(line["step"] for line in job.metrics())
    folder = job.run_dir / "checkpoints"
    shards = sorted(path.stem for path in folder.glob("*.shards"))
    assert len(shards) == 2 and shards == sorted(path.stem for path in folder.glob("*.pt"))
    # What a save leaves that is killed.
    (folder / "step-00000009.shards.tmp").mkdir()
    (folder / "step-00000009.shards").mkdir()
    (folder / "step-00000009.pt.tmp").touch()
    job = srun(blocks, tmp_path / "run", 2, *flags, f"--max-steps={max(24, stopped_at)}").wait()
    assert job.summary["resumed_from_step"] == stopped_at
    if stopped_at <= 24:
        assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
        assert reproducible(job.metrics()) == reproducible(whole.metrics())
    assert not list(folder.glob("*.tmp")) and not (folder / "step-00000009.shards").exists()


def test_one_rank_has_the_whole_network_whatever_the_strategy(
    project: Path, tmp_path: Path
) -> None:
    runs = [
        srun(project, tmp_path / strategy, 1, "--max-steps=3", f"--strategy={strategy}").wait()
        for strategy in ("ddp", "fsdp")
    ]
    assert len({job.summary["parameters_sha256"] for job in runs}) == 1
    assert not list(tmp_path.rglob("*.shards"))


def test_damaged_shards_are_found(
    project: Path, sharded: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from demo.engine.checkpoint_files import Checkpoints, find_fault

    folder = tmp_path / "checkpoints"
    shutil.copytree(sharded.run_dir / "checkpoints", folder)
    newest = folder / "step-00000024.pt"
    assert Checkpoints(folder).newest() == newest

    part = folder / "step-00000024.shards" / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0xFF
    part.write_bytes(content)
    assert "__1_0.distcp" in str(find_fault(newest))
    os.truncate(part, len(content) // 2)
    assert find_fault(newest)
    part.unlink()
    assert find_fault(newest)
    shutil.rmtree(part.parent)
    assert find_fault(newest)
    assert Checkpoints(folder).newest() == folder / "step-00000020.pt"
    assert "corrupt checkpoint" in caplog.text


def test_torch_reads_the_shards(project: Path, sharded: Job, tmp_path: Path) -> None:
    """The folder is one of torch.distributed.checkpoint, for its own programs too."""
    from demo.engine.checkpoint_files import load

    path = sharded.run_dir / "checkpoints/step-00000024.pt"
    dcp_to_torch_save(path.with_suffix(".shards"), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    found = load(path)["networks"]["network"]
    shared = [name for name in found if f"networks/network/{name}" in whole]
    assert len(shared) > len(found) / 2
    for name in shared:
        assert whole[f"networks/network/{name}"].equal(found[name])


def test_what_the_metadata_of_shards_may_hold(project: Path, tmp_path: Path) -> None:
    """Only tensors, in files of the folder: torch would unpickle anything else."""
    from demo.engine import shards

    dcp.save({"a": torch.arange(9.0), "b": "text"}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(pickle.UnpicklingError, match="BytesStorageMetadata"):
        shards.read(tmp_path, {"a": None})
    dcp.save({"a": torch.arange(9.0), "b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    found = shards.read(tmp_path, {"a": None, "b": None})
    assert found["a"].equal(torch.arange(9.0)) and found["b"].equal(torch.ones(2))
    part = (tmp_path / "__0_0.distcp").rename(tmp_path / "part")
    (tmp_path / "__0_0.distcp").symlink_to(part)
    with pytest.raises(OSError, match="is a link"):
        shards.read(tmp_path, {"a": None})
    file = tmp_path / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"\x0c__0_0.distcp", b"\x0c../00.distcp"))
    with pytest.raises(FileNotFoundError, match="No such file"):
        shards.read(tmp_path, {"a": None})


def test_shards_of_an_early_python_3_11_are_read(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to Python 3.11.3, a member of an enum is pickled as a call of getattr."""
    from demo.engine import shards
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    def by_getattr(member: enum.Enum, _protocol: int) -> tuple:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_getattr)
    dcp.save({"a": torch.arange(9.0)}, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert shards.read(tmp_path, {"a": None})["a"].equal(torch.arange(9.0))

    class Attack:
        def __reduce__(self) -> tuple:
            return getattr, (torch.Size, "numel")

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(pickle.UnpicklingError, match="calls getattr"):
        shards.read(tmp_path, {"a": None})


SAVES = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
from demo.engine import shards

folder, rank = Path(sys.argv[1]), dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
joined = []
join = DefaultSavePlanner._create_global_plan
DefaultSavePlanner._create_global_plan = lambda *given: joined.append(1) or join(*given)


def save(name, lengths):
    whole = {key: torch.arange(n) * 1.0 + len(name) for key, n in lengths.items()}
    parts = {key: distribute_tensor(each, mesh, [Shard(0)]) for key, each in whole.items()}
    shards.write(folder / name, parts, dist.group.WORLD)
    for key, each in shards.read(folder / name, dict.fromkeys(lengths)).items():
        assert each.equal(whole[key]), (name, key)


for name in ("first", "second", "the third"):
    save(name, {"a": 9, "b": 4})
save("with more", {"a": 9, "b": 4, "c": 7})
assert len(joined) == (2 if rank == 0 else 0), joined
opened = shards.open_regular
for broken in (0, 2):  # rank 0 also plans
    if rank == broken:
        shards.open_regular = None
    try:
        save("broken", {"a": 9, "b": 4})
    except OSError as error:
        assert f"rank {broken}" in str(error), error
    else:
        raise AssertionError("a rank could not write")
    shards.open_regular = opened
    save("after it", {"a": 9, "b": 4})
    save("after that", {"a": 9, "b": 4})
assert len(joined) == (5 if rank == 0 else 0), joined
"""


def test_rank_0_joins_the_plans_of_a_save_only_if_they_change(
    project: Path, tmp_path: Path
) -> None:
    """Each save is read again by each rank, also after one that a rank could not write."""
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    env = {**os.environ, "PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([*ranks, str(script), str(tmp_path)], env=env, check=True)


def on_nodes(project: Path, run_dir: Path, nodes: str, *flags: str) -> Job:
    """Train with FSDP within nodes, on ranks of nodes with names of one letter."""
    command = ["demo", "train", f"--run-dir={run_dir}", *QUICK, "--strategy=fsdp"]
    command += ["--shard-within=node", *flags]
    envs = [
        {**env, "SLURMD_NODENAME": node} for node, env in zip(nodes, tasks(len(nodes)), strict=True)
    ]
    return spawn(project, run_dir, [command] * len(nodes), envs).wait()


WITHIN = (*SAME, "--clip-norm=0.5", "--ema=0.9")


@pytest.fixture(scope="module")
def within(blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of two nodes with two ranks each, with checkpoints at steps 10, 20 and 24."""
    folder = tmp_path_factory.mktemp("within")
    return on_nodes(blocks, folder / "run", "aabb", *WITHIN, "--checkpoint-every=10")


def test_parts_within_nodes_give_the_same_training(
    blocks: Path, within: Job, tmp_path: Path
) -> None:
    whole = srun(blocks, tmp_path / "whole", 1, *WITHIN).wait()
    assert losses(within) == pytest.approx(losses(whole), rel=1e-3)
    assert within.summary["test_loss"] == pytest.approx(whole.summary["test_loss"], rel=1e-3)
    # Two nodes of a rank each hold the network whole, as DDP does.
    copied = srun(blocks, tmp_path / "copied", 2, *SAME).wait()
    alone = on_nodes(blocks, tmp_path / "alone", "ab", *SAME)
    assert alone.summary["parameters_sha256"] == copied.summary["parameters_sha256"]


def test_a_checkpoint_has_each_part_once(project: Path, within: Job, tmp_path: Path) -> None:
    path = within.run_dir / "checkpoints/step-00000024.pt"
    from demo.engine.checkpoint_files import load

    shared = tensors({"averages": load(path)["averages"]})
    elements = sum(tensor.numel() for tensor in shared.values())
    size = sum(part.stat().st_size for part in path.with_suffix(".shards").glob("*.distcp"))
    # Parameters, averages and AdamW's two states, of four bytes each.
    assert 4 * 4 * elements < size < 1.5 * 4 * 4 * elements
    dcp_to_torch_save(path.with_suffix(".shards"), tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    name = "averages/network/blocks.0.layers.1.weight"
    assert found[name].equal(shared[f"/{name}"])


def test_a_run_within_nodes_resumes_bit_for_bit(blocks: Path, within: Job, tmp_path: Path) -> None:
    on_nodes(blocks, tmp_path / "run", "aabb", *WITHIN, "--max-steps=9")
    job = on_nodes(blocks, tmp_path / "run", "aabb", *WITHIN)
    assert job.summary["resumed_from_step"] == 9
    assert job.summary["parameters_sha256"] == within.summary["parameters_sha256"]
    assert losses(job) == losses(within)


def test_checkpoints_go_from_one_strategy_and_world_size_to_another(
    blocks: Path, within: Job, tmp_path: Path
) -> None:
    """The parts of the network are within nodes, over all ranks, or whole."""
    run, parts, twice = tmp_path / "run", "--strategy=fsdp", "--accumulate=2"
    srun(blocks, run, 3, *WITHIN, parts, twice, "--max-steps=4").wait()
    srun(blocks, run, 2, *WITHIN, parts, "--max-steps=6").wait()
    on_nodes(blocks, run, "aabb", *WITHIN, "--max-steps=9")
    srun(blocks, run, 2, *WITHIN, twice, "--max-steps=12").wait()
    on_nodes(blocks, run, "aabb", *WITHIN, "--max-steps=15")
    srun(blocks, run, 4, *WITHIN, parts, "--max-steps=18").wait()
    srun(blocks, run, 1, *WITHIN, "--max-steps=20").wait()
    srun(blocks, run, 3, *WITHIN, parts, "--max-steps=22").wait()
    job = on_nodes(blocks, run, "aa", *WITHIN)  # on one node, within it and over all is the same
    assert job.summary["resumed_from_step"] == 22
    assert losses(job) == pytest.approx(losses(within), rel=1e-3)
    assert job.summary["test_loss"] == pytest.approx(within.summary["test_loss"], rel=1e-3)


@pytest.mark.parametrize("nodes", ["aab", "abab"])
def test_nodes_that_can_not_hold_the_same_parts(blocks: Path, tmp_path: Path, nodes: str) -> None:
    job = on_nodes(blocks, tmp_path / "run", nodes)
    assert job.codes == [1] * len(nodes) and "Traceback" not in job.log
    found = {"aab": "2 on a, 1 on b", "abab": "1 on a, 1 on b, 1 on a, 1 on b"}[nodes]
    assert f"order are {found}: " in job.log


@pytest.mark.parametrize(
    ("flag", "needs"),
    [
        ("--shard-within=node", "--strategy fsdp"),
        ("--offload", "--strategy fsdp"),
        ("--compile-mode=reduce-overhead", "--compile"),
    ],
)
def test_a_setting_names_the_one_that_it_needs(
    project: Path, tmp_path: Path, flag: str, needs: str
) -> None:
    job = srun(project, tmp_path / "run", 1, flag).wait()
    assert job.codes == [1] and "Traceback" not in job.log
    assert needs in job.log


def test_offloading_changes_nothing_on_cpus(blocks: Path, within: Job, tmp_path: Path) -> None:
    job = on_nodes(blocks, tmp_path / "run", "aabb", *WITHIN, "--offload", "--recompute")
    assert job.summary["parameters_sha256"] == within.summary["parameters_sha256"]


def test_a_run_within_nodes_is_evaluated_on_any_ranks(
    blocks: Path, within: Job, tmp_path: Path
) -> None:
    """Three ranks on two nodes could not have trained so."""
    for name, ranks in (("evaluate", 3), ("predict", 2)):
        command = ["demo", name, str(within.run_dir), f"--output={tmp_path / name}.json"]
        envs = [
            {**env, "SLURMD_NODENAME": node} for env, node in zip(tasks(ranks), "abb", strict=False)
        ]
        job = spawn(blocks, tmp_path / name, [command] * ranks, envs).wait()
        assert job.codes == [0] * ranks, job.log
    found = json.loads((tmp_path / "evaluate.json").read_text())["metrics"]["test/loss"]
    assert found == pytest.approx(within.summary["test_loss"], rel=1e-6)


def test_a_network_that_fsdp_cannot_shard(blocks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(blocks, folder)
    path = folder / "src" / "demo" / "model.py"
    path.write_text(path.read_text().replace("torch.ones(1)", "torch.ones(())"))
    job = srun(folder, tmp_path / "run", 2, "--strategy=fsdp").wait()
    assert job.codes == [1, 1]
    assert "shard Blocks" in job.log
    assert "Traceback" not in job.log
    assert not json.dumps(job.metrics()).count("train/loss")

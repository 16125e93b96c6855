"""Plans a save of a checkpoint's shards with the plans of all ranks, but without the ranks."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from demo.engine import shards
from demo.engine.checkpoint_files import part_name
from demo.engine.nested import each_leaf
from demo.engine.ranks.strategy import is_dtensor
from stopwatch import Clock, milliseconds
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult


def of_rank(plan: SavePlan, rank: int, size: int) -> SavePlan:
    """Return the plan of a rank, made from rank 0's plan: the same tensors, but its own rows."""

    def cut(item: WriteItem) -> WriteItem:
        whole = item.tensor_data.size
        rows = -(-whole[0] // size)
        first = min(rank * rows, whole[0])
        offsets = torch.Size([first, *(0 for _ in whole[1:])])
        sizes = torch.Size([min(rows, whole[0] - first), *whole[1:]])
        chunk = ChunkStorageMetadata(offsets, sizes)
        return replace(
            item,
            index=replace(item.index, offset=offsets),
            tensor_data=replace(item.tensor_data, chunk=chunk),
        )

    return replace(plan, items=[cut(item) for item in plan.items])


def planning(state: dict[str, Any], size: int, folder: Path) -> dict[str, float]:
    """Plan a save as PyTorch does for `shards.write`, with the plans of all ranks.

    PyTorch checks that the parts of all ranks fill each tensor, so the plans are right.
    """
    parts: dict[str, Tensor] = {}

    def take(place: tuple[Any, ...], leaf: Any) -> None:  # noqa: ANN401
        if is_dtensor(leaf):
            parts[part_name(place)] = leaf

    each_leaf(take, state)
    writer, planner = dcp.FileSystemWriter(folder), shards.planner()
    writer.set_up_storage_writer(True)

    def own() -> SavePlan:
        planner.set_up_planner(parts, writer.storage_meta(), is_coordinator=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    figures = {"own plan ms": milliseconds(own)}  # it is not yet kept, so it is the whole plan
    sent = [pickle.dumps(of_rank(own(), rank, size)) for rank in range(size)]

    planner.set_up_planner(parts, writer.storage_meta(), is_coordinator=True)
    clock = Clock()
    with clock:
        plans, metadata = planner.create_global_plan([pickle.loads(each) for each in sent])
        plans = writer.prepare_global_plan(plans)
        [pickle.dumps(plan) for plan in plans]  # to be sent back
    written = [results(rank, plan) for rank, plan in enumerate(plans)]
    with clock:
        writer.finish(metadata, written)
    again = Clock()
    with again:  # the ranks say that their plans are as before
        same, metadata = planner.create_global_plan([SavePlan([], usable=False)] * size)
        [pickle.dumps(plan) for plan in writer.prepare_global_plan(same)]
    with again:
        writer.finish(metadata, written)
    return figures | {
        "all plans ms": clock.ms,
        "all plans again ms": again.ms,
        "own plan KiB": len(sent[0]) / 1024,
        "all plans KiB": sum(map(len, sent)) / 1024,
        "list KiB": (folder / ".metadata").stat().st_size / 1024,
        "list ms": milliseconds(shards._Reader(folder).read_metadata),
        "shard files": sum(bool(plan.items) for plan in plans)
        + 3,  # the list, the .pt file, the digests
    }


def results(rank: int, plan: SavePlan) -> list[WriteResult]:
    """Return what a rank would report about its writes."""
    return [
        WriteResult(item.index, 4096, _StorageInfo(f"__{rank}_0.distcp", 4096 * number, 4096))
        for number, item in enumerate(plan.items)
    ]

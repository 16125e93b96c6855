"""The minimum that a rank does before its first step: import torch and join the others.

If asked for, it also makes DDP and an optimizer, for which PyTorch imports its compiler.
"""

import json
import os
import time

import torch.distributed as dist

dist.init_process_group("nccl" if os.environ["BENCHMARK_DEVICE"] == "cuda" else "gloo")
if os.environ["BENCHMARK_DDP"]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    local_rank = int(os.environ["LOCAL_RANK"])
    gpu = os.environ["BENCHMARK_DEVICE"] == "cuda"
    network = torch.nn.Linear(1, 1).to(torch.device("cuda", local_rank) if gpu else "cpu")
    torch.optim.SGD(DistributedDataParallel(network).parameters(), lr=0.1)
dist.barrier()
if dist.get_rank() == 0:
    print(json.dumps({"figure": time.time() - float(os.environ["BENCHMARK_BEGAN"])}), flush=True)
dist.barrier()
os._exit(0)

"""The all-reduce that examples/all_reduce.rs measures, by torch.distributed's gloo. One rank; prints GB/s."""

import os
import sys
import time

import torch
import torch.distributed as dist

elements, rounds = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
data = torch.full((elements,), float(dist.get_rank()))
times = []
for _ in range(rounds + 1):
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(data)
    times.append(time.monotonic() - start)
best = sorted(times[1:])[rounds // 2]
if dist.get_rank() == 0:
    print(f"{elements * 4 / best / 1e9:.3f}")
dist.barrier()
os._exit(0)

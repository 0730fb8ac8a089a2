"""The floor: two processes, each with half the batch and the whole update, that never talk between start and end.

No data-parallel training can be faster on the same cores without doing less arithmetic: nothing is exchanged here.
``train_step.py`` starts it; alone: torchrun --nproc-per-node 2 scripts/bench/floor.py mlp
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ps_contenders import peak_bytes
from workloads import WORKLOADS

workload = WORKLOADS[sys.argv[1]]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = workload.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs, targets = workload.replica_batch(seed=int(os.environ["RANK"]))
for step in range(-workload.warm_up_steps, workload.steps):
    if step == 0:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()
own_cpu = time.process_time() - cpu
dist.barrier()
seconds = time.perf_counter() - wall
facts = {"wall": seconds / workload.steps, "cpu": own_cpu / workload.steps, "peak": peak_bytes(os.getpid())}
print(json.dumps(facts))
dist.destroy_process_group()

"""What a parameter server imports while it steps: not PyTorch's compiler, which takes seconds and 70 MiB."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = textwrap.dedent(
    """
    import sys

    import torch
    from torch import nn

    from torchstrat.parameter_server.messages import NewOptimizer, NewShard, OptimizerStep, Push, Shard, VariableSpec
    from torchstrat.parameter_server.server.packing import pack_optimizer
    from torchstrat.parameter_server.server.store import VariableStore


    def made(cls):
        # As a coordinator makes it, but for the compiler, which would be imported here.
        optimizer = object.__new__(cls)
        optimizer.add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__.__get__(optimizer)
        cls.__init__(optimizer, [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))], lr=0.1)
        del optimizer.add_param_group
        return optimizer


    def variable(number, table):
        spec = VariableSpec(number, "v", (6, 2), torch.float32, "parameter", (Shard(0, 0, 6),), table, table)
        return NewShard(spec, 0, torch.ones(6, 2))


    for cls in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam):
        optimizer = made(cls)
        options = tuple({key: value for key, value in group.items() if key != "params"}
                        for group in optimizer.param_groups)
        store = VariableStore("ps 0")
        store.create([variable(0, True), variable(1, False)])
        store.add_optimizer(NewOptimizer(0, pack_optimizer(optimizer), ((0, 1),)))
        for count in range(3):
            rows = (((0, 0), torch.tensor([1, 4]), torch.ones(2, 2)),)
            dense = (((1, 0), torch.ones(6, 2)),)
            step = OptimizerStep(0, options, dense, rows)
            values = store.push(Push(count, 0, "w", (step,), (), ((1, 0),))).values
        assert (values[0] < 1).all(), cls
    print("torch._dynamo" in sys.modules)
    optimizer.step()
    print("torch._dynamo" in sys.modules)
    """
)


def test_steps_without_the_compiler_that_an_optimizers_own_step_imports() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["False", "True"]

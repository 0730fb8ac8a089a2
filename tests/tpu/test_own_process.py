"""What every file here may rely on: a process of its own, eight devices, and the compiler's dumps if it asks."""

import os

import numpy as np
import torch

from tests.tpu.hlo import DumpFolder

DUMP_HLO = True


def test_eight_virtual_devices_and_dumps_of_what_was_compiled(hlo_dumps: DumpFolder):
    import torch_xla
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    assert (os.environ["CPU_NUM_DEVICES"], os.environ["OMP_NUM_THREADS"]) == ("8", "1")
    runtime.use_spmd()
    assert runtime.global_runtime_device_count() == 8
    before = hlo_dumps.compiled
    mesh = spmd.Mesh(np.arange(8), (4, 2), ("replica", "d0"))
    rows = torch.arange(128.0).reshape(8, 16)
    on_devices = rows.to(torch_xla.device())
    spmd.mark_sharding(on_devices, mesh, ("replica", "d0"))
    total = (on_devices * 3).sum(1)
    torch_xla.sync()
    assert torch.equal(total.cpu(), (rows * 3).sum(1))
    program = hlo_dumps.training_step(after=before)
    assert program.num_partitions == 8
    assert "f32[2,8]" in [str(shape) for shape in program.parameters]
    (reduced,) = program.collectives("all-reduce")
    assert str(reduced) == "all-reduce of f32[2] in [[0, 1], [2, 3], [4, 5], [6, 7]]"

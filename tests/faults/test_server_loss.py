"""``on_server_loss="restore"``: servers of a real cluster are killed in the middle of training; nobody intervenes.

What a loss meets (another loss, a save, other calls), and the controls: with threads in tests/unit/test_server_loss.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, Counters, cluster_with
from torchstrat.testing.fault_plan import Fault, FaultPlan, phases

ROWS = 96
SIZE = 4096
"""Of a vector: large enough for gradients to go through shared memory."""
EPOCHS = 2
EVERY = 8
"""Leases from one checkpoint to the next."""

shares_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's")
pytestmark = [
    pytest.mark.deadline(420),
    pytest.mark.usefixtures("clusters_share_a_fork_server"),
    pytest.mark.filterwarnings("ignore:.*was not saved:UserWarning"),  # a kill may meet a save that is under way
]


@pytest.mark.parametrize(
    ("kills", "faults"),
    [
        pytest.param({13: (1,)}, {}, id="one"),
        pytest.param({13: (0, 1)}, {}, id="two at once", marks=pytest.mark.soak),
        pytest.param({5: (0,), 40: (1,)}, {}, id="two", marks=pytest.mark.soak),
        pytest.param({}, {("ps", 0): Fault(phases.APPLIED, 15)}, id="applied", marks=[pytest.mark.soak, shares_memory]),
        pytest.param(
            {},
            {("ps", 0): Fault(phases.WRITING_VALUES, 15), ("worker", 1): Fault(phases.WRITING_GRADIENTS, 9)},
            id="a server and a worker, half-way in writing to each other",
            marks=shares_memory,
        ),
    ],
)
def test_every_row_counts_once(
    kills: dict[int, tuple[int, ...]], faults: dict[tuple[str, int], Fault], tmp_path: Path
) -> None:
    """``kills``: after which lease which servers are killed."""
    plan, restored, killed = FaultPlan(tmp_path / "plan"), [], []
    for task, fault in faults.items():
        plan.add(*task, fault)
    began = time.monotonic()
    with cluster_with(plan) as cluster:
        cluster.wait_until_listening()
        strategy = ts.ParameterServerStrategy(cluster.resolver, on_server_loss="restore")
        try:
            with strategy.scope():
                model = Counters(SIZE)
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            coordinator = ts.ClusterCoordinator(strategy)
            leased = coordinator.create_leased_dataset(lambda: range(ROWS), batch_size=2, shuffle=True)
            manager = ts.CheckpointManager(tmp_path / "checkpoints")
            checkpoint = ts.Checkpoint(model=model, optimizer=optimizer, data=leased)
            coordinator.restore_on_server_loss(manager, checkpoint, on_restored=restored.append)
            workers = [cluster.process("worker", index).pid for index in range(2)]

            def train_step(rows):
                model.zero_grad()
                sum(-vector[rows].sum() for vector in model.vectors).backward()
                optimizer.step()

            step = 0
            manager.save(checkpoint, step)
            while leased.epoch < EPOCHS:
                for lease in leased:
                    coordinator.schedule(train_step, args=(lease,))
                    step += 1
                    killed += [cluster.kill("ps", index) for index in kills.get(step, ())]
                    if step % EVERY == 0:
                        manager.save(checkpoint, step, asynchronous=True)
                coordinator.join(PATIENCE_SECONDS)
            manager.close()
            print(f"{len(killed)} kills, restored {restored}, {time.monotonic() - began:.1f} s in all")
            for vector in model.state_dict().values():
                assert torch.equal(vector[:ROWS], torch.full((ROWS,), float(EPOCHS)))
            assert len(killed) == sum(map(len, kills.values()))
            assert len(restored) >= max(len(kills), 1)
            for task, fault in faults.items():
                assert [line.fault for line in plan.fired(*task)] == [fault]
            if ("worker", 1) not in faults:
                assert workers == [cluster.process("worker", index).pid for index in range(2)]
        finally:
            strategy.close()

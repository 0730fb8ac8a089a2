"""Fresh values that are still being written while the next function runs: who waits, and what a fault leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.faults.counting import PATIENCE_SECONDS, cluster_with, wait_until
from torchstrat.testing.fault_plan import Fault, FaultPlan, phases

WIDTHS = (512, 4096, 512)  # 8 MiB each
STOPS = Fault(phases.WRITING_VALUES, 3, "SIGSTOP")  # before the second layer: after the biases, and the first weight
ATTEMPTS = 5
OVERLAP_SECONDS = 5.0
"""Less than after what a server is taken for lost."""
NOTICE_SECONDS = 40.0
"""It takes two, on a machine that may be busy with anything."""

pytestmark = [
    pytest.mark.deadline(420),
    pytest.mark.usefixtures("clusters_share_a_fork_server"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a name is Linux's"),
    pytest.mark.filterwarnings("ignore:.*was not saved:UserWarning"),
]


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.ReLU(), nn.Linear(WIDTHS[1], WIDTHS[2]))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int, folder: str | None) -> dict[str, Any]:
    batch = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(step))
    at_the_beginning = type(model[2].weight).__name__
    optimizer.zero_grad()
    hidden = model[1](model[0](batch))
    if folder is not None:
        open(f"{folder}/{step} has computed its first layer", "w").close()
    loss = (model[2](hidden) - batch).square().mean()
    afterwards = type(model[2].weight).__name__
    loss.backward()
    optimizer.step()
    return {"loss": loss.item(), "classes": (at_the_beginning, afterwards)}


def test_the_next_function_computes_with_the_first_layers_and_a_server_may_die_meanwhile(tmp_path: Path) -> None:
    """The server is stopped when it has written the first layer, and goes on when the next function has used it.

    The second time it is killed there: the function that waits for the second layer fails, naming the server; after a
    restore nothing of the half-written values is seen.
    """
    plan = FaultPlan(tmp_path / "plan")
    found: list[dict[str, Any]] = []
    with cluster_with(plan, workers=1, ps=1, TORCHSTRAT_OVERLAP_PULLS="on") as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model, optimizer = make()
        coordinator = ts.ClusterCoordinator(strategy)
        checkpoint = ts.Checkpoint(model=model, optimizer=optimizer)

        def schedule() -> list[ts.RemoteValue]:
            steps = range(len(found), len(found) + 3)
            return [coordinator.schedule(train, (model, optimizer, step, str(tmp_path))) for step in steps]

        def stopped() -> tuple[list[ts.RemoteValue], int]:
            """Three functions, the second of which has used the first layer and still waits; the server's process.

            On a busy machine the second may come when the first has ended: then it reads everything anew."""
            for _ in range(ATTEMPTS):
                checkpoint.save(tmp_path / f"before {len(found)}")
                plan.add("ps", 0, STOPS)
                times, results = len(plan.fired("ps", 0)) + 1, schedule()
                wait_until(lambda times=times: len(plan.fired("ps", 0)) == times, "the stop of the server")
                server = plan.fired("ps", 0)[-1].pid
                with contextlib.suppress(TimeoutError):
                    used = tmp_path / f"{len(found) + 1} has computed its first layer"
                    wait_until(used.exists, "the use of the first layer meanwhile", OVERLAP_SECONDS)
                    return results, server
                os.kill(server, signal.SIGCONT)
                found.extend(coordinator.fetch(results))
            raise AssertionError(f"no function has used the first layer while the second was written, of {len(found)}")

        try:
            results, server = stopped()
            os.kill(server, signal.SIGCONT)
            found += coordinator.fetch(results)
            assert found[-2]["classes"] == ("PendingParameter", "WatchedParameter")

            results, server = stopped()
            os.kill(server, signal.SIGKILL)
            killed_at = time.monotonic()
            with pytest.raises(ts.errors.ParameterServerUnavailable, match="parameter server 0") as caught:
                results[1].get(PATIENCE_SECONDS)
            assert time.monotonic() - killed_at < NOTICE_SECONDS
            assert str(caught.value.task) == "ps 0"
            assert isinstance(caught.value, RuntimeError)
            with pytest.raises(ts.errors.ParameterServerUnavailable):
                coordinator.join(PATIENCE_SECONDS)
            checkpoint.restore(tmp_path / f"before {len(found)}")
            found += coordinator.fetch(schedule())
        finally:
            strategy.close()
    plain = make()
    assert [one["loss"] for one in found] == [train(*plain, step, None)["loss"] for step in range(len(found))]

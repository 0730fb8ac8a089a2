"""The end of a job of parameter servers: nothing is said about connections, and nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, os
import torchstrat as ts

def run(cluster):
    strategy = ts.ParameterServerStrategy(cluster.resolver)
    coordinator = ts.ClusterCoordinator(strategy)
    assert coordinator.schedule(lambda: 1).get(timeout=60) == 1
    coordinator.join()
    strategy.close()

counts = []
for _ in range(3):
    with ts.testing.LocalCluster(workers=2, ps=2) as cluster:
        run(cluster)
        run(cluster)
    gc.collect()
    counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
print(json.dumps(counts))
"""


@pytest.mark.deadline(200)
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_jobs_end_in_order_and_leave_no_threads_behind() -> None:
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "tensorpipe" not in ended.stderr
    first, *_, last = json.loads(ended.stdout.splitlines()[-1])
    assert last[0] <= first[0]
    assert last[1] <= first[1]

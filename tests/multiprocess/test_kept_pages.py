"""What keeping pages does, in real processes: blocks that are freed and allocated again take no page faults."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import torchstrat as ts
from torchstrat.core.kept_pages import KEEP_PAGES_VARIABLE, environment_that_keeps_pages, glibc_version
from torchstrat.launch import LocalCluster
from torchstrat.testing.spawn import spawn

pytestmark = pytest.mark.skipif(glibc_version() is None, reason="what is set is glibc's malloc")

ROOT = Path(__file__).resolve().parents[2]
SETTLING, ROUNDS, FLOATS = 16, 9, 10 << 20  # 40 MiB: up to 32, glibc may stop to give blocks back by itself
MANY = FLOATS * 4 // (2 << 20)
"""Huge pages in a block. There are 512 times as many small ones; which of the two it takes is the kernel's affair."""
FEW = MANY // 4


def faults() -> int:
    """Page faults of the calling thread for a block that it frees and allocates, as steps do with their gradients.

    The median, after some rounds that are not counted: what is allocated in between, by whichever thread, may take a
    piece of the block that was freed, and then the next one comes from new pages. A new thread does that for up to
    eight rounds, until malloc's cache of small blocks has its seven of the sizes that the loop takes.
    """
    import resource
    import statistics

    import torch

    def one() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        torch.empty(FLOATS).fill_(1.0)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    return statistics.median_high([one() for _ in range(SETTLING + ROUNDS)][SETTLING:])


# What it would take otherwise is seen of a server below.
@pytest.mark.parametrize("keep", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_functions_on_a_worker(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEEP_PAGES_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    with LocalCluster(workers=1, ps=1, env={"PYTHONPATH": str(ROOT)}, keep_pages=None if keep else False) as cluster:
        cluster.wait_until_listening()
        strategy = ts.ParameterServerStrategy(cluster.resolver)
        taken = ts.ClusterCoordinator(strategy).schedule(faults).get()
        strategy.close()
    assert (taken < FEW) if keep else (taken >= MANY), taken


PROGRAM = textwrap.dedent(
    """
    # A worker that was started by hand, up to the moment where its service would be made.
    import concurrent.futures, os, sys
    import torch
    from tests.multiprocess.test_kept_pages import faults
    from torchstrat.core.kept_pages import give_back_pages
    import torchstrat as ts

    class Enough(Exception): ...

    def in_place_of_a_service(_task):
        print(len(os.listdir("/proc/self/task")), faults())
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            print(thread.submit(faults).result())
        blocks = [torch.ones(1 << 20) for _ in range(32)]  # 128 MiB
        del blocks
        print(resident_mib())
        give_back_pages()
        print(resident_mib())
        raise Enough

    def resident_mib():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

    try:
        ts.Server({"worker": ["127.0.0.1:0"]}, secret="s" * 32, make_service=in_place_of_a_service)
    except Enough:
        pass
    """
)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at threads through /proc")
@pytest.mark.parametrize("keep", [True, False])
def test_a_server_that_was_started_by_hand(keep: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    assert environment_that_keeps_pages(glibc_version()).keys().isdisjoint(environment)
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", KEEP_PAGES_VARIABLE: str(int(keep))}
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    threads, of_main, of_another, before, after = map(int, said)
    assert threads == 1, "torch and torchstrat start no threads before a server does"
    for taken in (of_main, of_another):
        assert (taken < FEW) if keep else (taken >= MANY), taken
    assert (before - after > 120) is keep, "what is kept is given back on request"


WIDTH, FIRST_STEPS, STEPS = 3200, 6, 4  # 39 MiB
SMALL_PAGES = WIDTH * WIDTH * 4 // 4096
SMALL_IN_HUGE = 512
HUGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VM_COUNTS = Path("/proc/vmstat")


def _not_huge() -> int:
    """How often Linux, in all, had no huge page to give, as where memory is in pieces, and gave small ones."""
    return next(
        int(line.split()[1]) for line in VM_COUNTS.read_text().splitlines() if line.startswith("thp_fault_fallback ")
    )


def faults_of_a_step(env: dict[str, str], made_before: bool) -> tuple[float, float]:
    """Page faults per step with one large gradient, once first values and state are made; and as many at most of them
    as there were for want of huge pages."""
    import resource

    os.environ.update(env)  # before the first tensor of this process, a fork of one that has made none

    import torch

    if made_before:
        torch.zeros(1)
    strategy = ts.MirroredStrategy(["cpu:0"], collectives="process_group")
    with strategy.scope():
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    inputs = torch.ones(1, WIDTH)
    for _ in range(FIRST_STEPS):
        strategy.run(step, args=(inputs,))
    before, not_huge = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, _not_huge()
    for _ in range(STEPS):
        strategy.run(step, args=(inputs,))
    taken, not_huge = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, _not_huge() - not_huge
    strategy.close()
    return taken / STEPS, not_huge * SMALL_IN_HUGE / STEPS


@pytest.mark.skipif(
    not HUGE_SETTING.exists() or "[never]" in HUGE_SETTING.read_text(), reason="this Linux gives no huge pages"
)
@pytest.mark.parametrize(
    ("env", "made_before", "is_spared"),
    [
        ({KEEP_PAGES_VARIABLE: "1"}, False, True),
        pytest.param({KEEP_PAGES_VARIABLE: "0"}, False, True, marks=pytest.mark.soak),  # huge ones, which are few
        ({KEEP_PAGES_VARIABLE: "1", "THP_MEM_ALLOC_ENABLE": "0"}, False, False),
        pytest.param({KEEP_PAGES_VARIABLE: "1"}, True, False, marks=pytest.mark.soak),
    ],
    ids=["huge and kept", "huge", "switched off", "tensors were made before"],
)
def test_steps_under_torchrun(env: dict[str, str], made_before: bool, is_spared: bool) -> None:
    for taken, not_huge in spawn(faults_of_a_step, 2, (env, made_before), timeout_seconds=120):
        assert (taken - not_huge < SMALL_PAGES / 4) if is_spared else (taken >= SMALL_PAGES), (taken, not_huge)

"""The program of `tests.kept_checkpoints` under every strategy, for the table of who restores what whom has saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torchstrat as ts
from tests.kept_checkpoints import BOTH, DENSE, Job, make, on_servers, synchronous
from tests.kept_checkpoints import IN_PROCESS as KEPT
from torchstrat.partitioners import FixedShardsPartitioner, MinSizePartitioner

__all__ = ["DENSE", "IN_PROCESS", "PER_PROCESS", "Job", "make", "restore", "save", "synchronous"]

IN_PROCESS: dict[str, Callable[[int], contextlib.AbstractContextManager[Job]]] = {
    **{name: KEPT[name] for name in ("one_device", "mirrored", "central_storage")},
    "1 server": lambda seed: on_servers(1, None, seed, rows_only=True),
    "2 servers": lambda seed: on_servers(2, FixedShardsPartitioner(2), seed, rows_only=True),
    "3 servers": lambda seed: on_servers(3, MinSizePartitioner(min_shard_bytes=64, max_shards=3), seed, rows_only=True),
    "2 servers, 5 shards": lambda seed: on_servers(2, FixedShardsPartitioner(5), seed, rows_only=True),
    # The table's state goes through from the checkpoint before.
    "tpu 4x1": lambda seed: synchronous(lambda: ts.testing.fake_tpu_strategy(4, 1), seed, DENSE),
    "tpu 2x2": KEPT["tpu"],
}

PER_PROCESS: dict[str, Callable[[], ts.Strategy]] = {
    "mirrored, torchrun": ts.MirroredStrategy,
    "central_storage, torchrun": ts.CentralStorageStrategy,
}


def save(job: Job, folder: Path, steps: range, begin: Path | None = None) -> None:
    """``begin``: a checkpoint to begin with."""
    if begin is not None:
        job.checkpoint.restore(begin)
    job.train(steps)
    job.checkpoint.save(folder)


def restore(job: Job, saved: dict[str, str], folder: Path) -> None:
    """Restore each of ``saved``, and save what is there then, under the same name, into ``folder``."""
    for name, path in saved.items():
        job.checkpoint.restore(path)
        job.checkpoint.save(folder / name)


def save_on_every_rank(kind: str, folder: str, seed: int) -> None:
    with synchronous(PER_PROCESS[kind], seed, BOTH) as job:
        save(job, Path(folder), range(4))


def restore_on_every_rank(kind: str, saved: dict[str, str], folder: str) -> None:
    with synchronous(PER_PROCESS[kind], 99, BOTH) as job:
        restore(job, saved, Path(folder))

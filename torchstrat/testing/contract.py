"""The contract: every training case gives the same numbers under every strategy.

The cases are in ``cases_*.py``, the strategies in `IN_PROCESS` and `TORCHRUN`; a new backend adds a row there.
::

    row = contract.IN_PROCESS["mirrored x2"]
    for case in contract.CASES.values():
        contract.check(case, contract.run_row(case, row), contract.reference(case, row.replicas))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch

from torchstrat.strategies import placement
from torchstrat.testing import (
    cases_autograd,
    cases_helpers,
    cases_models,
    cases_optimizers,
    cases_steps,
)
from torchstrat.testing.training import Case, Snapshot, reference, run_case

__all__ = [
    "APART",
    "CASES",
    "IN_PROCESS",
    "LOCAL",
    "TORCHRUN",
    "Row",
    "check",
    "check_agreement",
    "reference",
    "run_case",
    "run_row",
]

_FILES = (cases_optimizers, cases_steps, cases_models, cases_autograd, cases_helpers)
CASES: Mapping[str, Case] = {case.name: case for file in _FILES for case in file.CASES}
"""Every training case by name."""


@dataclass(frozen=True)
class Row:
    """One way to launch a strategy."""

    name: str
    replicas: int
    make: Callable[..., Any]
    """Makes the strategy from its keyword-only options (``gradient_reduce_op``, ``timeout``)."""


def _make(class_name: str, arguments: Mapping[str, object], **options: object) -> Any:
    import torchstrat as ts

    return getattr(ts, class_name)(**arguments, **options)


def _row(name: str, replicas: int, class_name: str, **arguments: object) -> tuple[str, Row]:
    return name, Row(name, replicas, partial(_make, class_name, arguments))


def _cpus(count: int) -> list[str]:
    return [f"cpu:{index}" for index in range(count)]


IN_PROCESS: Mapping[str, Row] = dict(
    [
        _row("one_device", 1, "OneDeviceStrategy", device="cpu"),
        _row("mirrored x2", 2, "MirroredStrategy", devices=_cpus(2)),
        _row("mirrored x4", 4, "MirroredStrategy", devices=_cpus(4)),
        _row("central_storage x2", 2, "CentralStorageStrategy", compute_devices=_cpus(2)),
        _row("central_storage x4", 4, "CentralStorageStrategy", compute_devices=_cpus(4)),
    ]
)
"""All replicas in this process."""


def _apart(count: int, **options: Any) -> Any:
    import torchstrat as ts

    # To torch ``cpu`` and ``cpu:0`` are different names, and tensors can go from one to the other.
    with mock.patch.object(placement, "torch_device", torch.device):
        return ts.CentralStorageStrategy(_cpus(count), "cpu:0", **options)


APART: Mapping[str, Row] = {
    f"central_storage apart x{count}": Row(f"central_storage apart x{count}", count, partial(_apart, count))
    for count in (1, 2, 3)
}
"""Central storage whose variables live on a device that no replica computes on, as they do beside GPUs: the code that
carries values between the two asks only whether it is the same device."""

TORCHRUN: Mapping[str, Row] = dict(
    [
        _row("mirrored", 2, "MirroredStrategy"),
        # As between hosts: the one place where mirrored variables do without shared memory.
        _row("multi_worker_mirrored", 2, "MultiWorkerMirroredStrategy", collectives="process_group"),
        _row("central_storage", 2, "CentralStorageStrategy"),
        _row("central_storage on sockets", 2, "CentralStorageStrategy", collectives="process_group"),
    ]
)
"""One replica per process; ``replicas`` is the number of processes the tests start."""


LOCAL: Mapping[str, Row] = dict(
    [
        _row("local_sgd x2", 2, "LocalSGDStrategy", devices=_cpus(2), period=2),
        _row("local_sgd", 2, "LocalSGDStrategy", period=2),
        _row("local_sgd on sockets", 2, "LocalSGDStrategy", period=2, collectives="process_group"),
    ]
)
"""Replicas that step variables of their own, in this process and one per process: numbers that no single device has,
and equal bits in all rows. They combine no gradients, so `run_row` is not for them; `run_case` is."""


def run_row(case: Case, row: Row, timeout: timedelta = timedelta(seconds=60)) -> Snapshot:
    """Make the row's strategy, run the case under it, close it. Every process of the row's launch calls this."""
    strategy = row.make(gradient_reduce_op=case.gradient_reduce_op, timeout=timeout)
    try:
        return run_case(case, strategy)
    finally:
        strategy.close()


def check(case: Case, snapshot: Snapshot, expected: Snapshot | None) -> None:
    """Raise `AssertionError` unless ``snapshot`` (from `run_case`) has the expected numbers on every replica.

    The message lists what differs, the worst first, and the first loss that does: it tells the step to look at.
    """
    complaints: list[tuple[float, str]] = []
    if expected is not None:
        missing = sorted(set(expected) - set(snapshot))
        complaints += [(float("inf"), f"{name} is missing") for name in missing]
        complaints += [
            complaint
            for name in expected
            if name in snapshot and (complaint := _difference(name, snapshot[name], expected[name], case.tolerance))
        ]
    if not any(" on replica " in name for name in snapshot):
        complaints.append((float("inf"), "no replica was looked at"))
    for name in snapshot:
        common, on_replica, _ = name.partition(" on replica ")
        if on_replica and (complaint := _difference(name, snapshot[name], snapshot[common], 0.0)):
            complaints.append(complaint)
    if not complaints:
        return
    complaints.sort(key=lambda complaint: -complaint[0])
    shown = "\n".join(f"  {text}" for _, text in complaints[:8])
    late = [text for _, text in complaints if text.startswith("loss[")]
    first_loss = f"\n  first wrong loss: {min(late)}" if late else ""
    total = len(snapshot) if expected is None else len(expected)
    raise AssertionError(f"training case {case.name}: {len(complaints)} of {total} numbers differ\n{shown}{first_loss}")


def check_agreement(case: Case, snapshots: list[Snapshot]) -> None:
    """Raise `AssertionError` unless all processes of one run read the same bits; ``snapshots`` are in rank order."""
    for rank, snapshot in enumerate(snapshots[1:], start=1):
        names = [name for name in snapshots[0] if " on replica " not in name]
        for name in names:
            if complaint := _difference(name, snapshot[name], snapshots[0][name], 0.0):
                raise AssertionError(f"training case {case.name}: ranks 0 and {rank} disagree: {complaint[1]}")


def _difference(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> tuple[float, str] | None:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        text = f"{name} is {got.dtype} {tuple(got.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
        return float("inf"), text
    if torch.equal(got, wanted) or got.numel() == 0:
        return None
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    got, wanted = got.to(wide).flatten(), wanted.to(wide).flatten()
    difference = (got - wanted).abs()
    # NaN compares as the largest difference, unless both are.
    difference = torch.where(difference.isnan(), torch.inf, difference)
    difference = torch.where(got.isnan() & wanted.isnan() | (got == wanted), 0.0, difference)
    allowed = tolerance * wanted.abs().clamp(min=1.0).nan_to_num()
    if bool((difference <= allowed).all()):
        return None
    index = int(difference.argmax())
    worst = float(difference[index])
    text = (
        f"{name} differs by {worst:.2e} (allowed {float(allowed[index]):.0e}) "
        f"at flat index {index}: got {got[index].item():.10g}, expected {wanted[index].item():.10g}"
    )
    return worst, text

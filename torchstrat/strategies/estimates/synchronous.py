"""What replicas hold and send under the synchronous strategies. Pure: strategies are not made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchstrat.core.memory import Copies, Sizes, copies_in_one_process, copies_in_processes
from torchstrat.strategies.estimates.program import Program
from torchstrat.strategies.estimates.rows import Row

ONE_PROCESS = "one"
ON_ONE_HOST = "one per replica, one host"
ON_SEVERAL_HOSTS = "one per replica, several hosts"


@dataclass(frozen=True)
class Way:
    """A strategy, and how its job is started."""

    strategy: str
    processes: str
    replicas: int
    copies: Sequence[Copies]
    computes: Sequence[bool]
    """Whether each entry of ``copies`` has a replica; else it is a place that holds variables only."""
    sent: Callable[[Sizes], Sequence[int]]
    """Bytes by entry of ``copies``."""

    def rows(self, program: Program, batch: Any) -> Iterator[Row]:
        forward = program.forward(batch, self.replicas)
        for copies, computes, sent in zip(self.copies, self.computes, self.sent(program.sizes), strict=True):
            activations = None if forward is None else forward.saved_bytes if computes else 0
            kind = copies.device.partition(":")[0]
            holder = kind if self.processes == ONE_PROCESS else f"process ({kind})" if computes else "its host memory"
            yield Row(self.strategy, self.processes, holder, program.sizes.held(copies), activations, sent)


def ways(device: str, replicas: int) -> Iterator[Way]:
    """``device``: "cpu" or "cuda"."""
    first = f"{device}:0"
    yield _in_one_process("one_device", [first])
    if replicas == 1:
        return
    devices = [f"{device}:{number}" for number in range(replicas)]
    yield _in_one_process("mirrored", devices)
    yield _in_processes("mirrored", ON_ONE_HOST, first, replicas, sums_in_place=device == "cpu")
    yield _in_processes("multi_worker_mirrored", ON_SEVERAL_HOSTS, first, replicas)
    yield _in_one_process("central_storage", devices, "cpu:0")
    yield _in_processes("central_storage", ON_ONE_HOST, first, replicas, central=True, shares_memory=True)
    yield _in_processes("central_storage", ON_SEVERAL_HOSTS, first, replicas, central=True)
    on_tpu = [Copies(f"tpu:{number}", 1, 1, 1, 1, 0) for number in range(replicas)]
    yield Way("tpu", ONE_PROCESS, replicas, on_tpu, [True] * replicas, lambda sizes: [_sum(sizes, replicas)] * replicas)


def _in_one_process(strategy: str, devices: Sequence[str], home: str | None = None) -> Way:
    """Gradients go to the first replica, and the combined ones from there to all who have them. Values go to every
    other copy when a run starts, and again after an optimizer's step."""
    copies = copies_in_one_process(devices, home)
    others = len(devices) - 1
    has_home = len(copies) > len(devices)  # apart from the replicas

    def sent(sizes: Sizes) -> list[int]:
        from_others = [sizes.gradients] * others
        if has_home:
            return [2 * len(devices) * sizes.parameters, (others + 1) * sizes.gradients, *from_others]
        return [others * (sizes.gradients + 2 * sizes.parameters), *from_others]

    return Way(strategy, ONE_PROCESS, len(devices), copies, [*[False] * has_home, *[True] * len(devices)], sent)


def _in_processes(
    strategy: str,
    processes: str,
    device: str,
    replicas: int,
    *,
    central: bool = False,
    shares_memory: bool = False,
    sums_in_place: bool = False,
) -> Way:
    is_staged = shares_memory and not device.startswith("cpu")
    copies = copies_in_processes(
        device,
        replicas,
        central=central,
        shares_variables=shares_memory,
        sums_in_place=sums_in_place or shares_memory,
        is_staged=is_staged,
    )

    def sent(sizes: Sizes) -> list[int]:
        if is_staged:  # from the device to host memory, and back
            return [sizes.gradients, sizes.parameters] * replicas
        own = [_sum(sizes, replicas)] * replicas
        if central and not shares_memory:
            own[0] += (replicas - 1) * sizes.parameters
        return own

    computes = [True, False] * replicas if is_staged else [True] * replicas
    return Way(strategy, processes, replicas, copies, computes, sent)


def _sum(sizes: Sizes, replicas: int) -> int:
    return 2 * sizes.gradients * (replicas - 1) // replicas

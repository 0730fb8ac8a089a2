"""Runs drawn programs plainly and in every place, and says what differs, as a text that runs alone."""

from __future__ import annotations

import contextlib
import linecache
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.matrix import places
from tests.matrix.table import assert_close
from torchstrat.errors import TorchstratError
from torchstrat.testing import Workers
from torchstrat.testing.fake_cluster import FakeCluster
from torchstrat.testing.fake_tpu import fake_tpu_strategy
from torchstrat.testing.training import dtype_and_seed

Numbers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """A strategy with its launch."""

    strategy: str
    """The expression that makes it, in a program that imports ``torchstrat as ts``."""
    processes: int = 1
    needs: str = ""
    """A context around it, which ``cluster`` is the name of."""


def _mirrored(arguments: str) -> str:
    return f"ts.MirroredStrategy({arguments}gradient_reduce_op=REDUCE_OP)"


def _central(arguments: str) -> str:
    return f"ts.CentralStorageStrategy({arguments}gradient_reduce_op=REDUCE_OP)"


PLACES: Mapping[str, Place] = {
    "one_device": Place('ts.OneDeviceStrategy("cpu")'),
    "mirrored x2": Place(_mirrored('["cpu:0", "cpu:1"], ')),
    "mirrored x3": Place(_mirrored('["cpu:0", "cpu:1", "cpu:2"], ')),
    "central_storage x2": Place(_central('["cpu:0", "cpu:1"], ')),
    "central_storage x3": Place(_central('["cpu:0", "cpu:1", "cpu:2"], ')),
    "torchrun mirrored": Place(_mirrored(""), 2),
    "torchrun multi_worker_mirrored": Place(
        'ts.MultiWorkerMirroredStrategy(collectives="process_group", gradient_reduce_op=REDUCE_OP)', 2
    ),
    "torchrun central_storage": Place(_central(""), 2),
    "torchrun central_storage on sockets": Place(_central('collectives="process_group", '), 2),
    "two logical devices": Place(
        "ts.MirroredStrategy(logical_devices_per_replica=2, gradient_reduce_op=REDUCE_OP, sharding_rules=RULES)", 2
    ),
    places.TPU: Place("fake_tpu_strategy(2, gradient_reduce_op=REDUCE_OP)"),
    "servers in memory": Place("cluster.strategy(None, rows_only=False)", needs="FakeCluster(workers=1, ps=2)"),
    "servers in processes": Place(
        "ts.ParameterServerStrategy(cluster.resolver, rows_only=False)",
        needs="ts.testing.LocalCluster(workers=2, ps=2)",
    ),
}

_FOOTER = """

if __name__ == "__main__":  # {launch}
    from torchstrat.testing.fake_cluster import FakeCluster
    from torchstrat.testing.fake_tpu import fake_tpu_strategy

    torch.set_default_dtype(torch.float64)
    wanted = train()
    with {needs} as cluster:
        strategy = {strategy}
        seen = train(strategy)
        strategy.close()
    for name, number in wanted.items():
        print(name, "differs by", float((seen[name] - number).abs().max()))
"""


def standalone(source: str, place: str) -> str:
    """The program as a script that shows what it comes to in that place."""
    where = PLACES[place]
    launch = f"torchrun --nproc-per-node {where.processes} program.py" if where.processes > 1 else "python program.py"
    return source + _FOOTER.format(launch=launch, needs=where.needs or "nullcontext()", strategy=where.strategy)


def plain(source: str, moved_by: int | None = None) -> Numbers:
    """What the program comes to without a strategy; ``moved_by``: a seed, to move every weight by one ulp first."""
    names = _loaded(source)
    if moved_by is not None:
        build = names["build"]

        def moved() -> Any:
            program = build()
            move_by_one_ulp(program["model"], moved_by)
            return program

        names["build"] = moved
    with dtype_and_seed(torch.float64, 0), quiet():
        return names["train"]()  # type: ignore[no-any-return]


def move_by_one_ulp(model: torch.nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            real = torch.view_as_real(p) if p.is_complex() else p
            away = torch.where(torch.randint(0, 2, real.shape, generator=draw) > 0, torch.inf, -torch.inf)
            real.copy_(real.nextafter(away.to(real.dtype)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What PyTorch and this library advise is not asked for here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _loaded(source: str) -> dict[str, Any]:
    name = f"<program {hash(source):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    # No module that could be imported: its functions travel by value, as those of a script do.
    names: dict[str, Any] = {"__name__": "generated_program"}
    exec(compile(source, name, "exec"), names)
    return names


def here(source: str, place: str, cluster: Any = None) -> Numbers | str:
    """What the program comes to in that place, in this process of it; the text of an error of ours that refuses it."""
    names = _loaded(source)
    return run_in(place, names["train"], names, cluster)


def run_in(place: str, train: Callable[[Any], Numbers], names: Mapping[str, Any], cluster: Any = None) -> Numbers | str:
    """What ``train`` comes to with the strategy of that place; ``names``: what its expressions find beside ours."""
    where = PLACES[place]
    known = {"FakeCluster": FakeCluster, "fake_tpu_strategy": fake_tpu_strategy, **names}
    with dtype_and_seed(torch.float64, 0), quiet(), contextlib.ExitStack() as stack:
        if where.needs and cluster is None:
            cluster = stack.enter_context(eval(where.needs, known))
        strategy = eval(where.strategy, known | {"cluster": cluster})
        try:
            return train(strategy)
        except TorchstratError as error:
            return f"refused: {type(error).__name__}: {error}"
        except Exception:
            return "failed: " + traceback.format_exc()
        finally:
            strategy.close()


class Runner:
    """Runs programs in all places; keeps the processes and the cluster between them. A context manager."""

    def __init__(self, with_cluster: bool = False) -> None:
        self._workers = Workers(2)
        self._stack = contextlib.ExitStack()
        self._with_cluster = with_cluster
        self._cluster: Any = None

    def __enter__(self) -> Runner:
        from torchstrat.testing import LocalCluster

        self.start()
        self._stack.callback(self._workers.close)
        if self._with_cluster:
            self._cluster = self._stack.enter_context(LocalCluster(workers=2, ps=2))
        return self

    def start(self) -> None:
        """Start the processes that are not running: the first ones, and those of a run that has failed."""
        self._workers.start()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, source: str, place: str) -> list[Numbers | str]:
        """By process: its numbers, or the text of the error."""
        if PLACES[place].processes == 1:
            cluster = self._cluster if place == "servers in processes" else None
            return [here(source, place, cluster)]
        return self._workers.run(here, source, place, timeout_seconds=120)


def complaint(source: str, place: str, run: Callable[[str, str], list[Numbers | str]], wanted: Numbers) -> str:
    """What is wrong with the program in that place: "refused: …", "failed: …", "differs …", or "" if nothing is."""
    for rank, seen in enumerate(run(source, place)):
        if isinstance(seen, str):
            return seen
        try:
            assert_close(seen, wanted)
        except AssertionError as error:
            return f"differs, process {rank}: {error}"
    return ""


def is_well_conditioned(source: str, wanted: Numbers) -> bool:
    """Whether its own numbers stay within a tenth of the tolerance where every weight moves by one ulp."""
    try:
        for seed in range(5):
            assert_close(plain(source, moved_by=seed), wanted, 1e-11)
    except AssertionError:
        return False
    return True

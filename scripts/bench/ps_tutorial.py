"""A parameter server as tutorials write it, on torch.distributed.rpc. ``python ps_tutorial.py ROLE INDEX WORKLOAD …``

A static group of processes; an object on every server, reached by a remote reference; a worker pulls parameters, and
pushes gradients that the server's optimizer applies under a lock. Rows of the table travel by ids. One call per server
and direction in every step, sent to all servers before the first answer is waited for. Options are rpc's defaults. What
a tutorial leaves out is left out here: no restart, no exactly-once, and parameters may change while they are read.

Each server holds its part of every parameter, cut along the first axis.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence

import ps_stage
import torch
import torch.nn.functional as F
from ps_workloads import Batch, ClickModel, Problem, Workload, do_nothing, from_arguments
from torch import nn
from torch.distributed import rpc

TABLE = "table.weight"


class Server:
    """One server's part of every parameter, and the optimizer over it."""

    def __init__(self, index: int, workload: Workload) -> None:
        torch.set_num_threads(1)
        model, _ = workload.make()
        self._lock = threading.Lock()
        self._parts = {
            name: nn.Parameter(parameter.detach().tensor_split(workload.servers)[index].clone())
            for name, parameter in model.named_parameters()
        }
        self._optimizer = workload.make_optimizer([part for part in self._parts.values() if len(part)])

    def pull(self, ids: torch.Tensor | None) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """The dense parameters, and the rows ``(ids, dim)`` of the table."""
        dense = {name: part.detach() for name, part in self._parts.items() if name != TABLE}
        with self._lock:
            return dense, None if ids is None else self._parts[TABLE].detach()[ids]

    def push(self, gradients: dict[str, torch.Tensor], ids: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        """Step on dense gradients, and on those of some rows of the table."""
        with self._lock:
            for name, gradient in gradients.items():
                self._parts[name].grad = gradient
            if ids is not None and rows is not None:
                table = self._parts[TABLE]
                table.grad = torch.sparse_coo_tensor(ids[None], rows, table.shape, is_coalesced=True)
            self._optimizer.step()


_server: Server | None = None
_making = threading.Lock()


def get_server(index: int, workload: Workload) -> Server:
    """This process's one server: every worker asks for it, the first makes it."""
    global _server
    with _making:
        if _server is None:
            _server = Server(index, workload)
    return _server


class Worker:
    def __init__(self, index: int, workload: Workload) -> None:
        assert workload.problem is not None
        self._problem: Problem = workload.problem
        self._servers = [
            rpc.remote(f"server{number}", get_server, args=(number, workload)) for number in range(workload.servers)
        ]
        self._model, _ = workload.make()
        if isinstance(self._model, ClickModel):
            self._starts = _starts(self._model.table.num_embeddings, workload.servers)
            self._model.table = nn.Embedding(1, 1)  # the servers have it
        self._dense = {name: p for name, p in self._model.named_parameters() if name != TABLE}

    def step(self, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        self._model.zero_grad()
        if isinstance(self._model, ClickModel):
            ids, features = inputs
            unique, places = torch.unique(ids, return_inverse=True)
            by_server = self._split(unique)
            rows = torch.cat(self._pull(by_server)).requires_grad_()
            predictions = self._model.from_vectors(F.embedding(places, rows), features)
            loss = self._problem.loss(predictions, targets)
            loss.backward()
            assert rows.grad is not None
            self._push(by_server, list(rows.grad.split([len(ids) for ids in by_server])))
        else:
            self._pull([None] * len(self._servers))
            loss = self._problem.loss(self._model(*inputs), targets)
            loss.backward()
            self._push([None] * len(self._servers), [None] * len(self._servers))
        return loss.detach()

    def _split(self, unique: torch.Tensor) -> list[torch.Tensor]:
        """``unique``: sorted ids of the table; each server's, counted from its own first row."""
        ends = [*torch.searchsorted(unique, torch.tensor(self._starts[1:])).tolist(), len(unique)]
        begins = [0, *ends[:-1]]
        return [unique[b:e] - start for b, e, start in zip(begins, ends, self._starts, strict=True)]

    def _pull(self, ids: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        answers = [server.rpc_async().pull(own) for server, own in zip(self._servers, ids, strict=True)]
        parts, rows = zip(*(answer.wait() for answer in answers), strict=True)
        with torch.no_grad():
            for name, parameter in self._dense.items():
                torch.cat([part[name] for part in parts], out=parameter.data)
        return list(rows)

    def _push(self, ids: Sequence[torch.Tensor | None], rows: Sequence[torch.Tensor | None]) -> None:
        gradients = {name: parameter.grad.tensor_split(len(self._servers)) for name, parameter in self._dense.items()}
        answers = [
            server.rpc_async().push({name: parts[number] for name, parts in gradients.items()}, own_ids, own_rows)
            for number, (server, own_ids, own_rows) in enumerate(zip(self._servers, ids, rows, strict=True))
        ]
        for answer in answers:
            answer.wait()


def _starts(rows: int, servers: int) -> list[int]:
    """The first row of each server's part, as ``tensor_split`` cuts."""
    sizes = [len(part) for part in torch.empty(rows, device="meta").tensor_split(servers)]
    return list(itertools.accumulate(sizes[:-1], initial=0))


def train(index: int, workload: Workload) -> None:
    worker = Worker(index, workload)
    batches = itertools.cycle(workload.batches(index))
    for _ in range(workload.warm_up_steps):
        worker.step(next(batches))
    ps_stage.ready()
    began = time.perf_counter()
    losses = [worker.step(next(batches)) for _ in range(workload.steps)]
    wall = (time.perf_counter() - began) / workload.steps
    ps_stage.finished(wall=wall, losses=[float(loss) for loss in losses])


def call(workload: Workload) -> None:
    """The caller: no server, ``workload.workers`` processes that are called in turn."""
    callees = itertools.cycle([f"worker{index}" for index in range(workload.workers)])
    calls = workload.steps * workload.workers

    def run(number: int) -> None:
        if workload.one_by_one:
            for _ in range(number):
                rpc.rpc_sync(next(callees), do_nothing)
        else:
            torch.futures.wait_all([rpc.rpc_async(next(callees), do_nothing) for _ in range(number)])

    run(workload.warm_up_steps * workload.workers)
    ps_stage.ready()
    began = time.perf_counter()
    run(calls)
    ps_stage.finished(wall=(time.perf_counter() - began) / calls)


def main(role: str, index: int, workload: Workload) -> None:
    """``role``: ``server`` and ``worker`` where something is trained, ``caller`` and ``worker`` where calls are."""
    torch.set_num_threads(1)
    rpc.init_rpc(f"{role}{index}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    if role == "caller":
        call(workload)
    elif role == "worker" and workload.problem is not None:
        train(index, workload)
    rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), from_arguments(sys.argv[3:]))

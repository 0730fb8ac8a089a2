"""Every public call that involves other processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import torchstrat as ts
from tests.matrix.forked_cells import folder
from tests.matrix.lone_call_job import Job
from torchstrat import PerReplica


@dataclass(frozen=True)
class Row:
    """One call. ``says``: what an error has to call it. ``twin``: another call that exchanges what looks the same.

    ``before``: what every process makes first. ``like``: columns whose call is the same one.
    """

    name: str
    call: Callable[[Job], Any]
    says: str
    before: Sequence[Callable[[Job], Any]] = ()
    twin: str = ""
    like: str = ""
    central: bool = False
    """Whether it is another thing in central storage: then it has cells there, too."""
    only_central: bool = False
    without: Sequence[str] = ()
    """Columns that say nothing about it: the other rank's part is one that the call allows."""


def _in_run(name: str, call: Callable[[Job], Any], says: str, **options: Any) -> Row:
    return Row(name, lambda job: job.run(lambda: call(job)), says, **options)


def _replica() -> ts.ReplicaContext:
    found = ts.get_replica_context()
    assert found is not None
    return found


def _ones(job: Job) -> torch.Tensor:
    return torch.full((2,), job.rank + 1.0)


def _sparse(job: Job) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[job.rank]]), torch.ones(1), (2,), check_invariants=True)


def _new_variables(job: Job) -> None:
    with job.strategy.scope():
        job.other = nn.Linear(3, 3)  # type: ignore[attr-defined]


def _new_variable(job: Job) -> ts.Variable:
    with job.strategy.scope():
        return ts.Variable(torch.zeros(2), name="new")


def _to_the_end(job: Job) -> None:
    for _ in job.started:
        pass


def _each_own(job: Job) -> PerReplica:
    return PerReplica((torch.ones(2),), replica_ids=(job.rank,))


def _batches(job: Job) -> Any:
    return job.batches


def _started(job: Job) -> Any:
    return job.started


def _stream(job: Job) -> Any:
    return job.stream


def _save(job: Job, name: str = "new", **options: Any) -> Any:
    return job.checkpoint.save(folder() / name, **options)


def _normalised(job: Job) -> torch.Tensor:
    layer = ts.convert_sync_batchnorm(nn.BatchNorm1d(4))
    return layer(torch.randn(4, 4))


def _global_mean(job: Job) -> torch.Tensor:
    return ts.global_mean(job.loss(), torch.tensor(4.0))


def _closure(job: Job) -> None:
    def closure() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.loss()
        loss.backward()
        return loss

    job.optimizer.step(closure)


def _clipped(job: Job) -> torch.Tensor:
    job.backward()
    return nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)


def _cut_gradient(job: Job) -> torch.Tensor:
    job.backward()
    found = job.model[0].weight.grad
    assert found is not None
    return found


_STEP = r"backward\(\)|SGD\.step|end of a run|run \(all logical devices"

_NOT_HEARD = ("raises", "fails in a run, and stays", "fails in a run, and makes it")
"""What a rank tells of its failure stays within its strategy: who waits in another group learns that its process has
ended, and else nothing before the timeout."""

ROWS = (
    Row("run", lambda job: job.run(lambda: None), "end of a run", like="runs nothing"),
    Row("run of a step", lambda job: job.run(job.step), _STEP, like="runs a step", central=True),
    Row("reduce", lambda job: job.strategy.reduce("sum", job.value()), r"reduce\(sum", like="reduces", twin="read"),
    Row("reduce along an axis", lambda job: job.strategy.reduce("mean", job.value(), axis=0), r"reduce\(mean, axis"),
    Row(
        "reduce by weights",
        lambda job: job.strategy.reduce("mean", job.losses, weighted=True),
        "weighted=True",
        before=(lambda job: job.losses,),
    ),
    Row("reduce of a large value", lambda job: job.strategy.reduce("mean", job.value(400_000)), r"reduce\(mean"),
    Row("reduce of a number", lambda job: job.strategy.reduce("sum", 2.0), "of a Python number"),
    Row("gather", lambda job: job.strategy.gather(job.value(), axis=0), r"gather\(axis=0\)", twin="reduce"),
    Row(
        "reduce_to",
        lambda job: job.strategy.extended.reduce_to("sum", job.value(), "cpu:0"),
        "reduce_to",
        twin="reduce",
    ),
    Row("read", lambda job: job.counted.read_value(), "reading Variable 'counted'", twin="reduce", central=False),
    Row("scope", _new_variables, "initial values", central=True),
    Row("variable in a scope", _new_variable, "first value of Variable 'new'", twin="reduce", central=True),
    Row(
        "assign each its own",
        lambda job: job.mean.assign(_each_own(job)),
        "assign of Variable 'mean'",
        twin="reduce",
        only_central=True,
    ),
    Row("check_replicas", lambda job: job.strategy.extended.check_replicas(), "check_replicas", central=True),
    Row("optimizer step outside", lambda job: job.optimizer.step(), r"SGD\.step", only_central=True),
    # -- data
    Row("distribute_dataset", lambda job: job.batches, "distribute_dataset"),
    Row(
        "distribute_datasets_from_function",
        lambda job: job.stream,
        "distribute_dataset",
        without=("asks for its next batch",),  # for which it is made before
    ),
    Row(
        "next batch",
        lambda job: next(job.stream[1]),
        "rows of the next step",
        before=(_stream,),
        like="asks for its next batch",
        twin="state of a data set",
    ),
    Row("first batch", lambda job: next(job.batches), "checksum of the first batch", before=(_batches,)),
    Row(
        "end of a pass",
        _to_the_end,
        "end of a pass",
        before=(_started,),
        # Which drops its iterator: who leaves a loop early has nothing against the pass; nor has a run that has failed.
        without=("ends", "raises", "fails in a run, and makes it"),
    ),
    Row(
        "state of a data set",
        lambda job: job.stream[0].state_dict(),
        "position in a distributed dataset",
        before=(_stream,),
        twin="next batch",
    ),
    # -- checkpoints
    Row("save", _save, r"Checkpoint\.save", like="saves", twin="save by a manager", central=True),
    Row(
        "save in the background", lambda job: _save(job, asynchronous=True).result(), r"Checkpoint\.save", like="saves"
    ),
    Row(
        "restore",
        lambda job: job.checkpoint.restore(job.saved),
        r"Checkpoint\.restore",
        before=(lambda job: job.saved,),
        twin="save",
        central=True,
    ),
    Row(
        "restore of a part",
        lambda job: job.checkpoint.restore(job.saved, only=("model",)),
        r"Checkpoint\.restore\(only=\('model',\)\)",
        before=(lambda job: job.saved,),
        twin="restore",
    ),
    Row(
        "save by a manager",
        lambda job: job.manager.save(job.checkpoint, 2),
        r"CheckpointManager\.save",
        twin="save",
    ),
    Row(
        "restore by a manager",
        lambda job: job.manager.restore(job.checkpoint),
        r"CheckpointManager\.restore",
        before=(lambda job: job.managed,),
        twin="restore",
    ),
    Row("claim by a manager", lambda job: job.manager.claim(), r"CheckpointManager\.claim", twin="save by a manager"),
    # -- jobs
    Row(
        "should_stop",
        lambda job: [job.handler.should_stop() for _ in range(2)],
        r"agreement to stop|start of a group|first meeting",
        before=(lambda job: job.handler,),
        without=_NOT_HEARD,
    ),
    Row(
        "another strategy",
        lambda job: type(job.strategy)(timeout=job.timeout).close(),
        r"start of a group|first meeting",
        without=_NOT_HEARD,
    ),
    # -- in a step
    _in_run(
        "all_reduce", lambda job: _replica().all_reduce("sum", _ones(job)), r"all_reduce\(sum\)", twin="assign_add"
    ),
    _in_run("all_gather", lambda job: _replica().all_gather(_ones(job), 0), r"all_gather\(axis=0\)", twin="all_reduce"),
    _in_run("merge_call", lambda _: _replica().merge_call(lambda *_: None), "merge_call"),
    _in_run(
        "update", lambda job: job.strategy.extended.update(job.mean, lambda v: v.assign(torch.ones(2))), "merge_call"
    ),
    _in_run(
        "assign",
        lambda job: job.total.assign(_ones(job)),
        "assign of Variable 'total'",
        twin="assign_add",
        central=True,
    ),
    _in_run(
        "assign_add",
        lambda job: job.total.assign_add(_ones(job)),
        "assign_add of Variable 'total'",
        twin="assign_sub",
        central=True,
    ),
    _in_run(
        "assign_sub", lambda job: job.total.assign_sub(_ones(job)), "assign_sub of Variable 'total'", twin="all_reduce"
    ),
    _in_run(
        "assign to another variable",
        lambda job: job.mean.assign(_ones(job)),
        "assign of Variable 'mean'",
        twin="assign",
        central=True,
    ),
    _in_run(
        "scatter_add", lambda job: job.total.scatter_add(_sparse(job)), "scatter_add of Variable 'total'", central=True
    ),
    _in_run(
        "variable in a step",
        lambda _: ts.Variable(torch.zeros(2), name="late"),
        "first value of Variable 'late'",
        twin="all_gather",
    ),
    _in_run("backward", Job.backward, r"backward\(\)|end of a run"),
    _in_run("optimizer step", lambda job: job.optimizer.step(), r"SGD\.step|end of a run", central=True),
    _in_run("step with a closure", _closure, r"SGD\.step|closure|backward|end of a run", central=True),
    _in_run("synchronised batch norm", _normalised, r"first values of a SyncBatchNorm1d|all_gather\(axis=0\)"),
    _in_run("global mean", _global_mean, r"all_reduce"),
)
"""On every place with one replica per process."""

_CUT = "on a tensor that is cut over logical devices"
_CUT_STEP = rf"linear {_CUT}|{_STEP}"
"""Where a rank may find itself alone before it comes to the row's call."""

_ANNOUNCED = ("fails in a run, and stays",)
"""A run on logical devices begins with a call of all of them: as "runs nothing", which fails no further."""


def _cut_ones(job: Job) -> torch.Tensor:
    return job.strategy.split_to_logical_devices(torch.ones(4, 2, 8), [1, 1, 2])  # type: ignore[no-any-return]


CUT_ROWS = tuple(
    # A run begins with a call of all logical devices there, which is none of those that another rank is in.
    dataclasses.replace(row, without=(*row.without, "fails in a run, and makes it"))
    for row in (
        dataclasses.replace(ROWS[1], says=_CUT_STEP),
        dataclasses.replace(next(row for row in ROWS if row.name == "save"), without=_ANNOUNCED),
        dataclasses.replace(next(row for row in ROWS if row.name == "restore"), without=_ANNOUNCED),
        Row(
            "state_dict",
            lambda job: job.model.state_dict(),
            rf"called state_dict\(\) {_CUT}|in state_dict\(\) {_CUT}",
            twin="state_dict of an optimizer",
            without=_ANNOUNCED,
        ),
        Row(
            "state_dict of an optimizer",
            lambda job: job.optimizer.state_dict(),
            rf"optimizer\.state_dict\(\) {_CUT}",
            before=(lambda job: job.run(job.step),),
            without=_ANNOUNCED,
        ),
        _in_run("sum", lambda job: _cut_gradient(job).pow(2).sum(), rf"sum {_CUT}|{_CUT_STEP}"),
        _in_run("sum of the size of an output", lambda job: _cut_ones(job).sum(2), rf"sum {_CUT}|{_CUT_STEP}"),
        _in_run("norm", lambda job: torch.linalg.vector_norm(_cut_gradient(job)), rf"vector_norm {_CUT}|{_CUT_STEP}"),
        _in_run(
            "full_tensor", lambda job: _cut_gradient(job).full_tensor(), rf"{_CUT}|a sum or an exchange|{_CUT_STEP}"
        ),
        _in_run("clip_grad_norm_", _clipped, rf"norm {_CUT}|{_CUT_STEP}"),
    )
)
"""On two logical devices of one replica, where each process reads its data for itself."""


LOCAL_ROWS: Sequence[tuple[str, Callable[[Job], Any]]] = (
    ("local_results", lambda job: job.strategy.local_results(job.value())),
    ("describe", lambda job: job.strategy.extended.describe()),
    ("estimate", lambda job: job.strategy.extended.estimate(job.model, job.optimizer)),
    ("state_dict", lambda job: [job.model.state_dict(), job.optimizer.state_dict()]),
    ("consolidate", lambda job: ts.consolidate(job.saved, folder() / "model.pt")),
    ("broadcast_to", lambda job: job.strategy.extended.broadcast_to(torch.ones(2), "cpu:0")),
    ("read of a mirrored variable", lambda job: job.total.read_value()),
    ("evaluation", lambda job: job.model.eval()(torch.ones(1, 4))),
)
"""Calls that any process may make alone."""

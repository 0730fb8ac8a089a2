"""Rules about calls that one rank makes alone, switched off: the table has to notice each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from tests.matrix.places import LOGICAL_DEVICES, LOGICAL_ON_SOCKETS
from tests.matrix.table import PlantedFault, switched_off
from torchstrat.checkpoint import job_state
from torchstrat.core.engine import within
from torchstrat.core.variable import variable
from torchstrat.distributed.collectives import agreement, notes, process_group
from torchstrat.distributed.collectives.notes import FailureBoard
from torchstrat.distributed.collectives.shared_memory.lockstep import Lockstep
from torchstrat.replicas.per_process import engine as per_process
from torchstrat.sharding.dtensor.devices import LogicalDevices, SameCalls

SHARED, SOCKETS = "torchrun mirrored", "torchrun multi_worker_mirrored"


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _cell(row: str, column: str, place: str) -> str:
    return f"{row} | {column} | {place}"


def _unchecked(communicator: Any, call: str, headers: list[list[float]], count: int) -> list[list[float]]:
    return [row[1 : count + 1] for row in headers]


def _without_names() -> AbstractContextManager[object]:
    return patch.object(LogicalDevices, "_call", "a sum or an exchange of pieces")


_heard = notes.StoredWords._listen


def _listen_in_vain(self: notes.StoredWords) -> dict[int, str]:
    try:
        return _heard(self)
    except process_group.PeersMissingError:
        return {}


_meet = Lockstep.meet

FAULTS = (
    PlantedFault(
        "an assignment's exchange is not told from another's",
        switched_off(variable, "within", lambda call: within(call) if call.startswith("reading") else nullcontext()),
        (_cell("assign_add", "makes its twin", SHARED), _cell("assign_add", "makes its twin", SOCKETS)),
    ),
    PlantedFault(
        "reading a variable is not told from a reduce",
        switched_off(variable, "within", lambda call: nullcontext() if call.startswith("reading") else within(call)),
        (_cell("read", "makes its twin", SOCKETS),),
    ),
    PlantedFault(
        "ranks that send objects over sockets are not compared",
        switched_off(process_group, "header", lambda kind, call, numbers: agreement.header(kind, "any", numbers)),
        (_cell("next batch", "makes its twin", SHARED), _cell("state of a data set", "makes its twin", SOCKETS)),
    ),
    PlantedFault(
        "who waits does not look what the others wait in",
        switched_off(notes.Standstill, "look", _nothing),
        (_cell("next batch", "runs nothing", SHARED), _cell("next batch", "runs nothing", SOCKETS)),
    ),
    PlantedFault(
        "who waits for words does not look what the others wait in",
        switched_off(process_group._WordsPlace, "look", _nothing),
        (_cell("end of a pass", "is stopped", SOCKETS), _cell("end of a pass", "reduces", SHARED)),
    ),
    PlantedFault(
        "words that do not come are no error",
        switched_off(notes.StoredWords, "_listen", _listen_in_vain),
        (_cell("end of a pass", "is stopped", SHARED),),
    ),
    PlantedFault(
        "saves do not announce themselves",
        switched_off(job_state, "everyone_of", lambda objects: None),
        (_cell("save", "runs a step", SHARED), _cell("save by a manager", "runs nothing", SOCKETS)),
    ),
    PlantedFault(
        "what ranks agree on is not compared",
        switched_off(agreement, "_checked", _unchecked),
        (_cell("reduce", "runs nothing", SHARED), _cell("merge_call", "runs nothing", SOCKETS)),
    ),
    PlantedFault(
        "calls in shared memory are not compared",
        switched_off(Lockstep, "meet", lambda self, seconds, call=0: _meet(self, seconds)),
        (_cell("sum", "runs a step", LOGICAL_DEVICES), _cell("state_dict", "runs a step", LOGICAL_DEVICES)),
    ),
    PlantedFault(
        "exchanges of pieces do not say for which call they are",
        _without_names,
        (_cell("sum", "runs a step", LOGICAL_DEVICES), _cell("state_dict", "runs nothing", LOGICAL_DEVICES)),
    ),
    PlantedFault(
        "calls on tensors that are cut are not compared on sockets",
        switched_off(SameCalls, "expect", _nothing),
        (_cell("sum of the size of an output", "runs a step", LOGICAL_ON_SOCKETS),),
    ),
    PlantedFault(
        "a rank that fails does not say why",
        switched_off(FailureBoard, "post", _nothing),
        (_cell("reduce", "raises", SHARED), _cell("reduce", "raises", SOCKETS)),
    ),
    PlantedFault(
        "who waits does not hear of failures",
        switched_off(notes.Standstill, "_failed", lambda *_: {}),
        (
            _cell("gather", "fails in a run, and stays", SHARED),
            _cell("all_gather", "fails in a run, and stays", SOCKETS),
        ),
    ),
    PlantedFault(
        "nobody sees that a process in shared memory has ended",
        switched_off(Lockstep, "_ended", lambda self: set()),
        (_cell("reduce", "dies", SHARED),),
    ),
    PlantedFault(
        "input does not announce itself",
        switched_off(per_process, "INPUT", "the end of a run (bringing buffers and edited parameters together)"),
        (_cell("distribute_dataset", "runs nothing", SHARED),),
    ),
)

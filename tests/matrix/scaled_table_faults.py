"""Rules about tables whose lookups scale rows switched off one by one, and the cells that have to notice."""

from __future__ import annotations

from unittest.mock import patch

from tests.matrix.table import PlantedFault, cells_at, switched_off
from torchstrat.core import _functional_private
from torchstrat.replicas import scaling_lookups, table_memory
from torchstrat.replicas.in_process.components import Components
from torchstrat.replicas.per_process.step_policies import StepLevels

BY_POSITION = "functional.embedding by position"


def _install_central_unmerged(self: Components) -> None:
    with patch.object(Components, "merge_rows", lambda self: None):
        _install_central(self)


_install_central = Components.install_central


class _Forgets(list[None]):
    def append(self, one: None) -> None:
        pass


FAULTS = (
    PlantedFault(
        "no use is refused",
        switched_off(scaling_lookups._Group, "ask", lambda self, *call: None),
        cells_at("used without gradient", "nn.Embedding", "mirrored x2"),
    ),
    PlantedFault(
        "between processes no use is refused",
        switched_off(scaling_lookups._Group, "ask", lambda self, *call: None),
        cells_at("used without gradient", "nn.Embedding", "torchrun mirrored"),
    ),
    PlantedFault(
        "a function that is compiled in a run keeps its lookups",
        switched_off(_functional_private, "is_compiler_at_work", lambda: False),
        cells_at("looked up and used in a compiled function", BY_POSITION),
    ),
    PlantedFault(
        "views are tensors like others",
        switched_off(scaling_lookups, "share_storage", lambda one, other: False),
        cells_at("used by a view from before, in the second run", "nn.Embedding"),
    ),
    PlantedFault(
        "lookups with any norm are alike",
        switched_off(scaling_lookups._Group, "is_alike", lambda self, norm: True),
        cells_at("looked up with another norm", "functional.embedding"),
    ),
    PlantedFault(
        "rows that a closure's lookups have scaled stay each replica's own",
        switched_off(Components, "merge_rows_in_turn", lambda self: None),
        cells_at("a closure", "nn.Embedding"),
    ),
    PlantedFault(
        "between processes rows that a closure's lookups have scaled stay each rank's own",
        switched_off(StepLevels, "level_edits", lambda self, elsewhere, call: None),
        cells_at("a closure", "nn.Embedding", "torchrun mirrored"),
    ),
    PlantedFault(
        "a merge_call goes on with the rows that the first replica has scaled",
        switched_off(Components, "install_central", _install_central_unmerged),
        cells_at("a merge_call", "nn.Embedding"),
    ),
    PlantedFault(
        "what makes tensors of others asks nobody",
        switched_off(scaling_lookups, "have_readers_ask", lambda kind: lambda: None),
        (
            *cells_at("used by torch.asarray, in the second run", "nn.Embedding", "mirrored x2"),
            *cells_at("used by new_tensor, in the second run", "nn.Embedding", "mirrored x2"),
        ),
    ),
    PlantedFault(
        "a function that has been compiled keeps its lookups",
        switched_off(_functional_private, "_compiled_lookups", _Forgets()),
        cells_at("looked up and used in a function compiled before", BY_POSITION, "mirrored x2"),
    ),
    PlantedFault(
        "ranks do not tell what they have used tables for",
        switched_off(table_memory, "uses_of", lambda uses, keys: {}),
        (
            *cells_at("used where another one looks up", "nn.Embedding", "torchrun mirrored"),
            *cells_at("used where another one looks up, without a step", "nn.Embedding", "torchrun mirrored"),
        ),
    ),
    PlantedFault(
        "ranks do not hear of tables that others look up",
        switched_off(scaling_lookups.ScalingLookups, "hear_of", lambda self, key: None),
        cells_at("looked up on one replica alone", "functional.embedding", "torchrun mirrored"),
    ),
    PlantedFault(
        "nobody looks for what shows a table already",
        switched_off(scaling_lookups, "aliases_of", lambda tables, but: [[] for _ in tables]),
        cells_at("used by an attribute from before, in the second run", "nn.Embedding", "torchrun mirrored"),
    ),
    PlantedFault(
        "nobody looks into the code of a step",
        switched_off(scaling_lookups, "_may_scale", lambda code: False),
        (
            *cells_at("used by .data from before, in the first run", "functional.embedding", "torchrun mirrored"),
            *cells_at("used where another one looks up, before, in the first run", "functional.embedding"),
        ),
    ),
    PlantedFault(
        "a buffer is a table like others",
        switched_off(scaling_lookups.ScalingLookups, "_refuse_buffers", lambda self, table: None),
        cells_at("a buffer is looked up", "nn.Embedding", "mirrored x2"),
    ),
    PlantedFault(
        "nobody listens to operators",
        switched_off(scaling_lookups.ScalingLookups, "around", lambda self, inner: inner),
        (
            *cells_at("used by torch.DoubleTensor", "nn.Embedding"),
            *cells_at("used by torch.DoubleTensor", BY_POSITION, "torchrun mirrored"),
        ),
    ),
    PlantedFault(
        "what a replica has not seen it has not done",
        switched_off(scaling_lookups, "UNSEEN", ""),
        (
            *cells_at("used where another one looks up, before, in the first run", BY_POSITION),
            *cells_at("used where another one looks up, before, in the first run", BY_POSITION, "torchrun mirrored"),
        ),
    ),
    PlantedFault(
        "what shows a table in an array is forgotten",
        switched_off(scaling_lookups, "shows_memory", lambda value: False),
        cells_at("used by NumPy from before", "nn.Embedding"),
    ),
    PlantedFault(
        "registering a hook uses the values",
        switched_off(scaling_lookups, "_NEEDS_NO_VALUES", scaling_lookups.NEEDS_NO_VALUES),
        cells_at("a hook is registered", "nn.Embedding"),
    ),
)

"""Running one recorded case and saying how it ended: passed, differs on purpose, no counterpart, or failed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from tests.conformance.harness import Case, Difference, check, close_strategies

AREAS = (
    "reduce", "gather", "run", "context", "dataset", "dataset_from_function", "rebatch", "input_context",
    "input_options", "values", "values_from_function", "local_results", "merge_call", "all_reduce", "all_gather",
    "extended", "variable_aggregation", "central_storage", "central_train", "multi_worker", "tf_config",
    "cluster_spec", "simple_resolver", "cluster_roles", "cluster_resolver_property", "v1", "replica_context",
    "value_context", "partitioner", "sharded_variable", "sharded_assign", "sharded_ops", "sharded_scatter",
    "sharded_slicing", "embedding_lookup", "union_resolver", "ps_partition", "ps_placement", "ps_strategy",
    "ps_strategy_args", "ps_train", "coordinator", "coordinator_errors", "per_worker_dataset", "fault_tolerance",
    "server", "checkpoint", "topology", "device_assignment", "tpu_resolver", "logical_device", "tpu_strategy",
    "tpu_run", "strategy",
)  # fmt: skip
"""The areas that are replayed."""

Kind = Literal["passed", "differs", "no counterpart", "failed"]


@dataclass(frozen=True)
class Verdict:
    """How a case ended. ``number`` is that of the deliberate difference; ``error`` is why it failed."""

    kind: Kind
    number: int | None = None
    reason: str = ""
    error: BaseException | None = None


@dataclass(frozen=True)
class Adapter:
    """What one module in ``areas/`` says about the cases of its area."""

    ops: dict[str, Callable[[Case], Any]]
    differs: dict[str, Difference]
    no_counterpart: dict[str, str]
    fields_without_counterpart: dict[str, str]


@cache
def load_adapter(area: str) -> Adapter:
    module = importlib.import_module(f"tests.conformance.areas.{area}")
    fields = getattr(module, "FIELDS_WITHOUT_COUNTERPART", {})
    return Adapter(module.OPS, module.DIFFERS, module.NO_COUNTERPART, fields)


def judge(case: Case) -> Verdict:
    """Run ``case``. Every exception of the call is a result to compare; nothing is raised from here."""
    adapter = load_adapter(case.area)
    if case.id in adapter.no_counterpart:
        return Verdict("no counterpart", reason=adapter.no_counterpart[case.id])
    case = without_fields(case, adapter.fields_without_counterpart)
    try:
        actual = _perform(adapter.ops[case.op], case)
        if case.id not in adapter.differs:
            number = check(case, actual)
            return Verdict("passed") if number is None else Verdict("differs", number)
        return _judge_difference(case, adapter.differs[case.id], actual)
    except Exception as error:
        return Verdict("failed", error=error)
    finally:
        close_strategies()


def without_fields(case: Case, fields: Collection[str]) -> Case:
    """``case`` with those fields of its recorded results left out, in every record at any depth."""

    def stripped(recorded: Any) -> Any:
        if isinstance(recorded, dict):
            return {key: stripped(value) for key, value in recorded.items() if key not in fields}
        return [stripped(item) for item in recorded] if isinstance(recorded, list) else recorded

    return replace(case, expect=stripped(case.expect)) if fields else case


def _perform(operation: Callable[[Case], Any], case: Case) -> Any:
    try:
        return operation(case)
    except Exception as error:
        return error


def _judge_difference(case: Case, difference: Difference, actual: Any) -> Verdict:
    difference.promise(case)
    try:
        check(case, actual)
    except AssertionError:
        return Verdict("differs", difference.number, inspect.getdoc(difference.promise) or "")
    raise AssertionError(f"{case.id} is listed as a difference and agrees with TensorFlow: take it off the list")

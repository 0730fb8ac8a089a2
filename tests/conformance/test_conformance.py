"""Every recorded case of the areas that torchstrat implements; ``python -m tests.conformance.report`` sums up."""

from __future__ import annotations

import json

import pytest

from tests.conformance.harness import ACCIDENTS_OF_TENSORFLOW, RULES, Case, load_cases
from tests.conformance.verdicts import AREAS, judge, load_adapter, without_fields

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in load_cases(AREAS)])
def test_case(case: Case) -> None:
    verdict = judge(case)
    if verdict.error is not None:
        raise verdict.error


@pytest.mark.parametrize("area", AREAS)
def test_the_lists_of_exceptions_are_honest(area: str) -> None:
    adapter, cases = load_adapter(area), {case.id: case for case in load_cases([area])}
    excepted = adapter.differs.keys() | adapter.no_counterpart.keys()
    assert not adapter.differs.keys() & adapter.no_counterpart.keys()
    assert excepted <= cases.keys(), "a case that does not exist is listed"
    assert len(excepted) < len(cases), "a whole area is listed"
    assert {case.op for case in cases.values()} - adapter.ops.keys() <= {
        cases[name].op for name in adapter.no_counterpart
    }, "an operation has no adapter"
    assert all(adapter.no_counterpart.values()), "a case has no counterpart for no reason"
    remaining = [without_fields(case, adapter.fields_without_counterpart).expect for case in cases.values()]
    assert {} not in remaining or not adapter.fields_without_counterpart, "all that a case recorded is left out"
    for name, difference in adapter.differs.items():
        assert difference.number in RULES
        failed = '"error"' in json.dumps(cases[name].expect)
        assert difference.number != ACCIDENTS_OF_TENSORFLOW or failed, f"{name}: TensorFlow returned a value"

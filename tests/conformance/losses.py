"""Number 1 of the deliberate differences: TensorFlow drops an incomplete last step, torchstrat never loses a row."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance.differences import Operation
from tests.conformance.harness import Case, Difference, check
from tests.conformance.pipelines import pipeline, rows_of


def keeps_every_row(operation: Operation) -> Difference:
    """``operation`` returns ``{"steps": …, "end": …}``, perhaps as the ``"result"`` of a larger record."""

    def promise(case: Case) -> None:
        """The steps of TensorFlow, and one more with the rows that it drops; replicas without rows get empty ones."""
        actual = operation(case)
        expect = case.expect
        if "result" in expect:
            actual, expect = actual["result"], expect["result"]
        recorded = expect["steps"]
        check(replace(case, expect={"steps": recorded}), {"steps": actual["steps"][: len(recorded)]})
        assert len(actual["steps"]) == len(recorded) + 1
        given = case.inputs.get("dataset_fn") or case.inputs["dataset"]
        text_files = "text file" in given
        found = rows_of(actual["steps"])
        if text_files:  # one line of a single file is what the recording lost
            assert found == [*rows_of(recorded), "f0-4"]
        else:
            assert found == rows_of(list(pipeline(given)))

    return Difference(1, promise)

"""The list of operators for the docs, from the cases that prove them: ``python -m tests.dtensor.operator_list``."""

from __future__ import annotations

from pathlib import Path

from tests.dtensor.operator_cases import CASES, PROVEN_ELSEWHERE

DOCUMENT = Path(__file__).resolve().parents[2] / "torchstrat" / "sharding" / "dtensor" / "OPERATORS.md"

_HEAD = """\
# Operators on tensors that are cut over logical devices

Made by `python -m tests.dtensor.operator_list` from the cases that prove them; do not edit.

Each is proven equal to plain PyTorch, values and gradients, for every way to cut its arguments over 2 and 4 logical
devices, on generated shapes. A name stands for `torch.name`, the method of tensors and `torch.nn.functional.name`.
Whatever is not here raises on a tensor that is cut, and so do the ways to cut in the last column: call
`strategy.replicate_to_logical_devices` on the tensor before it. Tensors that are not cut know all of PyTorch.

| proven as | operators | ways to cut that raise |
|---|---|---|
"""


def text() -> str:
    by_itself = [case.name for case in CASES if case.operators == (case.name,) and not case.refuses]
    rows = [f"| one by one | {_named(by_itself)} | |"]
    for case in CASES:
        if case.name not in by_itself:
            rows.append(f"| {case.name} | {_named(case.operators)} | {case.refuses} |")
    for test in dict.fromkeys(PROVEN_ELSEWHERE.values()):
        names = [name for name, own in PROVEN_ELSEWHERE.items() if own == test]
        rows.append(f"| {test} | {_named(names)} | all other tensors |")
    return _HEAD + "\n".join(rows) + "\n"


def _named(operators: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in operators)


if __name__ == "__main__":
    DOCUMENT.write_text(text(), encoding="utf-8")

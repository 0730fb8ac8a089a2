"""What a step may touch, for the page that shows it: from the one list that the code has."""

from __future__ import annotations

from torchstrat.replicas.state_kinds import KINDS


def state_table() -> str:
    """Markdown: a row for each kind of state."""
    lines = [
        "| state | what a change within a step means | with local steps | compared by `check_replicas` |",
        "|---|---|---|---|",
    ]
    for kind in KINDS:
        compared = "yes" if kind.read is not None else ""
        lines.append(f"| {kind.name} | {kind.rule} | {kind.local or 'the same'} | {compared} |")
    return "\n".join(lines)

"""What is added to an exception that a replica's own code raised."""

from __future__ import annotations

from torchstrat.replicas.engine import StepWeights


def add_replica_note(error: Exception, replica: int, num_replicas: int, weights: StepWeights) -> None:
    """Name the replica, and its rows where these may be the reason. The exception stays the user's own object."""
    note = f"Raised on replica {replica} of {num_replicas}."
    rows = weights.rows_of(replica)
    if rows is not None and weights.batch is not None:
        total = sum(weights.batch.rows)
        note += f" It had {rows} of the {total} rows of this batch."
        if rows <= 1 or rows < max(weights.batch.rows):
            note += " If the step cannot work on so few, set drop_last=True on the loader or use a larger batch."
    if num_replicas > 1 and "through the graph a second time" in str(error):
        note += (
            " If replicas run in one process, they share Python objects: a graph that one has left in a list or object "
            "of the program's is used up by another. Keep it in an attribute of a module, or return it from the step."
        )
    add_note(error, note)


def add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10 has no notes
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])

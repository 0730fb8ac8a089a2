"""How the rows of a global batch are divided over replicas: pure arithmetic, without tensors.

There are two rules, and TensorFlow applies one or the other by the sharding policy (see `AutoShardPolicy`). Neither
loses a row here.

* *Equal chunks*: each batch by itself; every replica gets ``ceil(rows / n)`` rows until none are left.
* *Fixed sizes*: sizes follow from the declared batch size alone and are applied in turn to the stream of rows, across
  the borders of batches; what is left at the end fills the first replicas first.
"""

from __future__ import annotations

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError


def equal_chunks(rows: int, num_replicas: int) -> tuple[int, ...]:
    """Rows of each replica under the equal-chunk rule: 5 rows over 4 replicas are ``(2, 2, 1, 0)``."""
    chunk = -(-rows // num_replicas)
    return tuple(max(0, min(chunk, rows - replica * chunk)) for replica in range(num_replicas))


def fixed_sizes(global_batch: int, num_replicas: int) -> tuple[int, ...]:
    """Rows of each replica under the fixed-size rule: 5 rows over 4 replicas are ``(2, 1, 1, 1)``."""
    each, left_over = divmod(global_batch, num_replicas)
    return tuple(each + (replica < left_over) for replica in range(num_replicas))


def batch_sizes_for_worker(
    global_batch: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> tuple[int, ...]:
    """The sizes that one worker cuts from its own stream of rows under the fixed-size rule, in turn and cyclically.

    Each worker reads all rows of each of its batches, so one batch lasts ``num_workers`` steps. Workers start at
    different places of the same cycle: the sizes of all workers in one step add up to ``global_batch``.

    Args:
        global_batch: rows of a full global batch.
        num_workers: processes.
        num_replicas_per_worker: replicas in each process.
        worker_index: this process, from 0.

    Returns:
        ``num_workers * num_replicas_per_worker`` sizes; the first ``num_replicas_per_worker`` are for the first step.

    Raises:
        InvalidArgumentError: a negative batch, no workers or replicas, or a worker that does not exist.
        WrongTypeError: an argument that is not an int.
    """
    arguments = {
        "global_batch": (global_batch, 0),
        "num_workers": (num_workers, 1),
        "num_replicas_per_worker": (num_replicas_per_worker, 1),
        "worker_index": (worker_index, 0),
    }
    for name, (value, least) in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongTypeError(f"{name} must be an int; got {value!r}.")
        if value < least:
            raise InvalidArgumentError(f"{name}={value} must be at least {least}.")
    if worker_index >= num_workers:
        raise InvalidArgumentError(f"worker_index={worker_index} must be below num_workers={num_workers}.")
    cycle = fixed_sizes(global_batch, num_workers * num_replicas_per_worker)
    start = worker_index * num_replicas_per_worker
    return cycle[start:] + cycle[:start]

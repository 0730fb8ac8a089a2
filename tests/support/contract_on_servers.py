"""The training cases on parameter servers: the same steps, the coordinator's loop. With one worker, the same numbers.

The functions run one after the other, each fetched before the next is scheduled, and the coordinator pulls before it
looks at the model or writes to it: what its own tensors hold is what was last pulled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from torchstrat.errors import ContextError, InvalidArgumentError, NotSendableError, UnsupportedError
from torchstrat.testing.contract import CASES
from torchstrat.testing.training import Batch, Case, Snapshot, named_losses, read, step_for

FETCH_SECONDS = 120.0

REFUSED: Mapping[str, type[Exception]] = {
    "lbfgs": UnsupportedError,  # step(closure)
    "lbfgs_strong_wolfe": UnsupportedError,
    "closure_of_sgd": UnsupportedError,
    # schedulers are stepped by the coordinator
    **{name: ContextError for name in CASES if name.endswith("_scheduler_in_step") or "remade_in_a_module" in name},
    "lazy_in_run": UnsupportedError,  # has no shape when it is to be placed
    "lazy_in_run_drawn": UnsupportedError,
    "tensor_hooks": UnsupportedError,  # hooks on parameters, which workers have others of
    "lazy_layer_behind_the_hooks": UnsupportedError,
    "parameter_made_in_forward": UnsupportedError,  # it would be a worker's alone
    **dict.fromkeys(("group_added_in_step", "layers_put_in", "elements_of_other_shapes"), InvalidArgumentError),
    **{name: UnsupportedError for name in CASES if name.startswith("layers_taken_out")},
    "group_removed": UnsupportedError,
    **{name: UnsupportedError for name in CASES if "replaced_in_step" in name},
    "stepped_outside_of_runs": ContextError,  # the gradients are on the worker, and the step is the coordinator's
    "sharpness_aware": UnsupportedError,  # puts state into an optimizer outside of its step()
    "elements_exchanged_outside": UnsupportedError,  # for a moment two parameters have one memory
    "lookahead_without_hooks": UnsupportedError,  # not known where it is made, and may look at all it steps
    "lookahead_with_plain_hooks": UnsupportedError,
    "lookahead_without_hooks_idle": UnsupportedError,
    "several_in_one": UnsupportedError,
    "settings_of_the_thread": NotSendableError,
    "torch_script": UnsupportedError,
    "traced": UnsupportedError,
    "pruned_further": UnsupportedError,  # by what a forward pass has made on the worker
}
"""Cases that parameter servers refuse, and the error that says so."""

PYTHON_STATE: Mapping[str, str] = {
    "built_in_run": "the model is made by the function, so it is the worker's own",
    "built_in_run_drawn": "the model is made by the function, so it is the worker's own",
    "everything_made_in_first_run": "the model is made by the function, so it is the worker's own",
    "buffers_of_every_kind": "one is made by the function, so it is the worker's own",
    "members_set_anew_beside_made": "a number in an attribute, and the coordinator's is looked at",
    "members_set_anew": "a number in an attribute, and the coordinator's is looked at",
    "gradients_given_between_steps": "the coordinator's gradients, and every worker has its own",
    **{name: "the same" for name in CASES if name.endswith("_between_runs") or "penal" in name},
    "rate_set_by_hand": "the function sets its worker's copy of the learning rate",
    "deepcopy_kept_between_steps": "the coordinator clears a dict of which the worker has a copy",
    "grad_scaler_updated_between_steps": "every worker has a scaler of its own",
    "grad_scaler": "every worker has a scaler of its own, and the coordinator's is looked at",
    "grad_scaler_overflow": "every worker has a scaler of its own, and the coordinator's is looked at",
    "dropout": "every function has random numbers of its own",
}
"""Cases that look at Python state, which is a copy per worker, or at the program's random state."""


def run_case_on_servers(case: Case, strategy: Any, *, workers: int = 1) -> Snapshot:
    """Train under a `ParameterServerStrategy`, and read everything the case watches. ``workers``: with several, each
    runs a function in turn, and those that only accumulate do so under ``no_sync``."""
    import torchstrat as ts

    with case.conditions():
        with strategy.scope():
            training = case.build()
            begun = ts.Variable(torch.tensor(0), name="begun")
        coordinator = ts.ClusterCoordinator(strategy)
        losses: list[torch.Tensor] = []
        for index, batch in enumerate(case.batches()):
            strategy.extended.pull()
            training.before(index)
            step = step_for(training, index)

            leaves = workers > 1 and training.no_sync and index in training.accumulate_on

            def function(batch: Batch, index: int = index, step: object = step, leaves: bool = leaves) -> Any:
                if workers > 1:
                    begun.assign_add(1)
                    while int(begun.read_value()) < (index + 1) * workers:  # so each worker has one
                        time.sleep(0.001)
                    if coordinator.get_current_worker_index() != index % workers:
                        return None
                with strategy.no_sync() if leaves else nullcontext():
                    return strategy.run(step, args=(batch,))

            values = [coordinator.schedule(function, args=(batch,)) for _ in range(workers)]
            [result] = [found for value in values if (found := value.get(timeout=FETCH_SECONDS)) is not None]
            loss = strategy.reduce("mean", result, axis=0)
            strategy.extended.pull()
            training.after(index, loss)
            losses.append(loss)
        strategy.extended.pull()
        snapshot = {**named_losses(losses), **read(training.watch)}
        return snapshot | {f"{name} on replica 0": number for name, number in snapshot.items()}

"""Second names. Every method here is one of `Strategy` under the spelling of an older ``tf.distribute`` document.

`ExperimentalNames` are the ``experimental_`` spellings, `VersionOneCalls` what TensorFlow 1 programs call besides.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torchstrat.core import context
from torchstrat.core.context import RunOptions, StrategyLike, engine_of
from torchstrat.core.errors import UnsupportedError, WrongTypeError
from torchstrat.core.values import require_callable
from torchstrat.core.variable.storage import spans_processes
from torchstrat.data import v1_iterators
from torchstrat.data.distribute import distribute_dataset
from torchstrat.data.options import InputReplicationMode
from torchstrat.data.pipeline import ArrayDataset
from torchstrat.data.v1_iterators import InputIterator
from torchstrat.sharding.annotations import LogicalDeviceMethods

_DEVICES = (
    "torchstrat chooses how devices exchange tensors; leave cross_device_ops out. Between processes, "
    "collectives='process_group' keeps them off shared memory (torchstrat/MIGRATION.md)"
)
WITHOUT_COUNTERPART = dict.fromkeys(
    ("CrossDeviceOps", "NcclAllReduce", "HierarchicalCopyAllReduce", "ReductionToOneDevice"), _DEVICES
)
"""Names of ``tf.distribute`` that programs spell out and torchstrat lacks, and what to do instead."""


class ExperimentalNames(LogicalDeviceMethods, StrategyLike):
    """The ``experimental_`` spellings of `Strategy`'s methods: the same functions under their second names."""

    def experimental_distribute_dataset(self, dataset: object, options: object = None) -> Any:
        """`Strategy.distribute_dataset`."""
        return self.distribute_dataset(dataset, options)

    def experimental_distribute_datasets_from_function(self: Any, dataset_fn: object, options: object = None) -> Any:
        """`Strategy.distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self: Any, value_fn: object) -> Any:
        """`Strategy.distribute_values_from_function`."""
        return self.distribute_values_from_function(value_fn)

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """`Strategy.local_results`."""
        return self.local_results(value)

    def experimental_split_to_logical_devices(self, tensor: object, partition_dimensions: Sequence[int]) -> Any:
        """`Strategy.split_to_logical_devices`."""
        return self.split_to_logical_devices(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: object) -> Any:
        """`Strategy.replicate_to_logical_devices`."""
        return self.replicate_to_logical_devices(tensor)

    def experimental_assign_to_logical_device(self, tensor: object, logical_device_id: int) -> Any:
        """`Strategy.assign_to_logical_device`."""
        return self.assign_to_logical_device(tensor, logical_device_id)

    def experimental_run_v2(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """`Strategy.run`."""
        return self.run(fn, args, kwargs, options)


class VersionOneCalls(StrategyLike):
    """What programs written for TensorFlow 1 call. All of it works on every strategy and under every launch."""

    def experimental_run(self, fn: Callable[..., object], input_iterator: object = None) -> Any:
        """`Strategy.run` of ``fn`` on what ``input_iterator.get_next()`` gives; without an iterator, on nothing.

        Raises `OutOfRangeError` at the end of the data. Every process has to call it.
        """
        require_callable(fn, "experimental_run")
        context.require_cross(self, "experimental_run")  # before a batch is taken that would then be lost
        if input_iterator is None:
            return self.run(fn)
        with context.enter(self, None):  # an iterator of another strategy is an error
            batch = v1_iterators.next_of(input_iterator)
        return self.run(fn, args=(batch,))

    def make_dataset_iterator(self, dataset: object) -> InputIterator:
        """An iterator over the global batches of ``dataset``, split as by `Strategy.distribute_dataset`."""
        return InputIterator(distribute_dataset(self, self._engine.layout, dataset, None))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[..., object],
        replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """An iterator over what ``input_fn(InputContext)`` returns: a dataset of replica batches, or a function that
        is called once per replica and step. See `torchstrat.data.v1_iterators.make_input_fn_iterator`."""
        return v1_iterators.make_input_fn_iterator(self, self._engine.layout, input_fn, replication_mode)

    def experimental_make_numpy_dataset(self, numpy_input: object, session: object = None) -> ArrayDataset:
        """The rows of an array or a nest of arrays as a dataset, one element per row: batch it, then distribute it.

        Lists of arrays are stacked. ``session`` means nothing without graphs. Raises `ContextError` in a replica.
        """
        context.require_cross(self, "experimental_make_numpy_dataset")
        return v1_iterators.array_dataset(numpy_input)

    def update_config_proto(self, config_proto: object) -> Any:
        """A copy of ``config_proto``, a mapping or an OmegaConf config, with what this strategy sets in it.

        That is ``isolate_session_state``: whether no other process shares this one's variables.
        """
        changed = copy.deepcopy(config_proto if isinstance(config_proto, MutableMapping) else _as_dict(config_proto))
        _set_settings(changed, self)
        return changed

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: object = None,
        task_id: object = None,
    ) -> None:
        """`update_config_proto` on ``session_config`` itself. A cluster belongs into the strategy's constructor."""
        if cluster_spec is not None or task_type is not None or task_id is not None:
            raise UnsupportedError(
                f"configure cannot give a {type(self).__name__} another cluster after it was made; describe the "
                "cluster by TF_CONFIG or torchrun, or pass a cluster_resolver to the strategy that takes one."
            )
        if session_config is not None:
            _set_settings(session_config, self)

    def unwrap(self, value: object) -> tuple[Any, ...]:
        """`Strategy.local_results`."""
        return self.local_results(value)

    def group(self, value: object, name: str | None = None) -> Any:
        """The one component of ``value``. None where there are several: in a graph that would be an operation that
        runs them all, and here they have run."""
        components = self.local_results(value)
        return components[0] if len(components) == 1 and name is None else None

    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        """`StrategyExtended.colocate_vars_with`."""
        return self.extended.colocate_vars_with(colocate_with_variable)  # type: ignore[no-any-return]


class SeedNames(ExperimentalNames, VersionOneCalls):
    """Everything that `Strategy` answers to besides its own names."""


def _as_dict(config: object) -> dict[str, object]:
    if not isinstance(config, Mapping):
        raise WrongTypeError(f"a session config is a mapping or an OmegaConf config; got {type(config).__name__}.")
    return dict(config)


def _set_settings(config: object, strategy: StrategyLike) -> None:
    if not isinstance(config, MutableMapping):
        raise WrongTypeError(f"configure changes session_config, a mutable mapping; got {type(config).__name__}.")
    # Whoever has such a config has imported omegaconf. Its struct and read-only flags speak about the user's own keys.
    omegaconf = sys.modules.get("omegaconf")
    unlocked: AbstractContextManager[object] = nullcontext()
    if omegaconf is not None and isinstance(config, omegaconf.DictConfig):
        unlocked = omegaconf.flag_override(config, ["struct", "readonly"], False)
    with unlocked:
        config["isolate_session_state"] = not spans_processes(engine_of(strategy))

"""Second names. Every method here is one of `Strategy` under the spelling of an older ``tf.distribute`` document."""

from __future__ import annotations

from typing import Any


class SeedNames:
    """The ``experimental_`` spellings of `Strategy`'s methods: the same functions under their second names."""

    def experimental_distribute_dataset(self: Any, dataset: Any, options: Any = None) -> Any:
        return self.distribute_dataset(dataset, options)

    def experimental_distribute_datasets_from_function(self: Any, dataset_fn: Any, options: Any = None) -> Any:
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self: Any, value_fn: Any) -> Any:
        return self.distribute_values_from_function(value_fn)

    def experimental_local_results(self: Any, value: Any) -> tuple[Any, ...]:
        return self.local_results(value)  # type: ignore[no-any-return]

    def experimental_split_to_logical_devices(self: Any, tensor: Any, partition_dimensions: Any) -> Any:
        return self.split_to_logical_devices(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self: Any, tensor: Any) -> Any:
        return self.replicate_to_logical_devices(tensor)

    def experimental_assign_to_logical_device(self: Any, tensor: Any, logical_device_id: int) -> Any:
        return self.assign_to_logical_device(tensor, logical_device_id)

    def experimental_run_v2(self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        return self.run(fn, args=args, kwargs=kwargs, options=options)

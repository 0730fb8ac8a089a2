"""`RunOptions`: what a caller may say about one `Strategy.run`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchstrat.core.errors import WrongTypeError


class _Fields(NamedTuple):
    experimental_enable_dynamic_batch_size: bool
    experimental_bucketizing_dynamic_shape: bool
    experimental_xla_options: Any


class RunOptions(_Fields):
    """How a step is compiled where steps are compiled (TPUs); everywhere else it is accepted and changes nothing.

    An immutable named tuple. Every field also goes without ``experimental_``.

    Args:
        experimental_enable_dynamic_batch_size: allow the shapes of inputs to change from run to run, each compiled.
            Default True. False: another shape is an error.
        experimental_bucketizing_dynamic_shape: TensorFlow rounds shapes up to a few sizes, to compile less often. Here
            shapes are never changed, because rows that are not there would count in statistics. Default False.
        experimental_xla_options: None, the default. TPUs take the compiler's options from ``XLA_FLAGS`` alone.
        global_view: on TPUs, call the step once with the global batch, the replicas' batches joined, instead of once
            per replica. For models that cannot be mapped over replicas (LSTM). Statistics of the batch (BatchNorm) are
            then those of the global batch, random numbers are drawn for all of it, a loss is its loss, results are
            bare, and there are no collectives. A sum loss is the sum over all rows whatever `gradient_reduce_op` says.
    """

    global_view: bool  # beside the tuple, which is TensorFlow's

    def __new__(
        cls,
        experimental_enable_dynamic_batch_size: bool | None = None,
        experimental_bucketizing_dynamic_shape: bool | None = None,
        experimental_xla_options: object = None,
        *,
        enable_dynamic_batch_size: bool | None = None,
        bucketizing_dynamic_shape: bool | None = None,
        xla_options: object = None,
        global_view: bool = False,
    ) -> RunOptions:
        dynamic = _one_of(
            "enable_dynamic_batch_size", experimental_enable_dynamic_batch_size, enable_dynamic_batch_size
        )
        buckets = _one_of(
            "bucketizing_dynamic_shape", experimental_bucketizing_dynamic_shape, bucketizing_dynamic_shape
        )
        xla = _one_of("xla_options", experimental_xla_options, xla_options)
        options = super().__new__(cls, True if dynamic is None else bool(dynamic), bool(buckets), xla)
        options.global_view = bool(global_view)
        return options

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) and self.global_view == getattr(other, "global_view", False)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((*self, self.global_view))

    def __repr__(self) -> str:
        shown = super().__repr__()
        return f"{shown[:-1]}, global_view=True)" if self.global_view else shown

    enable_dynamic_batch_size = property(lambda self: self.experimental_enable_dynamic_batch_size)
    bucketizing_dynamic_shape = property(lambda self: self.experimental_bucketizing_dynamic_shape)
    xla_options = property(lambda self: self.experimental_xla_options)


def _one_of(name: str, long: object, short: object) -> object:
    if long is not None and short is not None:
        raise WrongTypeError(f"RunOptions was given both {name} and experimental_{name}; they are one field.")
    return short if long is None else long


def require_run_options(options: object) -> None:
    """`run(options=…)`: None or a `RunOptions`."""
    if options is not None and not isinstance(options, RunOptions):
        raise WrongTypeError(f"options must be a ts.RunOptions or None; got {type(options).__name__} {options!r:.80}.")

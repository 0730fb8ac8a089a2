"""The user's own optimizer class, stepping tensors that are handed to it.

The optimizer object itself stays on the coordinator. A server gets its class, its attributes and its hyperparameters,
and makes a stand-in of the same class for each step, with ``param_groups`` and ``state`` of that step alone: so pushes
to different variables step at the same time, and the hyperparameters are those in force where the step was called.

Step hooks (`Optimizer.register_step_pre_hook` and the like) run where the user calls ``optimizer.step()``, on the
worker, and not again on the servers; an ``optimizer.step`` that a learning rate scheduler has wrapped is the worker's
too.
"""

from __future__ import annotations

import collections
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchstrat._torch_private import optimizers_without_compiler, step_without_compiler
from torchstrat.errors import InvalidArgumentError, NotSendableError, UnsupportedError
from torchstrat.optimizer_blocks import step_in_blocks
from torchstrat.parameter_server.messages import StateOfShard
from torchstrat.stand_ins import stand_in_of

Options = Mapping[str, Any]
"""The hyperparameters of a parameter group: everything in it but ``params``."""

_NOT_SENT = {"state", "param_groups", "step"}
"""``step`` as an attribute of the object is a wrapper (of a scheduler, of a scope), not the class's own method."""


class ShardOptimizer:
    """An optimizer class with its attributes, and the hyperparameters its groups had when it was packed.

    Immutable, hence shared by threads.
    """

    def __init__(self, cls: type[Optimizer], attributes: Mapping[str, Any], options: Sequence[Options]) -> None:
        self.cls = cls
        self.options = tuple(options)
        self.attributes = dict(attributes)
        check_supported(cls, self.options)
        self._constructor_makes_state = self._find_whether_constructor_makes_state()
        self._step = step_without_compiler(cls.step)  # hooks run on the worker
        self.needs_sparse = self._find_whether_it_needs_sparse()
        """Whether it steps on sparse gradients alone, as SparseAdam does."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> ShardOptimizer:
        """From an optimizer in this process, which stays as it is."""
        return cls(*_parts_of(optimizer))

    @classmethod
    def from_bytes(cls, blob: bytes) -> ShardOptimizer:
        """From what `pack_optimizer` made. The bytes must come from a peer that is trusted: they are unpickled."""
        try:
            parts = pickle.loads(blob)
        except ModuleNotFoundError as error:
            raise InvalidArgumentError(
                f"a server cannot import {error.name!r}, where the class of an optimizer is defined. Install it there, "
                f"or have it sent: cloudpickle.register_pickle_by_value({error.name}) on the coordinator."
            ) from error
        return cls(*parts)

    @property
    def name(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def initial_state(self, options: Options, parameter: torch.Tensor) -> StateOfShard:
        """The state a parameter has before its first step: empty, or what the class's constructor puts there."""
        if not self._constructor_makes_state:
            return {}
        state: StateOfShard = self._construct(options, parameter).state.get(parameter, {})
        return state

    def step(
        self,
        options: Sequence[Options],
        parameters: Sequence[Sequence[torch.Tensor]],
        states: Mapping[torch.Tensor, StateOfShard],
    ) -> dict[torch.Tensor, StateOfShard]:
        """One step of ``parameters`` (leaves with ``.grad``, a list per group), in place.

        ``states``: what is known of each before; its dictionaries are used as they are. Returns the states after the
        step, for the parameters that have any. If the optimizer raises, parameters and states may be half-stepped.
        """
        stand_in = self.stand_in(options, parameters, states)
        if not step_in_blocks(stand_in, self.call_step):
            self.call_step(stand_in)
        state = stand_in.state
        return {parameter: state[parameter] for group in parameters for parameter in group if parameter in state}

    def call_step(self, stand_in: Optimizer) -> None:
        """Its ``step``, without importing torch's compiler for that."""
        with torch.set_grad_enabled(bool(self.attributes.get("defaults", {}).get("differentiable"))):
            self._step(stand_in)

    def stand_in(
        self,
        options: Sequence[Options],
        parameters: Sequence[Sequence[torch.Tensor]],
        states: Mapping[torch.Tensor, StateOfShard],
    ) -> Optimizer:
        """An optimizer of the class, over these parameters and states. Its constructor does not run."""
        state: dict[torch.Tensor, StateOfShard] = collections.defaultdict(dict)
        state.update(states)
        groups = [{**own, "params": list(tensors)} for own, tensors in zip(options, parameters, strict=True)]
        return stand_in_of(self.cls, self.attributes, groups, state)

    def _find_whether_constructor_makes_state(self) -> bool:
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        try:
            return bool(self._construct(self.options[0], parameter).state)
        except Exception:  # its constructor needs more than its defaults say: then it is taken to make no state
            return False

    def _find_whether_it_needs_sparse(self) -> bool:
        dense = torch.zeros(2, 2)
        return not self._can_step_on(dense) and self._can_step_on(sparse_rows(torch.arange(2), dense, 2))

    def _can_step_on(self, gradient: torch.Tensor) -> bool:
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        parameter.grad = gradient
        groups = [[parameter], *([] for _ in self.options[1:])]
        try:
            states: dict[torch.Tensor, StateOfShard] = {parameter: self.initial_state(self.options[0], parameter)}
            self.step(self.options, groups, states)
        except Exception:  # a class of the user's own: what it can raise is not known; a real step will tell
            return False
        return True

    def _construct(self, options: Options, parameter: torch.Tensor) -> Optimizer:
        """Built anew by the class's constructor, from what it keeps in ``defaults``."""
        accepted = inspect.signature(self.cls.__init__).parameters
        defaults = {name: value for name, value in self.attributes.get("defaults", {}).items() if name in accepted}
        with optimizers_without_compiler():
            return self.cls([{**options, "params": [parameter]}], **defaults)


def sparse_rows(ids: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
    """A coalesced sparse gradient. ``ids``: ``(n,)``, sorted and unique; ``values``: ``(n, …)``."""
    return torch.sparse_coo_tensor(
        ids.unsqueeze(0), values, (rows, *values.shape[1:]), is_coalesced=True, check_invariants=False
    )


def check_supported(cls: type[Optimizer], options: Sequence[Options]) -> None:
    """Raise `UnsupportedError` for what cannot be stepped on a server, whatever the gradients."""
    if _needs_closure(cls):
        raise UnsupportedError(
            f"{cls.__name__}.step needs a closure that evaluates the model, and parameter servers have no model: they "
            "only get gradients. Use an optimizer whose step() takes none, or a synchronous strategy such as "
            "MirroredStrategy."
        )
    for number, group in enumerate(options):
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise UnsupportedError(
                    f"{cls.__name__} has {flag}=True in parameter group {number}; its steps are made on parameter "
                    f"servers, where nothing is captured or differentiated. Use {flag}=False."
                )


def _look_for_closure(cls: type[Optimizer]) -> bool:
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# Every push asks, and looking takes 0.1 ms.
_needs_closure: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_look_for_closure)


def pack_optimizer(optimizer: Optimizer) -> bytes:
    """What `NewOptimizer.blob` carries: class, attributes and hyperparameters; no parameters, no state, no hooks.

    Pickled by value where the class lives in the user's script, so that servers need not import it. Not the object
    itself: ``Optimizer.__getstate__`` leaves out what a class of the user's keeps beside groups and defaults. Raises
    `NotSendableError` where an attribute cannot be pickled, or holds parameters.
    """
    import cloudpickle  # type: ignore[import-untyped]  # optional: parameter servers alone need it

    cls, attributes, options = _parts_of(optimizer)
    check_supported(cls, options)
    own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}

    class WithoutParameters(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, found: Any) -> None:
            if isinstance(found, torch.Tensor) and id(found) in own:
                raise NotSendableError(
                    f"{cls.__name__} keeps parameters in an attribute of its own, beside param_groups. On parameter "
                    "servers an optimizer only sees the shards that a step changes; look parameters up in "
                    "self.param_groups."
                )

    def pickled(value: Any) -> bytes:
        buffer = io.BytesIO()
        WithoutParameters(buffer).dump(value)
        return buffer.getvalue()

    try:
        return pickled((cls, attributes, options))
    except NotSendableError:
        raise
    except Exception as error:
        named = {f"self.{name}": value for name, value in attributes.items()}
        named |= {f"self.param_groups[{n}]": group for n, group in enumerate(options)}
        culprit = next((name for name, value in named.items() if not _succeeds(pickled, value)), "the class itself")
        raise NotSendableError(
            f"the optimizer {cls.__name__} cannot be sent to the parameter servers: {culprit} cannot be pickled "
            f"({error}). Keep such objects out of the optimizer, or make them where they are used."
        ) from error


def _succeeds(act: Callable[[Any], Any], value: Any) -> bool:
    try:
        act(value)
    except Exception:
        return False
    return True


def _parts_of(optimizer: Optimizer) -> tuple[type[Optimizer], dict[str, Any], tuple[dict[str, Any], ...]]:
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentError(f"need a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    attributes: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if name in _NOT_SENT:
            continue
        attributes[name] = collections.OrderedDict() if name.endswith("_hooks") else value
    options = tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    return type(optimizer), attributes, options

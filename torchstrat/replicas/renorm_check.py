"""Does a step use a table as a whole after lookups with ``max_norm`` have scaled rows of it?

One device scales the rows of the whole batch before anything else reads the table (``hidden @ table.weight.T``, a norm
of it). Each replica has scaled only those of its own part by then, and reads others than one device would. That is
told by the graph that ``backward`` starts from, in every run of a strategy that has such tables, and refused there.

Not told: tables that no `torch.nn` module holds (`torch.nn.functional.embedding` with a parameter), uses without a
gradient or with one by `torch.autograd.grad`, and what a compiled function computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torchstrat.errors import UnsupportedError
from torchstrat.replicas.loss_check import backward_calls
from torchstrat.replicas.renormed_rows import renormed_weights
from torchstrat.variables import VariableRegistry

_NOTHING = nullcontext()
_LOOKUPS = frozenset({"EmbeddingBackward0", "EmbeddingBagBackward0"})


class RenormCheck:
    """Of one strategy."""

    def __init__(self, strategy: Any, num_replicas: int, registry: VariableRegistry) -> None:
        self._strategy, self._num_replicas, self._registry = strategy, num_replicas, registry
        self._known = (-1, False)  # the registry's count of changes, and whether there were tables

    def around(self) -> AbstractContextManager[None]:
        """Around a run: raises `UnsupportedError` out of a ``backward`` of the step."""
        if self._num_replicas == 1:
            return _NOTHING
        changes = self._registry.changes
        if self._known[0] != changes:
            self._known = changes, bool(renormed_weights(self._registry.modules()))
        return self._looking() if self._known[1] else _NOTHING

    @contextmanager
    def _looking(self) -> Iterator[None]:
        names = renormed_weights(self._registry.modules())
        before = {id(one): one._version for one in self._registry.tensors() if id(one) in names}

        def look(roots: Any, _replica: int) -> None:
            used = _used_as_a_whole(roots, lambda one: before.get(id(one), one._version) != one._version)
            if used is not None:
                raise self._refused(*used)

        with backward_calls(self._strategy, look):
            yield

    def _refused(self, table: torch.Tensor, by: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._registry.describe(table)} has max_norm, and the step uses it as a whole ({by}) beside looking "
            f"rows up. A lookup scales rows in place, and each of {self._num_replicas} replicas only those of its own "
            "part of the batch, so each would use another table than one device does. Use it in lookups only; or leave "
            "max_norm out, and scale all rows after the optimizer's step: "
            "with torch.no_grad(): table.weight.copy_(table.weight.renorm(2, 0, max_norm))."
        )


def _used_as_a_whole(roots: Any, is_scaled: Callable[[torch.Tensor], bool]) -> tuple[torch.Tensor, str] | None:
    """A leaf that ``is_scaled``, and what uses it that is no lookup."""
    found = roots if isinstance(roots, list | tuple) else (roots,)
    nodes = [one.grad_fn for one in found if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    seen: set[Any] = set(nodes)
    while nodes:
        node = nodes.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            leaf = getattr(child, "variable", None)
            if leaf is not None and node.name() not in _LOOKUPS and is_scaled(leaf):
                return leaf, node.name()
            if child not in seen:
                seen.add(child)
                nodes.append(child)
    return None

"""Optimizers as other packages and scripts have them; none of them knows of servers.

Run as a program (``python -m tests.matrix.own_optimizers``) this is a script whose classes travel by value, and
which trains with them on a cluster of real processes.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Params = Iterable[torch.Tensor]


class Own(Optimizer):
    """The base of those below that step one parameter after the other."""

    def __init__(self, params: Params, lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})
        self.prepare()

    def prepare(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Own):
    """Each element for itself; state in ``state[p]``."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        p.add_(average.lerp(grad, 0.1).sign(), alpha=-group["lr"])
        average.lerp_(grad, 0.01)


class Rebinding(Own):
    """Gives the parameter other memory in each step."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.data = p.data - group["lr"] * grad


class Tagged(Own):
    """Reads what the program has set on parameters."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] * getattr(p, "rate_scale", 1.0))


class RowWise(Own):
    """Sparse gradients in another way than dense ones, as DLRM's RWSAdagrad: a sum per row, or per element."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            sums = state.setdefault("rows", p.new_zeros(p.shape[0])).index_add_(0, rows, values.square().mean(1))
            p.index_add_(0, rows, -group["lr"] * values / (sums[rows].sqrt() + 1e-10)[:, None])
        else:
            sums = state.setdefault("elements", torch.zeros_like(p)).add_(grad.square())
            p.sub_(grad / (sums.sqrt() + 1e-10), alpha=group["lr"])


class Lamb(Own):
    """Each parameter for itself: a trust ratio of its norm."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(grad, 0.1)
        p.sub_(average * (p.norm() / (average.norm() + 1e-8)), alpha=group["lr"])


class Factored(Own):
    """Each parameter for itself: means over rows and columns, as Adafactor keeps."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, square = self.state[p], grad.square() + 1e-12
        row = state.setdefault("row", square.new_zeros(square.shape[0])).lerp_(square.mean(1), 0.1)
        column = state.setdefault("column", square.new_zeros(square.shape[1])).lerp_(square.mean(0), 0.1)
        p.sub_(grad / (row[:, None] * column / row.mean()).sqrt(), alpha=group["lr"] * 0.1)


class Normalised(Own):
    """All parameters at once: by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / norm.item())


class Flag(Own):
    """A flag in an attribute says whether there is state, as in DLRM's optimizer."""

    def prepare(self) -> None:
        self.initialized = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.initialized = True

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.initialized:
            self.state[p]["sum"] = torch.zeros_like(p)
        self.state[p]["sum"].add_(grad.square())
        p.sub_(grad / (self.state[p]["sum"].sqrt() + 1e-10), alpha=group["lr"])


class CountsInGroup(Own):
    """State in ``param_groups``, as optimizers without schedules have it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] / group["k"])


class Lists(Own):
    """State in lists beside the groups' parameters, and a count in an attribute."""

    def prepare(self) -> None:
        self.velocity: list[list[torch.Tensor]] = []
        self.steps_taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.velocity:
            self.velocity = [[torch.zeros_like(p) for p in group["params"]] for group in self.param_groups]
        self.steps_taken += 1
        for group, velocities in zip(self.param_groups, self.velocity, strict=True):
            for p, velocity in zip(group["params"], velocities, strict=True):
                velocity.mul_(0.9)
                if p.grad is not None:
                    velocity.add_(p.grad)
                p.sub_(velocity, alpha=group["lr"] / self.steps_taken)


class KeepsParameters(Own):
    """Parameters in attributes, and slow copies of their first values."""

    def prepare(self) -> None:
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.all]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, slow in zip(self.all, self.slow, strict=True):
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
            p.copy_(slow.lerp_(p, 0.5))


class Lookahead(Optimizer):
    """A wrapper: another optimizer steps, and every second step goes half the way."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.count = 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class BareLookahead(Optimizer):
    """The same as some packages have it: without the base's constructor, and with groups that are the other's."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self.state = collections.defaultdict(dict)
        for group in base.param_groups:
            group["count"] = 0
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"] if group["count"] % 2 == 0 else ():
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class Centralised(torch.optim.Adam):
    """Derived from one of torch's, with a step before that of its base."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        super().step()


def make_closing(params: Params, lr: float = 0.05) -> Optimizer:
    count = 0

    class Closing(Own):
        """State in a variable of the function around the class."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            nonlocal count
            count += 1
            super().step()

        def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
            p.sub_(grad, alpha=group["lr"] / count)

    return Closing(params, lr)


def make_lookahead(params: Params) -> Optimizer:
    return Lookahead(torch.optim.SGD(params, lr=0.05, momentum=0.9))


def make_bare_lookahead(params: Params) -> Optimizer:
    return BareLookahead(torch.optim.SGD(params, lr=0.05, momentum=0.9))


def make_tagged(params: Params) -> Optimizer:
    params = list(params)
    for place, p in enumerate(params):
        p.rate_scale = 1.0 + place  # type: ignore[attr-defined]
    return Tagged(params)


OWN: dict[str, Callable[[Params], Optimizer]] = {
    "Lion": Lion,
    "Rebinding": Rebinding,
    "Tagged": make_tagged,
    "RowWise": RowWise,
    "Lamb": Lamb,
    "Factored": Factored,
    "Normalised": Normalised,
    "Flag": Flag,
    "CountsInGroup": CountsInGroup,
    "Lists": Lists,
    "KeepsParameters": KeepsParameters,
    "Lookahead": make_lookahead,
    "BareLookahead": make_bare_lookahead,
    "Centralised": Centralised,
    "Closing": make_closing,
}


def main() -> None:
    from tests.matrix import on_servers
    from tests.matrix.optimizers import check_of

    on_servers.answer(functools.partial(on_servers.on_one_cluster, "optimizers", functools.partial(check_of, OWN)))


if __name__ == "__main__":
    main()

"""The columns of the table of gradients: what is done with gradients before an update and in it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

Forward = Callable[[torch.Tensor], torch.Tensor]
Update = Callable[[Callable[[], None]], None]
"""Makes one update; it is given what makes the gradients."""


@dataclass(frozen=True)
class Column:
    name: str
    make: Callable[[nn.Module], tuple[Forward, Update]]
    traits: frozenset[str] = field(default_factory=frozenset)
    """What rules about pairs go by."""
    dtype: torch.dtype = torch.float64
    around: Callable[[], AbstractContextManager[Any]] | None = None
    """What the whole check is in."""


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def _stepping(optimizer: Optimizer, before_step: Callable[[], object] = lambda: None) -> Update:
    def update(compute: Callable[[], None]) -> None:
        compute()
        before_step()
        optimizer.step()
        optimizer.zero_grad()

    return update


# -- hooks -------------------------------------------------------------------------------------------------------------


def tensor_hooks(model: nn.Module, hook: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Forward, Update]:
    for p in model.parameters():
        p.register_hook(hook)
    return model, _stepping(_sgd(model))


def half_of_it(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.05, 0.05)


def hooks_that_step(model: nn.Module) -> tuple[Forward, Update]:
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return model, lambda compute: compute()


def hooks_that_update_by_hand(model: nn.Module) -> tuple[Forward, Update]:
    def hook(p: torch.Tensor) -> None:
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return model, lambda compute: compute()


def hooks_that_clip(model: nn.Module) -> tuple[Forward, Update]:
    def clip(p: torch.Tensor) -> None:
        nn.utils.clip_grad_norm_([p], 0.05)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clip)
    return model, _stepping(_sgd(model))


def hooks_that_free(model: nn.Module) -> tuple[Forward, Update]:
    def free(p: torch.Tensor) -> None:
        p.grad = None

    model.last.bias.register_post_accumulate_grad_hook(free)
    return model, _stepping(_sgd(model))


def hooks_that_edit(model: nn.Module) -> tuple[Forward, Update]:
    def edit(p: torch.Tensor) -> None:
        p.grad.mul_(0.5).add_(p.detach(), alpha=0.01)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(edit)
    return model, _stepping(_sgd(model))


def hooks_of_the_step(model: nn.Module, register: str, hook: Callable[[torch.Tensor], Any]) -> tuple[Forward, Update]:
    """The step registers them before its backward pass and removes them afterwards."""
    optimizer = _sgd(model)

    def update(compute: Callable[[], None]) -> None:
        handles = [getattr(p, register)(hook) for p in model.parameters()]
        compute()
        for handle in handles:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def halve(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


def module_hooks(model: nn.Module) -> tuple[Forward, Update]:
    model.last.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(i * 0.5 for i in inputs if i is not None)
    )
    model.last.register_full_backward_pre_hook(lambda module, outputs: tuple(o * 0.7 for o in outputs))
    return model, _stepping(_sgd(model))


# -- before the step, and in it ----------------------------------------------------------------------------------------


def clipped(model: nn.Module, clip: Callable[[Any], object]) -> tuple[Forward, Update]:
    return model, _stepping(_sgd(model), lambda: clip(list(model.parameters())))


def stepped_by(model: nn.Module, optimizer: Callable[..., Optimizer], **options: Any) -> tuple[Forward, Update]:
    return model, _stepping(optimizer(model.parameters(), lr=0.05, **options))


def compiled_optimizer(model: nn.Module) -> tuple[Forward, Update]:
    optimizer = AdamW(model.parameters(), lr=0.05)
    step = torch.compile(optimizer.step, backend="eager")

    def update(compute: Callable[[], None]) -> None:
        compute()
        step()
        optimizer.zero_grad()

    return model, update


def closure(model: nn.Module, *, returns: bool) -> tuple[Forward, Update]:
    optimizer = _sgd(model)

    def update(compute: Callable[[], None]) -> None:
        def evaluate() -> Any:
            compute()
            return torch.ones(()) if returns else None

        optimizer.step(evaluate)
        optimizer.zero_grad()

    return model, update


class SharpnessAware(Optimizer):
    """The well-known one: ``step(closure)`` zeroes gradients between its two halves."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for p in self._parameters()]).norm() if self._parameters() else 1.0
        for p in self._parameters():
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in self._parameters():
            p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()


def sharpness_aware(model: nn.Module, **options: Any) -> tuple[Forward, Update]:
    optimizer = SharpnessAware(model.parameters(), SGD, lr=0.1, **options)

    def update(compute: Callable[[], None]) -> None:
        compute()
        optimizer.step(compute)

    return model, update


class Lookahead(Optimizer):
    """Wraps another optimizer, whose groups are its own."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.counter = base, base.param_groups, 0
        self.state: Any = collections.defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.counter += 1
        for p in [p for group in self.param_groups for p in group["params"]]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.counter % 2 == 0:
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class Normalised(Optimizer):
    """Cannot step without gradients, and counts its steps in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (norm + 1), alpha=-0.1 / group["k"])


class Decaying(SGD):
    """Goes by ``super().step()``, which is a step that torch's hooks see as well once a plain SGD has been made."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
        return loss


def nested(model: nn.Module) -> tuple[Forward, Update]:
    SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return model, _stepping(Decaying(model.parameters(), lr=0.1))


def by_hand_with_own_gradients(model: nn.Module) -> tuple[Forward, Update]:
    def update(compute: Callable[[], None]) -> None:
        compute()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None

    return model, update


# -- forward -----------------------------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> tuple[Forward, Update]:
    return torch.compile(model, backend="aot_eager"), _stepping(_sgd(model))


@contextmanager
def compiler_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def autocast(model: nn.Module) -> tuple[Forward, Update]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16, "no matmul ran in bfloat16"
        return out.float()

    return forward, _stepping(_sgd(model))


def checkpointed(model: nn.Module, *, reentrant: bool) -> tuple[Forward, Update]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x.requires_grad_() if x.is_floating_point() else x, use_reentrant=reentrant)

    return forward, _stepping(_sgd(model))


def _of(*traits: str) -> frozenset[str]:
    return frozenset(traits)


COLUMNS = (
    Column("tensor hooks that scale", partial(tensor_hooks, hook=half_of_it)),
    Column("tensor hooks that clamp", partial(tensor_hooks, hook=clamped), _of("dense only")),
    Column("hooks that step", hooks_that_step, _of("accumulates", "changes in backward", "frees", "accumulates twice")),
    Column("hooks that update by hand", hooks_that_update_by_hand, _of("accumulates", "changes in backward", "frees")),
    Column("hooks that clip", hooks_that_clip, _of("accumulates", "in place", "dense only", "changes in backward")),
    Column("hooks that free", hooks_that_free, _of("accumulates", "frees")),
    Column("hooks that edit", hooks_that_edit, _of("accumulates", "in place", "dense only", "changes in backward")),
    Column("hooks that a step registers", partial(hooks_of_the_step, register="register_hook", hook=half_of_it)),
    Column(
        "hooks that a step registers, after accumulation",
        partial(hooks_of_the_step, register="register_post_accumulate_grad_hook", hook=halve),
        _of("accumulates", "in place", "dense only", "changes in backward"),
    ),
    Column("module backward hooks", module_hooks),
    Column(
        "clip by norm",
        partial(clipped, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.05)),
        _of("dense only", "in place"),
    ),
    Column(
        "clip by value",
        partial(clipped, clip=lambda p: nn.utils.clip_grad_value_(p, 0.02)),
        _of("dense only", "in place"),
    ),
    Column("foreach", partial(stepped_by, optimizer=Adam, foreach=True), _of("dense only")),
    Column("fused", partial(stepped_by, optimizer=AdamW, fused=True), _of("dense only", "contiguous")),
    Column("compiled optimizer", compiled_optimizer, _of("dense only"), around=compiler_afresh),
    Column("closure", partial(closure, returns=True), _of("closure")),
    Column("closure that returns None", partial(closure, returns=False), _of("closure")),
    Column("sam-like", sharpness_aware, _of("closure")),
    Column("sam-like, with momentum", partial(sharpness_aware, momentum=0.9), _of("closure")),
    Column(
        "own class that needs gradients",
        lambda model: (model, _stepping(Normalised(model.parameters()))),
        _of("dense only"),
    ),
    Column("wrapper", lambda model: (model, _stepping(Lookahead(SGD(model.parameters(), lr=0.1))))),
    Column("nested super().step()", nested),
    Column("update by hand, each with its own", by_hand_with_own_gradients, _of("own gradients")),
    Column("torch.compile", compiled, _of("compiled", "dense only"), around=compiler_afresh),
    Column("autocast", autocast, _of("half"), torch.float32),
    Column("checkpointed", partial(checkpointed, reentrant=False)),
    Column("checkpointed, reentrant", partial(checkpointed, reentrant=True), _of("reentrant")),
)

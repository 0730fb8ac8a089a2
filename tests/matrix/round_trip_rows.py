"""The objects of the table of round trips: each function makes a program's, trained or not."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Objects = dict[str, Any]


class Sum(nn.Module):
    """Adds up what its input is multiplied by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def module(trained: bool, dtype: torch.dtype = torch.float32) -> Objects:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(dtype)
    _fill(model, trained)
    return {"model": model}


class Transposed(Sum):
    """Its weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2).T.requires_grad_())


def transposed(trained: bool) -> Objects:
    model = Transposed()
    _fill(model, trained)
    return {"model": model}


def _fill(model: nn.Module, trained: bool) -> None:
    draw = torch.Generator().manual_seed(int(trained))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                dtype = torch.complex64 if tensor.is_complex() else torch.float32
                tensor.copy_(torch.rand(tensor.shape, generator=draw, dtype=dtype))


class Complex(Sum):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))


def complex_parameters(trained: bool) -> Objects:
    model = Complex()
    _fill(model, trained)
    return {"model": model}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x))
        return output


def tied(trained: bool) -> Objects:
    model = Tied()
    _fill(model, trained)
    return {"model": model}


def named_once(state: dict[str, Any]) -> dict[str, Any]:
    """As writers have it that drop what is there already."""
    del state["model"]["second.weight"]
    return state


def parametrized(trained: bool) -> Objects:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    _fill(model, trained)
    return {"model": model}


class Holder(Sum):
    def __init__(self, held: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("held", held)
        self.register_buffer("none", None)
        self.register_buffer("passing", torch.zeros(1), persistent=False)


def buffers(make: Callable[[], torch.Tensor], trained: bool) -> Objects:
    held = make()
    return {"model": Holder(held if trained else _another(held))}


def _another(held: torch.Tensor) -> torch.Tensor:
    if held.is_quantized:
        return torch.quantize_per_tensor(torch.zeros(held.shape), 0.5, 0, held.dtype)
    if held.layout == torch.sparse_csr:
        return (held.to_dense() * 9).to_sparse_csr()  # as many: PyTorch loads no others
    if held.layout != torch.strided:
        return torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([9.0]), held.shape).coalesce()
    return torch.zeros(held.shape, dtype=held.dtype)


class Extra(Sum):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def extra(before: Any, after: Any, trained: bool) -> Objects:
    return {"model": Extra(copy.deepcopy(after if trained else before))}


class _Halving(Sum):
    """Version 2 keeps half of what version 1 kept."""

    _version = 2

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), scale))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Versioned(nn.Sequential):
    def __init__(self, scale: float) -> None:
        super().__init__(_Halving(scale))


def versioned(trained: bool) -> Objects:
    return {"model": Versioned(3.0 if trained else 1.0)}


def of_version_1(state: dict[str, Any]) -> dict[str, Any]:
    state["model"]._metadata["0"]["version"] = 1
    return state


def averaged(trained: bool) -> Objects:
    model = nn.Linear(2, 2)
    _fill(model, trained)
    average = torch.optim.swa_utils.AveragedModel(model)
    if trained:
        average.update_parameters(model)
        _fill(model, False)
        average.update_parameters(model)
    return {"model": average}


def scaler(trained: bool) -> Objects:
    return {"scaler": torch.amp.GradScaler("cpu", init_scale=4.0 if trained else 2.0)}


def scheduler(kind: str, trained: bool) -> Objects:
    stepped = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedulers: dict[str, Callable[[], Any]] = {
        "StepLR": lambda: torch.optim.lr_scheduler.StepLR(stepped, 2, 0.5),
        "ReduceLROnPlateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(stepped, patience=0),
        "SequentialLR": lambda: torch.optim.lr_scheduler.SequentialLR(
            stepped,
            [
                torch.optim.lr_scheduler.ConstantLR(stepped, 0.1, 2),
                torch.optim.lr_scheduler.CosineAnnealingLR(stepped, 4),
            ],
            milestones=[2],
        ),
    }
    made = schedulers[kind]()
    if trained:
        for step in range(3):
            stepped.step()
            made.step(*([1.0 + step] if kind == "ReduceLROnPlateau" else []))
    return {"scheduler": made}


def optimizer(kind: str, options: dict[str, Any], trained: bool) -> Objects:
    model = nn.Linear(2, 2)
    _fill(model, trained)
    groups = [{"params": [model.weight], "lr": 0.25 if trained else 0.5}, {"params": [model.bias]}]
    if isinstance(options.get("lr"), torch.Tensor):
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        options = {**options, "lr": options["lr"] * (2.0 if trained else 1.0)}
    made = getattr(torch.optim, kind)(groups, **options)
    if trained and options != {"lr": 0.1}:
        for number in range(2):
            model(torch.full((1, 2), 1.0 + number)).sum().backward()
            made.step()
    return {"model": model, "optimizer": made}


def counted_in_state(trained: bool) -> Objects:
    """An optimizer that has a count in its state, under a word."""
    made = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    if trained:
        made.state["steps"] = {"all": 7}  # type: ignore[index]  # as FSDP and others do
    return {"optimizer": made}


class Counting(torch.optim.SGD):
    """Its ``state_dict()`` has more than PyTorch's."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]
        super().load_state_dict({key: one for key, one in state_dict.items() if key != "seen"})


def counting(trained: bool) -> Objects:
    made = Counting([nn.Parameter(torch.ones(1))], lr=0.1)
    made.seen = 5 * trained
    return {"optimizer": made}


class Words:
    """What a user has made, with a ``state_dict()``."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def nest(trained: bool) -> Objects:
    held = {
        "shadow": OrderedDict(b=torch.ones(2) * trained, n=1 + trained, a=torch.ones(1)),
        "text": None if trained else "x",
        "numbered": {1: torch.ones(1) * trained},
        "none": {},
        "list": [trained, torch.ones(2)],
        "counter": Counter(a=1 + trained),
        "parameter": [nn.Parameter(torch.ones(2) * trained)],
        "sparse": torch.eye(2).to_sparse(),
    }
    return {"object": Words(held)}

"""What processes of a group do for tests of replicas of several processes."""

from __future__ import annotations

import copy
import resource
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchstrat as ts
from tests.dtensor.training import TIMEOUT, batches_of, build, copied, make_optimizer, make_strategy

WIDTH = 6144
RULES = {"weight": ("d0", None), "bias": ("d0",)}


def peak_bytes() -> int:
    """Of this process, since it began or `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def large_linear(logical: int) -> dict[str, Any]:
    """Bytes that a `torch.nn.Linear` takes in one process, and whether all of it would have been too much for that."""
    warnings.simplefilter("error")
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # imports PyTorch's compiler, which is not to be counted
    strategy = ts.MirroredStrategy(logical_devices_per_replica=logical, sharding_rules=RULES, timeout=TIMEOUT)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        forget_peak()
        before = peak_bytes()
        with open("/proc/self/status", encoding="ascii") as file:
            (data,) = (int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
        whole_bytes = 4 * WIDTH * (WIDTH + 1)
        resource.setrlimit(resource.RLIMIT_DATA, (data + int(whole_bytes * 0.9), limits[1]))
        is_too_large = False
        try:
            nn.Linear(WIDTH, WIDTH)
        except RuntimeError:
            is_too_large = True
        forget_peak()
        with strategy.scope(), torch.device("meta"):
            model = nn.Linear(WIDTH, WIDTH)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = peak_bytes() - before
        resource.setrlimit(resource.RLIMIT_DATA, limits)  # a gradient takes as much again
        row = torch.ones(1, WIDTH)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(row).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = [float(strategy.reduce("mean", strategy.run(step))) for _ in range(2)]
        return {
            "share": whole_bytes / logical,
            "made": made,
            "trained": peak_bytes() - before,
            "too large": is_too_large,
            "losses": losses,
        }
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        strategy.close()


def first_values(logical: int, on_meta: bool) -> dict[str, torch.Tensor]:
    """Of a model of several kinds of layers, from a seed."""
    warnings.simplefilter("error")
    rules = {"0.weight": (None, "d0"), "1.weight": ("d0", None), "1.bias": ("d0",)}
    strategy = ts.MirroredStrategy(logical_devices_per_replica=logical, sharding_rules=rules, timeout=TIMEOUT)
    torch.manual_seed(11)
    try:
        with strategy.scope(), torch.device("meta" if on_meta else "cpu"):
            model = nn.Sequential(nn.Embedding(700, 52), nn.Linear(52, 44), nn.LayerNorm(44), nn.Linear(44, 3))
        strategy.run(lambda: None)
        return copied(model.state_dict())
    finally:
        strategy.close()


def save(kind: str, logical: int, path: str) -> dict[str, torch.Tensor]:
    """Train for three steps and save; the state that was saved."""
    return _trained(kind, logical, 3, save_to=path)


def restore(kind: str, logical: int, path: str) -> dict[str, torch.Tensor]:
    """Restore into fresh objects; their state, the optimizer's too."""
    return _trained(kind, logical, 0, restore_from=path)


def go_on(kind: str, logical: int, path: str) -> dict[str, torch.Tensor]:
    """Restore, and train for three more steps."""
    return _trained(kind, logical, 3, restore_from=path)


def _trained(
    kind: str, logical: int, steps: int, *, save_to: str = "", restore_from: str = ""
) -> dict[str, torch.Tensor]:
    warnings.simplefilter("error")
    torch.manual_seed(1)
    strategy = make_strategy(kind, logical) if logical > 1 else ts.MirroredStrategy()
    try:
        with strategy.scope():
            model = build(kind).double()
            optimizer = make_optimizer(kind, model)
        checkpoint = ts.Checkpoint(model=model, optimizer=optimizer)
        if restore_from:
            checkpoint.restore(restore_from)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()

        for number, batch in enumerate(strategy.distribute_dataset(batches_of(kind, torch.float64))):
            if number == steps:
                break
            strategy.run(step, args=(batch,))
        if save_to:
            checkpoint.save(save_to)
        state = copied(model.state_dict())
        of_optimizer = copy.deepcopy(optimizer.state_dict()["state"])
        for number, entries in of_optimizer.items():
            state |= {f"{number} {name}": value for name, value in entries.items()}
        return state
    finally:
        strategy.close()


def clipped(logical: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """Two steps with gradients clipped to a norm; the state before and after, and the norms."""
    warnings.simplefilter("error")
    strategy = make_strategy("mlp", logical)
    try:
        with strategy.scope():
            model = build("mlp").double()
            optimizer = make_optimizer("mlp", model)
        initial, norms = copied(model.state_dict()), []

        def step(batch: Any) -> None:
            model.zero_grad()
            functional.cross_entropy(model(batch[0]), batch[1]).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()

        for number, batch in enumerate(strategy.distribute_dataset(batches_of("mlp", torch.float64))):
            if number == 2:
                break
            strategy.run(step, args=(batch,))
        return initial, copied(model.state_dict()), norms
    finally:
        strategy.close()


def clipped_by_hand(initial: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = build("mlp").double()
    model.load_state_dict(initial)
    optimizer, norms = make_optimizer("mlp", model), []
    for number, (inputs, targets) in enumerate(batches_of("mlp", torch.float64)):
        if number == 2:
            break
        model.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    return model.state_dict(), norms


# -- mistakes ------------------------------------------------------------------------------------------------------


def _with_model(use: Callable[[Any, nn.Module, torch.optim.Optimizer], Any], kind: Any = torch.optim.Adam) -> str:
    """What ``use`` raised, with an MLP that is cut over two logical devices."""
    strategy = make_strategy("mlp", 2)
    try:
        with strategy.scope():
            model = build("mlp")
            optimizer = kind(model.parameters())
        try:
            use(strategy, model, optimizer)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"
    finally:
        strategy.close()


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, 6)).square().sum().backward()


def mistakes() -> dict[str, str]:
    import os

    rank = int(os.environ["RANK"])

    def edited(strategy: Any, model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            model[1].weight.mul_(2)
        strategy.run(lambda: None)

    def drawn(strategy: Any, model: Any, optimizer: Any) -> None:
        strategy.run(lambda: torch.rand(1 + rank).sum())
        strategy.run(lambda: None)

    def stepped_outside(strategy: Any, model: Any, optimizer: Any) -> None:
        strategy.run(lambda: _backward(model))
        optimizer.step()

    def steps(strategy: Any, model: Any, optimizer: Any) -> None:
        def step() -> None:
            _backward(model)
            optimizer.step()

        strategy.run(step)

    def closure(strategy: Any, model: Any, optimizer: Any) -> None:
        strategy.run(lambda: optimizer.step(lambda: _backward(model)))

    def hooked(strategy: Any, model: Any, optimizer: Any) -> None:
        model[1].weight.register_hook(lambda gradient: gradient * 2)
        strategy.run(lambda: _backward(model))

    def halved(strategy: Any, model: Any, optimizer: Any) -> None:
        model.half()
        strategy.run(lambda: None)

    def gradient_changed(strategy: Any, model: Any, optimizer: Any) -> None:
        strategy.run(lambda: _backward(model))
        model[1].weight.grad.mul_(2)
        strategy.run(lambda: None)

    def clipped_outside(strategy: Any, model: Any, optimizer: Any) -> None:
        strategy.run(lambda: _backward(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def hooked_steps(strategy: Any, model: Any, optimizer: Any) -> None:
        optimizer.register_step_pre_hook(lambda *_: None)
        strategy.run(lambda: None)

    def scaled(strategy: Any, model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")

        def step() -> None:
            scaler.scale(model(torch.ones(2, 6)).square().sum()).backward()
            scaler.step(optimizer)

        strategy.run(step)

    def copied_model(strategy: Any, model: Any, optimizer: Any) -> None:
        other = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was made outside of the scope
            strategy.run(lambda: _backward(other))

    return {
        "hooked": _with_model(hooked),
        "other dtype": _with_model(halved),
        "copied": _with_model(copied_model),
        "other rows": _with_model(lambda s, m, o: s.run(lambda x: None, args=(torch.full((4,), float(rank)),))),
        "other random numbers": _with_model(drawn),
        "changed outside": _with_model(edited),
        "stepped outside": _with_model(stepped_outside),
        "unknown optimizer": _with_model(steps, torch.optim.Adafactor),
        "closure": _with_model(closure, torch.optim.SGD),
        "cut outside": _with_model(lambda s, m, o: s.split_to_logical_devices(torch.ones(4, 4), [2, 1])),
        "does not divide": _with_model(
            lambda s, m, o: s.run(lambda: s.split_to_logical_devices(torch.ones(3, 4), [2, 1]))
        ),
        "other number of parts": _with_model(
            lambda s, m, o: s.run(lambda: s.split_to_logical_devices(torch.ones(4, 4), [2, 2]))
        ),
        "used outside": _with_model(lambda s, m, o: m(torch.ones(2, 6))),
        "made into something outside": _with_model(lambda s, m, o: torch.ones(2, 6) @ m[1].weight.t()),
        "gradient changed outside": _with_model(gradient_changed),
        "gradient used outside": _with_model(clipped_outside),
        "hook on steps": _with_model(hooked_steps),
        "hook in a step": _with_model(lambda s, m, o: s.run(lambda: m[1].weight.register_hook(lambda g: None))),
        "written to": _with_model(lambda s, m, o: s.run(lambda: m[1].weight.data.t().zero_())),
        "written to with a graph": _with_model(lambda s, m, o: s.run(lambda: m[1].weight.mul_(2))),
        "compiled": _with_model(lambda s, m, o: s.run(lambda: torch.compile(_backward, backend="eager")(m))),
        "mapped": _with_model(
            lambda s, m, o: s.run(lambda: torch.vmap(m[1])(torch.ones(4, m[1].in_features, dtype=m[1].weight.dtype)))
        ),
        "scaled": _with_model(scaled),
        "nothing": _with_model(steps),
    }


def odd_world() -> str:
    try:
        ts.MirroredStrategy(logical_devices_per_replica=3)
    except ValueError as error:
        return str(error)
    return "nothing"


def bare_parameters(logical: int) -> list[Any]:
    """A step that uses parameters of no module, one of them cut by an annotation; losses, and how it is explained."""
    warnings.simplefilter("error")
    strategy = ts.MultiWorkerMirroredStrategy(logical_devices_per_replica=logical, timeout=TIMEOUT)
    try:
        with strategy.scope():
            first = nn.Parameter(torch.arange(32.0).reshape(4, 8).double() / 32)
            second = nn.Parameter(torch.ones(4, dtype=torch.float64))
            strategy.split_to_logical_devices(first, [1, logical])
            optimizer = torch.optim.SGD([first, second], lr=0.1)
        seen = []

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((first @ torch.ones(8, dtype=torch.float64)) * second).square().sum()
            loss.backward()
            seen.append((tuple(first.shape), tuple(first.grad.shape), float(first.grad.sum())))  # type: ignore[union-attr]
            optimizer.step()
            return loss.detach()

        losses = [float(strategy.reduce("sum", strategy.run(step))) for _ in range(3)]
        layout = ts.explain_sharding(first, strategy=strategy)
        return [losses, seen, layout.bytes_per_device, str(layout)]
    finally:
        strategy.close()


# -- averages of weights -------------------------------------------------------------------------------------------

AVERAGES = ("AveragedModel", "deepcopy and lerp_", "second model and copy_", ".data", "foreach")


def averaged(way: str, logical: int) -> dict[str, torch.Tensor]:
    """The average of a model's weights over three steps, kept in the step in one of the usual ways."""
    warnings.simplefilter("error")
    torch.manual_seed(5)
    strategy = make_strategy("mlp", logical) if logical > 1 else ts.MirroredStrategy()
    try:
        with strategy.scope():
            model = build("mlp").double()
            optimizer = make_optimizer("mlp", model)
        with strategy.scope():
            if way == "AveragedModel":
                mean: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            elif way == "second model and copy_":
                mean = build("mlp").double()
            else:
                mean = copy.deepcopy(model)
        if way == "second model and copy_":
            mean.load_state_dict(model.state_dict())

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            _average(way, mean, model)

        for number, batch in enumerate(strategy.distribute_dataset(batches_of("mlp", torch.float64))):
            if number == 3:
                break
            strategy.run(step, args=(batch,))
        return copied(mean.state_dict())
    finally:
        strategy.close()


@torch.no_grad()
def _average(way: str, mean: Any, model: nn.Module) -> None:
    if way == "AveragedModel":
        mean.update_parameters(model)
    elif way == "foreach":
        torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 0.1)
    else:
        for old, new in zip(mean.parameters(), model.parameters(), strict=True):
            if way == "deepcopy and lerp_":
                old.lerp_(new, 0.1)
            elif way == ".data":
                old.data = 0.9 * old.data + 0.1 * new.data
            else:
                old.copy_(old * 0.9 + new * 0.1)


def logged_by_one() -> str:
    """What a process is told where the first one looks at a sum of something that is cut."""
    import os

    def log(strategy: Any, model: Any, optimizer: Any) -> None:
        def step() -> None:
            _backward(model)
            if os.environ["RANK"] == "0":
                model[1].weight.grad.square().sum().item()

        strategy.run(step)
        strategy.run(step)

    return _with_model(log)

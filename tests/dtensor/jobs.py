"""What processes of a group do for tests of replicas of several processes."""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils import dlpack

import torchstrat as ts
from tests.dtensor.training import TIMEOUT, batches_of, build, copied, make_optimizer, make_strategy
from torchstrat.errors import InvalidArgumentError

WIDTH = 6144


def peak_bytes(name: str = "VmHWM") -> int:
    """Of this process, since it began or `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith(name))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


@contextlib.contextmanager
def strategy_of(kind: str, logical: int, **options: Any) -> Iterator[Any]:
    """With one logical device: of this process alone."""
    warnings.simplefilter("error")
    strategy = make_strategy(kind, logical, **options) if logical > 1 else ts.MirroredStrategy()
    try:
        yield strategy
    finally:
        strategy.close()


def large_linear(logical: int) -> dict[str, Any]:
    """Bytes that a `torch.nn.Linear` takes in one process, and whether all of it would have been too much for that."""
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # imports PyTorch's compiler, which is not to be counted
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    rules = {"weight": ("d0", None), "bias": ("d0",)}
    try:
        with strategy_of("", logical, sharding_rules=rules) as strategy:
            forget_peak()
            before, whole_bytes = peak_bytes(), 4 * WIDTH * (WIDTH + 1)
            resource.setrlimit(resource.RLIMIT_DATA, (peak_bytes("VmData") + int(whole_bytes * 0.9), limits[1]))
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
            found = {"share": whole_bytes / logical, "made": made, "trained": peak_bytes() - before}
            return {**found, "too large": is_too_large, "losses": losses}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def layers_of_many_kinds() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Embedding(700, 52), nn.Linear(52, 44), nn.LayerNorm(44), nn.Linear(44, 3))


def first_values(logical: int, on_meta: bool) -> dict[str, torch.Tensor]:
    rules = {"0.weight": (None, "d0"), "1.weight": ("d0", None), "1.bias": ("d0",)}
    with strategy_of("", logical, sharding_rules=rules) as strategy:
        with strategy.scope(), torch.device("meta" if on_meta else "cpu"):
            model = layers_of_many_kinds()
        strategy.run(lambda: None)
        return copied(model.state_dict())


def trained(kind: str, logical: int, steps: int, restore_from: str = "", save_to: str = "") -> dict[str, torch.Tensor]:
    """Of a model and its optimizer, the state after so many steps."""
    torch.manual_seed(1)
    with strategy_of(kind, logical) as strategy:
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

        dataset = strategy.distribute_dataset(batches_of(kind, torch.float64))
        for _, batch in zip(range(steps), dataset, strict=False):
            strategy.run(step, args=(batch,))
        if save_to:
            checkpoint.save(save_to)
        state = copied(model.state_dict())
        for number, entries in copy.deepcopy(optimizer.state_dict()["state"]).items():
            state |= {f"{number} {name}": value for name, value in entries.items()}
        return state


# -- mistakes ------------------------------------------------------------------------------------------------------


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, 6)).square().sum().backward()


def _steps(s: Any, m: Any, o: Any) -> None:
    def step() -> None:
        _backward(m)
        o.step()

    s.run(step)


class _Bare(torch.optim.Optimizer):
    """Does without PyTorch's constructor."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.SGD(parameters, 0.1)
        self.param_groups, self.defaults, self.state = self.base.param_groups, self.base.defaults, self.base.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def _stepping(kind: Any, use: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """With another optimizer."""

    def with_it(s: Any, m: Any, o: Any) -> None:
        with s.scope():
            other = kind(m.parameters())
        use(s, m, other)

    return with_it


def _after(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Something that is done between two runs, without a graph."""

    def use(s: Any, m: Any, o: Any) -> None:
        s.run(lambda: _backward(m))
        with torch.no_grad():
            change(m, o)
        s.run(lambda: None)

    return use


def _scaled(s: Any, m: Any, o: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(m(torch.ones(2, 6)).square().sum()).backward()
        scaler.step(o)

    s.run(step)


def _copied(s: Any, m: Any, o: Any) -> None:
    other = copy.deepcopy(m)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it was made outside of the scope
        s.run(lambda: _backward(other))


def _logged_by_one(s: Any, m: Any, o: Any) -> None:
    def step() -> None:
        _backward(m)
        if _rank() == 0:
            m[1].weight.grad.square().sum().item()

    s.run(step)
    s.run(step)


def _changed_twice(s: Any, m: Any, o: Any) -> None:
    _steps(s, m, o)
    state = o.state_dict()
    _steps(s, m, o)
    for entries in state["state"].values():
        entries["exp_avg"].mul_(2)
    o.load_state_dict(state)


def _state_read_by_one(s: Any, m: Any, o: Any) -> None:
    _steps(s, m, o)
    if _rank() == 0:
        o.state[m[1].weight]["exp_avg"].sum()
    m.state_dict()


def _rank() -> int:
    return int(os.environ["RANK"])


def _mapped(s: Any, m: Any, o: Any) -> None:
    s.run(lambda: torch.vmap(m[1])(torch.ones(4, m[1].in_features, dtype=m[1].weight.dtype)))


def clipped(logical: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Norms of gradients that no backward pass has combined: left over by no_sync, and assigned by hand."""
    torch.manual_seed(5)
    with strategy_of("mlp", logical) as strategy:
        with strategy.scope():
            model = build("mlp").double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def own_rows() -> torch.Tensor:
            replica: Any = ts.get_replica_context()
            rows = torch.linspace(-1, 2, 48, dtype=torch.float64).reshape(8, 6)
            return rows.chunk(replica.num_replicas_in_sync)[replica.replica_id_in_sync_group]

        def clip() -> torch.Tensor:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        def assign() -> torch.Tensor:
            for parameter in model.parameters():
                parameter.grad = own_rows().mean() * torch.ones(parameter.shape, dtype=parameter.dtype)
            return clip()

        with strategy.no_sync():
            strategy.run(lambda: model(own_rows()).square().mean().backward())
        norms = [strategy.local_results(strategy.run(step))[0] for step in (clip, assign)]
        return norms, copied(model.state_dict())


def edited_states(logical: int) -> dict[str, torch.Tensor]:
    """What there is after each replica has changed what the optimizer keeps in its own way."""
    torch.manual_seed(5)
    with strategy_of("mlp", logical) as strategy, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that replicas differ, and the first one's counts
        with strategy.scope():
            model: Any = build("mlp").double()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def add(replica: int) -> None:
            optimizer.state[model[1].weight]["exp_avg"].add_(1.0 + replica)

        def replace(replica: int) -> None:
            value = torch.linspace(-1, 1 + replica, 96, dtype=torch.float64)
            optimizer.state[model[1].weight]["exp_avg"] = value.reshape(16, 6)

        def forget(replica: int) -> None:
            if replica:
                del optimizer.state[model[1].weight]

        def step(edit: Callable[[int], None]) -> None:
            replica: Any = ts.get_replica_context()
            rows = torch.linspace(-1, 2, 48, dtype=torch.float64).reshape(8, 6)
            number = replica.replica_id_in_sync_group
            optimizer.zero_grad()
            model(rows.chunk(replica.num_replicas_in_sync)[number]).square().mean().backward()
            edit(number)
            optimizer.step()

        for edit in (lambda number: None, add, replace, forget, add):
            strategy.run(step, args=(edit,))
        strategy.extended.check_replicas()
        found = copied(model.state_dict())
        for number, entries in optimizer.state_dict()["state"].items():
            found |= {f"{number} {name}": value for name, value in entries.items()}
        return dict(sorted(copied(found).items()))


def drifted(logical: int) -> str:
    """What is said where the replicas' optimizers have been edited differently between runs."""
    with strategy_of("mlp", logical) as strategy:
        with strategy.scope():
            model: Any = build("mlp")
            optimizer = torch.optim.Adam(model.parameters())
        _steps(strategy, model, optimizer)
        optimizer.state[model[1].weight]["exp_avg"].add_(float(_rank() // logical))
        try:
            strategy.extended.check_replicas()
        except ts.errors.ReplicaDriftError as error:
            return str(error)
        return "nothing"


def _with_parameter(s: Any, parameter: Any, use: Callable[[Any], Any]) -> None:
    """In a step, where it is not the member of a module."""
    s.run(lambda: use(parameter))


def _given_one_of_two(parameter: Any) -> torch.Tensor:
    first, other = torch.ones(2, *parameter.shape, dtype=parameter.dtype)
    parameter.data = first
    return other


def _kept_whole(s: Any, m: Any, o: Any) -> None:
    whole = torch.ones(m[1].weight.shape, dtype=m[1].weight.dtype)

    def step() -> None:
        m[1].weight.data = whole
        _backward(m)
        o.step()

    s.run(step)


def _given_state(s: Any, m: Any, o: Any, value: torch.Tensor) -> None:
    """Which the caller has, too."""
    _steps(s, m, o)
    o.state[m[1].weight]["exp_avg"] = value
    _steps(s, m, o)


def _made_and_run(s: Any, change: Callable[[Any], Any]) -> None:
    with s.scope():
        made = nn.Linear(6, 4)
        s.split_to_logical_devices(made.weight, (2, 1))
        made.kept = change(made)
    s.run(lambda: made.kept)


def _hooked_at_its_accumulator(s: Any, m: Any, o: Any) -> None:
    def hooked(made: nn.Linear) -> Any:
        node = made.weight.expand_as(made.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        return node, node.register_hook(lambda *_: None)

    _made_and_run(s, hooked)


def _hooked_for_one_run(s: Any, m: Any, o: Any) -> None:
    """A run that is refused leaves what is known of gradients: without the hook it goes on."""
    s.run(lambda: _backward(m))
    hook = m[3].weight.register_hook(lambda gradient: gradient)
    with contextlib.suppress(ts.errors.UnsupportedError):
        s.run(lambda: _backward(m))
        raise AssertionError("was not refused")
    hook.remove()
    o.zero_grad()
    _steps(s, m, o)


def _interrupted_where_a_run_begins(s: Any, m: Any, o: Any) -> None:
    """Some variables stand for their pieces by then, and others do not."""
    _steps(s, m, o)
    m[3].weight.requires_grad_(False)
    with contextlib.suppress(KeyboardInterrupt):
        with mock.patch.object(torch.Tensor, "requires_grad_", side_effect=KeyboardInterrupt):  # of its piece
            _steps(s, m, o)
        raise AssertionError("was not interrupted")
    shapes = [tuple(one.weight.shape) for one in (m[1], m[3])]
    assert shapes == [(16, 6), (12, 16)], shapes
    _steps(s, m, o)


def _scripted(s: Any, m: Any, o: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".torch\.jit\.")  # newer PyTorch says so of all of it
        _made_and_run(s, torch.jit.script)  # type: ignore[no-untyped-call]


def _ran_with_all_kinds(s: Any, m: Any, o: Any) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    arrays = [np.array(["a", "b"], object), np.array(["a", "b"]), np.str_("a"), np.arange(4)[::-1], np.empty((0, 2))]
    s.run(lambda *given: given[-1].sum().detach(), args=(*arrays, ragged, torch.eye(3).to_sparse(), m[1].weight))


def _raised_by_one(s: Any, m: Any, o: Any) -> None:
    """Behind its last exchange with the others, which are not told."""

    def total(raising: int) -> Any:
        return other.split_to_logical_devices(torch.ones(4, 2), (2, 1)).sum() * (1 // (raising != _rank()))

    with strategy_of("", 2, collectives="process_group") as other:
        for rank in (-1, 1, -1):
            with contextlib.suppress(ZeroDivisionError):
                found = other.run(total, args=(rank,))
        assert float(*other.local_results(found)) == 8.0


def _made_behind_scopes_that_failed(s: Any, m: Any, o: Any) -> None:
    with contextlib.suppress(InvalidArgumentError), s.scope():
        s.kept = nn.ParameterList([nn.Parameter(torch.ones(4, device="meta"))])  # has no reset_parameters()
    ts.experimental_set_strategy(s)
    with contextlib.suppress(InvalidArgumentError):
        ts.experimental_set_strategy(None)
    assert not ts.has_strategy()
    made = nn.Linear(2, 2)
    s.run(lambda: made.weight.sum().detach())


MISTAKES: dict[str, tuple[str, Callable[[Any, Any, Any], Any]]] = {
    # what is said of a strategy, an MLP that is cut over two logical devices, and its optimizer
    "hooked": (
        r"UnsupportedError: Linear.weight \(16, 6\) is cut over logical devices and has a hook of its own",
        lambda s, m, o: m[1].weight.register_hook(lambda gradient: gradient * 2) and s.run(lambda: _backward(m)),
    ),
    "hooked for one run": ("nothing", _hooked_for_one_run),
    "interrupted where a run begins": ("nothing", _interrupted_where_a_run_begins),
    "hooked where its gradient is accumulated": (
        r"UnsupportedError: Linear.weight \(4, 6\) is to be cut .* has its AccumulateGrad node kept",
        _hooked_at_its_accumulator,
    ),
    "in TorchScript": (
        r"UnsupportedError: Linear.weight \(4, 6\) is to be cut .* is in a module of TorchScript",
        _scripted,
    ),
    "other dtype": ("ContextError: half was called outside of run with a variable", lambda s, m, o: m.half()),
    "copied": ("nothing", _copied),
    "other rows": (
        "ReplicaDivergenceError: run got other arguments on other logical devices",
        lambda s, m, o: s.run(lambda x: None, args=(torch.full((4,), float(_rank())),)),
    ),
    "other strings": (
        "ReplicaDivergenceError: run got other arguments on other logical devices",
        lambda s, m, o: s.run(lambda x: None, args=(np.array(["a", str(_rank())], object),)),
    ),
    "arguments of all kinds": ("nothing", _ran_with_all_kinds),
    "raised by one, over sockets": ("nothing", _raised_by_one),
    "scopes that failed": ("UserWarning: .* a Linear made outside of it", _made_behind_scopes_that_failed),
    "other random numbers": (
        "ReplicaDivergenceError: .* have drawn different random numbers in the last run",
        lambda s, m, o: [s.run(lambda: torch.rand(1 + _rank()).sum()), s.run(lambda: None)],
    ),
    "changed outside": (
        "ContextError: mul_ was called outside of run with a variable that is cut",
        _after(lambda m, o: m[1].weight.mul_(2)),
    ),
    "stepped outside": (r"ContextError: Adam.step\(\) was called outside of run", _after(lambda m, o: o.step())),
    "unknown optimizer": (
        "UnsupportedError: Adafactor steps 6 parameters that are cut",
        _stepping(torch.optim.Adafactor, _steps),
    ),
    "optimizer without tables of hooks": (
        "UnsupportedError: _Bare steps 6 parameters that are cut",
        _stepping(_Bare, _steps),
    ),
    "closure": (
        r"UnsupportedError: SGD.step\(closure\)",
        _stepping(torch.optim.SGD, lambda s, m, o: s.run(lambda: o.step(lambda: _backward(m)))),
    ),
    "cut outside": (
        r"ContextError: a tensor of shape \(4, 4\) was to be cut .* outside of run",
        lambda s, m, o: s.split_to_logical_devices(torch.ones(4, 4), [2, 1]),
    ),
    "does not divide": (
        "InvalidArgumentError: .* dimension 0 has size 3, which does not divide into 2",
        lambda s, m, o: s.run(lambda: s.split_to_logical_devices(torch.ones(3, 4), [2, 1])),
    ),
    "other number of parts": (
        "InvalidArgumentError: .* makes 4 parts, and a replica has 2 logical devices",
        lambda s, m, o: s.run(lambda: s.split_to_logical_devices(torch.ones(4, 4), [2, 2])),
    ),
    "used outside": (
        "ContextError: linear was called outside of run with a variable that is cut",
        lambda s, m, o: m(torch.ones(2, 6)),
    ),
    "made into something outside": (
        "ContextError: t was called outside of run with a variable that is cut",
        lambda s, m, o: torch.ones(2, 6) @ m[1].weight.t(),
    ),
    "gradient changed outside": (
        "ContextError: mul_ was called outside of run with the gradient of a variable",
        _after(lambda m, o: m[1].weight.grad.mul_(2)),
    ),
    "gradient used outside": (
        "ContextError: linalg_vector_norm was called outside of run with the gradient",
        _after(lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1)),
    ),
    "hook on steps": (
        "UnsupportedError: Adam has a hook on its steps",
        lambda s, m, o: o.register_step_pre_hook(lambda *_: None) and s.run(lambda: None),
    ),
    "hook in a step": (
        "UnsupportedError: register_hook .* would last for this run only",
        lambda s, m, o: s.run(lambda: m[1].weight.register_hook(lambda g: None)),
    ),
    "written to": (
        "UnsupportedError: zero_ on a tensor that is cut over logical devices would change it in place",
        lambda s, m, o: s.run(lambda: m[1].weight.data.t().zero_()),
    ),
    "written to with a graph": (
        "UnsupportedError: mul_ .*; do it under torch.no_grad",
        lambda s, m, o: s.run(lambda: m[1].weight.mul_(2)),
    ),
    "packed by what asks no class": (
        "UnsupportedError: a call that asks no class of tensors .* was given a tensor that is cut",
        lambda s, m, o: _with_parameter(s, m[1].weight, dlpack.to_dlpack),
    ),
    "member packed by what asks no class": (
        "UnsupportedError: a call that asks no class of tensors .* was given a tensor that is cut",
        lambda s, m, o: s.run(lambda: dlpack.to_dlpack(m[1].weight)),
    ),
    "memory given to a plain tensor": (
        "UnsupportedError: Tensor.data .* would give its memory to a tensor that is not cut",
        lambda s, m, o: _with_parameter(s, m[1].weight, lambda one: setattr(torch.ones(1), "data", one)),
    ),
    "memory of a member given to a plain tensor": (
        "UnsupportedError: Tensor.data .* would give its memory to a tensor that is not cut",
        lambda s, m, o: s.run(lambda: setattr(torch.ones(1), "data", m[1].weight)),
    ),
    "given a whole tensor that is kept": (
        r"UnsupportedError: Adam.step\(\) would step a variable .* memory of a tensor that is not cut like it",
        _kept_whole,
    ),
    "given another shape": (
        r"UnsupportedError: Tensor.data .* would become one of shape \(1,\)",
        lambda s, m, o: s.run(lambda: setattr(m[1].weight, "data", torch.ones(1))),
    ),
    "given a part of something": (
        "UnsupportedError: Tensor.data .* would share memory with what others are views of",
        lambda s, m, o: s.run(lambda: _given_one_of_two(m[1].weight)),
    ),
    "given state that is kept": (
        "UnsupportedError: optimizer.state was given a tensor as 'exp_avg' .* still has that tensor under another name",
        lambda s, m, o: _given_state(s, m, o, torch.ones(16, 6)),
    ),
    "state that two have changed": (
        "UnsupportedError: the program has written .* and steps have changed the parameter since",
        _changed_twice,
    ),
    "given a piece of state": (
        r"UnsupportedError: optimizer.state has 'exp_avg' of shape \(8, 6\) for a parameter of shape \(16, 6\)",
        lambda s, m, o: _given_state(s, m, o, torch.ones(8, 6)),
    ),
    "state that gives its memory": (
        "UnsupportedError: Tensor.data .* would give its memory to a tensor that is not cut",
        lambda s, m, o: _steps(s, m, o) or setattr(torch.ones(1), "data", o.state[m[1].weight]["exp_avg"]),
    ),
    "state read by one": (
        "(?s)no longer make the same calls.*sum on a tensor that is cut over logical devices",
        _state_read_by_one,
    ),
    "compiled": (
        "^UnsupportedError: torch.compile of a function that works on tensors that are cut",
        lambda s, m, o: s.run(lambda: torch.compile(_backward, backend="eager")(m)),
    ),
    "mapped": (r"^UnsupportedError: linear on a tensor that is cut .* in a transform of torch.func", _mapped),
    "differentiated by torch.func": (
        r"^UnsupportedError: .* on a tensor that is cut .* was called below .* as a transform of torch.func",
        lambda s, m, o: s.run(
            lambda: torch.func.grad(lambda w: functional.linear(torch.ones(1, 6), w).sum())(m[1].weight)
        ),
    ),
    "scaled": ("UnsupportedError: _amp_foreach_non_finite_check_and_unscale_ on a tensor that is cut", _scaled),
    "nothing": ("nothing", _steps),
    "logged by one": (
        "(?s)no longer make the same calls.*sum on a tensor that is cut over logical devices",
        _logged_by_one,
    ),
}


def said_of_mistakes() -> dict[str, str]:
    """What each raised, with the class before it."""
    found = {}
    for name, (_, use) in MISTAKES.items():
        with strategy_of("mlp", 2) as strategy:
            with strategy.scope():
                model = build("mlp")
                optimizer = torch.optim.Adam(model.parameters())
            found[name] = "nothing"
            try:
                use(strategy, model, optimizer)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def odd_world() -> str:
    try:
        ts.MirroredStrategy(logical_devices_per_replica=3, timeout=TIMEOUT)
    except ValueError as error:
        return str(error)
    return "nothing"

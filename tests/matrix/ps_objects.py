"""What a program hangs on its modules and optimizers, or knows them by × what it does with that.

Each row is a program that is run twice: plainly, and with every call of a step made by a worker.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, partialmethod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import prune

import torchstrat as ts
from tests.matrix import on_servers, ps_after_steps, ps_attributes, ps_held_state, ps_views
from tests.matrix.own_optimizers import Own
from tests.matrix.table import RIGHT, Cell, Expected, PlantedFault, Table, assert_close, refused, switched_off
from torchstrat.errors import UnsupportedError
from torchstrat.parameter_server.serialization.captured_objects import Catalog, Outgoing
from torchstrat.parameter_server.server import live_optimizer
from torchstrat.parameter_server.variables import (
    attributes,
    cached_parameter,
    cached_state,
    optimizer_state,
    program_files,
    program_state,
)
from torchstrat.parameter_server.worker import push, stepped_optimizers
from torchstrat.parameter_server.worker.gradients import LeftGradients
from torchstrat.testing.fake_cluster import FakeCluster

SECONDS = 60
ROUNDS = 4


class Way(NamedTuple):
    """How a program is run."""

    scope: Callable[[], AbstractContextManager[object]]
    call: Callable[..., Any]
    """``call(fn, *args)``: on one device the function's own result, else that of a worker."""
    join: Callable[[], object] = lambda: None
    """Until functions have ended."""


Numbers = Mapping[str, torch.Tensor]
Program = Callable[[Way], Numbers]


def _batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(ROUNDS)]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def _values_of(model: nn.Module, **others: Any) -> Numbers:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    return found | {name: torch.as_tensor(value) for name, value in others.items()}


# -- tables by id -----------------------------------------------------------------------------------------------------


def _by_ids(way: Way, *, is_argument: bool = False, is_attribute: bool = False) -> Numbers:
    with way.scope():
        model: Any = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = {id(p): 0.5 + n for n, p in enumerate(model.parameters())}
        frozen = {id(model[2])}
        if is_attribute:
            model.rates = rates

    def step(batch: torch.Tensor, given: dict[int, float] | None) -> float:
        found = model.rates if is_attribute else rates if given is None else given
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for module in model:
            for p in module.parameters():
                p.grad.mul_(0.0 if id(module) in frozen else found.get(id(p), 1.0))
        optimizer.step()
        return sum(found.get(id(p), 0.0) for p in model.parameters())

    seen = [way.call(step, batch, rates if is_argument else None) for batch in _batches()]
    return _values_of(model, seen=seen)


def _ids_of_an_optimizer(way: Way) -> Numbers:
    class ById(Own):
        """Keeps what it knows of parameters in a table of its own."""

        def prepare(self) -> None:
            self.scales = {id(p): 1.0 + n for n, p in enumerate(self.param_groups[0]["params"])}

        def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
            p.sub_(grad, alpha=group["lr"] * self.scales.get(id(p), 100.0))

    with way.scope():
        model = _model()
        optimizer = ById(model.parameters())
    return _trained(way, model, optimizer)


def _train(way: Way, model: Any, optimizer: Any, between: Callable[[int], object] = lambda _: None) -> None:
    def step(batch: torch.Tensor) -> Any:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        return optimizer.step()

    for index, batch in enumerate(_batches()):
        between(index)
        way.call(step, batch)


def _trained(way: Way, model: Any, optimizer: Any, between: Callable[[int], object] = lambda _: None) -> Numbers:
    _train(way, model, optimizer, between)
    return _values_of(model)


# -- attributes of classes ---------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    """Reads attributes of its class, and of the base that it is given to."""

    scale, shift = 1.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + Scaled.shift


class Factored(Own):
    """Reads an attribute of its class."""

    factor = 1.0

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"] * self.factor * getattr(Factored, "late", 1.0))


class Derived(Factored):
    """Inherits it."""


class _Restored:
    """Puts back what a class had."""

    def __init__(self, *kinds: type) -> None:
        self._before = [(kind, dict(vars(kind))) for kind in kinds]

    def __call__(self) -> None:
        for kind, before in self._before:
            for name in set(vars(kind)) - set(before):
                delattr(kind, name)
            for name, value in before.items():
                if vars(kind)[name] is not value and not name.startswith("__"):
                    setattr(kind, name, value)


def _class_of_module(way: Way, kind: type) -> Numbers:
    restore = _Restored(Scaled)
    try:
        torch.manual_seed(0)
        with way.scope():
            model = nn.Sequential(kind(4, 3), nn.Linear(3, 2)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def edit(index: int) -> None:
            if index == 2:
                Scaled.scale, Scaled.shift = 0.5, 0.25

        return _trained(way, model, optimizer, edit)
    finally:
        restore()


def _class_of_optimizer(way: Way, kind: type) -> Numbers:
    restore = _Restored(Factored)
    try:
        with way.scope():
            model = _model()
            optimizer = kind(model.parameters(), lr=0.1)

        def edit(index: int) -> None:
            if index:
                Factored.factor = 0.5 * index
            if index == 2:
                Factored.late = 0.1  # type: ignore[attr-defined]
            if index == 3:
                del Factored.late  # type: ignore[attr-defined]

        return _trained(way, model, optimizer, edit)
    finally:
        restore()


# -- what hooks derive ------------------------------------------------------------------------------------------------


def _pruned(way: Way, *, again: bool = False, is_looked_at: bool = False, trains: bool = True) -> Numbers:
    with way.scope():
        model: Any = _model()
        prune.l1_unstructured(model[0], "weight", amount=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = _batches()[0]
    way.call(lambda: model(batch).detach())
    if trains:
        _trained(way, model, optimizer)
    if is_looked_at:
        with torch.no_grad():
            model(batch)
    if again:
        with way.scope():
            prune.l1_unstructured(model[0], "weight", amount=0.5)
    seen = model[0].weight.detach().clone()
    found = way.call(lambda: model(batch).detach())
    return _values_of(model, seen=seen, found=found)


def _normed(way: Way) -> Numbers:
    with warnings.catch_warnings(), way.scope():
        warnings.simplefilter("ignore")
        model: Any = _model()
        nn.utils.weight_norm(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _trained(way, model, optimizer)
    return {"weight": model[0].weight.detach().clone()}


# -- gradients that an optimizer keeps --------------------------------------------------------------------------------


class Extrapolating(Own):
    """By the gradient before, which is the same tensor where the program zeroes it in place."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        before = self.state[p].get("before", grad)
        p.sub_(2 * grad - before, alpha=group["lr"])
        self.state[p]["before"] = grad if group["keeps"] else grad.clone()


def _kept_gradient(way: Way, *, keeps: bool, set_to_none: bool) -> Numbers:
    with way.scope():
        model: Any = _model()
        optimizer = Extrapolating(model.parameters(), lr=0.1, keeps=keeps)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        optimizer.step()

    def steps() -> None:
        for batch in _batches():
            step(batch)

    way.call(steps)
    return _values_of(model)


# -- TorchScript ------------------------------------------------------------------------------------------------------


def _called(module: Any, batch: torch.Tensor) -> torch.Tensor:
    return module(batch)  # type: ignore[no-any-return]


def _saved(module: Any, batch: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)(batch)  # type: ignore[no-any-return,no-untyped-call]


def _copied(module: Any, batch: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(module)(batch)  # type: ignore[no-any-return]


def _frozen(module: Any, batch: torch.Tensor) -> torch.Tensor:
    return torch.jit.freeze(module.eval())(batch)


def _by_name(module: Any, batch: torch.Tensor) -> torch.Tensor:
    return module.forward(batch)  # type: ignore[no-any-return]


def _double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def _given(module: Any, batch: torch.Tensor) -> torch.Tensor:
    """A function of TorchScript gets a parameter."""
    return torch.jit.script(_double)(next(module.parameters()))  # type: ignore[no-any-return]


def _in_script(way: Way, *, use: Callable[[Any, torch.Tensor], torch.Tensor], is_traced: bool = False) -> Numbers:
    """Made before functions train the model, and after that, and used each time before anything else is read."""
    batch, found = _batches()[0], {}
    with way.scope():
        model: Any = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make() -> Any:
        return torch.jit.trace(model, batch) if is_traced else torch.jit.script(model)  # type: ignore[no-untyped-call]

    early = make()
    for turn in range(2):
        for name, module in (("early", early), ("late", make())):
            _train(way, model, optimizer)
            found[f"{name} {turn}"] = use(module, batch).detach()
    return found


class OfOwn(torch.Tensor):
    """A class that PyTorch asks nothing."""


def _as_subclass(way: Way, *, writes: bool) -> Numbers:
    with way.scope():
        model: Any = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for turn in range(2):
        _train(way, model, optimizer)
        seen = model[0].weight.detach().as_subclass(OfOwn) if turn else model[0].weight.as_subclass(OfOwn)
        found[f"{turn}"] = seen.as_subclass(torch.Tensor).detach().clone()
        if writes:
            with torch.no_grad():
                seen.mul_(2)
    _train(way, model, optimizer)
    return {**found, **_values_of(model)}


# -- rows, columns and places -----------------------------------------------------------------------------------------

KEPT = "a gradient that an optimizer keeps"
SCRIPT = "a module of TorchScript"
_USES = (_called, _by_name, _saved, _copied, _frozen, _given)
CLASSES = "attributes of classes"
DERIVED = "what hooks derive of parameters"
IDS = "a table by id()"

ROWS: Mapping[str, Mapping[str, Program]] = {
    IDS: {
        "in a closure": _by_ids,
        "as an argument": partial(_by_ids, is_argument=True),
        "in an attribute of a module": partial(_by_ids, is_attribute=True),
        "in an attribute of an optimizer": _ids_of_an_optimizer,
    },
    CLASSES: {
        "of a module's": partial(_class_of_module, kind=Scaled),
        "of an optimizer's": partial(_class_of_optimizer, kind=Factored),
        "of its base": partial(_class_of_optimizer, kind=Derived),
    },
    DERIVED: {
        "a pruned weight": _pruned,
        "a pruned weight, pruned again": partial(_pruned, again=True),
        "a pruned weight, after a forward pass": partial(_pruned, is_looked_at=True),
        "pruned again after a forward pass": partial(_pruned, is_looked_at=True, again=True),
        "a pruned weight that nobody trains": partial(_pruned, again=True, trains=False),
        "a normed weight": _normed,
    },
    KEPT: {
        "zeroed in place": partial(_kept_gradient, keeps=True, set_to_none=False),
        "made anew": partial(_kept_gradient, keeps=True, set_to_none=True),
        "copied, zeroed in place": partial(_kept_gradient, keeps=False, set_to_none=False),
    },
    "a parameter as a tensor of another class": {
        "read": partial(_as_subclass, writes=False),
        "written": partial(_as_subclass, writes=True),
    },
    SCRIPT: {
        **{f"script, {use.__name__[1:]}": partial(_in_script, use=use) for use in _USES},
        **{f"trace, {use.__name__[1:]}": partial(_in_script, use=use, is_traced=True) for use in (_called, _saved)},
    },
    **ps_after_steps.ROWS,
    **ps_attributes.ROWS,
    **ps_held_state.ROWS,
    **ps_views.ROWS,
}
OLD = ("a pruned weight", "a pruned weight, pruned again", "a normed weight")
FAKE = {f"{servers} servers, {workers} workers": (servers, workers) for servers, workers in ((1, 1), (2, 2))}


def expected(row: str, column: str) -> Expected:
    if column == "zeroed in place":
        return refused(UnsupportedError, "keeps gradients without a copy.*clone", "a server has gradients of its own")
    if column in OLD:
        return refused(UnsupportedError, "weight of Linear is what the last forward pass", "a worker has made the last")
    return RIGHT


def check(row: str, column: str, new_strategy: Callable[[], Any]) -> None:
    """Raises AssertionError where servers come to other numbers than one device."""
    wanted = ROWS[row][column](Way(nullcontext, lambda fn, *args: fn(*args)))
    strategy = new_strategy()
    try:
        coordinator = ts.ClusterCoordinator(strategy)
        seen = ROWS[row][column](
            Way(
                strategy.scope,
                lambda fn, *args: coordinator.schedule(fn, args=args).get(timeout=SECONDS),
                lambda: coordinator.join(timeout=SECONDS),
            )
        )
    finally:
        strategy.close()
    assert_close(seen, wanted)


def make_cells() -> Iterator[Cell]:
    for row, programs in ROWS.items():
        for column in programs:
            for place, (servers, workers) in FAKE.items() if row != ps_attributes.CODE else ():
                run = partial(_in_fake_cluster, row, column, servers, workers)
                yield Cell(row, column, place, run, expected(row, column))
            yield on_servers.cell("ps_objects", row, column, expected(row, column), __name__)


def _in_fake_cluster(row: str, column: str, servers: int, workers: int) -> None:
    with FakeCluster(workers=workers, ps=servers) as cluster:
        check(row, column, cluster.strategy)


def check_of(row: str, column: str, resolver: Any) -> Callable[[], None]:
    return partial(check, row, column, partial(ts.ParameterServerStrategy, resolver))


# -- planted faults ---------------------------------------------------------------------------------------------------


def _at(row: str, *columns: str, place: str = "2 servers, 2 workers") -> tuple[str, ...]:
    return tuple(f"{row} | {column} | {place}" for column in columns)


def _pushed(self: LeftGradients, whole: Callable[..., bool], gradient: torch.Tensor) -> bool:
    whole(self, gradient)
    return False


def _without_ids(
    self: Any, reference: Any, whole: Callable[..., Any] = live_optimizer._Unpickler.persistent_load
) -> Any:
    return 0 if reference[0] == "id" else whole(self, reference)


_CLASSES_STAY = "what is set on classes stays here"
_CODE_STAYS = "classes travel once"
_FILES_STAY = "files are as workers import them"
_ONLY_LATER = "what was set in files before does not count"

FAULTS = [
    PlantedFault(
        "whose tensors gradients are does not count",
        switched_off(LeftGradients, "pushed", partialmethod(_pushed, LeftGradients.pushed)),
        _at(KEPT, "zeroed in place"),
    ),
    PlantedFault(
        "as_subclass asks nobody",
        switched_off(cached_parameter.CachedTensor, "as_subclass", torch.Tensor.as_subclass),
        _at("a parameter as a tensor of another class", "read", "written"),
    ),
    PlantedFault(
        "TorchScript takes what there is",
        switched_off(cached_parameter, "bring_alone", lambda tensor: None),
        _at(SCRIPT, *ROWS[SCRIPT]),
    ),
    PlantedFault(
        _CLASSES_STAY,
        lambda: on_servers.marked(_CLASSES_STAY, switched_off(attributes, "set_on_classes", lambda owner: {})),
        _at(CLASSES, *ROWS[CLASSES], place=on_servers.PROCESSES),
    ),
    PlantedFault(
        "what hooks derive is like any tensor",
        switched_off(attributes, "_watch_derived", lambda module, name: None),
        _at(DERIVED, *OLD),
    ),
    PlantedFault(
        "what hooks derive is never current",
        switched_off(attributes, "is_same", lambda one, other: False),
        _at(DERIVED, "a pruned weight that nobody trains"),
    ),
    PlantedFault(
        "what shows a variable is a copy",
        switched_off(Outgoing, "_view", lambda self, value: None),
        _at(ps_views.OF_A_VARIABLE, *ps_views.ROWS[ps_views.OF_A_VARIABLE]),
    ),
    PlantedFault(
        "ids travel as the numbers that they are",
        switched_off(Catalog, "address", lambda self, value: None),
        _at(IDS, *list(ROWS[IDS])[:3]),
    ),
    PlantedFault(
        "what functions make of optimizer state is in other tensors",
        switched_off(cached_state.CachedState, "can_take", lambda self, tensor, value: False),
        _at(ps_held_state.ROW, "read", "given to load_state_dict"),
    ),
    PlantedFault(
        _CODE_STAYS,
        lambda: on_servers.marked(_CODE_STAYS, switched_off(program_files.CodeOfClasses, "marks", lambda self: [])),
        _at(ps_attributes.CODE, *ps_attributes.ROWS[ps_attributes.CODE], place=on_servers.PROCESSES),
    ),
    PlantedFault(
        _FILES_STAY,
        lambda: on_servers.marked(_FILES_STAY, switched_off(program_files.ProgramFiles, "changed", lambda self: ())),
        _at(ps_attributes.FILE, *list(ps_attributes.IN_FILE), place=on_servers.PROCESSES),
    ),
    PlantedFault(
        _ONLY_LATER,
        lambda: on_servers.marked(_ONLY_LATER, switched_off(program_files, "_written_in", lambda module: {})),
        _at(ps_attributes.FILE, *[f"{name}, before" for name in ps_attributes.IN_FILE], place=on_servers.PROCESSES),
    ),
    PlantedFault(
        "what is set on variables stays on the coordinator",
        switched_off(program_state.CapturedVariables, "tensors", lambda self: iter(())),
        _at(ps_attributes.ROW, *list(ps_attributes.ROWS[ps_attributes.ROW])[:3], "read by steps, set anew"),
    ),
    PlantedFault(
        "tensors of optimizer state ask nobody",
        switched_off(cached_state.CachedState, "adopt", lambda self, state: None),
        _at(ps_held_state.ROW, "read", "written through .data"),
    ),
    PlantedFault(
        "memory of optimizer state is compared once",
        switched_off(optimizer_state, "_is_shared", lambda state: False),
        _at(ps_held_state.ROW, "written by an array that is held, too"),
    ),
    PlantedFault(
        "what shows memory of optimizer state asks nobody",
        switched_off(cached_state, "aliases_in", lambda result, memory: ()),
        _at(ps_held_state.ROW, "parts of it"),
    ),
    PlantedFault(
        "functions see optimizers as they were before their steps",
        switched_off(stepped_optimizers.SteppedOptimizers, "begin", lambda self, optimizer: None),
        _at(ps_after_steps.IN_FUNCTION, *list(ps_after_steps.ROWS[ps_after_steps.IN_FUNCTION])[:10]),
    ),
    PlantedFault(
        "nobody reads what step() returns",
        switched_off(push, "reads_result", lambda: False),
        _at(ps_after_steps.IN_FUNCTION, "what step() returns", "what step() of a wrapper returns"),
    ),
    PlantedFault(
        "what came from a step stays on the worker",
        switched_off(stepped_optimizers.SteppedOptimizers, "end", stepped_optimizers.SteppedOptimizers._ask_no_more),
        _at(ps_after_steps.IN_FUNCTION, "a list"),
    ),
    PlantedFault(
        "lists that steps write to are others on the coordinator",
        switched_off(attributes, "_put", dict.__setitem__),
        _at(ps_after_steps.ON_COORDINATOR, "a list", "a dictionary"),
    ),
    PlantedFault(
        "a server's optimizer has the coordinator's ids",
        switched_off(live_optimizer._Unpickler, "persistent_load", _without_ids),
        _at(IDS, "in an attribute of an optimizer"),
    ),
]

TABLE = Table(
    "ps_objects",
    "Does what a program hangs on modules and optimizers mean on parameter servers what it means on one device?",
    make_cells,
    always=(
        "a table by id() | in an attribute of an optimizer | 1 servers, 1 workers",
        "what hooks derive of parameters | a pruned weight that nobody trains | 1 servers, 1 workers",
    ),
    faults=FAULTS,
    alike=lambda place: "" if place in FAKE else place,
)


def main() -> None:
    from tests.matrix.ps_objects import check_of

    on_servers.answer(partial(on_servers.on_one_cluster, "ps_objects", check_of))


if __name__ == "__main__":
    main()

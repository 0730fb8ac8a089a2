"""Functions that are scheduled again: what has changed since is seen, whatever it is, and what has not is not looked
through again."""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.unit.ps_worlds import Job
from torchstrat.errors import NotSendableError, UnsupportedError
from torchstrat.parameter_server.travel import remembered, stable
from torchstrat.parameter_server.travel.closures import Packed, pack, unpack
from torchstrat.parameter_server.travel.remembered import Remembered
from torchstrat.parameter_server.variables.reading import Reading
from torchstrat.testing.fake_cluster import FakeCluster


class Sender:
    """A coordinator's functions on their way to one worker."""

    def __init__(self) -> None:
        self.job = Job()
        with self.job.scope():
            self.model = nn.Linear(2, 1)
            self.other = nn.Linear(2, 1)
        self.remembered = Remembered(self.job.catalog)
        self.world = self.job.world()

    def packed(self, fn: Callable[..., Any]) -> Packed:
        found = self.remembered.find(fn)
        return pack(fn, self.job.catalog, remembered=self.remembered) if found is None else found

    def call(self, fn: Callable[..., Any]) -> Any:
        """What the function returns on the worker."""
        packed = self.packed(fn)
        self.job.bring_up_to_date(self.world)
        return unpack(packed, self.world)()


@pytest.fixture
def sender() -> Sender:
    return Sender()


def always_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a memory that asks for nothing but the code."""
    monkeypatch.setattr(remembered, "same_parts", lambda now, kept: True)
    monkeypatch.setattr(stable.Parts, "are_same", lambda self: True)
    monkeypatch.setattr(remembered, "_circumstances", lambda *_: ())
    monkeypatch.setattr(Reading, "is_same", lambda self, earlier: True)


# -- what may change --------------------------------------------------------------------------------------------------

Change = tuple[Callable[[], Any], Callable[[], None]]
"""A function, and what changes what it returns."""


def in_closure(value: Any, change: Callable[[Any], Any]) -> Callable[[Any], Change]:
    def make(_: Any) -> Change:
        held = value() if callable(value) else value

        def fn() -> Any:
            return repr(held)

        return fn, lambda: change(held) and None

    return make


def rebound(before: Any, after: Any) -> Callable[[Any], Change]:
    def make(_: Any) -> Change:
        held = before

        def change() -> None:
            nonlocal held
            held = after

        return lambda: repr(held), change

    return make


def _global(before: dict[str, Any], after: Callable[[dict[str, Any]], object], body: str) -> Callable[[Any], Change]:
    def make(_: Any) -> Change:
        space: dict[str, Any] = {"__name__": "__main__", **before}
        exec(f"def fn():\n    return {body}", space)
        return space["fn"], lambda: after(space) and None

    return make


def _defaults(_: Any) -> Change:
    def fn(scale: int = 1) -> int:
        return scale

    return fn, lambda: setattr(fn, "__defaults__", (2,))


def _keyword_default(_: Any) -> Change:
    def fn(*, scale: int = 1) -> int:
        return scale

    return fn, lambda: fn.__kwdefaults__.update(scale=2)


def _attribute_of_the_function(_: Any) -> Change:
    def fn() -> Any:
        return fn.scale  # type: ignore[attr-defined]

    fn.scale = 1  # type: ignore[attr-defined]
    return fn, lambda: setattr(fn, "scale", 2)


def _code(_: Any) -> Change:
    def fn() -> int:
        return 1

    def other() -> int:
        return 2

    return lambda: fn(), lambda: setattr(fn, "__code__", other.__code__)


def _nested_cell(_: Any) -> Change:
    scale = 1

    def inner() -> int:
        return scale

    def change() -> None:
        nonlocal scale
        scale = 2

    return lambda: inner(), change


def _nested_default(_: Any) -> Change:
    def inner(scale: int = 1) -> int:
        return scale

    return lambda: inner(), lambda: setattr(inner, "__defaults__", (2,))


class Thing:
    kept = 1

    def __init__(self, value: Any = 1) -> None:
        self.value = value

    def step(self) -> Any:
        return repr(self.value), self.kept

    def __call__(self) -> Any:
        return self.step()


Thing.__module__ = "__main__"  # as of a script: by value


def _of_object(change: Callable[[Any], Any], fn: Callable[[Any], Any] = lambda thing: thing.step) -> Any:
    def make(_: Any) -> Change:
        kind = type("Thing", (Thing,), {"__module__": "__main__", "step": Thing.step})
        thing = kind()
        return fn(thing), lambda: change(thing) and None

    return make


def _other_model(sender: Any) -> Change:
    model = sender.model

    def change() -> None:
        nonlocal model
        model = sender.other

    return lambda: model.weight[0, 0].item(), change


def _tensor(_: Any) -> Change:
    tensor = torch.zeros(2)

    def change() -> None:
        tensor.add_(1)

    return lambda: tensor.tolist(), change


CHANGES: dict[str, Callable[[Any], Change]] = {
    "list appended to": in_closure(lambda: [1], lambda held: held.append(2)),
    "item of a list": in_closure(lambda: [1, 2], lambda held: held.__setitem__(0, 5)),
    "list in a list": in_closure(lambda: [[1]], lambda held: held[0].append(2)),
    "value of a dict": in_closure(lambda: {"a": 1}, lambda held: held.update(a=2)),
    "key of a dict": in_closure(lambda: {"a": 1}, lambda held: held.update(b=held.pop("a"))),
    "list in a dict": in_closure(lambda: {"a": [1]}, lambda held: held["a"].append(2)),
    "set added to": in_closure(lambda: {1}, lambda held: held.add(2)),
    "array": in_closure(lambda: torch.zeros(2).numpy(), lambda held: held.__setitem__(0, 5)),
    "bytearray": in_closure(lambda: bytearray(b"a"), lambda held: held.append(5)),
    "tensor written": _tensor,
    "rebound name": rebound(1, 2),
    "equal number of another type": rebound(1, 1.0),
    "equal number of yet another type": rebound(1, True),
    "negative zero": rebound(0.0, -0.0),
    "equal string of another class": rebound("a", type("Text", (str,), {"__module__": "__main__"})("b")),
    "None": rebound(None, 0),
    "global": _global({"scale": 1}, lambda space: space.update(scale=2), "scale"),
    "list in a global": _global({"items": [1]}, lambda space: space["items"].append(2), "list(items)"),
    "global removed": _global({"len": sum}, lambda space: space.pop("len"), "len([5])"),
    "global in place of a builtin": _global({}, lambda space: space.update(len=sum), "len([5])"),
    "default": _defaults,
    "keyword's default": _keyword_default,
    "attribute of the function": _attribute_of_the_function,
    "code": _code,
    "cell of a nested function": _nested_cell,
    "default of a nested function": _nested_default,
    "attribute of an object": _of_object(lambda thing: setattr(thing, "value", 2)),
    "attribute of a callable object": _of_object(lambda thing: setattr(thing, "value", 2), lambda thing: thing),
    "list in an object": _of_object(lambda thing: setattr(thing, "value", [3])),
    "new attribute of an object": _of_object(lambda thing: setattr(thing, "kept", 2)),
    "attribute of a class": _of_object(lambda thing: setattr(type(thing), "kept", 2)),
    "attribute of a base class": _of_object(lambda thing: setattr(type(thing).__mro__[1], "kept", Thing.kept + 1)),
    "method of a class": _of_object(
        lambda thing: setattr(type(thing), "step", lambda self: "other"), lambda thing: thing
    ),
    "class of an object": _of_object(
        lambda thing: setattr(thing, "__class__", type("Other", (Thing,), {"kept": 7, "__module__": "__main__"}))
    ),
    "dictionary of an object": _of_object(lambda thing: setattr(thing, "__dict__", {"value": 9})),
    "another captured object": _other_model,
}
"""By what changes."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(sender: Sender, name: str) -> None:
    fn, change = CHANGES[name](sender)
    before = sender.call(fn)
    assert sender.call(fn) == before
    change()
    after = sender.call(fn)
    assert after == pack_anew(sender, fn) != before


def pack_anew(sender: Sender, fn: Callable[[], Any]) -> Any:
    """What the worker makes of a function that nobody remembers."""
    return unpack(pack(fn, sender.job.catalog), sender.world)()


NEVER_KEPT = {"array", "bytearray", "tensor written", "equal string of another class"}


# The method is replaced in the class that both sides share here, since they are one process.
@pytest.mark.parametrize("name", sorted(CHANGES.keys() - NEVER_KEPT - {"method of a class"}))
def test_a_memory_that_asks_for_nothing_would_miss_it(
    sender: Sender, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above sees what it is for."""
    always_reuse(monkeypatch)
    fn, change = CHANGES[name](sender)
    before = sender.call(fn)
    change()
    assert sender.call(fn) == before


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - NEVER_KEPT))
def test_what_has_not_changed_is_found_again(sender: Sender, name: str) -> None:
    fn, change = CHANGES[name](sender)
    packed = sender.packed(fn)
    assert sender.remembered.find(fn) is packed
    change()
    assert sender.remembered.find(fn) is not packed


@pytest.mark.parametrize("name", sorted(NEVER_KEPT - {"equal string of another class"}))
def test_what_may_change_unseen_is_packed_each_time(sender: Sender, name: str) -> None:
    fn, _ = CHANGES[name](sender)
    sender.packed(fn)
    assert sender.remembered.find(fn) is None


# -- the same function, made again ------------------------------------------------------------------------------------


def test_closures_over_different_objects_are_told_apart(sender: Sender) -> None:
    def over(model: nn.Module, scale: int) -> Callable[[], Any]:
        return lambda: (model.weight[0, 0].item(), scale)

    wanted = {}
    for _ in range(2):
        for model in (sender.model, sender.other):
            for scale in (1, 2):
                found = sender.remembered.find(over(model, scale))
                assert (found is None) is ((id(model), scale) not in wanted)
                result = sender.call(over(model, scale))
                assert wanted.setdefault((id(model), scale), result) == result
    assert len(set(wanted.values())) == 4


def test_an_object_with_the_id_of_another_one_is_not_taken_for_it(sender: Sender) -> None:
    held: Any = Thing(1)

    def fn() -> Any:
        return held.step()

    assert sender.call(fn) == ("1", Thing.kept)
    for _ in range(10_000):
        number = id(held)
        held = None
        held = Thing(2)
        if id(held) == number:
            break
    assert id(held) == number, "no object was made in the place of the last one"
    assert sender.call(fn) == ("2", Thing.kept)


def test_a_model_with_the_id_of_another_one_is_not_taken_for_it(sender: Sender) -> None:
    job, held = sender.job, [nn.Identity()]

    def over(model: Any) -> Callable[[], Any]:
        return lambda: model.weight[0, 0].item()

    numbers = set()
    for _ in range(1_000):
        held.clear()
        with job.scope():
            held.append(nn.Linear(2, 1))
        spec = job.spec_of(held[0].weight)  # type: ignore[arg-type]
        assert spec is not None
        assert sender.call(over(held[0])) == 100 + spec.number
        if id(held[0]) in numbers:
            return
        numbers.add(id(held[0]))
    raise AssertionError("no model was made in the place of an earlier one")


def test_nothing_captured_is_kept_alive(sender: Sender) -> None:
    with sender.job.scope():
        model = nn.Linear(2, 1)

    def make(model: nn.Module) -> list[Any]:
        thing = Thing(model)

        def inner() -> Any:
            return model

        return [lambda: (inner(), thing), inner, thing]

    fn, *rest = make(model)
    packed = sender.packed(fn)
    assert sender.remembered.find(fn) is packed
    gone = [weakref.ref(each) for each in (model, fn, *rest, packed)]
    sender.job.forget(model)
    del model, fn, rest, packed
    gc.collect()
    assert [reference() for reference in gone] == [None] * 5


def test_what_was_let_go_is_made_again_and_keeps_alive_what_it_refers_to(sender: Sender) -> None:
    model = sender.model

    def fn() -> Any:
        return model.weight[0, 0].item()

    first = sender.packed(fn)
    digest, blob, tokens = first.digest, first.blob, first.tokens
    del first
    gc.collect()
    again = sender.remembered.find(fn)
    assert again is not None
    assert (again.digest, again.blob, again.tokens) == (digest, blob, tokens)
    assert again.alive == (model,)
    assert sender.remembered.find(fn) is again


# -- what decides how it travels --------------------------------------------------------------------------------------

LIBRARY = """
import dataclasses

model = None
table = {}
nested = {"a": [1]}
scale = 1

class Holder:
    model = None

holder = Holder()

@dataclasses.dataclass(frozen=True)
class Settings:
    widths: tuple = (1, 2)
    found: list = None

class MoreSettings(Settings):
    pass

settings = Settings(widths=(3, 4))
settings_with_list = Settings(found=[])
more_settings = MoreSettings()

def plain():
    return helper()

def helper():
    return scale

def names_model():
    return model

def by_table():
    return table.get("model")

def by_holder():
    return holder.model

def by_class():
    return Holder.model

def defaulted(found=None):
    return found

class Stepper:
    def step(self):
        return helper()
"""


@pytest.fixture
def library(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / "psr_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("psr_library")
    sys.modules.pop("psr_library", None)


def renamed(library: types.ModuleType, model: nn.Module) -> None:
    library.helper = lambda: model  # type: ignore[attr-defined]


CAPTURES: dict[str, tuple[str, Callable[[Any, nn.Module], Any]]] = {
    "global": ("names_model", lambda library, model: setattr(library, "model", model)),
    "global of its module": ("plain", lambda library, model: setattr(library, "model", model)),
    "new global of its module": ("plain", lambda library, model: setattr(library, "fresh", model)),
    "table": ("by_table", lambda library, model: library.table.update(model=model)),
    "table of its module": ("plain", lambda library, model: library.table.update(model=model)),
    "list in a table of its module": ("plain", lambda library, model: library.nested["a"].append(model)),
    "list of frozen settings": ("plain", lambda library, model: library.settings_with_list.found.append(model)),
    "what is derived from frozen settings": (
        "plain",
        lambda library, model: setattr(library.more_settings, "x", model),
    ),
    "object": ("by_holder", lambda library, model: setattr(library.holder, "model", model)),
    "class": ("by_class", lambda library, model: setattr(library.Holder, "model", model)),
    "default": ("defaulted", lambda library, model: setattr(library.defaulted, "__defaults__", (model,))),
    "helper": ("plain", renamed),
    "default of a helper": ("plain", lambda library, model: setattr(library.helper, "__defaults__", (model,))),
    "attribute of a helper": ("plain", lambda library, model: setattr(library.helper, "model", model)),
    "method of an object": ("Stepper.step", lambda library, model: setattr(library.Stepper, "model", model)),
}


def function_of(library: types.ModuleType, name: str) -> Any:
    return library.Stepper().step if name == "Stepper.step" else getattr(library, name)


@pytest.mark.parametrize("name", CAPTURES)
def test_a_function_that_goes_by_name_is_sent_once_it_reaches_the_model(
    sender: Sender, library: types.ModuleType, name: str
) -> None:
    function, put = CAPTURES[name]
    fn = function_of(library, function)
    packed = sender.packed(fn)
    assert sender.remembered.find(fn) is packed
    put(library, sender.model)
    after = sender.packed(fn)
    assert after.digest == pack(fn, sender.job.catalog).digest
    assert after.digest != packed.digest


@pytest.mark.parametrize("name", CAPTURES)
def test_a_memory_that_asks_for_nothing_would_send_the_name(
    sender: Sender, library: types.ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_reuse(monkeypatch)
    function, put = CAPTURES[name]
    fn = function_of(library, function)
    packed = sender.packed(fn)
    put(library, sender.model)
    assert sender.packed(fn) is packed


def test_frozen_settings_are_not_looked_at_again(sender: Sender, library: types.ModuleType) -> None:
    found = sender.job.catalog.reach.rests_on(library.plain)
    assert found is not None
    seen = {id(part) for _, parts in found for part in parts}
    assert id(library.settings_with_list.found) in seen
    assert id(library.settings.widths) not in seen


def test_what_lies_there_and_is_captured_later(sender: Sender, library: types.ModuleType) -> None:
    library.holder.model = tensor = torch.zeros(2)  # type: ignore[attr-defined]
    packed = sender.packed(library.plain)
    assert sender.remembered.find(library.plain) is packed
    sender.job.place(tensor, "buffer")
    assert sender.packed(library.plain).digest == pack(library.plain, sender.job.catalog).digest != packed.digest


def test_what_lies_there_and_is_to_be_trained_later(sender: Sender, library: types.ModuleType) -> None:
    library.holder.model = model = nn.Linear(1, 1).requires_grad_(False)  # type: ignore[attr-defined]
    packed = sender.packed(library.by_holder)
    assert sender.remembered.find(library.by_holder) is packed
    model.requires_grad_(True)
    with pytest.raises(NotSendableError, match="trainable"):
        sender.packed(library.by_holder)


def test_a_name_that_means_another_function(sender: Sender, library: types.ModuleType) -> None:
    fn = library.plain
    packed = sender.packed(fn)
    assert sender.remembered.find(fn) is packed
    library.plain = library.helper  # type: ignore[attr-defined]
    after = sender.packed(fn)
    assert after.digest == pack(fn, sender.job.catalog).digest != packed.digest


def test_another_function_of_the_same_code(sender: Sender, library: types.ModuleType) -> None:
    packed = sender.packed(library.plain)
    double = types.FunctionType(library.plain.__code__, library.plain.__globals__, "plain")
    after = sender.packed(double)
    assert after.digest == pack(double, sender.job.catalog).digest != packed.digest


def test_modules_that_are_registered_to_be_sent(sender: Sender, library: types.ModuleType) -> None:
    import cloudpickle  # type: ignore[import-untyped]

    packed = sender.packed(library.plain)
    cloudpickle.register_pickle_by_value(library)
    try:
        assert sender.packed(library.plain).digest != packed.digest
    finally:
        cloudpickle.unregister_pickle_by_value(library)
    assert sender.packed(library.plain).digest == packed.digest


# -- the program around it --------------------------------------------------------------------------------------------


class Program:
    """A model on a cluster of one worker, and a function that tells what the worker sees of it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.strategy = cluster.strategy()
        with self.strategy.scope():
            self.model = model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
            self.spare = spare = nn.Linear(2, 1)
            self.optimizer = optimizer = torch.optim.SGD([*model.parameters()], lr=0.5, momentum=0.25)
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        self.scale: Any = [1.0]

        def state() -> Any:
            groups = [
                {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
            ]
            return (
                [module.training for module in model.modules()],
                [parameter.requires_grad for parameter in model.parameters()],
                [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())],
                repr(groups),
                [len(group["params"]) for group in optimizer.param_groups],
                spare.weight.tolist(),
            )

        self.state = state

    def seen(self, *args: Any) -> Any:
        return self.coordinator.schedule(self.state, args).get(timeout=60)


@pytest.fixture
def program() -> Iterator[Program]:
    with FakeCluster(workers=1, ps=1) as cluster:
        yield Program(cluster)


def write(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.fill_(value)


AROUND: dict[str, Callable[[Program], object]] = {
    "learning rate": lambda program: program.optimizer.param_groups[0].update(lr=0.125),
    "momentum": lambda program: program.optimizer.param_groups[0].update(momentum=0.5),
    "new hyperparameter": lambda program: program.optimizer.param_groups[0].update(note="x"),
    "new parameter group": lambda program: program.optimizer.add_param_group({"params": [program.spare.weight]}),
    "eval": lambda program: program.model.eval(),
    "eval of a child": lambda program: program.model[1].eval(),
    "requires_grad": lambda program: program.model[0].weight.requires_grad_(False),
    "parameter written": lambda program: write(program.model[0].weight, 3.0),
    "buffer written": lambda program: write(program.model[2].running_mean, 3.0),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_change_of_the_program_is_seen(program: Program, name: str) -> None:
    before = [program.seen() for _ in range(3)]
    assert before == before[:1] * 3
    AROUND[name](program)
    assert program.seen() == program.state() != before[0]


@pytest.mark.parametrize("name", AROUND)
def test_a_look_that_always_finds_the_same_would_miss_it(
    program: Program, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_reuse(monkeypatch)
    before = [program.seen() for _ in range(3)]
    AROUND[name](program)
    assert program.seen() == before[0]


def test_a_rate_that_is_a_tensor(program: Program) -> None:
    rate = torch.tensor(0.5)
    program.optimizer.param_groups[0]["lr"] = rate
    before = program.seen()
    program.seen()
    rate.fill_(0.25)
    assert program.seen() == program.state() != before


def test_a_replaced_parameter_is_refused_at_the_next_call(program: Program) -> None:
    for _ in range(3):
        program.seen()
    program.model[0].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match=r"weight of Linear was added, removed or replaced"):
        program.seen()


def test_a_child_put_into_the_model_is_refused_at_the_next_call(program: Program) -> None:
    for _ in range(3):
        program.seen()
    program.model.append(nn.ReLU())
    with pytest.raises(UnsupportedError, match=r"3 of Sequential was added, removed or replaced"):
        program.seen()


def test_a_tensor_with_the_id_of_a_buffer_that_was_replaced_is_not_taken_for_it(program: Program) -> None:
    layer = program.model[2]
    program.seen()
    number = id(layer.running_mean)
    layer.running_mean = torch.zeros(2)
    made = [torch.full((2,), 7.0) for _ in range(1_000)]
    found = [tensor for tensor in made if id(tensor) == number]
    assert found, "no tensor was made in the place of the buffer"
    (tensor,) = found
    for _ in range(2):
        assert program.coordinator.schedule(lambda: tensor.tolist()).get(timeout=60) == [7.0, 7.0]
        program.seen()  # the coordinator looks where buffers are
    assert program.coordinator.schedule(lambda: layer.running_mean.tolist()).get(timeout=60) == [0.0, 0.0]


def test_a_model_made_later_is_there_at_the_next_call(program: Program) -> None:
    model = program.model

    def count() -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    schedule = program.coordinator.schedule
    assert [schedule(count).get(timeout=60) for _ in range(3)] == [10] * 3
    with program.strategy.scope():
        model = nn.Linear(30, 1)  # type: ignore[assignment]
    assert schedule(count).get(timeout=60) == 31


def test_a_trainable_argument_is_refused_for_a_known_function(program: Program) -> None:
    def take(value: Any) -> int:
        return 1

    schedule = program.coordinator.schedule
    for _ in range(3):
        assert schedule(take, (5,)).get(timeout=60) == 1
    with pytest.raises(ts.errors.InvalidArgumentError, match="trainable variables that the scope has not seen"):
        schedule(take, (nn.Linear(1, 1),))


def test_arguments_are_those_of_each_call(program: Program) -> None:
    def take(*values: Any, **named: Any) -> str:
        return repr((values, named))

    model, items = program.model, [1]

    def with_model(found: Any, number: int) -> tuple[bool, int]:
        return found.weight.shape == (2, 2), number

    schedule = program.coordinator.schedule
    for _ in range(3):
        assert schedule(take).get(timeout=60) == "((), {})"
        assert schedule(take, (1,), {"a": 2.0}).get(timeout=60) == "((1,), {'a': 2.0})"
        assert schedule(take, (True, [1, (2, None)])).get(timeout=60) == "((True, [1, (2, None)]), {})"
        assert schedule(take, (items,)).get(timeout=60) == f"(({items},), {{}})"
        assert schedule(with_model, (model[0], len(items))).get(timeout=60) == (True, len(items))
        items.append(2)


def test_a_known_function_is_found_and_the_program_not_looked_through(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        program.seen()
    job = program.coordinator._job

    def never(*_: Any) -> Any:
        raise AssertionError

    for name in ("commit", "options", "modes"):
        monkeypatch.setattr(job, name, never)
    monkeypatch.setattr(program.strategy, "_capture", never)
    program.seen()
    program.model.eval()
    with pytest.raises(AssertionError):
        program.seen()
    program.model.train()


def test_tensors_among_the_arguments_are_copies_of_the_moment(program: Program) -> None:
    def take(one: torch.Tensor, other: Any, found: Any) -> tuple[list[float], bool, bool]:
        return one.tolist(), one is other[0], found.weight.shape == (2, 2)

    tensor, model = torch.zeros(2), program.model
    schedule = program.coordinator.schedule
    for _ in range(3):
        schedule(take, (tensor, [tensor], model[0])).get(timeout=60)
    results = []
    for number in range(3):
        results.append(schedule(take, (tensor, [tensor], model[0])))
        tensor.fill_(number + 1)
    assert [result.get(timeout=60) for result in results] == [([float(n)] * 2, True, True) for n in range(3)]
    with pytest.raises(NotSendableError, match=r"requires a gradient|gradient history"):
        schedule(take, (torch.zeros(2, requires_grad=True) * 2, [0], model[0]))

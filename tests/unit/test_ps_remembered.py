"""Functions that are scheduled again: what has changed since is seen, whatever it is, and what has not is not looked
through again."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchstrat as ts
from tests.support.ps_library import is_by_value, library_modules
from tests.support.ps_worlds import Job
from torchstrat.errors import NotSendableError
from torchstrat.parameter_server.serialization.functions import pack, unpack
from torchstrat.parameter_server.serialization.pack_cache import Packed, Remembered
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


# -- what may change --------------------------------------------------------------------------------------------------


class Thing:
    kept = 1

    def __init__(self, value: Any = 1) -> None:
        self.value = value

    def step(self) -> Any:
        return repr(self.value), self.kept

    def __call__(self) -> Any:
        return self.step()


Thing.__module__ = "__main__"  # as of a script: by value


def derived(**members: Any) -> type[Thing]:
    return type("Thing", (Thing,), {"__module__": "__main__", "step": Thing.step, **members})


class Text(str):
    __slots__ = ()


Text.__module__ = "__main__"
HELD, THING = "lambda: repr(held)", "thing.step"
CHANGES: dict[str, tuple[str, str, str]] = {
    "list appended to": ("held = [1]", HELD, "held.append(2)"),
    "item of a list": ("held = [1, 2]", HELD, "held[0] = 5"),
    "list in a list": ("held = [[1]]", HELD, "held[0].append(2)"),
    "value of a dict": ("held = {'a': 1}", HELD, "held['a'] = 2"),
    "key of a dict": ("held = {'a': 1}", HELD, "held['b'] = held.pop('a')"),
    "list in a dict": ("held = {'a': [1]}", HELD, "held['a'].append(2)"),
    "set added to": ("held = {1}", HELD, "held.add(2)"),
    "array": ("held = torch.zeros(2).numpy()", HELD, "held[0] = 5"),
    "bytearray": ("held = bytearray(b'a')", HELD, "held.append(5)"),
    "tensor written": ("held = torch.zeros(2)", "lambda: held.tolist()", "held.add_(1)"),
    "rebound name": ("held = 1", HELD, "nonlocal held; held = 2"),
    "equal number of another type": ("held = 1", HELD, "nonlocal held; held = 1.0"),
    "equal number of yet another type": ("held = 1", HELD, "nonlocal held; held = True"),
    "negative zero": ("held = 0.0", HELD, "nonlocal held; held = -0.0"),
    "equal string of another class": ("held = 'a'", HELD, "nonlocal held; held = Text('b')"),
    "None": ("held = None", HELD, "nonlocal held; held = 0"),
    "global": ("globals().update(scale=1)", "lambda: scale", "globals().update(scale=2)"),
    "list in a global": ("globals().update(items=[1])", "lambda: list(items)", "items.append(2)"),
    "global removed": ("globals().update(len=sum)", "lambda: len([5])", "globals().pop('len')"),
    "global in place of a builtin": ("", "lambda: len([5])", "globals().update(len=sum)"),
    "default": ("def fn(scale=1): return scale", "fn", "fn.__defaults__ = (2,)"),
    "keyword's default": ("def fn(*, scale=1): return scale", "fn", "fn.__kwdefaults__.update(scale=2)"),
    "attribute of the function": ("def fn(): return fn.scale\n    fn.scale = 1", "fn", "fn.scale = 2"),
    "code": ("def fn(): return 1", "lambda: fn()", "fn.__code__ = (lambda: 2).__code__"),
    "cell of a nested function": ("held = 1\n    def fn(): return held", "lambda: fn()", "nonlocal held; held = 2"),
    "default of a nested function": ("def fn(scale=1): return scale", "lambda: fn()", "fn.__defaults__ = (2,)"),
    "attribute of an object": ("thing = derived()()", THING, "thing.value = 2"),
    "attribute of a callable object": ("thing = derived()()", "thing", "thing.value = 2"),
    "list in an object": ("thing = derived()()", THING, "thing.value = [3]"),
    "new attribute of an object": ("thing = derived()()", THING, "thing.kept = -1"),
    "attribute of a class": ("thing = derived()()", THING, "type(thing).kept = -1"),
    "attribute of a base class": ("thing = derived()()", THING, "Thing.kept += 1"),
    "method of a class": ("thing = derived()()", "thing", "type(thing).step = lambda self: 'other'"),
    "class of an object": ("thing = derived()()", THING, "thing.__class__ = derived(kept=7)"),
    "dictionary of an object": ("thing = derived()()", THING, "thing.__dict__ = {'value': 9}"),
    "another captured object": (
        "model = sender.model",
        "lambda: model.weight[0, 0].item()",
        "nonlocal model; model = sender.other",
    ),
}
"""By what changes: what there is, a function, and what changes what it returns."""
NEVER_KEPT = {"array", "bytearray", "tensor written"}  # what may change unseen


def made(name: str, sender: Sender) -> tuple[Callable[[], Any], Callable[[], None]]:
    there, fn, change = CHANGES[name]
    space: dict[str, Any] = {"__name__": "__main__", "torch": torch, "Thing": Thing, "derived": derived, "Text": Text}
    exec(f"def make(sender):\n    {there}\n    def change(): {change}\n    return {fn}, change", space)
    found: tuple[Callable[[], Any], Callable[[], None]] = space["make"](sender)
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_what_has_not_changed_is_found_again(sender: Sender, name: str) -> None:
    fn, change = made(name, sender)
    packed = sender.packed(fn)
    assert sender.remembered.find(fn) is (None if name in NEVER_KEPT else packed)
    before = sender.call(fn)  # writes the class of an object, which both sides share: they are one process
    assert sender.call(fn) == before
    packed = sender.packed(fn)
    change()
    assert sender.remembered.find(fn) is not packed
    after = sender.call(fn)
    anew = unpack(pack(fn, sender.job.catalog), sender.world)()
    assert after == anew != before


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

library = pytest.fixture(library_modules)
CAPTURES: dict[str, tuple[str, str]] = {
    "global": ("names_model", "library.model = model"),
    "global of its module": ("plain", "library.model = model"),
    "new global of its module": ("plain", "library.fresh = model"),
    "table": ("by_table", "library.table['model'] = model"),
    "table of its module": ("plain", "library.table['model'] = model"),
    "list in a table of its module": ("plain", "library.nested['a'].append(model)"),
    "list of frozen settings": ("plain", "library.settings_with_list.found.append(model)"),
    "what is derived from frozen settings": ("plain", "library.more_settings.x = model"),
    "object": ("by_holder", "library.holder.model = model"),
    "class": ("by_class", "library.Holder.model = model"),
    "default": ("defaulted", "library.defaulted.__defaults__ = (model,)"),
    "helper": ("plain", "library.helper = lambda: model"),
    "default of a helper": ("plain", "library.helper.__defaults__ = (model,)"),
    "attribute of a helper": ("plain", "library.helper.model = model"),
    "method of an object": ("Caller().step", "library.Caller.model = model"),
    "global of a function that it calls": ("far", "library.model = model"),
    "object of another module": ("through_other", "library.imports.holder.model = model"),
    "global of a method": ("Stepper().step", "library.model = model"),
    "global of a static method": ("Stepper.found", "library.model = model"),
}
"""By where the model is put: a function of the library, and what puts it there."""


@pytest.mark.parametrize("name", CAPTURES)
def test_a_function_that_goes_by_name_is_sent_once_it_reaches_the_model(
    sender: Sender, library: types.ModuleType, name: str
) -> None:
    function, put = CAPTURES[name]
    fn = eval(f"library.{function}")
    packed = sender.packed(fn)
    assert sender.remembered.find(fn) is packed
    exec(f"def put(library, model): {put}", space := {})  # type: ignore[var-annotated]
    space["put"](library, sender.model)
    after = sender.packed(fn)
    assert after.digest == pack(fn, sender.job.catalog).digest != packed.digest
    own = sender.world.resolve(sender.job.catalog.token_of(sender.model))
    wanted = own if fn() is sender.model else library.scale
    assert sender.call(fn) is wanted
    assert is_by_value(after) or name == "method of an object"  # its helper goes by name
    assert not is_by_value(packed)


def test_frozen_settings_are_not_looked_at_again(sender: Sender, library: types.ModuleType) -> None:
    found = sender.job.catalog.reach.rests_on(library.plain)
    assert found is not None
    seen = {id(part) for _, parts in found for part in parts}
    assert id(library.settings_with_list.found) in seen
    assert id(library.settings.widths) not in seen


def test_what_lies_there_and_is_captured_or_to_be_trained_later(sender: Sender, library: types.ModuleType) -> None:
    library.holder.model = tensor = torch.zeros(2)  # type: ignore[attr-defined]
    packed = sender.packed(library.plain)
    assert sender.remembered.find(library.plain) is packed
    sender.job.place(tensor, "buffer")
    assert sender.packed(library.plain).digest == pack(library.plain, sender.job.catalog).digest != packed.digest
    library.holder.model = model = nn.Linear(1, 1).requires_grad_(False)  # type: ignore[attr-defined]
    packed = sender.packed(library.by_holder)
    assert sender.remembered.find(library.by_holder) is packed
    model.requires_grad_(True)
    with pytest.raises(NotSendableError, match="trainable"):
        sender.packed(library.by_holder)


def test_a_name_that_means_another_function_and_another_function_of_the_same_code(sender, library) -> None:
    fn = library.plain
    packed = sender.packed(fn)
    double = types.FunctionType(fn.__code__, fn.__globals__, "plain")
    assert sender.packed(double).digest == pack(double, sender.job.catalog).digest != packed.digest
    library.plain = library.helper  # type: ignore[attr-defined]
    assert sender.packed(fn).digest == pack(fn, sender.job.catalog).digest != packed.digest


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


def test_a_tensor_with_the_id_of_a_buffer_that_was_replaced_is_not_taken_for_it(program: Program) -> None:
    layer = program.model[2]
    for _ in range(100):  # whether the place of an object is taken by the next ones is for the allocator to say
        program.seen()
        number = id(layer.running_mean)
        layer.running_mean = torch.zeros(2)
        made = [torch.full((2,), 7.0) for _ in range(1_000)]
        found = [tensor for tensor in made if id(tensor) == number]
        if found:
            break
    else:
        pytest.fail("no tensor was made in the place of a buffer, a hundred times: something keeps all of them")
    (tensor,) = found
    for _ in range(2):
        assert program.coordinator.schedule(lambda: tensor.tolist()).get(timeout=60) == [7.0, 7.0]
        program.seen()  # the coordinator looks where buffers are
    assert program.coordinator.schedule(lambda: layer.running_mean.tolist()).get(timeout=60) == [0.0, 0.0]


def test_a_model_made_later_is_there_at_the_next_call(program: Program) -> None:
    model, schedule = program.model, program.coordinator.schedule

    def count() -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    assert [schedule(count).get(timeout=60) for _ in range(3)] == [10] * 3
    with program.strategy.scope():
        model = nn.Linear(30, 1)  # type: ignore[assignment]
    assert schedule(count).get(timeout=60) == 31


def test_arguments_are_those_of_each_call_and_their_tensors_copies_of_the_moment(program: Program) -> None:
    def take(*values: Any, **named: Any) -> str:
        return repr((values, named))

    def with_model(found: Any, tensor: Any, nested: Any) -> tuple[bool, list[float], bool]:
        return found.weight.shape == (2, 2), tensor.tolist(), tensor is nested[0]

    model, items, tensor, schedule = program.model[0], [1], torch.zeros(2), program.coordinator.schedule
    results = []
    for number in range(3):
        assert schedule(take).get(timeout=60) == "((), {})"
        assert schedule(take, (1,), {"a": 2.0}).get(timeout=60) == "((1,), {'a': 2.0})"
        assert schedule(take, (True, [1, (2, None)])).get(timeout=60) == "((True, [1, (2, None)]), {})"
        assert schedule(take, (items,)).get(timeout=60) == f"(({items},), {{}})"
        items.append(2)
        results.append(schedule(with_model, (model, tensor, [tensor])))
        tensor.fill_(number + 1)
    assert [result.get(timeout=60) for result in results] == [(True, [float(n)] * 2, True) for n in range(3)]
    with pytest.raises(ts.errors.InvalidArgumentError, match="trainable variables that the scope has not seen"):
        schedule(take, (nn.Linear(1, 1),))
    with pytest.raises(NotSendableError, match=r"requires a gradient|gradient history"):
        schedule(with_model, (model, torch.zeros(2, requires_grad=True) * 2, [0]))


def test_a_known_function_is_found_and_the_program_not_looked_through(program, monkeypatch) -> None:
    for _ in range(3):
        program.seen()
    job = program.coordinator._job

    def never(*_: Any) -> Any:
        raise AssertionError

    for name in ("commit", "options", "modes"):
        monkeypatch.setattr(job, name, never)
    monkeypatch.setattr(program.coordinator, "_capture", never)
    program.seen()
    program.model.eval()
    with pytest.raises(AssertionError):
        program.seen()
    program.model.train()

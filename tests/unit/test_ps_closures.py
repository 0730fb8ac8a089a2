"""Functions, arguments and results on their way between two worlds of objects, and the captured objects there."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import io
import socket
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import torchstrat as ts
from tests.support.ps_library import is_by_value, library_modules, without_library
from tests.support.ps_worlds import Job, make_tensor
from torchstrat.errors import ContextError, FunctionError, InvalidArgumentError, NotSendableError
from torchstrat.parameter_server.serialization import functions, pickler
from torchstrat.parameter_server.serialization.functions import World, pack, pack_result, unpack, unpack_result
from torchstrat.parameter_server.variables import program_files


@pytest.fixture
def job() -> Job:
    made = Job()
    with made.scope():
        made.model = nn.Linear(2, 1)
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.5)
    return made


def own_model(job: Job, world: Any) -> nn.Module:
    return world.resolve(job.catalog.token_of(job.model))


# -- what functions look like -----------------------------------------------------------------------------------------


class Trainer:
    """Reaches the model as an attribute."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def step(self, extra: Any = None) -> Any:
        return self.model, extra

    __call__ = step
    bound = property(lambda self: self.step)


def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


SHAPES = {
    "closure": "fn = lambda: (model, None)",
    "nested": "def fn():\n def inner(): return model, None\n return inner()",
    "default": "def fn(found=model, *, again=model): return (found, None) if found is again else again",
    "lambda in a dict": "table = {'step': lambda: (model, None)}\nfn = lambda: table['step']()",
    "recursion between functions": "def even(n): return (model, None) if n == 0 else odd(n - 1)\n"
    "def odd(n): return even(n - 1)\nfn = partial(even, 4)",
    "decorators": "@logged\n@torch.no_grad()\ndef fn(): return None if torch.is_grad_enabled() else (model, None)",
    "generator's function": "def produce(): yield from (model, None)\nfn = lambda: tuple(produce())",
    "dataclass": "@dataclass\nclass Step:\n found: Any\n notes: list = field(default_factory=list)\n"
    " def __call__(self): return self.found, None\nfn = Step(model)",
    "local classes": "class Base:\n def result(self): return model, None\n"
    "class Local(Base):\n kinds = Enum('kinds', 'A B')\n make = classmethod(lambda cls: cls())\n"
    " def result(self): return super().result() if self.kinds['A'] is type(self).kinds.A else None\n"
    "fn = lambda: Local.make().result()",
    "bound method": "fn = Trainer(model).step",
    "bound method through a property": "fn = Trainer(model).bound",
    "callable object": "fn = Trainer(model)",
    "partial": "fn = partial(Trainer.step, Trainer(model), extra=None)",
    "partial of a partial": "fn = partial(partial(lambda found: (found, None), model))",
    "container": "fn = partial(lambda found: (found['a'][0][1], None), {'a': [(0, model)]})",
    "PyTorch's operators": "aten, relu, default = torch.ops.aten, torch.ops.aten.relu, torch.ops.aten.relu.default\n"
    "def fn(): return model, None if torch.ops.aten is aten and aten.relu is relu and relu.default is default else 1",
    "single dispatch": "@functools.singledispatch\ndef kind(x): 'What it is'\n"
    "@kind.register\ndef _(x: list): return ['list', kind(x[0]), model]\nkind.note = 'own'\n"
    "def fn(): return kind([1])[2], kind.__wrapped__(1) if (kind.__name__, kind.__doc__, kind.note, kind([1])[:2]) == "
    "('kind', 'What it is', 'own', ['list', None]) else 1",
    "cached property and method by type": "class Local:\n found = functools.cached_property(lambda self: model)\n"
    " @functools.singledispatchmethod\n def of(self, x): return 1\n @of.register\n def _(self, x: str): return None\n"
    "def fn(): local = Local(); return local.found, local.of('a') if vars(local) == {'found': model} else 1",
    "cached functions": "@functools.lru_cache(7)\ndef found(n): return (model, None) if n == 0 else found(n - 1)\n"
    "found.note = 'own'\nclass Local:\n @staticmethod\n @functools.cache\n def make(n): return found(n)\n"
    "def fn(): return Local.make(2) if (found.note, found.cache_info().maxsize) == ('own', 7) else 1",
    "a cached helper": "found = functools.cache(lambda n: n)\nfn = lambda: (model, None) if found(2) == 2 else 1",
    "module method": "fn = partial(lambda forward: (forward.__self__, None), model.forward)",
}
NAMES = {"Any": Any, "Enum": enum.Enum, "dataclass": dataclasses.dataclass, "field": dataclasses.field}
NAMES |= {"Trainer": Trainer, "logged": logged, "partial": functools.partial, "torch": torch, "__name__": "__main__"}
NAMES |= {"functools": functools}


@pytest.mark.parametrize("shape", SHAPES)
def test_functions_of_any_shape_find_the_workers_model(job, shape):
    space = dict(NAMES)
    exec(f"def make(model):\n{textwrap.indent(SHAPES[shape], ' ')}\n return fn", space)
    fn = space["make"](job.model)
    assert fn() == (job.model, None)
    world = job.world()
    assert job.send(fn, world)() == (own_model(job, world), None)


# -- the same function again ------------------------------------------------------------------------------------------


# -- data -------------------------------------------------------------------------------------------------------------


def test_tensors_and_arrays_travel_beside_the_pickle_as_they_were_when_packed(job):
    big, array, small = torch.arange(10_000.0), np.arange(20_000, dtype=np.float64).reshape(100, 200), np.arange(3)
    packed = pack(([big, big[::2], big], {"n": 1}, [array, array.T, small]), job.catalog, "args")
    assert len(packed.blob) < 1_200
    assert [tuple(tensor.shape) for tensor in packed.tensors[:2]] == [(10_000,), (5_000,)]
    assert all(tensor.is_contiguous() for tensor in packed.tensors)
    assert packed.buffers >= 1
    wanted = torch.arange(10_000.0), array.copy()
    big += 1
    array += 1
    [first, half, again], rest, [sent, transposed, sent_small] = unpack(packed, job.world())
    assert first is again
    assert torch.equal(first, wanted[0])
    assert torch.equal(half, wanted[0][::2])
    assert rest == {"n": 1}
    np.testing.assert_array_equal(sent, wanted[1])
    np.testing.assert_array_equal(transposed, wanted[1].T)
    np.testing.assert_array_equal(sent_small, small)
    sent += 1  # it may be written to


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
        torch.zeros(2, 3, device="meta"),
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.arange(6).reshape(2, 3).t(),
        torch.zeros(2).expand(3, 2),
    ],
    ids=lambda tensor: f"{type(tensor).__name__} {tensor.layout} {tensor.dtype} {tuple(tensor.shape)} {tensor.device}",
)
def test_tensors_of_every_kind(job, tensor):
    [sent] = unpack(pack((tensor,), job.catalog, "args"), job.world())
    back = unpack_result(pack_result(sent, job.world()))
    for found in (sent, back):
        assert (found.dtype, found.shape, found.layout, found.device) == (
            tensor.dtype,
            tensor.shape,
            tensor.layout,
            tensor.device,
        )
        if tensor.device.type != "meta":
            assert torch.equal(found.to_dense(), tensor.to_dense().detach())
    assert type(sent) is type(tensor)


def test_a_tensor_of_inference_mode_is_ordinary_there(job):
    with torch.inference_mode():
        packed = pack((torch.ones(2),), job.catalog, "args")
    [sent] = unpack(packed, job.world())
    assert not sent.is_inference()
    assert not packed.tensors[0].is_inference()


# -- functions of importable modules ----------------------------------------------------------------------------------

library = pytest.fixture(library_modules)


def test_nothing_else_of_a_module_goes_by_name(job, library):
    """`sibling` reaches nothing, but its name would bring in the whole module, and what that imports."""
    library.imports.holder.model = job.model
    packed = pack(library.beside, job.catalog)
    assert is_by_value(packed)
    world = job.world()
    assert unpack(packed, world)() == (5, own_model(job, world))


def test_a_module_that_holds_captured_objects_is_never_imported(job, library):
    library.model = job.model
    assert is_by_value(pack(library.by_table, job.catalog))  # which itself does not reach the model

    def step() -> Any:
        return library.far(), library.model, library.imports.doubled(1)

    world = job.world()
    found, direct, number = job.send(step, world)()
    assert found is direct is own_model(job, world)
    assert number == 3

    def by_string() -> Any:
        return getattr(library, "ta" + "ble"), library.model

    with pytest.raises(AttributeError, match="'table' is not in that part"):
        job.send(by_string, world)()


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda library: library.far, r"global 'model' \(a torch.nn.modules.linear.Linear\) cannot travel"),
        (lambda library: library.Stepper().step, r"^Stepper.step → self → class Stepper\.found → global 'model' "),
        (lambda library: lambda: library.model, r"^<lambda> → closure variable 'library'\.model "),
    ],
    ids=["function", "method", "attribute of the module"],
)
def test_a_trainable_module_behind_an_importable_function_is_an_error(job, library, make, path):
    """By name it would be built again on each worker, trained there, and thrown away."""
    library.model = nn.Linear(1, 1)
    with pytest.raises(NotSendableError, match=path):
        pack(make(library), job.catalog)


def test_a_module_that_the_worker_lacks_is_named(job, library):
    packed = pack(library.imports.doubled, job.catalog)
    needed = r"doubled needs? the module 'psx_other', which this worker cannot import"
    with without_library(), pytest.raises(FunctionError, match=needed):
        unpack(packed, job.world())


# -- what cannot travel -----------------------------------------------------------------------------------------------


def _generator_object() -> Iterator[int]:
    yield 1


class _FakeStream(torch.Stream):
    """No accelerator is needed to be one."""

    def __new__(cls) -> Any:
        return torch.Stream.__new__(cls, stream_id=0, device_index=0, device_type=0)


ONE_AT_A_TIME, ONE_PROCESS = "Functions of one worker run one at a time", "exists in one process only"
IN_SCOPE = r"inside `with strategy.scope\(\):`"
UNSENDABLE = {
    "a lock": (threading.Lock, "a _thread.lock", ONE_AT_A_TIME),
    "an rlock": (threading.RLock, r"an? _thread.RLock", ONE_AT_A_TIME),
    "a condition": (threading.Condition, "a threading.Condition", ONE_AT_A_TIME),
    "a thread": (threading.Thread, "a threading.Thread", "create_per_worker"),
    "a file": (lambda: open(__file__), "a _io.TextIOWrapper", "an open file"),  # noqa: SIM115
    "a binary file": (lambda: open(__file__, "rb"), "a _io.BufferedReader", "an open file"),  # noqa: SIM115
    "a socket": (socket.socket, "a socket.socket", f"a socket {ONE_PROCESS}"),
    "a generator": (_generator_object, "a generator", "in the middle of its work"),
    "an iterator over data": (
        lambda: iter(DataLoader([1, 2])),
        "a torch.utils.data.dataloader._SingleProcessDataLoaderIter",
        "create_per_worker_dataset",
    ),
    "a store": (torch.distributed.HashStore, "a torch.*HashStore", f"a process group {ONE_PROCESS}"),
    "a compiled function": (
        lambda: torch.compile(lambda x: x + 1, backend="eager"),
        "a function",
        r"Call torch.compile in the scheduled",
    ),
    "a stream": (lambda: _FakeStream(), ".*Stream", "belong to a device"),
    "a trainable module": (lambda: nn.Linear(1, 1), "a torch.nn.modules.linear.Linear", "'weight' requires a grad"),
    "an optimizer": (lambda: torch.optim.SGD([torch.ones(1)], lr=0.1), "a torch.optim.sgd.SGD", IN_SCOPE),
    "a leaf": (lambda: torch.ones(1, requires_grad=True), "a torch.Tensor", IN_SCOPE),
    "a history": (lambda: torch.ones(1, requires_grad=True) * 2, "a torch.Tensor", r"value.detach\(\)"),
    "a variable": (lambda: ts.Variable(1.0), "a torchstrat.core.variable.variable.Variable", "what workers assign"),
    "a strategy": (lambda: ts.OneDeviceStrategy("cpu"), "a torchstrat.*OneDeviceStrategy", "another strategy"),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_the_error_names_the_captured_variable(job, name):
    make, kind, remedy = UNSENDABLE[name]
    with contextlib.ExitStack() as stack:
        thing = make()
        stack.callback(getattr(thing, "close", lambda: None))
        expected = rf"^<lambda> → closure variable 'thing' \({kind}\) cannot travel to a worker: .*{remedy}"
        with pytest.raises(NotSendableError, match=expected):
            pack(lambda: thing, job.catalog)
    pack(Trainer(job.model), job.catalog)  # nothing is left of it


class _Holder:
    def __init__(self, lock: Any) -> None:
        self.locks = {"a": [1, lock]}


def _default_of_a_default(lock: Any) -> Any:
    holder = _Holder(lock)

    def inner() -> Any:
        return holder

    def step(found: Any = inner) -> Any:
        return found

    return step


@pytest.mark.parametrize(
    ("make", "what", "path"),
    [
        (_default_of_a_default, "fn", r"step → default of 'found' → closure variable 'holder'\.locks\['a'\]\[1\]"),
        (lambda lock: ({"x": _Holder(lock)},), "args", r"args\[0\]\['x'\]\.locks\['a'\]\[1\]"),
        (lambda lock: Trainer(lock).step, "fn", r"Trainer.step → self\.model"),
        (lambda lock: functools.partial(lambda y: y, y=lock), "fn", r"partial\(<lambda>\) → argument 'y'"),
        (Trainer, "fn", r"the Trainer\.model"),
    ],
    ids=["defaults and cells", "arguments", "bound method", "partial", "callable object"],
)
def test_the_error_names_every_step_of_the_way(job, make, what, path):
    with pytest.raises(NotSendableError, match=rf"^{path} \(a _thread.lock\)"):
        pack(make(threading.Lock()), job.catalog, what)


def test_the_way_leads_through_nothing_that_is_torchstrats_own(bare: Job) -> None:
    class Guarded(nn.Linear):
        lock = threading.Lock()

    with bare.scope():
        model = Guarded(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters())
        optimizer.state = {"the keeper of it": Guarded}  # as what stands there on the coordinator, which is not sent
        optimizer.kept = World.__new__(World)
        optimizer.kept._what_belongs_to_it = Guarded
    with pytest.raises(NotSendableError, match=r"^Guarded → class Guarded\.lock \(a _thread\.lock\) cannot travel"):
        bare.world()


def test_what_cannot_be_found_again_is_still_described(job):
    class Odd:
        def __reduce__(self) -> Any:
            return (list, (threading.Lock(),))  # made for the occasion: nothing holds it

    with pytest.raises(NotSendableError, match=r"^args → something in it \(a _thread.lock\) cannot travel"):
        pack((Odd(),), job.catalog, "args")


def test_standard_streams_and_memory_files_travel(job):
    buffer = io.StringIO("text")
    fn = job.send(lambda: (sys.stderr, buffer.getvalue()), job.world())
    assert fn()[1] == "text"


def test_frozen_modules_of_no_scope_travel_by_value(job):
    extractor = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval().requires_grad_(False)
    own = job.send(lambda: extractor, job.world())()
    assert own is not extractor
    assert own.training is False
    assert torch.equal(own[0].weight, extractor[0].weight)
    assert isinstance(own[0].weight, nn.Parameter)
    assert not own[0].weight.requires_grad
    assert len(pack(lambda: extractor, job.catalog).tensors) == 7


def test_much_data_in_a_closure_is_worth_one_warning(job, monkeypatch):
    monkeypatch.setattr(functions, "LARGE_BYTES", 1_000_000)
    small, data, array = torch.zeros(1000), {"train": torch.zeros(1_000_000)}, np.zeros(2_000_000)
    extractor = nn.Linear(1000, 1000).requires_grad_(False)
    for fn, said in (
        (lambda: (small, data), r"<lambda> takes 4 MiB .* <lambda> → closure variable 'data'\['train'\] \(4 MiB\)"),
        (lambda: array, r"<lambda> → closure variable 'array' \(15 MiB\).*create_per_worker_dataset"),
        (lambda: extractor, r"<lambda> → closure variable 'extractor' \(4 MiB\)"),
    ):
        with pytest.warns(UserWarning, match=said):
            pack(fn, job.catalog)
        pack(fn, job.catalog)  # once
    pack((data,), job.catalog, "args")  # arguments are meant to be data


# -- results ----------------------------------------------------------------------------------------------------------


def test_results_are_plain_values(job):
    world = job.world()
    model = own_model(job, world)
    result = {
        "loss": model(torch.ones(1, 2)).sum(),
        "weight": model.weight,
        "state": model.state_dict(),
        "variable": ts.Variable(2.0),
        "none": None,
        "words": np.array(["a", "b"], dtype=object),
    }
    packed = pack_result(result, world)
    assert packed.tokens == frozenset()
    found = unpack_result(packed)
    assert type(found["weight"]) is torch.Tensor
    assert not found["weight"].requires_grad
    assert found["weight"].data_ptr() != model.weight.data_ptr()
    assert torch.equal(found["weight"], model.weight)
    assert torch.equal(found["state"]["bias"], model.bias)
    assert found["loss"].item() == result["loss"].item()
    assert found["variable"].item() == 2.0
    assert found["none"] is None
    assert found["words"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda world: {"model": Trainer(threading.Lock())}, r"result\['model'\]\.model \(a _thread.lock\)"),
        (lambda world: [next(world.modules())[1]], r"result\[0\] \(a torch.nn.modules.linear.Linear\).*it is captured"),
        (lambda world: (1, next(world.optimizers())[1]), r"result\[1\] \(a torch.optim.sgd.SGD\).*it is captured"),
        (lambda world: world.resolve(("strategy",)), r"result \(an? .*Trainer\).*belongs to this worker"),
        (lambda world: _generator_object(), r"result \(a generator\)"),
    ],
    ids=["lock", "module", "optimizer", "registered", "generator"],
)
def test_results_that_cannot_be_sent_are_named(job, make, path):
    world = job.world()
    world.register(("strategy",), Trainer(None))
    with pytest.raises(NotSendableError, match=f"^{path}"):
        pack_result(make(world), world)


def test_a_class_comes_home_as_it_is(job):
    class Local:
        calls = 0

        def number(self) -> int:
            return 1

    def make() -> Any:
        return Local()

    world = job.world()
    packed = pack_result(job.send(make, world)(), world)
    method = vars(Local)["number"]
    assert type(unpack_result(packed)) is Local
    assert vars(Local)["number"] is method


def test_objects_with_slots_come_home(job):
    @dataclasses.dataclass(slots=True)
    class Local:
        number: int = 1

    world, sent = job.world(), pack(functools.partial(Local, 2), job.catalog)
    with mock.patch("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary()):
        made = unpack(sent, world)()  # as in another process, which does not know the class
        result = pack_result(made, world)
    assert type(made) is not Local
    assert unpack_result(result) == Local(2)


class MistakeError(Exception):
    """With arguments that are not those of its base."""

    def __init__(self, *, row: int) -> None:
        super().__init__(f"row {row}")
        self.row = row


def test_exceptions_are_results_and_arguments_as_others_are(job):
    world, mistake = job.world(), MistakeError(row=3)
    for found in (unpack_result(pack_result(mistake, world)), *job.send(functools.partial(max, mistake), world).args):
        assert (type(found), found.args, found.row) == (MistakeError, ("row 3",), 3)


def test_a_librarys_wrapper_is_the_librarys_where_it_arrives(job):
    def step(optimizer: Any) -> str:
        return "stepped"

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    sent = job.send(hooked, job.world())
    assert sent is not hooked
    assert sent.__globals__ is hooked.__globals__
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    calls: list[str] = []
    assert sent(optimizer) == "stepped"
    assert calls == ["hook"]


# -- captured objects: tokens, increments, and what a worker makes of them --------------------------------------------


class Net(nn.Module):
    """Tied weights, a shared child, buffers, a child without members, and Python state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm
        self.act = nn.ReLU()
        self.history = ["made"]


@pytest.fixture
def bare() -> Job:
    return Job()


def made_in_scope(bare: Job, make: Callable[[], Any]) -> Any:
    with bare.scope():
        return make()


def linear(bare: Job, size: int = 2) -> nn.Linear:
    return made_in_scope(bare, lambda: nn.Linear(size, size))


def modules_of(world: World) -> list[Any]:
    return [token for token, _ in world.modules()]


def tokens(bare: Job, *objects: Any) -> list[Any]:
    return [bare.catalog.token_of(one) for one in objects]


def late(bare: Job, **options: Any) -> World:
    """A worker that joins now."""
    world = World(make_tensor)
    for increment in bare.catalog.increments(0, **options):
        world.load(increment)
    return world


def test_a_worker_gets_the_structure_and_its_own_tensors(bare: Job) -> None:
    model = made_in_scope(bare, Net)
    optimizer = made_in_scope(bare, lambda: torch.optim.Adam(model.parameters(), lr=0.25))
    world = bare.world()
    copy = world.resolve(bare.catalog.token_of(model))
    assert type(copy) is Net
    assert copy is not model
    assert copy.history == ["made"]
    assert copy.second.weight is copy.first.weight
    assert copy.again is copy.norm
    assert world.resolve(bare.catalog.token_of(model.act)) is copy.act
    assert isinstance(copy.first.weight, nn.Parameter)
    assert not isinstance(copy.norm.running_mean, nn.Parameter)
    number = bare.spec_of(model.first.weight).number
    assert torch.equal(copy.first.weight, torch.full((3, 3), 100.0 + number))
    [(token, own)] = world.optimizers()
    assert token == bare.catalog.token_of(optimizer)
    assert [id(p) for p in own.param_groups[0]["params"]] == [id(p) for p in copy.parameters()]
    assert own.param_groups[0]["lr"] == 0.25


def test_no_value_of_a_variable_and_no_state_travels(bare: Job) -> None:
    model = linear(bare)
    optimizer = made_in_scope(bare, lambda: torch.optim.Adam(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    increments = bare.catalog.increments(0)
    secret = model.weight.detach().numpy().tobytes()
    assert all(increment.tensors == () and secret not in increment.blob for increment in increments)
    [(_, own)] = bare.world().optimizers()
    assert not own.state


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 1)], milestones=[2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("inside", [True, False], ids=["in scope", "outside"])
def test_a_scheduler_may_be_reached_but_not_stepped(bare: Job, name: str, inside: bool) -> None:
    model = linear(bare)
    optimizer = made_in_scope(bare, lambda: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    scheduler = made_in_scope(bare, lambda: SCHEDULERS[name](optimizer)) if inside else SCHEDULERS[name](optimizer)
    world = bare.world()
    assert bare.send(lambda: scheduler.get_last_lr()[0], world)() == scheduler.get_last_lr()[0]
    with pytest.raises(ContextError, match=r"LR.*\.step\(\) was called in a scheduled function.*on the coordinator"):
        bare.send(lambda: scheduler.step(), world)()
    optimizer.step()
    scheduler.step(*([1.0] if name == "plateau" else []))  # the coordinator's own still steps


def test_increments_build_on_each_other(bare: Job) -> None:
    trunk = linear(bare)
    world = bare.world()
    assert world.version == bare.catalog.version == 1
    head = made_in_scope(bare, lambda: nn.Sequential(trunk, nn.Linear(2, 1)))
    bare.bring_up_to_date(world)
    assert world.version == 2
    assert world.resolve(bare.catalog.token_of(head))[0] is world.resolve(bare.catalog.token_of(trunk))
    assert bare.catalog.increments(2) == []

    other = World(make_tensor)
    increments = bare.catalog.increments(0)
    assert [increment.number for increment in increments] == [1, 2]
    with pytest.raises(FunctionError, match="out of order: increment 2 builds on 1, and this worker has 0"):
        other.load(increments[1])
    for increment in (*increments, *increments):  # again: nothing changes
        other.load(increment)
    assert other.resolve(bare.catalog.token_of(head))[0] is other.resolve(bare.catalog.token_of(trunk))


def test_a_half_built_model_is_left_alone(bare: Job) -> None:
    model = linear(bare)
    bare.world()
    with bare.scope():
        half = nn.Sequential(nn.Linear(2, 2))
        half.lock = threading.Lock()  # could not travel
        assert modules_of(late(bare, new=False)) == tokens(bare, model)
        bare.catalog.trim(1)  # and the same when it is made anew
        world = late(bare, new=False)
        assert modules_of(world) == tokens(bare, model)
        assert world.version == 1
    del half.lock
    bare.bring_up_to_date(world)
    assert type(world.resolve(bare.catalog.token_of(half))) is nn.Sequential


@pytest.mark.parametrize("is_known", [True, False])
def test_a_child_that_only_the_tree_knows_comes_with_its_module(bare: Job, is_known: bool) -> None:
    model = made_in_scope(bare, lambda: nn.Sequential(nn.Linear(2, 2)))
    if is_known:
        bare.world()
        bare.catalog.trim(1)
    model.append(nn.Tanh())  # after the scope
    assert bare.catalog.token_of(model[1]) is not None
    world = late(bare, new=False) if is_known else bare.world()
    assert world.resolve(bare.catalog.token_of(model))[1] is world.resolve(bare.catalog.token_of(model[1]))


def test_what_is_dropped_is_left_out_for_those_who_come_later(bare: Job) -> None:
    kept, dropped = linear(bare), linear(bare, 3)
    early = bare.world()
    [dropped_token] = tokens(bare, dropped)
    of_parameters = [bare.catalog.token_of(one) for one in dropped.parameters()]
    assert all(map(early.knows, of_parameters))
    bare.forget(dropped)
    del dropped
    gc.collect()

    later = bare.world()
    assert modules_of(later) == tokens(bare, kept)
    assert later.version == early.version
    assert not any(map(later.knows, of_parameters))

    third = linear(bare, 1)
    for world in (early, later):
        bare.bring_up_to_date(world)
        assert modules_of(world) == tokens(bare, kept, third)
    with pytest.raises(FunctionError, match="does not have"):
        early.resolve(dropped_token)


def test_trimmed_increments_are_made_anew(bare: Job) -> None:
    for _ in range(3):
        made_in_scope(bare, lambda: bare.registry.add_helper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)))
    kept = []
    for _ in range(3):
        kept.append(linear(bare, 1))
        bare.catalog.increments(0)
    world = bare.world()
    bare.catalog.trim(world.version)
    assert bare.catalog.increments(world.version) == []
    with pytest.raises(InvalidArgumentError, match="trimmed"):
        bare.catalog.increments(1)
    [whole] = bare.catalog.increments(0)
    assert whole.since == 0
    assert modules_of(late(bare)) == tokens(bare, *kept)


class Strategylike: ...


def test_registered_objects(bare: Job) -> None:
    strategy, made = Strategylike(), []
    bare.catalog.register(strategy, ("strategy",))
    with pytest.raises(InvalidArgumentError, match="belongs to another object"):
        bare.catalog.register(Strategylike(), ("strategy",))
    with pytest.raises(FunctionError, match=r"refers to \('strategy',\), which this worker does not have.* has: none"):
        unpack(pack(lambda: strategy, bare.catalog), bare.world())
    fn = bare.send(lambda: strategy, bare.world(make_missing=lambda token: made.append(token) or ["the worker's"]))
    assert fn() == ["the worker's"]
    assert made == [("strategy",)]


def test_a_head_put_on_outside_the_scope_is_named(bare: Job) -> None:
    model = made_in_scope(bare, lambda: nn.Sequential(nn.Linear(1, 1)))
    model.append(nn.Linear(1, 1))
    with pytest.raises(NotSendableError, match=r"^Sequential\.1\.weight .*created outside the strategy's scope"):
        bare.catalog.increments(0)


def test_classes_of_captured_modules_in_a_function(bare: Job) -> None:
    """A class of this function's reaches workers with its instances, the same class with both of two increments."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self) -> torch.Tensor:
            return self.weight * 2

    first = made_in_scope(bare, Local)
    world = bare.world()
    second = made_in_scope(bare, Local)
    bare.bring_up_to_date(world)
    copies = [world.resolve(token) for token in tokens(bare, first, second)]
    assert type(copies[0]) is type(copies[1])
    assert torch.equal(copies[1](), 2 * copies[1].weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 3))),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5),
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 3)),
    ],
    ids=["orthogonal", "spectral norm", "pruned", "averaged"],
)
def test_modules_that_hold_more_than_parameters(bare: Job, make: Callable[[], nn.Module]) -> None:
    """More of them train in the contract's cases."""
    model = made_in_scope(bare, make)
    own = bare.world().resolve(bare.catalog.token_of(model))
    own.load_state_dict(model.state_dict())  # the worker's part is to bring the values
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    found = own.eval()(x)
    torch.testing.assert_close(found, model.eval()(x))
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters() if parameter.requires_grad)


# -- what a worker cannot make ----------------------------------------------------------------------------------------


def assert_need(uses: list[Callable[[], Any]], message: str) -> None:
    for use in uses:
        with pytest.raises(FunctionError, match=message):
            use()


def test_what_a_worker_cannot_import_is_not_in_the_way_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    only_here = types.ModuleType("only_here")  # there when something is pickled, and not when it is unpickled
    exec(
        "import torch\nclass M(torch.nn.Linear): pass\nclass O(torch.optim.SGD): pass\nclass Config: size = 3",
        vars(only_here),
    )
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    bare = Job()
    with bare.scope():
        missing, good = only_here.M(2, 2), nn.Linear(2, 2)
        holder = nn.Sequential(nn.Linear(2, 2), missing)
        optimizer = only_here.O(good.parameters(), lr=0.1)
        bare.registry.add_helper(optimizer)
        good.config = only_here.Config()
    increments = bare.catalog.increments(0)
    with bare.scope():
        around = nn.Sequential(missing)
    increments += bare.catalog.increments(bare.catalog.version)
    tokens = [bare.catalog.token_of(value) for value in (missing, good, holder, optimizer, around)]
    del sys.modules["only_here"]
    world = World(lambda spec: nn.Parameter(torch.ones(spec.shape)))
    for increment in increments:
        world.load(increment)
    x = torch.ones(1, 2)
    assert not world.knows(tokens[0])
    own, own_holder = world.resolve(tokens[1]), world.resolve(tokens[2])
    assert own(x).tolist() == own_holder[0](x).tolist() == [[3.0, 3.0]]
    uses: list[Callable[[], Any]] = [
        lambda: world.resolve(tokens[0]),
        lambda: world.resolve(tokens[3]),
        lambda: own_holder(x),
        lambda: list(world.resolve(tokens[4]).parameters()),
        lambda: own.config.size,
        lambda: own.config == 3,
    ]
    assert_need(uses, r"need only_here\.\w+, which .* cannot import.*register_pickle")


def _raises(*_: Any) -> Any:
    raise OSError("no such device here")


class RaisesWhenMade(nn.Linear):
    __setstate__ = _raises


class RaisingList(list[int]):
    extend = _raises


class RaisingOptimizer(torch.optim.SGD):
    __setstate__ = _raises


class RaisesInItsFunction:
    def __reduce__(self) -> Any:
        return _raises, ()


def test_what_raises_while_a_worker_makes_it_stops_nothing_else() -> None:
    bare = Job()
    with bare.scope():
        good, bad, around = nn.Linear(2, 1), RaisesWhenMade(2, 1), nn.Sequential(RaisesWhenMade(2, 1), nn.Tanh())
        holder = nn.Linear(1, 1)
        holder.numbers, holder.made = RaisingList([1, 2]), RaisesInItsFunction()
        optimizer, sgd = RaisingOptimizer(good.parameters(), lr=0.1), torch.optim.SGD(good.parameters(), lr=0.1)
    world = bare.world()
    with bare.scope():
        later = nn.Linear(2, 1)
    bare.bring_up_to_date(world)
    assert world.version == bare.catalog.version

    def own(value: Any) -> Any:
        return world.resolve(bare.catalog.token_of(value))

    assert isinstance(own(good), nn.Linear)
    assert isinstance(own(later), nn.Linear)
    assert own(around)[1](torch.zeros(1)).tolist() == [0.0]
    assert own(holder)(torch.zeros(1)).shape == (1,)
    assert own(sgd).param_groups[0]["params"] == list(own(good).parameters())
    uses: list[Callable[[], Any]] = [
        lambda: own(bad),
        lambda: own(optimizer),
        lambda: own(around)(torch.ones(1, 2)),
        lambda: own(holder).numbers[0],
        lambda: own(holder).made.value,
    ]
    assert_need(uses, r"could not be made on this worker.*no such device here.*__setstate__")


class Wrapping(torch.optim.Optimizer):
    """Whose groups are another optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]


def test_an_optimizer_whose_groups_are_a_property_is_made_again() -> None:
    optimizer = Wrapping(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    make, arguments, state, _, _, set_state = pickler._reduce_optimizer(optimizer)
    made = make(*arguments)
    set_state(made, state)
    assert made.param_groups is optimizer.inner.param_groups


def test_what_a_file_works_out_where_it_is_imported_is_no_setting(tmp_path: Path) -> None:
    (tmp_path / "of_a_program.py").write_text(
        "import sys\nRATE = 1.0\nDEVICE = 'cpu'\nif sys.path:\n    DEVICE = 'cuda'\nRANK = 0\ntry:\n    RANK = int(1)\n"
        "except ValueError:\n    pass\n"
    )
    with mock.patch.object(sys, "path", [*sys.path, str(tmp_path)]):
        file = importlib.import_module("of_a_program")
    try:
        files = program_files.ProgramFiles(["of_a_program"])
        assert [*files.changed()] == []
        file.DEVICE, file.RATE = "cuda:1", 0.5
        ((_, found),) = files.changed()
        assert {name: one.value for name, one in found.items()} == {"DEVICE": "cuda:1", "RATE": 0.5}
    finally:
        del sys.modules["of_a_program"]

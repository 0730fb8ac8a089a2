"""Functions, arguments and results on their way between two worlds of objects."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import io
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchstrat as ts
from tests.support.ps_library import is_by_value, library_modules, without_library
from tests.support.ps_worlds import Job, make_tensor
from torchstrat.errors import FunctionError, NotSendableError
from torchstrat.parameter_server.travel import closures
from torchstrat.parameter_server.travel.closures import Packed, pack, pack_result, unpack, unpack_result
from torchstrat.parameter_server.travel.world import World

REPOSITORY = Path(__file__).parents[2]


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
    "module method": "fn = partial(lambda forward: (forward.__self__, None), model.forward)",
}
NAMES = {"Any": Any, "Enum": enum.Enum, "dataclass": dataclasses.dataclass, "field": dataclasses.field}
NAMES |= {"Trainer": Trainer, "logged": logged, "partial": functools.partial, "torch": torch, "__name__": "__main__"}


@pytest.mark.parametrize("shape", SHAPES)
def test_functions_of_any_shape_find_the_workers_model(job, shape):
    space = dict(NAMES)
    exec(f"def make(model):\n{textwrap.indent(SHAPES[shape], ' ')}\n return fn", space)
    fn = space["make"](job.model)
    assert fn() == (job.model, None)
    world = job.world()
    assert job.send(fn, world)() == (own_model(job, world), None)


def test_python_state_is_a_copy_per_worker_that_functions_share_there(job):
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    def seen() -> int:
        return count

    (first, seen_there), (second, _) = (job.send((step, seen), job.world()) for _ in range(2))
    assert [first(), first(), second(), seen_there()] == [1, 2, 1, 2]
    assert count == 0


# -- the same function again ------------------------------------------------------------------------------------------


def test_the_digest_tells_functions_apart(job):
    model, state = job.model, {"scale": 1.0, "data": torch.zeros(3)}

    def step() -> Any:
        return model, state["scale"], state["data"]

    first = pack(step, job.catalog).digest
    assert pack(step, job.catalog).digest == first
    state["scale"] = 2.0  # in a cell, which no cache may remember
    second = pack(step, job.catalog).digest
    state["data"][1] = 1.0
    third = pack(step, job.catalog).digest
    state["data"] = state["data"].reshape(3, 1)
    assert len({first, second, third, pack(step, job.catalog).digest}) == 4
    with torch.no_grad():
        job.model.weight += 1
    state["data"] = state["data"].reshape(3)
    assert pack(step, job.catalog).digest == third  # the model's values are no part of the function


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


def test_packed_travels_without_what_it_keeps_alive(job):
    packed = pack(Trainer(job.model).step, job.catalog)
    assert any(value is job.model for value in packed.alive)
    sent = pickle.loads(pickle.dumps(packed))
    assert isinstance(sent, Packed)
    assert (sent.alive, sent.blob, sent.tokens, sent.digest) == ((), packed.blob, packed.tokens, packed.digest)
    assert job.catalog.token_of(job.model) in packed.tokens


# -- functions of importable modules ----------------------------------------------------------------------------------

library = pytest.fixture(library_modules)


def test_functions_that_reach_nothing_captured_go_by_name(job, library):
    """Those that do go by value: see test_ps_remembered.py."""
    for fn in (library.imports.doubled, library.names_model, lambda: library.Stepper):
        assert not is_by_value(pack(fn, job.catalog))


def test_a_property_of_a_class_that_reaches_what_is_captured(job, library):
    library.model = job.model
    packed = pack(functools.partial(lambda stepper: stepper.alias(), library.Stepper()), job.catalog)
    assert is_by_value(packed)
    world = job.world()
    assert unpack(packed, world)() is own_model(job, world)


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


def test_a_second_process_runs_what_a_script_defines(tmp_path):
    """A script builds a model, an optimizer and a function; this process, which knows neither the script nor its
    helper module, runs the function over its own copies."""
    (tmp_path / "psx_helper.py").write_text(
        "model = None\n\ndef forward(x):\n    return model(x)\n\nraise_if_imported_again = True\n"
    )
    script = tmp_path / "user_script.py"
    script.write_text(
        textwrap.dedent(
            """
            import dataclasses, pickle, sys
            import torch
            from torch import nn
            import psx_helper
            from tests.support.ps_worlds import Job
            from torchstrat.parameter_server.travel.closures import pack, unpack_result

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = nn.Parameter(torch.ones(2))
                def forward(self, x):
                    return (self.weight * x).sum()

            @dataclasses.dataclass
            class Metrics:
                loss: torch.Tensor
                who: str

            job = Job()
            with job.scope():
                model = psx_helper.model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

            def step(x):
                loss = psx_helper.forward(x)
                loss.backward()
                optimizer.step()
                return Metrics(loss, __name__), model.weight

            packed = pack(step, job.catalog), pack((torch.ones(2),), job.catalog, "args")
            with open(sys.argv[1], "wb") as file:
                pickle.dump((packed, job.catalog.increments(0)), file)
            print("sent", flush=True)
            describe = Metrics.__repr__
            sys.stdin.readline()
            with open(sys.argv[2], "rb") as file:
                metrics, weight = unpack_result(pickle.load(file))
            assert type(metrics) is Metrics and Metrics.__repr__ is describe
            assert type(weight) is torch.Tensor and not metrics.loss.requires_grad
            print(metrics.loss.item(), weight.tolist(), model.weight.tolist(), metrics.who)
            """
        )
    )
    sent, returned = tmp_path / "sent", tmp_path / "returned"

    with subprocess.Popen(
        [sys.executable, str(script), str(sent), str(returned)],
        env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as coordinator:
        assert coordinator.stdout is not None
        if coordinator.stdout.readline() != "sent\n":
            pytest.fail(coordinator.communicate(timeout=30)[1])
        (fn, args), increments = pickle.loads(sent.read_bytes())
        world = World(make_tensor)
        for increment in increments:
            world.load(increment)
        result = unpack(fn, world)(*unpack(args, world))
        assert not {"user_script", "psx_helper"} & set(sys.modules)
        returned.write_bytes(pickle.dumps(pack_result(result, world)))
        output, errors = coordinator.communicate("\n", timeout=30)
    assert coordinator.returncode == 0, errors
    assert output.split("\n")[0] == "200.0 [99.0, 99.0] [1.0, 1.0] __main__"


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
    "a stream": (lambda: _FakeStream(), ".*Stream", "belong to a device"),
    "a trainable module": (lambda: nn.Linear(1, 1), "a torch.nn.modules.linear.Linear", "'weight' requires a grad"),
    "an optimizer": (lambda: torch.optim.SGD([torch.ones(1)], lr=0.1), "a torch.optim.sgd.SGD", IN_SCOPE),
    "a leaf": (lambda: torch.ones(1, requires_grad=True), "a torch.Tensor", IN_SCOPE),
    "a history": (lambda: torch.ones(1, requires_grad=True) * 2, "a torch.Tensor", r"value.detach\(\)"),
    "a variable": (lambda: ts.Variable(1.0), "a torchstrat.variable.variable.Variable", "what workers assign"),
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
    monkeypatch.setattr(closures, "LARGE_BYTES", 1_000_000)
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


def test_a_model_made_in_the_function_may_be_returned(job):
    made = nn.Linear(1, 1)
    back = unpack_result(pack_result(made, job.world()))
    assert torch.equal(back.weight, made.weight.detach())


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

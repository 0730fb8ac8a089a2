"""The coordinator's tensors of a job on parameter servers: a read has what the servers have, a write changes that."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn, tensor
from torch.nn import functional as F

import torchstrat as ts
from tests.support.gates import await_arrivals, close_gate, pass_gate
from tests.support.parameter_servers import Program, on_servers
from tests.support.tpu import Doubled
from torchstrat.errors import ContextError, InvalidArgumentError, ParameterServerUnavailable, UnsupportedError
from torchstrat.testing.fake_cluster import FakeCluster


class Job:
    """A model on servers, and functions that add 1 to every parameter, and to the buffers' means."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.strategy = cluster.strategy(ts.partitioners.FixedShardsPartitioner(2))
        self.coordinator = ts.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.model = model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
            self.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        self.weight = model[0].weight
        self.first = model[0].weight.detach().clone()

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
            model[1].running_mean += 1

        def held() -> torch.Tensor:
            return model[0].weight.detach().clone()

        self.step, self.held = step, held

    def train(self, times: int = 1) -> None:
        for _ in range(times):
            self.coordinator.schedule(self.step)
        self.coordinator.join()

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        return self.__dict__.setdefault(f"kept {name}", make())

    def trained(self, times: int = 1) -> torch.Tensor:
        """The weight after so many steps from the beginning."""
        total, velocity = 0.0, 0.0
        for _ in range(times):
            velocity = 0.5 * velocity + 1
            total += velocity
        return self.first + total

    def lose_servers(self) -> None:
        for index in range(2):
            self.cluster.wait_until_lost(self.cluster.kill_server(index))

    def on_servers(self) -> torch.Tensor:
        found: torch.Tensor = self.coordinator.schedule(self.held).get()
        return found


@pytest.fixture
def job() -> Iterator[Job]:
    with FakeCluster(workers=1, ps=2) as cluster:
        made = Job(cluster)
        yield made
        made.strategy.close()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one.detach() - other.detach()).abs().max() < 1e-6)


# -- reading -----------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Job], torch.Tensor]] = {
    "detach": lambda job: job.weight.detach(),
    "data": lambda job: job.weight.data,
    "numpy": lambda job: torch.from_numpy(job.weight.detach().numpy()),
    "an operator": lambda job: job.weight * 1,
    "a view": lambda job: torch.stack([job.weight[row] for row in range(3)]),
    "a list": lambda job: torch.tensor(job.weight.tolist()),
    "deepcopy": lambda job: copy.deepcopy(job.model)[0].weight,
    "state_dict": lambda job: job.model.state_dict()["0.weight"],
    "parameters_to_vector": lambda job: nn.utils.parameters_to_vector([job.weight]).reshape(3, 4),
    "a forward pass": lambda job: F.linear(torch.eye(4), job.weight).T,
    "an autograd function": lambda job: Doubled.apply(job.weight) / 2,
    "func.vmap": lambda job: torch.vmap(lambda row, weight: weight @ row, (0, None))(torch.eye(4), job.weight).T,
    "func.grad": lambda job: torch.func.grad(lambda x: (job.weight.T * x).sum())(torch.ones(4, 3)).T,
    "func.functional_call": lambda job: (
        torch.func.functional_call(job.model[0], dict(job.model[0].named_parameters()), torch.eye(4)).T
        - job.model[0].bias.unsqueeze(1)
    ),
    "jit.trace": lambda job: torch.jit.trace(_Product(job.weight), torch.eye(4))(torch.eye(4)).T,
    "torch.save": lambda job: _saved(job.model)[0].weight,
    "torch.tensor": lambda job: torch.tensor(job.weight),
    "torch.tensor of a list": lambda job: torch.tensor([list(row) for row in job.weight.requires_grad_(False)]),
    "torch.as_tensor": lambda job: torch.as_tensor(data=job.weight, dtype=torch.float64),
    "torch.asarray": lambda job: torch.asarray(obj=job.weight, copy=True, requires_grad=False),
    "torch.tensor by a name of its own": lambda job: tensor(job.weight),
    "an assignment to data": lambda job: _assigned(torch.zeros(1), job.weight),
    "torch.Tensor": lambda job: torch.Tensor(job.weight),
    "a class derived of it": lambda job: _Marked(job.weight),
    "new_tensor": lambda job: torch.zeros(1).new_tensor(job.weight),
    "new": lambda job: torch.zeros(1).new(job.weight),
    "set_": lambda job: torch.zeros(1).set_(job.weight),
    "sparse_coo_tensor": lambda job: torch.sparse_coo_tensor(
        torch.arange(3)[None], job.weight, check_invariants=False
    ).to_dense(),
    "nested_tensor": lambda job: torch.nested.nested_tensor([job.weight]).unbind()[0],
    "to_dlpack": lambda job: torch.from_dlpack(torch.utils.dlpack.to_dlpack(job.weight.requires_grad_(False))),
    "torch.full": lambda job: torch.full((3, 4), job.weight[0, 0].detach()) + job.first - job.first[0, 0],
    "a thread": lambda job: _in_a_thread(lambda: job.weight.detach().clone()),
    # Made before the second function.
    "a kept view": lambda job: torch.cat([job.weight[:1], job.kept("view", lambda: job.weight[1:])]),
    "a kept state_dict": lambda job: job.kept("state", job.model.state_dict)["0.weight"],
    "torch.compile": lambda job: (
        (
            job.kept("forward", lambda: torch.compile(job.model[0], backend="aot_eager"))(torch.eye(4))
            - job.model[0].bias
        ).T
    ),
}


class _Marked(torch.Tensor):
    """Made by the constructor of its base."""


def _in_a_thread(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(read).result(60)


class _Product(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_has_what_functions_have_trained(read: Callable[[Job], torch.Tensor], job: Job) -> None:
    job.train()
    assert equal(read(job), job.trained())
    job.train()
    assert equal(read(job), job.trained(2))


def test_what_a_constructor_makes_of_a_parameter_follows_it(job: Job) -> None:
    made = [torch.Tensor(job.weight), torch.zeros(1).new(job.weight), torch.zeros(1).set_(job.weight)]
    made += [_assigned(torch.zeros(1), job.weight), _assigned(nn.Parameter(torch.zeros(1)), job.weight.data)]
    job.train()
    assert all(equal(one, job.trained()) for one in made)
    for one in made:
        _fill(one, lambda weight: weight.add_(1))
    assert equal(job.on_servers(), job.trained() + 5)


def _assigned(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    tensor.data = memory
    return tensor


def test_what_makes_tensors_is_pytorchs_for_who_looks_at_functions(job: Job) -> None:
    """Compilers and modes know functions by what they are."""

    def makes(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0]) + x.new_tensor([1.0, 2.0]) + torch.full_like(x, 2.0) + torch.Tensor([1, 2])

    def makes_in_script(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0]) + torch.full_like(x, 2.0)

    x = torch.ones(2)
    assert equal(torch.compile(makes, backend="aot_eager", fullgraph=True)(x), makes(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # from torch 2.14 on
        assert equal(torch.jit.script(makes_in_script)(x), makes_in_script(x))
    with torch.device("meta"):
        assert torch.tensor(1.0).is_meta
    assert pickle.loads(pickle.dumps(torch.tensor)) is copy.deepcopy(torch.tensor) is torch.tensor is tensor
    assert type(_Marked([1.0])) is type(pickle.loads(pickle.dumps(_Marked([1.0])))) is _Marked


def test_buffers_are_read_as_parameters_are(job: Job) -> None:
    job.train(2)
    assert job.model[1].running_mean.tolist() == [2.0] * 3
    job.model[1].running_mean = job.model[1].running_mean * 10  # another tensor in its place
    job.train()
    assert job.model[1].running_mean.tolist() == [21.0] * 3


def test_what_can_be_said_without_values_reads_nothing(job: Job) -> None:
    job.train()
    assert repr(job.weight.detach().clone()) in repr(job.weight.detach())
    assert "on parameter servers" not in repr(job.weight)
    job.train()
    job.lose_servers()
    assert job.weight.shape == (3, 4)
    assert (job.weight.is_leaf, job.weight.requires_grad, job.weight.is_sparse) == (True, True, False)
    assert isinstance(job.weight, nn.Parameter)
    assert "on parameter servers" in repr(job.weight)
    with pytest.raises(ParameterServerUnavailable):
        job.weight.detach()
    job.strategy.close()
    assert job.weight.shape == (3, 4)
    for read in (lambda: job.weight + 1, lambda: copy.deepcopy(job.weight), lambda: job.model.state_dict()):
        with pytest.raises(ContextError, match="weight of module 0 was on the parameter servers"):
            read()
    assert "weight of module 0" in repr(job.weight)


# -- writing: most ways to are rows of tests/matrix/ps_writes.py ------------------------------------------------------


def _fill(weight: Any, how: Callable[[Any], object]) -> None:
    with torch.no_grad():
        how(weight)


def _with_row(before: torch.Tensor, value: float) -> torch.Tensor:
    after = before.clone()
    after[1] = value
    return after


@pytest.mark.parametrize("steps_before", [3, 0])
def test_other_memory_changes_what_functions_have_trained(steps_before: int, job: Job) -> None:
    """Set at rest, or while functions are in flight: then they are before it or behind it."""
    for _ in range(3):
        job.coordinator.schedule(job.step)
    if steps_before:
        job.coordinator.join()
    _fill(job.weight, lambda weight: weight.set_(torch.ones(3, 4)))
    found = job.on_servers()
    possible = [1 + job.trained(3) - job.trained(before) for before in range(steps_before, 4)]
    assert any(equal(found, one) for one in possible)
    assert equal(job.weight, found)


def test_an_array_is_written_while_functions_run(job: Job) -> None:
    gate = close_gate("array")
    job.coordinator.schedule(pass_gate, args=("array",))
    job.weight.detach().numpy()[1] = 7.0
    gate.set()
    assert equal(job.on_servers(), _with_row(job.first, 7.0))


def test_an_array_that_is_kept_is_sent_while_nothing_else_changes_the_variable(job: Job) -> None:
    array = job.weight.detach().numpy()
    array[0] = 7
    assert job.on_servers()[0].tolist() == [7.0] * 4
    array[0] = 8
    job.coordinator.schedule(job.held)  # changes nothing
    array[1] = 9
    assert job.on_servers()[:2].tolist() == [[8.0] * 4, [9.0] * 4]


def test_an_array_that_is_old_is_refused_by_name(job: Job) -> None:
    array = job.weight.detach().numpy()
    job.train()
    array[0] = 7
    with pytest.raises(InvalidArgumentError, match=r"weight of module 0 was written .* after functions had changed it"):
        job.train()
    job.train()
    assert equal(job.weight, job.trained(2))  # nothing that was trained is lost


def test_writes_that_are_refused_by_name(job: Job) -> None:
    job.train()
    with pytest.raises(UnsupportedError, match=r"nn\.Parameter\(parameter\.detach\(\)\.clone\(\)\)"):
        nn.Parameter(job.weight)
    assert equal(nn.Parameter(job.weight.detach().clone()), job.trained(1))
    job.model.double()
    with pytest.raises(InvalidArgumentError, match="keep their shape and dtype"):
        job.train()


@pytest.mark.parametrize("by", ["data", "set_"])
def test_no_variable_gets_the_memory_of_another(by: str, job: Job) -> None:
    job.train()
    bias, column = job.model[0].bias, job.weight.detach()[:, 0]
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"bias .* shares its memory with weight of module 0"):
        setattr(bias, "data", column) if by == "data" else bias.set_(column)
    job.train()
    assert equal(job.weight, job.trained(2))


def test_a_buffer_that_gets_the_memory_of_a_parameter_is_refused_as_long_as_it_has_it(job: Job) -> None:
    job.model[1].running_mean = job.model[0].bias.detach()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"running_mean .* shares its memory with bias of module 0"):
            job.train()
    job.model[1].running_mean = job.model[0].bias.detach().clone()
    job.train()
    assert equal(job.weight, job.trained(1))


def test_what_is_written_below_python_is_refused_while_functions_run(job: Job) -> None:
    gate = close_gate("unforeseen")
    job.coordinator.schedule(pass_gate, args=("unforeseen",))
    with pytest.raises(ContextError, match="has changed weight of module 0 in place"):
        _unforeseen(job.weight)
    gate.set()
    job.coordinator.join()
    assert equal(job.on_servers(), job.first)


def _unforeseen(weight: Any) -> Any:
    """An operator that writes, under a name that does not say so."""

    def detach(tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            tensor.mul_(2)

    return torch.overrides.handle_torch_function(detach, (weight,), weight)


def test_state_of_an_optimizer_is_read_and_changed(job: Job) -> None:
    assert not job.optimizer.state[job.weight]
    job.train(2)
    momentum = job.optimizer.state[job.weight]["momentum_buffer"]
    assert equal(momentum, torch.full((3, 4), -1.5))
    momentum.zero_()
    job.train()
    assert equal(job.optimizer.state[job.weight]["momentum_buffer"], torch.full((3, 4), -1.0))
    job.optimizer.state.clear()
    job.train()
    assert equal(job.optimizer.state[job.weight]["momentum_buffer"], torch.full((3, 4), -1.0))
    kept = job.optimizer.state[job.weight]["momentum_buffer"]
    job.train()
    kept.zero_()
    job.train()
    assert equal(kept, torch.full((3, 4), -1.0))
    array = kept.numpy()
    job.train()
    array[...] = 0  # nothing has brought what functions have made of it
    with pytest.raises(InvalidArgumentError, match=r"state of SGD was changed .* before functions ran"):
        job.train()
    assert equal(kept, torch.full((3, 4), -1.5))


def test_state_that_is_taken_is_an_ordinary_tensor_after_the_job(job: Job) -> None:
    job.train()
    kept = job.optimizer.state[job.weight]["momentum_buffer"]
    job.train()
    copied = copy.deepcopy(job.optimizer).state_dict()["state"][0]["momentum_buffer"]
    assert type(copied) is torch.Tensor
    assert equal(copied, torch.full((3, 4), -1.5))
    job.strategy.close()
    assert type(kept) is torch.Tensor
    assert equal(kept.mul_(2), torch.full((3, 4), -3.0))


def test_state_that_two_optimizers_were_given_is_each_ones_own(job: Job) -> None:
    with job.strategy.scope():
        second = torch.optim.SGD(job.model.parameters(), lr=1.0, momentum=0.5)
    job.train()
    with pytest.warns(UserWarning, match="SGD was given tensors that are in the state of another.*copy.deepcopy"):
        second.load_state_dict(job.optimizer.state_dict())
    second.state[job.weight]["momentum_buffer"].fill_(3.0)
    job.train()
    assert equal(job.optimizer.state[job.weight]["momentum_buffer"], torch.full((3, 4), -1.5))
    assert equal(second.state[job.weight]["momentum_buffer"], torch.full((3, 4), 3.0))


def test_state_of_an_optimizer_that_is_changed_as_a_group_comes(job: Job) -> None:
    with job.strategy.scope():
        later = nn.Linear(2, 1)
    job.train(2)
    job.optimizer.state[job.weight]["momentum_buffer"].zero_()
    job.optimizer.add_param_group({"params": later.parameters()})
    job.train()
    assert equal(job.optimizer.state[job.weight]["momentum_buffer"], torch.full((3, 4), -1.0))


def test_state_of_a_dropped_optimizer(job: Job) -> None:
    with job.strategy.scope():
        second = torch.optim.SGD(job.model.parameters(), lr=1.0, momentum=0.5)
    job.train()
    second.state = job.optimizer.state
    assert equal(second.state[job.weight]["momentum_buffer"], torch.full((3, 4), -1.0))
    with pytest.warns(UserWarning, match="SGD was given tensors that are in the state of another"):
        job.strategy.extended.pull()  # from now on it has its own
    assert equal(second.state[job.weight]["momentum_buffer"], torch.full((3, 4), -1.0))
    with job.strategy.scope():
        dropped = torch.optim.SGD(job.model.parameters(), lr=1.0)
    kept = dropped.state
    del dropped
    gc.collect()
    with pytest.raises(InvalidArgumentError, match=r"an optimizer that the program has dropped"):
        kept.refresh()


def test_state_of_an_optimizer_in_a_function_is_read_and_not_changed(job: Job) -> None:
    model, optimizer = job.model, job.optimizer

    def read() -> float:
        return float(optimizer.state[model[0].weight]["momentum_buffer"].sum())

    def change() -> None:
        optimizer.state[model[0].weight]["momentum_buffer"].zero_()

    def clear() -> None:
        optimizer.state.clear()

    job.train(2)
    assert job.coordinator.schedule(read).get() == pytest.approx(-18.0)
    for each in (change, clear):
        with pytest.raises(UnsupportedError, match=r"SGD\.state"):
            job.coordinator.schedule(each).get()
        with pytest.raises(UnsupportedError):
            job.coordinator.join()
    assert job.coordinator.schedule(read).get() == pytest.approx(-18.0)


# -- tables without values ---------------------------------------------------------------------------------------------

META_WRITES: dict[str, Callable[[nn.Embedding], object]] = {
    "nn.init": lambda table: nn.init.constant_(table.weight, 2.0),
    "a row": lambda table: _fill(table.weight, lambda weight: weight.__setitem__(0, 2.0)),
    "rows by ids": lambda table: _fill(
        table.weight, lambda weight: weight.__setitem__(torch.tensor([5, 0]), torch.full((2, 4), 2.0))
    ),
    "rows by two-dimensional ids": lambda table: _fill(
        table.weight, lambda weight: weight.__setitem__(torch.tensor([[5, 0], [1, 2]]), torch.full((1, 2, 2, 4), 2.0))
    ),
    "a slice": lambda table: _fill(table.weight, lambda weight: weight.__setitem__(slice(0, 6), torch.full((4,), 2.0))),
    "a mask": lambda table: _fill(table.weight, lambda weight: weight.__setitem__(torch.arange(50) < 6, 2.0)),
    "a view": lambda table: _fill(table.weight, lambda weight: weight[:6].copy_(torch.full((6, 4), 2.0))),
    "scaled": lambda table: (nn.init.ones_(table.weight), _fill(table.weight, lambda weight: weight.mul_(2))),
    "copy_": lambda table: _fill(table.weight, lambda weight: weight.copy_(torch.full((50, 4), 2.0))),
    "load_state_dict": lambda table: table.load_state_dict({"weight": torch.full((50, 4), 2.0)}),
}


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
@pytest.mark.parametrize("write", META_WRITES.values(), ids=META_WRITES)
def test_writes_to_a_table_on_meta_reach_the_servers(write: Callable[[nn.Embedding], object]) -> None:
    with on_servers(lambda: nn.Embedding(50, 4, device="meta"), 2) as program:
        table = program.made
        before = program.run(lambda: table(torch.tensor([0, 5, 30])).detach())
        write(table)
        after = program.run(lambda: table(torch.tensor([0, 5, 30])).detach())
        assert (after[0] == 2).all()
        is_whole = (after[2] != before[2]).any()
        assert (after[2] == (2 if is_whole else before[2])).all()
        for refused in (
            lambda weight: weight.__setitem__((0, 1), 2.0),
            lambda weight: weight.__setitem__(torch.ones(50, 4, dtype=torch.bool), 2.0),
            nn.init.orthogonal_,
            lambda weight: weight[:, 1].copy_(torch.ones(50)),
        ):
            with torch.no_grad(), pytest.raises(UnsupportedError, match=r"weight.* is on meta"):
                refused(table.weight)


# -- rows ----------------------------------------------------------------------------------------------------------


class Table(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(1_000, 4)
        nn.init.zeros_(self.weight)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)

    def step(self) -> None:
        self.optimizer.zero_grad()
        (-self(torch.arange(1_000)).sum()).backward()
        self.optimizer.step()


@pytest.fixture
def table() -> Iterator[Program]:
    with on_servers(Table, 2) as program:
        yield program


def _moved(program: Program, *methods: str) -> int:
    """How many numbers of tables the servers have answered with."""
    answers = (one for name in methods for one in program.cluster.network.record(name) if one.kind == "result")
    return sum(value.numel() for answer in answers for value in answer.value)


ROW_READS: dict[str, Callable[[nn.Embedding, list[int]], torch.Tensor]] = {
    "indexed": lambda table, ids: table.weight[torch.tensor(ids)],
    "a list": lambda table, ids: table.weight[ids],
    "looked up": lambda table, ids: table(torch.tensor(ids)),
    "in bags": lambda table, ids: F.embedding_bag(torch.tensor([ids]), table.weight, mode="sum").expand(3, 4) / 3,
}


@pytest.mark.parametrize("read", ROW_READS.values(), ids=ROW_READS)
def test_rows_of_a_table_come_alone(read: Callable[[nn.Embedding, list[int]], torch.Tensor], table: Program) -> None:
    module = table.made
    for steps in (1, 2):
        table.run(Table.step, module)
        found = read(module, [3, 999, 3])
        assert (found == steps).all()
        found.sum().backward()
        assert module.weight.grad[0].tolist() == [0.0] * 4
    assert _moved(table, "ps.read") == 0
    assert _moved(table, "ps.read_rows") < 1_000 * 4 * 2 + 100  # functions read them all
    assert float(module.weight.detach().sum()) == 2 * 4_000  # the others are not taken for current


IDS = torch.tensor([[0, 1], [2, 3]])
ROW_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "a mask of elements": lambda weight: weight.__setitem__(torch.arange(4_000).view(1_000, 4) % 3 == 0, 5.0),
    "two-dimensional ids": lambda weight: weight.__setitem__(IDS, torch.arange(16.0).view(2, 2, 4)),
    "a value that broadcasts": lambda weight: weight.__setitem__(IDS, torch.arange(8.0).view(2, 1, 4)),
    "a value with one dimension more": lambda weight: weight.__setitem__(IDS[0], torch.arange(8.0).view(1, 2, 4)),
    "all, by None": lambda weight: weight.__setitem__(None, torch.arange(4_000.0).view(1, 1_000, 4)),
}


@pytest.mark.parametrize("write", ROW_WRITES.values(), ids=ROW_WRITES)
def test_whatever_an_index_means_to_pytorch_it_means_on_servers(
    write: Callable[[torch.Tensor], object], table: Program
) -> None:
    module = table.made
    table.run(Table.step, module)
    plain = torch.ones(1_000, 4)
    write(plain)
    with torch.no_grad():
        write(module.weight)
        table.run(lambda: None)
        assert torch.equal(module.weight[IDS], plain[IDS])
        assert torch.equal(table.run(lambda: module(torch.arange(1_000)).detach()), plain)


def test_rows_whose_assignment_pytorch_refuses_stay_on_servers_too(table: Program) -> None:
    module = table.made
    for steps in (1, 2):
        table.run(Table.step, module)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            module.weight[torch.tensor([3])] = torch.full((1, 4), 9.0)
        assert table.run(lambda: module(torch.tensor([3])).detach()).tolist() == [[steps] * 4]
    assert module.weight.detach().unique().tolist() == [2]


def test_rows_that_are_written_go_alone_and_wait_for_nobody(table: Program) -> None:
    module, coordinator = table.made, table.coordinator
    gate = close_gate("rows")
    coordinator.schedule(Table.step, args=(module,))
    coordinator.schedule(pass_gate, args=("rows",))
    await_arrivals("rows", 1)
    with torch.no_grad():
        module.weight[torch.tensor([5, 7])] = torch.full((2, 4), 70.0)
        module.weight[9] = module.weight[torch.tensor([5])][0] * 2
    assert module.weight[[5, 7, 9]].tolist() == [[70.0] * 4, [70.0] * 4, [140.0] * 4]
    gate.set()
    coordinator.schedule(Table.step, args=(module,))
    coordinator.join()
    assert _moved(table, "ps.read") == 0
    found = module.weight.detach().clone()
    assert found[[5, 7, 9]].tolist() == [[71.0] * 4, [71.0] * 4, [141.0] * 4]
    assert found[0].tolist() == [2.0] * 4


# -- the end -----------------------------------------------------------------------------------------------------------


def test_after_close_they_are_ordinary_tensors(job: Job) -> None:
    job.train()
    job.strategy.close()
    assert type(job.weight) is nn.Parameter
    assert type(job.model[1].running_mean) is torch.Tensor
    assert type(job.optimizer.state).__name__ == "defaultdict"
    assert equal(job.weight, job.trained())


def test_switched_off_they_are_ordinary_tensors_as_old_as_the_last_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHSTRAT_COORDINATOR_CACHE", "off")
    with FakeCluster(workers=1, ps=2) as cluster:
        job = Job(cluster)
        job.train()
        assert type(job.weight) is nn.Parameter
        assert equal(job.weight, job.first)
        job.strategy.extended.pull()
        assert equal(job.weight, job.trained())
        _fill(job.weight, lambda weight: weight.mul_(2))
        assert equal(job.on_servers(), 2 * job.trained())
        _fill(job.weight, lambda weight: weight.add_(1))
        job.train()
        _fill(job.weight, lambda weight: weight.mul_(2))
        assert equal(job.on_servers(), 2 * (2 * job.trained() + 1)), "as it is: what was trained since is undone"
        job.strategy.close()

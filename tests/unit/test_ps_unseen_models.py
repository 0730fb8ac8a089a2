"""Models that a function is not seen to reach: their variables are brought by whoever uses them, and what is done with
them is done to those on the servers."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.parameter_servers import on_servers, states_are_close

WIDTH = 4


class InAList(nn.Module):
    """Keeps its layers in a plain list, each with its optimizer, as a forward-forward network does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[Any] = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)]
        self.layers = [layer.double() for layer in layers]
        for layer in self.layers:
            layer.optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def train(self, mode: bool = True) -> InAList:
        for layer in self.layers:
            layer.train(mode)
        return self

    def states(self) -> dict[str, torch.Tensor]:
        return {f"{n} {key}": value for n, one in enumerate(self.layers) for key, value in one.state_dict().items()}


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def train_on(model: InAList, number: int) -> torch.Tensor:
    loss = model(batch(number))
    for layer in model.layers:
        layer.optimizer.zero_grad()
    loss.backward()
    for layer in model.layers:
        layer.optimizer.step()
    return loss.detach()


def train_twice(model: InAList, number: int) -> torch.Tensor:
    return torch.stack([train_on(model, number), train_on(model, number + 10)])


def evaluate(model: InAList, number: int) -> torch.Tensor:
    with torch.no_grad():
        return model.train(False)(batch(number))


def evaluate_in_a_thread(model: InAList, number: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(evaluate(model, number)))
    thread.start()
    thread.join()
    return found[0]


def step_with_given_gradients(model: InAList, number: int) -> torch.Tensor:
    """Without having used a parameter; and then once more, from the new values."""
    layer = model.layers[0]
    for _ in range(2):
        layer.weight.grad, layer.bias.grad = torch.full_like(layer.weight, 0.1), batch(number)[0]
        layer.optimizer.step()
    return layer.weight.detach().clone()


def write(model: InAList, number: int) -> torch.Tensor:
    with torch.no_grad():
        model.layers[2].weight.mul_(0.5)
        model.layers[0].bias.data.add_(1.0)
    model.layers[1].running_mean = batch(number)[0]  # without having used the one that was there
    model.layers[1].num_batches_tracked += 7
    return model.layers[0].bias.detach().clone()


def compiled(model: InAList, number: int) -> torch.Tensor:
    return torch.compile(model, backend="eager")(batch(number)).detach()


LIST_PROGRAMS = {
    "evaluated": [evaluate] * 2,
    "trained": [train_on] * 3,
    "trained twice in each function": [train_twice] * 2,
    "in turn": [train_on, evaluate_in_a_thread, train_on, evaluate, train_on],
    "gradients by hand": [step_with_given_gradients, train_on, step_with_given_gradients, evaluate],
    "written": [write, train_on, write, evaluate],
    "compiled": [compiled, train_on, compiled, compiled],
}


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", LIST_PROGRAMS)
def test_a_model_in_a_list_has_the_numbers_of_one_device(name: str) -> None:
    plain = InAList()
    with on_servers(InAList) as program:
        for number, function in enumerate(LIST_PROGRAMS[name]):
            wanted = function(plain, number)
            torch.testing.assert_close(program.run(function, program.made, number), wanted, rtol=1e-12, atol=1e-12)
            plain.train()
            program.made.train()
        states_are_close(program.made.states(), plain.states(), 1e-12)


def test_what_was_not_brought_before_a_function_is_the_next_time() -> None:
    with on_servers(InAList) as program:
        messages = program.cluster.network.record("ps.read")
        counts = []
        for _ in range(3):
            before = len(messages)
            program.run(evaluate, program.made, 0)
            counts.append(len(messages) - before)
    assert counts[0] > counts[1] == counts[2]


def test_two_models_in_turn_each_with_the_values_of_its_last_step() -> None:
    """The one that a function does not reach is not current there, whoever used it before."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = [InAList(), InAList()]

    def step(two: Two, which: int, number: int) -> torch.Tensor:
        loss = train_on(two.models[which].train(), number)
        return torch.stack([loss, evaluate(two.models[1 - which], number)])

    plain = Two()
    with on_servers(Two) as program:
        for number in range(4):
            wanted = step(plain, number % 2, number)
            torch.testing.assert_close(program.run(step, program.made, number % 2, number), wanted)


def test_a_process_that_a_function_forks_is_told() -> None:
    def fork(model: InAList) -> str:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                model.layers[0].weight.sum()
            except BaseException as error:
                os.write(writing, str(error).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            return pipe.read()

    with on_servers(InAList) as program:
        assert "in a process that a scheduled function" in program.run(fork, program.made)

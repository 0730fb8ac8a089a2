"""Programs that do with the parameters themselves what users do, in steps: over two logical devices as on one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.dtensor.programs import Program, program


@program()
def tables_by_parameters(one: Program) -> None:
    """Made outside of runs, and looked up in steps: by the object, and by its number."""
    rates = {id(each): 0.5 + place for place, each in enumerate(one.model.parameters())}
    places = {each: place for place, each in enumerate(one.model.parameters())}

    def scale() -> None:
        for each in one.model.parameters():
            assert each.grad is not None
            each.grad.mul_(rates.get(id(each), 1.0))
            one.seen.append([places.get(each), isinstance(each, nn.Parameter)])
            one.seen.append([any(each is other for other in one.optimizer.param_groups[0]["params"])])

    one.train(before_step=scale)


@program()
def parameters_that_functions_return(one: Program) -> None:
    """Who changes a parameter in place, or changes nothing of it, has that parameter behind it."""

    def change() -> None:
        for each in one.model.parameters():
            changed = each
            changed *= 0.9
            found = [changed, each.lerp_(each, 0.5), *(torch._foreach_mul_([each], 2.0) or [])]
            found += [each.to("cpu"), each.double(), each.contiguous(), each.type_as(each)]
            found += [functional.dropout(each, training=False), one.cut(each, 0) if each is one.first else each]
            one.seen.append([other is each for other in found])
        one.model[0].weight += torch.ones_like(one.first)

    def step() -> None:
        one.loss(0).backward()
        with torch.no_grad():
            change()

    one.run(step)


@program()
def a_model_that_is_moved_to_where_it_is(one: Program) -> None:
    """Between runs, in a step, and between a forward pass and its gradients; with gradients and without."""
    moves: list[Callable[[], Any]] = [lambda: one.model.to("cpu"), one.model.cpu, one.model.double]

    def move() -> None:
        for change in moves:
            change()

    move()
    one.train(lambda number: (one.loss(number), move())[0], move)
    move()
    one.train()


def _frozen(set_to: Callable[[torch.Tensor, bool], Any], one: Program) -> None:
    """As networks that train each other freeze one: within a step, over steps and between them. What is frozen is
    looked at, edited, and has gradients for what is before it."""
    head = one.model[2]

    def say(parameters: Any, wants: bool) -> None:
        for each in parameters:
            set_to(each, wants)
        one.seen.append([(each.requires_grad, each.is_leaf, each.grad_fn) for each in one.model.parameters()])

    def loss(number: int) -> torch.Tensor:
        say([one.model[0].weight, one.model[0].bias], number != 1)
        before = one.loss(number)
        say(head.parameters(), False)
        before.backward()
        one.seen.append([each.grad is None for each in one.model.parameters()])
        head.weight.mul_(0.5)
        frozen = one.loss(number)
        say(head.parameters(), True)
        return frozen + one.loss(number)

    for _ in range(2):
        one.train(loss)
        say([one.first], False)
        one.train()
        say([one.first], True)


program("parameters_that_are_frozen")(partial(_frozen, lambda each, wants: each.requires_grad_(wants)))
program("parameters_that_are_frozen_by_attribute")(
    partial(_frozen, lambda each, wants: setattr(each, "requires_grad", wants))
)


@program()
def gradients_that_are_looked_at(one: Program) -> None:
    """Kept of an activation, over two passes; seen by hooks of modules; looked through for NaN; of a part."""
    middle = one.model[1]
    found: list[Any] = []

    def loss(number: int) -> torch.Tensor:
        hidden = one.model[0](one.inputs[number])
        hidden.retain_grad()
        one.first.retain_grad()
        found.append(hidden)
        return functional.cross_entropy(one.model[2](middle(hidden)), one.targets[number])

    def look() -> None:
        one.seen.extend(each.grad.sum() for each in found)
        found.clear()

    def of_a_part() -> None:
        one.optimizer.zero_grad()
        loss(0).backward(inputs=[one.first, one.model[2].bias])
        torch.autograd.backward(loss(0), inputs=one.first)
        one.seen.append([each.grad is None for each in one.model.parameters()])
        one.seen.append(one.first.grad.sum())

    def twice(number: int) -> torch.Tensor:
        loss(number).backward()
        value = loss(number)
        value.backward(retain_graph=True)
        return value

    with middle.register_full_backward_hook(lambda _, of_input, of_output: one.seen.append((of_input[0] * 2).sum())):
        one.train(twice, look)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly():
            one.train(loss, look)
    one.run(of_a_part)

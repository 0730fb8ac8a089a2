"""Mistakes that a type checker finds before anything runs: one in every line that ends with the name of its error."""

import torch

import torchstrat as ts

strategy = ts.MirroredStrategy()


def step() -> torch.Tensor:
    return torch.zeros(())


losses = strategy.run(step)
float(losses)  # arg-type
losses.backward()  # attr-defined
losses + 1  # operator
strategy.run(step())  # call-overload
strategy.reduce("mean", losses).no_such_method()  # attr-defined
count: int = strategy.local_results(losses)  # assignment

"""FTRL-Proximal, the optimizer of large sparse linear models, which torch.optim does not have.

Source: H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, Algorithm 1, with the
generalisations that TensorFlow's ``Ftrl`` made customary: another exponent than ½ for the learning rate, a starting
value for the accumulator, and a shrinkage that acts through the gradient.

Per element, with gradient ``g``, weight ``w``, exponent ``q = -lr_power`` (½ in the paper)::

    g'     = g + 2 · l2_shrinkage · w
    n'     = n + g²
    z'     = z + g' - (n'^q - n^q) / lr · w
    w'     = 0                                                  where |z'| ≤ l1
             (sign(z') · l1 - z') / ((beta + n'^q) / lr + 2 · l2)     elsewhere

The paper's λ₁ is ``l1``, its λ₂ is ``2 · l2``, its learning rate's two numbers are ``lr`` and ``beta``. The weight is a
function of ``z`` and ``n`` alone: an element without any gradient yet becomes 0 at a step of the dense rule. Rows of an
embedding table that no step touches stay as they are where gradients are sparse, or on parameter servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrat.core.errors import InvalidArgumentError, WrongTypeError


class Ftrl(Optimizer):
    """Follow the (proximally) regularised leader, with L1 regularisation that makes weights exactly zero.

    ``params``: parameters or groups, as for every optimizer; gradients may be dense or sparse (rows). ``lr``: > 0.
    ``lr_power``: ≤ 0; 0 keeps the learning rate constant. ``initial_accumulator_value``: ≥ 0, where the sum of squared
    gradients starts. ``l1``, ``l2``, ``l2_shrinkage``, ``beta``: ≥ 0. ``maximize``: ascend.

    State: ``accumulator`` (n) and ``linear`` (z), of the parameter's shape. Raises `InvalidArgumentError` for values
    outside these ranges.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
        beta: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        numbers = {"lr": lr, "lr_power": lr_power, "l1": l1, "l2": l2, "l2_shrinkage": l2_shrinkage, "beta": beta}
        for name, value in {**numbers, "initial_accumulator_value": initial_accumulator_value}.items():
            if not hasattr(value, "__float__"):
                raise WrongTypeError(f"Ftrl({name}=…) must be a number; got {type(value).__name__} {value!r:.80}.")
        if not float(lr) > 0:
            raise InvalidArgumentError(f"lr={lr} must be greater than 0: Ftrl divides by it.")
        if lr_power > 0:
            raise InvalidArgumentError(f"lr_power={lr_power} must be 0 or less; -0.5 is the usual one.")
        at_least_zero = {
            "initial_accumulator_value": initial_accumulator_value,
            "l1": l1,
            "l2": l2,
            "l2_shrinkage": l2_shrinkage,
            "beta": beta,
        }
        for name, value in at_least_zero.items():
            if not value >= 0:
                raise InvalidArgumentError(f"{name}={value} must be 0 or more.")
        defaults = {"lr": lr, "lr_power": lr_power, **at_least_zero, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient. ``closure``, if given, evaluates the model first; its value
        is returned. Raises `InvalidArgumentError`, before anything changes, where a group's ``lr`` is not above 0."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not float(group["lr"]) > 0:
                raise InvalidArgumentError(
                    f"lr={float(group['lr'])} at this step, set since Ftrl was made (by a scheduler?), must be greater "
                    "than 0: Ftrl divides by it. Let the schedule begin and end above 0."
                )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            start = group["initial_accumulator_value"]
            state["accumulator"] = torch.full_like(parameter, start, memory_format=torch.preserve_format)
            state["linear"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient = parameter.grad
        assert gradient is not None
        if not gradient.is_sparse:
            _ftrl(parameter, gradient, state["accumulator"], state["linear"], group)
            return
        if gradient.sparse_dim() != 1:
            raise InvalidArgumentError(
                f"a sparse gradient of {gradient.sparse_dim()} sparse dimensions; Ftrl steps whole rows, as "
                "nn.Embedding makes them (one sparse dimension). Use gradient.to_dense()."
            )
        gradient = gradient.coalesce()
        rows = gradient.indices()[0]
        whole = (parameter, state["accumulator"], state["linear"])
        weight, accumulator, linear = (tensor.index_select(0, rows) for tensor in whole)
        _ftrl(weight, gradient.values(), accumulator, linear, group)
        for tensor, stepped in zip(whole, (weight, accumulator, linear), strict=True):
            tensor.index_copy_(0, rows, stepped)


def _ftrl(weight: Tensor, gradient: Tensor, accumulator: Tensor, linear: Tensor, group: dict[str, Any]) -> None:
    """All of one shape; everything but ``gradient`` is changed in place."""
    exponent = -group["lr_power"]
    lr, l1 = group["lr"], group["l1"]
    if group["maximize"]:
        gradient = -gradient
    old = accumulator.pow(exponent)
    accumulator.addcmul_(gradient, gradient)
    new = accumulator.pow(exponent)
    if group["l2_shrinkage"]:
        gradient = gradient.add(weight, alpha=2 * group["l2_shrinkage"])
    linear.add_(gradient).sub_((new - old).div_(lr).mul_(weight))
    curvature = new.add_(group["beta"]).div_(lr).add_(2 * group["l2"])
    # z beyond ±l1, with the opposite sign; 0 within. A curvature of 0 comes with z = 0: no gradient yet, from n = 0.
    stepped = linear.clamp(-l1, l1).sub_(linear)
    weight.copy_(torch.where(stepped == 0, torch.zeros_like(stepped), stepped.div_(curvature)))

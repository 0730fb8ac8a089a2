"""The replacements of PyTorch functions on torch_xla: values, and that the compiler cuts them over logical devices.

Four replicas of two logical devices, hidden behind ``vmap`` as the replicas of a step are when it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import torchstrat as ts
from tests.tpu.hlo import Collective, DumpFolder, Module
from torchstrat.sharding.tpu import _functorch_private as functorch
from torchstrat.sharding.tpu.rewrites import Rewrites

# The originals that the controls run warn that they run replica by replica, or that torch_xla lacks their gradients.
pytestmark = [pytest.mark.tpu, pytest.mark.filterwarnings("default")]

DUMP_HLO = True

REPLICAS, LOGICAL_DEVICES = 4, 2


class Xla:
    """Eight virtual devices, and the programs compiled for them."""

    def __init__(self, dumps: DumpFolder) -> None:
        import numpy as np
        import torch_xla
        import torch_xla.runtime
        from torch_xla.distributed import spmd

        assert torch_xla.runtime.global_runtime_device_count() == REPLICAS * LOGICAL_DEVICES
        self._spmd, self.device, self._sync, self._dumps = spmd, torch_xla.device(), torch_xla.sync, dumps
        self._mesh = spmd.Mesh(np.arange(8), (REPLICAS, LOGICAL_DEVICES), ("replica", "d0"))

    def place(self, tensor: torch.Tensor, split: int | None) -> torch.Tensor:
        """``tensor``: ``(replicas, …)``; ``split``: a dimension of one replica's part to be cut in two."""
        placed = tensor.to(self.device)
        axes: list[str | None] = ["replica", *[None] * (tensor.dim() - 1)]
        if split is not None:
            axes[split + 1] = "d0"
        self._spmd.mark_sharding(placed, self._mesh, tuple(axes))
        return placed

    def executed(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Module]:
        """The values, and the program that was compiled for them."""
        before = self._dumps.compiled
        self._sync()
        return [one.cpu() for one in tensors], self._dumps.training_step(after=before)


@pytest.fixture(scope="module", autouse=True)
def _spmd() -> None:
    """For the whole process, and in its environment: before anything looks whether a test changes that, and before the
    plain backward passes of this file."""
    ts.tpu.initialize_tpu_system(virtual_devices=8)


@pytest.fixture
def xla(hlo_dumps: DumpFolder) -> Xla:
    return Xla(hlo_dumps)


class Rewritten(TorchFunctionMode):
    def __init__(self, rewrites: Rewrites) -> None:
        super().__init__()
        self._rewrites = rewrites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._rewrites.find(func) or func)(*args, **(kwargs or {}))


def first_replica(tensor: torch.Tensor) -> torch.Tensor:
    if not functorch.is_batched(tensor):
        return tensor
    return functorch.unwrapped(tensor).select(functorch.batch_dim_of(tensor), 0)


def recorded(
    xla: Xla, module: nn.Module, x: torch.Tensor, others: tuple[torch.Tensor, ...], split: int | None, rewrite: bool
) -> tuple[list[torch.Tensor], Module]:
    """One forward and backward pass; output, gradients of ``x`` and parameters, buffers."""
    state = {name: one.detach().to(xla.device) for name, one in module.state_dict().items()}
    leaves = {name: state[name].requires_grad_() for name, _ in module.named_parameters()}
    placed = xla.place(x, split).requires_grad_()
    rest = [xla.place(one, None) for one in others]
    level = functorch.push_level(REPLICAS, "different")
    try:
        inputs = [functorch.add_batch_dim(one, 0, level) for one in (placed, *rest)]
        mode = Rewritten(Rewrites(first_replica, logical_devices=LOGICAL_DEVICES))
        if rewrite:
            with mode:
                y = torch.func.functional_call(module, state, tuple(inputs))
        else:
            y = torch.func.functional_call(module, state, tuple(inputs))
        y = functorch.unwrapped(y)
    finally:
        functorch.pop_level()
    gradients = torch.autograd.grad(y.square().sum(), [placed, *leaves.values()])
    buffers = [state[name] for name, one in module.named_buffers() if one.is_floating_point()]
    return xla.executed([y.detach(), *gradients, *buffers])


def plain(module: nn.Module, x: torch.Tensor, others: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The same by PyTorch, one replica after the other; buffers are those of the first."""
    leaf, outputs, buffers = x.clone().requires_grad_(), [], []
    given = {name: one.clone() for name, one in module.named_buffers()}
    for replica in range(REPLICAS):
        state = {name: one.clone() for name, one in given.items()}
        inputs = (leaf[replica], *(one[replica] for one in others))
        outputs.append(torch.func.functional_call(module, state, inputs))
        buffers.append([one for one in state.values() if one.is_floating_point()])
    y = torch.stack(outputs)
    gradients = torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()])
    return [y.detach(), *gradients, *buffers[0]]


class LossOverClasses(nn.Module):
    """Scores whose classes may be cut: the output of a tensor-parallel layer."""

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores, target, label_smoothing=0.1)


def images(channels: int = 4) -> torch.Tensor:
    return torch.randn(REPLICAS, 2, channels, 8, 8, generator=torch.Generator().manual_seed(0)) + 1


def rows(features: int = 16) -> torch.Tensor:
    return torch.randn(REPLICAS, 3, features, generator=torch.Generator().manual_seed(1)) + 1


def with_parameters(module: nn.Module) -> nn.Module:
    """Not the ones and zeros that parameters of normalisations start with."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.5)
    return module


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], tuple[torch.Tensor, ...], int | None]] = {
    "layer_norm_hidden": (lambda: nn.LayerNorm(16), rows, (), 1),
    "layer_norm_image": (lambda: nn.LayerNorm((4, 8, 8)), images, (), 2),
    "rms_norm_hidden": (lambda: nn.RMSNorm(16), rows, (), 1),
    "group_norm_spatial": (lambda: nn.GroupNorm(2, 4), images, (), 2),
    "group_norm_channels": (lambda: nn.GroupNorm(2, 4), images, (), 1),
    "batch_norm_spatial": (lambda: nn.BatchNorm2d(4), images, (), 2),
    "batch_norm_channels": (lambda: nn.BatchNorm2d(4), images, (), 1),
    "batch_norm_eval": (lambda: nn.BatchNorm2d(4).eval(), images, (), 2),
    "instance_norm_spatial": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        images,
        (),
        2,
    ),
    "cross_entropy_classes": (
        LossOverClasses,
        rows,
        (torch.randint(0, 16, (REPLICAS, 3), generator=torch.Generator().manual_seed(3)),),
        1,
    ),
    "elu": (nn.ELU, rows, (), 1),
    "celu": (lambda: nn.CELU(0.5), rows, (), None),
    "selu": (nn.SELU, rows, (), None),
    "prelu": (lambda: nn.PReLU(4), images, (), 2),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), images, (), None),
    "depthwise_spatial": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), images, (), 2),
    "groups": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), images, (), None),
    "transposed_groups": (lambda: nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2), images, (), None),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_no_gathered_activation(xla: Xla, case: str) -> None:
    build, make_input, others, split = CASES[case]
    module, x = with_parameters(build()), make_input()
    found, program = recorded(xla, module, x, others, split, rewrite=True)
    for own, wanted in zip(found, plain(module, x, others), strict=True):
        torch.testing.assert_close(own, wanted, rtol=2e-5, atol=2e-5 * max(1.0, wanted.abs().max().item()))
    assert program.num_partitions == REPLICAS * LOGICAL_DEVICES
    assert gathered(program) == ()


@pytest.mark.parametrize("case", ["layer_norm_hidden", "group_norm_spatial"])
def test_the_originals_gather_the_activation(xla: Xla, case: str) -> None:
    """The control: what the test above looks for is there without the replacement."""
    build, make_input, others, split = CASES[case]
    _, program = recorded(xla, with_parameters(build()), make_input(), others, split, rewrite=False)
    assert gathered(program)


@pytest.mark.parametrize("case", ["elu", "depthwise"])
def test_the_originals_have_wrong_gradients(xla: Xla, case: str) -> None:
    """Fails once torch_xla has been mended: then the replacement can go."""
    build, make_input, others, split = CASES[case]
    module, x = with_parameters(build()), make_input()
    found, _ = recorded(xla, module, x, others, split, rewrite=False)
    expected = plain(module, x, others)
    gradient = 1 if case == "elu" else 2  # of the input, of the weight
    assert (found[gradient] - expected[gradient]).abs().max() > 0.1 * expected[gradient].abs().max()


def gathered(program: Module) -> tuple[Collective, ...]:
    """What puts the pieces of a tensor together."""
    return program.collectives("all-gather", "all-to-all")

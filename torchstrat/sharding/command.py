"""The command ``torchstrat explain``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchstrat.core.commands import named_object, parser_with_examples
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.sharding.explain import Explanation, explain_tensors
from torchstrat.sharding.grid import DeviceGrid
from torchstrat.sharding.layout import ShardedEntry
from torchstrat.sharding.rules import ShardingRules


def main(words: Sequence[str]) -> int:
    """Print where the pieces of the parameters are that ``words`` name."""
    parser = parser_with_examples(
        "torchstrat explain",
        "Print which device holds which piece of which parameter, for sharding rules that no job has been started "
        "with yet. The model is made without values. Within a job: torchstrat.explain_sharding.",
        (
            "torchstrat explain train:build_model --rules train:RULES --logical-devices 2",
            "torchstrat explain train:build_model --rules train:RULES --logical-devices 2 4 --replicas 2 --png it.png",
        ),
    )
    parser.add_argument("build", metavar="MODULE:BUILD", help="makes the model and returns it")
    parser.add_argument(
        "--rules", required=True, metavar="MODULE:RULES", help="sharding_rules, as a strategy takes them"
    )
    parser.add_argument(
        "--logical-devices",
        type=int,
        nargs="+",
        required=True,
        metavar="N",
        help="of a replica; several numbers are the sizes of d0, d1, …: logical_mesh_shape",
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="how many there are (1)")
    parser.add_argument("--png", metavar="FILE", help="draw it, too; needs matplotlib")
    options = parser.parse_args(words)
    try:
        build, rules = named_object(options.build), named_object(options.rules)
        explanation = explain_rules(build, rules, options.logical_devices, options.replicas)
    except (InvalidArgumentError, WrongTypeError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{explanation}\n")
    if options.png is not None:
        explanation.save_png(options.png)
    return 0


def explain_rules(
    build: Callable[[], nn.Module], rules: Mapping[str, Any], mesh_shape: Sequence[int], replicas: int
) -> Explanation:
    """Where the pieces of a model's parameters will be under ``rules``.

    Raises `InvalidArgumentError` for rules that do not fit the model, `WrongTypeError` for what is no rule or no model.
    """
    if replicas < 1:
        raise InvalidArgumentError(f"there are {replicas} replicas; the least is 1.")
    checked = ShardingRules(rules, mesh_shape)
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise WrongTypeError(f"the model's builder returned {type(model).__name__} {model!r:.60}, which is no module.")
    entries = {
        name: ShardedEntry(tuple(tensor.shape), checked.sharding_for(name, tuple(tensor.shape)), tensor.dtype)
        for name, tensor in model.named_parameters()
    }
    checked.require_all_used()
    each = math.prod(mesh_shape)
    grid = DeviceGrid(tuple(tuple(range(first, first + each)) for first in range(0, replicas * each, each)))
    return explain_tensors(entries, grid, [f"device {number}" for number in range(replicas * each)])

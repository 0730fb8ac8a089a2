"""The command ``torchstrat estimate``."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Sequence
from typing import Any

from torchstrat.core.commands import named_object, parser_with_examples
from torchstrat.core.errors import InvalidArgumentError, WrongTypeError
from torchstrat.parameter_server.partitioners import MinSizePartitioner
from torchstrat.strategies.estimates.estimate import DEVICES, estimate, optimizer_named


def main(words: Sequence[str]) -> int:
    """Print the table for the program that ``words`` name."""
    parser = parser_with_examples(
        "torchstrat estimate",
        "Print how many bytes each device or process holds and sends under each strategy, before anything is "
        "allocated. The model is made without values. See torchstrat.estimate.",
        (
            "torchstrat estimate train:build_model --optimizer adam --replicas 4",
            "torchstrat estimate train:build_model --optimizer sgd momentum=0.9 --device cuda --batch train:batch",
            "torchstrat estimate train:build_model --optimizer adagrad --ps 2 --workers 4 --max-shards 2",
        ),
    )
    parser.add_argument("build", metavar="MODULE:BUILD", help="makes the model, or models and optimizers")
    parser.add_argument(
        "--optimizer",
        nargs="+",
        metavar=("NAME", "ARGUMENT=VALUE"),
        help="one of torch's optimizers, and what it is made with; where BUILD makes none",
    )
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="of the synchronous strategies (2)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what their replicas compute on (cpu)")
    parser.add_argument("--ps", type=int, metavar="N", help="parameter servers; without them these are left out")
    parser.add_argument("--workers", type=int, metavar="N", help="workers of the parameter servers")
    parser.add_argument(
        "--max-shards",
        type=int,
        metavar="N",
        help="cut large variables over so many parameter servers (MinSizePartitioner)",
    )
    parser.add_argument(
        "--batch",
        metavar="MODULE:BATCH",
        help="a global batch as the model takes it, or a function that makes one; activations are then counted",
    )
    options = parser.parse_args(words)
    try:
        found = estimate(
            named_object(options.build),
            None if options.optimizer is None else _optimizer(*options.optimizer),
            replicas=options.replicas,
            device=options.device,
            ps=options.ps,
            workers=options.workers,
            partitioner=None if options.max_shards is None else MinSizePartitioner(max_shards=options.max_shards),
            batch=None if options.batch is None else _batch(options.batch),
        )
    except (InvalidArgumentError, WrongTypeError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{found}\n")
    return 0


def _optimizer(name: str, *arguments: str) -> Any:
    chosen: dict[str, Any] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        try:
            chosen[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise InvalidArgumentError(f"{argument!r} must be ARGUMENT=VALUE, such as momentum=0.9.") from error
    return functools.partial(optimizer_named(name), **chosen)


def _batch(name: str) -> object:
    found = named_object(name)
    return found() if callable(found) else found

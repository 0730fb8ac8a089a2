"""Random programs: small modules, optimizers and step bodies from the rows of the tables, as text that runs alone."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tests.matrix import generator_pieces as pieces
from tests.matrix.generator_pieces import Piece, fits

__all__ = ["Program", "drawn", "programs"]

_TABLES: Mapping[str, Mapping[str, Piece]] = {
    "stem": pieces.STEMS,
    "loss": pieces.LOSSES,
    "backward": pieces.BACKWARDS,
    "update": pieces.UPDATES,
    "hook": pieces.HOOKS,
    "edit": pieces.EDITS,
    "optimizer": pieces.OPTIMIZERS,
    "groups": pieces.GROUPS,
    "zero": pieces.ZEROS,
    "schedule": pieces.SCHEDULES,
    "after": pieces.AFTER,
    "between": pieces.BETWEEN,
}
"""What a program has one of, in the order in which it is drawn."""

_OVER: Mapping[str, Piece] = {
    "": Piece(),
    "accumulated": Piece(traits=frozenset({"over"})),
    "no_sync": Piece(traits=frozenset({"over", "quiet"})),
    "no_sync nested": Piece(traits=frozenset({"over", "quiet"})),
}
"""How two runs make one update, if they do."""

_ROWS = (
    *((8, 8), (6, 9, 7), (8, 5, 7, 3), (4, 2, 3), (9, 1, 7), (1, 8, 2), (3, 3), (7, 4, 9, 8), (2, 1, 5, 6), (5, 8)),
    *((8, 1, 8, 1), (1, 1), (9, 5, 1, 2, 8), (8, 9, 6, 8)),
)
_TWO_FOR_EACH = ((8, 8), (6, 9, 12), (8, 6, 6, 9), (12, 8), (9, 8, 6))
"""Rows of each global batch. In the second, each of up to three replicas has two or more."""


@dataclass(frozen=True)
class Program:
    """What was drawn: names of pieces."""

    of: Mapping[str, str]
    blocks: tuple[str, ...] = ()
    over: str = ""
    rows: tuple[int, ...] = (8, 8)
    traits: frozenset[str] = field(default_factory=frozenset)

    @property
    def source(self) -> str:
        """Its text: ``train(strategy=None)`` and what that needs."""
        return _source(self)

    def __repr__(self) -> str:
        """What was drawn, short: the text is in the failure."""
        drawn = {**self.of, "blocks": self.blocks, "over": self.over, "rows": self.rows}
        return f"<{', '.join(f'{name}: {what}' for name, what in drawn.items() if what not in _PLAIN)}>"


_PLAIN = ("none", "nothing", "one", "", (), "step", "mean", "linear", "after")
"""Of what is not worth a word."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs that plain PyTorch runs; what it refuses is not drawn."""
    traits: set[str] = set()

    def choose(table: Mapping[str, Piece]) -> str:
        name = draw(st.sampled_from([name for name, piece in table.items() if fits(piece, traits)]))
        traits.update(table[name].traits)
        for one, other, both in pieces.TOGETHER:
            if traits >= {one, other}:
                traits.add(both)
        return name

    of = {"stem": choose(pieces.STEMS)}
    blocks = tuple(choose(pieces.BLOCKS) for _ in range(draw(st.integers(0, 3))))
    for slot, table in _TABLES.items():
        if slot not in of:
            of[slot] = choose(table)
    over = choose(_OVER)
    rows = draw(st.sampled_from(_TWO_FOR_EACH if traits & {"two rows", "parts of a batch"} else _ROWS))
    return Program(of, blocks, over, rows + rows[-1:] * (len(rows) % 2 if over else 0), frozenset(traits))


def drawn(blocks: tuple[str, ...] = ("linear",), over: str = "", rows: tuple[int, ...] = (8, 8), **of: str) -> Program:
    """The program of these pieces, as if it had been drawn; the first of its table where none is named."""
    chosen = {slot: next(iter(table)) for slot, table in _TABLES.items()} | of
    found = [_TABLES[slot][name] for slot, name in chosen.items()]
    found += [pieces.BLOCKS[name] for name in blocks] + [_OVER[over]]
    return Program(chosen, blocks, over, rows, frozenset(trait for piece in found for trait in piece.traits))


# -- text --------------------------------------------------------------------------------------------------------------

_QUIET = {"no_sync": 1, "no_sync nested": 2}

_OWN_HEAD = "import collections\nfrom typing import Any\n\nfrom torch.optim import SGD, Optimizer\n\n"
_HEAD = """\
import copy
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchstrat as ts
"""

_LOOP = '''\
def batches():
    draw = torch.Generator().manual_seed(1)
    made = [(torch.randn(n, 6, generator=draw), torch.randn(n, 4, generator=draw)) for n in ROWS]
    for _, y in made:
        y[0, 1] = 5.0  # a label that counts
    return made


def train(strategy=None):
    """What is left of the program's numbers: plainly, or under a strategy."""
    on_servers = isinstance(strategy, ts.ParameterServerStrategy)
    with strategy.scope() if strategy else nullcontext():
        program = build()
        turn = ts.Variable(torch.tensor(0), name="turn") if on_servers else None
    coordinator = ts.ClusterCoordinator(strategy) if on_servers else None
    spread = strategy and not on_servers
    for index, batch in enumerate(strategy.distribute_dataset(batches()) if spread else batches()):
        one = partial(step, program, index)
        if not strategy:
            one(batch)
        elif on_servers:
            workers = strategy.cluster_resolver.cluster_spec().num_tasks("worker")

            def in_turn(batch):  # by another worker than the last
                turn.assign_add(1)
                while int(turn.read_value()) < workers * (index + 1):  # each has one of these
                    pass
                if coordinator.get_current_worker_index() == index % workers:
                    strategy.run(one, args=(batch,))

            for ended in [coordinator.schedule(in_turn, args=(batch,)) for _ in range(workers)]:
                ended.get(60)
            strategy.extended.pull()
        else:
            quiet = QUIET if index % 2 == 0 else 0
            with strategy.no_sync() if quiet else nullcontext():
                with strategy.no_sync() if quiet == 2 else nullcontext():
                    pass
                strategy.run(one, args=(batch,))
        between(program, index)
        if on_servers:
            strategy.extended.pull()
    return numbers(program)


def numbers(program):
    found = {}
    for name, part in program.items():
        if isinstance(part, nn.Module):
            found.update({f"{name}.{key}": value.detach().clone() for key, value in part.state_dict().items()})
    for place, optimizer in enumerate(program["optimizers"]):
        for number, group in enumerate(optimizer.param_groups):
            found[f"optimizers[{place}].{number}.lr"] = torch.tensor(float(group["lr"]))
    return found
'''


def _source(program: Program) -> str:
    of = {slot: table[program.of[slot]] for slot, table in _TABLES.items()}
    blocks = [
        Piece(*(part.replace("{i}", str(i)) for part in pieces.BLOCKS[name][:3]))
        for i, name in enumerate(program.blocks)
    ]
    own = pieces.CLASSES.get(program.of["optimizer"], "")
    parts = [
        _OWN_HEAD + _HEAD if own else _HEAD,
        own,
        _model(of["stem"], blocks),
        _build(program, of, blocks),
        _step(program, of),
        _between(program, of),
        _constants(program),
        _LOOP,
    ]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts if part)


def _constants(program: Program) -> str:
    rank = {"convolution": 4}.get(program.of["stem"], 2)
    rules = {"stem.weight": ("d0", *[None] * (rank - 1)), "head.weight": (None, "d0")}
    return "\n".join(
        [
            f"ROWS = {program.rows}",
            f"QUIET = {_QUIET.get(program.over, 0)}  # blocks of no_sync around a run that only accumulates",
            f"REDUCE_OP = {'sum' if 'summed' in program.traits else 'mean'!r}",
            f"RULES = {rules!r}  # over logical devices",
        ]
    )


def _indented(text: str, by: int) -> str:
    return textwrap.indent(text, "    " * by)


def _model(stem: Piece, blocks: list[Piece]) -> str:
    inits = [stem.init, *(block.init for block in blocks), "self.head = nn.Linear(6, 4)"]
    forward = [stem.text, *(block.text for block in blocks), "return self.head(h)"]
    return "\n".join(
        [
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            _indented("\n".join(inits), 2),
            "",
            "    def forward(self, x):",
            _indented("\n".join(forward), 2),
        ]
    )


def _build(program: Program, of: Mapping[str, Piece], blocks: list[Piece]) -> str:
    trained = "[p for p in model.parameters() if p.requires_grad]"
    everything = "list(model.parameters())"
    make = of["optimizer"].text.replace("{rate}", "0.05")
    two = f'[{{"params": {everything}[::2]}}, {{"params": {everything}[1::2], "lr": 0.02}}]'
    groups = (
        of["groups"]
        .text.replace("{whole}", make.replace("{p}", "model.parameters()"))
        .replace("{groups}", make.replace("{p}", two))
        .replace("{started}", make.replace("{p}", f"{everything}[:-1]"))
        .replace("{trained}", make.replace("{p}", trained))
        .replace("{first}", make.replace("{p}", f"{everything}[::2]"))
        .replace("{second}", of["optimizer"].text.replace("{rate}", "0.02").replace("{p}", f"{everything}[1::2]"))
    )
    lines = [
        "torch.manual_seed(0)",
        "model = Model()",
        *dict.fromkeys(block.build for block in blocks if block.build),
        of["hook"].build,
        groups if "no step" not in program.traits else "optimizers = []",
        of["update"].build,
        'program = {"model": model, "optimizers": optimizers}',
        *(of[slot].build for slot in ("schedule", "after", "between")),
        "return program",
    ]
    return "def build():\n" + _indented("\n".join(filter(None, lines)), 1)


def _step(program: Program, of: Mapping[str, Piece]) -> str:
    edits = of["edit"].text
    update = of["update"].text.replace("{indented_edits}", _indented(edits, 1)).replace("{edits}", edits)
    each = "for optimizer in optimizers:\n    "
    zero = of["zero"].text if of["zero"].text.startswith("model") else each + of["zero"].text
    is_before, has_closure = "zeroed before" in program.traits, "closure" in program.traits
    tail = "\n".join(
        filter(
            None,
            [
                update,
                "" if is_before or has_closure or "no step" in program.traits else zero,
                of["schedule"].text if "scheduled in step" in program.traits else "",
                of["after"].text,
            ],
        )
    )
    start = zero if is_before else ""
    if program.over:
        tail = "if index % 2:\n" + _indented(tail, 1)
        start = "if index % 2 == 0:\n" + _indented(start, 1) if start else ""
    lines = [
        'model, optimizers = program["model"], program["optimizers"]',
        "x, y = batch",
        "model.index = index" if "every other step" in program.blocks else "",
        "\ndef loss_of(x, y):\n    out = model(x)\n" + _indented(of["loss"].text, 1),
        "\ndef compute():\n" + _indented(of["backward"].text, 1) + "\n    return loss.detach()\n",
        start,
        "" if has_closure else "compute()",
        tail,
    ]
    return "def step(program, index, batch):\n" + _indented("\n".join(filter(None, lines)), 1)


def _between(program: Program, of: Mapping[str, Piece]) -> str:
    lines = [of["schedule"].text if "scheduled between" in program.traits else "", of["between"].text]
    body = "\n".join(filter(None, lines)) or "pass"
    return (
        'def between(program, index):\n    """Outside of runs, behind each."""\n'
        '    model, optimizers = program["model"], program["optimizers"]\n' + _indented(body, 1)
    )

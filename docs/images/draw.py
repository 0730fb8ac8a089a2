"""Draws the pictures of the documents: ``python docs/images/draw.py`` writes the SVG files beside this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
BLUE, GREEN, ORANGE, GREY = "#dbeafe", "#d8f3dc", "#ffe8cc", "#eef1f4"
STRONG = {"blue": "#2563eb", "green": "#2f9e44", "orange": "#e8590c", "grey": "#adb5bd"}
FONTS = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker></defs>'
)


class Picture:
    """Boxes, words and arrows on a white ground."""

    def __init__(self, width: int, height: int) -> None:
        size = f'width="{width}" viewBox="0 0 {width} {height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}">',
            TIP,
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str = GREY, words: str = "", size: int = 13) -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{LINE}" stroke-width="1"/>'
        )
        lines = words.split("\n") if words else []
        for number, line in enumerate(lines):
            below = y + h / 2 + size * (0.36 + 1.25 * (number - (len(lines) - 1) / 2))
            self.text(x + w / 2, below, line, size=size, anchor="middle")

    def bar(self, x: float, y: float, w: float, h: float, colour: str) -> None:
        self._parts.append(f'<rect x="{x}" y="{y}" width="{w:.1f}" height="{h}" rx="2" fill="{STRONG[colour]}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False, dashed: bool = False) -> None:
        start = ' marker-start="url(#tip)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{SOFT}" stroke-width="1.5" '
            f'marker-end="url(#tip)"{start}{dash}/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def one_step_many_places() -> Picture:
    p = Picture(760, 330)
    p.box(270, 14, 220, 52, BLUE, "one training step\nplain PyTorch", 14)
    columns = [
        ("OneDevice", "on one device"),
        ("Mirrored", "a copy on\nevery device"),
        ("CentralStorage", "one copy,\nseveral devices"),
        ("ParameterServer", "in shards\non servers"),
        ("TPU", "cut over\nlogical devices"),
    ]
    for number, (name, where) in enumerate(columns):
        left = 12 + number * 148
        p.arrow(380, 68, left + 72, 108)
        p.text(left + 72, 128, name, 14, "middle", bold=True)
        p.box(left, 138, 144, 132, "#ffffff")
        for line, words in enumerate(where.split("\n")):
            p.text(left + 72, 290 + 17 * line, words, 13, "middle", SOFT)
        if number == 0:
            p.box(left + 37, 160, 70, 36, GREEN, "variables", 12)
            p.box(left + 37, 214, 70, 36, GREY, "device", 12)
        elif number == 1:
            for copy in range(2):
                p.box(left + 8 + 66 * copy, 160, 62, 36, GREEN, "variables", 12)
                p.box(left + 8 + 66 * copy, 214, 62, 36, GREY, "device", 12)
            p.arrow(left + 60, 205, left + 84, 205, both=True)
        elif number == 2:
            p.box(left + 37, 152, 70, 32, GREEN, "variables", 12)
            for copy in range(2):
                p.box(left + 8 + 66 * copy, 214, 62, 36, GREY, "device", 12)
                p.arrow(left + 39 + 66 * copy, 212, left + 60 + 24 * copy, 187, both=True)
        elif number == 3:
            for copy in range(2):
                p.box(left + 8 + 66 * copy, 152, 62, 32, GREEN, "server", 12)
                p.box(left + 8 + 66 * copy, 214, 62, 36, GREY, "worker", 12)
            for a in range(2):
                for b in range(2):
                    p.arrow(left + 39 + 66 * a, 212, left + 39 + 66 * b, 187, both=True)
        else:
            for row in range(2):
                for copy in range(2):
                    p.box(left + 12 + 62 * copy, 152 + 56 * row, 58, 44, GREEN, f"core {2 * row + copy}\n½", 12)
    return p


def replicas() -> Picture:
    p = Picture(700, 240)
    p.text(12, 24, "In one process: threads that take turns", 14, bold=True)
    for row in range(2):
        y = 42 + 46 * row
        p.text(12, y + 22, f"replica {row}", 13)
        for part in range(3):
            p.box(84 + part * 190 + row * 92, y, 88, 32, (BLUE, GREEN)[row], ("forward", "backward", "step")[part], 12)
    p.text(84, 150, "they meet where gradients are combined, and at each all_reduce", 12, colour=SOFT)
    p.text(12, 184, "Under torchrun: one in each process", 14, bold=True)
    for rank in range(2):
        p.box(12 + rank * 345, 196, 330, 34, (BLUE, GREEN)[rank], f"rank {rank}: replica {rank} on its device", 13)
    return p


def variables() -> Picture:
    p = Picture(700, 250)
    for number, title in enumerate(("Mirrored", "CentralStorage", "ParameterServer")):
        left = 12 + number * 232
        p.text(left + 104, 24, title, 14, "middle", bold=True)
        p.box(left, 36, 208, 200, "#ffffff")
        if number == 0:
            for copy in range(2):
                p.box(left + 12 + 98 * copy, 56, 86, 62, GREEN, "weights\nstate", 13)
                p.box(left + 12 + 98 * copy, 176, 86, 40, GREY, f"replica {copy}")
                p.arrow(left + 55 + 98 * copy, 174, left + 55 + 98 * copy, 121, both=True)
            p.text(left + 104, 150, "gradients meet", 12, "middle", SOFT)
        elif number == 1:
            p.box(left + 44, 56, 120, 62, GREEN, "weights\nstate", 13)
            for copy in range(2):
                p.box(left + 12 + 98 * copy, 176, 86, 40, GREY, f"replica {copy}")
                p.arrow(left + 55 + 98 * copy, 174, left + 84 + 40 * copy, 121, both=True)
            p.text(left + 104, 150, "one step", 12, "middle", SOFT)
        else:
            for copy in range(2):
                p.box(left + 12 + 98 * copy, 56, 86, 62, GREEN, f"rows of\nserver {copy}", 13)
                p.box(left + 12 + 98 * copy, 176, 86, 40, GREY, f"worker {copy}")
                for other in range(2):
                    p.arrow(left + 55 + 98 * copy, 174, left + 55 + 98 * other, 121, both=True)
    return p


def batches() -> Picture:
    p = Picture(660, 220)
    p.text(12, 24, "the last global batch: 5 rows", 14, bold=True)
    for row in range(5):
        p.box(20 + 62 * row, 38, 56, 36, BLUE, f"row {row}")
    left = 0
    for replica, rows in enumerate((2, 2, 1, 0)):
        x = 20 + replica * 158
        p.box(x, 128, 146, 78, "#ffffff")
        p.text(x + 73, 226 - 28, f"replica {replica}", 13, "middle", SOFT)
        for row in range(rows):
            p.box(x + 10 + 66 * row, 138, 60, 36, BLUE, f"row {left + row}")
            p.arrow(48 + 62 * (left + row), 78, x + 40 + 66 * row, 134)
        if not rows:
            p.text(x + 73, 160, "sits out", 13, "middle", SOFT)
        left += rows
    return p


def reductions() -> Picture:
    p = Picture(720, 200)
    items = (
        ("gradients", "mean, by rows", "backward() returns"),
        ("results", "as the program says", "reduce, gather"),
        ("buffers", "mean, if floating", "after the step"),
        ("a value in a step", "sum or mean", "all_reduce"),
    )
    for number, (what, how, where) in enumerate(items):
        x = 12 + 177 * number
        p.text(x + 82, 24, what, 14, "middle", bold=True)
        for replica in range(2):
            p.box(x + 6 + 80 * replica, 38, 72, 34, BLUE, f"replica {replica}", 12)
            p.arrow(x + 42 + 80 * replica, 74, x + 72 + 20 * replica, 116)
        p.box(x + 6, 120, 152, 40, GREEN, how, 13)
        p.text(x + 82, 186, where, 13, "middle", SOFT)
    return p


def parameter_servers() -> Picture:
    p = Picture(700, 290)
    p.box(20, 110, 150, 70, BLUE, "coordinator\nyour script", 14)
    for worker in range(2):
        y = 40 + 130 * worker
        p.box(290, y, 130, 64, GREY, f"worker {worker}\nruns functions", 13)
        p.arrow(172, 135 + 20 * worker, 287, y + 32, both=True)
        p.box(550, y, 130, 64, GREEN, f"server {worker}\nhalf of the rows", 13)
    for worker in range(2):
        for server in range(2):
            p.arrow(423, 72 + 130 * worker, 547, 72 + 130 * server, both=True)
    p.text(228, 110, "schedule", 12, "middle", SOFT)
    p.text(228, 205, "results", 12, "middle", SOFT)
    p.text(485, 34, "rows", 12, "middle", SOFT)
    p.text(485, 252, "gradients", 12, "middle", SOFT)
    p.text(350, 280, "workers never wait for each other", 13, "middle", SOFT)
    return p


def leases() -> Picture:
    p = Picture(700, 220)
    p.text(12, 24, "rows of an epoch", 14, bold=True)
    for lease in range(4):
        p.box(12 + 96 * lease, 36, 90, 36, BLUE, f"{64 * lease}–{64 * lease + 63}")
    p.box(12, 124, 140, 54, GREY, "worker 0\n0–63, 128–191")
    p.box(200, 124, 140, 54, ORANGE, "worker 1\nkilled with 64–127")
    p.box(388, 124, 140, 54, GREY, "worker 2\n64–127, 192–255")
    p.arrow(57, 74, 70, 121)
    p.arrow(153, 74, 250, 121)
    p.arrow(249, 74, 110, 121)
    p.arrow(345, 74, 470, 121)
    p.arrow(342, 151, 385, 151)
    p.text(364, 143, "again", 12, "middle", SOFT)
    p.box(570, 124, 118, 54, GREEN, "ledger\n256 of 256")
    p.arrow(530, 151, 567, 151)
    p.text(350, 208, "each row is finished once", 13, "middle", SOFT)
    return p


def logical_devices() -> Picture:
    p = Picture(720, 230)
    p.text(12, 24, "4 replicas × 2 logical devices", 14, bold=True)
    for replica in range(4):
        x = 12 + 178 * replica
        p.box(x, 38, 164, 130, "#ffffff")
        for device in range(2):
            p.box(
                x + 10 + 74 * device,
                50,
                70,
                76,
                (GREEN, BLUE)[device],
                f"device {device}\nrows\n{16 * device}–{16 * device + 15}",
                12,
            )
        p.text(x + 82, 152, f"replica {replica}: rows {8 * replica}–{8 * replica + 7}", 12, "middle", SOFT)
    p.text(360, 196, "the weight (32, 16) is cut in two, and every replica has both halves", 13, "middle", SOFT)
    p.text(360, 216, "each replica computes with its rows of the batch", 13, "middle", SOFT)
    return p


def _bars(p: Picture, top: float, rows: list[tuple[str, float, str, str]], scale: float) -> float:
    for name, value, label, colour in rows:
        p.text(232, top + 15, name, 13, "end")
        p.bar(240, top, value * scale, 20, colour)
        p.text(246 + value * scale, top + 15, label, 12, colour=SOFT)
        top += 27
    return top


def performance() -> Picture:
    p = Picture(720, 300)
    p.text(12, 22, "MLP 784-1024-1024-10, 2 processes on 2 CPU cores: time of a step", 14, bold=True)
    top = _bars(
        p,
        36,
        [
            ("never communicates (floor)", 1.0, "1.00", "grey"),
            ("torchstrat Mirrored", 1.08, "1.08 × floor, 0.70 × DDP", "blue"),
            ("torchstrat CentralStorage", 1.12, "0.73 × DDP", "blue"),
            ("DDP", 1.53, "1.53 × floor", "orange"),
        ],
        200,
    )
    p.text(12, top + 32, "Table 1,000,000 × 64, SGD, 2 workers + 2 servers: time of a step", 14, bold=True)
    _bars(
        p,
        top + 46,
        [
            ("never communicates (floor)", 1.0, "1.00", "grey"),
            ("torchstrat ParameterServer", 1.26, "1.26 × floor, one host", "blue"),
            ("the same, RPC only", 1.55, "1.55 × floor", "blue"),
            ("a server as tutorials write it", 1.7, "1.60 to 1.80 × floor", "orange"),
        ],
        200,
    )
    return p


def workers() -> Picture:
    p = Picture(720, 330)
    for title, x, unit, rows in (
        ("steps per second, all workers", 12, 5.0, ((23.4, 22.4), (44.4, 39.4), (44.2, 37.2), (39.9, 35.7))),
        ("CPU ms per step, all processes", 372, 3.7, ((42.7, 46.7), (43.8, 48.7), (44.8, 52.8), (49.8, 55.7))),
    ):
        p.text(x, 22, title, 14, bold=True)
        for number, (floor, own) in enumerate(rows):
            y = 40 + 66 * number
            p.text(x, y + 26, f"{2**number} worker{'s' if number else ''}", 12)
            p.bar(x + 66, y, floor * unit, 20, "grey")
            p.text(x + 72 + floor * unit, y + 15, f"{floor}", 12, colour=SOFT)
            p.bar(x + 66, y + 23, own * unit, 20, "blue")
            p.text(x + 72 + own * unit, y + 38, f"{own}", 12, colour=SOFT)
    p.bar(12, 306, 20, 12, "grey")
    p.text(38, 317, "floor: one process per worker that holds everything and never talks", 12, colour=SOFT)
    p.bar(452, 306, 20, 12, "blue")
    p.text(478, 317, "torchstrat, 2 servers", 12, colour=SOFT)
    return p


PICTURES = (
    *(one_step_many_places, replicas, variables, batches, reductions),
    *(parameter_servers, leases, logical_devices, performance, workers),
)


def file_name(picture: Callable[[], Picture]) -> str:
    return f"{picture.__name__.replace('_', '-')}.svg"


def main() -> None:
    for picture in PICTURES:
        (HERE / file_name(picture)).write_text(str(picture()), encoding="utf-8")


if __name__ == "__main__":
    main()

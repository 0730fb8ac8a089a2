"""Train one ConvNet on handwritten digits under eight set-ups and compare them; called by ``./scripts/demo``.

Every set-up is a real run of ``scripts/train.py`` in its own processes, and leaves its log in its folder. The
comparison reads what the runs left there, ends with a table and a picture, and exits non-zero if a set-up misses what
is promised:

* the accuracy on held-out digits reaches ACCURACY;
* after 20 float32 steps no parameter is further than FROM_ONE_DEVICE from training on one device: replicas sum their
  gradients in another order, and nothing else may differ;
* at the same moment the same strategy in one process and under torchrun agree to BETWEEN_LAUNCHES;
* on eight devices of a TPU, which the CPU pretends to be, four replicas that share each image between two devices are
  no further from one device either; torch_xla gets an environment of its own, which is made while the others train, and
  the row is left out where that cannot be, or with ``--no-tpu``;
* on parameter servers, where training is asynchronous, a worker that is killed half-way costs neither the run nor the
  accuracy. Its steps do not average momentum over workers, so it trains without, at a higher
  rate and for longer;
* the same again, told to end half-way (SIGTERM): it saves, and goes on on another number of servers. No step is missing
  or there twice, every epoch has had each of its rows once, and the loss goes on from where it was: it moves by less
  than SEAM of what the first epoch began with.

At the end of training, hundreds of steps later, the differences have grown as rounding does; they are shown only.
"""

import argparse
import contextlib
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from omegaconf import OmegaConf

from torchstrat.app.report import read_metrics
from torchstrat.checkpoint.preemption import EXIT_CODE as RUN_AGAIN
from torchstrat.launch import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "scripts" / "train.py"

ACCURACY = 0.97
FROM_ONE_DEVICE = 1e-5
BETWEEN_LAUNCHES = 1e-6
SNAPSHOT_STEPS = 20
REPLICAS = 2
RUN_DEADLINE_SECONDS = 300
LOG, CLUSTER_LOG = "log.txt", "cluster.log"
SEAM = 0.1
SEAM_STEPS = 5
"""On either side of the end, over which the loss is averaged. Few: asynchronous training now and then has twenty bad
steps, and those before the end are no seam."""

TPU_ENVIRONMENT = ROOT / ".venv-tpu"
"""Made by scripts/_environment.sh."""

SECONDS = {
    "one_device": 7,
    "mirrored": 9,
    "central_storage": 9,
    "mirrored-torchrun": 9,
    "central_storage-torchrun": 9,
    "parameter_server": 11,
    "parameter_server-resumed": 17,
    "tpu": 24,
}
"""What each set-up takes on two cores: for the time left, which goes by how long those before have taken of theirs."""


@dataclass(frozen=True)
class Setup:
    strategy: str
    torchrun: bool = False
    overrides: tuple[str, ...] = ()
    python: str = sys.executable
    label: str = ""

    @property
    def name(self) -> str:
        label = "torchrun" if self.torchrun else self.label
        return f"{self.strategy}-{label}" if label else self.strategy

    def command(self, folder: Path) -> list[str]:
        launcher = [self.python]
        if self.torchrun:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}"]
        return [
            *launcher,
            str(TRAIN),
            *common_overrides(folder),
            f"strategy={self.strategy}",
            *self.overrides,
            f"snapshot_after_steps={SNAPSHOT_STEPS}",
        ]


def common_overrides(folder: Path) -> list[str]:
    return [
        "experiment=digits_convnet",
        "cluster.accelerator=cpu",
        "progress=off",
        f"hydra.run.dir={folder}",
    ]


BASELINE = Setup("one_device")
IN_ONE_PROCESS = (f"strategy.replicas={REPLICAS}",)
SETUPS = [
    BASELINE,
    Setup("mirrored", overrides=IN_ONE_PROCESS),
    Setup("central_storage", overrides=IN_ONE_PROCESS),
    Setup("mirrored", torchrun=True),
    Setup("central_storage", torchrun=True),
]
TPU = Setup(
    "tpu",
    python=str(TPU_ENVIRONMENT / "bin" / "python"),
    overrides=(
        "strategy.virtual_devices=8",
        "strategy.replicas=4",
        "strategy.logical_devices=2",
        "model.spatially_parallel=true",
        "hydra/job_logging=disabled",  # it says at each compilation what the run says at its end
    ),
)
WORKERS, SERVERS, OTHER_SERVERS = 2, 2, 3
PARAMETER_SERVERS = Setup("parameter_server")
RESUMED = Setup("parameter_server", label="resumed")


@dataclass(frozen=True)
class Outcome:
    """What one run left behind."""

    setup: Setup
    result: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    early: dict[str, torch.Tensor]
    """Parameters after SNAPSHOT_STEPS steps."""
    final: dict[str, torch.Tensor]
    note: str = ""
    misses: tuple[str, ...] = ()
    """What this set-up alone promises, and did not reach."""
    seam: int | None = None
    """The step after which the run ended and went on."""


class Progress:
    """Which set-up runs, and about how long the rest takes: one line that is rewritten, or a line for each set-up where
    stderr is no terminal."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._began, self._number = names, time.monotonic(), 0
        self._note, self._over = "", threading.Event()
        self._stream = sys.stderr
        self._shows = self._stream.isatty()
        if self._shows:
            threading.Thread(target=self._show, daemon=True).start()

    def begin(self, name: str) -> None:
        self._number, self._note = self._names.index(name) + 1, ""
        if not self._shows:
            print(self._line(), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        self._note = text
        if not self._shows:
            print(f"      {text}", file=self._stream, flush=True)

    def end(self) -> None:
        self._over.set()
        if self._shows:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _line(self) -> str:
        taken = time.monotonic() - self._began
        done = sum(SECONDS[name] for name in self._names[: self._number - 1])
        slowness = taken / done if done else 1.0
        left = max(0.0, slowness * sum(SECONDS[name] for name in self._names) - taken)
        name = self._names[self._number - 1]
        note = f", {self._note}" if self._note and self._shows else ""
        return f"[{self._number}/{len(self._names)}] {name}{note}: about {left:.0f} s left"

    def _show(self) -> None:
        while not self._over.wait(0.5):
            if self._number:
                print(f"\r\x1b[K{self._line()}", end="", file=self._stream, flush=True)


class TpuEnvironment:
    """The environment with torch_xla, made in the background: it takes minutes of downloading, once."""

    def __init__(self, log: Path) -> None:
        program = 'ROOT="$1"; source "$ROOT/scripts/_environment.sh"'
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", program, "bash", str(ROOT)],
                env={**os.environ, "TORCHSTRAT_ENV": "tpu"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def why_not(self) -> str | None:
        """Wait until it is there, and then None; else in a line why it is not."""
        if self._process.wait() == 0:
            return None
        lines = self._log.read_text().split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"{TPU_ENVIRONMENT.name} could not be made")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="./scripts/demo", description="Trains one ConvNet under eight set-ups.")
    parser.add_argument("--no-tpu", action="store_true", help="seven set-ups: without TPUStrategy on virtual devices")
    arguments = parser.parse_args()
    began = time.perf_counter()
    folder = ROOT / "outputs" / "demo" / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True)
    tpu = None if arguments.no_tpu else TpuEnvironment(folder / "tpu_environment.log")
    setups = [*SETUPS, PARAMETER_SERVERS, RESUMED, *([] if tpu is None else [TPU])]
    progress = Progress([setup.name for setup in setups])
    left_out = "--no-tpu"
    try:
        outcomes = [run(setup, folder / setup.name, progress) for setup in SETUPS]
        outcomes.append(run_parameter_servers(folder / PARAMETER_SERVERS.name, progress))
        outcomes.append(run_resumed(folder / RESUMED.name, progress))
        if tpu is not None:
            progress.begin(TPU.name)
            progress.note(f"{TPU_ENVIRONMENT.name} has to be there, which is made once")
            left_out = tpu.why_not() or ""
            if not left_out:
                outcomes.append(run_tpu(folder / TPU.name, progress))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        progress.end()
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        progress.end()
        if tpu is not None:
            tpu.close()
    baseline = outcomes[0]
    picture = folder / "curves.png"
    draw(picture, outcomes)

    print_table(outcomes, baseline, left_out)
    misses = judge(outcomes, baseline)
    print(f"\ntook {time.perf_counter() - began:.0f} s; the runs are in {folder.relative_to(ROOT)}")
    for miss in misses:
        print(f"MISSED: {miss}", file=sys.stderr)
    print(f"the curves, and how far they are apart: {picture.relative_to(ROOT)}")
    print("next: docs/quickstart.md, a first program; scripts/examples, ten to copy; README.md, what there is")
    return int(bool(misses))


def run(setup: Setup, folder: Path, progress: Progress, environment: dict[str, str] | None = None) -> Outcome:
    progress.begin(setup.name)
    finish(start(setup.command(folder), folder, environment), folder)
    return Outcome(
        setup=setup,
        result=read_metrics(folder, "result")[-1],
        steps=read_metrics(folder, "step"),
        evaluations=read_metrics(folder, "evaluation"),
        early=torch.load(folder / f"parameters_after_step_{SNAPSHOT_STEPS}.pt", weights_only=True),
        final=torch.load(folder / "parameters.pt", weights_only=True),
    )


def start(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """A run whose output goes to a file in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)


def run_tpu(folder: Path, progress: Progress) -> Outcome:
    """In an environment of its own, for torch_xla works with one release of PyTorch."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "CPU_NUM_DEVICES")}
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **kept}  # XLA warns at each compilation of its own plans
    outcome = run(TPU, folder, progress, environment)
    (programs,) = read_metrics(folder, "programs")
    note = (
        f"{programs['replicas']} replicas × {programs['logical_devices']} logical devices on {programs['devices']} "
        f"virtual devices; {len(programs['compilations'])} compilations; each replica's images in "
        f"{programs['logical_devices']} bands of rows"
    )
    return replace(outcome, note=note)


def run_parameter_servers(folder: Path, progress: Progress) -> Outcome:
    """One coordinator, WORKERS workers, SERVERS servers; worker 0 is killed when half of the epochs are over."""
    progress.begin(PARAMETER_SERVERS.name)
    with running_cluster(SERVERS, folder) as cluster:
        process = start_coordinator(cluster, folder)
        try:
            epoch, epochs = wait_for_half(process, folder)
            cluster.kill("worker", 0)
            progress.note(f"worker 0 killed (kill -9) in epoch {epoch} of {epochs}")
        finally:
            finish(process, folder)
    return Outcome(
        setup=PARAMETER_SERVERS,
        result=read_metrics(folder, "result")[-1],
        steps=read_metrics(folder, "step"),
        evaluations=read_metrics(folder, "evaluation"),
        early={},
        final={},
        note=f"worker 0 of {WORKERS} killed (kill -9) in epoch {epoch} of {epochs}; {SERVERS} servers",
    )


def run_resumed(folder: Path, progress: Progress) -> Outcome:
    """As above, but half-way the whole cluster ends, and a run on OTHER_SERVERS servers goes on with what it saved."""
    progress.begin(RESUMED.name)
    kept = ("resume=auto", f"checkpoint.directory={folder / 'checkpoints'}")
    with running_cluster(SERVERS, folder) as cluster:
        process = start_coordinator(cluster, folder / "first", *kept)
        try:
            epoch, epochs = wait_for_half(process, folder / "first")
            process.terminate()
            progress.note(f"told to end (SIGTERM) in epoch {epoch} of {epochs}")
        finally:
            finish(process, folder / "first", expected=RUN_AGAIN)
    with running_cluster(OTHER_SERVERS, folder) as cluster:
        finish(start_coordinator(cluster, folder / "second", *kept), folder / "second")
    run, seam = folder / "second", len(read_metrics(folder / "first", "step"))
    steps, ledgers = read_metrics(run, "step"), read_metrics(run, "ledger")
    return Outcome(
        setup=RESUMED,
        result=read_metrics(run, "result")[-1],
        steps=steps,
        evaluations=read_metrics(run, "evaluation"),
        early={},
        final={},
        note=f"told to end (SIGTERM) in epoch {epoch} of {epochs}, after step {seam}, on {SERVERS} servers; went on on "
        f"{OTHER_SERVERS}, each epoch with all of its rows once",
        misses=tuple(broken_promises(steps, ledgers, seam, epochs)),
        seam=seam,
    )


@contextlib.contextmanager
def running_cluster(servers: int, folder: Path) -> Iterator[LocalCluster]:
    """Workers and servers, which say what happens to them in a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CLUSTER_LOG).open("a") as output, contextlib.redirect_stderr(output):
        with LocalCluster(workers=WORKERS, ps=servers) as cluster:
            yield cluster


def start_coordinator(cluster: LocalCluster, folder: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        str(TRAIN),
        *common_overrides(folder),
        "strategy=parameter_server",
        "optimizer.lr=0.2",
        "optimizer.momentum=0",
        "epochs=18",
        *overrides,
    ]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch's RPC warns of every connection that ends
    environment = {**quiet, **os.environ, **cluster.environment_of("chief", 0)}
    return start(command, folder, environment)


def broken_promises(
    steps: list[dict[str, Any]], ledgers: list[dict[str, Any]], seam: int, epochs: int
) -> Iterator[str]:
    """What a run that ended after ``seam`` steps, and went on, has not kept."""
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        yield "its record has steps twice, or misses some"
    if len(ledgers) != epochs or any(epoch["finished"] != epoch["rows"] for epoch in ledgers):
        rows = [f"{epoch['finished']} of {epoch['rows']}" for epoch in ledgers]
        yield f"of {epochs} epochs not all had each row once; rows that were trained on: {', '.join(rows)}"
    begun, before, after = (
        mean_loss(part) for part in (steps[:SEAM_STEPS], steps[:seam][-SEAM_STEPS:], steps[seam:][:SEAM_STEPS])
    )
    if not abs(after - before) <= SEAM * begun:
        yield f"its loss went from {before:.4f} to {after:.4f} at step {seam}, over {SEAM:.0%} of {begun:.4f}"


def mean_loss(steps: list[dict[str, Any]]) -> float:
    return sum(step["loss"] for step in steps) / len(steps) if steps else math.nan


def wait_for_half(process: "subprocess.Popen[bytes]", folder: Path) -> tuple[int, int]:
    """Wait until half of a run's epochs are over and the next has begun: that epoch, and how many there are."""
    deadline = time.monotonic() + RUN_DEADLINE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if (folder / "metrics.jsonl").exists():
            epochs = int(OmegaConf.load(folder / "config.yaml").epochs)
            steps = read_metrics(folder, "step")
            if steps and steps[-1]["epoch"] > epochs // 2:
                return steps[-1]["epoch"], epochs
        time.sleep(0.05)
    raise subprocess.TimeoutExpired(process.args, RUN_DEADLINE_SECONDS)


def finish(process: "subprocess.Popen[bytes]", folder: Path, expected: int = 0) -> None:
    """Wait for a run to end with this status; whatever happens, leave none of its processes behind. Of a run that ends
    with another one, the end of its log is shown."""
    try:
        status = process.wait(RUN_DEADLINE_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()  # not kill: torchrun ends its processes when it is asked to end
            process.wait(RUN_DEADLINE_SECONDS)
    if status != expected:
        print("\n".join(["", *(folder / LOG).read_text().split("\n")[-40:]]), file=sys.__stderr__)
        raise subprocess.CalledProcessError(status, process.args)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two states' equally named parameters."""
    if one.keys() != other.keys():
        raise ValueError(f"states differ in their names: {sorted(one.keys() ^ other.keys())}")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def judge(outcomes: list[Outcome], baseline: Outcome) -> list[str]:
    """What was promised and not reached, a line each. ``not <=`` also catches NaN."""
    misses = []
    for outcome in outcomes:
        name, accuracy = outcome.setup.name, outcome.result["accuracy"]
        if not accuracy >= ACCURACY:
            misses.append(f"{name}: accuracy {accuracy:.4f} is below {ACCURACY}")
        misses += [f"{name}: {miss}" for miss in outcome.misses]
        if not outcome.early:
            continue  # asynchronous: no two runs are alike
        apart = distance(outcome.early, baseline.early)
        if not apart <= FROM_ONE_DEVICE:
            misses.append(f"{name}: {apart:.1e} from one_device at step {SNAPSHOT_STEPS}, over {FROM_ONE_DEVICE:.0e}")
    for one, other in itertools.combinations(outcomes, 2):
        if one.setup.strategy == other.setup.strategy and one.early and other.early:
            apart = distance(one.early, other.early)
            print(f"{one.setup.name} and {other.setup.name} after {SNAPSHOT_STEPS} steps: {apart:.1e} apart")
            if not apart <= BETWEEN_LAUNCHES:
                misses.append(
                    f"{one.setup.name} and {other.setup.name} are {apart:.1e} apart, over {BETWEEN_LAUNCHES:.0e}"
                )
    return misses


def print_table(outcomes: list[Outcome], baseline: Outcome, left_out: str) -> None:
    """``left_out``: why there is no TPU, where there is none."""
    header = [
        "strategy",
        "processes",
        "replicas",
        "test accuracy",
        "final loss",
        "examples/s",
        f"apart, step {SNAPSHOT_STEPS}",
        "apart, end",
    ]
    rows = [
        [
            outcome.result["strategy"],
            str(outcome.result["processes"]),
            shown_replicas(outcome.result),
            f"{outcome.result['accuracy']:.4f}",
            f"{outcome.result['loss']:.4f}",
            f"{outcome.result['examples_per_second']:,.0f}",
            f"{distance(outcome.early, baseline.early):.1e}" if outcome.early else "–",
            f"{distance(outcome.final, baseline.final):.1e}" if outcome.final else "–",
        ]
        for outcome in outcomes
    ]
    if left_out:
        rows.append([TPU.strategy, "left out", *"–" * (len(header) - 2)])
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    print('\n"apart": the largest difference of a parameter to one_device')
    for outcome in outcomes:
        if outcome.note:
            print(f"{outcome.setup.name}: {outcome.note}")
    if left_out:
        print(f"{TPU.name}: left out: {left_out}")


def shown_replicas(result: dict[str, Any]) -> str:
    """With the logical devices of each, where there are several."""
    logical = result["logical_devices"]
    return f"{result['replicas']}×{logical}" if logical > 1 else str(result["replicas"])


def draw(file: Path, outcomes: list[Outcome]) -> None:
    """The curves, which lie on each other, and below them how far they are from one device's."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "accuracy"], ["apart", "apart"]], height_ratios=[3, 2])
    baseline = outcomes[0]
    # Later ones hide earlier ones: those are drawn wider.
    for number, outcome in enumerate(outcomes):
        style = {"color": f"C{number}", "linewidth": len(outcomes) - number, "alpha": 0.7}
        steps, losses = zip(*((step["step"], step["loss"]) for step in outcome.steps), strict=True)
        panels["loss"].plot(steps, losses, label=outcome.setup.name, **style)
        epochs = [evaluation["epoch"] for evaluation in outcome.evaluations]
        panels["accuracy"].plot(epochs, [evaluation["accuracy"] for evaluation in outcome.evaluations], **style)
        if outcome.seam is not None:
            panels["loss"].axvline(outcome.seam, color=style["color"], linestyle=":", label="  it ended, and went on")
        if outcome.early and outcome is not baseline:
            apart = [abs(step["loss"] - one["loss"]) for step, one in zip(outcome.steps, baseline.steps, strict=True)]
            largest = list(itertools.accumulate(apart, max))
            panels["apart"].plot(steps, largest, color=style["color"], linewidth=1.5)
    panels["loss"].set(title="training loss", xlabel="step", ylabel="cross entropy", yscale="log")
    panels["accuracy"].set(title="accuracy on held-out digits", xlabel="epoch", ylim=(0.8, 1.0))
    panels["accuracy"].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels["apart"].set(
        title=f"synchronous strategies: the largest difference from the loss of {baseline.setup.name} so far",
        xlabel="step",
        ylabel="difference",
        yscale="log",
    )
    for axes in panels.values():
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())

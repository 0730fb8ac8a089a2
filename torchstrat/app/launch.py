"""One command, one Hydra: rank 0 composes, sweeps and writes Hydra's files; the other ranks follow.

Started without a launcher, this process is rank 0 of one. Under ``torchrun`` every rank calls `main`; they meet before
Hydra is entered, hence before any folder exists, and each run is handed over (`HandOver`) before it begins. Composing
on every rank would give each its own run folder (ranks start seconds apart, so ``${now:}`` differs) and, in a sweep, as
many announcements as there are ranks.

Errors made on purpose (`TorchstratError`, Hydra's own) end as one line on stderr, said once, and a non-zero exit
status; a sweep goes on with its other runs where every rank failed alike. ``HYDRA_FULL_ERROR=1`` shows tracebacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from torchstrat.app import config as schema
from torchstrat.app import targets
from torchstrat.app.report import show_sweep
from torchstrat.checkpoint.preemption import EXIT_CODE
from torchstrat.core.errors import CommunicationTimeoutError, TorchstratError
from torchstrat.distributed.cluster import ProcessPlan
from torchstrat.distributed.collectives.default_group import fresh_store
from torchstrat.distributed.launcher import launched_plan

_FULL_ERROR = "HYDRA_FULL_ERROR"
_ON_PURPOSE = (TorchstratError, HydraException, OmegaConfBaseException)
"""Errors whose message says it all. Any other leaves with its traceback."""

MEETING_TIMEOUT = timedelta(minutes=10)
"""Until every rank has been started. Machines of one job can be minutes apart."""

HAND_OVER_TIMEOUT = timedelta(minutes=10)
"""From the end of one run to the next: rank 0 draws a picture and composes a configuration in between."""

OUTCOME_TIMEOUT = timedelta(seconds=10)
"""From one rank's failure to that of another, when both have the same cause."""


@dataclass(frozen=True)
class Run:
    """One run as every rank knows it: what to do, where its results go, and this process's place in it."""

    config: schema.ExperimentConfig
    resolved: Mapping[str, object]
    """The whole configuration as plain values, for the record."""
    folder: Path
    """Made by rank 0, which alone writes to it."""
    plan: ProcessPlan | None
    """None: started without a launcher."""

    @classmethod
    def unpack(cls, message: Mapping[str, Any], plan: ProcessPlan | None) -> Run:
        """The run that rank 0 described. Raises `InvalidArgumentError` for a configuration that means nothing."""
        config = schema.experiment_from_mapping(message["config"])
        targets.check(config)
        return cls(config, message["config"], Path(message["folder"]), plan)


class RunAgain(SystemExit):
    """Raised by a task, on every rank of a run: what was reached is saved, and the process ends with the status that
    asks whoever started it to do so again. The other runs of a sweep do not begin."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


Task = Callable[[Run], None]


def main(task: Task) -> int:
    """Call ``task`` for every run that the command line asks for, on every rank.

    Args:
        task: Called on all ranks of a run with equal configurations. It must leave nothing open: the next run of a
            sweep starts in the same process.

    Returns:
        The exit status for the process: 0 if every run succeeded, that of `RunAgain` if a run ended with it.
    """
    caught = _ON_PURPOSE if os.environ.get(_FULL_ERROR, "0") in ("", "0") else ()
    register_schema()
    try:
        plan = launched_plan()
        rank = _Rank(task, plan, _meet(plan), caught)
        with _users_modules():
            return rank.lead() if rank.hand_over.rank == 0 else rank.follow()
    except caught as error:
        return _fail(error)


def register_schema() -> None:
    """Give Hydra the dataclasses that the YAML files set values of."""
    experiment = OmegaConf.structured(schema.ExperimentConfig)
    for group in schema.CALLS:  # their keys are those of whatever is called, and `targets` knows which these are
        OmegaConf.set_struct(experiment[group], False)
    ConfigStore.instance().store(name="base_config", node=experiment)


def config_folder() -> Path:
    """``configs/``: the wheel's copy, or that of the checkout."""
    packaged = Path(__file__).with_name("configs")
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "configs"


@contextlib.contextmanager
def _users_modules() -> Iterator[None]:
    """``_target_`` may name what is in the folder that the command is run in, here and in processes started here."""
    path = [*sys.path]
    sys.path.append(os.getcwd())
    try:
        with _variable("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))):
            yield
    finally:
        sys.path[:] = path


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """In the environment, for as long as the context lasts."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _meet(plan: ProcessPlan | None) -> HandOver:
    """Meet the other ranks over the store that the launcher keeps, or rank 0 where the launcher keeps none."""
    if plan is None or plan.size == 1:
        return HandOver(dist.HashStore(), 0, 1)
    store, _, _ = next(dist.rendezvous(plan.init_method or "env://", plan.rank, plan.size, timeout=MEETING_TIMEOUT))
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # tells it from others that share a store
    store = fresh_store(store, plan.rank, plan.size, f"runs of {launch}", MEETING_TIMEOUT)
    return HandOver(store, plan.rank, plan.size)


@dataclass(frozen=True)
class _Rank:
    """This process's part of the command."""

    task: Task
    plan: ProcessPlan | None
    hand_over: HandOver
    caught: tuple[type[Exception], ...]
    """Errors that end as one line."""

    def lead(self) -> int:
        """Let Hydra parse the command line and call back once per run; returns the exit status."""
        status = 1  # what the others are told if something unforeseen leaves through here
        try:
            status = self._run_hydra()
        except self.caught as error:
            status = _fail(error)
        finally:
            self.hand_over.publish(status)
        self.hand_over.wait_until_read()
        return status

    def _run_hydra(self) -> int:
        runs: list[tuple[Path, list[str], bool]] = []

        def run_one(config: DictConfig) -> None:
            succeeded = self._run(config)
            composed = HydraConfig.get()
            runs.append((Path(composed.runtime.output_dir), list(composed.overrides.task), succeeded))

        # Once per command, where `now` would be resolved again and again. The end keeps two of the same second apart.
        run_id = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}"
        OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)
        decorate = hydra.main(version_base="1.3", config_path=str(config_folder().resolve()), config_name="config")
        try:
            with _variable(_FULL_ERROR, "1"):  # Hydra's way to be told: raise to the caller, do not print and exit
                decorate(run_one)()
        except SystemExit as stop:  # --help, arguments that argparse refuses, a run that left the others waiting
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if len(runs) > 1 and any(succeeded for _, _, succeeded in runs):
            show_sweep(runs)
        return int(not all(succeeded for _, _, succeeded in runs))

    def _run(self, config: DictConfig) -> bool:
        """One run; whether it succeeded. `SystemExit` when other ranks may be waiting for this one in vain."""
        composed = HydraConfig.get()
        try:
            values = values_of(config, list(composed.overrides.task))
            message = {"config": values, "folder": composed.runtime.output_dir}
            run = Run.unpack(message, self.plan)
        except self.caught as problem:  # nothing was handed over: the others know nothing of this run
            _fail(problem)
            return False
        self.hand_over.publish(message)
        error = self._attempt(run)
        if error is not None and not self.hand_over.everyone_failed():
            raise SystemExit(1)
        return error is None

    def follow(self) -> int:
        """Take runs until there are no more; returns the exit status. Knows nothing of Hydra and writes nothing."""
        while True:
            message = self.hand_over.receive()
            if isinstance(message, int):
                return message
            try:
                error = self._attempt(Run.unpack(message, self.plan))
            except RunAgain:
                continue  # rank 0 is told to end as well, and says with what status
            if error is not None and not self.hand_over.failed(rank=0):
                return _fail(error, f"rank {self.hand_over.rank}: ")  # rank 0 knows nothing of it, and would not say it

    def _attempt(self, run: Run) -> Exception | None:
        """Do it, and let the other ranks know how it ended. Rank 0 says what the error is."""
        error: Exception | None = None
        try:
            self.task(run)
        except self.caught as problem:
            error = problem
            if self.hand_over.rank == 0:
                _fail(error)
        self.hand_over.report_outcome(succeeded=error is None)
        return error


def values_of(config: DictConfig, overrides: list[str]) -> dict[str, Any]:
    """The configuration that Hydra composed, as plain values."""
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    given = {text.lstrip("+").partition("=")[0] for text in overrides}
    for group in schema.CALLS:
        if f"{group}._target_" in given:  # another call: the arguments of the one in the file are not for it
            kept = {key.split(".")[1] for key in given if key.startswith(f"{group}.")}
            kept |= {"global_batch", "workers", "gradient_reduce_op"}
            values[group] = {key: value for key, value in (values[group] or {}).items() if key in kept}
    return values


def _fail(error: Exception, who: str = "") -> int:
    """Print the one line; returns the exit status."""
    print(f"error: {who}{_explain(error)}", file=sys.stderr, flush=True)
    return 1


def _explain(error: Exception) -> str:
    """The message in one line. Hydra spreads its own over several, and their causes carry the better half."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        choices = [choice for choice in error.options or () if not choice.startswith("base_")]
        return f"{group}={name} does not exist; choose one of {', '.join(choices) or 'none'}."
    messages = [str(error)]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        told = str(cause).partition("full_key:")[0].strip()  # then come OmegaConf's own type names
        if told not in messages[0]:
            messages.append(told)
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(cause.object_type):
            there = ", ".join(one.name for one in dataclasses.fields(cause.object_type))
            messages.append(f"(there are {there})")
    return " ".join(" ".join(messages).split())


class HandOver:
    """How rank 0 hands runs to the others. Each of its methods has its counterpart there, in the same order.

    The messages are JSON, so nothing that arrives is executed. ``store``: one that nobody has written to.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self._size = size
        self._runs = 0

    def publish(self, run: Mapping[str, Any] | int) -> None:
        """Rank 0: hand a run to the others, or the exit status after the last one. Does not wait for them."""
        self._store.set(f"run/{self._runs}", json.dumps(run))
        self._runs += 1

    def wait_until_read(self, timeout: timedelta = OUTCOME_TIMEOUT) -> None:
        """Rank 0: stay until the others know of the end, for the store may live in this process. Gives up quietly."""
        with contextlib.suppress(RuntimeError):
            self._store.wait([f"left/{rank}" for rank in range(1, self._size)], timeout)

    def receive(self, timeout: timedelta = HAND_OVER_TIMEOUT) -> Mapping[str, Any] | int:
        """The others: wait for the next run, or for the exit status after the last one.

        Raises:
            CommunicationTimeoutError: rank 0 said neither within ``timeout``.
        """
        key = f"run/{self._runs}"
        try:
            self._store.wait([key], timeout)
        except RuntimeError as error:
            raise CommunicationTimeoutError(
                f"rank {self.rank} waited {timeout.total_seconds():.0f} s for rank 0 to hand over run {self._runs}; is "
                "it alive, and can it be reached at MASTER_ADDR?"
            ) from error
        run: Mapping[str, Any] | int = json.loads(self._store.get(key))
        self._runs += 1
        if isinstance(run, int):
            self._store.set(f"left/{self.rank}", "")
        return run

    def report_outcome(self, succeeded: bool) -> None:
        """Say how the current run ended here, for `failed` elsewhere."""
        self._store.set(f"outcome/{self._runs - 1}/{self.rank}", json.dumps(succeeded))

    def failed(self, rank: int, timeout: timedelta = OUTCOME_TIMEOUT) -> bool:
        """Whether the current run ended in an error on that rank. If not, it may wait for ranks that gave up."""
        key = f"outcome/{self._runs - 1}/{rank}"
        try:
            self._store.wait([key], timeout)
        except RuntimeError:
            return False
        return json.loads(self._store.get(key)) is False

    def everyone_failed(self, timeout: timedelta = OUTCOME_TIMEOUT) -> bool:
        return all(self.failed(rank, timeout) for rank in range(self._size))

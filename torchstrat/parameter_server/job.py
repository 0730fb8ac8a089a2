"""The coordinator's hold on one job: its servers, what they were given, and when the two sides are made equal."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchstrat.checkpoint.pieces import is_block
from torchstrat.checkpoint.remote import RemoteVariable
from torchstrat.core import terminal
from torchstrat.core._torch_private import DisableTorchFunctionSubclass
from torchstrat.core.errors import (
    CommunicationError,
    ParameterServerUnavailable,
    PeerUnavailableError,
    UnsupportedError,
)
from torchstrat.core.optimizers import Tier, groups_with_wrapped, is_listed, wrapped_by
from torchstrat.core.variables import VariableRegistry
from torchstrat.distributed.cluster import PARAMETER_SERVER
from torchstrat.parameter_server import dispatch
from torchstrat.parameter_server.dispatch import Modes, Options, Report, ServerGone
from torchstrat.parameter_server.interface import Handler, Peer, Task
from torchstrat.parameter_server.membership.membership import Membership
from torchstrat.parameter_server.messages import (
    InitialOp,
    NewOptimizer,
    NewShard,
    Reader,
    ShardKey,
    StateOfShard,
    Token,
    VariableSpec,
    dropped_among,
)
from torchstrat.parameter_server.serialization.captured_objects import Catalog, Lifetimes, token_of_spec
from torchstrat.parameter_server.server.shard_optimizer import pack_optimizer
from torchstrat.parameter_server.variables import remote_access
from torchstrat.parameter_server.variables.attributes import PlainAttributes
from torchstrat.parameter_server.variables.coordinator_cache import CoordinatorCache
from torchstrat.parameter_server.variables.coordinator_state import CoordinatorState, CoordinatorSteps
from torchstrat.parameter_server.variables.deferred_init import recipe_of
from torchstrat.parameter_server.variables.module_structure import ModuleStructure, StepHooks
from torchstrat.parameter_server.variables.optimizer_state import (
    Kinds,
    has_begun,
    read_state,
    require_growth,
    split_state,
    warn_of_rows,
)
from torchstrat.parameter_server.variables.placement import (
    Partitioner,
    Placement,
    check_places,
    held_bytes,
    pieces,
    seed_of_variable,
)
from torchstrat.parameter_server.variables.program_state import CapturedVariables, Reading, all_options, options_of
from torchstrat.parameter_server.variables.remote_access import CoordinatorSender, ServerGroup, VariableAccess

_SIGN_OF_LIFE_SECONDS = 5.0  # within which a server that a worker cannot reach has to answer the coordinator
_MOST_CUT_OFF = 3


class Job:
    """One strategy's variables on one cluster's servers. Methods are for the coordinator's own thread, but for the
    callbacks of the membership."""

    def __init__(
        self,
        membership: Membership,
        registry: VariableRegistry,
        num_servers: int,
        num_workers: int,
        partitioner: Partitioner | None,
        *,
        rows_only: bool | None = True,
        kinds: Kinds | None = None,
        timeout_seconds: float,
    ) -> None:
        self.membership, self.endpoint = membership, membership.endpoint
        self.num_servers, self.num_workers = num_servers, num_workers
        self.servers = ServerGroup(self.endpoint, timeout_seconds=timeout_seconds)
        sender = CoordinatorSender(self.endpoint.peer.incarnation)
        self.access = VariableAccess(self.servers, lambda: sender)
        self.placement = Placement(num_servers, partitioner)
        self.kinds = kinds or Kinds()
        self.lifetimes = Lifetimes()
        self.cache = CoordinatorCache(self.access, lambda: self.seed, timeout_seconds)
        own = self.variables = CapturedVariables(registry, self.placement, self.kinds, self.cache, self.lifetimes.died)
        self.catalog = Catalog(registry, own.spec_of, self.lifetimes, own.at, own.shown_by)
        self.first_function = 0  # numbers below were used by an earlier coordinator of the same servers
        self.on_worker_lost: Callable[[Peer, str], None] = lambda peer, reason: None
        self.on_server_lost: Callable[[ParameterServerUnavailable], None] = lambda error: None
        self.on_worker_leaves: Callable[[Peer], int] = lambda peer: 0
        self.on_outcomes: Callable[[Peer, Report], None] = lambda peer, report: None
        self.on_close: Callable[[], None] = lambda: None
        self.left_gradients: Callable[[Sequence[int]], set[int]] = lambda numbers: set()
        self.is_open = True
        self._registry = registry
        self._structure, self._step_hooks = ModuleStructure(self.catalog.reach.named_files), StepHooks()
        self._rows_only, self._warns_of_rows = rows_only is not False, rows_only is None
        self.seed = torch.initial_seed()
        """Of the program, at the end of its last scope; random numbers of functions come from it."""
        self.functions_elsewhere = 0
        """What to add to a function's number for its place in the training, which a restored checkpoint began."""
        self.timeout_seconds = timeout_seconds
        """How long to wait for servers, and for their answers."""
        self._lock = threading.Lock()
        self._joined: dict[int, Peer] = {}
        self._in_use: dict[int, Peer] = {}
        self._takes_over = False  # from a coordinator that was lost: the servers know its variables
        self._lost_servers: set[int] = set()
        self._cut_off: Counter[tuple[Task, Peer | None]] = Counter()
        self._on_worker_joined: Callable[[Peer], None] | None = None
        self._early_workers: list[Peer] = []
        self._optimizers: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._standalone: dict[int, VariableSpec] = {}
        self._default_dtype: torch.dtype | None = None  # as the servers know it
        self._committed = registry.counts
        self._attributes = PlainAttributes(own.shown_by, watches_derived=self.cache.is_on)
        self._settled: tuple[Reading, Options, Modes] | None = None
        self._steps = CoordinatorSteps(self)

    # -- the cluster ------------------------------------------------------------------------------------------------

    def seed_of(self, function: int) -> int:
        """Of the random state that a function runs with, wherever and however often it runs."""
        return hash((self.seed, function + self.functions_elsewhere)) & 0xFFFF_FFFF_FFFF

    def connect(self) -> None:
        """Find all servers. Raises `CommunicationTimeoutError` naming those that are missing."""
        leaves, outcomes = Handler(lambda sender, _: self.on_worker_leaves(sender)), Handler(self._outcomes)
        self.endpoint.serve({"coordinator.worker_leaves": leaves, "coordinator.outcomes": outcomes})
        self.membership.start(self._process_joined, self._process_lost)
        with terminal.shown("waiting for the parameter servers"):
            self.membership.wait_for(self._server_tasks(), self.timeout_seconds)
        self._use_joined_servers()
        if self._takes_over:
            self.first_function = remote_access.retire_earlier_functions(self.servers, self.first_function)

    def take_over_no_more(self) -> None:
        """What is made from now on is new; what an earlier coordinator has left besides goes."""
        if self._takes_over:
            remote_access.release_others(self.servers, {spec.number for spec in self._specs()}, self._optimizers)
            self._takes_over = False

    def _server_tasks(self) -> list[Task]:
        return [Task(PARAMETER_SERVER, index) for index in range(self.num_servers)]

    def readmit_servers(self) -> set[int]:
        """Wait until every server is there, and use the processes that they are now; those that were started again hold
        nothing. Returns which ones were. Raises `CommunicationTimeoutError` naming those that are missing."""
        before = self.server_peers()
        until = time.monotonic() + self.timeout_seconds
        while True:
            with terminal.shown("waiting for parameter servers that were lost"):
                self.membership.wait_for(self._server_tasks(), max(until - time.monotonic(), 0.0))
            self._use_joined_servers()
            try:
                self.servers.ask_all("ps.catalog")
            except ParameterServerUnavailable as error:
                # A worker may have told of a death that has not been noticed here yet.
                if not isinstance(error.__cause__, PeerUnavailableError) or time.monotonic() >= until:
                    raise
                self.membership.give_up(self.server_peers()[error.task.index], str(error.__cause__))
                continue
            return {index for index, peer in self.server_peers().items() if before.get(index) != peer}

    def lost_servers(self) -> list[int]:
        """Which of the servers in use are gone."""
        with self._lock:
            return sorted(self._lost_servers)

    def _use_joined_servers(self) -> None:
        with self._lock:
            self._in_use = {index: self._joined[index] for index in range(self.num_servers)}
            self._lost_servers.clear()
            self._cut_off.clear()
        self.servers.use(self._in_use)

    def server_peers(self) -> Mapping[int, Peer]:
        return self.servers.peers()

    def _process_joined(self, peer: Peer, status: Mapping[str, Any]) -> None:
        if peer.task.job != PARAMETER_SERVER:
            self._worker_joined(peer)
            return
        with self._lock:
            self.first_function = max(self.first_function, int(status.get("next_function", 0)))
            if not self._in_use:  # later, what servers hold is this coordinator's
                self._takes_over |= self.first_function > 0 or int(status.get("variables", 0)) > 0
            self._joined[peer.task.index] = peer
            replaced = self._in_use.get(peer.task.index)
        if replaced is not None and replaced.incarnation != peer.incarnation:
            self._server_lost(replaced, "it was started again")

    def start_workers(self, on_joined: Callable[[Peer], None]) -> None:
        """Tell ``on_joined`` of every worker, also of those that were there before."""
        with self._lock:
            self._on_worker_joined = on_joined
            early, self._early_workers = self._early_workers, []
        for peer in early:
            on_joined(peer)

    def _worker_joined(self, peer: Peer) -> None:
        with self._lock:
            on_joined = self._on_worker_joined
            if on_joined is None:
                self._early_workers.append(peer)
        if on_joined is not None:
            on_joined(peer)

    def _outcomes(self, sender: Peer, report: Report) -> None:
        self.on_outcomes(sender, report)

    def _process_lost(self, peer: Peer, reason: str) -> None:
        if peer.task.job != PARAMETER_SERVER:
            self.on_worker_lost(peer, reason)
        else:
            self._server_lost(peer, reason)

    def _server_lost(self, peer: Peer, reason: str) -> None:
        index = peer.task.index
        with self._lock:
            if self._in_use.get(index) != peer or index in self._lost_servers:
                return
            self._lost_servers.add(index)
        self.servers.mark_lost(index, f"{peer} was lost: {reason}")
        self.on_server_lost(
            ParameterServerUnavailable(
                f"parameter server {index} ({peer}) was lost: {reason}. The variables it held are gone. Start it again "
                "(a launcher does that by itself) and restore a checkpoint with ts.Checkpoint(…).restore.",
                peer.task,
            )
        )

    def fence(self, peer: Peer) -> None:
        """Let the servers refuse what a worker that was given up may still send. Does not wait."""
        for index in self.servers.peers():
            self.servers.send(index, "ps.fence", peer.incarnation)

    def server_gone(self, worker: Peer, gone: ServerGone, then: Callable[[], None]) -> None:
        """A worker says that it has no server ``gone.index`` any more. Does not wait.

        If that server answers here, it is the worker that is cut off: it is given up, to come back with connections of
        its own or to be replaced, and its functions run elsewhere. Otherwise the server is lost, unless it was replaced
        meanwhile, and ``then`` is called after that was told. So is one that the same task, in different processes,
        could not reach `_MOST_CUT_OFF` times: that is how the network is, and somebody has to hear of it.
        """
        with self._lock:
            is_in_use = gone.peer == self._in_use.get(gone.index) and gone.index not in self._lost_servers
            if is_in_use and gone.is_cut_off:
                self._cut_off[worker.task, gone.peer] += 1
            times = self._cut_off[worker.task, gone.peer]
        if not is_in_use or not gone.is_cut_off:
            self._server_is_gone(worker, gone, then)
        elif times >= _MOST_CUT_OFF:
            remark = f", nor could {times - 1} processes of that task before; look at the network between the two"
            self._server_is_gone(worker, gone, then, remark)
        else:
            asked = self.servers.send(gone.index, "ps.catalog", None, _SIGN_OF_LIFE_SECONDS)
            asked.add_done_callback(partial(self._server_answered, worker, gone, then))

    def _server_answered(
        self, worker: Peer, gone: ServerGone, then: Callable[[], None], answered: Future[object]
    ) -> None:
        if answered.exception() is None:
            self.membership.give_up(
                worker, f"it cannot reach parameter server {gone.index}, which answers the coordinator ({gone.reason})"
            )
        else:
            self._server_is_gone(worker, gone, then)

    def _server_is_gone(self, worker: Peer, gone: ServerGone, then: Callable[[], None], remark: str = "") -> None:
        if gone.peer is not None:
            self._server_lost(gone.peer, f"{worker} could not reach it{remark} ({gone.reason})")
        then()

    def close(self, *, finished: bool, brings: bool = False) -> None:
        self.on_close()
        self.is_open = False
        self.cache.close(brings=brings)
        self._steps.close()
        for optimizer in self._registry.optimizers():
            CoordinatorState.detach(optimizer)
        self.membership.close(finished=finished)

    def warn_of_conflicts(self, *, wrote_parameters: bool) -> None:
        """See `CapturedVariables.may_conflict`."""
        if self.variables.may_conflict(wrote_parameters=wrote_parameters):
            found = self.servers.ask_all("ps.take_conflicts").values()
            self.variables.warn_of_conflicts({number for numbers in found for number in numbers})

    def held_bytes(self) -> dict[int, int]:
        """How many bytes of variables each server was given, without the optimizers' state."""
        return held_bytes(self._specs(), self.num_servers)

    # -- giving the servers what is new -----------------------------------------------------------------------------

    def commit(self) -> None:
        """Make the servers know every variable and optimizer of the program, and what it has written to them since."""
        self._structure.check(self._registry.modules())
        self._tell_default_dtype()
        self._commit_new()
        self.variables.follow_replaced()
        self.cache.push_written()
        self._push_states()

    def _commit_new(self) -> None:
        """What servers cannot take is refused in the call that brings it, and is not in the way of later ones."""
        counts = self._registry.counts
        self._forget_dead()
        try:
            self.variables.place_new()
            new = self.variables.to_create()
            if new:
                self._create([self._new_shard(spec, number) for spec in new for number in range(len(spec.shards))])
                self.variables.created(with_these_values=not self._takes_over)
            self._add_optimizers(with_state=not self._takes_over)
        except CommunicationError:  # says nothing about them
            raise
        except Exception:
            self._registry.give_up(self._committed)
            self.variables.give_up_new()
            raise
        self._committed = counts

    def _forget_dead(self) -> None:
        """What the program has dropped is in none of the tables here."""
        if dead := self.lifetimes.take_dead():
            self.catalog.forget(dead)
            dropped = dropped_among(dead)
            self.variables.forget(dropped.variables)
            for number in dropped.variables:
                self._standalone.pop(number, None)
            for number in dropped.optimizers:
                self._optimizers.pop(number, None)

    def let_go(self, values: Collection[object]) -> None:
        """As if the program had dropped these."""
        for optimizer in (value for value in values if isinstance(value, Optimizer)):
            CoordinatorState.detach(optimizer)
        for token in filter(None, [self.catalog.token_of(value) for value in values]):
            self.lifetimes.died(token)
        self.catalog.let_go(values)
        self._forget_dead()

    def release(self, tokens: Iterable[Token]) -> None:
        """Let the servers drop these, which no function names any more. Does not wait."""
        dropped = dropped_among(tokens)
        if dropped.variables or dropped.optimizers:
            for index in self.server_peers():
                self.servers.send(index, "ps.release", dropped)

    def _new_shard(self, spec: VariableSpec, number: int) -> NewShard:
        tensor = self.variables.tensor(spec.number)
        assert tensor is not None
        if tensor.is_meta:
            seed = seed_of_variable(self.seed, spec)
            return NewShard(spec, number, None, recipe_of(tensor, spec.name), seed, self.variables.whole_for(spec))
        if not is_block(tensor):
            what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
            raise UnsupportedError(
                f"{spec.name!r} is {what}, and parameter servers hold dense tensors. Make it dense, or keep it as a "
                "plain attribute of its module, which travels with the functions that use it."
            )
        with DisableTorchFunctionSubclass():  # what is here, not what the servers have
            value = pieces(spec, tensor.detach())[number].to("cpu", copy=True).contiguous()
        return NewShard(spec, number, value, whole_for=self.variables.whole_for(spec))

    def _create(self, shards: Iterable[NewShard]) -> None:
        by_server: dict[int, list[NewShard]] = {index: [] for index in self.server_peers()}
        for new in shards:
            by_server[new.spec.shards[new.shard].server].append(new)
        self.servers.ask("ps.create", {index: of_server for index, of_server in by_server.items() if of_server})

    def add_variable(self, spec: VariableSpec, value: torch.Tensor) -> None:
        """A `ts.Variable`: on the servers from the moment it is made."""
        parts = pieces(spec, value.detach())
        new = [NewShard(spec, number, part.cpu().contiguous()) for number, part in enumerate(parts)]
        self.servers.asking(lambda: self._create(new))
        self._standalone[spec.number] = spec  # only now: a restore meanwhile would make it, of zeros

    def _tell_default_dtype(self) -> None:
        dtype = torch.get_default_dtype()
        if dtype is not self._default_dtype:
            self.servers.ask_all("ps.use_default_dtype", dtype)
            self._default_dtype = dtype

    def _add_optimizers(self, *, with_state: bool) -> None:
        self.catalog.begin()
        for optimizer in self._registry.optimizers():
            number = self._number_of(optimizer)
            groups = tuple(tuple(self.variables.numbers_of(group["params"])) for group in optimizer.param_groups)
            if (known := self._optimizers.get(number)) == groups:
                continue
            require_growth(optimizer, known or (), groups)
            # Its step is made on the servers, which schedulers here do not see.
            vars(optimizer)["_opt_called"] = True
            kind = self.kinds.of(optimizer)
            specs = list(self.variables.specs_of(optimizer).values())
            wraps = tuple((self.catalog.token_of(one) or (None, None))[1] for one in wrapped_by(optimizer))
            new = NewOptimizer(number, pack_optimizer(optimizer, kind), groups, self._rows_only, wraps)
            check_places(optimizer, kind, specs)
            if self._warns_of_rows and self.variables.go_by_rows(specs):
                self._warns_of_rows = not warn_of_rows(optimizer, kind)
            self.servers.ask_all("ps.add_optimizer", new)
            self._attributes.note(optimizer)
            for tensor in (one for group in optimizer.param_groups for one in group["params"]):
                self.catalog.refer_to(tensor)  # settings of functions name it, and no module may hold it
            if known is None:
                self._keep_state(optimizer, is_current=not self._takes_over)
                if with_state and has_begun(optimizer, kind):
                    self.push_optimizer(optimizer)
            self._optimizers[number] = groups  # now: what has come half-way comes again

    def _number_of(self, optimizer: Optimizer) -> int:
        token = self.catalog.token_of(optimizer)
        assert token is not None
        return int(token[1])

    def options(self) -> Options:
        optimizers = [(self._number_of(optimizer), optimizer) for optimizer in self.optimizers()]
        return all_options(optimizers, self.variables.numbers_of)

    # -- giving servers that were started again what they had ---------------------------------------------------------

    def create_missing(self, to_be_restored: Collection[int], started_again: Collection[int]) -> list[str]:
        """Make every server know all variables and optimizers again. One that still does keeps what it has.

        Args:
            to_be_restored: numbers of variables that get their values afterwards; until then they are zeros.
            started_again: servers.

        Returns the names of other variables that were lost: parameters and buffers have the coordinator's values now,
        what it has none of is zeros. Modules' buffers are not named.
        """
        self._forget_dead()
        held = {
            (described["number"], shard)
            for catalog in self.servers.ask_all("ps.catalog").values()
            for described in catalog["variables"]
            for shard in described["held"]
        }
        new, lost = [], []
        never_made = {spec.number for spec in self.variables.to_create()}
        for spec in self._specs():
            missing = [number for number in range(len(spec.shards)) if (spec.number, number) not in held]
            has_value = spec.number not in to_be_restored and self.variables.tensor(spec.number) is not None
            zeros = (InitialOp("zero_", ()),)
            new += [self._new_shard(spec, n) if has_value else NewShard(spec, n, None, zeros) for n in missing]
            if spec.number not in (*to_be_restored, *never_made) and spec.kind != "buffer":
                lost += [spec.name] if any(spec.shards[n].server in started_again for n in missing) else []
        self._create(new)
        self._default_dtype = None
        self._tell_default_dtype()
        self._optimizers.clear()
        self._add_optimizers(with_state=False)
        return lost

    def _specs(self) -> list[VariableSpec]:
        return [*self.variables.specs(), *self._standalone.values()]

    def trained(self) -> list[VariableSpec]:
        """All variables, but for modules' buffers."""
        return [spec for spec in self._specs() if spec.kind != "buffer"]

    def holds(self, spec: VariableSpec) -> bool:
        """Whether a `ts.Variable`'s spec is one of this job's."""
        return self._standalone.get(spec.number) is spec

    def optimizer_number(self, optimizer: Optimizer) -> int | None:
        """What the servers know an optimizer by; None for one that they do not step."""
        return self._number_of(optimizer) if self.parameters_of(optimizer) else None

    def modes(self) -> Modes:
        """Which modules are in training mode and which parameters require gradients, by their tokens; and what else
        functions find as it is here."""
        token_of = self.catalog.token_of
        modules = [(token, one) for one in self._registry.modules() if (token := token_of(one)) is not None]
        modes: dict[Token, object] = dict(self._structure.changed(self.catalog, self.variables.spec_of_buffer))
        modes |= self._step_hooks.changed(self.catalog, self.optimizers())
        modes |= {token: module.training for token, module in modules}
        own = [one for one in self.optimizers() if not is_listed(type(one))]
        optimizers = [(token, one) for one in own if (token := token_of(one)) is not None]
        modes |= self._attributes.changed([*modules, *optimizers, *self.variables.tensors()])
        modes[dispatch.DEFAULT_DTYPE] = torch.get_default_dtype()
        modes[dispatch.AGGREGATIONS] = self.variables.aggregations()
        modes[dispatch.SHARED] = dict(self.variables.shared)
        modes[dispatch.NUM_WORKERS] = self.num_workers
        return modes | {token_of_spec(spec): tensor.requires_grad for spec, tensor in self.variables.parameters()}

    def read(self) -> Reading:
        """All that `commit`, `options` and `modes` are made of, as it is now."""
        return Reading(self._registry, self.variables, self._attributes, self._structure)

    def known(self, reading: Reading) -> tuple[Options, Modes] | None:
        """`options` and `modes`, where nothing has changed since they were worked out for an equal reading; None where
        everything is to be looked through, beginning with `commit`."""
        settled = self._settled
        if settled is None or not reading.is_same(settled[0]) or not self.catalog.is_up_to_date:
            return None
        return settled[1:]

    def settle(self, reading: Reading) -> tuple[Options, Modes]:
        """`options` and `modes`. ``reading`` was made before the `commit` that has just ended: what has changed since
        then makes the next one another."""
        options, modes = self.options(), {**self.modes(), dispatch.SURROUNDINGS: reading.surroundings}
        self._settled = reading, options, modes
        return options, modes

    # -- reading ----------------------------------------------------------------------------------------------------

    def pull(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Bring the servers' values into the coordinator's copies; for None of all variables, with `pull_options`."""
        self.pull_variables(self.variables.specs() if modules is None else self.variables.specs_under(modules))
        if modules is None:
            self.pull_options(self.optimizers())

    def pull_variables(self, specs: Iterable[RemoteVariable]) -> None:
        """The same for single variables. What the coordinator holds no copy of is left out."""
        self.cache.pull(specs)

    # -- optimizer state --------------------------------------------------------------------------------------------

    def pull_optimizer(self, optimizer: Optimizer) -> None:
        """Bring the state that the servers keep into the coordinator's object, as if it had stepped here."""
        self.pull_options([optimizer])
        if not CoordinatorState.refresh(optimizer):
            self._keep_state(optimizer, is_current=False)

    def push_optimizer(self, optimizer: Optimizer) -> None:
        """Give the servers the state that the coordinator's object holds: none, where it holds none."""
        number, held = self._number_of(optimizer), CoordinatorState.held(optimizer)
        by_server: dict[int, dict[ShardKey, StateOfShard]] = defaultdict(dict)
        for tensor, spec in self.variables.specs_of(optimizer).items():
            for shard, part in enumerate(split_state(spec, held.get(tensor) or {})):
                by_server[spec.shards[shard].server][spec.number, shard] = part
        self.servers.ask("ps.load_optimizer_state", {server: (number, states) for server, states in by_server.items()})
        self._keep_state(optimizer, is_current=True)

    def _keep_state(self, optimizer: Optimizer, *, is_current: bool) -> None:
        """Let ``optimizer.state`` ask the servers; ``is_current``: they have what it holds."""
        if self.cache.is_on and self.variables.specs_of(optimizer):
            CoordinatorState.attach(self, optimizer, is_current=is_current)

    def state_of(self, optimizer: Optimizer) -> dict[torch.Tensor, StateOfShard]:
        """What the servers have of an optimizer."""
        return read_state(self.servers, self._number_of(optimizer), self.variables.specs_of(optimizer))

    def _push_states(self) -> None:
        """Send what the program has changed in ``optimizer.state`` in place, or put in its place."""
        for optimizer in self._registry.optimizers():
            if CoordinatorState.keeps(optimizer):
                CoordinatorState.of(optimizer).push_changed()
            elif self.cache.is_on and self.optimizer_number(optimizer) in self._optimizers:
                self.push_optimizer(optimizer)

    def pull_options(self, optimizers: Iterable[Optimizer], reader: Reader = Reader.PROGRAM) -> None:
        """Bring what steps of the program's own classes have set, in groups and attributes, into the objects here."""
        for optimizer, server in ((one, server) for one in optimizers for server in self._setting_servers(one)):
            own = self._number_of(optimizer), *options_of(optimizer), reader
            groups, attributes = self.servers.ask("ps.optimizer_options", {server: own})[server]
            for group, new in zip(groups_with_wrapped(optimizer)[0], groups, strict=False):
                group.update(new)
            for one, new in zip((optimizer, *wrapped_by(optimizer)), attributes, strict=False):
                self._attributes.take(one, new)

    def push_options(self, optimizer: Optimizer) -> None:
        """Give the servers whose steps set them what is in the groups now."""
        own = self._number_of(optimizer), *options_of(optimizer)
        self.servers.ask("ps.load_optimizer_options", dict.fromkeys(self._setting_servers(optimizer), own))

    def optimizers(self) -> list[Optimizer]:
        return self._registry.optimizers()

    def parameters_of(self, optimizer: Optimizer) -> dict[torch.Tensor, VariableSpec]:
        """Those of an optimizer that the servers step; of another one none."""
        return {} if self.catalog.token_of(optimizer) is None else self.variables.specs_of(optimizer)

    def _setting_servers(self, optimizer: Optimizer) -> set[int]:
        """Where steps of an optimizer may set hyperparameters: at most one."""
        if self.kinds.of(optimizer).tier is not Tier.ALL or self.optimizer_number(optimizer) not in self._optimizers:
            return set()
        return {shard.server for spec in self.variables.specs_of(optimizer).values() for shard in spec.shards}

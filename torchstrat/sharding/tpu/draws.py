"""Random numbers that a step draws: each replica its own, unless the step says where they come from.

The devices have one stream, `RandomStream`, started by ``torch.manual_seed`` as those of other devices are. From it the
lanes draw different numbers. Three things mean that they are to be equal: a variable's first values, a generator that
the step makes for itself, and a seed that the step sets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeGuard

import torch
from torch.nn import functional as F

from torchstrat.core import nest
from torchstrat.core.errors import UnsupportedError
from torchstrat.core.randomness import remember, seedings, state_of, stream_seed
from torchstrat.sharding.tpu.edits import Edits
from torchstrat.sharding.tpu.lanes import Arguments, Options
from torchstrat.sharding.tpu.limits import current_place
from torchstrat.sharding.tpu.number_kinds import members
from torchstrat.sharding.tpu.spmd import SpmdRuntime


class RandomStream:
    """One stream for all lanes, which draw different numbers from it; goes on from run to run, and starts anew when the
    default generator has been seeded, with whatever seed. A seed that only
    ``torch.random.fork_rng`` has put aside finds its stream where it was."""

    def __init__(self, runtime: SpmdRuntime) -> None:
        self._runtime = runtime
        self._states: OrderedDict[int, tuple[int, object, bool]] = OrderedDict()
        """By seed: its epoch, where the stream is, and whether it is one for all replicas."""
        self._outside: object = None
        self._seed = self._seed_within = 0
        self._epoch = 0
        self._host: torch.Tensor | None = None
        self._is_shared = self._is_seeded_within = False

    def begin(self) -> None:
        self._host, self._is_seeded_within = state_of(), False
        self._seed = torch.initial_seed()
        self._epoch = seedings.epoch_of(self._seed, state_of())
        self._outside = self._runtime.random_state()
        known_epoch, state, is_shared = self._states.pop(self._seed, (None, None, False))
        if known_epoch == self._epoch:
            self._is_shared = is_shared
            self._runtime.restore_random_state(state)
        else:
            self._is_shared = False
            self._runtime.seed(stream_seed(self._seed, 0))
        self._mark()

    def _mark(self) -> None:
        self._seed_within = torch.initial_seed()
        seedings.leave(torch.default_generator, state_of())

    def seeded_in_step(self) -> bool:
        """Whether the replicas' streams are one, because a step has seeded them all alike; to ask before each draw.

        Seeding within a step is seeding a replica's stream: the user's generator is as it was when the run is over.
        """
        if torch.initial_seed() != self._seed_within or seedings.is_seeded_since(state_of()):
            self._is_shared = self._is_seeded_within = True
            self._runtime.seed(stream_seed(torch.initial_seed(), 0))
            self._mark()
        return self._is_shared

    def end(self) -> None:
        self.seeded_in_step()  # after the last draw, perhaps
        remember(self._states, self._seed, (self._epoch, self._runtime.random_state(), self._is_shared))
        self._runtime.restore_random_state(self._outside)
        if self._is_seeded_within and self._host is not None:
            torch.default_generator.set_state(self._host)
        seedings.leave(torch.default_generator, state_of())

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Where the streams are, between runs: ``{"lanes": {"now": state, "seed_7": state}}``; empty before the first
        run of a seed."""
        found: dict[str, object] = {}
        for label, seed in seedings.labels():
            epoch, state, _ = self._states.get(seed, (None, None, False))
            if epoch == seedings.epoch_of_known(seed):
                found[label] = state
        return {"lanes": found} if found else {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Go on from there. Where ``state`` is another strategy's, the stream begins with the seed in force."""
        self._states.clear()
        for label, kept in state.get("lanes", {}).items():
            seed = seedings.seed_of(label)
            self._states[seed] = (seedings.epoch_of_known(seed), kept, False)


_FILLS = members("bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_", torch.Tensor)
_INITIALIZED = """
    kaiming_normal_ kaiming_uniform_ normal_ orthogonal_ sparse_ trunc_normal_ uniform_ xavier_normal_ xavier_uniform_
"""
_INITIALIZATIONS = members(_INITIALIZED, torch.nn.init)
_IN_PLACE = _FILLS | _INITIALIZATIONS

_FACTORIES = frozenset((torch.rand, torch.randint, torch.randn, torch.randperm))
_LIKE = frozenset((torch.rand_like, torch.randint_like, torch.randn_like))
_FUNCTIONAL = """
    alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout fractional_max_pool2d
    fractional_max_pool3d gumbel_softmax rrelu scaled_dot_product_attention multi_head_attention_forward
"""
_PLAIN = """
    alpha_dropout bernoulli binomial dropout feature_alpha_dropout feature_dropout multinomial native_dropout normal
    poisson rrelu
"""
_BY_VALUES = members(_FUNCTIONAL, F) | members(_PLAIN, torch) | members("bernoulli multinomial", torch.Tensor)
"""Draws that depend on values, which may differ between replicas."""

_DRAWS = _IN_PLACE | _FACTORIES | _LIKE | _BY_VALUES


Drawing = Callable[..., torch.Tensor]


def is_draw(func: object) -> TypeGuard[Drawing]:
    """Whether ``func`` may draw random numbers, or gives a tensor its first values."""
    return func in _DRAWS or getattr(func, "__module__", None) == "torch.nn.init"


def is_fill(func: object) -> bool:
    """Whether a function that `is_draw` names gives its first argument other values."""
    return func in _IN_PLACE or func not in _DRAWS


def target_of(args: Arguments, kwargs: Options) -> torch.Tensor:
    """What a function that `is_fill` names fills."""
    target = args[0] if args else kwargs["tensor"]
    assert isinstance(target, torch.Tensor)
    return target


def drawn_on(func: Drawing, args: Arguments, kwargs: Options, host: torch.device) -> torch.Tensor:
    """What ``func`` draws on ``host``; what a fill draws, in a tensor of its own."""
    if is_fill(func):
        target = target_of(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "tensor"}
        return func(torch.empty(target.shape, dtype=target.dtype, device=host), *args[1:], **rest)
    if func in _LIKE:
        like = args[0]
        assert isinstance(like, torch.Tensor)
        return func(torch.empty(like.shape, dtype=like.dtype, device=host), *args[1:], **{**kwargs, "device": host})
    if func in _FACTORIES or func is torch.normal:
        return func(*args, **{**kwargs, "device": host})
    return func(*(one.to(host) if isinstance(one, torch.Tensor) else one for one in args), **kwargs)


class Draws:
    """What random functions mean in one pass.

    ``from_outside``: whether the step was given a generator, rather than having made it.
    ``share``: brings a tensor of the host to the devices, for all replicas.
    """

    def __init__(
        self,
        edits: Edits,
        stream: RandomStream,
        share: Callable[[torch.Tensor], torch.Tensor],
        from_outside: Callable[[torch.Generator], bool],
    ) -> None:
        self._lanes, self._edits, self._stream = edits.lanes, edits, stream
        self._share, self._from_outside = share, from_outside

    def call(self, func: Drawing, args: Arguments, kwargs: Options, plainly: Callable[[], object]) -> object:
        """``plainly``: the call as any other is made."""
        generator = kwargs.get("generator")
        if generator is torch.default_generator:  # each replica's own, as where none is named
            del kwargs["generator"]
        elif isinstance(generator, torch.Generator):
            return self._by_generator(func, args, kwargs, generator)
        is_shared = self._stream.seeded_in_step()
        if is_fill(func):
            return self._fill(func, args, kwargs, is_shared)
        if not is_shared or self._lanes.is_inside_transform:
            return plainly()
        if func in _FACTORIES or (func in _LIKE and not self._is_lane(args, kwargs)):
            with self._lanes.left("a random function"):
                return plainly()
        if func in _LIKE:
            like = args[0]
            assert isinstance(like, torch.Tensor)
            with self._lanes.left("a random function"):
                return func(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs)
        if _is_still(func, args, kwargs):
            return plainly()
        raise UnsupportedError(
            f"{_name(func)} after torch.manual_seed in the same step: every replica would draw the same numbers then, "
            f"and here replicas draw for what they have from one stream. It is at {current_place()}. Seed outside of "
            "the step, where each replica gets a stream of its own, or draw with torch.rand(...) and compare."
        )

    def _is_lane(self, args: Arguments, kwargs: object) -> bool:
        return any(self._lanes.is_lane_tensor(one) for one in nest.leaves((list(args), kwargs)))

    def _fill(self, func: Drawing, args: Arguments, kwargs: Options, is_shared: bool) -> torch.Tensor:
        """Random values in place: each replica's own for what the step has made, for all the same else."""
        target = target_of(args, kwargs)
        if self._lanes.is_inside_transform:
            return func(*args, **kwargs)
        if self._lanes.is_lane_tensor(target):
            if not is_shared:
                return func(*args, **kwargs)
            with self._lanes.left("a random function"):
                drawn = drawn_on(func, args, kwargs, target.device)
            with torch.no_grad():
                return target.copy_(drawn)
        if func in _IN_PLACE and not is_shared and self._edits.is_made(target):
            self._edits.make_own(func, target)
            return func(*args, **kwargs)
        with self._lanes.left("a random initialisation"):
            return func(*args, **kwargs)

    def _by_generator(
        self, func: Drawing, args: Arguments, kwargs: Options, generator: torch.Generator
    ) -> torch.Tensor:
        """Drawn on the generator's device, as the numbers are that it is made for. From one that the step was given
        the replicas draw one after the other; one that the step has made is each replica's, at the same place."""
        if func in _BY_VALUES and self._is_lane(args, kwargs):
            raise UnsupportedError(
                f"{_name(func)} with a generator, for values that differ between replicas: its numbers are drawn where "
                f"the generator is, before these values are there. It is at {current_place()}. Leave the generator "
                "out, or draw with torch.rand(shape, generator=generator) and compare."
            )
        target = target_of(args, kwargs) if is_fill(func) else None
        with self._lanes.left("a random function"):
            draw = partial(drawn_on, func, args, kwargs, generator.device)
            is_own = self._from_outside(generator) and (target is None or self._edits.is_made(target))
            drawn = [draw() for _ in self._lanes.active] if is_own else [draw()]
            wanted = kwargs.get("dtype")
            if is_own:
                by_lane = dict(zip(self._lanes.active, drawn, strict=True))
                stacked = torch.stack([by_lane.get(lane, drawn[0]) for lane in range(self._lanes.count)])
                values = self._share(stacked)
            else:
                values = self._share(drawn[0].to(wanted) if isinstance(wanted, torch.dtype) else drawn[0])
        result = self._lanes.hide(values) if is_own else values
        if kwargs.get("requires_grad"):
            result = result.detach()
            self._lanes.behind(result).requires_grad_()
        if target is None:
            return result
        if is_own and not self._lanes.is_lane_tensor(target):
            self._edits.make_own(func, target)
        with torch.no_grad():
            return target.copy_(result)


def _is_still(func: object, args: Arguments, kwargs: Options) -> bool:
    """Whether a function that can draw does not, by its arguments."""
    if kwargs.get("training") is False or (func is F.dropout and args[2:3] == (False,)):
        return True
    places: dict[object, int] = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
    place = places.get(func)
    if place is None:
        return False
    return (args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)) == 0.0


def _name(func: object) -> str:
    return f"{getattr(func, '__name__', func)}"

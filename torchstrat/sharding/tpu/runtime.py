"""torch_xla as an `SpmdRuntime`. The only file that imports it; what it needs is looked up when it is imported.

torch_xla 2.9 is the last release of its line and is built against torch 2.9 alone: with another torch its import fails
in the loader, with names of symbols. That is found out here, from the versions, before anything is loaded.

Double-precision complex numbers on their way from torch_xla's devices to the host.

torch_xla 2.9 copies their real parts and leaves out the imaginary ones, in each of the operations by which a value
reaches the host. They travel as pairs of real numbers here, whoever asks: `.cpu()`, ``state_dict``, ``torch.save``,
printing and checkpoints all end in these operations.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchstrat.core.errors import UnsupportedError
from torchstrat.sharding.grid import REPLICA_AXIS, DeviceGrid, Sharding, logical_axis

_WIDE = torch.complex128


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    """On the host. The operation that copies: below autograd these devices have no views."""
    pairs: torch.Tensor = torch.ops.aten.view_as_real_copy.default(tensor)
    return pairs.cpu()


@lru_cache(maxsize=1)
def mend_complex_downloads() -> torch.library.Library:
    """For the whole process, and once; for all other types the operations are what they were."""
    library = torch.library.Library("aten", "IMPL")
    to_copy, local_scalar, copy = (
        torch.library.get_kernel(f"aten::{name}", "XLA") for name in ("_to_copy", "_local_scalar_dense", "copy_")
    )

    def mended_to_copy(keys: Any, tensor: torch.Tensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
        if tensor.dtype is _WIDE and device is not None and device.type == "cpu":
            return torch.view_as_complex(_pairs(tensor)).to(_WIDE if dtype is None else dtype)
        return to_copy.call_boxed(keys, tensor, dtype=dtype, device=device, **rest)

    def mended_local_scalar(keys: Any, tensor: torch.Tensor) -> object:
        if tensor.dtype is _WIDE:
            return complex(*_pairs(tensor).flatten().tolist())
        return local_scalar.call_boxed(keys, tensor)

    def mended_copy(keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> object:
        if source.dtype is _WIDE and source.device.type == "xla" and target.device.type == "cpu":
            return target.copy_(torch.view_as_complex(_pairs(source)))
        return copy.call_boxed(keys, target, source, non_blocking)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced, which is the point
        library.impl("_to_copy", mended_to_copy, "XLA", with_keyset=True)
        library.impl("_local_scalar_dense", mended_local_scalar, "XLA", with_keyset=True)
        library.impl("copy_", mended_copy, "XLA", with_keyset=True)
    return library


def _require_matching_versions() -> str:
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            "TPUStrategy needs torch_xla, which is not installed. It exists for torch 2.9: "
            "pip install torch==2.9.0 'torch_xla[tpu]==2.9.0' (without [tpu] on a machine that has no TPU)."
        ) from None
    torch_version = torch.__version__.split("+")[0]
    if version.split(".")[:2] != torch_version.split(".")[:2]:
        raise UnsupportedError(
            f"torch_xla {version} does not work with torch {torch.__version__}: both have to be of one release. "
            f"pip install torch=={'.'.join(version.split('.')[:2])}.0, or another torch_xla."
        )
    return version


_VERSION = _require_matching_versions()

# torch_xla compiles the numbers 0 and 1 into a program and makes all others its inputs. A learning rate that warms up
# from 0 would be compiled again.
os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")


def _look_up(path: str) -> Any:
    try:
        for module in ("torch_xla", "torch_xla.runtime", "torch_xla.distributed.spmd", "torch_xla.debug.metrics"):
            importlib.import_module(module)
        return operator.attrgetter(path)(importlib.import_module("torch_xla"))
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"torchstrat needs torch_xla.{path}, which torch_xla {_VERSION} (with torch {torch.__version__}) does not "
            f"have: {error}. torchstrat supports torch_xla 2.9."
        ) from error


_use_spmd: Callable[[], None] = _look_up("runtime.use_spmd")
_is_spmd: Callable[[], bool] = _look_up("runtime.is_spmd")
_device_count: Callable[[], int] = _look_up("runtime.global_runtime_device_count")
_device_attributes: Callable[[], list[Mapping[str, Any]]] = _look_up("runtime.global_runtime_device_attributes")
_process_count: Callable[[], int] = _look_up("runtime.process_count")
_device: Callable[[], torch.device] = _look_up("device")
_sync: Callable[..., None] = _look_up("sync")
_set_seed: Callable[[int, str], None] = _look_up("_XLAC._xla_set_rng_seed")
_get_seed: Callable[[str], int] = _look_up("_XLAC._xla_get_rng_seed")
_mesh: Callable[..., Any] = _look_up("distributed.spmd.Mesh")
_op_sharding: Callable[..., Any] = _look_up("distributed.spmd.Mesh.get_op_sharding")
_mark: Callable[[torch.Tensor, Any], None] = _look_up("_XLAC._xla_mark_sharding")
_wait_for_programs: Callable[[list[str]], None] = _look_up("_XLAC._xla_wait_device_ops")
_clear: Callable[[torch.Tensor], None] = _look_up("_XLAC._xla_clear_sharding")
_spec_of: Callable[[torch.Tensor], str] = _look_up("_XLAC._get_xla_sharding_spec")
_from_shards: Callable[..., torch.Tensor] = _look_up("_XLAC._global_tensor_from_cpu_shards")
_metric: Callable[[str], Any] = _look_up("debug.metrics.metric_data")


class XlaRuntime:
    """All devices of this process's torch_xla runtime, as one SPMD program sees them. See `SpmdRuntime`.

    Raises:
        UnsupportedError: the process has used autograd before torch_xla's devices were there; there are several hosts.
    """

    def __init__(self) -> None:
        _require_one_host()
        if not _is_spmd():
            _use_spmd()
        self.num_devices = _device_count()
        self.device = _device()
        self.name = f"torch_xla {_VERSION}"
        self._executed = -1
        mend_complex_downloads()
        _require_autograd(self.device)

    @property
    def num_hosts(self) -> int:
        return 1 + max((int(one.get("process_index", 0)) for one in self.device_attributes()), default=0)

    def device_attributes(self) -> list[Mapping[str, Any]]:
        return list(_device_attributes())

    def annotate(self, tensor: torch.Tensor, sharding: Sharding, grid: DeviceGrid) -> None:
        wanted = _compiled_sharding(sharding, grid)
        if _spec_of(tensor):
            _clear(tensor)
        try:
            _mark(tensor, wanted)
        except RuntimeError as error:
            if "Data does not present" not in str(error):
                raise
            _wait_for_programs([])  # the one that computes it still runs
            _mark(tensor, wanted)

    def sharding_of(self, tensor: torch.Tensor) -> str:
        return _spec_of(tensor)

    def place(self, parts: Sequence[torch.Tensor], sharding: Sharding, grid: DeviceGrid) -> torch.Tensor:
        shape = (len(parts), *parts[0].shape)
        own = [part.clone() for part in parts]
        pieces: list[torch.Tensor | None] = [None] * self.num_devices
        for device, (lane, *rest) in sharding.tiles(shape, grid).items():
            pieces[device] = own[lane.start][tuple(rest)].unsqueeze(0).contiguous()
        return _from_shards(pieces, _compiled_sharding(sharding, grid), torch.Size(shape))

    def replicate(self, tensor: torch.Tensor, grid: DeviceGrid) -> torch.Tensor:
        # Not `tensor.to(device)`: while another thread executes, torch_xla 2.9 makes zeros of it.
        whole = Sharding.replicated(tensor.ndim, grid.num_logical_devices)
        own = tensor.clone(memory_format=torch.contiguous_format)
        return _from_shards([own] * self.num_devices, _compiled_sharding(whole, grid), own.shape)

    def execute(self, *, wait: bool = False) -> None:
        _sync(wait=wait)
        self._executed = _traced()

    def has_recorded(self) -> bool:
        return _traced() != self._executed

    def compiles(self) -> int:
        timings = _metric("CompileTime")
        return 0 if timings is None else int(timings[0])

    def seed(self, value: int) -> None:
        _set_seed(value, str(self.device))

    def random_state(self) -> int:
        return _get_seed(str(self.device))

    def restore_random_state(self, state: int) -> None:
        _set_seed(state, str(self.device))

    def tracing(self) -> AbstractContextManager[None]:
        return nullcontext()  # torch_xla records whatever is done with tensors of its device


def _traced() -> int:
    """How many operations torch_xla has ever recorded."""
    timings = _metric("LazyTracing")
    return 0 if timings is None else int(timings[0])


@lru_cache(maxsize=512)
def _compiled_sharding(sharding: Sharding, grid: DeviceGrid) -> object:
    axes = (REPLICA_AXIS, *(logical_axis(index) for index in range(len(sharding.axis_sizes))))
    devices = np.array(grid.devices).reshape(-1)
    mesh = _mesh(devices, (grid.num_replicas, *sharding.axis_sizes), axes)
    spec = tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding.spec)
    return _op_sharding(mesh, spec)


def _require_one_host() -> None:
    hosts = _process_count()
    if hosts > 1:
        raise UnsupportedError(
            f"the TPU spans {hosts} hosts, and TPUStrategy drives the devices of one. Use a slice of one host, or "
            "restrict the job to one with TPU_PROCESS_BOUNDS and TPU_VISIBLE_CHIPS."
        )


def _require_autograd(device: torch.device) -> None:
    """Autograd starts its threads at the first backward pass of a process, one for each kind of device there is then;
    a backward pass on a device that came later fails with an internal error."""
    probe = torch.zeros((), device=device, requires_grad=True)
    try:
        (probe * 1.0).backward()
    except RuntimeError as error:
        if "device_ready_queues" not in str(error):
            raise
        raise UnsupportedError(
            "a backward pass ran in this process before the TPU system was initialized, and PyTorch's autograd does "
            "not take up devices afterwards. Make the TPUStrategy, or call ts.tpu.initialize_tpu_system(), at the "
            "start of the program."
        ) from error


@lru_cache(maxsize=1)
def xla_runtime() -> XlaRuntime:
    """The one runtime of this process. SPMD is a setting of the whole process, and stays."""
    return XlaRuntime()

"""The simulated accelerator of the tests: importing it makes ``torch.device("sim")`` and ``torch.sim`` available.

Its rules are those of CUDA, and what costs on a GPU is counted (:func:`count`). Import it at the top of a module of
tests: with the first backward pass torch starts a thread for each device that it knows by then.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils import backend_registration

SOURCE = Path(__file__).with_name("sim.cpp")
#: Two, so that tensors on different devices of one type can be mixed too.
NUM_DEVICES = 2
_SEED_MASK = 0x5EED


def build() -> Path:
    """Compile the device once per machine, version of torch and version of the source.

    Torch's own loader of extensions would need ninja and the headers of Python; this is one call of the compiler.

    Returns:
        The shared library.

    Raises:
        RuntimeError: If there is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        raise RuntimeError("the simulated accelerator needs a compiler of C++20 on the PATH (Debian: g++)")
    torch_folder = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    flags += [f"-isystem{torch_folder / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    links = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    if sys.platform == "darwin":
        links.append(f"-Wl,-rpath,{torch_folder / 'lib'}")
    key = repr((torch.__version__, compiler, flags, links)).encode() + SOURCE.read_bytes()
    cache = (
        Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions")) / "ctta_accelerator"
    )
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"sim-{hashlib.sha256(key).hexdigest()[:16]}.so"
    with FileLock(f"{library}.lock"):
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            command = [compiler, *flags, str(SOURCE), "-o", str(unfinished), *links]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(
                    f"the simulated accelerator does not compile: {' '.join(command)}\n{done.stderr[-4000:]}"
                )
            unfinished.rename(library)
    return library


def _index(device: "torch.device | str | int | None") -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return torch.accelerator.current_device_index() if index is None else index


class _Module(types.ModuleType):
    """``torch.sim``: what torch and users ask of the module of a device."""

    Stream, Event = torch.Stream, torch.Event

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def _lazy_init() -> None:
        pass

    @staticmethod
    def device_count() -> int:
        return NUM_DEVICES

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def set_device(device: "torch.device | str | int") -> None:
        torch.accelerator.set_device_index(_index(device))

    @staticmethod
    @contextlib.contextmanager
    def device(device: "torch.device | str | int | None") -> Iterator[None]:
        before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(_index(device))
        try:
            yield
        finally:
            torch.accelerator.set_device_index(before)

    @staticmethod
    def get_device_name(device: "torch.device | str | int | None" = None) -> str:
        return f"simulated accelerator {_index(device)}"

    @staticmethod
    def synchronize(device: "torch.device | str | int | None" = None) -> None:
        torch.accelerator.synchronize(_index(device))

    @staticmethod
    def current_stream(device: "torch.device | str | int | None" = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def is_bf16_supported() -> bool:
        return True

    # Random numbers

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(torch.ops.sim.default_generator(index) for index in range(NUM_DEVICES))

    def manual_seed(self, seed: int) -> None:
        self.default_generators[_index(None)].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: "torch.device | str | int | None" = None) -> torch.Tensor:
        return self.default_generators[_index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: "torch.device | str | int | None" = None) -> None:
        self.default_generators[_index(device)].set_state(state)

    # Memory

    @staticmethod
    def memory_allocated(device: "torch.device | str | int | None" = None) -> int:
        return torch.accelerator.memory_allocated(_index(device))

    @staticmethod
    def max_memory_allocated(device: "torch.device | str | int | None" = None) -> int:
        return torch.accelerator.max_memory_allocated(_index(device))

    @staticmethod
    def reset_peak_memory_stats(device: "torch.device | str | int | None" = None) -> None:
        torch.accelerator.reset_peak_memory_stats(_index(device))

    @staticmethod
    def empty_cache() -> None:
        torch.accelerator.empty_cache()

    # As in torch.cuda: that the host waits for the device is ignored (0), a warning (1) or an error (2).

    @staticmethod
    def set_sync_debug_mode(mode: int) -> None:
        torch.ops.sim.set_sync_debug_mode(mode)

    @staticmethod
    def get_sync_debug_mode() -> int:
        return int(torch.ops.sim.get_sync_debug_mode())


#: The module ``torch.sim``, for readers that know the types of torch only.
sim = _Module("torch.sim")


def _register() -> None:
    backend_registration.rename_privateuse1_backend("sim")
    torch.ops.load_library(build())
    torch._register_device_module("sim", sim)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.ops.sim.set_seed_mask(_SEED_MASK)
    torch.ops.sim.register_hooks()


if not hasattr(torch, "sim"):
    _register()


@dataclass
class Counts:
    """What happened on the device.

    Args:
        kernels: How many kernels ran.
        host_reads: How many times the host waited for the device, such as for ``item`` or a copy to the host.
        copies_to_host: How many tensors were copied from the device.
        copies_to_device: How many tensors were copied to the device.
        names: How many kernels ran, by operator.
    """

    kernels: int = 0
    host_reads: int = 0
    copies_to_host: int = 0
    copies_to_device: int = 0
    names: dict[str, int] = field(default_factory=dict, repr=False)


@contextlib.contextmanager
def count() -> Iterator[Counts]:
    """Count what happens on all devices within a block; the numbers are there when it ends."""
    counts = Counts()
    torch.ops.sim.reset_counts()
    try:
        yield counts
    finally:
        counts.kernels, counts.host_reads, counts.copies_to_host, counts.copies_to_device = torch.ops.sim.counts()
        counts.names = dict(torch.ops.sim.kernel_names())


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise a RuntimeError where the host would wait for the device."""
    torch.ops.sim.set_sync_debug_mode(2)
    try:
        yield
    finally:
        torch.ops.sim.set_sync_debug_mode(0)


@contextlib.contextmanager
def no_float64() -> Iterator[None]:
    """Refuse float64 on the device, as MPS does."""
    torch.ops.sim.set_float64(False)
    try:
        yield
    finally:
        torch.ops.sim.set_float64(True)


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Raise torch.OutOfMemoryError where a device would hold more than ``size`` bytes."""
    torch.ops.sim.set_memory_limit(size)
    try:
        yield
    finally:
        torch.ops.sim.set_memory_limit(2**63 - 1)


@contextlib.contextmanager
def numbers_of_cpu() -> Iterator[None]:
    """Let a seed give the CPU's random numbers on the device, where on a GPU it gives others, to compare answers."""
    torch.ops.sim.set_seed_mask(0)
    try:
        yield
    finally:
        torch.ops.sim.set_seed_mask(_SEED_MASK)

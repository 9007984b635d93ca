"""Where a result comes from: versions, threads, and the memory it took."""

import contextlib
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

#: Whatever of these is installed may make a difference.
PACKAGES = ("ctta", "torch", "numpy", "pillow", "timm", "torchvision", "transformers")


def environment(device: torch.device) -> dict[str, Any]:
    """What else a figure depends on, for the record."""
    return {
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class PeakMemory:
    """The most memory used since it was made: of the device where that is CUDA, else of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):  # not Linux, or a sandbox
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak of whatever ran before in this process

    def mib(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) >> 20
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) >> 10
        # Forgets no peak, so that of the whole process so far; bytes on macOS, else KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak >> (20 if platform.system() == "Darwin" else 10)

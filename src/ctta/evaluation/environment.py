"""The environment of a result: versions, device, threads and peak memory."""

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

#: Packages that results may depend on; those that are installed are recorded.
PACKAGES = ("ctta", "torch", "numpy", "pillow", "timm", "torchvision", "transformers")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return what results depend on besides the settings.

    Args:
        device: Device of the network.

    Returns:
        Versions, device, number of threads and operating system; plain JSON.
    """
    return {
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _find_version(name))},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class PeakMemory:
    """The peak memory since construction: of the device if it is CUDA, else of this process.

    Args:
        device: Device of the network.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):  # not Linux, or a sandbox
                Path("/proc/self/clear_refs").write_text("5")  # reset the peak of what ran before in this process

    def read_mib(self) -> int | None:
        """Return the peak in MiB; None where the system does not report it, as on Windows."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) >> 20
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) >> 10
        try:
            import resource
        except ImportError:  # Windows
            return None
        # The peak of the whole process, which cannot be reset; in bytes on macOS, else in KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak >> (20 if platform.system() == "Darwin" else 10)

"""Where a result comes from: versions, threads, and the memory it took."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """What else a figure depends on, for the record."""
    names = ("ctta", "torch", "numpy")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


class PeakMemory:
    """The most memory used since it was made: of the device where that is CUDA, else of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif (switch := Path("/proc/self/clear_refs")).exists():
            switch.write_text("5")  # Linux: forget the peak of whatever ran before in this process

    def mib(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) >> 20
        status = Path("/proc/self/status")
        if status.exists():
            (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            return int(line.split()[1]) >> 10
        import resource  # not on Windows

        # In bytes on macOS, which forgets no peak: there, that of the whole process so far.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20

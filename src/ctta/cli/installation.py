"""What is installed, which devices work, and what is missing, for ``ctta doctor``; needs no extra itself."""

import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ctta
from ctta.core.options import resolve_device
from ctta.data.datasets.cache import cache_dir
from ctta.evaluation.steps import name_device

#: Extras for the development of the library itself, which users need not hear about.
_DEVELOPMENT = ("dev", "docs")
#: Libraries whose networks ``ctta.models.load`` finds by name, if they are installed.
_NETWORKS = {"timm": "timm:NAME", "torchvision": "torchvision:NAME", "transformers": "hf:NAME"}
_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,-]+)\])?(?P<versions>[^;]*)(?:;.*extra == ["'](?P<extra>[\w-]+)["'])?"""
)


@dataclass(frozen=True)
class Requirement:
    """A package that the library or one of its extras needs."""

    name: str
    needed: str  # the versions that are supported, such as ">=2.6"
    installed: str | None
    is_met: bool  # whether the installed version is supported


@dataclass(frozen=True)
class DeviceTest:
    """Whether a method runs on a device."""

    device: str  # such as "cpu" or "cuda:0"
    name: str
    seconds: float | None  # time of one step of TENT on 16 small images; None if it failed
    error: str = ""  # why it failed


@dataclass(frozen=True)
class Installation:
    """The state of an installation."""

    version: str
    folder: str
    python: str
    system: str
    threads: int
    required: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]
    networks: dict[str, str | None]  # versions of the libraries whose networks can be loaded by name
    devices: tuple[DeviceTest, ...]
    cache: str
    can_write_cache: bool

    @property
    def problems(self) -> list[str]:
        """What keeps the library itself from working, and what to do; empty if nothing does."""
        found = [
            f"{each.name} {each.installed or 'is not installed'}, but ctta needs {each.name}{each.needed}: "
            f"pip install '{each.name}{each.needed}'"
            for each in self.required
            if not each.is_met
        ]
        return found + [f"a step on {each.device} failed: {each.error}" for each in self.devices if each.error]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        return {**asdict(self), "problems": self.problems}

    def describe(self) -> str:
        """Return everything as text, with a command for what is missing."""
        return "\n".join(self._describe_lines())

    def _describe_lines(self) -> Iterator[str]:
        yield f"ctta {self.version} in {self.folder}"
        yield f"Python {self.python}, {self.system}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        yield ", ".join(f"{each.name} {each.installed}" for each in self.required)
        yield f"downloads are kept in {self.cache}{'' if self.can_write_cache else ', which cannot be written'}"
        yield ""
        for each in self.devices:
            outcome = f"one step in {1000 * each.seconds:.0f} ms" if each.seconds is not None else "failed"
            yield f"{each.device:14}{outcome} ({each.name})"
        if len(self.devices) == 1:
            yield f"{'accelerator':14}not available"
        yield ""
        for name, requirements in self.extras.items():
            missing = [each.name for each in requirements if not each.is_met]
            status = f"missing {', '.join(missing)}: pip install 'ctta[{name}]'" if missing else "installed"
            yield f"{name:14}{status}"
        for name, installed in self.networks.items():
            status = (
                f"{installed}, networks as {_NETWORKS[name]}" if installed else f"not installed: pip install {name}"
            )
            yield f"{name:14}{status}"
        yield ""
        yield from (f"Problem: {each}" for each in self.problems)
        if not self.problems:
            yield "The library works."


def inspect_installation() -> Installation:
    """Return what is installed, after a step of a method on every device."""
    required, extras = read_requirements()
    cache = cache_dir()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    return Installation(
        version=ctta.__version__,
        folder=str(Path(ctta.__file__).parent),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        required=required,
        extras=extras,
        networks={name: _find_version(name) for name in _NETWORKS},
        devices=tuple(_test_device(device) for device in _find_devices()),
        cache=str(cache),
        can_write_cache=os.access(existing, os.W_OK),
    )


def read_requirements() -> tuple[tuple[Requirement, ...], dict[str, tuple[Requirement, ...]]]:
    """Return what the distribution requires, and each of its extras, with those that an extra includes."""
    plain: dict[str, list[Requirement]] = {"": []}
    includes: dict[str, list[str]] = {}
    for text in metadata.requires("ctta") or ():
        found = _REQUIREMENT.fullmatch(text.strip())
        assert found is not None, text
        extra = found["extra"] or ""
        if found["name"] == "ctta":
            includes.setdefault(extra, []).extend(found["extras"].split(","))
        else:
            plain.setdefault(extra, []).append(_check(found["name"], found["versions"].strip(" ()")))

    def resolve(extra: str) -> dict[str, Requirement]:
        inherited = [resolve(other) for other in includes.get(extra, ())]
        own = {each.name: each for each in plain.get(extra, ())}
        return {name: each for group in (*inherited, own) for name, each in group.items()}

    names = dict.fromkeys([*plain, *includes])
    extras = {name: tuple(resolve(name).values()) for name in names if name and name not in _DEVELOPMENT}
    return tuple(plain[""]), extras


def _check(name: str, needed: str) -> Requirement:
    installed = _find_version(name)
    bounds = re.findall(r">=\s*([\d.]+)", needed)
    is_met = installed is not None and all(_parse(installed) >= _parse(bound) for bound in bounds)
    return Requirement(name, needed, installed, is_met)


def _parse(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _find_devices() -> list[str]:
    accelerator = resolve_device("auto")
    numbers = range(torch.accelerator.device_count() if accelerator != "cpu" else 0)
    return ["cpu", *(f"{accelerator}:{number}" for number in numbers)]


def _test_device(device: str) -> DeviceTest:
    """Adapt the embedded network to images on a device; a failure is the result, whatever its class."""
    name = platform.processor() or "processor" if device == "cpu" else name_device(torch.device(device))
    try:
        model = ctta.Tent(ctta.models.embedded()).to(device)
        x = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
        model(x).cpu()  # which waits until an accelerator is done
        start = time.perf_counter()
        is_finite = bool(model(x).isfinite().all())
    except Exception as error:
        return DeviceTest(device, name, None, f"{type(error).__name__}: {error}")
    if not is_finite:
        return DeviceTest(device, name, None, "the logits are not finite")
    return DeviceTest(device, name, time.perf_counter() - start)

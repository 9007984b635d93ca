"""A folder of small states, one per domain, that one stream learned and others can use."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ctta.core.fingerprints import source_fingerprint
from ctta.core.model import AdaptiveModel
from ctta.core.registry import name_of
from ctta.errors import ConfigError, DamagedCheckpointError
from ctta.io.atomic import atomic_write
from ctta.io.tensors import read_tensors, write_tensors
from ctta.policies.recalling import NONE, DomainMemory, Recall

FORMAT = 1
_METADATA_KEY = "ctta_domain"


class StateLibrary:
    """Norm layers and statistics by domain, in a folder: what one camera learned in fog serves the next.

    Models need the policy :data:`ctta.policies.recall`, which remembers domains and chooses among them. The states of
    several networks and methods can share a folder; each model gets those that fit it.

    Args:
        folder: The folder; created with the first state.

    >>> import ctta, tempfile
    >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    >>> settings = {"policies": [ctta.policies.recall()]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     library = ctta.StateLibrary(folder)
    ...     camera7 = ctta.adapt(net, "tent", **settings)
    ...     logits = camera7(torch.randn(64, 4))
    ...     library.collect(camera7)                             # after the stream, or from time to time
    ...     camera8 = ctta.adapt(net, "tent", **settings)
    ...     library.lend(camera8)                                # before the stream
    1
    1
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"StateLibrary({str(self.folder)!r})"

    def collect(self, model: AdaptiveModel) -> int:
        """Write the domains that a model remembers; they replace those of the folder that look the same.

        Args:
            model: A model with the policy ``recall``, guarded or not.

        Returns:
            How many domains were written.

        Raises:
            ConfigError: If the model has no such policy.
            OSError: If a file cannot be written.
        """
        policy, memory = _find_memory(model)
        if not model.coordinator.is_rank_zero:
            return 0
        slots = [slot for slot in range(policy.num) if memory.counts[slot] > 0]
        old = list(self._read_fitting(model, memory))
        for slot in slots:
            replaced = [
                path for path, tensors in old if policy.is_near(memory, slot, tensors["mean"], tensors["count"])
            ]
            written = self._write(model, memory, slot)
            for path in replaced:
                if path != written:
                    path.unlink(missing_ok=True)
        return len(slots)

    def lend(self, model: AdaptiveModel) -> int:
        """Let a model remember the domains of the folder that fit it, as far as it has room.

        Args:
            model: A model with the policy ``recall``, guarded or not; usually a new one.

        Returns:
            How many domains it got; those that were seen in most images go first.

        Raises:
            ConfigError: If the model has no such policy.
            DamagedCheckpointError: If a file is damaged.
        """
        _, memory = _find_memory(model)
        found = sorted(self._read_fitting(model, memory), key=lambda each: (-float(each[1]["count"]), each[0].name))
        free = [slot for slot, count in enumerate(memory.counts.tolist()) if not count]
        with torch.no_grad():
            for slot, (_, tensors) in zip(free, found, strict=False):
                memory.means[slot], memory.covariances[slot] = tensors["mean"], tensors["covariance"]
                memory.counts[slot], memory.used_at[slot] = tensors["count"], NONE + 1
                for number, learned in enumerate(memory.learned):
                    learned[slot] = tensors[f"learned{number}"]
        return min(len(free), len(found))

    def _write(self, model: AdaptiveModel, memory: DomainMemory, slot: int) -> Path:
        tensors = {
            "mean": memory.means[slot],
            "covariance": memory.covariances[slot],
            "count": memory.counts[slot],
            **{f"learned{number}": learned[slot] for number, learned in enumerate(memory.learned)},
        }
        digest = hashlib.sha256()
        for tensor in tensors.values():
            digest.update(tensor.detach().cpu().double().numpy().tobytes())
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name_of(type(model.unwrapped))}-{digest.hexdigest()[:16]}.safetensors"
        with atomic_write(path, durable=True) as temporary:
            write_tensors(temporary, tensors, _METADATA_KEY, _describe(model, memory))
        return path

    def _read_fitting(self, model: AdaptiveModel, memory: DomainMemory) -> Iterator[tuple[Path, dict[str, Tensor]]]:
        expected = _describe(model, memory)
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                header, tensors = read_tensors(path, _METADATA_KEY)
            except FileNotFoundError:  # another process replaced it
                continue
            if header is None or header.get("format") != FORMAT:
                raise DamagedCheckpointError(f"{path} is not a state of a library of this version: move it elsewhere")
            if header == expected:
                yield path, tensors


def _find_memory(model: AdaptiveModel) -> tuple[Recall, DomainMemory]:
    method = model.unwrapped
    policy = next((policy for policy in method.policies if isinstance(policy, Recall)), None)
    if policy is None:
        raise ConfigError(
            f"{type(method).__name__} does not remember domains: build it with policies=[ctta.policies.recall()], or "
            "--policy recall"
        )
    memory = method.get_submodule("policy_states.recall")
    assert isinstance(memory, DomainMemory)
    return policy, memory


def _describe(model: AdaptiveModel, memory: DomainMemory) -> dict[str, Any]:
    """Return what must agree between the model that learned a state and the one that uses it."""
    return {
        "format": FORMAT,
        "source": source_fingerprint(model.unwrapped.source),
        "method": name_of(type(model.unwrapped)),
        "shapes": [list(learned.shape[1:]) for learned in memory.learned],
    }

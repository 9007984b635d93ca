"""Statistics of source images as a module: selected, verified, saved and loaded."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.fingerprints import fingerprint
from ctta.errors import CheckpointError, ConfigError
from ctta.io.atomic import atomic_write
from ctta.io.tensors import read_tensors, write_tensors

_METADATA_KEY, _FORMAT = "ctta-source-stats", 1
#: Statistics that need the features before the classifier.
_OF_FEATURES = ("class_counts", "class_means", "class_variances", "feature_mean", "feature_variance")


class SourceStats(nn.Module):
    """Statistics of source images, of one network. They are made by :func:`ctta.source_stats`.

    A method keeps a copy of those that it needs as a submodule, so its checkpoints hold them.

    Args:
        tensors: The statistics: ``NAME``, or ``NAME/LAYER`` for those that have one tensor per parameter or layer.
        fingerprint: That of the network.
        num_images: How many images they were computed from.
        is_labeled: Whether the classes are those of given labels, and not of the network's predictions.
        is_verified: Whether the network is known to be the right one.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        fingerprint: str,
        num_images: int,
        is_labeled: bool,
        is_verified: bool = False,
    ) -> None:
        super().__init__()
        self.fingerprint, self.num_images = fingerprint, num_images
        self.is_labeled, self.is_verified = is_labeled, is_verified
        for name, value in tensors.items():
            self.register_buffer(name.replace(".", ":"), value)  # torch allows no dots in the names of buffers

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All statistics by name."""
        return {name.replace(":", "."): value for name, value in self.named_buffers()}

    @property
    def names(self) -> list[str]:
        """The statistics there are, without parameters and layers."""
        return sorted({name.partition("/")[0] for name in self.tensors})

    def __getitem__(self, name: str) -> Tensor:
        """Return one statistic, such as ``stats["class_means"]`` (C, d)."""
        return self.tensors[name]

    def by_name(self, name: str) -> dict[str, Tensor]:
        """Return a statistic that has one tensor per parameter or layer.

        Args:
            name: Such as ``"fisher"`` or ``"layer_inputs.mean"``.

        Returns:
            The tensors by the name of the parameter or layer.
        """
        return {key.partition("/")[2]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}

    def select(self, names: Iterable[str], owner: str) -> Self:
        """Return a copy of some statistics.

        Args:
            names: What is needed.
            owner: Who needs it, for the error.

        Returns:
            Statistics of the same network.

        Raises:
            ConfigError: Some are missing.
        """
        names = set(names)
        if missing := sorted(names - set(self.names)):
            hint = " with head=..., since the head was not found" if names & set(_OF_FEATURES) else ""
            raise ConfigError(f"{owner} needs {', '.join(missing)} of the source images: compute source_stats{hint}")
        chosen = {name: value.clone() for name, value in self.tensors.items() if name.partition("/")[0] in names}
        return type(self)(chosen, **self._facts())

    def verify(self, net: nn.Module) -> None:
        """Raise unless the statistics are of this network.

        Args:
            net: The source network.

        Raises:
            ConfigError: They are of another one.
        """
        if not self.is_verified and self.fingerprint != (found := fingerprint(net)):
            raise ConfigError(
                f"the source_stats are of a network with fingerprint {self.fingerprint}, and this one has {found}: "
                "compute them again with ctta.source_stats(net, batches)"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to a safetensors file with a checksum, completely or not at all.

        Args:
            path: The file, which is replaced if it exists.
        """
        header = {"format": _FORMAT, **self._facts(), "is_verified": False}
        with atomic_write(path) as temporary:
            write_tensors(temporary, self.tensors, _METADATA_KEY, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            path: The file.

        Returns:
            The statistics; a method that takes them checks that they are of its network.

        Raises:
            CheckpointError: The file is damaged, or not one of source statistics.
        """
        header, tensors = read_tensors(path, _METADATA_KEY)
        if not isinstance(header, dict) or header.pop("format", None) != _FORMAT:
            raise CheckpointError(f"{path} does not hold source statistics of this version: run ctta source-stats")
        try:
            return cls(tensors, **header)
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the header of {path} is damaged: {error}") from error

    def to_settings(self) -> dict[str, Any]:
        """Return what a checkpoint says about the statistics beside their tensors, which are part of the stream."""
        layout = [
            [name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in self.tensors.items()
        ]
        return {"layout": layout, **self._facts()}

    @classmethod
    def from_settings(cls, *, layout: Iterable[tuple[str, str, tuple[int, ...]]], **facts: Any) -> Self:
        """Return statistics of zeros, into which a checkpoint's tensors are copied.

        Args:
            layout: Name, dtype and shape of each tensor.
            **facts: The other arguments of the class.

        Returns:
            Statistics that need no further check: a checkpoint is loaded with its own network.
        """
        tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in layout}
        return cls(tensors, **{**facts, "is_verified": True})

    def _facts(self) -> dict[str, Any]:
        names = ("fingerprint", "num_images", "is_labeled", "is_verified")
        return {name: getattr(self, name) for name in names}

    @override
    def __repr__(self) -> str:
        names = self.names if len(self.names) < 4 else [*self.names[:2], "...", self.names[-1]]
        labels = "given labels" if self.is_labeled else "labels of the network"
        return f"SourceStats({self.num_images} images, {labels}: {', '.join(names)})"

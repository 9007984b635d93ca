"""Moving a network to a device that a user named."""

from torch import nn

from ctta.errors import ConfigError


def to_device(net: nn.Module, device: str) -> nn.Module:
    """Move a network to a device; raise :class:`~ctta.errors.ConfigError` if the device cannot be used."""
    try:
        return net.to(device)
    except (RuntimeError, AssertionError) as error:  # torch raises either for a device that is not there
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"cannot use device {device!r}: {reason}; expected a device such as cpu or cuda:0") from error

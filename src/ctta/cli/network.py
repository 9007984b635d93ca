"""The network that a person names."""

from torch import nn

from ctta import models


def load_network(spec: str, device: str) -> nn.Module:
    """The network on the device, or one sentence on what is wrong with either."""
    net = models.load(spec)
    try:
        return net.to(device)
    except (RuntimeError, AssertionError) as error:  # torch has both for a device that is not there
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"the device {device!r} cannot be used: {reason}; expected one such as cpu or cuda:0"
        ) from error

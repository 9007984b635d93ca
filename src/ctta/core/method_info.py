"""What a table of methods says about a method; its author writes it next to the class."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MethodInfo:
    """Facts about a method, for ``ctta methods`` and for tables of results.

    A method declares them as its class attribute ``info``::

        class Tent(AdaptiveModel):
            info = MethodInfo("TENT", paper="Wang et al., ICLR 2021", trains="norm layers", backward_passes=1)

    Attributes:
        title: Name of the method as papers print it; the row of a table.
        paper: Authors, venue and year; empty if there is none.
        trains: What the method changes: ``"nothing"``, ``"norm layers"``, ``"all weights"`` or another short phrase.
        forward_passes: Passes of a batch through a network per step; a text where settings decide, such as
            ``"2 + views"``.
        backward_passes: Backward passes per step.
        num_networks: Copies of the network in memory, the source included.
        needs_source_data: Whether the method needs statistics of source images.
        labels_pixels: Whether the method also adapts networks that label pixels.
        needs_vit: Whether the method adapts vision transformers with a class token only, see :mod:`ctta.nn.vit`.
        starts_random: Whether a new model depends on ``seed``, such as by the first weights of a projector, so that
            results vary with it even without random views.
        is_episodic: Whether every image or batch starts from the source, so that no step lasts.
    """

    title: str
    paper: str = ""
    trains: str = "nothing"
    forward_passes: int | str = 1
    backward_passes: int = 0
    num_networks: int = 1
    needs_source_data: bool = False
    labels_pixels: bool = True
    needs_vit: bool = False
    starts_random: bool = False
    is_episodic: bool = False

"""``ctta source-stats``: compute what some methods need of source images."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from ctta.cli.console import exit_on_interrupt, print_text, progress_bar
from ctta.cli.options import DeviceOption, MeanOption, ModelOption, SizeOption, StdOption, load_network
from ctta.data.datasets.clean_images import read_clean_images
from ctta.errors import ConfigError
from ctta.source_stats import source_stats


def compute_source_stats(
    model: ModelOption,
    images: Annotated[
        Path,
        typer.Option(
            help="Read source images from a folder, with or without one subfolder per class, or from an .npz file.",
            metavar="DIR|FILE.npz",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--out", help="Write the statistics to this file.", metavar="FILE.safetensors")
    ],
    labels: Annotated[
        bool,
        typer.Option(
            "--labels", help="Take classes from the labels of the images, not from the network's predictions."
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Use at most N randomly chosen images.", metavar="N")] = 2000,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Read N images at a time; use the number of your application.", metavar="N")
    ] = 200,
    batch_stats: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Normalize by this part of each batch's own statistics, as methods do; 0 for petta, whose source is "
            "the network as it was trained.",
            metavar="FRACTION",
        ),
    ] = 1.0,
    head: Annotated[
        str | None, typer.Option(help="Use this module as the classifier, such as fc. Default: found.", metavar="NAME")
    ] = None,
    size: SizeOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    device: DeviceOption = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Seed the choice of images.", metavar="N")] = 0,
) -> None:
    """Compute statistics of source images for the methods that need them.

    Fisher information, class prototypes and statistics of layers are written
    to one file, which belongs to this network. Give it to a method with
    --set source_stats=FILE, or in Python with ctta.SourceStats.load(FILE).
    """
    clean = read_clean_images(images, size=size, limit=limit, seed=seed)
    if labels and clean.labels is None:
        raise ConfigError(f"{images} has no labels: leave out --labels, or give one subfolder per class")
    net = load_network(model, device, mean, std)
    pixels = torch.from_numpy(clean.images).permute(0, 3, 1, 2)
    given = torch.from_numpy(clean.labels) if labels and clean.labels is not None else None
    with exit_on_interrupt("Nothing was written."), progress_bar("computing") as update:

        def read_batches() -> Iterator[Tensor]:
            num_done = 0
            for part in pixels.split(batch_size):
                update(num_done, len(pixels))
                yield part.float().div(255).to(device)
                num_done += len(part)

        stats = source_stats(net, read_batches(), given, head=head, batch_stats=batch_stats)
    stats.save(output)
    print_text(f"Wrote {', '.join(stats.names)} of {stats.num_images} images to {output}.")

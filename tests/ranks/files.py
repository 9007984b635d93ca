"""Cases: files that several ranks read and write together."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from command_line import write_images
from torch import Tensor

import ctta
from ctta.adapt import adapt_folder
from ctta.adapt import folder as folder_module
from ctta.data.streams import Segment
from ctta.distributed import DistributedError, check_consistent, data_parallel, rank, shard, world_size
from ctta.errors import ConfigError
from ctta.evaluation import BatchRecord
from ctta.evaluation.label_maps import load_label_maps
from ctta.testing import NETWORKS, ContractCase
from ctta.views import multiscale_flip
from ranks import case
from ranks.stream import VIEWS, Stream, make_batch

#: The stream that a world resumes where a world of another size has saved it.
MOVING_STREAM, MOVING_FILE, MOVING_STEPS = Stream(ctta.CoTTA, settings=VIEWS), "stream.safetensors", 3


@case
def a_stream_resumes_on_another_number_of_ranks(folder: Path) -> None:
    """Three steps from wherever the stream is; test_distributed.py checks the end."""
    path = folder / MOVING_FILE
    network = MOVING_STREAM.make_network()
    model = data_parallel(ctta.load(path, network) if path.exists() else MOVING_STREAM.make_model())
    for number in range(model.num_steps, model.num_steps + MOVING_STEPS):
        model(shard(make_batch(number)))
    check_consistent(model)  # so that no rank is still reading the file
    ctta.save(model, path)


@dataclass(frozen=True)
class Scenes:
    """Random scenes with label maps."""

    name: str
    labels = None

    def __len__(self) -> int:
        return 5

    def read(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        generators = [torch.Generator().manual_seed(len(self.name) * 100 + row) for row in rows.tolist()]
        images = [torch.rand(3, 16, 16, generator=generator) for generator in generators]
        maps = [torch.randint(5, (16, 16), generator=generator) for generator in generators]
        return torch.stack(images).double(), torch.stack(maps)


@case
def an_interrupted_evaluation_equals_one_on_a_single_process(folder: Path) -> None:
    segments = [Segment(name, Scenes(name), np.arange(5)) for name in ("fog", "night")]
    scenes = ctta.data.streams.Stream("scenes", segments, batch_size=3)
    stream = Stream(ctta.CoTTA, "segmentation", {"views": multiscale_flip((0.5, 1))})
    own, shared = folder / f"alone-{world_size()}-{rank()}", folder / f"shared-{world_size()}"
    alone = ctta.evaluate(stream.make_model(), scenes, folder=own)

    def interrupt(record: BatchRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ctta.evaluate(data_parallel(stream.make_model()), scenes, folder=shared, on_batch=interrupt)
    result = ctta.evaluate(data_parallel(stream.make_model()), scenes, folder=shared)
    assert result.is_complete and result.mious == alone.mious
    check_consistent(data_parallel(stream.make_model()))  # which also waits until rank 0 has written everything
    saved, expected = (load_label_maps(place, 1).maps for place in (shared, own))
    assert np.array_equal(saved, expected)
    with pytest.raises(ConfigError if rank() == 0 else DistributedError, match="method"):
        ctta.evaluate(data_parallel(ctta.Tent(stream.make_network())), scenes, folder=shared)


@case
def commands_print_on_rank_zero_only(folder: Path) -> None:
    """What they write is compared with a single process by test_distributed.py."""
    from ctta.cli import main

    for name, arguments in json.loads((folder / "commands.json").read_text()).items():
        output = io.StringIO()
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code, ended.value.code
        assert bool(output.getvalue()) == (rank() == 0)
        if rank() == 0:
            (folder / f"{name}.stdout").write_text(output.getvalue())


@case
def images_that_arrive_meanwhile_are_left_for_the_next_call(folder: Path) -> None:
    images, out = folder / f"images-{world_size()}", folder / f"images-{world_size()}.csv"
    if rank() == 0:
        write_images(images, range(3))
    check_consistent(data_parallel(Stream(ctta.Tent).make_model()))  # waits until the images are there
    found = sorted(images.rglob("*.png"))
    with_new = [found[0].with_name("0.png"), *found]  # as if one had arrived after rank 0 listed the folder
    network = ContractCase(ctta.Tent, NETWORKS["batch_norm"], {}).make_network()
    with mock.patch.object(folder_module, "find_images", lambda root: with_new if rank() else found):
        summary = adapt_folder(network, images, out, method="tent")
    assert summary.num_images == 3

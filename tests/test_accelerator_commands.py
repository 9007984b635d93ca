"""Commands on a device that is not the CPU, in 16 bits, with what they write on the CPU; see accelerator/."""

import json
from collections.abc import Iterator
from pathlib import Path

import accelerator
import numpy as np
import pytest
import torch
from command_line import invoke, output, write_network
from safetensors.torch import load_file
from video_clips import draw_frames, read_clip, write_clip

import ctta
from ctta.cli.adapt import adapt
from ctta.cli.advise import advise, certify
from ctta.cli.bench import bench
from ctta.cli.data import compute_source_stats
from ctta.models import Normalized

DEVICES = ("cpu", "auto")
AMP = ("--amp", "bf16")


@pytest.fixture(autouse=True)
def numbers_of_cpu() -> Iterator[None]:
    with accelerator.numbers_of_cpu():
        yield


@pytest.fixture
def common(tmp_path: Path) -> tuple[object, ...]:
    """Return the network, the images and the batch size as options."""
    images = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "clean.npz", images=images, labels=np.arange(40) % 5)
    return ("--model", write_network(tmp_path), "--images", tmp_path / "clean.npz", "--batch-size", 8)


@pytest.mark.parametrize("check", ["--check-normalization", "--any-input"])
@pytest.mark.parametrize("normalization", [(), ("--mean", 0.5, "--std", 0.25)])
def test_advise(common: tuple[object, ...], check: str, normalization: tuple[object, ...], tmp_path: Path) -> None:
    found = []
    for device in DEVICES:
        arguments = (*common, *normalization, "--corruptions", "fog", "--quick", check, "--device", device, *AMP)
        advice = json.loads(output(advise, *arguments, "--out", tmp_path / "ctta.toml", "--json"))
        errors = {row["method"]: (row["error"], row["errors"], row["difference"]) for row in advice["finalists"]}
        found.append((advice["network"], advice["source"]["errors"], errors, advice["recommended"]))
    assert found[0] == found[1] and len(found[0][2]) > 2


def test_certify(common: tuple[object, ...], tmp_path: Path) -> None:
    fast = ("--batch-sizes", "4", "--corruptions", "fog", "--visits", 5, "--seeds", 1, "--limit", 24)
    arguments = (*common, *fast, "--method", "vane")
    found = []
    for device in DEVICES:
        options = ("--device", device, "--out", tmp_path / device, "--any-input", "--json")
        result = invoke(certify, *arguments, *AMP, *options)
        assert result.exit_code in (0, 1), result.output
        certificate = json.loads(result.stdout)
        found.append([certificate[name] for name in ("verdict", "scenarios", "influence")])
    assert found[0] == found[1] and found[0][2]


def test_source_stats(common: tuple[object, ...], tmp_path: Path) -> None:
    for device in DEVICES:
        output(compute_source_stats, *common, "--labels", "--device", device, "--out", tmp_path / device)
    expected, found = (load_file(tmp_path / device) for device in DEVICES)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_bench(common: tuple[object, ...], tmp_path: Path) -> None:
    arguments = ("demo", "--limit", 4, "--batch-size", 4, "--methods", "source,vane", *AMP)
    found = []
    for device in DEVICES:
        lines = output(bench, *arguments, "--out", tmp_path / device, "--device", device, "--json").splitlines()
        found.append([(line["row"], line["errors"]) for line in map(json.loads, lines)])
    assert found[0] == found[1] and len(found[0]) == 2


def test_adapt_video(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mp4", draw_frames(10))
    for device in DEVICES:
        arguments = ("--model", write_network(tmp_path), "--video", clip, "--batch-size", 4, "--compare", *AMP)
        outputs = ("--out", tmp_path / f"{device}.csv", "--annotate", tmp_path / f"{device}.mp4")
        output(adapt, *arguments, *outputs, "--device", device)
    tables = [(tmp_path / f"{device}.csv").read_text() for device in DEVICES]
    assert tables[0] == tables[1]
    expected, found = (read_clip(tmp_path / f"{device}.mp4") for device in DEVICES)
    assert np.array_equal(expected, found)


@pytest.mark.parametrize("batches_on", ["cpu", "sim"])
def test_a_threshold_and_running_statistics_are_of_batches_on_any_device(batches_on: str) -> None:
    net = ctta.models.embedded()
    batches = [torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    expected = ctta.calibrate_threshold(net, batches), ctta.Tent(net).deploy(batches)(batches[0])
    net, moved = net.to("sim"), [x.to(batches_on) for x in batches]
    assert ctta.calibrate_threshold(net, moved) == expected[0]
    assert torch.equal(ctta.Tent(net).deploy(moved)(batches[0].to("sim")).cpu(), expected[1])


def test_a_normalization_is_where_the_network_is() -> None:
    net, x = ctta.models.embedded(), torch.rand(2, 3, 32, 32)
    mean, std = (0.5, 0.4, 0.3), (0.25, 0.2, 0.2)
    expected = Normalized(net, mean, std)(x)
    assert torch.equal(Normalized(net.to("sim"), mean, std)(x.to("sim")).cpu(), expected)


def test_source_statistics_say_which_batch_would_fit() -> None:
    net = ctta.models.embedded().to("sim")
    batches = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0)).split(64)
    limit = torch.accelerator.memory_allocated() + 2**24
    with accelerator.memory_limit(limit):
        with pytest.raises(torch.OutOfMemoryError, match="sim:0 has not enough memory for a batch of 64 ") as found:
            ctta.source_stats(net, batches)
        fitting = int(str(found.value).rpartition(" ")[2])
        assert 1 <= fitting < 64
        ctta.source_stats(net, batches[0].split(fitting))

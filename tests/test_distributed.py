"""Several ranks on one stream give what a single process gives; a lost rank ends the others."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import write_images, write_network
from filelock import FileLock
from ranks.files import MOVING_FILE, MOVING_STEPS, MOVING_STREAM
from ranks.launch import (
    DEVICE_CASES,
    OTHER_DEVICE_CASES,
    PROCESS_CASES,
    TORCHRUN_CASES,
    World,
    run_processes,
    run_with_torchrun,
)
from ranks.stream import make_batch

import ctta
from ctta.cli import main
from ctta.distributed import all_gather, data_parallel, rank, shard, world_size
from ctta.errors import ConfigError
from ctta.evaluation import read_result
from ctta.testing import NETWORKS

CIFAR_NETWORK = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 10))
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that the workers of pytest-xdist share, so that each world runs once."""
    if worker_id == "master":
        return tmp_path_factory.mktemp("ranks")
    path = tmp_path_factory.getbasetemp().parent / "ranks"
    path.mkdir(exist_ok=True)
    return path


def run_once(folder: Path, name: str, run: Callable[[], World]) -> World:
    """Run a world, or return what another worker got from it."""
    path = folder / f"{name}.exit_codes.json"
    with FileLock(folder / f"{name}.lock"):
        if not path.exists():
            path.write_text("[]")  # if it fails here, it is not started again for every case
            path.write_text(json.dumps(run().exit_codes))
        exit_codes = json.loads(path.read_text())
    assert exit_codes, "this world failed in another test"
    return World(folder, exit_codes)


@pytest.fixture(scope="session")
def two_ranks(folder: Path) -> World:
    """Two ranks of torchrun."""

    def run() -> World:
        write_commands(folder)
        return run_with_torchrun(2, folder, TORCHRUN_CASES)

    return run_once(folder, "two", run)


@pytest.fixture(scope="session")
def three_ranks(folder: Path, two_ranks: World) -> World:
    """Three processes, after a single process has continued the stream of the two ranks."""

    def run() -> World:
        path = folder / MOVING_FILE
        alone = ctta.load(path, MOVING_STREAM.make_network())
        for number in range(MOVING_STEPS, 2 * MOVING_STEPS):
            alone(make_batch(number))
        ctta.save(alone, path)
        return run_processes(3, folder)

    return run_once(folder, "three", run)


@pytest.fixture(scope="session")
def two_devices(folder: Path) -> World:
    """Two ranks of torchrun, each with a simulated accelerator."""
    own = folder / "devices"
    own.mkdir(exist_ok=True)

    def run() -> World:
        write_commands(own, device="auto")
        return run_with_torchrun(2, own, DEVICE_CASES, "sim")

    return run_once(own, "two", run)


@pytest.mark.parametrize("name", DEVICE_CASES)
def test_two_devices(two_devices: World, name: str) -> None:
    two_devices.check(name)


@pytest.mark.long
def test_every_method_on_two_devices(tmp_path: Path) -> None:
    world = run_with_torchrun(2, tmp_path, OTHER_DEVICE_CASES, "sim")
    for name in OTHER_DEVICE_CASES:
        world.check(name)


@pytest.mark.parametrize("name", TORCHRUN_CASES)
def test_two_ranks(two_ranks: World, name: str) -> None:
    two_ranks.check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", PROCESS_CASES)
def test_three_ranks(three_ranks: World, name: str) -> None:
    three_ranks.check(name)


@pytest.mark.long
def test_only_the_killed_rank_fails(three_ranks: World) -> None:
    assert three_ranks.exit_codes == [0, 0, -signal.SIGKILL]


@pytest.mark.long
def test_a_stream_moves_between_world_sizes(three_ranks: World) -> None:
    """Two ranks, one process and three ranks have each computed a third of it."""
    resumed = ctta.load(three_ranks.folder / MOVING_FILE, MOVING_STREAM.make_network())
    uninterrupted = MOVING_STREAM.make_model()
    for number in range(3 * MOVING_STEPS):
        uninterrupted(make_batch(number))
    assert resumed.num_steps == 3 * MOVING_STEPS
    for actual, expected in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def bench_arguments(folder: Path, out: str) -> list[str]:
    (folder / "cifar.py").write_text(CIFAR_NETWORK)
    cells = "--methods source,tent --limit 5 --batch-size 3 --threads 1"
    command = f"bench embedded --model file:{folder / 'cifar.py'}:net {cells} --json --out {folder / out}"
    return command.split()


def adapt_arguments(folder: Path, out: str) -> list[str]:
    options = f"--images {folder / 'images'} --batch-size 3 --method tent --compare"
    return f"adapt --model {write_network(folder)} {options} --json --out {folder / out}".split()


def write_commands(folder: Path, device: str = "cpu") -> None:
    """Write the arguments of the commands that the ranks run."""
    write_images(folder / "images", range(5))
    state = ["--state", str(folder / "by-ranks.safetensors")]
    commands = {
        "bench": [*bench_arguments(folder, "bench-by-ranks"), "--device", device],
        "adapt": [*adapt_arguments(folder, "by-ranks.csv"), *state, "--device", device],
    }
    (folder / "commands.json").write_text(json.dumps(commands))


def run_command(arguments: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "exit", lambda *_: None)
        main(arguments)


@pytest.mark.parametrize("world", ["two_ranks", "two_devices"])
def test_bench_by_ranks_equals_bench_by_one_process(world: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(world).folder
    run_command(bench_arguments(folder, "bench-by-one"))
    for cell in sorted((folder / "bench-by-one" / "cells").iterdir()):
        one, ranks = read_result(cell), read_result(folder / "bench-by-ranks" / "cells" / cell.name)
        assert ranks.is_complete and ranks.errors == one.errors
        assert ranks.calibration_error == pytest.approx(one.calibration_error, abs=1e-5)  # networks are in float32
    assert len((folder / "bench.stdout").read_text().splitlines()) == 2


@pytest.mark.parametrize("world", ["two_ranks", "two_devices"])
def test_adapt_by_ranks_equals_adapt_by_one_process(world: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(world).folder
    run_command(adapt_arguments(folder, "by-one.csv"))
    tables = [(folder / f"{name}.csv").read_text().split() for name in ("by-one", "by-ranks")]
    assert len(tables[0]) == 6
    for one, ranks in zip(*([line.split(",") for line in table] for table in tables), strict=True):
        assert ranks[:3] == one[:3]
    network = ctta.models.load(write_network(folder))
    assert ctta.load(folder / "by-ranks.safetensors", network).num_steps == 2


def test_a_single_process_is_a_world_of_one() -> None:
    model, plain = (ctta.Tent(NETWORKS["batch_norm"]()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    assert data_parallel(model) is model and (rank(), world_size()) == (0, 1)
    x = torch.rand(4, 3, 16, 16)
    assert torch.equal(all_gather(model(shard(x))), plain(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"shard": "rows"}, "'batch', 'views'"), ({"check_every": 0}, "check_every must be an integer of at least 1")],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data_parallel(ctta.Tent(NETWORKS["batch_norm"]()), **settings)


def test_models_that_cannot_be_shared() -> None:
    net: Any = NETWORKS["batch_norm"]()
    with pytest.raises(TypeError, match="adaptive model"):
        data_parallel(net)
    untracked = torch.nn.Sequential(torch.nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(ConfigError):
        data_parallel(ctta.Tent(untracked))

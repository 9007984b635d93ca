"""Several ranks on one stream give what one process gives; a rank that is lost ends the others."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import rank_cases
import torch
from command_line import write_images, write_network
from rank_cases import CASES, VIEWS, Stream

import ctta
from ctta.cli import main
from ctta.distributed import all_gather, data_parallel, rank, shard, world_size
from ctta.evaluation.results import read_result
from ctta.testing import NETWORKS, ContractCase

SCRIPT = rank_cases.__file__
#: Nothing but this machine is ever asked, and one thread is enough.
ENVIRONMENT = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
ONLY_BY_TORCHRUN = {"the_command_gives_what_one_process_gives"}
WITHOUT_TORCHRUN = {"a_killed_rank_ends_the_others_with_an_error"}  # torchrun would end the others itself
LONGEST = 600  # seconds; a world that hangs is a failure, on however busy a machine


def by_torchrun(num_ranks: int, folder: Path, *cases: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    ended = subprocess.run(
        [*launcher, SCRIPT, str(folder), *cases], env=ENVIRONMENT, timeout=LONGEST, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def without_torchrun(num_ranks: int, folder: Path, *cases: str) -> list[int]:
    """Exit codes of processes started as torchrun would, but with nobody to end them all when one is lost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(num_ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(folder), *cases],
            env=ENVIRONMENT | place | {"RANK": str(number), "LOCAL_RANK": str(number)},
        )
        for number in range(num_ranks)
    ]
    try:
        return [process.wait(LONGEST) for process in processes]
    finally:
        for process in processes:
            process.kill()


def check(num_ranks: int, folder: Path) -> None:
    for number in range(num_ranks):
        for name, problem in json.loads((folder / f"rank{number}.json").read_text()).items():
            pytest.fail(f"{name} on rank {number} of {num_ranks}:\n{problem}")


def test_two_and_three_ranks_give_what_one_process_gives_and_end_when_one_is_killed(tmp_path: Path) -> None:
    commands = bench_and_adapt(tmp_path)
    by_torchrun(2, tmp_path, *(name for name in CASES if name not in WITHOUT_TORCHRUN))
    check(2, tmp_path)
    check_commands(tmp_path, commands)

    stream, path = Stream(ctta.CoTTA, settings=VIEWS), tmp_path / "stream.safetensors"
    batches = [ContractCase(ctta.CoTTA, NETWORKS["batch_norm"], {}).make_batch(number).double() for number in range(9)]
    alone = ctta.load(path, stream.net())
    for x in batches[3:6]:
        alone(x)
    ctta.save(alone, path)
    codes = without_torchrun(3, tmp_path, *(name for name in CASES if name not in ONLY_BY_TORCHRUN))
    check(3, tmp_path)
    assert codes == [0, 0, -signal.SIGKILL]
    resumed, uninterrupted = ctta.load(path, stream.net()), stream.model()
    for x in batches:
        uninterrupted(x)
    assert resumed.num_steps == 9
    for ours, theirs in zip(resumed.parameters(), uninterrupted.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def bench_and_adapt(folder: Path) -> dict[str, list[str]]:
    """The commands' words by name; noted for the ranks, and to be run by this process too."""
    write_images(folder / "pictures", range(5))
    model = write_network(folder)
    cells = "--methods source,tent --limit 5 --batch-size 3 --threads 1"
    bench = f"bench embedded --model {network_for_cifar(folder)} {cells}"
    adapt = f"adapt --model {model} --images {folder / 'pictures'} --batch-size 3 --method tent --compare"
    commands = {"bench": [*bench.split(), "--json", "--out"], "adapt": [*adapt.split(), "--json", "--out"]}
    ranks = {
        "bench": [*commands["bench"], str(folder / "bench-by-ranks")],
        "adapt": [*commands["adapt"], str(folder / "by-ranks.csv"), "--state", str(folder / "by-ranks.safetensors")],
    }
    (folder / "commands.json").write_text(json.dumps(ranks))
    return commands


def network_for_cifar(folder: Path) -> str:
    (folder / "cifar.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def net():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 10))\n"
    )
    return f"file:{folder / 'cifar.py'}:net"


def check_commands(folder: Path, commands: dict[str, list[str]]) -> None:
    for name, place in (("bench", "bench-by-one"), ("adapt", "by-one.csv")):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "exit", lambda *_: None)
            main([*commands[name], str(folder / place)])
    for cell in sorted((folder / "bench-by-one" / "cells").iterdir()):
        one, ranks = read_result(cell), read_result(folder / "bench-by-ranks" / "cells" / cell.name)
        assert ranks.is_complete and ranks.errors == one.errors
        assert ranks.calibration_error == pytest.approx(one.calibration_error, abs=1e-5)  # networks are in float32
    assert len((folder / "bench.printed").read_text().splitlines()) == 2
    tables = [(folder / f"{place}.csv").read_text().split() for place in ("by-one", "by-ranks")]
    assert len(tables[0]) == 6
    for one, ranks in zip(*([line.split(",") for line in table] for table in tables), strict=True):
        assert ranks[:3] == one[:3]
    assert ctta.load(folder / "by-ranks.safetensors", ctta.models.load(write_network(folder))).num_steps == 2


def test_a_process_by_itself_is_a_world_of_one() -> None:
    model, plain = (ctta.Tent(NETWORKS["batch_norm"]()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    assert data_parallel(model) is model and (rank(), world_size()) == (0, 1)
    x = torch.rand(4, 3, 16, 16)
    assert torch.equal(all_gather(model(shard(x))), plain(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"shard": "rows"}, "'batch', 'views'"), ({"check_every": 0}, "check_every must be an integer of at least 1")],
)
def test_mistakes(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_parallel(ctta.Tent(NETWORKS["batch_norm"]()), **settings)
    with pytest.raises(TypeError, match="a model that adapts"):
        data_parallel(NETWORKS["batch_norm"]())
    untracked = torch.nn.Sequential(torch.nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(ValueError, match="keeps no running statistics"):
        data_parallel(ctta.Tent(untracked))

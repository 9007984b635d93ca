"""``ctta data``: what can be downloaded, what is cached, and where."""

import hashlib
import json
from pathlib import Path

import pytest
from command_line import invoke, output, user_error
from download_server import serving

import ctta.benchmark
from ctta.cli import data as module
from ctta.cli.bench import bench
from ctta.cli.data import data
from ctta.data.datasets import DATASETS, Dataset, DownloadError, download, find

CONTENT = b"weights of a network"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CTTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_get_prints_the_path_of_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(CONTENT) as server:
        sha256 = hashlib.sha256(CONTENT).hexdigest()
        dataset = Dataset(server.url, "weights.pt", sha256, size=len(CONTENT), is_archive=False)
        monkeypatch.setitem(DATASETS, "weights", dataset)
        assert output(data, "get", "weights") == f"{cache / 'weights.pt'}\n"
        assert output(data, "get", "weights") == f"{cache / 'weights.pt'}\n"
        assert len(server.requests) == 1
    assert (cache / "weights.pt").read_bytes() == CONTENT
    assert find("weights") == cache / "weights.pt"


def test_get_without_a_sha256_needs_a_decision(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(CONTENT) as server:
        monkeypatch.setitem(DATASETS, "weights", Dataset(server.url, "weights.pt", is_archive=False))
        error = user_error(data, "get", "weights")
        assert "no SHA-256 is known (no checksum at all)" in error and "--insecure" in error
        assert server.requests == [] and not (cache / "weights.pt").exists()
        assert output(data, "get", "weights", "--insecure") == f"{cache / 'weights.pt'}\n"
    assert output(data, "get", "weights") == f"{cache / 'weights.pt'}\n"  # what is there was decided on before


def test_a_benchmark_needs_the_same_decision(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of CIFAR10-C has no SHA-256; the server's file is none either, so that the run ends after it."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    (cache / "cifar10-c").mkdir(parents=True)
    with serving(CONTENT) as server:
        monkeypatch.setitem(DATASETS, "wrn28-10-standard", Dataset(server.url, "weights.pt", is_archive=False))
        error = user_error(bench, "cifar10c", "--download")
        assert "no SHA-256 is known (no checksum at all)" in error and "add --insecure to the command" in error
        assert server.requests == []
        with pytest.raises(DownloadError, match="no SHA-256 is known"):
            ctta.benchmark.run("cifar10c", download=True)
        assert "cifar10-c/labels.npy is missing" in user_error(bench, "cifar10c", "--download", "--insecure")
        assert (cache / "weights.pt").read_bytes() == CONTENT
    assert user_error(bench, "demo", "--insecure").startswith("insecure is about downloads")


def test_list_says_what_is_cached(cache: Path, tmp_path: Path) -> None:
    (cache / "cifar10").mkdir(parents=True)
    text = output(data, "list")
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    cifar = "zenodo.org/records/2535967"
    assert lines["cifar10-c"] == ["2.9", "GB", "CC", "BY", "4.0,", cifar, "sha256", "no"]
    page = "www.cs.toronto.edu/~kriz/cifar.html"
    assert lines["cifar10"] == ["170", "MB", "none", "stated,", page, "sha256", "yes"]
    assert lines["imagenet-c/noise"] == ["about", "21", "GB", "see", "zenodo.org/records/2235448", "md5", "no"]
    weights = "github.com/RobustBench/robustbench"
    assert lines["resnext29-augmix"] == ["about", "28", "MB", "see", weights, "nothing", "no"]
    assert all(dataset.page.startswith("https://") for dataset in DATASETS.values())
    assert all(dataset.size_text for dataset in DATASETS.values())
    assert f"Cache folder: {cache}\nDownload with: ctta data get NAME\n" in text
    rows = {row["name"]: row for row in json.loads(output(data, "list", "--json"))}
    assert list(rows) == list(DATASETS)
    assert rows["cifar10"] == {
        "name": "cifar10",
        "bytes": 170_498_071,
        "license": "none stated",
        "page": "https://www.cs.toronto.edu/~kriz/cifar.html",
        "checksum": "sha256",
        "path": str(cache / "cifar10"),
    }
    assert (rows["cifar10-c"]["bytes"], rows["cifar10-c"]["path"]) == (2_918_471_680, None)
    assert not any(row["path"] for row in json.loads(output(data, "list", "--json", "--cache", tmp_path / "other")))


def test_find_never_downloads_and_says_how_to(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DownloadError, match=r"^cifar10-c \(2.9 GB\) is not in .*cifar10-c is missing\); run: ctta data get cifar10-c$"
    ):
        find("cifar10-c")
    with pytest.raises(DownloadError, match=r"wrn28-10-standard.pt is missing\); run: ctta data get wrn28"):
        find("wrn28-10-standard")
    (tmp_path / "mine" / "imagenet-c" / "blur").mkdir(parents=True)
    assert find("imagenet-c/blur", cache=tmp_path / "mine") == download("imagenet-c/blur", cache=tmp_path / "mine")
    cache.mkdir()
    (cache / "wrn28-10-standard.pt").write_text("<html>")
    with pytest.raises(DownloadError, match="cannot be used: it is a web page"):
        find("wrn28-10-standard")


def test_user_errors_are_one_line(cache: Path) -> None:
    assert user_error(data, "get", "cifar-10").startswith(
        "unknown dataset 'cifar-10' (did you mean 'cifar10'?); expected one of cifar10-c, "
    )
    assert invoke(data, "get").exit_code == 2


def test_ctrl_c_says_how_to_resume(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(name: str, **_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "download", stopped)
    result = invoke(data, "get", "cifar10-c")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Run the same command again to resume." in result.stderr

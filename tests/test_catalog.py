"""Tests of the catalog of downloads, and that importing it needs no network and no extra."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctta.data.datasets import DATASETS, download
from ctta.errors import ConfigError, DownloadError

#: As published by the hosts of the files.
PUBLISHED_MD5 = {
    "cifar10-c": "56bf5dcef84df0e2308c6dcbcbbd8499",
    "cifar100-c": "11f0ed0f1191edbf9fa23466ae6021d3",
    "imagenet-c/noise": "e80562d7f6c3f8834afb1ecf27252745",
    "imagenet-c/blur": "2d8e81fdd8e07fef67b9334fa635e45c",
    "imagenet-c/weather": "33ffea4db4d93fe4a428c40a6ce0c25d",
    "imagenet-c/digital": "89157860d7b10d5797849337ca2e5c03",
    "imagenet-c/extra": "d492dfba5fc162d8ec2c3cd8ee672984",
    "cifar10": "c58f30108f718f92721af3b95e74349a",
}


#: As TensorFlow Datasets and Keras have them.
KNOWN_SHA256 = {
    "cifar10-c": "c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
    "cifar10": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
}


def test_entries() -> None:
    parts = [f"imagenet-c/{part}" for part in ("noise", "blur", "weather", "digital", "extra")]
    checkpoints = ["wrn28-10-standard", "resnext29-augmix"]
    assert list(DATASETS) == ["cifar10-c", "cifar100-c", *parts, "cifar10", *checkpoints]
    assert (
        len({dataset.file for dataset in DATASETS.values()})
        == len({dataset.url for dataset in DATASETS.values()})
        == 10
    )
    assert {name: dataset.md5 for name, dataset in DATASETS.items() if dataset.md5} == PUBLISHED_MD5
    assert {name: dataset.sha256 for name, dataset in DATASETS.items() if dataset.sha256} == KNOWN_SHA256
    for name, dataset in DATASETS.items():
        assert dataset.url.startswith("https://")
        assert (dataset.md5 is None) == (not dataset.is_archive) == (name in checkpoints)
        assert dataset.md5 is None or re.fullmatch("[0-9a-f]{32}", dataset.md5)
    with pytest.raises(
        ConfigError, match=r"unknown dataset 'cifar-10' \(did you mean 'cifar10'\?\); expected one of cifar10-c, "
    ):
        download("cifar-10")


def test_what_cannot_be_verified_is_not_requested(tmp_path: Path) -> None:
    for name, dataset in DATASETS.items():
        if dataset.sha256 is None:
            with pytest.raises(DownloadError, match=r"no SHA-256 is known .*--insecure.*save a copy that you trust as"):
                download(name, cache=tmp_path)


def test_import_needs_neither_network_nor_extra(tmp_path: Path) -> None:
    script = """if True:
        import sys
        def refuse(event, _):
            assert not event.startswith(("socket.connect", "socket.getaddrinfo")), event
        sys.addaudithook(refuse)
        sys.modules["requests"] = sys.modules["rich"] = None
        import ctta.data.datasets
        try:
            ctta.data.datasets.download("cifar10-c")
        except ImportError as error:
            sys.exit(0 if "pip install 'ctta[data]'" in str(error) else 1)
        sys.exit(2)"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CTTA_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)

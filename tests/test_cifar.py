"""Tests of the readers of CIFAR-10-C, CIFAR-100-C and clean CIFAR, also on damaged files."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_data import IMAGES, LABELS, NAMES, create_stream, is_same_batch, write_cifar_batch

from ctta.data.corruptions import corrupt, write_cifar_c
from ctta.data.datasets import CifarC, clean_cifar
from ctta.data.streams import continual, gradual, mixed
from ctta.errors import DataError


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    write_cifar_c(IMAGES, LABELS, tmp_path / "CIFAR-10-C", names=NAMES)
    return tmp_path / "CIFAR-10-C"


def test_cifar_c_reads_what_write_cifar_c_writes(cifar: Path) -> None:
    from_disk, generated = continual(CifarC(cifar), names=NAMES, batch_size=10), create_stream()
    for one, other in zip(from_disk, generated, strict=True):
        assert is_same_batch(one, other)
    weak = continual(CifarC(cifar), names=NAMES, severity=2, batch_size=24)
    expected = corrupt(IMAGES, "contrast", 2)
    torch.testing.assert_close(next(iter(weak)).x, torch.from_numpy(expected).permute(0, 3, 1, 2) / 255)
    scattered = mixed(continual(CifarC(cifar), names=NAMES, batch_size=10))
    for one, other in zip(scattered, mixed(generated), strict=True):
        assert is_same_batch(one, other)


def test_hash_of_cifar_c_depends_on_content_not_location(cifar: Path, tmp_path: Path) -> None:
    before = continual(CifarC(cifar), names=NAMES).hash
    moved = cifar.rename(tmp_path / "elsewhere")
    assert continual(CifarC(moved), names=NAMES).hash == before
    write_cifar_c(255 - IMAGES, LABELS, tmp_path / "negative", names=NAMES)
    np.save(moved / "labels.npy", np.tile(LABELS, 5).astype(np.uint8))
    assert continual(CifarC(moved), names=NAMES).hash == before, "the dtype of labels does not matter"
    changed = np.load(moved / "contrast.npy")
    changed[-1] += 1
    np.save(moved / "contrast.npy", changed)
    assert continual(CifarC(moved), names=NAMES).hash != before
    assert continual(CifarC(tmp_path / "negative"), names=NAMES).hash != before


def test_cifar_c_is_memory_mapped(cifar: Path) -> None:
    domain = CifarC(cifar).domain("contrast", 5)
    assert isinstance(domain.pixels, np.memmap)
    assert not domain.pixels.flags.owndata


def anonymous_kib() -> int:
    """Return the memory of this process that is not backed by a file."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def test_memory_stays_flat_while_reading_mapped_files(tmp_path: Path) -> None:
    """Three hundred batches read 53 MiB of mapped bytes and convert them to 211 MiB of floats."""
    num_images, side = 2000, 32
    np.save(tmp_path / "labels.npy", np.tile(np.arange(num_images) % 10, 5))
    shape = (5 * num_images, side, side, 3)
    stored = np.lib.format.open_memmap(tmp_path / "contrast.npy", "w+", np.uint8, shape)
    stored[:] = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), np.uint8)
    stored.flush()
    del stored
    stream = gradual(CifarC(tmp_path), names=["contrast"], batch_size=60)
    assert len(stream) == 9 * 34
    batches = iter(stream)
    for _ in range(10):
        next(batches)
    before = anonymous_kib()
    highest = max(anonymous_kib() for _ in batches)
    assert highest - before < 16 * 1024


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, images=IMAGES)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "labels.npy").unlink(), "labels.npy is missing"),
        (lambda folder: (folder / "contrast.npy").unlink(), "contrast.npy is missing .* contains brightness, labels"),
        (lambda folder: (folder / "contrast.npy").write_bytes(b"<html>"), "not a .npy file"),
        (lambda folder: (folder / "contrast.npy").write_bytes(b""), "truncated"),
        (lambda folder: truncate(folder / "contrast.npy"), "truncated"),
        (lambda folder: np.save(folder / "contrast.npy", np.zeros((7, 32, 32, 3), np.uint8)), "expected uint8"),
        (lambda folder: np.save(folder / "contrast.npy", np.zeros((120, 32, 32, 3))), "float64"),
        (lambda folder: np.save(folder / "labels.npy", np.zeros(7, int)), "repeated five times"),
        (lambda folder: np.save(folder / "labels.npy", np.zeros(0, int)), "repeated five times"),
        (lambda folder: np.save(folder / "labels.npy", np.arange(120)), "repeated five times"),
        (lambda folder: np.save(folder / "labels.npy", np.tile(LABELS + 0.5, 5)), "as integers"),
        (lambda folder: np.save(folder / "labels.npy", np.int64(3)), r"int64 \(\); expected"),
        (lambda folder: write_npz(folder / "contrast.npy"), "not a .npy file"),
        (lambda folder: write_npz(folder / "labels.npy"), "not a .npy file"),
    ],
)
def test_damaged_cifar_c(cifar: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(cifar)
    with pytest.raises(DataError, match=words) as caught:
        continual(CifarC(cifar), names=NAMES)
    assert f"delete {cifar} and run: ctta data get cifar10-c (2.9 GB) (or cifar100-c)" in str(caught.value)
    assert "ctta corrupt SRC DST" in str(caught.value)


def test_hint_does_not_suggest_to_delete_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ctta data get cifar10-c"):
        CifarC(tmp_path / "nowhere")


def test_clean_cifar_10_and_100(tmp_path: Path) -> None:
    for number in range(1, 6):
        write_cifar_batch(tmp_path / "ten" / f"data_batch_{number}", IMAGES[number : number + 2], [number, 0])
    write_cifar_batch(tmp_path / "ten" / "test_batch", IMAGES[:4], [3, 2, 1, 0])
    images, labels = clean_cifar(tmp_path / "ten")
    assert np.array_equal(images, IMAGES[:4])
    assert labels.tolist() == [3, 2, 1, 0]
    images, labels = clean_cifar(tmp_path / "ten", "train")
    assert images.shape == (10, 32, 32, 3)
    assert labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    write_cifar_batch(tmp_path / "hundred" / "test", IMAGES[:2], [99, 7], key=b"fine_labels")
    images, labels = clean_cifar(tmp_path / "hundred")
    assert np.array_equal(images, IMAGES[:2])
    assert labels.tolist() == [99, 7]


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("owned"),))


def test_damaged_or_malicious_clean_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="ctta data get cifar10"):
        clean_cifar(tmp_path)
    with pytest.raises(DataError):
        clean_cifar(tmp_path, "train")
    path = tmp_path / "test_batch"
    write_cifar_batch(path, IMAGES[:4], [0, 1, 2, 3])
    complete = path.read_bytes()
    for content in (complete[:-200], b"<html>", b"", pickle.dumps({b"data": IMAGES, b"labels": [1]})):
        path.write_bytes(content)
        with pytest.raises(DataError, match="test_batch"):
            clean_cifar(tmp_path)
    path.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(DataError):
        clean_cifar(tmp_path)
    assert not (tmp_path / "owned").exists()

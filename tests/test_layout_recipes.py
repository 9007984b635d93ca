"""Recipes for clean data sets in the layouts in which they are published: ImageNet, CIFAR-100, PACS, Cityscapes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import output, user_error
from PIL import Image
from small_data import IMAGES, labels_of, write_cifar_batch
from torch import nn

from ctta.benchmark import BenchmarkOptions, BenchmarkTask, build_task
from ctta.cli.bench import bench
from ctta.data.datasets import DomainFolders, FolderDataset, clean_cifar
from ctta.data.streams import continual, cyclic, gradual, mixed
from ctta.errors import ConfigError, DataError

NETWORK = """
import torch
from torch import nn

def _build(num_classes):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, num_classes)).eval()

def thousand():
    return _build(1000)

def hundred():
    return _build(100)

def seven():
    return _build(7)

def pixels():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 19, 1)).eval()
"""
WNIDS = [f"n{number:08d}" for number in range(1000)]
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


@pytest.fixture(autouse=True)
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)


def make_task(recipe: str, network: str, **options: Any) -> BenchmarkTask:
    task = build_task(recipe, BenchmarkOptions(model=f"file:net.py:{network}", **options))
    assert task.check_network is not None
    task.check_network(task.make_network())
    return task


def save(path: Path, value: int, size: tuple[int, int] = (40, 32)) -> None:
    """Save an image of one gray level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def label_by_gray(task: BenchmarkTask) -> dict[int, int]:
    """Return the label that each gray level of a clean stream has."""
    return {
        round(float(x.mean()) * 255): int(y)
        for batch in task.make_stream(None)
        for x, y in zip(batch.x, labels_of(batch), strict=True)
    }


def test_imagenet_folders_may_be_named_by_index() -> None:
    """In the order of their names, 10 would come before 2; a part of the classes keeps its labels."""
    for index in (0, 2, 10, 999):
        save(Path("val") / str(index) / "a.png", index % 256)
    task = make_task("imagenet-val", "thousand", data="val", corruptions=("none",))
    assert label_by_gray(task) == {0: 0, 2: 2, 10: 10, 999 % 256: 999}
    assert next(iter(task.make_stream(None))).x.shape == (4, 3, 224, 224)
    save(Path("val/1000/a.png"), 3)
    with pytest.raises(DataError, match="1000 is not among the 1000 given classes"):
        make_task("imagenet-val", "thousand", data="val")


def test_imagenet_folders_may_be_named_by_wordnet_id() -> None:
    for name in WNIDS:
        Path("val", name).mkdir(parents=True)
        Path("val", name, "a.png").write_bytes(b"")
    save(Path("val") / WNIDS[7] / "a.png", 70)
    data = FolderDataset("val", crop=True)
    assert data.labels[[path.parent.name for path in data.paths].index(WNIDS[7])] == 7
    task = build_task("imagenet-val", BenchmarkOptions(data="val", model="file:net.py:thousand"))
    assert len(task.make_stream(None).segments) == 15
    assert task.methods["tent"].settings["optimizer"].keywords["lr"] == 2.5e-4, "the settings for ImageNet"


def test_a_part_of_the_wordnet_ids_needs_the_classes() -> None:
    for name in WNIDS[:3]:
        save(Path("val") / name / "a.png", 9)
    model = ("--model", "file:net.py:thousand", "--corruptions", "none", "--threads", "1", "--methods", "source")
    message = user_error(bench, "imagenet-val", "--data", "val", *model)
    assert "the network has 1000 classes and the images have 3: give --classes FILE" in message
    Path("classes.txt").write_text("\n".join(WNIDS))
    output(bench, "imagenet-val", "--data", "val", *model, "--classes", "classes.txt", "--out", "run")


def cifar100_images() -> tuple[np.ndarray, list[int]]:
    images = np.broadcast_to(np.arange(100, dtype=np.uint8)[:, None, None, None], (100, 32, 32, 3))
    return np.ascontiguousarray(images), list(range(100))


def write_binary(path: Path, images: np.ndarray, *labels: list[int]) -> None:
    """Write records of a byte per label, the fine one last, and 3072 of the image, plane after plane."""
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), 3072)
    np.hstack([np.array(labels, np.uint8).T, planes]).astype(np.uint8).tofile(path)


def write_layout(layout: str) -> Path:
    images, labels = cifar100_images()
    if layout == "python":
        write_cifar_batch(Path("data/cifar-100-python/test"), images, labels, key=b"fine_labels")
        Path("data/cifar-100-python/meta").write_bytes(b"")
    elif layout == "binary":
        write_binary(Path("data/cifar-100-binary/test.bin"), images, [19] * 100, labels)
    else:
        for label in labels:
            for split in ("train", "test"):
                save(Path("data") / split / f"class{label:02d}" / "a.png", label, (32, 32))
    return Path("data")


@pytest.mark.parametrize("layout", ["python", "binary", "folders"])
def test_cifar_100_is_read_in_every_layout(layout: str) -> None:
    task = make_task("cifar100", "hundred", data=str(write_layout(layout)), corruptions=("none",))
    assert label_by_gray(task) == {number: number for number in range(100)}
    assert sum(len(segment.rows) for segment in task.make_stream(None).segments) == 100, "the test images only"


def test_cifar_100_needs_its_own_images_and_a_network_for_them() -> None:
    write_cifar_batch(Path("ten/test_batch"), IMAGES[:4], [3, 2, 9, 0])
    with pytest.raises(DataError, match="labels up to 9: expected CIFAR-100, with labels up to 99"):
        make_task("cifar100", "hundred", data="ten")
    folders = write_layout("folders")
    shutil.rmtree(folders / "test" / "class07")
    with pytest.raises(DataError, match="labels up to 98: expected CIFAR-100"):
        make_task("cifar100", "hundred", data=str(folders))
    shutil.rmtree(folders)
    with pytest.raises(ConfigError, match="the network has 7 classes and the images have 100: give a network"):
        make_task("cifar100", "seven", data=str(write_layout("python")))
    assert build_task("cifar100", BenchmarkOptions()).downloads == ("cifar100", "resnext29-augmix")


def test_clean_cifar_in_its_binary_version() -> None:
    write_binary(Path("ten/test_batch.bin"), IMAGES[:4], [3, 2, 1, 0])
    for number in range(1, 6):
        write_binary(Path(f"ten/data_batch_{number}.bin"), IMAGES[number : number + 2], [number, 0])
    images, labels = clean_cifar("ten")
    assert np.array_equal(images, IMAGES[:4]) and labels.tolist() == [3, 2, 1, 0]
    images, labels = clean_cifar("ten", "train")
    assert np.array_equal(images[2:4], IMAGES[2:4]) and labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    content = Path("ten/test_batch.bin").read_bytes()
    for damaged in (content[:-1], b""):
        Path("ten/test_batch.bin").write_bytes(damaged)
        with pytest.raises(DataError, match=r"test_batch\.bin is missing or truncated"):
            clean_cifar("ten")


@pytest.fixture
def pacs_folder() -> Path:
    for number, domain in enumerate(DOMAINS):
        for label, name in enumerate(PACS_CLASSES):
            if (domain, name) != ("sketch", "dog"):  # a domain may lack a class
                save(Path("PACS") / domain / name / "a.png", 40 * number + label)
    return Path("PACS")


def test_pacs_is_a_stream_of_natural_shifts(pacs_folder: Path) -> None:
    task = make_task("pacs", "seven", data=str(pacs_folder))
    stream = task.make_stream(None)
    assert stream.domains == ["art_painting", "cartoon", "sketch"]
    assert label_by_gray(task) == {
        40 * number + label: label
        for number in (0, 1, 3)
        for label in range(7)
        if (DOMAINS[number], PACS_CLASSES[label]) != ("sketch", "dog")
    }
    assert next(iter(stream)).x.shape == (7, 3, 224, 224)
    assert stream.class_names == PACS_CLASSES


def test_pacs_goes_with_protocols_and_domains_of_choice(pacs_folder: Path) -> None:
    options = {"data": str(pacs_folder), "size": (16, 16)}
    assert make_task("pacs", "seven", **options, protocol="clean").make_stream(None).domains == ["clean"]
    shuffled = make_task("pacs", "seven", **options, protocol="mixed")
    assert shuffled.default_orders == (None,)
    assert {domain for batch in shuffled.make_stream(None) for domain in batch.domains} == set(DOMAINS) - {"photo"}
    chosen = make_task("pacs", "seven", **options, corruptions=("sketch", "none")).make_stream(None)
    assert chosen.domains == ["sketch", "clean"]
    recurring = make_task("pacs", "seven", **options, protocol="recurring,num_visits=2,sampler=iid")
    assert recurring.make_stream(None).domains == ["art_painting", "cartoon", "sketch"] * 2
    with pytest.raises(ConfigError, match="gradual needs corruptions with severities"):
        make_task("pacs", "seven", **options, protocol="gradual").make_stream(None)
    with pytest.raises(ConfigError, match="leave out the option 'orders'"):
        make_task("pacs", "seven", **options).make_stream(0)
    with pytest.raises(DataError, match=r"no domain 'cartoons' .did you mean 'cartoon'"):
        make_task("pacs", "seven", **options, corruptions=("cartoons",)).make_stream(None)
    with pytest.raises(DataError, match="no domain 'photo'; it has dog, elephant"):
        make_task("pacs", "seven", data=str(pacs_folder / "photo"))


def test_domain_folders_are_a_dataset(pacs_folder: Path) -> None:
    data = DomainFolders(pacs_folder, source="cartoon")
    stream = continual(data, batch_size=3)
    assert stream.domains == ["art_painting", "photo", "sketch"]
    assert len(mixed(stream)) == 7
    for protocol in (gradual, cyclic):
        with pytest.raises(ConfigError, match="needs corruptions"):
            protocol(data)


def test_pacs_by_its_command(pacs_folder: Path) -> None:
    arguments = (
        "--data",
        "PACS",
        "--model",
        "file:net.py:seven",
        "--size",
        "16",
        "16",
        "--threads",
        "1",
        "--out",
        "run",
    )
    text = output(bench, "pacs", *arguments, "--methods", "source,bn_stats")
    assert "art  car  ske mean" in text and "BN Stats Adapt" in text
    assert "--model SPEC is missing: ctta bench pacs --data PACS" in user_error(bench, "pacs", "--data", "PACS")


def test_cityscapes_is_corrupted_when_it_is_read() -> None:
    for number in range(2):
        name = f"bonn_00000{number}_000019"
        save(Path(f"CS/leftImg8bit/val/bonn/{name}_leftImg8bit.png"), 90, (64, 32))
        truth = Path(f"CS/gtFine/val/bonn/{name}_gtFine_labelIds.png")
        truth.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((32, 64), 7, np.uint8)).save(truth)
    options = BenchmarkOptions(data="CS", model="file:net.py:pixels", size=(16, 32))
    stream = build_task("cityscapes-c", options).make_stream(None)
    assert len(stream.domains) == 15 and stream.domains[0] == "gaussian_noise 5" and len(stream) == 30
    batch = stream.read_batch(0)
    assert batch.x.shape == (1, 3, 16, 32) and float(batch.x.std()) > 0.05, "noise on a gray image"
    assert labels_of(batch).unique().tolist() == [0] and labels_of(batch).shape == (1, 32, 64)
    arguments = ("--data", "CS", "--model", "file:net.py:pixels", "--size", "16", "32", "--corruptions", "none,fog")
    text = output(bench, "cityscapes-c", *arguments, "--methods", "source,tent", "--threads", "1", "--out", "run")
    assert "mIoU" in text
    message = user_error(bench, "cityscapes-c", "--model", "file:net.py:pixels")
    assert "--data DIR is missing: ctta bench cityscapes-c --data CITYSCAPES" in message


def test_networks_of_the_recipes_are_replaced_by_the_users() -> None:
    """Otherwise a network would be downloaded."""
    assert isinstance(make_network("imagenet-val", "thousand"), nn.Sequential)
    assert make_network("cifar100", "hundred")(torch.rand(1, 3, 32, 32)).shape == (1, 100)


def make_network(recipe: str, network: str) -> nn.Module:
    return build_task(recipe, BenchmarkOptions(data="x", model=f"file:net.py:{network}")).make_network()

"""Recipes: the settings of the paper and its reference implementation, and what a user may change."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import IMAGES, LABELS, labels_of, write_cifar_batch
from torch import nn

import ctta
from ctta.benchmark import BenchmarkOptions, build_task
from ctta.benchmark.recipes.base import apply_changes
from ctta.benchmark.recipes.images import IMAGENET_LIST, every_method
from ctta.data.datasets import ArrayDataset
from ctta.errors import ConfigError, DataError
from ctta.methods import CoTTA
from ctta.models import LOADERS, SlidingWindow
from ctta.views import fast_image_views, image_views


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def read_settings(recipe: str, method: str, **options: object) -> dict[str, object]:
    """Return the hyperparameters of a recipe's method as its model reports them."""
    task = build_task(recipe, BenchmarkOptions(**options))  # type: ignore[arg-type]
    return task.methods[method].build_model(tiny(), seed=7).hyperparameters


def make_optimizer(settings: dict[str, object]) -> torch.optim.Optimizer:
    factory = settings["optimizer"]
    assert callable(factory)
    built: torch.optim.Optimizer = factory([nn.Parameter(torch.zeros(1))])
    return built


@pytest.mark.parametrize(
    ("recipe", "threshold", "restore", "loss"),
    [
        ("cifar10c", 0.92, 0.01, "cross_entropy"),
        ("cifar10c-gradual", 0.92, 0.01, "cross_entropy"),
        ("cifar100c", 0.72, 0.01, "cross_entropy"),
        ("imagenetc", 0.1, 0.001, "symmetric"),
        ("embedded", 0.92, 0.01, "cross_entropy"),
    ],
)
def test_cotta_has_the_settings_of_the_reference_implementation(
    recipe: str, threshold: float, restore: float, loss: str
) -> None:
    settings = read_settings(recipe, "cotta")
    assert (settings["threshold"], settings["restore"], settings["loss"]) == (threshold, restore, loss)
    assert (settings["decay"], settings["seed"], getattr(settings["views"], "num_views", None)) == (0.999, 7, 32)
    assert (settings["gate"], settings["average"], settings["predict_with"]) == ("batch", "logits", "refined")


def test_optimizers_are_those_of_the_reference_implementation() -> None:
    for recipe, method, rate in (("cifar10c", "cotta", 1e-3), ("cifar10c", "tent", 1e-3), ("cifar100c", "tent", 1e-3)):
        optimizer = make_optimizer(read_settings(recipe, method))
        assert type(optimizer) is torch.optim.Adam
        assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (rate, (0.9, 0.999))
    for method, rate in (("cotta", 0.01), ("tent", 2.5e-4), ("pseudo_label", 2.5e-4)):
        optimizer = make_optimizer(read_settings("imagenetc", method))
        assert type(optimizer) is torch.optim.SGD
        assert [optimizer.defaults[key] for key in ("lr", "momentum", "nesterov")] == [rate, 0.9, True]


def test_text_of_the_paper_is_a_preset() -> None:
    settings = read_settings("imagenetc", "cotta", preset="paper")
    assert (settings["gate"], settings["average"], settings["predict_with"]) == ("element", "probabilities", "teacher")
    assert (settings["restore"], settings["loss"]) == (0.01, "cross_entropy")


def test_ablation_adds_one_part_at_a_time() -> None:
    task = build_task("ablation", BenchmarkOptions())
    rows = [task.methods[name].build_model(tiny(), 0).hyperparameters for name in task.default_methods]
    parts = [(bool(row["views"]), row["restore"]) for row in rows]
    assert parts == [(False, 0), (True, 0), (True, 0.01)]
    assert task.default_seeds == (1, 2, 3, 4, 5)


def test_settings_reach_the_method() -> None:
    typed = ("cotta.restore=0.005", "cotta.lr=1e-4", "cotta.views=8", "cotta.gate=element", "imagenetc.lr=1")
    methods = every_method(BenchmarkOptions(), None, cotta={})
    settings = apply_changes(methods, typed[:4])["cotta"].build_model(tiny(), 0).hyperparameters
    assert (settings["restore"], settings["gate"], getattr(settings["views"], "num_views", None)) == (
        0.005,
        "element",
        8,
    )
    assert make_optimizer(settings).defaults["lr"] == 1e-4
    with pytest.raises(ConfigError):
        apply_changes(methods, typed[4:])


def test_learning_rate_keeps_the_other_settings_of_the_optimizer() -> None:
    settings = read_settings("imagenetc", "cotta", settings=("cotta.lr=0.5",))
    optimizer = make_optimizer(settings)
    assert [optimizer.defaults[key] for key in ("lr", "momentum", "nesterov")] == [0.5, 0.9, True]


@pytest.mark.parametrize(
    ("recipe", "options", "segments", "batches"),
    [
        ("demo", {}, 15, 60),
        ("embedded", {}, 15, 150),
        ("embedded", {"limit": 100, "batch_size": 50, "rounds": 10}, 150, 300),
        ("embedded-gradual", {"limit": 20}, 131, 131),
        ("embedded-gradual", {"limit": 20, "preset": "paper"}, 135, 135),
        ("ablation", {}, 15, 150),
    ],
)
def test_length_of_streams(recipe: str, options: dict[str, object], segments: int, batches: int) -> None:
    stream = build_task(recipe, BenchmarkOptions(**options)).make_stream(None)  # type: ignore[arg-type]
    assert (len(stream.segments), len(stream)) == (segments, batches)


@pytest.fixture
def cifar_c(tmp_path: Path) -> Path:
    from ctta.data.corruptions import CORRUPTIONS

    np.save(tmp_path / "labels.npy", np.tile(np.arange(6), 5))
    for name in CORRUPTIONS:
        np.save(tmp_path / f"{name}.npy", np.zeros((30, 32, 32, 3), np.uint8))
    return tmp_path


@pytest.mark.parametrize(("recipe", "segments"), [("cifar10c", 15), ("cifar10c-gradual", 131), ("cifar100c", 15)])
def test_cifar_recipes_read_the_published_folder(cifar_c: Path, recipe: str, segments: int) -> None:
    stream = build_task(recipe, BenchmarkOptions(data=str(cifar_c))).make_stream(3)
    assert len(stream.segments) == segments
    assert stream.read_batch(0).x.shape == (6, 3, 32, 32)
    assert "order=3" in stream.name


@pytest.mark.parametrize(("recipe", "segments"), [("embedded", 15), ("embedded-gradual", 131), ("ablation", 15)])
def test_embedded_recipes_corrupt_the_test_images_of_a_folder(tmp_path: Path, recipe: str, segments: int) -> None:
    write_cifar_batch(tmp_path / "test_batch", IMAGES, [3] * len(IMAGES))
    options = BenchmarkOptions(data=str(tmp_path), batch_size=8)
    stream = build_task(recipe, options).make_stream(None if segments == 15 else 0)
    assert (len(stream.segments), len(stream)) == (segments, 3 * segments)
    assert stream.name.startswith("cifar10-test[")
    batch = stream.read_batch(1)
    corruption, severity = stream.segments[0].domain.split()
    expected = ArrayDataset(IMAGES, LABELS, name="").domain(corruption, int(severity)).read(np.arange(8, 16))[0]
    assert torch.equal(batch.x, expected)
    assert labels_of(batch).tolist() == [3] * 8


def test_embedded_recipes_refuse_the_folder_of_cifar_100(tmp_path: Path) -> None:
    write_cifar_batch(tmp_path / "test", IMAGES, [*range(76, 100)], key=b"fine_labels")
    with pytest.raises(DataError):
        build_task("embedded", BenchmarkOptions(data=str(tmp_path))).make_stream(None)


@pytest.fixture
def imagenet_c(tmp_path: Path) -> Path:
    from ctta.data.corruptions import CORRUPTIONS

    for name in CORRUPTIONS:
        for wnid in ("n01", "n02"):
            folder = tmp_path / name / "5" / wnid
            folder.mkdir(parents=True)
            for number in range(7):
                Image.new("RGB", (224, 224)).save(folder / f"{number}.JPEG")
    return tmp_path


def num_images(recipe: str, folder: Path) -> int:
    return len(build_task(recipe, BenchmarkOptions(data=str(folder))).make_stream(0).segments[0].rows)


def test_imagenet_uses_five_images_per_class_or_the_list(imagenet_c: Path) -> None:
    assert num_images("imagenetc", imagenet_c) == 10
    (imagenet_c / IMAGENET_LIST).write_text("n02/6.JPEG\nn01/0.JPEG\nn01/1.JPEG\n")
    assert num_images("imagenetc", imagenet_c) == 3


def test_unsupported_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cifar10c'"):
        build_task("cifar11c", BenchmarkOptions())


def test_rounds_repeat_the_stream() -> None:
    assert len(build_task("embedded-gradual", BenchmarkOptions(limit=20, rounds=2)).make_stream(0)) == 262


def test_methods_that_draw_random_numbers_have_seeds() -> None:
    methods = build_task("embedded", BenchmarkOptions()).methods
    assert {name for name, spec in methods.items() if spec.is_random} == {
        *("test_aug", "cotta_view_average", "cotta", "cotta_fast", "cotta_official", "cotta_paper"),
        *("rotta", "petta", "note", "sotta", "tribe", "roid", "cmf", "deyo", "santa", "rmt", "petal", "palm", "tea"),
        *("memo", "adacontrast", "foa", "vane", "unmix_tns"),
    }
    assert (
        build_task("embedded", BenchmarkOptions(settings=("cotta_weight_average.restore=0.1",)))
        .methods["cotta_weight_average"]
        .is_random
    )


def test_the_demo_has_a_row_for_what_a_user_gets_who_names_no_method() -> None:
    default = inspect.signature(ctta.adapt).parameters["method"].default
    assert default in build_task("demo", BenchmarkOptions()).default_methods


def test_downloads_are_what_the_user_does_not_provide() -> None:
    assert build_task("cifar10c", BenchmarkOptions()).downloads == ("cifar10-c", "wrn28-10-standard")
    assert build_task("cifar10c", BenchmarkOptions(data="x")).downloads == ("wrn28-10-standard",)
    assert build_task("cifar100c", BenchmarkOptions(model="timm:x")).downloads == ("cifar100-c",)
    assert build_task("imagenetc", BenchmarkOptions(data="x")).downloads == ()


def test_acdc_uses_the_official_preset_for_segmentation() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    row = build_task("acdc", BenchmarkOptions()).methods["cotta"]
    assert repr(row.build_model(net, 0)) == repr(CoTTA.official_segmentation(net))
    paper = build_task("acdc", BenchmarkOptions(preset="paper")).methods["cotta"].build_model(net, 0)
    assert paper.hyperparameters["loss"] == "cross_entropy" and paper.hyperparameters["predict_with"] == "teacher"


def test_acdc_uses_the_sliding_window_of_the_reference_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def load(name: str) -> nn.Module:
        requested.append(name)
        return nn.Conv2d(3, 19, 1)

    monkeypatch.setitem(LOADERS, "hf:NAME", load)
    net = build_task("acdc", BenchmarkOptions()).make_network()
    assert isinstance(net, SlidingWindow) and (net.window, net.stride) == (1024, 768)
    assert requested == ["nvidia/segformer-b5-finetuned-cityscapes-1024-1024"]


def test_acdc_has_the_settings_of_the_reference_implementation() -> None:
    settings = read_settings("acdc", "cotta")
    assert [
        settings[key] for key in ("threshold", "restore", "gate", "average", "loss", "predict_with", "batch_stats")
    ] == [
        0.69,
        0.01,
        "element",
        "probabilities",
        "hard",
        "refined",
        0.0,
    ]
    assert make_optimizer(settings).defaults["lr"] == pytest.approx(6e-5 / 8)
    assert len(settings["views"]) == 14  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        build_task("acdc", BenchmarkOptions()).make_stream(None)


def test_acdc_has_ten_rounds(tmp_path: Path) -> None:
    for condition in ("fog", "night", "rain", "snow"):
        for number in range(2):
            scene, label = (tmp_path / kind / condition / "train/GOPR01" for kind in ("rgb_anon", "gt"))
            scene.mkdir(parents=True, exist_ok=True)
            label.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 36)).save(scene / f"{number}_rgb_anon.png")
            Image.new("L", (64, 36)).save(label / f"{number}_gt_labelTrainIds.png")
    stream = build_task("acdc", BenchmarkOptions(data=str(tmp_path))).make_stream(None)
    assert stream.domains == ["fog", "night", "rain", "snow"] * 10
    assert len(stream) == 80
    assert stream.read_batch(0).x.shape == (1, 3, 540, 960)
    assert len(build_task("acdc", BenchmarkOptions(data=str(tmp_path), limit=1, rounds=2)).make_stream(None)) == 8


def test_fixed_views_cannot_be_replaced_by_random_ones() -> None:
    with pytest.raises(ConfigError):
        build_task("acdc", BenchmarkOptions(settings=("cotta.views=8",)))
    assert build_task("streets", BenchmarkOptions(settings=("cotta.views=0",))).methods["cotta"].settings["views"] == ()


def test_number_of_views_keeps_their_kind() -> None:
    methods = apply_changes(every_method(BenchmarkOptions(), None, cotta={}), ("cotta_fast.views=4", "cotta.views=4"))
    assert methods["cotta_fast"].build_model(tiny(), 0).views == fast_image_views(4)
    assert methods["cotta"].build_model(tiny(), 0).views == image_views(4)

"""Example scenes of a segmentation benchmark: which are chosen, how they are saved, how the report draws them."""

import re
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from random_scenes import FULL, SIZE, NamedScenes, RandomScenes, make_net, make_stream

import ctta
from ctta.benchmark.report.plots import choose_palette, plot_overlays
from ctta.benchmark.report.tables import infer_layout
from ctta.data import streets as synthetic
from ctta.data.datasets import IGNORE_INDEX
from ctta.data.datasets.scenes import CLASS_NAMES
from ctta.data.streams import Segment, Stream
from ctta.evaluation.label_maps import (
    MAX_WIDTH,
    SceneExample,
    load_examples,
    load_label_maps,
    save_example,
    save_examples,
)


def test_best_and_worst_change_are_found(tmp_path: Path) -> None:
    scenes = make_stream(NamedScenes("fog", ignored=(1,)), NamedScenes("night"))
    folders = {name: tmp_path / name for name in ("source", "tent")}
    ctta.evaluate(ctta.Source(make_net()), scenes, folder=folders["source"])
    ctta.evaluate(
        ctta.Tent(make_net(), batch_stats=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=10.0)),
        scenes,
        folder=folders["tent"],
    )
    save_examples("TENT", folders["tent"], folders["source"], scenes, tmp_path / "examples")
    changes: dict[tuple[int, int], float] = {}
    for number in range(len(scenes)):
        before, after = (load_label_maps(folders[name], number).accuracy for name in ("source", "tent"))
        changes |= {(number, row): change for row, change in enumerate(after - before) if change == change}
    assert len(changes) == 9  # one of ten scenes has no labeled pixel
    best, worst = load_examples(tmp_path)
    for example, kind, pick in ((best, "best", max), (worst, "worst", min)):
        number, row = pick(changes, key=lambda scene: changes[scene])
        assert (example.method, example.kind, example.class_names) == ("TENT", kind, NamedScenes.class_names)
        assert example.accuracy_after - example.accuracy_before == pytest.approx(changes[number, row])
        batch = scenes.read_batch(number)
        assert batch.y is not None
        assert (example.domain, example.segment) == (batch.domain, scenes.segment_index(number))
        assert example.stream_hash == scenes.hash
        assert example.truth.tolist() == batch.y[row].tolist()
        assert example.after.tolist() == load_label_maps(folders["tent"], number).maps[row].tolist()
        assert example.image.shape == (*FULL, 3)


def test_unchanged_predictions_have_no_example(tmp_path: Path) -> None:
    for name in ("one", "other"):
        ctta.evaluate(ctta.Source(make_net()), make_stream(), folder=tmp_path / name)
    save_examples("Source", tmp_path / "one", tmp_path / "other", make_stream(), tmp_path / "examples")
    assert load_examples(tmp_path) == []


class LargeScenes(RandomScenes):
    """Scenes whose label maps are wider than an example."""

    def read(self, rows: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().read(rows)
        return x, y.repeat_interleave(50, 1).repeat_interleave(50, 2)


def test_examples_of_large_scenes_are_shrunk(tmp_path: Path) -> None:
    scenes = Stream("large", [Segment("fog", LargeScenes("fog"), np.arange(2))], batch_size=1)
    ctta.evaluate(ctta.Source(make_net()), scenes, folder=tmp_path / "source")
    ctta.evaluate(ctta.BNStats(make_net(), batch_stats=1.0), scenes, folder=tmp_path / "adapted")
    save_examples("BN", tmp_path / "adapted", tmp_path / "source", scenes, tmp_path / "examples")
    examples = load_examples(tmp_path)
    assert examples
    for example in examples:
        assert example.image.shape == (*example.truth.shape, 3) == (round(MAX_WIDTH * SIZE[0] / SIZE[1]), MAX_WIDTH, 3)
        assert any(is_shrunk(example, scenes.read_batch(number).y) for number in range(2))


def is_shrunk(example: SceneExample, labels: torch.Tensor | None) -> bool:
    """Return whether the example shows these labels, which have one class in each of 12x20 patches."""
    assert labels is not None
    centers = labels[0, 25::50, 25::50].numpy()
    height, width = example.truth.shape
    rows, columns = ((np.arange(count) + 0.5) * size / count for count, size in ((12, height), (20, width)))
    return bool((example.truth[np.ix_(rows.astype(int), columns.astype(int))] == centers).all())


def make_example(**changes: object) -> SceneExample:
    classes = np.array([[0, 1], [2, IGNORE_INDEX]], np.uint8)
    image = np.full((2, 2, 3), 100, np.uint8)
    fields = {"method": "CoTTA", "kind": "best", "stream_hash": "0", "domain": "fog", "segment": 4}
    metrics = {"class_names": synthetic.CLASSES, "accuracy_before": 0.25, "accuracy_after": 1.0}
    return SceneExample(**fields | metrics | dict(image=image, truth=classes, before=classes, after=classes) | changes)  # type: ignore[arg-type]


def test_map_is_drawn_in_the_colors_of_its_classes() -> None:
    figure = plot_overlays([make_example()], infer_layout([("fog", "night", "rain", "snow") * 10]))
    image, truth, before, after = figure.axes
    assert image.get_title("left") == "CoTTA, best change: fog, round 2"
    assert [axes.get_xlabel() for axes in figure.axes] == ["image", "labels", "Source, 25.0", "CoTTA, 100.0"]
    for axes in (truth, before, after):
        pixels = np.asarray(axes.images[0].get_array())
        for (row, column), kind in (((0, 0), 0), ((0, 1), 1), ((1, 0), 2)):
            assert pixels[row, column].tolist() == (0.7 * synthetic.PALETTE[kind] + 0.3 * 100).round().tolist()
        assert pixels[1, 1].tolist() == [0, 0, 0]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == list(synthetic.CLASSES)


def test_every_class_has_its_own_color() -> None:
    for names, count in ((synthetic.CLASSES, 9), (CLASS_NAMES, 19), ((), 12)):
        palette = choose_palette(names, count)
        assert palette.shape == (count, 3) and len({tuple(color) for color in palette.tolist()}) == count


def test_classes_without_names_are_drawn() -> None:
    unknown = np.array([[0, 1], [2, 3]], np.uint8)
    figure = plot_overlays([make_example(class_names=(), after=unknown)], infer_layout([("fog",) * 5]))
    assert not figure.legends and np.asarray(figure.axes[3].images[0].get_array())[1, 1].any()


def test_non_finite_predictions_are_black() -> None:
    names = ("road", "sky", "car")
    unknown = np.array([[0, 1], [2, len(names)]], np.uint8)  # as they are saved
    figure = plot_overlays([make_example(class_names=names, after=unknown)], infer_layout([("fog",)]))
    assert not np.asarray(figure.axes[3].images[0].get_array())[1, 1].any()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(names)


def test_example_is_saved_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    save_example(make_example(), folder / "first.npz")
    (example,) = load_examples(tmp_path)
    for name, value in vars(make_example()).items():
        assert np.array_equal(getattr(example, name), value)

    def killed(file: IO[bytes], **arrays: object) -> None:
        assert set(arrays) == set(vars(example))
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", killed)
    with pytest.raises(KeyboardInterrupt):
        save_example(make_example(), folder / "second.npz")
    assert len(load_examples(tmp_path)) == 1


def test_page_loads_no_images_from_elsewhere() -> None:
    templates = Path(ctta.__file__).parent / "benchmark" / "report"
    page = (templates / "base.html").read_text()
    assert all('{% extends "base.html" %}' in (templates / name).read_text() for name in ("page.html", "matrix.html"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

"""Predicted label maps on disk, the scenes that adapting changed most, and how the report shows them."""

import re
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from test_pixel_evaluation import FULL, SIZE, Named, Scenes, cotta, net, stream

import ctta
from ctta import synthetic
from ctta.datasets.base import IGNORE_INDEX
from ctta.datasets.segmentation import CLASS_NAMES
from ctta.evaluation.examples import MAX_WIDTH, SceneExample, load_examples, save_example, save_examples
from ctta.evaluation.label_maps import load_label_maps, save_label_maps, saved_batches
from ctta.report.layout import infer_layout
from ctta.report.overlays import choose_palette, plot_overlays
from ctta.streams import Segment, Stream, rounds


def naive_maps(model: ctta.AdaptiveModel, scenes: Stream) -> list[torch.Tensor]:
    return [torch.nn.functional.interpolate(model(batch.x), FULL, mode="bilinear").argmax(1) for batch in scenes]


def test_maps_of_the_last_round_are_kept(tmp_path: Path) -> None:
    scenes = rounds(stream(), 3)  # of 3 + 3 batches each
    ctta.evaluate(cotta(), scenes, folder=tmp_path)
    assert saved_batches(tmp_path) == list(range(12, 18))
    expected = naive_maps(cotta(), rounds(stream(), 3))
    for number in saved_batches(tmp_path):
        kept, labels = load_label_maps(tmp_path, number), scenes.read_batch(number).y
        assert kept.maps.dtype == np.uint8
        assert kept.maps.tolist() == expected[number].tolist()
        assert labels is not None
        for accuracy, predicted, truth in zip(kept.accuracy, kept.maps, labels.numpy(), strict=True):
            assert accuracy == pytest.approx(float((predicted == truth)[truth != IGNORE_INDEX].mean()))


def test_an_interrupted_evaluation_keeps_the_same_maps(tmp_path: Path) -> None:
    def stop(_record: object) -> None:
        if len(saved_batches(tmp_path / "stopped")) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ctta.evaluate(cotta(), stream(), folder=tmp_path / "stopped", on_batch=stop)
    for folder in ("stopped", "whole"):
        ctta.evaluate(cotta(), stream(), folder=tmp_path / folder)
    assert saved_batches(tmp_path / "stopped") == saved_batches(tmp_path / "whole") == list(range(6))
    for number in range(6):
        stopped, whole = (load_label_maps(tmp_path / folder, number) for folder in ("stopped", "whole"))
        assert np.array_equal(stopped.maps, whole.maps)


def test_answers_that_are_not_finite_have_a_class_of_their_own(tmp_path: Path) -> None:
    model = ctta.Source(net())
    with torch.no_grad():
        model.source[3].bias[0] = torch.nan  # type: ignore[index, union-attr]
    ctta.evaluate(model, stream(), folder=tmp_path)
    kept = load_label_maps(tmp_path, 0)
    assert (kept.maps == 4).all() and (kept.accuracy == 0).all()


def test_labels_of_16_bits_are_compared(tmp_path: Path) -> None:
    logits = torch.eye(3)[None, :, :, None]  # classes 0, 1 and 2 below each other
    labels = torch.tensor([[[0], [2], [IGNORE_INDEX]]])
    save_label_maps(tmp_path, 0, logits, labels.to(torch.uint16))
    assert load_label_maps(tmp_path, 0).accuracy.tolist() == [0.5]


def test_images_with_one_label_have_no_maps(tmp_path: Path) -> None:
    data = ctta.datasets.Corrupted(np.zeros((4, 32, 32, 3), np.uint8), np.zeros(4, np.int64), name="black")
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    scenes = ctta.streams.continual(data, names=("brightness",), batch_size=2)
    ctta.evaluate(ctta.Source(flat), scenes, folder=tmp_path)
    assert saved_batches(tmp_path) == []


def test_the_best_and_the_worst_change_are_found(tmp_path: Path) -> None:
    scenes = stream(Named("fog", ignored=(1,)), Named("night"))
    folders = {name: tmp_path / name for name in ("source", "tent")}
    ctta.evaluate(ctta.Source(net()), scenes, folder=folders["source"])
    ctta.evaluate(ctta.Tent(net(), optimizer=lambda p: torch.optim.SGD(p, lr=10.0)), scenes, folder=folders["tent"])
    save_examples("TENT", folders["tent"], folders["source"], scenes, tmp_path / "examples")
    changes = {}
    for number in range(len(scenes)):
        before, after = (load_label_maps(folders[name], number).accuracy for name in ("source", "tent"))
        changes |= {(number, place): change for place, change in enumerate(after - before) if change == change}
    assert len(changes) == 9  # one of ten scenes has no labelled pixel
    best, worst = load_examples(tmp_path)
    for example, kind, pick in ((best, "best", max), (worst, "worst", min)):
        number, place = pick(changes, key=lambda scene: changes[scene])
        assert (example.method, example.kind, example.class_names) == ("TENT", kind, Named.class_names)
        assert example.accuracy_after - example.accuracy_before == pytest.approx(changes[number, place])
        batch = scenes.read_batch(number)
        assert batch.y is not None
        assert (example.domain, example.segment) == (batch.domain, scenes.segment_index(number))
        assert example.stream_hash == scenes.hash
        assert example.truth.tolist() == batch.y[place].tolist()
        assert example.after.tolist() == load_label_maps(folders["tent"], number).maps[place].tolist()
        assert example.image.shape == (*FULL, 3)


def test_what_changed_nothing_has_no_example(tmp_path: Path) -> None:
    for name in ("one", "other"):
        ctta.evaluate(ctta.Source(net()), stream(), folder=tmp_path / name)
    save_examples("Source", tmp_path / "one", tmp_path / "other", stream(), tmp_path / "examples")
    assert load_examples(tmp_path) == []


class Large(Scenes):
    """Scenes whose label maps are wider than an example may be."""

    def read(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().read(rows)
        return x, y.repeat_interleave(50, 1).repeat_interleave(50, 2)


def test_examples_of_large_scenes_are_shrunk(tmp_path: Path) -> None:
    scenes = Stream("large", [Segment("fog", Large("fog"), np.arange(2))], batch_size=1)
    ctta.evaluate(ctta.Source(net()), scenes, folder=tmp_path / "source")
    ctta.evaluate(ctta.BNStats(net()), scenes, folder=tmp_path / "adapted")
    save_examples("BN", tmp_path / "adapted", tmp_path / "source", scenes, tmp_path / "examples")
    examples = load_examples(tmp_path)
    assert examples
    for example in examples:
        assert example.image.shape == (*example.truth.shape, 3) == (round(MAX_WIDTH * SIZE[0] / SIZE[1]), MAX_WIDTH, 3)
        assert any(_is_shrunk(example, scenes.read_batch(number).y) for number in range(2))


def _is_shrunk(example: SceneExample, labels: torch.Tensor | None) -> bool:
    """Whether the example's truth is that of these labels: each of 12x20 patches has one class."""
    assert labels is not None
    centres = labels[0, 25::50, 25::50].numpy()
    height, width = example.truth.shape
    rows, columns = ((np.arange(count) + 0.5) * size / count for count, size in ((12, height), (20, width)))
    return bool((example.truth[np.ix_(rows.astype(int), columns.astype(int))] == centres).all())


def an_example(**changes: object) -> SceneExample:
    classes = np.array([[0, 1], [2, IGNORE_INDEX]], np.uint8)
    image = np.full((2, 2, 3), 100, np.uint8)
    fields = {"method": "CoTTA", "kind": "best", "stream_hash": "0", "domain": "fog", "segment": 4}
    figures = {"class_names": synthetic.CLASSES, "accuracy_before": 0.25, "accuracy_after": 1.0}
    return SceneExample(**fields | figures | dict(image=image, truth=classes, before=classes, after=classes) | changes)  # type: ignore[arg-type]


def test_a_map_is_drawn_in_the_colours_of_its_classes() -> None:
    figure = plot_overlays([an_example()], infer_layout([("fog", "night", "rain", "snow") * 10]))
    picture, truth, before, after = figure.axes
    assert picture.get_title("left") == "CoTTA, best change: fog, round 2"
    assert [axes.get_xlabel() for axes in figure.axes] == ["image", "labels", "Source, 25.0", "CoTTA, 100.0"]
    for axes in (truth, before, after):
        pixels = np.asarray(axes.images[0].get_array())
        for (row, column), kind in (((0, 0), 0), ((0, 1), 1), ((1, 0), 2)):
            assert pixels[row, column].tolist() == (0.7 * synthetic.PALETTE[kind] + 0.3 * 100).round().tolist()
        assert pixels[1, 1].tolist() == [0, 0, 0]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == list(synthetic.CLASSES)


def test_every_class_has_a_colour_of_its_own() -> None:
    for names, count in ((synthetic.CLASSES, 9), (CLASS_NAMES, 19), ((), 12)):
        palette = choose_palette(names, count)
        assert palette.shape == (count, 3) and len({tuple(colour) for colour in palette.tolist()}) == count


def test_classes_without_names_and_answers_beyond_them_are_drawn() -> None:
    strange = np.array([[0, 1], [2, 3]], np.uint8)
    figure = plot_overlays([an_example(class_names=(), after=strange)], infer_layout([("fog",) * 5]))
    assert not figure.legends and np.asarray(figure.axes[3].images[0].get_array())[1, 1].any()


def test_answers_that_are_not_finite_are_black() -> None:
    names = ("road", "sky", "car")
    strange = np.array([[0, 1], [2, len(names)]], np.uint8)  # as they are kept
    figure = plot_overlays([an_example(class_names=names, after=strange)], infer_layout([("fog",)]))
    assert not np.asarray(figure.axes[3].images[0].get_array())[1, 1].any()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(names)


def test_an_example_is_written_whole_by_any_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    save_example(an_example(), folder / "first.npz")
    (example,) = load_examples(tmp_path)
    for name, value in vars(an_example()).items():
        assert np.array_equal(getattr(example, name), value)

    def killed(file: IO[bytes], **arrays: object) -> None:
        assert set(arrays) == set(vars(example))
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", killed)
    with pytest.raises(KeyboardInterrupt):
        save_example(an_example(), folder / "second.npz")
    assert len(load_examples(tmp_path)) == 1


def test_the_page_may_show_pictures_from_itself_only() -> None:
    page = (Path(ctta.__file__).parent / "report" / "page.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

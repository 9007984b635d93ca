"""Scores of boxes, streams of drawn streets, and the demo that compares methods on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ctta.benchmark.detection import run_street_detection
from ctta.cli import main
from ctta.data.corruptions import corrupt
from ctta.detection import (
    CITYSCAPES_BOX_CLASSES,
    Boxes,
    corrupt_stream,
    draw_street_batches,
    find_labeled_images,
    read_cityscapes,
    read_coco,
    read_yolo,
    street_detector,
)
from ctta.detection.drawing import draw_boxes
from ctta.errors import DataError, InputError
from ctta.evaluation.boxes import BoxMatches, DetectionRun, estimate_scores, run_detection, score_boxes


def boxes(*rows: tuple[float, ...], labels: list[int], scores: list[float] | None = None) -> Boxes:
    found = Boxes(boxes=torch.tensor(rows).view(-1, 4), labels=torch.tensor(labels, dtype=torch.long))
    if scores is not None:
        found["scores"] = torch.tensor(scores)
    return found


A, B, C = (0.0, 0.0, 20.0, 20.0), (50.0, 0.0, 70.0, 20.0), (0.0, 50.0, 20.0, 70.0)


def test_scores_of_known_answers() -> None:
    truth = [boxes(A, B, labels=[0, 0])]
    perfect = score_boxes([boxes(A, B, labels=[0, 0], scores=[0.9, 0.8])], truth)
    assert (perfect.map50, perfect.map, perfect.by_class[0]) == pytest.approx((100.0, 100.0, 100.0))
    # A wrong box before the second right one: precision 1 up to recall 1/2, then 2/3, at 101 points.
    found = [boxes(A, C, B, labels=[0, 0, 0], scores=[0.9, 0.8, 0.7])]
    assert score_boxes(found, truth).map50 == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)
    # An overlap of 0.6 is right at 0.5, 0.55 and 0.6 of ten thresholds.
    loose = [boxes((0.0, 0.0, 20.0, 12.1), labels=[0], scores=[0.9])]
    scores = score_boxes(loose, [boxes(A, labels=[0])])
    assert (scores.map50, scores.map) == pytest.approx((100.0, 30.0))


def test_scores_are_means_over_the_classes_that_there_are() -> None:
    truth = [boxes(A, B, labels=[0, 1]), boxes(labels=[])]
    found = [boxes(A, labels=[0], scores=[0.9]), boxes(C, labels=[7], scores=[0.9])]
    scores = score_boxes(found, truth)
    assert scores.by_class == {0: pytest.approx(100.0), 1: pytest.approx(0.0)} and scores.map50 == pytest.approx(50.0)
    assert score_boxes([boxes(labels=[], scores=[])] * 2, truth).map50 == 0.0
    with pytest.raises(InputError, match="as many targets"):
        score_boxes(found, truth[:1])
    with pytest.raises(InputError, match="as many targets"):
        score_boxes(found[1:], truth[1:])


def draw_boxes_at_random(seed: int, num_images: int, *, scored: bool) -> list[Boxes]:
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(num_images):
        count = int(torch.randint(0, 7, (), generator=generator))
        corner = 40 * torch.rand(count, 2, generator=generator)
        extent = 10 + 20 * torch.rand(count, 2, generator=generator)
        labels = torch.randint(3, (count,), generator=generator)
        each = Boxes(boxes=torch.cat([corner, corner + extent], 1), labels=labels)
        if scored:
            each["scores"] = (10 * torch.rand(count, generator=generator)).round() / 10  # with equal ones
        else:
            each["crowd"] = torch.rand(count, generator=generator) < 0.2
        drawn.append(each)
    return drawn


@pytest.mark.parametrize("seed", range(3))
def test_scores_equal_those_of_the_evaluator(seed: int) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, noise = (draw_boxes_at_random(seed, 12, scored=each) for each in (False, True))
    found = []  # some that are nearly right, and some that are not
    for target, other in zip(truth, noise, strict=True):
        near = target["boxes"] + torch.randn(target["boxes"].shape, generator=torch.Generator().manual_seed(seed))
        every, labels = torch.cat([near, other["boxes"]]), torch.cat([target["labels"], other["labels"]])
        found.append(Boxes(boxes=every, labels=labels, scores=torch.linspace(0.9, 0.1, len(labels))))
    coco = COCO()

    def list_entries(images: list[Boxes]) -> list[dict[str, Any]]:
        return [
            {
                "image_id": number,
                "category_id": int(each["labels"][row]),
                "bbox": [*box[:2], box[2] - box[0], box[3] - box[1]],
                "area": (box[2] - box[0]) * (box[3] - box[1]),
                "iscrowd": int(each["crowd"][row]) if "crowd" in each else 0,
                "score": float(each["scores"][row]) if "scores" in each else 1.0,
            }
            for number, each in enumerate(images)
            for row, box in enumerate(each["boxes"].double().tolist())
        ]

    coco.dataset = {
        "images": [{"id": number} for number in range(12)],
        "categories": [{"id": number} for number in range(3)],
        "annotations": [{"id": number, **each} for number, each in enumerate(list_entries(truth), start=1)],
    }
    coco.createIndex()
    evaluation = COCOeval(coco, coco.loadRes(list_entries(found)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    scores = score_boxes(found, truth)
    assert 20 < scores.map < 95
    assert (scores.map, scores.map50) == pytest.approx(tuple(100 * evaluation.stats[:2]), abs=1e-9)
    # An image that counts twice is as two images.
    weights = np.array([2.0, 0.0] + [1.0] * 10)
    rows = [0, 0, *range(2, 12)]
    weighted, copied = (
        BoxMatches(found, truth).score(weights),
        score_boxes(*([each[r] for r in rows] for each in (found, truth))),
    )
    assert (weighted.map, weighted.map50) == pytest.approx((copied.map, copied.map50), abs=1e-9)


def test_intervals_are_over_images() -> None:
    truth = [boxes(A, labels=[0])] * 8
    right, wrong = boxes(A, labels=[0], scores=[0.9]), boxes(C, labels=[0], scores=[0.9])
    half = [right if number % 2 else wrong for number in range(8)]
    runs = {
        "half": DetectionRun(half * 2, truth * 2, ["fog"] * 8 + ["snow"] * 8),
        "same": DetectionRun(half * 2, truth * 2, ["fog"] * 8 + ["snow"] * 8),
        "right": DetectionRun([right] * 16, truth * 2, ["fog"] * 8 + ["snow"] * 8),
    }
    estimates = estimate_scores(runs, ["fog", "snow"])
    interval = estimates["half"].map50
    assert interval.estimate == pytest.approx(runs["half"].score("fog").map50)
    assert interval.low < interval.estimate - 10 and interval.high > interval.estimate + 10
    assert (estimates["same"].difference.low, estimates["same"].difference.high) == (0.0, 0.0)
    assert estimates["right"].map.low == pytest.approx(100.0) and estimates["right"].difference.low > 20
    assert estimate_scores(runs, ["fog"]) == estimate_scores(runs, ["fog"])


def test_runs_are_scored_by_domain_and_window() -> None:
    truth, right, wrong = (boxes(A, labels=[0]), boxes(A, labels=[0], scores=[0.9]), boxes(C, labels=[0], scores=[0.9]))
    run = DetectionRun([right, wrong, wrong, right], [truth] * 4, ["day", "day", "night", "night"])
    assert run.score("day").map50 < 100 and run.score_windows(1) == pytest.approx([100.0, 0.0, 0.0, 100.0])
    stream = [(torch.zeros(2, 3, 8, 8), [truth, truth], "day"), (torch.zeros(1, 3, 8, 8), [truth], "night")]
    runs = run_detection({"right": lambda x: [right] * len(x), "wrong": lambda x: [wrong] * len(x)}, stream)
    assert runs["right"].score().map50 == pytest.approx(100.0) and runs["wrong"].score().map50 == 0.0
    assert runs["right"].domains == ["day", "day", "night"]


def test_street_batches_show_each_scene_once() -> None:
    parts = list(draw_street_batches(["clear", "night"], 5, batch_size=3, size=(64, 128)))
    assert [(len(x), part) for x, _, part in parts] == [(3, "1 clear"), (2, "1 clear"), (3, "2 night"), (2, "2 night")]
    images = torch.cat([x for x, _, _ in parts])
    assert len({image.numpy().tobytes() for image in images}) == 10
    assert all(len(targets) == len(x) for x, targets, _ in parts)


def test_coco_files(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20), (255, 0, 0)).save(tmp_path / "a.png")
    Image.new("L", (10, 10)).save(tmp_path / "b.png")
    content: dict[str, Any] = {
        "images": [{"id": 9, "file_name": "a.png"}, {"id": 4, "file_name": "b.png"}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"image_id": 9, "category_id": 18, "bbox": [1, 2, 10, 5], "iscrowd": 0},
            {"image_id": 9, "category_id": 1, "bbox": [0, 0, 0, 5]},
            {"image_id": 9, "category_id": 3, "bbox": [0, 0, 5, 5], "iscrowd": 1},
            {"image_id": 4, "category_id": 3, "bbox": [0, 0, 5, 5]},
        ],
    }
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    (image, [first], name), (gray, [second], _) = read_coco(path, tmp_path)
    assert (tuple(image.shape), name, tuple(gray.shape)) == ((1, 3, 20, 30), "a.png", (1, 3, 10, 10))
    assert image[0, :, 0, 0].tolist() == [1.0, 0.0, 0.0]
    assert first["boxes"].tolist() == [[1.0, 2.0, 11.0, 7.0], [0.0, 0.0, 5.0, 5.0]]
    assert first["labels"].tolist() == [2, 1] and first["crowd"].tolist() == [False, True]
    assert second["labels"].tolist() == [1]
    assert [each["labels"].tolist() for _, [each], _ in read_coco(path, tmp_path, ["car", "truck"])] == [[0], [0]]
    with pytest.raises(DataError, match="none of the classes"):
        list(read_coco(path, tmp_path, ["cat"]))
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot be read"):
        list(read_coco(path, tmp_path))
    for broken in ("{", "[]", "{}", json.dumps(content | {"annotations": [{"image_id": 77, "bbox": [1]}]})):
        path.write_text(broken)
        with pytest.raises(DataError, match="COCO's format"):
            list(read_coco(path, tmp_path))


def test_yolo_files(tmp_path: Path) -> None:
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.mkdir()
    labels.mkdir()
    for name in ("b.png", "a.png", "c.png"):
        Image.new("RGB", (100, 50)).save(images / name)
    (images / "notes.txt").write_text("no image")
    (labels / "a.txt").write_text("7 0.5 0.5 0.2 0.4\n2 0.1 0.1 0.2 0.2\n")
    (labels / "b.txt").write_text("")
    (first, [found], name), (_, [empty], _), (_, [unlabeled], _) = read_yolo(images, labels)
    assert (tuple(first.shape), name) == ((1, 3, 50, 100), "a.png")
    assert found["labels"].tolist() == [7, 2]
    assert torch.allclose(found["boxes"], torch.tensor([[40.0, 15.0, 60.0, 35.0], [0.0, 0.0, 20.0, 10.0]]))
    assert len(empty["boxes"]) == len(unlabeled["boxes"]) == 0
    (labels / "b.txt").write_text("cat 0.5 0.5 0.2 0.4")
    with pytest.raises(DataError, match=r"b\.txt is no file of classes"):
        list(read_yolo(images, labels))
    with pytest.raises(DataError, match="no text file"):
        list(read_yolo(images, images / "none"))


def test_corrupted_streams_keep_boxes() -> None:
    images = torch.rand(3, 3, 32, 40, generator=torch.Generator().manual_seed(0))
    truth = [boxes(A, labels=[number]) for number in range(3)]

    def read() -> Any:
        yield images[:2], truth[:2], "a"
        yield images[2:], truth[2:], "b"

    stream = list(corrupt_stream(read, ["clean", "gaussian_noise"], rounds=2, severity=3))
    names = ["1 clean", "1 gaussian_noise", "2 clean", "2 gaussian_noise"]
    assert [name for _, _, name in stream] == [name for name in names for _ in range(2)]
    assert all(targets == truth[number % 2 * 2 :][: len(x)] for number, (x, targets, _) in enumerate(stream))
    assert torch.equal(stream[0][0], images[:2]) and torch.equal(stream[3][0], stream[7][0])
    # An image of a later batch gets the noise that it has in a batch of all.
    assert torch.equal(torch.cat([stream[2][0], stream[3][0]]), corrupt(images, "gaussian_noise", 3))


def test_detections_in_crowds_are_neither_right_nor_wrong() -> None:
    truth = boxes(A, (0.0, 40.0, 90.0, 90.0), labels=[0, 0])
    found = boxes(C, A, labels=[0, 0], scores=[0.9, 0.8])
    assert score_boxes([found], [truth | {"crowd": torch.tensor([False, True])}]).map50 == pytest.approx(100.0)
    assert score_boxes([found], [truth]).map50 < 50


def test_labeled_images_are_found_by_their_layout(tmp_path: Path) -> None:
    images, labels = tmp_path / "images" / "val", tmp_path / "labels" / "val"
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    for name in ("a", "b"):
        Image.new("RGB", (20, 10)).save(images / f"{name}.png")
        (labels / f"{name}.txt").write_text("1 0.5 0.5 0.5 0.5")
    read = find_labeled_images(images, limit=1)
    assert [[each["labels"].tolist() for each in targets] for _, targets, _ in read()] == [[[1]]] and len(
        [*read()]
    ) == 1
    (tmp_path / "annotations").mkdir()
    content = {
        "images": [{"id": 1, "file_name": "b.png"}],
        "categories": [{"id": 5, "name": "car"}],
        "annotations": [{"image_id": 1, "category_id": 5, "bbox": [0, 0, 5, 5]}],
    }
    (tmp_path / "val").mkdir()
    Image.new("RGB", (20, 10)).save(tmp_path / "val" / "b.png")
    (tmp_path / "annotations" / "instances_val.json").write_text(json.dumps(content))
    [(_, [found], name)] = find_labeled_images(tmp_path / "annotations" / "instances_val.json", ["person", "car"])()
    assert (found["labels"].tolist(), name) == ([1], "b.png")
    with pytest.raises(DataError, match="neither the root of Cityscapes"):
        find_labeled_images(tmp_path / "val")


def test_boxes_of_cityscapes_surround_instances(tmp_path: Path) -> None:
    maps, images = (tmp_path / folder / "val" / "ulm" for folder in ("gtFine", "leftImg8bit"))
    maps.mkdir(parents=True)
    images.mkdir(parents=True)
    pixels = np.zeros((40, 60), np.uint16)
    pixels[5:25, 10:30] = 26001  # a car
    pixels[8:12, 15:18] = 24000  # a person in front of it
    pixels[30:40, 40:60] = 24003
    pixels[0:3, :] = 26  # cars that are not told apart
    Image.fromarray(pixels).save(maps / "ulm_1_gtFine_instanceIds.png")
    Image.new("RGB", (60, 40)).save(images / "ulm_1_leftImg8bit.png")
    [(image, [found], city)] = read_cityscapes(tmp_path)
    assert tuple(image.shape) == (1, 3, 40, 60) and city == "ulm"
    assert found["boxes"].tolist() == [[0.0, 0.0, 60.0, 3.0], [40.0, 30.0, 60.0, 40.0], [10.0, 5.0, 30.0, 25.0]]
    assert [CITYSCAPES_BOX_CLASSES[label] for label in found["labels"]] == ["car", "person", "car"]
    assert found["crowd"].tolist() == [True, False, False]
    [(_, [everything], _)] = read_cityscapes(tmp_path, min_pixels=1)
    assert len(everything["boxes"]) == 4
    [(small, [others], _)] = read_cityscapes(tmp_path, classes=["bicycle", "car"], size=(20, 60))
    assert tuple(small.shape) == (1, 3, 20, 60) and others["labels"].tolist() == [1, 1]
    assert others["boxes"].tolist() == [[0.0, 0.0, 60.0, 1.5], [10.0, 2.5, 30.0, 12.5]]
    pixels[30:40, 40:60] = 25003  # a rider, which COCO calls a person
    Image.fromarray(pixels).save(maps / "ulm_1_gtFine_instanceIds.png")
    [(_, [coco], _)] = find_labeled_images(tmp_path, ["person", "car"])()
    assert coco["labels"].tolist() == [1, 0, 1]
    with pytest.raises(DataError, match="instanceIds"):
        list(read_cityscapes(tmp_path, "train"))


def test_frames_of_boxes() -> None:
    image = torch.zeros(40, 60, 3, dtype=torch.uint8).numpy()
    drawn = draw_boxes(image, boxes((10, 10, 30, 25), (0, 0, 90, 90), labels=[0, 1], scores=[0.9, 0.2]), scale=2)
    assert drawn.shape == (80, 120, 3) and not image.any()
    assert drawn[20, 20:60].any(1).all() and drawn[49, 20:60].any(1).all() and not drawn[24:46, 24:56].any()
    assert not drawn[0].any(), "the second box has a low score"
    assert draw_boxes(image, boxes((-5, -5, 90, 90), labels=[1]))[0, 0].any()


def test_shipped_detector_finds_objects_by_day() -> None:
    detector = street_detector()
    assert sum(parameter.numel() for parameter in detector.parameters()) < 500_000
    [run] = run_detection({"": detector.predict}, draw_street_batches(["clear"], 12, split="choose")).values()
    assert run.score().map50 > 25


def test_demo_shows_scores_and_images(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctta.benchmark.detection as module

    def short(**settings: Any) -> Any:
        return run_street_detection(num_frames=4, **settings)

    monkeypatch.setattr(module, "run_street_detection", short)
    monkeypatch.setattr("sys.argv", ["ctta", "demo", "--task", "detection", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    out = capsys.readouterr().out
    assert all(name in out for name in ("source", "shift_statistics", "2 night", "3 clear"))
    with Image.open(tmp_path / "detection" / "images.png") as image:
        assert image.size == (2 * 768, 3 * 384)
    assert "<svg" in (tmp_path / "detection" / "scores.svg").read_text()


def run_command(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["ctta", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


def test_command_measures_detectors(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from ctta.detection import street_detector\nbuild = lambda: street_detector().net\n")
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.mkdir()
    labels.mkdir()
    for x, [target], _ in draw_street_batches(["clear"], 2, batch_size=1):
        name = f"{len(list(images.iterdir()))}"
        Image.fromarray((255 * x[0]).byte().permute(1, 2, 0).numpy()).save(images / f"{name}.png")
        sides = torch.tensor([384, 192]).repeat(2)
        low, high = target["boxes"].float().split(2, 1)
        fractions = torch.cat([(low + high) / 2, high - low], 1) / sides
        rows = zip(target["labels"].tolist(), fractions.tolist(), strict=True)
        (labels / f"{name}.txt").write_text("\n".join(f"{label} {' '.join(map(str, row))}" for label, row in rows))
    options = ("--model", f"file:{mine}:build", "--data", str(images), "--corruptions", "gaussian_noise,none")
    chosen = ("--methods", "source,shift_statistics", "--set", "shift_statistics.scales=()", "--severity", "1")
    out = tmp_path / "run"
    assert not run_command("bench", "detection", *options, *chosen, "--out", str(out), monkeypatch=monkeypatch)
    text = capsys.readouterr().out
    assert "gaussian_noise" in text and "above source" in text and "0.0 [0.0, 0.0]" in text
    content = json.loads((out / "scores.json").read_text())
    assert content["scores"]["source"]["clean"]["map50"] > content["scores"]["source"]["gaussian_noise"]["map50"]
    assert set(content["estimates"]) == {"shifted", "clean"} and content["command"].startswith("ctta bench detection")
    assert (out / "images.png").exists() and "<svg" in (out / "scores.svg").read_text()
    assert not run_command(
        "bench", "detection", "--limit", "2", "--json", "--out", str(tmp_path / "drawn"), monkeypatch=monkeypatch
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["method"] for line in lines] == ["source", "bn_stats", "shift_statistics"]
    for wrong, message in (
        (("--workers", "2"), "does not take --workers"),
        (("--methods", "tent"), "methods"),
        (("--model", "yolo:x.pt"), "unknown network"),
        (("--data", str(images), "--corruptions", "nosuch"), "unknown corruption"),
    ):
        assert message in str(run_command("bench", "detection", *wrong, monkeypatch=monkeypatch))

"""``ctta adapt --video``: predictions for frames, resumed after every kind of interruption, and drawn on the frames."""

import csv
import json
import os
import signal
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import invoke, output, user_error, write_network
from killed_runs import kill_repeatedly
from safetensors.torch import load_file
from video_clips import RATE, draw_frames, dropping_camera, keep_all_frames, read_clip, write_clip

import ctta
from ctta import models
from ctta.adapt import adapt_video, adapt_video_boxes, run
from ctta.benchmark.report.plots import blend_classes, choose_palette
from ctta.cli.adapt import adapt
from ctta.data.streams import video
from ctta.data.streets import render_frame
from ctta.detection import street_detector
from ctta.errors import ConfigError

NUM_FRAMES = 22
OPTIONS = ("--method", "tent", "--batch-size", 4, "--set", "lr=0.05", "--no-guard")


class Clip:
    """A clip, and the options of a command on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, write_clip(root / "clip.mp4", draw_frames(NUM_FRAMES))
        self.table, self.state, self.annotated = root / "table.csv", root / "state.safetensors", root / "out.mp4"
        self.options = ["--model", write_network(root), "--video", self.path, *OPTIONS]
        self.resumable = [*self.options, "--out", self.table, "--state", self.state]

    def rows(self) -> list[dict[str, str]]:
        with self.table.open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture
def clip(tmp_path: Path) -> Clip:
    return Clip(tmp_path)


def test_every_frame_is_predicted_while_adapting(clip: Clip) -> None:
    text = output(adapt, *clip.options, "--out", clip.table, "--every", 2, "--compare", "--set", "batch_stats=0.5")
    assert f"{clip.table} has 11 rows, 11 of them new." in text and "frames/s" in text and "Order" not in text
    net = models.load(write_network(clip.root))
    model = ctta.adapt(net, "tent", lr=0.05, batch_stats=0.5)
    rows = iter(clip.rows())
    for number, batch in enumerate(video(clip.path, every=2, batch_size=4)):
        with torch.no_grad():
            answers = [net.eval()(batch.x).double().softmax(1).max(1), model(batch.x).double().softmax(1).max(1)]
        for place, frame in enumerate(batch.index.tolist()):
            (source_confidence, source), (confidence, label) = ((each[place] for each in answer) for answer in answers)
            assert next(rows) == {
                "video": "clip.mp4",
                "batch": str(number),
                "frame": str(frame),
                "seconds": f"{frame / RATE:.6f}",
                "class": str(int(label)),
                "confidence": f"{float(confidence):.6f}",
                "source_class": str(int(source)),
                "source_confidence": f"{float(source_confidence):.6f}",
                "changed": str(int(label != source)),
            }
    assert next(rows, None) is None


def test_table_state_and_annotated_video_are_the_same_after_kills(clip: Clip) -> None:
    (clip.root / "expected").mkdir()
    expected = Clip(clip.root / "expected")
    output(adapt, *expected.resumable, "--annotate", expected.annotated)
    command = [*clip.resumable, "--annotate", clip.annotated]
    # Where, at which call, seconds between saves; and how many rows the table then has.
    kills = {("state", 3, 0): 12, ("rows", 2, 0): 12}
    kill_repeatedly(kills, clip.table, *command)
    assert not clip.annotated.exists()
    assert "22 rows, 10 of them new" in output(adapt, *command)
    assert clip.table.read_bytes() == expected.table.read_bytes()
    one, other = load_file(clip.state), load_file(expected.state)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    pictures, expected_pictures = (read_clip(each.annotated).astype(int) for each in (clip, expected))
    assert len(pictures) == NUM_FRAMES
    assert np.abs(pictures - expected_pictures).mean() < 1.5  # key frames are in other places
    assert sorted(path.name for path in clip.root.glob("out.mp4*")) == ["out.mp4"]
    assert "No new frames: all 22 are in" in output(adapt, *command)
    assert len(read_clip(clip.annotated)) == NUM_FRAMES


def test_ctrl_c_saves_and_a_longer_run_goes_on(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*clip.resumable, "--annotate", clip.annotated]
    with monkeypatch.context() as patch:
        patch.setattr(run.InferenceRun, "save", lambda run: os.kill(os.getpid(), signal.SIGINT))
        patch.setattr(run, "SECONDS_BETWEEN_SAVES", 0)
        assert invoke(adapt, *clip.options, "--out", clip.root / "other.csv").exit_code == 130
    assert "12 rows" in output(adapt, *command, "--seconds", 1.15)
    assert len(read_clip(clip.annotated)) == 12
    assert "22 rows, 10 of them new" in output(adapt, *command)
    assert len(read_clip(clip.annotated)) == NUM_FRAMES
    assert [row["frame"] for row in clip.rows()] == list(map(str, range(NUM_FRAMES)))
    # Another video continues the same stream, in the same table.
    other = write_clip(clip.root / "other.mp4", draw_frames(5))
    options = [*clip.resumable, "--compare"]
    options[options.index(clip.path)] = other
    assert "5 of them new" in output(adapt, *options)
    assert [row["video"] for row in clip.rows()] == ["clip.mp4"] * 22 + ["other.mp4"] * 5
    assert int(clip.rows()[-1]["batch"]) == 7


def test_answers_are_drawn_below_the_frame(clip: Clip) -> None:
    names = clip.root / "names.txt"
    names.write_text("bird\ncat\ndog\nfrog\nship\n")
    text = output(
        adapt, *clip.options, "--out", clip.table, "--annotate", clip.annotated, "--classes", names, "--set", "lr=1.0"
    )
    assert f"{clip.annotated} shows the answers on the frames." in text
    pictures, frames = read_clip(clip.annotated), read_clip(clip.path)
    assert pictures.shape == (NUM_FRAMES, 320 + 44, 320, 3)
    enlarged = frames.repeat(20, axis=1).repeat(20, axis=2)
    assert np.abs(pictures[:, :320].astype(int) - enlarged).mean() < 6
    strips = pictures[:, 320:].astype(int)
    for row, strip in zip(clip.rows(), strips, strict=True):
        assert (strip.mean(2) > 150).any(), "there is text on a dark strip"
        is_yellow = (strip[22:, :, 0] - strip[22:, :, 2] > 80).sum() > 20  # where the answer differs from the source's
        assert is_yellow == (row["changed"] == "1") == (row["class"] != row["source_class"])
    assert {row["changed"] for row in clip.rows()} == {"0", "1"}


def test_label_maps_are_drawn_side_by_side(clip: Clip) -> None:
    net = models.load(write_network(clip.root, "dense"))
    summary = adapt_video(
        net, clip.path, clip.table, method="source", every=10, annotate=clip.annotated, batch_size=2, guard=False
    )
    assert (summary.num_changed, summary.changed, summary.warning) == (None, 0.0, None)
    pictures, frames = read_clip(clip.annotated), read_clip(clip.path)[::10]
    assert pictures.shape == (3, 22 + 320, 640, 3)
    x = torch.from_numpy(frames).permute(0, 3, 1, 2) / 255
    probabilities, labels = net(x).detach().softmax(1).max(1)
    for picture, frame, label in zip(pictures, frames, labels.numpy().astype(np.uint8), strict=True):
        small = blend_classes(frame, label, choose_palette((), 5))
        expected = small.repeat(20, axis=0).repeat(20, axis=1)
        for panel in picture[22:, :320], picture[22:, 320:]:
            assert np.abs(panel.astype(int) - expected).mean() < 12
    for row, label, probability in zip(clip.rows(), labels, probabilities, strict=True):
        assert int(row["class"]) == int(label.flatten().mode().values)
        assert float(row["confidence"]) == pytest.approx(float(probability.mean()), abs=1e-5)
        assert row["changed"] == "0"


def test_a_camera_drops_and_goes_on_later(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all_frames(monkeypatch)
    sentences: list[str] = []

    def run_until(stop_at: int) -> None:
        def on_progress(num_done: int, total: int | None) -> None:
            if num_done >= stop_at:
                raise KeyboardInterrupt

        adapt_video(
            models.load(write_network(clip.root)),
            address,
            clip.table,
            method="tent",
            state=clip.state,
            batch_size=4,
            annotate=clip.annotated,
            on_progress=on_progress,
            on_change=sentences.append,
        )

    with dropping_camera(draw_frames(30), num_per_connection=5) as address:
        for number in (8, 16):
            with pytest.raises(KeyboardInterrupt):
                run_until(number)
    rows = clip.rows()
    assert [int(row["frame"]) for row in rows] == list(range(16))
    assert {row["video"] for row in rows} == {address}
    assert all(row["time"].endswith("Z") for row in rows)
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert any("dropped" in sentence for sentence in sentences) and len(read_clip(clip.annotated)) == 16


def test_mistakes_are_named_and_leave_no_files(clip: Clip) -> None:
    out = ("--out", clip.table)
    model, pictures = clip.options[:2], clip.root / "pictures"
    assert "give --images DIR for a folder" in user_error(adapt, *model, *out)
    assert "not both" in user_error(adapt, *clip.options, *out, "--images", pictures)
    assert "--order needs --images" in user_error(adapt, *clip.options, *out, "--order", "name")
    assert "--strict needs --images" in user_error(adapt, *clip.options, *out, "--strict")
    for option in ("--every", "2"), ("--seconds", "2"), ("--annotate", "a.mp4"):
        assert f"{option[0]} needs --video" in user_error(adapt, *model, *out, "--images", pictures, *option)
    assert "such as 0.5s, got 'often'" in user_error(adapt, *clip.options, *out, "--every", "often")
    assert "does not exist" in user_error(adapt, *clip.options[:2], "--video", "gone.mp4", *out)
    clip.annotated.touch()
    assert "exists, and the run is new" in user_error(adapt, *clip.options, *out, "--annotate", clip.annotated)
    wrong = write_clip(clip.root / "wrong.mp4", draw_frames(3, side=32))
    assert isinstance(invoke(adapt, *model, "--video", wrong, "--out", clip.root / "x.csv").exception, RuntimeError)
    assert not (clip.root / "x.csv").exists()


def test_summary_as_json_and_refusals_on_resume(clip: Clip) -> None:
    summary = json.loads(output(adapt, *clip.resumable, "--json", "--every", "0.5s"))
    assert (summary["num_images"], summary["order"], summary["num_changed"]) == (5, "time", None)
    with pytest.raises(ConfigError):
        adapt_video(models.load(write_network(clip.root)), clip.path, clip.table, state=clip.state, size=(8, 8))
    assert "has the columns" in user_error(adapt, *clip.resumable, "--compare")


# ---- detectors ----


def test_boxes_of_frames_are_written_and_drawn(tmp_path: Path) -> None:
    frames = [render_frame(number, "night", size=(192, 384)).image for number in range(4)]
    clip, table, annotated = write_clip(tmp_path / "clip.mp4", np.stack(frames)), tmp_path / "a.csv", tmp_path / "a.mp4"
    options = ["--task", "detection", "--model", "streets", "--video", clip, "--out", table]
    text = output(adapt, *options, "--every", 2, "--annotate", annotated, "--classes", write_names(tmp_path))
    model, source = ctta.detect(street_detector()), ctta.detect(street_detector(), "source")
    expected, num_source = [], 0
    for batch in video(clip, every=2, batch_size=1):
        for found, before in zip(model(batch.x), source(batch.x), strict=True):
            num_source += int((before["scores"] >= 0.25).sum())
            for box, score, label in zip(
                found["boxes"].tolist(), found["scores"].tolist(), found["labels"], strict=True
            ):
                if score >= 0.25:
                    row = [str(int(batch.index[0])), str(int(label)), ("car", "person")[int(label)], f"{score:.4f}"]
                    expected.append([*row, *(f"{side:.1f}" for side in box)])
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("frame", "class", "name", "score", "left", "top", "right", "bottom")
    assert len(expected) > 1 and [[row[name] for name in columns] for row in rows] == expected
    assert f"{len(expected)} boxes in 2 frames. The source found {num_source}." in text
    assert read_clip(annotated).shape == (2, 192 + 22, 2 * 384, 3)
    assert f"{table} exists" in user_error(adapt, *options)
    others = options[:-1]
    for wrong, message in (
        (["--state", tmp_path / "x.safetensors"], "does not take --state"),
        (["--method", "tent"], "--method must be one of 'source'"),
        (["--config", tmp_path / "x.toml"], "does not take --config"),
    ):
        assert message in user_error(adapt, *others, tmp_path / "b.csv", *wrong)
    summary = adapt_video_boxes(street_detector(), clip, tmp_path / "c.csv", batch_size=3, seconds=0.01)
    assert summary.num_images == 1 and summary.num_source_boxes is None


def write_names(root: Path) -> Path:
    path = root / "names.txt"
    path.write_text("car\nperson\n")
    return path

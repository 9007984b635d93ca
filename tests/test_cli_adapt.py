"""``ctta adapt``: to one's own pictures, stopped and killed at any moment, gone on with."""

import csv
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import mistake, network, output, run, write_pictures
from filelock import FileLock

import ctta
from ctta import models
from ctta.cli.adapt import adapt
from ctta.datasets.image_files import read_images
from ctta.hyperparameters import parse_hyperparameters
from ctta.inference.run import InferenceRun

FEW_VIEWS = ("--set", "views=2", "--set", "threshold=1.1")


class Camera:
    """Pictures in a folder, and the options of a command on them."""

    def __init__(self, root: Path, count: int = 20) -> None:
        self.root, self.images = root, root / "camera"
        self.table, self.state = root / "table.csv", root / "state.safetensors"
        self.paths = write_pictures(self.images, range(count))
        self.options = ["--model", network(root), "--images", self.images, "--batch-size", 4, *FEW_VIEWS]
        self.kept = [*self.options, "--out", self.table, "--state", self.state]

    def rows(self, table: Path | None = None) -> list[dict[str, str]]:
        with (table or self.table).open(newline="") as file:
            return list(csv.DictReader(file))

    def uninterrupted(self) -> bytes:
        """The table without a state and without a break."""
        table = self.root / "uninterrupted.csv"
        output(adapt, *self.options, "--out", table)
        return table.read_bytes()


@pytest.fixture
def camera(tmp_path: Path) -> Camera:
    return Camera(tmp_path)


def test_every_picture_is_predicted_while_adapting(camera: Camera) -> None:
    write_pictures(camera.images / "later", range(20, 22))
    text = output(adapt, *camera.options, "--out", camera.table)
    assert f"{camera.table} has 22 rows, 22 of them new." in text and "cotta: mean confidence 0." in text
    model = ctta.CoTTA(models.load(network(camera.root)), views=ctta.views.image_views(2), threshold=1.1)
    paths = [*camera.paths, camera.images / "later/020.png", camera.images / "later/021.png"]
    for number in range(6):
        batch = paths[4 * number : 4 * number + 4]
        confidence, predicted = model(read_images(batch, None)).double().softmax(1).max(1)
        for path, row, probability, label in zip(
            batch, camera.rows()[4 * number :], confidence, predicted, strict=False
        ):
            assert row == {
                "image": path.relative_to(camera.images).as_posix(),
                "batch": str(number),
                "class": str(int(label)),
                "confidence": f"{float(probability):.6f}",
            }
    assert len(camera.rows()) == 22


def test_names_of_classes_and_what_the_source_says(camera: Camera) -> None:
    names = camera.root / "names.txt"
    names.write_text("bird\ncat\ndog, small\nfrog\nship\n")
    summary = json.loads(
        output(adapt, *camera.options, "--out", camera.table, "--classes", names, "--compare", "--json")
    )
    rows = camera.rows()
    words = names.read_text().splitlines()
    source = models.load(network(camera.root))(read_images(camera.paths, None)).argmax(1)
    for row, label in zip(rows, source.tolist(), strict=True):
        assert row["name"] == words[int(row["class"])]
        assert (row["source_class"], row["source_name"]) == (str(label), words[label])
    assert summary["num_changed"] == sum(row["class"] != row["source_class"] for row in rows)
    assert (summary["num_images"], summary["num_skipped"], summary["method"]) == (20, 0, "cotta")
    mean = sum(float(row["confidence"]) for row in rows) / 20
    assert summary["confidence"] == pytest.approx(mean, abs=1e-5)


#: Starts the command again and again in processes that are killed in the middle of writing rows, or between the rows
#: and the state; after each, prints how it ended and how many rows of the table are complete.
KILLED_OFTEN = """
import json, os, signal, sys
from pathlib import Path
import torch, typer
from ctta.inference import run
from ctta.inference.predictions import PredictionFile
from ctta.cli.adapt import adapt

append, save = PredictionFile.append, run.save

def half_a_row(file, rows):
    with file.path.open("a") as stream:
        stream.write("000.png,1")

def killed_at(number, function, before=lambda *given: None):
    calls = 0
    def replacement(*given):
        nonlocal calls
        calls += 1
        if calls == number:
            before(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given)
    return replacement

def child(where, number, seconds_between_saves, arguments):
    torch.set_num_threads(1)
    run.SECONDS_BETWEEN_SAVES = seconds_between_saves
    if where == "rows":
        PredictionFile.append = killed_at(number, append, half_a_row)
    else:
        run.save = killed_at(number, save)
    app = typer.Typer()
    app.command()(adapt)
    app(args=arguments)

kills, table, *arguments = sys.argv[1:]
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports much, here once for all
for kill in json.loads(kills):
    process = os.fork()
    if process == 0:
        child(*kill, arguments)
    _, status = os.waitpid(process, 0)
    print(os.waitstatus_to_exitcode(status), Path(table).read_text().count(".png") - (kill[0] == "rows"))
"""


def test_killed_and_started_again_the_table_is_identical(camera: Camera) -> None:
    expected = camera.uninterrupted()
    #: Where, at which call, seconds between saves; and how many rows the table then has.
    kills = {("rows", 3, 1000): 8, ("state", 1, 0): 4, ("state", 3, 0): 12, ("rows", 2, 0): 12, ("rows", 1, 0): 12}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED_OFTEN, json.dumps(list(kills)), camera.table, *camera.kept]
    ended = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    assert ended.stdout == "".join(f"{-signal.SIGKILL} {rows}\n" for rows in kills.values()), ended.stderr
    assert "20 rows, 8 of them new" in output(adapt, *camera.kept)
    assert camera.table.read_bytes() == expected


def test_ctrl_c_ends_after_the_step_and_loses_nothing(camera: Camera, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = camera.uninterrupted()
    process_batch = InferenceRun.process_batch

    def interrupted(run: InferenceRun, x: torch.Tensor, names: list[str]) -> None:
        if run.model.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        process_batch(run, x, names)

    with monkeypatch.context() as patch:
        patch.setattr(InferenceRun, "process_batch", interrupted)
        result = run(adapt, *camera.kept)
    assert result.exit_code == 130
    assert f"Stopped. The state is {camera.state}; the same command goes on" in result.stderr
    assert len(camera.rows()) == 12
    text = output(adapt, *camera.kept)
    assert "8 of them new" in text and "done again" not in text
    assert camera.table.read_bytes() == expected


def test_a_second_ctrl_c_within_a_step_loses_that_step_only(camera: Camera, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = camera.uninterrupted()
    process_batch = InferenceRun.process_batch

    def stopped(run: InferenceRun, x: torch.Tensor, names: list[str]) -> None:
        process_batch(run, x, names)
        if run.model.num_steps == 3:  # when the model is a step further than what may be saved
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(InferenceRun, "process_batch", stopped)
        patch.setattr("ctta.inference.run.SECONDS_BETWEEN_SAVES", 0)
        result = run(adapt, *camera.kept)
    assert result.exit_code == 130
    assert "12 of them new" in output(adapt, *camera.kept)
    assert camera.table.read_bytes() == expected


def test_pictures_that_come_later_are_done_later(camera: Camera) -> None:
    output(adapt, *camera.kept)
    first = camera.table.read_text()
    assert output(adapt, *camera.kept) == f"Nothing new: all 20 pictures are in {camera.table}.\n"
    early, late = write_pictures(camera.images / "000", range(2))
    output(adapt, *camera.kept)
    assert camera.table.read_text().startswith(first)
    assert [(row["image"], row["batch"]) for row in camera.rows()[20:]] == [("000/000.png", "5"), ("000/001.png", "5")]
    model = ctta.load(camera.state, models.load(network(camera.root)))
    assert model.num_steps == 6 and model.hyperparameters["threshold"] == 1.1
    early.unlink(), late.unlink()
    assert "Nothing new: all 22 pictures" in output(adapt, *camera.kept)


def test_another_folder_goes_on_with_the_stream_and_its_settings(camera: Camera) -> None:
    output(adapt, *camera.kept)
    write_pictures(camera.root / "next day", range(30, 34))
    table = camera.root / "tables" / "next.csv"
    arguments = ["--model", network(camera.root), "--images", camera.root / "next day", "--out", table]
    assert "4 of them new" in output(adapt, *arguments, "--state", camera.state)
    assert [row["batch"] for row in camera.rows(table)] == ["5"] * 4


def test_a_broken_picture_stops_and_can_be_replaced(camera: Camera) -> None:
    expected = camera.uninterrupted()
    content = camera.paths[13].read_bytes()
    camera.paths[13].write_bytes(content[:50])
    assert "013.png is missing, truncated or no picture" in mistake(adapt, *camera.kept)
    assert len(camera.rows()) == 12
    camera.paths[13].write_bytes(content)
    assert "8 of them new" in output(adapt, *camera.kept)
    assert camera.table.read_bytes() == expected


def test_what_killed_saves_left_behind_is_removed(camera: Camera) -> None:
    (camera.root / f".{camera.state.name}.0123abcd.tmp").write_bytes(b"half a state")
    output(adapt, *camera.kept)
    assert not list(camera.root.glob(".*"))


def test_rows_that_a_state_does_not_know_are_kept_aside(camera: Camera) -> None:
    output(adapt, *camera.kept)
    finished = camera.table.read_bytes()
    camera.state.unlink()
    assert "exists, and there is no state at" in mistake(adapt, *camera.kept)
    ctta.save(
        ctta.CoTTA(models.load(network(camera.root)), views=ctta.views.image_views(2), threshold=1.1), camera.state
    )
    assert "20 pictures were done again" in output(adapt, *camera.kept)
    assert camera.table.with_name("table.csv.before").read_bytes() == finished == camera.table.read_bytes()


def test_mistakes_are_one_line(camera: Camera) -> None:
    model, options = network(camera.root), camera.options
    wrong = partial(mistake, adapt, *options, "--out", camera.root / "other.csv")
    assert "must be one of 'source'" in wrong("--method", "cota")
    assert "CoTTA has no setting 'restor'; it has optimizer, decay, restore," in wrong("--set", "restor=0.1")
    assert "restore is a number such as 0.01, got 'much'" in wrong("--set", "restore=much")
    assert "restore must lie between 0 and 1, got 7" in wrong("--set", "restore=7")
    assert "Tent has no setting 'views'" in wrong("--method", "tent")
    assert "holds no pictures" in wrong("--images", camera.root / "nowhere")
    assert "no network" in wrong("--model", "resnet50")
    assert "the device 'cuda:99' cannot be used" in wrong("--device", "cuda:99")
    assert "failed on 4 images of 32x32" in wrong("--size", 32, 32)
    (camera.root / "other.csv").unlink()
    names = camera.root / "names.txt"
    names.write_text("one\ntwo\n")
    assert "2 names for the network's 5 classes" in wrong("--classes", names)
    (camera.root / "other.csv").unlink()
    assert "one class per image" in wrong("--model", network(camera.root, "dense"))
    output(adapt, *camera.kept)
    assert "table.csv exists, and there is no state given" in mistake(adapt, *options, "--out", camera.table)
    assert "begun with restore=0.01, and now restore=0.5" in mistake(adapt, *camera.kept, "--set", "restore=0.5")
    assert "saved by cotta, not by tent" in mistake(
        adapt,
        "--model",
        model,
        "--images",
        camera.images,
        "--out",
        camera.table,
        "--state",
        camera.state,
        "--method",
        "tent",
    )
    assert "fingerprint" in mistake(adapt, *camera.kept, "--model", network(camera.root, "other_weights"))
    assert "has the columns image,batch,class,confidence" in mistake(adapt, *camera.kept, "--compare")
    with FileLock(camera.state.with_name("state.safetensors.lock")):
        assert "another process is adapting with" in mistake(adapt, *camera.kept)
    frozen = ctta.load(camera.state, models.load(model)).freeze()
    ctta.save(frozen, camera.state)
    assert "was saved frozen" in mistake(adapt, *camera.kept)


def test_settings_as_typed() -> None:
    found = parse_hyperparameters(
        ctta.CoTTA, ["optimizer=SGD", "lr=1e-2", "optimizer.momentum=0.9", "gate=element", "views=0"]
    )
    optimizer: Any = found.pop("optimizer")([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.9)
    assert found == {"gate": "element", "views": ()}
    assert parse_hyperparameters(ctta.Tent, ["lr=0.5"])["optimizer"].func is torch.optim.Adam
    for texts, words in {
        ("restore",): "NAME=VALUE",
        ("optimizer=Madam",): "one of torch.optim's",
        ("views=many",): "a number of random views",
        ("optimizer.speed=1",): "does not take speed",
    }.items():
        with pytest.raises(ValueError, match=words):
            parse_hyperparameters(ctta.CoTTA, texts)
    with pytest.raises(ValueError, match="Source has no setting 'lr'; it has output"):
        parse_hyperparameters(ctta.Source, ["lr=1"])


def test_a_guard_watches_and_goes_on_watching(camera: Camera) -> None:
    """All is well: the table is the same as without it; and what happened is on record."""
    text = output(adapt, *camera.options, "--out", camera.table, "--state", camera.state, "--guard")
    assert camera.table.read_bytes() == camera.uninterrupted()
    assert "Guard: all was well." in text
    write_pictures(camera.images / "later", range(20, 24))
    outcome = json.loads(output(adapt, *camera.kept, "--json"))
    assert outcome["num_images"] == 4 and outcome["method"] == "cotta" and set(outcome["events"]) == {"load"}
    lines = (camera.root / "table.audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["load"]


def test_a_state_without_a_guard_gets_none(camera: Camera) -> None:
    output(adapt, *camera.kept)
    write_pictures(camera.images / "later", range(20, 24))
    assert "was begun without a guard" in mistake(adapt, *camera.kept, "--guard")

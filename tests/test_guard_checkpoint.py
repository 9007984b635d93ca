"""Events of a guard, and guarded streams in files."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_streams import (
    WRONG_RATE,
    are_equal,
    collapse,
    event_kinds,
    load_guarded,
    make_batch,
    make_batches,
    make_tent,
    student_weights,
    trained_network,
)
from saved_streams import Header, Tensors, rewrite_file
from torch import nn

import ctta
from ctta.evaluation import BatchRecord
from ctta.guard import CollapseThresholds, EventKind, Guarded, InputSpec


@pytest.fixture
def source() -> nn.Module:
    return trained_network()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer factory that no file can hold."""
    return torch.optim.SGD(parameters, lr=0.01)


def test_every_event_is_a_line_of_the_audit_log(source: nn.Module, tmp_path: Path) -> None:
    audit, path = tmp_path / "audit.jsonl", tmp_path / "s.safetensors"
    model, _ = collapse(source, audit=audit)
    model.freeze().unfreeze().rollback()
    with pytest.raises(ctta.InputError):
        model(torch.rand(2, 3, 9, 9))
    ctta.save(model, path)
    model = load_guarded(path, source, audit=audit)
    model.reset()
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    expected = ["rollback", "freeze", "unfreeze", "rollback", "refusal", "load", "reset"]
    assert [line["kind"] for line in lines] == expected
    assert set(lines[0]) == {"time", "step", "kind", "cause", "signals"}
    assert "collapse score" in lines[0]["cause"] and lines[0]["signals"]["collapse_score"] >= 1
    assert load_guarded(path, source).audit is None, "a file does not say where to write"
    assert model.fork().audit is None


def test_the_list_of_events_is_bounded(source: nn.Module) -> None:
    model = Guarded(make_tent(source))
    for _ in range(150):
        model.rollback()
    assert len(model.events) == 100


def test_kinds_of_events_are_those_of_the_audit_logs() -> None:
    assert {kind.value for kind in EventKind} == {
        *("collapse", "recovery", "rollback", "reset", "soft_reset", "periodic_reset", "freeze", "unfreeze"),
        *("sorted_stream", "refusal", "bad_rows", "skipped", "shadow", "harm", "load", "remedy"),
    }


def test_a_stream_resumes_bit_identically_after_a_rollback(source: nn.Module, tmp_path: Path) -> None:
    model = Guarded(
        make_tent(source, WRONG_RATE),
        input_spec=InputSpec(shape=(3, None, None)),
        inspect_every=2,
        snapshot_every=3,
        cooldown=3,
        thresholds=CollapseThresholds(margin=0.02),
    )
    stream = make_batches(40)
    for x in stream[:20]:
        model(x)
    assert "rollback" in event_kinds(model)
    ctta.save(model, tmp_path / "s")
    again = load_guarded(tmp_path / "s", source)
    assert again.hyperparameters == model.hyperparameters and type(again.wrapped) is ctta.Tent
    twin = copy.deepcopy(model)
    for number, x in enumerate(stream[20:]):
        if number == 10:
            for each in (model, again, twin):
                each.rollback()
        expected = model(x)
        assert torch.equal(again(x), expected) and torch.equal(twin(x), expected)
        assert again.collapse_score == model.collapse_score
    assert event_kinds(again)[1:] == event_kinds(model)[-len(event_kinds(again)) + 1 :]


def test_unserializable_arguments_are_given_to_the_method_inside(source: nn.Module, tmp_path: Path) -> None:
    model = Guarded(ctta.Tent(source, optimizer=sgd))
    model(make_batch())
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match=r"optimizer=\.\.\."):
        ctta.load(tmp_path / "s", source)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    again = load_guarded(tmp_path / "s", source, optimizer=optimizer, shadow=True)
    assert again.shadow and are_equal(student_weights(again.wrapped), student_weights(model.wrapped))
    with pytest.raises(TypeError, match="no hyperparameter"):
        ctta.load(tmp_path / "s", source, optimizer=optimizer, color=1)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda header: header.pop("inside"),
        lambda header: header["inside"].pop("last_good"),
        lambda header: header["inside"].pop("wrapped"),
        lambda header: header["inside"]["wrapped"].update(method="guarded"),
        lambda header: header["inside"]["wrapped"].update(method="os.system"),
        lambda header: header["inside"]["wrapped"].update(counters={"frozen": 1}),
        lambda header: header["inside"]["last_good"].update(optimizer={"groups": [], "numbers": {}}),
        lambda header: header["hyperparameters"].update(audit="/tmp/elsewhere"),
        lambda header: header["hyperparameters"].update(thresholds={"guard": "open", "arguments": {}}),
    ],
)
def test_a_manipulated_file_is_refused(source: nn.Module, tmp_path: Path, tamper: Callable[[Header], Any]) -> None:
    def change(header: Header, tensors: Tensors) -> None:
        tamper(header)

    model = Guarded(make_tent(source))
    model(make_batch())
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError):
        ctta.load(rewrite_file(tmp_path / "s", change), source)


def test_a_file_with_earlier_names_of_the_parts_is_read(source: nn.Module, tmp_path: Path) -> None:
    def use_earlier_names(header: Header, tensors: Tensors) -> None:
        header["inside"]["good"] = header["inside"].pop("last_good")
        for name in list(tensors):
            earlier = name.removeprefix("accuracy.").replace("last_good.", "good.")
            tensors[earlier] = tensors.pop(name)
        assert any(name.startswith("good.") for name in tensors) and "answers.classes" in tensors

    model = Guarded(make_tent(source), inspect_every=1, snapshot_every=1, remember_answers=50)
    for x in make_batches(12):
        model(x)
    assert model.last_ids is not None
    model.feedback(model.last_ids[:3], [0, 1, 2])
    ctta.save(model, tmp_path / "s")
    again = load_guarded(rewrite_file(tmp_path / "s", use_earlier_names), source)
    assert again.accuracy.answers is not None and again.accuracy.answers.summarize().num_labels == 3
    found, expected = ([value.nan_to_num() for value in each.state_dict().values()] for each in (again, model))
    assert are_equal(found, expected)
    again.rollback(), model.rollback()
    assert torch.equal(again(make_batch()), model(make_batch()))


@pytest.mark.parametrize("name", ["source.1.weight", "wrapped.source.1.weight", "last_good.source.1.weight"])
def test_a_file_cannot_write_to_the_source(source: nn.Module, tmp_path: Path, name: str) -> None:
    def add_tensor(header: Header, tensors: Tensors) -> None:
        tensors[name] = torch.zeros(8)

    ctta.save(Guarded(make_tent(source)), tmp_path / "s")
    with pytest.raises(ctta.CheckpointError):
        ctta.load(rewrite_file(tmp_path / "s", add_tensor), source)


class InterruptError(Exception):
    """Raised to interrupt an evaluation."""


def test_an_interrupted_evaluation_resumes(tmp_path: Path) -> None:
    """Also if a file cannot hold every argument of the method inside."""

    def make_model() -> Guarded:
        return Guarded(ctta.Tent(ctta.models.embedded(), optimizer=sgd))

    def interrupt(record: BatchRecord) -> None:
        raise InterruptError

    stream = ctta.data.streams.continual(ctta.data.datasets.sample(), names=("fog",), limit=20, batch_size=10)
    expected = ctta.evaluate(make_model(), stream)
    with pytest.raises(InterruptError):
        ctta.evaluate(make_model(), stream, folder=tmp_path, on_batch=interrupt)
    resumed = ctta.evaluate(make_model(), stream, folder=tmp_path)
    assert resumed.errors == expected.errors
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["settings"]["model"].startswith("Tent(") and about["settings"]["cooldown"] == "10"

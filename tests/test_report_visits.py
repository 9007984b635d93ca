"""The report on streams whose domains come back, that do not wait, or that are made by another protocol."""

from pathlib import Path

import pytest
import torch
from report_runs import CONTINUAL, format_row, read_results, write_cell, write_run
from small_data import create_data, create_stream
from torch import nn

import ctta
from ctta.benchmark.report import score_table, write_report
from ctta.benchmark.report.runs import group_by_method
from ctta.benchmark.report.score_tables import build_visit_table
from ctta.data.streams import cyclic, rounds
from ctta.errors import InputError
from ctta.evaluation.display import NO_NUMBER


def make_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))


def test_table_of_visits() -> None:
    stream = cyclic(create_data(), num_visits=3, names=("contrast", "brightness"), batch_size=8)
    source = ctta.evaluate(make_net(), stream, name="Source")
    other = ctta.evaluate(make_net(1), stream, name="Other")
    table = build_visit_table(group_by_method([source, other]))
    assert table is not None
    assert [column.name for column in table.columns] == ["visit 1", "visit 2", "visit 3", "drift", "harm"]
    row = format_row(table, "Other")
    assert row["visit 2"] == f"{100 * other.visit_errors[1]:.1f}"
    assert row["drift"] == "+0.0" and row["harm"] == NO_NUMBER, "too few batches to tell"
    assert format_row(table, "Source")["harm"] == NO_NUMBER
    assert build_visit_table(group_by_method([ctta.evaluate(make_net(), create_stream())])) is None
    with pytest.raises(InputError):
        other.time_to_harm(ctta.evaluate(make_net(), create_stream()))


def test_visits_that_have_columns_already_are_not_repeated() -> None:
    names = ("gaussian_noise", "shot_noise", "impulse_noise", "brightness", "contrast", "pixelate")
    stream = rounds(create_stream(names=names, limit=2, batch_size=2), 4)
    table = build_visit_table(group_by_method([ctta.evaluate(make_net(), stream, name="Source")]))
    assert table is not None
    assert [column.name for column in table.columns] == ["visit 1", "visit 4", "drift", "harm"]


def test_caption_says_what_a_round_is_only_if_it_has_several_segments() -> None:
    for names, caption in {
        ("contrast",): "Error in percent",
        ("gaussian_noise", "shot_noise", "impulse_noise", "brightness", "contrast", "pixelate"): (
            "Error in percent; each round is the mean of its 6 segments"
        ),
    }.items():
        stream = rounds(create_stream(names=names, limit=2, batch_size=2), 4)
        assert score_table([ctta.evaluate(make_net(), stream, name="Source")]).caption == caption


def test_report_says_how_the_stream_was_made(tmp_path: Path) -> None:
    stream = rounds(create_stream(batch_size=8), 2)
    for name, ratio in {"source": 1, "other": 3}.items():
        ctta.evaluate(make_net(), stream, folder=tmp_path / "run" / name, name=name, step_ratio=ratio)
    page = write_report([tmp_path / "run"], tmp_path / "report")
    html, markdown = page.read_text(), (tmp_path / "report" / "report.md").read_text()
    for text in (html, markdown):
        assert "Batches of 8: 4.0 of 4 classes and 1.0 of 2 domains on average." in text
        assert "Visits" in text and "one step per 3 batches" in text
    assert ": visits," in (tmp_path / "report" / "table.csv").read_text()


def test_published_numbers_are_not_of_another_protocol(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    labels = {"recipe": "cifar10c", "order": None, "seed": None}
    for changed in ([], ["--protocol rotta"]):
        write_cell(run, "Source", [[87] * 50] * 15, domains=CONTINUAL, labels={**labels, "changed": changed})
    plain, chosen = read_results(run)
    assert score_table([plain]).has_published
    table = score_table([chosen])
    assert not table.has_published
    assert table.notes == ("Published numbers are not shown: these are of --protocol rotta.",)

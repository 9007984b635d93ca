"""Results and comparisons as people see them: text, tables, plots, and the report of their folders."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import output
from labeled_images import BYTES, X, Y, in_batches, make_net
from torch.utils.data import DataLoader, TensorDataset

import ctta
from ctta.cli.bench import report
from ctta.data.streams import Stream, continual, in_memory
from ctta.errors import ConfigError, InputError


def make_stream() -> Stream:
    return continual(in_memory(BYTES, Y.numpy(), name="mine", batch_size=8), names=("contrast", "brightness"))


@pytest.fixture(scope="module")
def comparison() -> ctta.Comparison:
    # Batches of eight alone are noisy statistics, so that the methods differ.
    tent, bn = ctta.Tent(make_net(), batch_stats=1.0), ctta.BNStats(make_net(), batch_stats=1.0)
    return ctta.compare({"source": make_net(), "tent": tent, "bn": bn}, make_stream())


def test_a_result_has_three_lines(comparison: ctta.Comparison) -> None:
    result = comparison.results["tent"]
    first, second, third = repr(result).splitlines()
    assert first.startswith("tent on in_memory mine corruptions=") and first.endswith(
        "(80 images, 10 batches, 2 segments)"
    )
    interval = result.interval
    assert interval is not None
    ends = f"(95 % interval {100 * interval.low:.1f} to {100 * interval.high:.1f})"
    worst = f"worst {result.worst[0]} with {100 * result.worst[1]:.1f} %"
    assert second.startswith(f"error {100 * result.error:.1f} % {ends}, {worst}, calibration error")
    assert "ms per image" in third and third.endswith(f"stream {result.stream_hash}")


def test_an_incomplete_result_says_so(comparison: ctta.Comparison) -> None:
    result = comparison.results["tent"]
    half = ctta.Result(**{**vars_of(result), "batches": result.batches[:3]})
    assert "incomplete: 3 of 10 batches" in repr(half) and "incomplete" in half._repr_html_()


def vars_of(result: ctta.Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ctta.Result.__dataclass_fields__}


def test_rows_and_frames(comparison: ctta.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    result = comparison.results["bn"]
    rows = result.to_records()
    assert [row["domain"] for row in rows] == ["contrast 5", "brightness 5"]
    assert [row["error"] for row in rows] == list(result.errors)
    assert sum(row["seconds"] for row in rows) == pytest.approx(result.seconds)
    table = comparison.to_records()
    assert [row["method"] for row in table] == ["source", "tent", "bn"]
    (best,) = [row for row in table if row["difference_to_best"] == 0 and row["difference_low"] is None]
    assert best["method"] == comparison.best and best["error"] == min(row["error"] for row in table)
    assert [row["update_share"] for row in table] == [0, 1, 0]
    assert [row["peak_mib"] for row in table] == [each.peak_mib for each in comparison.results.values()]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        result.to_frame()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda records: ("frame", records)))
    assert result.to_frame() == ("frame", rows) and comparison.to_frame() == ("frame", table)


class Cells(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.is_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        self.is_cell = tag in ("td", "th")
        if self.is_cell:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.is_cell:
            self.rows[-1][-1] += data


def test_notebooks_show_tables(comparison: ctta.Comparison) -> None:
    result = comparison.results["tent"]
    rows = Cells(result._repr_html_()).rows
    assert rows[0][:3] == ["method", "domain", "num_images"] and [row[1] for row in rows[1:]] == list(result.domains)
    rows = Cells(comparison._repr_html_()).rows
    assert [row[0] for row in rows[1:]] == ["source", "tent", "bn"]
    hostile = ctta.compare({"<script>": make_net()}, in_batches())
    assert "script" not in Cells(hostile._repr_html_()).tags


def test_a_comparison_is_a_table_with_intervals(comparison: ctta.Comparison) -> None:
    head, columns, *rows, sentence = repr(comparison).splitlines()
    assert head.startswith("Comparison on in_memory mine corruptions=") and head.endswith("(80 images)")
    assert columns.split("  ")[0] == "" and columns.count("95 % interval") == 2
    for line, (name, result) in zip(rows, comparison.results.items(), strict=True):
        assert line.startswith(name) and f"{100 * result.error:.1f}" in line and " to " in line
    learned = dict.fromkeys(comparison.results, "0") | {"tent": "100"}
    for row in comparison._format_rows():
        result = comparison.results[row[""]]
        assert row["ECE %"] == f"{100 * result.calibration_error:.1f}" and row["updates %"] == learned[row[""]]
        assert row["peak MiB"] == f"{result.peak_mib:,}"
    assert sentence.startswith(f"{comparison.best} has the lowest mean error, ")
    assert "95 % interval" in sentence and sentence.endswith("; one run each.")
    assert ("but not beyond noise" in sentence) == (not comparison.is_decided)


def test_the_winner_is_decided_only_beyond_noise() -> None:
    """One network knows the answers; two that guess differ by chance only."""
    answers = torch.nn.functional.one_hot(Y, 5).float()
    x = torch.cat([answers, torch.rand(40, 5, generator=torch.Generator().manual_seed(3))], 1)

    class Columns(torch.nn.Module):
        def __init__(self, start: int, scale: float = 1.0) -> None:
            super().__init__()
            self.start = start
            self.scale = torch.nn.Parameter(torch.tensor(scale))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, self.start : self.start + 5] * self.scale

    batches = list(zip(x.split(4), Y.split(4), strict=True))
    clear = ctta.compare({"guess": Columns(5), "know": Columns(0)}, batches)
    assert clear.best == "know" and clear.is_decided and clear.ranking == ["know", "guess"]
    assert "know has the lowest mean error, 0.0 %, " in clear.headline and "noise" not in clear.headline
    lead = clear.difference("know", "guess")
    assert lead is not None and lead.high < 0 and lead.estimate == -clear.results["guess"].error
    noise = ctta.compare({"guess": Columns(5), "reverse": Columns(5, -1.0)}, batches)
    assert not noise.is_decided and "but not beyond noise" in noise.headline
    few = ctta.compare({"guess": Columns(5), "know": Columns(0)}, batches[:3])
    assert not few.is_decided and "too few batches for an interval" in few.headline
    with pytest.raises(InputError):
        clear.difference("know", "other")


def test_methods_are_named_in_many_ways() -> None:
    net = make_net()
    names = ctta.compare(["source", "bn_stats"], in_batches(), net=net)
    classes = ctta.compare([net, ctta.BNStats], in_batches())
    models = ctta.compare([ctta.Source(net), ctta.BNStats(net)], in_batches())
    assert list(names.results) == ["source", "bn_stats"] and list(classes.results) == ["source", "BNStats"]
    assert list(models.results) == ["Source", "BNStats"]
    errors = [[result.error for result in each.results.values()] for each in (names, classes, models)]
    assert errors[0] == errors[1] == errors[2]


def test_data_that_can_be_read_once_goes_through_all_methods() -> None:
    methods = {"source": make_net(), "tent": "tent"}
    shuffled = ctta.compare(methods, DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True))
    assert len({result.stream_hash for result in shuffled.results.values()}) == 1
    once = ctta.compare(methods, (batch for batch in in_batches()))
    alone = ctta.evaluate(ctta.Tent(make_net()), in_batches())
    assert once.results["tent"].errors == alone.errors and once.results["tent"].stream_hash == alone.stream_hash


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "at least one method"),
        ("tent", r"got one: give a dictionary such as"),
        (make_net(), "got one: give a dictionary"),
        ({"tent": "tent"}, r"'tent' needs a network to adapt: pass net="),
        ([ctta.Tent(make_net()), ctta.Tent(make_net())], "two methods are called 'Tent'"),
        ({"a": 3}, "expected a model"),
    ],
)
def test_other_methods_are_told_what_to_do(models: Any, message: str) -> None:
    with pytest.raises((InputError, ConfigError, TypeError), match=message):
        ctta.compare(models, in_batches())


def test_one_model_is_not_compared_with_itself() -> None:
    model = ctta.Tent(make_net())
    with pytest.raises(ConfigError):
        ctta.compare({"a": model, "b": model}, in_batches())


def test_data_without_labels_is_not_compared() -> None:
    with pytest.raises(InputError):
        ctta.compare({"source": make_net()}, [X])


def test_plots(comparison: ctta.Comparison) -> None:
    from matplotlib import pyplot

    axes = comparison.results["source"].plot()
    assert comparison.results["tent"].plot(axes) is axes
    assert [line.get_label() for line in axes.lines if not str(line.get_label()).startswith("_")] == ["source", "tent"]
    values = np.asarray(axes.lines[0].get_ydata())
    assert values == pytest.approx([100 * error for error in comparison.results["source"].errors])
    dots = comparison.plot()
    assert [text.get_text() for text in dots.get_yticklabels()] == ["source", "tent", "bn"]
    for each in (axes, dots):
        each.figure.canvas.draw()
    pyplot.close("all")


def test_folders_resume_and_make_a_report(tmp_path: Path) -> None:
    """Compare, then ``ctta report FOLDER``; also of a single evaluation, and of one without labels."""
    folder = tmp_path / "camera"
    methods = {"source": make_net(), "TENT / fast": "tent"}
    first = ctta.compare(methods, make_stream(), folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == ["TENT_fast", "source"]
    assert ctta.compare(methods, make_stream(), folder=folder).results == first.results
    assert output(report, folder).startswith("Report: ")
    page = (folder / "report" / "report.html").read_text()
    assert "<title>Results: camera</title>" in page and "TENT / fast" in page and "Commands" not in page
    assert first.headline.removesuffix(".") in page
    rows = (folder / "report" / "report.md").read_text().splitlines()
    names = [row.split(" | ")[0] for row in rows if row.startswith(("| source", "| TENT"))]
    assert names == ["| source", "| TENT / fast"] * 3  # the source network first, whatever its folder is called
    output(report, folder / "source", "--out", tmp_path / "one")
    text = (tmp_path / "one" / "report.md").read_text()
    error = f"{100 * first.results['source'].error:.1f}"
    assert f"source has a mean error of {error} %, 95 % interval" in text
    ctta.evaluate(make_net(), [X], folder=folder / "unlabeled")
    output(report, folder)
    assert "has no labels, and so no error to report" in (folder / "report" / "report.md").read_text()

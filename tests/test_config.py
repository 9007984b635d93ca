"""ctta.toml: written, read, and used by Python and by the commands."""

from pathlib import Path
from typing import Any

import pytest
from command_line import output, user_error, write_images, write_network

import ctta
from ctta.cli.adapt import adapt
from ctta.cli.serve import serve
from ctta.core.config import AdaptationConfig, read_config, relative_model


def test_what_is_written_is_read(tmp_path: Path) -> None:
    config = AdaptationConfig(
        "tent",
        {"lr": 3e-05, "batch_stats": "blend"},
        ("reset_every=1000",),
        model="timm:resnet50",
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.2, 0.2),
        size=(64, 32),
        batch_size=16,
        tables={"evidence": {"error": 0.25, "labels": True, "corruptions": ["fog", 'a "quoted" \\ name']}},
    )
    config.write(tmp_path / "ctta.toml", comment=["Why", ""])
    assert read_config(tmp_path / "ctta.toml") == config
    assert (tmp_path / "ctta.toml").read_text().startswith("# Why\n#\n")


def test_a_path_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_network(tmp_path)
    path = tmp_path / "ctta.toml"
    assert relative_model(model, path) == "file:network.py:net" and relative_model("embedded", path) == "embedded"
    AdaptationConfig("tent", {"lr": 1e-4}, model=relative_model(model, path)).write(path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model_of_file = ctta.from_config("../ctta.toml")
    assert isinstance(model_of_file, ctta.Tent) and model_of_file.optimizer is not None
    assert model_of_file.optimizer.param_groups[0]["lr"] == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no method"),
        ("[method]\nname = 3", "names no method"),
        ("[method]\nnmae = 'tent'", "did you mean 'name'"),
        ("[method]\nname = 'tent'\nsettings = 3", "settings must be a table"),
        ("[method]\nname = 'tent'\n[network]\nsize = [3]", "size must be"),
        ("[method]\nname = 'tent'\n[network]\nmean = 'x'", "mean must be a list"),
        ("[method]\nname = 'tent'\n[network]\nmodel = 3", "model must be a text"),
        ("[method]\nname = 'tent'\n[stream]\nbatch_size = 0", "batch_size must be"),
        ("network = 3", "expected a table"),
        ("[method", "is not a TOML file"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ctta.toml").write_text(text)
    with pytest.raises(ctta.ConfigError, match=message):
        read_config(tmp_path / "ctta.toml")


def test_a_missing_file_and_a_missing_network(tmp_path: Path) -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.from_config(tmp_path / "ctta.toml")
    AdaptationConfig("tent").write(tmp_path / "ctta.toml")
    with pytest.raises(ctta.ConfigError):
        ctta.from_config(tmp_path / "ctta.toml")


def test_adapt_takes_everything_from_the_file(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(6), side=24)
    path = tmp_path / "ctta.toml"
    AdaptationConfig(
        "tent", {"lr": 1e-4, "batch_stats": "auto"}, model=write_network(tmp_path), size=(16, 16), batch_size=3
    ).write(path)
    common = ("--config", path, "--images", tmp_path / "images")
    text = output(adapt, *common, "--out", tmp_path / "a.csv", "--json")
    assert '"method": "tent"' in text and "lr=0.0001" in text and "batch_stats='auto'" in text
    rows = (tmp_path / "a.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]] == ["0", "0", "0", "1", "1", "1"]
    # Options replace what the file says; its settings belong to its method.
    text = output(adapt, *common, "--out", tmp_path / "b.csv", "--json", "--method", "bn_stats", "--batch-size", 6)
    assert '"method": "bn_stats"' in text and {row.split(",")[1] for row in _rows(tmp_path / "b.csv")} == {"0"}


def test_adapt_without_a_network(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(2))
    common = ("--images", tmp_path / "images", "--out", tmp_path / "a.csv")
    assert "give --model SPEC, or --config FILE" in user_error(adapt, *common)
    AdaptationConfig("tent").write(tmp_path / "ctta.toml")
    assert "names no network" in user_error(adapt, *common, "--config", tmp_path / "ctta.toml")


def test_serve_takes_everything_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ctta.toml"
    AdaptationConfig("tent", {"lr": 1e-4}, model=write_network(tmp_path), size=(16, 16)).write(path)
    served: list[Any] = []
    monkeypatch.setattr("ctta.serve.serve", lambda service, **options: served.append(service))
    output(serve, "--config", path)
    (service,) = served
    method = service.factory.template.unwrapped
    service.release()
    assert isinstance(method, ctta.Tent) and method.optimizer is not None and service.image_size == (16, 16)
    assert method.optimizer.param_groups[0]["lr"] == 1e-4


def _rows(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]

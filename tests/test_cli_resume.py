"""Commands that continue a saved state use its method, also if only settings are given."""

import signal
from pathlib import Path

import pytest
from command_line import output, user_error, write_images, write_network
from serving import ServerProcess, make_images, make_tent

import ctta
from ctta.cli.adapt import adapt
from ctta.core.hyperparameters import format_hyperparameters
from ctta.errors import ConfigError
from ctta.serve import Service, build_method, resume_method


@pytest.mark.parametrize("options", [("--no-guard",), ()], ids=["alone", "guarded"])
def test_adapt_takes_settings_for_the_method_of_its_state(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder, table, state = tmp_path / "images", tmp_path / "a.csv", tmp_path / "a.safetensors"
    command = ("--model", write_network(tmp_path), "--images", folder, "--out", table, "--state", state, *options)
    write_images(folder, range(4))
    assert "tent" in output(adapt, *command, "--method", "tent", "--set", "lr=0.01")
    write_images(folder, range(8))
    assert "8 rows, 4 of them new" in output(adapt, *command, "--set", "lr=0.01")
    write_images(folder, range(12))
    assert "other settings" in user_error(adapt, *command, "--set", "lr=0.02")
    assert "restore" in user_error(adapt, *command, "--set", "restore=0.1")  # not a setting of TENT


def test_adapt_keeps_the_precision_of_its_state(tmp_path: Path) -> None:
    folder, state, half = tmp_path / "images", tmp_path / "a.safetensors", ("--amp", "bf16")
    write_images(folder, range(8))
    command = ("--model", write_network(tmp_path), "--images", folder, "--method", "tent", "--batch-size", 4)
    output(adapt, *command, "--out", tmp_path / "full.csv")
    output(adapt, *command, "--out", tmp_path / "half.csv", "--state", state, *half, "--compare")
    rows = [(tmp_path / name).read_text().splitlines() for name in ("full.csv", "half.csv")]
    assert all(not half.startswith(full) for full, half in zip(rows[0][1:], rows[1][1:], strict=True))
    model = ctta.load(state, ctta.models.load(write_network(tmp_path)))
    assert model.amp == "bf16"
    write_images(folder, range(12))
    changed = user_error(adapt, *command, "--out", tmp_path / "half.csv", "--state", state, "--amp", "fp16")
    assert "other settings" in changed and "amp" in changed
    output(adapt, *command, "--out", tmp_path / "half.csv", "--state", state, "--compare")  # in that of the state
    output(adapt, *command, "--out", tmp_path / "whole.csv", *half, "--compare")
    assert (tmp_path / "half.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_a_service_keeps_the_precision_of_its_streams(tmp_path: Path) -> None:
    net = make_tent(tmp_path).copy_of_source()
    Service(build_method(net, "tent", ["amp=bf16"]), tmp_path / "state").release()
    assert resume_method(net, tmp_path / "state", ["amp=bf16"]).amp == "bf16"
    with pytest.raises(ConfigError, match="amp"):
        Service(build_method(net, "tent", []), tmp_path / "state")


def test_the_command_says_what_it_saved_and_resumes_with_the_same_method(tmp_path: Path) -> None:
    """Settings without a method are those of the saved streams' method."""
    state, options = tmp_path / "state", ("--set", "lr=0.01", "--no-guard", "--window", 0)
    for method, names in (("--method", "tent"), "ab"), ((), "a"):
        server = ServerProcess(state, *method, *options)
        with server as client:
            for name in names:
                answer = client.infer(name, make_images(4))
            assert server.stop(signal.SIGTERM) == 0
            assert server.process.stdout
            assert server.process.stdout.read().splitlines()[-1] == f"Saved 2 streams in {state}."
    assert answer["update"] == 2


def test_the_method_of_saved_streams_is_found_by_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a package with methods is installed that cannot be imported."""
    info = tmp_path / "site" / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ctta.methods]\nbroken = no_such_module:Tent\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    net = make_tent(tmp_path).copy_of_source()
    for name in ("tent", "cotta", "cotta_fast", "cotta_paper", "bn_stats"):
        settings = ["views=2"] if name.startswith("cotta") else []
        model = build_method(net, name, settings)
        Service(model, tmp_path / name).release()
        found = resume_method(net, tmp_path / name, settings)
        assert type(found) is type(model)
        assert format_hyperparameters(found.hyperparameters) == format_hyperparameters(model.hyperparameters)
    assert type(resume_method(net, None)) is type(resume_method(net, tmp_path / "empty")) is ctta.VANE
    (tmp_path / "tent/service.json").write_text('{"format": 2, "method": "Mine"}')
    with pytest.raises(ConfigError, match="give --method"):
        resume_method(net, tmp_path / "tent")

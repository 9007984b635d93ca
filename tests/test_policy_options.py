"""Policies as a user types them: ``--policy reset_every=1000`` in adapt, serve and bench."""

import json
from pathlib import Path

import pytest
import torch
from benchmark_runs import write_network as write_benchmark_network
from command_line import output, user_error, write_images, write_network

import ctta
from ctta import policies
from ctta.benchmark import BenchmarkOptions, build_task
from ctta.cli.adapt import adapt
from ctta.cli.bench import bench
from ctta.cli.catalog import methods
from ctta.cli.options import AdaptationOptions
from ctta.cli.serve import serve
from ctta.core.registry import parse_settings
from ctta.data.datasets.image_files import read_images
from ctta.errors import ConfigError
from ctta.policies import POLICIES, format_policy, parse_policy
from ctta.serve import build_method


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reset_every=1000", policies.reset_every(1000)),
        ("reset_every", policies.reset_every()),
        ("reset_every=64000,unit=images", policies.reset_every(64_000, "images")),
        (" restore = 0.02 ", policies.restore(0.02)),
        ("kalman, noise=0.01, pull_to=predicted", policies.kalman(noise=0.01, pull_to="predicted")),
        ("average_with_source=1", policies.average_with_source(1)),
        ("frozen_teacher", policies.frozen_teacher()),
    ],
)
def test_policies_are_parsed_from_text(text: str, expected: policies.Policy) -> None:
    assert parse_policy(text) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_formatted_policies_are_parsed_again(name: str) -> None:
    assert parse_policy(format_policy(POLICIES[name]())) == POLICIES[name]()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reset_evry=5", r"no policy 'reset_evry' \(did you mean 'reset_every'\?\); expected one of restore, "),
        (
            "reset_every=5,units=images",
            r"reset_every has no setting 'units' \(did you mean 'unit'\?\); it has num, unit",
        ),
        ("reset_every=2.5", "num must be an integer such as 1000, got 2.5"),
        ("reset_every=0", "num must be an integer of at least 1, got 0"),
        ("reset_every=5,images", "expected a setting NAME=VALUE"),
        ("reset_every=5,unit=frames", "unit must be one of 'batches', 'images', got 'frames'"),
        ("restore=2", "probability must lie between 0 and 1, got 2"),
        ("frozen_teacher=1", "frozen_teacher has no settings, got 'frozen_teacher=1': leave out '=1'"),
    ],
)
def test_mistyped_policies_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_policy(text)


def test_policies_are_settings_of_a_method() -> None:
    found = parse_settings(ctta.Tent, ["lr=1e-4", "policies=restore=0.1", "policies=reset_every=5"])
    assert found["policies"] == (policies.restore(0.1), policies.reset_every(5))
    with pytest.raises(ConfigError):
        parse_settings(ctta.Source, ["policies=restore=0.1"])


def test_adapt_resets_and_remembers_it(tmp_path: Path) -> None:
    paths = write_images(tmp_path / "camera", range(12))
    table, state = tmp_path / "table.csv", tmp_path / "state.safetensors"
    model = write_network(tmp_path)
    arguments = ["--model", model, "--images", tmp_path / "camera", "--out", table, "--state", state, "--no-guard"]
    arguments += ["--batch-size", 4, "--order", "name"]
    output(adapt, *arguments, "--method", "tent", "--set", "lr=0.1", "--policy", "reset_every=2")
    saved = ctta.load(state, ctta.models.load(model))
    expected = ctta.Tent(ctta.models.load(model), lr=0.1, batch_stats="blend", policies=[policies.reset_every(2)])
    for start in range(0, 12, 4):
        expected(read_images(paths[start : start + 4], None))
    assert saved.hyperparameters["policies"] == (policies.reset_every(2),)
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in expected.state_dict().items())
    write_images(tmp_path / "camera", range(12, 16))
    assert "reset_every" in user_error(adapt, *arguments, "--policy", "reset_every=3")
    output(adapt, *arguments)  # goes on as it was


def test_serve_takes_policies(tmp_path: Path) -> None:
    model = write_network(tmp_path)
    error = user_error(serve, "--model", model, "--policy", "reset_evry=5", "--port", 0)
    assert error.startswith("there is no policy 'reset_evry' (did you mean 'reset_every'?)")
    built = build_method(ctta.models.load(model), "tent", AdaptationOptions(policies=["reset_every=5"]).texts)
    assert built.policies == (policies.reset_every(5),)


def test_bench_applies_policies_to_methods_that_learn(tmp_path: Path) -> None:
    model = f"file:{write_benchmark_network(tmp_path)}:tiny"

    def run(name: str, *typed: str) -> dict[str, float]:
        outcome = ctta.benchmark.run(
            "embedded",
            methods=["bn_stats", "tent"],
            model=model,
            limit=60,
            batch_size=20,
            corruptions=["fog"],
            settings=["tent.lr=0.5"],
            policies=typed,
            threads=1,
            folder=tmp_path / name,
            report=False,
        )
        return {result.labels["row"]: result.error for result in outcome.results}

    plain, single = run("plain"), run("single", "tent.reset_every,num=1")
    arguments = ["embedded", "--model", model, "--methods", "bn_stats,tent", "--corruptions", "fog", "--limit", 60]
    arguments += ["--batch-size", 20, "--threads", 1, "--set", "tent.lr=0.5", "--json", "--out", tmp_path / "all"]
    rows = [json.loads(line) for line in output(bench, *arguments, "--policy", "reset_every=1").splitlines()]
    # TENT that is reset after every batch predicts like BN Stats, since predictions precede the update.
    assert plain["tent"] != plain["bn_stats"]
    assert single["tent"] == plain["bn_stats"]
    assert {row["row"]: row["error"] for row in rows} == single
    assert rows[1]["changed"][-2:] == ["--policy reset_every=1", "--set tent.lr=0.5"]
    assert json.loads((tmp_path / "all/run.json").read_text())["options"]["policies"] == ["reset_every=1"]
    assert "policies" not in json.loads((tmp_path / "plain/run.json").read_text())["options"]
    with pytest.raises(ConfigError):
        run("all", "reset_every=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reset_evry=1", "no policy 'reset_evry'"),
        ("tnet.reset_every=1", r"names a method that this recipe does not have \(did you mean 'tent'\?\)"),
        ("source.reset_every=1", "Source takes no policies"),
    ],
)
def test_bench_refuses_mistyped_policies(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_task("embedded", BenchmarkOptions(policies=(text,)))


def test_policies_in_python_are_objects_or_texts(tmp_path: Path) -> None:
    model = f"file:{write_benchmark_network(tmp_path)}:tiny"
    outcome = ctta.benchmark.run(
        "embedded",
        methods=["tent"],
        model=model,
        limit=4,
        corruptions=["fog"],
        policies=[policies.reset_every(7)],
        folder=tmp_path / "run",
        report=False,
    )
    assert "reset_every(num=7" in outcome.results[0].settings["policies"]


def test_a_random_policy_needs_seeds() -> None:
    task = build_task("embedded", BenchmarkOptions(policies=("cotta_weight_average.restore=0.1",)))
    assert task.methods["cotta_weight_average"].is_random


def test_policies_are_listed() -> None:
    assert "Policies, for methods that learn: restore, restore_by_fisher, " in output(methods)

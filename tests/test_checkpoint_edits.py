"""Every field of a checkpoint's header, edited: refused on load, or the loaded model takes the next step."""

import random
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import MODELS, REPLACEMENTS, edit, is_refused, paths_in, save_adapted
from saved_streams import make_network, read_file

import ctta

#: Of the many edits of a field, those that are tried here; benchmarks/chaos/edit_checkpoints.py tries all.
NUM_EDITS = dict.fromkeys(MODELS, 1) | {"tent": 2, "cotta": 2, "t3a": 2}


@pytest.mark.parametrize("name", MODELS)
def test_edited_headers(name: str, tmp_path: Path) -> None:
    save_adapted(name, tmp_path / "s")
    header, tensors = read_file(tmp_path / "s")
    generator, num_refused, num_edits = random.Random(name), 0, 0
    for path in paths_in(header):
        for replacement in generator.sample(REPLACEMENTS, NUM_EDITS[name]):
            try:
                num_refused += is_refused(edit(header, path, replacement), tensors, path, tmp_path / "edited")
            except Exception as error:
                raise AssertionError(f"{'.'.join(map(str, path))} = {str(replacement)[:40]}") from error
            num_edits += 1
    assert num_edits / 4 < num_refused < num_edits


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hyperparameters", "output"), "x"),
        (("hyperparameters", "output"), 0),
        (("hyperparameters", "output"), [0]),
        (("hyperparameters", "threshold"), "high"),
        (("hyperparameters", "views", "arguments", "num_views"), 10**18),
        (("hyperparameters", "views", "arguments", "num_views"), 0),
        (("hyperparameters", "views", "arguments", "mean"), 0.5),
        (("hyperparameters", "views", "arguments", "color"), float("nan")),
        (("hyperparameters", "views", "arguments", "motion"), 1e300),
    ],
)
def test_settings_that_loaded_once_and_failed_later(path: tuple[str, ...], value: object, tmp_path: Path) -> None:
    save_adapted("cotta", tmp_path / "s")
    header, tensors = read_file(tmp_path / "s")
    assert is_refused(edit(header, path, value), tensors, path, tmp_path / "edited")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hyperparameters", "thresholds"), None),
        (("hyperparameters", "input_spec"), 1),
        (("hyperparameters", "input_spec", "arguments", "high"), -1),
        (("hyperparameters", "input_spec", "arguments", "low"), "low"),
        (("hyperparameters", "input_spec", "arguments", "shape"), {"sequence": ["x"]}),
        (("hyperparameters", "thresholds", "arguments", "memory"), 10**400),
    ],
)
def test_settings_of_a_guard_that_loaded_once_and_failed_later(
    path: tuple[str, ...], value: object, tmp_path: Path
) -> None:
    save_adapted("guarded_tent", tmp_path / "s")
    header, tensors = read_file(tmp_path / "s")
    assert is_refused(edit(header, path, value), tensors, path, tmp_path / "edited")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hyperparameters", "weak"), []),
        (("hyperparameters", "strong", "arguments", "num_views"), 1),
        (("optimizer", "groups", 0, "lr"), 10**18),
        (("optimizer", "groups", 0, "weight_decay"), 10**30),
    ],
)
def test_settings_of_adacontrast_that_loaded_once_and_failed_later(
    path: tuple[Any, ...], value: object, tmp_path: Path
) -> None:
    save_adapted("adacontrast", tmp_path / "s")
    header, tensors = read_file(tmp_path / "s")
    assert is_refused(edit(header, path, value), tensors, path, tmp_path / "edited")


def test_what_the_caller_of_load_gives_is_the_callers_mistake(tmp_path: Path) -> None:
    """As the constructor says it; the file is not blamed."""
    save_adapted("cotta", tmp_path / "s")
    with pytest.raises(ctta.ConfigError, match="decay"):
        ctta.load(tmp_path / "s", make_network(), decay=7)
    with pytest.raises(TypeError, match="must be an integer"):
        ctta.load(tmp_path / "s", make_network(), views_at_once=1.5)
    loaded = ctta.load(tmp_path / "s", make_network(), decay=0.5)
    assert loaded.hyperparameters["decay"] == 0.5
    save_adapted("guarded_tent", tmp_path / "g")
    with pytest.raises(ctta.ConfigError):
        ctta.load(tmp_path / "g", make_network(), cooldown=-1)
    with pytest.raises(ctta.ConfigError):
        ctta.load(tmp_path / "g", make_network(), batch_stats=3)


def test_a_mistake_of_the_file_stays_one_whatever_is_given(tmp_path: Path) -> None:
    save_adapted("cotta", tmp_path / "s")
    header, tensors = read_file(tmp_path / "s")
    edited = edit(header, ("hyperparameters", "restore"), 3)
    assert is_refused(edited, tensors, ("hyperparameters", "restore"), tmp_path / "edited")
    with pytest.raises(ctta.CheckpointError, match="restore"):
        ctta.load(tmp_path / "edited", make_network(), decay=0.5)


def test_another_output_may_be_given(tmp_path: Path) -> None:
    """The same weights may be in a network that returns something else."""
    save_adapted("tent", tmp_path / "s")
    model = ctta.load(tmp_path / "s", make_network(), output="logits")
    assert model.output == "logits"

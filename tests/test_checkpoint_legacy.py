"""Files that ctta 0.1 wrote still load, and predict what it predicted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ctta
from ctta.guard import CollapseThresholds, Guarded, InputSpec

#: Streams after ten batches; the networks, the eleventh batch, and what ``predict`` returned for it.
FOLDER = Path(__file__).parent / "data" / "v0_1"
EXPECTED = load_file(FOLDER / "expected.safetensors")
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors") if path.stem != "expected")


def network(name: str) -> nn.Module:
    """Return the network that a stream was started with."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    is_dense = name == "cotta_seg"
    layers += [nn.Conv2d(8, 5, 1)] if is_dense else [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    net, prefix = nn.Sequential(*layers).double(), "px." if is_dense else "bn."
    weights = {name.removeprefix(prefix): value for name, value in EXPECTED.items() if name.startswith(prefix)}
    net.load_state_dict(weights)
    return net


def batch() -> Tensor:
    return EXPECTED["batch"].double()


def test_every_method_of_that_version_is_covered() -> None:
    methods = {"source", "bn_stats", "pseudo_label", "tent", "test_aug", "cotta"}
    assert methods <= set(ctta.METHODS)
    assert set(FILES) >= {*methods, "cotta_seg", "guarded_cotta", "guarded_tent"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_predicts_what_it_did(name: str) -> None:
    model = ctta.load(FOLDER / f"{name}.safetensors", network(name))
    assert model.num_steps == 10
    torch.testing.assert_close(model.predict(batch()), EXPECTED[f"logits.{name}"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", FILES)
def test_a_file_saved_again_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    model = ctta.load(FOLDER / f"{name}.safetensors", network(name))
    ctta.save(model, tmp_path / "again")
    again = ctta.load(tmp_path / "again", network(name))
    assert repr(again) == repr(model) and again.counters == model.counters
    for _ in range(3):
        assert torch.equal(again(batch()), model(batch()))


def test_renamed_settings_keep_their_values() -> None:
    model = ctta.load(FOLDER / "guarded_settings.safetensors", network("guarded_settings"))
    assert isinstance(model, Guarded) and model.frozen
    assert model.hyperparameters == {
        "input_spec": InputSpec(shape=(3, None, None), dtype="float64", low=0, high=1),
        "bad_rows": "source",
        "on_collapse": "soft_reset",
        "reset_every": 100,
        "adapt_every": 2,
        "max_update": 0.1,
        "shadow": True,
        "thresholds": CollapseThresholds(margin=0.1, class_sorting=0.3),
        "inspect_every": 2,
        "snapshot_every": 3,
        "cooldown": 4,
        "remember_answers": 0,  # not known then
        "on_harm": None,
        "estimator": None,
    }
    assert model.counters == {"num_steps": 10, "num_skipped": 0, "num_compared": 60, "num_differing": 60}
    assert model.unwrapped.hyperparameters["optimizer"].keywords == {"lr": 0.01, "momentum": 0.9}

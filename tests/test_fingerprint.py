"""Fingerprints identify the weights of a network."""

import sys
from pathlib import Path

import pytest
import torch
from saved_streams import adapted_model, make_network
from torch import Tensor, nn

import ctta


def module_with_buffer(name: str, value: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer(name, value)
    return module


def test_names_dtypes_shapes_and_values_count() -> None:
    modules = [
        module_with_buffer("a", torch.zeros(4)),
        module_with_buffer("b", torch.zeros(4)),
        module_with_buffer("a", torch.zeros(2, 2)),
        module_with_buffer("a", torch.zeros(4, dtype=torch.int32)),
        module_with_buffer("a", torch.ones(4)),
    ]
    assert len({ctta.fingerprint(module) for module in modules}) == len(modules)


def test_wrappers_of_the_network_do_not_count() -> None:
    assert ctta.fingerprint(nn.DataParallel(make_network())) == ctta.fingerprint(make_network())


def test_a_source_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted_model()
    ctta.save(model, tmp_path / "s")
    module = sys.modules["ctta.nn.surgery"]
    monkeypatch.setattr(module, "fingerprint", lambda net: pytest.fail("computed again"))
    ctta.save(model, tmp_path / "s")
    ctta.save(model.fork(), tmp_path / "fork")


def test_a_source_that_was_written_to_is_hashed_again(tmp_path: Path) -> None:
    model = adapted_model()
    ctta.save(model, tmp_path / "s")
    model.load_state_dict(adapted_model(make_network(seed=1)).state_dict())
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match="fingerprint"):
        ctta.load(tmp_path / "s", make_network())
    ctta.load(tmp_path / "s", make_network(seed=1))

"""Saved streams resume bit-identically, whatever their settings, optimizer and method."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saved_streams import STREAM, Header, Tensors, adapted_model, load_cotta, make_network, read_file, rewrite_file
from torch import Tensor, nn

import ctta
from ctta import OptimizerFactory


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer factory that no file can hold."""
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"views": ctta.views.image_views(2, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))},
        {"views": ctta.views.multiscale_flip((0.5, 1.0))},
        {"views": (), "optimizer": torch.optim.SGD},
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)},
        {"optimizer": partial(torch.optim.AdamW, betas=(0.8, 0.9), amsgrad=True)},
        {"optimizer": partial(torch.optim.Adafactor)},
        {"optimizer": partial(torch.optim.RMSprop, momentum=0.5)},
        {"threshold": float("inf"), "output": None},
    ],
    ids=str,
)
def test_every_serializable_setting_resumes_bit_identically(settings: dict[str, Any], tmp_path: Path) -> None:
    model = adapted_model(**settings)
    ctta.save(model, tmp_path / "s")
    again = load_cotta(tmp_path / "s")
    assert repr(again) == repr(model)
    for x in STREAM[3:]:
        assert torch.equal(again(x), model(x))


def test_a_changed_learning_rate_is_kept(tmp_path: Path) -> None:
    model = adapted_model()
    assert model.optimizer is not None
    model.optimizer.param_groups[0]["lr"] = 0.5
    ctta.save(model, tmp_path / "s")
    again = load_cotta(tmp_path / "s")
    assert again.optimizer is not None and again.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.Adam, lr=0.25), torch.optim.SGD, partial(torch.optim.Adam, amsgrad=True)]
)
def test_a_new_optimizer_starts_without_state(optimizer: OptimizerFactory, tmp_path: Path) -> None:
    model = adapted_model()
    ctta.save(model, tmp_path / "s")
    changed = load_cotta(tmp_path / "s", optimizer=optimizer)
    assert changed.optimizer is not None and changed.optimizer.state_dict()["state"] == {}
    assert torch.equal(changed.student.get_parameter("0.weight"), model.student.get_parameter("0.weight"))
    changed(STREAM[3])
    assert changed.num_steps == 4


def test_an_unserializable_optimizer_is_given_again_and_resumes(tmp_path: Path) -> None:
    model = adapted_model(optimizer=adam)
    ctta.save(model, tmp_path / "s")
    again = load_cotta(tmp_path / "s", optimizer=adam)
    assert torch.equal(again(STREAM[3]), model(STREAM[3]))
    for actual, expected in zip(again.student.parameters(), model.student.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_scalars_of_an_optimizer_keep_their_dtype(tmp_path: Path) -> None:
    source = make_network().double()
    model = ctta.CoTTA(source, views=(), optimizer=torch.optim.NAdam, decay=0.5)
    x = STREAM[0].double()
    model(x)
    model(x)
    ctta.save(model, tmp_path / "s")
    again = load_cotta(tmp_path / "s", source)
    moved = copy.deepcopy(model).to("cpu")
    expected = [model(x) for _ in range(3)]
    for other in (again, moved):
        assert all(torch.equal(other(x), logits) for logits in expected)


def test_a_tensor_as_learning_rate_is_an_error_that_names_it(tmp_path: Path) -> None:
    model = adapted_model(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-3)))
    with pytest.raises(TypeError, match="'lr'"):
        ctta.save(model, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_numpy_numbers_are_stored_as_numbers(tmp_path: Path) -> None:
    ctta.save(adapted_model(threshold=np.float32(0.5)), tmp_path / "s")
    assert load_cotta(tmp_path / "s").threshold == 0.5


def test_hyperparameters_can_be_changed_on_load(tmp_path: Path) -> None:
    ctta.save(adapted_model(), tmp_path / "s")
    assert load_cotta(tmp_path / "s", threshold=0.5).threshold == 0.5
    with pytest.raises(TypeError, match="treshold"):
        ctta.load(tmp_path / "s", make_network(), treshold=0.5)


def test_frozen_is_kept(tmp_path: Path) -> None:
    ctta.save(adapted_model().freeze(), tmp_path / "s")
    assert load_cotta(tmp_path / "s").frozen


def test_complex_buffers(tmp_path: Path) -> None:
    source = make_network()
    source.register_buffer("constant", torch.zeros(2, dtype=torch.complex128))
    source.register_buffer("filter", torch.zeros(2, dtype=torch.complex64))
    model = ctta.Tent(source)
    model.student.get_buffer("filter").add_(1j)
    ctta.save(model, tmp_path / "s")
    again = ctta.load(tmp_path / "s", source)
    assert torch.equal(again.get_buffer("student.filter"), model.student.get_buffer("filter"))


class MethodWithMemory(ctta.Tent):
    """A user's method with a buffer, a counter and a hyperparameter that no file can hold."""

    memory: Tensor
    num_seen: int

    def __init__(self, net: nn.Module, *, measure: Any = torch.abs) -> None:
        super().__init__(net)
        self.measure = measure
        self.register_buffer("memory", torch.zeros(4))
        self.register_counter("num_seen")

    def adapt_step(self, x: Tensor) -> Tensor:
        logits = super().adapt_step(x)
        self.memory.mul_(0.5).add_(self.measure(logits.detach()).mean(0))
        self.num_seen += len(x)
        return logits


def test_a_users_method(tmp_path: Path) -> None:
    model = MethodWithMemory(make_network(), measure=torch.square)
    model(STREAM[0])
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match="method="):
        ctta.load(tmp_path / "s", make_network(), measure=torch.square)
    with pytest.raises(ctta.CheckpointError, match=r"measure=\.\.\."):
        ctta.load(tmp_path / "s", make_network(), method=MethodWithMemory)
    with pytest.raises(ctta.CheckpointError, match="not by tent"):
        ctta.load(tmp_path / "s", make_network(), method=ctta.Tent, measure=torch.square)
    again = ctta.load(tmp_path / "s", make_network(), method=MethodWithMemory, measure=torch.square)
    assert isinstance(again, MethodWithMemory)
    assert torch.equal(again.memory, model.memory)
    assert again.num_seen == 6
    model.double()
    assert model.fork().memory.dtype == torch.float64
    assert model.reset().num_seen == 0
    assert torch.equal(model.memory, torch.zeros(4, dtype=torch.float64))


def test_a_stream_converted_to_double_is_loaded_onto_the_double_network(tmp_path: Path) -> None:
    model = adapted_model().double()
    model(STREAM[3].double())
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match="dtype"):
        ctta.load(tmp_path / "s", make_network())
    again = load_cotta(tmp_path / "s", make_network().double())
    assert torch.equal(again(STREAM[4].double()), model(STREAM[4].double()))


def test_a_file_from_before_a_setting_existed_loads_and_takes_it(tmp_path: Path) -> None:
    def remove_setting(header: Header, tensors: Tensors) -> None:
        del header["hyperparameters"]["views_at_once"]

    ctta.save(adapted_model(), tmp_path / "s")
    old = rewrite_file(tmp_path / "s", remove_setting)
    assert load_cotta(old).views_at_once == 1
    assert load_cotta(old, views_at_once=2).views_at_once == 2


def test_the_header_describes_the_model(tmp_path: Path) -> None:
    ctta.save(adapted_model(seed=11, restore=0.05), tmp_path / "s")
    header, _ = read_file(tmp_path / "s")
    assert header["format"] == 2
    assert header["method"] == "cotta"
    assert header["hyperparameters"]["restore"] == 0.05
    assert header["hyperparameters"]["seed"] == 11
    assert header["hyperparameters"]["optimizer"] == {"optimizer": "Adam", "arguments": {"lr": 0.001}}
    assert header["hyperparameters"]["views"]["view"] == "image_views"
    assert header["counters"] == {"num_steps": 3, "num_skipped": 0}
    assert header["source"] == ctta.fingerprint(make_network())
    assert header["torch"] == torch.__version__
    assert header["ctta"] == ctta.__version__


def test_what_equals_the_source_is_not_stored_again(tmp_path: Path) -> None:
    large = nn.Sequential(nn.Linear(4, 2000), nn.LayerNorm(2000), nn.Linear(2000, 500))
    model = ctta.Tent(large)
    model(torch.randn(8, 4))
    ctta.save(model, tmp_path / "s")
    _, tensors = read_file(tmp_path / "s")
    students = {name for name in tensors if name.startswith("student.")}
    assert students == {"student.1.weight", "student.1.bias"}
    assert (tmp_path / "s").stat().st_size < 60_000 < sum(p.numel() for p in large.parameters()) * 4


def test_negative_zero_counts_as_a_change(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model = ctta.CoTTA(source, views=())
    with torch.no_grad():
        source_bias, bias = (net.get_parameter("1.bias") for net in (model.source, model.student))
        assert torch.equal(source_bias, torch.zeros(2))
        bias.copy_(torch.tensor([-0.0, 0.0]))
    ctta.save(model, tmp_path / "s")
    again = load_cotta(tmp_path / "s", source)
    assert torch.signbit(again.student.get_parameter("1.bias")).tolist() == [True, False]

"""Save and load: the file, what it holds, and every way in which it is refused."""

import copy
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import ctta

STREAM = [torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(number)) for number in range(8)]


def net(seed: int = 0, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 4)
    )


def adapted(**settings) -> ctta.CoTTA:
    return adapted_from(net(), **settings)


def adapted_from(source: nn.Module, **settings) -> ctta.CoTTA:
    model = ctta.CoTTA(source, **{"views": ctta.views.image_views(2)} | settings)
    for x in STREAM[:3]:
        model(x)
    return model


def header_of(path: Path) -> dict:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["ctta"])


def rewritten(path: Path, change) -> Path:
    """The file with its header, or its tensors, changed; the list of tensors follows."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = header_of(path)
    header["tensors"] = None
    change(header, tensors)
    header["tensors"] = header["tensors"] or sorted(tensors)
    save_file(tensors, path, metadata={"ctta": json.dumps(header)})
    return path


def test_the_header_says_what_is_inside(tmp_path: Path) -> None:
    path = tmp_path / "camera7.safetensors"
    ctta.save(adapted(seed=11, restore=0.05), path)
    header = header_of(path)
    assert header["method"] == "cotta"
    assert header["hyperparameters"]["restore"] == 0.05
    assert header["hyperparameters"]["seed"] == 11
    assert header["hyperparameters"]["optimizer"] == {"optimizer": "Adam", "arguments": {"lr": 0.001}}
    assert header["hyperparameters"]["views"]["view"] == "image_views"
    assert header["counters"] == {"num_steps": 3, "num_skipped": 0}
    assert header["source"] == ctta.checkpoint.fingerprint(net())
    assert header["torch"] == torch.__version__
    assert header["ctta"] == ctta.__version__


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
def test_every_storable_setting_goes_on_bit_identically(settings: dict, tmp_path: Path) -> None:
    model = adapted(**settings)
    ctta.save(model, tmp_path / "s")
    again = ctta.load(tmp_path / "s", net())
    assert repr(again) == repr(model)
    for x in STREAM[3:]:
        assert torch.equal(again(x), model(x))


def test_a_learning_rate_changed_on_the_way_is_kept(tmp_path: Path) -> None:
    model = adapted()
    model.optimizer.param_groups[0]["lr"] = 0.5
    ctta.save(model, tmp_path / "s")
    assert ctta.load(tmp_path / "s", net()).optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.Adam, lr=0.25), torch.optim.SGD, partial(torch.optim.Adam, amsgrad=True)]
)
def test_a_new_optimizer_starts_afresh(optimizer, tmp_path: Path) -> None:
    model = adapted()
    ctta.save(model, tmp_path / "s")
    changed = ctta.load(tmp_path / "s", net(), optimizer=optimizer)
    assert changed.optimizer.state_dict()["state"] == {}
    assert torch.equal(changed.student[0].weight, model.student[0].weight)
    changed(STREAM[3])
    assert changed.num_steps == 4


def test_an_optimizer_that_no_file_can_hold_is_given_again_and_goes_on(tmp_path: Path) -> None:
    factory = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    model = adapted(optimizer=factory)
    ctta.save(model, tmp_path / "s")
    again = ctta.load(tmp_path / "s", net(), optimizer=factory)
    assert torch.equal(again(STREAM[3]), model(STREAM[3]))
    for ours, theirs in zip(again.student.parameters(), model.student.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_single_numbers_of_an_optimizer_keep_their_dtype(tmp_path: Path) -> None:
    model = ctta.CoTTA(net().double(), views=(), optimizer=torch.optim.NAdam, decay=0.5)
    x = STREAM[0].double()
    model(x), model(x)
    ctta.save(model, tmp_path / "s")
    again = ctta.load(tmp_path / "s", net().double())
    moved = copy.deepcopy(model).to("cpu")
    expected = [model(x) for _ in range(3)]
    for other in (again, moved):
        assert all(torch.equal(other(x), answer) for answer in expected)


def test_a_learning_rate_that_is_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    model = adapted(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-3)))
    with pytest.raises(TypeError, match="'lr'"):
        ctta.save(model, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_numpy_numbers_are_stored_as_numbers(tmp_path: Path) -> None:
    ctta.save(adapted(threshold=np.float32(0.5)), tmp_path / "s")
    assert ctta.load(tmp_path / "s", net()).threshold == 0.5


def test_a_source_that_was_written_to_has_another_fingerprint(tmp_path: Path) -> None:
    model = adapted()
    ctta.save(model, tmp_path / "s")
    model.load_state_dict(adapted_from(net(seed=1)).state_dict())
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match="fingerprint"):
        ctta.load(tmp_path / "s", net())
    ctta.load(tmp_path / "s", net(seed=1))


def test_the_fingerprint_tells_names_dtypes_and_shapes_and_is_computed_once(tmp_path: Path, monkeypatch) -> None:
    def with_buffer(name: str, value: Tensor) -> nn.Module:
        module = nn.Module()
        module.register_buffer(name, value)
        return module

    modules = [
        with_buffer("a", torch.zeros(4)),
        with_buffer("b", torch.zeros(4)),
        with_buffer("a", torch.zeros(2, 2)),
        with_buffer("a", torch.zeros(4, dtype=torch.int32)),
        with_buffer("a", torch.ones(4)),
    ]
    assert len({ctta.checkpoint.fingerprint(module) for module in modules}) == len(modules)
    assert ctta.checkpoint.fingerprint(nn.DataParallel(net())) == ctta.checkpoint.fingerprint(net())
    model = adapted()
    ctta.save(model, tmp_path / "s")
    module = sys.modules["ctta.checkpoint.fingerprint"]
    monkeypatch.setattr(module, "fingerprint", lambda net: pytest.fail("computed again"))
    ctta.save(model, tmp_path / "s")
    ctta.save(model.fork(), tmp_path / "fork")


def test_complex_buffers(tmp_path: Path) -> None:
    source = net()
    source.register_buffer("constant", torch.zeros(2, dtype=torch.complex128))
    source.register_buffer("filter", torch.zeros(2, dtype=torch.complex64))
    model = ctta.Tent(source)
    model.student.filter.add_(1j)
    ctta.save(model, tmp_path / "s")
    assert torch.equal(ctta.load(tmp_path / "s", source).student.filter, model.student.filter)


def test_hyperparameters_can_be_changed_on_load(tmp_path: Path) -> None:
    ctta.save(adapted(), tmp_path / "s")
    assert ctta.load(tmp_path / "s", net(), threshold=0.5).threshold == 0.5
    with pytest.raises(TypeError, match="treshold"):
        ctta.load(tmp_path / "s", net(), treshold=0.5)


def test_frozen_is_kept(tmp_path: Path) -> None:
    ctta.save(adapted().freeze(), tmp_path / "s")
    assert ctta.load(tmp_path / "s", net()).frozen


def test_what_equals_the_source_is_not_stored_again(tmp_path: Path) -> None:
    big = nn.Sequential(nn.Linear(4, 2000), nn.LayerNorm(2000), nn.Linear(2000, 500))
    model = ctta.Tent(big)
    model(torch.randn(8, 4))
    ctta.save(model, tmp_path / "s")
    with safe_open(tmp_path / "s", framework="pt") as file:
        students = {name for name in file.keys() if name.startswith("student.")}  # noqa: SIM118
    assert students == {"student.1.weight", "student.1.bias"}
    assert (tmp_path / "s").stat().st_size < 60_000 < sum(p.numel() for p in big.parameters()) * 4


def test_negative_zero_counts_as_a_change(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model = ctta.CoTTA(source, views=())
    with torch.no_grad():
        source_bias, bias = model.source[1].bias, model.student[1].bias
        assert torch.equal(source_bias, torch.zeros(2))
        bias.copy_(torch.tensor([-0.0, 0.0]))
    ctta.save(model, tmp_path / "s")
    assert torch.signbit(ctta.load(tmp_path / "s", source).student[1].bias).tolist() == [True, False]


class WithBuffer(ctta.Tent):
    """A user's method with a memory, a counter and a hyperparameter that no file can hold."""

    def __init__(self, net: nn.Module, *, measure=torch.abs) -> None:
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
    model = WithBuffer(net(), measure=torch.square)
    model(STREAM[0])
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match="method="):
        ctta.load(tmp_path / "s", net(), measure=torch.square)
    with pytest.raises(ctta.CheckpointError, match=r"measure=\.\.\."):
        ctta.load(tmp_path / "s", net(), method=WithBuffer)
    with pytest.raises(ctta.CheckpointError, match="not by tent"):
        ctta.load(tmp_path / "s", net(), method=ctta.Tent, measure=torch.square)
    again = ctta.load(tmp_path / "s", net(), method=WithBuffer, measure=torch.square)
    assert torch.equal(again.memory, model.memory)
    assert again.num_seen == 6
    model.double()
    assert model.fork().memory.dtype == torch.float64
    assert model.reset().num_seen == 0
    assert torch.equal(model.memory, torch.zeros(4, dtype=torch.float64))


def test_a_stream_that_became_double_is_loaded_onto_the_double_network(tmp_path: Path) -> None:
    model = adapted().double()
    model(STREAM[3].double())
    ctta.save(model, tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match="dtype"):
        ctta.load(tmp_path / "s", net())
    again = ctta.load(tmp_path / "s", net().double())
    assert torch.equal(again(STREAM[4].double()), model(STREAM[4].double()))


def test_another_network_is_refused(tmp_path: Path) -> None:
    ctta.save(adapted(), tmp_path / "s")
    for other in (net(seed=1), net(width=7)):
        with pytest.raises(ctta.CheckpointError, match="fingerprint"):
            ctta.load(tmp_path / "s", other)


@pytest.mark.parametrize("keep", [0, 3, 8, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "s"
    ctta.save(adapted(), path)
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ctta.CheckpointError, match="truncated"):
        ctta.load(path, net())


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    html, plain, odd = tmp_path / "page", tmp_path / "weights", tmp_path / "odd"
    html.write_text("<!doctype html><title>Sign in</title>" * 10)
    save_file({"weight": torch.zeros(2)}, plain)
    save_file({"weight": torch.zeros(2)}, odd, metadata={"ctta": "[1]"})
    torch.save(net().state_dict(), tmp_path / "pickle")
    for path in (html, plain, odd, tmp_path / "pickle"):
        with pytest.raises(ctta.CheckpointError):
            ctta.load(path, net())
    for absent in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError):
            ctta.load(absent, net())
    with pytest.raises(ctta.CheckpointError):
        (tmp_path / "long").write_bytes(struct.pack("<Q", 2**60) + b"{}")
        ctta.load(tmp_path / "long", net())


def set_format(header, tensors):
    header["format"] = 99


def wrong_shape(header, tensors):
    tensors["student.0.weight"] = torch.zeros(1, 2)


def wrong_dtype(header, tensors):
    tensors["student.0.weight"] = tensors["student.0.weight"].double()


def unknown_tensor(header, tensors):
    tensors["student.9.weight"] = torch.zeros(1)


def wrong_state(header, tensors):
    tensors["optimizer.0.exp_avg"] = torch.zeros(5, 5)


def state_of_no_parameter(header, tensors):
    tensors["optimizer.77.exp_avg"] = torch.zeros(5)


def other_groups(header, tensors):
    header["optimizer"]["groups"].append({"params": [99]})


def lost_tensors(header, tensors):
    header["tensors"] = sorted(tensors)
    del tensors["student.0.weight"]


def tensor_of_the_source(header, tensors):
    tensors["source.0.bias"] = torch.zeros(6)


def foreign_counter(header, tensors):
    header["counters"]["predict_step"] = 5


def counter_of_words(header, tensors):
    header["counters"]["num_steps"] = "many"


def no_source(header, tensors):
    del header["source"]


def unknown_view(header, tensors):
    header["hyperparameters"]["views"]["view"] = "kaleidoscope"


def no_optimizer_of_torch(header, tensors):
    header["hyperparameters"]["optimizer"]["optimizer"] = "lr_scheduler"


def bad_argument(header, tensors):
    header["hyperparameters"]["optimizer"]["arguments"] = {"speed": 3}


def bad_setting(header, tensors):
    header["hyperparameters"]["decay"] = 7


def negative_number(header, tensors):
    tensors["optimizer.-1.exp_avg"] = torch.zeros(4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_format, "format 99"),
        (wrong_shape, "student.0.weight"),
        (wrong_dtype, "float64"),
        (unknown_tensor, "student.9.weight"),
        (wrong_state, "0.exp_avg"),
        (state_of_no_parameter, "77.exp_avg"),
        (other_groups, "groups"),
        (lost_tensors, "tensors that its header lists"),
        (tensor_of_the_source, "source.0.bias"),
        (foreign_counter, "predict_step"),
        (counter_of_words, "num_steps"),
        (no_source, "damaged: no usable source"),
        (unknown_view, "kaleidoscope"),
        (no_optimizer_of_torch, "lr_scheduler"),
        (bad_argument, "speed"),
        (bad_setting, "decay"),
        (negative_number, "exp_avg"),
    ],
)
def test_a_mismatching_file_is_refused(change, words: str, tmp_path: Path) -> None:
    ctta.save(adapted(), tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match=words):
        ctta.load(rewritten(tmp_path / "s", change), net())


def before_views_at_once(header, tensors):
    del header["hyperparameters"]["views_at_once"]


def test_a_file_from_before_a_setting_existed_loads_and_takes_it(tmp_path: Path) -> None:
    ctta.save(adapted(), tmp_path / "s")
    old = rewritten(tmp_path / "s", before_views_at_once)
    assert ctta.load(old, net()).views_at_once == 1
    assert ctta.load(old, net(), views_at_once=2).views_at_once == 2


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "s"
    ctta.save(adapted(), path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        ctta.save(adapted(seed=5), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_folder_are_flushed_to_disk(tmp_path: Path, monkeypatch) -> None:
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    ctta.save(adapted(), tmp_path / "s")
    assert flushed == [False, True]


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    ctta.save(adapted(), tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_killed_while_saving_the_file_is_always_whole(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, torch, ctta
        from torch import nn
        torch.manual_seed(0)
        model = ctta.CoTTA(nn.Sequential(nn.Linear(64, 600), nn.LayerNorm(600), nn.Linear(600, 600)), views=())
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        while True:
            model(x)
            ctta.save(model, sys.argv[1])
            print(model.num_steps, flush=True)
    """)
    path = tmp_path / "s"
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(64, 600), nn.LayerNorm(600), nn.Linear(600, 600))
    steps = []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        steps.append(ctta.load(path, source).num_steps)
    assert min(steps) >= 3

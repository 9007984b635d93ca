"""Files of other networks, by their fingerprints, are refused; files are written completely or not at all."""

import os
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved_streams import Header, Tensors, adapted_model, make_network, rewrite_file
from torch import Tensor, nn

import ctta


def test_another_network_is_refused(tmp_path: Path) -> None:
    ctta.save(adapted_model(), tmp_path / "s")
    for other in (make_network(seed=1), make_network(width=7)):
        with pytest.raises(ctta.CheckpointError):
            ctta.load(tmp_path / "s", other)


@pytest.mark.parametrize("keep", [0, 3, 8, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "s"
    ctta.save(adapted_model(), path)
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ctta.CheckpointError, match="truncated"):
        ctta.load(path, make_network())


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    html, plain, odd, long = (tmp_path / name for name in ("page", "weights", "odd", "long"))
    html.write_text("<!doctype html><title>Sign in</title>" * 10)
    save_file({"weight": torch.zeros(2)}, plain)
    save_file({"weight": torch.zeros(2)}, odd, metadata={"ctta": "[1]"})
    long.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    torch.save(make_network().state_dict(), tmp_path / "pickle")
    for path in (html, plain, odd, long, tmp_path / "pickle"):
        with pytest.raises(ctta.CheckpointError):
            ctta.load(path, make_network())
    for absent in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError):
            ctta.load(absent, make_network())


def set_format(header: Header, tensors: Tensors) -> None:
    header["format"] = 99


def wrong_shape(header: Header, tensors: Tensors) -> None:
    tensors["student.0.weight"] = torch.zeros(1, 2)


def wrong_dtype(header: Header, tensors: Tensors) -> None:
    tensors["student.0.weight"] = tensors["student.0.weight"].double()


def unknown_tensor(header: Header, tensors: Tensors) -> None:
    tensors["student.9.weight"] = torch.zeros(1)


def wrong_state(header: Header, tensors: Tensors) -> None:
    tensors["optimizer.0.exp_avg"] = torch.zeros(5, 5)


def state_of_no_parameter(header: Header, tensors: Tensors) -> None:
    tensors["optimizer.77.exp_avg"] = torch.zeros(5)


def state_of_a_negative_number(header: Header, tensors: Tensors) -> None:
    tensors["optimizer.-1.exp_avg"] = torch.zeros(4)


def other_groups(header: Header, tensors: Tensors) -> None:
    header["optimizer"]["groups"].append({"params": [99]})


def lost_tensors(header: Header, tensors: Tensors) -> None:
    header["tensors"] = sorted(tensors)
    del tensors["student.0.weight"]


def tensor_of_the_source(header: Header, tensors: Tensors) -> None:
    tensors["source.0.bias"] = torch.zeros(6)


def unknown_counter(header: Header, tensors: Tensors) -> None:
    header["counters"]["predict_step"] = 5


def counter_of_another_type(header: Header, tensors: Tensors) -> None:
    header["counters"]["num_steps"] = "many"


def no_source(header: Header, tensors: Tensors) -> None:
    del header["source"]


def unknown_view(header: Header, tensors: Tensors) -> None:
    header["hyperparameters"]["views"]["view"] = "kaleidoscope"


def not_an_optimizer(header: Header, tensors: Tensors) -> None:
    header["hyperparameters"]["optimizer"]["optimizer"] = "lr_scheduler"


def bad_argument(header: Header, tensors: Tensors) -> None:
    header["hyperparameters"]["optimizer"]["arguments"] = {"speed": 3}


def bad_setting(header: Header, tensors: Tensors) -> None:
    header["hyperparameters"]["decay"] = 7


def unexpected_inner_model(header: Header, tensors: Tensors) -> None:
    inner = {key: header[key] for key in ("hyperparameters", "give_on_load", "counters", "frozen", "optimizer")}
    header["inside"] = {"wrapped": inner | {"method": "tent"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_format, "format 99"),
        (wrong_shape, "student.0.weight"),
        (wrong_dtype, "float64"),
        (unknown_tensor, "student.9.weight"),
        (wrong_state, "0.exp_avg"),
        (state_of_no_parameter, "77.exp_avg"),
        (state_of_a_negative_number, "exp_avg"),
        (other_groups, "groups"),
        (lost_tensors, "tensors that its header lists"),
        (tensor_of_the_source, "source.0.bias"),
        (unknown_counter, "predict_step"),
        (counter_of_another_type, "num_steps"),
        (no_source, "damaged: no usable source"),
        (unknown_view, "kaleidoscope"),
        (not_an_optimizer, "lr_scheduler"),
        (bad_argument, "speed"),
        (bad_setting, "decay"),
        (unexpected_inner_model, "wrapped"),
    ],
)
def test_a_mismatching_file_is_refused(change: Callable[[Header, Tensors], None], words: str, tmp_path: Path) -> None:
    ctta.save(adapted_model(), tmp_path / "s")
    with pytest.raises(ctta.CheckpointError, match=words):
        ctta.load(rewrite_file(tmp_path / "s", change), make_network())


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    ctta.save(adapted_model(), path)
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        ctta.save(adapted_model(seed=5), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_directory_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced_directories: list[bool] = []

    def record(descriptor: int) -> None:
        synced_directories.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))

    monkeypatch.setattr(os, "fsync", record)
    ctta.save(adapted_model(), tmp_path / "s")
    assert synced_directories == [False, True]


def test_the_file_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    ctta.save(adapted_model(), tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_process_killed_while_saving_leaves_a_complete_file(tmp_path: Path) -> None:
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
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        steps.append(ctta.load(path, source).num_steps)
    assert min(steps) >= 3


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


def quantize(bias: float, scale: float) -> nn.Module:
    layer = nn.Linear(4, 3)
    nn.init.constant_(layer.bias, bias)
    nn.init.constant_(layer.weight, scale)
    net = nn.Sequential(nn.Flatten(), layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves quantization to another package
        quantized: nn.Module = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    return quantized


def test_packed_weights_of_quantized_layers_count(tmp_path: Path) -> None:
    ctta.save(ctta.adapt(quantize(0.0, 1.0), "source"), tmp_path / "s")
    ctta.load(tmp_path / "s", quantize(0.0, 1.0))
    for other in (quantize(1.0, 1.0), quantize(0.0, 2.0)):
        with pytest.raises(ctta.CheckpointError):
            ctta.load(tmp_path / "s", other)


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
    with pytest.raises(ctta.CheckpointError):
        ctta.load(tmp_path / "s", make_network())
    ctta.load(tmp_path / "s", make_network(seed=1))

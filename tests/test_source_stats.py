"""Source statistics agree with plain loops, survive files, and belong to one network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import output, user_error, write_images, write_network
from naive_entropy import naive_fisher
from test_mathematics import CLOSE, classifier, stream
from torch import Tensor, nn

import ctta
from ctta.cli.adapt import adapt
from ctta.cli.data import compute_source_stats
from ctta.data.datasets.image_files import read_images
from ctta.testing import NETWORKS, ContractCase


def test_statistics_agree_with_plain_loops() -> None:
    net, batches = classifier(), stream()[:4]
    stats = ctta.source_stats(net, batches)
    assert stats.num_images == 20 and not stats.is_labeled
    CLOSE(list(stats.by_name("fisher").values()), naive_fisher(net, batches))
    inputs, features, classes = [], [], []
    adapted = ctta.BNStats(net, batch_stats=1.0).source
    assert isinstance(adapted, nn.Sequential)
    body = adapted[:-1]
    adapted[1].register_forward_pre_hook(lambda _, x: inputs.append(x[0].detach()))
    for x in batches:
        features += list(body(x).detach())
        classes += adapted(x).argmax(1).tolist()
    by_channel = torch.cat(inputs[::2]).movedim(1, 0).flatten(1)
    CLOSE(stats.by_name("layer_inputs.mean")["1"], torch.stack([row.sum() / len(row) for row in by_channel]))
    CLOSE(stats.by_name("layer_inputs.variance")["1"], by_channel.var(1, correction=0))
    all_features = torch.stack(features)
    CLOSE(stats["feature_mean"], all_features.mean(0))
    CLOSE(stats["feature_variance"], all_features.var(0, correction=0))
    for number in range(4):
        members = [feature for feature, found in zip(features, classes, strict=True) if found == number]
        assert int(stats["class_counts"][number]) == len(members)
        mean = torch.stack(members).mean(0) if members else torch.zeros(12, dtype=torch.float64)
        variance = torch.stack(members).var(0, correction=0) if members else torch.zeros(12, dtype=torch.float64)
        CLOSE(stats["class_means"][number], mean)
        CLOSE(stats["class_variances"][number], variance)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_statistics_are_the_same_within_a_loop_without_gradients(around: Callable[[], Any]) -> None:
    expected = ctta.source_stats(classifier(), stream(), parameters="all")
    with around():
        stats = ctta.source_stats(classifier(), stream(), parameters="all")
    assert all(torch.equal(value, expected[name]) for name, value in stats.tensors.items())
    assert not any(value.is_inference() for value in stats.tensors.values())


@pytest.mark.parametrize("form", ["tensor", "list", "batches"])
def test_labels_may_be_given(form: str) -> None:
    net, inputs = classifier(), stream()[:2]
    labels = [torch.arange(5) % 4, torch.tensor([3, 3, 0, 0, 0])]
    batches: list[Any] = list(zip(inputs, labels, strict=True)) if form == "batches" else inputs
    given: Any = {"tensor": torch.cat(labels), "list": labels, "batches": "batches"}[form]
    stats = ctta.source_stats(net, batches, given)
    assert stats.is_labeled
    assert stats["class_counts"].tolist() == [5, 1, 1, 3]
    with pytest.raises(ctta.InputError):
        ctta.source_stats(net, inputs, labels[:1])


@pytest.mark.parametrize("network", NETWORKS)
def test_every_kind_of_network(network: str, tmp_path: Path) -> None:
    case = ContractCase(ctta.Tent, NETWORKS[network], {})
    net = case.make_network()
    stats = ctta.source_stats(net, case.make_stream(), parameters="all")
    assert {"fisher", "class_means", "feature_mean", "layer_inputs.mean", "layer_outputs.variance"} <= set(stats.names)
    assert stats["class_means"].shape[0] == 5
    assert set(stats.by_name("fisher")) == {name for name, _ in net.named_parameters()}
    stats.save(tmp_path / "stats.safetensors")
    again = ctta.SourceStats.load(tmp_path / "stats.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in stats.tensors.items())
    assert repr(again) == repr(stats)


def test_without_a_head_there_are_no_features() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    stats = ctta.source_stats(net, [torch.randn(8, 4)])
    assert "fisher" in stats.names and "class_means" not in stats.names
    with pytest.raises(ctta.ConfigError, match="head="):
        stats.select(["class_means"], "RMT")
    assert "class_means" in ctta.source_stats(net, [torch.randn(8, 4)], head="0").names


def test_statistics_belong_to_one_network(tmp_path: Path) -> None:
    net, other = classifier(), classifier()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    stats = ctta.source_stats(net, stream()[:2])
    with pytest.raises(ctta.ConfigError, match="fingerprint"):
        ctta.EATA(other, source_stats=stats)
    with pytest.raises(ctta.ConfigError):
        ctta.EATA(net)
    wrong: Any = {"fisher": 1}
    with pytest.raises(TypeError, match=r"ctta\.source_stats"):
        ctta.EATA(net, source_stats=wrong)


def test_statistics_are_checked_again_for_every_network() -> None:
    net, other = classifier(), classifier()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    stats = ctta.source_stats(net, stream()[:1])
    for model in (ctta.EATA(net, source_stats=stats), ctta.EATA(net, source_stats=stats).float()):
        model.reset()  # in another dtype the source has another fingerprint
    with pytest.raises(ctta.ConfigError):
        ctta.EATA(other, source_stats=stats)


def test_a_checkpoint_holds_what_the_method_needs(tmp_path: Path) -> None:
    net = classifier()
    model = ctta.EATA(net, source_stats=ctta.source_stats(net, stream()[:2]))
    assert model.source_stats.names == ["fisher"]
    for x in stream()[:3]:
        model(x)
    ctta.save(model, tmp_path / "eata.safetensors")
    again = ctta.load(tmp_path / "eata.safetensors", net)
    for x in stream()[3:8]:
        assert torch.equal(model(x), again(x))
    assert repr(again) == repr(model)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    ctta.source_stats(classifier(), stream()[:1]).save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ctta.CheckpointError, match="checksum"):
        ctta.SourceStats.load(path)
    ctta.save(ctta.Tent(classifier()), path)
    with pytest.raises(ctta.CheckpointError, match="ctta source-stats"):
        ctta.SourceStats.load(path)


def test_no_batches() -> None:
    empty: list[Tensor] = []
    with pytest.raises(ctta.InputError):
        ctta.source_stats(classifier(), empty)


def test_the_command_and_a_method_that_uses_its_file(tmp_path: Path) -> None:
    network, images, path = write_network(tmp_path), tmp_path / "images", tmp_path / "stats.safetensors"
    write_images(images, range(10))
    arguments = ("--model", network, "--images", images, "--out", path, "--batch-size", 4)
    assert "fisher" in output(compute_source_stats, *arguments)
    assert ctta.SourceStats.load(path).num_images == 10
    assert "leave out --labels" in user_error(compute_source_stats, *arguments, "--labels")
    method = ("--model", network, "--images", images, "--out", tmp_path / "table.csv", "--method", "eata")
    assert "ctta source-stats" in user_error(adapt, *method)
    output(adapt, *method, "--set", f"source_stats={path}")
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 11


def test_the_command_can_measure_the_network_as_it_was_trained(tmp_path: Path) -> None:
    network, images, path = write_network(tmp_path), tmp_path / "images", tmp_path / "stats.safetensors"
    paths = write_images(images, range(8))
    output(compute_source_stats, "--model", network, "--images", images, "--out", path, "--batch-stats", 0)
    net, x = ctta.models.load(network), read_images(paths, None)
    for fraction, is_equal in ((0.0, True), (1.0, False)):
        expected = ctta.source_stats(net, [x], batch_stats=fraction)["feature_mean"]
        assert torch.allclose(ctta.SourceStats.load(path)["feature_mean"], expected) == is_equal

"""State of a stream: its memory, device and precision; compiled, deterministic and channels-last execution."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.benchmark.options import BenchmarkOptions
from ctta.benchmark.recipes import build_task
from ctta.core.options import Precision
from ctta.errors import ConfigError
from ctta.testing import NETWORKS, ContractCase, select_networks, select_settings
from ctta.testing.networks import BlockViT
from ctta.views import image_views

#: Methods that train, with hyperparameters that make every step do all its work.
TRAINING: dict[str, dict[str, Any]] = {
    "cotta": {"views": image_views(2), "threshold": 1.0},
    "tent": {},
    "pseudo_label": {},
}


def make_batch(batch_size: int = 8) -> torch.Tensor:
    return torch.rand(batch_size, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def to_channels_last(net: nn.Module) -> nn.Module:
    untyped: Any = net  # torch does not annotate memory_format for modules
    converted: nn.Module = untyped.to(memory_format=torch.channels_last)
    return converted


def find_live_storages() -> dict[int, int]:
    """Return the bytes of every live tensor by address, without the compiler's fake tensors, which have no storage."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def iterate_state(model: ctta.AdaptiveModel) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model and of its optimizer."""
    yield from model.state_dict().values()
    assert model.optimizer is not None
    for state in model.optimizer.state.values():
        yield from state.values()


def get_last_step(model: ctta.AdaptiveModel) -> ctta.Step:
    assert model.last_step is not None
    return model.last_step


@pytest.mark.parametrize("method", TRAINING)
def test_a_stream_holds_only_its_networks_and_its_optimizer(method: str) -> None:
    net, x = NETWORKS["batch_norm"](), make_batch()
    model = ctta.adapt(net, method, **TRAINING[method])
    before = find_live_storages().keys() - {tensor.untyped_storage().data_ptr() for tensor in iterate_state(model)}
    for _ in range(3):
        model(x)
    known = before | {tensor.untyped_storage().data_ptr() for tensor in iterate_state(model)}
    extra = sum(size for address, size in find_live_storages().items() if address not in known)
    assert extra <= 64, "more than the loss, confidence and augmented fraction of the last step"


def test_memory_does_not_grow_with_steps() -> None:
    model, x = ctta.CoTTA(NETWORKS["batch_norm"](), **TRAINING["cotta"]), make_batch()
    sizes = []
    for _ in range(3):
        for _ in range(5):
            model(x)
        sizes.append(sum(find_live_storages().values()))
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("loss", ["cross_entropy", "symmetric", "hard"])
def test_autocast_averages_views_and_computes_the_loss_in_float32(loss: Any) -> None:
    model = ctta.CoTTA(NETWORKS["batch_norm"](), loss=loss, **TRAINING["cotta"])
    dtypes = []
    model.teacher.register_forward_hook(lambda module, inputs, logits: dtypes.append(logits.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(make_batch())
    assert set(dtypes) == {torch.bfloat16}
    step = get_last_step(model)
    assert step.loss is not None and step.confidence is not None
    assert logits.dtype == step.loss.dtype == step.confidence.dtype == torch.float32


@pytest.mark.parametrize("network", ["batch_norm", "group_norm", "segmentation"])
def test_autocast_predicts_in_float32_whatever_the_gate_does(network: str) -> None:
    net = NETWORKS[network]()
    confidences = ctta.functional.confidence(ctta.BNStats(net)(make_batch()))
    for threshold in (1e-9, float(confidences.median()), 1.0):
        for predict_with in ("refined", "teacher"):
            settings: dict[str, Any] = {"gate": "element", "predict_with": predict_with, "threshold": threshold}
            model = ctta.CoTTA(net, views=image_views(2), **settings)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model.predict(make_batch()).dtype == model(make_batch()).dtype == torch.float32


@pytest.mark.parametrize("method", ["tent", "pseudo_label"])
def test_autocast_computes_the_loss_of_other_methods_in_float32(method: str) -> None:
    model = ctta.adapt(NETWORKS["batch_norm"](), method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(make_batch()).dtype == torch.bfloat16
    step = get_last_step(model)
    assert step.loss is not None and step.loss.dtype == torch.float32


@pytest.mark.parametrize("name", sorted(ctta.METHODS))
def test_amp_is_autocast_around_every_call(name: str) -> None:
    """Also in a fork, after a reset, and in predictions; what comes out is float32."""
    cls = ctta.METHODS[name]
    networks = select_networks(cls)
    case = ContractCase(cls, networks[next(iter(networks))], select_settings(cls))
    stats, batches = case.make_source_stats(case.make_network()), case.make_stream(2)

    def build(amp: Precision | None) -> ctta.AdaptiveModel:
        return cls(case.make_network(), **stats, **case.hyperparameters, amp=amp)

    plain, expected = build(None), []
    for x in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected.append(plain(x).float())
    model = build("bf16")
    assert "amp='bf16'" in repr(model) and "amp=" not in repr(plain)
    for stream in (model, model.fork(), copy.deepcopy(model).reset()):
        for x, logits in zip(batches, expected, strict=True):
            predicted = stream.predict(x)
            assert torch.equal(predicted, logits) and torch.equal(stream(x), logits)
            assert predicted.dtype == torch.float32


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_stream_keeps_its_precision(amp: Precision, is_guarded: bool, tmp_path: Path) -> None:
    net, stream = NETWORKS["batch_norm"](), [make_batch(), make_batch() / 2, make_batch() / 3]
    model: ctta.AdaptiveModel = ctta.Tent(net, amp=amp)
    model = ctta.Guarded(model) if is_guarded else model
    model(stream[0])
    ctta.save(model, tmp_path / "stream.safetensors")
    resumed = ctta.load(tmp_path / "stream.safetensors", net)
    assert resumed.amp == resumed.unwrapped.amp == model.amp == amp
    for x in stream[1:]:
        assert torch.equal(resumed(x), model(x))
    assert not torch.equal(resumed(stream[0]), ctta.Tent(net)(stream[0]))


def test_what_methods_are_compared_with_has_their_precision() -> None:
    """In a benchmark and in the race of ``ctta advise``, whose recommendation says so."""
    net = NETWORKS["batch_norm"]()
    task = build_task("embedded", BenchmarkOptions(amp="bf16"), [])
    assert all(task.methods[name].build_model(net, 0).amp == "bf16" for name in ("source", "tent", "vane"))
    assert "--amp bf16" in BenchmarkOptions(amp="bf16").changes and "amp" not in BenchmarkOptions().to_dict()
    images = np.random.default_rng(0).integers(256, size=(32, 16, 16, 3), dtype=np.uint8)
    advice = ctta.advise(
        net,
        images,
        methods=["tent"],
        corruptions=["fog"],
        batch_size=8,
        quick=True,
        check_normalization=False,
        amp="bf16",
    )
    rows = [advice.race.source, *advice.race.finalists]
    assert len(rows) == 3 and all(row.candidate.build(net).amp == "bf16" for row in rows)
    assert advice.config().settings["amp"] == "bf16" and advice.build().amp == "bf16"


def test_amp_without_asking_the_author() -> None:
    """A constructor of a user's class need not know about it, also if it is extended."""

    class Plain(ctta.AdaptiveModel):
        def __init__(self, net: nn.Module, *, scale: float = 1.0) -> None:
            super().__init__(net)
            self.scale = scale

        def adapt_step(self, x: Tensor) -> Tensor:
            logits: Tensor = self.source(x)
            return self.scale * logits

    class Extended(Plain):
        def __init__(self, net: nn.Module, *, scale: float = 2.0) -> None:
            super().__init__(net, scale=scale)

    net = NETWORKS["batch_norm"]()
    for cls in (Plain, Extended):
        model = cls(net, amp="bf16")  # type: ignore[call-arg]
        assert model.amp == "bf16" and model.fork().amp == "bf16" and cls(net).amp is None
        assert not torch.equal(model(make_batch()), cls(net)(make_batch()))
    with pytest.raises(ConfigError, match="'bf16', 'fp16'"):
        ctta.adapt(net, "tent", amp="float16")


@pytest.mark.parametrize("views_at_once", [1, 2])
def test_compiled_networks_predict_and_learn_like_eager_ones(views_at_once: int) -> None:
    torch.compiler.reset()
    eager = ctta.CoTTA(NETWORKS["batch_norm"](), views_at_once=views_at_once, **TRAINING["cotta"])
    compiled = copy.deepcopy(eager)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    for net in (compiled.teacher, compiled.source):
        net.compile(backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(make_batch()), eager(make_batch()))
    assert graphs, "nothing was compiled"
    copied = copy.deepcopy(compiled)  # the compiled code belongs to the process, not to the stream
    torch.testing.assert_close(copied(make_batch()), eager(make_batch()))


def test_steps_run_with_deterministic_algorithms_only() -> None:
    nets = [NETWORKS["batch_norm"](), to_channels_last(NETWORKS["batch_norm"]())]
    torch.use_deterministic_algorithms(True)
    try:
        for net in nets:
            ctta.CoTTA(net, restore=0.5, **TRAINING["cotta"])(make_batch())
    finally:
        torch.use_deterministic_algorithms(False)


def test_restored_weights_are_the_same_in_every_memory_format() -> None:
    student, source = (nn.Conv2d(3, 5, 3) for _ in range(2))
    others = [to_channels_last(copy.deepcopy(net)) for net in (student, source)]
    for one, two in ((student, source), others):
        ctta.functional.stochastic_restore_(one, two, 0.3, torch.Generator().manual_seed(1))
    assert torch.equal(student.weight, others[0].get_parameter("weight"))
    restored = (student.weight == source.weight).float().mean()
    assert 0.1 < restored < 0.5


def make_network(cls: type[ctta.AdaptiveModel]) -> nn.Module:
    torch.manual_seed(0)
    if cls.info is not None and cls.info.needs_vit:
        return BlockViT(size=8)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("name", ["vane", "delta", "tribe", "rotta", "adacontrast"])
def test_a_fork_has_the_dtypes_of_the_stream(name: str) -> None:
    model = ctta.METHODS[name](make_network(ctta.METHODS[name])).double()
    dtypes = {key: value.dtype for key, value in model.fork().state_dict().items()}
    assert dtypes == {key: value.dtype for key, value in model.state_dict().items()}

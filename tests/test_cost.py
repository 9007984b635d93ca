"""What a stream costs beside its networks: memory, precision of the loss, and options that must not change answers."""

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ctta
from ctta.testing.networks import NETWORKS
from ctta.views import image_views

LEARNING = {"cotta": {"views": image_views(2), "threshold": 1.0}, "tent": {}, "pseudo_label": {}}


def batch(count: int = 8) -> torch.Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def live_storages() -> dict[int, int]:
    """Bytes by address of every tensor that is held somewhere; the compiler's fake ones have none."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def tensors_of(model: ctta.AdaptiveModel) -> Iterator[torch.Tensor]:
    yield from model.state_dict().values()
    for state in model.optimizer.state.values():
        yield from state.values()


@pytest.mark.parametrize("method", LEARNING)
def test_a_stream_keeps_its_networks_and_its_optimizer_and_nothing_else(method: str) -> None:
    net, x = NETWORKS["batch_norm"](), batch()
    model = ctta.adapt(net, method, **LEARNING[method])
    before = live_storages().keys() - {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model)}
    for _ in range(3):
        model(x)
    known = before | {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model)}
    extra = sum(size for address, size in live_storages().items() if address not in known)
    assert extra <= 64, "beside loss, confidence and share augmented of the last step"


def test_memory_does_not_grow_with_steps() -> None:
    model, x = ctta.CoTTA(NETWORKS["batch_norm"](), **LEARNING["cotta"]), batch()
    sizes = []
    for _ in range(3):
        for _ in range(5):
            model(x)
        sizes.append(sum(live_storages().values()))
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("loss", ["cross_entropy", "symmetric", "hard"])
def test_under_autocast_views_are_averaged_and_the_loss_is_taken_in_float32(loss: str) -> None:
    model = ctta.CoTTA(NETWORKS["batch_norm"](), loss=loss, **LEARNING["cotta"])
    seen = []
    model.teacher.register_forward_hook(lambda module, inputs, logits: seen.append(logits.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = model(batch())
    assert set(seen) == {torch.bfloat16}
    assert answer.dtype == model.last_step.loss.dtype == model.last_step.confidence.dtype == torch.float32


@pytest.mark.parametrize("network", ["batch_norm", "group_norm", "segmentation"])
def test_under_autocast_answers_are_float32_wherever_the_gate_opens(network: str) -> None:
    net = NETWORKS[network]()
    confidences = ctta.functional.confidence(ctta.BNStats(net)(batch()))
    for threshold in (1e-9, float(confidences.median()), 1.0):
        for predict_with in ("refined", "teacher"):
            settings = {"gate": "element", "predict_with": predict_with, "threshold": threshold}
            model = ctta.CoTTA(net, views=image_views(2), **settings)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model.predict(batch()).dtype == model(batch()).dtype == torch.float32


@pytest.mark.parametrize("method", ["tent", "pseudo_label"])
def test_under_autocast_the_loss_of_the_other_methods_is_float32(method: str) -> None:
    model = ctta.adapt(NETWORKS["batch_norm"](), method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch()).dtype == torch.bfloat16
    assert model.last_step.loss.dtype == torch.float32


@pytest.mark.parametrize("views_at_once", [1, 2])
def test_compiled_networks_answer_and_learn_as_plain_ones(views_at_once: int) -> None:
    torch.compiler.reset()
    plain = ctta.CoTTA(NETWORKS["batch_norm"](), views_at_once=views_at_once, **LEARNING["cotta"])
    compiled = copy.deepcopy(plain)
    frames = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        frames.append(graph)
        return graph.forward

    for net in (compiled.teacher, compiled.source):
        net.compile(backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(batch()), plain(batch()))
    assert frames, "nothing was compiled"
    ours = copy.deepcopy(compiled)  # what compile adds is of this process, not of the stream
    torch.testing.assert_close(ours(batch()), plain(batch()))


def test_a_step_works_where_only_deterministic_algorithms_are_allowed() -> None:
    nets = [NETWORKS["batch_norm"](), NETWORKS["batch_norm"]().to(memory_format=torch.channels_last)]
    torch.use_deterministic_algorithms(True)
    try:
        for net in nets:
            ctta.CoTTA(net, restore=0.5, **LEARNING["cotta"])(batch())
    finally:
        torch.use_deterministic_algorithms(False)


def test_restored_weights_are_the_same_in_every_memory_layout() -> None:
    student, source = (nn.Conv2d(3, 5, 3) for _ in range(2))
    others = [copy.deepcopy(net).to(memory_format=torch.channels_last) for net in (student, source)]
    for one, two in ((student, source), others):
        ctta.functional.stochastic_restore_(one, two, 0.3, torch.Generator().manual_seed(1))
    assert torch.equal(student.weight, others[0].weight)
    restored = (student.weight == source.weight).float().mean()
    assert 0.1 < restored < 0.5

"""Networks under ``torch.compile``: no graph breaks, shared code, the same results, and one warning where it fails."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.testing.networks import BlockViT
from ctta.views import image_views

SETTINGS: dict[str, Any] = {"views": image_views(2), "threshold": 1.1}  # above 1: views in every step


class Backend:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        forward: Callable[..., Any] = graph.forward
        return forward

    @property
    def options(self) -> dict[str, Any]:
        """With a single graph for each network: a break would raise, and be warned of."""
        return {"backend": self, "fullgraph": True}


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """Warnings are errors, and no test finds the code of another one."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def make_network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 5)
    return nn.Sequential(*layers)


def draw_images(number: int, size: int = 8) -> Tensor:
    return torch.rand(number, 3, size, size, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("build", [ctta.models.embedded, lambda: BlockViT(size=8)], ids=["ResNet-20", "ViT"])
def test_a_network_is_one_graph(build: Callable[[], nn.Module]) -> None:
    """One for the teacher and the source, without gradients, and one for the student."""
    net, x, backend = build(), draw_images(16), Backend()
    plain, compiled = (ctta.CoTTA(net, views=image_views(1), threshold=1.0) for _ in range(2))
    compiled.compile(**backend.options)
    for _ in range(2):
        assert torch.equal(compiled(x), plain(x))
    assert backend.num_graphs == 2


@pytest.mark.parametrize("settings", [{"views_at_once": 2}, {"batch_stats": "blend"}], ids=repr)
def test_every_kind_of_statistics(settings: dict[str, Any]) -> None:
    """Also those of small batches, which are blended; a new fraction needs no new code."""
    plain, compiled = (ctta.CoTTA(make_network(), **SETTINGS, **settings) for _ in range(2))
    backend = Backend()
    compiled.compile(**backend.options)
    for size in (12, 10, 9):
        x = draw_images(size)
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
        if size == 10:
            num_graphs = backend.num_graphs
    assert backend.num_graphs == num_graphs


def test_a_batch_of_one_value_per_channel_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = ctta.Tent(net, batch_stats=1.0).compile(backend="eager")
    with pytest.raises(ctta.InputError):
        model(torch.rand(1, 4))


def test_reset_fork_and_copies_share_compiled_code() -> None:
    x, backend = draw_images(16), Backend()
    model = ctta.CoTTA(make_network(), **SETTINGS).compile(**backend.options)
    first = model(x)
    num_graphs = backend.num_graphs
    fork, copied = model.fork(), copy.deepcopy(model)
    assert torch.equal(fork(x), first) and torch.equal(model.predict(x), copied(x))
    assert torch.equal(model.reset()(x), first)
    assert backend.num_graphs == num_graphs
    assert all(each.student._compiled_call_impl for each in (model, fork, copied))


def test_a_guarded_model_stays_compiled_after_a_rollback() -> None:
    x, backend = draw_images(16), Backend()
    model = ctta.Guarded(ctta.CoTTA(make_network(), **SETTINGS)).compile(**backend.options)
    model(x)
    model(x)
    num_graphs = backend.num_graphs
    model.rollback()(x)
    assert model.health.student_disagreement is not None
    assert backend.num_graphs == num_graphs
    assert model.wrapped.student._compiled_call_impl is not None  # type: ignore[union-attr]


def test_a_trained_network_of_any_name_is_compiled() -> None:
    """MEMO trains a network that it does not call student."""
    x, backend = draw_images(2), Backend()
    plain, compiled = (ctta.MEMO(make_network(), views=ctta.views.augmix_views(1)) for _ in range(2))
    assert compiled.trained_networks == [compiled.adapted]
    torch.testing.assert_close(compiled.compile(**backend.options)(x), plain(x), rtol=1e-4, atol=1e-5)
    assert compiled.adapted._compiled_call_impl is not None and backend.num_graphs > 0


def test_files_have_no_trace_of_it(tmp_path: Path) -> None:
    x, net = draw_images(16), make_network()
    model = ctta.adapt(net, "cotta", **SETTINGS).compile(backend="eager")
    model(x)
    ctta.save(model, tmp_path / "a.safetensors")
    loaded = ctta.load(tmp_path / "a.safetensors", net)
    assert torch.equal(loaded.compile(backend="eager")(x), model(x))


def test_one_warning_where_the_compiler_fails() -> None:
    def fail(graph: Any, inputs: list[Any]) -> Any:
        raise OSError("no C++ compiler")

    x, net = draw_images(16), make_network()
    plain, model = ctta.CoTTA(net, **SETTINGS), ctta.CoTTA(net, **SETTINGS).compile(backend=fail)
    with pytest.warns(UserWarning, match="without torch.compile.*no C\\+\\+ compiler") as caught:
        logits = model(x)
    assert len(caught) == 1 and torch.equal(logits, plain(x))
    assert torch.equal(model.fork()(x), logits)  # without another warning


def test_one_warning_where_layers_keep_a_state() -> None:
    net, x = make_network(), draw_images(16)
    plain, model = ctta.NOTE(net, memory_size=16), ctta.NOTE(net, memory_size=16).compile()
    with pytest.warns(UserWarning, match="RunningStatistics") as caught:
        logits = [model(x), model(x)]
    assert len(caught) == 1 and all(torch.equal(each, plain(x)) for each in logits)


def test_errors_of_the_network_are_not_the_compilers() -> None:
    model = ctta.CoTTA(make_network(), **SETTINGS).compile(backend="eager")
    with pytest.raises(RuntimeError, match="shape"):
        model(draw_images(16, size=9))
    model(draw_images(16))
    assert model.student._compiled_call_impl is not None
    assert model._compilation is not None and not model._compilation.is_given_up


def test_adapt_compiles() -> None:
    assert ctta.adapt(make_network(), "tent", compile=True)._compilation is not None
    assert ctta.adapt(make_network(), "tent")._compilation is None

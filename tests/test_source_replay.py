"""RMT with labeled source images: replay and warm-up agree with a naive implementation, and streams resume exactly."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_entropy import NaiveSGD
from naive_features import naive_rmt
from test_mathematics import CLOSE, assert_same_run, assert_same_weights, stream
from test_methods_entropy import decided_classifier
from test_methods_features import CONTRAST, NAIVE_CONTRAST, labeled_stats, naive_projector, prototypes
from torch import Tensor

import ctta
from ctta.core.registry import resolve_method
from ctta.errors import CheckpointError, ConfigError
from ctta.testing import CHECKS, NETWORKS, ContractCase

SGD: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
NAIVE_SGD: dict[str, Any] = {"optimizer": partial(NaiveSGD, lr=0.05, momentum=0.9)}


def make_replay(num_images: int = 14, batch_size: int = 4) -> ctta.SourceReplay:
    generator = torch.Generator().manual_seed(4)
    images = torch.rand(num_images, 3, 4, 4, generator=generator, dtype=torch.float64)
    return ctta.SourceReplay(images, torch.arange(num_images) % 4, batch_size)


@pytest.mark.parametrize("num_warm_up", [0, 5])
def test_rmt_with_source_images(num_warm_up: int) -> None:
    net, replay = decided_classifier(2.0), make_replay()
    settings: dict[str, Any] = {"decay": 0.9, "replay_weight": 0.6}
    model = ctta.RMT(net, source_stats=labeled_stats(net), replay=replay, seed=3, **settings, **CONTRAST | SGD)
    projector = naive_projector(model.projector)
    expected, student, teacher = naive_rmt(
        net,
        stream(),
        projector=projector,
        prototypes=prototypes(net),
        replay=lambda step: replay.draw(step, 3, torch.zeros((), dtype=torch.float64)),
        warm_up=[replay.draw(step, 3, torch.zeros((), dtype=torch.float64))[0] for step in range(num_warm_up)],
        **settings,
        **NAIVE_CONTRAST | NAIVE_SGD,
    )
    if num_warm_up:
        assert model.warm_up(num_warm_up * 4 + 3) is model and model.num_steps == 0
    assert_same_run(model, stream(), expected)
    assert_same_weights(model.student, student)
    assert_same_weights(model.teacher, teacher)
    assert model.optimizer is not None and model.optimizer.param_groups[0]["lr"] == 0.05


def test_a_pass_shows_every_image_once() -> None:
    replay = make_replay(12, 4)
    passes = [torch.cat([replay.draw(step, 0)[0] for step in range(3 * n, 3 * n + 3)]) for n in range(2)]
    for seen in passes:
        CLOSE(seen.flatten(1).sum(1).sort().values, replay.images.float().flatten(1).sum(1).sort().values)
    assert not torch.equal(*passes)
    assert not torch.equal(replay.draw(0, 0)[0], replay.draw(0, 1)[0])
    assert len(make_replay(3, 200).draw(7, 0)[0]) == 3  # fewer images than a batch: all of them


def test_bytes_are_scaled_and_belong_to_their_labels() -> None:
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1) * 25
    batch, labels = ctta.SourceReplay(images, torch.arange(10), 5).draw(0, 0, torch.zeros((), dtype=torch.float64))
    CLOSE(batch.flatten(), labels.double() * 25 / 255)


def make_model(replay: ctta.SourceReplay, net: Any = None) -> ctta.RMT:
    net = net or decided_classifier(2.0)
    return ctta.RMT(net, source_stats=labeled_stats(net), replay=replay, **CONTRAST)


def test_a_stream_with_source_images_resumes_exactly(tmp_path: Path) -> None:
    net, path, given = decided_classifier(2.0), tmp_path / "rmt.safetensors", {"views": CONTRAST["views"]}
    model = make_model(make_replay(), net)
    model.warm_up(12)
    first, rest = stream()[:3], stream()[3:6]
    for x in first:
        model(x)
    ctta.save(model, path)
    assert path.stat().st_size < 60_000 and not holds(path, make_replay().images)
    resumed = ctta.load(path, net, replay=make_replay(), **given)
    for x in rest:
        assert torch.equal(resumed(x), model(x))
    with pytest.raises(CheckpointError, match="replay="):
        ctta.load(path, net, **given)
    for other in (make_replay(13), make_replay(14, 5)):
        with pytest.raises(CheckpointError):
            ctta.load(path, net, replay=other, **given)
    assert torch.equal(resumed.reset()(rest[0]), make_model(make_replay(), net)(rest[0]))  # without the warm-up


def holds(path: Path, images: Tensor) -> bool:
    return images[0].numpy().tobytes() in path.read_bytes()


def test_copies_share_the_images() -> None:
    model = make_model(make_replay())
    assert copy.deepcopy(model).replay is model.replay is model.fork().replay


@pytest.mark.parametrize("check", ["check_resume_is_bit_identical", "check_reset_equals_new", "check_moves_mid_stream"])
def test_replay_keeps_the_contract(check: str) -> None:
    generator = torch.Generator().manual_seed(0)
    replay = ctta.SourceReplay(torch.rand(20, 3, 16, 16, generator=generator), torch.arange(20) % 5, 6)
    settings = {"replay": replay, "views": ctta.views.image_views(1)}
    CHECKS[check](ContractCase(ctta.RMT, NETWORKS["batch_norm"], settings))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(3, 3, 4, 4), torch.arange(2), r"one label per source image.* got shapes \(3, 3, 4, 4\) and \(2,\)"),
        (torch.rand(0, 3, 4, 4), torch.arange(0), "at least one image"),
        (torch.rand(2, 3, 4, 4), torch.rand(2), "expected integers of at least 0"),
        (torch.rand(2, 3, 4, 4), torch.tensor([0, -1]), "expected integers of at least 0"),
        (torch.ones(2, 3, 4, 4).long(), torch.arange(2), "floating-point numbers or bytes, got torch.int64"),
    ],
)
def test_images_that_cannot_be_are_refused(images: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ctta.SourceReplay(images, labels)


def test_misuse_is_rejected() -> None:
    net = decided_classifier()
    stats = labeled_stats(net)
    with pytest.raises(ConfigError):
        ctta.RMT(net, source_stats=stats, replay=ctta.SourceReplay(torch.rand(1, 3, 4, 4), torch.tensor([7])))
    with pytest.raises(ConfigError):
        ctta.RMT(net, source_stats=stats).warm_up()
    replay: Any = [torch.rand(1, 3, 4, 4)]
    with pytest.raises(TypeError, match="list"):
        ctta.RMT(net, source_stats=stats, replay=replay)
    with pytest.raises(ConfigError):
        resolve_method("rmt").parse(["replay=images.npy"])

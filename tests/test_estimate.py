"""Accuracy without labels: the fit, the averages of a stream, what the guard does about harm, and ctta.toml."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import output, write_images, write_network
from torch import nn

import ctta
from ctta.advise.calibration import DomainSignals, fit_estimator
from ctta.cli.adapt import adapt
from ctta.core.config import AdaptationConfig, read_config
from ctta.guard import EventKind, GainEstimator
from ctta.guard.estimate import GainMonitor, to_signals
from ctta.guard.summary import summarize

#: Estimates an accuracy of 0.5 with and 0.9 without adaptation, whatever the signals.
HARM = GainEstimator((0.0, 0.0, 0.0, 0.0), (2.1972246, 0.0, 0.0, 0.0), 0.05, 0.05, 0.1)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()


def make_model(**settings: Any) -> ctta.Guarded:
    return ctta.Guarded(ctta.Tent(make_net()), estimator=HARM, **settings)


def draw(seed: int) -> torch.Tensor:
    return torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_the_fit_finds_what_accuracy_depends_on() -> None:
    generator = np.random.default_rng(0)

    def draw_domain(name: str, noise: float) -> DomainSignals:
        confidence, agreement, evenness = generator.uniform(0.3, 0.99, 3)
        signals, plain = to_signals(confidence, agreement, evenness), to_signals(confidence - 0.1, agreement, evenness)
        first, second = [1 / (1 + np.exp(-(0.8 * each[1] + 0.3 * each[2] - 0.2 + noise))) for each in (signals, plain)]
        return DomainSignals(name, signals, plain, first, second, 10_000)

    exact = [draw_domain(name, 0.0) for name in "abcd" * 10]
    estimator = fit_estimator(exact)
    for domain in exact:
        found = estimator.estimate(domain.signals, domain.source_signals)
        assert found.accuracy == pytest.approx(domain.accuracy, abs=0.05)
        assert found.gain == pytest.approx(domain.accuracy - domain.source_accuracy, abs=0.05)
    shifted = [*exact[:-1], *(draw_domain("odd", 2.0) for _ in range(10))]  # another relation widens the intervals
    assert fit_estimator(shifted).half_width > 0.1 > estimator.half_width


def test_intervals_allow_for_other_images() -> None:
    """How hard images are is common to all domains, so errors on the images of the fit would be too small."""
    generator = np.random.default_rng(0)

    def make(name: str, signals: tuple[float, ...], shift: float) -> DomainSignals:
        accuracy = 1 / (1 + np.exp(-signals[1])) + shift
        return DomainSignals(name, signals, signals, accuracy, accuracy, 10_000)

    domains = []
    for name in "abcd" * 6:
        signals = to_signals(generator.uniform(0.4, 0.8), 0.9, 1.0)
        halves = make(name, signals, 0.06), make(name, signals, -0.06)
        domains.append(replace(make(name, signals, 0.0), halves=halves))
    same_images = fit_estimator([replace(each, halves=()) for each in domains])
    assert same_images.half_width < 0.05
    # The root mean square of 0.12 times the quantile of Student's t for four corruptions.
    assert fit_estimator(domains).half_width == pytest.approx(2.132 * 0.12, abs=0.03)


def test_averages_need_some_images_and_forget_slowly() -> None:
    monitor = GainMonitor(HARM)
    sure, unsure = (
        summarize(scale * torch.randn(50, 5, generator=torch.Generator().manual_seed(0))) for scale in (20, 1)
    )
    monitor.add_(sure, unsure)
    assert monitor.estimate() is None
    monitor.add_(sure, unsure)
    found = monitor.estimate()
    assert found is not None and found.gain == pytest.approx(-0.4, abs=1e-6) and found.is_harmful
    assert float(monitor.averages[0]) == pytest.approx(sure.confidence)
    for _ in range(4):
        monitor.add_(unsure, unsure)
    assert unsure.confidence < float(monitor.averages[0]) < sure.confidence
    for _ in range(60):
        monitor.add_(unsure, unsure)
    assert float(monitor.averages[0]) == pytest.approx(unsure.confidence, abs=1e-3)
    before = monitor.averages.clone()
    monitor.add_(summarize(torch.full((50, 5), float("nan"))), unsure)
    assert torch.equal(monitor.averages, before)


def test_health_has_the_estimate_and_harm_ends_adaptation() -> None:
    model = make_model()
    model(draw(0))
    assert model.health.estimated_gain is None
    for number in range(3):
        model(draw(number))
    health = model.health
    assert health.estimated_gain == pytest.approx(-0.4, abs=1e-6) and health.estimated_accuracy == 0.5
    assert (health.estimated_gain_low, health.estimated_gain_high) == pytest.approx((-0.5, -0.3), abs=1e-6)
    assert not model.events  # nothing was asked for
    frozen = make_model(on_harm="freeze")
    for number in range(3):
        frozen(draw(number))
    assert frozen.frozen and frozen.events[-1].kind == EventKind.HARM and "estimated" in frozen.events[-1].cause


def test_the_estimate_goes_on_after_loading(tmp_path: Path) -> None:
    model = make_model()
    for number in range(3):
        model(draw(number))
    ctta.save(model, tmp_path / "state.safetensors")
    loaded = ctta.load(tmp_path / "state.safetensors", make_net())
    assert isinstance(loaded, ctta.Guarded) and loaded.estimator == HARM
    assert torch.equal(model(draw(7)), loaded(draw(7))) and model.health == loaded.health
    assert loaded.fork().health.estimated_gain is None


def test_calibration_and_configuration(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (32, 8, 8, 3), dtype=np.uint8)
    estimator = ctta.calibrate_gain(make_net(), images, method="tent", batch_size=16, severities=(1.0, 5.0))
    assert 0 < estimator.half_width < 1 and len(estimator.weights) == 4
    path = tmp_path / "ctta.toml"
    AdaptationConfig("tent", tables={"estimate": estimator.as_dict()}).write(path)
    assert read_config(path).estimator == estimator
    AdaptationConfig("tent", tables={"estimate": {"weights": [1.0]}}).write(path)
    with pytest.raises(ctta.ConfigError):
        _ = read_config(path).estimator


def test_mistakes_are_rejected() -> None:
    with pytest.raises(ctta.ConfigError):
        ctta.calibrate_gain(make_net(), np.zeros((32, 8, 8, 3), np.uint8), method="tent", corruptions=["fog"])
    with pytest.raises(ctta.ConfigError):
        GainEstimator((1.0,), (1.0,), 0.1, 0.1, 0.1)
    with pytest.raises(TypeError, match="calibrate_gain"):
        ctta.Guarded(ctta.Tent(make_net()), estimator=0.5)  # type: ignore[arg-type]


def test_adapt_says_the_estimate(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(120))
    config = AdaptationConfig("tent", model=write_network(tmp_path), batch_size=40, tables={"estimate": HARM.as_dict()})
    config.write(tmp_path / "ctta.toml")
    common = ("--config", tmp_path / "ctta.toml", "--images", tmp_path / "images")
    text = output(adapt, *common, "--out", tmp_path / "a.csv")
    assert "Adapting: -40.0 ± 10.0 points of accuracy over the network without adaptation" in text
    other = output(adapt, *common, "--out", tmp_path / "b.csv", "--set", "lr=1e-5")  # it holds for the settings only
    assert "Adapting:" not in other

"""Remembered domains: recognized by their inputs, returned to if that helps, and carried to other models."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import output, user_error, write_images, write_network
from torch import Tensor, nn

import ctta
from ctta.cli.adapt import adapt
from ctta.errors import ConfigError, DamagedCheckpointError
from ctta.functional import confidence
from ctta.policies.recalling import (
    NUM_FEATURES,
    DomainMemory,
    describe_images,
    find_remembered,
    measure_information,
    recall_,
)

RECALL = ctta.policies.recall(num=3)


def classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)).eval()


def draw(domain: str, seed: int, number: int = 40) -> Tensor:
    """Return images of one of four domains, all with the same kind of content."""
    noise = torch.Generator().manual_seed(seed)
    coarse = torch.rand(number, 3, 2, 2, generator=noise)
    x = nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear") * 0.5 + 0.25
    if domain == "noisy":
        x = x + 0.1 * torch.randn(x.shape, generator=noise)
    return {"dark": 0.4 * x, "pale": 0.6 + 0.3 * x}.get(domain, x).clamp(0, 1)


def memory_of(model: ctta.AdaptiveModel) -> DomainMemory:
    memory = model.unwrapped.get_submodule("policy_states.recall")
    assert isinstance(memory, DomainMemory)
    return memory


def learned_by(model: ctta.AdaptiveModel) -> list[Tensor]:
    return [getattr(module, name).detach().clone() for module, name in find_remembered(model.unwrapped)]


def run(model: ctta.AdaptiveModel, *domains: str, first_seed: int = 0) -> list[int]:
    """Show a batch of each domain; return which slot each was given."""
    slots = []
    for seed, domain in enumerate(domains, start=first_seed):
        model(draw(domain, seed))
        slots.append(int(memory_of(model).current))
    return slots


@pytest.mark.parametrize("method", ["tent", "vane"])
def test_domains_are_recognized(method: str) -> None:
    model = ctta.adapt(classifier(), method, policies=[RECALL])
    visits = ["clear"] * 3 + ["dark"] * 3 + ["noisy"] * 3
    assert run(model, *visits, *visits) == [0, 0, 0, 1, 1, 1, 2, 2, 2] * 2
    assert run(model, "pale", first_seed=50) == [0], "the one that was not seen for longest is forgotten"
    assert run(model, "noisy", "dark", first_seed=60) == [2, 1]


def test_small_batches_of_one_domain_stay_one_domain() -> None:
    model = ctta.adapt(classifier(), "tent", policies=[RECALL])
    for seed in range(12):
        model(draw("clear", seed, number=8))
    assert int(memory_of(model).current) == 0 and (memory_of(model).counts > 0).sum() == 1


def test_a_domain_keeps_what_was_learned_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a return is worth it, the state is exactly that after the domain's last batch."""
    model = ctta.adapt(classifier(), "tent", lr=0.05, policies=[RECALL])
    run(model, "clear", "clear")
    learned = learned_by(model)
    run(model, "dark", "dark", first_seed=10)
    assert not all(map(torch.equal, learned, learned_by(model)))
    for information in (1.0, 2.0):
        again = ctta.adapt(classifier(), "tent", lr=0.05, policies=[RECALL])
        again.load_state_dict(model.state_dict())
        answers = [information, 1.5]  # of the remembered state, after that of the present one
        with monkeypatch.context() as patch:
            patch.setattr(
                "ctta.policies.recalling.measure_information", lambda _logits, left=answers: torch.tensor(left.pop())
            )
            again(draw("clear", 20))
        assert all(map(torch.equal, learned_by(again), learned)) == (information > 1.5)
        assert int(memory_of(again).current) == 0
        assert all(map(torch.equal, [each[0] for each in memory_of(again).learned], learned_by(again)))


@pytest.mark.parametrize("excess", [-1e-4, 1e-4])
def test_nothing_is_returned_to_where_the_source_is_confident(excess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was trained, and not with the statistics of the batch that the method uses."""
    net, x = classifier(), draw("clear", 20)
    limit = float(confidence(net(x).detach()).mean()) + excess
    model = ctta.adapt(net, "tent", lr=0.05, policies=[ctta.policies.recall(num=3, max_confidence=limit)])
    run(model, "clear", "clear")
    learned = learned_by(model)
    run(model, "dark", "dark", first_seed=10)
    answers = [2.0, 1.5]  # of the remembered state, after that of the present one
    monkeypatch.setattr("ctta.policies.recalling.measure_information", lambda _logits: torch.tensor(answers.pop()))
    model(x)
    assert all(map(torch.equal, learned_by(model), learned)) == (excess > 0)
    assert len(answers) == (0 if excess > 0 else 2), "a model that is not going to return compares nothing"
    with pytest.raises(ConfigError, match="max_confidence must lie between 0 and 1"):
        ctta.policies.recall(max_confidence=1.5)


def test_without_a_return_the_method_is_not_changed() -> None:
    recalling, plain = (ctta.adapt(classifier(), "tent", policies=policies) for policies in ([RECALL], []))
    for seed, domain in enumerate(["clear", "clear", "dark", "dark", "noisy", "noisy"]):
        assert torch.equal(recalling(draw(domain, seed)), plain(draw(domain, seed)))
    assert (memory_of(recalling).counts > 0).all()


def test_a_stream_that_starts_is_compared_before_it_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ctta.adapt(classifier(), "tent", lr=0.5, policies=[RECALL])
    compared: list[Tensor] = []

    def record(logits: Tensor) -> Tensor:
        compared.append(logits)
        return torch.zeros(())

    monkeypatch.setattr("ctta.policies.recalling.measure_information", record)
    donor = ctta.adapt(classifier(), "tent", lr=0.5, policies=[RECALL])
    run(donor, "clear", "clear")
    memory_of(model).load_state_dict(memory_of(donor).state_dict())
    memory_of(model).current.fill_(-1)
    x = draw("clear", 9)
    expected = ctta.adapt(classifier(), "tent", lr=0.5).predict(x), donor.predict(x)
    model(x)
    assert len(compared) == 2 and all(map(torch.equal, compared, expected))


def test_information_is_that_of_sure_and_diverse_predictions() -> None:
    sure = 50 * torch.eye(4)
    torch.testing.assert_close(measure_information(sure), torch.tensor(4.0).log())
    assert measure_information(torch.zeros(4, 4)).abs() < 1e-6, "unsure"
    assert measure_information(sure[:1].expand(4, 4)).abs() < 1e-6, "collapsed"
    pixels = sure.view(4, 4, 1, 1).expand(4, 4, 3, 3)
    torch.testing.assert_close(measure_information(pixels), torch.tensor(4.0).log())


@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (5, 1, 9, 7), (5, 12), (5, 4, 1, 1), (5, 3, 2, 40, 40)])
def test_features_of_any_input(shape: tuple[int, ...]) -> None:
    features = describe_images(torch.rand(shape, generator=torch.Generator().manual_seed(0)).half())
    assert features.shape == (5, NUM_FEATURES) and features.dtype == torch.float32 and features.isfinite().all()


def test_statistics_that_a_method_follows_are_remembered() -> None:
    model = ctta.adapt(classifier(), "vane", policies=[RECALL])
    run(model, "clear", "clear")
    statistics = model.unwrapped.get_submodule("statistics.0")
    before = statistics.get_buffer("mean").clone()
    run(model, "dark", first_seed=10)
    assert not torch.equal(statistics.get_buffer("mean"), before)
    recall_(model, memory_of(model), 0)
    assert torch.equal(statistics.get_buffer("mean"), before)


def test_networks_without_norm_layers_are_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(ConfigError, match="recall needs norm layers"):
        ctta.adapt(net, "cotta", policies=[RECALL])


# ---- the library ----


@pytest.mark.parametrize("wrap", [lambda model: model, ctta.Guarded], ids=["alone", "guarded"])
def test_what_one_camera_learned_serves_the_next(wrap: Any, tmp_path: Path) -> None:
    build = partial(ctta.adapt, classifier(), "tent", lr=0.05, policies=[RECALL])
    first, library = build(), ctta.StateLibrary(tmp_path / "states")
    run(first, "clear", "clear", "dark", "dark")
    assert library.collect(wrap(first)) == 2 and len(list(library.folder.iterdir())) == 2
    second = build()
    assert library.lend(wrap(second)) == 2
    run(second, "dark", first_seed=30)
    dark = [learned[1] for learned in memory_of(first).learned]
    assert all(map(torch.equal, learned_by(second), dark)), "from the first batch on"
    run(second, "dark", "dark", first_seed=31)
    library.collect(second)
    assert len(list(library.folder.iterdir())) == 2, "the same domains are replaced"


def test_only_states_that_fit_are_lent(tmp_path: Path) -> None:
    library = ctta.StateLibrary(tmp_path)
    first = ctta.adapt(classifier(), "tent", policies=[RECALL])
    run(first, "clear", "dark", "noisy")
    library.collect(first)
    small = ctta.policies.recall(num=2)
    lent = {
        "same": ctta.adapt(classifier(), "tent", policies=[RECALL]),
        "little room": ctta.adapt(classifier(), "tent", policies=[small]),
        "other weights": ctta.adapt(classifier(1), "tent", policies=[RECALL]),
        "other method": ctta.adapt(classifier(), "vane", policies=[RECALL]),
    }
    assert {name: library.lend(model) for name, model in lent.items()} == {
        "same": 3,
        "little room": 2,
        "other weights": 0,
        "other method": 0,
    }
    with pytest.raises(ConfigError, match=r"build it with policies=\[ctta.policies.recall\(\)\]"):
        library.lend(ctta.adapt(classifier(), "tent"))
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DamagedCheckpointError, match=r"damaged|truncated"):
        library.lend(ctta.adapt(classifier(), "tent", policies=[RECALL]))


def test_a_lent_model_is_saved_and_resumes(tmp_path: Path) -> None:
    library, net = ctta.StateLibrary(tmp_path / "states"), classifier()
    first = ctta.adapt(net, "vane", policies=[RECALL])
    run(first, "clear", "clear", "dark", "dark")
    library.collect(first)
    second = ctta.adapt(net, "vane", policies=[RECALL])
    library.lend(second)
    ctta.save(second, tmp_path / "second.safetensors")
    again = ctta.load(tmp_path / "second.safetensors", net)
    for seed, domain in enumerate(["dark", "dark", "clear", "dark"]):
        assert torch.equal(again(draw(domain, seed)), second(draw(domain, seed)))


def test_the_command_uses_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctta.policies.recalling.MARGIN", -10.0)  # so few images teach too little to tell
    write_images(tmp_path / "images", range(24))
    library = tmp_path / "states"
    command = ["--model", write_network(tmp_path), "--images", tmp_path / "images", "--method", "tent"]
    command += ["--library", library, "--batch-size", 8, "--out"]
    assert "--policy recall" in user_error(adapt, *command, tmp_path / "a.csv")
    output(adapt, *command, tmp_path / "a.csv", "--policy", "recall", "--set", "lr=0.05")
    assert len(list(library.iterdir())) == 1
    output(adapt, *command, tmp_path / "b.csv", "--policy", "recall", "--set", "lr=0.05")
    first, second = ((tmp_path / name).read_text().splitlines() for name in ("a.csv", "b.csv"))
    assert first[1:9] == second[1:9] and first[9:] != second[9:], "it helps from the second batch on"

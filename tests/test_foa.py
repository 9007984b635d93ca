"""FOA agrees with a naive implementation to 1e-10, and its search finds minima."""

import copy
import pickle
from typing import Any

import pytest
import torch
from naive import step_generator
from naive_foa import naive_foa
from test_mathematics import CLOSE, STEPS, assert_same_run, stream
from test_vit import KINDS, make_small_vit
from torch import Tensor, nn

import ctta
from ctta.errors import ConfigError
from ctta.methods.foa.evolution import EvolutionStrategy
from ctta.methods.foa.prompts import FeatureShift, PromptSite, draw_prompts
from ctta.testing.networks import BlockViT

NUM_PROMPTS, WIDTH, POPULATION, SEED = 2, 4, 4, 3


def normal(step: int) -> Any:
    generator = step_generator(SEED, step, "candidates")
    return torch.randn(POPULATION, NUM_PROMPTS * WIDTH, generator=generator, dtype=torch.float64).numpy()


def make_source_images(num_images: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.rand(num_images, 3, 4, 4, generator=generator, dtype=torch.float64).square()


def test_foa() -> None:
    net, batches, images = make_small_vit(depth=2), [x[:2] for x in stream()], make_source_images()
    settings: dict[str, Any] = {
        "population": POPULATION,
        "sigma": 0.8,
        "discrepancy": 2.0,
        "shift": 0.7,
        "decay": 0.6,
    }
    first = draw_prompts(net, NUM_PROMPTS, step_generator(SEED, 0, "prompts"))
    expected, search, winners = naive_foa(net, images, batches, first_prompts=first, normal=normal, **settings)
    stats = ctta.source_stats(net, [images[:4], images[4:]])
    model = ctta.FOA(net, source_stats=stats, num_prompts=NUM_PROMPTS, seed=SEED, **settings)
    assert_same_run(model, batches, expected)
    CLOSE(model.search.mean, torch.from_numpy(search.mean))
    CLOSE(model.search.covariance, torch.from_numpy(search.covariance))
    CLOSE(float(model.search.sigma), search.sigma)
    assert search.age == 0 or search.steps > search.age  # the axes were computed anew on the way
    assert len({*winners}) > 3 and winners.count(POPULATION) in range(1, STEPS)  # the best one so far won, not always


def test_prompts_are_drawn_as_xavier_has_it() -> None:
    net = BlockViT(width=16, patch=4)
    bound = (6 / (3 * 4 * 4 + 16)) ** 0.5
    prompts = draw_prompts(net, 500, torch.Generator().manual_seed(0))
    assert prompts.shape == (500, 16) and 0.99 * bound < prompts.abs().max() <= bound
    assert prompts.mean().abs() < 0.01 and abs(float(prompts.std()) - bound / 3**0.5) < 0.01


def rotated_ellipsoid(x: Tensor) -> Tensor:
    """Return a quadratic function with its minimum at 1, a condition number of 1e6 and oblique axes."""
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    values: Tensor = (((x - 1) @ rotation).square() * torch.logspace(0, 6, 6, dtype=torch.float64)).sum(1)
    return values


@pytest.mark.parametrize(("ill_conditioned", "num_steps"), [(False, 150), (True, 450)])
def test_the_search_finds_minima(ill_conditioned: bool, num_steps: int) -> None:
    search = EvolutionStrategy(6, 9, 0.5)
    for step in range(num_steps):
        candidates = search.sample(torch.Generator().manual_seed(step))
        fitness = rotated_ellipsoid(candidates) if ill_conditioned else (candidates - 1).square().sum(1)
        search.update_(candidates, fitness)
    torch.testing.assert_close(search.mean, torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-5)
    variances = torch.linalg.eigvalsh(search.covariance)
    condition = float(variances[-1] / variances[0])
    assert condition > 1e4 if ill_conditioned else condition < 1e3


def test_the_search_ranks_only() -> None:
    plain, bent = EvolutionStrategy(3, 6, 1.0), EvolutionStrategy(3, 6, 1.0)
    for step in range(20):
        candidates = plain.sample(torch.Generator().manual_seed(step))
        fitness = candidates.square().sum(1)
        plain.update_(candidates, fitness)
        bent.update_(candidates, fitness.exp() - 7)
    assert torch.equal(plain.mean, bent.mean) and torch.equal(plain.sigma, bent.sigma)


def test_a_distant_candidate_does_not_carry_the_search_away() -> None:
    search = EvolutionStrategy(4, 4, 1.0)
    candidates = torch.cat([search.sample(torch.Generator().manual_seed(0)), torch.full((1, 4), 1e6).double()])
    search.update_(candidates, torch.arange(5.0).flip(0), num_injected=1)
    assert search.mean.norm() < 6


def test_the_search_stays_exact_where_a_model_is_moved() -> None:
    search = EvolutionStrategy(3, 4, 1.0)
    assert search.half().mean.dtype == search.to(torch.bfloat16).covariance.dtype == torch.float64


def make_model(net: nn.Module, **settings: Any) -> ctta.FOA:
    stats = ctta.source_stats(net, [torch.rand(16, 3, 16, 16)])
    return ctta.FOA(net, source_stats=stats, population=4, num_prompts=2, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_foa_learns_on_every_kind_of_vit(kind: str) -> None:
    torch.manual_seed(0)
    net, x = KINDS[kind][0]().eval().requires_grad_(False), torch.rand(8, 3, 16, 16) / 2
    model = make_model(net)
    first = model.prompts.clone()
    losses = []
    for _ in range(12):
        model(x)
        assert model.last_step is not None
        losses.append(float(model.last_step.loss))
    assert losses[-1] < losses[0] and losses == sorted(losses, reverse=True)  # the best so far is among the candidates
    assert not torch.equal(model.prompts, first)


def test_a_deployed_network_keeps_prompts_and_shift() -> None:
    model, x = make_model(BlockViT().eval(), sigma=5.0), torch.rand(8, 3, 16, 16)
    for _ in range(3):
        model(x)
    plain = model.deploy()
    features, _, _ = model.site.run(model.source, x, model.prompts)
    expected = model.source.get_submodule(model.head)(model.feature_shift.move(features))
    for net in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        torch.testing.assert_close(net(x), expected)
    assert not torch.allclose(expected, model.source(x), atol=1e-3)
    assert type(plain) is BlockViT
    assert plain.state_dict().keys() == {*model.source.state_dict(), "blocks.0.prompts"}


def test_a_single_image_is_predicted_and_teaches_nothing() -> None:
    model, x = make_model(BlockViT().eval()), torch.rand(8, 3, 16, 16)
    model(x)
    before = copy.deepcopy(model.state_dict())
    single = model(x[:1])
    assert model.last_step is None and model.num_steps == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(single, model.deploy()(x[:1]))


def test_features_start_where_they_are() -> None:
    shift = FeatureShift(torch.tensor([1.0, 2.0]), 0.5, 0.75)
    assert torch.equal(shift.move(torch.zeros(1, 2)), torch.zeros(1, 2))
    shift.update_(torch.tensor([3.0, 0.0]))
    assert torch.equal(shift.move(torch.zeros(1, 2)), torch.tensor([[-1.0, 1.0]]))
    shift.update_(torch.tensor([-1.0, 0.0]))
    assert torch.equal(shift.past, torch.tensor([2.0, 0.0]))


def test_candidates_that_cannot_be_rated_change_nothing() -> None:
    model, x = make_model(BlockViT().eval()), torch.rand(4, 3, 16, 16)
    model(x)
    with torch.no_grad():
        model.source.get_parameter("head.bias").fill_(torch.nan)
    before = copy.deepcopy(model.search.state_dict())
    assert model(x).shape == (4, 5)
    assert model.num_skipped == 1 and model.last_step is not None and model.last_step.skipped
    assert all(torch.equal(value, before[name]) for name, value in model.search.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"population": 1}, "population must be an integer of at least 2"),
        ({"num_prompts": 0}, "num_prompts must be an integer of at least 1"),
        ({"sigma": 0.0}, "sigma must be above 0"),
        ({"shift": 1.5}, "shift must lie between 0 and 1"),
        ({"discrepancy": -1.0}, "discrepancy must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    net = BlockViT()
    with pytest.raises(ConfigError, match=message):
        ctta.FOA(net, source_stats=ctta.source_stats(net, [torch.rand(4, 3, 16, 16)]), **settings)


def test_a_block_without_a_norm_is_refused() -> None:
    net = BlockViT()
    for norm in ("norm1", "norm2"):
        setattr(net.blocks[1], norm, nn.Identity())
    with pytest.raises(ConfigError):
        PromptSite.find(net, "head")

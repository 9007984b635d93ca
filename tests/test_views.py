"""Views: every pixel of a view, normalized inputs, alignment of dense logits, averages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive import naive_view
from torch import Tensor, nn

import ctta
from ctta.testing import NETWORKS
from ctta.views import Average, ImageView, ImageViews, View, Views, average_views, image_views, multiscale_flip
from ctta.views.geometric import Motion, Padding, balance, find_positions, move_numbers, sample_bilinear

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def draw(seed: int = 0, **settings: Any) -> ImageView:
    return image_views(1, **settings).draw(torch.Generator().manual_seed(seed))[0]


def images(size: int = 20, count: int = 2) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def draw_noise(view: ImageView, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(view.noise_seed)
    return 0.005 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


@pytest.mark.parametrize(("seed", "n"), [(0, 20), (1, 20), (2, 20), (3, 21), (4, 18), (5, 25)])
def test_a_view_equals_the_naive_one_pixel_by_pixel(seed: int, n: int) -> None:
    view, x = draw(seed), images(n)
    expected = torch.stack([naive_view(view, image) for image in x])
    torch.testing.assert_close(view.augment(x), (expected + draw_noise(view, x)).clamp(0, 1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("sigma", [0.001, 0.1, 0.2, 0.3, 0.5])
def test_omitted_taps_of_the_blur_are_below_rounding_error(sigma: float) -> None:
    settings = vars(draw()) | {"sigma": sigma}
    view = ImageView(**settings)
    fast, exact = view.augment(images().float()), view.augment(images())
    # The noise is drawn in the dtype of the images, so it is subtracted before comparing.
    fast, exact = fast - draw_noise(view, images().float()), exact - draw_noise(view, images())
    inside = (exact > 0.03) & (exact < 0.97)
    torch.testing.assert_close(fast.double()[inside], exact[inside], rtol=0, atol=3e-6)


def test_the_draws_cover_their_ranges() -> None:
    drawn = image_views(4000).draw(torch.Generator().manual_seed(0))
    ranges = {
        "brightness": (0.6, 1.4),
        "contrast": (0.7, 1.3),
        "saturation": (0.5, 1.5),
        "hue": (-0.06, 0.06),
        "gamma": (0.7, 1.3),
        "degrees": (-15, 15),
        "translate_x": (-1 / 16, 1 / 16),
        "translate_y": (-1 / 16, 1 / 16),
        "scale": (0.9, 1.1),
        "sigma": (0.001, 0.5),
    }
    for name, (low, high) in ranges.items():
        values = torch.tensor([getattr(view, name) for view in drawn])
        assert low <= values.min() < low + 0.01 * (high - low), name
        assert high - 0.01 * (high - low) < values.max() <= high, name
        assert abs(values.mean() - (low + high) / 2) < 0.02 * (high - low), name
        assert abs(values.std() - (high - low) / math.sqrt(12)) < 0.02 * (high - low), name
    assert abs(sum(view.flip for view in drawn) / 4000 - 0.5) < 0.03
    orders = {view.color_order for view in drawn}
    assert len(orders) == math.factorial(5)
    assert len({view.noise_seed for view in drawn}) == 4000


@pytest.mark.parametrize("n", [1, 2, 5, 8, 32])
def test_balanced_views_cover_every_range_evenly_in_mirrored_pairs(n: int) -> None:
    views = image_views(n, balanced=True)
    for seed in range(20):
        drawn = views.draw(torch.Generator().manual_seed(seed))
        half = 0 if n % 2 else n // 2
        for name, (low, high) in views.ranges.items():
            places = torch.tensor([(getattr(view, name) - low) / (high - low) for view in drawn], dtype=torch.float64)
            assert (n * places).floor().sort().values.tolist() == list(range(n)), name
            torch.testing.assert_close(places[:half] + places[n - half :], torch.ones(half, dtype=torch.float64))
        for one, other in zip(drawn[:half], drawn[n - half :], strict=True):
            assert one.flip != other.flip
            assert one.color_order == other.color_order[::-1]


@pytest.mark.parametrize("n", [4, 5])
def test_balanced_views_of_many_steps_are_distributed_as_independent_ones(n: int) -> None:
    views = image_views(n, balanced=True)
    drawn = [view for seed in range(1500) for view in views.draw(torch.Generator().manual_seed(seed))]
    for name, (low, high) in views.ranges.items():
        values = torch.tensor([getattr(view, name) for view in drawn])
        quantiles = torch.quantile((values - low) / (high - low), torch.linspace(0.1, 0.9, 9))
        torch.testing.assert_close(quantiles, torch.linspace(0.1, 0.9, 9), rtol=0, atol=0.02, msg=name)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_balanced_numbers_are_jointly_uniform(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat([balance(torch.rand(n, 3, generator=generator), generator) for _ in range(40_000)])
    expected = (1 / 12) ** 3  # for independent numbers
    assert ((rows - 0.5) ** 2).prod(1).mean() == pytest.approx(expected, rel=0.06)
    assert (rows - 0.5).prod(1).mean().abs() < 3e-4


def test_narrower_views_draw_from_the_middle_of_the_ranges() -> None:
    full, narrow = image_views(1), image_views(50, color=0.5, motion=0.25)
    for name, (low, high) in full.ranges.items():
        fraction = {"brightness": 0.5, "hue": 0.5, "degrees": 0.25, "scale": 0.25, "sigma": 1}.get(name)
        if fraction is not None:
            inner_low, inner_high = narrow.ranges[name]
            assert inner_high - inner_low == pytest.approx(fraction * (high - low))
            assert inner_high + inner_low == pytest.approx(low + high)
    for view in narrow.draw(torch.Generator().manual_seed(0)):
        assert abs(view.degrees) <= 15 / 4
        assert abs(view.brightness - 1) <= 0.2
    still = image_views(1, color=0, motion=0).draw(torch.Generator().manual_seed(0))[0]
    assert (still.brightness, still.hue, still.degrees, still.translate_x, still.scale) == (1, 0, 0, 0, 1)


def test_one_draw_is_shared_by_the_batch() -> None:
    view = draw()
    twice = images(count=1).expand(2, -1, -1, -1)
    quiet = view.augment(twice) - draw_noise(view, twice)
    inside = (quiet > 0.03).all(0) & (quiet < 0.97).all(0)
    torch.testing.assert_close(quiet[0][inside], quiet[1][inside])


def test_a_view_is_deterministic_and_steps_differ() -> None:
    x = images()
    assert torch.equal(draw(3).augment(x), draw(3).augment(x))
    assert not torch.equal(draw(3).augment(x), draw(4).augment(x))


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (1, 3, 7, 5), (2, 3, 48, 64), (1, 1, 16, 16), (1, 3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_image_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for view in image_views(8).draw(torch.Generator().manual_seed(0)):
        image = view.augment(torch.rand(shape, dtype=dtype))
        assert image.shape == shape
        assert image.dtype == dtype
        assert image.min() >= 0
        assert image.max() <= 1


def test_normalized_images_are_augmented_as_plain_ones() -> None:
    mean, std = (torch.tensor(IMAGENET[key], dtype=torch.float64).view(1, 3, 1, 1) for key in ("mean", "std"))
    x = images()
    plain, normalized = draw(5), draw(5, **IMAGENET)
    torch.testing.assert_close(normalized.augment((x - mean) / std), (plain.augment(x) - mean) / std)


@pytest.mark.parametrize(
    ("views", "x", "word"),
    [
        (image_views(1), images() * 255, "mean="),
        (image_views(1), images() * 4 - 2, "[0, 1]"),
        (image_views(1, **IMAGENET), images() * 9, "after undoing"),
        (image_views(1), torch.rand(2, 5, 8, 8), "RGB or gray"),
        (image_views(1), torch.rand(2, 8), "RGB or gray"),
        (image_views(1, mean=(0.5,), std=(0.5,)), images(), "1 channels"),
    ],
)
def test_input_outside_the_declared_range_is_an_error(views: ImageViews, x: Tensor, word: str) -> None:
    (view,) = views.draw(torch.Generator())
    with pytest.raises(ctta.InputError) as caught:
        view(lambda images: images, x)
    assert word in str(caught.value)


def test_a_method_rejects_a_wrong_range_even_if_its_gate_stays_closed() -> None:
    model = ctta.CoTTA(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), threshold=1e-9)
    with pytest.raises(ctta.InputError):
        model(torch.randn(2, 3, 2, 2) * 3)
    assert model.num_steps == 0


@pytest.mark.parametrize(
    "build",
    [
        lambda: image_views(0),
        lambda: image_views(2, mean=(0.5,)),
        lambda: image_views(2, color=1.5),
        lambda: image_views(2, motion=-0.1),
        lambda: image_views(2, mean=(0.5,), std=(0.0,)),
        lambda: multiscale_flip(()),
        lambda: multiscale_flip((0.5, -1)),
        lambda: multiscale_flip((0.5, float("nan"))),
        lambda: multiscale_flip((0.5, float("inf"))),
    ],
)
def test_bad_settings_of_views(build: Callable[[], Views]) -> None:
    with pytest.raises(ctta.ConfigError):
        build()


def test_scaled_views_align_dense_logits() -> None:
    """If the network returns its input, every view must return the image."""
    smooth = torch.linspace(0, 1, 32).view(1, 1, 1, 32) + torch.linspace(0, 2, 24).view(1, 1, 24, 1)
    for view in multiscale_flip((1.0, 2.0)):
        logits = view(lambda x: x, smooth)
        assert logits.shape == smooth.shape
        torch.testing.assert_close(logits[..., 2:-2, 2:-2], smooth[..., 2:-2, 2:-2], rtol=0, atol=1e-5)


class Recorder:
    """A model that keeps its inputs."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return x.mean((2, 3))

    @property
    def batch_sizes(self) -> list[int]:
        return [len(x) for x in self.inputs]


def test_scaled_views_have_the_scales_and_their_mirror_images() -> None:
    model = Recorder()
    for view in multiscale_flip((0.5, 1.5)):
        view(model, torch.rand(1, 3, 10, 20, generator=torch.Generator().manual_seed(0)))
    seen = model.inputs
    assert [tuple(image.shape[2:]) for image in seen] == [(5, 10), (5, 10), (15, 30), (15, 30)]
    torch.testing.assert_close(seen[0], seen[1].flip(-1))


def test_probabilities_average_to_probabilities_and_stay_finite() -> None:
    confident = torch.tensor([[200.0, -200.0]])
    views: list[View] = [lambda model, x: confident] * 2
    logits = average_views(views, lambda x: x, torch.zeros(1, 2), "probabilities")
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits.softmax(1), torch.tensor([[1.0, 0.0]]))


def test_views_are_computed_one_at_a_time() -> None:
    model = Recorder()
    average_views(image_views(5).draw(torch.Generator()), model, torch.rand(3, 3, 8, 8), "logits")
    assert model.batch_sizes == [3] * 5


@pytest.mark.parametrize("views", [image_views(5), multiscale_flip((0.5, 1.0))], ids=["random", "scaled"])
@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("network", NETWORKS)
def test_several_views_at_once_give_the_logits_of_one_at_a_time(
    network: str, fraction: float, average: Average, views: Views
) -> None:
    torch.manual_seed(0)
    net, x = NETWORKS[network]().double(), images(16, count=3)
    if network == "vit" and not isinstance(views, ImageViews):
        views = multiscale_flip((1.0,))  # the transformer takes one size
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    settings: dict[str, Any] = {"views": views, "average": average, "batch_stats": fraction}
    one_by_one = ctta.TestAug(net, **settings)(x)
    for at_once in (2, 3, 8):
        together = ctta.TestAug(net, views_at_once=at_once, **settings)(x)
        torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-10)


def test_views_at_once_go_through_the_network_together() -> None:
    model = Recorder()
    average_views(image_views(5).draw(torch.Generator()), model, torch.rand(3, 3, 8, 8), "logits", 2)
    assert model.batch_sizes == [6, 6, 3]


def test_several_views_at_once_need_views_with_augment_and_align() -> None:
    class Drawn:
        def draw(self, generator: torch.Generator) -> Sequence[View]:
            return [lambda model, x: model(x)] * 2

    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    with pytest.raises(TypeError, match="augment"):
        ctta.CoTTA(net, views=[lambda model, x: model(x)], views_at_once=2)
    with pytest.raises(TypeError, match="augment"):
        ctta.TestAug(net, views=Drawn(), views_at_once=2)(torch.rand(2, 3, 4, 4))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_batch_norms_without_running_statistics_take_one_view_at_a_time(fraction: float) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(), nn.Linear(48, 3))
    settings: dict[str, Any] = {"views": image_views(2), "batch_stats": fraction}
    assert ctta.TestAug(net, **settings)(torch.rand(4, 3, 4, 4)).shape == (4, 3)
    with pytest.raises(ctta.ConfigError):
        ctta.TestAug(net, views_at_once=2, **settings)


def test_the_number_of_views_at_once_is_read_only() -> None:
    name, methods = "views_at_once", (ctta.TestAug, ctta.CoTTA)
    for method in methods:
        model = method(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), views_at_once=2)
        with pytest.raises(AttributeError):
            setattr(model, name, 1)
        assert model.fork().views_at_once == 2


@pytest.mark.parametrize("method", [ctta.CoTTA, ctta.TestAug])
@pytest.mark.parametrize("at_once", [0, -1, 1.5, True])
def test_a_wrong_number_of_views_at_once(method: type[ctta.TestAug | ctta.CoTTA], at_once: Any) -> None:
    with pytest.raises((ctta.ConfigError, TypeError), match="views_at_once"):
        method(nn.Linear(2, 2), views_at_once=at_once)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_logits_that_a_view_keeps_are_not_changed(average: Average) -> None:
    kept = torch.randn(2, 5, 4, 4)
    before, x = kept.clone(), torch.rand(2, 3, 4, 4)
    views: list[View] = [lambda model, x: kept] * 3
    mean = average_views(views, lambda x: x, x, average)
    assert torch.equal(kept, before)
    torch.testing.assert_close(mean.softmax(1), kept.softmax(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_16_bit_images_are_sampled_exactly(dtype: torch.dtype) -> None:
    x = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in image_views(4).draw(torch.Generator().manual_seed(1)):
        image = view.augment(x)
        assert torch.isfinite(image).all()
        torch.testing.assert_close(image.float(), view.augment(x.float()), rtol=0, atol=0.005)


def test_image_views_align_dense_logits() -> None:
    """If the network returns its smooth input, every view must return the image, away from its edges."""
    rows, columns = torch.linspace(0.2, 0.8, 40).view(1, 1, 40, 1), torch.linspace(0.2, 0.8, 48).view(1, 1, 1, 48)
    image = torch.cat([rows.expand(1, 1, 40, 48), columns.expand(1, 1, 40, 48), torch.full((1, 1, 40, 48), 0.5)], 1)
    for view in image_views(12).draw(torch.Generator().manual_seed(2)):
        plain = ImageView(**vars(view) | {"color_order": (), "sigma": 0.001})
        logits = plain(lambda x: x, image)
        middle = (..., slice(14, 26), slice(16, 32))
        torch.testing.assert_close(logits[middle], image[middle], rtol=0, atol=0.03)


@pytest.mark.parametrize("convert", [list, torch.tensor, lambda values: torch.tensor(values).numpy()])
def test_mean_and_std_may_be_lists_tensors_and_arrays(convert: Callable[[list[float]], Any]) -> None:
    views = image_views(1, mean=convert([0.5, 0.25, 0.5]), std=convert([0.5, 0.5, 0.5]))
    assert views == image_views(1, mean=(0.5, 0.25, 0.5), std=(0.5, 0.5, 0.5))


def test_reflected_padding_equals_padding_and_moving() -> None:
    image = torch.rand(2, 3, 9, 8, dtype=torch.float64)
    padded = nn.functional.pad(image, (4, 4, 4, 4), mode="reflect")

    def move(images: Tensor, padding: Padding = "edge") -> Tensor:
        (numbers,) = move_numbers([[Motion(10.0, 1.1, 1, -2).numbers]], images)
        return sample_bilinear(images.unsqueeze(0), *find_positions(numbers, images), padding)[0]

    torch.testing.assert_close(move(image, "reflect"), move(padded)[..., 4:-4, 4:-4])


def test_views_without_blur_and_noise_keep_a_constant_image() -> None:
    (view,) = image_views(1, color=0, motion=0, blur_and_noise=False).draw(torch.Generator().manual_seed(0))
    x = torch.rand(2, 3, 8, 8)
    expected = x.flip(-1) if view.flip else x
    torch.testing.assert_close(view.augment(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, IMAGENET, {"padding": "reflect", "blur_and_noise": False}])
@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (1, 3, 7, 5), (3, 3, 33, 21), (2, 1, 16, 9)])
@pytest.mark.parametrize("layout", ["rows", "channels_last", "columns"])
def test_views_augmented_together_equal_each_alone(settings: Any, shape: tuple[int, ...], layout: str) -> None:
    if shape[1] == 1 and "mean" in settings:
        settings = {"mean": (0.5,), "std": (0.25,)}
    drawn = image_views(9, **settings).draw(torch.Generator().manual_seed(0))
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    if layout != "rows":
        x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x.mT.contiguous().mT
    x = (x - settings["mean"][0]) / settings["std"][0] if "mean" in settings else x
    drawn = [replace(view, check_range=False) for view in drawn]
    assert torch.equal(ImageView.augment_together(drawn, x), torch.cat([view.augment(x) for view in drawn]))


def test_image_views_of_several_normalizations_are_augmented_together() -> None:
    drawn, x = [draw(0), replace(draw(1, **IMAGENET), check_range=False)], images()
    assert torch.equal(ImageView.augment_together(drawn, x), torch.cat([view.augment(x) for view in drawn]))


class Inverted(ImageView):
    """A view of one's own that changes what another shows."""

    def augment(self, x: Tensor) -> Tensor:
        return 1 - super().augment(x)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_subclass_may_change_what_a_view_shows(at_once: int) -> None:
    drawn, x = image_views(4).draw(torch.Generator()), images()
    plain = average_views(drawn, lambda x: x.mean((2, 3)), x, "logits", at_once)
    inverted = average_views([Inverted(**vars(view)) for view in drawn], lambda x: x.mean((2, 3)), x, "logits", at_once)
    torch.testing.assert_close(inverted, 1 - plain)


class HasWeakViews(ctta.Tent):
    """A method of one's own whose views have another name."""

    view_arguments = ("weak",)

    def __init__(self, net: nn.Module, *, weak: Views = image_views(1)) -> None:
        super().__init__(net)
        self.weak = weak


def test_views_of_any_name_refuse_a_batch_before_anything_changes() -> None:
    model = HasWeakViews(NETWORKS["batch_norm"]())
    with pytest.raises(ctta.InputError):
        model(torch.full((4, 3, 16, 16), 2.0))
    assert model.num_steps == 0
    assert len(model(torch.rand(4, 3, 16, 16))) == 4

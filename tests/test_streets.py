"""The embedded street: the same frames whoever asks, exact labels, and weather that follows from the scene."""

import hashlib
import itertools
import pickle
import sys
import threading

import numpy as np
import pytest
import torch

import ctta
from ctta import streams, synthetic
from ctta.datasets import StreetScenes
from ctta.streams import rounds
from ctta.synthetic import CLASSES, CONDITIONS, HOLD_OUT, SPLITS, Frame, apply_haze, render_frame
from ctta.synthetic.camera import Camera
from ctta.synthetic.canvas import Canvas
from ctta.synthetic.falling import flakes, scattered, streaks
from ctta.synthetic.rng import SceneRNG

SKY, ROAD, LANE, PAVEMENT, BUILDING, VEGETATION, CAR, PERSON, POLE = range(9)
WEATHER = [(name, "report") for name in CONDITIONS] + [(name, "choose") for name in HOLD_OUT]
GROUND = (ROAD, LANE, PAVEMENT)


def scenes(count: int = 40) -> list[Frame]:
    return [render_frame(index) for index in range(count)]


# --- the same, always ---


@pytest.mark.parametrize(("condition", "split"), WEATHER)
def test_a_frame_is_a_function_of_its_arguments(condition: str, split: str) -> None:
    first, again = render_frame(5, condition, split=split), render_frame(5, condition, split=split)
    np.testing.assert_array_equal(first.image, again.image)
    for other in (render_frame(6, condition, split=split), render_frame(5, condition, split=split, seed=1)):
        assert (first.image != other.image).mean() > 0.5
        assert (first.label != other.label).any()


def test_frames_do_not_depend_on_the_global_generator_or_on_threads() -> None:
    expected = [render_frame(index, "snow").image for index in range(4)]
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    made: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda index=index: made.__setitem__(index, render_frame(index, "snow").image))
        for index in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, image in enumerate(expected):
        np.testing.assert_array_equal(made[index], image)
    np.testing.assert_array_equal(np.random.get_state()[1], state)


@pytest.mark.parametrize(("condition", "split"), WEATHER)
def test_a_scene_reads_the_same_alone_and_in_any_batch(condition: str, split: str) -> None:
    alone, _ = StreetScenes(condition, split).read(np.array([7]))
    together, maps = StreetScenes(condition, split).read(np.array([7, 2, 0]))
    assert torch.equal(together[0], alone[0])
    assert together.shape == (3, 3, 128, 256) and together.dtype == torch.float32
    assert maps.shape == (3, 128, 256) and maps.dtype == torch.int64
    assert together.min() >= 0 and together.max() <= 1


def test_labels_and_pixels_are_pinned() -> None:
    """Whoever changes them raises VERSION, which is in the hash of every stream.

    Labels come from sums, products and comparisons, which are the same on any machine; pictures also from exponentials,
    whose last bits are not, so of them the means are held.
    """
    digest = hashlib.sha256(b"".join(render_frame(index).label.tobytes() for index in range(8))).hexdigest()
    means = {
        condition: np.mean([render_frame(index, condition, split=split).image.mean() for index in range(3)])
        for condition, split in WEATHER
    }
    assert (synthetic.VERSION, digest[:16]) == (1, "eb04d7d99993757e")
    assert means == pytest.approx(
        {
            "clear": 112.646,
            "fog": 163.997,
            "night": 36.605,
            "rain": 95.323,
            "snow": 151.66,
            "dusk": 65.991,
            "dust": 125.889,
        },
        abs=0.02,
    )


def test_the_splits_share_no_scene() -> None:
    seen = {render_frame(index, split=split).label.tobytes() for split in SPLITS for index in range(20)}
    assert len(seen) == 20 * len(SPLITS)


# --- labels and distances are exact ---


def test_weather_changes_the_picture_and_never_the_truth() -> None:
    for index in range(6):
        for split, conditions in SPLITS.items():
            clear = render_frame(index, split=split)
            for condition in conditions[1:]:
                other = render_frame(index, condition, split=split)
                np.testing.assert_array_equal(other.label, clear.label)
                np.testing.assert_array_equal(other.distance, clear.distance)
                change = np.abs(other.image.astype(int) - clear.image).mean()
                assert change > 12, (condition, index, change)


def test_every_class_occurs_often_enough() -> None:
    maps = np.stack([scene.label for scene in scenes()])
    share = np.bincount(maps.ravel(), minlength=len(CLASSES)) / maps.size
    present = [(maps == number).any(axis=(1, 2)).mean() for number in range(len(CLASSES))]
    assert maps.max() == len(CLASSES) - 1
    assert min(share) > 0.004, dict(zip(CLASSES, share, strict=True))
    assert max(share) < 0.45, dict(zip(CLASSES, share, strict=True))
    assert min(present) > 0.85, dict(zip(CLASSES, present, strict=True))


def test_sky_is_above_and_road_below() -> None:
    for scene in scenes():
        rows = np.arange(scene.label.shape[0])[:, None] * np.ones_like(scene.label)
        assert rows[scene.label == SKY].max() < rows[np.isin(scene.label, (ROAD, LANE))].min()
        assert np.isin(scene.label[-1], GROUND).mean() > 0.3


def test_the_sky_alone_is_infinitely_far() -> None:
    for scene in scenes(10):
        np.testing.assert_array_equal(np.isinf(scene.distance), scene.label == SKY)
        assert scene.distance.min() > 0.5


def test_the_road_comes_nearer_from_row_to_row() -> None:
    for scene in scenes():
        on_road = np.isin(scene.label, (ROAD, LANE))
        both = on_road[1:] & on_road[:-1]
        assert both.sum() > 1000
        assert (scene.distance[1:] < scene.distance[:-1])[both].all()


def test_the_road_narrows_towards_the_horizon() -> None:
    """Of the ground alone, as cars and people hide parts: half as far below the horizon, half as wide."""
    for scene in scenes(20):
        widths = np.isin(scene.label, (ROAD, LANE, CAR)).sum(axis=1)
        rows = np.flatnonzero(widths)
        upper, lower = widths[rows[0] : rows[0] + 5].mean(), widths[-5:].mean()
        assert upper < 0.8 * lower


def test_far_people_are_small() -> None:
    """A person at depth z is about height * focal / z pixels tall, so pixels times metres hardly vary."""
    sizes = []
    for scene in scenes(60):
        for metres in np.unique(scene.distance[scene.label == PERSON].round(0)):
            rows, columns = np.nonzero((scene.label == PERSON) & (np.abs(scene.distance - metres) < 0.6))
            if np.ptp(columns) * metres < 150:  # one person, not a group
                sizes.append((metres, (np.ptp(rows) + 1) * metres))
    metres, tall = np.array(sizes).T
    near, far = np.median(tall[metres < 12]), np.median(tall[metres > 20])
    assert 0.6 < far / near < 1.4


def test_nearer_things_hide_farther_ones_in_whichever_order_they_are_painted() -> None:
    camera = Camera(height=40, width=60, focal=40, above_ground=1.5, vanishing_row=20, vanishing_column=30)
    things = [(0.0, 5.0, CAR), (0.5, 9.0, PERSON), (-1.0, 20.0, POLE)]
    maps = []
    for order in itertools.permutations(things):
        canvas = Canvas(camera)
        for x, z, label in order:
            window = canvas.upright(x, z, 0.8, 0, z / 5)
            if window is not None:
                across, up = window.u * z - x, 1.5 - window.v * z
                canvas.paint(window, (np.abs(across) < 0.8) & (up > 0) & (up < z / 5), z, np.ones((3, 1, 1)), label)
        maps.append((canvas.label, canvas.depth))
    for label, depth in maps:
        np.testing.assert_array_equal(label, maps[0][0])
        np.testing.assert_array_equal(depth, maps[0][1])
    column = maps[0][0][:, int(camera.column(0.5, 9.0))]
    assert [key for key, _ in itertools.groupby(column)] == [SKY, PERSON, CAR, SKY]  # nothing below: there is no ground


# --- weather ---


def test_koschmieder() -> None:
    clear, distance = np.full((3, 2, 2), 0.2, np.float32), np.array([[0, 10], [100, np.inf]], np.float32)
    seen = apply_haze(clear, distance, 0.05, np.array([[[0.8]], [[0.7]], [[0.6]]], np.float32))
    for row in range(2):
        for column in range(2):
            left = np.exp(-0.05 * distance[row, column])
            expected = 0.2 * left + np.array([0.8, 0.7, 0.6]) * (1 - left)
            np.testing.assert_allclose(seen[:, row, column], expected, rtol=1e-5)


@pytest.mark.parametrize("index", [0, 1, 2, 8, 13])
def test_fog_follows_from_the_clear_picture_and_the_distance(index: int) -> None:
    """The air's colour is what the infinitely far sky shows; one extinction then explains all other pixels."""
    clear, foggy = render_frame(index), render_frame(index, "fog")
    sky = clear.label == SKY
    airlight = foggy.image[sky].mean(axis=0) / 255
    assert np.ptp(foggy.image[sky], axis=0).max() <= 1
    before, after = clear.image / 255 - airlight, foggy.image / 255 - airlight
    usable = (np.abs(before) > 0.25) & (np.abs(after) > 0.06) & ~sky[..., None]
    beta = -np.log(after[usable] / before[usable]) / np.repeat(clear.distance[..., None], 3, axis=2)[usable]
    typical = np.median(beta)
    assert 2.9 / 70 < typical < 3.1 / 25
    transmitted = np.exp(-typical * clear.distance.astype(np.float64))[..., None]
    expected = 255 * (airlight + transmitted * before)
    np.testing.assert_allclose(foggy.image, expected, atol=2.5)


def test_night_is_dark_and_lamps_are_not() -> None:
    nights, days = [render_frame(index, "night") for index in range(8)], scenes(8)
    assert np.mean([night.image.mean() for night in nights]) < 0.45 * np.mean([day.image.mean() for day in days])
    for night, day in zip(nights, days, strict=True):
        sky = day.label == SKY
        assert night.image[sky].mean() < 0.3 * day.image[sky].mean()
        assert night.image.max() > 200


def test_snow_whitens_the_pavement_and_rain_darkens_the_road() -> None:
    for index in range(8):
        clear, label = render_frame(index).image.astype(float), render_frame(index).label
        snowy, wet = render_frame(index, "snow").image, render_frame(index, "rain").image
        assert snowy[label == PAVEMENT].mean() > clear[label == PAVEMENT].mean()
        # Its water takes colour, and mirrors.
        assert wet[label == LANE].mean() < clear[label == LANE].mean()


def test_what_falls_outside_is_dropped_and_what_meets_adds_up() -> None:
    rows, columns = np.array([0.5, 0.7, -0.2, 2.0]), np.array([1.1, 1.9, 0.0, 1.0])
    layer = scattered(2, 3, rows, columns, np.float32(0.5))
    np.testing.assert_array_equal(layer, [[0, 1, 0], [0, 0, 0]])


def test_streaks_and_flakes_reach_all_of_the_picture() -> None:
    for layer in (streaks(64, 96, 400, 0.4, SceneRNG(0, "test", 0)), flakes(64, 96, 400, 1.5, SceneRNG(0, "test", 0))):
        tiles = layer.reshape(4, 16, 4, 24).mean(axis=(1, 3))
        assert tiles.min() > 0.3 * tiles.max()


# --- streams ---


def test_the_stream_is_fog_night_rain_snow_ten_times() -> None:
    stream = rounds(streams.streets(num_scenes=3, batch_size=2, size=(64, 96)), 10)
    assert stream.domains == ["fog", "night", "rain", "snow"] * 10
    batches = list(stream)
    assert [len(batch.x) for batch in batches[:4]] == [2, 1, 2, 1]
    assert batches[0].index.tolist() == [0, 1] and batches[1].index.tolist() == [2]
    assert torch.equal(batches[0].x, batches[8].x), "another round, the same frames"
    assert not torch.equal(batches[0].x, batches[2].x)
    assert torch.equal(batches[0].y, batches[2].y)
    expected = render_frame(1, "night", size=(64, 96))
    np.testing.assert_array_equal((batches[2].x[1] * 255).round().permute(1, 2, 0).numpy(), expected.image)
    np.testing.assert_array_equal(batches[2].y[1].numpy(), expected.label)


def test_each_split_has_its_own_weather() -> None:
    assert streams.streets(split="train", num_scenes=2).domains == ["clear"]
    assert streams.streets(split="choose", num_scenes=2).domains == ["dusk", "dust"]
    assert streams.streets(conditions=("clear", "snow"), num_scenes=2).domains == ["clear", "snow"]


def test_the_hash_tells_streams_apart() -> None:
    def stream(**settings) -> streams.Stream:
        return streams.streets(**{"num_scenes": 4} | settings)

    others = [
        stream(num_scenes=5),
        stream(seed=1),
        stream(size=(64, 128)),
        stream(batch_size=2),
        stream(conditions=("fog", "rain")),
        stream(split="choose"),
    ]
    assert len({stream().hash, *(other.hash for other in others)}) == 7
    assert stream().hash == stream().hash


def test_what_a_reader_remembers_is_bounded_and_safe_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ctta.datasets.streets"], "MAX_CACHED_PIXELS", 2 * 32 * 48)
    scenes = StreetScenes("rain", num_scenes=4, size=(32, 48))
    first, _ = scenes.read(np.arange(4))
    assert len(scenes._cache) == 2
    expected = first.clone()
    first.zero_()
    assert torch.equal(scenes.read(np.arange(4))[0], expected)
    assert pickle.loads(pickle.dumps(scenes)) == scenes


@pytest.mark.parametrize("size", [(32, 32), (33, 67), (101, 64), (64, 300)])
def test_any_size(size: tuple[int, int]) -> None:
    for condition, split in WEATHER:
        made = render_frame(3, condition, split=split, size=size)
        assert made.image.shape == (*size, 3) and made.label.shape == size and made.distance.shape == size


# --- mistakes ---


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match=r"condition must be one of 'clear', .*, got 'hail'"):
        render_frame(0, "hail")
    with pytest.raises(ValueError, match="split must be one of 'train', 'choose', 'report', got 'test'"):
        render_frame(0, split="test")
    with pytest.raises(ValueError, match=r"split 'choose' is seen in clear, dusk, dust, got 'fog': use split='report'"):
        StreetScenes("fog", "choose")
    with pytest.raises(ValueError, match="got 'dusk': use split='choose'"):
        streams.streets(conditions=("fog", "dusk"))
    with pytest.raises(ValueError, match=r"got 'fog': give \('fog',\)"):
        streams.streets(conditions="fog")
    with pytest.raises(ValueError, match="index must be an integer of at least 0, got -1"):
        render_frame(-1)
    with pytest.raises(TypeError, match=r"seed must be an integer, got 0\.5"):
        render_frame(0, seed=0.5)
    with pytest.raises(ValueError, match="width must be an integer of at least 32, got 16"):
        render_frame(0, size=(64, 16))
    with pytest.raises(ValueError, match=r"size must be \(height, width\), got 128"):
        render_frame(0, size=128)
    with pytest.raises(ValueError, match="num_scenes must be an integer of at least 1, got 0"):
        streams.streets(num_scenes=0)


def test_the_street_names_its_classes_where_it_is_scored() -> None:
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, len(CLASSES), 1)
    result = ctta.evaluate(ctta.Source(net), streams.streets(num_scenes=2, size=(32, 64), conditions=("fog",)))
    assert tuple(result.class_iou) == CLASSES
    assert 0 <= result.miou <= 1

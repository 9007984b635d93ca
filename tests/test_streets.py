"""Streams of synthetic street scenes."""

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

import ctta
from ctta.data import streams
from ctta.data.datasets import StreetScenes
from ctta.data.streams import rounds
from ctta.data.streets import CLASSES, CONDITIONS, HOLD_OUT, render_frame
from ctta.errors import ConfigError

WEATHER = [(name, "report") for name in CONDITIONS] + [(name, "choose") for name in HOLD_OUT]


@pytest.mark.parametrize(("condition", "split"), WEATHER)
def test_a_scene_reads_the_same_alone_and_in_any_batch(condition: str, split: str) -> None:
    alone, _ = StreetScenes(condition, split).read(np.array([7]))
    together, maps = StreetScenes(condition, split).read(np.array([7, 2, 0]))
    assert torch.equal(together[0], alone[0])
    assert together.shape == (3, 3, 128, 256) and together.dtype == torch.float32
    assert maps.shape == (3, 128, 256) and maps.dtype == torch.int64
    assert together.min() >= 0 and together.max() <= 1


def test_the_stream_is_fog_night_rain_snow_ten_times() -> None:
    stream = rounds(streams.streets(num_scenes=3, batch_size=2, size=(64, 96)), 10)
    assert stream.domains == ["fog", "night", "rain", "snow"] * 10
    batches = list(stream)
    assert [len(batch.x) for batch in batches[:4]] == [2, 1, 2, 1]
    assert batches[0].index.tolist() == [0, 1] and batches[1].index.tolist() == [2]
    assert torch.equal(batches[0].x, batches[8].x), "another round, the same frames"
    assert not torch.equal(batches[0].x, batches[2].x)
    labels = [batch.y for batch in batches]
    assert labels[0] is not None and labels[2] is not None
    assert torch.equal(labels[0], labels[2])
    expected = render_frame(1, "night", size=(64, 96))
    np.testing.assert_array_equal((batches[2].x[1] * 255).round().permute(1, 2, 0).numpy(), expected.image)
    np.testing.assert_array_equal(labels[2][1].numpy(), expected.label)


def test_each_split_has_its_own_weather() -> None:
    assert streams.streets(split="train", num_scenes=2).domains == ["clear"]
    assert streams.streets(split="choose", num_scenes=2).domains == ["dusk", "dust"]
    assert streams.streets(conditions=("clear", "snow"), num_scenes=2).domains == ["clear", "snow"]


def test_the_hash_distinguishes_streams() -> None:
    def stream(**settings: Any) -> streams.Stream:
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


def test_the_cache_of_a_reader_is_bounded_and_not_shared_with_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ctta.data.datasets.scenes"], "MAX_CACHED_PIXELS", 2 * 32 * 48)
    scenes = StreetScenes("rain", num_scenes=4, size=(32, 48))
    first, _ = scenes.read(np.arange(4))
    assert len(scenes._cache) == 2
    expected = first.clone()
    first.zero_()
    assert torch.equal(scenes.read(np.arange(4))[0], expected)
    assert pickle.loads(pickle.dumps(scenes)) == scenes


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"conditions": ("fog", "dusk")}, "'dusk'"), ({"conditions": "fog"}, "'fog'"), ({"num_scenes": 0}, "num_scenes")],
)
def test_errors_name_the_argument(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        streams.streets(**arguments)


def test_a_condition_belongs_to_one_split() -> None:
    with pytest.raises(ConfigError):
        StreetScenes("fog", "choose")


def test_results_name_the_classes() -> None:
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, len(CLASSES), 1)
    result = ctta.evaluate(ctta.Source(net), streams.streets(num_scenes=2, size=(32, 64), conditions=("fog",)))
    assert tuple(result.class_iou) == CLASSES
    assert 0 <= result.miou <= 1

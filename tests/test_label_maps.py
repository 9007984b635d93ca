"""Predicted label maps on disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from random_scenes import FULL, make_cotta, make_net, make_stream

import ctta
from ctta.data.datasets import IGNORE_INDEX
from ctta.data.streams import Stream, rounds
from ctta.evaluation.label_maps import load_label_maps, save_label_maps, saved_batches


def predict_maps(model: ctta.AdaptiveModel, scenes: Stream) -> list[torch.Tensor]:
    return [torch.nn.functional.interpolate(model(batch.x), FULL, mode="bilinear").argmax(1) for batch in scenes]


def test_maps_of_the_last_round_are_saved(tmp_path: Path) -> None:
    scenes = rounds(make_stream(), 3)  # of 3 + 3 batches each
    ctta.evaluate(make_cotta(), scenes, folder=tmp_path)
    assert saved_batches(tmp_path) == list(range(12, 18))
    expected = predict_maps(make_cotta(), rounds(make_stream(), 3))
    for number in saved_batches(tmp_path):
        saved, labels = load_label_maps(tmp_path, number), scenes.read_batch(number).y
        assert saved.maps.dtype == np.uint8
        assert saved.maps.tolist() == expected[number].tolist()
        assert labels is not None
        for accuracy, predicted, truth in zip(saved.accuracy, saved.maps, labels.numpy(), strict=True):
            assert accuracy == pytest.approx(float((predicted == truth)[truth != IGNORE_INDEX].mean()))


def test_interrupted_evaluation_saves_the_same_maps(tmp_path: Path) -> None:
    def stop(_record: object) -> None:
        if len(saved_batches(tmp_path / "stopped")) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ctta.evaluate(make_cotta(), make_stream(), folder=tmp_path / "stopped", on_batch=stop)
    for folder in ("stopped", "whole"):
        ctta.evaluate(make_cotta(), make_stream(), folder=tmp_path / folder)
    assert saved_batches(tmp_path / "stopped") == saved_batches(tmp_path / "whole") == list(range(6))
    for number in range(6):
        stopped, whole = (load_label_maps(tmp_path / folder, number) for folder in ("stopped", "whole"))
        assert np.array_equal(stopped.maps, whole.maps)


def test_non_finite_predictions_have_a_class_of_their_own(tmp_path: Path) -> None:
    model = ctta.Source(make_net())
    with torch.no_grad():
        model.source.get_parameter("3.bias")[0] = torch.nan
    ctta.evaluate(model, make_stream(), folder=tmp_path)
    saved = load_label_maps(tmp_path, 0)
    assert (saved.maps == 4).all() and (saved.accuracy == 0).all()


def test_16_bit_labels_are_compared(tmp_path: Path) -> None:
    logits = torch.eye(3)[None, :, :, None]  # classes 0, 1 and 2, one below the other
    labels = torch.tensor([[[0], [2], [IGNORE_INDEX]]])
    save_label_maps(tmp_path, 0, logits, labels.to(torch.uint16))
    assert load_label_maps(tmp_path, 0).accuracy.tolist() == [0.5]


def test_image_classification_saves_no_maps(tmp_path: Path) -> None:
    data = ctta.data.datasets.ArrayDataset(np.zeros((4, 32, 32, 3), np.uint8), np.zeros(4, np.int64), name="black")
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    scenes = ctta.data.streams.continual(data, names=("brightness",), batch_size=2)
    ctta.evaluate(ctta.Source(flat), scenes, folder=tmp_path)
    assert saved_batches(tmp_path) == []

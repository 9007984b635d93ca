"""How sorted and how mixed streams are, foreign images in them, and the error at each visit."""

import json
from importlib import import_module
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from small_data import IMAGES, LABELS, create_data, create_stream, labels_of
from torch import Tensor, nn

import ctta
from ctta.data.datasets import IGNORE_LABEL
from ctta.data.streams import Stream, cdc, correlated, foreign, in_memory, mixed, rounds, single
from ctta.errors import ConfigError, DataError, InputError
from ctta.evaluation import read_result
from ctta.evaluation.metrics import ImageScore, Score, score_images


def count_by_reading(stream: Stream) -> tuple[float, float]:
    """Return the mean numbers of distinct classes and domains per batch, from the batches themselves."""
    classes, domains = [], []
    for batch in stream:
        known = (labels_of(batch) != IGNORE_LABEL).tolist()
        classes.append(len({label for label, keep in zip(labels_of(batch).tolist(), known, strict=True) if keep}))
        domains.append(len({domain for domain, keep in zip(batch.domains, known, strict=True) if keep}))
    return fmean(classes), fmean(domains)


@pytest.mark.parametrize("name", ["plain", "sorted", "mixed", "single", "foreign", "mixed foreign", "foreign single"])
def test_composition_equals_that_of_the_batches(name: str) -> None:
    stream = {
        "plain": lambda: create_stream(),
        "sorted": lambda: correlated(create_stream(batch_size=5), sampler="sorted"),
        "mixed": lambda: mixed(rounds(create_stream(batch_size=7), 2)),
        "single": lambda: single(create_stream(limit=5)),
        "foreign": lambda: foreign(create_stream(), fraction=0.4),
        "mixed foreign": lambda: mixed(foreign(create_stream(), fraction=0.4)),
        "foreign single": lambda: single(foreign(create_stream(limit=5), fraction=0.5)),
    }[name]()
    found = stream.composition
    assert (found.classes_per_batch, found.domains_per_batch) == pytest.approx(count_by_reading(stream))
    assert (found.num_classes, found.num_domains, found.batch_size) == (4, 2, stream.batch_size)
    assert found.foreign == pytest.approx({"foreign": 0.4, "mixed foreign": 0.4, "foreign single": 0.5}.get(name, 0.0))


def test_composition_in_words() -> None:
    assert create_stream(limit=12, batch_size=4).composition.describe() == (
        "batches of 4: 4.0 of 4 classes and 1.0 of 2 domains on average"
    )
    unlabeled = in_memory(IMAGES, name="mine", batch_size=8).composition
    assert unlabeled.describe() == "batches of 8: 1.0 of 1 domain on average"
    assert foreign(create_stream(), fraction=0.25).composition.describe().endswith(", and 25 % foreign images")


def test_foreign_images_are_evenly_spaced_and_of_the_right_size() -> None:
    plain = create_stream(batch_size=8)
    stream = foreign(plain, fraction=0.5)
    batches = list(stream)
    assert len(batches) == 2 * len(plain)
    for batch in batches:
        is_foreign = labels_of(batch) == IGNORE_LABEL
        assert is_foreign.tolist() == [False, True] * 4
        assert [domain == "foreign" for domain in batch.domains] == is_foreign.tolist()
        assert batch.x.shape == (8, 3, 32, 32)
    kept = torch.cat([batch.x[labels_of(batch) >= 0] for batch in batches])
    assert torch.equal(kept, torch.cat([batch.x for batch in plain])), "the images of the stream, in their order"
    noise = torch.cat([batch.x[labels_of(batch) < 0] for batch in batches])
    assert len(noise.unique(dim=0)) == 48 and noise.mean() == pytest.approx(0.5, abs=0.01)
    assert noise.std() == pytest.approx(12**-0.5, abs=0.01), "uniform"


def test_foreign_images_of_another_stream_are_resized_and_start_over() -> None:
    others = in_memory(np.full((5, 16, 20, 3), 51, np.uint8), np.arange(5), name="gray")
    stream = foreign(create_stream(), others, fraction=0.25)
    batch = stream.read_batch(0)
    gray = batch.x[labels_of(batch) < 0]
    assert torch.allclose(gray, torch.full_like(gray, 0.2)) and gray.shape[1:] == (3, 32, 32)
    assert batch.index[labels_of(batch) < 0].tolist() == [0, 1]
    assert sum(int((labels_of(batch) < 0).sum()) for batch in stream) == 16


def test_foreign_images_enter_the_hash() -> None:
    plain, gray = create_stream(), in_memory(IMAGES[:5], np.arange(5), name="own")
    variants = [
        plain,
        foreign(plain),
        foreign(plain, seed=1),
        foreign(plain, fraction=0.4),
        foreign(plain, "streets"),
        foreign(plain, gray),
        foreign(plain, in_memory(IMAGES[5:9], np.arange(4), name="own")),
    ]
    assert len({stream.hash for stream in variants}) == len(variants)
    assert "foreign noise fraction=0.5 seed=0" in variants[1].name
    batch = variants[4].read_batch(0)
    assert batch.x[1].std() > 0.01 and not torch.equal(batch.x[1], batch.x[3])


def test_foreign_images_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError):
        foreign(create_stream(), fraction=1)
    with pytest.raises(ConfigError):
        foreign(create_stream(), "mnist")
    with pytest.raises(DataError):
        foreign(in_memory(IMAGES, name="mine"))
    with pytest.raises(DataError):
        correlated(foreign(create_stream()))


def test_images_with_the_ignored_label_count_nowhere() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, -100, 2, 3, -100, 1, 2, -100, 0])
    score, kept = score_images(logits, labels), labels >= 0
    alone = score_images(logits[kept], labels[kept])
    assert (score.num_wrong, score.bins, score.classes) == (alone.num_wrong, alone.bins, alone.classes)
    assert (score.num_images, score.num_ignored, score.num_processed) == (6, 3, 9)
    assert Score.sum([score, score]).num_ignored == 6
    assert ImageScore.from_json(json.loads(json.dumps(score.to_json()))) == score
    assert "ignored" not in alone.to_json()
    none = score_images(logits, torch.full((9,), -100))
    assert np.isnan(none.error) and (none + alone).error == alone.error
    with pytest.raises(InputError):
        score_images(logits, torch.tensor([0, -1, 2, 3, 0, 0, 0, 0, 0]))


class Recorder(ctta.Source):
    """A source that counts the images that it is shown."""

    num_shown = 0

    def adapt_step(self, x: Tensor) -> Tensor:
        type(self).num_shown += len(x)
        return super().adapt_step(x)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))


def test_evaluation_shows_foreign_images_and_scores_the_others(tmp_path: Path) -> None:
    plain = create_stream()
    Recorder.num_shown = 0
    result = ctta.evaluate(Recorder(make_net()), foreign(plain), folder=tmp_path)
    expected = ctta.evaluate(make_net(), plain)
    assert Recorder.num_shown == 96
    assert result.errors == expected.errors and result.class_error == expected.class_error
    assert result.calibration_error == pytest.approx(expected.calibration_error)
    assert (result.total.num_images, result.total.num_processed) == (48, 96)
    assert result.images_per_second == pytest.approx(96 / result.seconds)
    assert read_result(tmp_path).composition == foreign(plain).composition
    alone = ctta.evaluate(make_net(), single(foreign(plain)))
    assert alone.errors == expected.errors and alone.interval is not None, "also where a batch has nothing to score"


def test_error_at_each_visit(tmp_path: Path) -> None:
    stream = rounds(create_stream(), 3)
    result = ctta.evaluate(make_net(), stream, folder=tmp_path)
    assert result.visit_errors == pytest.approx([fmean(result.errors[:2])] * 3)
    assert read_result(tmp_path).visits == (0, 0, 1, 1, 2, 2)
    once = ctta.evaluate(make_net(), create_stream(), folder=tmp_path / "once")
    assert once.visits == () and once.visit_errors == pytest.approx([once.error])
    assert "visits" not in json.loads((tmp_path / "once" / "about.json").read_text())


def test_pieces_of_a_domain_count_as_one_at_a_visit() -> None:
    stream = cdc(create_data(), num_visits=4, names=("contrast", "brightness"), batch_size=3)
    result = ctta.evaluate(make_net(), stream)
    plain = ctta.evaluate(make_net(), create_stream())
    assert len(result.domains) > 8
    assert result.visit_errors == pytest.approx([plain.error] * 4), "the source's error does not depend on the pieces"


def test_an_evaluation_is_resumed_with_the_same_step_ratio_only(tmp_path: Path) -> None:
    stream = rounds(create_stream(), 2)
    expected = ctta.evaluate(make_net(), stream, folder=tmp_path)
    assert ctta.evaluate(make_net(), stream, folder=tmp_path).errors == expected.errors
    with pytest.raises(ConfigError):
        ctta.evaluate(make_net(), stream, folder=tmp_path, step_ratio=2)


def test_labels_are_not_needed() -> None:
    result = ctta.evaluate(make_net(), in_memory(IMAGES, name="mine", batch_size=8))
    assert result.composition is not None and result.composition.classes_per_batch is None
    labeled = ctta.evaluate(make_net(), [(torch.rand(4, 3, 32, 32), torch.from_numpy(LABELS[:4]))])
    assert labeled.composition is None


def test_hash_depends_on_how_streets_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = [foreign(create_stream(), "streets").hash]
    monkeypatch.setattr(
        import_module("ctta.data.streams.foreign"), "VERSION", 99
    )  # the package has a function of this name
    hashes.append(foreign(create_stream(), "streets").hash)
    assert hashes[0] != hashes[1]
    assert foreign(create_stream(), "noise").hash not in hashes

"""What a user passes to ``evaluate`` first: networks, loaders, datasets, arrays; it works or says what to do."""

from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labeled_images import BYTES, X, Y, in_batches, make_net
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typing_extensions import override

import ctta
from ctta.errors import ConfigError, DataError, InputError
from ctta.evaluation import read_result


def expected_error() -> float:
    with torch.no_grad():
        return float((make_net()(X).argmax(1) != Y).double().mean())


class LabeledImages(Dataset[Any]):
    """PIL images with labels in the order of the classes, as torchvision's ImageFolder without a transform."""

    classes = ("a", "b", "c", "d", "e")

    def __len__(self) -> int:
        return len(BYTES)

    def __getitem__(self, index: int) -> Any:
        return Image.fromarray(BYTES[int(Y.argsort(stable=True)[index])]), int(Y.sort().values[index])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


LABELED: dict[str, Callable[[], Any]] = {
    "stream": lambda: ctta.data.streams.in_memory(BYTES, Y.numpy(), name="mine", batch_size=8),
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=8),
    "shuffling loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "default loader": lambda: DataLoader(TensorDataset(X, Y)),
    "loader of an iterable": lambda: DataLoader(Endless(), batch_size=8),
    "dataset": lambda: TensorDataset(X, Y),
    "dataset of images": LabeledImages,
    "iterable dataset": Endless,
    "list of batches": in_batches,
    "list of lists": lambda: [list(batch) for batch in in_batches()],
    "generator": lambda: (batch for batch in in_batches()),
    "batches with more fields": lambda: [(x, y, ["path"] * len(x)) for x, y in in_batches()],
    "single images": lambda: [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "tensors": lambda: (X, Y),
    "list of two tensors": lambda: [X, Y],
    "double arrays": lambda: (X.double().numpy(), Y.numpy()),
    "byte arrays": lambda: (BYTES, Y.numpy()),
    "byte tensors": lambda: [(torch.from_numpy(BYTES).permute(0, 3, 1, 2), Y)],
    "byte arrays in batches": lambda: [(BYTES[:20], Y[:20].numpy()), (BYTES[20:], Y[20:].numpy())],
    "arrays and a list": lambda: (X, Y.tolist()),
    "int32": lambda: [(x, y.int()) for x, y in in_batches()],
    "uint8": lambda: [(x, y.to(torch.uint8)) for x, y in in_batches()],
    "uint16 arrays": lambda: [(x.numpy(), y.numpy().astype(np.uint16)) for x, y in in_batches()],
    "lists of labels": lambda: [(x, y.tolist()) for x, y in in_batches()],
    "a column of labels": lambda: [(x, y[:, None]) for x, y in in_batches()],
    "dictionaries": lambda: [{"pixel_values": x, "labels": y} for x, y in in_batches()],
    "dictionaries of images": lambda: [
        {"image": Image.fromarray(x), "label": int(y)} for x, y in zip(BYTES, Y, strict=True)
    ],
    "batches of a stream": lambda: list(ctta.data.streams.in_memory(BYTES, Y.numpy(), name="mine", batch_size=8)),
}


@pytest.mark.parametrize("kind", LABELED)
def test_labeled_data_of_any_kind_has_the_error_of_a_plain_loop(kind: str) -> None:
    result = ctta.evaluate(make_net(), LABELED[kind]())
    assert result.method == "Source" and result.total.num_images == 40
    assert result.error == pytest.approx(expected_error())
    assert result.is_labeled and len(result.stream_hash) == 16


@pytest.mark.parametrize(
    "data",
    [
        lambda: X,
        lambda: X.numpy(),
        lambda: BYTES,
        lambda: [X[:20], X[20:]],
        lambda: list(X),
        lambda: [(X,)],
        lambda: DataLoader(TensorDataset(X), batch_size=8),
        lambda: (x for x in X.split(7)),
        lambda: ctta.data.streams.live(iter(BYTES), batch_size=9),
        lambda: [Image.fromarray(pixels) for pixels in BYTES],
    ],
)
def test_data_without_labels_has_no_error(data: Callable[[], Any]) -> None:
    result = ctta.evaluate(make_net(), data())
    probabilities = make_net()(X).softmax(1)
    assert not result.is_labeled and result.total.num_images == 40
    assert list(result.num_predicted) == probabilities.argmax(1).bincount(minlength=5).tolist()
    assert result.confidence == pytest.approx(float(probabilities.max(1).values.mean().detach()))
    assert "no labels: mean confidence" in repr(result) and len(repr(result).splitlines()) == 3
    with pytest.raises(InputError):
        _ = result.error


def test_adaptation_on_a_loader_equals_a_plain_loop() -> None:
    result = ctta.evaluate(ctta.Tent(make_net()), DataLoader(TensorDataset(X, Y), batch_size=8))
    model = ctta.Tent(make_net())
    wrong = [int((model(x).argmax(1) != y).sum()) for x, y in in_batches()]
    assert [round(batch.score.error * 8) for batch in result.batches] == wrong
    assert result.method == "Tent" and result.settings["batch_stats"]


def test_a_dataset_is_shuffled_always_in_the_same_way() -> None:
    """Many datasets list class after class, which no method adapts to."""
    first, second = (ctta.evaluate(make_net(), LabeledImages(), batch_size=8) for _ in range(2))
    assert first.stream_hash == second.stream_hash and first.num_batches == 5
    assert first.stream == "LabeledImages shuffled batch=8" and first.class_names == LabeledImages.classes
    in_order = ctta.evaluate(make_net(), [LabeledImages()[place] for place in range(40)], batch_size=8)
    assert in_order.stream_hash != first.stream_hash


def test_the_hash_tells_whether_two_results_saw_the_same_batches() -> None:
    hashes = [
        ctta.evaluate(make_net(), data).stream_hash
        for data in (in_batches(), iter(in_batches()), in_batches(5), in_batches()[::-1], [(X, Y)], [(X, Y * 0)])
    ]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 5


def test_domains_of_batches_are_segments() -> None:
    images = ctta.data.streams.in_memory(BYTES, Y.numpy(), name="mine", batch_size=10)
    stream = ctta.data.streams.continual(images, names=("contrast", "brightness"))
    whole, listed = ctta.evaluate(make_net(), stream), ctta.evaluate(make_net(), list(stream))
    assert listed.domains == ("contrast 5", "brightness 5") and listed.errors == whole.errors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("val/", r"got the path 'val/': open it with ctta\.data\.streams\.image_folder"),
        (Path("val"), r"ctta\.data\.streams\.folder\(path\)"),
        ({"image": X, "label": Y}, r"got a dictionary with 'image', 'label': give a pair"),
        (
            ctta.data.datasets.sample(),
            r"got the dataset ArrayDataset: give it an order, such as ctta\.data\.streams\.continual",
        ),
        (7, r"expected a stream of ctta\.data\.streams, a DataLoader, or an iterable"),
        ([], "list yields no batch"),
        (iter(()), "can be read only once"),
        ([{"pixels": X}], r"a dictionary with 'pixels': yield tuples"),
        ([()], "an empty tuple"),
        (["image.png"], "got str: yield"),
        ([(X.movedim(1, -1), Y)], r"channels last: move them first"),
        ([((X * 255).long(), Y)], r"got torch\.int64: convert them to float"),
        ([(X, Y.float())], r"call y\.long\(\) first"),
        ([(X, nn.functional.one_hot(Y))], r"call y\.argmax\(1\) first"),
        ([(X, ["cat"] * 40)], "map class names to"),
        ([(X, Y[:10])], r"labels of shape \(10,\) for 40 images"),
        ([(X, Y + 3)], "labels range from 3 to 7, but the model has 5 classes"),
        ([(X, Y), X], "has no labels or others than those before it"),
        ([(X[0], 1), (X[1][:, :8], 2)], "images in a batch must have the same size"),
        (ctta.Source(make_net()), "give the model first and the data second"),
    ],
)
def test_other_data_is_told_what_to_do_in_one_sentence(data: Any, message: str) -> None:
    with pytest.raises((InputError, DataError, TypeError), match=message) as caught:
        ctta.evaluate(make_net(), data)
    assert "\n" not in str(caught.value) and type(caught.value) is not AttributeError


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tent", r"got 'tent': wrap your network, such as ctta\.adapt"),
        (ctta.Tent, "got the class Tent: wrap your network"),
        (in_batches(), "got list: give the model first"),
        (None, "got NoneType"),
    ],
)
def test_other_models_are_told_what_to_do(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ctta.evaluate(model, in_batches())


def test_batch_size_is_for_single_images() -> None:
    assert ctta.evaluate(make_net(), (X, Y), batch_size=10).num_batches == 4
    for data in (in_batches(), LABELED["stream"]()):
        with pytest.raises(ConfigError):
            ctta.evaluate(make_net(), data, batch_size=10)


def test_a_folder_of_plain_batches_is_written_once_and_not_resumed(tmp_path: Path) -> None:
    result = ctta.evaluate(ctta.Tent(make_net()), in_batches(), folder=tmp_path / "run")
    assert read_result(tmp_path / "run") == result
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["about.json", "batches.jsonl"]
    with pytest.raises(ConfigError):
        ctta.evaluate(ctta.Tent(make_net()), in_batches(), folder=tmp_path / "run")


def test_byte_arrays_are_a_stream_and_resume(tmp_path: Path) -> None:
    first = ctta.evaluate(ctta.Tent(make_net()), (BYTES, Y.numpy()), folder=tmp_path)
    assert ctta.evaluate(ctta.Tent(make_net()), (BYTES, Y.numpy()), folder=tmp_path) == first


def test_the_progress_of_several_methods_shares_a_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        @override
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("ctta.evaluation.loop.TERMINAL_INTERVAL", 0.0)
    ctta.compare({"a network": make_net(), "tent": "tent"}, iter(in_batches()), progress=True)
    shown = terminal.getvalue().split("\r")[1:]
    assert len(shown) == 12 and all(line.rstrip("\n").endswith("%\x1b[K") for line in shown)
    assert [line.partition(":")[0] for line in shown if line.endswith("\n")] == ["a network", "tent"]


def test_the_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ctta.evaluate(make_net(), DataLoader(TensorDataset(X, Y), batch_size=8), progress=True)
    ctta.evaluate(make_net(), iter(in_batches()), progress=True, name="mine")
    lines = capsys.readouterr().err.splitlines()
    error = f"{100 * expected_error():.1f} %"
    assert lines == [f"Source: 5 of 5 batches, error {error}", f"mine: 5 batches, error {error}"]

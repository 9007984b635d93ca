"""Streams: order, position, hash, protocols and readers, and every way in which data on disk can be wrong."""

import hashlib
import pickle
import struct
import threading
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ctta import datasets, streams
from ctta.corruptions import CORRUPTIONS, corrupt, write_cifar_c
from ctta.datasets import CifarC, Corrupted, ImageNetC, clean_cifar
from ctta.errors import DataError
from ctta.streams import acdc, cityscapes, continual, correlated, corruption_order, gradual, mixed, rounds, single

IMAGES = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), np.uint8)
LABELS = np.arange(24) % 4
TWO = ("contrast", "brightness")


def data(seed: int = 0) -> Corrupted:
    return Corrupted(IMAGES, LABELS, name="noise", seed=seed)


def short(**settings) -> streams.Stream:
    return continual(data(), **{"names": TWO, "batch_size": 10} | settings)


def same(one, other) -> bool:
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and one.domain == other.domain


# --- streams ---


def test_batches_come_in_order_with_their_labels_domain_and_index() -> None:
    batches = list(short())
    assert [batch.domain for batch in batches] == ["contrast 5"] * 3 + ["brightness 5"] * 3
    assert [len(batch.x) for batch in batches] == [10, 10, 4] * 2
    expected = corrupt(IMAGES[10:20], "contrast", 5, index=np.arange(10, 20))
    torch.testing.assert_close(batches[1].x, torch.from_numpy(expected).permute(0, 3, 1, 2) / 255)
    assert batches[1].y.tolist() == LABELS[10:20].tolist()
    assert batches[1].index.tolist() == list(range(10, 20))
    assert batches[1].x.dtype == torch.float32


def test_a_stream_can_be_gone_through_again() -> None:
    stream = short()
    assert len(stream) == 6
    first, second = list(stream), list(stream)
    assert all(same(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("read_ahead", [0, 1, 3, 50])
@pytest.mark.parametrize("stop", [0, 1, 2, 5, 6])
def test_a_saved_position_yields_the_identical_rest(stop: int, read_ahead: int) -> None:
    whole = list(short())
    stream = short()
    stream.read_ahead = read_ahead
    iterator = iter(stream)
    for _ in range(stop):
        next(iterator)
    position = stream.position
    assert position == stop
    iterator.close()
    resumed = short()
    resumed.position = position
    rest = list(resumed)
    assert len(rest) == 6 - stop
    assert all(same(one, other) for one, other in zip(rest, whole[stop:], strict=True))
    with pytest.raises(ValueError, match="position"):
        resumed.position = 7


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_position_follows_the_batches_whatever_iterators_do(read_ahead: int) -> None:
    stream = short()
    stream.read_ahead = read_ahead
    iterator = iter(stream)
    next(iterator)
    stream.position = 0
    next(iterator)
    assert stream.position == 2
    for _ in stream:
        if stream.position == len(stream):
            break  # on the last batch, as loops that count do
    assert len(list(stream)) == 6
    stream.position = 6
    assert list(stream) == []
    for number in (-1, 6):
        with pytest.raises(IndexError):
            stream.batch(number)
    with pytest.raises(TypeError):
        stream.position = 2.0
    stream.position = np.int64(2)
    assert type(stream.position) is int, "so that it can be written as JSON"


def test_reading_ahead_happens_in_other_threads_and_stops_with_the_consumer() -> None:
    threads, second_has_begun = set(), threading.Event()

    class Watched:
        name, labels = "watched", None

        def __len__(self) -> int:
            return 100

        def read(self, rows):
            threads.add(threading.current_thread().name)
            if rows[0] == 1:
                second_has_begun.set()
            return torch.zeros(len(rows), 3, 4, 4), None

    stream = streams.Stream("w", [streams.Segment("d", Watched(), np.arange(100))], batch_size=1, read_ahead=2)
    iterator = iter(stream)
    next(iterator)
    assert second_has_begun.wait(timeout=30), "nobody has asked for the second batch yet"
    iterator.close()
    assert threading.current_thread().name not in threads
    assert stream.position == 1
    assert threading.active_count() < 5


def test_the_hash_tells_streams_apart_and_the_name_says_why() -> None:
    variants = [
        short(),
        short(batch_size=8),
        short(severity=4),
        short(limit=12),
        short(names=TWO[::-1]),
        continual(data(seed=1), names=TWO, batch_size=10),
        continual(Corrupted(255 - IMAGES, LABELS, name="noise"), names=TWO, batch_size=10),
        rounds(short(), 2),
        mixed(short()),
        mixed(short(), seed=1),
        correlated(short()),
        correlated(short(), seed=1),
        gradual(data(), names=TWO, batch_size=10),
        mixed(correlated(short())),
        mixed(correlated(short(), seed=1)),
        mixed(short(names=TWO[::-1])),
        continual(Corrupted(IMAGES, LABELS[::-1], name="noise"), names=TWO, batch_size=10),
        continual(Corrupted(IMAGES.reshape(24, 16, 64, 3), LABELS, name="noise"), names=TWO, batch_size=10),
    ]
    assert len({stream.hash for stream in variants}) == len(variants)
    assert short().hash == short().hash
    assert " seed=0 continual severity=5 names=contrast+brightness" in short().name
    assert rounds(short(), 2).name == short().name + " rounds=2"


@pytest.mark.parametrize(
    "build",
    [
        lambda: short(batch_size=0),
        lambda: short(limit=0),
        lambda: rounds(short(), 0),
        lambda: correlated(short(), concentration=0),
        lambda: gradual(data(), variant="mine"),
        lambda: corruption_order(10),
        lambda: Corrupted(IMAGES, LABELS[:3], name="x"),
        lambda: Corrupted(IMAGES, LABELS + 0.5, name="x"),
        lambda: short(names="fog"),
        lambda: correlated(short(), concentration=float("nan")),
        lambda: short(names=["rust"]),
        lambda: short(severity=6),
        lambda: short(order=3),
        lambda: correlated(short(), slots=0),
    ],
)
def test_mistakes(build) -> None:
    with pytest.raises(ValueError):
        build()


@pytest.mark.parametrize("setting", ["batch_size", "limit", "severity"])
@pytest.mark.parametrize("value", [2.0, True, "2"])
def test_numbers_that_are_not_whole_are_refused_at_once(setting: str, value: object) -> None:
    with pytest.raises(TypeError, match=setting):
        short(**{setting: value})
    with pytest.raises(TypeError, match="seed"):
        data(seed=value)
    assert len(short(**{setting: np.int64(2)})) > 0


# --- protocols ---


def test_the_orders_are_permutations_of_the_fifteen() -> None:
    orders = [corruption_order(None), *(corruption_order(number) for number in range(10))]
    assert len(set(orders)) == 11
    assert all(sorted(order) == sorted(CORRUPTIONS) for order in orders)
    assert orders[0] == tuple(CORRUPTIONS)
    ten = "\n".join(" ".join(order) for order in orders[1:])
    assert (
        hashlib.sha256(ten.encode()).hexdigest() == "8b8f4dca3fc88d91f7dd9905d50732e93441db09adf96c769f548ec48eb8ff8d"
    ), "the authors' ten orders are not to be edited"


def test_gradual_comes_and_goes() -> None:
    paper = gradual(data(), order=3, limit=1)
    severities = [int(domain.split()[1]) for domain in paper.domains]
    assert severities == [1, 2, 3, 4, 5, 4, 3, 2, 1] * 15
    authors = gradual(data(), order=3, limit=1, variant="authors")
    assert len(authors.segments) == 131
    assert authors.domains == paper.domains[4:]
    assert authors.domains[:5] == [f"shot_noise {severity}" for severity in (5, 4, 3, 2, 1)]


def test_rounds_and_single_compose() -> None:
    stream = single(rounds(short(limit=2), 3))
    assert [len(batch.x) for batch in stream] == [1] * 12
    assert stream.domains == ["contrast 5", "brightness 5"] * 3


def test_mixed_holds_every_image_once_and_mixes_domains() -> None:
    stream = mixed(short(batch_size=12), seed=3)
    batches = list(stream)
    seen = [pair for batch in batches for pair in zip(batch.domains, batch.index.tolist(), strict=True)]
    assert sorted(seen) == sorted((f"{name} 5", row) for name in TWO for row in range(24))
    made = {f"{name} 5": torch.from_numpy(corrupt(IMAGES, name, 5)).permute(0, 3, 1, 2) / 255 for name in TWO}
    for batch in batches:
        expected = [made[domain][row] for domain, row in zip(batch.domains, batch.index.tolist(), strict=True)]
        torch.testing.assert_close(batch.x, torch.stack(expected))
        assert batch.y.tolist() == LABELS[batch.index].tolist()
    assert 0 < batches[0].domains.count("contrast 5") < 12


def test_mixed_names_the_domain_of_each_image() -> None:
    stream = mixed(short(batch_size=12), seed=3)
    for batch in stream:
        assert batch.domain == "mixed"
        assert set(batch.domains) == {"contrast 5", "brightness 5"}
    again = mixed(rounds(stream, 2), seed=1)
    for batch in again:
        assert batch.y.tolist() == LABELS[batch.index].tolist(), "the row in the innermost domain"
    counts = Counter(domain for batch in again for domain in batch.domains)
    assert counts == {"contrast 5": 48, "brightness 5": 48}, "a mixture of mixtures knows too"
    twice = torch.cat([batch.x for batch in again])
    dark = twice.flatten(1).std(1) < 0.1  # contrast 5 is nearly grey
    assert dark.tolist() == [domain == "contrast 5" for batch in again for domain in batch.domains]
    assert next(iter(short())).domains == ("contrast 5",) * 10
    assert streams.Batch(twice[:2], None, "own", torch.arange(2)).domains == ("own", "own")


def test_correlated_keeps_every_image_and_clumps_labels() -> None:
    many = Corrupted(np.zeros((2000, 8, 8, 3), np.uint8), np.arange(2000) % 10, name="black")
    plain = continual(many, names=["contrast"], batch_size=100)
    stream = correlated(plain, concentration=0.1)
    labels = many.labels[stream.segments[0].rows]
    assert sorted(stream.segments[0].rows.tolist()) == list(range(2000))
    distinct = [len(set(labels[start : start + 100].tolist())) for start in range(0, 2000, 100)]
    assert np.mean(distinct) < 5
    even = correlated(plain, concentration=1e6)
    spread = many.labels[even.segments[0].rows].reshape(10, 200)
    assert all(len(set(slot.tolist())) == 10 for slot in spread)


def test_correlated_draws_for_each_segment_by_itself() -> None:
    whole = correlated(short()).segments
    assert not np.array_equal(whole[0].rows, whole[1].rows)
    plain = short()
    fewer = streams.Stream("fewer", [short(limit=12).segments[0], plain.segments[1]], batch_size=10)
    assert np.array_equal(correlated(fewer).segments[1].rows, whole[1].rows), "whatever came before"


def test_mixed_domains_of_different_sizes_are_named() -> None:
    small, large = (streams.in_memory(IMAGES[:, :side], LABELS, name=f"{side}") for side in (16, 32))
    both = streams.Stream("both", [*small.segments, *large.segments], batch_size=48)
    with pytest.raises(DataError, match=r"16 has \(16, 32\) pixels and 32 \(32, 32\).*single\(mixed"):
        next(iter(mixed(both)))
    assert len(list(single(mixed(both)))) == 48


def test_own_frost_photos_are_used_and_are_part_of_the_hash(tmp_path: Path) -> None:
    for name, colour in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
        (tmp_path / name).mkdir()
        Image.new("RGB", (300, 200), colour).save(tmp_path / name / "a.png")
    black = np.zeros((2, 32, 32, 3), np.uint8)
    hashes = set()
    for photos in (None, tmp_path / "blue", tmp_path / "red"):
        stream = continual(Corrupted(black, [0, 1], name="b", frost_photos=photos), names=["frost"])
        hashes.add(stream.hash)
    assert (next(iter(stream)).x[0].amax((1, 2)) * 255).round().tolist() == [90, 0, 0]
    assert len(hashes) == 3
    assert datasets.sample(frost_photos=tmp_path / "red").frost_photos == tmp_path / "red"
    with pytest.raises(ValueError, match="frost_photos"):
        Corrupted(black, [0, 1], name="b", frost_photos=tmp_path / "none")


def test_another_version_of_the_generator_is_another_stream(monkeypatch) -> None:
    before = short()
    monkeypatch.setattr(datasets.corrupted, "VERSION", 2)
    assert short().hash != before.hash
    assert "corruptions=1" in before.name


def test_correlated_needs_labels() -> None:
    segment = streams.Segment("d", datasets.image_files.ImageFiles("p", (Path("a"),), None), np.arange(1))
    with pytest.raises(ValueError, match="no labels"):
        correlated(streams.Stream("s", [segment]))


# --- CIFAR-C ---


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    write_cifar_c(IMAGES, LABELS, tmp_path / "CIFAR-10-C", names=TWO)
    return tmp_path / "CIFAR-10-C"


def test_cifar_c_reads_what_our_generator_makes(cifar: Path) -> None:
    from_disk, made = continual(CifarC(cifar), names=TWO, batch_size=10), short()
    for one, other in zip(from_disk, made, strict=True):
        assert same(one, other)
    weak = continual(CifarC(cifar), names=TWO, severity=2, batch_size=24)
    expected = corrupt(IMAGES, "contrast", 2)
    torch.testing.assert_close(next(iter(weak)).x, torch.from_numpy(expected).permute(0, 3, 1, 2) / 255)
    scattered = mixed(continual(CifarC(cifar), names=TWO, batch_size=10))
    for one, other in zip(scattered, mixed(made), strict=True):
        assert same(one, other)


def test_the_hash_of_cifar_c_is_by_content_not_by_place(cifar: Path, tmp_path: Path) -> None:
    before = continual(CifarC(cifar), names=TWO).hash
    moved = cifar.rename(tmp_path / "elsewhere")
    assert continual(CifarC(moved), names=TWO).hash == before
    write_cifar_c(255 - IMAGES, LABELS, tmp_path / "negative", names=TWO)
    np.save(moved / "labels.npy", np.tile(LABELS, 5).astype(np.uint8))
    assert continual(CifarC(moved), names=TWO).hash == before, "the dtype of labels does not matter"
    changed = np.load(moved / "contrast.npy")
    changed[-1] += 1
    np.save(moved / "contrast.npy", changed)
    assert continual(CifarC(moved), names=TWO).hash != before
    assert continual(CifarC(tmp_path / "negative"), names=TWO).hash != before


def test_cifar_c_is_mapped_not_loaded(cifar: Path) -> None:
    domain = CifarC(cifar).domain("contrast", 5)
    assert isinstance(domain.pixels, np.memmap)
    assert not domain.pixels.flags.owndata


def anonymous_kib() -> int:
    """Memory of this process that no file backs."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def test_reading_mapped_files_keeps_memory_flat(tmp_path: Path) -> None:
    """Three hundred batches read 53 MiB of mapped bytes, and make 211 MiB of floats of them."""
    count, side = 2000, 32
    np.save(tmp_path / "labels.npy", np.tile(np.arange(count) % 10, 5))
    shape = (5 * count, side, side, 3)
    stored = np.lib.format.open_memmap(tmp_path / "contrast.npy", "w+", np.uint8, shape)
    stored[:] = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), np.uint8)
    stored.flush()
    del stored
    stream = gradual(CifarC(tmp_path), names=["contrast"], batch_size=60)
    assert len(stream) == 9 * 34
    batches = iter(stream)
    for _ in range(10):
        next(batches)
    before = anonymous_kib()
    highest = max(anonymous_kib() for _ in batches)
    assert highest - before < 16 * 1024


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "labels.npy").unlink(), "labels.npy is missing"),
        (lambda folder: (folder / "contrast.npy").unlink(), "contrast.npy is missing .* holds brightness, labels"),
        (lambda folder: (folder / "contrast.npy").write_bytes(b"<html>"), "not a .npy file"),
        (lambda folder: (folder / "contrast.npy").write_bytes(b""), "truncated"),
        (lambda folder: truncate(folder / "contrast.npy"), "truncated"),
        (lambda folder: np.save(folder / "contrast.npy", np.zeros((7, 32, 32, 3), np.uint8)), "expected uint8"),
        (lambda folder: np.save(folder / "contrast.npy", np.zeros((120, 32, 32, 3))), "float64"),
        (lambda folder: np.save(folder / "labels.npy", np.zeros(7, int)), "five times over"),
        (lambda folder: np.save(folder / "labels.npy", np.zeros(0, int)), "five times over"),
        (lambda folder: np.save(folder / "labels.npy", np.arange(120)), "five times over"),
        (lambda folder: np.save(folder / "labels.npy", np.tile(LABELS + 0.5, 5)), "whole numbers"),
        (lambda folder: np.save(folder / "labels.npy", np.int64(3)), r"int64 \(\); expected"),
        (lambda folder: write_npz(folder / "contrast.npy"), "not a .npy file"),
        (lambda folder: write_npz(folder / "labels.npy"), "not a .npy file"),
    ],
)
def test_damaged_cifar_c(cifar: Path, damage, words: str) -> None:
    damage(cifar)
    with pytest.raises(DataError, match=words) as caught:
        continual(CifarC(cifar), names=TWO)
    assert f"delete {cifar} and run: ctta data get cifar10-c (or cifar100-c)" in str(caught.value)
    assert "ctta corrupt SRC DST" in str(caught.value)


def test_nobody_is_told_to_delete_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="check the path and run: ctta data get cifar10-c"):
        CifarC(tmp_path / "nowhere")


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, images=IMAGES)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


# --- clean CIFAR ---


def write_cifar_batch(path: Path, images: np.ndarray, labels: list[int], key: bytes = b"labels") -> None:
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), 3072)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({b"data": planes, key: labels, b"filenames": [b"a.png"] * len(images)}, protocol=2))


def test_clean_cifar_10_and_100(tmp_path: Path) -> None:
    for number in range(1, 6):
        write_cifar_batch(tmp_path / "ten" / f"data_batch_{number}", IMAGES[number : number + 2], [number, 0])
    write_cifar_batch(tmp_path / "ten" / "test_batch", IMAGES[:4], [3, 2, 1, 0])
    images, labels = clean_cifar(tmp_path / "ten")
    assert np.array_equal(images, IMAGES[:4])
    assert labels.tolist() == [3, 2, 1, 0]
    images, labels = clean_cifar(tmp_path / "ten", "train")
    assert images.shape == (10, 32, 32, 3)
    assert labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    write_cifar_batch(tmp_path / "hundred" / "test", IMAGES[:2], [99, 7], key=b"fine_labels")
    images, labels = clean_cifar(tmp_path / "hundred")
    assert np.array_equal(images, IMAGES[:2])
    assert labels.tolist() == [99, 7]


class Hostile:
    def __reduce__(self):
        return (Path.touch, (Path("owned"),))


def test_clean_cifar_that_is_damaged_or_hostile(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"test_batch \(CIFAR-10\) or test \(CIFAR-100\) is missing.*ctta data get cifar10"
    ):
        clean_cifar(tmp_path)
    with pytest.raises(DataError, match=r"data_batch_1 \(CIFAR-10\) or train \(CIFAR-100\)"):
        clean_cifar(tmp_path, "train")
    path = tmp_path / "test_batch"
    write_cifar_batch(path, IMAGES[:4], [0, 1, 2, 3])
    whole = path.read_bytes()
    for content in (whole[:-200], b"<html>", b"", pickle.dumps({b"data": IMAGES, b"labels": [1]})):
        path.write_bytes(content)
        with pytest.raises(DataError, match="test_batch"):
            clean_cifar(tmp_path)
    path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DataError, match="would call"):
        clean_cifar(tmp_path)
    assert not (tmp_path / "owned").exists()


# --- pictures ---


def save(path: Path, value: int, size: tuple[int, int] = (20, 30), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixel = {"RGB": (value, 0, 0), "RGBA": (value, 0, 0, 7), "L": value, "I;16": value * 256}[mode]
    Image.new(mode, size, pixel).save(path)


def test_a_folder_of_the_users_own(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path / "cam" / f"{number}.png", 50 * number)
    (tmp_path / "cam" / "notes.txt").write_text("no picture")
    stream = streams.folder(tmp_path / "cam", batch_size=2)
    batches = list(stream)
    assert [len(batch.x) for batch in batches] == [2, 2, 1]
    assert batches[0].y is None
    assert batches[0].domain == "cam"
    assert batches[1].x.shape == (2, 3, 30, 20)
    assert batches[1].x[1, 0, 0, 0] == pytest.approx(150 / 255)


def test_pictures_of_every_kind_become_rgb(tmp_path: Path) -> None:
    for mode in ("RGB", "RGBA", "L", "I;16"):
        save(tmp_path / f"{mode.replace(';', '')}.png", 100, mode=mode)
    (batch,) = streams.folder(tmp_path, batch_size=4)
    assert batch.x.shape == (4, 3, 30, 20)
    torch.testing.assert_close(batch.x[:, 0, 0, 0], torch.full((4,), 100 / 255))


@pytest.mark.parametrize(("kind", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_pictures_with_16_bits_keep_their_upper_8(kind: int, channels: int, tmp_path: Path) -> None:
    """Grey, RGB, grey with alpha and RGB with alpha, as a PNG numbers them; Pillow cannot write most of these."""
    pixels = np.full((5, 7, channels), (100 << 8) + 200, ">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", 7, 5, 16, kind, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    coded = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(coded))
    (batch,) = streams.folder(tmp_path)
    assert batch.x.shape == (1, 3, 5, 7)
    torch.testing.assert_close(batch.x, torch.full((1, 3, 5, 7), 100 / 255))


def test_pictures_with_a_palette_and_transparent_colours(tmp_path: Path) -> None:
    picture = Image.new("P", (7, 5), 1)
    picture.putpalette([0, 0, 0, 100, 50, 25])
    picture.save(tmp_path / "a.png", transparency=bytes([0, 7]))
    (batch,) = streams.folder(tmp_path)
    assert (batch.x[0, :, 0, 0] * 255).round().tolist() == [100, 50, 25]


def test_pictures_of_different_sizes(tmp_path: Path) -> None:
    save(tmp_path / "a.png", 1)
    save(tmp_path / "b.png", 1, size=(21, 30))
    with pytest.raises(DataError, match=r"size=\(height, width\)"):
        list(streams.folder(tmp_path))
    (batch,) = streams.folder(tmp_path, size=(8, 16))
    assert batch.x.shape == (2, 3, 8, 16)


def test_pictures_are_resized_bilinearly_and_streams_can_be_pickled(tmp_path: Path) -> None:
    picture = Image.fromarray(IMAGES[0])
    picture.save(tmp_path / "a.png")
    (batch,) = pickle.loads(pickle.dumps(streams.folder(tmp_path, size=(8, 16))))
    expected = np.array(picture.resize((16, 8), Image.Resampling.BILINEAR))
    torch.testing.assert_close(batch.x[0], torch.from_numpy(expected).permute(2, 0, 1) / 255)


def test_a_picture_that_is_damaged_and_a_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no pictures"):
        streams.folder(tmp_path)
    save(tmp_path / "a.png", 1)
    whole = (tmp_path / "a.png").read_bytes()
    header = b"P6\n8 x 255\n"  # for which Pillow raises ValueError
    for damaged in (whole[:40], whole[:35] + b"\xff\xff\xff\xff" + whole[39:], b"", header):
        (tmp_path / "b.png").write_bytes(damaged)
        with pytest.raises(DataError, match=r"b\.png"):
            list(streams.folder(tmp_path))
    Image.new("F", (20, 30), 0.5).save(tmp_path / "b.tif")
    (tmp_path / "b.png").unlink()
    with pytest.raises(DataError, match="32 bits"):
        list(streams.folder(tmp_path))


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    for corruption in TWO:
        for number, label in enumerate(("n01", "n02")):
            for picture in range(3):
                save(tmp_path / corruption / "5" / label / f"{picture}.JPEG", 40 * number + picture, size=(224, 224))
    return tmp_path


def test_imagenet_c(imagenet: Path, tmp_path: Path) -> None:
    stream = continual(ImageNetC(imagenet), names=TWO, batch_size=4)
    batches = list(stream)
    assert stream.read_ahead > 0
    assert [batch.y.tolist() for batch in batches] == [[0, 0, 0, 1], [1, 1]] * 2
    first = continual(ImageNetC(imagenet, per_class=1), names=TWO, batch_size=4)
    assert [batch.y.tolist() for batch in first] == [[0, 1]] * 2
    assert [path.name for path in first.segments[0].images.paths] == ["0.JPEG"] * 2
    listing = tmp_path / "list.txt"
    listing.write_text("n02/2.JPEG\nn01/0.JPEG\n")
    chosen = continual(ImageNetC(imagenet, images=listing), names=TWO, batch_size=4)
    assert [batch.y.tolist() for batch in chosen] == [[1, 0]] * 2
    assert len({stream.hash, first.hash, chosen.hash}) == 3
    double = continual(ImageNetC(imagenet, double_resize=True), names=TWO, batch_size=4)
    assert double.hash != stream.hash
    for lines, words in (("n02/9.JPEG", r"9\.JPEG is missing: "), ("n02/9.JPEG\nn02/8.JPEG", "missing, and 1 more of")):
        listing.write_text(lines)
        with pytest.raises(DataError, match=f"{words}.*ctta data get imagenet-c/digital"):
            continual(ImageNetC(imagenet, images=listing), names=TWO)
    with pytest.raises(DataError, match=r"list of images .*nowhere\.txt cannot be read.*per_class"):
        ImageNetC(imagenet, images=tmp_path / "nowhere.txt")
    for corruption, words in (("fog", "ctta data get imagenet-c/weather"), ("rust", "ImageNet-C has no rust")):
        with pytest.raises(DataError, match=f"{corruption}/5 is missing.*{words}.*ctta corrupt SRC DST"):
            continual(ImageNetC(imagenet), names=[corruption])


def test_double_resize_is_the_authors(tmp_path: Path) -> None:
    path = tmp_path / "contrast" / "5" / "n01" / "a.png"
    path.parent.mkdir(parents=True)
    gradient = np.add.outer(np.arange(224), np.arange(224))[..., None] * [1, 2, 3] % 256
    picture = Image.fromarray(gradient.astype(np.uint8))
    picture.save(path)
    twice = picture.resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
    for double, expected in ((True, twice), (False, picture)):
        (batch,) = continual(ImageNetC(tmp_path, double_resize=double), names=["contrast"])
        torch.testing.assert_close(batch.x[0], torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255)
    assert not np.array_equal(np.asarray(twice), np.asarray(picture))


def test_what_a_killed_unpacking_left_is_not_read(imagenet: Path, tmp_path: Path) -> None:
    root = tmp_path / "groups"
    (root / "noise").mkdir(parents=True)
    (root / ".digital.unpacking").mkdir()
    (imagenet / "contrast").rename(root / ".digital.unpacking" / "contrast")
    with pytest.raises(DataError, match="imagenet-c/digital"):
        continual(ImageNetC(root), names=["contrast"])
    (root / ".digital.unpacking").rename(root / "digital")
    assert len(continual(ImageNetC(root), names=["contrast"])) == 1


def test_a_class_that_one_domain_lacks_does_not_shift_labels(imagenet: Path, tmp_path: Path) -> None:
    (imagenet / "brightness" / "5" / "n00").mkdir()
    listing = tmp_path / "list.txt"
    listing.write_text("n02/2.JPEG\nn01/0.JPEG\n")
    with pytest.raises(DataError, match=r"contrast/5/n00 is missing, which .*brightness/5 has: .*-c/digital"):
        continual(ImageNetC(imagenet, images=listing), names=TWO)
    with pytest.raises(DataError, match=r"n00 holds no pictures .*imagenet-c/weather"):
        continual(ImageNetC(imagenet), names=["brightness"])


def test_imagenet_c_labels_do_not_shift(imagenet: Path) -> None:
    before = continual(ImageNetC(imagenet), names=TWO, batch_size=6)
    (imagenet / "contrast" / "5" / "__MACOSX").mkdir()
    after = continual(ImageNetC(imagenet), names=TWO, batch_size=6)
    assert [batch.y.tolist() for batch in after] == [batch.y.tolist() for batch in before]
    assert after.hash == before.hash
    save(imagenet / "brightness" / "5" / "n01" / "0.JPEG", 99, size=(224, 224))
    assert continual(ImageNetC(imagenet), names=TWO, batch_size=6).hash != before.hash
    (imagenet / "brightness" / "5" / "n02" / "1.JPEG").unlink()
    with pytest.raises(DataError, match=r"brightness/5/n02/1\.JPEG is missing"):
        continual(ImageNetC(imagenet), names=TWO)


def test_a_transform_needs_a_name(imagenet: Path) -> None:
    root = imagenet / "contrast" / "5"
    with pytest.raises(ValueError, match="transform_name="):
        streams.image_folder(root, transform=lambda picture: picture)
    named = streams.image_folder(root, transform=lambda picture: picture, transform_name="same")
    assert named.hash != streams.image_folder(root).hash


@pytest.mark.parametrize(
    "transform",
    [lambda picture: picture.convert("L"), lambda picture: np.asarray(picture) / 255, lambda picture: None],
)
def test_a_transform_must_give_pictures(imagenet: Path, transform) -> None:
    stream = streams.image_folder(imagenet / "contrast" / "5", transform=transform, transform_name="wrong")
    with pytest.raises(ValueError, match="the transform must return an RGB PIL image"):
        next(iter(stream))


# --- street scenes ---

FOG = {"conditions": ("fog",), "split": "val", "size": None}


def write_scene(picture: Path, label_map: Path, trained: int = 3) -> None:
    save(picture, 10, size=(64, 32))
    label_map.parent.mkdir(parents=True, exist_ok=True)
    values = np.full((32, 64), trained, np.uint8)
    values[0] = 255
    Image.fromarray(values).save(label_map)


@pytest.fixture
def streets(tmp_path: Path) -> Path:
    for condition in ("fog", "night", "rain", "snow"):
        for frame in ("f1", "f2"):
            write_scene(
                tmp_path / "rgb_anon" / condition / "train" / "GP01" / f"{frame}_rgb_anon.png",
                tmp_path / "gt" / condition / "train" / "GP01" / f"{frame}_gt_labelTrainIds.png",
            )
    return tmp_path


def test_acdc(streets: Path) -> None:
    stream = rounds(acdc(streets, size=(16, 32)), 2)
    assert stream.domains == ["fog", "night", "rain", "snow"] * 2
    batches = list(stream)
    assert len(batches) == 16
    assert batches[0].x.shape == (1, 3, 16, 32)
    assert batches[0].y.shape == (1, 32, 64)
    assert set(batches[0].y.unique().tolist()) == {3, 255}
    assert (batches[0].x.amax((0, 2, 3)) * 255).round().tolist() == [10, 0, 0], "red comes first"
    (streets / "rgb_anon" / "fog" / "train" / "GP01" / "._f1_rgb_anon.png").write_bytes(b"a Mac's")
    assert len(acdc(streets)) == 8
    with pytest.raises(ValueError, match=r"conditions must be several of .* got 'fog'"):
        acdc(streets, conditions="fog")


def test_cityscapes(tmp_path: Path) -> None:
    write_scene(
        tmp_path / "leftImg8bit" / "val" / "bonn" / "b_leftImg8bit.png",
        tmp_path / "gtFine" / "val" / "bonn" / "b_gtFine_labelTrainIds.png",
    )
    (batch,) = cityscapes(tmp_path)
    assert batch.x.shape == (1, 3, 32, 64)
    assert batch.domain == "clear"


def test_label_ids_become_train_ids(tmp_path: Path) -> None:
    """The table of Cityscapes, written as its authors print it: name, id, trainId."""
    table = """road 7 0, sidewalk 8 1, building 11 2, wall 12 3, fence 13 4, pole 17 5, traffic-light 19 6,
        traffic-sign 20 7, vegetation 21 8, terrain 22 9, sky 23 10, person 24 11, rider 25 12, car 26 13,
        truck 27 14, bus 28 15, train 31 16, motorcycle 32 17, bicycle 33 18"""
    expected = np.full(256, 255)
    for entry in table.split(","):
        _, label_id, train_id = entry.split()
        expected[int(label_id)] = int(train_id)
    ids = np.array([*range(34), 255], np.uint8)
    for picture, label_map, read in [
        ("leftImg8bit/val/bonn/b_leftImg8bit.png", "gtFine/val/bonn/b_gtFine_labelIds.png", cityscapes),
        ("rgb_anon/fog/val/G/b_rgb_anon.png", "gt/fog/val/G/b_gt_labelIds.png", lambda root: acdc(root, **FOG)),
    ]:
        write_scene(tmp_path / picture, tmp_path / label_map)
        Image.fromarray(np.tile(ids, (18, 1))).save(tmp_path / label_map)
        (batch,) = read(tmp_path)
        assert batch.y.dtype == torch.int64
        assert batch.y[0].tolist() == [expected[ids].tolist()] * 18
        before = read(tmp_path).hash
        write_scene(tmp_path / picture, tmp_path / label_map.replace("labelIds", "labelTrainIds"), trained=5)
        (batch,) = read(tmp_path)
        assert set(batch.y.unique().tolist()) == {5, 255}, "trainIds go first"
        assert read(tmp_path).hash != before, "other labels, another score"
        made = np.tile(expected[ids].astype(np.uint8), (18, 1))
        Image.fromarray(made).save(tmp_path / label_map.replace("labelIds", "labelTrainIds"))
        assert read(tmp_path).hash == before, "what Cityscapes' own script makes is the same"
        (tmp_path / label_map.replace("labelIds", "labelTrainIds")).unlink()
        for foreign in (34, 254, 26001):
            Image.fromarray(np.full((2, 2), foreign, np.uint16)).save(tmp_path / label_map)
            with pytest.raises(DataError, match="labelIds 0 to 33"):
                list(read(tmp_path))


@pytest.mark.parametrize("size", [(31, 63), (1, 1), None])
@pytest.mark.parametrize("mode", ["RGBA", "L", "I;16"])
def test_street_scenes_of_every_kind_and_size(mode: str, size: tuple[int, int] | None, streets: Path) -> None:
    scene = streets / "rgb_anon" / "fog" / "train" / "GP01" / "f1_rgb_anon.png"
    save(scene, 100, size=(61, 33), mode=mode)
    batch = next(iter(acdc(streets, size=size)))
    assert batch.x.shape == (1, 3, *(size or (33, 61)))
    torch.testing.assert_close(batch.x[:, 0], torch.full_like(batch.x[:, 0], 100 / 255))
    assert batch.y.shape == (1, 32, 64)


def test_label_maps_with_16_bits_or_a_palette(streets: Path) -> None:
    label_map = streets / "gt" / "fog" / "train" / "GP01" / "f1_gt_labelTrainIds.png"
    values = np.full((33, 65), 18, np.uint8)
    values[0] = 255
    with_palette = Image.fromarray(values, "L").convert("P")
    with_palette.putdata(values.ravel().tolist())
    for stored in (Image.fromarray(values.astype(np.uint16)), with_palette):
        stored.save(label_map)
        batch = next(iter(acdc(streets)))
        assert torch.equal(batch.y[0], torch.from_numpy(values.astype(np.int64)))


@pytest.mark.parametrize("map_size", [(64, 32), (32, 32), (64, 48)])  # on its side, cut off, and too high
def test_a_map_of_another_shape_is_refused(map_size: tuple[int, int], streets: Path) -> None:
    label_map = streets / "gt" / "fog" / "train" / "GP01" / "f2_gt_labelTrainIds.png"
    Image.fromarray(np.zeros(map_size, np.uint8)).save(label_map)
    with pytest.raises(DataError, match=r"f2_rgb_anon\.png has 32x64 pixels and its labels .* another shape"):
        list(acdc(streets))


def test_pictures_may_be_smaller_than_their_maps(streets: Path) -> None:
    for number in (1, 2):
        save(streets / "rgb_anon" / "fog" / "train" / "GP01" / f"f{number}_rgb_anon.png", 10, size=(21, 11))
    assert len(list(acdc(streets, conditions=("fog",)))) == 2


def test_damaged_street_scenes(streets: Path) -> None:
    with pytest.raises(DataError, match="val"):
        acdc(streets, split="val")
    label_map = streets / "gt" / "rain" / "train" / "GP01" / "f1_gt_labelTrainIds.png"
    Image.fromarray(np.full((32, 64), 40, np.uint8)).save(label_map)
    with pytest.raises(DataError, match="trainIds"):
        list(acdc(streets))
    for mode in ("RGB", "RGBA", "LA", "1", "F"):
        Image.new(mode, (64, 32)).save(label_map, "TIFF" if mode == "F" else "PNG")
        with pytest.raises(DataError, match=r"f1_gt_labelTrainIds.* not one whole number per pixel: use the maps of"):
            list(acdc(streets))
    Image.fromarray(np.full((32, 64), -1, np.int32)).save(label_map, "TIFF")
    with pytest.raises(DataError, match="trainIds"):
        list(acdc(streets))
    label_map.write_bytes(b"P6\n8 x 255\n")
    with pytest.raises(DataError, match=r"f1_gt_labelTrainIds.*truncated"):
        list(acdc(streets))
    label_map.unlink()
    with pytest.raises(DataError, match="f1_gt_labelTrainIds"):
        acdc(streets)

"""Damaged and altered checkpoints: a CheckpointError or an equal model, and nothing else."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from saved_streams import STREAM, Header, Tensors, make_network, read_file, rewrite_file
from torch import Tensor

import ctta
from ctta.io.tensors import read_tensors, write_tensors


def adapted_tent() -> ctta.Tent:
    model = ctta.Tent(make_network())
    for x in STREAM[:2]:
        model(x)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "s.safetensors"
    ctta.save(adapted_tent(), path)
    return path


def load_or_none(path: Path) -> ctta.AdaptiveModel | None:
    """Return the model, or None if the file is refused; any other exception is a failure."""
    try:
        return ctta.load(path, make_network())
    except ctta.CheckpointError as error:
        assert str(error)
        return None


def state_of(model: ctta.AdaptiveModel) -> tuple[dict[str, Tensor], dict[str, int], str]:
    return model.state_dict(), model.counters, repr(model.optimizer)


def assert_equal(model: ctta.AdaptiveModel, other: ctta.AdaptiveModel) -> None:
    (tensors, *rest), (expected, *expected_rest) = state_of(model), state_of(other)
    assert rest == expected_rest
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


# Bits that flip


def test_every_flipped_bit_is_noticed(saved: Path, tmp_path: Path) -> None:
    """In the tensors and in the header; the file is a few kilobytes, of which every seventh byte is tried."""
    content, path = saved.read_bytes(), tmp_path / "s"
    for position in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        assert load_or_none(path) is None, f"byte {position} of {len(content)}"


@settings(max_examples=60)
@given(data=st.data())
def test_mutated_bytes(saved: Path, data: st.DataObject) -> None:
    content = bytearray(saved.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 64)))
        content[start:end] = data.draw(st.binary(max_size=64))
    path = saved.with_name("mutated")
    path.write_bytes(content)
    model = load_or_none(path)
    assert model is None or bytes(content) == saved.read_bytes()


def test_a_checksum_cannot_be_left_out(saved: Path, tmp_path: Path) -> None:
    header, tensors = read_file(saved)
    save_file(tensors, tmp_path / "s", metadata={"ctta": json.dumps(header)})
    with pytest.raises(ctta.CheckpointError, match="checksum"):
        ctta.load(tmp_path / "s", make_network())


def test_the_file_may_be_overwritten_while_the_model_runs(tmp_path: Path) -> None:
    """The tensors of the model, those of its optimizer too, are not mapped from the file."""
    path = tmp_path / "s"
    ctta.save(adapted_tent(), path)
    model, expected = ctta.load(path, make_network()), adapted_tent()
    path.write_bytes(b"")
    for x in STREAM[2:4]:
        assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_tensors_of_every_kind_are_written_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "transposed": torch.arange(6).reshape(2, 3).to(dtype).T,
        "number": torch.ones((), dtype=dtype),
        "empty": torch.ones(0, 3, dtype=dtype),
        "other": torch.rand(3),
    }
    write_tensors(tmp_path / "t", tensors, "header", {"text": 'ä"\n'})
    header, found = read_tensors(tmp_path / "t", "header")
    assert header == {"text": 'ä"\n'} and found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)


def test_a_file_without_metadata_is_damaged(tmp_path: Path) -> None:
    header = b'{"__metadata__":null}'
    (tmp_path / "t").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ctta.errors.DamagedCheckpointError):
        read_tensors(tmp_path / "t", "header")


# Headers that are edited, with a checksum that fits


def set_option(name: str, value: Any) -> Callable[[Header, Tensors], None]:
    def change(header: Header, tensors: Tensors) -> None:
        header["optimizer"]["groups"][0][name] = value

    return change


def set_counter(value: int) -> Callable[[Header, Tensors], None]:
    def change(header: Header, tensors: Tensors) -> None:
        header["counters"]["num_steps"] = value

    return change


def drop_momentum(header: Header, tensors: Tensors) -> None:
    del tensors["optimizer.0.exp_avg"]


def shrink_momentum(header: Header, tensors: Tensors) -> None:
    tensors["optimizer.0.exp_avg"] = torch.zeros(1)


def set_value(kind: str, value: float) -> Callable[[Header, Tensors], None]:
    def change(header: Header, tensors: Tensors) -> None:
        name = next(name for name in sorted(tensors) if kind in name and tensors[name].is_floating_point())
        tensors[name].view(-1)[0] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_option("lr", "fast"),
        set_option("lr", float("nan")),
        set_option("betas", [0.9]),
        set_option("eps", None),
        set_option("weight_decay", []),
        set_option("amsgrad", True),
        set_option("capturable", True),
        set_counter(-1),
        set_counter(10**30),
        drop_momentum,
        shrink_momentum,
        *(set_value(kind, value) for kind in ("student", "exp_avg") for value in (float("nan"), float("inf"))),
    ],
)
def test_what_would_fail_at_the_next_step_is_refused(
    change: Callable[[Header, Tensors], None], saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    path.write_bytes(saved.read_bytes())
    with pytest.raises(ctta.CheckpointError):
        ctta.load(rewrite_file(path, change), make_network())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_buffers_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    model = ctta.Guarded(adapted_tent())
    model(STREAM[0])
    ctta.save(model, tmp_path / "s")
    ctta.load(tmp_path / "s", make_network())  # the open bounds of the input are infinite, and that is right

    def change(header: Header, tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith("predictions"))
        tensors[name].view(-1)[0] = value

    with pytest.raises(ctta.CheckpointError):
        ctta.load(rewrite_file(tmp_path / "s", change), make_network())


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**30, float("nan"), float("inf"), 0.5, "", "x", "cotta", "\x00"]),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.sampled_from(["sequence", "view", "optimizer", "arguments"]), st.integers(0, 1), max_size=2),
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from paths_in(child, (*path, key))


@settings(max_examples=150)
@given(data=st.data())
def test_mutated_headers(saved: Path, data: st.DataObject) -> None:
    """A file that is loaded can take the next step."""
    header, tensors = read_file(saved)
    original = copy.deepcopy(header)
    path = data.draw(st.sampled_from(list(paths_in(header))))
    parent = header
    for key in path[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[path[-1]] = data.draw(VALUES)
    else:
        del parent[path[-1]]
    mutated = saved.with_name("edited")
    write_tensors(mutated, {name: value.clone() for name, value in tensors.items()}, "ctta", header)
    model = load_or_none(mutated)
    if model is None:
        return
    if json.dumps(header) == json.dumps(original):  # False equals 0, but not in a header
        assert_equal(model, ctta.load(saved, make_network()))
    model(STREAM[2])


def test_random_headers(tmp_path: Path) -> None:
    """Not even the shape of a header."""
    generator = random.Random(0)
    for _ in range(40):
        header: Any = generator.choice(
            [None, 1, "x", [], {}, {"format": 2}, {"format": [2]}, {"format": True}, [[]] * 3]
        )
        write_tensors(tmp_path / "s", {"a": torch.ones(1)}, "ctta", header)
        assert load_or_none(tmp_path / "s") is None
    write_tensors(tmp_path / "s", {}, "ctta", {})
    (tmp_path / "deep").write_bytes((tmp_path / "s").read_bytes().replace(b"{}", b"[" * 2, 1))
    assert load_or_none(tmp_path / "deep") is None

"""Readers of tables, settings and run files: for any input a value or one of the library's own errors."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctta.errors import ConfigError, DataError, InputError
from ctta.hyperparameters import parse_hyperparameters
from ctta.inference.predictions import PredictionFile, escape_formula, unescape_formula
from ctta.methods import METHODS
from ctta.report.runs import FORMAT, read_run_file

#: Inputs that are close to valid ones, from which the mutations start.
TABLES = [
    b"image,batch,class\na.png,0,1\nb.png,1,2\n",
    b'image,batch,class\n"a\rb.png",0,1\n"c\nd.png",1,2\n',
    b"image,batch,class\n\xff.png,0,1\n",
    b"image,batch,class\na.png,\xd9\xa3,1\n",
    b"image,batch,class\na.png," + b"9" * 5000 + b",1\n",
    b'image,batch,class\n"' + b"a" * 140_000 + b'",0,1\n',
    b"image,batch,class\r\na.png,0,1\r\n",
    b"",
    b"\n",
    b"\x00",
]
SETTINGS = ["restore=0.005", "lr=1e-4", "views=8", "optimizer=SGD", "optimizer.momentum=0.9", "seed=1", "gate=element"]
RUN = {"format": FORMAT, "recipe": "demo", "options": {"limit": 1}, "threads": 1, "commands": ["ctta bench demo"]}


def mutate(data: st.DataObject, content: bytes) -> bytes:
    """Return content with a few parts replaced."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(changed)))
        end = data.draw(st.integers(start, min(start + 8, len(changed))))
        changed[start:end] = data.draw(
            st.binary(max_size=8) | st.sampled_from([b'"', b",", b"\n", b"\r", b"\x00", b"{"])
        )
    return bytes(changed)


@settings(max_examples=200)
@given(data=st.data())
def test_tables(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """What is read is written again as it was, and then read as the same."""
    file = PredictionFile(tmp_path_factory.getbasetemp() / "fuzzed.csv", ["class"])
    file.path.write_bytes(mutate(data, data.draw(st.sampled_from(TABLES))))
    try:
        images, num_dropped = file.truncate(1)
    except (ConfigError, DataError):
        return
    assert num_dropped >= 0
    rewritten = file.path.read_bytes()
    assert file.truncate(1)[0] == images
    file.append([["last.png", 0, 1]])
    assert file.truncate(1) == (images | {"last.png"}, 0)
    assert file.path.read_bytes().startswith(rewritten)


NAMES = st.text(st.characters(exclude_categories=[]) | st.sampled_from("\r\n\t\"',=+-@"), max_size=12)


@settings(max_examples=200)
@given(names=st.lists(NAMES, unique=True, max_size=4), escape_formulas=st.booleans())
@example(names=["\r", "\n", "'\r", "''="], escape_formulas=True)
def test_any_name_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], escape_formulas: bool
) -> None:
    names = [name for name in names if not any("\ud800" <= letter <= "\udfff" for letter in name)]
    file = PredictionFile(tmp_path_factory.getbasetemp() / "names.csv", ["class"], escape_formulas=escape_formulas)
    file.create()
    file.append([name, 0, 1] for name in names)
    assert file.truncate(1, names) == (set(names), 0)


@settings(max_examples=200)
@given(text=NAMES)
def test_escaping_is_exact(text: str) -> None:
    escaped = escape_formula(text)
    assert not escaped.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert unescape_formula(escaped) == text


@settings(max_examples=300)
@given(data=st.data(), method=st.sampled_from(sorted(METHODS)))
def test_settings(data: st.DataObject, method: str) -> None:
    base = data.draw(st.sampled_from(SETTINGS))
    mutated = mutate(data, base.encode()).decode("utf-8", "replace")
    name = base.partition("=")[0]
    literal = data.draw(
        st.sampled_from(["((((", "1_0", "-" * 500 + "1", "[" * 300, "{}", "None", "9" * 5000, "1e999", "'"])
    )
    text = data.draw(st.sampled_from([mutated, f"{name}={literal}"]))
    try:
        parsed = parse_hyperparameters(METHODS[method], [text])
    except (ConfigError, InputError) as error:
        assert str(error)
    else:
        assert parsed.keys() <= set(METHODS[method].__init__.__annotations__) | {"optimizer", "views"}


@settings(max_examples=150)
@given(data=st.data())
def test_run_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "run"
    folder.mkdir(exist_ok=True)
    content = mutate(data, json.dumps(RUN).encode())
    other = data.draw(
        st.sampled_from([b"[]", b"null", b"{}", b"[" * 5000, b"\xff", b'{"format": 1}', b'{"format": "1"}'])
    )
    (folder / "run.json").write_bytes(data.draw(st.sampled_from([content, other])))
    try:
        found = read_run_file(folder)
    except DataError as error:
        assert str(error)
    else:
        assert found["format"] == FORMAT and isinstance(found["commands"], list)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no run\.json"):
        read_run_file(tmp_path)

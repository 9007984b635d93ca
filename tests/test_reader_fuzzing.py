"""Readers of foreign bytes: for any input a value or one of the library's own errors.

The targets are in ``fuzz_targets.py``, and ``benchmarks/chaos/fuzz.py`` runs them guided by coverage. Every file of the
corpus is tried, and then mutations of them.
"""

from pathlib import Path

import pytest
from fuzz_targets import CORPUS, TARGETS, corpus, fuzz_csv, fuzz_run, fuzz_settings
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctta.adapt.predictions import PredictionFile, escape_formula, unescape_formula
from ctta.benchmark.report.runs import read_run_file
from ctta.errors import DataError

TABLES, SETTINGS, RUNS = ([path.read_bytes() for path in corpus(target)] for target in ("csv", "settings", "run"))


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


@pytest.mark.parametrize(("target", "name"), [(target, path.name) for target in TARGETS for path in corpus(target)])
def test_corpus(target: str, name: str) -> None:
    TARGETS[target]((CORPUS / target / name).read_bytes())


@settings(max_examples=200)
@given(data=st.data())
def test_tables(data: st.DataObject) -> None:
    fuzz_csv(mutate(data, data.draw(st.sampled_from(TABLES))))


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
@given(data=st.data())
def test_settings(data: st.DataObject) -> None:
    fuzz_settings(mutate(data, data.draw(st.sampled_from(SETTINGS))))


@settings(max_examples=150)
@given(data=st.data())
def test_run_files(data: st.DataObject) -> None:
    fuzz_run(mutate(data, data.draw(st.sampled_from(RUNS))))


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_run_file(tmp_path)

"""Settings of a folder: recorded once, and refused if they differ later."""

import json
from pathlib import Path

import pytest

from ctta.errors import ConfigError, DataError
from ctta.io.provenance import check_same_settings, record_settings


def test_message_lists_every_difference() -> None:
    recorded = {"seed": 1, "views": "8", "environment": {"torch": "2.8", "threads": 1}, "old": True}
    requested = {"seed": 2, "views": "8", "environment": {"torch": "2.9", "device": "cpu"}, "new": None}
    with pytest.raises(ConfigError) as raised:
        check_same_settings(Path("runs/a"), recorded, requested, hint="choose another folder")
    assert str(raised.value) == (
        "runs/a was made with other settings (seed: 1 → 2; environment.torch: 2.8 → 2.9; "
        "environment.threads: 1 → nothing; environment.device: nothing → cpu; new: nothing → nothing): "
        "choose another folder"
    )


def test_equal_settings_pass_and_unrequested_ones_do_not_matter() -> None:
    check_same_settings(Path("runs/a"), {"seed": 1, "nested": {"a": [1]}, "old": 3}, {"seed": 1, "nested": {"a": [1]}})


def test_settings_are_recorded_once_and_compared_later(tmp_path: Path) -> None:
    path = tmp_path / "made" / "settings.json"
    settings = {"seed": 1, "images": "abc"}
    record_settings(path, settings)
    assert json.loads(path.read_text()) == settings
    before = path.stat().st_mtime_ns
    record_settings(path, settings)
    for other, difference in (
        ({**settings, "seed": 2}, "seed: 1 → 2"),
        ({**settings, "size": 3}, "size: nothing → 3"),
        ({"seed": 1}, "images: abc → nothing"),
    ):
        message = rf"made was made with other settings \({difference}\): use another folder"
        with pytest.raises(ConfigError, match=message):
            record_settings(path, other)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("content", [b"", b'{"seed": 1', b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b"3"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "made_from.json"
    path.write_bytes(content)
    with pytest.raises(DataError):
        record_settings(path, {"seed": 1})
    assert path.read_bytes() == content

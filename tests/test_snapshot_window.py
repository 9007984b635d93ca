"""The window file of a stream's snapshot: flipped bits and truncation are refused by its reader."""

from pathlib import Path

import pytest
import torch
from serving import make_images, make_tent

from ctta.errors import DamagedCheckpointError
from ctta.serve.audit import AuditLog
from ctta.serve.options import ServiceOptions
from ctta.serve.persistence import WINDOW_FILE, Snapshots
from ctta.serve.stream import ServedStream


def make_stream(folder: Path) -> ServedStream:
    model = make_tent(folder)
    log = AuditLog(folder / "audit.jsonl", lambda _kind: None, lambda: None)
    return ServedStream("s", model, model.source, log, ServiceOptions(window_size=2, update_every=1))


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    """Return the snapshots of a stream that has seen three images."""
    stream, snapshots = make_stream(tmp_path), Snapshots(tmp_path / "streams")
    stream.infer(make_images(3), adapt=True)
    snapshots.write(stream)
    return snapshots


def is_refused(snapshots: Snapshots, folder: Path) -> bool:
    restored = make_stream(folder)
    try:
        snapshots.restore(restored)
    except DamagedCheckpointError:
        return True
    assert restored.window.images is not None and restored.num_images == 3
    return False


def test_an_undamaged_window_is_restored(snapshots: Snapshots, tmp_path: Path) -> None:
    restored = make_stream(tmp_path)
    snapshots.restore(restored)
    assert restored.window.images is not None
    assert torch.equal(restored.window.images, make_images(3)[-2:])


def test_every_flipped_bit_is_noticed(snapshots: Snapshots, tmp_path: Path) -> None:
    """In the header every byte, since one that hides the checksum must not hide the damage; of the images some."""
    path = snapshots.directory / "s" / "1" / WINDOW_FILE
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    restored = make_stream(tmp_path)
    for position in (*range(header), *range(header, len(content), 97)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError):
            snapshots.restore(restored)
    path.write_bytes(content)
    assert not is_refused(snapshots, tmp_path)


def test_every_truncation_is_noticed(snapshots: Snapshots, tmp_path: Path) -> None:
    path = snapshots.directory / "s" / "1" / WINDOW_FILE
    content = path.read_bytes()
    restored = make_stream(tmp_path)
    for length in (*range(0, 64), *range(64, len(content), 61), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError):
            snapshots.restore(restored)

"""A video file that is written in parts, so that what belongs to a saved state survives a kill."""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctta.data.datasets.video import import_av
from ctta.errors import ConfigError
from ctta.io.atomic import atomic_write, fsync_file

#: Encoders in the order of preference, with their options; without B-frames, packets are in the order of the frames.
ENCODERS = {"libx264": {"crf": "20", "preset": "veryfast", "bf": "0"}, "mpeg4": {"qscale": "3", "bf": "0"}}


class VideoFile:
    """Append pictures to a video file; resumable after a kill.

    A video file cannot be read before it is complete. So the pictures between two saved states are a file of their own
    in the folder ``<path>.parts``, complete before the state is saved, and :meth:`close` joins them without encoding
    anything again.

    Args:
        path: The file, such as ``out.mp4``.
        rate: Frames per second.
        step: Step that the run starts from: 0 for a new one; parts of later steps are dropped.

    Raises:
        ConfigError: There is such a file, and the run is new.
    """

    def __init__(self, path: Path, rate: Fraction, *, step: int) -> None:
        self.path, self.rate = path, rate
        self.folder = path.with_name(f"{path.name}.parts")
        self._first_step, self._num_frames = step, 0
        self._output: Any = None
        self._stream: Any = None
        if step == 0 and path.exists():
            raise ConfigError(f"{path} exists, and the run is new: choose another file, or delete it")
        if step and path.exists():
            shutil.rmtree(self.folder, ignore_errors=True)  # of a call that was killed after it had joined them
            self.folder.mkdir()
            path.replace(self.folder / _part_name(0))  # of an earlier call, to which this one appends
        for part in self._list_parts():
            if int(part.stem) >= step:
                part.unlink()

    def append(self, picture: NDArray[np.uint8]) -> None:
        """Append a picture, uint8 (H, W, 3); all have the size of the first, made even."""
        av = import_av()
        if self._output is None:
            self._open(picture)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame = frame.reformat(self._stream.width, self._stream.height, format="yuv420p")
        frame.pts, frame.time_base = self._num_frames, 1 / self.rate
        self._num_frames += 1
        self._output.mux(self._stream.encode(frame))

    def finish_part(self, step: int) -> None:
        """Complete the file of the pictures so far; those after it belong to a step and later ones."""
        if self._output is not None:
            self._output.mux(self._stream.encode())
            self._output.close()
            fsync_file(self._current)
            self._output, self._num_frames = None, 0
        self._first_step = step

    def close(self, *, keep_unsaved: bool) -> None:
        """Join the parts to one file.

        Args:
            keep_unsaved: Whether to keep the pictures since the last part, although no saved state includes them.
        """
        if self._output is not None:
            self.finish_part(self._first_step)
            if not keep_unsaved:
                self._current.unlink()
        parts = self._list_parts()
        if parts:
            with atomic_write(self.path) as temporary:
                self._join(parts, temporary)
            shutil.rmtree(self.folder)

    @property
    def _current(self) -> Path:
        return self.folder / _part_name(self._first_step)

    def _list_parts(self) -> list[Path]:
        return sorted(self.folder.glob("*.mp4"))

    def _open(self, picture: NDArray[np.uint8]) -> None:
        av = import_av()
        name = next((name for name in ENCODERS if name in av.codecs_available), None)
        if name is None:
            raise ConfigError(f"PyAV was built without {' and '.join(ENCODERS)}: leave --annotate out, or reinstall it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._output = av.open(str(self._current), "w", format="mp4")
        self._stream = self._output.add_stream(name, rate=self.rate, options=ENCODERS[name])
        height, width = picture.shape[:2]
        self._stream.height, self._stream.width = self._size_of_parts() or (height + height % 2, width + width % 2)
        self._stream.pix_fmt, self._stream.time_base = "yuv420p", 1 / self.rate

    def _size_of_parts(self) -> tuple[int, int] | None:
        """Return the (height, width) of earlier parts, as a video file has one size."""
        parts = [part for part in self._list_parts() if part != self._current]
        if not parts:
            return None
        with import_av().open(str(parts[0])) as container:
            return container.streams.video[0].height, container.streams.video[0].width

    def _join(self, parts: list[Path], path: Path) -> None:
        av, number = import_av(), 0
        with av.open(str(path), "w", format="mp4") as output:
            stream = None
            for part in parts:
                with av.open(str(part)) as container:
                    stream = stream or output.add_stream_from_template(container.streams.video[0])
                    for packet in container.demux(container.streams.video[0]):
                        if packet.dts is None:  # the end
                            continue
                        packet.stream, packet.time_base = stream, 1 / self.rate
                        packet.pts = packet.dts = number
                        packet.duration = 1
                        number += 1
                        output.mux(packet)


def _part_name(step: int) -> str:
    return f"{step:012}.mp4"

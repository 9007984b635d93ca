"""Frames with the answers drawn on them: the source's and the adapted model's."""

from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ctta.adapt.comparison import Predictions
from ctta.adapt.run import InferenceBatch
from ctta.adapt.video_file import VideoFile
from ctta.io.images import import_pillow

MIN_WIDTH = 320  # pixels, below which frames are enlarged so that the text can be read
FONT_SIZE, LINE_HEIGHT, MARGIN = 15, 22, 6
BACKGROUND, TEXT, CHANGED = (24, 24, 27), (228, 228, 231), (250, 204, 21)


class AnnotatedVideo:
    """Draws the answers to every frame and appends the picture to a video file.

    Args:
        file: The video file.
        classes: Class names, if known.
        keep_unsaved: Whether to keep pictures at the end that no saved state includes, as there is none.
    """

    def __init__(self, file: VideoFile, classes: Sequence[str] | None, *, keep_unsaved: bool) -> None:
        self.file, self.classes, self.keep_unsaved = file, tuple(classes or ()), keep_unsaved

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file.close(keep_unsaved=self.keep_unsaved)

    def add(self, batch: InferenceBatch, adapted: Predictions, source: Predictions) -> None:
        """Append the frames of a batch."""
        for row, frame in enumerate(batch.frames):
            self.file.append(self._draw(frame, row, adapted, source))

    def flush_to_disk(self, step: int) -> None:
        """Complete the file of the frames before a step."""
        self.file.finish_part(step)

    def _draw(self, frame: NDArray[np.uint8], row: int, adapted: Predictions, source: Predictions) -> NDArray[np.uint8]:
        if adapted.label_maps is not None and source.label_maps is not None:
            return self._draw_maps(frame, source.label_maps[row], adapted.label_maps[row])
        answers = [(each.classes[row], each.confidences[row]) for each in (source, adapted)]
        texts = [f"{self._name(label)}  {confidence:.2f}" for label, confidence in answers]
        picture = _enlarge(frame)
        lines = [("source", texts[0], TEXT), ("adapted", texts[1], _color(answers[0][0] != answers[1][0]))]
        return np.concatenate([picture, _draw_lines(picture.shape[1], lines)])

    def _draw_maps(self, frame: NDArray[np.uint8], source: Tensor, adapted: Tensor) -> NDArray[np.uint8]:
        share = float((source != adapted).float().mean())
        titles = ("source", "", TEXT), ("adapted", f"{100 * share:.0f} % of the pixels differ", _color(share > 0))
        panels = []
        for labels, title in zip((source, adapted), titles, strict=True):
            picture = self._blend(frame, labels.numpy())
            panels.append(np.concatenate([_draw_lines(picture.shape[1], [title]), picture]))
        return np.concatenate(panels, axis=1)

    def _blend(self, frame: NDArray[np.uint8], labels: NDArray[np.int64]) -> NDArray[np.uint8]:
        from ctta.benchmark.report.plots import blend_classes, choose_palette  # imports matplotlib

        num_classes = max(len(self.classes), int(labels.max()) + 1)
        palette = choose_palette(self.classes, num_classes)
        picture = _enlarge(frame)
        height, width = picture.shape[:2]
        rows = np.arange(height) * labels.shape[0] // height
        columns = np.arange(width) * labels.shape[1] // width
        return blend_classes(picture, labels[rows[:, None], columns].astype(np.uint16), palette)

    def _name(self, label: int) -> str:
        return self.classes[label] if self.classes else f"class {label}"


def _color(is_changed: bool) -> tuple[int, int, int]:
    return CHANGED if is_changed else TEXT


def _enlarge(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a small frame enlarged by a whole factor, so that its pixels stay what they are."""
    factor = -(-MIN_WIDTH // frame.shape[1])
    return frame if factor == 1 else frame.repeat(factor, axis=0).repeat(factor, axis=1)


def _draw_lines(width: int, lines: Sequence[tuple[str, str, tuple[int, int, int]]]) -> NDArray[np.uint8]:
    """Return a strip with lines of text: a word, and what it says in a color."""
    from PIL import ImageDraw

    strip = import_pillow().new("RGB", (width, LINE_HEIGHT * len(lines)), BACKGROUND)
    draw, font = ImageDraw.Draw(strip), _load_font()
    left = MARGIN + max(draw.textlength(word, font) for word, _, _ in lines) + 2 * MARGIN
    for number, (word, text, color) in enumerate(lines):
        center = (number + 0.5) * LINE_HEIGHT
        draw.text((MARGIN, center), word, TEXT, font, anchor="lm")
        draw.text((left, center), text, color, font, anchor="lm")
    return np.asarray(strip)


@cache
def _load_font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(FONT_SIZE)

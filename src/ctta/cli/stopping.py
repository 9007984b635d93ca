"""Ctrl-C between two steps rather than within one, so that nothing done is lost."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopping_between_steps() -> Iterator[Callable[[], None]]:
    """Give a function to call between steps, which raises KeyboardInterrupt after Ctrl-C; a second one does at once."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    def stop_if_asked() -> None:
        if came:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield stop_if_asked
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop_if_asked
    finally:
        signal.signal(signal.SIGINT, before)

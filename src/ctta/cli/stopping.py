"""Ctrl-C between two steps rather than within one, so that nothing done is lost."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ctta.distributed.collectives import any_rank


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
        if any_rank(came):  # under torchrun the signal may reach one before a step and another after it
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield stop_if_asked
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop_if_asked
    finally:
        signal.signal(signal.SIGINT, before)

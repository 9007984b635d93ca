"""Errors of the HTTP API, and failures that are the service's own fault."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ctta.errors import InputError

logger = logging.getLogger("ctta.serve")

OUT_OF_MEMORY, DISK, INTERNAL = "out_of_memory", "disk", "internal"  # causes of a failure, as the metrics count them
RETRY_AFTER_OUT_OF_MEMORY, _RETRY_AFTER_DISK_ERROR = 10, 30  # seconds


class ApiError(Exception):
    """An answer with an HTTP error status.

    Args:
        status: HTTP status code.
        message: One sentence for the client that says what is wrong and what to do.
        retry_after: Seconds after which the same request may succeed; None if it will not.
    """

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the machine ran out of memory, also if that is only the cause of an error.

    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"))
    True
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # On the CPU, and on some accelerators, torch raises a plain RuntimeError.
    text = str(error)
    if isinstance(error, RuntimeError) and ("out of memory" in text.lower() or "DefaultCPUAllocator" in text):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextmanager
def hide_internal_errors(task: str, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Turn errors that are not the client's fault into an :class:`ApiError` that withholds their text.

    ``ApiError`` and ``InputError`` pass. Everything else is logged with its traceback, counted, and answered with
    status 500; if memory ran out, the answer says that the same request may succeed later.

    Args:
        task: What is done within, for the log.
        on_failure: Called with the cause, ``"out_of_memory"`` or ``"internal"``.
    """
    try:
        yield
    except (ApiError, InputError):
        raise
    except Exception as error:
        logger.error("%s failed", task, exc_info=error)
        if is_out_of_memory(error):
            on_failure(OUT_OF_MEMORY)
            message = "the service ran out of memory; nothing was changed: send the request again later"
            raise ApiError(500, message, retry_after=RETRY_AFTER_OUT_OF_MEMORY) from error
        on_failure(INTERNAL)
        raise ApiError(500, "the network or the service failed; nothing was changed: see the service's log") from error


@contextmanager
def report_disk_errors(task: str, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Turn errors of the disk into an :class:`ApiError` with status 503: they may be temporary, such as a full disk.

    Only for blocks in which an ``OSError`` comes from the service's own files, and not from a network.

    Args:
        task: What is done within, for the log and the client.
        on_failure: Called with the cause, ``"disk"``.
    """
    try:
        yield
    except OSError as error:
        logger.error("%s failed", task, exc_info=error)
        on_failure(DISK)
        reason = error.strerror or "disk error"  # the whole text may contain paths
        raise ApiError(
            503,
            f"{task} failed ({reason}); nothing was changed: send the request again later",
            retry_after=_RETRY_AFTER_DISK_ERROR,
        ) from error

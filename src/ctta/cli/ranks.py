"""The command under ``torchrun``: every rank runs it, and one speaks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from ctta.cli.console import err, out
from ctta.distributed import init, rank


@contextmanager
def speaking_first_only() -> Iterator[None]:
    """Within, ranks but the first print nothing; a process by itself is the first."""
    init()
    if rank() == 0:
        yield
        return
    out.quiet = err.quiet = True
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield

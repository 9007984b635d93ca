"""The command ``ctta``: arguments in, calls out."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ctta.errors import is_user_error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    A user's mistake is reported in one line with exit code 1 (usage errors: 2), or with a traceback if the environment
    variable ``CTTA_TRACEBACK`` is set. Any other exception is a bug, here or in the user's network, and propagates.
    """
    try:
        from ctta.cli.app import app
        from ctta.cli.console import quiet_except_rank_zero
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ctta"):
            raise
        if list(sys.argv[1:] if arguments is None else arguments) == ["doctor"]:
            _print_doctor()
        sys.exit(f"ctta: the command needs {error.name}, which is not installed: pip install 'ctta[bench]'")
    try:
        with quiet_except_rank_zero():
            app(args=arguments, prog_name="ctta")
    except Exception as error:
        if os.environ.get("CTTA_TRACEBACK") or not is_user_error(error):
            raise
        rank = os.environ.get("RANK", "0")
        sys.exit(f"{'ctta' if rank == '0' else f'rank {rank}'}: {error}")


def _print_doctor() -> NoReturn:
    """Check an installation that lacks what commands need."""
    from ctta.cli.installation import inspect_installation

    found = inspect_installation()
    sys.stdout.write(f"{found.describe()}\n")
    sys.exit(1 if found.problems else 0)

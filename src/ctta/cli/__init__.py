"""The command ``ctta``: arguments in, calls out."""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a mistake is one line and an exit code, not a traceback (``CTTA_TRACEBACK=1`` shows that)."""
    try:
        from ctta.cli.app import app
        from ctta.cli.ranks import speaking_first_only
    except ModuleNotFoundError as error:
        sys.exit(f"ctta: the command needs {error.name}, which an extra brings: pip install 'ctta[bench]'")
    try:
        with speaking_first_only():
            app(args=arguments, prog_name="ctta")
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("CTTA_TRACEBACK"):
            raise
        speaker = f"rank {number}" if (number := os.environ.get("RANK", "0")) != "0" else "ctta"
        sys.exit(f"{speaker}: {error}")

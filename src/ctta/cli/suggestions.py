"""A command that corrects mistyped options."""

from typing import Any

from typer.core import TyperCommand
from typing_extensions import override


class SuggestingCommand(TyperCommand):
    """A command whose error for an unknown option names the option that resembles it most."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # its class is click's or a copy within typer, depending on the version of typer
            if similar := getattr(error, "possibilities", None):
                message = f"No such option: {getattr(error, 'option_name', '')}. Did you mean {similar[0]}?"
                vars(error).update(message=message, possibilities=None)
            raise

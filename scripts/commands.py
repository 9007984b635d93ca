"""Write the tables of docs/commands.md from the help texts of the command: ``python scripts/commands.py``."""

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from ctta.cli.app import app

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
MARK = "<!-- What follows is written by scripts/commands.py. -->\n"


def describe_commands() -> str:
    """Return a section per command: what it does, and a table of its arguments and options."""
    root: Any = get_command(app)
    sections = []
    for name, command in root.commands.items():
        if subcommands := getattr(command, "commands", None):
            sections += [_describe(f"{name} {each}", subcommand) for each, subcommand in subcommands.items()]
        else:
            sections.append(_describe(name, command))
    return "\n".join(sections)


def _describe(name: str, command: Any) -> str:
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help.strip())
    rows = [_describe_parameter(parameter) for parameter in command.params if parameter.name != "help"]
    table = ["| option | what it does |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## ctta {name}", "", text, "", *table, ""])


def _describe_parameter(parameter: Any) -> str:
    help_text = parameter.help or ""
    if parameter.param_type_name == "argument":
        names, value = [parameter.metavar or parameter.name.upper()], ""
    else:
        names = [*parameter.opts, *parameter.secondary_opts]
        value = "" if parameter.is_flag else f" {parameter.metavar or ''}".rstrip()
        if "Default: " not in help_text and parameter.default not in (None, False, ()):
            default = parameter.opts[0] if parameter.is_flag else parameter.default
            help_text += f" Default: {default}."
    if parameter.required:
        help_text += " Required."
    return f"| `{', '.join(names)}{value}` | {help_text.replace('|', '&#124;')} |"


if __name__ == "__main__":
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(f"{head}{MARK}\n{describe_commands()}", encoding="utf-8")

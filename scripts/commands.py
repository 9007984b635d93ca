"""Write the tables of docs/commands.md from the help texts of the command: ``python scripts/commands.py``."""

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from ctta.cli.app import app
from ctta.cli.command import describe_parameter

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
    described = [describe_parameter(parameter) for parameter in command.params if parameter.name != "help"]
    rows = [f"| `{_escape(names)}` | {_escape(help_text)} |" for names, help_text in described]
    table = ["| option | what it does |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## ctta {name}", "", text, "", *table, ""])


def _escape(text: str) -> str:
    return text.replace("|", r"\|")  # also within code: tables are split first


if __name__ == "__main__":
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(f"{head}{MARK}\n{describe_commands()}", encoding="utf-8")

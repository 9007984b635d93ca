"""Reference of the command and of the HTTP service, from the code: ``{command-reference}`` and ``{http-reference}``."""

import re
import tempfile
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from ctta import Tent, models
from ctta.cli.app import app as command_line
from ctta.cli.app import describe_parameter
from ctta.serve import Service, create_app


def describe_commands() -> str:
    """Return a section per command in Markdown: what it does, and a table of its arguments and options."""
    root: Any = get_command(command_line)
    sections = []
    for name, command in root.commands.items():
        if subcommands := getattr(command, "commands", None):
            sections += [_describe_command(f"{name} {each}", subcommand) for each, subcommand in subcommands.items()]
        else:
            sections.append(_describe_command(name, command))
    return "\n".join(sections)


def _describe_command(name: str, command: Any) -> str:
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help.strip())
    described = [
        describe_parameter(parameter)
        for parameter in command.params
        if parameter.name != "help" and not getattr(parameter, "hidden", False)
    ]
    rows = [f"| `{_escape(names)}` | {_escape(help_text)} |" for names, help_text in described]
    table = ["| option | what it does |", "|---|---|", *rows] if rows else []
    return "\n".join([f"## ctta {name}", "", text, "", *table, ""])


def _escape(text: str) -> str:
    return text.replace("|", r"\|")  # also within code: tables are split first


def read_openapi() -> dict[str, Any]:
    """Return the OpenAPI description of a service with the embedded network."""
    with tempfile.TemporaryDirectory() as folder:
        return create_app(Service(Tent(models.embedded()), folder)).openapi()


def describe_routes(api: dict[str, Any]) -> str:
    """Return a section per route in Markdown: parameters, bodies and statuses.

    Args:
        api: An OpenAPI description.
    """
    sections = []
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            sections += [f"### {method.upper()} {path.replace('{', '&#123;').replace('}', '&#125;')}", ""]
            sections += [route.get("description") or route.get("summary", ""), ""]
            if parameters := route.get("parameters"):
                sections += ["| parameter | in | type | default |", "|---|---|---|---|"]
                sections += [_describe_route_parameter(each) for each in parameters] + [""]
            if body := route.get("requestBody"):
                sections += [f"Body: {', '.join(f'`{kind}`' for kind in body['content'])}.", ""]
            sections += ["| status | answer |", "|---|---|"]
            sections += [_describe_response(status, each) for status, each in route["responses"].items()] + [""]
    return "\n".join(sections)


def _describe_route_parameter(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    options = schema.get("anyOf", [schema])
    kind = " or ".join(dict.fromkeys(str(each.get("type", each.get("const", "any"))) for each in options))
    bounds = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    default = "required" if parameter.get("required") else f"`{str(schema.get('default')).lower()}`"
    return f"| `{parameter['name']}` | {parameter['in']} | {' '.join([kind, *bounds])} | {default} |"


def _describe_response(status: str, response: dict[str, Any]) -> str:
    kinds = ", ".join(f"`{kind}`" for kind in response.get("content", {}))
    return f"| {status} | {_escape(response['description'])}{f' ({kinds})' if kinds else ''} |"


class CommandReference(SphinxDirective):
    """Writes a section per command."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        return self.parse_text_to_nodes(describe_commands(), allow_section_headings=True)


class HttpReference(SphinxDirective):
    """Writes a section per route."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        return self.parse_text_to_nodes(describe_routes(read_openapi()), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("command-reference", CommandReference)
    app.add_directive("http-reference", HttpReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

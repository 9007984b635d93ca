"""The code of the documentation runs, its commands exist, every method has a page, every public name a docstring."""

import html
import importlib
import inspect
import json
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from api_pages import find_comment, protect_colon, restore_colon
from command_pages import describe_commands, describe_routes, read_openapi
from documents import PAGES, PREAMBLE, ROOT, read_commands, read_python
from PIL import Image
from repository_links import rewrite_links
from sphinx.ext.napoleon.docstring import GoogleDocstring
from typer.main import get_command

import ctta
from benchmarks.draw import cotta as draw_cotta
from benchmarks.draw import speed as draw_speed
from benchmarks.speed.measurements import Measurement, read_results
from ctta.cli.app import app
from ctta.core.options import describe_fields
from ctta.methods import METHODS

METHOD_PAGES = ROOT / "docs" / "reference" / "methods"
#: test_contributing runs the code of CONTRIBUTING.md block by block.
WITH_PYTHON = [page for page in PAGES if page.name != "CONTRIBUTING.md" and read_python(page)]
COMMANDS = sorted({(page, shlex.join(words)) for page in PAGES for words in read_commands(page)})


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_page)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")  # a class of the page is pickled by its name
    monkeypatch.setitem(sys.modules, "page", module)
    vars(module)["monkeypatch"] = monkeypatch
    exec(compile(PREAMBLE + read_python(page), str(page), "exec"), vars(module))


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{name_page(page)}: {line}" for page, line in COMMANDS])
def test_commands_of_a_page_exist(page: Path, line: str) -> None:
    """Parse the options of a command without running it."""
    words = shlex.split(line)[1:]
    command: Any = get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{page}: {line}"
        command = command.commands[words.pop(0)]
    if words not in (["-h"], ["--version"], []):
        command.make_context("ctta", words)


def test_code_is_found() -> None:
    assert {"README.md", "docs/get-started/five-minutes.md", "docs/how-to/deploy.md"} <= set(
        map(name_page, WITH_PYTHON)
    )
    assert len(COMMANDS) > 30


def test_every_method_has_a_page_with_its_equation() -> None:
    pages = {path.stem: path.read_text() for path in METHOD_PAGES.glob("*.md") if path.stem != "index"}
    assert pages.keys() == METHODS.keys()
    for name, text in pages.items():
        assert f"```{{method-facts}} {name}\n" in text and f"```{{method-numbers}} {name}\n" in text, name
        assert re.search(r"^\$\$.+\$\$$", text, re.MULTILINE), name
    tables = (METHOD_PAGES / "index.md").read_text()
    listed = [name for block in re.findall(r"```{method-table}\n(.*?)```", tables, re.DOTALL) for name in block.split()]
    assert sorted(listed) == sorted(METHODS)


def test_published_numbers_have_a_source() -> None:
    published = json.loads((METHOD_PAGES / "published.json").read_text())
    assert {row["method"] for row in published["rows"]} <= METHODS.keys()
    assert {row["source"] for row in published["rows"]} == published["sources"].keys()


def test_the_command_reference_has_every_option() -> None:
    sections = dict(re.findall(r"^## ctta ([a-z -]+)\n(.*?)(?=^## |\Z)", describe_commands(), re.MULTILINE | re.DOTALL))
    root: Any = get_command(app)
    for name, command in root.commands.items():
        for each, subcommand in getattr(command, "commands", {"": command}).items():
            section = sections[f"{name} {each}".strip()]
            shown = [each for each in subcommand.params if not getattr(each, "hidden", False)]
            names = [parameter.opts[0] for parameter in shown if parameter.opts[0].startswith("--")]
            assert [option for option in names if option != "--help" and f"`{option}" not in section] == []


def test_the_http_reference_has_every_route() -> None:
    api = read_openapi()
    text = html.unescape(describe_routes(api))
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            section = text.partition(f"### {method.upper()} {path}\n")[2].partition("\n### ")[0]
            assert section and all(f"| {status} |" in section for status in route["responses"]), path
            assert all(f"`{parameter['name']}`" in section for parameter in route.get("parameters", ())), path


def test_a_constant_has_the_comment_of_the_module_that_defines_it() -> None:
    assert find_comment("METHODS", METHODS)[0].startswith("Every method of the library by its name")


def test_a_colon_in_the_docstring_of_a_property_ends_no_type() -> None:
    written = "Whether the best method leads: by more than noise."
    lines, app = [written], cast(Any, None)
    protect_colon(app, "property", "ctta.Comparison.is_decided", None, None, lines)
    lines[:] = GoogleDocstring(lines, what="property", name="is_decided").lines()
    restore_colon(app, "property", "ctta.Comparison.is_decided", None, None, lines)
    assert "\n".join(lines).strip() == written


def test_links_into_the_repository() -> None:
    page = ROOT / "docs" / "how-to" / "speed.md"
    text = "[a](../../Makefile) [b](../results/demo/) [c](evaluate.md#intervals) ![d](../figures/streets.png)"
    assert rewrite_links(text, page) == (
        "[a](https://github.com/ctta-project/ctta/blob/main/Makefile) [b](../results/demo/README.md) "
        "[c](evaluate.md#intervals) ![d](../figures/streets.png)"
    )


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_external_links_are_well_formed(page: Path) -> None:
    """They cannot be opened in a test; the form shows a typing mistake."""
    for link in re.findall(r"\]\((\w+:[^)]*)\)|<(\w+:[^>]*)>", page.read_text()):
        address = urlsplit("".join(link))
        assert address.scheme == "https" and "." in (address.hostname or ""), link


@pytest.mark.parametrize("name", draw_cotta.THEMES)
def test_the_figure_of_cotta_is_drawn_by_its_script(name: str) -> None:
    """If it fails: python -m benchmarks.draw.cotta."""
    drawn = draw_cotta.draw(draw_cotta.THEMES[name])
    assert (draw_cotta.FOLDER / f"cotta-{name}.svg").read_text() == drawn
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_figure_of_the_measured_ratios_is_drawn_from_them() -> None:
    """If it fails: python -m benchmarks.draw.speed."""
    assert draw_speed.FIGURE.read_text() == draw_speed.draw(read_results(draw_speed.RESULTS))
    rows = [Measurement("fast", 0.9, 1.0, low=0.8, high=0.95), Measurement("slow & far", 3.0, 1.0)]
    drawn = draw_speed.draw(rows)
    assert "1 of 2 ratios" in drawn and "slow &amp; far" in drawn and drawn.count('class="interval"') == 1
    end = draw_speed.WIDTH - draw_speed.NUMBERS - draw_speed.NAMES
    assert f'class="missed" x="{draw_speed.NAMES}" y="{draw_speed.TOP + draw_speed.ROW + 4}" width="{end:.1f}"' in drawn


def test_the_front_picture_is_small() -> None:
    path = draw_cotta.FOLDER / "snow.webp"
    assert path.stat().st_size < 150_000
    with Image.open(path) as image:
        assert image.width > 2 * image.height


def test_the_readme_shows_the_command_of_the_checks() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] in (ROOT / "README.md").read_text()


def public_modules() -> list[str]:
    """Return the names of ``ctta`` and of every package below it that declares ``__all__``."""
    names = ["ctta"]
    for module in pkgutil.walk_packages(ctta.__path__, "ctta."):
        if module.name != "ctta.__main__" and hasattr(importlib.import_module(module.name), "__all__"):
            names.append(module.name)
    return names


def documented(docstring: str, section: str) -> set[str]:
    """Return the names that a Google-style section of a docstring describes."""
    found = re.search(rf"^{section}:\n((?:(?: +.*)?\n)*)", docstring + "\n", re.MULTILINE)
    return set(re.findall(r"^    \*{0,2}(\w+)(?: \([^)]*\))?:", found[1], re.MULTILINE)) if found else set()


def undocumented_parts(thing: Any, docstring: str, *, skip_self: bool) -> Iterator[str]:
    """Yield the parameters, and the return value, that a docstring does not describe."""
    signature = inspect.signature(thing)
    parameters = list(signature.parameters)[1 if skip_self else 0 :]
    args = documented(docstring, "Args") | documented(docstring, "Attributes")
    yield from (name for name in parameters if name not in args)
    returns_nothing = signature.return_annotation in (None, "None", inspect.Signature.empty)
    has_section = re.search(r"^(Returns|Yields):$", docstring, re.MULTILINE)
    if inspect.isfunction(thing) and parameters and not returns_nothing and not has_section:
        yield "Returns"


def is_code(thing: Any) -> bool:
    return inspect.isfunction(thing) or inspect.isclass(thing)


def problems_with(name: str, thing: Any) -> Iterator[str]:
    docstring = inspect.getdoc(thing) or ""
    if not docstring:
        yield f"{name} has no docstring"
    elif inspect.isfunction(thing):
        yield from (f"{name}: {part}" for part in undocumented_parts(thing, docstring, skip_self=False))
    elif inspect.isclass(thing) and not issubclass(thing, Enum | BaseException):
        described = documented(docstring, "Args") | documented(docstring, "Attributes")
        if is_dataclass(thing):
            described |= set(describe_fields(thing))  # of options, which say it beside the field
            yield from (
                f"{name}: {field.name}" for field in fields(thing) if field.init and field.name not in described
            )
        elif "__init__" in vars(thing) and not getattr(thing, "_is_protocol", False):
            # Options are one argument here, and their fields are described where they are declared.
            is_method = issubclass(thing, ctta.AdaptiveModel)
            constructor = thing.__init__ if is_method else inspect.unwrap(thing.__init__)
            parameters = [each for each in inspect.signature(constructor).parameters if each != "self"]
            yield from (f"{name}: {each}" for each in parameters if each not in described)
        for method_name, method in vars(thing).items():
            function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            if method_name.startswith("_") or not inspect.isfunction(function):
                continue
            method_doc = inspect.getdoc(getattr(thing, method_name)) or ""
            if not method_doc:
                yield f"{name}.{method_name} has no docstring"
            elif method_name in vars(thing) and not any(hasattr(base, method_name) for base in thing.__mro__[1:]):
                parts = undocumented_parts(function, method_doc, skip_self=not isinstance(method, staticmethod))
                yield from (f"{name}.{method_name}: {part}" for part in parts)


@pytest.mark.parametrize("module_name", public_modules())
def test_every_public_name_has_a_documented_signature(module_name: str) -> None:
    module = importlib.import_module(module_name)
    things = [(name, getattr(module, name)) for name in module.__all__]
    problems = [text for name, thing in things if is_code(thing) for text in problems_with(name, thing)]
    assert not problems, "\n".join(problems)

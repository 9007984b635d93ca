"""One page per public module, written to ``reference/api`` before a build, and roles that find every public name."""

import importlib
import inspect
import pkgutil
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import ctta

FOLDER = Path(__file__).parents[1] / "reference" / "api"
PACKAGE = Path(ctta.__file__).parent
METHODS = {cls.__name__ for cls in ctta.METHODS.values()}
_COLON = "\ue000"  # a character of private use


def list_modules() -> list[ModuleType]:
    """Return ``ctta`` and every package below it that declares public names."""
    names = [module.name for module in pkgutil.walk_packages(ctta.__path__, "ctta.")]
    modules = [importlib.import_module(name) for name in names if name != "ctta.__main__"]
    return [ctta, *(each for each in modules if hasattr(each, "__all__") and each.__name__ != "ctta.methods")]


def find_documented_names() -> dict[int, str]:
    """Return under which name the site documents an object, by its id: the shortest one, so that there is one page."""
    found: dict[int, str] = {}
    for module in list_modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found.setdefault(id(thing), f"{module.__name__}.{name}")
    return found


def render_page(module: ModuleType, documented: dict[int, str]) -> str:
    """Return the page of a module in reStructuredText, the language of docstrings."""
    title = module.__name__
    lines = [title, "=" * len(title), "", f".. automodule:: {title}", "   :no-members:"]
    lines += ["   :no-index:"] if title.partition(".")[2] in ctta.__all__ and not _is_module(title) else []
    lines += [""]
    elsewhere = []
    for name in module.__all__:
        thing, path = getattr(module, name), f"{title}.{name}"
        if isinstance(thing, ModuleType):
            continue
        home = documented.get(id(thing), path)
        if home != path or (module is ctta and name in METHODS):
            elsewhere.append(f":py:obj:`{home}`")
        elif inspect.isclass(thing):
            lines += [f".. autoclass:: {path}", "   :members:"]
            lines += ["   :inherited-members: Module"] if name == "AdaptiveModel" else []
            lines += [""]
        elif inspect.isfunction(thing):
            lines += [f".. autofunction:: {path}", ""]
        else:
            lines += [f".. py:data:: {path}", "", *(f"   {line}" for line in find_comment(name, thing)), ""]
    if elsewhere:
        lines += ["Also here, and described elsewhere: " + ", ".join(elsewhere) + ".", ""]
    return "\n".join(lines)


def _is_module(title: str) -> bool:
    """Return whether the name of a module is not also that of a function, which has the name in the index then."""
    return isinstance(getattr(ctta, title.partition(".")[2], None), ModuleType)


def find_comment(name: str, constant: Any) -> list[str]:
    """Return the lines of the comment ``#:`` above a constant, in the module that defines it."""
    pattern = re.compile(rf"((?:^#:.*\n)+)^{name}\b *[:=]", re.MULTILINE)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if getattr(sys.modules.get(module), name, None) is constant and (found := pattern.search(path.read_text())):
            return [line.removeprefix("#:").strip() for line in found[1].splitlines()]
    return []


def protect_colon(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Hide the colons in the first line of an attribute's docstring: napoleon takes what is before one for a type."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = lines[0].replace(": ", _COLON)


def restore_colon(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Put the colons back, after napoleon."""
    lines[:] = [line.replace(_COLON, ": ") for line in lines]


def write_pages(app: Sphinx) -> None:
    """Write the pages anew, those that have changed only, so that a second build is quick."""
    documented, pages = find_documented_names(), {}
    for module in list_modules():
        pages[FOLDER / f"{module.__name__}.rst"] = render_page(module, documented)
    if FOLDER.exists() and {*FOLDER.iterdir()} != pages.keys():
        shutil.rmtree(FOLDER)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def resolve_reference(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Node | None:
    """Resolve a role that names an object of the package by another of its names, or one that has no page.

    A name that exists nowhere is left to Sphinx, which warns.
    """
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    module, cls = node.get("py:module"), node.get("py:class")
    candidates = [target, f"{module}.{target}", f"{module}.{cls}.{target}"]
    for name in candidates:
        if (thing := _import(name)) is None:
            continue
        domain = env.domains.python_domain
        if (home := find_documented_names().get(id(thing))) and home in domain.objects:
            entry = domain.objects[home]
            uri = app.builder.get_relative_uri(node["refdoc"], entry.docname) + f"#{entry.node_id}"
            return nodes.reference("", "", text, internal=True, refuri=uri)
        return text
    return None


def _import(name: str) -> Any:
    """Return the object of a dotted name below ``ctta``; None if there is none."""
    parts = name.split(".")
    if parts[0] != "ctta":
        return None
    for number in range(len(parts), 0, -1):  # a function may hide the module of its name
        if module := sys.modules.get(".".join(parts[:number])):
            found: Any = module
            for part in parts[number:]:
                found = getattr(found, part, None) or getattr(found, "__annotations__", {}).get(part)
            if found is not None:
                return found
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages when a build begins."""
    app.connect("builder-inited", write_pages)
    app.connect("missing-reference", resolve_reference)
    app.connect("autodoc-process-docstring", protect_colon, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", restore_colon, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

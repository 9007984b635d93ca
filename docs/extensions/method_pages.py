"""What pages of methods take from the code and from measurements, as directives such as ``{method-facts} tent``."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from repository_links import rewrite_links
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

from ctta import AdaptiveModel
from ctta.core.hyperparameters import format_value
from ctta.core.registry import NamedMethod, list_methods, resolve_method

DOCS = Path(__file__).parents[1]
PUBLISHED = DOCS / "reference" / "methods" / "published.json"
MEASURED = DOCS / "results" / "all-methods" / "numbers.json"
NONE = "\N{EN DASH}"
DATASETS = ("CIFAR10-C", "CIFAR100-C", "ImageNet-C")


def list_built_in() -> list[NamedMethod]:
    """Return the methods of the library without their presets, in the order of ``ctta methods``."""
    found = [resolve_method(name) for name in list_methods()]
    return [each for each in found if not each.preset and each.method.__module__.startswith("ctta.methods.")]


def describe_facts(found: NamedMethod) -> str:
    """Return what a method is, costs and needs, in Markdown."""
    info = found.info
    summary = _to_markdown((inspect.getdoc(found.method) or "").partition("\n\n")[0])
    needs = ["statistics of source images"] if info.needs_source_data else []
    needs += ["a vision transformer with one class token"] if info.needs_vit else []
    needs += [] if info.labels_pixels else ["whole images: it does not label pixels"]
    arguments = ", source_stats=stats" if info.needs_source_data else ""
    rows = {
        "paper": info.paper or NONE,
        "trains": info.trains,
        "passes per step": f"{info.forward_passes} forward, {info.backward_passes} backward",
        "copies of the network": str(info.num_networks),
        "needs": "; ".join(needs) or "nothing but the network",
        "source": f"[{Path(inspect.getfile(found.method)).name}](../../../{_find_source(found)})",
    }
    if info.is_episodic:
        rows["forgets"] = "what it learned, after every image"
    return "\n".join(
        [
            summary,
            "",
            f'`ctta.adapt(net, "{found.name}"{arguments})` or `ctta.{found.method.__name__}(net{arguments})`; '
            f"on the command line `--method {found.name}`.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {text} |" for name, text in rows.items()),
        ]
    )


def describe_numbers(name: str) -> str:
    """Return the published numbers of a method, and its row of the embedded benchmark, in Markdown."""
    published = json.loads(PUBLISHED.read_text())
    rows = [row for row in published["rows"] if row["method"] == name]
    lines = ["## Published numbers", ""]
    if rows:
        lines += [f"| | {' | '.join(DATASETS)} | source |", "|---|---:|---:|---:|---|"]
        for row in rows:
            cells = " | ".join(str(row.get(dataset, NONE)) for dataset in DATASETS)
            lines.append(f"| {row['what']} | {cells} | {published['sources'][row['source']]} |")
    else:
        lines.append("None are quoted: none were found in a primary source with the protocols of this library.")
    lines += ["", "## Measured here", ""]
    measured = json.loads(MEASURED.read_text())
    if name in measured:
        lines.append(_describe_measured(measured[name], measured["source"], measured["bn_stats"]))
    else:
        lines.append("Not on the embedded benchmark.")
    return "\n".join(lines)


def _describe_measured(row: dict[str, Any], source: dict[str, Any], bn_stats: dict[str, Any]) -> str:
    deviation = f" ± {row['deviation']}" if row["deviation"] is not None else ""
    several = len(row["seeds"]) > 1
    seeds = f"{len(row['seeds'])} seeds" if several else "one seed" if row["seeds"][0] else "deterministic"
    return (
        f"{row['error']:.2f}{deviation} % error on the [embedded benchmark](../../results/all-methods/README.md) "
        f"(15 corruptions, 2,000 images each, batches of 200; {seeds}), with a calibration error of "
        f"{row['calibration_error']:.1f} % and {row['milliseconds_per_image']:.1f} ms of one core per image. "
        f"Source has {source['error']:.2f} %, BN Stats Adapt {bn_stats['error']:.2f} %."
    )


def describe_table(kind: str) -> str:
    """Return a table of methods in Markdown: of one kind, the names of which are given."""
    lines = ["| method | paper | trains | passes | needs |", "|---|---|---|---|---|"]
    for name in kind.split():
        found = resolve_method(name)
        info = found.info
        needs = [
            text
            for is_needed, text in (
                (info.needs_source_data, "source statistics"),
                (info.needs_vit, "a ViT"),
                (not info.labels_pixels, "whole images"),
            )
            if is_needed
        ]
        lines.append(
            f"| [`{name}`]({name}.md) {info.title} | {info.paper or NONE} | {info.trains} "
            f"| {info.forward_passes} + {info.backward_passes} | {', '.join(needs) or NONE} |"
        )
    return "\n".join(lines)


def _find_source(found: NamedMethod) -> str:
    return f"src/{found.method.__module__.replace('.', '/')}.py"


def _to_markdown(text: str) -> str:
    """Return a docstring's first paragraph without its roles."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`")


class _Text(str):
    """A default value as one would type it."""

    def __repr__(self) -> str:
        return str(self)


def write_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Return the signature of a method with its defaults as one would type them."""
    if not (what == "class" and issubclass(thing, AdaptiveModel)):
        return None
    shown = inspect.signature(thing)
    parameters = [
        each if each.default is each.empty else each.replace(default=_Text(format_value(each.default)))
        for each in shown.parameters.values()
    ]
    shown = shown.replace(parameters=parameters, return_annotation=shown.empty)
    return stringify_signature(shown, unqualified_typehints=True), None


class MethodFacts(SphinxDirective):
    """Writes what the code says about a method."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        page = Path(self.env.doc2path(self.env.docname))
        return self.parse_text_to_nodes(rewrite_links(describe_facts(resolve_method(self.arguments[0])), page))


class MethodNumbers(SphinxDirective):
    """Writes the numbers of a method and its class."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        found = resolve_method(self.arguments[0])
        text = f"""{describe_numbers(found.name)}

## Reference

```{{eval-rst}}
.. autoclass:: ctta.{found.method.__name__}
   :members: {", ".join(name for name in vars(found.method) if _is_own(found.method, name))}
```
"""
        self.env.note_dependency(str(PUBLISHED))
        self.env.note_dependency(str(MEASURED))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class MethodTable(SphinxDirective):
    """Writes a table of the methods that are named."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        return self.parse_text_to_nodes(describe_table(" ".join(self.content)))


def _is_own(method: type, name: str) -> bool:
    """Return whether a method has a public member of its own, such as a preset; steps are those of the contract."""
    member = vars(method)[name]
    is_callable = callable(member) or isinstance(member, classmethod | property)
    return is_callable and not name.startswith("_") and name not in ("adapt_step", "predict_step", "forward")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.connect("autodoc-process-signature", write_signature)
    app.add_directive("method-facts", MethodFacts)
    app.add_directive("method-numbers", MethodNumbers)
    app.add_directive("method-table", MethodTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

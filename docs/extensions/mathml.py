"""Equations as MathML, which browsers draw themselves: no script, no font and no other server is needed."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def convert(text: str, node: nodes.Node, *, as_block: bool) -> str:
    """Return an equation as MathML; one that cannot be converted is a warning."""
    try:
        return str(tex2mathml(text, as_block=as_block))
    except MathError as error:
        logger.warning("equation %r: %s", text, error, location=node)
        return ""


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write an equation within a line."""
    translator.body.append(convert(node.astext(), node, as_block=False))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """Write an equation on a line of its own."""
    translator.body.append(convert(node.astext(), node, as_block=True))
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("config-inited", lambda _, config: setattr(config, "html_math_renderer", "mathml"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

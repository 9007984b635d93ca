"""Links from a page into the repository: relative on GitHub, and to GitHub on the site."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

DOCS = Path(__file__).parents[1]
REPOSITORY = "https://github.com/ctta-project/ctta"
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
logger = logging.getLogger(__name__)


def rewrite_links(text: str, page: Path) -> str:
    """Return a page with links to folders of docs leading to their README, and other files of the repository to GitHub.

    Args:
        text: Markdown.
        page: Where it is stored, below ``docs``.
    """

    def rewrite(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = (page.parent / target).resolve()
        if not path.exists():
            logger.warning("%s: there is no %s", page, target, location=str(page))
        elif not path.is_relative_to(DOCS):
            kind = "tree" if path.is_dir() else "blob"
            return f"[{label}]({REPOSITORY}/{kind}/main/{path.relative_to(DOCS.parent)}{anchor})"
        elif path.is_dir() and (path / "README.md").exists():
            return f"[{label}]({target.rstrip('/')}/README.md{anchor})"
        elif path.suffix not in (".md", ".png", ".svg", ".webp"):
            kind = "tree" if path.is_dir() else "blob"
            return f"[{label}]({REPOSITORY}/{kind}/main/{path.relative_to(DOCS.parent)}{anchor})"
        return match[0]

    return _LINK.sub(rewrite, text)


def _read_source(app: Sphinx, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md" and page.is_relative_to(DOCS) and page.parent.name != "api":
        content[0] = rewrite_links(content[0], page)


def setup(app: Sphinx) -> dict[str, Any]:
    """Rewrite the links of every page when it is read."""
    app.connect("source-read", _read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

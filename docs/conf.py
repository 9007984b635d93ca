"""How Sphinx builds the site: ``make docs``, warnings as errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import ctta

project = "ctta"
author = "The ctta maintainers"
copyright = f"2026, {author}"
version = release = ctta.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    # Own extensions, in docs/extensions.
    "api_pages",
    "command_pages",
    "mathml",
    "method_pages",
    "repository_links",
]
exclude_patterns = ["_build", "extensions"]
suppress_warnings = ["myst.header"]  # reports start their sections at any level

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

highlight_language = "text"  # blocks without a language
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
nitpicky = True  # a role that names nothing is an error; api_pages knows the rest of the package
nitpick_ignore_regex = [(r"py:.*", r"(?!ctta\b).*")]  # types of torch, numpy and Python, which are not on this site

html_theme = "furo"
html_title = f"ctta {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/ctta-project/ctta/",
    "source_branch": "main",
    "source_directory": "docs/",
}
# Links to files of this repository, which repository_links has found.
linkcheck_ignore = [r"https://github.com/ctta-project/ctta/(blob|tree|edit)/main/.*"]
copybutton_exclude = ".linenos, .gp, .go"

"""Sphinx settings of the documentation site; `scripts/docs --serve` builds it."""

from pathlib import Path

from ftkit import __version__

project = "ftkit"
author = "The ftkit authors"
project_copyright = "the ftkit authors"
release = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links such as page.md#a-heading, as GitHub has them

html_theme = "furo"
html_title = "ftkit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "search_scorer.js")
html_copy_source = False
html_show_sourcelink = False

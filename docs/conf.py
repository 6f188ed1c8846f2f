"""Settings of the documentation site, with an API reference made from the docstrings. It builds without a network."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import domino_jax  # noqa: E402

project = "domino_jax"
author = "The domino_jax authors"
version = release = domino_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.apidoc",
    "sphinx_copybutton",
    "sphinx_llms_txt",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "domino_jax"
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# The stored outputs of the notebook are shown; a slow test runs it.
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # no widgets, and no scripts from another server
copybutton_prompt_text = "$ "

# One page per folder of the package, written into docs/api at each build.
apidoc_modules = [
    {
        "path": "../domino_jax",
        "destination": "api",
        "separate_modules": False,
        "module_first": True,
        "automodule_options": {"members"},
    }
]
# llms.txt and llms-full.txt, the pages as language models read them.
llms_txt_exclude = ["api/*"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Two modules may name the same class; a docstring's reference to it needs no warning.
suppress_warnings = ["ref.python"]

QUOTED = re.compile(r"(``.+?``|`[^`]+`)")
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes):$")


def show_as_written(_app, _what, _name, _object, _options, lines: list[str]) -> None:
    """Docstrings are plain text with Google's sections: * and | stand for themselves, indented layout is kept."""
    shown: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        text, sections = _split_at_section(paragraph.split("\n"))
        if _has_layout(text):
            shown += ["::", "", *(f"    {line}" for line in text), ""]
        else:
            shown += [*map(_escaped, text), ""]
        shown += [*map(_escaped, sections), ""] if sections else []
    lines[:] = shown


def _split_at_section(lines: list[str]) -> tuple[list[str], list[str]]:
    starts = [index for index, line in enumerate(lines) if SECTION.match(line)]
    first = starts[0] if starts else len(lines)
    return lines[:first], lines[first:]


def _has_layout(lines: list[str]) -> bool:
    return any(line.startswith(" ") for line in lines) and not re.match(r"- |\d\. ", lines[0])


def _escaped(line: str) -> str:
    parts = QUOTED.split(line)
    parts[::2] = [re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [part if part.startswith("``") else f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


def setup(app) -> None:
    app.connect("autodoc-process-docstring", show_as_written, priority=400)  # before napoleon reads the sections

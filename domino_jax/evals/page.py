"""Self-contained pages with tables and plots, from the template page.html: report.html of a run and others."""

import base64
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from domino_jax.evals import tables

TEMPLATE = Path(__file__).with_name("page.html")


def render_page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page of a decoding's report.

    Args:
        pictures: PNG by file name.
    """
    return page_of(
        heading="Decoding report",
        facts=tables.origins(report),
        versions=report["versions"],
        title=tables.title(report),
        rows=tables.rows_of(report),
        notes=tables.notes_of(report),
        sections=tables.sections(report),
        pictures=pictures,
    )


def page_of(
    *, facts: Mapping[str, str], versions: Mapping[str, str], pictures: Mapping[str, bytes], **parts: Any
) -> str:
    """The HTML text of a page; everything that comes out of a file or a model is escaped.

    Args:
        parts: of the template: heading, title, rows of the first table, notes, and sections, each of a heading, a
            sentence and the rows of a table.
    """
    environment = jinja2.Environment(autoescape=True, finalize=printable)
    facts = {**facts, "versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    encoded = {name: base64.b64encode(data).decode() for name, data in pictures.items()}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(**parts, facts=facts, pictures=encoded)


def printable(value: Any) -> Any:
    """A text with control characters, which HTML does not allow, replaced by U+FFFD; line breaks and tabs stay."""
    if type(value) is not str:  # also HTML that jinja has made
        return value
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs") else "\ufffd" for letter in value
    )

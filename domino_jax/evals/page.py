"""report.html: one self-contained page of a run, with its tables and plots."""

import base64
import importlib.resources
import string
import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from domino_jax.evals import tables

SCALE = 0.47  # CSS pixels per pixel of a plot: two that are 7 inches wide fill the page
TEMPLATE = string.Template(importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


def render_page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The HTML text of a report.

    Args:
        pictures: PNG by file name.
    """
    kind = " (simulated)" if report["simulated"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    facts = {**tables.origins(report), "versions": versions}
    notes = "".join(f"<li>{as_html(note)}</li>" for note in tables.notes_of(report))
    parts = ["<h2>Figures</h2>", _table(tables.rows_of(report)), f'<ul class="notes">{notes}</ul>']
    for heading, note, rows in tables.sections(report):
        parts += [f"<h2>{as_html(heading)}</h2>", f'<p class="soft">{as_html(note)}</p>' * bool(note), _table(rows)]
    if pictures:
        images = "".join(_image(name, data) for name, data in pictures.items())
        parts += ["<h2>Plots</h2>", f'<div class="plots">{images}</div>']
    return TEMPLATE.substitute(
        title=as_html(f"Decoding report: {facts['target']}"),
        heading=f"Decoding report{kind}",
        subtitle=as_html(tables.title(report)),
        facts="".join(f"<dt>{name}</dt><dd>{as_html(str(value))}</dd>" for name, value in facts.items()),
        body="\n".join(parts),
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    heading, *body = rows
    cells = "".join(f'<th scope="col">{as_html(cell)}</th>' for cell in heading)
    lines = "".join(f"<tr>{''.join(f'<td>{as_html(cell)}</td>' for cell in row)}</tr>\n" for row in body)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _image(name: str, data: bytes) -> str:
    """All pictures have one scale, so that their letters are equally large and two narrow pictures fit side by side."""
    text, width = as_html(Path(name).stem.replace("_", " ")), int.from_bytes(data[16:20], "big")  # in a PNG's header
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<img alt="{text}" width="{width * SCALE:.0f}" src="{source}">'


def as_html(text: str) -> str:
    """The text with everything escaped that has a meaning in HTML, also in an attribute."""
    return escape(printable(text))


def printable(text: str) -> str:
    """The text with control characters, which HTML does not allow, replaced by U+FFFD; line breaks and tabs stay."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs") else "\ufffd" for letter in text
    )

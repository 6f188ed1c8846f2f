"""report.html: one self-contained page of a run, with its tables and plots and example answers round by round."""

import base64
import importlib.resources
import string
import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from domino_jax.decoding.text_stream import TextStream
from domino_jax.evals import tables
from domino_jax.evals.examples import Example, ShownAnswer
from domino_jax.evals.prompts import TextCodec

COLOURS = 6  # of rounds, in page.html
SCALE = 0.47  # CSS pixels per pixel of a plot: two that are 7 inches wide fill the page
TEMPLATE = string.Template(importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
LEGEND = """<p class="soft">Tokens of one round have one colour. The target checks the drafts of a round in one pass:
<span class="t r0">accepted drafts</span> are followed by one
<span class="t r0 bonus">bonus token</span>, the target's choice. The <span class="t first">first token</span> comes
from the prefill.</p>"""


def render_page(
    report: Mapping[str, Any], pictures: Mapping[str, bytes], examples: Sequence[Example], codec: TextCodec
) -> str:
    """The HTML text of a report.

    Args:
        pictures: PNG by file name.
    """
    kind = " (simulated)" if report["simulated"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    facts = {**tables.origins(report), "versions": versions}
    notes = "".join(f"<li>{as_html(note)}</li>" for note in tables.notes_of(report))
    parts = ["<h2>Figures</h2>", _table(tables.rows_of(report)), f'<ul class="notes">{notes}</ul>']
    if examples:
        parts += ["<h2>Answers, round by round</h2>", _examples(report, examples, codec)]
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


def _examples(report: Mapping[str, Any], examples: Sequence[Example], codec: TextCodec) -> str:
    warning = f'<p class="warning">{as_html(tables.simulated(report))}</p>' if report["simulated"] else ""
    return LEGEND + warning + "".join(_example(example, codec) for example in examples)


def _example(example: Example, codec: TextCodec) -> str:
    prompt = example.prompt
    text = example.text if example.text is not None else " ".join(map(str, prompt.token_ids))
    answers = "".join(_answer(answer, codec) for answer in example.answers)
    summary = f"<summary>prompt, {len(prompt.token_ids)} tokens</summary>"
    details = f"<details>{summary}<pre>{as_html(text)}</pre></details>"
    return f"<article><h3>{as_html(prompt.id)}</h3>{details}{answers}</article>\n"


def _answer(answer: ShownAnswer, codec: TextCodec) -> str:
    tokens = 1 + sum(map(len, answer.rounds))
    figures = f"{tokens} tokens in {len(answer.rounds)} rounds"
    if answer.tau is not None:
        figures += f", τ {answer.tau:.2f}"
    spans = "".join(token_spans(answer, codec))
    return f'<h4>{as_html(answer.mode)} <small>{figures}</small></h4><p class="answer" dir="auto">{spans}</p>'


def token_spans(answer: ShownAnswer, codec: TextCodec) -> list[str]:
    """One <span> for each token of the answer, in order; their texts together are the answer's text."""
    text = TextStream(codec.tokenizer)
    spans = [_span(text.add([answer.first], last=not answer.rounds), "first")]
    for number, token_ids in enumerate(answer.rounds):
        for place, token in enumerate(token_ids):
            bonus = place == len(token_ids) - 1
            last = bonus and number == len(answer.rounds) - 1
            spans.append(_span(text.add([token], last), f"r{number % COLOURS}{' bonus' * bonus}"))
    return spans


def _span(text: str, kind: str) -> str:
    # A token without text is a special one, or a part of a character that the next token completes.
    kind += " newline" * (text.strip(" ").startswith("\n")) + " hidden" * (not text)
    return f'<span class="t {kind}">{as_html(text)}</span>'


def as_html(text: str) -> str:
    """The text with everything escaped that has a meaning in HTML, also in an attribute."""
    return escape(printable(text))


def printable(text: str) -> str:
    """The text with control characters, which HTML does not allow, replaced by U+FFFD; line breaks and tabs stay."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs") else "\ufffd" for letter in text
    )

"""How answers of the small tasks are compared with the right one: line by line, as JSON, or by their equations.

lines: line by line without trailing blanks, inside the first fenced block if there is one.  json: as parsed values.
equations: all equations "2 + 3 = 5" in order and the last number; the wording is free.
"""

import dataclasses
import json
import re

_FENCE = re.compile(r"```[a-z]*\n")
# Texts come from rows and models, so no pattern may backtrack: each number is tried once, from its first digit.
_EQUATION = re.compile(r"(?<!\d)(\d++) ([+*-]) (\d++) = (\d++)")


def fenced_block(text: str) -> str | None:
    """What the first fenced block holds; None without one that is closed."""
    opening = _FENCE.search(text)
    if opening is None:
        return None
    closing = text.find("\n```", opening.end())
    return None if closing < 0 else text[opening.end() : closing]


def _same_lines(text: str, answer: str) -> bool:
    return _lines(text) == _lines(answer)


def _lines(text: str) -> list[str]:
    code = fenced_block(text)
    return [line.rstrip() for line in (text if code is None else code).strip("\n").split("\n")]


def _same_json(text: str, answer: str) -> bool:
    try:
        return json.loads(text) == json.loads(answer)
    except (ValueError, RecursionError):  # no JSON, an int of thousands of digits, brackets without end
        return False


def _same_equations(text: str, answer: str) -> bool:
    equations = _EQUATION.findall(text)
    return (
        bool(equations)
        and equations == _EQUATION.findall(answer)
        and re.findall(r"\d+", text)[-1] == re.findall(r"\d+", answer)[-1]
    )


COMPARISONS = {"lines": _same_lines, "json": _same_json, "equations": _same_equations}


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right answer and how an answer is compared with it, a key of COMPARISONS."""

    compare: str
    answer: str

    def accepts(self, text: str) -> bool:
        """text: the assistant's turn without special tokens."""
        return COMPARISONS[self.compare](text.strip(), self.answer)

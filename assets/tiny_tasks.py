"""The tasks of the tiny target: functions of the standard library harvested from source, and prompts about them."""

import ast
import keyword
import pathlib
import random
import re
import sysconfig
from dataclasses import dataclass

from assets.tiny_answers import first_function, function_parameters

# Packages that are not ordinary library code: tests are harvested for training only, the others not at all.
SKIPPED = {"site-packages", "__pycache__", "lib2to3", "pydoc_data", "turtledemo", "ensurepip"}
TEST_FOLDERS = {"test", "tests", "idle_test"}

# How often a kind is drawn for training: the harder ones more. Measured after 2.1 M tokens of equal shares: rename 6 %
# right, arithmetic none, stub 72 %, comment 83 %.
SHARES = {
    "parameters": 2,
    "rename": 3,
    "number": 1,
    "hint": 1,
    "comment": 1,
    "stub": 1,
    "method": 1,
    "arithmetic": 3,
}

# New names for a rename; each is one token of the tokenizer with a space before it and without.
NAMES = (
    "value item result data node index name text line path key source target size start mode message part event server "
    "file root base args attr bytes code col command conn context filename frame func iter lines main method module "
    "next obj object option other out output parser place res sock socket sub tag test time trace url version"
).split()
CLASS_NAMES = (
    "Shape Reader Writer Parser Worker Server Client Table Buffer Record Node Tree Queue Stack Cache Loader Printer "
    "Counter Filter Builder Handler Manager Runner Scanner Helper Window Editor Monitor Router Storage"
).split()
HINTS = "int str float bool bytes list dict set tuple object".split()
COMMENTS = (
    "checked by hand;part of the public interface;kept for old callers;see the tests for an example;this may be slow;"
    "called once at start;not safe for threads;written for the next release;moved here from the main module;"
    "used by the command line;keep in step with the manual;the caller must hold the lock;returns early on purpose;"
    "copied from the first version;reviewed last spring;small but important;works on every platform;do not call twice"
).split(";")

WORDINGS = {
    "parameters": (
        "List the parameters of this function as JSON.",
        "Give the parameters of the function below as a JSON object.",
        "Which parameters does this function take? Answer in JSON.",
    ),
    "rename": (
        "Rename `{old}` to `{new}` in this function.",
        "Write this function again with `{new}` in place of `{old}`.",
        "In the function below, call `{old}` `{new}` instead.",
    ),
    "number": (
        "Number the lines of this function.",
        "Repeat the function below with line numbers.",
        "Put a number in front of every line of this code.",
    ),
    "hint parameter": (
        "Add the type hint `{hint}` to the parameter `{parameter}`.",
        "Repeat this function, with `{parameter}` annotated as `{hint}`.",
        "Annotate `{parameter}` with `{hint}` in this function.",
    ),
    "hint return": (
        "Add the return type `{hint}` to this function.",
        "Repeat this function, annotated to return `{hint}`.",
        "This function returns `{hint}`. Add the annotation.",
    ),
    "comment": (
        "Put the comment `{comment}` above this function.",
        "Repeat the function below under the comment `{comment}`.",
        "Add a first line with the comment `{comment}` to this code.",
    ),
    "stub": (
        "Write a stub with the signature of this function.",
        "Keep only the signature of the function below and raise NotImplementedError.",
        "Turn this function into a stub that is not implemented.",
    ),
    "method": (
        "Make this function a method of the class `{class_name}`.",
        "Put the function below into a class named `{class_name}`.",
        "Write the class `{class_name}` with this function as its method.",
    ),
}


@dataclass(frozen=True)
class Function:
    """A short function: the file and line it comes from, and its dedented source without the docstring."""

    origin: str
    code: str


def _without_docstring(node: ast.FunctionDef, lines: list[str]) -> str | None:
    """Dedented source of a function; None when nothing is left or the layout is unusual."""
    body = node.body
    first = node.lineno - 1
    dropped: range = range(0)
    if ast.get_docstring(node, clean=False) is not None:
        dropped = range(body[0].lineno - 1, body[0].end_lineno)
        body = body[1:]
    if not body or body[0].lineno == node.lineno:
        return None
    kept = [lines[i] for i in range(first, node.end_lineno) if i not in dropped and lines[i].strip()]
    indent = len(kept[0]) - len(kept[0].lstrip())
    if any(line[:indent].strip() for line in kept):
        return None
    return "\n".join(line[indent:].rstrip() for line in kept)


def _acceptable(code: str) -> bool:
    """Plain ASCII, one header line, 2 to 10 lines, no longer than a small model copies without fail."""
    lines = code.split("\n")
    header_is_whole = re.fullmatch(r"def \w+\(.*\):", lines[0]) is not None
    plain = code.isascii() and not any(mark in code for mark in ("```", "\t", "\\", "#", '"""', "'''"))
    return header_is_whole and plain and 2 <= len(lines) <= 10 and 80 <= len(code) <= 300 and max(map(len, lines)) <= 84


def harvest(include_tests: bool = False) -> list[Function]:
    """All acceptable functions of this Python's standard library, once each, ordered by origin."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Function] = {}
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if parts & SKIPPED or (bool(parts & TEST_FOLDERS) and not include_tests):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = text.split("\n")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            code = _without_docstring(node, lines)
            if code is None or not _acceptable(code) or code in found:
                continue
            try:
                first_function(code)
            except (SyntaxError, ValueError):
                continue
            origin = f"{path.relative_to(root).as_posix()}:{node.lineno}"
            found[code] = Function(origin, code)
    return list(found.values())


def renamable(code: str) -> list[str]:
    """Variables that stand at least twice and never as an attribute or in a text; short words only."""
    node = first_function(code)
    names = {arg.arg for arg in node.args.args}
    names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    out = []
    for name in sorted(names):
        uses = len(re.findall(rf"\b{name}\b", code))
        inside_text = re.search(rf"""(\.{name}\b)|(['"][^'"]*\b{name}\b[^'"]*['"])|(\b{name}=)""", code)
        if uses >= 2 and name.isalpha() and len(name) <= 6 and name not in ("self", "cls", "_") and not inside_text:
            out.append(name)
    return out


def _values(kind: str, code: str, random_: random.Random) -> dict | None:
    """The values of `answer_check` for one task, or None when the function does not suit the kind."""
    parameters = function_parameters(code)
    if kind in ("parameters", "stub"):
        quotes = any(mark in (default or "") for _, default in parameters for mark in "\"'")
        return None if len(parameters) < 2 or quotes else {}
    if kind == "rename":
        function = first_function(code).name
        once = len(re.findall(rf"\b{function}\b", code)) == 1
        old = [function] if once and random_.random() < 0.5 else renamable(code)
        new = [name for name in NAMES if not re.search(rf"\b{name}\b", code)]
        return {"old": random_.choice(old), "new": random_.choice(new)} if old else None
    if kind == "hint":
        bare = [n for n, d in parameters if d is None and n.isidentifier() and n not in ("self", "cls")]
        header = code.partition("\n")[0]
        if ":" in header[:-1] or not bare and random_.random() < 0.5:
            return None
        parameter = random_.choice(bare) if bare and random_.random() < 0.6 else None
        return {"parameter": parameter, "hint": random_.choice(HINTS)}
    if kind == "comment":
        return {"comment": random_.choice(COMMENTS)}
    if kind == "method":
        return {"class_name": random_.choice(CLASS_NAMES)}
    return {}


def code_task(kind: str, function: Function, random_: random.Random) -> dict | None:
    """One row (without id) that asks for `kind` about a function; None when they do not fit."""
    check = _values(kind, function.code, random_)
    if check is None or any(keyword.iskeyword(str(value)) for value in check.values()):
        return None
    wording = kind
    if kind == "hint":
        wording = "hint return" if check["parameter"] is None else "hint parameter"
    ask = random_.choice(WORDINGS[wording]).format(**check)
    content = f"{ask}\n```python\n{function.code}\n```"
    return {"kind": kind, "messages": [{"role": "user", "content": content}], "answer_check": check}


PEOPLE = [(n, "She") for n in "Anna Clara Emma Julia Laura Mary Nina Rosa Sarah Helen".split()]
PEOPLE += [(n, "He") for n in "Ben David Frank George Henry Jack Leo Mark Paul Tom".split()]
THINGS = "apples books coins stamps cards pencils marbles shells stones tickets eggs plums".split()
GAINS = ("buys {} more", "finds {} more", "wins {} more", "gets {} from a friend", "picks up {} more")
LOSSES = ("gives {} away", "loses {}", "sells {}", "breaks {}", "gives {} to a friend")


def arithmetic_task(random_: random.Random) -> dict:
    """A word problem of three to five steps with amounts of one digit and sums of two."""
    (name, pronoun), things = random_.choice(PEOPLE), random_.choice(THINGS)
    total = start = random_.randint(10, 80)
    steps = []
    for _ in range(random_.randint(3, 5)):
        gain = random_.random() < 0.5
        if total < 10 or total > 90:
            gain = total < 10
        amount = random_.randint(2, 9)
        steps.append(["+" if gain else "-", amount, random_.choice(GAINS if gain else LOSSES).format(amount)])
        total += amount if gain else -amount
    story = " ".join([f"{name} has {start} {things}."] + [f"{pronoun} {words}." for _, _, words in steps])
    ask = random_.choice(
        (
            f"How many {things} does {name} have now?",
            f"How many {things} are left? Show every step.",
            f"Work out, step by step, how many {things} {name} has.",
        )
    )
    check = {"name": name, "things": things, "pronoun": pronoun, "start": start, "steps": steps}
    return {"kind": "arithmetic", "messages": [{"role": "user", "content": f"{story} {ask}"}], "answer_check": check}


def any_task(functions: list[Function], random_: random.Random) -> dict:
    """A task of a random kind, by SHARES, about a random function."""
    kind = random_.choices(list(SHARES), list(SHARES.values()))[0]
    if kind == "arithmetic":
        return arithmetic_task(random_)
    while True:
        row = code_task(kind, random_.choice(functions), random_)
        if row is not None:
            return row

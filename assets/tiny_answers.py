"""The right answers of the small chat tasks of assets/tiny_qwen3.

A task row holds the prompt (`messages`), its `kind`, and `answer_check`, the values that the kind needs. The code of a
task is read from the fenced block of the prompt. Every kind has one deterministic answer, which `expected_answer`
writes; `reference` says how the answers of a model are compared with it.
"""

import ast
import json
import re

from assets.references import fenced_block

COMPARISONS = {"parameters": "json", "arithmetic": "equations"}  # code is compared by lines
KINDS = ("parameters", "rename", "number", "hint", "comment", "stub", "method", "arithmetic")


def prompt_code(row: dict) -> str:
    """The code inside the fenced block of the prompt."""
    code = fenced_block(row["messages"][-1]["content"])
    if code is None:
        raise ValueError("no fenced code in the prompt")
    return code


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def first_function(code: str) -> ast.FunctionDef:
    """The function definition that a snippet consists of."""
    node = ast.parse(code).body[0]
    if not isinstance(node, ast.FunctionDef):
        raise ValueError("the snippet does not start with a plain function")
    return node


def function_parameters(code: str) -> list[tuple[str, str | None]]:
    """(name, default as source or None) of every plain parameter, in order; starred parameters carry their stars."""
    arguments = first_function(code).args
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    out = [(arg.arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        out.append(("*" + arguments.vararg.arg, None))
    out += [(arg.arg, default) for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        out.append(("**" + arguments.kwarg.arg, None))
    return [(name, None if node is None else ast.unparse(node)) for name, node in out]


def parameters_json(code: str) -> str:
    """One JSON object: the function's name, its parameters in order, and the defaults as source text."""
    parameters = function_parameters(code)
    return json.dumps(
        {
            "function": first_function(code).name,
            "parameters": [name for name, _ in parameters],
            "defaults": {name: default for name, default in parameters if default is not None},
        }
    )


def renamed(code: str, old: str, new: str) -> str:
    """The code with the name `old` replaced wherever it is a whole word."""
    return re.sub(rf"\b{_name(old)}\b", lambda match: new, code)


def _name(text: str) -> str:
    """The text, which has to be a name of Python's, with stars in front or without, as a pattern."""
    if not text.lstrip("*").isidentifier():
        raise ValueError(f"{text[:40]!r} is not a name")
    return re.escape(text)


def numbered(code: str) -> str:
    return "\n".join(f"{i}: {line}" for i, line in enumerate(code.split("\n"), 1))


def hinted(code: str, parameter: str | None, hint: str) -> str:
    """The code with a type hint on one parameter of its one-line header, or on the return when `parameter` is None."""
    header, _, body = code.partition("\n")
    if parameter is None:
        header = re.sub(r"\):$", lambda match: f") -> {hint}:", header)
    else:
        pattern = rf"(?<=[(\s]){_name(parameter)}(?=[,)])"
        header = re.sub(pattern, lambda match: f"{parameter}: {hint}", header, count=1)
    return f"{header}\n{body}"


def stub(code: str) -> str:
    """The same header over a body that only raises."""
    return f'{code.partition(chr(10))[0]}\n    raise NotImplementedError("{first_function(code).name}")'


def method(code: str, class_name: str) -> str:
    """The function as the only method of a class."""
    return f"class {class_name}:\n" + "\n".join("    " + line for line in code.split("\n"))


def solution(check: dict) -> str:
    """The worked solution of an arithmetic problem: one line with a running sum for each step."""
    name, things, pronoun = check["name"], check["things"], check["pronoun"]
    total = check["start"]
    lines = [f"{name} starts with {total} {things}."]
    for sign, amount, words in check["steps"]:
        after = total + amount if sign == "+" else total - amount
        lines.append(f"{pronoun} {words}: {total} {sign} {amount} = {after}.")
        total = after
    lines.append(f"{name} has {total} {things}.")
    return "\n".join(lines)


def expected_answer(row: dict) -> str:
    """The one right answer of a task, as the corpus writes it."""
    kind, check = row["kind"], row["answer_check"]
    if kind == "arithmetic":
        return solution(check)
    code = prompt_code(row)
    if kind == "parameters":
        return parameters_json(code)
    made = {
        "rename": lambda: renamed(code, check["old"], check["new"]),
        "number": lambda: numbered(code),
        "hint": lambda: hinted(code, check["parameter"], check["hint"]),
        "comment": lambda: f"# {check['comment']}\n{code}",
        "stub": lambda: stub(code),
        "method": lambda: method(code, check["class_name"]),
    }
    if kind not in made:
        raise ValueError(f"unknown task kind {kind!r}; known: {', '.join(KINDS)}")
    return fenced(made[kind]())


def reference(row: dict) -> dict[str, str]:
    """The `reference` of a prompt row (assets/references.py)."""
    return {"compare": COMPARISONS.get(row["kind"], "lines"), "answer": expected_answer(row)}

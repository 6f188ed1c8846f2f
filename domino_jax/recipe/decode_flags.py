"""Flags and keys of `decode` of which one would be ignored: they are refused before anything is loaded."""

from collections.abc import Iterator

from domino_jax.recipe import cli
from domino_jax.runtime.errors import DominoError

# (two that exclude each other, why or what to change)
CONFLICTS = [
    ("--prompts", "--prompt", "decode the rows of a file or one text, not both"),
    ("decode.tasks", "--prompts", "decode tasks or prompts, not both"),
    ("decode.tasks", "--prompt", "decode tasks or prompts, not both"),
    *(
        ("--interactive", f"--{name}", f"a chat ignores --{name}; remove it")
        for name in ("output", "prompt", "prompts")
    ),
]


def check_flags(flags: cli.Flags) -> None:
    for problem in _problems(flags):
        raise DominoError(problem)


def _problems(flags: cli.Flags) -> Iterator[str]:
    decode = flags.config.decode
    values = {f"--{name}": getattr(flags, name) for name in ("prompt", "prompts", "interactive", "output")}
    values |= {f"decode.{name}": decode[name] for name in ("tasks", "concurrency")}
    if flags.prompt is not None and not flags.prompt.strip():
        yield "--prompt is empty; give it a text, or leave it out to decode the recipe's prompts."
    for first, second, change in CONFLICTS:
        if values[first] and values[second]:
            yield f"{first} and {second} are both given; {change}."
    shown = next((name for name in ("--interactive", "--prompt") if values[name]), None)
    if not flags.output and shown is None:
        yield "--output is missing (a folder for the report); without it give --prompt or --interactive."
    for name in ("decode.tasks", "decode.concurrency"):
        if values[name] and not flags.output:
            yield (
                f"config.{name} is {values[name]!r}, but {shown} without --output only shows one text: add"
                f" --output=FOLDER, or remove {name}."
            )

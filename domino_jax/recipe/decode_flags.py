"""Flags and keys of `decode` of which one would be ignored: they are refused before anything is loaded."""

from domino_jax.recipe import cli
from domino_jax.runtime.errors import DominoError


def check_flags(flags: cli.Flags) -> None:
    decode, shown = flags.config.decode, "--interactive" if flags.interactive else "--prompt"
    _check_prompt_flags(flags)
    if decode.compare and decode.concurrency:
        raise DominoError(
            "config.decode.compare and config.decode.concurrency are both given, but drafters are compared at"
            " decode.batch_size alone; remove one of them."
        )
    if decode.compare and decode.parity == "fixed_shape":
        raise DominoError(
            "config.decode.parity is 'fixed_shape', in which plain decoding is as wide as one drafter's rounds, but"
            " config.decode.compare has several drafters: set parity to near_tie, or decode with one at a time."
        )
    if flags.output:
        return
    if not (flags.prompt or flags.interactive):
        raise DominoError("--output is missing (a folder for the report); without it give --prompt or --interactive.")
    for name in ("tasks", "compare", "concurrency", "simulate_tau"):
        if decode[name]:
            raise DominoError(
                f"config.decode.{name} is {decode[name]!r}, but {shown} without --output only shows one text: add"
                f" --output=FOLDER, or remove decode.{name}."
            )


def _check_prompt_flags(flags: cli.Flags) -> None:
    if flags.prompt is not None and not flags.prompt.strip():
        raise DominoError("--prompt is empty; give it a text, or leave it out to decode the recipe's prompts.")
    flag = "--prompts" if flags.prompts else "--prompt" if flags.prompt else None
    if flags.prompts and flags.prompt:
        raise DominoError("--prompts and --prompt are both given; decode the rows of a file or one text, not both.")
    if flags.config.decode.tasks and flag:
        raise DominoError(f"config.decode.tasks and {flag} are both given; decode tasks or prompts, not both.")
    if flags.interactive:
        for name, value in (("--output", flags.output), ("--prompt", flags.prompt), ("--prompts", flags.prompts)):
            if value:
                raise DominoError(f"--interactive and {name} are both given, but a chat ignores {name}; remove it.")

"""The one place where a command line becomes values, and a user's mistake becomes a message and an exit code.

Each command ends with

    if __name__ == "__main__":
        cli.run(main, required=("config", "workdir"), optional=("allow_config_change",))

and takes one argument, the Flags. Nothing here touches a device.

A disk that is full or read-only is reported in one sentence (errors.py), with exit code 3 or 2. SIGTERM and SIGHUP end
a command at once; a training that has steps to save leaves with 42 (preemption.py).
"""

import argparse
import dataclasses
import difflib
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from absl import flags as absl_flags
from ml_collections import config_dict, config_flags

from domino_jax.recipe import loading
from domino_jax.runtime import distributed, environment
from domino_jax.runtime.errors import FULL, REFUSED, DominoError, unwritable
from domino_jax.runtime.keys import walk
from domino_jax.runtime.preemption import PREEMPTED, Preempted

OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)(?:=.*)?", re.DOTALL)  # a value of the recipe, its key as group 1
NUMBER = re.compile(r"-[\d.].*")  # a value in a word of its own
LONGEST_LINE = 1_000  # characters of an error message


def _entries(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _flag(help: str, default: Any = None, **how: Any) -> Any:
    """A flag: what --help says, its value where it is not given, and other arguments of add_argument."""
    return dataclasses.field(default=default, metadata={"help": help, **how})


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of a command line. Each command names the ones that it reads.

    set_keys: the recipe's keys that the command line sets, as "decode.num_drafts".
    """

    config: config_dict.ConfigDict | None = _flag(
        "recipe file, for example configs/tiny.py; --config.SECTION.KEY=VALUE changes one value of it"
    )
    workdir: str | None = _flag("folder of one training run")
    prompts: str | None = _flag("JSONL file of prompts, one a line: messages, prompt or token_ids")
    prompt: str | None = _flag("one prompt, given here")
    output: str | None = _flag("file or folder to write")
    answers: str | None = _flag("answers of the target: a file of regenerate, or a folder of decode")
    server: str | None = _flag("URL of a running server, which answers the prompts and is checked")
    requests: int = _flag("with --server: prompts that it answers at once (default 8)", 8, type=int)
    drafters: tuple[str, ...] = _flag(
        "folders of drafters, joined by commas (default: drafter.path)", (), type=_entries
    )
    round_seconds: str | None = _flag("measure: time rounds on this device, for speed-ups", choices=("measure",))
    allow_config_change: tuple[str, ...] = _flag(
        "recipe keys or sections, joined by commas, that may differ from the checkpoint's", (), type=_entries
    )
    distributed: str = _flag(
        "auto (default: JAX_ variables, else a cluster that JAX detects, else this process) or off",
        "auto",
        choices=("auto", "off"),
    )
    host: str = _flag("address to listen on (default 127.0.0.1; other machines reach 0.0.0.0)", "127.0.0.1")
    port: int = _flag("port to listen on (default 8000; 0 is any free one)", 8000, type=int)
    allow_origin: str | None = _flag(
        "origin whose pages may ask the server, as https://example.org; * is every one (default: its own)"
    )
    metrics_prefix: str = _flag(
        "of the names of /metrics (default domino; vllm for clients that read vLLM's)",
        "domino",
        choices=("domino", "vllm"),
    )
    interactive: bool = _flag("chat at the terminal, text shown as it comes", False, action="store_true")
    dry_run: bool = _flag(
        "from shapes alone: memory and cost of the training step, or bytes of decoding's step and rounds",
        False,
        action="store_true",
    )
    topology: str | None = _flag("with --dry_run: other devices than those here, for example v5e:4x4")
    set_keys: frozenset[str] = frozenset()

    @property
    def given(self) -> set[str]:
        """The names of the other flags that the command line sets."""
        return {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default}

    @property
    def head(self) -> str | None:
        """drafter.head where the command line sets it: the head that a drafter's folder must then have."""
        return self.config.drafter.head if "drafter.head" in self.set_keys else None


def run(
    main: Callable[[Flags], int | None],
    required: Sequence[str] = (),
    optional: Sequence[str] = (),
    argv: Sequence[str] | None = None,
) -> None:
    """Parse, call main and leave with its exit code: 0 done, a DominoError's code, 42 saved after SIGTERM, 130 Ctrl-C.

    The processes of one run leave together when main returns, and each by itself when it fails (distributed.py). An
    unexpected exception keeps its traceback. In a run of several processes it is most often the loss of another one, so
    the process leaves in the way that launchers answer with a new start.

    Args:
        main: the command; it returns its exit code, or None for 0.
        required, optional: flags that must be given, and others that the command reads.
        argv: the program's name and its arguments, sys.argv by default.
    """
    place = "a file"
    environment.settle()
    try:
        flags = parse(sys.argv if argv is None else argv, required, optional)
        place = flags.output or flags.workdir or place
        code = main(flags) or 0
        distributed.shutdown()
        sys.exit(code)
    except DominoError as refusal:
        code = report(refusal)
    except Preempted:
        code = PREEMPTED
    except KeyboardInterrupt:
        code = 130
    except Exception as failure:
        if isinstance(failure, OSError) and failure.errno in FULL + REFUSED:
            code = report(unwritable(failure.filename or place, failure))
        elif distributed.is_one_of_several():
            traceback.print_exc()
            distributed.abort()
        else:
            raise
    distributed.leave(code)
    sys.exit(code)


def report(error: DominoError) -> int:
    """Prints an error as all commands do, and returns its exit code."""
    # Names and values in a message may come out of a file: none may fill the terminal or command it.
    lines = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in str(error).split("\n")]
    text = "\n".join("".join(letter if letter.isprintable() else "?" for letter in line) for line in lines)
    print(f"error: {text}", file=sys.stderr)
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DominoError(f"{message}.")


def parse(argv: Sequence[str], required: Sequence[str], optional: Sequence[str] = ()) -> Flags:
    """The flags of one command line; a mistake in it is a DominoError."""
    names = (*required, *optional)
    parser = _Parser(
        prog=f"python -m domino_jax.{pathlib.Path(argv[0]).stem}",
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    flags = {field.name: field.metadata for field in dataclasses.fields(Flags)}
    for name in names:
        parser.add_argument(f"--{name}", **flags[name])
    stated, rest = parser.parse_known_args(argv[1:])
    stated = vars(stated)
    for problem in _problems(stated, rest, required, names):
        raise DominoError(problem)
    set_keys = frozenset(match[1] for match in map(OVERRIDE.fullmatch, rest) if match)
    if "config" in stated:
        stated["config"] = _recipe(stated["config"], set_keys, rest)
    return Flags(**stated, set_keys=set_keys)


def _problems(stated: dict[str, Any], rest: Sequence[str], required: Sequence[str], names: Sequence[str]):
    """The problems of a command line. stated: its flags.  rest: its other words."""
    for argument in rest:
        if argument.startswith("-") and not OVERRIDE.fullmatch(argument) and not NUMBER.fullmatch(argument):
            yield _unknown(argument, names)
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(Flags) if field.metadata}
    for name in required:
        if not stated.get(name):
            yield f"--{name} is missing ({helps[name]}); needed: {', '.join(f'--{each}' for each in required)}."
    if stated.get("topology") and not stated.get("dry_run"):
        yield f"--topology={stated['topology']} is for --dry_run alone: add --dry_run or take it out."
    if rest and "config" not in stated:
        yield f"{rest[0]!r} is given without a recipe: add --config=configs/tiny.py or another."


def _recipe(path: str, set_keys: Collection[str], overrides: Sequence[str]) -> config_dict.ConfigDict:
    """The recipe of a file with the command line's values in it, which keep the recipe's types."""
    config = loading.load_recipe(path)
    for problem in filter(None, (key_problem(config, key, path) for key in sorted(set_keys))):
        raise DominoError(problem)
    argv, values = ["command", *overrides], absl_flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    try:
        rest = values(argv)
        if len(rest) == 1:
            return config
        problem = f"{rest[1]!r} is not a flag: every argument starts with --, as --config.train.steps=VALUE"
    except absl_flags.Error as error:
        problem = str(error)
        if refused := re.match(r"flag --(config\.[^=]+)=(.*?): ", problem, re.DOTALL):
            kind = values[refused[1]].parser.flag_type()
            problem = f"--{refused[1]}={refused[2]}: the value is not of the kind {kind} that the recipe has there"
    raise DominoError(f"{problem}.")


def key_problem(config: config_dict.ConfigDict, key: str, recipe: str) -> str | None:
    """Why a dotted key names no value of the recipe, with the nearest ones that do."""
    names = [name for name, _, _ in walk(config)]
    inside = [name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")]
    if key in names:
        return None
    if inside:
        return f"--config.{key} is a section of {recipe}; set one of its values: {', '.join(inside)}."
    # A key of another section is recognized by its last words, as the selector_rank of a head is its section's rank.
    last = f"_{key.rpartition('.')[2]}"
    alike = [name for name in names if last.endswith(f"_{name.rpartition('.')[2]}")]
    near = difflib.get_close_matches(key, alike, n=3, cutoff=0) or difflib.get_close_matches(key, names, n=1)
    meant = " or ".join(f"config.{name}" for name in near)
    hint = f"Did you mean {meant}?" if near else f"There is {', '.join(sorted(config))}."
    return f"--config.{key}: {recipe} has no such key. {hint}"


def _unknown(argument: str, names: Sequence[str]) -> str:
    name = argument.lstrip("-").partition("=")[0]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean --{near[0]}?" if near else f"This command knows {', '.join(f'--{flag}' for flag in names)}."
    return f"unknown flag --{name}. {hint}"

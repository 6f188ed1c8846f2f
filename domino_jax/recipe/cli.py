"""The one place where a command line becomes values, and a user's mistake becomes a message and an exit code.

Each command ends with

    if __name__ == "__main__":
        cli.run(main, required=("config", "workdir"), optional=("allow_config_change",))

and takes one argument, the Flags. Nothing here touches a device.

All commands follow the same rules. Ctrl-C leaves with 130. A disk that is full or read-only is reported in one sentence
(errors.py). SIGTERM and SIGHUP end a command at once; a training that has steps to save leaves with 42 (preemption.py).
"""

import dataclasses
import difflib
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from absl import flags as absl_flags
from ml_collections import config_dict, config_flags

from domino_jax.recipe import loading
from domino_jax.runtime import distributed
from domino_jax.runtime.errors import FULL, REFUSED, DominoError, unwritable
from domino_jax.runtime.preemption import PREEMPTED, Preempted

HELP = {
    "config": "recipe file, for example configs/tiny.py; --config.SECTION.KEY=VALUE changes one value of it",
    "workdir": "folder of one training run",
    "prompts": "JSONL file of prompts, one a line: messages, prompt or token_ids",
    "prompt": "one prompt, given here",
    "output": "file or folder to write",
    "format": "serving (default: what SGLang and vLLM open), specforge or speculators (what they train further)",
    "host": "address to listen on (default 127.0.0.1; other machines reach 0.0.0.0)",
    "port": "port to listen on (default 8000; 0 is any free one)",
    "interactive": "chat at the terminal, text shown as it comes",
    "allow_config_change": "recipe keys or sections, joined by commas, that may differ from the checkpoint's",
    "distributed": "auto (default: JAX_ variables, else a cluster that JAX detects, else this process), manual or off",
    "dry_run": "compile the step from shapes alone, print its memory and cost, train nothing",
    "topology": "with --dry_run: devices to compile for instead of those here, for example v5e:4x4",
}
OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)(?:=.*)?", re.DOTALL)  # a value of the recipe, its key as group 1
LONGEST_LINE = 1_000  # characters of an error message
LISTS = ("allow_config_change",)
BOOLEANS = ("dry_run", "interactive")
INTEGERS = ("port",)
CHOICES = {"distributed": ("auto", "manual", "off"), "format": ("serving", "specforge", "speculators")}


@dataclasses.dataclass(frozen=True)
class Flags:
    """What was given on the command line; None (or empty) where a flag was not.

    set_keys: the recipe's keys that the command line sets, as "decode.num_drafts".
    """

    config: config_dict.ConfigDict | None = None
    workdir: str | None = None
    prompts: str | None = None
    prompt: str | None = None
    output: str | None = None
    format: str = "serving"
    allow_config_change: tuple[str, ...] = ()
    distributed: str = "auto"
    host: str | None = None
    port: int | None = None
    interactive: bool = False
    dry_run: bool = False
    topology: str | None = None
    set_keys: frozenset[str] = frozenset()

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

    A full disk is exit code 3, and a file that may not be written is 2, wherever the error comes from.

    The processes of one run leave together when main returns, and each by itself when it fails (distributed.py). An
    unexpected exception keeps its traceback. In a run of several processes it is most often the loss of another one, so
    the process leaves in the way that launchers answer with a new start.

    Args:
      main: the command; what it returns is the exit code, None being 0.
      required: flags that must be given.
      optional: flags the command also reads; any other is unknown to it.
      argv: the program's name and its arguments, sys.argv by default.
    """
    place = "a file"
    try:
        flags = parse(sys.argv if argv is None else argv, required, optional)
        place = flags.output or flags.workdir or place
        code = main(flags) or 0
        distributed.shutdown()
        sys.exit(code)
    except DominoError as refusal:
        code = _report(refusal)
    except Preempted:
        code = PREEMPTED
    except KeyboardInterrupt:
        code = 130
    except Exception as failure:
        if isinstance(failure, OSError) and failure.errno in FULL + REFUSED:
            code = _report(unwritable(failure.filename or place, failure))
        elif distributed.is_one_of_several():
            traceback.print_exc()
            distributed.abort()
        else:
            raise
    distributed.leave(code)
    sys.exit(code)


def _report(error: DominoError) -> int:
    # Names and values in a message may come out of a file: none may fill the terminal or command it.
    lines = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in str(error).split("\n")]
    text = "\n".join("".join(letter if letter.isprintable() else "?" for letter in line) for line in lines)
    print(f"error: {text}", file=sys.stderr)
    return error.exit_code


def parse(argv: Sequence[str], required: Sequence[str], optional: Sequence[str] = ()) -> Flags:
    """The flags of one command line; a mistake in it is a DominoError."""
    names = (*required, *optional)
    values = absl_flags.FlagValues()
    values.set_gnu_getopt(True)
    absl_flags.DEFINE_boolean("help", False, "show the flags", flag_values=values)
    for name in names:
        if name != "config":
            _define(name, values)
    argv = list(argv)
    if "config" in names:
        argv = _define_config(argv, values)
    try:
        rest = values(argv)
    except absl_flags.Error as error:
        raise DominoError(_explain(str(error), values)) from error
    if values.help:
        _print_help(names, required)
        sys.exit(0)
    if len(rest) > 1:
        raise DominoError(
            f"{rest[1]!r} is not a flag: every argument starts with --, as --{(names or ('config',))[0]}=VALUE."
        )
    _check_required(values, required)
    if "topology" in names and values.topology and not values.dry_run:
        raise DominoError(f"--topology={values.topology} is for --dry_run alone: add --dry_run or take it out.")
    stated = {name: getattr(values, name) for name in names if name in values and values[name].value is not None}
    stated |= {name: tuple(stated[name]) for name in LISTS if name in stated}
    overrides = (OVERRIDE.fullmatch(argument) for argument in argv[1:])
    return Flags(**stated, set_keys=frozenset(match[1] for match in overrides if match))


def _define(name: str, values: absl_flags.FlagValues) -> None:
    if name in CHOICES:
        absl_flags.DEFINE_enum(name, None, CHOICES[name], HELP[name], flag_values=values)
    else:
        define = absl_flags.DEFINE_list if name in LISTS else absl_flags.DEFINE_string
        define = absl_flags.DEFINE_boolean if name in BOOLEANS else define
        define = absl_flags.DEFINE_integer if name in INTEGERS else define
        define(name, None, HELP[name], flag_values=values)


def _define_config(argv: list[str], values: absl_flags.FlagValues) -> list[str]:
    """Load the recipe that argv names and define a typed flag for each override; returns argv without --config."""
    path, argv = _take_config(argv)
    if path is None:
        return argv
    config = loading.load_recipe(path)
    for argument in argv[1:]:
        key = OVERRIDE.fullmatch(argument)
        if key:
            check_key(config, key[1], path)
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    return argv


def check_key(config: config_dict.ConfigDict, key: str, recipe: str) -> None:
    """Refuse a dotted key that names no value of the recipe, with the nearest ones that do."""
    value = config
    for name in key.split("."):
        if not isinstance(value, config_dict.ConfigDict) or name not in value:
            raise DominoError(f"--config.{key}: {recipe} has no such key. {config.hint(key)}")
        value = value[name]
    if isinstance(value, config_dict.ConfigDict):
        raise DominoError(
            f"--config.{key} is a section of {recipe}; set one of its values: {', '.join(sorted(value))}."
        )


def _take_config(argv: list[str]) -> tuple[str | None, list[str]]:
    path, rest, index = None, argv[:1], 1
    while index < len(argv):
        argument = argv[index]
        index += 1
        if argument in ("--config", "-config"):
            if index == len(argv) or argv[index].startswith("-"):
                raise DominoError("--config needs a recipe, as --config=configs/tiny.py.")
            path = argv[index]
            index += 1
        elif argument.startswith(("--config=", "-config=")):
            path = argument.split("=", 1)[1]
        elif argument == "--":
            return path, rest + argv[index - 1 :]
        else:
            rest.append(argument)
    return path, rest


def _explain(message: str, values: absl_flags.FlagValues) -> str:
    """absl's sentence in terms of this command: the kind of value a key takes, the nearest flag there is."""
    refused = re.match(r"flag --((config\.)?[^=]+)=(.*?): ", message, re.DOTALL)
    if refused:
        if refused[1] in CHOICES:
            return f"--{refused[1]}={refused[3]}: set it to one of {', '.join(CHOICES[refused[1]])}."
        if refused[1] in INTEGERS:
            return f"--{refused[1]}={refused[3]}: give a whole number."
        if not refused[2]:
            return f"--{refused[1]}={refused[3]}: give --{refused[1]} or --no{refused[1]}, without a value."
        kind = values[refused[1]].parser.flag_type()
        return f"--{refused[1]}={refused[3]}: the value is not of the kind {kind} that the recipe has there."
    unknown = re.match(r"Unknown command line flag '(.*?)'", message)
    if not unknown:
        return f"{message}."
    name = unknown[1]
    if name.startswith("config."):
        return f"--{name} is given without a recipe: add --config=configs/tiny.py or another."
    known = sorted(flag for flag in [*values, "config"] if "." not in flag)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean --{near[0]}?" if near else f"This command knows {', '.join(f'--{flag}' for flag in known)}."
    return f"unknown flag --{name}. {hint}"


def _check_required(values: absl_flags.FlagValues, required: Sequence[str]) -> None:
    missing = [name for name in required if name not in values or not values[name].value]
    if missing:
        name = missing[0]
        raise DominoError(f"--{name} is missing ({HELP[name]}); needed: {', '.join(f'--{flag}' for flag in required)}.")


def _print_help(names: Sequence[str], required: Sequence[str]) -> None:
    print((sys.modules["__main__"].__doc__ or "").strip())
    print("\nFlags:")
    for name in names:
        print(f"  --{name}{'' if name in required else ' (optional)'}: {HELP[name]}")

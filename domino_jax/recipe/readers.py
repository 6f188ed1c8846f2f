"""The table of commands and the keys of a recipe that each of them reads.

If the command line sets a key that nobody reads, the user believes in an experiment that did not run. Such a key is
refused. It is only named in a note if no result depends on it, or if other runs of the command read it.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from domino_jax.method.config import LAMBDA_KEYS
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.losses import Loss
from domino_jax.method.settings import SAMPLING_VALUES, DraftSettings
from domino_jax.recipe.open_keys import loss_class
from domino_jax.runtime.keys import keys_of, walk


def _decode(*names: str) -> tuple[str, ...]:
    return tuple(f"decode.{name}" for name in names)


MODELS = ("target", "drafter.path", "drafter.head")
DRAFTING = _decode(*keys_of(DraftSettings))
SAMPLING = _decode("seed", *SAMPLING_VALUES)
# Command → the keys and sections that it reads. A dry run takes the command line of its run.
READS = {
    "train": ("seed", "target", "drafter", "data", "train", "checkpoint", "eval", "mesh", "regenerate", "decode"),
    "decode": (*MODELS, "data.train", "data.skip_bad_rows", "eval.prompts", "decode"),
    "serve": (*MODELS, "data.train", "decode", "serve"),
    "regenerate": (*MODELS, "data.train", "data.skip_bad_rows", "seed", "regenerate")
    + (*DRAFTING, *_decode("thinking", "width")),
    "evaluate": (*MODELS, "data.train", "data.skip_bad_rows", "eval.prompts", "regenerate.batch_size")
    + (*SAMPLING, *DRAFTING)
    + _decode("max_new_tokens", "num_prompts", "batch_size", "cache_length", "dtype", "thinking", "mesh"),
}
READS |= {"dry_run": READS["train"], "decode_dry_run": (*READS["decode"], "drafter")}
# The keys of these sections that the commands leave out.
EXCEPT = dict.fromkeys(READS, ()) | {
    "train": _decode("tasks", "concurrency", "mesh"),
    "serve": _decode("num_prompts", "tasks", "concurrency", "batch_size"),
    "evaluate": _decode("num_drafts"),
}
# Keys on which no text depends, but memory, speed, or the choice of the drafter's folder.
HARMLESS = ("drafter.path", *_decode("cache_length", "batch_size"), *DRAFTING)
# Keys that the evaluations of a training read; the others of the decode section are for its final decoding.
EVALUATED = _decode("max_new_tokens", "thinking", "num_drafts", "draft_sharpness", "head_candidates")
# Keys that the answers of evaluate depend on, where it does not read them from a file.
ANSWERED = (*SAMPLING, "decode.max_new_tokens", "eval.prompts", "regenerate.batch_size")
# Keys that the loss of Domino alone reads, where it replaces the loss of a head.
COMMON = ("dpace_alpha", *LAMBDA_KEYS)
# Keys of the drafter and train sections that not all drafters read.
READ_BY_SOME = frozenset(name for drafter in CONFIGS.values() for name in drafter.reads)
# Values that change nothing: all others, in a recipe too, are refused where they are not read.
OFF = {"train.loss": "own", "train.dpace_alpha": None, "train.frozen_backbone": None}


class Unread(NamedTuple):
    """A key that a run does not read. refused: False if a note only names it."""

    key: str
    why: str
    refused: bool


def unread_keys(config, command: str, set_keys: Collection[str], given: Collection[str] = ()) -> Iterator[Unread]:
    """Yields the keys that the command line sets, or a recipe turns on, without any effect.

    Args:
        command: a key of READS.  given: the command's flags besides the recipe, as "answers".
    """
    trains = command in ("train", "dry_run")
    drafter = config.drafter.head, config.train.loss, config.train.dpace_alpha
    for key, _, value in walk(config):
        is_set = value != OFF[key] if key in OFF else key in set_keys
        if trains and is_set and (why := unread(key, *drafter)):
            yield Unread(key, why, True)
        elif key in set_keys and not reads(command, key) and key not in HARMLESS:
            yield Unread(key, f"{command.partition('_')[0]} does not read it; {_change(config, command, key)}", True)
        elif key in set_keys and (why := _unread_here(config, command, key, given)):
            yield Unread(key, why, False)


def reads(command: str, key: str) -> bool:
    """True if some runs of the command read the key."""
    return _covered(key, READS[command]) and not _covered(key, EXCEPT[command])


def _covered(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _change(config, command: str, key: str) -> str:
    """The advice for a key: the key of the same name that the command reads, if there is one."""
    last = key.rpartition(".")[2]
    others = [name for name, _, _ in walk(config) if name.rpartition(".")[2] == last and reads(command, name)]
    others.sort(key=lambda name: not name.startswith(command))  # its own section first
    return f"it reads config.{others[0]}" if others else "leave it out"


def _unread_here(config, command: str, key: str, given: Collection[str]) -> str | None:
    """The reason why this run does not read a key that other runs of the command read; None where it does."""
    section, decode = key.partition(".")[0], config.decode
    rules: tuple[tuple[Any, str], ...] = ((not reads(command, key), f"{command} does not read it"),)
    if command == "train":
        asks = section == "regenerate" and key != "regenerate.batch_size"  # which the answers of evaluations need
        rules += (
            (asks and not config.data.regenerate, "data.regenerate is False"),
            (section == "decode" and key not in EVALUATED and not config.eval.final, "eval.final is False"),
            (key == "drafter.path", "train.start_from names the weights to start from"),
        )
    elif key == "data.train":
        rules += ((not decode.draft_vocab, "decode.draft_vocab, for which rows are counted, is 0"),)
    elif command == "regenerate":
        drafts = key in DRAFTING or key == "drafter.path"
        rules += ((drafts and not config.regenerate.use_drafter, "regenerate.use_drafter is False"),)
    elif command == "evaluate":
        rules += (
            ("answers" in given and key in ANSWERED, "the answers are read from --answers"),
            ("server" in given and key in SAMPLING, "--server is asked for greedy answers"),
        )
    elif command == "decode" and key == "eval.prompts":
        rules += ((decode.tasks or {"prompts", "prompt", "interactive"} & set(given), "other prompts are named"),)
    return next((why for holds, why in rules if holds), None)


def unread(key: str, head: str, loss: str = "own", dpace_alpha: float | None = None) -> str | None:
    """Why a training does not read a key of its drafter or train section, and what to change; None where it does.

    head: drafter.head.  loss, dpace_alpha: of the train section.
    """
    drafter, (section, _, name) = CONFIGS[head], key.partition(".")
    if section not in ("drafter", "train") or key in ("drafter.head", "drafter.path"):
        return None
    own_loss = loss_class(head, loss) is not Loss
    read = drafter.reads if own_loss or drafter.loss is Loss else (*drafter.reads, *COMMON)
    if own_loss and "loss" in read and name in COMMON and name not in read:
        change = "leave it out, or set --config.train.loss=cross_entropy"
        return f"drafter.head {head} has its own loss, which does not read it; {change}"
    if (name not in read) if name in READ_BY_SOME else ("." in name and not name.startswith(f"{head}.")):
        return f"drafter.head {head} does not read it; leave it out"
    if name == "gamma" and dpace_alpha is not None:
        return "train.dpace_alpha replaces the decay; leave one of the two out"
    return None

"""A recipe's decode section: as settings, and checked, alone and against the drafter that a training ends with."""

from collections.abc import Collection

from domino_jax.method.kinds import KINDS
from domino_jax.method.settings import (
    BASELINE,
    MODES,
    TREE,
    DecodeSettings,
    SamplingParams,
    TreeSettings,
    default_modes,
    refused_mode,
)
from domino_jax.recipe.head_rules import decoded_rank_rule
from domino_jax.recipe.values import refuse, require, shifts_labels

COMMAND_KEYS = ("num_prompts", "tasks", "compare", "mesh")  # of the decode section, for the command alone


def modes_of(decode, head: str) -> tuple[str, ...]:
    """decode.modes, or where they are left open those of a drafter with this head."""
    return default_modes(KINDS[head]) if decode.modes is None else tuple(decode.modes)


def decode_settings(decode, head: str) -> DecodeSettings:
    """The decode section as settings.

    head: of the drafter, for modes that are left open.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in decode.items()}
    values |= {"modes": modes_of(decode, head), "num_drafts": decode.num_drafts or None}
    # Without the mode a tree's rows must not count in how much cache a prompt needs.
    values["tree"] = TreeSettings(**decode.tree) if TREE in values["modes"] else None
    return DecodeSettings().change(**{name: value for name, value in values.items() if name not in COMMAND_KEYS})


def check_sampling(section: str, values) -> None:
    """The sampling values of a section."""
    refuse(section, SamplingParams(values.temperature, values.top_k, values.top_p).problem())


def check_decode(config) -> None:
    """The decode section."""
    decode, modes = config.decode, modes_of(config.decode, config.drafter.head)
    change = f"list some of {', '.join(MODES)}, as --config.decode.modes=\"('autoregressive','domino')\""
    require(bool(modes), "decode.modes", modes, change)
    refuse("decode", decode_settings(decode, config.drafter.head).problem())
    refuse("decode", TreeSettings(**decode.tree).problem())
    for key in ("tasks", "compare"):
        fine = all(isinstance(entry, str) and entry for entry in decode[key])
        require(fine, f"decode.{key}", decode[key], f"list texts, as --config.decode.{key}=\"('NAME',)\"")
    check_mesh("decode.mesh", decode.mesh, ("data", "tensor"))


def check_mesh(section: str, mesh, axes: Collection[str]) -> None:
    """The sizes of a mesh."""
    for axis in axes:
        size = mesh[axis]
        require(size >= 1 or size == -1, f"{section}.{axis}", size, "give a number of devices, or -1 for the rest")
    rest = [axis for axis in axes if mesh[axis] == -1]
    require(len(rest) <= 1, section, rest, "only one axis can be -1 (the rest of the devices)")


def check_final_decoding(config) -> None:
    """Refuses before the training what the final decoding would refuse after it."""
    drafter, decode, modes = config.drafter, config.decode, modes_of(config.decode, config.drafter.head)
    for mode in modes:
        refused = refused_mode(mode, KINDS[drafter.head])
        change = f"of decode.modes, which eval.final decodes in, {refused}"
        require(refused is None, "drafter.head", drafter.head, change)
    if not set(modes) - {BASELINE}:
        return
    sure = KINDS[drafter.head].has_confidence_in(config)
    change = f"a drafter of drafter.head {drafter.head} has no confidence head, or nothing trains it; set it to 0"
    require(sure or decode.confidence == 0, "decode.confidence", decode.confidence, change)
    require(*decoded_rank_rule(drafter, decode))
    drafting = decode_settings(decode, drafter.head).drafting
    block_drafts = drafter.block_size - (0 if shifts_labels(drafter) else 1)
    size, drafts, most = KINDS[drafter.head].widths(drafter, block_drafts)
    refuse("decode", drafting.width_problem(size, drafts, most))

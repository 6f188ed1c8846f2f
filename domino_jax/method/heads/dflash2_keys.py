"""The keys of DFlash2 in a drafter's config.json: its selector, its convolutions, and transforms around the backbone.

Convolutions are an option of any backbone here; public files have them in DFlash2 drafters only.
"""

from typing import Any

from domino_jax.method.config_keys import DFLASH2 as DFLASH2_CLASS
from domino_jax.method.config_keys import WRITTEN_WITH, either, integer, number
from domino_jax.method.names import DFLASH2
from domino_jax.runtime.errors import DataError, quote

CLASS = DFLASH2_CLASS  # all that tells these folders from DFlash's
CONVOLUTION = ("conv_kernel_size", "conv_group_size")
SELECTOR = ("selector_rank", "selector_top_k")
TRANSFORMS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
REQUIRED = (*CONVOLUTION, *SELECTOR)
OWN = (*SELECTOR, *TRANSFORMS)  # keys that other drafters must not have


def is_dflash2(raw: dict[str, Any]) -> bool:
    return CLASS in str(raw.get("architectures"))


def check_layout(raw: dict[str, Any], nested: dict[str, Any]) -> None:
    """Raises DataError for a key that contradicts the class DFlash2DraftModel.

    Its drafters have no projector, are never shifted, and correct every draft.
    """
    for name, only in (("projector_type", None), ("shift_label", False), ("sample_from_anchor", False)):
        value = either(raw, nested, name)
        if value is not None and value != only:
            means = "which has none" if only is None else f"which means {only}"
            raise DataError(
                f"the drafter's config.json has {name} {quote(value)} and architectures {CLASS}, {means};"
                f" {WRITTEN_WITH}"
            )
    prefix = either(raw, nested, "pure_draft_prefix_len")
    if prefix:
        raise DataError(
            f"the drafter's config.json has pure_draft_prefix_len {quote(prefix)}; only a {CLASS} that corrects every"
            " draft (0) is supported."
        )


def option_fields(raw: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """What a drafter may have beside a plain backbone: convolutions, selector and transforms that are stated."""
    names = (*CONVOLUTION, *SELECTOR, *TRANSFORMS)
    stated = {name: value for name in names if (value := either(raw, nested, name)) is not None}
    if stated.get("final_logit_softcapping") == 0:
        del stated["final_logit_softcapping"]  # servers read 0 as no cap
    return {name: number(name, value) if name in TRANSFORMS else integer(name, value) for name, value in stated.items()}


def option_keys(config: Any) -> dict[str, Any]:
    """A config's keys for dflash_config: those that its head needs, and others where they have an effect."""
    needed = REQUIRED if config.head == DFLASH2 else ()
    neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    keys = {name: getattr(config, name) for name in (*REQUIRED, *TRANSFORMS)}
    return {name: value for name, value in keys.items() if name in needed or value != neutral.get(name, 0)}


def option_problems(config: Any) -> list[tuple[bool, str]]:
    """(whether it is so, what is wrong) with the options of a DrafterConfig."""
    c, selects = config, config.head == DFLASH2
    taps, group = c.conv_kernel_size, c.conv_group_size
    return [
        (
            not 0 <= taps <= c.block_size,
            f"conv_kernel_size {taps} is not in 0..{c.block_size}, the block_size (0: no convolutions)",
        ),
        (
            taps > 0 and (group < 1 or c.hidden_size % group != 0),
            f"conv_group_size {group} does not divide hidden_size {c.hidden_size}",
        ),
        (
            selects and (c.shift_label or c.pure_draft_prefix_len != 0),
            f"head dflash2 has shift_label {c.shift_label} and pure_draft_prefix_len {c.pure_draft_prefix_len}, but its"
            " drafters are never shifted and correct every draft",
        ),
        (selects and c.selector_rank < 1, f"selector_rank {c.selector_rank} must be at least 1"),
        (
            selects and not 1 <= c.selector_top_k <= c.vocab_size,
            f"selector_top_k {c.selector_top_k} is not in 1..{c.vocab_size}, the vocab_size",
        ),
    ]

"""The keys of DSpark's Markov and confidence heads in a drafter's config.json.

SGLang reads them at the top level, SpecForge in dflash_config; both places are written, and either is read. DeepSpec's
own files are flat and name no projector_type.
"""

from typing import Any

from domino_jax.method.config_keys import DSPARK as CLASS
from domino_jax.method.config_keys import WRITTEN_WITH, boolean, either, integer
from domino_jax.method.names import MARKOV, MARKOV_KINDS
from domino_jax.runtime.errors import DataError, quote

PROJECTOR = "dspark"  # as projector_type
_DEEPSPEC_CLASS = "Qwen3DSparkModel"
_ATTENTION = "attention_mode"
KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
OWN = ("projector_type", "markov_rank", "enable_confidence_head")  # keys that other drafters must not have


def is_dspark(raw: dict[str, Any], nested: dict[str, Any]) -> bool:
    """True for a drafter with the layout of DSpark, always shifted, with a Markov head unless its rank is 0."""
    names = str(raw.get("architectures"))
    return either(raw, nested, "projector_type") == PROJECTOR or CLASS in names or is_deepspec(raw)


def is_deepspec(raw: dict[str, Any]) -> bool:
    """True for DeepSpec's flat files, which also store copies of the target's embedding and lm_head."""
    return _DEEPSPEC_CLASS in str(raw.get("architectures"))


def markov_fields(raw: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """The DrafterConfig fields of a DSpark config.json; raises DataError for keys that contradict the layout."""
    rank = either(raw, nested, "markov_rank")
    if rank is None:
        raise _lacks("markov_rank")
    rank = integer("markov_rank", rank)
    _check_layout(raw, nested)
    confident, with_markov = _confidence(raw, nested)
    if rank == 0:
        if confident:
            raise DataError(
                "the drafter's config.json has markov_rank 0 and enable_confidence_head true; a confidence head"
                " without a Markov head is not supported."
            )
        return {}
    kind = either(raw, nested, "markov_head_type")
    if kind is None:
        raise _lacks("markov_head_type")
    kind = kind.lower() if isinstance(kind, str) else kind  # as its public readers do
    if kind not in MARKOV_KINDS:
        raise DataError(
            f"the drafter's config.json has markov_head_type {quote(kind)}; expected one of {', '.join(MARKOV_KINDS)}."
        )
    return {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": confident,
        "confidence_head_with_markov": with_markov,
    }


def _lacks(name: str) -> DataError:
    return DataError(
        f"the drafter's config.json ({PROJECTOR}) lacks {name}, at top level and in dflash_config; it is never guessed:"
        " add the value it was trained with."
    )


def _check_layout(raw: dict[str, Any], nested: dict[str, Any]) -> None:
    projector = either(raw, nested, "projector_type")
    if projector not in (None, PROJECTOR):
        raise DataError(
            f"the drafter's config.json has projector_type {quote(projector)} and architectures"
            f" {quote(raw['architectures'])}, which is {PROJECTOR}; {WRITTEN_WITH}"
        )
    for name in ("shift_label", "sample_from_anchor"):
        if boolean(raw, nested, name) is False:
            raise DataError(
                f"the drafter's config.json has {name} false; only {PROJECTOR} drafters whose slot k predicts the token"
                " after its own (true) are supported."
            )
    prefix = either(raw, nested, "pure_draft_prefix_len")
    if prefix:
        raise DataError(
            f"the drafter's config.json has pure_draft_prefix_len {quote(prefix)}; only Markov heads that correct every"
            " draft (0) are supported."
        )
    mode, heads, pairs = either(raw, nested, _ATTENTION), raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if mode is not None and str(mode).lower() != ("mha" if pairs == heads else "gqa"):
        raise DataError(
            f"the drafter's config.json has attention_mode {quote(mode)} with num_attention_heads {quote(heads)} and"
            f" num_key_value_heads {quote(pairs)}; gqa means fewer of the latter, mha the same number."
        )


def _confidence(raw: dict[str, Any], nested: dict[str, Any]) -> tuple[bool, bool]:
    """(enable_confidence_head, which is by default whether its loss has a weight; confidence_head_with_markov)."""
    stated = boolean(raw, nested, "enable_confidence_head")
    weight = either(raw, nested, "confidence_head_alpha") or 0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise DataError(f"the drafter's config.json has confidence_head_alpha {quote(weight)}; expected a number.")
    confident = weight > 0 if stated is None else stated
    with_markov = bool(boolean(raw, nested, "confidence_head_with_markov"))
    return confident, confident and with_markov


def markov_keys(config: Any) -> dict[str, Any]:
    """The keys of a DrafterConfig with a Markov head, for both places."""
    return {
        "projector_type": PROJECTOR,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "confidence_head_alpha": 1.0 if config.enable_confidence_head else 0.0,
        _ATTENTION: "gqa" if config.num_key_value_heads < config.num_attention_heads else "mha",
    }


def markov_problems(config: Any) -> list[tuple[bool, str]]:
    """(whether it is so, what is wrong) with the Markov head of a DrafterConfig."""
    c, markov = config, config.head == MARKOV
    return [
        (
            markov and (c.markov_rank < 1 or c.markov_head_type not in MARKOV_KINDS),
            f"markov_rank {c.markov_rank} must be positive and markov_head_type {c.markov_head_type!r} one of"
            f" {', '.join(MARKOV_KINDS)}",
        ),
        (
            markov and (not c.shift_label or c.pure_draft_prefix_len != 0),
            f"head markov has shift_label {c.shift_label} and pure_draft_prefix_len {c.pure_draft_prefix_len}, but its"
            " drafters are always shifted and correct every draft",
        ),
    ]

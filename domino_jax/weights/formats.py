"""The folders a drafter is exported as, and which released servers draft with it as it was trained.

What the servers do was read in the sources of SGLang 0.5.23 and vLLM 0.33, and for Markov drafters in vLLM's
qwen3_dspark.py.
"""

import re
from pathlib import Path
from typing import Any

from domino_jax.method.config import DrafterConfig
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.names import DFLASH2, DOMINO, MARKOV, MEDUSA, NONE, VANILLA

# serving: what SGLang and vLLM open. specforge: what SpecForge's training continues from. vllm: Medusa heads with the
# copy of the target's lm_head that vLLM demands; for other drafters the same as serving.
FORMATS = (SERVING, SPECFORGE, VLLM) = ("serving", "specforge", "vllm")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def public_config(config: AnyConfig, format: str = SERVING, verifier: str | None = None) -> dict[str, Any]:
    """The config.json of an exported folder.

    Args:
        format: one of FORMATS.  verifier: the target's path; a hub id lets vLLM start from the folder alone.
    """
    raw = config.to_dict()
    if not config.has_backbone:
        return raw
    if format == SPECFORGE and config.head == DOMINO:
        return {**raw, "architectures": ["DominoDraftModel"]}
    if format != SPECFORGE and config.head == NONE and vllm_refusal(config) is None and is_hub_id(verifier):
        raw |= speculators_keys(config, verifier)
    return raw


def speculators_keys(config: DrafterConfig, verifier: str) -> dict[str, Any]:
    """The keys with which `vllm serve FOLDER` finds the target and the number of drafts by itself."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "speculators_model_type": "dflash",
        # vLLM demands the key; it reads the layers' shapes from the top level, where SGLang reads them too.
        "transformer_layer_config": {},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


def is_hub_id(path: str | None) -> bool:
    """True for "owner/name" that is no folder here. A revision has no key to be written under, so it makes none."""
    return path is not None and _HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def sglang_refusal(config: AnyConfig) -> str | None:
    """Why SGLang does not draft with this drafter as it was trained; None when it does."""
    if not config.has_backbone:
        return "SGLang has no Medusa heads" if config.head == MEDUSA else None
    if config.head == MARKOV and config.markov_head_type != VANILLA:
        return f"SGLang has the vanilla Markov head, and this drafter has the {config.markov_head_type} one"
    if config.head == DOMINO and config.pure_draft_prefix_len != 1:
        return f"SGLang requires pure_draft_prefix_len 1, and this drafter has {config.pure_draft_prefix_len}"
    if config.shift_label and config.head == NONE:
        return "SGLang reads a plain DFlash drafter as unshifted and would draft one position late"
    return _convolution_refusal(config)


def vllm_refusal(config: AnyConfig, format: str = SERVING) -> str | None:
    """Why vLLM does not draft with this drafter, exported in this format, as it was trained; None when it does."""
    if not config.has_backbone:
        if format == VLLM:
            return None
        missing = "vLLM demands a copy of the target's lm_head in the folder: export with --format=vllm"
        return missing if config.head == MEDUSA else None
    if config.head == MARKOV and config.markov_head_type != VANILLA:
        return f"vLLM has the vanilla Markov head, and this drafter has the {config.markov_head_type} one"
    if config.head == DOMINO:
        return "vLLM has no Domino head"
    if config.head == NONE and config.shift_label:
        return "vLLM refuses sample_from_anchor for DFlash"
    return _convolution_refusal(config)


def _convolution_refusal(config: DrafterConfig) -> str | None:
    """Servers know a selector and convolutions together only."""
    if config.head == DFLASH2 and not config.conv_kernel_size:
        return "servers read DFlash2 drafters with convolutions only, and this one has conv_kernel_size 0"
    if config.head != DFLASH2 and config.conv_kernel_size:
        return f"servers read convolutions of DFlash2 drafters only, and this one has head {config.head}"
    return None


def serving_note(config: AnyConfig, format: str = SERVING) -> str | None:
    """A sentence for whoever exports a drafter that no released server drafts with; None for the others."""
    reasons = sglang_refusal(config), vllm_refusal(config, format)
    if None in reasons:
        return None
    return (
        f"SGLang cannot serve this drafter: {reasons[0]}. vLLM cannot either: {reasons[1]}. domino_jax.decode reads it."
    )

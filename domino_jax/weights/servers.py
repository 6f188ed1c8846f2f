"""Other servers: which of them draft with a drafter as it was trained, under which name, and the folder that they open.

A head without a line in SERVERS is served here only. What the servers do was read in the sources of SGLang 0.5.23 and
vLLM 0.33, and compared with SGLang's classes and with vLLM 0.32 (docs/serving.md).
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import AnyConfig
from domino_jax.method.heads.eagle3 import CHAIN
from domino_jax.method.heads.markov import VANILLA
from domino_jax.weights import speculators

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/")


class Names(NamedTuple):
    """A head's method in SGLang and in vLLM, and the flags without which SGLang drafts otherwise than in training."""

    sglang: str
    vllm: str
    sglang_flags: str = ""


_CHAIN_FLAGS = f" --speculative-num-steps {CHAIN} --speculative-eagle-topk 1 --speculative-num-draft-tokens {CHAIN + 1}"
SERVERS = {
    "none": Names("DFLASH", "dflash"),
    "domino": Names("DFLASH", "dflash", " --speculative-domino-candidate-pool-size 0"),
    "markov": Names("DSPARK", "dspark"),
    "dflash2": Names("DFLASH", "dflash"),
    "xpress": Names("DFLASH", "dflash"),
    "eagle3": Names("EAGLE3", "eagle3", _CHAIN_FLAGS),
}


def server_refusals(config: AnyConfig) -> tuple[str | None, str | None]:
    """Why SGLang, and why vLLM, does not draft with a drafter as it was trained; None where it does."""
    if config.head not in SERVERS:
        return f"SGLang has no {config.title} head", f"vLLM has no {config.title} head"
    if not config.has_backbone:
        return "SGLang does not know norm_before_residual" if config.norm_before_residual else None, None
    sglang = vllm = None
    if config.head == "dflash2" and not config.conv_kernel_size:
        sglang = vllm = "servers read DFlash2 drafters with convolutions only, and this one has conv_kernel_size 0"
    elif config.head != "dflash2" and config.conv_kernel_size:
        sglang = vllm = f"servers read convolutions in DFlash2 drafters only, and this one has head {config.head}"
    if config.head == "none" and config.shift_label:
        sglang = "SGLang reads a plain DFlash drafter as unshifted and would draft one position late"
        vllm = "vLLM refuses sample_from_anchor for DFlash"
    elif config.head == "domino":
        vllm = "vLLM has no Domino head without the plug-in in integrations/vllm"
        if config.pure_draft_prefix_len != 1:
            sglang = f"SGLang requires pure_draft_prefix_len 1, and this drafter has {config.pure_draft_prefix_len}"
    elif config.head == "markov" and config.markov_head_type != VANILLA:
        vllm = f"vLLM has the vanilla Markov head, and this drafter has the {config.markov_head_type} one"
    elif config.head == "xpress":
        sglang = "SGLang has no xPress head"
        vllm = "vLLM refuses sample_from_anchor for xPress" if config.shift_label else vllm
    return sglang, vllm


def served_drafts(config: AnyConfig) -> int:
    """Drafts of a round in these servers, which verify as many rows as a block of the DFlash family has slots."""
    of_dflash = config.head in SERVERS and SERVERS[config.head].vllm == "dflash"
    return config.block_size - 1 if of_dflash else config.num_drafts


def serving_note(config: AnyConfig) -> str | None:
    """A sentence for whoever exports a drafter that no other released server drafts with; None for the others."""
    reasons = server_refusals(config)
    if None in reasons:
        return None
    return (
        f"SGLang cannot serve this drafter: {reasons[0]}. vLLM cannot either: {reasons[1]}. domino_jax.serve and"
        " domino_jax.decode read it."
    )


# ---------------------------------------------------------------------------------------------------------- the folder


def public_config(config: AnyConfig, verifier: str | None = None) -> dict[str, Any]:
    """The config.json of an exported folder.

    verifier: the target's path; a hub id lets vLLM start from a plain DFlash folder alone.
    """
    raw = config.to_dict()
    if config.head == "none" and server_refusals(config)[1] is None and is_hub_id(verifier):
        # The keys of speculators do not state causal full layers: there, they always read the whole block.
        if not (config.is_causal and "full_attention" in raw["layer_types"]):
            raw |= _speculators_keys(config, raw, verifier)
    return raw


def _speculators_keys(config: DrafterConfig, raw: dict[str, Any], verifier: str) -> dict[str, Any]:
    """The keys with which `vllm serve FOLDER` finds the target and the number of drafts by itself, and with which
    speculators opens the folder. Readers of flat files read theirs beside them.

    raw: the flat config.json.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {name: raw[name] for name in speculators.LAYER_KEYS},
        speculators.LAYER_IDS: [index + 1 for index in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "sample_from_anchor": config.shift_label,
        "sliding_window_non_causal": config.is_causal is False,
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


def hub_id(path: str) -> str | None:
    """The hub id that a path is, without a revision, or that a folder of the hub's cache belongs to; else None."""
    name, cached = path.partition("@")[0], _CACHED.search(path)
    return f"{cached[1]}/{cached[2]}" if cached else name if is_hub_id(name) else None

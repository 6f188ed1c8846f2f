"""Other servers: which of them draft with a drafter as it was trained, and under which name.

A head without a line in SERVERS is served here only. What the servers do was read in the sources of SGLang 0.5.23 and
vLLM 0.33, and compared with SGLang's classes and with vLLM 0.32 (docs/serving.md).
"""

import re
from pathlib import Path
from typing import NamedTuple

from domino_jax.method.drafters import AnyConfig
from domino_jax.method.heads.eagle3 import CHAIN
from domino_jax.method.heads.markov import VANILLA

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


def hub_id(path: str) -> str | None:
    """The hub id that a path is, without a revision, or that a folder of the hub's cache belongs to; else None."""
    name, cached = path.partition("@")[0], _CACHED.search(path)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None

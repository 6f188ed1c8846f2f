"""The folder of a Domino drafter: its conventions, the tensors of its head, and what this adapter refuses."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from safetensors import safe_open

from integrations.sglang_jax.head import Head

PROJECTORS = ("domino", "causal_v5")
TENSORS = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")
# Keys that the engine's backbone ignores, and their values without effect.
NEUTRAL = {
    **dict.fromkeys(("is_causal", "causal", "conv_kernel_size", "final_logit_softcapping"), 0),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), 1),
    "rope_scaling": None,
}


class Unsupported(ValueError):
    """A folder or an option that this adapter or the engine cannot draft with; its text is a whole message."""


class HeadConfig(NamedTuple):
    """block_size: G, slots of the backbone.  shift_label: slot k predicts the token at a + k + 1, else at a + k.
    pure_draft_prefix_len: drafts of the base logits alone."""

    block_size: int
    shift_label: bool
    pure_draft_prefix_len: int

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 0 if self.shift_label else 1

    @property
    def num_drafts(self) -> int:
        """M, the drafts of a round: G shifted, G - 1 unshifted."""
        return self.block_size - self.first_slot

    def check_rows(self, rows: int) -> None:
        """Raises Unsupported if a round cannot verify `rows` rows, the anchor and drafts."""
        if not 2 <= rows <= self.num_drafts + 1:
            raise Unsupported(
                f"--speculative-num-draft-tokens is {rows}, but this drafter's block gives at most"
                f" {self.num_drafts + 1} rows, the anchor and {self.num_drafts} drafts. Leave the option out for all."
            )


def local_folder(path: str, revision: str | None = None) -> Path:
    """The folder at `path`, or that of a hub id in the hub's cache."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"]))


def read_json(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unsupported(f"{folder}/config.json cannot be read: {error}.") from error


def check_rope(folder: Path) -> None:
    """Raises Unsupported for a config.json of transformers 5 alone: the engine's version reads rope_theta only."""
    raw = read_json(folder)
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta"))
    if theta is None or raw.get("rope_theta") != theta:
        raise Unsupported(
            f"{folder}/config.json has rope_theta {raw.get('rope_theta')}, and {theta} in rope_parameters. The engine"
            " reads the first: set both to the value of the training."
        )


def read_config(folder: Path) -> HeadConfig:
    """The conventions of the drafter in `folder`.

    Raises:
        Unsupported: it is no Domino drafter, lacks a key, or computes what the engine does not.
    """
    raw = read_json(folder)
    values = raw | (raw.get("dflash_config") or {})
    if values.get("projector_type") not in PROJECTORS:
        raise Unsupported(
            f"{folder} has projector_type {values.get('projector_type')!r}, and this adapter drafts with 'domino' only."
            " The engine itself drafts with plain DFlash and EAGLE-3: start it with sgl_jax.launch_server."
        )
    missing = [name for name in ("block_size", "shift_label") if values.get(name) is None]
    if missing:
        raise Unsupported(f"{folder}/config.json lacks {', '.join(missing)}: add the values of the training.")
    refused = {name: values[name] for name, neutral in NEUTRAL.items() if values.get(name) not in (None, neutral)}
    if "sliding_attention" in (raw.get("layer_types") or ()):
        refused["layer_types"] = raw["layer_types"]
    if refused:
        raise Unsupported(f"{folder}/config.json has {refused}, which the engine's backbone ignores.")
    check_rope(folder)
    return HeadConfig(values["block_size"], values["shift_label"], values.get("pure_draft_prefix_len") or 0)


def read_head(folder: Path, dtype: Any, width: int, vocab: int) -> Head:
    """The head's tensors, from torch's [out, in], in `dtype` on the default device.

    Args:
        width, vocab: D and V of the target.

    Raises:
        Unsupported: a tensor is missing, or the head belongs to another target.
    """
    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "flax") as file:
            names = {name: name.removeprefix("logit_head.") for name in file.keys()}  # noqa: SIM118
            stored |= {short: file.get_tensor(name) for name, short in names.items() if short in TENSORS}
    missing = [name for name in TENSORS if name not in stored]
    if missing:
        raise Unsupported(f"{folder} has no tensor {', '.join(missing)}.")
    gates_x, gates_h, down, up = (stored[name].T for name in TENSORS)
    if (gates_x.shape[0], up.shape[1]) != (width, vocab):
        raise Unsupported(
            f"{folder} has a head for width {gates_x.shape[0]} and {up.shape[1]} tokens, and the target has width"
            f" {width} and {vocab} tokens. Use the target that the drafter was trained for."
        )
    head = Head(gates_x, gates_h, down[:width], down[width:], up)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), head)

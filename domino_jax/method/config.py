"""A drafter's config.json: read from either of the two places of a key, written in the public layout.

A config also says what the package asks of a drafter's head. `DrafterConfig` has the answers of plain DFlash, a
backbone without a head; a file in heads/ has a subclass with other ones (kinds.py collects them).
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from domino_jax.method.config_keys import (
    DFLASH,
    either,
    integer,
    lacks,
    listed,
    number,
    public_keys,
    refuse,
    refuse_variants,
    section,
    shift_label,
    sliding_window,
    twin_switch,
)
from domino_jax.method.kind import Kind
from domino_jax.method.losses import LossSettings
from domino_jax.models.decoder_config import DecoderConfig, read_decoder_fields
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.models.tables import Entry, rename
from domino_jax.runtime.errors import DataError

CONVOLUTION = ("conv_kernel_size", "conv_group_size")
TRANSFORMS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# What these options are where they have no effect, and so are not written.
_NEUTRAL = {**dict.fromkeys(CONVOLUTION, 0), "input_embedding_scale": 1.0, "output_multiplier": 1.0}
# Far above any public drafter: more slots or a larger rank are refused before anything is allocated.
LARGEST_BLOCK, LARGEST_RANK = 4_096, 65_536
# Early files and those of speculators keep the head's tensors under these.
_HEAD_PREFIXES = ("logit_head.", "logits_correction.")


@dataclasses.dataclass(frozen=True)
class DrafterConfig(Kind, DecoderConfig):
    """Shapes and conventions of one drafter. Field names are those of the public config.json.

    architecture: the class that its files name.  needed: keys of the head that a file must have.
    own_keys: keys that drafters of other heads must not have.
    speculators: the speculators_model_type of its folders there.  speculators_keys: {the head's key in dflash_config:
    theirs}, which such a folder must have.  whole_blocks: there, sliding layers read the whole block by default.
    speculators_class: its class there, if folders are also written for it; speculators_names: {how tensors of the head
    begin: how they begin there}.
    """

    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    shift_label: bool
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    # Whether a slot reads only slots not after its own: in all layers, in none, or (None) in the sliding ones.
    is_causal: bool | None = None
    # Convolutions around attention and MLP: taps (0: none), and channels that share what their input decides.
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    # Factors and a cap on the block's embeddings and on the lm_head's logits (backbone.transformed_logits).
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    # No keys of a file: decode.draft_vocab, draft_window and draft_sink.
    draft_token_bytes: bytes = dataclasses.field(default=b"", repr=False)
    draft_window: int = 0
    draft_sink: int = 0

    architecture, has_backbone = "DFlashDraftModel", True
    own_keys = needed = ()
    speculators, speculators_keys, whole_blocks = "dflash", {}, False
    speculators_class, speculators_names = "", {}
    pure_draft_prefix_len = 0  # slots that the head leaves as they are

    @property
    def head_rank(self) -> int:
        """E, the rank of the head's correction; 0 without a head."""
        return getattr(self, self.rank_key) if self.has_head else 0

    @property
    def conv_groups(self) -> int:
        """Groups of channels of the convolutions."""
        return self.hidden_size // self.conv_group_size

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token: 0 shifted, 1 unshifted (whose slot 0 is the anchor itself)."""
        return 0 if self.shift_label else 1

    @property
    def num_drafts(self) -> int:
        """M, tokens drafted per round: G shifted, G-1 unshifted."""
        return self.block_size - self.first_slot

    @property
    def suffix_start(self) -> int:
        """The first slot that gets the head's correction."""
        return self.first_slot + self.pure_draft_prefix_len

    def candidates(self, wanted: int) -> int:
        """Tokens of a slot that the head corrects."""
        return wanted

    def is_sliding(self, layer: int) -> bool:
        """True when this draft layer uses the sliding window."""
        return bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        """The sliding window of this draft layer, None where it reads all of the context."""
        return self.sliding_window if self.is_sliding(layer) else None

    def reach(self, layer: int) -> tuple[int | None, int]:
        """(window, sink): what a layer reads of the text when decoding; the window is None where it reads all of it."""
        trained = self.window(layer)
        window = min((rows for rows in (trained, self.draft_window) if rows), default=None)
        return window, 0 if trained else self.draft_sink

    def ring(self, layer: int) -> int | None:
        """Slots of the ring of a layer with a window: what it reads, a block, and a row more, which a commit of all
        drafts may take. None for a layer that keeps all of the text."""
        window, sink = self.reach(layer)
        return None if window is None else sink + window + self.block_size

    def kept_slots(self, part: int, slots: int) -> int:
        return min(slots, self.ring(part) or slots)

    def reusable(self, cached: int, text: int, prompt: int) -> int:
        """A window's rows before the end of a shorter prompt are lost once later ones took their slots."""
        for window, sink in map(self.reach, range(self.num_hidden_layers)):
            if window and prompt < text and text + 1 - window > sink:
                cached = min(cached, max(prompt + 1 - window, 0))
        return cached

    def causal(self, layer: int) -> bool:
        """True when a slot of this draft layer reads only the slots of its block that are not after its own."""
        return self.is_sliding(layer) if self.is_causal is None else self.is_causal

    @classmethod
    def matches(cls, raw: dict[str, Any], tensors: Collection[str]) -> bool:
        """True for any drafter with a backbone."""
        classes, keys = str(raw.get("architectures")), ("dflash_config", "target_layer_ids", "speculators_model_type")
        return any(name in classes for name in ("DFlash", "Domino", "DSpark")) or any(map(raw.get, keys))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Any = None) -> "DrafterConfig":
        dflash = section(raw, "dflash_config")
        refuse_variants(raw, dflash, cls.own_keys)
        names = ("block_size", "mask_token_id", "target_layer_ids", *cls.needed)
        values = {name: either(raw, dflash, name) for name in names}
        missing = [name for name, value in values.items() if value is None]
        missing += [] if raw.get("num_target_layers") is not None else ["num_target_layers"]
        if missing:
            raise lacks(cls.head if cls.has_head else DFLASH, *missing)
        layer_ids = listed("target_layer_ids", values["target_layer_ids"])
        config = cls(
            **read_decoder_fields(raw),
            num_target_layers=integer("num_target_layers", raw["num_target_layers"]),
            block_size=integer("block_size", values["block_size"]),
            mask_token_id=integer("mask_token_id", values["mask_token_id"]),
            target_layer_ids=tuple(integer("target_layer_ids", index) for index in layer_ids),
            layer_types=tuple(map(str, listed("layer_types", raw.get("layer_types") or ()))),
            sliding_window=sliding_window(raw),
            is_causal=twin_switch(raw, dflash, "is_causal", "causal"),  # vLLM reads dflash_config.causal
            **_options(raw, dflash),
            **cls.head_fields(raw, dflash),
        )
        config.check()
        return config

    @classmethod
    def head_fields(cls, raw: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
        """shift_label and the head's own fields of a config.json; nested: its dflash_config.

        Raises:
            DataError: a key that is missing or contradicts the head's layout.
        """
        return {"shift_label": bool(shift_label(raw, nested))}

    @classmethod
    def from_speculators(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The head's keys of dflash_config, from a config.json of speculators."""
        return {"projector_type": cls.speculators, **{name: raw[key] for name, key in cls.speculators_keys.items()}}

    def to_speculators(self) -> dict[str, Any]:
        """The head's keys of a config.json of speculators."""
        return {theirs: getattr(self, ours) for ours, theirs in self.speculators_keys.items()}

    @classmethod
    def for_target(
        cls, target: Qwen3Config, *, num_layers: int, target_layer_ids=None, mask_token_id: int | None = None, **choices
    ) -> "DrafterConfig":
        """A new drafter of `num_layers` layers with the target's widths, where `choices` of other fields give no other.

        Args:
            target_layer_ids: None for the public rule (default_layer_ids).
            mask_token_id: None for the last row of the embedding, where only shapes and speed matter.
        """
        ids = target_layer_ids or default_layer_ids(target.num_hidden_layers, num_layers)
        shared = dataclasses.asdict(target)
        del shared["tie_word_embeddings"], shared["experts"]
        shared["num_hidden_layers"] = num_layers
        config = cls(
            # A drafter is Qwen3-like whatever its target: its public layout has norms on queries and keys, no biases.
            **{**shared, "attention_bias": False, "qk_norm": True, **choices},
            num_target_layers=target.num_hidden_layers,
            target_layer_ids=tuple(ids),
            mask_token_id=target.vocab_size - 1 if mask_token_id is None else mask_token_id,
        )
        config.check()
        return config

    def to_dict(self) -> dict[str, Any]:
        layer_types = list(self.layer_types) or ["full_attention"] * self.num_hidden_layers
        top, nested = self.head_keys()
        options = {name: getattr(self, name) for name in (*CONVOLUTION, *TRANSFORMS)}
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
            "layer_types": layer_types,
            **public_keys(self),
            "attention_bias": self.attention_bias,
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_hidden_layers,
            **({} if self.is_causal is None else {"is_causal": self.is_causal}),
            **top,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **{name: value for name, value in options.items() if value != _NEUTRAL.get(name)},
                **nested,
            },
        }

    def head_keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The head's keys of config.json, at the top level and in dflash_config, with the layout's shift_label."""
        # How servers spell it: vLLM refuses such a drafter by this key instead of drafting one position late.
        shifted = {"sample_from_anchor": True} if self.shift_label else {}
        return shifted, {"shift_label": self.shift_label, **shifted}

    def check(self) -> None:
        """Raises DataError for values that contradict each other; a head adds its own."""
        ids, last, taps = list(self.target_layer_ids), self.num_target_layers - 1, self.conv_kernel_size
        size, types = self.block_size, set(self.layer_types)
        refuse(not 2 <= size <= LARGEST_BLOCK, f"block_size {size} must be in 2..{LARGEST_BLOCK}")
        if self.has_head:
            refuse(
                not 1 <= self.head_rank <= LARGEST_RANK,
                f"{self.rank_key} {self.head_rank} must be in 1..{LARGEST_RANK}",
            )
        refuse(len(set(ids)) != len(ids) or not ids, f"target_layer_ids {ids} must be distinct and at least one")
        refuse(
            any(not 0 <= index < last for index in ids),
            f"target_layer_ids {ids} must be in 0..{last - 1}: the target has {last + 1} layers, and the last one's"
            " public hidden state is already normed",
        )
        refuse(
            not 0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is not a row of the {self.vocab_size}-row embedding",
        )
        refuse(
            len(self.layer_types) not in (0, self.num_hidden_layers),
            f"layer_types has {len(self.layer_types)} entries for num_hidden_layers {self.num_hidden_layers}",
        )
        refuse(
            not types <= {"full_attention", "sliding_attention"},
            f"layer_types {sorted(types)} may hold full_attention and sliding_attention only",
        )
        refuse(
            "sliding_attention" in types and (self.sliding_window or 0) < 1,
            "layer_types holds sliding_attention, but sliding_window and use_sliding_window leave it without a window",
        )
        refuse(
            self.only_shift not in (None, self.shift_label),
            f"head {self.head} has shift_label {self.shift_label}, but its drafters always have {self.only_shift}",
        )
        refuse(
            not 0 <= taps <= size, f"conv_kernel_size {taps} is not in 0..{size}, the block_size (0: no convolutions)"
        )
        refuse(
            taps > 0 and (self.conv_group_size < 1 or self.hidden_size % self.conv_group_size != 0),
            f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}",
        )

    def aliases(self, table: list[Entry]) -> dict[str, str]:
        head = [entry.name for entry in table if entry.path[0] == "head"]
        names = {prefix + name: name for prefix in _HEAD_PREFIXES for name in head}
        return names | {rename(name, self.speculators_names): name for name in head}

    @classmethod
    def loss_settings(cls, recipe: Any, shared: dict[str, Any]) -> LossSettings:
        if recipe.train.loss == "own" and cls.own_loss:
            return cls.own_settings(recipe, shared)
        return LossSettings(**shared, dpace_alpha=recipe.train.dpace_alpha)

    @classmethod
    def own_settings(cls, recipe: Any, shared: dict[str, Any]) -> LossSettings:
        """`loss_settings` of a head with `own_loss`."""
        raise NotImplementedError

    def sglang_refusal(self) -> str | None:
        if self.shift_label and not self.has_head:
            return "SGLang reads a plain DFlash drafter as unshifted and would draft one position late"
        return self.convolution_refusal()

    def vllm_refusal(self) -> str | None:
        if self.shift_label and not self.has_head:
            return "vLLM refuses sample_from_anchor for DFlash"
        return self.convolution_refusal()

    def convolution_refusal(self) -> str | None:
        """Servers know a selector and convolutions together only."""
        if self.conv_kernel_size:
            return f"servers read convolutions of drafters with a selector only, and this one has head {self.head}"
        return None


def _options(raw: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """The convolutions and transforms that are stated."""
    stated = {name: value for name in (*CONVOLUTION, *TRANSFORMS) if (value := either(raw, nested, name)) is not None}
    if stated.get("final_logit_softcapping") == 0:
        del stated["final_logit_softcapping"]  # servers read 0 as no cap
    return {name: number(name, value) if name in TRANSFORMS else integer(name, value) for name, value in stated.items()}


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The public rule for new drafters: L//2 for one, else round(1 + i·(L-4)/(n-1))."""
    if draft_layers == 1:
        return (target_layers // 2,)
    ids = tuple(round(1 + index * (target_layers - 4) / (draft_layers - 1)) for index in range(draft_layers))
    if len(set(ids)) != len(ids):
        raise DataError(
            f"{draft_layers} draft layers over a target of {target_layers} layers give doubled layer ids {list(ids)};"
            " set drafter.target_layer_ids or use fewer layers."
        )
    return ids

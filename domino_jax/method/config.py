"""A drafter's config.json: read from either of the two places of a key, written in the public layout.

`DrafterConfig` is the config of all drafters with a backbone. By itself it describes plain DFlash, which has no head; a
file in heads/ has a subclass with the head's fields and answers (head.py).
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from domino_jax.method.config_keys import (
    DFLASH,
    SLIDING,
    public_keys,
    read_key,
    read_windows,
    refuse,
    refuse_other_layout,
    refuse_variants,
    section,
)
from domino_jax.method.fields import (
    BY_HEAD,
    LARGEST_BLOCK,
    NESTED,
    TOP,
    check_ranges,
    field,
    fields_of,
    read_fields,
    written,
)
from domino_jax.method.head import HeadConfig
from domino_jax.models.decoder_config import DecoderConfig, read_decoder_fields
from domino_jax.models.qwen3 import Qwen3Config

CONVOLUTION = ("conv_kernel_size", "conv_group_size")
TRANSFORMS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# Keys of the recipe that not all drafters read: about blocks, and about Domino's curriculum.
BLOCK_KEYS = ("num_layers", "intermediate_size", "block_size", "shift_label", "sliding_window")
BLOCK_KEYS += ("target_layer_ids", "mask_token_id", "num_anchors", "remat", "loss", "gamma")
LAMBDA_KEYS = ("lambda_start", "lambda_decay_ratio")


@dataclasses.dataclass(frozen=True)
class DrafterConfig(HeadConfig, DecoderConfig):
    """Shapes and conventions of one drafter. Fields are named as in the public config.json."""

    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    num_target_layers: int = field(place=TOP)
    block_size: int = field(place=TOP, least=2, most=LARGEST_BLOCK)
    mask_token_id: int = field()
    target_layer_ids: tuple[int, ...] = field()
    # Whether slot k predicts the token after its own; the other names are speculators' and vLLM's, and DeepSpec's.
    shift_label: bool = field(False, also=("sample_from_anchor", "query_zero_predicts_next"), place=BY_HEAD)
    # Whether a slot reads only slots not after its own: in all layers, in none, or (None) in the sliding ones.
    is_causal: bool | None = field(None, also=("causal",), place=TOP, quiet=True)  # vLLM reads dflash_config.causal
    # Convolutions around attention and MLP: taps (0: none), and channels that share what their input decides.
    conv_kernel_size: int = field(0, quiet=True)
    conv_group_size: int = field(0, quiet=True)
    # Factors and a cap on the block's embeddings and on the lm_head's logits (backbone.transformed_logits).
    input_embedding_scale: float = field(1.0, quiet=True)
    output_multiplier: float = field(1.0, quiet=True)
    final_logit_softcapping: float | None = field(None, quiet=True)
    # No keys of a file: decode.draft_vocab and draft_window.
    draft_token_bytes: bytes = dataclasses.field(default=b"", repr=False)
    draft_window: int = 0

    pure_draft_prefix_len = 0  # first drafts of a block that the head leaves as they are; a field of Domino's
    head, title, known_by = "none", "DFlash", ("DFlash", "Domino", "DSpark")
    tensor_names = {"backbone.": ""}
    reads = (*BLOCK_KEYS, "dpace_alpha")

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

    # ------------------------------------------------- the rows of the text and of their block that a layer reads

    def window(self, layer: int) -> int | None:
        """The sliding window of this draft layer, None where it reads all of the context."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """True when a slot of this draft layer reads only the slots of its block that are not after its own."""
        return self.window(layer) is not None if self.is_causal is None else self.is_causal

    def reach(self, layer: int) -> int | None:
        """The rows at the end of the text that a layer reads when decoding; None where it reads all of it."""
        return min((rows for rows in (self.window(layer), self.draft_window) if rows), default=None)

    # --------------------------------------------------------------------------------------------------------- files

    @classmethod
    def matches(cls, raw: dict[str, Any], tensors: Collection[str]) -> bool:
        """Whether a config.json or the names of tensors are such a drafter's, in any of the public layouts."""
        stated = str(raw.get("architectures"))
        projector = read_key(raw, section(raw, "dflash_config"), "projector_type")
        keys = ("dflash_config", "target_layer_ids", "speculators_model_type")  # of all drafters with a backbone
        named = projector in cls.known_by or any(name in stated for name in cls.known_by)
        return named or (cls is DrafterConfig and any(map(raw.get, keys)))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Any = None) -> "DrafterConfig":
        """Reads a parsed config.json; raises DataError naming a missing, doubled or impossible key.

        target: a Qwen3Config, for EAGLE-3's files, which may leave their layers to it.
        """
        nested = section(raw, "dflash_config")
        own = fields_of(cls, DrafterConfig)
        refuse_variants(raw, nested, {*cls.own_keys, *(name for entry in own for name in (entry.name, *entry.also))})
        cls.refuse_other_layout(raw, nested)
        fields = read_decoder_fields(raw)
        fields |= read_fields(cls, raw, nested, cls.needed, cls.head if cls.has_head else DFLASH)
        fields |= {name: value for name, value in cls.fixed.items() if name in fields}
        kinds, window, whole = read_windows(raw, nested)
        if whole and fields["is_causal"] is None:
            fields["is_causal"] = False
        config = cls(**fields, layer_types=kinds, sliding_window=window)
        config.check()
        return config

    @classmethod
    def refuse_other_layout(cls, raw: dict[str, Any], nested: dict[str, Any]) -> None:
        """Raises DataError for a key with another value than all drafters of this head have (`fixed`)."""
        fixed = [entry for entry in fields_of(cls) if entry.name in cls.fixed]
        also = {name: cls.fixed[entry.name] for entry in fixed for name in entry.also}
        refuse_other_layout(raw, nested, cls.title, cls.fixed | also)

    def to_dict(self) -> dict[str, Any]:
        """The public config.json."""
        top, nested = self.head_keys()
        shared = list(fields_of(DrafterConfig))
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types) or ["full_attention"] * self.num_hidden_layers,
            **public_keys(self),
            "attention_bias": self.attention_bias,
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_hidden_layers,
            **written(self, shared, TOP),
            **top,
            "dflash_config": {**written(self, shared, NESTED), **nested},
        }

    def head_keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The head's keys of config.json, at the top level and in dflash_config."""
        # How servers spell it: vLLM refuses such a drafter by this key instead of drafting one position late.
        shifted = {"sample_from_anchor": True} if self.shift_label else {}
        return shifted, {"shift_label": self.shift_label, **shifted, **self.head_fields()}

    def head_fields(self) -> dict[str, Any]:
        """{field of the head: its value}, as config.json has them."""
        return written(self, fields_of(self, DrafterConfig))

    def check(self) -> None:
        check_ranges(self)
        ids, last, taps = list(self.target_layer_ids), self.num_target_layers - 1, self.conv_kernel_size
        refuse(
            not ids or len(set(ids)) != len(ids),
            "target_layer_ids",
            f"target_layer_ids {ids} must be distinct and at least one; name others, or use fewer draft layers",
        )
        refuse(
            any(not 0 <= index < last for index in ids),
            "target_layer_ids",
            f"target_layer_ids {ids} must be in 0..{last - 1}: the target has {last + 1} layers, and the last one's"
            " public hidden state is already normed",
        )
        refuse(
            not 0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            f"mask_token_id {self.mask_token_id} is not a row of the {self.vocab_size}-row embedding",
        )
        self._check_windows()
        only = self.fixed.get("shift_label", self.shift_label)
        refuse(
            self.shift_label != only,
            "shift_label",
            f"head {self.head} has shift_label {self.shift_label}, but its drafters always have {only}",
        )
        refuse(
            not 0 <= taps <= self.block_size,
            "conv_kernel_size",
            f"conv_kernel_size {taps} is not in 0..{self.block_size}, the block_size (0: no convolutions)",
        )
        refuse(
            taps > 0 and (self.conv_group_size < 1 or self.hidden_size % self.conv_group_size != 0),
            "conv_group_size",
            f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}",
        )

    def _check_windows(self) -> None:
        kinds, layers = set(self.layer_types), self.num_hidden_layers
        refuse(
            len(self.layer_types) not in (0, layers),
            "layer_types",
            f"layer_types has {len(self.layer_types)} entries for num_hidden_layers {layers}",
        )
        refuse(
            not kinds <= {"full_attention", SLIDING},
            "layer_types",
            f"layer_types {sorted(kinds)} may hold full_attention and sliding_attention only",
        )
        refuse(
            SLIDING in kinds and (self.sliding_window or 0) < 1,
            "sliding_window",
            "layer_types holds sliding_attention, but sliding_window and use_sliding_window leave it without a window",
        )

    # ------------------------------------------------------------------------------------------------- a new drafter

    @classmethod
    def for_target(
        cls, target: Qwen3Config, *, num_layers: int, target_layer_ids=None, mask_token_id: int | None = None, **choices
    ) -> "DrafterConfig":
        """A new drafter of `num_layers` layers with the target's widths, where `choices` of other fields give no other.

        Args:
            target_layer_ids: None for the public rule (default_layer_ids).
            mask_token_id: None for the last row of the embedding, where only shapes and speed matter.
        """
        # Qwen3-like whatever its target: the public layout has norms on queries and keys, no biases.
        shapes = target.layer_fields() | {"num_hidden_layers": num_layers, "attention_bias": False, "qk_norm": True}
        config = cls(
            **shapes | choices,
            num_target_layers=target.num_hidden_layers,
            target_layer_ids=tuple(target_layer_ids or default_layer_ids(target.num_hidden_layers, num_layers)),
            mask_token_id=target.vocab_size - 1 if mask_token_id is None else mask_token_id,
        )
        config.check()
        return config


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The public rule for new drafters: L//2 for one, else round(1 + i·(L-4)/(n-1))."""
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + index * (target_layers - 4) / (draft_layers - 1)) for index in range(draft_layers))

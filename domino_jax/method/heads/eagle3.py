"""The config.json of an EAGLE-3 drafter, in both public conventions of layer ids, and its draft vocabulary."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from domino_jax.method.config_keys import (
    LAYER_VARIANTS,
    SLIDING,
    integer,
    public_keys,
    read_list,
    read_windows,
    section,
)
from domino_jax.method.fields import field
from domino_jax.method.head import HeadConfig
from domino_jax.method.heads.eagle3_model import Eagle3, Eagle3Loss
from domino_jax.models.decoder_config import (
    LIMITS,
    WRITTEN_WITH,
    DecoderConfig,
    read_decoder_fields,
    read_switch,
    refuse_unsupported,
    refuse_values,
)
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import ConfigError, DataError, quote

EAGLE3 = "eagle3"
# The default and the largest length of a chain; the default is the public number of training passes.
CHAIN, LONGEST_CHAIN = 7, 64
FUSED_LAYERS = 3  # layers of the target whose outputs are fused
OFFSETS, MEMBERS = VOCABULARY = ("d2t", "t2d")
ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# SafeAILab's folders name the class of a target.
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
NORMS = ("norm_output", "norm_before_fc", "norm_before_residual")
# Keys of other drafters with these tensors, or nearly, and the values without effect.
_VARIANTS = LAYER_VARIANTS | {
    **dict.fromkeys(("fc_norm", "use_aux_norm", "attention_bias", "use_mtp_layernorm", "parallel_drafting"), (False,)),
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_aux_hidden_state"), (True,)),
    **dict.fromkeys(("num_hidden_layers", "parallel_draft_step"), (1,)),
    "num_aux_hidden_states": (FUSED_LAYERS,),
}
# In eagle_config servers read the second of NORMS alone.
_NESTED_VARIANTS = _VARIANTS | {"norm_output": (False,), "norm_before_residual": (False,)}
_ROPE_THETA = 10_000.0  # what Llama means without the key, which published folders leave out


@dataclasses.dataclass(frozen=True)
class Eagle3Config(HeadConfig, DecoderConfig):
    """Shapes of one drafter; vocab_size is the target's.

    target_layer_ids: zero-based layers of the target whose outputs are fused.
    draft_vocab_size: V_d.
    norm_output: a drafted row gets the normed state of the row before.  norm_before_fc: the features are normed before
        they are fused.  norm_before_residual: the layer adds to the normed state.
    sliding_window: how many rows a row reads, its own included; None: all of them.
    """

    target_layer_ids: tuple[int, ...]
    # The most frequent tokens of the training rows' answers; all if the target has fewer.
    draft_vocab_size: int = field(least=1, recipe=32_000, shape=True)
    draft_token_bytes: bytes = dataclasses.field(default=b"", repr=False)
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    sliding_window: int | None = None

    head, title, paper = EAGLE3, "EAGLE-3", " (arXiv 2503.01840)"
    has_backbone, module, loss = False, Eagle3, Eagle3Loss
    tensor_names = {}
    reads = ("intermediate_size", "target_layer_ids", "remat")
    mask_token_id = shift_label = None  # of blocks
    num_drafts = CHAIN
    most_drafts = LONGEST_CHAIN

    @property
    def block_size(self) -> int:
        """Rows of the pass that verifies a chain of the usual length, the anchor's included."""
        return self.num_drafts + 1

    @property
    def target_ids(self) -> np.ndarray:
        """draft_tokens, or all tokens where these are the draft vocabulary."""
        return self.draft_tokens if len(self.draft_tokens) else np.arange(self.vocab_size, dtype=np.int32)

    @classmethod
    def matches(cls, raw: dict[str, Any], tensors: Collection[str]) -> bool:
        stated = "Eagle3" in str(raw.get("architectures")) or raw.get("speculators_model_type") == EAGLE3
        layers = any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in tensors)
        return stated or "eagle_config" in raw or (LAYER_IDS in raw and "dflash_config" not in raw) or layers

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Qwen3Config | None = None) -> "Eagle3Config":
        """As DrafterConfig.from_dict, without the draft vocabulary, which is in d2t.

        target: for a file without layer ids; None: such a file is refused.
        """
        nested = section(raw, "eagle_config")
        names = raw.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            raise ConfigError(
                f"({EAGLE3}) has architectures {quote(names)}; only {' and '.join(ARCHITECTURES)} are supported."
            )
        refuse_unsupported(raw)
        refuse_values(raw, _VARIANTS | {"target_hidden_size": (raw.get("hidden_size"),)})
        refuse_values(nested, _NESTED_VARIANTS, "eagle_config.")
        theta = {} if "rope_theta" in raw or section(raw, "rope_parameters") else {"rope_theta": _ROPE_THETA}
        fields = read_decoder_fields(theta | raw, llama=True)
        size = raw.get("draft_vocab_size")
        size = fields["vocab_size"] if size is None else integer("draft_vocab_size", size, 1, fields["vocab_size"])
        ids = _layer_ids(raw, nested, target.num_hidden_layers if target else None)
        norms = {name: read_switch(raw, name) for name in NORMS}
        if "norm_before_fc" in nested:
            norms["norm_before_fc"] = read_switch(nested, "norm_before_fc")
        kinds, window, _ = read_windows(raw, {})
        choices = {"draft_vocab_size": size, "sliding_window": window if SLIDING in kinds else None, **norms}
        config = cls(**fields, **choices, qk_norm=False, target_layer_ids=ids)
        tokens = [integer("draft_tokens", token) for token in read_list("draft_tokens", raw.get("draft_tokens") or [])]
        return config.with_draft_tokens(tokens) if tokens else config

    @classmethod
    def for_target(
        cls,
        target: Qwen3Config,
        *,
        draft_vocab_size: int | None = None,
        target_layer_ids: Sequence[int] | None = None,
        intermediate_size: int | None = None,
    ) -> "Eagle3Config":
        """A new drafter with the target's widths, of which intermediate_size may be another.

        Its draft vocabulary is the first tokens, for where only shapes and speed matter.

        Args:
            draft_vocab_size: None for all tokens.  target_layer_ids: None for the public rule.
        """
        ids = tuple(target_layer_ids or default_layer_ids(target.num_hidden_layers))
        _check_ids(ids, target.num_hidden_layers)
        shapes = target.layer_fields() | {"num_hidden_layers": 1, "attention_bias": False, "qk_norm": False}
        shapes["intermediate_size"] = intermediate_size or target.intermediate_size
        size = min(draft_vocab_size or target.vocab_size, target.vocab_size)
        return cls(**shapes, target_layer_ids=ids, draft_vocab_size=size).with_draft_tokens(range(size))

    def with_draft_tokens(self, tokens: Sequence[int]) -> "Eagle3Config":
        """The config with this draft vocabulary; a DataError if it does not fit draft_vocab_size or the target's."""
        ids, count, vocab = np.asarray(tokens, np.int64), self.draft_vocab_size, self.vocab_size
        if len(ids) != count or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab:
            raise DataError(
                f"the draft vocabulary must be {count} tokens (draft_vocab_size) in ascending order, each below"
                f" vocab_size {vocab}, and it is {len(ids)} tokens from {ids.min()} to {ids.max()}. d2t holds offsets:"
                " draft token i is the target's token i + d2t[i]."
            )
        return self if count == vocab else self.with_vocabulary(ids)

    def to_dict(self) -> dict[str, Any]:
        window = {"layer_types": [SLIDING], "sliding_window": self.sliding_window}
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **public_keys(self),
            "attention_bias": False,
            "mlp_bias": False,
            "draft_vocab_size": self.draft_vocab_size,
            **{name: True for name in NORMS if getattr(self, name)},
            **(window if self.sliding_window else {}),
            # vLLM reads the layers here, counted by their inputs, and SGLang in eagle_config, counted by their outputs.
            LAYER_IDS: [index + 1 for index in self.target_layer_ids],
            "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(self.target_layer_ids)},
        }

    def with_tensors(self, tensors: Any) -> "Eagle3Config":
        """The config with the draft vocabulary from d2t, against which t2d is checked."""
        missing = [name for name in VOCABULARY if name not in tensors]
        if self.draft_vocab_size == self.vocab_size and len(missing) == len(VOCABULARY):
            return self
        if missing:
            raise DataError(
                f"{tensors.folder} lacks {' and '.join(missing)}, which map its {self.draft_vocab_size} draft tokens to"
                f" the target's {self.vocab_size}."
            )
        offsets = tensors.read(OFFSETS).reshape(-1)
        config = self.with_draft_tokens(np.arange(offsets.size) + offsets)
        if not np.array_equal(np.flatnonzero(tensors.read(MEMBERS)), config.target_ids):
            raise DataError(f"{tensors.folder}: {OFFSETS} and {MEMBERS} name different tokens; d2t holds offsets.")
        return config

    def extra_tensors(self) -> dict[str, np.ndarray]:
        tokens = np.asarray(self.target_ids, np.int64)
        members = np.zeros(self.vocab_size, bool)
        members[tokens] = True
        return {OFFSETS: tokens - np.arange(len(tokens)), MEMBERS: members}


def default_layer_ids(target_layers: int) -> tuple[int, ...]:
    """The public rule: the outputs of layers 1, L//2 - 1 and L - 4."""
    return (1, target_layers // 2 - 1, target_layers - 4)


def _layer_ids(raw: dict[str, Any], nested: dict[str, Any], target_layers: int | None) -> tuple[int, ...]:
    """Zero-based layers whose outputs are fused, from eagle_config, or from the top level, where ids are one higher.

    target_layers: for the public rule, where neither place has them.
    """
    stated = set()
    for place, ids, shift in (
        (f"eagle_config.{LAYER_IDS}", nested.get(LAYER_IDS), 0),
        (LAYER_IDS, raw.get(LAYER_IDS), 1),
    ):
        if ids is not None:
            stated.add(tuple(integer(place, index) - shift for index in read_list(place, ids)))
    if len(stated) > 1:
        raise ConfigError(
            f"has {LAYER_IDS} {list(nested[LAYER_IDS])} in eagle_config and"
            f" {list(raw[LAYER_IDS])} at top level, where the same layers are one higher each; {WRITTEN_WITH}"
        )
    if not stated and target_layers is None:
        raise ConfigError(f"lacks eagle_config.{LAYER_IDS}.")
    ids = stated.pop() if stated else default_layer_ids(target_layers)
    counting = f"\neagle_config.{LAYER_IDS} counts them from 0; at top level the ids are one higher."
    _check_ids(ids, LIMITS["num_hidden_layers"], counting)
    return ids


def _check_ids(ids: tuple[int, ...], target_layers: int, hint: str = "") -> None:
    inside = all(0 <= index < target_layers - 1 for index in ids)
    if not inside or len(ids) != FUSED_LAYERS or len(set(ids)) != FUSED_LAYERS:
        raise DataError(
            f"target_layer_ids {list(ids)} must be {FUSED_LAYERS} different layers of the target from 0 to"
            f" {target_layers - 2}, whose outputs the drafter fuses.{hint}",
            "target_layer_ids",
        )

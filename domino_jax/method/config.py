"""A drafter's config.json: read from either of the two places of a key, written in the public layout."""

import dataclasses
from collections.abc import Collection
from typing import Any

from domino_jax.method.config_keys import (
    DFLASH,
    DOMINO_NAMES,
    WRITTEN_WITH,
    boolean,
    either,
    integer,
    listed,
    optional_integer,
    public_keys,
    refuse_variants,
    section,
    shift_label,
    sliding_window,
)
from domino_jax.method.heads.dflash2_keys import CLASS as DFLASH2_CLASS
from domino_jax.method.heads.dflash2_keys import OWN as DFLASH2_OWN
from domino_jax.method.heads.dflash2_keys import REQUIRED as DFLASH2_REQUIRED
from domino_jax.method.heads.dflash2_keys import check_layout, is_dflash2, option_fields, option_keys, option_problems
from domino_jax.method.heads.markov_keys import CLASS as DSPARK_CLASS
from domino_jax.method.heads.markov_keys import OWN as DSPARK_OWN
from domino_jax.method.heads.markov_keys import is_dspark, markov_fields, markov_keys, markov_problems
from domino_jax.method.names import (
    DFLASH2,
    DOMINO,
    EAGLE3,
    LARGEST_BLOCK,
    LARGEST_RANK,
    MARKOV,
    NONE,
    RANK_KEYS,
)
from domino_jax.models.decoder_config import DecoderConfig, read_decoder_fields
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError


@dataclasses.dataclass(frozen=True)
class DrafterConfig(DecoderConfig):
    """Shapes and conventions of one drafter. Field names are those of the public config.json."""

    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    head: str  # one of names.BLOCK_HEADS
    shift_label: bool
    pure_draft_prefix_len: int = 0
    emb_dim: int = 0
    gru_hidden_dim: int = 0
    markov_rank: int = 0
    markov_head_type: str = ""  # one of names.MARKOV_KINDS
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    # Whether a slot reads only slots not after its own: in all layers, in none, or (None) in the sliding ones.
    is_causal: bool | None = None
    # DFlash2's convolutions around attention and MLP: taps (0: none), and channels that share what their input decides.
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    # Factors and a cap on the block's embeddings and on the lm_head's logits (backbone.transformed_logits).
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    has_backbone = True  # the drafters of names.ROW_DRAFTERS have none

    @property
    def has_head(self) -> bool:
        """False for a plain DFlash drafter."""
        return self.head != NONE

    @property
    def head_rank(self) -> int:
        """E, the rank of the head's correction; 0 without a head."""
        return getattr(self, RANK_KEYS[self.head]) if self.has_head else 0

    @property
    def reads_embeddings(self) -> bool:
        """Whether the head reads the target's embeddings of tokens; else it reads their ids."""
        return self.head == DOMINO

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
    def most_drafts(self) -> int:
        """The largest number of drafts that a round may ask for; here all that it makes."""
        return self.num_drafts

    @property
    def suffix_start(self) -> int:
        """The first slot that gets the head's correction."""
        return self.first_slot + self.pure_draft_prefix_len

    def candidates(self, wanted: int) -> int:
        """Tokens of a slot that the head corrects: `wanted`, but a selector always its own number."""
        return self.selector_top_k or wanted

    def is_sliding(self, layer: int) -> bool:
        """True when this draft layer uses the sliding window."""
        return bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        """The sliding window of this draft layer, None where it reads all of the context."""
        return self.sliding_window if self.is_sliding(layer) else None

    def causal(self, layer: int) -> bool:
        """True when a slot of this draft layer reads only the slots of its block that are not after its own."""
        return self.is_sliding(layer) if self.is_causal is None else self.is_causal

    @staticmethod
    def matches(raw: dict[str, Any], tensors: Collection[str]) -> bool:
        """True for the keys, or the tensors, of a drafter with a backbone, in any of the public layouts."""
        classes = str(raw.get("architectures"))
        return (
            any(name in classes for name in ("DFlash", "Domino", "DSpark"))
            or any(raw.get(name) for name in ("dflash_config", "target_layer_ids"))
            or raw.get("speculators_model_type") not in (None, EAGLE3)
            or {"fc.weight", "hidden_norm.weight"} <= set(tensors)
        )

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "DrafterConfig":
        """Reads a parsed config.json; raises DataError naming a missing, doubled or impossible key."""
        dflash = section(raw, "dflash_config")
        dspark, dflash2 = is_dspark(raw, dflash), is_dflash2(raw)
        refuse_variants(raw, dflash, DSPARK_OWN if dspark else DFLASH2_OWN if dflash2 else ())
        shifted, markov = shift_label(raw, dflash), {}
        if dspark:
            shifted, markov = True, markov_fields(raw, dflash)
        if dflash2:
            check_layout(raw, dflash)
        head = head_of(raw)
        needed = ["block_size", "mask_token_id", "target_layer_ids"]
        needed += {DOMINO: ["emb_dim"], DFLASH2: DFLASH2_REQUIRED}.get(head, [])
        values = {name: either(raw, dflash, name) for name in needed}
        missing = [name for name, value in values.items() if value is None]
        missing += ["shift_label"] if head == DOMINO and shifted is None else []
        missing += [] if raw.get("num_target_layers") is not None else ["num_target_layers"]
        if missing:
            raise DataError(
                f"the drafter's config.json ({DFLASH if head == NONE else head}) lacks {', '.join(missing)}, at top"
                " level and in dflash_config; these are never guessed: add the values it was trained with."
            )
        emb_dim = optional_integer(raw, dflash, "emb_dim", 0)
        layer_ids = listed("target_layer_ids", values["target_layer_ids"])
        config = cls(
            **read_decoder_fields(raw),
            num_target_layers=integer("num_target_layers", raw["num_target_layers"]),
            block_size=integer("block_size", values["block_size"]),
            mask_token_id=integer("mask_token_id", values["mask_token_id"]),
            target_layer_ids=tuple(integer("target_layer_ids", index) for index in layer_ids),
            head=head,
            shift_label=bool(shifted),
            pure_draft_prefix_len=optional_integer(raw, dflash, "pure_draft_prefix_len", 0),
            emb_dim=emb_dim,
            gru_hidden_dim=optional_integer(raw, dflash, "gru_hidden_dim", emb_dim),
            layer_types=tuple(map(str, listed("layer_types", raw.get("layer_types") or ()))),
            sliding_window=sliding_window(raw),
            is_causal=_is_causal(raw, dflash),
            **markov,
            **option_fields(raw, dflash),
        )
        config.check()
        return config

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
        del shared["tie_word_embeddings"]
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
        """The public config.json."""
        layer_types = list(self.layer_types) or ["full_attention"] * self.num_hidden_layers
        head = {}
        if self.head == DOMINO:
            names = ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")
            head = {"projector_type": DOMINO, **{name: getattr(self, name) for name in names}}
        markov = markov_keys(self) if self.head == MARKOV else {}
        # How servers spell it: vLLM refuses such a drafter by this key instead of drafting one position late.
        shifted = {"sample_from_anchor": True} if self.shift_label and self.head == NONE else {}
        # Public Markov drafters have no shift_label: they are shifted. Those of DFlash2 are not, and have the block
        # size in dflash_config alone.
        layouts = {MARKOV: {}, DFLASH2: {"block_size": self.block_size}}
        return {
            "architectures": [{MARKOV: DSPARK_CLASS, DFLASH2: DFLASH2_CLASS}.get(self.head, "DFlashDraftModel")],
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
            **shifted,
            **markov,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **layouts.get(self.head, {"shift_label": self.shift_label}),
                **shifted,
                **option_keys(self),
                **head,
                **markov,
            },
        }

    def check(self) -> None:
        """Raises DataError for values that contradict each other."""
        last = self.num_target_layers - 1
        problems = [
            (
                self.block_size > LARGEST_BLOCK,
                f"block_size {self.block_size} is larger than {LARGEST_BLOCK}, far beyond any public drafter's",
            ),
            (
                max(self.emb_dim, self.gru_hidden_dim, self.markov_rank, self.selector_rank) > LARGEST_RANK,
                f"emb_dim {self.emb_dim}, gru_hidden_dim {self.gru_hidden_dim}, markov_rank {self.markov_rank} and"
                f" selector_rank {self.selector_rank} may be at most {LARGEST_RANK}",
            ),
            (self.block_size < 2, f"block_size {self.block_size} leaves nothing to draft; it must be at least 2"),
            (
                len(set(self.target_layer_ids)) != len(self.target_layer_ids) or not self.target_layer_ids,
                f"target_layer_ids {list(self.target_layer_ids)} must be distinct and at least one",
            ),
            (
                any(not 0 <= index < last for index in self.target_layer_ids),
                f"target_layer_ids {list(self.target_layer_ids)} must be in 0..{last - 1}: the target has {last + 1}"
                " layers, and the last one's public hidden state is already normed",
            ),
            (
                not 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} is not a row of the {self.vocab_size}-row embedding",
            ),
            (
                self.head == DOMINO and not 0 <= self.suffix_start < self.block_size,
                f"pure_draft_prefix_len {self.pure_draft_prefix_len} leaves the head no slot of block_size"
                f" {self.block_size}",
            ),
            (
                self.head == DOMINO and min(self.emb_dim, self.gru_hidden_dim) < 1,
                "emb_dim and gru_hidden_dim must be positive",
            ),
            (
                bool(self.layer_types) and len(self.layer_types) != self.num_hidden_layers,
                f"layer_types has {len(self.layer_types)} entries for num_hidden_layers {self.num_hidden_layers}",
            ),
            (
                not set(self.layer_types) <= {"full_attention", "sliding_attention"},
                f"layer_types {sorted(set(self.layer_types))} may hold full_attention and sliding_attention only",
            ),
            (
                "sliding_attention" in self.layer_types and not self.sliding_window,
                "layer_types holds sliding_attention, but sliding_window and use_sliding_window leave it without a"
                " window",
            ),
        ]
        for wrong, message in [*problems, *markov_problems(self), *option_problems(self)]:
            if wrong:
                raise DataError(f"drafter config: {message}.")


def _is_causal(raw: dict[str, Any], nested: dict[str, Any]) -> bool | None:
    """is_causal, which vLLM also reads as dflash_config.causal; None without either."""
    ours, theirs = (boolean(raw, nested, name) for name in ("is_causal", "causal"))
    if None not in (ours, theirs) and ours != theirs:
        raise DataError(
            f"the drafter's config.json gives is_causal {ours} and causal {theirs}, which mean the same; {WRITTEN_WITH}"
        )
    return theirs if ours is None else ours


def head_of(raw: dict[str, Any]) -> str:
    """The head (names.BLOCK_HEADS) of a parsed config.json."""
    dflash = section(raw, "dflash_config")
    if is_dflash2(raw):
        return DFLASH2
    if is_dspark(raw, dflash):
        return MARKOV if either(raw, dflash, "markov_rank") else NONE
    return DOMINO if either(raw, dflash, "projector_type") in DOMINO_NAMES else NONE


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

"""The config.json of a Domino drafter as the engine reads it, and the options with which it cannot draft."""

from typing import Any, NamedTuple

PROJECTORS = ("domino", "causal_v5")
ARCHITECTURE = "DFlashDominoDraftModel"  # without DFlash in front the engine would add it
HEAD_KEYS = ("projector_type", "shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")
# Keys that the engine's backbone ignores, and their values without effect.
NEUTRAL = {
    **dict.fromkeys(("conv_kernel_size", "final_logit_softcapping"), 0),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), 1),
}
CANDIDATES = 64  # of each slot, as domino_jax corrects
CANDIDATES_KEY = "domino_head_candidates"  # in the engine's --additional-config


class Unsupported(ValueError):
    """A folder or an option that the plug-in or the engine cannot draft with; its text is a whole message."""


class HeadConfig(NamedTuple):
    """block_size: G, slots of the backbone.  shift_label: slot k predicts the token at a + k + 1, else at a + k.
    pure_draft_prefix_len: drafts of the base logits alone.  emb_dim: E.  gru_hidden_dim: U."""

    block_size: int
    shift_label: bool
    pure_draft_prefix_len: int
    emb_dim: int
    gru_hidden_dim: int

    @property
    def num_drafts(self) -> int:
        """M, the drafts of a round: G shifted, G - 1 unshifted."""
        return self.block_size if self.shift_label else self.block_size - 1


def is_domino(config: Any) -> bool:
    """True for the Hugging Face config of a Domino drafter."""
    return values_of(config).get("projector_type") in PROJECTORS


def values_of(config: Any) -> dict[str, Any]:
    """The keys of a Hugging Face config, those of dflash_config among them."""
    raw = config.to_dict()
    return raw | (raw.get("dflash_config") or {})


def read_head_config(config: Any) -> HeadConfig:
    """The conventions of a Domino drafter.

    Raises:
        Unsupported: a key is missing, or the backbone computes what the engine's does not.
    """
    values = values_of(config)
    needed = ("block_size", "shift_label", "emb_dim", "mask_token_id", "target_layer_ids")
    missing = [name for name in needed if values.get(name) is None]
    if missing:
        raise Unsupported(f"The drafter's config.json lacks {', '.join(missing)}: add the values of the training.")
    refused = {name: values[name] for name, neutral in NEUTRAL.items() if values.get(name) not in (None, neutral)}
    if refused:
        raise Unsupported(f"The drafter's config.json has {refused}, which vLLM's backbone ignores.")
    prefix, rank = values.get("pure_draft_prefix_len") or 0, values["emb_dim"]
    return HeadConfig(
        values["block_size"], values["shift_label"], prefix, rank, values.get("gru_hidden_dim") or rank
    )


def check_options(vllm_config: Any) -> HeadConfig:
    """The conventions of the drafter of this run.

    Raises:
        Unsupported: an option with which a Domino drafter cannot work.
    """
    options, target = vllm_config.speculative_config, vllm_config.model_config
    config = read_head_config(options.draft_model_config.hf_config)
    if options.method != "dflash":
        raise Unsupported(f'method is "{options.method}", and a Domino drafter needs "method": "dflash".')
    if options.num_speculative_tokens > config.num_drafts:
        raise Unsupported(
            f"num_speculative_tokens is {options.num_speculative_tokens}, but this drafter's block of"
            f" {config.block_size} gives at most {config.num_drafts} drafts."
        )
    if options.draft_sample_method != "greedy":
        raise Unsupported(f'draft_sample_method is "{options.draft_sample_method}", and Domino drafts are "greedy".')
    if options.draft_model_config.quantization is not None:
        raise Unsupported(
            f"The drafter is quantised ({options.draft_model_config.quantization}), and the plug-in reads float weights."
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise Unsupported(
            "pipeline_parallel_size is"
            f" {vllm_config.parallel_config.pipeline_parallel_size}, and a Domino drafter needs the target's embeddings"
            " and lm_head on one stage. Use tensor_parallel_size."
        )
    drafter = options.draft_model_config.get_hidden_size(), options.draft_model_config.get_vocab_size()
    if drafter != (target.get_hidden_size(), target.get_vocab_size()):
        raise Unsupported(
            f"The drafter has width {drafter[0]} and {drafter[1]} tokens, and the target {target.get_hidden_size()} and"
            f" {target.get_vocab_size()}. Use the target that the drafter was trained for."
        )
    return config


def candidates(vllm_config: Any) -> int:
    """Q, the tokens of a slot that the head corrects; 0: all."""
    options = vllm_config.additional_config
    count = options.get(CANDIDATES_KEY, CANDIDATES) if isinstance(options, dict) else CANDIDATES
    if not isinstance(count, int) or count < 0:
        raise Unsupported(f"{CANDIDATES_KEY} is {count!r}; it is a number of tokens, or 0 for all.")
    return count

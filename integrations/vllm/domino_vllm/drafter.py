"""The config.json of a Domino drafter as the engine reads it, and the options with which it cannot draft."""

from typing import Any, NamedTuple

PROJECTORS = ("domino", "causal_v5")
ARCHITECTURE = "DFlashDominoDraftModel"  # without DFlash in front the engine would add it
NEEDED = ("mask_token_id", "target_layer_ids", "block_size", "shift_label", "emb_dim")
HEAD_KEYS = (*NEEDED, "projector_type", "pure_draft_prefix_len", "gru_hidden_dim")
# Keys that the engine's backbone ignores, and their values without effect.
NEUTRAL = {
    **dict.fromkeys(("conv_kernel_size", "final_logit_softcapping"), 0),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), 1),
}
CANDIDATES_KEY, CANDIDATES = "domino_head_candidates", 64  # in --additional-config, and without it


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


def values_of(hf_config: Any) -> dict[str, Any]:
    """The keys of a Hugging Face config and of its dflash_config."""
    raw = hf_config.to_dict()
    return raw | (raw.get("dflash_config") or {})


def is_domino(hf_config: Any) -> bool:
    return values_of(hf_config).get("projector_type") in PROJECTORS


def read_head_config(hf_config: Any) -> HeadConfig:
    """The conventions of a Domino drafter.

    Raises:
        Unsupported: a key is missing, or the backbone computes what the engine's does not.
    """
    values = values_of(hf_config)
    missing = [name for name in NEEDED if values.get(name) is None]
    if missing:
        raise Unsupported(f"The drafter's config.json lacks {', '.join(missing)}: add the values of the training.")
    refused = {name: values[name] for name, neutral in NEUTRAL.items() if values.get(name) not in (None, neutral)}
    if refused:
        raise Unsupported(f"The drafter's config.json has {refused}, which vLLM's backbone ignores.")
    prefix, rank = values.get("pure_draft_prefix_len") or 0, values["emb_dim"]
    state = values.get("gru_hidden_dim") or rank
    return HeadConfig(values["block_size"], values["shift_label"], prefix, rank, state)


def check_options(vllm_config: Any) -> HeadConfig:
    """The conventions of this run's drafter.

    Raises:
        Unsupported: an option with which a Domino drafter cannot work.
    """
    options, target = vllm_config.speculative_config, vllm_config.model_config
    drafter, drafts, method = options.draft_model_config, options.num_speculative_tokens, options.draft_sample_method
    config, stages = read_head_config(drafter.hf_config), vllm_config.parallel_config.pipeline_parallel_size
    size, target_size = [(model.get_hidden_size(), model.get_vocab_size()) for model in (drafter, target)]
    for refused, sentence in (
        (options.method != "dflash", f'method is "{options.method}", but a Domino drafter needs "dflash".'),
        (
            drafts > config.num_drafts,
            f"num_speculative_tokens is {drafts}, but this drafter's block gives at most {config.num_drafts} drafts.",
        ),
        (method != "greedy", f'draft_sample_method is "{method}", but Domino drafts are greedy. Leave the option out.'),
        (
            options.use_local_argmax_reduction,
            "use_local_argmax_reduction is on, but Domino's head needs the logits. Leave the option out.",
        ),
        (drafter.quantization, f"The drafter is quantised ({drafter.quantization}), but Domino needs float weights."),
        (stages > 1, f"pipeline_parallel_size is {stages}, but Domino needs one stage. Use tensor_parallel_size."),
        (
            size != target_size,
            f"The drafter's width and number of tokens are {size}, but the target's {target_size}. Use the target that"
            " the drafter was trained for.",
        ),
    ):
        if refused:
            raise Unsupported(sentence)
    return config


def candidates(vllm_config: Any) -> int:
    """Q, the tokens of a slot that the head corrects; 0: all."""
    count = dict(vllm_config.additional_config).get(CANDIDATES_KEY, CANDIDATES)
    if not isinstance(count, int) or count < 0:
        raise Unsupported(f"{CANDIDATES_KEY} is {count!r}; it is a number of tokens, or 0 for all.")
    return count

"""What the package asks of a kind of drafter: a config is an instance of it, and a file in heads/ gives the answers."""

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np

from domino_jax.models.tables import EMBEDDING, LM_HEAD, Entry


class Kind:
    """The answers of a drafter without a head. Most belong to the class; methods that need shapes take a config.

    head: its name in a recipe.  title: its drafters' name.  paper: where they are described.
    specforge_class: the class for SpecForge's training, if it is not that of `to_dict`.
    sglang, vllm: the servers' names for the method, "" where they do not have it.
    sglang_flags: those without which SGLang drafts otherwise than the drafter was trained.
    has_backbone: it drafts blocks with a backbone, and so trees as well as chains. Without one it drafts chains, and
        has a draft vocabulary that is counted in the training rows.
    has_head: a head (head.py) corrects the backbone's logits.
    has_confidence: the head also estimates each draft's chance.
    reads_embeddings: the head reads the target's embeddings of tokens, else their ids.
    only_candidates: tokens that are no candidates have no probability.
    lead: slots that the head reads before the first one that predicts a token: 1 where it reads the anchor's slot of
        unshifted blocks, and so the token before the anchor.
    head_passes: passes over a block in which its head drafts; 0: it drafts slot after slot.
    rank_key: the field with the rank of the head.
    tensor_names: {how a parameter's name begins (tables.table_of): how its tensor's does}; the first that fits.
    copies: {a copy of a tensor of the target that a folder may store: the target's}.
    """

    head, title, paper, specforge_class = "none", "DFlash", "", None
    sglang, vllm, sglang_flags = "DFLASH", "dflash", ""
    has_backbone, has_head, has_confidence = False, False, False
    reads_embeddings, only_candidates = False, False
    lead, head_passes = 0, 0
    rank_key = ""
    tensor_names = {"backbone.": ""}
    copies = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}
    # `draft_tokens` as bytes. Jitted functions hash the config at every call, and Python keeps the hash of bytes, while
    # it would go through 32,000 numbers of a tuple again.
    draft_token_bytes = b""

    @property
    def draft_tokens(self) -> np.ndarray:
        """The target's ids of the draft vocabulary, int32, ascending; empty: all tokens can be drafted."""
        return np.frombuffer(self.draft_token_bytes, np.int32)

    @property
    def most_drafts(self) -> int:
        """The largest number of drafts that a round may ask for; all that it makes, where nothing else is said."""
        return self.num_drafts

    def with_vocabulary(self, tokens: np.ndarray) -> Any:
        """The config of a drafter whose parameters hold these tokens' columns alone."""
        return dataclasses.replace(self, draft_token_bytes=tokens.astype(np.int32).tobytes())

    def kept_slots(self, part: int, slots: int) -> int:
        """The slots of a part of what the drafter keeps of a text (kinds.py), beside `slots` of the target's cache."""
        return slots

    def reusable(self, cached: int, text: int, prompt: int) -> int:
        """With how many rows of an earlier text of `text` tokens a prompt can start that has `cached` ones in common
        with it and `prompt` tokens in all."""
        return cached

    # ------------------------------------------------------------------------------------------------------- files

    @classmethod
    def matches(cls, raw: dict[str, Any], tensors: Collection[str]) -> bool:
        """True for the keys of a config.json, or the tensors, of such a drafter in any of the public layouts."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, raw: dict[str, Any], target: Any = None) -> Any:
        """Reads a parsed config.json; raises DataError naming a missing, doubled or impossible key.

        target: a Qwen3Config, for a file that leaves to its target what other files state.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The public config.json."""
        raise NotImplementedError

    def stored(self) -> dict[str, Any]:
        """The config.json of a workdir, which has no tensors beside it."""
        return self.to_dict()

    def aliases(self, table: list[Entry]) -> dict[str, str]:
        """{other name of a tensor in public files: its name in the drafter's table}."""
        return {}

    def with_tensors(self, tensors: Any) -> Any:
        """The config with what a folder (hf.Tensors) stores of it as tensors."""
        return self

    def extra_tensors(self) -> dict[str, Any]:
        """These tensors, {name: array}."""
        return {}

    # ----------------------------------------------------------------------------------------------------- modules

    def module(self, dtype: Any, remat: bool = False) -> Any:
        """The module (kinds.py) of a drafter without a backbone; remat: a layer is computed again in the backward pass,
        if there is one."""
        raise NotImplementedError

    def head_module(self, dtype: Any, whole: bool) -> Any:
        """The head of a drafter that has one; the arguments are head.Head's."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------ recipe

    # What the recipe's drafter.shift_label and conv_kernel_size mean where they are absent: as in public checkpoints.
    shifts_labels, conv_taps = False, 0
    # The only shift_label that the head's drafters have.
    only_shift = None
    # Whether train.loss=own is another loss than Domino's, and whether that one reads D-PACE weights; whether
    # train.head_tokens may be the head's drafts.
    own_loss, own_dpace, reads_drafts = False, False, False
    # The keys of its section of the recipe, drafter.<head>.
    recipe_keys = {}
    # Keys for drafters of blocks, of the drafter and train sections, that a drafter without a backbone reads too.
    reads = ()

    @classmethod
    def for_recipe(cls, recipe: Any, target: Any, shared: dict[str, Any]) -> Any:
        """The config of a recipe's drafter for a target; shared: fields of any drafter with a backbone."""
        return cls.for_target(target, **shared, **cls.recipe_fields(recipe))

    @classmethod
    def recipe_fields(cls, recipe: Any) -> dict[str, Any]:
        """The fields of the head; here its keys in the recipe have the names of the fields."""
        return {name: recipe.drafter[cls.head][name] for name in cls.recipe_keys}

    @classmethod
    def loss_settings(cls, recipe: Any, shared: dict[str, Any]) -> Any:
        """The loss of a recipe; shared: choices of all losses of blocks."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- servers

    def sglang_refusal(self) -> str | None:
        """Why SGLang does not draft with this drafter as it was trained; None when it does."""
        return None

    def vllm_refusal(self) -> str | None:
        """Why vLLM does not draft with this drafter as it was trained; None when it does."""
        return None

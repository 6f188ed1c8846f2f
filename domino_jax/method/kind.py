"""What the package asks of a kind of drafter: a config is an instance of it, and a file in heads/ gives the answers."""

from collections.abc import Collection
from typing import Any

from domino_jax.models.tables import EMBEDDING, LM_HEAD, Entry


class Kind:
    """The answers of a drafter without a head; all are about the class but for those that need the shapes of a config.

    head: its name in a recipe.  title: its drafters' name.  paper: where they are described.
    specforge_class: the class for SpecForge's training, if it is not that of `to_dict`.
    sglang, vllm: the servers' names for the method, "" where they do not have it.
    sglang_flags: those without which SGLang drafts otherwise than the drafter was trained.
    has_backbone: it drafts blocks with a backbone.  has_head: a head (head.py) corrects the backbone's logits.
    has_confidence: the head also estimates each draft's chance.
    reads_embeddings: the head reads the target's embeddings of tokens, else their ids.
    only_candidates: tokens that are no candidates have no probability.
    draws_paths: it scores any path, so it drafts trees as well as chains.
    rank_key: the field with the rank of the head.  table_fields: those that its tables of tokens depend on.
    marks: keys of config.json that no drafter of another kind has.
    copies: {a copy of a tensor of the target that a folder may store: the target's}.
    layer_ids_hint: what to know about target_layer_ids that do not fit.
    """

    head, title, paper, specforge_class = "none", "DFlash", "", None
    sglang, vllm, sglang_flags = "DFLASH", "dflash", ""
    has_backbone, has_head, has_confidence = False, False, False
    reads_embeddings, only_candidates, draws_paths = False, False, True
    rank_key, table_fields, marks, layer_ids_hint = "", (), (), ""
    copies = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}

    # ------------------------------------------------------------------------------------------------------- files

    @classmethod
    def matches(cls, raw: dict[str, Any], tensors: Collection[str]) -> bool:
        """True for the keys of a config.json, or the tensors, of such a drafter in any of the public layouts."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Any:
        """Reads a parsed config.json; raises DataError naming a missing, doubled or impossible key."""
        raise NotImplementedError

    @classmethod
    def read(cls, raw: dict[str, Any], target: Any) -> Any:
        """from_dict for a file that leaves to its target, a Qwen3Config, what other files state."""
        return cls.from_dict(raw)

    @classmethod
    def from_stored(cls, raw: dict[str, Any]) -> Any:
        """The config of what `stored` returned."""
        return cls.from_dict(raw)

    def to_dict(self) -> dict[str, Any]:
        """The public config.json."""
        raise NotImplementedError

    def stored(self) -> dict[str, Any]:
        """The config.json of a workdir, which has no tensors beside it."""
        return self.to_dict()

    def table(self) -> list[Entry]:
        """Every tensor of floats of a drafter without a backbone."""
        raise NotImplementedError

    def aliases(self) -> dict[str, str]:
        """{other name of a tensor in public files: its name in the table}."""
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

    def head_table(self) -> list[Entry]:
        """The tensors of the head."""
        return []

    def head_ranks(self, own: Any, width: Any) -> dict[tuple[str, str], tuple]:
        """For each parameter of the head that has ranks, but for the last matrix, by axis the rank of each place.

        Args:
            own: [E], 0, 1, …, the ranks.  width: [D], that of places which belong to z: ranks.NO_RANK.
        """
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- servers

    def sglang_refusal(self) -> str | None:
        """Why SGLang does not draft with this drafter as it was trained; None when it does."""
        return None

    def vllm_refusal(self) -> str | None:
        """Why vLLM does not draft with this drafter as it was trained; None when it does."""
        return None

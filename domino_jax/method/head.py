"""The interface of a head: the answers of a drafter's config, and the module that corrects a backbone's logits.

A head is one file in heads/ with, in this order, a subclass of `Head`, its loss if that is not Domino's, and a subclass
of `DrafterConfig` (config.py), whose fields are keys of its files and recipes (fields.py).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.method.fields import keyed_fields
from domino_jax.method.losses import Loss
from domino_jax.models.layers import INIT_STD, Linear, Matrix, in_use, multiply
from domino_jax.models.quantized import is_quantized, transposed
from domino_jax.models.shapes import Hidden
from domino_jax.models.sharding import constrain_rows
from domino_jax.runtime.keys import Key, keys_of


class HeadConfig:
    """The package's questions about a drafter's head. The config of a drafter is an instance.

    A head gives the first five answers. The others have defaults, which describe a drafter without a head. `matches`,
    `from_dict` and `to_dict` read and write config.json; DrafterConfig has them for all drafters with a backbone.
    """

    head: str  # its name in a recipe
    title: str  # its drafters' name
    known_by: tuple[str, ...]  # what its files state in architectures, or as projector_type
    module: Any = None  # the subclass of Head; of a drafter without a backbone, the whole drafter
    tensor_names: Mapping[str, str]  # {how a parameter's name begins (tables.table_of): how its tensor's does}

    # ------------------------------------------------------------------------------------------------------ drafting

    # It drafts blocks, and so trees as well as chains. Without a backbone it drafts chains alone, and has a draft
    # vocabulary that is counted in the training rows.
    has_backbone = True
    reads_embeddings = False  # the head reads the target's embeddings of tokens, else their ids
    # Slots that the head reads before the first one that predicts a token: 1 where it reads the anchor's slot of
    # unshifted blocks, and so the token before the anchor.
    extra_slots = 0
    passes = 0  # over a block, in which the head drafts; 0: it drafts slot after slot
    only_candidates = 0  # how many candidates of a slot it scores, others having no probability; 0: any number

    # ------------------------------------------------------------------------------------------- training and recipe

    loss: Any = Loss
    reads: tuple[str, ...] = ()  # keys of the recipe's drafter and train sections that some heads do not read
    new: Mapping[str, Any] = {}  # fields of a new drafter that the recipe leaves open

    @classmethod
    def recipe_fields(cls, recipe: Any) -> dict[str, Any]:
        """The head's fields in a new drafter."""
        return {name: recipe.drafter[cls.head][key] for name, (key, _) in keyed_fields(cls).items()}

    # --------------------------------------------------------------------------------------------------------- files

    paper = ""  # where the head is described, for the card of an export
    architecture = "DFlashDraftModel"  # the class that its files name
    fixed: Mapping[str, Any] = {}  # {key of config.json: the only value of the head's drafters}
    needed: tuple[str, ...] = ()  # keys that a file must have, of DrafterConfig's fields with a default
    own_keys: tuple[str, ...] = ()  # keys that drafters of other heads must not have, beside its fields

    def check(self) -> None:
        """Raises DataError for values that contradict each other; a head adds its own checks."""

    def with_tensors(self, tensors: Any) -> Any:
        """The config with what a folder (hf.Tensors) stores of it as tensors."""
        return self

    def extra_tensors(self) -> dict[str, Any]:
        """These tensors, {name: array}."""
        return {}

    # ----------------------------------------------------------------------------------------- what follows from them

    has_head: bool  # a head corrects the logits of a backbone
    # `draft_tokens` as bytes. Jitted functions hash the config at every call, and Python keeps the hash of bytes, while
    # it would go through 32,000 numbers of a tuple again.
    draft_token_bytes = b""

    def __init_subclass__(cls) -> None:
        cls.has_head = cls.has_backbone and cls.module is not None

    @classmethod
    def recipe_keys(cls) -> dict[str, Key]:
        """The keys of the head's section of the recipe, drafter.<head>."""
        return dict(keyed_fields(cls).values()) | keys_of(cls.loss)

    @property
    def draft_tokens(self) -> np.ndarray:
        """The target's ids of the draft vocabulary, int32, ascending; empty: all tokens can be drafted."""
        return np.frombuffer(self.draft_token_bytes, np.int32)

    def with_vocabulary(self, tokens: np.ndarray) -> Any:
        """The config of a drafter whose parameters hold these tokens' columns alone."""
        return dataclasses.replace(self, draft_token_bytes=tokens.astype(np.int32).tobytes())

    @property
    def most_drafts(self) -> int:
        """The largest number of drafts that a round may ask for."""
        return self.num_drafts


class Head(nn.Module):
    """Logits of a slot = base logits + code · matrix. The code [..., E] follows from the slot's z, from the token
    before the slot, and from a state over all tokens before that one.

    A head defines `setup`, where `up` is `last_matrix()`, and the methods that raise here; one with a state also
    `initial_state` and `step`. They see T slots: those that predict a token, and before them `HeadConfig.extra_slots`
    others. For a token they get x: its target embedding [..., D] where `HeadConfig.reads_embeddings`, else its id,
    int32 [...].

    `z_terms` is called first, for whole blocks. Training then calls `codes`, and `residual` for slices of blocks.
    Drafting calls `step` for one slot at a time, a chain with arrays [B, ...], a tree with lanes, [B, W, ...]; or
    `codes` once per pass. With few candidates, `residual_of` replaces `residual`.

    reads_ahead: the head also has `reading`, a product with x alone, and `advance`, the rest of `step`. With few
    candidates of a slot a chain calls `reading` once, for all of them.
    """

    reads_ahead = False

    config: Any
    dtype: Any = jnp.float32
    whole: bool = False  # decoding on a mesh: every device computes all of it

    def initial_state(self, *batch: int) -> Any:
        """The state before any token: a tree of float32 arrays [*batch, ...], () for a head without a state."""
        return ()

    def z_terms(self, z: Hidden) -> jax.Array:
        """The part of the codes that z [B, T, D] of a block determines alone, for each slot one array: [B, T, any]."""
        raise NotImplementedError

    def step(self, state: Any, x: jax.Array, z_terms: jax.Array) -> tuple[Any, jax.Array]:
        """State, the token before the slot, and the slot's terms → (the state after that token, code [..., E])."""
        return state, self.codes(z_terms, x)

    def codes(self, z_terms: jax.Array, x: jax.Array) -> jax.Array:
        """Codes [B, t, E] of the first t slots, as t steps give them, from their terms and x [B, t, ...]."""
        raise NotImplementedError

    def use_all(self, z: Hidden, codes: jax.Array) -> None:
        """Makes the parameters that `codes` does not use; z [B, A, G, D], codes [B, A, M, E]."""
        self.residual(codes)

    def last_matrix(self, **choices: Any) -> Linear:
        """The matrix [E, N], stored as the parameter up/kernel; N is V or the size of a draft vocabulary."""
        columns = len(self.config.draft_tokens) or self.config.vocab_size
        return Linear(columns, dtype=self.dtype, whole=self.whole, logits=True, **choices)

    def token_table(self, rank: int) -> nn.Embed:
        """A table [V, rank] for `look_up`, stored as the parameter predecessor/embedding.

        Rows are cast, not the table: of a table in bfloat16 the gradient of a frequent token is summed in bfloat16, and
        comes out too small.
        """
        return nn.Embed(self.config.vocab_size, rank, embedding_init=nn.initializers.normal(INIT_STD))

    def look_up(self, tokens: jax.Array) -> jax.Array:
        """Rows [..., rank] of the table `predecessor`."""
        rows = self.predecessor(tokens).astype(self.dtype)
        return rows if self.whole else constrain_rows(rows)

    def residual(self, code: jax.Array) -> jax.Array:
        """Codes [..., E] → the correction of all logits, float32 [..., N]."""
        if self.is_initializing():
            return self.up(code)
        return multiply(code.astype(self.dtype), self._last_kernel(), logits=True)

    def _last_kernel(self) -> Matrix:
        """The matrix [E, N], however it is stored (rows_together)."""
        stored = self.up.variables["params"]
        if "rows" not in stored:
            return in_use(stored["kernel"], None if self.whole else "up", self.dtype)
        return transposed(in_use(stored["rows"], None, self.dtype))

    def rows(self, columns: jax.Array) -> jax.Array:
        """`columns` [..., Q] of the matrix as rows [..., Q, E]: all that `residual_of` reads of it."""
        kernel = self._last_kernel()
        if not is_quantized(kernel):
            return jnp.take(kernel.T, columns, axis=0)
        scale = jnp.take(kernel["scale"][0], columns)
        rows = jnp.take(kernel["q"].T, columns, axis=0).astype(jnp.float32)
        return (rows * scale[..., None]).astype(self.dtype)

    def residual_of(self, code: jax.Array, rows: jax.Array) -> jax.Array:
        """As `residual`, for a few tokens: codes [..., W, E], their `rows` [..., Q, E] → float32 [..., W, Q]."""
        return jnp.einsum("...we,...qe->...wq", code, rows, preferred_element_type=jnp.float32)

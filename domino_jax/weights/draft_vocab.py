"""A draft vocabulary for a block drafter: drafts are among the N most frequent tokens alone.

The lm_head and the head's last matrix are then read for N tokens only. The target verifies with all of them, so the
text is the same. `train` stores the order of the tokens with the drafter, in a file that no other engine opens: servers
read every *.safetensors of a folder as weights.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from domino_jax.data.token_counts import frequent_tokens, order_of_rows_in
from domino_jax.method.drafters import AnyConfig
from domino_jax.method.settings import DraftSettings
from domino_jax.models.layers import Matrix
from domino_jax.models.quantized import is_quantized
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights.hf import TOKEN_ORDER
from domino_jax.weights.safetensors_file import read_header
from domino_jax.weights.target import Params, Sharding

_TENSOR = "token_order"


def order_bytes(order: np.ndarray) -> bytes:
    """The content of the file TOKEN_ORDER; order: tokens int32, the most frequent first."""
    return safetensors.numpy.save({_TENSOR: np.ascontiguousarray(order, np.int32)})


def read_order(folder: Path, vocab: int) -> np.ndarray | None:
    """The order that is stored with a drafter, int32; None without the file.

    Raises DataError: a file that is damaged, or of another vocabulary.
    """
    path = folder / TOKEN_ORDER
    if not path.exists():
        return None
    stored = read_header(path)
    order = stored[_TENSOR].read() if _TENSOR in stored else np.zeros((0, 0))
    if order.ndim != 1 or order.dtype != np.int32 or ((order < 0) | (order >= vocab)).any():
        raise DataError(f"{path} holds no order of the target's {vocab} tokens; export the drafter again.")
    return order


def choose_tokens(
    folder: Path, config: AnyConfig, drafting: DraftSettings, tokenizer: Any, stop_ids: tuple[int, ...]
) -> np.ndarray:
    """The draft vocabulary of a drafter, int32 [N], ascending, with the ids that end an answer.

    Raises:
        DominoError: a size that the drafter cannot have.
        DataError: neither its folder nor drafting.draft_vocab_rows gives frequencies.
    """
    if problem := drafting.vocabulary_problem(config):
        raise DominoError(f"decode.{problem}")
    vocab = config.vocab_size
    order = read_order(folder, vocab)
    if order is None and drafting.draft_vocab_rows:
        order = order_of_rows_in(drafting.draft_vocab_rows, tokenizer, vocab)
    if order is None or not len(order):
        raise DataError(
            f"decode.draft_vocab is {drafting.draft_vocab}, but {folder} has no {TOKEN_ORDER} with the frequencies of"
            " tokens; name rows with answers in data.train (in Python draft_vocab_rows), or set draft_vocab to 0."
        )
    # A tokenizer may know ids that the embedding has no row for.
    always = [token for token in stop_ids if token < vocab]
    return frequent_tokens(order, vocab, drafting.draft_vocab, always)


def with_draft_vocab(
    config: AnyConfig, params: Params, target: Qwen3Config, target_params: Params, tokens: np.ndarray, place: Sharding
) -> tuple[AnyConfig, Params]:
    """The drafter that drafts among `tokens` int32 [N], with copies of their columns of the two matrices."""
    matrix = lm_head_of(target, target_params)
    params = {**params, "lm_head": {"kernel": _columns(matrix, tokens, ("lm_head", "kernel"), place)}}
    if config.has_head:
        up = _columns(params["head"]["up"]["kernel"], tokens, ("head", "up", "kernel"), place)
        params["head"] = {**params["head"], "up": {"kernel": up}}
    return config.with_vocabulary(tokens), params


def lm_head_of(target: Qwen3Config, params: Params) -> Matrix:
    """The matrix [D, V] of a target's logits."""
    return params["embed_tokens"]["embedding"].T if target.tie_word_embeddings else params["lm_head"]["kernel"]


def _columns(matrix: Matrix, tokens: np.ndarray, path: tuple[str, ...], place: Sharding) -> Matrix:
    """matrix [X, V] → [X, N]; of one in eight bits its scales as well."""
    if is_quantized(matrix):
        return {name: _columns(leaf, tokens, (*path, name), place) for name, leaf in matrix.items()}
    where = place(path, (matrix.shape[0], len(tokens))) if callable(place) else place
    return jax.jit(lambda matrix: jnp.take(matrix, tokens, axis=1), out_shardings=where)(matrix)

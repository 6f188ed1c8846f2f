"""From folders to models that can run: what the commands share. Nothing here knows a recipe."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from domino_jax.method.drafters import AnyConfig, new_drafter
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings
from domino_jax.models import kernels
from domino_jax.models.quantized import is_quantized, quantize, transposed
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.runtime.environment import device_name
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.remote import cache_folder
from domino_jax.weights import hf, target
from domino_jax.weights.draft_vocab import choose_tokens, lm_head_of, with_draft_vocab
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.quantization import INT8
from domino_jax.weights.target import Sharding

MATRICES = ("kernel", "weight_ih", "weight_hh")  # names of the parameters that layers.multiply takes
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target as its folder gives it; without a tokenizer (None) only token_ids can be prompts.

    stop_ids: what ends an answer, the token that closes a turn of the chat template included (hf.stop_ids).
    """

    path: str
    model: Qwen3
    params: dict
    tokenizer: Any
    stop_ids: tuple[int, ...]

    def stop_tokens(self) -> list[str]:
        """The stop ids with their text, as "151645 <|im_end|>"."""
        texts = [""] * len(self.stop_ids)
        if self.tokenizer is not None:
            texts = [self.tokenizer.decode([token], skip_special_tokens=False) for token in self.stop_ids]
        return [f"{token} {text}".strip() for token, text in zip(self.stop_ids, texts, strict=True)]


def load_target(path: str, dtype: str, sharding: Sharding = None, quantize: str | None = None) -> LoadedTarget:
    """Weights in `dtype` (float32 or bfloat16), tokenizer and stop ids of a local folder or a hub id.

    sharding: where the weights go (target.Sharding); this process' first device when None. Of a sharded weight
    a host reads what its devices hold.  quantize: a key of quantization.QUANTIZE, for copies in eight bits.
    """
    kernels.refuse_faulty()
    folder = hf.resolve_folder(path)
    config, params = target.load_target(folder, np.dtype(dtype), sharding, quantize)
    model = Qwen3(config, np.dtype(dtype))
    tokenizer = hf.load_tokenizer(folder)
    stop_ids = hf.stop_ids(folder, tokenizer)
    if not stop_ids:
        log.warning(
            "%s has no stop id, so every answer runs to max_new_tokens: neither generation_config.json nor config.json"
            " has an eos_token_id, and no chat template closes a turn with a special token. Write the id that ends an"
            ' answer into generation_config.json: {"eos_token_id": ID}.',
            path,
        )
    return LoadedTarget(str(path), model, params, tokenizer, stop_ids)


def use_exact_matmuls(dtype: str) -> None:
    """For commands, which own their process: float32 products are exact in all of it (see Programs.run)."""
    if dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")


def keep_compiled(folder: os.PathLike | None = None) -> None:
    """Keeps compiled programs in `folder`, so that the next run and the final decoding find what was compiled before;
    then tries this process' kernels, whose verdicts are kept there too.

    They are apart by devices and versions, so that machines can share the folder, which may be in a bucket; without one
    they are kept in the user's cache. Of several processes with accelerators process 0 alone writes, as jax has it. A
    cache that the environment names (JAX_COMPILATION_CACHE_DIR) stays in use.
    """
    if jax.default_backend() == "cpu" and jax.process_count() > 1:
        _write_from_every_process()
    if not jax.config.jax_compilation_cache_dir:
        with contextlib.suppress(OSError):
            folder = epath.Path(folder or cache_folder() / "programs") / device_name()
            if not is_remote(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # whoever writes there can run code here
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    kernels.refuse_faulty()


def _write_from_every_process() -> None:
    """Lets each process keep its programs: a CPU's are keyed by their process, and jax lets process 0 alone write."""
    from jax._src import compiler, distributed  # no public switch

    def write(*program: Any, write: Callable = compiler._cache_write) -> None:
        process, distributed.global_state.process_id = distributed.global_state.process_id, 0
        try:
            write(*program)
        finally:
            distributed.global_state.process_id = process

    compiler._cache_write = write


def load_models(
    loaded: LoadedTarget, drafter_path: str | None, sharding: Sharding = None, drafting: DraftSettings | None = None
) -> Pair:
    """The target with the drafter of a folder, a hub id or a train workdir (its export/); alone without one.

    Args:
        sharding: where the drafter's weights go, as for load_target.
        drafting: for draft_vocab, draft_window and draft_weights; None: the drafter as it is.
    """
    if not drafter_path:
        return Pair(loaded.model, loaded.params)
    dtype, drafting = np.dtype(loaded.model.dtype), drafting or DraftSettings()
    config, params = load_drafter(drafter_path, loaded.model.config, dtype, sharding, loaded.path)
    config = with_window(config, drafting)
    if drafting.draft_vocab:
        tokens = choose_tokens(hf.drafter_folder(drafter_path), config, drafting, loaded.tokenizer, loaded.stop_ids)
        config, params = with_draft_vocab(config, params, loaded.model.config, loaded.params, tokens, sharding)
    params = in_draft_type(config, params, loaded.model.config, loaded.params, drafting)
    return Pair(
        loaded.model, loaded.params, new_drafter(config, dtype, whole_head=sharding is not None), rows_together(params)
    )


def in_draft_type(
    config: AnyConfig, params: dict, target: Qwen3Config, target_params: dict, drafting: DraftSettings
) -> dict:
    """A drafter's parameters with its matrices as draft_weights says.

    In int8 they include a copy of a floating lm_head, because the base logits read all of it.
    """
    if drafting.draft_weights != INT8:
        return params
    if config.has_backbone and "lm_head" not in params:
        matrix = lm_head_of(target, target_params)
        if not is_quantized(matrix):
            params = {**params, "lm_head": {"kernel": matrix}}
    return quantized_matrices(params)


def with_window(config: AnyConfig, drafting: DraftSettings) -> AnyConfig:
    """A drafter whose backbone, if it has one, reads draft_window rows of the text."""
    if not drafting.draft_window or not config.has_backbone:
        return config
    return dataclasses.replace(config, draft_window=drafting.draft_window)


# ------------------------------------------------------------------- a drafter's parameters as decoding stores them


def rows_together(params: dict) -> dict:
    """A drafter's parameters with the head's last matrix as up/rows [V, E], not up/kernel [E, V].

    A draft reads the rows of its candidates (Head.rows). The compiler for TPUs would copy the whole matrix into this
    order in every round. A layout of [E, V] with that order is not enough: the compiler for GPUs copies it back before
    the loop of rounds. On a CPU nothing changes.

    Args:
        params: arrays, or shapes with their shardings, the head whole on every device.
    """
    if "head" not in params:
        return params
    kernel = params["head"]["up"]["kernel"]
    values = kernel["q"] if is_quantized(kernel) else kernel
    if any(device.platform == "cpu" for device in values.sharding.device_set):
        return params
    if isinstance(values, jax.ShapeDtypeStruct):
        rows = jax.ShapeDtypeStruct(values.shape[::-1], values.dtype, sharding=values.sharding)
        rows = {**kernel, "q": rows} if is_quantized(kernel) else rows
    else:
        rows = jax.jit(transposed)(kernel)
    return {**params, "head": {**params["head"], "up": {"rows": rows}}}


def quantized_matrices(params: dict) -> dict:
    """A drafter's parameters with all matrices of its products in int8, one scale for each output channel.

    Tables of tokens, of which a draft reads single rows, stay as they are.
    """

    def convert(path: tuple, leaf: Any) -> Any:
        rounded = path[-1].key in MATRICES and not is_quantized(leaf) and leaf.ndim == 2
        return jax.jit(quantize, static_argnums=1)(leaf, "int8") if rounded else leaf

    return jax.tree_util.tree_map_with_path(convert, params, is_leaf=is_quantized)

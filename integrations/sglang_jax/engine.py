"""The names of sglang-jax that this adapter uses. An engine that lacks or changes one is refused at import."""

import functools
import importlib
import importlib.util
import inspect
from typing import Any

COMMIT, DATE = "cddbf6f1", "2026-08-21"
PACKAGE = "sgl_jax.srt.speculative"
# By module and name, with the parameters there. Most names are private, so only the commit is a promise.
USED = {
    "dflash_worker.DFlashWorker": ("server_args", "target_worker"),
    "dflash_worker.DFlashWorker._init_jit_draft_block": ("self",),
    "dflash_worker.DFlashWorker._run_jit_draft_block": ("self", "plan"),
    "dflash_worker.DFlashWorker._can_use_fused_spec_prefill": ("self", "model_worker_batch"),
    "dflash_worker.DFlashWorker._dispatch_context": ("self", "runner"),
    "dflash_worker.DFlashWorker._replace_memory_pools": ("runner", "pool_updates"),
    "dflash_worker.DraftForwardPlan": (
        *("forward_batch", "forward_metadata", "seq_lens", "target_prefix_lens", "positions_host", "allocated_lens"),
        *("reservation_base_lens", "relay_future_indices", "relay_valid_mask", "use_relay_state", "dp_size", "bs"),
    ),
    "dflash_info.DFlashVerifyInput": ("draft_token", "draft_token_num"),
    "draft_extend_fused._make_target_verify_metadata": (
        *("old_metadata", "verify_seq_lens", "allocated_lens"),
        *("speculative_num_draft_tokens", "page_size", "dp_size"),
    ),
    "relay_buffer.gather_dflash_relay_buffers": ("buffers", "future_indices", "dp_size"),
}


def look_up(name: str) -> Any:
    """A module of PACKAGE, or what it holds under the rest of a dotted name."""
    module, *rest = name.split(".")
    return functools.reduce(getattr, rest, importlib.import_module(f"{PACKAGE}.{module}"))


def differences() -> list[str]:
    """One line for each name of USED that the installed engine lacks or defines with other parameters."""
    lines = []
    for name, expected in USED.items():
        try:
            actual = tuple(inspect.signature(look_up(name)).parameters)
        except (ImportError, AttributeError):
            lines.append(f"{name} is missing")
            continue
        if actual != expected:
            lines.append(f"{name} has the parameters ({', '.join(actual)}) instead of ({', '.join(expected)})")
    return lines


def check() -> None:
    """Raises ImportError unless the installed engine has all of USED."""
    if importlib.util.find_spec("sgl_jax") is None:
        raise ImportError(f"sgl_jax is not importable: install sglang-jax at commit {COMMIT} ({DATE}).")
    lines = differences()
    if lines:
        raise ImportError(
            f"this adapter was made for sglang-jax at commit {COMMIT} ({DATE}), and the installed engine differs:\n  "
            + "\n  ".join(lines)
            + "\nInstall that commit."
        )


check()

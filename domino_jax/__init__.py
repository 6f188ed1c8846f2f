"""domino_jax: Domino speculative decoding (arXiv 2605.29707) for Qwen3 models, trained and run in JAX."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Answer", "DecodeSettings", "Decoder", "TreeSettings", "load"]


def __getattr__(name: str) -> Any:
    # Imported at the first use: the commands need little of it.
    if name in __all__:
        from domino_jax.decoding import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

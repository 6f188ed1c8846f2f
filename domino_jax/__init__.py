"""domino_jax: Domino speculative decoding (arXiv 2605.29707) for Qwen3 models, trained and run in JAX."""

__version__ = "0.1.0"

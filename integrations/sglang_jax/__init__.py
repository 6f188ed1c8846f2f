"""Domino drafting in sglang-jax, on TPUs: docs/serving.md has its commands and the list of runs.

It imports nothing of domino_jax, because the two cannot share an environment (transformers 4.57 there, 5 here).
"""

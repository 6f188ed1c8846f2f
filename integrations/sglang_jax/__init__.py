"""Domino drafting in sglang-jax, on TPUs: docs/serving.md says how to start it and what was never run.

It imports nothing of domino_jax, because the two cannot share an environment (transformers 4.57 there, 5 here).
"""

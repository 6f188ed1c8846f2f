"""Domino drafting in vLLM, as a plug-in: docs/serving.md has its commands and the list of runs.

It imports nothing of domino_jax, so that an engine's environment needs no JAX.
"""


def register() -> None:
    """The entry point, which vLLM calls in each of its processes.

    Raises:
        RuntimeError: the installed vLLM is none that the plug-in was made for. An error at import would only be logged.
    """
    from domino_vllm import engine

    engine.check()

    from domino_vllm import proposer

    proposer.install()

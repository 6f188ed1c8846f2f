"""The environment of processes that tests start."""

import os


def optimizing() -> dict[str, str]:
    """For long runs: programs are optimized as a user's are, without conftest's flags for short ones."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

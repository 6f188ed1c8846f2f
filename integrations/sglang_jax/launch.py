"""The server of sglang-jax with a Domino drafter, from the root of a checkout, in the engine's environment:

python -m integrations.sglang_jax.launch --model-path TARGET --speculative-draft-model-path DRAFTER

All other options are the engine's own. The engine has no entry point for a worker of another package. Its schedulers
look up the worker by name when they start; they are spawned processes that import this module again, so the name is set
at import.
"""

import sys

from integrations.sglang_jax.drafter import Unsupported
from integrations.sglang_jax.options import server_arguments


def fail(error: Exception) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


try:
    from integrations.sglang_jax import worker
except ImportError as error:
    fail(error)

worker.install()

if __name__ == "__main__":
    try:
        sys.argv[1:] = server_arguments(sys.argv[1:])
    except Unsupported as error:
        fail(error)
    from sgl_jax.launch_server import main

    main()

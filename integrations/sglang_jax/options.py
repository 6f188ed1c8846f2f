"""The command line of the engine's server, with what a Domino drafter needs added and checked before anything loads."""

import argparse
from collections.abc import Sequence

from integrations.sglang_jax.drafter import Unsupported, check_rope, local_folder, read_config

# The engine's options for DFLASH, its name for drafters with a parallel backbone.
FIXED = {
    "--speculative-algorithm": "DFLASH",
    "--speculative-eagle-topk": "1",
    "--speculative-num-steps": "1",
    "--grammar-backend": "none",
}
DRAFTER, ROWS = "--speculative-draft-model-path", "--speculative-num-draft-tokens"
TARGET = ("--model-path", "--model")  # the engine's two names


def server_arguments(words: Sequence[str]) -> list[str]:
    """The engine's arguments: the user's, and the ones that a Domino drafter needs.

    Without a number of rows (`ROWS`, the anchor and the drafts) a round verifies all drafts of the block; the engine's
    own default is the block, with which a shifted drafter loses its last draft.

    Raises:
        Unsupported: an option or a folder with which the engine cannot draft.
    """
    if {"-h", "--help"} & set(words):
        return list(words)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (DRAFTER, "--speculative-draft-model-revision", "--revision", *FIXED):
        parser.add_argument(name)
    parser.add_argument(*TARGET, dest="target")
    parser.add_argument(ROWS, type=int, dest="rows")
    given = vars(parser.parse_known_args(words)[0])
    drafter = given["speculative_draft_model_path"]
    if not drafter or not given["target"]:
        raise Unsupported(f"{TARGET[0]} names the target and {DRAFTER} the drafter; both are needed.")
    added = []
    for name, value in FIXED.items():
        stated = given[name.removeprefix("--").replace("-", "_")]
        if stated not in (None, value):
            raise Unsupported(f"{name} is {stated}, and a Domino drafter needs {value}. Leave the option out.")
        added += [] if stated else [name, value]
    config = read_config(local_folder(drafter, given["speculative_draft_model_revision"]))
    check_rope(local_folder(given["target"], given["revision"]))
    if given["rows"] is None:
        added += [ROWS, str(config.num_drafts + 1)]
    else:
        config.check_rows(given["rows"])
    return [*words, *added]

"""Measure how a drafter decodes fastest on this device, and store it with the drafter.

    python -m domino_jax.tune --config=configs/tiny.py
    python -m domino_jax.tune --config=configs/qwen3_8b.py --config.drafter.path=DIR --prompts=FILE.jsonl \\
        --config.decode.temperature=1.0 --config.decode.batch_size=8 --config.decode.modes="('draft','tree')"

Measures how many drafts a round should verify in batches of 1, 2, 4, … up to decode.batch_size rows and, with mode
tree in decode.modes, the shape of the tree (evals/tuning.py, docs/decoding.md). The text is the same each time; the
speed is not. The result goes into <drafter>/decoding.<device>.json. `decode`, `regenerate` and `domino_jax.load` read
it there and use it where num_drafts and the tree are left open.
"""

import functools

from domino_jax.data.chat import encode_row
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.stored_tuning import check_writable, store_tuning
from domino_jax.evals import tuning
from domino_jax.evals.models import check_kind, named_drafter
from domino_jax.recipe import cli, rules
from domino_jax.recipe.values import decode_settings
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import is_remote
from domino_jax.weights import hf
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.loading import keep_compiled, load_models, load_target


def main(flags: cli.Flags) -> None:
    config = flags.config
    rules.check(config, "decode")
    if is_remote(config.drafter.path or ""):
        raise DominoError(
            f"config.drafter.path is {config.drafter.path}, but a tuning is stored with local drafters only; copy the"
            " folder here first."
        )
    keep_compiled()
    source = flags.prompts or config.eval.prompts
    if not source:
        raise DominoError("there are no prompts: give --prompts=FILE.jsonl or set config.eval.prompts.")
    settings = decode_settings(config.decode, config.drafter.head).change(simulate_tau=0.0)
    mode = tuning.chain_mode(settings.modes)
    path = named_drafter(config.drafter.path, (mode,))
    check_kind(stored_head(path), flags.head, path)
    loaded = load_target(config.target.path, settings.dtype)
    models = load_models(loaded, path, head_rank=settings.drafting.head_rank)
    folder = hf.drafter_folder(path)
    check_writable(folder)
    encode = functools.partial(encode_row, loaded.tokenizer, settings.thinking)
    rows = read_prompts(source, config.decode.num_prompts or None, config.data.skip_bad_rows, encode)
    prompts = [encode(row) for row in rows]
    print(f"tune: {len(prompts)} prompts of {source}; every shape of a round is compiled and timed", flush=True)
    widths, tree = tuning.tune(models, settings, loaded.stop_ids, mode, prompts)
    file = store_tuning(folder, widths, tree)
    print(f"stored in {file}; decode uses it where the recipe leaves these values open.")


if __name__ == "__main__":
    cli.run(main, required=("config",), optional=("prompts",))

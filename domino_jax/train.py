"""Train a Domino drafter for a frozen target, then decode held-out prompts with it.

    python -m domino_jax.train --config=configs/tiny.py --workdir=/tmp/domino

Reads top to bottom: recipe, target, data, state, steps, export, decoding. A workdir that holds a run is continued; a
finished one is shown. What a workdir holds: README, "Files".
"""

import itertools
import json
import math
import pathlib
import time

import jax
import numpy as np

from domino_jax import cli, decode, export, regenerate
from domino_jax import config as recipes
from domino_jax.checkpoint import Checkpoints, refuse_changes
from domino_jax.data.chat import encode_prompt
from domino_jax.data.pipeline import make_dataset
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import Generator
from domino_jax.decoding.models import Models
from domino_jax.drafter.model import Drafter, DrafterConfig
from domino_jax.errors import DominoError, NonFiniteError
from domino_jax.loading import LoadedTarget, keep_compiled, load_target
from domino_jax.metrics import MetricsWriter
from domino_jax.report import console_table, read_report
from domino_jax.training.curriculum import lambda_base
from domino_jax.training.evaluate import DecodedEvaluation
from domino_jax.training.losses import LossSettings
from domino_jax.training.optimizer import learning_rate, make_optimizer
from domino_jax.training.state import init_state
from domino_jax.training.step import make_train_step

MASK_TOKEN = "<|mask|>"


def main(flags: cli.Flags) -> None:
    # ---------------------------------------------------------------- recipe
    config = flags.config
    recipes.check(config, "train")
    workdir = pathlib.Path(flags.workdir).expanduser()
    finished = read_report(workdir / "report")
    if finished is not None:
        print(f"{workdir} holds a finished run; this is its report. Choose another --workdir to train again.")
        console_table(finished)
        return
    workdir.mkdir(parents=True, exist_ok=True)
    keep_compiled(workdir / ".xla_cache")
    recipe = recipes.resolved(config)
    started = time.monotonic()

    # ---------------------------------------------------------------- target and drafter
    loaded = load_target(config.target.path, config.target.dtype)
    drafter_config = new_drafter_config(config.drafter, loaded)
    drafter = Drafter(drafter_config, np.dtype(config.train.dtype))
    print(f"target {config.target.path}: {count(loaded.params):,} parameters, frozen", flush=True)

    # ---------------------------------------------------------------- data
    rows = config.data.train
    if config.data.regenerate:
        rows = workdir / "regenerated.jsonl"
        prompts = read_prompts(config.data.train, config.regenerate.num_prompts or None)
        regenerate.regenerate_rows(loaded, prompts, rows, **regenerate.settings(config))
    dataset = make_dataset(
        rows,
        loaded.tokenizer,
        max_length=config.data.max_length,
        batch_size=config.train.batch_size,
        seed=config.seed,
        thinking=config.data.thinking,
        vocab_size=loaded.model.config.vocab_size,
    )

    # ---------------------------------------------------------------- state: new, or the newest checkpoint
    schedule = learning_rate(config.train.learning_rate, config.train.steps, config.train.warmup_ratio)
    optimizer = new_optimizer(config.train, schedule)
    step = new_train_step(config.train, loaded.model, drafter, optimizer)
    evaluate = new_evaluation(config, loaded, drafter) if config.eval.every else None
    run_key = jax.random.key(config.seed)
    iterator = iter(dataset)
    with Checkpoints(workdir, config.checkpoint.keep) as checkpoints:
        state = jax.jit(lambda key: init_state(drafter, optimizer, key))(run_key)
        print(f"drafter: {count(state.params):,} parameters in {drafter_config.num_hidden_layers} layers", flush=True)
        restored = checkpoints.restore_latest(
            state,
            lambda meta: refuse_changes(meta["config"], recipe, recipes.FREE_TO_CHANGE, flags.allow_config_change),
        )
        first = 0
        if restored:
            first, state = restored.step, restored.state
            iterator.set_state(restored.iterator_state)
            print(f"continues from step {first}", flush=True)
        # Only now: a recipe that the checkpoint refuses must not replace the one it was made with.
        write_json(workdir / "config.json", recipe)
        write_json(workdir / "drafter_config.json", drafter_config.to_dict())

        # ------------------------------------------------------------ steps
        with MetricsWriter(workdir, config.train.steps, start_step=first) as metrics:
            for index in range(first, config.train.steps):
                batch = next(iterator)
                state, measured = step(state, loaded.params, batch, run_key)
                done = index + 1
                last = done == config.train.steps
                log, save = (last or done % every == 0 for every in (config.train.log_every, config.checkpoint.every))
                if log or save:  # the only host reads of the loop
                    values = {name: float(value) for name, value in jax.device_get(measured).items()}
                    refuse_non_finite(values, done, batch["row_ids"])
                if log:
                    metrics.write(done, {**values, "learning_rate": float(schedule(index))})
                metrics.advance(done)
                if evaluate and (last or done % config.eval.every == 0):
                    metrics.write(done, evaluate(state.params))
                if save:
                    checkpoints.save(done, state, iterator.get_state(), {"config": recipe})

    # ---------------------------------------------------------------- export
    export.write_export(workdir / "export", drafter_config, state.params, recipe, config.train.steps)
    print(f"exported the drafter to {workdir / 'export'}", flush=True)

    # ---------------------------------------------------------------- the final decoding
    if config.eval.final:
        report = decode.decode_with(config, loaded, drafter_config, state.params, workdir / "report")
        # Again, for the model card: it now has the τ to show.
        export.write_export(workdir / "export", drafter_config, state.params, recipe, config.train.steps, report)
        console_table(report)
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes", flush=True)


def new_drafter_config(choices, loaded: LoadedTarget) -> DrafterConfig:
    """A drafter of the recipe's choices with the target's widths."""
    domino = choices.projector == "domino"
    head = {
        "pure_draft_prefix_len": choices.pure_draft_prefix_len,
        "emb_dim": choices.emb_dim,
        "gru_hidden_dim": choices.gru_hidden_dim,
    }
    return DrafterConfig.for_target(
        loaded.model.config,
        num_layers=choices.num_layers,
        target_layer_ids=choices.target_layer_ids,
        block_size=choices.block_size,
        mask_token_id=find_mask_token(choices.mask_token_id, loaded),
        projector=choices.projector,
        shift_label=choices.shift_label,
        **(head if domino else {}),
    )


def find_mask_token(chosen: int | None, loaded: LoadedTarget) -> int:
    """The recipe's id, else the tokenizer's <|mask|>, else the first row past the tokenizer (CONTRACT §1.1)."""
    rows = loaded.model.config.vocab_size
    if chosen is None:
        if loaded.tokenizer is None:
            raise DominoError(
                f"{loaded.path} has no tokenizer to find a mask token in; set "
                f"--config.drafter.mask_token_id (below {rows})."
            )
        chosen = loaded.tokenizer.get_vocab().get(MASK_TOKEN, len(loaded.tokenizer))
    if not 0 <= chosen < rows:
        raise DominoError(
            f"the mask token id {chosen} is no row of the target's {rows}-row embedding; set "
            f"--config.drafter.mask_token_id."
        )
    return chosen


def new_optimizer(train, schedule):
    return make_optimizer(
        train.optimizer,
        schedule,
        b1=train.b1,
        b2=train.b2,
        eps=train.eps,
        weight_decay=train.weight_decay,
        clip_norm=train.clip_norm,
    )


def new_train_step(train, target, drafter: Drafter, optimizer):
    settings = LossSettings(
        gamma=None if math.isinf(train.gamma) else train.gamma,
        contiguous=train.contiguous_labels,
        slice_blocks=train.loss_slice_blocks,
    )
    return make_train_step(
        target,
        drafter,
        optimizer,
        num_anchors=train.num_anchors,
        curriculum=lambda step: lambda_base(step, train.steps, train.lambda_start, train.lambda_decay_ratio),
        settings=settings,
    )


def new_evaluation(config, loaded: LoadedTarget, drafter: Drafter) -> DecodedEvaluation:
    """Greedy decoding of the first eval.num_prompts held-out prompts, one at a time as a latency run would."""
    rows = itertools.islice(read_prompts(config.eval.prompts), config.eval.num_prompts)
    prompts = [encode_prompt(loaded.tokenizer, row, config.decode.thinking, f"prompt {row['id']}") for row in rows]
    generator = Generator(
        Models(loaded.model, loaded.params, drafter),
        stop_ids=loaded.stop_ids,
        cache_slots=config.decode.cache_length,
        max_new_tokens=config.decode.max_new_tokens,
        batch_size=config.eval.batch_size,
    )
    return DecodedEvaluation(generator, prompts)


def refuse_non_finite(values: dict[str, float], step: int, row_ids: np.ndarray) -> None:
    """Stops the run, naming step and rows, before a poisoned state is saved: an infinite gradient norm poisons too."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"step {step}: {', '.join(bad)} not finite; rows of this batch: {', '.join(map(str, row_ids[:16]))}.\n"
            "The last checkpoint is intact. Look at these rows, or lower train.learning_rate."
        )


def count(params: dict) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def write_json(path: pathlib.Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    cli.run(main, required=("config", "workdir"), optional=("allow_config_change",))

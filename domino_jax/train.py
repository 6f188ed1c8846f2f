"""Train a Domino drafter for a frozen target, then decode held-out prompts with it.

    python -m domino_jax.train --config=configs/tiny.py --workdir=/tmp/domino
    python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=DIR --dry_run --topology=v5e:4x4

Reads top to bottom: recipe, devices, target, data, state, steps, export, decoding. The same command runs in every
process of a pod. A workdir that holds a run is continued; a finished one is shown. docs/commands.md lists
the files of a workdir. Exit code 42: stopped by SIGTERM with everything saved; start it again.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from etils import epath

from domino_jax import export, regenerate
from domino_jax.data.order import Layout
from domino_jax.data.pipeline import Batches, ProcessShare, make_batches
from domino_jax.data.rows import RowEncoder
from domino_jax.evals.plots import plot_run
from domino_jax.evals.report import console_table, read_report, refuse_obstacles
from domino_jax.forecast import dry_run
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.names import BLOCK_HEADS, EAGLE3
from domino_jax.method.state import NonFiniteGuard, TrainState
from domino_jax.models import sharding
from domino_jax.recipe import builders, cli
from domino_jax.recipe import checks as recipes
from domino_jax.recipe.decoding import check_final, decode_trained
from domino_jax.runtime import distributed, environment
from domino_jax.runtime.agreement import from_primary, primary_first, refuse_differences, refuse_own_folder
from domino_jax.runtime.errors import DataError, DominoError, refuse_read_only
from domino_jax.runtime.files import is_remote, write_whole
from domino_jax.runtime.journal import locked
from domino_jax.runtime.made_with import flatten
from domino_jax.runtime.preemption import Preemption
from domino_jax.runtime.remote import access, cache_folder, open_path
from domino_jax.runtime.watchdog import Watchdog
from domino_jax.training import console, estimates
from domino_jax.training.checkpoints import Checkpoints, refuse_changes, refuse_unknown
from domino_jax.training.evaluation_layout import EvaluationLayout
from domino_jax.training.finished import mark_finished, read_marker
from domino_jax.training.loop import Intervals, TrainingLoop
from domino_jax.training.metrics import MetricsWriter, read_rows
from domino_jax.training.preflight import run_preflight
from domino_jax.training.step_clock import Profile
from domino_jax.training.weights_and_biases import require_wandb
from domino_jax.weights import formats, hf
from domino_jax.weights.drafter import stored_config
from domino_jax.weights.loading import (
    LoadedTarget,
    keep_compiled,
    load_target,
    read_target_config,
    read_target_identity,
)

WINDOW = 4_096  # rows that are packed or sorted into buckets together

# A restart by a launcher waits for the lock: on a shared disk a machine that was lost holds it until its lease ends,
# 90 seconds by default on an NFS server.
LEASE_SECONDS = 120.0


def main(flags: cli.Flags) -> int | None:
    # ---------------------------------------------------------------- recipe
    config = flags.config
    recipes.check(config, "dry_run" if flags.dry_run else "train", flags.given)
    if flags.dry_run:
        return dry_run.main(flags)
    require_wandb(config.train.wandb)
    workdir = open_path(flags.workdir).expanduser()
    recipe = recipes.resolved(config)
    with access(workdir):
        if not (workdir / "config.json").exists():  # else the keys of the run before count too
            refuse_unknown(flags.allow_config_change, flatten(recipe))
    refuse_obstacles(workdir, folders=("checkpoints", "export", "plots", "report"))
    if is_finished(workdir, config, recipe, flags.allow_config_change):
        return None
    refuse_read_only(workdir)
    started = time.monotonic()

    # ---------------------------------------------------------------- devices
    distributed.initialize(flags.distributed)
    with contextlib.ExitStack() as stack:
        workdir.mkdir(parents=True, exist_ok=True)
        local = None if is_remote(workdir) else pathlib.Path(workdir)
        if local:
            refuse_own_folder(workdir)
        refuse_differences({"the recipe": json.dumps(recipe), "the code": environment.code_digest()})
        if local and distributed.is_primary():
            stack.enter_context(only_run(local))
        say(builders.describe_run(config))
        keep_compiled(local and local / ".xla_cache")
        mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        sharding.check_rows(mesh, config.train.batch_size, config.train.accumulate)
        rows = sharding.process_rows(mesh, config.train.batch_size)
        target_shape = read_target_config(config.target.path)
        builders.drafter_config_of(config, target_shape)  # refuses what does not fit before the target answers

        # -------------------------------------------------------- data
        source = config.data.train
        if config.data.regenerate:
            source = str(workdir / "regenerated.jsonl")
            regenerate.answer_prompts(config, config.data.train, source)
        stack.enter_context(jax.set_mesh(mesh))

        # -------------------------------------------------------- target and drafter
        place = sharding.placement(mesh, target_shape.num_key_value_heads)
        loaded = load_target(config.target.path, config.target.dtype, place)
        blocks = config.drafter.head in BLOCK_HEADS  # which need a token for the slots of a block
        mask_token_id = builders.find_mask_token(config.drafter.mask_token_id, loaded) if blocks else None
        drafter_config = builders.drafter_config_of(config, loaded.model.config, mask_token_id)
        share = ProcessShare(
            local / "data" if local else cache_folder() / "data",
            rows,
            bucket=None if local else f"{workdir}/data",
            primary_first=primary_first,
            report=say,
            progress=distributed.is_primary(),
        )
        batches = batches_of(config, source, loaded, share)
        identity = read_target_identity(config.target.path, config.target.dtype)
        refuse_differences({"the training data": batches.fingerprint, "the target": identity})
        drafter_config = builders.with_draft_vocabulary(drafter_config, batches.rows)
        drafter = builders.drafter_of(drafter_config, config)
        layout = evaluate = None
        if config.eval.every or config.eval.final:
            layout = builders.evaluation_layout_of(config, loaded.model.config, drafter, mesh)
        if config.eval.every:
            evaluate = builders.evaluation_of(config, loaded, layout, batches.rows)
        check_final(config, loaded, drafter)
        optimizer = builders.optimizer_of(config.train)
        make_state, state_shapes = builders.state_maker(config.train, drafter, optimizer, mesh)
        step = builders.train_step_of(config.train, loaded.model, drafter, optimizer, mesh, state_shapes)

        # -------------------------------------------------------- state: new, or the newest intact checkpoint
        meta = {"config": recipe, "data": batches.fingerprint}
        run_key = jax.random.key(config.seed)
        watchdog = stack.enter_context(Watchdog(config.train.hang_seconds, config.train.abort_on_hang))
        checkpoints = Checkpoints(workdir, config.checkpoint.keep, say)
        stack.enter_context(checkpoints)
        restored = checkpoints.restore_latest(
            state_shapes, lambda saved: refuse_other_run(saved, meta, flags.allow_config_change)
        )
        if restored:
            first, state, position = restored.step, restored.state, restored.data_state
            say(f"continues from step {first}")
            refuse_other_vocabulary(workdir, drafter_config)
        else:
            first, state, position = 0, make_state(run_key), None
            state = builders.with_stored_weights(state, drafter_config, config.train, loaded)
            lost = read_rows(workdir / "metrics.jsonl")
            if lost:
                say(f"starts from step 0: step {lost[-1]['step']} was reached before without a checkpoint")
        for line in console.start_up_lines(recipe, state.params, loaded.params, mesh):
            say(line)
        # Only now: a recipe that the checkpoint refuses must not replace the one it was made with.
        if distributed.is_primary():
            write_json(workdir / "config.json", recipe)
            write_json(workdir / "drafter_config.json", stored_config(drafter_config))
            environment.write_environment(workdir)
            if batches.rows.num_held_out_prompts:
                write_jsonl(workdir / "held_out.jsonl", batches.rows.held_out_prompts())
        if not restored:
            run_preflight(
                workdir,
                batches.rows,
                loaded,
                drafter_config,
                mesh,
                fingerprint=batches.fingerprint,
                scored_rows=config.preflight.rows,
                seed=config.seed,
                thinking=config.data.thinking,
            )
        data = export.read_data(workdir) if distributed.is_primary() else None  # for the model card

        def export_drafter(params: dict, step: int, tau: float | None, report: dict | None = None) -> None:
            """Into <workdir>/export; every process calls it."""
            folder = workdir / "export"
            facts = {"report": report, "data": data, "tau": tau}
            # A licence that somebody adds there must not end the run.
            export.write_export(folder, drafter_config, params, recipe, step, **facts, keep_others=True)

        # ------------------------------------------------------------ steps
        train = config.train
        profile = Profile(workdir / "profile", train.profile_steps)
        writer = MetricsWriter(
            workdir,
            train.steps,
            start_step=first,
            primary=distributed.is_primary(),
            wandb=train.wandb,
            recipe=recipe,
        )
        evaluated = from_primary(lambda: writer.has(first, "eval_tau"))
        with writer as metrics, batches.start(position) as stream, profile, Preemption(say) as preemption:
            loop = TrainingLoop(
                Intervals(train.steps, train.log_every, config.checkpoint.every, config.eval.every),
                step=lambda state, batch: step(state, loaded.params, sharding.global_batch(mesh, batch), run_key),
                evaluate=evaluate,
                export=export_drafter,
                checkpoints=checkpoints,
                preemption=preemption,
                watchdog=watchdog,
                metrics=metrics,
                clock=clock_of(
                    metrics, config, mesh, lambda shapes: step.trace(state_shapes, loaded.params, shapes, run_key)
                ),
                guard=NonFiniteGuard(train.non_finite == "stop", int(state.skipped), batches.rows.where),
                profile=profile,
                stream=stream,
                batch_size=train.batch_size,
                meta=meta,
                state=state,
                done=first,
                evaluated=first if evaluated else None,
            )
            del state  # the loop donates it
            state = loop.run()

        # ------------------------------------------------------------ export, final decoding
        with watchdog.slow("the export"):
            best = best_drafter(checkpoints, drafter_config, state, loop.done)
            export_drafter(*best)
        say(f"exported the drafter of step {best.step} to {workdir / 'export'}")
        if note := formats.serving_note(drafter_config):
            say(f"note: {note}")
        if distributed.is_primary():
            plot_run(workdir)
        with watchdog.paused():
            report = decode_finally(config, loaded, drafter_config, best.params, layout, workdir)
            if report is not None:
                export_drafter(*best, report=report)  # again, for the model card: it now has figures to show
                console_table(report)
        if distributed.is_primary():
            mark_finished(workdir, loop.done, jax.process_count(), best.step)
    say(f"done in {(time.monotonic() - started) / 60:.1f} minutes")
    return None


def is_finished(workdir: epath.Path, config, recipe: dict, allowed: tuple[str, ...]) -> bool:
    """Whether the run in this workdir is over, by its marker (finished.py); its report is then printed.

    Another recipe is refused here as well, because the report would not be of this recipe.
    """
    report = read_report(workdir / "report")
    marker = read_marker(workdir, config.train.steps, print)
    if marker is None:
        return False
    # Several processes do not decode at the end, so their run is over without a report.
    if config.eval.final and report is None and marker["processes"] == 1:
        return False
    before = hf.read_json(workdir, "config.json", kind=export.WORKDIR)
    refuse_changes(before, recipe, recipes.FREE_TO_CHANGE, allowed, recipes.FIXED)
    print(f"{workdir} holds a finished run. Choose another --workdir to train again.")
    if report is not None:
        console_table(report)
    return True


@contextlib.contextmanager
def only_run(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a local workdir; a DominoError while another run holds it."""
    busy = f"another run is writing {workdir}; wait for it, or choose another --workdir."
    until = time.monotonic() + (LEASE_SECONDS if os.environ.get("DOMINO_RESTARTED") else 0.0)
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(workdir / "run.lock", busy))
                break
            except DominoError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.5)
        yield


def say(text: str) -> None:
    """A line of the run, from one process."""
    if distributed.is_primary():
        print(text, flush=True)


def batches_of(config, source: str, loaded: LoadedTarget, share: ProcessShare) -> Batches:
    data = config.data
    encoder = RowEncoder(loaded.tokenizer, data.max_length, data.thinking, loaded.model.config.vocab_size)
    layout = Layout(data.layout, data.max_length, config.train.batch_size, WINDOW)
    choices = {"seed": config.seed, "held_out": data.held_out, "skip_bad": data.skip_bad_rows}
    return make_batches(source, encoder, layout, share, **choices)


def clock_of(metrics: MetricsWriter, config, mesh: jax.sharding.Mesh, trace: Callable[[dict], jax.stages.Traced]):
    """Counts rows, tokens, anchors and, on known devices, the share of their peak.

    Args:
        trace: shapes of a batch → the traced step.
    """
    peak = estimates.peak_flops(jax.devices()[0].device_kind)

    def row_flops(length: int) -> float:
        traced = trace(dry_run.batch_shapes(config, mesh, length))
        return estimates.product_flops(traced.jaxpr) / config.train.batch_size

    return metrics.clock(row_flops=row_flops if peak else None, peak_flops=peak and peak * jax.device_count())


def refuse_other_run(saved: dict, meta: dict, allowed: tuple[str, ...]) -> None:
    """Refuse a checkpoint of another recipe, or of other data under the same names."""
    refuse_changes(saved["config"], meta["config"], recipes.FREE_TO_CHANGE, allowed, recipes.FIXED)
    if saved["data"] != meta["data"] and not any(entry.split(".")[0] == "data" for entry in allowed):
        raise DataError(
            f"the training data changed since the checkpoint (fingerprint {saved['data'][:12]} then, "
            f"{meta['data'][:12]} now); bring the old rows back,\n"
            "train in another workdir, or allow it with --allow_config_change=data.train"
        )


def refuse_other_vocabulary(workdir: epath.Path, config: AnyConfig) -> None:
    """Refuses to continue a drafter whose draft vocabulary was counted otherwise: its lm_head rows are other tokens."""
    if config.head != EAGLE3:
        return
    name = "drafter_config.json"
    earlier = hf.read_json(workdir, name, kind="the workdir of a run that can be continued")
    if earlier.get("draft_tokens") != stored_config(config)["draft_tokens"]:
        raise DataError(
            f"the draft vocabulary of {workdir}/{name} is not the one that these training rows give now: the lm_head of"
            " the checkpoint was trained for other tokens.\nBring the old rows back, or train in another workdir."
        )


class BestDrafter(NamedTuple):
    """What export/ holds at the end of a run. params: on the devices.  tau: decoded after `step`, if it was."""

    params: dict
    step: int
    tau: float | None


def best_drafter(checkpoints: Checkpoints, config: AnyConfig, state: TrainState, done: int) -> BestDrafter:
    """The drafter with the best τ of the run's evaluations; without evaluations the one that `state` holds."""
    step, tau = checkpoints.best() or (done, None)
    if step == done:
        return BestDrafter(state.best_params, done, tau)
    if from_primary(lambda: checkpoints.damage(step) is not None):
        say(f"warning: the checkpoint of step {step}, the best by τ, is damaged; the last step is exported instead")
        return BestDrafter(state.best_params, done, None)
    say(f"step {step} has the best τ, {tau:.2f}")
    places = jax.tree.map(lambda leaf: leaf.sharding, state.best_params)
    field = "ema" if state.ema else "params"
    return BestDrafter(export.restore_params(checkpoints, config, step, field, places), step, tau)


def decode_finally(
    config,
    loaded: LoadedTarget,
    drafter: AnyConfig,
    params: dict,
    layout: EvaluationLayout | None,
    workdir: epath.Path,
) -> dict | None:
    """The report of held-out prompts decoded with the exported drafter, in <workdir>/report, or None.

    layout: None without eval.final.
    """
    if not config.eval.final:
        return None
    if jax.process_count() > 1:
        say(
            "decode in one process: python -m domino_jax.decode --config=RECIPE"
            f" --config.drafter.path={workdir} --output=DIR"
        )
        return None
    with jax.set_mesh(layout.mesh):
        placed = dataclasses.replace(loaded, params=layout.target_params(loaded.params))
        return decode_trained(config, placed, drafter, layout.drafter_params(params), workdir / "report")


def write_json(path: epath.Path, value: dict) -> None:
    write_whole(path, f"{json.dumps(value, indent=2)}\n".encode())


def write_jsonl(path: epath.Path, rows: list[dict]) -> None:
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


if __name__ == "__main__":
    cli.run(
        main,
        required=("config", "workdir"),
        optional=("allow_config_change", "distributed", "dry_run", "topology"),
    )

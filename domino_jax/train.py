"""Train a Domino drafter for a frozen target, then decode held-out prompts with it.

    python -m domino_jax.train --config=configs/tiny.py --workdir=/tmp/domino
    python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=DIR --dry_run --topology=v5e:4x4

main has seven stages: recipe, devices, rows and target, drafter, state, steps, export. The same command runs in every
process of a pod. A workdir that holds a run is continued; a finished one is shown. docs/commands.md lists its files.
Exit code 42: stopped by SIGTERM with everything saved; start it again.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from etils import epath

from domino_jax import export, regenerate
from domino_jax.data.answer_files import ALONE
from domino_jax.data.chat import TextCodec
from domino_jax.data.pipeline import Batches
from domino_jax.data.token_counts import order_of_rows
from domino_jax.decoding.answers import TargetAnswer, read_answers
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.evals.plots import plot_run
from domino_jax.evals.report import console_table, read_report
from domino_jax.forecast import dry_run
from domino_jax.method.drafters import CONFIGS, AnyConfig, AnyDrafter, stored_config
from domino_jax.method.state import TrainState
from domino_jax.models import sharding
from domino_jax.recipe import builders, cli, loading, restart, rules
from domino_jax.recipe.final_decoding import check_final, decode_trained
from domino_jax.runtime import distributed, environment, sizes
from domino_jax.runtime.agreement import from_primary, only_run, refuse_differences
from domino_jax.runtime.differences import differences, flatten, refuse
from domino_jax.runtime.distributed import say
from domino_jax.runtime.files import is_remote, write_whole
from domino_jax.runtime.json_files import write_json
from domino_jax.runtime.preemption import Preemption
from domino_jax.runtime.remote import access, cache_folder, open_path
from domino_jax.runtime.watchdog import Watchdog
from domino_jax.training import flops, hooks
from domino_jax.training.checkpoints import Checkpoints, Restored, refuse_changes, refuse_other_target, refuse_unknown
from domino_jax.training.loop import TrainingLoop
from domino_jax.training.metrics import MetricsWriter, read_rows
from domino_jax.training.non_finite import NonFiniteGuard
from domino_jax.training.preflight import run_preflight
from domino_jax.training.step_clock import StepClock
from domino_jax.training.step_folders import StepFolders
from domino_jax.weights import hf, servers
from domino_jax.weights.draft_vocab import order_bytes
from domino_jax.weights.identity import target_identity
from domino_jax.weights.loading import LoadedTarget, keep_compiled, load_target, use_exact_matmuls
from domino_jax.weights.target import read_target_config


def main(flags: cli.Flags) -> int | None:
    # 1. The recipe, and its workdir. A finished run is shown.
    config = flags.config
    rules.check(config, "dry_run" if flags.dry_run else "train", flags.set_keys)
    if flags.dry_run:
        return dry_run.main(flags)
    train, target, recipe = config.train, config.target, loading.resolved(config)
    workdir = open_path(flags.workdir).expanduser()
    with access(workdir):
        if not (workdir / "config.json").exists():  # else the keys of the run before count too
            refuse_unknown(flags.allow_config_change, flatten(recipe))
    if is_finished(workdir, config, recipe, flags.allow_config_change):
        return None
    started = time.monotonic()

    # 2. The devices. From here on no other run writes the workdir.
    distributed.initialize(flags.distributed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_run(workdir))
        identity = target_identity(target.path)
        refuse_differences({"the recipe": recipe, "the target": identity, "the code": environment.code_digest()})
        use_exact_matmuls(target.dtype)
        keep_compiled(workdir / ".xla_cache")
        mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        sharding.check_rows(mesh, train.batch_size, train.accumulate)
        target_shape = read_target_config(target.path)
        builders.drafter_config_of(config, target_shape)  # refuses what does not fit before the target answers

        # 3. The training rows, the answers that evaluations judge, and the target.
        source, tokenizer = training_source(flags, workdir, identity), hf.load_tokenizer(hf.resolve_folder(target.path))
        batches = builders.batches_of(config, source, tokenizer, target_shape.vocab_size, workdir, mesh, say)
        answers = held_out_answers(config, workdir, batches, tokenizer, identity) if config.eval.every else []
        on_mesh = stack.enter_context(contextlib.ExitStack())
        on_mesh.enter_context(jax.set_mesh(mesh))
        place = sharding.placement(mesh, target_shape.num_key_value_heads)
        loaded = load_target(target.path, target.dtype, place, target.quantize)

        # 4. The drafter, its evaluation and its training step.
        drafter_config = final_drafter_config(config, loaded, batches, workdir)
        drafter = builders.drafter_of(drafter_config, config)
        evaluate = builders.evaluation_of(config, loaded, drafter, answers) if answers else None
        warn_of_shared_prompts(config, batches, [answer.prompt for answer in answers], loaded, drafter)
        optimizer = builders.optimizer_of(train)
        make_state, shapes = builders.state_maker(train, drafter, optimizer, mesh)
        step = builders.train_step_of(config, loaded.model, drafter, optimizer, mesh, shapes)
        run_key = jax.random.key(config.seed, impl="threefry2x32")

        # 5. The state. A start resumes in this order:
        #    1. The newest intact checkpoint is restored. It is refused if its recipe or data are others.
        #    2. Without a checkpoint the state is new, with the weights that the recipe takes from other drafters.
        #    3. The recipe is written to the workdir: a refused one must not replace the checkpoint's.
        #    4. The pre-flight looks at the rows, unless the checkpoint was trained on these and for this target.
        #    5. The data go on after the checkpoint's batches, and rows of metrics.jsonl after its step are dropped.
        #    6. An evaluation that is due at the checkpoint's step and has no row is made. Then the next step is taken.
        meta = {"config": recipe, "data": batches.fingerprint, "target": identity}
        watchdog = stack.enter_context(Watchdog(train.hang_seconds))
        checkpoints = stack.enter_context(Checkpoints(workdir, report=say))
        check = functools.partial(refuse_other_run, meta=meta, config=config, allowed=flags.allow_config_change)
        restored = checkpoints.restore_latest(shapes, check)
        if restored:
            done, state, position, _ = restored
        else:
            done, position = 0, None
            state = builders.with_stored_weights(make_state(run_key), drafter_config, train, loaded)
        report_start(restored, workdir, mesh, state, loaded)
        for line in restart.changes(restored.meta, meta, done) if restored else ():
            say(line)
        same_rows = restored and all(restored.meta[name] == meta[name] for name in ("data", "target"))
        write_run_files(workdir, recipe, drafter_config, batches, bool(same_rows))
        if not same_rows:
            run_preflight(workdir, batches.rows, loaded, drafter_config, mesh, batches.fingerprint, config.seed)

        # 6. The steps, and what happens between them.
        export_drafter = exporter(workdir, drafter_config, recipe)
        metrics = MetricsWriter(workdir, train.steps, start_step=done)
        with metrics, batches.start(position) as stream, Preemption(say) as preemption:
            loop = TrainingLoop(
                train.steps,
                done,
                state,
                step=step,
                inputs=lambda batch: (loaded.params, sharding.global_batch(mesh, batch), run_key),
                stream=stream,
                batch_size=train.batch_size,
                store=hooks.store_in(checkpoints, metrics, meta),
                guard=NonFiniteGuard(train.non_finite == "stop", int(state.skipped), batches.rows.where),
                clock=clock_of(config, mesh, lambda rows: step.trace(shapes, loaded.params, rows, run_key)),
                watchdog=watchdog,
                preemption=preemption,
            )
            del state  # the loop donates it
            evaluation = hooks.evaluate_with(evaluate, checkpoints, metrics, export_drafter)
            loop.every(train.log_every, hooks.log_to(metrics))
            loop.every(config.checkpoint.every, hooks.save)
            loop.every(1, hooks.leave_on_sigterm)
            loop.every(config.eval.every, evaluation)
            if loop.is_due(config.eval.every):
                evaluation(loop)
            state = loop.run()

        # 7. The export, and the final decoding.
        with watchdog.slow("the export"):
            best = best_drafter(checkpoints, drafter_config, state, loop.done)
            export_drafter(*best)
        report_export(workdir, drafter_config, best.step)
        on_mesh.close()
        with watchdog.slow("the final decoding", times=0):
            decode_finally(config, loaded, identity, best, workdir, export_drafter)
        if distributed.is_primary():
            marker = {"step": loop.done, "exported_step": best.step, "target": identity}
            write_json(workdir / export.FINISHED, marker)
    say(f"done in {(time.monotonic() - started) / 60:.1f} minutes")


def is_finished(workdir: epath.Path, config, recipe: dict, allowed: tuple[str, ...]) -> bool:
    """Whether the run in this workdir is over, by finished.json, which is written last; its report is then printed.

    Another recipe or target is refused here as well, because the report would not be of it. Raises DataError: all of
    its checkpoints are gone.
    """
    marker = hf.read_json(workdir, export.FINISHED, required=False)
    with hf.naming(workdir, export.FINISHED):
        if marker.get("step", 0) < config.train.steps:
            return False
    folders = StepFolders(workdir / "checkpoints", print)
    if not folders.finished():
        raise folders.loss({})
    before = hf.read_json(workdir, "config.json", kind=export.WORKDIR)
    refuse_changes(before, recipe, loading.FREE_TO_CHANGE, allowed, loading.fixed_keys(config))
    refuse_other_target(marker, target_identity(config.target.path), allowed)
    print(f"{workdir} holds a finished run. Choose another --workdir to train again.")
    if report := read_report(workdir / "report"):
        console_table(report)
    return True


def training_source(flags: cli.Flags, workdir: epath.Path, identity: dict) -> str:
    """Where the training rows are: data.train, or the target's answers to it, made if they do not exist."""
    config = flags.config
    if not config.data.regenerate:
        return config.data.train
    source = str(workdir / "regenerated.jsonl")
    regenerate.answer_prompts(config, config.data.train, source, identity, flags.set_keys)
    return source


def held_out_answers(config, workdir: epath.Path, batches: Batches, tokenizer, identity: dict) -> list[TargetAnswer]:
    """The answers that evaluations judge: of eval.answers, or the target's to the held-out prompts.

    The latter are made once, into a file of the workdir; other prompts or decode settings have another file.
    """
    source = config.eval.answers
    if not source:
        rows = builders.evaluation_rows(config, batches.rows, regenerate.refuse_unanswerable)
        settings = DecodeSettings(
            batch_size=config.regenerate.batch_size,
            max_new_tokens=config.decode.max_new_tokens,
            thinking=config.decode.thinking,
            dtype=config.target.dtype,
        )
        origin = regenerate.origin_of(rows, identity, config.target.quantize, settings)
        digest = hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:8]
        source = workdir / f"held_out_answers-{digest}.jsonl"
        if is_remote(workdir):
            from_primary(lambda: answer_into_bucket(config, rows, origin, source, settings))
        else:
            regenerate.answer_rows(config, rows, pathlib.Path(source), origin, settings)
    return read_answers(source, TextCodec(tokenizer, config.decode.thinking), config.eval.num_prompts)


def warn_of_shared_prompts(
    config, batches: Batches, prompts: list[Sequence[int]], loaded: LoadedTarget, drafter: AnyDrafter
) -> None:
    """Counts the rows whose prompts are evaluated. It also refuses prompts that the final decoding could not use."""
    learned = batches.rows.count_evaluated([*prompts, *check_final(config, loaded, drafter)])
    if learned:
        say(
            f"warning: {learned} of {len(batches.rows)} rows in {config.data.train} have prompts that are also in"
            f" {config.eval.answers or config.eval.prompts}: τ will be too high. Take them out of one of the files."
        )


def answer_into_bucket(config, rows: list[dict], origin: dict, output: epath.Path, settings: DecodeSettings) -> None:
    """`regenerate.answer_rows` by this process alone, for a file in a bucket, to which no row can be appended."""
    if not output.exists():
        local = cache_folder() / "answers" / output.name
        regenerate.answer_rows(config, rows, local, origin, settings, processes=ALONE)
        write_whole(output, local.read_bytes())


def final_drafter_config(config, loaded: LoadedTarget, batches: Batches, workdir: epath.Path) -> AnyConfig:
    """The drafter's config with what it takes from the target (the mask token) and the rows (its vocabulary).

    A run that continues keeps its vocabulary, for which the lm_head of its checkpoint was trained.
    """
    blocks = CONFIGS[config.drafter.head].has_backbone  # which need a token for the slots of a block
    mask_token_id = builders.find_mask_token(config.drafter.mask_token_id, loaded) if blocks else None
    drafter_config = builders.drafter_config_of(config, loaded.model.config, mask_token_id)
    stored = None
    if restart.has_checkpoints(workdir):
        stored = hf.read_json(workdir, export.DRAFTER_CONFIG, required=False).get("draft_tokens")
    if stored and not drafter_config.has_backbone and len(stored) == drafter_config.draft_vocab_size:
        return drafter_config.with_draft_tokens(stored)
    return builders.with_draft_vocabulary(drafter_config, batches.rows)


def report_start(
    restored: Restored | None, workdir: epath.Path, mesh: jax.sharding.Mesh, state: TrainState, loaded: LoadedTarget
) -> None:
    """Prints where the run starts, and what is on the devices."""
    if restored:
        say(f"continues from step {restored.step}")
    elif rows := read_rows(workdir / "metrics.jsonl"):
        say(f"starts from step 0: step {rows[-1]['step']} was reached before without a checkpoint")
    say("mesh " + " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items()))
    say(f"drafter, trained: {sizes.parameter_line(state.params)}")
    say(f"target, frozen: {sizes.parameter_line(loaded.params)}")


def write_run_files(
    workdir: epath.Path, recipe: dict, drafter_config: AnyConfig, batches: Batches, same_rows: bool
) -> None:
    """same_rows: the run goes on with the rows that its files describe."""
    if not distributed.is_primary():
        return
    write_json(workdir / "config.json", recipe)
    write_json(workdir / "drafter_config.json", stored_config(drafter_config))
    write_json(workdir / "env.json", environment.environment())
    if drafter_config.has_backbone and not (same_rows and (workdir / hf.TOKEN_ORDER).exists()):
        write_whole(workdir / hf.TOKEN_ORDER, order_bytes(order_of_rows(batches.rows, drafter_config.vocab_size)))
    if rows := batches.rows.held_out_prompts():
        write_whole(workdir / restart.HELD_OUT, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    else:  # they are trained on now
        (workdir / restart.HELD_OUT).unlink(missing_ok=True)


def exporter(workdir: epath.Path, drafter: AnyConfig, recipe: dict) -> Callable[..., None]:
    """(parameters, step, τ, report) → None: writes the drafter to <workdir>/export; every process calls it."""
    primary = distributed.is_primary()
    stored = {"data": export.read_data(workdir), "token_order": export.read_token_order(workdir)} if primary else {}

    def export_drafter(params: dict, step: int, tau: float | None, report: dict | None = None) -> None:
        export.write_export(workdir / "export", drafter, params, recipe, step, report=report, tau=tau, **stored)

    return export_drafter


def report_export(workdir: epath.Path, drafter: AnyConfig, step: int) -> None:
    say(f"exported the drafter of step {step} to {workdir / 'export'}")
    if note := servers.serving_note(drafter):
        say(f"note: {note}")
    if distributed.is_primary():
        plot_run(workdir)


def clock_of(config, mesh: jax.sharding.Mesh, trace: Callable[[dict], jax.stages.Traced]):
    """Counts rows, tokens and, on known devices, the share of their peak; trace: shapes of a batch → the step."""
    peak = flops.peak_flops(jax.devices()[0].device_kind)

    def row_flops(length: int) -> float:
        traced = trace(dry_run.batch_shapes(config, mesh, length))
        return flops.product_flops(traced.jaxpr) / config.train.batch_size

    return StepClock(row_flops, peak and peak * jax.device_count())


def refuse_other_run(saved: dict, meta: dict, config, allowed: tuple[str, ...]) -> None:
    """Refuse a checkpoint of another recipe, or of another target or other data under the same names."""
    refuse_changes(saved["config"], meta["config"], loading.FREE_TO_CHANGE, allowed, loading.fixed_keys(config))
    refuse_other_target(saved, meta["target"], allowed)
    if not any(entry.split(".")[0] == "data" for entry in allowed):
        refuse(
            differences({"fingerprint": saved["data"]}, {"fingerprint": meta["data"]}),
            "the training data changed since the checkpoint:",
            "Bring the old rows and decode.thinking back, train in another workdir, or allow it with"
            " --allow_config_change=data.train",
        )


class BestDrafter(NamedTuple):
    """The drafter in export/ at the end of a run. params: on the devices.  tau: measured after `step`, if it was."""

    params: dict
    step: int
    tau: float | None


def best_drafter(checkpoints: Checkpoints, config: AnyConfig, state: TrainState, done: int) -> BestDrafter:
    """The drafter with the best τ of the run's evaluations; without evaluations the one that `state` holds."""
    step, tau = checkpoints.best() or (done, None)
    if step != done:
        step, tau = from_primary(lambda: export.choose_step(checkpoints))
    if step == done:
        return BestDrafter(state.best_params, done, tau)
    places = jax.tree.map(lambda leaf: leaf.sharding, state.best_params)
    field = "ema" if state.ema else "params"
    return BestDrafter(export.restore_params(checkpoints.folders.path(step), config, field, places), step, tau)


def decode_finally(
    config,
    loaded: LoadedTarget,
    identity: dict,
    best: BestDrafter,
    workdir: epath.Path,
    export_drafter: Callable[..., None],
) -> None:
    """Decodes held-out prompts with the exported drafter, if the recipe asks for it, into <workdir>/report."""
    if not config.eval.final:
        return
    if jax.process_count() > 1:
        say(
            "decode in one process: python -m domino_jax.decode --config=RECIPE"
            f" --config.drafter.path={workdir} --output=DIR"
        )
        return
    for leaf in jax.tree.leaves(loaded.params):
        leaf.delete()
    with regenerate.local_mesh(config.target.path, config.decode.batch_size) as place:
        report = decode_trained(config, place, identity, workdir)
    export_drafter(*best, report=report)  # again, for the model card: it now has figures to show
    console_table(report)


if __name__ == "__main__":
    cli.run(
        main, required=("config", "workdir"), optional=("allow_config_change", "distributed", "dry_run", "topology")
    )

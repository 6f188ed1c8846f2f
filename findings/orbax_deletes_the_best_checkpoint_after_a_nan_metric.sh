#!/usr/bin/env bash
# orbax-checkpoint 0.12.8, CheckpointManager with best_fn and max_to_keep.
# Guess: a checkpoint whose metric is NaN counts as the worst, or is refused. The best checkpoints remain.
# What happens: the metrics are sorted as plain floats. A NaN compares false with everything, so one NaN leaves the
#   list out of order. The checkpoint with the best metric is deleted, best_step() names a worse step or the one with
#   the NaN, without an error. The same run with inf in place of the NaN keeps what it should.
# Why it matters: a run that meets a single bad evaluation loses its best weights, and goes on. Have best_fn return
#   inf (or -inf with best_mode "max") for a metric that is not finite.
# Output seen: losses 1.0, NaN, 2.0, keep 1: the loss kept is 2.0. Losses 3.0, 1.0, NaN, 2.0, 2.5, keep 2: NaN is gone
#   and so is 1.0; the losses kept are 2.0 and 2.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "orbax-checkpoint==0.12.8" "jax==0.10.2" \
    "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import math
import sys
from pathlib import Path

import orbax.checkpoint as ocp

root = Path(sys.argv[1])


def losses_kept(losses, keep, best_fn):
    """Losses of the checkpoints that remain after a run, and the loss of best_step()."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, best_fn=best_fn, best_mode="min", enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(root / str(len(list(root.iterdir()))), options=options) as manager:
        for step, loss in enumerate(losses):
            assert manager.save(step, args=ocp.args.JsonSave({"step": step}), metrics={"loss": loss})
        return [losses[step] for step in manager.all_steps()], losses[manager.best_step()]


def plain(metrics):
    return metrics["loss"]


def guarded(metrics):
    return metrics["loss"] if math.isfinite(metrics["loss"]) else math.inf


nan = math.nan
for losses, keep in (([1.0, nan], 1), ([1.0, nan, 2.0], 1), ([3.0, 1.0, nan, 2.0, 2.5], 2)):
    kept, best = losses_kept(losses, keep, plain)
    print(f"losses {losses}, keep {keep}: kept {kept}, best {best}")
    assert 1.0 not in kept and best != 1.0, "the best checkpoint now survives a NaN"
    kept, best = losses_kept(losses, keep, guarded)
    print(f"  with inf for NaN: kept {kept}, best {best}")
    assert 1.0 in kept and best == 1.0
PY
mkdir "$folder/runs"
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py" "$folder/runs" 2>"$folder/log" || {
    cat "$folder/log"
    exit 1
}

"""The state of a run, float32 weights, moments and the step (never the target), and its guard against NaN."""

import collections
import math
from collections.abc import Callable, Mapping

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.kinds import AnyDrafter
from domino_jax.runtime.errors import NonFiniteError

KEPT_STEPS = 4_096  # more than anyone logs apart; row ids are a few bytes each
NAMED_ROWS = 8


@flax.struct.dataclass
class TrainState:
    """One array or tree per field; a checkpoint holds all of them.

    step: steps taken, int32, those left out included.  params: float32 drafter parameters.  opt_state: optax state.
    ema: float32 average of the parameters, an empty dict without one.
    skipped: int32, steps left out because a loss or gradient was not finite.  bad_step: int32, the last of them,
    counted from 1; 0 without one.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    ema: dict
    skipped: jax.Array
    bad_step: jax.Array

    @property
    def best_params(self) -> dict:
        """The parameters that are evaluated and exported: the average, if there is one."""
        return self.ema or self.params


def init_state(
    drafter: AnyDrafter, optimizer: optax.GradientTransformation, key: jax.Array, with_ema: bool = False
) -> TrainState:
    """The state before the first step; pass it through jax.eval_shape for its shapes alone."""
    params = init_drafter_params(drafter, key)
    zero = jnp.zeros((), jnp.int32)
    ema = jax.tree.map(jnp.copy, params) if with_ema else {}
    return TrainState(zero, params, optimizer.init(params), ema, zero, zero)


class NonFiniteGuard:
    """The jitted step never applies such an update; this class reads its count and names the rows of the batch.

    Args:
        stop: end the run at such a step; else it is left out and counted ("skipped" in metrics.jsonl).
        skipped: steps left out before this start.
        where: row id → "file:line" of the row.
    """

    def __init__(self, stop: bool, skipped: int, where: Callable[[int], str]):
        self._stop, self._skipped, self._where = stop, skipped, where
        self._rows: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def remember(self, step: int, row_ids: np.ndarray) -> None:
        """The rows (of this process) that step `step`, counted from 1, trains on."""
        self._rows[step] = row_ids
        if len(self._rows) > KEPT_STEPS:
            self._rows.popitem(last=False)

    def check(self, values: Mapping[str, float]) -> None:
        """Raises NonFiniteError when steps were left out since the last call and the run is to stop at them.

        values: a step's metrics, with "skipped" and "bad_step".
        """
        new = int(values["skipped"]) - self._skipped
        self._skipped += new
        if not (self._stop and new):
            return
        step = int(values["bad_step"])
        rows = self._rows.get(step, np.zeros(0, np.int32))
        named = ", ".join(self._where(int(row)) for row in rows[:NAMED_ROWS])
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        raise NonFiniteError(
            f"step {step}: {' and '.join(bad) or 'loss or gradient'} not finite; rows of the batch: {named}.\n"
            "The last checkpoint is intact. Look at these rows, lower train.learning_rate, or leave such "
            "steps out with --config.train.non_finite=skip."
        )

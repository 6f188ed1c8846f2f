"""One training step: frozen target forward, anchors, drafter forward, sliced loss, update; one jitted function.

The target's parameters are a separate argument: never differentiated, never donated, never in the state. Nothing here
names a device: the shardings of the arguments and the constraints of sharding.py spread the step over a mesh.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from domino_jax.method.blocks import block_tokens, head_tokens, label_positions, labels_and_mask, sample_anchors
from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import Drafter
from domino_jax.method.drafters import AnyDrafter
from domino_jax.method.losses import Labels, Loss, Outputs, weigh_slots
from domino_jax.method.pair import Pair
from domino_jax.method.sliced_loss import SlicedForward, Sums, scan_sum, sliced_loss
from domino_jax.method.state import TrainState
from domino_jax.models.layers import with_kernel_in_use
from domino_jax.models.qwen3 import Qwen3
from domino_jax.models.shapes import Features, Hidden

# "tokens" int32 [B, S], "loss_mask" float32 [B, S], "row_ids" int32 [B]; packed rows also "positions" and "documents"
# int32 [B, S].
Batch = dict[str, jax.Array]


def target_pass(
    target: Qwen3, target_params: dict, batch: Batch, layer_ids: tuple[int, ...], with_hidden: bool = False
) -> tuple[Features | None, Hidden | None]:
    """Tapped features [B, S, C·D], None without layer ids, and with_hidden the last normed hidden states [B, S, D]; no
    gradient enters.

    Without them the pass stops after the last tapped layer.
    """
    packed = {name: batch[name] for name in ("positions", "documents") if name in batch}
    out = target.apply(
        {"params": target_params},
        batch["tokens"],
        tap_layers=layer_ids,
        features_only=not with_hidden,
        with_logits=False,
        **packed,
    )
    out = jax.lax.stop_gradient(out)
    return out.get("features"), out["hidden"] if with_hidden else None


class Blocks(NamedTuple):
    """Blocks of a batch, with the labels that a drafter learns from.

    anchors: int32 [B, A], keep: bool [B, A] (False: no block); both None for a drafter without blocks.  labels: of it.
    """

    anchors: jax.Array | None
    keep: jax.Array | None
    labels: Labels


def label_blocks(batch: Batch, anchors: jax.Array, keep: jax.Array, config: DrafterConfig, loss: Loss) -> Blocks:
    """The blocks at given anchors with their labels and weights."""
    ids, mask = labels_and_mask(
        batch["tokens"],
        batch["loss_mask"],
        anchors,
        keep,
        block_size=config.block_size,
        first_slot=config.first_slot,
        contiguous=loss.contiguous,
        documents=batch.get("documents"),
    )
    return Blocks(anchors, keep, Labels(ids, mask, weigh_slots(mask, config, loss)))


def drafter_loss(
    params: dict,
    models: Pair,
    features: Features,
    batch: Batch,
    blocks: Blocks,
    loss: Any,
    hidden: Hidden | None = None,
) -> tuple[jax.Array, Sums]:
    """The loss of one batch, and its sums, through which no gradient flows.

    Args:
        params: the drafter's, which replace the parameters in `models`.
        features: of the target, [B, S, C·D].
        hidden: the target's last hidden states [B, S, D]; needed where loss.reads_target.
    """
    models = models.replace(drafter_params=params)
    if models.drafter.config.has_backbone:
        forward = block_forward(models, features, batch, blocks, loss, hidden)
    else:
        forward = loss.forward(models, features, batch, hidden)
    return sliced_loss(forward, blocks.labels, loss)


def block_forward(
    models: Pair, features: Features, batch: Batch, blocks: Blocks, loss: Loss, hidden: Hidden | None
) -> SlicedForward:
    """The drafter's pass over the blocks of a batch; `drafter_loss` declares the arguments."""
    drafter, tokens, (anchors, keep, labels) = models.drafter, batch["tokens"], blocks
    config = drafter.config
    if loss.frozen_backbone:
        backbone = jax.lax.stop_gradient(models.drafter_params["backbone"])
        models = models.replace(drafter_params={**models.drafter_params, "backbone": backbone})
    gathered = models.with_gathered_head()  # for logits alone: tokens are looked up in the table as it is spread
    base_logits = gathered.draft_logits
    x = models.embed(block_tokens(tokens, anchors, keep, config.block_size, config.mask_token_id))
    positions = batch.get("positions")
    previous_tokens = head_tokens(tokens, anchors, config.num_drafts, config.extra_slots, positions)
    z, codes = models.bound(features, x, anchors, keep, models.head_inputs(previous_tokens), positions)
    states = _states_before_labels(hidden, anchors, config) if loss.reads_target else None

    def outputs_of(params, z, codes, states):
        base = base_logits(z)
        final = correct_logits(drafter, {"head": params}, base, codes)
        return Outputs(base, final, None if states is None else gathered.unembed(states))

    if not config.has_head:
        default = SlicedForward(outputs_of, {}, (z, codes), states)
    else:
        # The slices read the head's last matrix alone. The compiler leaves out the zeros that are summed for the rest.
        in_use = functools.partial(with_kernel_in_use, module="up", dtype=drafter.dtype)
        default = SlicedForward(outputs_of, models.drafter_params["head"], (z, codes), states, in_use)
    return loss.forward(default, models, base_logits, labels, previous_tokens)


def _states_before_labels(hidden: Hidden, anchors: jax.Array, config: DrafterConfig) -> jax.Array:
    """The target's states [B, A, G, D] that predict each label: one place before the label, clamped to the row."""
    places = label_positions(anchors, config.block_size, config.first_slot) - 1
    places = jnp.clip(places, 0, hidden.shape[1] - 1)
    flat = places.reshape(places.shape[0], -1, 1)
    return jnp.take_along_axis(hidden, flat, axis=1).reshape(*places.shape, hidden.shape[-1])


def correct_logits(drafter: Drafter, params: dict, base: jax.Array, codes: jax.Array | None) -> jax.Array:
    """Final logits [.., G, V]: base plus the head's residual from suffix_start on; the base itself without a head."""
    if codes is None:
        return base
    config = drafter.config
    codes = codes[..., config.pure_draft_prefix_len :, :]
    residual = drafter.bind({"params": params}).head.residual(codes)
    return base.at[..., config.suffix_start :, :].add(residual)


def batch_gradients(models: Pair, batch: Batch, blocks: Blocks, loss: Any, accumulate: int = 1) -> tuple[Sums, dict]:
    """The sums of a batch and the gradients of its loss by the drafter's parameters.

    The batch goes through in `accumulate` micro-batches, one after the other. The divisor of the losses is known before
    any forward pass, so the gradients of the parts add up to that of the whole.
    """
    if accumulate > 1:
        # Every accumulate-th row, so that each device has its share of every micro-batch.
        parts = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), (batch, blocks))
        return scan_sum(lambda part, blocks: batch_gradients(models, part, blocks, loss), parts)
    taps = models.drafter.config.target_layer_ids
    features, hidden = target_pass(models.target, models.target_params, batch, taps, loss.reads_target)
    with_gradients = jax.value_and_grad(drafter_loss, has_aux=True)
    (_, sums), gradients = with_gradients(models.drafter_params, models, features, batch, blocks, loss, hidden)
    return sums, gradients


def make_train_step(
    target: Qwen3,
    drafter: AnyDrafter,
    optimizer: optax.GradientTransformation,
    *,
    num_anchors: int,
    learning_rate: Callable[[jax.Array], jax.Array],
    curriculum: Callable[[jax.Array], jax.Array],
    loss: Any,
    accumulate: int = 1,
    ema_decay: float = 0.0,
    shardings: tuple[Any, Any] | None = None,
) -> Callable[[TrainState, dict, Batch, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """(state, target_params, batch, run key) → (state, metrics); jitted, the state donated.

    A step whose loss or gradient is not finite changes no parameter, moment or average; it is counted in
    state.skipped. It still is a step: anchors, λ and the learning rate follow state.step, which counts it.

    Args:
        optimizer: with the updates of learning rate 1 (make_optimizer).
        num_anchors: A, drawn in each step from the key folded with step and row id; not read without blocks.
        learning_rate: step → the factor of the updates.  curriculum: step → λ.
        accumulate: micro-batches that the rows are cut into, one after the other; the result is that of the whole.
        ema_decay: d of average ← d·average + (1-d)·parameters; 0 keeps none (and the state has none).
        shardings: of the new state and of the metrics, on a mesh.
    """

    def step(state: TrainState, target_params: dict, batch: Batch, key: jax.Array):
        if drafter.config.has_backbone:
            step_key, mask = jax.random.fold_in(key, state.step), batch["loss_mask"]
            anchors, keep = sample_anchors(step_key, mask, batch["row_ids"], num_anchors, batch.get("documents"))
            blocks = label_blocks(batch, anchors, keep, drafter.config, loss)
        else:
            blocks = Blocks(None, None, loss.labels(batch))
        step_loss = loss.at(curriculum(state.step), blocks.labels)
        models = Pair(target, target_params, drafter, state.params)
        sums, gradients = batch_gradients(models, batch, blocks, step_loss, accumulate)
        metrics = step_loss.metrics(sums)
        rate = jnp.asarray(learning_rate(state.step), jnp.float32)
        mask = blocks.labels.mask
        metrics |= {"grad_norm": optax.tree.norm(gradients), "learning_rate": rate}
        metrics |= {"anchors": (mask.max(axis=-1) > 0).sum(), "predictions": mask.sum()}
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, jax.tree.map(lambda update: rate * update, updates))
        ema = {}
        if ema_decay:
            ema = jax.tree.map(lambda mean, new: ema_decay * mean + (1.0 - ema_decay) * new, state.ema, params)
        return _guarded(state, params, opt_state, ema, metrics)

    return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def _guarded(
    state: TrainState, params: dict, opt_state: Any, ema: dict, metrics: dict[str, jax.Array]
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after the step: the new values when loss and gradient are finite, else the old ones and a count."""
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    new, old = (params, opt_state, ema), (state.params, state.opt_state, state.ema)
    chosen = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
    skipped = state.skipped + jnp.where(finite, 0, 1)
    bad_step = jnp.where(finite, state.bad_step, state.step + 1)
    return TrainState(state.step + 1, *chosen, skipped, bad_step), metrics | {"skipped": skipped, "bad_step": bad_step}

"""One training step: frozen target forward, anchors, drafter forward, sliced loss, update; one jitted function.

The target's parameters are an argument of their own: never differentiated, never donated, never in the state. Nothing
here names a device, so a mesh is laid over it by sharding the arguments (DESIGN §6).
"""

from collections.abc import Callable

import jax
import optax

from domino_jax.drafter import blocks
from domino_jax.drafter.model import Drafter
from domino_jax.shapes import Features
from domino_jax.target.qwen3 import Qwen3
from domino_jax.training.losses import LossSettings, Sums, dual_loss, sliced_sums
from domino_jax.training.state import TrainState

Batch = dict[str, jax.Array]  # "tokens" int32 [B, S], "loss_mask" float32 [B, S], "row_ids" int32 [B]


def target_features(target: Qwen3, target_params: dict, tokens: jax.Array, layer_ids: tuple[int, ...]) -> Features:
    """Tapped features [B, S, C·D]; the pass stops after the last tapped layer and no gradient enters it."""
    out = target.apply({"params": target_params}, tokens, tap_layers=layer_ids, features_only=True)
    return jax.lax.stop_gradient(out["features"])


def drafter_sums(
    drafter: Drafter,
    params: dict,
    target: Qwen3,
    target_params: dict,
    features: Features,
    batch: Batch,
    anchors: jax.Array,
    keep: jax.Array,
    settings: LossSettings,
) -> Sums:
    """The loss sums of one batch for given anchors int32 [B, A] and keep bool [B, A]."""
    config = drafter.config
    tokens, size = batch["tokens"], config.block_size

    def embed(ids):
        return target.apply({"params": target_params}, ids, method="embed")

    x = embed(blocks.block_tokens(tokens, anchors, keep, size, config.mask_token_id))
    prefix = embed(blocks.head_tokens(tokens, anchors, size))
    z, inner = drafter.apply({"params": params}, features, x, anchors, keep, prefix)
    labels, raw_weights = blocks.labels_and_weights(
        tokens,
        batch["loss_mask"],
        anchors,
        keep,
        block_size=size,
        shift_label=config.shift_label,
        contiguous=settings.contiguous,
    )

    def logits_of(z, inner):
        base = target.apply({"params": target_params}, z, method="unembed")
        return base, corrected(drafter, params, base, inner)

    def flat(array):
        return array.reshape(-1, *array.shape[2:])

    inputs = jax.tree.map(flat, (z, inner))
    return sliced_sums(logits_of, inputs, flat(labels), flat(raw_weights), config, settings)


def corrected(drafter: Drafter, params: dict, base: jax.Array, inner: tuple | None) -> jax.Array:
    """Final logits [.., G, V]: base plus the head's residual from suffix_start on; the base itself without a head."""
    if inner is None:
        return base
    start = drafter.config.suffix_start
    residual = drafter.apply({"params": params}, *(part[..., start:, :] for part in inner), method="residual")
    return base.at[..., start:, :].add(residual)


def make_train_step(
    target: Qwen3,
    drafter: Drafter,
    optimizer: optax.GradientTransformation,
    *,
    num_anchors: int,
    curriculum: Callable[[jax.Array], jax.Array],
    settings: LossSettings,
) -> Callable[[TrainState, dict, Batch, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """(state, target_params, batch, run key) → (state, metrics); jitted, the state donated.

    num_anchors: A, drawn anew each step from the key folded with step and row id.  curriculum: step → λ.
    """

    def step(state: TrainState, target_params: dict, batch: Batch, key: jax.Array):
        features = target_features(target, target_params, batch["tokens"], drafter.config.target_layer_ids)
        step_key = jax.random.fold_in(key, state.step)
        anchors, keep = blocks.sample_anchors(step_key, batch["loss_mask"], batch["row_ids"], num_anchors)

        def loss_of(params):
            sums = drafter_sums(drafter, params, target, target_params, features, batch, anchors, keep, settings)
            return dual_loss(sums, curriculum(state.step))

        (_, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"grad_norm": optax.tree.norm(gradients), "anchors": keep.sum()}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(step, donate_argnums=0)

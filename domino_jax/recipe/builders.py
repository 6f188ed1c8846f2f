"""From the sections of a recipe to the objects of a training run; what is made takes plain values, never a config."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from domino_jax.data.held_out import COUNT, SHARE
from domino_jax.data.index import ProcessShare
from domino_jax.data.order import Layout
from domino_jax.data.pipeline import Batches, make_batches
from domino_jax.data.prompts import read_prompts
from domino_jax.data.rows import RowEncoder, TrainingRows
from domino_jax.data.token_counts import frequent_tokens, order_of_rows
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer, check_answers
from domino_jax.decoding.evaluate import Evaluation
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.curriculum import lambda_base
from domino_jax.method.drafters import CONFIGS, AnyConfig, AnyDrafter, new_drafter
from domino_jax.method.fields import keyed_fields
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings
from domino_jax.method.state import TrainState, init_state
from domino_jax.method.step import make_train_step
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.recipe import rules
from domino_jax.recipe.models import Loader, decode_mesh
from domino_jax.recipe.open_keys import loss_class, shifts_labels
from domino_jax.recipe.restart import held_out_before
from domino_jax.runtime.agreement import primary_first, refuse_differences
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.remote import cache_folder
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.fit import refuse_other_backbone, refuse_other_drafter
from domino_jax.weights.loading import LoadedTarget

MASK_TOKEN = "<|mask|>"
WINDOW = 4_096  # rows that are packed together


def loader_of(flags, settings: DecodeSettings, key: str = "decode.batch_size") -> Loader:
    """Reads the models of a recipe, on the devices of decode.mesh. key: the recipe's, of settings.batch_size."""
    config, mesh = flags.config, flags.config.decode.mesh
    mesh = decode_mesh(mesh.data, mesh.tensor, settings.batch_size, key)
    return Loader(config.target.path, settings, mesh, flags.head, config.target.quantize)


def batches_of(
    config,
    source: str,
    tokenizer: Any,
    vocab_size: int,
    workdir: epath.Path,
    mesh: Mesh,
    report: Callable[[str], None],
) -> Batches:
    """The rows of `source` in the recipe's order; a DominoError if the processes have other rows.

    tokenizer, vocab_size: the target's.  report: takes the lines about the rows, from each process.
    """
    data = config.data
    share = ProcessShare(
        cache_folder() / "data" if is_remote(workdir) else pathlib.Path(workdir, "data"),
        sharding.process_rows(mesh, config.train.batch_size),
        primary_first=primary_first,
        report=report,
    )
    encoder = RowEncoder(tokenizer, data.max_length, config.decode.thinking, vocab_size)
    layout = Layout(data.layout, data.max_length, config.train.batch_size, WINDOW)
    choices = {
        "seed": config.seed,
        "held_out": 0 if config.eval.prompts or config.eval.answers else COUNT,
        "skip_bad": data.skip_bad_rows,
    }
    before = held_out_before(workdir)
    batches = make_batches(source, encoder, layout, share, held_out_before=before or (), **choices)
    if before == [] and batches.rows.num_held_out_prompts:
        report(
            "warning: the steps before this start may have learned the prompts that are held out now, and τ may be too"
            " high. Name others with --config.eval.prompts=PROMPTS.jsonl."
        )
    refuse_differences({"the training data": batches.fingerprint})
    return batches


def drafter_config_of(config, target: Qwen3Config, mask_token_id: int | None = None) -> AnyConfig:
    """A drafter of the recipe with the target's widths.

    A draft vocabulary is not chosen here, because it depends on the data: `with_draft_vocabulary`.

    mask_token_id: from find_mask_token for a drafter that is trained. None where only shapes and speed matter: the
    recipe's, else DrafterConfig.for_target's default.

    Raises:
        DominoError: values that do not fit together or the target.
    """
    choices = config.drafter
    shared = {
        "num_layers": choices.num_layers,
        "intermediate_size": choices.intermediate_size or target.intermediate_size,
        "target_layer_ids": choices.target_layer_ids,
        "block_size": choices.block_size,
        "mask_token_id": choices.mask_token_id if mask_token_id is None else mask_token_id,
        "shift_label": shifts_labels(choices),
        "layer_types": ("sliding_attention",) * choices.num_layers if choices.sliding_window else (),
        "sliding_window": choices.sliding_window or None,
    }
    drafter = CONFIGS[choices.head]
    if not drafter.has_backbone:
        shared = {name: value for name, value in shared.items() if name in drafter.reads}
    try:
        return drafter.for_target(target, **{**drafter.new, **shared, **drafter.recipe_fields(config)})
    except DataError as error:  # as of a damaged file; here it is the recipe that has to change
        keys = keys_of_fields(config)
        change = f"\nChange --config.{keys[error.field]}." if error.field in keys else ""
        raise DominoError(f"{error}{change}") from error


def keys_of_fields(config) -> dict[str, str]:
    """{field of the drafter's config: the recipe's key}."""
    head = config.drafter.head
    keys = {field: f"drafter.{field}" for field in set(config.drafter) - {"head", "path", *CONFIGS}}
    return keys | {field: f"drafter.{head}.{name}" for field, (name, _) in keyed_fields(CONFIGS[head]).items()}


def with_draft_vocabulary(config: AnyConfig, rows: TrainingRows) -> AnyConfig:
    """The config with the draft vocabulary that the training rows suggest, where a drafter has one."""
    if config.has_backbone or config.draft_vocab_size == config.vocab_size:
        return config
    order = order_of_rows(rows, config.vocab_size)
    return config.with_draft_tokens(frequent_tokens(order, config.vocab_size, config.draft_vocab_size))


def find_mask_token(chosen: int | None, loaded: LoadedTarget) -> int:
    """The recipe's id, else the tokenizer's <|mask|>, else an id that no text becomes: the first one after all tokens,
    or where the embedding ends there the lowest that the tokenizer gives to none.
    """
    rows, tokenizer = loaded.model.config.vocab_size, loaded.tokenizer
    if chosen is None and tokenizer is not None:
        tokens = tokenizer.get_vocab()
        used = {*tokens.values(), *loaded.stop_ids}
        free = (number for number in (*range(max(used) + 1, rows), *range(rows)) if number not in used)
        chosen = tokens[MASK_TOKEN] if MASK_TOKEN in tokens else next(free, None)
    if chosen is not None and 0 <= chosen < rows:
        return chosen
    problem = f"the mask token id {chosen} is outside the target's embedding of {rows} rows"
    if chosen is None:
        lack = "no tokenizer" if tokenizer is None else f"a token for each of the {rows} rows of its embedding"
        problem = f"{loaded.path} has {lack}, so no mask token can be chosen"
    raise DominoError(
        f"{problem}; set --config.drafter.mask_token_id to an id below {rows} that no row of data.train has."
    )


def drafter_of(config: AnyConfig, recipe) -> AnyDrafter:
    """The drafter as it trains."""
    return new_drafter(config, np.dtype(recipe.target.dtype), remat=recipe.train.remat)


def state_maker(train, drafter: AnyDrafter, optimizer: optax.GradientTransformation, mesh: Mesh):
    """(jitted run key → TrainState laid over the mesh, the shapes of that state with their shardings)."""

    def make(key: jax.Array):
        return init_state(drafter, optimizer, key, with_ema=train.ema_decay > 0)

    # A key that is made outside of the traced function would be put on the mesh, whose devices may not be here.
    shapes = jax.eval_shape(lambda: make(jax.random.key(0)))
    places = sharding.param_shardings(mesh, shapes, drafter.config.num_key_value_heads)
    shapes = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)
    return jax.jit(make, out_shardings=places), shapes


def loss_of(config) -> Any:
    """The loss of a recipe, with each of its choices that the recipe has a key for."""
    train, head = config.train, config.drafter.head
    choices = {
        "gamma": None if math.isinf(train.gamma) else train.gamma,
        "dpace_alpha": train.dpace_alpha,
        "frozen_backbone": train.frozen_backbone is not None,
        **(config.drafter[head] if head in config.drafter else {}),
    }
    loss = loss_class(head, train.loss)
    return loss(**{field.name: choices[field.name] for field in dataclasses.fields(loss) if field.name in choices})


def optimizer_of(train) -> optax.GradientTransformation:
    return make_optimizer(train.optimizer, frozen_backbone=train.frozen_backbone is not None)


def with_stored_weights(state: TrainState, config: AnyConfig, train, loaded: LoadedTarget) -> TrainState:
    """The state of a new run with what the recipe's train section takes from other drafters, if anything.

    Raises:
        DataError: that drafter, or the part of it that is taken, has another shape, block, rank, vocabulary or layout.
    """

    def load(path: str) -> tuple[AnyConfig, dict]:
        return load_drafter(path, loaded.model.config, np.float32, target_path=loaded.path)

    if train.start_from:
        stored, params = load(train.start_from)
        refuse_other_drafter(config, stored, train.start_from)
        state = _with_params(state, params)
    if train.frozen_backbone:
        stored, params = load(train.frozen_backbone)
        refuse_other_backbone(config, stored, train.frozen_backbone)
        state = _with_params(state, {"backbone": params["backbone"]})
    return state


def _with_params(state: TrainState, stored: dict) -> TrainState:
    """The state whose parameters, or a part of their tree, are replaced by stored ones."""

    def merged(old: Any, new: Any) -> Any:
        if isinstance(new, dict):
            return {**old, **{name: merged(old[name], part) for name, part in new.items()}}
        return jax.device_put(np.asarray(new), old.sharding)

    return state.replace(params=merged(state.params, stored), ema=merged(state.ema, stored) if state.ema else {})


def train_step_of(config, target: Qwen3, drafter: AnyDrafter, optimizer, mesh: Mesh, state_shapes: Any):
    """The jitted step of the recipe; `state_shapes` from state_maker."""
    train, places = config.train, jax.tree.map(lambda x: x.sharding, state_shapes)
    return make_train_step(
        target,
        drafter,
        optimizer,
        num_anchors=train.num_anchors,
        learning_rate=learning_rate(train.learning_rate, train.steps, train.warmup_ratio),
        curriculum=lambda step: lambda_base(step, train.steps, train.lambda_start, train.lambda_decay_ratio),
        loss=loss_of(config),
        accumulate=train.accumulate,
        ema_decay=train.ema_decay,
        shardings=(places, sharding.replicated(mesh)),
    )


def chain_drafting(config, drafter: AnyConfig) -> DraftSettings:
    """How evaluations draft: the chains of decode's settings, among all tokens and over the whole text.

    Raises:
        DominoError: settings that the drafter does not have.
    """
    decode, most = config.decode, drafter.most_drafts
    chosen = {name: decode[name] for name in ("draft_sharpness", "head_candidates")}
    drafting = DraftSettings(num_drafts=min(decode.num_drafts or most, most), **chosen)
    rules.refuse(drafting.drafter_problem(drafter), "decode.")
    return drafting


def evaluation_of(config, loaded: LoadedTarget, drafter: AnyDrafter, answers: Sequence[TargetAnswer]) -> Evaluation:
    """Passes over the target's answers, with the layout of the training step and the rows of its micro-batches.

    Raises:
        DominoError, DataError: answers that the models cannot read, or that are another target's.
    """
    source, drafting = config.eval.answers or "the held-out prompts", chain_drafting(config, drafter.config)
    models = Pair(loaded.model, loaded.params, drafter)
    check_answers(answers, models, source)
    passes = AnswerPasses(answers, drafting, config.train.batch_size // config.train.accumulate)
    refuse_differences({"the answers": passes.digest})
    if config.eval.answers:  # the answers of this run are the target's
        passes.chosen_share(models, source)
    return Evaluation(models, passes, drafting.width(drafter.config))


def evaluation_rows(config, rows: TrainingRows, check: Callable[[dict], None]) -> list[dict]:
    """The first eval.num_prompts rows of eval.prompts, or of the prompts held out of the data if it is not set.

    check: raises DataError for a row that cannot be used.
    """
    if config.eval.prompts:
        return read_prompts(config.eval.prompts, config.eval.num_prompts, config.data.skip_bad_rows, check)
    held_out = rows.held_out_prompts()[: config.eval.num_prompts]
    if not held_out:
        raise DataError(
            f"{config.data.train} has {rows.num_read} rows: too few to hold prompts out for evaluation (one prompt in "
            f"{SHARE}, of at most half of data.max_length {config.data.max_length}).\n"
            "Name prompts with --config.eval.prompts=PROMPTS.jsonl, or set --config.eval.every=0."
        )
    for row in held_out:
        check(row)
    return held_out

"""Checks of a recipe's drafter and of its training that depend on the drafter's head."""

import math
from collections.abc import Collection

from domino_jax.method.names import (
    BLOCK_HEADS,
    DFLASH2,
    DOMINO,
    EAGLE3,
    FUSED_LAYERS,
    MARKOV,
    ROW_DRAFTERS,
)
from domino_jax.recipe.head_rules import head_rules
from domino_jax.recipe.values import (
    confidence_head,
    convolution_taps,
    has_own_loss,
    require,
    shifts_labels,
    trains_confidence,
    whole_numbers,
)

# Keys that only these drafters read. The command line may not set one for another drafter, where it would do nothing.
READERS = {
    "drafter.pure_draft_prefix_len": (DOMINO,),
    "drafter.shift_label": BLOCK_HEADS,
    "drafter.target_layer_ids": (*BLOCK_HEADS, EAGLE3),
}


def check_drafter(config, given: Collection[str]) -> None:
    """The drafter section; `given` are the keys that the command line sets."""
    drafter = config.drafter
    require(bool(config.target.path), "target.path", config.target.path, "name the target's folder or hub id")
    for key, heads in READERS.items():
        change = f"drafter.head {drafter.head} does not read it; leave it out"
        require(key not in given or drafter.head in heads, key, drafter[key.removeprefix("drafter.")], change)
    _check_slots(drafter)
    taps, size = convolution_taps(drafter), drafter.block_size
    change = f"a block of drafter.block_size {size} has no more taps than slots; give 0 (none) to {size}"
    require(taps <= size, "drafter.conv_kernel_size", taps, change)
    _check_layer_ids(drafter)


def _check_slots(drafter) -> None:
    head, shifted, prefix = drafter.head, shifts_labels(drafter), drafter.pure_draft_prefix_len
    change = (
        f"with drafter.block_size {drafter.block_size} and shift_label {shifted} the head would correct no slot; make "
        "the prefix shorter or the block longer"
    )
    suffix_start = prefix + (0 if shifted else 1)
    require(head != DOMINO or suffix_start < drafter.block_size, "drafter.pure_draft_prefix_len", prefix, change)
    change = f"the head {head} is {'always' if head == MARKOV else 'never'} shifted; leave it out"
    only = {MARKOV: True, DFLASH2: False}
    require(only.get(head, shifted) == shifted, "drafter.shift_label", drafter.shift_label, change)


def _check_layer_ids(drafter) -> None:
    ids, key = drafter.target_layer_ids, "drafter.target_layer_ids"
    fine = ids is None or (whole_numbers(ids) and bool(ids) and len(set(ids)) == len(ids))
    change = "list different layers of the target, counted from 0, or leave it out for the public rule"
    require(fine, key, ids, change)


def check_training(config) -> None:
    """What the train section and the drafter's head ask of each other."""
    head, train, ids = config.drafter.head, config.train, config.drafter.target_layer_ids
    change = f"drafter.head {EAGLE3} fuses {FUSED_LAYERS} layers; list {FUSED_LAYERS}, or leave it out"
    fine = ids is None or head != EAGLE3 or len(ids) == FUSED_LAYERS
    require(fine, "drafter.target_layer_ids", ids, change)
    _check_own_losses(head, train)
    _check_confidence(config)
    _check_row_losses(head, train)
    for rule in head_rules(config.drafter, train):
        require(*rule)
    _check_curriculum(head, train)


def _check_own_losses(head: str, train) -> None:
    weights = train.markov_weights
    numbers = [weight for weight in weights if isinstance(weight, int | float) and 0 <= weight < math.inf]
    # The third weight trains the confidence head alone.
    fine = len(numbers) == len(weights) == 3 and any(numbers[:2])
    change = (
        'give three weights, 0 or above and the first two not both 0, as --config.train.markov_weights="(0.1,0.9,1.0)"'
    )
    require(fine, "train.markov_weights", weights, change)
    alpha = train.selector_alpha
    require(math.isfinite(alpha), "train.selector_alpha", alpha, "give a finite number, 0 or more")
    if has_own_loss(head, train):
        why = f"{head}'s own loss does not read it; leave it out, or set --config.train.loss=cross_entropy"
        require(train.dpace_alpha is None or head == DFLASH2, "train.dpace_alpha", train.dpace_alpha, why)
        require(train.distill == 0, "train.distill", train.distill, why)


def _check_confidence(config) -> None:
    """An untrained confidence head would be exported as a trained one."""
    train = config.train
    untrained = config.drafter.head == MARKOV and confidence_head(config) and not trains_confidence(train)
    change = (
        f"with train.loss {train.loss} and train.markov_weights {tuple(train.markov_weights)} nothing trains it; leave "
        "it out"
    )
    require(not untrained, "drafter.enable_confidence_head", config.drafter.enable_confidence_head, change)


def _check_row_losses(head: str, train) -> None:
    decay = train.eagle3.decay
    require(0 < decay <= 1, "train.eagle3.decay", decay, "set it above 0 and at most 1")
    if head in ROW_DRAFTERS:
        for name, default in (("dpace_alpha", None), ("distill", 0.0), ("loss", "own")):
            change = f"drafter.head {head} has its own loss, which does not read it; leave it out"
            require(train[name] == default, f"train.{name}", train[name], change)


def _check_curriculum(head: str, train) -> None:
    # λ takes from the head's loss what it gives to that of the backbone.
    wasted = train.frozen_backbone is not None and not has_own_loss(head, train) and train.lambda_start > 0
    change = "the base loss has nothing to train on train.frozen_backbone; set --config.train.lambda_start=0"
    require(not wasted, "train.lambda_start", train.lambda_start, change)

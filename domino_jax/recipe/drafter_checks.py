"""Checks of a recipe's drafter and of its training that depend on the drafter's head."""

from collections.abc import Collection

from domino_jax.method.kinds import KINDS
from domino_jax.recipe.head_rules import head_rules
from domino_jax.recipe.values import (
    convolution_taps,
    has_own_loss,
    require,
    shifts_labels,
    whole_numbers,
)

# Keys that some drafters do not read. The command line may not set one for those, where it would do nothing.
SHARED = ("pure_draft_prefix_len", "shift_label", "target_layer_ids")


def check_drafter(config, given: Collection[str]) -> None:
    """The drafter section; `given` are the keys that the command line sets."""
    drafter = config.drafter
    require(bool(config.target.path), "target.path", config.target.path, "name the target's folder or hub id")
    for name in SHARED:
        change, key = f"drafter.head {drafter.head} does not read it; leave it out", f"drafter.{name}"
        require(key not in given or name in KINDS[drafter.head].reads, key, drafter[name], change)
    _check_slots(drafter)
    taps, size = convolution_taps(drafter), drafter.block_size
    change = f"a block of drafter.block_size {size} has no more taps than slots; give 0 (none) to {size}"
    require(taps <= size, "drafter.conv_kernel_size", taps, change)
    _check_layer_ids(drafter)


def _check_slots(drafter) -> None:
    shifted, prefix = shifts_labels(drafter), drafter.pure_draft_prefix_len
    change = (
        f"with drafter.block_size {drafter.block_size} and shift_label {shifted} the head would correct no slot; make "
        "the prefix shorter or the block longer"
    )
    reads = "pure_draft_prefix_len" in KINDS[drafter.head].reads
    fine = not reads or prefix + (0 if shifted else 1) < drafter.block_size
    require(fine, "drafter.pure_draft_prefix_len", prefix, change)
    only = KINDS[drafter.head].only_shift
    change = f"drafters of the head {drafter.head} always have {only}; leave it out"
    require(only in (None, shifted), "drafter.shift_label", drafter.shift_label, change)


def _check_layer_ids(drafter) -> None:
    ids, key = drafter.target_layer_ids, "drafter.target_layer_ids"
    fine = ids is None or (whole_numbers(ids) and bool(ids) and len(set(ids)) == len(ids))
    change = "list different layers of the target, counted from 0, or leave it out for the public rule"
    require(fine, key, ids, change)


def check_training(config) -> None:
    """What the train section and the drafter's head ask of each other."""
    head, train = config.drafter.head, config.train
    if KINDS[head].has_backbone and has_own_loss(head, train):
        why = f"{head}'s own loss does not read it; leave it out, or set --config.train.loss=cross_entropy"
        require(train.dpace_alpha is None or KINDS[head].own_dpace, "train.dpace_alpha", train.dpace_alpha, why)
        require(train.distill == 0, "train.distill", train.distill, why)
    if not KINDS[head].has_backbone:
        for name, default in (("dpace_alpha", None), ("distill", 0.0), ("loss", "own")):
            change = f"drafter.head {head} has its own loss, which does not read it; leave it out"
            require(train[name] == default, f"train.{name}", train[name], change)
    values = [rule for kind in KINDS.values() for rule in kind.value_rules(config)]
    for rule in (*values, *KINDS[head].rules(config), *head_rules(config.drafter, train)):
        require(*rule)
    _check_curriculum(head, train)


def _check_curriculum(head: str, train) -> None:
    # λ takes from the head's loss what it gives to that of the backbone.
    wasted = train.frozen_backbone is not None and not has_own_loss(head, train) and train.lambda_start > 0
    change = "the base loss has nothing to train on train.frozen_backbone; set --config.train.lambda_start=0"
    require(not wasted, "train.lambda_start", train.lambda_start, change)

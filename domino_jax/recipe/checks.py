"""Recipes: reading one, every check that spans its fields, and the plain copy of it that a workdir keeps.

The types of the fields are checked where they are set (ml_collections); here it is ranges and what must fit together. A
recipe is a Python file with get_config(); a value from the command line arrives through cli.py.
"""

import importlib.machinery
import importlib.util
import math
import pathlib
import sys
import traceback
from collections.abc import Collection

from ml_collections import config_dict

from domino_jax.decoding.decode_settings import tree_settings
from domino_jax.decoding.settings import (
    BASELINE,
    LARGEST,
    MODES,
    PARITIES,
    TREE,
    DraftSettings,
    Problem,
    SamplingParams,
    cache_problem,
    parity_problem,
    refused_mode,
)
from domino_jax.drafters.names import (
    CHAIN,
    DFLASH2,
    DOMINO,
    EAGLE3,
    HEADS,
    LONGEST_CHAIN,
    MARKOV,
    MARKOV_KINDS,
    ROW_DRAFTERS,
    SELECTOR_RULES,
)
from domino_jax.recipe.head_rules import decoded_rank_rule, head_rules
from domino_jax.runtime.errors import DominoError, first_line

ROOT = pathlib.Path(__file__).resolve().parents[2]

DTYPES = ("float32", "bfloat16")
MESH_AXES = ("data", "fsdp", "tensor")

# What may change between a checkpoint and the run that continues it without touching the training: everything else is
# refused (checkpoint.refuse_changes) unless --allow_config_change names it.
FREE_TO_CHANGE = (
    *("decode", "eval", "checkpoint", "mesh", "preflight", "drafter.path"),
    *("train.log_every", "train.hang_seconds", "train.abort_on_hang", "train.profile_steps", "train.wandb"),
    *("regenerate.batch_size", "regenerate.use_drafter"),
)


def load_recipe(path: str) -> config_dict.ConfigDict:
    """The locked config of one recipe file; whatever is wrong with the file is a DominoError that names its line."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise DominoError(
            f"--config={path}: there is no such file. Recipes are in configs/, for example configs/tiny.py."
        )
    # A recipe imports its neighbours as `from configs import ...`, also when it is started from another folder.
    folder = str(file.resolve().parent.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_loader("recipe", importlib.machinery.SourceFileLoader("recipe", str(file)))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except Exception as error:  # a recipe is the user's program, which may raise anything
        raise DominoError(
            f"--config={path}: the recipe does not load.\n{_line_of(error, file)}: {first_line(error)}"
        ) from error
    if not isinstance(config, config_dict.ConfigDict):
        raise DominoError(f"--config={path}: get_config() returned {type(config).__name__}, expected a ConfigDict.")
    return config.lock()


def _line_of(error: Exception, file: pathlib.Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file)]
    return f"{file}:{own[-1].lineno}" if own else str(file)


def resolved(config: config_dict.ConfigDict) -> dict:
    """The recipe as JSON values (tuples become lists, infinities strings): what config.json and checkpoints hold."""
    plain = _plain(config.to_dict())
    plain["drafter"]["shift_label"] = shifts_labels(config.drafter)
    plain["drafter"]["conv_kernel_size"] = convolution_taps(config.drafter)
    return plain


def shifts_labels(drafter: config_dict.ConfigDict) -> bool:
    """drafter.shift_label, or what public checkpoints of its head have: servers take plain DFlash as unshifted."""
    return drafter.head in (DOMINO, MARKOV) if drafter.shift_label is None else drafter.shift_label


def convolution_taps(drafter: config_dict.ConfigDict) -> int:
    """drafter.conv_kernel_size, or what public checkpoints of its head have."""
    default = 2 if drafter.head == DFLASH2 else 0
    return default if drafter.conv_kernel_size is None else drafter.conv_kernel_size


def portable(text: str) -> str:
    """Paths inside the checkout as ./…: it may have moved when a run continues or a decoding is shown again."""
    return text.replace(f"{ROOT}/", "./")


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    if isinstance(value, str):
        return portable(value)
    return value


def check(config: config_dict.ConfigDict, command: str) -> None:
    """Refuse a recipe whose values are out of range or do not fit together, before anything is loaded.

    Args:
      config: the recipe with the command line's values in it.
      command: train, dry_run (train without data), decode or regenerate; what only one of them reads is required by
        that one alone.
    """
    _check_integers(config)
    _check_values(config)
    _check_drafter(config)
    _check_training(config)
    _check_decode(config.decode)
    _check_sampling("regenerate", config.regenerate)
    _check_mesh("mesh", config.mesh, MESH_AXES)
    if command == "train":
        _check_train_needs(config)


def _check_integers(config, above: str = "") -> None:
    """Every integer, seeds included, fits the int32 of arrays on a device."""
    for name, value in config.items():
        key = f"{above}{name}"
        if isinstance(value, config_dict.ConfigDict):
            _check_integers(value, f"{key}.")
        elif isinstance(value, int):
            _require(abs(value) <= LARGEST, key, value, f"integers must fit int32; give {LARGEST} or less")


def _require(fine: bool, key: str, value, change: str) -> None:
    if not fine:
        raise DominoError(f"config.{key} is {value!r}: {change}.")


def _refuse(section: str, problem: Problem | None) -> None:
    if problem:
        raise DominoError(f"config.{section}.{problem}")


# The rules of single values; a value that is absent (None) has none.
LEAST = {
    0: (
        *("seed", "drafter.pure_draft_prefix_len", "drafter.mask_token_id", "drafter.conv_kernel_size"),
        *("data.held_out", "preflight.rows", "train.selector_alpha"),
        *("eval.every", "regenerate.num_prompts", "decode.seed", "decode.num_prompts", "decode.num_drafts"),
        *("decode.head_candidates", "decode.head_rank", "decode.cores"),
        *("train.lambda_decay_ratio", "train.hang_seconds"),
    ),
    1: (
        *("drafter.num_layers", "drafter.intermediate_size", "drafter.gru_hidden_dim", "drafter.emb_dim"),
        *("drafter.markov_rank", "drafter.conv_group_size", "drafter.selector_rank", "drafter.selector_top_k"),
        *("drafter.eagle3.draft_vocab_size", "drafter.medusa.num_heads", "drafter.medusa.num_layers"),
        *("train.steps", "train.batch_size", "train.log_every", "train.num_anchors", "train.eagle3.passes"),
        *("checkpoint.every", "checkpoint.keep"),
        *("eval.batch_size", "eval.num_prompts", "decode.batch_size", "decode.max_new_tokens"),
        *("regenerate.batch_size", "regenerate.max_new_tokens"),
    ),
    2: ("drafter.block_size", "data.max_length"),  # an anchor and a draft
}
CHOICES = (
    ("target.dtype", DTYPES),
    ("drafter.head", HEADS),
    ("drafter.markov_head_type", MARKOV_KINDS),
    ("data.layout", ("pad", "pack", "buckets")),
    ("train.loss", ("own", "cross_entropy")),
    ("train.eagle3.mask", ("label", "parity")),
    ("train.medusa_loss", ("default", "unweighted", "common_rows")),
    ("train.head_tokens", ("text", "drafts")),
    ("train.optimizer", ("adamw", "muon")),
    ("train.non_finite", ("stop", "skip")),
    ("train.selector_rule", SELECTOR_RULES),
    ("decode.dtype", DTYPES),
    ("decode.parity", PARITIES),
)
SHARES = ("train.lambda_start", "train.dpace_alpha", "train.distill", "decode.confidence")  # 0 to 1
SHARES += ("train.selector_warmup_ratio", "train.selector_ramp_ratio")
SHARES_BELOW_ONE = ("train.warmup_ratio", "train.ema_decay")


def _value(config, key: str):
    for name in key.split("."):
        config = config[name]
    return config


def _check_values(config) -> None:
    for key, allowed in CHOICES:
        value = _value(config, key)
        _require(value in allowed, key, value, f"set --config.{key} to one of {', '.join(allowed)}")
    for least, keys in LEAST.items():
        for key in keys:
            value = _value(config, key)
            _require(value is None or value >= least, key, value, f"set --config.{key} to {least} or more")
    rate = config.train.learning_rate
    _require(0 < rate < math.inf, "train.learning_rate", rate, "set it to a finite number above 0")
    for key in (*SHARES, *SHARES_BELOW_ONE):
        value, below = _value(config, key), "below" if key in SHARES_BELOW_ONE else "at most"
        fine = value is None or 0 <= value < 1 or (value == 1 and key in SHARES)
        _require(fine, key, value, f"set --config.{key} to 0 or more and {below} 1")


def _check_drafter(config) -> None:
    drafter = config.drafter
    _require(bool(config.target.path), "target.path", config.target.path, "name the target's folder or hub id")
    shifted = shifts_labels(drafter)
    suffix_start = drafter.pure_draft_prefix_len + (0 if shifted else 1)
    _require(
        drafter.head != DOMINO or suffix_start < drafter.block_size,
        "drafter.pure_draft_prefix_len",
        drafter.pure_draft_prefix_len,
        f"with drafter.block_size {drafter.block_size} and shift_label {shifted} the head would correct no slot; make "
        "the prefix shorter or the block longer",
    )
    only = {MARKOV: True, DFLASH2: False}
    change = f"the head {drafter.head} is {'always' if drafter.head == MARKOV else 'never'} shifted; leave it out"
    _require(only.get(drafter.head, shifted) == shifted, "drafter.shift_label", drafter.shift_label, change)
    taps, size = convolution_taps(drafter), drafter.block_size
    change = f"a block of drafter.block_size {size} has no more taps than slots; give 0 (none) to {size}"
    _require(taps <= size, "drafter.conv_kernel_size", taps, change)
    ids = drafter.target_layer_ids
    fine = ids is None or (_whole_numbers(ids) and bool(ids) and len(set(ids)) == len(ids))
    change = "list different layers of the target, counted from 0, or leave it out for the public rule"
    _require(fine, "drafter.target_layer_ids", ids, change)


def _whole_numbers(values: Collection, least: int = 0) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values)


def _check_training(config) -> None:
    data, train = config.data, config.train
    change = f"a row of data.max_length {data.max_length} has one anchor less than tokens; change one of the two"
    fine = train.num_anchors < data.max_length or config.drafter.head in ROW_DRAFTERS  # which draw no anchors
    _require(fine, "train.num_anchors", train.num_anchors, change)
    fine = train.accumulate >= 1 and train.batch_size % train.accumulate == 0
    _require(fine, "train.accumulate", train.accumulate, f"it has to divide train.batch_size {train.batch_size}")
    _require(train.gamma > 0, "train.gamma", train.gamma, "set --config.train.gamma above 0, or to inf for no decay")
    _check_own_losses(config.drafter.head, train)
    _check_row_losses(config.drafter.head, train)
    for rule in head_rules(config.drafter, train):
        _require(*rule)
    steps = train.profile_steps
    change = 'give the first and the last step, as --config.train.profile_steps="(10,15)"'
    _require(not steps or (len(steps) == 2 and 0 < steps[0] <= steps[1]), "train.profile_steps", steps, change)


def _check_own_losses(head: str, train) -> None:
    weights = train.markov_weights
    numbers = [weight for weight in weights if isinstance(weight, int | float) and 0 <= weight < math.inf]
    fine = len(numbers) == len(weights) == 3 and any(numbers)
    change = 'give three weights, 0 or above and not all 0, as --config.train.markov_weights="(0.1,0.9,1.0)"'
    _require(fine, "train.markov_weights", weights, change)
    alpha = train.selector_alpha
    _require(math.isfinite(alpha), "train.selector_alpha", alpha, "give a finite number, 0 or more")
    if head in (MARKOV, DFLASH2) and train.loss == "own":
        why = f"{head}'s own loss does not read it; leave it out, or set --config.train.loss=cross_entropy"
        _require(train.dpace_alpha is None or head == DFLASH2, "train.dpace_alpha", train.dpace_alpha, why)
        _require(train.distill == 0, "train.distill", train.distill, why)


def _check_row_losses(head: str, train) -> None:
    decay = train.eagle3.decay
    _require(0 < decay <= 1, "train.eagle3.decay", decay, "set it above 0 and at most 1")
    if head in ROW_DRAFTERS:
        for name, default in (("dpace_alpha", None), ("distill", 0.0), ("loss", "own")):
            change = f"drafter.head {head} has its own loss, which does not read it; leave it out"
            _require(train[name] == default, f"train.{name}", train[name], change)


def _check_sampling(section: str, values, min_p: float = 0.0) -> None:
    _refuse(section, SamplingParams(values.temperature, values.top_k, values.top_p, min_p).problem())


def _check_decode(decode) -> None:
    modes = decode.modes
    known = all(mode in MODES for mode in modes)
    _require(
        bool(modes) and known and len(set(modes)) == len(modes),
        "decode.modes",
        modes,
        f"list some of {', '.join(MODES)}, each once, as --config.decode.modes=\"('autoregressive','domino')\"",
    )
    _check_sampling("decode", decode, decode.min_p)
    _require(
        decode.cache_length > decode.max_new_tokens,
        "decode.cache_length",
        decode.cache_length,
        f"it holds the prompt and decode.max_new_tokens {decode.max_new_tokens}; make it larger or generate "
        "fewer tokens",
    )
    _check_drafting(decode)


def _check_drafting(decode) -> None:
    _require(
        decode.parity == "near_tie" or bool(set(decode.modes) - {BASELINE}),
        "decode.parity",
        decode.parity,
        "it gives plain decoding the width of a draft block, and decode.modes drafts nothing; add a mode that does",
    )
    tau = decode.simulate_tau
    _require(tau == 0 or 1 <= tau < math.inf, "decode.simulate_tau", tau, "0 is off; a round emits 1 token or more")
    sizes = decode.concurrency
    _require(
        _whole_numbers(sizes, 1),
        "decode.concurrency",
        sizes,
        'list batch sizes, as --config.decode.concurrency="(1,8,32)"',
    )
    for key in ("tasks", "compare"):
        fine = all(isinstance(entry, str) and entry for entry in decode[key])
        _require(fine, f"decode.{key}", decode[key], f"list texts, as --config.decode.{key}=\"('NAME',)\"")
    _check_mesh("decode.mesh", decode.mesh, ("data", "tensor"))
    _check_tree(decode)


def _check_tree(decode) -> None:
    tree = tree_settings(decode.tree)
    _refuse("decode", tree.problem())
    if TREE in decode.modes:
        _refuse("decode", parity_problem(decode.parity, tree))
        _refuse("decode", cache_problem(tree, decode.cache_length, decode.max_new_tokens))


def _check_mesh(section: str, mesh, axes: Collection[str]) -> None:
    for axis in axes:
        size = mesh[axis]
        _require(size >= 1 or size == -1, f"{section}.{axis}", size, "give a number of devices, or -1 for the rest")
    rest = [axis for axis in axes if mesh[axis] == -1]
    _require(len(rest) <= 1, section, rest, "only one axis can be -1 (the rest of the devices)")


def _check_train_needs(config) -> None:
    rows = config.data.train
    _require(bool(rows), "data.train", rows, "name the training rows, as --config.data.train=ROWS.jsonl")
    judged = config.eval.every > 0 and not config.data.held_out
    _require(
        bool(config.eval.prompts) or not (judged or config.eval.final),
        "eval.prompts",
        config.eval.prompts,
        f"eval.every {config.eval.every} and eval.final {config.eval.final} need held-out prompts; give them with "
        "--config.eval.prompts=PROMPTS.jsonl, or turn both off (data.held_out is enough for eval.every alone)",
    )
    if config.eval.final:
        _check_final_decoding(config.drafter, config.decode)


def _check_final_decoding(drafter, decode) -> None:
    """Refuses before the training what the final decoding would refuse after it."""
    for mode in decode.modes:
        refused = refused_mode(mode, drafter.head)
        _require(
            refused is None, "drafter.head", drafter.head, f"of decode.modes, which eval.final decodes in, {refused}"
        )
    if not set(decode.modes) - {BASELINE}:
        return
    sure = drafter.head == MARKOV and drafter.enable_confidence_head
    change = f"a drafter of drafter.head {drafter.head} has no confidence head; set it to 0"
    _require(sure or decode.confidence == 0, "decode.confidence", decode.confidence, change)
    _require(*decoded_rank_rule(drafter, decode))
    tree = tree_settings(decode.tree) if TREE in decode.modes else None
    drafting = DraftSettings(num_drafts=decode.num_drafts or None, tree=tree)
    drafts, most = drafter.block_size - (0 if shifts_labels(drafter) else 1), None
    if drafter.head in ROW_DRAFTERS:
        drafts, most = (CHAIN, LONGEST_CHAIN) if drafter.head == EAGLE3 else (drafter.medusa.num_heads, None)
    size = drafts + 1 if drafter.head in ROW_DRAFTERS else drafter.block_size
    _refuse("decode", drafting.problem(size, drafts, most))

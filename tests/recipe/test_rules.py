"""A bad value of a recipe is refused in one sentence that names its key: ranges, and rules between keys."""

import pytest

from domino_jax.decoding.settings import canonical_mode, supported_modes
from domino_jax.method.drafters import CONFIGS
from domino_jax.recipe import loading, rules
from domino_jax.recipe.open_keys import decode_settings, modes_of
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.keys import LARGEST, walk
from tests.helpers.recipes import recipe, set_value

NAN, INF = float("nan"), float("inf")


def passes(changes, command="train", set_keys=()):
    config = recipe()
    for key, value in changes.items():
        set_value(config, key, value)
    rules.check(config, command, set_keys)


def refusal(changes, command="train", set_keys=()):
    """The message about a sound recipe with these changes."""
    with pytest.raises(DominoError) as refused:
        passes(changes, command, set_keys)
    assert refused.value.exit_code == 2
    return str(refused.value)


def out_of_range():
    """(key, value) just outside of every limit that a key declares, and values of no range."""
    for name, key, value in walk(recipe()):
        whole = int in (key.of, type(value), key.default)
        step = 1 if whole else 0.001
        values = [key.least - step] if key.least is not None else []
        values += [key.most + step] if key.most is not None else []
        values += [limit for limit in (key.above, key.below) if limit is not None]
        values += ["x"] if key.choices else []
        values += [LARGEST + 1] if whole else []
        values += [NAN] if values and not whole and not key.choices else []
        values += [""] if key.of is str else []
        for bad in values:
            yield name, (bad,) if key.of else bad


@pytest.mark.parametrize(("key", "value"), list(out_of_range()), ids=str)
def test_a_value_out_of_its_range_is_refused_by_key_and_value(key, value):
    message = refusal({key: value})
    assert f"config.{key} is {value!r}" in message and len(message) < 300 and "\n" not in message


# {the key that the message names: changes}, of rules between keys.
HELD_OUT = {"eval.final": True, "eval.prompts": "p.jsonl"}
MARKOV, EAGLE3 = ({"drafter.head": head} for head in ("markov", "eagle3"))
RULES = [
    ("target.path", {"target.path": ""}),
    ("data.train", {"data.train": ""}),
    ("eval.prompts", {"eval.final": True}),
    ("mesh.data", {"mesh.data": 0}),
    ("mesh.fsdp", {"mesh.data": -1}),
    ("decode.mesh.tensor", {"decode.mesh.tensor": 0}),
    ("drafter.sliding_window", {"drafter.sliding_window": 2}),  # below the block
    ("train.accumulate", {"train.accumulate": 3}),
    ("train.num_anchors", {"train.num_anchors": 3072}),
    ("train.start_from", {"train.start_from": ""}),
    ("train.start_from", {**EAGLE3, "train.start_from": "F"}),
    ("train.start_from", {"train.start_from": "F", "train.frozen_backbone": "G", "train.lambda_start": 0.0}),
    ("train.lambda_start", {"train.frozen_backbone": "F"}),
    ("train.lambda_start", {**MARKOV, "train.loss": "cross_entropy", "train.frozen_backbone": "F"}),
    ("train.frozen_backbone", {**EAGLE3, "train.frozen_backbone": "F"}),
    ("train.frozen_backbone", {"train.frozen_backbone": "", "train.lambda_start": 0.0}),
    *(("train.dpace_alpha", {**head, "train.dpace_alpha": 0.5}) for head in (MARKOV, EAGLE3)),
    ("train.loss", {**EAGLE3, "train.loss": "cross_entropy"}),
    *(("decode.modes", {"decode.modes": modes}) for modes in ((), ("domino", "domino"))),
    ("decode.cache_length", {"decode.cache_length": 2048}),
    ("decode.tree.lanes", {"decode.tree.lanes": 65}),
    ("decode.parity", {"decode.modes": ("autoregressive", "tree"), "decode.parity": "fixed_shape"}),
    ("decode.cache_length", {"decode.modes": ("tree",), "decode.cache_length": 192, "decode.max_new_tokens": 128}),
    # What the final decoding would refuse after the training.
    ("drafter.head", {**HELD_OUT, "drafter.head": "none", "decode.modes": ("domino",)}),
    ("drafter.head", {**HELD_OUT, **EAGLE3, "decode.modes": ("backbone",)}),
    ("decode.draft_vocab", {"decode.draft_vocab": 63}),  # below the candidates of a slot
    ("decode.draft_vocab", {**HELD_OUT, **EAGLE3, "decode.draft_vocab": 128}),
]


@pytest.mark.parametrize(("key", "changes"), RULES, ids=str)
def test_values_that_do_not_fit_together_are_refused_by_key(key, changes):
    assert refusal(changes).startswith(f"config.{key} is ")


SOUND = [
    {"train.gamma": INF},
    {"train.frozen_backbone": "F", "train.lambda_start": 0.0},
    {"drafter.head": "dflash2", "train.frozen_backbone": "F"},  # its own loss has no λ
    {"drafter.head": "dflash2", "train.dpace_alpha": 0.5},
    {**MARKOV, "train.loss": "cross_entropy", "train.dpace_alpha": 0.5},
    {**EAGLE3, "data.max_length": 200},  # it draws no anchors
    {"drafter.head": "none", "drafter.block_size": 2, "train.num_anchors": 8},
    {"drafter.path": "", "eval.prompts": ""},  # as if they were left out
    {**HELD_OUT, "decode.modes": ("autoregressive",), "decode.num_drafts": 99},  # nothing is drafted
    *({**HELD_OUT, "drafter.head": head} for head in CONFIGS),
]


@pytest.mark.parametrize("changes", SOUND, ids=str)
def test_values_that_fit_together_pass(changes):
    passes(changes)


def test_what_a_training_asks_for_does_not_concern_the_other_commands():
    passes({"data.train": None, "drafter.shift_label": True, **EAGLE3, "train.dpace_alpha": 0.1}, "decode")


@pytest.mark.parametrize(
    ("head", "key", "value"),
    [
        *((head, "train.lambda_start", 0.0) for head in ("none", "markov", "dflash2", "xpress", "eagle3")),
        ("eagle3", "train.gamma", 4.0),
        ("markov", "drafter.domino.emb_dim", 64),
        ("none", "drafter.eagle3.passes", 3),
        ("eagle3", "drafter.block_size", 8),
    ],
)
def test_a_key_of_the_command_line_that_the_drafter_does_not_read_is_refused(head, key, value):
    changes = {"drafter.head": head, key: value}
    passes(changes)  # in a recipe file
    assert f"config.{key} is {value!r}: drafter.head {head}" in refusal(changes, set_keys={key, "train.steps"})


READ = [
    ("regenerate", ("seed", "regenerate.temperature", "decode.thinking", "data.skip_bad_rows", "target.quantize")),
    ("evaluate", ("decode.temperature", "decode.seed", "decode.head_candidates", "eval.prompts", "drafter.path")),
    ("decode", ("decode.tasks", "decode.tree.nodes", "decode.temperature", "eval.prompts", "drafter.head")),
    ("serve", ("serve.batch_size", "decode.temperature", "decode.tree.beta", "decode.mesh.tensor")),
    ("train", ("seed", "eval.every", "mesh.fsdp", "regenerate.batch_size", "decode.max_new_tokens")),
]
UNREAD = [
    ("regenerate", "decode.temperature", "reads config.regenerate.temperature"),
    ("regenerate", "decode.seed", "reads config.seed"),
    ("regenerate", "decode.tasks", "leave it out"),
    ("regenerate", "eval.num_prompts", "reads config.regenerate.num_prompts"),
    ("evaluate", "decode.tasks", "leave it out"),
    ("evaluate", "decode.modes", "leave it out"),
    ("evaluate", "regenerate.max_new_tokens", "reads config.decode.max_new_tokens"),
    ("evaluate", "eval.answers", "leave it out"),
    ("evaluate", "seed", "reads config.decode.seed"),
    ("decode", "train.steps", "leave it out"),
    ("decode", "regenerate.temperature", "reads config.decode.temperature"),
    ("decode", "drafter.block_size", "leave it out"),
    ("decode", "mesh.data", "reads config.decode.mesh.data"),
    ("serve", "decode.num_prompts", "leave it out"),
    ("serve", "data.max_length", "leave it out"),
    ("train", "serve.batch_size", "reads config.train.batch_size"),
    ("train", "decode.tasks", "leave it out"),
]
NOTED = [
    ("regenerate", "decode.cache_length", {}, "regenerate does not read it"),
    ("regenerate", "decode.num_drafts", {}, "regenerate.use_drafter is False"),
    ("serve", "decode.batch_size", {}, "serve does not read it"),
    ("evaluate", "decode.num_drafts", {}, "evaluate does not read it"),
    ("evaluate", "decode.temperature", {"answers"}, "the answers are read from --answers"),
    ("evaluate", "decode.temperature", {"server"}, "--server is asked for greedy answers"),
    ("decode", "eval.prompts", {"prompts"}, "other prompts are named"),
    ("train", "decode.temperature", {}, "eval.final is False"),
    ("train", "regenerate.temperature", {}, "data.regenerate is False"),
    ("train", "drafter.path", {}, "train.start_from names"),
]


@pytest.mark.parametrize(("command", "key", "change"), UNREAD)
def test_a_key_of_the_command_line_that_the_command_does_not_read_is_refused(command, key, change, capsys):
    passes({}, command)  # in a recipe file
    message = refusal({}, command, {key})
    assert message.startswith(f"config.{key} is ") and f"{command} does not read it" in message and change in message


@pytest.mark.parametrize(("command", "keys"), READ)
def test_a_key_that_the_command_reads_passes_without_a_note(command, keys, capsys):
    passes({}, command, set(keys))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("command", "key", "given", "why"), NOTED)
def test_a_key_on_which_no_text_depends_or_that_this_run_does_not_read_is_named(command, key, given, why, capsys):
    rules.check(recipe(), command, {key}, given)
    assert f"note: config.{key} is not read here: {why}" in " ".join(capsys.readouterr().out.split())


def test_a_key_of_its_own_section_is_read():
    for head, kind in CONFIGS.items():
        set_keys = {"drafter.head", "train.loss", *(f"drafter.{head}.{name}" for name in kind.recipe_keys())}
        passes({"drafter.head": head}, set_keys=set_keys)


def test_a_loss_is_given_only_the_keys_that_it_reads():
    curriculum, decay = {"train.lambda_start", "train.lambda_decay_ratio"}, {"train.gamma"}
    passes({}, set_keys=curriculum | decay)
    for head in ("markov", "dflash2", "xpress"):
        passes({"drafter.head": head}, set_keys=decay)
        passes({"drafter.head": head, "train.loss": "cross_entropy"}, set_keys=curriculum | decay)
    passes({**EAGLE3, "train.remat": True}, set_keys={"train.remat"})
    weighted = {"train.dpace_alpha": 0.5}
    passes(weighted)  # a recipe's γ is replaced
    assert "train.dpace_alpha replaces the decay" in refusal(weighted, set_keys=decay)


@pytest.mark.parametrize("head", CONFIGS)
def test_modes_that_are_left_open_are_those_of_the_drafter(head):
    config = recipe()
    config.drafter.head = head
    modes = modes_of(config.decode, head)
    assert modes == tuple(loading.resolved(config)["decode"]["modes"]) == decode_settings(config.decode, head).modes
    assert supported_modes(modes, CONFIGS[head]) == modes and modes[0] == "autoregressive"
    assert ("backbone" in modes) == CONFIGS[head].has_head
    assert canonical_mode(modes[-1]) == "draft"

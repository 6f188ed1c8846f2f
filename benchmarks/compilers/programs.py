"""The decode programs that compilers for absent devices are asked about, as functions over shapes, and their bounds.

Batch 1 and caches of 4,096 slots in bfloat16 where nothing else is stated; five draft layers, blocks of 16.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from configs import qwen3_8b
from domino_jax.forecast import dry_run
from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import CONFIGS, new_drafter
from domino_jax.method.heads.domino import DominoConfig
from domino_jax.method.heads.markov import MARKOV_KINDS
from domino_jax.method.loop import DecodeState, Prompts, prefill, run_rounds
from domino_jax.method.pair import Pair
from domino_jax.method.propose import draft_base, roll_out_head
from domino_jax.method.rounds import autoregressive_round, commit, speculative_round
from domino_jax.method.sampling import request_keys
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.method.tree import keep_best, roll_out_lanes
from domino_jax.method.verify import Tree, Verified, accept_tree, verify
from domino_jax.models import sharding
from domino_jax.models.cache import keep_path, slots_of
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.recipe.builders import drafter_config_of
from domino_jax.runtime.sizes import device_bytes
from domino_jax.weights.loading import in_draft_type, rows_together
from domino_jax.weights.quantization import PUBLIC_FP8, QUANTIZE, read_scheme

SLOTS, BUFFER, BLOCK = 4096, 2048, 16
# xPress drafts in some passes over the block.
HEADS = ("domino", "none", *(f"markov_{kind}" for kind in MARKOV_KINDS), "dflash2", "xpress_2", "xpress_4", "xpress_6")
HEADS += ("eagle3",)
CANDIDATES = (64, 16, 256)  # of a head, the recipes' first
NODES = (64, 16, 32, 128)  # of trees, in the order of compiling
CONTEXTS, ROWS = (512, 4_096, 32_768), (1, 8, 32)  # slots and requests
KV = ("k_proj", "v_proj")
GREEDY = SamplingParams()
DRAFT_TOKENS = 32_768


def drafting(candidates: int = CANDIDATES[0], passes: int = 0) -> DraftSettings:
    """A greedy chain; 0 candidates: the whole vocabulary; passes: of a head that drafts in passes over the block."""
    return DraftSettings(draft_sharpness=float("inf"), head_candidates=candidates, head_passes=passes)


def drafting_tree(nodes: int) -> DraftSettings:
    """As the recipes' decode.tree."""
    return DraftSettings(draft_sharpness=float("inf"), tree=TreeSettings(nodes=nodes, lanes=16, candidates=64))


# -------------------------------------------------------------------------------------------------------- shapes


def models_on(mesh: Mesh, size: str, layers: int | None = None) -> Pair:
    """Shapes of the published Domino drafter's form beside a target.

    layers: fewer than the target has, for a test.
    """
    target_config = dry_run.shapes_of(f"Qwen/Qwen3-{size.upper()}")
    if layers:
        target_config = dataclasses.replace(target_config, num_hidden_layers=layers)
    config = DominoConfig.for_target(
        target_config,
        num_layers=min(5, layers or 5),
        target_layer_ids=None if layers is None else (0, 1),
        block_size=BLOCK,
        shift_label=True,
        pure_draft_prefix_len=1,
        emb_dim=256,
        gru_hidden_dim=1024,
    )
    return models_of(mesh, config, target_config)


def models_of(mesh: Mesh, config: DrafterConfig, target_config: Qwen3Config) -> Pair:
    """Shapes of a drafter beside its target."""
    target = Qwen3(target_config, jnp.bfloat16)
    return with_drafter(mesh, Pair(target, dry_run.target_shapes(target, mesh)), config)


def with_drafter(mesh: Mesh, models: Pair, config: DominoConfig, int8: bool = False) -> Pair:
    """The shapes of a target as decoding lays them out, with those of a drafter of this config.

    int8: the drafter's matrices are in eight bits, and so is a copy of a floating lm_head.
    """
    target = models.target
    drafter = new_drafter(config, jnp.bfloat16, whole_head=mesh.size > 1)
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    if columns := len(config.draft_tokens):
        shapes["lm_head"] = {"kernel": jax.ShapeDtypeStruct((config.hidden_size, columns), jnp.bfloat16)}
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    if int8:
        shapes = jax.eval_shape(functools.partial(in_int8, config, target.config), shapes, models.target_params)
    tied = target.config.tie_word_embeddings
    place = sharding.decode_placement(mesh, config.num_key_value_heads, tied)

    def laid_out(tree):
        def one(path, leaf):
            where = place([part.key for part in path], leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree_util.tree_map_with_path(one, tree)

    return Pair(target, laid_out(models.target_params), drafter, rows_together(laid_out(shapes)))


def in_int8(config: DrafterConfig, target: Qwen3Config, params: dict, target_params: dict) -> dict:
    """A drafter's parameters as decode.draft_weights=int8 loads them."""
    return in_draft_type(config, params, target, target_params, DraftSettings(draft_weights="int8"))


def placed(shapes, places, dtype=None):
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=to), shapes, places)


def array(mesh: Mesh, *shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.replicated(mesh))


def state_on(mesh: Mesh, models: Pair, slots: int = SLOTS, rows: int = 1) -> DecodeState:
    """Shapes of the state of some requests with caches of `slots` slots."""
    start = functools.partial(prefill, slots=slots, buffer=BUFFER, sampling=GREEDY)
    state = jax.eval_shape(start, models, prompts_on(mesh, rows, 16), array(mesh, 1))
    return placed(state, sharding.decode_layout(mesh, state))


def prompts_on(mesh: Mesh, rows: int, tokens: int) -> Prompts:
    numbers = array(mesh, rows)
    keys = jax.eval_shape(request_keys, numbers, numbers).dtype
    return Prompts(array(mesh, rows, tokens), numbers, numbers, array(mesh, rows, dtype=keys))


# ------------------------------------------------------------------------------------------------------ programs


def heads(mesh: Mesh, models: Pair) -> dict[str, tuple]:
    """A step, and the round of each head as the paper's recipe trains it; xPress in some passes over the block."""
    target, programs = models.target.config, {"step": chains(mesh, models)["step"]}

    def round_of(passes):
        def whole_round(models, state, stop):
            return speculative_round(models, state, stop, GREEDY, drafting(passes=passes))

        return whole_round

    for name in HEADS:
        head, _, choice = name.partition("_")
        recipe = qwen3_8b.get_config()
        recipe.drafter.head = head
        if CONFIGS[head].has_backbone:
            recipe.drafter.num_layers = models.drafter.config.num_hidden_layers
            recipe.drafter.target_layer_ids = models.drafter.config.target_layer_ids
        if head == "markov":
            recipe.drafter.markov.head_type = choice
        drafted = models_of(mesh, drafter_config_of(recipe, target), target)
        function = round_of(int(choice) if head == "xpress" else 0)
        function.__name__ = f"round_{name}"
        programs[function.__name__] = (function, (drafted, state_on(mesh, drafted), array(mesh, 1)))
    return programs


def chains(mesh: Mesh, models: Pair) -> dict[str, tuple]:
    """name → (function, arguments); argument 1 is donated, but the head's drafted block, which no result can reuse.

    head and round correct the whole vocabulary; a number after their name is that of the candidates. They are called as
    their programs are: the compilers' files are found by it. loop64 is the loop of rounds that decoding runs: it shows
    what a compiler copies before the loop.
    """
    state, plain = state_on(mesh, models), Pair(models.target, models.target_params)
    bare = state.replace(draft_cache=())
    config, stop = models.drafter.config, array(mesh, 1)
    taps = config.target_layer_ids
    z = array(mesh, 1, config.extra_slots + config.num_drafts, config.hidden_size, dtype=jnp.bfloat16)
    base = array(mesh, 1, config.num_drafts, config.vocab_size, dtype=jnp.float32)

    def step(models, state, stop):
        return autoregressive_round(models, state, stop, GREEDY)

    def draft(models, cache, state):
        return draft_base(models, state.replace(draft_cache=cache))

    def head(candidates):
        def roll_out(models, drafted, state):
            return roll_out_head(models, state, *drafted, GREEDY, drafting(candidates)).tokens

        return roll_out

    def check(models, cache, tokens, lengths):
        out = verify(models, cache, tokens, lengths, tap_layers=taps)
        return jnp.argmax(out.logits, -1), out.features, out.cache

    def loop64(models, state, stop, *limits):
        def round_(models, state, stop):
            return speculative_round(models, state, stop, GREEDY, drafting(CANDIDATES[0]))

        return run_rounds(round_, models, state, stop, *limits)

    def round_of(candidates):
        def whole_round(models, state, stop):
            return speculative_round(models, state, stop, GREEDY, drafting(candidates))

        return whole_round

    narrow = bare.replace(target_cache=())
    rows = {width: array(mesh, 1, width) for width in (17, 64)}
    programs = {
        "step": (step, (plain, bare, stop)),
        f"round{CANDIDATES[0]}": (round_of(CANDIDATES[0]), (models, state, stop)),
        **{f"head{count}": (head(count), (models, (z, base), narrow)) for count in CANDIDATES},
        f"loop{CANDIDATES[0]}": (loop64, (models, state, stop, *3 * [array(mesh)])),
        "head": (head(0), (models, (z, base), narrow)),
        "round": (round_of(0), (models, state, stop)),
        **{f"verify{width}": (check, (models, state.target_cache, rows[width], state.lengths)) for width in rows},
        "draft": (draft, (models, state.draft_cache, narrow)),
    }
    for label, (function, _) in programs.items():
        if label.startswith(("head", "round")):
            function.__name__ = label
    return programs


def trees(mesh: Mesh, models: Pair) -> dict[str, tuple]:
    """The parts of a round whose draft is a tree, beside the chain's head, verify and round."""
    chain = chains(mesh, models)
    programs = {label: chain[label] for label in ("head", "verify17")}
    for nodes in NODES:
        for label, function, arguments in tree_parts(mesh, models, nodes):
            function.__name__ = label
            programs[label] = (function, arguments)

    def round_tree64(models, state, stop):
        return speculative_round(models, state, stop, GREEDY, drafting_tree(64))

    return programs | {"round_tree64": (round_tree64, chain["round"][1]), "round": chain["round"]}


def tree_parts(mesh: Mesh, models: Pair, nodes: int) -> list[tuple]:
    """(name, function, arguments) of a tree's round in parts: its proposal from z and base logits, verify, commit.

    Together with the backbone's pass they are the round of a tree.
    """
    state = state_on(mesh, models)
    config, settings = models.drafter.config, drafting_tree(nodes)
    deepest = settings.width(config)
    bare = state.replace(target_cache=(), draft_cache=())

    def tree(models, drafted, state):
        shape = settings.tree
        ledger = roll_out_lanes(models, state, *drafted, GREEDY, settings)
        return keep_best(state.anchors, ledger, shape.lanes, shape.nodes, shape.beta)

    def check(models, cache, tree, lengths):
        shape = {"depths": tree.depths, "ancestors": tree.ancestors, "tap_layers": config.target_layer_ids}
        out = verify(models, cache, tree.tokens, lengths, **shape)
        return jnp.argmax(out.logits, -1).astype(jnp.int32), out.features, out.cache

    def conclude(models, caches, verified, tree, state, stop):
        (target_cache, draft_cache), (chosen, features) = caches, verified
        accepted, path = accept_tree(tree, chosen, deepest)
        of_path = jnp.take_along_axis(features, path[:, :, None], axis=1)
        out = Verified(None, of_path, keep_path(target_cache, state.lengths, path, tree.tokens.shape[1]))
        emitted = jnp.take_along_axis(chosen, path, axis=1)
        return commit(models, state, out, draft_cache, emitted, accepted, stop)

    drafted = chains(mesh, models)["head"][1][1]
    row = array(mesh, 1, nodes)
    drawn = Tree(row, row, row, array(mesh, 1, nodes, nodes, dtype=bool))
    features = array(mesh, 1, nodes, len(config.target_layer_ids) * config.hidden_size, dtype=jnp.bfloat16)
    caches = (state.target_cache, state.draft_cache)
    return [
        (f"tree{nodes}", tree, (models, drafted, bare)),
        (f"verify{nodes}", check, (models, state.target_cache, drawn, state.lengths)),
        (f"commit{nodes}", conclude, (models, caches, (row, features), drawn, bare, array(mesh, 1))),
    ]


def contexts(mesh: Mesh, models: Pair) -> dict[str, tuple]:
    """name → (function, arguments): step and round by slots and rows."""
    plain, stop = Pair(models.target, models.target_params), array(mesh, 1)
    programs = {}

    def step(models, state, stop):
        return autoregressive_round(models, state, stop, GREEDY)

    def round_(models, state, stop):
        return speculative_round(models, state, stop, GREEDY, drafting())

    sizes = [(slots, rows, state_on(mesh, models, slots, rows)) for rows, slots in itertools.product(ROWS, CONTEXTS)]
    for slots, rows, state in sizes:
        programs[f"step {slots} {rows}"] = (step, (plain, state.replace(draft_cache=()), stop))
    for slots, rows, state in sizes:
        programs[f"round {slots} {rows}"] = (round_, (models, state, stop))
    return programs


def vocabulary(mesh: Mesh, models: Pair) -> dict[str, tuple]:
    """A step, and a greedy round that drafts among DRAFT_TOKENS tokens."""
    few = with_drafter(mesh, models, models.drafter.config.with_vocabulary(np.arange(DRAFT_TOKENS)))
    chain = chains(mesh, models)
    function, (_, *arguments) = chain[f"round{CANDIDATES[0]}"]
    return {f"round{CANDIDATES[0]}": (function, (few, *arguments)), "step": chain["step"]}


def eight_bits(mesh: Mesh, models: Pair) -> dict[str, tuple]:
    """Step and round of the bfloat16 target, of its int8 copy and of Qwen's FP8 folder, then rounds whose drafter is in
    int8: of the bfloat16 target with all tokens and with a draft vocabulary, and of the int8 target."""
    config, target = models.drafter.config, models.target
    few = config.with_vocabulary(np.arange(DRAFT_TOKENS))
    floating = Pair(target, models.target_params)
    copies = Pair(target, dry_run.target_shapes(target, mesh, QUANTIZE["int8"]))
    tiles = Pair(target, dry_run.target_shapes(target, mesh, read_scheme({"quantization_config": PUBLIC_FP8})))
    label, programs = f"round{CANDIDATES[0]}", {}
    for name, part in (("", floating), ("int8 ", copies), ("fp8 ", tiles)):
        chain = chains(mesh, with_drafter(mesh, part, config))
        programs |= {f"{name}{each}": chain[each] for each in ("step", label)}
    rounds = {"draft": (floating, config), "draft vocabulary": (floating, few), "int8 draft": (copies, config)}
    for name, (part, drafted) in rounds.items():
        programs[f"{name} {label}"] = chains(mesh, with_drafter(mesh, part, drafted, int8=True))[label]
    return programs


# -------------------------------------------------------------------------------------------------------- bounds


def must_move(models: Pair, state: DecodeState) -> dict[str, int]:
    """A lower bound on the bytes of main memory that a program moves on one chip.

    Each weight that it multiplies with counts once per pass, however often the pass uses it; so does the whole cache
    (all its slots are read), and the rows that it must write. The embedding does not count (a few rows of it are
    read) unless it is the lm_head too, and activations do not count, but for the base logits from which a head alone
    picks its candidates.
    """
    per_chip = device_bytes
    target = models.target_params
    tied = models.target.config.tie_word_embeddings
    vocabulary = per_chip(target["embed_tokens" if tied else "lm_head"])
    weights = per_chip(target) - (0 if tied else per_chip(target["embed_tokens"]))
    cache, context = per_chip(state.target_cache), per_chip(state.draft_cache)
    backbone, head = per_chip(models.drafter_params["backbone"]), per_chip(models.drafter_params["head"])
    fusion = fusion_bytes(models)
    slots = slots_of(state.target_cache)
    bound = {"step": weights + cache + cache // slots}
    bound |= {f"verify{rows}": weights + cache + rows * cache // slots for rows in (17, 64)}
    copied = per_chip(models.drafter_params.get("lm_head", ()))
    bound["draft"] = backbone - fusion + (copied or vocabulary) + context
    bound["head"] = head
    # Draft and verify each read the lm_head: verify waits for the drafts, and no compiled program keeps it until then,
    # 97 MB to 1.2 GB a chip. At least one row of context is written.
    bound["round"] = bound["verify17"] + bound["draft"] + fusion + context // slots + head
    config = models.drafter.config
    sequential = head - per_chip(models.drafter_params["head"]["up"])
    for count in CANDIDATES:
        rows = (config.num_drafts - config.pure_draft_prefix_len) * count * 2 * config.emb_dim
        bound[f"head{count}"] = 4 * config.num_drafts * config.vocab_size + sequential + rows
        bound[f"round{count}"] = bound["round"] - head + sequential + rows
    return bound | tree_bytes(models, state, bound["step"])


def tree_bytes(models: Pair, state: DecodeState, step: int) -> dict[str, int]:
    """The same of the parts of a tree's round.

    A proposal reads the base logits, the GRU and the head's first product once, and the columns of at least one
    depth's candidates. A commit may find its path in place already; it fuses the features into one row or more.
    """
    config, cache = models.drafter.config, device_bytes(state.target_cache)
    backbone, head = models.drafter_params["backbone"], models.drafter_params["head"]
    columns = drafting_tree(64).tree.candidates * 2 * config.emb_dim
    tree = 4 * config.num_drafts * config.vocab_size + device_bytes([head["down"], head["gru"]]) + columns
    kv = device_bytes([part["self_attn"][name] for part in backbone.values() if "self_attn" in part for name in KV])
    slots, bound = slots_of(state.target_cache), {}
    for nodes in NODES:
        bound[f"tree{nodes}"] = tree
        bound[f"verify{nodes}"] = step + (nodes - 1) * cache // slots
        bound[f"commit{nodes}"] = fusion_bytes(models) + kv + device_bytes(state.draft_cache) // slots
    return bound


def context_bytes(models: Pair) -> dict[str, int]:
    """must_move of a step and a round, by slots and rows, on the mesh that is set."""
    mesh, bound = jax.sharding.get_mesh(), {}
    for rows, slots in itertools.product(ROWS, CONTEXTS):
        must = must_move(models, state_on(mesh, models, slots, rows))
        bound |= {f"step {slots} {rows}": must["step"], f"round {slots} {rows}": must["round64"]}
    return bound


def fusion_bytes(models: Pair) -> int:
    """Bytes on one chip of the weights that turn the target's features into the drafter's context."""
    backbone = models.drafter_params["backbone"]
    return device_bytes([backbone["fc"], backbone["hidden_norm"]])

"""Shared by the decoding tests: tiny random models, the golden pairs, stub drafts, and the chi-square yardstick."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import qwen3
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.evals.near_ties import divergences
from domino_jax.method import rounds
from domino_jax.method.drafter import Drafter, init_drafter_params
from domino_jax.method.drafters import CONFIGS, AnyDrafter, new_drafter
from domino_jax.method.heads.eagle3 import Eagle3Config
from domino_jax.method.pair import Pair
from domino_jax.method.sampling import request_keys
from domino_jax.method.settings import DraftSettings
from domino_jax.method.tree import ancestor_table
from domino_jax.method.verify import Tree
from domino_jax.models.moe import ROUTER, ExpertConfig
from domino_jax.models.quantized import quantize
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.weights.draft_vocab import with_draft_vocab
from domino_jax.weights.loading import in_draft_type
from tests.helpers.models import load_golden

VOCAB = 64
CHAINS = ("autoregressive", "backbone", "domino")
# Kinds of Domino drafter: shifted or not, and the number of drafts that the head leaves alone.
DRAFTERS = {
    "shifted, prefix 1": {"shift_label": True, "pure_draft_prefix_len": 1},
    "shifted, prefix 2": {"shift_label": True, "pure_draft_prefix_len": 2},
    "unshifted, prefix 0": {"shift_label": False, "pure_draft_prefix_len": 0},
}


def random_params(shapes, seed: int) -> dict:
    """Matrices of about unit gain: at init scale a tiny model's logits are flat, and every choice is a coin toss."""
    random = np.random.default_rng(seed)

    def fill(leaf):
        if leaf.ndim == 1:
            return jnp.ones(leaf.shape)
        return jnp.asarray(random.normal(0, 0.25, leaf.shape), jnp.float32)

    return jax.tree.map(fill, shapes)


@functools.lru_cache
def random_target(vocab: int = VOCAB, tied: bool = False, layers: int = 2, sparse: bool = False) -> tuple[Qwen3, dict]:
    """Two layers or more, 32 wide, grouped heads 4/2 of width 16 (not 32/4); sparse: the second one has experts."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=tied,
        attention_bias=False,
        max_position_embeddings=512,
        experts=ExpertConfig(8, 3, 24, True, decoder_sparse_step=2) if sparse else None,
    )
    target = Qwen3(config)
    shapes = jax.eval_shape(target.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    return target, random_params(shapes, 0)


HEAD_SIZES = {
    "none": {},
    "domino": {"pure_draft_prefix_len": 1, "emb_dim": 8, "gru_hidden_dim": 16},
    "markov": {"markov_rank": 8, "markov_head_type": "rnn"},
    "dflash2": {"selector_rank": 8, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8},
    "xpress": {"xpress_rank": 8, "xpress_mlp_hidden": 12, "xpress_num_passes": 2},
    "eagle3": {"draft_vocab_size": 40, "target_layer_ids": (0, 1, 2)},
}


def eagle3_config(target: Qwen3Config, **choices) -> Eagle3Config:
    """An EAGLE-3 drafter whose draft vocabulary leaves some tokens out everywhere."""
    fields = HEAD_SIZES["eagle3"] | choices
    tokens = np.linspace(0, target.vocab_size - 1, fields["draft_vocab_size"]).astype(int)
    return Eagle3Config.for_target(target, **fields).with_draft_tokens(tokens)


def random_drafter(target: Qwen3, block_size: int = 4, seed: int = 1, **choices) -> tuple[AnyDrafter, dict]:
    """One layer, or one for each of `layer_types`, over layer 0 of the target; or the sizes of HEAD_SIZES."""
    if choices.get("head") == "eagle3":
        drafter = new_drafter(
            eagle3_config(target.config, **{name: choices[name] for name in choices if name != "head"})
        )
        shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
        return drafter, random_params(shapes, seed)
    fields = {
        "num_layers": len(choices["layer_types"]) if "layer_types" in choices else 1,
        "target_layer_ids": (0,),
        "block_size": block_size,
        "mask_token_id": target.config.vocab_size - 1,
        "head": "domino",
        "shift_label": choices.get("head") not in ("dflash2", "xpress"),
        **choices,
    }
    fields = HEAD_SIZES[fields["head"]] | fields
    drafter = Drafter(CONFIGS[fields.pop("head")].for_target(target.config, **fields))
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    return drafter, random_params(shapes, seed)


@functools.lru_cache
def random_models(block_size: int = 4, vocab: int = VOCAB, tied: bool = False, sparse: bool = False, **choices) -> Pair:
    target, params = random_target(vocab, tied, 4 if choices.get("head") == "eagle3" else 2, sparse)
    return Pair(target, params, *random_drafter(target, block_size, **choices))


def with_tokens(models: Pair, tokens: np.ndarray) -> Pair:
    """The models with these tokens as their draft vocabulary."""
    target = models.target.config, models.target_params
    config, params = with_draft_vocab(models.drafter.config, models.drafter_params, *target, tokens, None)
    return Pair(models.target, models.target_params, new_drafter(config), params)


def with_window(models: Pair, window: int) -> Pair:
    """The models whose drafter reads the last `window` rows of a text."""
    config = dataclasses.replace(models.drafter.config, draft_window=window)
    return models.replace(drafter=models.drafter.clone(config=config))


def in_eight_bits(models: Pair, part: str) -> Pair:
    """The models with the matrices of the "target" or the "drafter" in int8."""
    if part == "drafter":
        params = models.drafter.config, models.drafter_params, models.target.config, models.target_params
        return models.replace(drafter_params=in_draft_type(*params, DraftSettings(draft_weights="int8")))

    def convert(path, leaf):
        return quantize(leaf, "int8") if path[-1].key == "kernel" and path[-2].key != ROUTER else leaf

    return models.replace(target_params=jax.tree_util.tree_map_with_path(convert, models.target_params))


def rows_read(models: Pair, state, row: int, end: int) -> list[jax.Array]:
    """The rows of both caches that the next round reads, of a text of `end` rows. The row of EAGLE-3 before the anchor
    is left out: that round writes it, because a prefill does not know the token after it."""
    taken = [leaf[row, :, :end] for leaf in jax.tree.leaves(state.target_cache)]
    end -= models.drafter.config.head == "eagle3"
    return taken + [leaf[row, :, :end] if leaf.ndim == 4 else leaf[row] for leaf in jax.tree.leaves(state.draft_cache)]


def golden_models(name: str) -> Pair:
    """A trained pair of tests/golden: acceptance is neither 1 nor full."""
    golden = load_golden(name)
    return Pair(golden.target.module, golden.target.params, golden.drafter.module, golden.drafter.params)


@dataclasses.dataclass(frozen=True)
class SmallGenerator:
    """A generator with the models that it runs, so that tests need not pass them in every call."""

    models: Pair
    generator: Generator

    def __getattr__(self, name: str):
        return getattr(self.generator, name)

    def generate(self, prompts, mode, requests=None) -> list[Generation]:
        return self.generator.generate(self.models, prompts, mode, requests).answers

    def stream(self, *args, **kwargs):
        return self.generator.stream(self.models, *args, **kwargs)

    def start(self, *args, **kwargs):
        return self.generator.start(self.models, *args, **kwargs)

    def advance(self, *args, **kwargs):
        return self.generator.advance(self.models, *args, **kwargs)

    def divergences(self, *args):
        return divergences(self.models, self.generator, *args)

    def with_stop_ids(self, *stop_ids: int) -> "SmallGenerator":
        """The same programs with the same number of other stop ids."""
        return SmallGenerator(self.models, dataclasses.replace(self.generator, stop_ids=jnp.array(stop_ids)))


def make_generator(models: Pair, stop_ids: Sequence[int] = (), **choices) -> SmallGenerator:
    """A small generator; choices are values of DecodeSettings.change. Noise is shared in full."""
    settings = DecodeSettings(cache_length=64, max_new_tokens=16)
    settings = settings.change(**{"draft_sharpness": 1.0, "head_candidates": 0, **choices})
    return SmallGenerator(models, new_generator(models, settings, stop_ids))


def decode_settings_of(modes: tuple[str, ...], **changes) -> DecodeSettings:
    """The default recipe's settings, in float32 and without a tree."""
    settings = decode_settings(qwen3.get_config("none").decode, "domino")
    return settings.change(**{"modes": modes, "dtype": "float32", "tree": None, **changes})


def random_prompts(count: int, shortest: int = 1, longest: int = 12, vocab: int = VOCAB, seed: int = 0):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(shortest, longest + 1, count)
    return [[int(token) for token in draw.integers(0, vocab, length)] for length in lengths]


@dataclasses.dataclass(frozen=True)
class PlantedDrafts:
    """Drafts from tables instead of from a drafter, by the request of a row and the index of the new token.

    known: int32 [R, N], the draft of request r at index n; of a tree along its main path.
    decoys: int32 [R, N], the sibling of each node of a tree's main path. Decoys have no children.
    keys: uint32 [R, 2], the noise keys of the requests.
    """

    known: jax.Array
    decoys: jax.Array
    keys: jax.Array

    def chain(self, models, state, sampling, settings):
        """In place of rounds.propose."""
        return self._at(self.known, state, settings.width(models.drafter.config)), state.draft_cache

    def tree(self, models, state, sampling, settings):
        """In place of rounds.propose_tree: main node and decoy change places from depth to depth."""
        nodes, count = settings.width(models.drafter.config), settings.tree.nodes
        sides = [np.array([depth % 2, 1 - depth % 2]) for depth in range(nodes)]
        main = np.array([1 + 2 * depth + side[0] for depth, side in enumerate(sides)])
        decoy = np.array([1 + 2 * depth + side[1] for depth, side in enumerate(sides)])
        depths, parents = np.zeros(2 * nodes + 1, np.int32), np.zeros(2 * nodes + 1, np.int32)
        depths[main] = depths[decoy] = np.arange(nodes) + 1
        parents[main[1:]] = parents[decoy[1:]] = main[:-1]
        tokens = jnp.broadcast_to(state.anchors[:, None], (len(state.anchors), max(count, len(depths))))
        for places, table in ((main, self.known), (decoy, self.decoys)):
            tokens = tokens.at[:, places].set(self._at(table, state, nodes))
        # Places that no draft fills, or nodes that have no place any more.
        fill = [(0, max(count - len(depths), 0))]
        depths, parents = (np.pad(column, fill)[:count] for column in (depths, parents))
        parents = jnp.broadcast_to(parents, (len(state.anchors), count))
        depths = jnp.broadcast_to(depths, parents.shape)
        return Tree(tokens[:, :count], depths, parents, ancestor_table(parents, nodes)), state.draft_cache

    def _at(self, table: jax.Array, state, count: int) -> jax.Array:
        row = jnp.argmax((jax.random.key_data(state.keys)[:, None] == self.keys).all(-1), axis=1)
        return table[row[:, None], state.counts[:, None] + jnp.arange(count)]


@contextlib.contextmanager
def planted_drafts(known: np.ndarray, decoys: np.ndarray | None = None, requests: Sequence[Request] | None = None):
    """The real rounds with PlantedDrafts; after a text's end token 0 is drafted.

    Programs compiled inside keep the stub, so they need a separate generator. requests: 0, 1, … with seed 0 when None.
    """
    known = np.asarray(known)
    requests = [Request(index, seed=0) for index in range(len(known))] if requests is None else requests
    seeds, noise = (jnp.array([getattr(one, name) for one in requests]) for name in ("seed", "noise"))
    tables = [
        jnp.pad(jnp.asarray(table, jnp.int32), ((0, 0), (0, 64)))
        for table in (known, known + 1 if decoys is None else decoys)
    ]
    planted = PlantedDrafts(*tables, jax.random.key_data(request_keys(seeds, noise)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "propose", planted.chain)
        patch.setattr(rounds, "propose_tree", planted.tree)
        yield


@jax.jit
def _pass(models, tokens):
    return models.run_target(tokens, tap_layers=(0,))


def uncached(models: Pair, texts_: list[list[int]]) -> np.ndarray:
    """The target's logits [B, T, V] after every prefix of equally long texts, by one pass without a cache.

    Padded to 32 tokens, so that one program serves all lengths; the pass is causal.
    """
    tokens = np.asarray(texts_, np.int32)
    padded = np.pad(tokens, ((0, 0), (0, 32 - tokens.shape[1])))
    return np.asarray(_pass(models, padded)["logits"][:, : tokens.shape[1]])


def texts(generations) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's statistic, cells of fewer than 5 expected draws joined; infinite after an impossible outcome."""
    counts, expected = counts.ravel().astype(float), law.ravel() * counts.sum()
    if counts[law.ravel() == 0].any():
        return float("inf")
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    return float((((counts - expected) ** 2)[kept] / expected[kept]).sum())


def total_variation(counts: np.ndarray, law: np.ndarray) -> float:
    return float(abs(counts / counts.sum() - law).sum() / 2)


def check_lossless(generator: SmallGenerator, prompts, modes=CHAINS, requests=None) -> dict[str, list[Generation]]:
    """The answers of every mode, each mode held against the first one, row by row."""
    runs = {mode: generator.generate(prompts, mode, requests) for mode in modes}
    for mode in modes[1:]:
        found = generator.divergences(prompts, runs[modes[0]], runs[mode], requests)
        wrong = [entry for entry in found if not entry.near_tie]
        same, ties = len(prompts) - len(found), len(found) - len(wrong)
        print(f"{mode}: {same} of {len(prompts)} identical, {ties} near ties, {len(wrong)} violations")
        assert not wrong, f"not lossless: {wrong}"
        for answer in runs[mode]:
            assert 1 + sum(answer.accept_lengths) == len(answer.token_ids)
    return runs

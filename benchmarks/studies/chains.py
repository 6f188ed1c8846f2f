"""τ of chains by `decode.draft_sharpness` or `decode.draft_vocab`, over the same answers (docs/decoding.md).

    python -m benchmarks.studies.chains --target=assets/smollm2 --drafter=assets/smollm2_domino \\
        --prompts=assets/smollm2_prompts/prompts_heldout.jsonl --count=50 --table=vocabulary
    python -m benchmarks.studies.chains --small                                         # a test of the command

A text does not depend on how it was drafted. So every text is decoded once, plainly. One teacher-forced pass then gives
the drafts after each of its tokens for all settings, and walking over the text gives the rounds that decoding has. The
first texts of each setting are also decoded with drafts, and their rounds must be the same.
"""

import argparse
import functools
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tables import DOCS, ROOT, conditions, publish, spread
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import Generator, new_generator
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import BASELINE, DRAFT, DecodeSettings
from domino_jax.method import blocks
from domino_jax.method.candidates import pick_candidates, with_noise
from domino_jax.method.pair import Models
from domino_jax.method.rollout import settle
from domino_jax.method.sampling import RowSampling, Sampling, request_keys
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.draft_vocab import read_order
from domino_jax.weights.loading import load_models, load_target, use_exact_matmuls

NOISE, VOCABULARY = "noise", "vocabulary"
SHARPNESS = (0.5, 0.7, 1.0, 1.4, 2.0, 4.0, math.inf)
TEMPERATURES = (0.3, 0.7, 1.0)
EDGES = ({}, {"top_k": 20, "top_p": 0.8})  # Qwen3's advice with a temperature of 0.7
SHARES = (1, 2, 4, 8)  # parts of the vocabulary: all of it, a half, …
Setting = tuple[float, int]  # sharpness, size of the draft vocabulary
TEXTS, PLACES = 4, 128  # texts of a pass of the backbone, places of a pass of the lm_head
CHECKED = (1.0,)  # with these a few texts are decoded with drafts too
FEW = 4
COLUMNS = {"temperature": "T", "top_k": "top-k", "top_p": "top-p"}


class Text(NamedTuple):
    """prompt, answer: token ids.  request: whose noise chose the answer."""

    prompt: Sequence[int]
    answer: Sequence[int]
    request: Request


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    use_exact_matmuls("float32")
    loaded = load_target(options.target, "float32")
    models = load_models(loaded, options.drafter)
    rows = read_prompts(options.prompts, options.count)
    prompts = [encode_prompt(loaded.tokenizer, row, False, f"prompt {row['id']}") for row in rows]
    settings = DecodeSettings(cache_length=1024, max_new_tokens=options.tokens, batch_size=min(32, len(prompts)))
    settings = settings.change(dtype="float32", head_candidates=0)
    plain, *drafting = (
        new_generator(models, settings.change(draft_sharpness=c), loaded.stop_ids) for c in (math.inf, *CHECKED)
    )
    vocab = loaded.model.config.vocab_size
    labels, samplings = {f"{c:g}": (c, vocab) for c in SHARPNESS}, itertools.product(TEMPERATURES, EDGES)
    if options.table == VOCABULARY:
        c = settings.drafting.draft_sharpness
        labels, samplings = {f"{vocab // share}": (c, vocab // share) for share in SHARES}, ((0.0, {}), (0.7, {}))
    ranks = token_ranks(options.drafter, vocab) if options.table == VOCABULARY else np.arange(vocab)
    taus: dict[SamplingParams, list[dict[str, float]]] = {}
    for seed, (temperature, edges) in itertools.product(options.seeds, list(samplings)):
        sampling = SamplingParams(temperature, **edges)
        requests = [Request(index, seed, sampling=sampling) for index in range(len(prompts))]
        answers = plain.generate(models, prompts, BASELINE, requests).answers
        texts = [Text(*parts) for parts in zip(prompts, [one.token_ids for one in answers], requests, strict=True)]
        walks = replay(models, texts, settings.drafting, tuple(labels.values()), ranks)
        for c, generator in zip(CHECKED, drafting, strict=True) if seed == options.seeds[0] else ():
            if (c, vocab) in walks:
                check(models, generator, texts, walks[c, vocab])
        rounds = {label: walks[setting] for label, setting in labels.items()}
        measured = {label: sum(map(sum, one)) / sum(map(len, one)) for label, one in rounds.items()}
        print(seed, sampling, measured, flush=True)
        taus.setdefault(sampling, []).append(measured)
    table = [row_of(sampling, seeds) for sampling, seeds in taus.items()]
    text = f"""### {options.title}

{len(prompts)} prompts, at most {options.tokens} tokens each, {len(options.seeds)} seeds. {conditions(("jax",))}"""
    columns = COLUMNS | {label: f"{'N' if options.table == VOCABULARY else 'c'} = {label}" for label in labels}
    print(publish(options.page, options.name, table, columns, text), flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = ROOT / "assets" / "tiny_qwen3"
    parser.add_argument("--target", default=str(tiny))
    parser.add_argument("--drafter", default=str(ROOT / "assets" / "tiny_domino"))
    parser.add_argument("--prompts", default=str(tiny / "prompts_heldout.jsonl"))
    parser.add_argument("--count", type=int, default=50, help="of the first prompts")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--table", choices=(NOISE, VOCABULARY), default=NOISE)
    parser.add_argument("--name", default="noise tiny", help="of the section and its data file")
    parser.add_argument("--title", default="Shared noise, the tiny target")
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "results.md", help="the page that gets the table")
    parser.add_argument("--small", action="store_true", help="two prompts of a few tokens: a test of the command")
    options = parser.parse_args(arguments)
    if options.small:
        options.count, options.tokens, options.seeds = 2, 12, [0]
    return options


def token_ranks(drafter: str, vocab: int) -> np.ndarray:
    """int [V], the place of each token in the order that is stored with the drafter."""
    order = read_order(pathlib.Path(drafter), vocab)
    if order is None:
        raise DominoError(f"{drafter} has no order of tokens; name a drafter that has one.")
    ranks = np.full(vocab, vocab)
    ranks[order] = np.arange(len(order))
    return np.argsort(np.argsort(ranks, kind="stable"))


def row_of(sampling: SamplingParams, seeds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A row of the table: for each setting the mean of τ over the seeds, and half their range."""
    row = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    columns = {label: [seed[label] for seed in seeds] for label in seeds[0]}
    row |= {label: float(np.mean(column)) for label, column in columns.items()}
    return row | {f"{label} spread": spread(column) for label, column in columns.items()}


def check(models: Models, generator: Generator, texts: Sequence[Text], walks: Sequence[list[int]]) -> None:
    """Raises DominoError where the first texts have other rounds when they are decoded with drafts."""
    some = texts[:FEW]
    prompts, _, requests = zip(*some, strict=True)
    answers = generator.generate(models, prompts, DRAFT, requests).answers
    for text, answer, rounds in zip(some, answers, walks, strict=False):
        # A near tie may end a text's equality, and with it that of its rounds.
        if answer.token_ids == list(text.answer) and answer.accept_lengths != rounds:
            raise DominoError(f"decoding has the rounds {answer.accept_lengths}, the replay {rounds}.")


# ------------------------------------------------------------------------------------------------------------- replay


def replay(
    models: Models,
    texts: Sequence[Text],
    drafting: DraftSettings,
    variants: tuple[Setting, ...],
    ranks: np.ndarray,
) -> dict[Setting, list[list[int]]]:
    """For each setting the tokens emitted per round, of every text (accept_lengths of a Generation).

    ranks: int [V], a token's place by frequency.
    """
    longest = max(len(text.prompt) + len(text.answer) for text in texts)
    size, places = -(-longest // 64) * 64, max(len(text.answer) for text in texts)
    walks: dict[Setting, list[list[int]]] = {setting: [] for setting in variants}
    for start in range(0, len(texts), TEXTS):
        some = texts[start : start + TEXTS]
        accepted = accepted_drafts(models, some, drafting, variants, ranks, size, places)
        for (row, text), (column, setting) in itertools.product(enumerate(some), enumerate(variants)):
            walks[setting].append(walk(accepted[column, row, : len(text.answer) - 1]))
    return walks


def walk(accepted: np.ndarray) -> list[int]:
    """Tokens of every round, from the drafts int [R] that a round would accept at each place of an answer."""
    emitted, place = [], 0
    while place < len(accepted):
        emitted.append(min(int(accepted[place]) + 1, len(accepted) - place))
        place += emitted[-1]
    return emitted


def accepted_drafts(models: Models, texts, drafting, variants: tuple, ranks, size: int, places: int) -> np.ndarray:
    """int [settings, texts, places]: drafts accepted after each token of the answers.

    Slot after slot, only places go on at which some setting is right so far.
    """
    tokens = np.zeros((TEXTS, size), np.int32)
    first = np.ones(TEXTS, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text.prompt) + len(text.answer)] = [*text.prompt, *text.answer]
        first[row] = len(text.prompt)
    anchors = np.minimum(first[:, None] + np.arange(places), size - 1)
    z, codes = block_states(models, tokens, anchors)
    requests = [text.request for text in (*texts, *[texts[0]] * (TEXTS - len(texts)))]
    seeds, noise = (jnp.array([getattr(one, name) for one in requests]) for name in ("seed", "noise"))
    keys = request_keys(seeds, noise)
    sampling = RowSampling.of([texts[0].request.sampling] * PLACES)
    ends = np.array([len(text.prompt) + len(text.answer) for text in texts] + [0] * (TEXTS - len(texts)))
    accepted = np.zeros((len(variants), TEXTS, places), int)
    alive = np.ones(accepted.shape, bool)
    prefix = models.drafter.config.pure_draft_prefix_len
    for slot in range(models.drafter.config.num_drafts):
        positions = anchors + 1 + slot
        alive &= positions < ends[:, None]
        rows, columns = np.nonzero(alive.any(0))
        for part in range(0, len(rows), PLACES):
            row, column = (np.resize(index[part : part + PLACES], PLACES) for index in (rows, columns))
            here = (z[row, column, slot], codes[row, column, slot], keys[row], positions[row, column])
            drafts = np.asarray(choices(models, *here, sampling, ranks, slot >= prefix, drafting, variants))
            alive[:, row, column] &= drafts == tokens[row, positions[row, column]]
        accepted += alive & (positions < ends[:, None])
    return accepted[:, : len(texts)]


@jax.jit
def block_states(models: Models, tokens: jax.Array, anchors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(z [B, A, M, D], codes [B, A, M, E]) of the predicting slots of all blocks, as in training."""
    config = models.drafter.config
    out = models.run_target(tokens, tap_layers=config.target_layer_ids, with_logits=False, features_only=True)
    keep = jnp.ones(anchors.shape, bool)
    x = models.embed(blocks.block_tokens(tokens, anchors, keep, config.block_size, config.mask_token_id))
    inputs = models.head_inputs(blocks.head_tokens(tokens, anchors, config.num_drafts))
    z, codes = models.drafter.apply({"params": models.drafter_params}, out["features"], x, anchors, keep, inputs)
    return z[:, :, config.first_slot :], codes


@functools.partial(jax.jit, static_argnums=(7, 8, 9))
def choices(
    models: Models,
    z,
    code,
    keys,
    positions,
    sampling: Sampling,
    ranks,
    corrected: bool,
    drafting: DraftSettings,
    variants: tuple[Setting, ...],
) -> jax.Array:
    """The drafts int32 [settings, R] of one slot at R places, after the text's own tokens."""
    config = models.drafter.config
    base = models.draft_logits(z)[:, None]
    drafts = []
    for c, count in variants:
        likely = base if count == base.shape[-1] else jnp.where(ranks < count, base, -jnp.inf)
        candidates = pick_candidates(likely, config.candidates(drafting.head_candidates))
        if corrected:
            rows = None if candidates.columns is None else models.head_rows(candidates.columns[:, 0])
            change = models.residual(code) if rows is None else models.residual_of(code[:, None], rows)[:, 0]
            candidates = candidates._replace(logits=candidates.logits + change[:, None])
        if not math.isinf(c):
            candidates = with_noise(candidates, keys, positions[:, None], base.shape[-1])
        drafts.append(settle(candidates, sampling, c).tokens[:, 0])
    return jnp.stack(drafts)


if __name__ == "__main__":
    main()

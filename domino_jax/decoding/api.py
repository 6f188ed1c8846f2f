"""The Python API: load a target with its drafter, and generate answers as a whole or piece by piece.

import domino_jax

decoder = domino_jax.load("assets/tiny_qwen3", "assets/tiny_domino", dtype="float32")
[answer] = decoder.generate(["Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"])
for piece in decoder.stream("Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"):
    print(piece.text, end="", flush=True)
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import check_prompt
from domino_jax.decoding.decode_settings import Tuning
from domino_jax.decoding.generate import Generator, new_generator
from domino_jax.decoding.programs import Clock
from domino_jax.decoding.requests import Request, seed_problem
from domino_jax.decoding.stored_tuning import Setup, stored_tuning
from domino_jax.decoding.text_stream import TextStream
from domino_jax.method.pair import Models
from domino_jax.method.settings import (
    BASELINE,
    DRAFT,
    DTYPES,
    TREE,
    DraftSettings,
    GeneratorSettings,
    SamplingParams,
    TreeSettings,
    refused_mode,
)
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights.loading import load_models, load_target

CANDIDATES = 64  # of a head whose drafter was not tuned, as in the recipes
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """text: without special tokens, None without a tokenizer.  accept_lengths: tokens per round, [] when plain."""

    text: str | None
    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str  # "stop" | "length"


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """What one chunk of rounds added. text: whole characters only; an incomplete one waits for the next piece.

    finish_reason is None until the last piece.
    """

    text: str
    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str | None


class Decoder:
    """A target with its drafter (or without), ready for any number of calls; programs are compiled once.

    The text is the target's own in every mode, token for token (docs/equality.md).

    Args:
        generator: of these models.
        tokenizer: the target's; with None prompts are token ids and answers have no text.
        thinking: for the chat template.
    """

    def __init__(self, models: Models, generator: Generator, tokenizer: Any, thinking: bool = False):
        self.default_mode = TREE if generator.settings.drafting.tree else DRAFT if models.drafter else BASELINE
        self.models = models
        self.generator = generator
        self.tokenizer = tokenizer
        self.thinking = thinking

    def generate(self, prompts: Sequence[Prompt], *, mode: str | None = None, **sampling) -> list[Answer]:
        """Answers in the order of the prompts.

        Args:
            prompts: each a text (a user's message where the tokenizer has a chat template), a list of
                {"role", "content"} messages, or a list of token ids.
            mode: "tree", "draft" (or "domino"), "backbone" or "autoregressive"; the first of them that was loaded when
                None.
            sampling: temperature, top_k, top_p, min_p, seed, max_new_tokens; the temperature given to `load`, 0 by
                default, when left out.

        Raises:
            DataError: a prompt that is empty or does not fit.  DominoError: a value out of range.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
            kind = "a text" if isinstance(prompts, str) else "a list of messages"
            raise DataError(f"prompts is {kind}, which is one prompt; put it into a list: generate([prompt]).")
        ids = [self.encode(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
        requests = [self._request(index, **sampling) for index in range(len(ids))]
        answers = self.generator.generate(self.models, ids, mode or self.default_mode, requests).answers
        return [Answer(self._text(answer.token_ids), **dataclasses.asdict(answer)) for answer in answers]

    def stream(
        self,
        prompt: Prompt,
        *,
        mode: str | None = None,
        chunk_rounds: int = 1,
        clock: Clock | None = None,
        **sampling,
    ) -> Iterator[TextPiece]:
        """The answer while it is generated: one piece for every `chunk_rounds` rounds; arguments as in `generate`.

        Args:
            clock: counts on the seconds of prefill, decoding and compilation with every piece.
        """
        if chunk_rounds < 1:
            raise DominoError(f"chunk_rounds is {chunk_rounds}: give 1 or more.")
        ids = self.encode(prompt, "the prompt")
        text = TextStream(self.tokenizer)
        request = self._request(0, **sampling)
        pieces = self.generator.stream(self.models, ids, mode or self.default_mode, chunk_rounds, request, clock)
        for piece in pieces:
            shown = text.add(piece.token_ids, last=piece.finish_reason is not None)
            yield TextPiece(shown, **dataclasses.asdict(piece))

    def fits(self, prompt: Prompt) -> bool:
        """Whether there is room for the prompt and an answer of max_new_tokens."""
        room = self.generator.limits.room(self.generator.settings.max_new_tokens)
        return len(self.encode(prompt, "the prompt")) <= room

    def encode(self, prompt: Prompt, where: str) -> list[int]:
        """The prompt's token ids as `generate` takes them."""
        if isinstance(prompt, str) and not prompt.strip():
            raise DataError(f"{where} is an empty text; give it something to answer.")
        row = prompt_row(prompt, self.tokenizer)
        check_prompt(row, where)
        return encode_prompt(self.tokenizer, row, self.thinking, where)

    def _request(self, noise: int, temperature: float | None = None, **sampling) -> Request:
        default = self.generator.settings.sampling.temperature
        return _request(noise, default if temperature is None else temperature, **sampling)

    def _text(self, token_ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)


@dataclasses.dataclass(frozen=True)
class LoadSettings:
    """What `load` takes by name.

    dtype: float32 (texts equal except at verified near ties) or bfloat16.
    cache_length: the most slots that the caches may have; a prompt, its answer and one block must fit.
    max_new_tokens: the most that a call may ask for; at most half of the cache and of the target's positions.
    batch_size: prompts of `generate` in flight at a time.
    thinking: for the chat template.
    draft_scale: c of drafts that share the target's noise (docs/equality.md).  num_drafts: tokens drafted a round.
        None: as `domino_jax.tune` stored them with the drafter for this device, dtype, batch_size, temperature,
        head_candidates and confidence, by the rows of the batch, else a greedy draft of all that the block gives.
    head_candidates: tokens per slot that the head of a chain corrects; 0, or more than there are: the whole vocabulary.
        None: as the stored tuning was measured, else 64.
    head_rank: what the head is cut to; 0: all of it (docs/heads.md).
    confidence: a chain ends before the first draft whose confidence head gives it a smaller chance (docs/heads.md).
    tree: its shape; calls may then ask for mode "tree", and use it by default (docs/trees.md). None: the stored one
        where a tree was faster than a chain, else none.
    temperature: of calls that name none.
    """

    dtype: str = "bfloat16"
    cache_length: int = 4096
    max_new_tokens: int = 2048
    batch_size: int = 1
    thinking: bool = False
    draft_scale: float | None = None
    num_drafts: int | None = None
    head_candidates: int | None = None
    head_rank: int = 0
    confidence: float = 0.0
    tree: TreeSettings | None = None
    temperature: float = 0.0

    def check(self) -> None:
        """Raises DominoError for a dtype that is none of DTYPES, or a size below 1."""
        if self.dtype not in DTYPES:
            raise DominoError(f"dtype is {self.dtype!r}: give {' or '.join(DTYPES)}.")
        for name in ("cache_length", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise DominoError(f"{name} is {getattr(self, name)}: give 1 or more.")

    def drafting(self, tuning: Tuning | None) -> DraftSettings:
        """What is left open comes from the tuning."""
        scale = self.draft_scale
        if scale is None:
            scale = tuning.draft_scale if tuning else math.inf
        drafting = DraftSettings(scale=scale, num_drafts=self.num_drafts or None, tree=self.tree)
        if tuning and not self.num_drafts and self.tree is None:
            drafting = dataclasses.replace(tuning.chain, scale=scale, tree=tuning.tree if tuning.mode == TREE else None)
        candidates = self.head_candidates
        if candidates is None:
            candidates = tuning.head_candidates if tuning else CANDIDATES
        return dataclasses.replace(drafting, head_candidates=candidates, confidence=self.confidence)


def load(target: str, drafter: str | None = None, settings: LoadSettings | None = None, **changes: Any) -> Decoder:
    """A Decoder of a target's folder or hub id and, for speed, a drafter's folder, hub id or train workdir.

    Args:
        settings: LoadSettings() when None.
        changes: fields of LoadSettings by name, as in load(target, drafter, dtype="float32", tree=TreeSettings()).

    Raises:
        DominoError, DataError: a folder that is missing or damaged, a drafter of another target, a tree that does not
            fit.  TypeError: an unknown name.
    """
    settings = dataclasses.replace(settings or LoadSettings(), **changes)
    settings.check()
    tree = settings.tree
    if tree is not None and not isinstance(tree, TreeSettings):
        raise DominoError(f"tree is {tree!r}: give its shape, as tree=domino_jax.TreeSettings(nodes=64).")
    if tree and not drafter:
        raise DominoError("tree is given, but no drafter; name the drafter's folder, or leave tree out.")
    sampling = SamplingParams(settings.temperature)
    setup = Setup(
        settings.dtype,
        settings.batch_size,
        sampling,
        head_candidates=settings.head_candidates,
        confidence=settings.confidence,
        head_rank=settings.head_rank,
    )
    tuning = stored_tuning(drafter, setup)
    drafting = settings.drafting(tuning)
    loaded = load_target(target, settings.dtype)
    block = tuning.block_size if tuning and not settings.num_drafts and tree is None else 0
    models = load_models(loaded, drafter, block_size=block, head_rank=settings.head_rank)
    if tree and (refused := refused_mode(TREE, models.drafter.config.head)):
        raise DominoError(f"tree is given, but {refused}.")
    most = min(settings.cache_length, loaded.model.config.max_position_embeddings) // 2
    generator_settings = GeneratorSettings(
        cache_slots=settings.cache_length,
        max_new_tokens=min(settings.max_new_tokens, most),
        batch_size=settings.batch_size,
        sampling=sampling,
        drafting=drafting,
        stop_ids=loaded.stop_ids,
    )
    generator = new_generator(models, generator_settings)
    return Decoder(models, generator, loaded.tokenizer, settings.thinking)


def prompt_row(prompt: Prompt, tokenizer) -> dict:
    """A prompt as a row: a text is a user's message for a model with a chat template, else the text as it is."""
    if isinstance(prompt, str):
        if tokenizer is not None and tokenizer.chat_template:
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}
    prompt = list(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return {"messages": [dict(message) for message in prompt]}
    return {"token_ids": [int(token) for token in prompt]}


def _request(
    noise: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    max_new_tokens: int | None = None,
) -> Request:
    sampling = SamplingParams(float(temperature), int(top_k), float(top_p), float(min_p))
    problem = sampling.problem() or seed_problem(seed)
    if problem:
        raise DominoError(str(problem))
    return Request(noise, seed, max_new_tokens, sampling)

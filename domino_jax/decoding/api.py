"""The Python API: load a target with its drafter, and generate answers as a whole or piece by piece.

import domino_jax

decoder = domino_jax.load("assets/tiny_qwen3", "assets/tiny_domino", dtype="float32")
[answer] = decoder.generate(["Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"])
for piece in decoder.stream("Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"):
    print(piece.text, end="", flush=True)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.programs import Clock
from domino_jax.decoding.requests import Request
from domino_jax.decoding.settings import BASELINE, DRAFT, TREE, DecodeSettings, refused_mode
from domino_jax.decoding.text_stream import TextStream
from domino_jax.method.pair import Pair
from domino_jax.method.settings import Problem, TreeSettings, first_problem
from domino_jax.runtime.errors import DataError, DominoError, quote
from domino_jax.weights.loading import load_models, load_target
from domino_jax.weights.quantization import QUANTIZE

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Answer(Generation):
    """A Generation and its text, without special tokens; None without a tokenizer. The text of a piece has whole
    characters: an incomplete one waits for the next piece."""

    text: str | None = None


class Decoder:
    """A target with its drafter (or without), ready for any number of calls; programs are compiled once.

    Args:
        generator: of these models.
        tokenizer: the target's; with None prompts are token ids and answers have no text.
        prefixes: where streams leave the caches of their texts for those that begin alike; None: nowhere.
    """

    def __init__(self, models: Pair, generator: Generator, tokenizer: Any, prefixes: Prefixes | None = None):
        self.default_mode = TREE if generator.settings.drafting.tree else DRAFT if models.drafter else BASELINE
        self.models, self.generator, self.tokenizer, self.prefixes = models, generator, tokenizer, prefixes
        self.codec = TextCodec(tokenizer, generator.settings.thinking, today=True)

    def generate(self, prompts: Sequence[PromptLike], *, mode: str | None = None, **sampling) -> list[Answer]:
        """Answers in the order of the prompts.

        Args:
            prompts: each a text (a user's message where the tokenizer has a chat template), a list of
                {"role", "content"} messages, or a list of token ids.
            mode: "tree", "draft" (or "domino"), "backbone" or "autoregressive"; the first of them that was loaded when
                None.
            sampling: temperature, top_k, top_p, min_p, seed, max_new_tokens; what is left out is as given to `load`.

        Raises:
            DataError: a prompt that is empty or does not fit.  DominoError: a value out of range.
        """
        prompts = prompts if isinstance(prompts, str | Mapping) else list(prompts)
        if isinstance(prompts, str | Mapping) or any(map(_is_part, prompts)):
            raise DataError("prompts is a single prompt; put it into a list: generate([prompt]).")
        ids = [self.encode(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
        requests = [self._request(index, **sampling) for index in range(len(ids))]
        answers = self.generator.generate(self.models, ids, mode or self.default_mode, requests).answers
        return [Answer(**vars(answer), text=self.codec.decode(answer.token_ids)) for answer in answers]

    def stream(
        self,
        prompt: PromptLike,
        *,
        mode: str | None = None,
        chunk_rounds: int = 1,
        clock: Clock | None = None,
        **sampling,
    ) -> Iterator[Answer]:
        """The answer while it is generated: one piece for every `chunk_rounds` rounds; arguments as in `generate`.

        Args:
            clock: counts on the seconds of prefill, decoding and compilation with every piece.
        """
        if chunk_rounds < 1:
            raise DominoError(f"chunk_rounds is {chunk_rounds}: give 1 or more.")
        ids, request = self.encode(prompt, "the prompt"), self._request(0, **sampling)
        choices = {"clock": clock, "prefixes": self.prefixes}
        pieces = self.generator.stream(self.models, ids, mode or self.default_mode, chunk_rounds, request, **choices)
        text = TextStream(self.tokenizer)
        return (
            Answer(**vars(piece), text=text.add(piece.token_ids, last=piece.finish_reason is not None))
            for piece in pieces
        )

    def fits(self, prompt: PromptLike) -> bool:
        """Whether there is room for the prompt and an answer of max_new_tokens."""
        room = self.generator.limits.room(self.generator.settings.max_new_tokens)
        return len(self.encode(prompt, "the prompt")) <= room

    def encode(self, prompt: PromptLike, where: str) -> list[int]:
        """The prompt's token ids as `generate` takes them."""
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise DataError(f"{where} is {quote(prompt)}; give a text, messages or token ids.")
        if isinstance(prompt, str) and not prompt.strip():
            raise DataError(f"{where} is an empty text; give it something to answer.")
        return self.codec.encode(prompt_row(prompt, self.tokenizer), where)

    def _request(self, noise: int, seed: int | None = None, max_new_tokens: int | None = None, **changes) -> Request:
        settings = self.generator.settings
        given = {"seed": seed, "max_new_tokens": max_new_tokens, **changes}
        values = {"seed": settings.seed, **_plain(given)}
        seed, most = values.pop("seed"), values.pop("max_new_tokens", None)
        sampling = dataclasses.replace(settings.sampling, **values)
        asked = dataclasses.replace(
            settings, seed=seed, max_new_tokens=settings.max_new_tokens if most is None else most
        )
        if problem := sampling.problem() or first_problem(asked):
            raise DominoError(str(problem))
        return Request(noise, seed, most, sampling)


def load(
    target: str,
    drafter: str | None = None,
    settings: DecodeSettings | None = None,
    quantize: str | None = None,
    **changes: Any,
) -> Decoder:
    """A Decoder of a target's folder or hub id and, for speed, a drafter's folder, hub id or train workdir.

    Calls use mode "tree" by default where a tree is loaded.

    Args:
        settings: DecodeSettings(width="adaptive") when None: every few rounds the number of drafts follows what was
            accepted and how long rounds took (docs/decoding.md), so τ is measured with "fixed". max_new_tokens is at
            most half of the cache and of the positions of either model.
        quantize: copies of the target's matrices in eight bits: "int8", "fp8", or "int8_layers" and "fp8_layers", which
            leave the lm_head as it is. These copies determine the text.
        changes: fields of DecodeSettings and of its sampling and drafting by name, as in load(target, drafter,
            dtype="float32", temperature=0.7, draft_sharpness=1.0, tree=TreeSettings()). None: as in settings.

    Raises:
        DominoError, DataError: a folder that is missing or damaged, a drafter of another target, a value or a tree that
            does not fit.  TypeError: an unknown name.
    """
    settings = (settings or DecodeSettings(width="adaptive")).change(**_plain(changes))
    if problem := first_problem(settings):
        raise DominoError(str(problem))
    most = max(settings.cache_length // 2, 1)
    settings = settings.change(
        max_new_tokens=min(settings.max_new_tokens, most), num_drafts=settings.drafting.num_drafts or None
    )
    if problem := _load_problem(settings, drafter, quantize):
        raise DominoError(str(problem))
    loaded = load_target(target, settings.dtype, quantize=quantize)
    models = load_models(loaded, drafter, drafting=settings.drafting)
    if settings.drafting.tree and (refused := refused_mode(TREE, models.drafter.config)):
        raise DominoError(f"tree is given, but {refused}.")
    modules = [module for module in (models.target, models.drafter) if module]
    positions = min(module.config.max_position_embeddings for module in modules)
    settings = settings.change(max_new_tokens=min(settings.max_new_tokens, positions // 2))
    return Decoder(models, new_generator(models, settings, loaded.stop_ids), loaded.tokenizer)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without None, and scalars of numpy and jax as Python's numbers."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: value.item() if hasattr(value, "item") and not value.ndim else value for name, value in given.items()}


def _load_problem(settings: DecodeSettings, drafter: str | None, quantize: str | None) -> Problem | str | None:
    tree = settings.drafting.tree
    if not jax.sharding.get_mesh().empty:
        return "a mesh is set, but load places models on one device; load and decode outside of jax.set_mesh."
    if jax.config.jax_enable_x64:
        return "jax_enable_x64 is on, but models run in float32 or bfloat16; turn it off before load."
    if tree is not None and not isinstance(tree, TreeSettings):
        return f"tree is {tree!r}: give its shape, as tree=domino_jax.TreeSettings(nodes=64)."
    if tree and not drafter:
        return "tree is given, but no drafter; name the drafter's folder, or leave tree out."
    if quantize not in (None, *QUANTIZE):
        return f"quantize is {quantize!r}: give one of {', '.join(QUANTIZE)}, or leave it out."
    return settings.problem()


def _is_part(value: Any) -> bool:
    """Whether a value is a part of a prompt: a message or a token."""
    return isinstance(value, Mapping) or (hasattr(value, "__index__") and not getattr(value, "ndim", 0))


def prompt_row(prompt: PromptLike, tokenizer) -> dict:
    """A prompt as a row: a text is a user's message for a model with a chat template, else the text as it is."""
    if isinstance(prompt, str):
        if tokenizer is not None and tokenizer.chat_template:
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}
    prompt = list(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return {"messages": [dict(message) for message in prompt]}
    # Integers of numpy and jax are ids too; what is none is refused by name.
    whole = (hasattr(token, "__index__") and not isinstance(token, bool) for token in prompt)
    return {"token_ids": [int(token) if fits else token for token, fits in zip(prompt, whole, strict=True)]}

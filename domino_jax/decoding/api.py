"""The package's front: load a target with its drafter, get answers whole or as they come.

import domino_jax

decoder = domino_jax.load("assets/tiny_qwen3", "assets/tiny_domino", dtype="float32")
[answer] = decoder.generate(["Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"])
for piece in decoder.stream("Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"):
    print(piece.text, end="", flush=True)
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import check_prompt
from domino_jax.decoding.generate import BASELINE, TREE, Generator, Request
from domino_jax.decoding.propose import DraftSettings, TreeSettings
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.decoding.text_stream import TextStream
from domino_jax.drafters.pair import gate_table
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights.loading import load_models, load_target

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
    """What one chunk of rounds added. text: whole characters only, what is cut waits for the next piece.

    finish_reason is None until the last piece.
    """

    text: str
    token_ids: list[int]
    accept_lengths: list[int]
    finish_reason: str | None


class Decoder:
    """A target with its drafter (or without), ready for any number of calls; programs are compiled once.

    The text is the target's own in every mode, token for token (README, "What is promised about equality").

    Args:
        generator: made for the models, the stop ids and the sizes.
        tokenizer: the target's; with None prompts are token ids and answers have no text.
        thinking: for the chat template.
    """

    def __init__(self, generator: Generator, tokenizer: Any, thinking: bool = False):
        drafter = generator.models.drafter
        has_head = drafter is not None and drafter.config.has_head
        chain = "domino" if has_head else "backbone" if drafter else BASELINE
        self.default_mode = TREE if generator.drafting.tree else chain
        self.generator = generator
        self.tokenizer = tokenizer
        self.thinking = thinking

    def generate(self, prompts: Sequence[Prompt], *, mode: str | None = None, **sampling) -> list[Answer]:
        """Answers in the order of the prompts.

        Args:
            prompts: each a text (a user's message where the tokenizer has a chat template), a list of
                {"role", "content"} messages, or a list of token ids.
            mode: "tree", "domino", "backbone" or "autoregressive"; the first of them that was loaded when None.
            sampling: temperature, top_k, top_p, min_p, seed, max_new_tokens; greedy when left out.

        Raises:
            DataError: a prompt that is empty or does not fit.  DominoError: a value out of range.
        """
        ids = [self.encode(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
        requests = [_request(index, **sampling) for index in range(len(ids))]
        made = self.generator.generate(ids, mode or self.default_mode, requests)
        return [Answer(self._text(one.token_ids), **dataclasses.asdict(one)) for one in made]

    def stream(
        self, prompt: Prompt, *, mode: str | None = None, chunk_rounds: int = 1, **sampling
    ) -> Iterator[TextPiece]:
        """The answer as it is committed: one piece for each `chunk_rounds` rounds; arguments as in `generate`."""
        ids = self.encode(prompt, "the prompt")
        text = TextStream(self.tokenizer)
        for piece in self.generator.stream(ids, mode or self.default_mode, chunk_rounds, _request(0, **sampling)):
            shown = text.add(piece.token_ids, last=piece.finish_reason is not None)
            yield TextPiece(shown, **dataclasses.asdict(piece))

    def fits(self, prompt: Prompt) -> bool:
        """Whether there is room for the prompt and an answer of max_new_tokens."""
        room = self.generator.limits.room(self.generator.max_new_tokens)
        return len(self.encode(prompt, "the prompt")) <= room

    def encode(self, prompt: Prompt, where: str) -> list[int]:
        """The prompt's token ids as `generate` takes them."""
        if isinstance(prompt, str) and not prompt.strip():
            raise DataError(f"{where} is an empty text; give it something to answer.")
        row = prompt_row(prompt, self.tokenizer)
        check_prompt(row, where)
        return encode_prompt(self.tokenizer, row, self.thinking, where)

    def _text(self, token_ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)


def load(
    target: str,
    drafter: str | None = None,
    *,
    dtype: str = "bfloat16",
    cache_length: int = 4096,
    max_new_tokens: int = 2048,
    batch_size: int = 1,
    thinking: bool = False,
    draft_scale: float = float("inf"),
    num_drafts: int | None = None,
    tree: TreeSettings | None = None,
    tabulate_gates: bool = False,
) -> Decoder:
    """A Decoder of a target's folder or hub id and, for speed, a drafter's folder, hub id or train workdir.

    Args:
        dtype: float32 (texts equal but for shown near ties) or bfloat16.
        cache_length: slots of the caches: a prompt, its answer and one block must fit.
        max_new_tokens: the most that a call may ask for; at most half of the cache and of the target's positions.
        batch_size: prompts of `generate` in flight at a time.
        draft_scale, num_drafts, tabulate_gates: how to draft (draft_scale, num_drafts, gate_table of the recipes).
        tree: with it calls may ask for mode "tree" (docs/tree.md), and do where they name none.

    Raises:
        DominoError, DataError: a folder that is missing or damaged, a drafter of another target, a tree that does not
            fit.
    """
    if tree is not None and not isinstance(tree, TreeSettings):
        raise DominoError(f"tree is {tree!r}: give its shape, as tree=domino_jax.TreeSettings(nodes=64).")
    if tree and not drafter:
        raise DominoError("tree is given, but no drafter that could draft it: name its folder, or leave tree out.")
    loaded = load_target(target, dtype)
    models = load_models(loaded, drafter, ("backbone",) if drafter else (BASELINE,))
    if tabulate_gates and models.drafter and models.drafter.config.has_head:
        models = models.replace(gates=gate_table(models))
    most = min(cache_length, loaded.model.config.max_position_embeddings) // 2
    generator = Generator(
        models,
        stop_ids=loaded.stop_ids,
        cache_slots=cache_length,
        max_new_tokens=min(max_new_tokens, most),
        batch_size=batch_size,
        drafting=DraftSettings(scale=draft_scale, num_drafts=num_drafts, tree=tree),
    )
    return Decoder(generator, loaded.tokenizer, thinking)


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
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    max_new_tokens: int | None = None,
) -> Request:
    sampling = SamplingParams(float(temperature), int(top_k), float(top_p), float(min_p))
    problem = sampling.problem()
    if problem:
        raise DominoError(problem)
    return Request(noise, seed, max_new_tokens, sampling)

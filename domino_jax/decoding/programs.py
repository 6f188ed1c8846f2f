"""The decoding programs: one for each mode, batch size and cache size, compiled when it is first used."""

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from domino_jax.decoding.limits import Limits
from domino_jax.decoding.settings import BASELINE, MODES, TREE, DecodeSettings, canonical_mode, refused_mode
from domino_jax.decoding.width import WidthController
from domino_jax.method.drafters import AnyConfig
from domino_jax.method.loop import DecodeState, Prompts, prefill, run_rounds
from domino_jax.method.pair import Pair
from domino_jax.method.rounds import autoregressive_round, speculative_round
from domino_jax.method.settings import DraftSettings
from domino_jax.models import sharding
from domino_jax.models.cache import slots_of
from domino_jax.runtime.environment import mappings_in_use
from domino_jax.runtime.errors import DominoError

SMALLEST_BUCKET = 16
PREFILLS = ("prefill", "empty", "admit", "keep")  # programs whose time is that of prefills
FULL = 0.75  # share of the memory mappings that may be in use; a program of 24 layers on a CPU needs 1 %


@dataclasses.dataclass
class Clock:
    """Wall seconds of a run, compilation separate.

    decode_tokens: without each row's first token, the prefill's.  drafts: that the rounds offered to the target.
    prefix_waits: texts that were not stored or not started from because the program for it was not compiled yet.
    widths, exploring_seconds: where the width is adaptive, rounds by their drafts, and what exploring cost.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    decode_tokens: int = 0
    drafts: int = 0
    exploring_seconds: float = 0.0
    prefix_waits: int = 0
    widths: dict[str, int] = dataclasses.field(default_factory=Counter)

    def __post_init__(self):
        self.widths = Counter(self.widths)  # a sum of clocks adds the values of a key


class Program(NamedTuple):
    """An argument of `Programs.run`: where the program is stored, and what it is compiled from."""

    key: tuple
    function: Callable
    arguments: tuple  # arrays or their shapes
    donate: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Programs of fixed shapes for models whose shapes and dtypes never change; every call gets these models.

    drafter: None for plain decoding.  stop_ids: int32, never empty.
    compiled: by what they differ in, filled as they are needed.  controllers: by mode, where the width is adaptive.
    """

    settings: DecodeSettings
    drafter: AnyConfig | None
    limits: Limits
    stop_ids: jax.Array
    compiled: dict[tuple, jax.stages.Compiled] = dataclasses.field(default_factory=dict)
    controllers: dict[str, WidthController] = dataclasses.field(default_factory=dict)

    def rounds(self, mode: str, drafts: int | None = None) -> Callable[..., DecodeState]:
        """The unjitted program of a mode, with `drafts` drafts a round: run_rounds without its first argument."""
        settings = self.settings
        if mode == BASELINE:
            width = self.drafting(mode).width(self.drafter) + 1 if settings.fixed_shape else None
            round_ = functools.partial(autoregressive_round, sampling=settings.sampling, fixed_width=width)
        else:
            choices = {"settings": self.drafting(mode, drafts), "isolated": settings.fixed_shape}
            round_ = functools.partial(speculative_round, sampling=settings.sampling, **choices)
        return functools.partial(run_rounds, round_)

    def drafting(self, mode: str, drafts: int | None = None) -> DraftSettings:
        """DecodeSettings.drafting_of for this drafter."""
        return self.settings.drafting_of(mode, self.drafter, drafts)

    def widths(self, mode: str) -> tuple[int, ...]:
        """The numbers of drafts that an adaptive width chooses among; those between 0 and all are for chains."""
        most = self.drafting(mode).width(self.drafter)
        smaller = (0,) if mode == TREE else self.settings.widths
        return (*sorted({drafts for drafts in smaller if drafts < most}), most)

    def controller(self, mode: str) -> WidthController | None:
        """Chooses the width of a mode's dispatches; None where it is fixed."""
        if mode == BASELINE or not self.settings.adaptive:
            return None
        return self.controllers.setdefault(canonical_mode(mode), WidthController(self.widths(mode)))

    def block_rows(self, mode: str) -> int:
        """Slots after the committed ones that a round of a mode writes."""
        if self.plain(mode):
            return 2  # cache.append writes a block of one as two
        return self.drafting(mode).block_rows(self.drafter)

    def prefill(self, models: Pair, prompts: Prompts, stop_ids: jax.Array, *earlier: Any, slots: int) -> DecodeState:
        """The unjitted program that starts a batch (loop.prefill); `slots` is static.

        earlier: caches and how many of their rows to start from, or nothing.
        """
        shape = {"slots": slots, "buffer": self.settings.max_new_tokens}
        return prefill(models, prompts, stop_ids, *earlier, sampling=self.settings.sampling, **shape)

    def dispatch(
        self,
        models: Pair,
        state: DecodeState,
        mode: str,
        max_rounds: int,
        *,
        idle: int | None = None,
        longest: int | None = None,
        drafts: int | None = None,
    ) -> Program:
        """The program of up to max_rounds rounds (loop.run_rounds); the state is donated.

        Args:
            idle: None: until all rows are done.
            longest: None: the rounds end before a live row would outgrow the caches. Blocks that do not fit are lost.
            drafts: of a round; None: as the settings say.
        """
        rows, slots = state.done.shape[0], slots_of(state.target_cache)
        idle = rows - 1 if idle is None else idle
        longest = slots - self.block_rows(mode) if longest is None else longest
        kind = state.sampling and state.sampling.kind
        key = (canonical_mode(mode), rows, slots, kind, bool(state.draft_cache), drafts)
        limits = (np.int32(limit) for limit in (max_rounds, idle, longest))
        return Program(key, self.rounds(mode, drafts), (models, state, self.stop_ids, *limits), donate=(1,))

    def advance(
        self, models: Pair, state: DecodeState, mode: str, max_rounds: int, clock: Clock | None = None, **limits
    ) -> DecodeState:
        """Up to max_rounds rounds in one `dispatch`, compiled if needed; the state passed in is donated."""
        return self.run(clock or Clock(), self.dispatch(models, state, mode, max_rounds, **limits))

    def run(self, clock: Clock, program: Program) -> Any:
        """The result of a program, which is compiled first if it is not yet."""
        mesh, arguments = jax.sharding.get_mesh(), program.arguments
        if not mesh.empty:
            arguments = (arguments[0], *sharding.replicate(mesh, arguments[1:]))
        compiled = self.compiled.get(program.key)
        if compiled is None:
            begin = time.perf_counter()
            if mappings_in_use() > FULL:  # XLA would end a process without memory mappings
                self.compiled.clear()
            with self.exact():
                program = program._replace(arguments=arguments)
                compiled = self.compiled[program.key] = self.jitted(program).lower(*arguments).compile()
            clock.compile_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        part = "prefill_seconds" if program.key[0] in PREFILLS else "decode_seconds"
        setattr(clock, part, getattr(clock, part) + time.perf_counter() - begin)
        return result

    def jitted(self, program: Program) -> Any:
        layout = (
            None if jax.sharding.get_mesh().empty else jax.tree.map(lambda leaf: leaf.sharding, self.result(program))
        )
        return jax.jit(program.function, donate_argnums=program.donate, out_shardings=layout)

    def result(self, program: Program) -> Any:
        """The shapes of a program's result, on a mesh with its layout."""
        shapes, mesh = jax.eval_shape(program.function, *program.arguments), jax.sharding.get_mesh()
        if mesh.empty:
            return shapes
        layout = sharding.decode_layout(mesh, shapes)
        return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, layout)

    def exact(self) -> contextlib.AbstractContextManager:
        """float32 means float32: GPUs and TPUs otherwise multiply it in TF32 or bfloat16, and equal texts were luck."""
        return jax.default_matmul_precision("highest") if self.settings.dtype == "float32" else contextlib.nullcontext()

    def at_hand(self, program: Program) -> bool:
        """Whether a step may use a program that it can do without; here it may wait for any (background.py)."""
        return True

    def delete(self, tree: Any) -> None:
        """Frees the arrays of a tree, whoever else refers to them."""
        for leaf in jax.tree.leaves(tree):
            leaf.delete()

    def bucket(self, length: int) -> int:
        """The length to which prompts are padded: the next power of two, at most the largest cache."""
        return min(max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()), self.settings.cache_length)

    def slots(self, rows: int) -> int:
        """The slots of caches that hold `rows` rows: a power of two, smallest_cache or more, at most cache_length."""
        rows = max(rows, self.settings.smallest_cache, SMALLEST_BUCKET)
        return min(1 << (rows - 1).bit_length(), self.settings.cache_length)

    def general_bucket(self, bucket: int) -> int:
        """One of few lengths to which any prompts can be padded: the smallest cache, four of it, and so on."""
        size = self.slots(1)
        while size < bucket:
            size = min(4 * size, self.settings.cache_length)
        return size

    @property
    def batches(self) -> tuple[int, ...]:
        """Rows of the batches, the smallest first: the largest, a quarter of it, and so on.

        In fixed shape there is one, because sums over another number of rows may round differently. On a mesh the rows
        of each batch are cut evenly.
        """
        sizes, mesh = [self.settings.batch_size], jax.sharding.get_mesh()
        while (rows := sizes[0] // 4) and not self.settings.fixed_shape:
            if not mesh.empty and rows % sharding.row_shards(mesh):
                break
            sizes.insert(0, rows)
        return tuple(sizes)

    def check_mode(self, mode: str) -> None:
        """Raises DominoError for a mode that does not exist, or that this drafter or these settings do not have."""
        problem = None
        if mode not in MODES:
            problem = f"mode {mode!r} is not one of {', '.join(MODES)}"
        elif mode == TREE and self.settings.drafting.tree is None:
            problem = "mode 'tree' needs the tree's shape; load the drafter with tree=TreeSettings(…)"
        elif mode != BASELINE and self.drafter is None:
            problem = f"mode {mode!r} needs a drafter, and none was given; set config.drafter.path"
        elif mode != BASELINE:
            problem = refused_mode(mode, self.drafter)
        if problem:
            raise DominoError(f"{problem}.")

    def plain(self, mode: str) -> bool:
        """Whether a mode runs without the drafter's cache; in fixed shape plain decoding has it too."""
        return mode == BASELINE and not self.settings.fixed_shape

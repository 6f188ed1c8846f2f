"""The measurements of campaign.py: each function is one phase and returns JSON values.

Every phase measures the bandwidth of a copy, or the rate of a matrix product, in the same alternation as what is
compared with it. Models have random weights, made on the device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu.decode_attention import mqa

from benchmarks.compilers.programs import CANDIDATES, in_int8
from benchmarks.device import decode_latency, train_step
from benchmarks.device.decode_latency import copy_stopwatch, rate, timed
from benchmarks.device.random_models import decoding_models, state_of, target_config
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import BASELINE, DOMINO, DecodeSettings
from domino_jax.evals.round_times import endless, round_stopwatch, stopwatch
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings
from domino_jax.models import gpu_attention
from domino_jax.models.attention import KERNELS, attend
from domino_jax.models.cache import block_mask
from domino_jax.models.long_attention import attend_long
from domino_jax.models.shapes import MASKED
from domino_jax.training.flops import peak_flops
from domino_jax.weights.draft_vocab import with_draft_vocab
from domino_jax.weights.loading import rows_together
from domino_jax.weights.quantization import PUBLIC_FP8, QUANTIZE, SECTION, read_scheme

# Acceptance lengths at T = 0 of public runs, set by hand here: random weights accept nothing.
TAUS = (5.42, 7.17)
CHAIN = 17  # rows that a round of 16 drafts verifies
POINTS = {
    # The public trainer's published point: no head; its figure leaves the target's pass out.
    "public": ["--length=768", "--rows=2", "--no-head"],
    # One row of the paper's recipe.
    "paper": ["--length=3072", "--rows=1", "--parts", "whole"],
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of everything a phase takes.

    slots: of the caches in `decode`.  contexts: slots in `context`.  row_counts, row_slots: of `batch`.
    vocabulary: of `drafts`.  widths: rows of verify.  trees: nodes.
    product: rows and columns of the matrices of `bandwidth`.
    train: arguments of train_step beside a point's own.
    """

    golden_sets: tuple[str, ...] = ("tied_shift", "untied_noshift")
    dtype: str = "bfloat16"
    repeats: int = 5
    copy_megabytes: int = 1024
    product: int = 8192
    layers: int = 5
    head: tuple[int, int] = (256, 1024)
    slots: int = 4096
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    trees: tuple[int, ...] = (64,)
    contexts: tuple[int, ...] = (512, 4096, 32_768)
    row_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    row_slots: int = 1024
    vocabulary: int = 32_768
    train: tuple[str, ...] = ()


LARGE = Scale()
SMALL = Scale(
    golden_sets=("tied_shift",),
    dtype="float32",
    repeats=1,
    copy_megabytes=1,
    product=64,
    layers=1,
    head=(8, 8),
    slots=64,
    widths=(4,),
    trees=(4,),
    contexts=(32, 64),
    row_counts=(1, 2),
    row_slots=64,
    vocabulary=64,
    train=("--dtype=float32", "--length=24", "--rows=2", "--anchors=4", "--layers=1", "--block=4", "--steps=2"),
)


def peak_bytes() -> int | None:
    """Most bytes in use on the first device since this process started; None where jax does not say (a CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] if "peak_bytes_in_use" in stats else None


def bandwidth(scale: Scale, peak_tflops: float | None) -> dict[str, Any]:
    """Bytes/s of a copy, read and written together, and FLOP/s of a square bfloat16 product."""
    copy, copied = copy_stopwatch(scale.copy_megabytes)
    product, flops = product_stopwatch(scale.product)
    seconds = decode_latency.median_seconds({"copy": copy, "product": product}, scale.repeats)
    known = peak_flops(jax.devices()[0].device_kind)
    return {
        "copy_bytes_per_second": rate(copied, seconds["copy"]),
        "flops_per_second": rate(flops, seconds["product"]),
        "sheet_flops_per_second": peak_tflops * 1e12 if peak_tflops else known,
    }


def product_stopwatch(size: int) -> tuple[Callable[[int], float], int]:
    """turns → seconds of that many square bfloat16 products of `size` rows, and the FLOPs of one of them."""
    # Values whose powers keep their size; of zeros a product is faster, because it needs less power.
    a, x = (jax.random.normal(jax.random.key(seed), (size, size)).astype(jnp.bfloat16) for seed in range(2))
    a = (a * size**-0.5).astype(jnp.bfloat16)

    def products(a, x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, x: jax.lax.dot(a, x), x)

    return stopwatch(jax.jit(products), a, x), 2 * size**3


# ------------------------------------------------------------------------------------------------------- decoding


def decode(size: str, scale: Scale) -> dict[str, Any]:
    """A step, a round and its parts, verify of every width and a tree, over caches of `scale.slots` slots."""
    arguments = [f"--size={size}", f"--dtype={scale.dtype}", f"--slots={scale.slots}", f"--layers={scale.layers}"]
    arguments += [f"--repeats={scale.repeats}", f"--copy-megabytes={scale.copy_megabytes}"]
    for name, values in (("head", scale.head), ("widths", scale.widths), ("trees", scale.trees)):
        arguments += [f"--{name}", *map(str, values)]
    measured = decode_latency.measure(decode_latency.parsed(arguments))
    copied, seconds = measured["copy_bytes_per_second"], measured["seconds"]
    parts = {name: timed(spent, measured["must"].get(name), copied) for name, spent in seconds.items()}
    return {
        "slots": scale.slots,
        "copy_bytes_per_second": copied,
        "parts": parts,
        **compared(seconds["step"], seconds["round"]),
        "peak_bytes": peak_bytes(),
    }


def compared(step: float, round_: float) -> dict[str, Any]:
    """A round against a step. Break-even: the τ above which drafting pays."""
    ratio = rate(round_, step)
    return {"break_even_tau": ratio, "speedup_at_tau": {str(tau): rate(tau * step, round_) for tau in TAUS}}


def context(size: str, scale: Scale) -> dict[str, Any]:
    """A step and a round of one request, by the slots of the caches, which every pass reads whole."""
    models = decoding_models(size, scale.dtype, scale.layers, scale.head)
    return steps_and_rounds(scale, {f"{slots:,} slots": (models, 1, slots) for slots in scale.contexts})


def batch(size: str, scale: Scale) -> dict[str, Any]:
    """A step and a round by the number of requests decoded together."""
    models = decoding_models(size, scale.dtype, scale.layers, scale.head)
    return steps_and_rounds(scale, {f"{rows} rows": (models, rows, scale.row_slots) for rows in scale.row_counts})


def eight_bits(size: str, scale: Scale) -> dict[str, Any]:
    """A step and a round of one request by the type of the target's matrices."""
    tiles = read_scheme({SECTION: PUBLIC_FP8})
    schemes = {scale.dtype: None, "int8": QUANTIZE["int8"], "FP8 by channel": QUANTIZE["fp8"], "FP8 tiles": tiles}
    whole: dict[str, Any] = {"sizes": {}}
    for name, scheme in schemes.items():  # one after another, as a card may hold one target alone
        models = decoding_models(size, scale.dtype, scale.layers, scale.head, scheme)
        measured = steps_and_rounds(scale, {name: (models, 1, scale.slots)})
        whole = measured | {"sizes": whole["sizes"] | measured["sizes"]}
        del models
    return whole


def steps_and_rounds(scale: Scale, cases: dict[str, tuple[Pair, int, int]]) -> dict[str, Any]:
    """cases: name → (models, rows, slots)."""
    most = max(slots for _, _, slots in cases.values())
    drafting = DraftSettings(head_candidates=CANDIDATES[0])
    settings = DecodeSettings(cache_length=most, max_new_tokens=16, drafting=drafting)
    copy, copied = copy_stopwatch(scale.copy_megabytes)
    stopwatches, must = {"copy": copy}, {}
    for name, (models, rows, slots) in cases.items():
        generator = new_generator(models, settings)
        # Full but for a block: a generation would use no larger caches for such a text.
        state = state_of(models, generator, rows, slots, max(1, slots - CHAIN - 1))
        for mode, label in ((BASELINE, "step"), (DOMINO, "round")):
            stopwatches[f"{label} {name}"] = round_stopwatch(models, generator, endless(state), mode)
        bound = decode_latency.must_bytes(models, state, ("step", "round"))
        must |= {f"{label} {name}": count for label, count in bound.items()}
    seconds = decode_latency.median_seconds(stopwatches, scale.repeats)
    bandwidth = rate(copied, seconds.pop("copy"))
    by_case = {}
    for name, (_, rows, slots) in cases.items():
        step, whole = (seconds[f"{label} {name}"] for label in ("step", "round"))
        parts = {
            label: timed(seconds[f"{label} {name}"], must[f"{label} {name}"], bandwidth) for label in ("step", "round")
        }
        rates = {"plain_tokens_per_second": rate(rows, step), "rows": rows, "slots": slots}
        by_case[name] = {**parts, **compared(step, whole), **rates}
    return {"copy_bytes_per_second": bandwidth, "sizes": by_case, "peak_bytes": peak_bytes()}


def drafts(size: str, scale: Scale) -> dict[str, Any]:
    """A round of one request over the longest caches: as it is, with a draft vocabulary, and by drafters
    in int8 with all tokens and with that vocabulary."""
    models = decoding_models(size, scale.dtype, scale.layers, scale.head)
    target, slots = models.target.config, scale.contexts[-1]
    tokens = np.arange(min(scale.vocabulary, target.vocab_size))
    head = models.drafter_params["head"]
    if "rows" in head["up"]:  # as accelerators store it; the columns of a vocabulary are taken before that
        head = {**head, "up": {"kernel": head["up"]["rows"].T}}
    params = {**models.drafter_params, "head": head}
    shared = (models.drafter.config, params, target, models.target_params, tokens, None)
    whole_int8 = in_int8(models.drafter.config, target, params, models.target_params)
    config, params = with_draft_vocab(*shared)
    few = models.replace(drafter=models.drafter.clone(config=config), drafter_params=rows_together(params))
    few_int8 = in_int8(config, target, params, models.target_params)
    drafting = DraftSettings(head_candidates=min(CANDIDATES[0], len(tokens)))
    forms = {
        "round": (models, drafting),
        "round, int8 drafter": (models.replace(drafter_params=rows_together(whole_int8)), drafting),
        f"round, {len(tokens):,} tokens": (few, drafting),
        f"round, {len(tokens):,} tokens, int8 drafter": (few.replace(drafter_params=rows_together(few_int8)), drafting),
    }
    copy, copied = copy_stopwatch(scale.copy_megabytes)
    stopwatches = {"copy": copy}
    for name, (models, drafting) in forms.items():
        shape = {"cache_length": slots, "max_new_tokens": 16}
        generator = new_generator(models, DecodeSettings(**shape, drafting=drafting))
        state = state_of(models, generator, 1, slots, max(1, slots - CHAIN - 1))
        stopwatches[name] = round_stopwatch(models, generator, endless(state), DOMINO)
    seconds = decode_latency.median_seconds(stopwatches, scale.repeats)
    bandwidth = rate(copied, seconds.pop("copy"))
    return {
        "copy_bytes_per_second": bandwidth,
        "parts": {name: timed(spent, None, bandwidth) for name, spent in seconds.items()},
        "peak_bytes": peak_bytes(),
    }


def attention(size: str, scale: Scale) -> dict[str, Any]:
    """Attention of a verifying pass in one layer, by the slots of the caches, in every form that the device has.

    Results are compared with those of the einsums, over half of the slots: a kernel that ignores the mask would hardly
    differ over all of them.
    """
    forms = {"einsums": attend}
    kernel = {"tpu": KERNELS["tpu"], "gpu": KERNELS["cuda"]}.get(jax.default_backend())
    if kernel:
        forms["kernel"] = functools.partial(attend_long, kernel.kernel_call)
    if jax.default_backend() == "gpu":
        forms |= {"kernel, one tile of rows": attend_by_one_tile, "jax's decode attention": attend_by_jax}
    config, chain = target_config(size), jnp.tril(jnp.ones((CHAIN, CHAIN), bool))
    copy, copied = copy_stopwatch(scale.copy_megabytes)
    stopwatches, notes, read = {"copy": copy}, {}, {}
    for slots in scale.contexts[1:]:
        shapes = [(1, config.num_attention_heads, CHAIN, config.head_dim)]
        shapes += [(1, config.num_key_value_heads, slots, config.head_dim)] * 2
        q, k, v = (jax.random.normal(jax.random.key(seed), shape, scale.dtype) for seed, shape in enumerate(shapes))
        mask, half = (block_mask(jnp.array([text]), chain, slots) for text in (slots - CHAIN, slots // 2))
        plain = attend(q, k, v, half).astype(jnp.float32)
        for name, form in forms.items():
            label, result = f"{name}, {slots:,} slots", jax.jit(form)(q, k, v, half).astype(jnp.float32)
            notes[label] = f"{float(jnp.linalg.norm(result - plain) / jnp.linalg.norm(plain)):.1e} apart"
            read[label] = k.nbytes + v.nbytes

            def turns(q, k, v, mask, count, form=form):
                return jax.lax.fori_loop(0, count, lambda _, q: form(q, k, v, mask).astype(q.dtype), q)

            stopwatches[label] = stopwatch(jax.jit(turns), q, k, v, mask)
    seconds = decode_latency.median_seconds(stopwatches, scale.repeats)
    bandwidth = rate(copied, seconds.pop("copy"))
    parts = {name: {**timed(spent, read[name], bandwidth), "note": notes[name]} for name, spent in seconds.items()}
    return {
        "copy_bytes_per_second": bandwidth,
        "parts": parts,
        "peak_bytes": peak_bytes(),
    }


def attend_by_one_tile(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """The kernel with all rows of a head in one tile, whose size is a power of two."""
    with mock.patch.object(gpu_attention, "row_tiles", lambda rows: [(0, gpu_attention.MOST_ROWS)]):
        return attend_long(gpu_attention.kernel_call, q, k, v, mask)


def attend_by_jax(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, **choices: Any) -> jax.Array:
    """`attend` of one request's chain by a kernel that comes with jax, which knows lengths and no masks.

    It reads the committed slots; the chain's own rows are joined to them by einsums.
    """
    heads, slots, width = k.shape[1:]
    drafts, rows = mask.shape[1], q.reshape(heads, -1, q.shape[3])
    committed = mask[0].all(axis=0).sum() - 1  # all rows read these, and the slot of the anchor
    shape = {"sm_scale": width**-0.5, "block_h": 64, "block_k": 64, "k_splits": min(32, slots // 512 or 1)}
    lengths = jnp.broadcast_to(committed, heads)
    out, (total, top) = mqa(rows, k[0], v[0], kv_seq_len=lengths, return_residuals=True, **shape | choices)
    near = [jax.lax.dynamic_slice_in_dim(x[0], committed, drafts, axis=1) for x in (k, v)]
    scores = jnp.einsum("kqh,kth->kqt", rows, near[0], preferred_element_type=jnp.float32) * width**-0.5
    chain = jnp.tile(jnp.tril(jnp.ones((drafts, drafts), bool)), (rows.shape[1] // drafts, 1))
    scores = jnp.where(chain, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    weights, before = jnp.exp(scores - new_top[..., None]), total * jnp.exp(top - new_top)
    own = jnp.einsum("kqt,kth->kqh", weights.astype(q.dtype), near[1], preferred_element_type=jnp.float32)
    joined = (own + out * before[..., None]) / (weights.sum(-1) + before)[..., None]
    return joined.astype(q.dtype).reshape(q.shape)


# ------------------------------------------------------------------------------------------------------- training


def train(point: str, size: str, scale: Scale, peak_tflops: float | None) -> dict[str, Any]:
    """The training step at a point of POINTS: seconds, tokens/s, share of the peak, memory.

    With several devices every one of them has at least a row. The memory is that of the whole step alone, which is
    timed first.
    """
    arguments = [f"--size={size}", *POINTS[point], *scale.train]
    arguments += [f"--peak-tflops={peak_tflops}"] if peak_tflops else []
    choices = train_step.parsed(arguments)
    choices.rows = max(choices.rows, jax.device_count())
    wanted, figures, peak = choices.parts, {}, None
    for part in wanted:
        choices.parts = [part]
        figures |= train_step.report(choices, train_step.measure(choices))
        peak = peak or peak_bytes()
    product, flops = product_stopwatch(scale.product)
    seconds = decode_latency.median_seconds({"product": product}, scale.repeats)
    names = ("rows", "length", "anchors", "block", "layers", "head", "dtype", "loss_slice", "devices")
    parts = {
        part: {**figures[part], "ms": figures[part]["seconds"] * 1e3, "mfu": figures[part]["share_of_peak"]}
        for part in wanted
    }
    measured = rate(flops, seconds["product"])
    return {
        "choices": {name: figures[name] for name in names},
        "parts": parts,
        "peak_bytes": peak,
        "flops_per_second": measured,
    }

"""What an evaluation while training needs: its programs compiled from shapes, on the layout that they decode with."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from domino_jax.decoding.generate import Generator
from domino_jax.forecast import compiled, topologies
from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.method.heads.medusa import MedusaConfig
from domino_jax.method.kinds import AnyDrafter
from domino_jax.method.loop import DecodeState, Prompts
from domino_jax.method.pair import Models
from domino_jax.method.sampling import request_keys
from domino_jax.method.settings import BACKBONE, BASELINE, DOMINO, DRAFT
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3
from domino_jax.recipe import builders
from domino_jax.training.console import say_bytes
from domino_jax.training.estimates import device_bytes

# Tokens that a drafted round is taken to emit where rounds are counted: a drafter that is half trained.
ASSUMED_TAU = 3.0
PREFILL = "prefill"
MODES = (BASELINE, BACKBONE, DOMINO)  # of an evaluation; the last one of drafters with a head


def examine_evaluation(
    config, target: Qwen3, drafter: AnyDrafter, mesh: Mesh, state: Any, params: Any
) -> dict[str, Any]:
    """What dry_run.json holds under "evaluation", but for the figures of a known chip (`on_chip`).

    Args:
        mesh, state, params: of the training step; shapes with their shardings.
    """
    layout = builders.evaluation_layout_of(config, target.config, drafter, mesh)
    placed = layout.target_params(params), layout.drafter_params(state.best_params)
    models = Models(target, placed[0], layout.drafter, placed[1])
    generator = builders.evaluation_generator(config, models, ())
    with jax.set_mesh(layout.mesh):
        programs, cache = compile_programs(models, generator, layout.mesh)
    read = round_bytes(models, cache, generator.settings.drafting.head_candidates)
    memory = {mode: compiled.memory(program) for mode, program in programs.items()}
    texts = {mode: program.as_text() for mode, program in programs.items()}
    # The training state and the target, placed for the training step, stay in memory.
    resident = device_bytes((params, state))
    gathers = sum(weight_gathers(text, placed) for mode, text in texts.items() if mode != PREFILL)
    return {
        "mesh": dict(layout.mesh.shape),
        "batch_size": config.eval.batch_size,
        "num_prompts": config.eval.num_prompts,
        "max_new_tokens": config.decode.max_new_tokens,
        "target_bytes_per_chip": device_bytes(placed[0]),
        "drafter_bytes_per_chip": device_bytes(placed[1]),
        "resident_bytes_per_chip": resident,
        "temporary_bytes_per_chip": max(entry["temporary"] for entry in memory.values()),
        "peak_bytes_per_chip": resident + max(entry["peak"] for entry in memory.values()),
        "bytes_per_round": {mode: count for mode, count in read.items() if mode in programs},
        "weight_gathers_in_loop": gathers,
        "collectives": {mode: compiled.collectives(text) for mode, text in texts.items()},
    }


def compile_programs(
    models: Models, generator: Generator, mesh: Mesh
) -> tuple[dict[str, jax.stages.Compiled], DecodeState]:
    """mode → the program of its rounds over the largest caches, and PREFILL, of the longest prompts that fit them; the
    state of both."""
    rows = generator.settings.batch_size
    longest = generator.settings.cache_slots - generator.settings.max_new_tokens - generator.limits.block_rows

    def whole(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.replicated(mesh))

    keys = jax.eval_shape(lambda: request_keys(np.zeros(rows, np.int32), np.zeros(rows, np.int32))).dtype
    numbers, stop_ids = whole((rows,)), whole((1,))
    prompts = Prompts(whole((rows, generator.bucket(longest))), numbers, numbers, whole((rows,), keys))
    start = (models, prompts, stop_ids)

    prefill = functools.partial(generator.prefill, slots=generator.settings.cache_slots)
    state = jax.eval_shape(prefill, *start)
    places = sharding.decode_layout(mesh, state)
    state = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)
    modes = MODES if generator.drafter.has_head else MODES[:2]
    if not generator.drafter.has_backbone:
        modes = (BASELINE, DRAFT)
    made = {PREFILL: jax.jit(prefill, out_shardings=places).lower(*start).compile()}
    for mode in modes:
        program = jax.jit(generator.rounds(mode), donate_argnums=(1,), out_shardings=places)
        made[mode] = program.lower(models, state, stop_ids, whole(()), whole(())).compile()
    return made, state


def round_bytes(models: Models, state: DecodeState, head_candidates: int = 0) -> dict[str, int]:
    """mode → bytes of weights and of full caches that a device reads in a round.

    A drafted round reads the lm_head twice, for the base logits and to verify. The head is read once for each draft
    that it corrects, of its vocabulary matrix the rows of the candidates (0: all of them; a selector has its own
    number), of a token table one row.
    """
    target, drafter = models.target_params, models.drafter_params
    tied = models.target.config.tie_word_embeddings
    read = {name: part for name, part in target.items() if tied or name != "embed_tokens"}
    plain = device_bytes((read, state.target_cache))
    lm_head = read["embed_tokens" if tied else "lm_head"]
    config = models.drafter.config
    if isinstance(config, MedusaConfig):
        return {BASELINE: plain, DRAFT: plain + device_bytes((lm_head, drafter))}
    if isinstance(config, Eagle3Config):  # its layer and its lm_head are read for every draft
        each = device_bytes(({name: part for name, part in drafter.items() if name != "fc"}, state.draft_cache))
        return {BASELINE: plain, DRAFT: plain + device_bytes(drafter["fc"]) + config.num_drafts * each}
    backbone = plain + device_bytes((lm_head, drafter["backbone"], state.draft_cache))
    head = 0
    if config.has_head:
        matrices = {name: part for name, part in drafter["head"].items() if name != "predecessor"}
        vocabulary = device_bytes(matrices["up"])
        count = config.candidates(head_candidates)
        part = min(state.done.shape[0] * count / config.vocab_size, 1) if count else 1
        each = device_bytes(matrices) - round((1 - part) * vocabulary)
        head = (config.block_size - config.suffix_start) * each
    return {BASELINE: plain, BACKBONE: backbone, DOMINO: backbone + head}


def weight_gathers(text: str, params: Any) -> int:
    """How many all-gathers in loop bodies give a whole matrix of the parameters, in either order of its axes."""
    matrices = {tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(params) if len(leaf.shape) == 2}
    gathered = [tuple(sorted(size for size in shape if size > 1)) for shape in compiled.gathers_in_loops(text)]
    return sum(shape in matrices for shape in gathered)


def on_chip(found: dict[str, Any], every: int, step_seconds: float | None, topology: str) -> dict[str, Any]:
    """The figures of a known chip: whether it fits, and seconds by its memory's bandwidth alone.

    Rounds are counted as if every answer had max_new_tokens and a drafted round emitted ASSUMED_TAU tokens. Answers of
    the target alone are counted in "first_seconds" only: the first evaluation of a start makes them, others keep them.
    """
    chip = topologies.chip_of(topology)
    extra = {"assumed_tau": ASSUMED_TAU, "fits": None, "seconds": None, "first_seconds": None, "share_of_time": None}
    if not chip:
        return extra
    tokens = math.ceil(found["num_prompts"] / found["batch_size"]) * found["max_new_tokens"]
    each = {mode: count / chip.bandwidth for mode, count in found["bytes_per_round"].items()}
    seconds = sum(each[mode] * tokens / ASSUMED_TAU for mode in each if mode != BASELINE)
    return extra | {
        "fits": found["peak_bytes_per_chip"] < chip.memory,
        "seconds": seconds,
        "first_seconds": seconds + each[BASELINE] * tokens,
        "share_of_time": seconds / (every * step_seconds) if every and step_seconds else None,
    }


def lines(found: dict[str, Any], chip_bytes: float | None) -> list[str]:
    """What is printed."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    target, drafter, resident, temporary = (
        say_bytes(found[f"{part}_bytes_per_chip"]) for part in ("target", "drafter", "resident", "temporary")
    )
    room = f" of {chip_bytes / 1e9:.0f} GB: {'fits' if found['fits'] else 'DOES NOT FIT'}" if chip_bytes else ""
    moved = ", ".join(f"{mode} {say_bytes(count)}" for mode, count in found["bytes_per_round"].items())
    out = [
        "",
        f"an evaluation: {found['num_prompts']} prompts, {found['batch_size']} at a time, decoded on mesh {mesh}",
        f"  target {target}, drafter {drafter}, of the training {resident}, temporary {temporary}",
        f"  peak {found['peak_bytes_per_chip'] / 1e9:.2f} GB{room}",
        f"  bytes of weights and caches read in a round: {moved}; all-gathers of weights in the loops: "
        f"{found['weight_gathers_in_loop']}",
    ]
    if found["seconds"] is not None:
        share = f", {found['share_of_time']:.1%} of the steps between two" if found["share_of_time"] else ""
        out.append(
            f"  estimate, by bandwidth alone, {found['max_new_tokens']} tokens an answer, τ {found['assumed_tau']:g}: "
            f"{found['seconds']:.0f} s{share}; the first {found['first_seconds']:.0f} s"
        )
    return out

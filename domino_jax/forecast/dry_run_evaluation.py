"""What an evaluation while training needs: its programs compiled from shapes, on the layout that they decode with."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from domino_jax.decoding.generate import Generator
from domino_jax.decoding.settings import BACKBONE, BASELINE, DOMINO, DRAFT
from domino_jax.forecast import compiled
from domino_jax.method.kinds import AnyDrafter
from domino_jax.method.loop import Prompts
from domino_jax.method.pair import Models
from domino_jax.method.sampling import request_keys
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3
from domino_jax.recipe import builders
from domino_jax.training.estimates import device_bytes
from domino_jax.training.evaluation_layout import EvaluationLayout

PREFILL = "prefill"
MODES = (BASELINE, BACKBONE, DOMINO)  # of an evaluation; the last one of drafters with a head


def examine_evaluation(
    config, target: Qwen3, drafter: AnyDrafter, mesh: Mesh, state: Any, params: Any
) -> dict[str, Any]:
    """What dry_run.json holds under "evaluation", without "fits".

    Args:
        mesh, state, params: of the training step; shapes with their shardings.
    """
    layout = EvaluationLayout(mesh, target.config, drafter)
    placed = layout.target_params(params), layout.drafter_params(state.best_params)
    models = Models(target, placed[0], layout.drafter, placed[1])
    generator = builders.evaluation_generator(config, models, ())
    with jax.set_mesh(layout.mesh):
        programs = compile_programs(models, generator, layout.mesh)
    memory = [compiled.memory(program) for program in programs.values()]
    # The training state and the target, placed for the training step, stay in memory.
    resident = device_bytes((params, state))
    return {
        "mesh": dict(layout.mesh.shape),
        "batch_size": config.eval.batch_size,
        "num_prompts": config.eval.num_prompts,
        "target_bytes_per_chip": device_bytes(placed[0]),
        "drafter_bytes_per_chip": device_bytes(placed[1]),
        "resident_bytes_per_chip": resident,
        "temporary_bytes_per_chip": max(entry["temporary"] for entry in memory),
        "peak_bytes_per_chip": resident + max(entry["peak"] for entry in memory),
    }


def compile_programs(models: Models, generator: Generator, mesh: Mesh) -> dict[str, jax.stages.Compiled]:
    """mode → the program of its rounds over the largest caches, and PREFILL, of the longest prompts that fit them."""
    rows = generator.settings.batch_size
    longest = generator.settings.cache_length - generator.settings.max_new_tokens - generator.limits.block_rows

    def whole(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.replicated(mesh))

    keys = jax.eval_shape(lambda: request_keys(np.zeros(rows, np.int32), np.zeros(rows, np.int32))).dtype
    numbers, stop_ids = whole((rows,)), whole((1,))
    prompts = Prompts(whole((rows, generator.bucket(longest))), numbers, numbers, whole((rows,), keys))
    start = (models, prompts, stop_ids)

    prefill = functools.partial(generator.prefill, slots=generator.settings.cache_length)
    state = jax.eval_shape(prefill, *start)
    places = sharding.decode_layout(mesh, state)
    state = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)
    modes = MODES if generator.drafter.has_head else MODES[:2]
    if not generator.drafter.has_backbone:
        modes = (BASELINE, DRAFT)
    programs = {PREFILL: jax.jit(prefill, out_shardings=places).lower(*start).compile()}
    for mode in modes:
        program = jax.jit(generator.rounds(mode), donate_argnums=(1,), out_shardings=places)
        programs[mode] = program.lower(models, state, stop_ids, whole(()), whole(()), whole(())).compile()
    return programs

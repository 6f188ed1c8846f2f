"""Decoding of a tiny random model on meshes, in a process of its own with fake CPU devices (test_decode_meshes.py).

    JAX_NUM_CPU_DEVICES=8 python -m tests.decode_mesh_run '{"name": [2, 4], ...}'

With JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment the devices are those of several
processes. Prints one JSON object: name → {mode: texts, "split": leaves of the parameters that no device holds whole,
"cache": share of the target's cache on one device}.
"""

import json
import os
import sys

import jax

from domino_jax import distributed, sharding
from domino_jax.decoding.models import Models
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.drafter.model import Drafter
from tests.decoding_models import make_generator, random_models, random_prompts, texts

PROMPTS = random_prompts(11)


def laid_out(models: Models, mesh) -> Models:
    config = models.target.config
    place = sharding.decode_placement(mesh, config.num_key_value_heads, config.tie_word_embeddings)

    def put(tree):
        def one(path, leaf):
            return jax.device_put(leaf, place([part.key for part in path], leaf.shape))

        return jax.tree_util.tree_map_with_path(one, tree)

    drafter = Drafter(models.drafter.config, models.drafter.dtype, whole_head=True)
    return Models(models.target, put(models.target_params), drafter, put(models.drafter_params))


def run(data: int, tensor: int, tied: bool = False) -> dict:
    mesh = sharding.make_mesh(data, 1, tensor, devices=jax.devices()[: data * tensor])
    with jax.set_mesh(mesh):
        models = laid_out(random_models(tied=tied), mesh)
        made = make_generator(models, batch_size=8, sampling=SamplingParams(1.0))
        found = {mode: texts(made.generate(PROMPTS, mode)) for mode in ("autoregressive", "domino")}
        state = made.start(PROMPTS[:8], range(8))
        keys = state.target_cache[0][0]
        leaves = jax.tree.leaves((models.target_params, models.drafter_params))
        return {
            **found,
            "split": sum(not leaf.sharding.is_fully_replicated for leaf in leaves),
            "head_split": sum(
                not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(models.drafter_params["head"])
            ),
            "cache": keys.addressable_shards[0].data.size / keys.size,
        }


def main() -> None:
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        distributed.initialize("manual")
    meshes = json.loads(sys.argv[1])
    found = {name: run(*arguments) for name, arguments in meshes.items()}
    print(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main()

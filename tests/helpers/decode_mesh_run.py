"""Decoding of a tiny random model on meshes, in a separate process with fake CPU devices (test_decode_meshes.py).

    JAX_NUM_CPU_DEVICES=8 python -m tests.helpers.decode_mesh_run '{"name": [2, 4], ...}'

With JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment the devices belong to several
processes. Prints one JSON object: name → {mode: texts, "candidates": texts of chains with few candidates, "split":
leaves of the parameters that no device holds whole, "sizes": slots of the caches of plain decoding, "cache": share of
the target's cache on one device}. Two names are for something else: EVALUATION and COMMAND.
"""

import json
import os
import sys

import jax
import numpy as np

from domino_jax import decode
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer
from domino_jax.decoding.evaluate import Evaluation
from domino_jax.decoding.requests import Request
from domino_jax.evals.run import Runner
from domino_jax.method.drafter import Drafter
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.models import sharding
from domino_jax.recipe import cli
from domino_jax.runtime import distributed
from tests.helpers.decoding_models import in_eight_bits, make_generator, random_models, random_prompts, texts

PROMPTS = random_prompts(11)
MODES = ("autoregressive", "domino", "tree")
TREE = TreeSettings(nodes=6, lanes=2, candidates=8)
CANDIDATES = 5  # of the chains in "candidates"
# Modes for the first batch alone, in caches that hold the answers from the start: {name: mode}.
ONE_BATCH = {"candidates": "domino", "tree": "tree"}
EVALUATION = "evaluation"  # the name under which meshes (data, fsdp, tensor) are for the trainer's evaluation
COMMAND = "command"  # the name of arguments of domino_jax.decode, instead of a mesh


def laid_out(models: Pair, mesh) -> Pair:
    config = models.target.config
    place = sharding.decode_placement(mesh, config.num_key_value_heads, config.tie_word_embeddings)

    def put(tree):
        def one(path, leaf):
            return jax.device_put(leaf, place([part.key for part in path], leaf.shape))

        return jax.tree_util.tree_map_with_path(one, tree)

    drafter = Drafter(models.drafter.config, models.drafter.dtype, whole_head=True)
    return Pair(models.target, put(models.target_params), drafter, put(models.drafter_params))


def count_split(tree) -> int:
    return sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(tree))


def run(data: int, tensor: int, tied: bool = False, int8: bool = False, sparse: bool = False) -> dict:
    mesh = sharding.make_mesh(data, 1, tensor, devices=jax.devices()[: data * tensor])
    # Outside of the mesh: they are made once for meshes of different devices.
    models = random_models(tied=tied, sparse=sparse)
    if int8:  # the drafter first, so that it has a copy of a floating lm_head
        models = in_eight_bits(in_eight_bits(models, "drafter"), "target")
    with jax.set_mesh(mesh):
        models = laid_out(models, mesh)
        choices = {"batch_size": 8, "sampling": SamplingParams(1.0)}
        few = make_generator(models, head_candidates=CANDIDATES, tree=TREE, **choices)
        found = {name: texts(few.generate(PROMPTS[:8], mode)) for name, mode in ONE_BATCH.items()}
        # Caches that grow: on one device the test has them whole from the start.
        made = make_generator(models, smallest_cache=16, **choices)
        found |= {mode: texts(made.generate(PROMPTS, mode)) for mode in MODES[:2]}
        state = made.start(PROMPTS[:8], range(8))
        keys = state.target_cache[0][0]
        leaves = jax.tree.leaves((models.target_params, models.drafter_params))
        return {
            **found,
            "split": count_split(leaves),
            "head_split": count_split(models.drafter_params["head"]),
            "sizes": sorted({key[2] for key in made.compiled if key[0] == MODES[0]}),
            "cache": keys.addressable_shards[0].data.size / keys.size,
        }


def evaluate(data: int, fsdp: int, tensor: int, head: str) -> dict:
    """An evaluation of a training run: weights where the trainer has them, over fsdp and tensor."""
    mesh = sharding.make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])
    models = random_models(head=head)

    def put(tree):
        return jax.device_put(tree, sharding.param_shardings(mesh, tree, models.target.config.num_key_value_heads))

    with jax.set_mesh(mesh):
        trained, drafter_params = put(models.target_params), put(models.drafter_params)
        return evaluated(models.replace(target_params=trained, drafter_params=drafter_params))


def evaluated(models: Pair) -> dict:
    """The figures without the time, and the mean of log q, of texts that no target has given, with noise."""
    sampled = {"seed": 3, "sampling": SamplingParams(1.0)}
    pairs = enumerate(zip(PROMPTS[:6], random_prompts(6, 9, 30, vocab=4, seed=1), strict=True))
    answers = [TargetAnswer(str(index), *pair, Request(index, **sampled)) for index, pair in pairs]
    passes = AnswerPasses(answers, DraftSettings(), 2)
    figures = Evaluation(models.replace(drafter_params=None), passes, 3)(models.drafter_params)
    assert figures.pop("eval_seconds") > 0
    return figures | {"log_q": float(np.mean([one.log_q.mean() for one in passes(models)]))}


def command(*arguments: str) -> dict:
    """domino_jax.decode in this process.

    The parts of a round are not timed: that would compile more programs than all of the rest.
    """
    Runner.time_rounds = lambda *arguments: {}
    decode.main(cli.parse(["decode", *arguments], ("config", "output"), ("prompts", "distributed")))
    return {}


def main() -> None:
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        distributed.initialize()
    meshes = json.loads(sys.argv[1])
    kinds = {EVALUATION: lambda *each: [evaluate(*sizes) for sizes in each], COMMAND: command}
    found = {name: (kinds[name] if name in kinds else run)(*sizes) for name, sizes in meshes.items()}
    print(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    main()

#!/usr/bin/env bash
# google-tunix 0.1.7 with jax 0.10.2 and flax 0.12.8 on a CPU (jax 0.12.0.1 does the same), RL with the default rollout
#   engine "vanilla".
# Guess: at temperature 1 each answer is a fresh draw. GRPO asks a prompt num_generations times, and the group's answers
#   differ, also in tunix.rl.agentic, where each one is an episode of its own. Without a seed the draws are not even
#   the same in a second run.
# What happens: every call of generate starts from the same key: that of seed 0, or of the seed in the RolloutConfig.
#   Only the rows of one call differ. The agentic learner makes one call with one row for each episode, so all episodes
#   of a group are the same text. Their rewards are equal, the advantages are zero, and the weights do not change at
#   all. No error and no warning. In the other learners a group is one call, but each call repeats the draws of the one
#   before, and rows of two micro-batches in one place share them.
# Why it matters: an agentic run trains nothing, or nothing but the KL term, while steps, rewards and completion lengths
#   are logged as ever. tunix's own agentic configuration and its agentic Gemma example use this engine, without a seed.
#   A pass@k that is measured by k calls is pass@1. A rollout class that puts a new seed into each call is right.
# Output seen: different answers of 8 to one prompt: one call 8; 8 calls 1, also with seed=7 in the config; one call in
#   micro-batches of 4 4; two calls of 8 together 8. Agentic GRPO, three steps with groups of 8: 1, 1 and 1 different
#   answers, largest change of a weight 0.0; with a new seed in each call 8, 8, 8 and 0.019.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "google-tunix==0.1.7" "jax==0.10.2" "jaxlib==0.10.2" \
    "flax==0.12.8" "qwix==0.1.8" "grain==0.2.18" "datasets==5.2.0" "transformers==5.12.1" "tokenizers==0.22.2" \
    "huggingface_hub==1.33.0" "safetensors==0.7.0"
cat >"$folder/run.py" <<'PY'
import dataclasses
import itertools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.rollout import base_rollout, vanilla_rollout

PAD, BOS, EOS, LETTERS, LENGTH, GROUP = 0, 1, 2, 20, 64, 8
PROMPTS = ["a b c", "d e f", "g h i"]
ROLES = rl_cluster.Role


class Tokenizer:
    """A token for each letter."""

    def encode(self, text, **_):
        return [ord(letter) - ord("a") + 3 for letter in text.split()]

    def decode(self, ids, **_):
        return " ".join(chr(int(token) - 3 + ord("a")) for token in ids if token > EOS)

    def pad_id(self):
        return PAD

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS


class Parser:
    """A chat template that writes the text alone."""

    assistant_token = ""

    def parse(self, messages, **_):
        return " ".join(str(text) for message in messages for text in np.ravel(message["content"]))


@dataclasses.dataclass(frozen=True)
class Config:
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 1


class Model(nnx.Module):
    """Logits from the last token alone, so no cache is needed."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.config = Config()
        self.embed = nnx.Embed(LETTERS + 3, 16, rngs=rngs)
        self.head = nnx.Linear(16, LETTERS + 3, rngs=rngs)

    def __call__(self, tokens, positions, cache=None, attention_mask=None, **_):
        shift = jnp.where(jnp.arange(LETTERS + 3) < EOS, -1e4, 0.0)
        return self.head(self.embed(tokens)) + shift, cache

    def init_cache(self, rows, size, dtype):
        return {"layer_0": {"k": jnp.zeros((rows, size, 1, 1), dtype)}}


class FreshRollout(vanilla_rollout.VanillaRollout):
    """The control: a new seed in each call."""

    seeds = itertools.count()

    def generate(self, prompts, rollout_config, **kwargs):
        rollout_config = dataclasses.replace(rollout_config, seed=next(self.seeds))
        return super().generate(prompts, rollout_config, **kwargs)


def cluster(seed=None):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    return rl_cluster.RLCluster(
        actor=Model(),
        reference=Model(),
        tokenizer=Tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={ROLES.ACTOR: mesh, ROLES.REFERENCE: mesh, ROLES.ROLLOUT: mesh},
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(0.1),
                eval_every_n_steps=100,
                max_steps=len(PROMPTS),
                mini_batch_size=1,
                train_micro_batch_size=1,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_prompt_length=4,
                max_tokens_to_generate=LENGTH,
                kv_cache_size=80,
                temperature=1.0,
                top_p=1.0,
                return_logprobs=True,
                seed=seed,
            ),
        ),
    )


def answers(cluster, rows, calls=1, **kwargs):
    """How many answers differ."""
    return len({text for _ in range(calls) for text in cluster.generate(PROMPTS[:1] * rows, **kwargs).text})


def train(fresh):
    """The different answers of each group, and the largest change of a weight."""
    engine, groups = cluster(), []
    assert type(engine.rollout) is vanilla_rollout.VanillaRollout
    if fresh:
        engine.rollout.__class__ = FreshRollout

    def reward(prompts, completions, **_):
        groups.append(len(set(completions)))
        return [float(text.count("e") + text.count("f")) for text in completions]

    def weights():
        return [np.asarray(w) for w in jax.tree.leaves(nnx.state(engine.actor_trainer.model, nnx.Param))]

    before = weights()
    learner = agentic_grpo_learner.GRPOLearner(
        rl_cluster=engine,
        reward_fns=reward,
        algo_config=agentic_grpo_learner.GRPOConfig(num_generations=GROUP, beta=0.0, max_response_length=LENGTH),
        chat_parser=Parser(),
    )
    learner.train(grain.MapDataset.source(PROMPTS).batch(1).map(lambda text: {"prompts": text}))
    assert engine.actor_trainer.train_steps == len(PROMPTS)
    return groups, max(float(np.abs(a - b).max()) for a, b in zip(before, weights()))


engine = cluster()
seen = {
    "one call": answers(engine, GROUP),
    "8 calls": answers(engine, 1, calls=GROUP),
    "8 calls, seed 7": answers(cluster(seed=7), 1, calls=GROUP),
    "micro_batch_size 4": answers(engine, GROUP, micro_batch_size=4),
    "two calls together": answers(engine, GROUP, calls=2),
}
print(f"different answers of {GROUP} to one prompt: {seen}")
assert seen["one call"] == GROUP, "the control: rows of one call differ"
same, changed = train(fresh=False)
print(f"agentic GRPO: different answers of each group {same}, largest change of a weight {changed:.4f}")
fresh, changed_fresh = train(fresh=True)
print(f"with a new seed in each call: different answers {fresh}, largest change of a weight {changed_fresh:.4f}")
assert min(fresh) > GROUP - 3 and changed_fresh > 1e-3, "the right way"
assert seen["8 calls"] == seen["8 calls, seed 7"] == 1 and seen["two calls together"] == seen["one call"], (
    "calls now draw from different keys"
)
assert seen["micro_batch_size 4"] == 4
assert same == [1] * len(PROMPTS) and changed == 0.0, "the episodes of a group now differ"
PY
JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 "$folder/v/bin/python" -W ignore "$folder/run.py" 2>"$folder/log" || {
    tail -20 "$folder/log"
    exit 1
}

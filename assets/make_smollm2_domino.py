"""Trains the drafter for SmolLM2 on a CPU in many cheap steps.

    python -m assets.make_smollm2_domino --workdir=WORKDIR --start=assets/smollm2_domino --steps=1600 --decay=1600

The step is that of `train`, with two changes that make a row four times as cheap on a CPU. The target's features of a
row never change, so each is computed once and kept in WORKDIR (8 GB). And the loss runs over the tokens that the recipe
drafts among (`decode.draft_vocab`), an eighth of the vocabulary; a label outside of them does not count. The learning
rate is constant, and falls to zero over the last `decay` steps. WORKDIR/drafter gets the averaged weights every 200
steps; to go on after an interruption, start from it.
"""

import argparse
import functools
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from configs import smollm2_135m
from domino_jax.data.pipeline import Batches
from domino_jax.data.token_counts import frequent_tokens
from domino_jax.method import blocks
from domino_jax.method.losses import Labels
from domino_jax.method.optimizer import make_optimizer
from domino_jax.method.pair import Models
from domino_jax.method.state import TrainState
from domino_jax.method.step import drafter_loss, label_blocks, target_pass
from domino_jax.models import sharding
from domino_jax.recipe import builders
from domino_jax.runtime.distributed import say
from domino_jax.weights.draft_vocab import read_order, with_draft_vocab
from domino_jax.weights.drafter import load_drafter, save_drafter
from domino_jax.weights.hf import TOKEN_ORDER
from domino_jax.weights.loading import LoadedTarget, load_target

RATE, LAMBDA, AVERAGE = 4e-3, 0.2, 0.995
PACKS = 4  # of a step: Muon's products take as long as those of one pack
TEXT = 430  # tokens of a pack that are text, roughly: the number of packs follows from it
LOGGED, SAVED = 50, 200


class Packs:
    """The packs of one epoch, each with the target's features float32 [1, S, C·D], kept in a file."""

    def __init__(self, loaded: LoadedTarget, batches: Batches, layers: tuple[int, ...], path: Path):
        with batches.start() as stream:
            count = int(batches.rows.lengths[batches.rows.usable].sum()) // TEXT
            self.packs = [next(stream) for _ in range(count)]
        shape = (count, batches.layout.max_length, len(layers) * loaded.model.config.hidden_size)
        self.features = np.lib.format.open_memmap(path, "r+" if path.exists() else "w+", np.float32, shape)
        self._pass = jax.jit(lambda params, batch: target_pass(loaded.model, params, batch, layers)[0])
        self._params = loaded.params

    def batches(self, seed: int) -> Iterator[tuple[dict, np.ndarray]]:
        """Endless batches of PACKS packs with their features, shuffled again in every epoch."""
        random = np.random.default_rng(seed)
        while True:
            for places in random.permutation(len(self.packs))[: len(self.packs) // PACKS * PACKS].reshape(-1, PACKS):
                some = [self.packs[place] for place in places]
                batch = {name: np.concatenate([pack[name] for pack in some]) for name in some[0]}
                yield batch, np.stack([self._features(place) for place in places])

    def _features(self, place: int) -> np.ndarray:
        if not self.features[place, 0].any():  # a file begins with zeros, which no target gives
            self.features[place] = np.asarray(self._pass(self._params, self.packs[place]))[0]
        return self.features[place]


def make_step(config, vocab: int, tokens: np.ndarray, optimizer: optax.GradientTransformation):
    """The jitted step (state, models, features, batch, rate) → (state, metrics).

    models: with a drafter for `tokens`, int32 [N], alone; its parameters are their columns of the lm_head.
    """
    columns = np.full(vocab, -1)
    columns[tokens] = np.arange(len(tokens))
    settings, num_anchors = builders.loss_settings(config), config.train.num_anchors

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, models: Models, features, batch, rate):
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        anchors = blocks.sample_anchors(key, batch["loss_mask"], batch["row_ids"], num_anchors, batch["documents"])
        drawn = label_blocks(batch, *anchors, models.drafter.config, settings)
        column = jnp.asarray(columns)[drawn.labels.ids]
        weights = (weight * (column >= 0) for weight in drawn.labels[1:])
        drawn = drawn._replace(labels=Labels(jnp.maximum(column, 0), *weights))
        objective = settings.objective(jnp.float32(LAMBDA), drawn.labels.loss_weights.sum())

        def loss(params):
            whole = models.replace(drafter_params={**models.drafter_params, **params})
            return drafter_loss(whole, features, batch, drawn, objective)

        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, moments = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, jax.tree.map(lambda update: rate * update, updates))
        average = jax.tree.map(lambda mean, new: AVERAGE * mean + (1 - AVERAGE) * new, state.ema, params)
        new = state.replace(step=state.step + 1, params=params, opt_state=moments, ema=average)
        return new, objective.metrics(sums)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="a drafter with its token order")
    parser.add_argument("--steps", type=int, default=1_600)
    parser.add_argument("--decay", type=int, default=1_600)
    options = parser.parse_args()
    config, mesh = smollm2_135m.get_config(), sharding.make_mesh(1, 1, 1)
    options.workdir.mkdir(parents=True, exist_ok=True)
    with jax.set_mesh(mesh):
        loaded = load_target(config.target.path, config.target.dtype)
        batches = builders.batches_of(config, config.data.train, loaded, epath.Path(options.workdir), mesh, say)
        shape, params = load_drafter(options.start, loaded.model.config, np.float32)
        packs = Packs(loaded, batches, shape.target_layer_ids, options.workdir / "features.npy")
        train(config, loaded, packs, (shape, params), options)


def train(config, loaded: LoadedTarget, packs: Packs, start: tuple, options) -> None:
    """The steps, each logged as a mean of LOGGED, and the drafter of every SAVED."""
    (shape, whole), vocab = start, loaded.model.config.vocab_size
    order = read_order(options.start, vocab)
    tokens = frequent_tokens(order, vocab, config.decode.draft_vocab, always=loaded.stop_ids)
    small, params = with_draft_vocab(shape, whole, loaded.model.config, loaded.params, tokens, None)
    models = Models(loaded.model, loaded.params, builders.drafter_of(small, config), {"lm_head": params.pop("lm_head")})
    optimizer, params = make_optimizer(config.train.optimizer), jax.tree.map(jnp.asarray, params)
    step, zeros = make_step(config, vocab, tokens, optimizer), [jnp.int32(0) for _ in range(3)]
    state = TrainState(zeros[0], params, optimizer.init(params), jax.tree.map(jnp.copy, params), *zeros[1:])
    up = np.array(whole["head"]["up"]["kernel"])
    began, logged = time.time(), []
    for done, (batch, features) in zip(range(1, options.steps + 1), packs.batches(config.seed), strict=False):
        rate = RATE * min(1.0, done / LOGGED, (options.steps - done) / max(options.decay, 1))
        state, metrics = step(state, models, features, batch, jnp.float32(rate))
        logged.append(metrics)
        if done % LOGGED == 0:
            means = "  ".join(f"{name} {np.mean([one[name] for one in logged]):.3f}" for name in ("loss", "accept_len"))
            say(f"step {done}/{options.steps}  {means}  {(time.time() - began) / done:.2f} s a step")
            logged.clear()
        if done % SAVED == 0 or done == options.steps:
            average = jax.tree.map(np.asarray, state.ema)
            up[:, tokens] = average["head"]["up"]["kernel"]
            average = {**average, "head": {**average["head"], "up": {"kernel": up}}}
            save_drafter(options.workdir / "drafter", shape, average)
            (options.workdir / "drafter" / TOKEN_ORDER).write_bytes((options.start / TOKEN_ORDER).read_bytes())


if __name__ == "__main__":
    main()

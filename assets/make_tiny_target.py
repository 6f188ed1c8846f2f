"""Train the tiny target of assets/tiny_qwen3 on the corpus of make_corpus.py.

    python -m assets.make_tiny_target --workdir=/tmp/tiny_target --output=assets/tiny_qwen3 --minutes=80
    python -m assets.make_tiny_target --workdir=DIR --output=FOLDER --minutes=20 --layers=12 --width=96

A Qwen3 decoder, deep and narrow, trained on the CPU in float32 for a given time; --layers and --width make targets of
other sizes. --output holds the tokenizer (make_corpus.py). The learning rate follows the clock, not the step, so that a
busy machine costs tokens and never an unfinished schedule. The state is saved every few minutes; the same command
resumes.
"""

import argparse
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import PreTrainedTokenizerFast

from assets.target_folder import save_target
from assets.tiny_answers import KINDS
from domino_jax.models.qwen3 import Qwen3, Qwen3Config

# Conversations are padded to the next of these lengths. Measured on 2 cores, 24 layers x 128 wide: rows of 144 run at
# 2,850 tokens/s, packed rows of 320 at 2,000, because attention grows with the row.
BUCKETS = (96, 120, 144, 168, 192, 232, 304)
PROMPT_WEIGHT = 0.1  # loss weight of prompt tokens; answers count 1
WARM_UP = 0.02  # part of the time
INIT_STD = 0.06


HEAD_DIM = 32


def model_config(vocab_size: int, layers: int = 24, width: int = 128) -> Qwen3Config:
    """Deep and narrow, because on a CPU nine rows then cost only about two single ones.

    width: a multiple of HEAD_DIM, with half as many key/value heads as heads where that divides them, else one.
    """
    heads = width // HEAD_DIM
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=1 if heads % 2 else heads // 2,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        attention_bias=False,
        max_position_embeddings=1024,
    )


def batches(data: dict, tokens: int, seed: int):
    """One pass over the conversations, in random batches of one bucket each: (ids [B, T], loss weights [B, T])."""
    random_ = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(data["length"])[:-1]])
    order = random_.permutation(len(starts))
    bucket = np.searchsorted(BUCKETS, data["length"][order])
    groups = []
    for index, length in enumerate(BUCKETS):
        members = order[bucket == index]
        rows = tokens // length
        groups += [(length, members[i : i + rows]) for i in range(0, len(members) - rows + 1, rows)]
    for i in random_.permutation(len(groups)):
        yield padded(data, starts, *groups[i])


def padded(data: dict, starts: np.ndarray, length: int, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids = np.zeros((len(members), length), np.int32)
    weights = np.zeros((len(members), length), np.float32)
    for row, member in enumerate(members):
        size, prompt = data["length"][member], data["prompt"][member]
        ids[row, :size] = data["ids"][starts[member] : starts[member] + size]
        weights[row, 1:prompt] = PROMPT_WEIGHT
        weights[row, prompt:size] = 1.0
    return ids, weights


def initial(model: Qwen3, depth: int) -> dict:
    """Normal weights; what writes into the residual stream is scaled down with the depth."""
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    out = []
    for key, (path, leaf) in zip(keys, leaves, strict=True):
        name = jax.tree_util.keystr(path)
        std = INIT_STD / (2 * depth) ** 0.5 if "o_proj" in name or "down_proj" in name else INIT_STD
        out.append(leaf if leaf.ndim < 2 else std * jax.random.normal(key, leaf.shape))
    return jax.tree_util.tree_unflatten(tree, out)


def is_embedding(path) -> bool:
    return "embed_tokens" in jax.tree_util.keystr(path)


def make_optimizer(name: str) -> optax.GradientTransformation:
    """Scaled by the learning rate outside, because that follows the clock. Norm weights do not decay."""
    decay = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    if name == "adamw":
        update = optax.adamw(1.0, b1=0.9, b2=0.98, weight_decay=0.1, mask=decay)
    else:

        def hidden_matrices(params):
            numbers = optax.contrib.MuonDimensionNumbers()
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: numbers if leaf.ndim == 2 and not is_embedding(path) else None, params
            )

        update = optax.contrib.muon(
            1.0,
            beta=0.95,
            weight_decay=0.1,
            weight_decay_mask=decay,
            adam_b2=0.98,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=hidden_matrices,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), update)


def make_functions(model: Qwen3, optimizer: optax.GradientTransformation):
    """(gradients of one batch, update of the parameters, evaluation of one batch), each jitted."""

    def losses(params, ids, weights):
        logits = model.apply({"params": params}, ids)["logits"][:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]), logits, weights[:, 1:]

    def loss(params, ids, weights):
        each, _, weights = losses(params, ids, weights)
        return jnp.sum(each * weights) / jnp.sum(weights), jnp.sum(each * (weights == 1.0)) / jnp.sum(weights == 1.0)

    @jax.jit
    def evaluate(params, ids, weights):
        each, logits, weights = losses(params, ids, weights)
        answer = weights == 1.0
        right = (jnp.argmax(logits, -1) == ids[:, 1:]) | ~answer
        return jnp.sum(each * answer), jnp.sum(answer), jnp.all(right, axis=1)

    def update(params, state, gradients, rate):
        changes, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, c: p + rate * c, params, changes), state

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), jax.jit(update, donate_argnums=(0, 1)), evaluate


def held_out(evaluate, params, data: dict, tokens: int) -> str:
    """Loss per answer token, and by kind the share of answers whose every token is the model's first choice.

    Those are the answers that greedy decoding gives exactly as the corpus has them.
    """
    starts = np.concatenate([[0], np.cumsum(data["length"])[:-1]])
    bucket = np.searchsorted(BUCKETS, data["length"])
    total, count, right = 0.0, 0, np.zeros(len(starts), bool)
    for index, length in enumerate(BUCKETS):
        members, rows = np.flatnonzero(bucket == index), tokens // length
        for i in range(0, len(members), rows):
            some = members[i : i + rows]
            ids, weights = padded(data, starts, length, some)
            ids, weights = (np.pad(a, ((0, rows - len(some)), (0, 0))) for a in (ids, weights))
            part, n, good = jax.device_get(evaluate(params, ids, weights))
            total, count, right[some] = total + float(part), count + int(n), good[: len(some)]
    by_kind = " ".join(f"{kind} {right[data['kind'] == i].mean():.0%}" for i, kind in enumerate(KINDS))
    return f"held out: answer loss {total / count:.4f}, all tokens right {right.mean():.1%} ({by_kind})"


def save(path: pathlib.Path, trees, counters: tuple) -> None:
    """Leaves in tree order and the counters, written beside the old file and then moved over it."""
    leaves = {f"leaf_{i}": leaf for i, leaf in enumerate(jax.device_get(jax.tree.leaves(trees)))}
    fresh = path.with_suffix(".new.npz")
    np.savez(fresh, counters=np.array(counters, np.float64), **leaves)
    fresh.replace(path)


def restore(path: pathlib.Path, trees) -> tuple:
    """What `save` wrote, in the shape of `trees`."""
    tree = jax.tree.structure(trees)
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"leaf_{i}"]) for i in range(tree.num_leaves)]
        elapsed, *whole = file["counters"].tolist()
    return jax.tree.unflatten(tree, leaves), (elapsed, *map(int, whole))


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak, by the part of the time that has passed."""
    if progress < WARM_UP:
        return peak * max(progress / WARM_UP, 0.01)
    return peak * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * min((progress - WARM_UP) / (1 - WARM_UP), 1.0))))


def train(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Trains until args.minutes have passed, resumed time included; saves and writes the folder on the way."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.output)
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    token_ids = {"bos_token_id": None, "eos_token_id": stops, "pad_token_id": tokenizer.pad_token_id}
    config = model_config(len(tokenizer), args.layers, args.width)
    model, optimizer = Qwen3(config), make_optimizer(args.optimizer)
    gradients, update, evaluate = make_functions(model, optimizer)
    corpus, validation = (dict(np.load(args.workdir / f"{name}.npz")) for name in ("corpus", "heldout"))
    saved = args.workdir / "state.npz"
    params = initial(model, config.num_hidden_layers)
    state, elapsed, step, seen, epoch = optimizer.init(params), 0.0, 0, 0, 0
    if saved.exists():
        (params, state), (elapsed, step, seen, epoch) = restore(saved, (params, state))
    say(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, {args}")

    limit, started = args.minutes * 60, time.monotonic() - elapsed
    next_save = elapsed + args.checkpoint_minutes * 60
    recent: list = []
    while elapsed < limit:
        epoch += 1
        for ids, weights in batches(corpus, args.tokens, epoch):
            (_, answer_loss), slope = gradients(params, ids, weights)
            params, state = update(params, state, slope, learning_rate(elapsed / limit, args.rate))
            recent.append(answer_loss)
            step, seen, elapsed = step + 1, seen + int((weights > 0).sum()), time.monotonic() - started
            if step % 20 == 0:
                mean = float(np.mean(jax.device_get(recent)))
                pace = f"minute {elapsed / 60:.1f} tokens {seen:,} ({seen / elapsed:.0f}/s)"
                say(f"step {step} {pace} answer loss {mean:.4f}")
                recent = []
            if elapsed >= min(next_save, limit):
                next_save = elapsed + args.checkpoint_minutes * 60
                say(held_out(evaluate, params, validation, args.tokens))
                save(saved, (params, state), (elapsed, step, seen, epoch))
                save_target(args.output, config, params, "bfloat16", token_ids=token_ids)
            if elapsed >= limit:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--tokens", type=int, default=2400, help="tokens of one batch, padding included")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--checkpoint_minutes", type=float, default=10)
    args = parser.parse_args()
    if args.width < HEAD_DIM or args.width % HEAD_DIM:
        parser.error(f"--width={args.width} is no multiple of {HEAD_DIM}, the width of an attention head")
    with (args.workdir / "log.txt").open("a", buffering=1) as log:

        def say(text: str) -> None:
            log.write(text + "\n")
            print(text, flush=True)

        train(args, say)


if __name__ == "__main__":
    main()

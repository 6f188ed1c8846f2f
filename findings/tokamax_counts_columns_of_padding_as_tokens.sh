#!/usr/bin/env bash
# tokamax 0.0.17 with jax 0.12.0.1 on a CPU, linear_softmax_cross_entropy_loss. Both need Python 3.12 or newer:
#   python3.13 or python3.12 of the PATH, or of pyenv.
# Guess: implementation="chunked_xla" gives the loss of implementation="xla" and needs less memory, as the text of the
#   function says. It is plain jax and runs everywhere.
# What happens: it fills the vocabulary up to a multiple of 2048 with columns of zeros, and their logits, which are 0,
#   are counted in the sum of the softmax. The model has up to 2047 tokens more than it has, in the loss and in the
#   gradient. Only a vocabulary that is a multiple of 2048 is right, as that of the package's tests is. The TPU kernel
#   of the same function leaves such columns out, by its source.
# Why it matters: how wrong it is depends on where the logits are. A softmax does not see a shift of all logits, so they
#   may be anywhere, and below zero the columns of padding get nearly all of the probability. The losses of two models
#   can no longer be compared, a perplexity is wrong, and a model that is trained further first learns to move its
#   logits up. A small vocabulary is wrong from the first step. Use "xla", or a loop of it over parts of the rows.
# Output seen: loss of xla and of chunked_xla: 2048 tokens 7.844 and 7.844, with all logits 10 lower the same; 65 tokens
#   4.152 and 7.435, 10 lower 4.152 and 17.397; 32,000 tokens 10.326 and 10.346, 10 lower 10.326 and 16.437; 151,936
#   tokens 11.991 and 12.000, 10 lower 11.991 and 17.319. Error of the gradient of the inputs, 10 lower: 17 to 18 times
#   its size.
set -euo pipefail
for name in python3.13 python3.12; do
    python=$(command -v "$name" || true)
    "${python:-false}" --version >/dev/null 2>&1 && break
    python=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${name#python}".*/bin/"$name" 2>/dev/null | head -1 || true)
    [ -n "$python" ] && break
done
[ -n "$python" ] || { echo "Install Python 3.12 or 3.13, which tokamax 0.0.17 needs."; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "tokamax==0.0.17" "qwix==0.1.8" "flax==0.12.12" \
    "jax==0.12.0.1" "jaxlib==0.12.0.1"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import tokamax

ROWS, SIZE, BLOCK = 16, 32, 2048


def losses(vocabulary, shift):
    """Losses of xla and chunked_xla, the loss with columns of zeros in the vocabulary, and the gradients' error."""
    keys = jax.random.split(jax.random.key(vocabulary), 3)
    # The first number of each row is 1, so the first row of the weights is added to all logits.
    x = jax.random.normal(keys[0], (ROWS, SIZE)).at[:, 0].set(1.0)
    weights = (jax.random.normal(keys[1], (SIZE, vocabulary)) / 10).at[0].set(shift)
    labels = jax.random.randint(keys[2], (ROWS,), 0, vocabulary)

    def loss(x, implementation):
        return tokamax.linear_softmax_cross_entropy_loss(
            x, labels, weights, reduction="mean", implementation=implementation
        )

    def by_hand(x, columns):
        logits = jnp.dot(x, jnp.pad(weights, ((0, 0), (0, columns))), precision="highest")
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()

    plain, right = jax.value_and_grad(loss)(x, "xla")
    chunked, gradient = jax.value_and_grad(loss)(x, "chunked_xla")
    assert abs(plain - by_hand(x, 0)) < 1e-3
    error = jnp.linalg.norm(gradient - right) / jnp.linalg.norm(right)
    return float(plain), float(chunked), float(by_hand(x, -vocabulary % BLOCK)), float(error)


for vocabulary in (2048, 65, 32000, 151936):
    for shift in (0.0, -10.0):
        plain, chunked, padded, error = losses(vocabulary, shift)
        print(f"{vocabulary} tokens, all logits {shift:+.0f}: xla {plain:.3f}, chunked_xla {chunked:.3f}", end=", ")
        print(f"with {-vocabulary % BLOCK} columns of zeros {padded:.3f}; error of the gradient {error:.3f}")
        assert abs(chunked - padded) < 1e-3, "chunked_xla now counts other columns"
        if vocabulary % BLOCK == 0:
            assert abs(chunked - plain) < 1e-3 and error < 1e-3
        else:
            assert chunked - plain > (4.0 if shift else 0.005)
            assert not shift or error > 1.0
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py" 2>"$folder/log" || {
    cat "$folder/log"
    exit 1
}

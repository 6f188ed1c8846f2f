#!/usr/bin/env bash
# jax 0.12.0.1, jax.vjp(f, table) and with_refs, which adds the gradient of an indexed read into a jax.new_ref. This
#   jax needs Python 3.12 or newer: python3.13 or python3.12 of the PATH, or of pyenv.
# Guess: with_refs gives the gradient that jax.grad gives. Rows that are out of bounds give nothing, in both.
# What happens: the read turns a negative index i of a table with n rows into i + n, and what is still negative is out
#   of bounds. The addition into the ref gets i + n, takes it for an index of the user, and adds n once more. Between
#   -2n and -n - 1, the gradient goes to a row that was never read. Outside of that, and with clip in place of fill,
#   both agree.
# Why it matters: with 65 characters as vocabulary and -100 as the index of padding, the values are right (padding
#   reads zeros) and row 30 is trained by all padding. A check of one against the other with real tokens sees nothing.
# Output seen: rows with a gradient 3 with jax.grad; 3 and 30 with a ref, where row 30 gets all 6 of the padding.
set -euo pipefail
for name in python3.13 python3.12; do
    python=$(command -v "$name" || true)
    "${python:-false}" --version >/dev/null 2>&1 && break
    python=$(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${name#python}".*/bin/"$name" 2>/dev/null | head -1 || true)
    [ -n "$python" ] && break
done
[ -n "$python" ] || { echo "Install Python 3.12 or 3.13, which jax 0.12.0.1 needs."; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.12.0.1" "jaxlib==0.12.0.1"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp

ROWS, PADDING = 65, -100


def gradients(indices, mode):
    """The rows of a table that get a gradient, with its sum, from jax.grad and from a ref."""

    def read(table):
        return table.at[jnp.array(indices)].get(mode=mode, fill_value=0.0).sum()

    table = jnp.ones((ROWS, 2))
    plain, with_ref = jax.grad(read)(table), jax.new_ref(jnp.zeros_like(table))
    value, vjp = jax.vjp(read, table)
    vjp.with_refs(with_ref)(jnp.ones_like(value))
    assert value == plain.sum()  # of a table of ones
    sums = plain.sum(axis=1), with_ref[...].sum(axis=1)
    return [{int(row): float(rows[row]) for row in jnp.nonzero(rows)[0]} for rows in sums]


for name, indices, mode in (
    ("tokens", [3, 3, 64, -1], "fill"),
    ("too high", [3, 65, 100], "fill"),
    ("far too low", [3, -131, -1000], "fill"),
    ("padding, clipped", [3, PADDING], "clip"),
    ("padding", [3, PADDING, PADDING, PADDING], "fill"),
):
    plain, with_ref = gradients(indices, mode)
    print(f"{name} {indices}, {mode}: jax.grad {plain}, with a ref {with_ref}")
    if name == "padding":
        assert plain == {3: 2.0}
        assert with_ref != plain, "a ref now gets the gradient of jax.grad"
        assert with_ref[PADDING + 2 * ROWS] == 6.0
    else:
        assert with_ref == plain
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"

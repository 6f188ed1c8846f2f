#!/usr/bin/env bash
# jax 0.10.2 on a CPU, conversions to the MX types float8_e8m0fnu (a block's scale) and float4_e2m1fn.
# Guess: a compiled program gives the same bits whether numbers come as an argument or are a constant of the program, as
#   float8_e4m3fn and float8_e5m2 do for NaN, infinities, overflow and negative zero.
# What happens: XLA folds conversions of a constant by other rules than those that it compiles. As a scale, 0 and -3 are
#   NaN when computed (as in ml_dtypes), but 2**-127 and 4 when folded; NaN becomes infinity. As float4, infinity is 6
#   when computed and 0 when folded. The program that JAX hands over is the same conversion each time.
# Why it matters: the edges of a quantiser (a block of zeros, an overflow, a negative or undefined scale) are where its
#   tests look. A test that closes over its array passes on values that no run gives, and scales that are computed from
#   closed-over weights lose the NaN that would have shown the fault.
# Output seen: e8m0 of 0, -3, nan, inf, 3: computed nan nan nan nan 4; folded 5.9e-39 4 inf inf 4. float4 of inf, -inf,
#   100: computed 6 -6 6; folded 0 -0 6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" "ml_dtypes==0.6.0" \
    "numpy==2.4.6"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

inf, nan = np.inf, np.nan
EDGES = np.array([0, -3, nan, inf, -inf, 100, 3, 1e9, -0.0], np.float32)


def both(kind, values):
    """The values through `kind` and back: as an argument, as a constant of the compiled program, and by ml_dtypes."""

    def there_and_back(x):
        return x.astype(kind).astype(jnp.float32)

    computed = jax.jit(there_and_back)(values)
    constant = jax.jit(lambda: there_and_back(jnp.asarray(values)))
    assert constant.lower().as_text().count("stablehlo.convert") == 2, "JAX itself now folds the conversions"
    with np.errstate(all="ignore"):
        return np.asarray(computed), np.asarray(constant()), values.astype(kind).astype(np.float32)


for kind in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu, jnp.float4_e2m1fn):
    computed, folded, by_numpy = both(kind, EDGES)
    print(np.dtype(kind).name, "computed", computed, "folded", folded)
    np.testing.assert_array_equal(computed, by_numpy)
    if kind in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        np.testing.assert_array_equal(folded, computed)  # the control: here both agree
    elif kind is jnp.float8_e8m0fnu:
        assert np.isnan(computed[:3]).all()
        assert not np.isnan(folded[:3]).any(), "XLA now folds conversions to e8m0 as it computes them"
        assert folded[1] == 4, "the sign of a folded scale is no longer lost"
    else:
        assert computed[3] == 6 and folded[3] == 0, "XLA now folds conversions to float4 as it computes them"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"

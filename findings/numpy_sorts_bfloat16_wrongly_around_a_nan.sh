#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0, the types that JAX arrays have in numpy: bfloat16, float8.
# Guess: np.sort puts NaN last for these types as for float32 and float16, or at worst only the NaN's own place is off.
# What happens: a NaN is a wall. The comparison that ml_dtypes gives to numpy says "not less" on both sides of it, so
#   numbers around it are not put in order: np.sort's result is not sorted, the last place of np.argsort is not the
#   largest number, np.unique returns numbers twice, and np.isin says that members of an array are not in it. Nothing
#   warns. isnan, max, argmax and nanmax are right, so checks with those pass.
# Why it matters: ranks, pruning thresholds and differences of sets are computed with numpy from downloaded bfloat16
#   arrays. One NaN (a masked place, the mean of an empty group) changes the answer for ordinary numbers. Cast to
#   float32 first.
# Output seen: 297 numbers, 100 distinct, and 3 NaN: bfloat16: 147 members found, 106 distinct, 2 neighbours of the
#   sorted numbers in the wrong order, the last is not the largest. float32 and float16: 297, 100, 0, it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "numpy==2.4.6" "ml_dtypes==0.6.0" \
    "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

values = np.repeat(np.arange(100, dtype=np.float32), 3)
values = np.random.default_rng(13).permutation(values)
values[[7, 100, 250]] = np.nan
numbers = values[~np.isnan(values)]


def disorder(array):
    array = np.asarray(array).astype(np.float32)
    return int((np.diff(array[~np.isnan(array)]) < 0).sum())


def measure(array):
    clean = array[~np.isnan(array)]
    distinct = np.unique(array).astype(np.float32)
    last = array[np.argsort(array)].astype(np.float32)
    return {
        "pairs in the wrong order": disorder(np.sort(array)),
        "members found": int(np.isin(clean, array).sum()),
        "distinct": int((~np.isnan(distinct)).sum()),
        "largest is last": float(last[~np.isnan(last)][-1]) == 99,
    }


right = {"pairs in the wrong order": 0, "members found": len(numbers), "distinct": 100, "largest is last": True}
seen = {}
for kind in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
    array = values.astype(kind)
    seen[kind] = measure(array)
    print(np.dtype(kind).name, seen[kind])
    if kind is not ml_dtypes.float8_e5m2:
        assert measure(numbers.astype(kind)) == right, "the control: without NaN all is right"
assert seen[np.float32] == seen[np.float16] == right, "the control: numpy's own types are right"
assert disorder(jnp.sort(jnp.asarray(values, jnp.bfloat16))) == 0, "the control: jax.numpy sorts it"
assert np.argmax(values.astype(ml_dtypes.bfloat16)) == 7 and np.nanmax(values.astype(ml_dtypes.bfloat16)) == 99
wrong = seen[ml_dtypes.bfloat16]
assert wrong["pairs in the wrong order"] > 0, "numpy now sorts bfloat16 around a NaN"
assert wrong["members found"] < len(numbers), "np.isin is now right for bfloat16 with a NaN"
assert not wrong["largest is last"], "np.argsort is now right for bfloat16 with a NaN"
assert wrong["distinct"] > 100, "np.unique is now right for bfloat16 with a NaN"
assert seen[ml_dtypes.float8_e5m2]["pairs in the wrong order"] > 0, "numpy now sorts float8 around a NaN"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"

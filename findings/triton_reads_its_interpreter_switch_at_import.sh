#!/usr/bin/env bash
# triton 3.9.0 on a machine without a GPU.
# Guess: TRITON_INTERPRET is read when a kernel is started, so setting it anywhere before the first launch is enough.
# What happens: it is read when a function is decorated, and triton.language's own functions are decorated when triton
#   is imported. With the variable set after the import, a kernel that uses such a function (tl.rand here) fails,
#   while one that uses none of them runs, so a short trial says that all is well.
# Why it matters: a test of a GPU engine on a CPU sets the variable in a fixture, and fails far away from the reason.
# Output seen: set before the import: ran; set after it: a kernel without tl.rand ran, one with it ended in an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "triton==3.9.0" "torch==2.13.0" numpy
cat >"$folder/run.py" <<'PY'
import os
import sys

if sys.argv[1] == "before":
    os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl

os.environ["TRITON_INTERPRET"] = "1"


@triton.jit
def plain(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, i)


@triton.jit
def drawn(x, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(x + i, tl.rand(0, i))


for kernel in (plain, drawn):
    try:
        kernel[(1,)](torch.zeros(4), 4)
        print(sys.argv[1], kernel.__name__, "ran")
    except Exception as error:
        print(sys.argv[1], kernel.__name__, "failed:", type(error).__name__)
PY
"$folder/v/bin/python" "$folder/run.py" before | tee "$folder/before"
"$folder/v/bin/python" "$folder/run.py" after | tee "$folder/after"
grep -q "before drawn ran" "$folder/before"
grep -q "after plain ran" "$folder/after"
grep -q "after drawn failed" "$folder/after"

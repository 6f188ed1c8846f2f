#!/usr/bin/env bash
# on_tpu.sh COMMAND...: what runs on every machine of a Cloud TPU (launch.tpu_vm, launch.queued_resources).
# Makes the Python environment once, then runs the command, again after exit code 42 (saved on SIGTERM) and after death
# by a signal; all machines of a pod do the same and meet again. DOMINO_MAX_RESTARTS bounds it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${DOMINO_VENV:-${HOME:-/root}/domino-venv}
if [ ! -e "$venv/ready" ]; then
  # uv brings a Python of its own: the images' is too old.
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --clear --python 3.12 "$venv"
  python3 -m uv pip install --quiet --python "$venv/bin/python" -r requirements.txt 'jax[tpu]'
  touch "$venv/ready"
fi
export PATH="$venv/bin:$PATH"
# The machines of a pod are not ready in the same minute.
export DOMINO_INIT_SECONDS=${DOMINO_INIT_SECONDS:-600}

left=${DOMINO_MAX_RESTARTS:-50}
while true; do
  code=0
  "$@" || code=$?
  if ! [[ $code -eq 42 || $code -gt 130 ]] || [ "$left" -le 0 ]; then
    exit "$code"
  fi
  left=$((left - 1))
  echo "on_tpu.sh: exit code $code, starting again; $left starts left" >&2
done

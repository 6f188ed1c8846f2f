#!/usr/bin/env bash
# on_tpu.sh COMMAND...: runs a command on a machine of a Cloud TPU, in a Python environment that it makes before.
# launch.host starts it on every machine, one at a time, and starts it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${DOMINO_VENV:-${HOME:-/root}/domino-venv}
# Made again when one of these changes.
wanted=$(cat requirements.txt requirements-gcs.txt requirements-tpu.txt launch/on_tpu.sh | sha256sum)

# uv brings the Python that the tests ran with: the images' may be too old. It goes into a separate folder, because pip
# refuses to install into a Python that the distribution manages (Ubuntu 24.04), and python3-venv may not be there. The
# chain stops at the first failure.
set_up() {
  python3 -m pip install --quiet --upgrade --target "$venv-uv" uv &&
    "$venv-uv/bin/uv" venv --quiet --clear --python 3.11 "$venv" &&
    "$venv-uv/bin/uv" pip install --quiet --python "$venv/bin/python" -r requirements-tpu.txt -r requirements-gcs.txt &&
    echo "$wanted" > "$venv/ready"
}

if [ "$(cat "$venv/ready" 2> /dev/null)" != "$wanted" ]; then
  for pause in 5 20 60 120 end; do
    if set_up; then break; fi
    if [ "$pause" = end ]; then
      echo "on_tpu.sh: the Python environment could not be made" >&2
      exit 2
    fi
    echo "on_tpu.sh: no Python environment yet, next try in $pause s" >&2
    sleep "$pause"
  done
fi
export PATH="$venv/bin:$PATH"
exec "$@"

#!/usr/bin/env bash
# Prints the path of a Python interpreter that has everything this checkout needs;
# builds it first where it is missing. Progress goes to standard error.
#
# Two layers, both outside the checkout, under $NIGHTJAR_CACHE
# (default: ~/.cache/sglang-nightjar):
#   venv-HASH      SGLang and the developers' tools, about 11 GB, built once for
#                  one pair of scripts/requirements*.txt and one Python version;
#   checkout-HASH  a thin venv for this checkout and its setup.py, which sees the
#                  first and has this checkout installed with `pip install -e`.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${NIGHTJAR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-nightjar}
requirements=$root/scripts/requirements.txt
demo=$root/scripts/requirements-demo.txt
python=${PYTHON:-python3}

say() { echo "[nightjar] $*" >&2; }
die() { say "error: $*"; exit 1; }
digest() { sha256sum | cut -c1-12; }

command -v "$python" >/dev/null || die "no '$python' on PATH; install Python 3.10 to 3.12 or set PYTHON"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
  3.10 | 3.11 | 3.12) ;;
  *) die "Python $version is not supported by the pinned SGLang; set PYTHON to a 3.10 to 3.12 interpreter" ;;
esac

base=$cache/venv-$( (echo "$version"; cat "$requirements" "$demo") | digest)
thin=$cache/checkout-$( (echo "$base"; echo "$root"; cat "$root/setup.py") | digest)

if [ ! -e "$thin/.complete" ]; then
  mkdir -p "$cache"
  exec 9>"$cache/.lock"
  flock 9 # a second script waits here for the first one's venv
fi

if [ ! -e "$base/.complete" ]; then
  say "installing SGLang into $base (once; about 11 GB and 7 minutes)"
  free_kb=$(df -Pk "$cache" | awk 'NR == 2 { print $4 }')
  [ "$free_kb" -gt $((14 * 1024 * 1024)) ] ||
    die "$cache has $((free_kb / 1024 / 1024)) GiB free and the installation needs 14; set NIGHTJAR_CACHE to a larger disk"
  rm -rf "$base"
  "$python" -m venv "$base" >&2
  "$base/bin/python" -m pip install --quiet --upgrade pip setuptools wheel >&2
  "$base/bin/python" -m pip install --progress-bar on --requirement "$requirements" >&2
  "$base/bin/python" -m pip install --progress-bar on --no-deps --requirement "$demo" >&2
  touch "$base/.complete"
fi

if [ ! -e "$thin/.complete" ]; then
  say "installing this checkout into $thin"
  rm -rf "$thin"
  "$base/bin/python" -m venv --without-pip "$thin" >&2
  echo "import site; site.addsitedir('$base/lib/python$version/site-packages')" \
    >"$thin/lib/python$version/site-packages/_nightjar_base.pth"
  "$base/bin/python" -m pip --python "$thin/bin/python" install --quiet --no-deps --no-build-isolation --editable "$root" >&2
  touch "$thin/.complete"
fi

echo "$thin/bin/python"

#!/usr/bin/env bash
# Prints the path of a Python interpreter of the version asked for (default 3.10); fails when none runs.
set -euo pipefail
version="${1:-3.10}"
shopt -s nullglob
candidates=("python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/"python$version" \
    "$HOME"/.local/share/uv/python/cpython-"$version".*/bin/"python$version" "/usr/local/bin/python$version")
for candidate in "${candidates[@]}"; do
    path="$(command -v "$candidate" || true)"
    if [ -n "$path" ] && found="$("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" \
        && [ "$found" = "$version" ]; then
        echo "$path"
        exit 0
    fi
done
echo "error: no Python $version found on PATH or under pyenv or uv; install one (for example" \
    "'pyenv install $version'): firstlight promises Python $version and checks it" >&2
exit 4

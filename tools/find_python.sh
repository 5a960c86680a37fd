#!/usr/bin/env bash
# Print the Python that `make` uses: that of .venv while it runs, else the newest of the supported ones, also pyenv's and
# uv's own. Prints nothing where there is none; with --install, uv installs one, or a message says how to get one.
# With a version (3.12): a Python of that version, whatever .venv has.
set -euo pipefail
cd "$(dirname "$0")/.."

supported=(3.13 3.12)
of_venv=.venv/pyvenv.cfg
if [[ ${1:-} == 3.* ]]; then
    supported=("$1")
    of_venv=
fi

# pyenv's shims exist for versions that are not selected, and Debian's Python may lack venv: try each.
runs() {
    [[ -n $1 ]] && "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

candidates() {
    local version
    if [[ -f $of_venv ]]; then
        sed -n 's/^executable = //p' "$of_venv"
    fi
    for version in "${supported[@]}"; do
        command -v "python$version" || true
        printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/"python$version"
        printf '%s\n' "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}/cpython-$version".*/bin/"python$version"
    done
}

find_python() {
    local candidate
    while read -r candidate; do
        if runs "$candidate"; then
            echo "$candidate"
            return
        fi
    done < <(candidates)
}

found=$(find_python)
if [[ -z $found && ${1:-} == --install ]]; then
    if command -v uv >/dev/null; then
        echo "no Python ${supported[-1]} or newer: uv installs ${supported[0]}" >&2
        uv python install "${supported[0]}" >&2 || true
        found=$(find_python)
    fi
    if [[ -z $found ]]; then
        cat >&2 <<EOF
error: no Python that runs llmrecipes
  rule: Python ${supported[-1]} or newer with venv; looked for python3.13 and python3.12 on the PATH, in pyenv and in uv
  fix:  apt-get install python3-venv (Debian 13, Ubuntu 24.04), pyenv install ${supported[0]}, or uv python install ${supported[0]};
        elsewhere: make setup PYTHON=/path/to/python3.12
EOF
        exit 2
    fi
fi
echo "$found"

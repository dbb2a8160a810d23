#!/usr/bin/env bash
# Make a virtual environment with the pinned packages and HyperParallel itself, editable.
# Usage: make_env.sh PYTHON VENV REQUIREMENTS
set -euo pipefail

python=$1 venv=$2 requirements=$3

stop() {
    echo "make env: $*" >&2
    exit 1
}

# Install a Debian package, or say which command would.
need() {
    local package=$1
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "Installing the system package $package ..."
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null
    else
        stop "the system package $package is missing. Run: sudo apt-get install $package"
    fi
}

command -v "$python" >/dev/null ||
    stop "no '$python' here. Install Python 3.11, or name one: make env PYTHON=/path/to/python3.11"

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11 | 3.12) ;;
    *) stop "'$python' is Python $version; the pinned packages need 3.11 or 3.12. Run: make env PYTHON=/path/to/python3.11" ;;
esac

# Debian keeps these two apart from python3: what makes virtual environments, and what MindSpore is linked against.
"$python" -c 'import ensurepip, venv' 2>/dev/null || need "python$version-venv"
"$python" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || need libgomp1

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$venv"
fi

echo "Installing the pinned packages into $venv (1 GB or more to fetch; a few minutes) ..."
"$venv/bin/python" -m pip install --quiet --requirement "$requirements"
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
echo "Ready: $venv"

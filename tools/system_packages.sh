#!/bin/sh
# Installs what a fresh Debian or Ubuntu lacks for the set-up: venv, a C++ compiler, Python.h. A
# machine that has them is left alone.
#
# usage: system_packages.sh PYTHON
set -eu

python=$1

fail() {
    echo "cannot set up torchmig: $*" >&2
    exit 1
}

command -v "$python" > /dev/null || [ "$python" = python3 ] ||
    fail "'$python' is not a program; correct TORCHMIG_PYTHON"

missing=
lacks() {
    missing="$missing $1"
}
if command -v "$python" > /dev/null; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "'$python' is older than 3.11; name a newer Python in TORCHMIG_PYTHON"
    "$python" -c 'import ensurepip, venv' 2> /dev/null || lacks python3-venv
    "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
        lacks python3-dev
else
    lacks python3 && lacks python3-venv && lacks python3-dev
fi
command -v "${CXX:-c++}" > /dev/null || lacks g++
command -v unshare > /dev/null || lacks util-linux
[ -n "$missing" ] || exit 0

case "$(command -v "$python")" in
    /usr/bin/* | "") ;;
    *) case "$missing" in
        *python3-*) fail "'$python' lacks$missing, which cannot be added to it; use another Python" ;;
    esac ;;
esac
command -v apt-get > /dev/null || fail "install the equivalents of:$missing"
[ "$(id -u)" = 0 ] || fail "run as root: apt-get install$missing"
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update || fail "apt could not read its sources"
# shellcheck disable=SC2086 # a list of names
apt-get -qq install -y --no-install-recommends $missing > /dev/null ||
    fail "apt could not install$missing"

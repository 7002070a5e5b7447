#!/bin/sh
# Puts a newer release's criu, its libraries and its pycriu into a private prefix, through apt so that
# signatures are checked: Debian trixie's, or on Ubuntu that of resolute. Nothing of the system is
# replaced or installed. Called again it only mends the paths inside the prefix, as is needed after
# the prefix has been moved.
#
# usage: criu_prefix.sh PREFIX
# TORCHMIG_DEBIAN_MIRROR names a Debian mirror; without it the machine's own apt sources are searched
# for a mirror of Debian, then of Ubuntu.
set -eu

prefix=$1

fail() {
    echo "cannot set up CRIU: $*" >&2
    exit 20
}

# Prints the first mirror of a distribution in the machine's apt sources: deb822 files, then one-line
# files. A mirror is known by its path, which ends in the distribution's name.
machine_mirror() {
    for file in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -r "$file" ] || continue
        case "$file" in
            *.sources) awk 'tolower($1) == "uris:" { for (i = 2; i <= NF; i++) print $i }' "$file" ;;
            *) sed -n 's/^deb[[:space:]]\{1,\}\(\[[^]]*\][[:space:]]\{1,\}\)\{0,1\}\([^[:space:]]\{1,\}\).*/\2/p' "$file" ;;
        esac
    done | grep -E "/$1/?\$" | head -n 1
}

download() {
    mirror=${TORCHMIG_DEBIAN_MIRROR:-$(machine_mirror debian)}
    from='trixie main'
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    if [ -z "$mirror" ]; then
        mirror=$(machine_mirror ubuntu)
        from='resolute main universe'
        keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg
    fi
    [ -n "$mirror" ] || fail "no mirror of Debian or Ubuntu in this machine's apt sources;" \
        "name one of Debian in TORCHMIG_DEBIAN_MIRROR, or a criu of 4.1 or newer in TORCHMIG_CRIU"
    command -v apt-get > /dev/null && command -v dpkg > /dev/null ||
        fail "there is no apt here; install criu 4.1 or newer with its pycriu and name it in TORCHMIG_CRIU"
    [ "$(dpkg --print-architecture)" = amd64 ] ||
        fail "this is no x86-64 machine ($(dpkg --print-architecture)), and torchmig runs on no other"
    [ -r "$keyring" ] || fail "the keys that '$mirror' is signed with are not in '$keyring';" \
        "install them with: apt-get install $(basename "$keyring" .gpg | sed s/ubuntu-archive/ubuntu/)"

    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
    # An empty status file: apt thinks that nothing is installed and resolves every library.
    : > "$work/status"
    echo "deb [signed-by=$keyring] $mirror $from" > "$work/sources.list"
    set -- -qq \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o Dir::State="$work" -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" \
        -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any \
        -o Acquire::Languages=none -o Debug::NoLocking=true
    apt-get "$@" update || fail "apt could not read '$mirror' ($from)"
    apt-get "$@" install -y --no-install-recommends --download-only criu patchelf ||
        fail "apt could not download criu from '$mirror' ($from)"
    # pycriu would pull in a whole second Python, of which nothing is needed.
    (cd "$work/cache/archives" && apt-get "$@" download python3-pycriu) ||
        fail "apt could not download python3-pycriu from '$mirror' ($from)"
    for package in "$work"/cache/archives/*.deb; do
        dpkg -x "$package" "$work/root"
    done
    rm -rf "$work/root/usr/share" "$work"/root/usr/lib/*/gconv "$work"/root/usr/lib/*/perl*
    # The temporary folder may lie on another file system, where mv is a copy that can be cut short.
    rm -rf "$prefix" "$prefix.new"
    mv "$work/root" "$prefix.new"
    chmod 755 "$prefix.new"
    mv "$prefix.new" "$prefix"
}

# Lets criu find the prefix's own loader and libraries, which are newer than the system's may be.
mend() {
    libraries=$(dirname "$(find "$prefix/usr/lib" -name libc.so.6 | head -n 1)")
    loader=$(find "$prefix/usr/lib64" -name 'ld-linux*' | head -n 1)
    "$loader" --library-path "$libraries" "$prefix/usr/bin/patchelf" \
        --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$prefix/usr/sbin/criu"
}

mkdir -p "$(dirname "$prefix")"
prefix=$(cd "$(dirname "$prefix")" && pwd)/$(basename "$prefix")
[ -x "$prefix/usr/sbin/criu" ] && [ -x "$prefix/usr/bin/patchelf" ] || download
mend
"$prefix/usr/sbin/criu" --version > /dev/null || fail "'$prefix/usr/sbin/criu' does not start"

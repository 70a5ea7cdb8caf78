# Sourced by test, demo and .ci/run with the repository's root as the current folder.
# Written for bash 3.2, which is what macOS has.

venv=.venv

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# Prints the first Python that mlx-lm supports: $PYTHON where set, else the ones on the PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer and found none (looked for ${PYTHON:-python3, python3.13," \
        "python3.12, python3.11}). Install one, or name it: PYTHON=/path/to/python3 ./${0##*/}"
}

make_venv() {
    local python
    # A half-made or moved environment has a Python that does not start, or no pip.
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    python=$(find_python)
    # Debian and Ubuntu split these two off the python3 package.
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: venv or ensurepip is missing." \
            "On Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv --clear "$venv"
}

# Everything that an install depends on and that an editable install does not follow by itself:
# the metadata, the native sources, the place, the machine and the interpreter.
fingerprint() {
    cat pyproject.toml
    [ ! -e setup.py ] || cat setup.py
    find kernels -type f \( -name '*.c' -o -name '*.cc' -o -name '*.cpp' -o -name '*.h' \
        -o -name '*.hpp' -o -name '*.inc' \) -exec cksum {} + | LC_ALL=C sort
    "$venv/bin/python" -c 'import sys; print(sys.version, sys.prefix)'
    uname -sm
    pwd -P
}

# install EXTRA[,EXTRA]: makes $venv if need be, and installs the package with these extras into it
# unless exactly this was installed before.
install() {
    local stamp="$venv/installed-$1" now
    make_venv
    now=$(fingerprint)
    if [ -e "$stamp" ] && [ "$now" = "$(cat "$stamp")" ]; then
        return
    fi
    # An install that is cut off leaves no stamp.
    rm -f "$stamp"
    echo "${0##*/}: installing paged-kv[$1] into $venv, which takes a minute or two" >&2
    # A hundred lines that only matter if it fails.
    # Compiling 20,000 files that nobody imports takes longer than those that somebody does.
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --editable ".[$1]" \
        >"$venv/install.log" 2>&1 || {
        cat "$venv/install.log" >&2
        fail "pip could not install paged-kv[$1] into $venv, see above"
    }
    printf '%s\n' "$now" >"$stamp"
}

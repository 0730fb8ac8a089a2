# Sourced by the other scripts: makes .venv with the package, its extras and the tools, and puts it first on PATH.
#
# Nothing to set for the usual case. What may be set:
#   PYTHON       the interpreter that .venv is made from (default: python3, or whichever of 3.13 … 3.10 is on PATH)
#   TORCH_SPEC   what pip installs as PyTorch (default: torch==2.13.0)
#   PIP_…        pip's own variables; an index or a folder of wheels named there or in pip's files is used as it is
#
# A second call finds the stamp of the first and costs milliseconds.

VENV="$ROOT/.venv"
TORCH_SPEC="${TORCH_SPEC:-torch==2.13.0}"
EXTRAS="experiments,dev"

say() { echo "$*" >&2; }

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        # Run it: a version manager's shim exists for versions that it cannot start.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    say "error: no Python of at least 3.10 with venv found; install one, or name it: PYTHON=/path/to/python $0"
    exit 1
}

# PyPI's Linux wheel of PyTorch brings gigabytes of CUDA. Without an NVIDIA driver, and without an index of the user's
# own, take PyTorch's CPU wheels.
_torch_index() {
    if [[ "$(uname -s)" == Linux && ! -e /proc/driver/nvidia/version ]] &&
        ! "$VENV/bin/pip" config list 2>/dev/null | grep -Eq '(index-url|find-links)='; then
        echo "--extra-index-url https://download.pytorch.org/whl/cpu"
    fi
}

_wanted() {
    { cat "$ROOT/setup.py" "$ROOT/scripts/_environment.sh"; echo "$TORCH_SPEC $EXTRAS $1"; } |
        "$1" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

_pip_install() {
    if ! "$VENV/bin/pip" install --quiet --disable-pip-version-check "$@" >"$VENV/pip.log" 2>&1; then
        tail -n 20 "$VENV/pip.log" >&2
        say "error: pip install $* failed; the whole output is in $VENV/pip.log"
        exit 1
    fi
}

_set_up() {
    local python wanted
    python="$(_find_python)"
    wanted="$(_wanted "$python")"
    if [[ "$(cat "$VENV/stamp" 2>/dev/null)" == "$wanted" ]]; then
        return
    fi
    say "Setting up .venv with $("$python" --version) (a few minutes, once)"
    "$python" -m venv --clear "$VENV"
    say "  $TORCH_SPEC"
    # shellcheck disable=SC2046  # none, or an option and its value
    _pip_install "$TORCH_SPEC" $(_torch_index)
    say "  torchstrat[$EXTRAS]"
    _pip_install -e "$ROOT[$EXTRAS]"
    echo "$wanted" >"$VENV/stamp"
}

_locked_set_up() {
    if command -v flock >/dev/null; then # two scripts started together: the second waits for the first
        (flock 9 && _set_up) 9>"$ROOT/.venv.lock"
    else
        _set_up
    fi
}

_locked_set_up
export PATH="$VENV/bin:$PATH"
unset PYTHONHOME

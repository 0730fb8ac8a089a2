# Sourced by the other scripts: makes an environment with the package, its extras and the tools, and puts it first on PATH.
#
# There are two: .venv, and .venv-tpu with the one PyTorch that torch_xla's last release works with, for TPUStrategy. A
# third, .venv-matrix, is made anew for each pair of ./scripts/soak --matrix.
#
# Nothing to set for the usual case. What may be set:
#   TORCHSTRAT_ENV  main (the default) or tpu: which of the two the script uses
#   PYTHON          the interpreter that it is made from (default: python3, or whichever of 3.14 … 3.10 is on PATH)
#   TORCH_SPEC      what pip installs as PyTorch in .venv, such as torch==2.9.0 (default: newest, see _torch_spec)
#   PIP_…           pip's own variables; an index or a folder of wheels named there or in pip's files is used as it is
#
# A second call finds the stamp of the first and costs milliseconds.

EXTRAS="experiments,dev"
readonly NOT_FOR_THIS_MACHINE=3 # what setting up tpu returns where torch_xla does not exist; it has said so

say() { echo "$*" >&2; }

# What one environment is: VENV, SPECS (what pip installs first, together) and NEWEST_PYTHON (empty: any).
_describe() {
    case "$1" in
    main)
        VENV="$ROOT/.venv"
        SPECS=("${TORCH_SPEC:-newest}")
        NEWEST_PYTHON=""
        ;;
    matrix)
        VENV="$ROOT/.venv-matrix"
        SPECS=("$TORCH_SPEC")
        NEWEST_PYTHON=""
        ;;
    tpu)
        # Not the package's extra tpu, which is for machines with a TPU: its libtpu would be downloaded for nothing.
        VENV="$ROOT/.venv-tpu"
        SPECS=(torch==2.9.0 torch_xla==2.9.0)
        NEWEST_PYTHON="3.13"
        ;;
    *)
        say "error: TORCHSTRAT_ENV is $1; choose main or tpu"
        exit 1
        ;;
    esac
}

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        # Run it: a version manager's shim exists for versions that it cannot start.
        if "$candidate" - "${NEWEST_PYTHON:-4.0}" 2>/dev/null <<'PROGRAM'; then
import sys, venv, ensurepip
newest = tuple(int(part) for part in sys.argv[1].split("."))
sys.exit(not (3, 10) <= sys.version_info[:2] <= newest)
PROGRAM
            # Not an environment's own: with one on PATH, the next script would take another interpreter to be meant.
            "$candidate" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'
            return
        fi
    done
    return 1
}

# PyPI's Linux wheel of PyTorch brings gigabytes of CUDA. Without an NVIDIA driver, and without an index of the user's
# own, take PyTorch's CPU wheels.
_torch_index() {
    if [[ "$(uname -s)" == Linux && ! -e /proc/driver/nvidia/version ]] &&
        ! "$VENV/bin/pip" config list 2>/dev/null | grep -Eq '(index-url|find-links)='; then
        echo "--extra-index-url https://download.pytorch.org/whl/cpu"
    fi
}

# What pip is asked for where SPECS has "newest" or "oldest": of the versions that can be had for this Python the newest,
# or the newest of the oldest that is supported, as a CPU wheel. On Linux for x86-64 those have "+cpu" in their names;
# elsewhere, and where there is a driver, all do: what pip would take. Where no CPU wheel can be had, it is that too, but
# that ./scripts/soak --matrix leaves such a pair out unless MATRIX_CUDA is set.
_torch_spec() {
    local range found
    case "$1" in
    newest) range="torch>=2.9" ;;
    oldest) range="torch==2.9.*" ;;
    *)
        echo "$1"
        return
        ;;
    esac
    if [[ "$(uname -sm)" == "Linux x86_64" && ! -e /proc/driver/nvidia/version ]]; then
        # shellcheck disable=SC2046  # none, or an option and its value
        found="$("$VENV/bin/pip" index versions torch $(_torch_index) 2>/dev/null |
            sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' | grep '+cpu$' |
            grep -E "$([[ "$1" == oldest ]] && echo '^2\.9\.' || echo '.')" | head -n 1)" || true
        if [[ -n "$found" ]]; then
            range="torch==$found"
        elif [[ "$VENV" == *-matrix && -z "${MATRIX_CUDA:-}" ]]; then
            return "$NOT_FOR_THIS_MACHINE"
        fi
    fi
    echo "$range"
}

_wanted() {
    { cat "$ROOT/setup.py" "$ROOT/scripts/_environment.sh"; echo "${SPECS[*]} $EXTRAS $1"; } |
        "$1" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

_pip_install() {
    "$VENV/bin/pip" install --quiet --disable-pip-version-check "$@" >"$VENV/pip.log" 2>&1
}

_explain_pip() {
    tail -n 20 "$VENV/pip.log" >&2
    say "error: pip install $* failed; the whole output is in $VENV/pip.log"
    exit 1
}

# An index that answers, and has none for this system and Python. One that does not answer is not this.
_pip_found_no_torch_xla() {
    grep -q "No matching distribution found for torch_xla" "$VENV/pip.log" &&
        ! grep -Eq "Retrying|ConnectionError|NewConnectionError|SSLError|Could not fetch URL" "$VENV/pip.log"
}

_skip_tpu() {
    say "TPUStrategy's tests are skipped: torch_xla 2.9 does not exist for $1 (it does for Linux on x86-64, Python 3.10 … 3.13)"
    exit "$NOT_FOR_THIS_MACHINE"
}

_set_up() {
    local name="$1" python wanted
    if ! python="$(_find_python)"; then
        [[ "$name" == tpu ]] && NEWEST_PYTHON="" _find_python >/dev/null && _skip_tpu "the Python that is here"
        say "error: no Python of at least 3.10 with venv found; install one, or name it: PYTHON=/path/to/python $0"
        exit 1
    fi
    wanted="$(_wanted "$python")"
    if [[ "$(cat "$VENV/stamp" 2>/dev/null)" == "$wanted" ]]; then
        return
    fi
    say "Setting up ${VENV##*/} with $("$python" --version) (a few minutes, once)"
    "$python" -m venv --clear "$VENV" || exit 1
    SPECS[0]="$(_torch_spec "${SPECS[0]}")" || exit
    say "  ${SPECS[*]}"
    # shellcheck disable=SC2046  # none, or an option and its value
    if ! _pip_install "${SPECS[@]}" $(_torch_index); then
        if [[ "$name" == tpu ]] && _pip_found_no_torch_xla; then
            _skip_tpu "$("$python" --version) on $(uname -s) $(uname -m)"
        fi
        _explain_pip "${SPECS[*]}"
    fi
    say "  torchstrat[$EXTRAS]"
    _pip_install -e "$ROOT[$EXTRAS]" || _explain_pip -e "$ROOT[$EXTRAS]"
    echo "$wanted" >"$VENV/stamp"
}

# use_environment main|tpu: sets it up if need be, and puts it first on PATH. Returns NOT_FOR_THIS_MACHINE, having said
# why in one line, if there is no such environment here; ends the script if something failed.
use_environment() {
    local status=0
    _describe "$1"
    if command -v flock >/dev/null; then # two scripts started together: the second waits for the first
        (flock 9 && _set_up "$1") 9>"$ROOT/.venv.lock" || status=$?
    else
        (_set_up "$1") || status=$?
    fi
    if [[ "$status" == "$NOT_FOR_THIS_MACHINE" ]]; then
        return "$status"
    elif [[ "$status" != 0 ]]; then
        exit "$status"
    fi
    PATH="$VENV/bin:$PATH"
}

unset PYTHONHOME
export PATH
use_environment "${TORCHSTRAT_ENV:-main}"

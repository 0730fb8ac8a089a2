# Sourced by ./scripts/test: parts of a run, each a pytest of which a line is printed when it starts and one when it
# ends, and lanes of parts that go side by side.
#
#   some_lane() { part "tests/unit" tests/unit; part "tests/docs" -k mirrored tests/docs; }
#   lane some_lane && lane another_lane && finish
#
# What a part prints goes to a file. `finish` waits, prints what failed, and returns the last status that was not 0.

_outputs="$(mktemp -d)"
_lanes=()
trap _end_lanes EXIT

# lane FUNCTION [arguments]: starts it. In a process group of its own, so that its end is that of pytest too and not
# only of the shell around it.
lane() {
    set -m
    "$@" </dev/null &
    set +m
    _lanes+=($!)
}

# part NAME pytest-arguments: in a lane; returns pytest's status.
part() {
    local name="$1" output status=0
    shift
    [[ ! -e "$_outputs/ended" ]] || exit 2 # the part before it was interrupted
    output="$_outputs/${name//[^a-zA-Z0-9_]/_}"
    echo "$name: started"
    python -m pytest -q "$@" >"$output" 2>&1 || status=$?
    echo "$name: $(grep . "$output" | tail -n 1)$([[ "$status" -le 1 ]] || echo " (pytest's exit status $status)")"
    [[ "$status" == 0 ]] || echo "$name" >"$output.failed"
    return "$status"
}

finish() {
    local one status=0 failed
    for one in "${_lanes[@]}"; do
        wait "$one" || status=$?
    done
    for failed in "$_outputs"/*.failed; do
        [[ -e "$failed" ]] || continue
        printf '\n%s\n' "$(cat "$failed"):"
        _failures "${failed%.failed}"
    done
    echo
    grep -hs '^SKIPPED' "$_outputs"/* | sort -u || true
    echo "in all: $([[ "$status" == 0 ]] && echo passed || echo FAILED), $((SECONDS / 60)) min $((SECONDS % 60)) s"
    return "$status"
}

_failures() { # all from the first failure on; a pytest that did not come that far: its last lines
    local from
    from="$(grep -nE -m 1 '^=+ (FAILURES|ERRORS) =+$' "$1" | cut -d: -f1)" || true
    tail -n "${from:++}${from:-400}" "$1"
}

# Whatever the reason, nothing goes on. First as Ctrl-C does, so that tests end the processes that they have started, in
# groups of their own too; after ten seconds anyhow.
_end_lanes() {
    local one waits
    touch "$_outputs/ended"
    for one in "${_lanes[@]}"; do
        kill -INT -- "-$one" 2>/dev/null || true
    done
    for one in "${_lanes[@]}"; do
        for ((waits = 0; waits < 100; waits++)); do
            kill -0 -- "-$one" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$one" 2>/dev/null || true
    done
    rm -rf "$_outputs"
}

# Sourced by ./scripts/test: parts of a run, each a pytest of which a line is printed when it starts and one when it
# ends, and lanes of parts that go side by side.
#
#   some_lane() { part "tests/unit" tests/unit; part "tests/docs" -k mirrored tests/docs; }
#   lane some_lane && lane another_lane && finish
#
# What a part prints goes to a file. `finish` waits, prints what failed, and returns the last status that was not 0.

_outputs="$(mktemp -d)"
_lanes=()
_began=$SECONDS
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
    local name="$1" output began=$SECONDS status=0
    shift
    [[ ! -e "$_outputs/ended" ]] || exit 2 # the part before it was interrupted
    output="$_outputs/${name//[^a-zA-Z0-9_]/_}"
    echo "$name: started"
    python -m pytest -q "$@" >"$output" 2>&1 || status=$?
    echo "$name: $(_counts "$output" "$status") in $(_time $((SECONDS - began)))"
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
    echo "in all: $([[ "$status" == 0 ]] && echo passed || echo FAILED), $(_time $((SECONDS - _began)))"
    return "$status"
}

_counts() { # what pytest's last line says, without its time
    local counts
    counts="$(tail -n 1 "$1" | sed -nE 's/^[= ]*(.*[a-z]) in [0-9.]+s.*$/\1/p')"
    [[ -n "$counts" && "$2" -le 1 ]] && echo "$counts" || echo "${counts:-no summary} (pytest's exit status $2)"
}

_failures() { # all from the first failure on; a pytest that did not come that far: its last lines
    local from
    from="$(grep -nE -m 1 '^=+ (FAILURES|ERRORS) =+$' "$1" | cut -d: -f1)" || true
    tail -n "${from:++}${from:-400}" "$1"
}

_time() {
    [[ "$1" -lt 60 ]] && echo "$1 s" || printf '%d min %02d s\n' $(($1 / 60)) $(($1 % 60))
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

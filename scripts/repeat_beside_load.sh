#!/usr/bin/env bash
# Runs a command several times in a row while busy processes run beside it:
#
#     scripts/repeat_beside_load.sh PROCESSES TIMES COMMAND...
#     scripts/repeat_beside_load.sh 12 3 make test
#
# Prints exit status, time and load of each round; ends with 1 if a round did not end with 0.
set -euo pipefail
if (($# < 3)); then
    sed -n 's/^#  *\(scripts.*\)/\1/p' "$0" >&2
    exit 2
fi
processes=$1 times=$2
shift 2

busy=()
stop() { ((${#busy[@]} == 0)) || kill "${busy[@]}" 2>/dev/null || true; }
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
for ((each = 0; each < processes; each++)); do
    # Ends also where this script is killed and stops nothing.
    (while kill -0 $$ 2>/dev/null; do for ((i = 0; i < 100000; i++)); do :; done; done) &
    busy+=($!)
done

failed=0
rounds=()
for ((round = 1; round <= times; round++)); do
    began=$SECONDS
    "$@" && status=0 || status=$?
    rounds+=("round $round: exit status $status, $((SECONDS - began)) s, load $(cut -d ' ' -f 1-3 /proc/loadavg)")
    echo "${rounds[-1]}"
    ((status == 0)) || failed=1
done
echo "beside $processes busy processes: $*"
printf '%s\n' "${rounds[@]}"
exit $failed

#!/bin/sh
# Answer the calls of `tiebreak export FOLDER --raw` with a program of one call: sh answers.sh FOLDER PROGRAM
# It is given FOLDER, ID, "" or ".1", ".2" of a further run, and NAME=VALUE words, and writes FOLDER/ID.oRUN.bin.
# Exit code 3: the call is not for it.
while read -r id digest runs words; do
    run=0 code=0
    while [ "$run" -lt "$runs" ] && [ "$code" = 0 ]; do
        # shellcheck disable=SC2086
        "$2" "$1" "$id" "$([ "$run" = 0 ] || echo ".$run")" $words </dev/null || code=$?
        run=$((run + 1))
    done
    case $code in
    0) printf '{"call": "%s"}' "$digest" ;;
    3) printf '{"call": "%s", "refused": "not for it"}' "$digest" ;;
    *) printf '{"call": "%s", "raised": "exit code %s"}' "$digest" "$code" ;;
    esac >"$1/$id.out.json"
done <"$1/calls.txt"

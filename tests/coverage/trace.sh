# shellcheck shell=bash
# What each bash under `make coverage` reads before its script: note the lines that are run.
if exec {BASH_XTRACEFD}>>"$COVERAGE_FOLDER/bash.$HOSTNAME.$$"; then
    PS4='+ ${PWD}:${BASH_SOURCE-}:${LINENO} '
    set -x
fi 2>/dev/null

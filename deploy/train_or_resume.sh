#!/usr/bin/env bash
# `slipstream train` for schedulers that restart processes automatically: resumes the run in RUN_DIR if one exists.
#
#   train_or_resume.sh run.toml RUN_DIR [--key value ...]        RANKS=8: several ranks, with accelerate
#
# Exit status: that of the learner, but 75 (try again) if a signal stopped the learner early. Usually, the last step and
# a checkpoint are then written, and the same command resumes. Without 75, an evicted run would be taken for a finished
# run, or for a failed run if the learner could not shut down cleanly. 2 stays 2: an error that a person has to fix.
set -u

if [ $# -lt 2 ]; then
    echo "usage: train_or_resume.sh run.toml RUN_DIR [--key value ...]" >&2
    exit 2
fi
config=$1 run_dir=$2
shift 2

learner=(slipstream)
if [ "${RANKS:-1}" -gt 1 ]; then
    learner=(accelerate launch --num-processes "$RANKS" --no_python slipstream)
fi
resume=()
if [ -e "$run_dir/config.toml" ]; then
    resume=(--resume)
fi

pid='' interrupted=no hung_up=no
for name in TERM INT USR1; do
    trap 'interrupted=yes; [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null' "$name"
done
# A closing terminal sends SIGHUP more than once; the repetition does not count as a second signal.
trap '[ "$hung_up" = yes ] || { hung_up=yes interrupted=yes; [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null; }' HUP

# In its own session: otherwise, a signal to the process group would arrive twice, and the second one stops the learner
# at once.
setsid "${learner[@]}" train "$config" --run-dir "$run_dir" "${resume[@]}" "$@" &
pid=$!
if [ "$interrupted" = yes ]; then
    kill -TERM "$pid"
fi

status=0
wait "$pid" || status=$?
while kill -0 "$pid" 2>/dev/null; do # a signal interrupted the wait, but the learner still runs
    status=0
    wait "$pid" || status=$?
done
if [ "$interrupted" = yes ] && [ "$status" -ne 2 ]; then
    exit 75
fi
exit "$status"

#!/usr/bin/env bash
# `slipstream train` for what starts processes again by itself: goes on with the run if there is one, and tells whether it is over.
#
#   train_or_resume.sh run.toml RUN_DIR [--key value ...]        RANKS=8: several ranks, by accelerate
#
# Exit status: the learner's, but 75 (try again) for one that a signal has ended early: usually its last step and a checkpoint are
# written, and the same command goes on. Without that, a run that was evicted would look like one that is done, or like one that failed
# where the learner could not end in order. 2 stays 2: an error that a person has to solve.
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
# A terminal that closes says so more than once, which is no second signal.
trap '[ "$hung_up" = yes ] || { hung_up=yes interrupted=yes; [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null; }' HUP

# In a session of its own: a signal to the whole process group would come twice, and the second one ends a learner at once.
setsid "${learner[@]}" train "$config" --run-dir "$run_dir" "${resume[@]}" "$@" &
pid=$!
if [ "$interrupted" = yes ]; then
    kill -TERM "$pid"
fi

status=0
wait "$pid" || status=$?
while kill -0 "$pid" 2>/dev/null; do # a signal has ended the wait, not the learner
    status=0
    wait "$pid" || status=$?
done
if [ "$interrupted" = yes ] && [ "$status" -ne 2 ]; then
    exit 75
fi
exit "$status"

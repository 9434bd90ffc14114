#!/usr/bin/env bash
# `slipstream train` for schedulers that restart processes automatically: resumes the run in RUN_DIR if one exists.
#
#   train_or_resume.sh run.toml RUN_DIR [--key value ...]
#
#   RANKS=8       several ranks on this node, with accelerate
#   NODES=2       several nodes, each of which runs this script with its own NODE_RANK (from 0), and all with the
#                 MASTER_ADDR of node 0 (MASTER_PORT: 29400)
#
# Node 0 has the run directory. With several nodes, learner.checkpoint.dir is a directory that all of them mount.
# Exit status: that of the learner, but 75 (try again) if a signal stopped the learner early. Usually, the last step and
# a checkpoint are then written, and the same command resumes. Without 75, an evicted run would be taken for a finished
# run, or for a failed run if the learner could not shut down cleanly. 2 stays 2: an error that a person has to fix.
# With several ranks, that is an error in the config, which is checked before they start.
set -u

if [ $# -lt 2 ]; then
    echo "usage: train_or_resume.sh run.toml RUN_DIR [--key value ...]" >&2
    exit 2
fi
config=$1 run_dir=$2
shift 2

learner=(slipstream) has_launcher=no
nodes=${NODES:-1}
ranks=$((nodes * ${RANKS:-1}))
if [ "$ranks" -gt 1 ]; then
    has_launcher=yes
    learner=(accelerate launch --multi_gpu --num-processes "$ranks")
    if [ "$nodes" -gt 1 ]; then
        learner+=(--num-machines "$nodes" --machine-rank "${NODE_RANK:?}" --main-process-ip "${MASTER_ADDR:?}"
            --main-process-port "${MASTER_PORT:-29400}")
    fi
    learner+=(--no_python slipstream)
fi
resume=()
if [ -e "$run_dir/config.toml" ]; then
    resume=(--resume)
fi

pid='' interrupted=no hung_up=no
# shellcheck disable=SC2329  # the traps call it
stop() {
    interrupted=yes
    [ -n "$pid" ] || return
    if [ "$has_launcher" = yes ]; then
        # Its ranks, because a launcher that gets the signal kills them after 30 s.
        local children
        read -r -a children < "/proc/$pid/task/$pid/children"
        if [ "${#children[@]}" -gt 0 ]; then
            kill -TERM "${children[@]}" 2>/dev/null
            return
        fi
    fi
    kill -TERM "$pid" 2>/dev/null
}
for name in TERM INT USR1; do
    trap stop "$name"
done
# A closing terminal sends SIGHUP more than once; the repetition does not count as a second signal.
trap '[ "$hung_up" = yes ] || { hung_up=yes; stop; }' HUP

if [ "$has_launcher" = yes ]; then
    # The launcher turns every exit status of a rank into 1, so an error in the config would be tried again.
    status=0
    slipstream train "$config" --run-dir "$run_dir" "$@" --dry-run > /dev/null || status=$?
    if [ "$interrupted" = yes ] && [ "$status" -ne 2 ]; then
        exit 75
    fi
    [ "$status" -eq 0 ] || exit "$status"
fi

# In its own session: otherwise, a signal to the process group would arrive twice, and the second one stops the learner
# at once.
setsid "${learner[@]}" train "$config" --run-dir "$run_dir" "${resume[@]}" "$@" &
pid=$!
if [ "$interrupted" = yes ]; then
    stop
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

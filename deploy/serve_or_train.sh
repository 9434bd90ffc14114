#!/usr/bin/env bash
# Part of a run over several nodes: this node's share of a server, or its learner ranks. Every node of the job runs:
#
#   NODE_INDEX=0 NODE_NAMES="node1 node2 node3" serve_or_train.sh run.toml RUN_DIR [--key value ...]
#
#   NODE_INDEX         this node's position in NODE_NAMES, which lists all nodes in the same order on each of them
#   SERVERS            number of servers (1), on the first nodes of the list
#   NODES_PER_SERVER   number of nodes that one server spans (1)
#   PORT               port of each server (5757); HTTP is at the next one
#   KEYS               directory of the keys that `slipstream keys` made
#   RANKS              as in train_or_resume.sh, which the remaining nodes run
#
# Flags that begin with --server. go to the servers, --learner. to the learner, and all others to both. Set keys that
# both sides read in the file: learner.lora, learner.weight_sync.lora, learner.routing_replay, server.max_model_len.
set -u

if [ $# -lt 2 ]; then
    echo "usage: serve_or_train.sh run.toml RUN_DIR [--key value ...]" >&2
    exit 2
fi
config=$1 run_dir=$2
shift 2
read -r -a names <<< "${NODE_NAMES:?}"
servers=${SERVERS:-1} span=${NODES_PER_SERVER:-1} port=${PORT:-5757} index=${NODE_INDEX:?}
num_serving=$((servers * span))

of_server=() of_learner=() target=both
for word in "$@"; do # a flag is followed by its values
    case $word in
        --server.*) target=server ;;
        --learner.*) target=learner ;;
        --*) target=both ;;
    esac
    [ "$target" = learner ] || of_server+=("$word")
    [ "$target" = server ] || of_learner+=("$word")
done

if [ "$index" -lt "$num_serving" ]; then
    if [ "$span" -gt 1 ]; then
        of_server+=(--server.nnodes "$span" --server.node-rank "$((index % span))"
            --server.master-addr "${names[index - index % span]}")
    fi
    exec slipstream serve "$config" --endpoint "tcp://*:$port" --keys "$KEYS" --server.http-host 0.0.0.0 \
        --server.http-port "$((port + 1))" "${of_server[@]}"
fi

endpoints=()
for ((i = 0; i < num_serving; i += span)); do
    endpoints+=("tcp://${names[i]}:$port")
done
flag=--endpoints
[ "$servers" -gt 1 ] || flag=--endpoint
NODES=$((${#names[@]} - num_serving)) NODE_RANK=$((index - num_serving)) MASTER_ADDR=${names[num_serving]}
export NODES NODE_RANK MASTER_ADDR
exec "$(dirname "$0")/train_or_resume.sh" "$config" "$run_dir" "$flag" "${endpoints[@]}" --keys "$KEYS" \
    --learner.evaluation.url "http://${names[0]}:$((port + 1))/v1" "${of_learner[@]}"

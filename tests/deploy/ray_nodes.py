"""Nodes of a Ray cluster on this machine, until the input ends:
`python -m tests.deploy.ray_nodes NUM_CPUS_OF_THE_HEAD NUM_CPUS ...`.

Prints the address of the cluster. A line of input is the beginning of a node's id, which is killed; the answer is
`killed`.
"""

import sys

from ray.cluster_utils import Cluster

OBJECT_STORE_B = 80_000_000
NUM_GPUS = 2
"""Of each node. Ray only counts them; there need not be any."""


def main() -> None:
    cluster = Cluster()
    for num_cpus in map(int, sys.argv[1:]):
        cluster.add_node(
            num_cpus=num_cpus, num_gpus=NUM_GPUS, object_store_memory=OBJECT_STORE_B, include_dashboard=False
        )
    print(cluster.address, flush=True)
    for line in sys.stdin:
        (node,) = (node for node in cluster.worker_nodes if node.node_id.startswith(line.strip()))
        cluster.remove_node(node, allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

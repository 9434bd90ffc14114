"""`learner …` on a CPU by whose ranks FSDP2 shares a policy, for `accelerate launch --use_fsdp -m` this."""

from learner.__main__ import main
from tests.learner.training.sharding import shard_on_cpu

if __name__ == "__main__":
    shard_on_cpu()
    main()

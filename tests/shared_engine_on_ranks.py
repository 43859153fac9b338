"""How many ranks share the engine that train.py builds.

    torchrun --nproc-per-node N tests/shared_engine_on_ranks.py RANKS_TO_SHARE

Rank 0 prints a JSON list: of each rank, how many ranks its engine has.
"""

import json
import sys

import torch.distributed as dist

from rollout import init_distributed
from train import Config, build_engines


def main(rollout_tp: int) -> None:
    init_distributed()
    engine, _ = build_engines(Config(rollout_tp=rollout_tp), longest=64)
    from vllm.distributed import get_tp_group

    sizes: list = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, get_tp_group().world_size)
    if dist.get_rank() == 0:
        print(json.dumps(sizes))
    engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))

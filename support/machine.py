"""The machine: its ranks, and on a CPU the dtypes, the cores and the memory."""

import ctypes
import os
import socket

import torch
import torch.distributed as dist

from support.command import Refused

# What torchrun would set. Port 0 is any free one.
OF_THE_ONLY_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
# How many processes torchrun, srun, Open MPI's mpirun and MPICH's have started.
STARTED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Parameters of mallopt, as in glibc's malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
# Larger blocks are returned to the system when they are freed. glibc allows no more.
LARGEST_KEPT = 32 * 2**20  # bytes


def init_distributed() -> dist.DeviceMesh:
    """Join torchrun's process group, or be its only rank, and return the mesh of ranks.

    The mesh is [ranks] on one node and [nodes, ranks of a node] on several. Call this
    before building an Engine, which would otherwise make a process group of its own, of
    the wrong size. Raises Refused if torch is built for CUDA and finds no GPU, if
    another launcher than torchrun has started several ranks, or if another node could
    not reach this one.
    """
    missing = [name for name in OF_THE_ONLY_RANK if name not in os.environ]
    for name in STARTED:
        # Without a rank each process would train a model of its own.
        if missing and os.environ.get(name, "1") != "1":
            raise Refused(
                f"{name} is {os.environ[name]}, and {', '.join(missing)} not set: "
                "start the ranks by torchrun (on each node, with --nnodes and "
                f"--node-rank), or unset {name} for one rank"
            )
    if missing:
        os.environ.update(OF_THE_ONLY_RANK)
    ranks_of_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // ranks_of_node
    if nodes > 1:
        choose_interface(os.environ["MASTER_ADDR"])
    if torch.cuda.is_available():
        device_type = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # We pass no device_id. With one torch would split NCCL's communicator for each
        # group of the mesh and of vLLM, which has hung (pytorch issue 145376).
        dist.init_process_group("cpu:gloo,cuda:nccl")
    elif torch.version.cuda:
        raise Refused(
            f"torch is built for CUDA {torch.version.cuda} and finds no GPU that it "
            "can use: look at nvidia-smi (is the driver older?) and at "
            "CUDA_VISIBLE_DEVICES"
        )
    else:
        device_type = "cpu"
        dist.init_process_group("gloo")
        prepare_cpu(ranks_of_node)
    if nodes == 1:
        # A dimension of one node would cost FSDP an average over one rank.
        return dist.init_device_mesh(device_type, (ranks_of_node,))
    return dist.init_device_mesh(
        device_type, (nodes, ranks_of_node), mesh_dim_names=("node", "rank")
    )


def choose_interface(master: str) -> None:
    """Have gloo and NCCL use the network interface that leads to the first node.

    By itself gloo takes the address of this host's name, which is 127.0.1.1 on Debian
    and Ubuntu, and NCCL one of the interfaces that are up. Variables that the user has
    set are kept. Raises Refused where the other nodes could not reach this one.
    """
    import psutil  # Only several nodes need it.

    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        return
    family, kind, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # This sends nothing. It chooses a route.
        own = probe.getsockname()[0]
    # All ranks may be on one machine, as in a test. Then the user gives this address.
    if own in ("127.0.0.1", "::1") and master != own:
        raise Refused(
            f"MASTER_ADDR {master} is {own} on this node, which no other one reaches: "
            "give torchrun the first node's address in their network as --master-addr, "
            "or set GLOO_SOCKET_IFNAME to the interface that leads there"
        )
    for interface, entries in psutil.net_if_addrs().items():
        if own in [entry.address for entry in entries]:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # this alone


def default_dtype() -> str:
    """What trainer and evaluation compute in: bfloat16 on CUDA, float32 on a CPU.

    In float32 neither the number of ranks nor the size of a batch changes a result.
    """
    return "bfloat16" if torch.cuda.is_available() else "float32"


def bfloat16_is_slow() -> bool:
    """Whether this is a CPU that multiplies bfloat16 in a plain loop.

    A CPU that does it itself (AVX-512 BF16, AMX) samples the embedded policy in 0.8 of
    the time that float32 takes. Any other takes twice as long, and for fp8 has taken 20
    times as long.
    """
    on_cpu = not torch.cuda.is_available()
    return on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def default_rollout_dtype(quantization: str) -> str:
    """What rollouts are sampled in: bfloat16 where that is fast, or is all there is.

    vLLM has fp8 beside bfloat16 alone.
    """
    return "float32" if bfloat16_is_slow() and quantization == "none" else "bfloat16"


def prepare_cpu(ranks_of_node: int) -> None:
    """Give this rank its share of the cores, and let malloc keep what is freed.

    torchrun gives each of several ranks one thread, and the engine would keep it. By
    default glibc returns freed memory to the system, and what the next update allocates
    in its place costs page faults.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // ranks_of_node))
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(TRIM_THRESHOLD, -1)
    # Linux kills a process that uses AMX and did not ask for it. oneDNN asks; vLLM's
    # attention does not, and an fp8 engine samples without oneDNN (see Engine.sample).
    torch.cpu._init_amx()
    # With a log-probability vLLM counts the token's rank, in a function that it has
    # compiled. The compiler takes ten seconds or more, and the count itself no time.
    torch.compiler.set_stance("force_eager")

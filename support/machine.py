"""Sets up this machine: process group, dtypes, cores and memory."""

import ctypes
import os

import torch
import torch.distributed as dist

from support.command import Refused

# What torchrun would set for a process that is the only rank. Port 0 stands for any
# free port.
SINGLE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def init_distributed() -> dist.DeviceMesh:
    """Join torchrun's process group, or form one of a single rank; return its mesh.

    The mesh is [ranks] on one node and [nodes, ranks of a node] on several. Call this
    before building an Engine, which would otherwise create a process group of its own,
    of the wrong size. Raises Refused if torch is built for CUDA and finds no GPU, if
    several ranks were started by a launcher other than torchrun, or if several nodes
    are not told which network interface to use.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:  # not started by torchrun
        # In these variables torchrun, srun, Open MPI's mpirun and MPICH's mpirun tell a
        # process how many processes they have started.
        for name in (
            "WORLD_SIZE",
            "SLURM_STEP_NUM_TASKS",
            "OMPI_COMM_WORLD_SIZE",
            "PMI_SIZE",
        ):
            # Each process would take itself for the only rank, and train its own model.
            if os.environ.get(name, "1") != "1":
                raise Refused(
                    f"{name} is {os.environ[name]}, but LOCAL_WORLD_SIZE is not set: "
                    "start the ranks with torchrun (on each node, with --nnodes and "
                    f"--node-rank), or unset {name} for one rank"
                )
        os.environ.update(SINGLE_RANK)
    ranks_of_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // ranks_of_node
    if nodes > 1 and not os.environ.get("GLOO_SOCKET_IFNAME"):
        # Gloo would use the address of the host name: on Debian and Ubuntu 127.0.1.1,
        # at which no other node can reach this one.
        raise Refused(
            "there are several nodes: on each of them, set GLOO_SOCKET_IFNAME, and "
            "NCCL_SOCKET_IFNAME if there are GPUs, to the network interface through "
            "which the other nodes reach it (recipes/README.md)"
        )
    if torch.cuda.is_available():
        device_type = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # We pass no device_id. With one, torch would split NCCL's communicator for each
        # group of the mesh and of vLLM, which has hung (pytorch issue 145376).
        dist.init_process_group("cpu:gloo,cuda:nccl")
    elif torch.version.cuda:
        raise Refused(
            f"torch is built for CUDA {torch.version.cuda} but finds no GPU that it "
            "can use: check CUDA_VISIBLE_DEVICES, and the driver version in nvidia-smi"
        )
    else:
        device_type = "cpu"
        dist.init_process_group("gloo")
        prepare_cpu(ranks_of_node)
    if nodes == 1:
        # With a node dimension of size 1, FSDP would needlessly average over it.
        return dist.init_device_mesh(device_type, (ranks_of_node,))
    return dist.init_device_mesh(
        device_type, (nodes, ranks_of_node), mesh_dim_names=("node", "rank")
    )


def default_dtype(without_bfloat16: str) -> str:
    """Return the dtype to compute in: float32 on a CPU, bfloat16 on a GPU that has it.

    A GPU without bfloat16 computes in `without_bfloat16`. In float32, rounding is so
    small that the number of ranks and the size of a batch hardly change a result.
    """
    if not torch.cuda.is_available():
        return "float32"
    return "bfloat16" if has_fast_bfloat16() else without_bfloat16


def has_fast_bfloat16() -> bool:
    """Return whether this machine has instructions for bfloat16.

    A GPU has them from compute capability 8.0 on; a T4 or V100 does not. A CPU that has
    them (AVX-512 BF16, which every CPU with AMX has) samples the embedded policy in 0.8
    of the time that float32 takes. On any other CPU bfloat16 takes two to four times as
    long as float32, and fp8 took 20 times as long.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    # oneDNN's own check is not enough, because it also accepts AVX-512 without BF16.
    return torch.cpu._is_avx512_bf16_supported()


def prepare_cpu(ranks_of_node: int) -> None:
    """Give this rank its share of the cores, and let malloc keep freed memory.

    If there are several ranks, torchrun allows each only one thread, and the engine
    would use no more. By default glibc returns freed memory to the system, so that the
    next update's allocations cause page faults, which cost time.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_of_node))
    libc = ctypes.CDLL(None)
    # Blocks above this many bytes are returned to the system when freed. glibc accepts
    # no higher number.
    libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    # A process must ask Linux for permission to use AMX, or it is killed by SIGILL.
    # oneDNN asks, but vLLM's attention kernel does not, and an fp8 engine samples with
    # oneDNN switched off (see Engine.sample), so we ask here.
    torch.cpu._init_amx()
    # vLLM would compile the function that computes the rank of each sampled token.
    # Compiling takes ten seconds or more, and the function is fast without it.
    torch.compiler.set_stance("force_eager")

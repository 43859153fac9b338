"""Rollouts: what the vLLM engine samples, and with which probability it does.

The behavior policy pi_b of (7) and (12) is what vLLM really drew from: after
temperature, top-p and top-k, in the engine's precision. The engine runs inside the
trainer's process, by the same code on CPU and CUDA.

    python rollout.py      # samples from the embedded policy, prints what comes back
"""

import atexit
import logging
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

if "--verbose" not in sys.argv:
    # torch reads it when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.nn.utils.rnn import pad_sequence

from support.flags import Refused
from support.malloc import keep_freed_memory
from support.shared_memory import own_segments


@dataclass
class Rollouts:
    """N responses, padded on the right. Column t of [N, T] is the t-th token."""

    tokens: torch.Tensor  # [N, L] prompt, response with its end of sequence, padding
    prompt_length: torch.Tensor  # [N], where the response begins in tokens
    mask: torch.Tensor  # [N, T] bool: True on response tokens
    logp_behavior: torch.Tensor  # [N, T] log pi_b of the response tokens, nats
    top_tokens: torch.Tensor  # [N, T, K] the K tokens that pi_b finds most likely there
    top_logp_behavior: torch.Tensor  # [N, T, K] log pi_b of these, nats
    truncated: torch.Tensor  # [N] bool: ended by max_tokens, not by an end of sequence
    text: list[str]  # [N] the response without special tokens
    weight_version: str  # of the weights that sampled: the number of steps they had
    reward: torch.Tensor | None = None  # [N]
    advantage: torch.Tensor | None = None  # [N]
    logp_prox: torch.Tensor | None = None  # [N, T] log pi_theta before the first update

    def select(self, rows: list[int], device: torch.device | str = "cpu") -> "Rollouts":
        """These responses on this device, without the padding that only others need.

        For no rows it is response 0 with a mask that is False everywhere: under FSDP a
        rank that has nothing to do in a forward pass has to take part in it.
        """
        if not rows:
            padding = self.select([0], device)
            return replace(padding, mask=torch.zeros_like(padding.mask))
        response_length = self.mask[rows].sum(dim=1)  # [len(rows)]
        longest_response = int(response_length.max())
        longest = int((self.prompt_length[rows] + response_length).max())
        chosen = {}
        for name, value in vars(self).items():
            if not isinstance(value, torch.Tensor):
                continue
            value = value[rows]
            if name == "tokens":
                value = value[:, :longest]
            elif value.dim() > 1:
                value = value[:, :longest_response]
            chosen[name] = value.to(device)
        return replace(self, text=[self.text[row] for row in rows], **chosen)


def init_distributed() -> dist.DeviceMesh:
    """Join torchrun's process group, or be its only rank, and return the mesh of ranks.

    Its dimensions are (node, rank), or (rank,) on one node. It comes before the engine,
    which would otherwise make a group of its own, of the wrong size. On a CPU it gives
    the rank its share of the cores, and has malloc keep what is freed. Raises Refused
    where torch is built for CUDA and finds no GPU.
    """
    if "RANK" not in os.environ:
        # Not under torchrun. Port 0 is any free one.
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"
        )
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    ranks_of_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // ranks_of_node
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # Without a device_id, as vLLM and TRL start by default. With one torch splits
        # NCCL's communicator for each dimension of the mesh and for each group of vLLM,
        # in which ranks outside of it take part; that has hung: pytorch issue 145376.
        dist.init_process_group("cpu:gloo,cuda:nccl")
    elif torch.version.cuda:
        raise Refused(
            f"torch is built for CUDA {torch.version.cuda} and finds no GPU that it "
            "can use: look at nvidia-smi (is the driver older?) and at "
            "CUDA_VISIBLE_DEVICES"
        )
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        # torchrun gives each of several ranks one thread, and the engine would keep it.
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // ranks_of_node))
        keep_freed_memory()
    if nodes == 1:
        return dist.init_device_mesh(
            device.type, (ranks_of_node,), mesh_dim_names=("rank",)
        )
    shape = (nodes, ranks_of_node)
    return dist.init_device_mesh(device.type, shape, mesh_dim_names=("node", "rank"))


def prompts_of_rank(prompt_count: int) -> range:
    """Which of the prompts this rank samples: r, r + w, r + 2w, ... for rank r of w.

    The responses to a prompt are a group, which is never divided among ranks.
    """
    return range(dist.get_rank(), prompt_count, dist.get_world_size())


def noise_seeds(seed: int, first: int, count: int, spacing: int) -> list[int]:
    """Seeds of the sampling noise of prompts first, first + 1, ... of a run.

    The engine adds j for response j to a prompt, hence the spacing. All are different
    within a run. A hash of the run's own seed places their range: those of runs 0, 1,
    ... would otherwise overlap.
    """
    base = random.Random(seed).getrandbits(31)
    return [base + (first + prompt) * spacing for prompt in range(count)]


def padded(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What M response tokens have, [M, ...], at their places: [N, T, ...], else 0.

    The tokens are in the order of the mask, [N, T] bool: response by response.
    """
    places = values.new_zeros(*mask.shape, *values.shape[1:])
    places[mask] = values
    return places


class IncompleteLayers(logging.Handler):
    """Collects the layers that vLLM reports as incomplete after a reload.

    vLLM only logs it, and calls the reload done. What a layer lacks is then whatever
    was in memory: its old weights where it got nothing and the engine has not slept.
    """

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.empty: list[str] = []
        self.partial: list[str] = []
        logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # What it says is raised, not printed.
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        message = str(record.msg)
        layer = str(record.args[0]) if record.args else ""
        # A rotary embedding has nothing to load: its one buffer is computed.
        if "Failed to load weights" in message and "Rotary" not in layer:
            self.empty.append(layer)
        if "Delayed processing" in message:
            self.partial.append(layer)


class Engine:
    """A vLLM engine in this process, or split between `tp` neighboring ranks of a node.

    `init_distributed` comes first, and all ranks build their engines together.
    quantization "fp8_per_channel" is vLLM's own, of weights and activations of the
    linear layers; every `load_weights` quantizes anew.
    """

    def __init__(
        self,
        model: str,
        max_model_len: int,
        *,
        tp: int = 1,
        quantization: str = "none",
        dtype: str = "bfloat16",
        top_logprobs: int = 0,
        kv_cache_gb: float = 0.25,
        max_num_seqs: int = 256,
        can_sleep: bool = False,
        verbose: bool = False,
    ) -> None:
        if not verbose:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            # vLLM reads the variable too late for some of its first messages.
            logging.getLogger("vllm").setLevel("ERROR")
            warnings.filterwarnings("ignore", category=FutureWarning)
            transformers.utils.logging.disable_progress_bar()
        # Not at the top of the file: it takes seconds, and reads the variable above.
        from vllm import LLM

        cuda = torch.cuda.is_available()
        self.while_generating: Callable[[LLM], AbstractContextManager] = nullcontext
        if not cuda:
            # Before the engine is built, as it changes a layer of vLLM's.
            from support.vllm_on_cpu import faster_on_cpu

            self.while_generating = faster_on_cpu
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        vocabulary = config.get_text_config().vocab_size
        self.top_logprobs = min(top_logprobs, vocabulary)
        self.dtype = getattr(torch, dtype)
        self.max_model_len = max_model_len
        self.can_sleep = can_sleep and cuda  # vLLM can sleep on GPUs only.
        shares_memory = tp > 1 and not cuda
        with own_segments() if shares_memory else nullcontext():
            self.llm = LLM(
                model,
                trust_remote_code=False,
                dtype=dtype,
                quantization=None if quantization == "none" else quantization,
                # In this process and in its process group.
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=tp,
                # Log-probabilities of the distribution that was sampled from.
                logprobs_mode="processed_logprobs",
                max_logprobs=self.top_logprobs,
                # The head in float32, as in Policy.
                hf_overrides={"head_dtype": "float32"},
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                kv_cache_memory_bytes=int(kv_cache_gb * 2**30),
                # The cache has its size. vLLM wants this share of the memory to be
                # free, and does not use it.
                gpu_memory_utilization=0.01,
                enforce_eager=not cuda,
                enable_sleep_mode=self.can_sleep,
                use_tqdm_on_load=verbose,
                # On CPU vLLM cannot prefill a prompt that has its own seed in pieces.
                enable_chunked_prefill=cuda,
                max_num_batched_tokens=None if cuda else max(8192, max_model_len),
            )
        self.tokenizer = self.llm.get_tokenizer()
        self.incomplete = IncompleteLayers()
        self.padded_layers: Counter | None = None
        self.is_asleep = False
        if cuda:
            atexit.register(self.leave_unclosed)

    def sample(
        self, prompts: list[list[int]], n: int, seeds: list[int], **sampling: Any
    ) -> Rollouts:
        """n responses to each prompt (token ids); those to one prompt are neighbors.

        Response j to prompt i draws its noise from seeds[i] + j. `sampling` are vLLM's
        SamplingParams: temperature, top_p, top_k, max_tokens.
        Ranks that share an engine call it together, each with prompts of its own.
        """
        from vllm import SamplingParams, distributed

        # After a sync its entries are those of older weights. And a resumed run, which
        # is to sample the same, has none.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM kept its prefix cache: is another thread sampling?"
            )
        # The prompts of all ranks that share this engine, of which it answers all.
        tp_group = distributed.get_tp_group()
        pairs_by_rank: list = [None] * tp_group.world_size
        mine = list(zip(prompts, seeds, strict=True))
        dist.all_gather_object(pairs_by_rank, mine, tp_group.cpu_group)
        asked = [pair for pairs in pairs_by_rank for pair in pairs]
        outputs = self.generate(
            [prompt for prompt, _ in asked],
            [
                SamplingParams(
                    n=n,
                    seed=seed % 2**31,
                    logprobs=self.top_logprobs,  # beside the sampled token's own
                    flat_logprobs=True,
                    detokenize=False,
                    **sampling,
                )
                for _, seed in asked
            ],
        )
        first = sum(len(pairs) for pairs in pairs_by_rank[: tp_group.rank_in_group])
        return self.as_rollouts(outputs[first : first + len(prompts)])

    def generate(self, prompts: list[list[int]], sampling: Any) -> list:
        """vLLM's RequestOutputs for these prompts (token ids), with SamplingParams."""
        with self.while_generating(self.llm):
            return self.llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                sampling,
                use_tqdm=False,
            )

    def as_rollouts(self, outputs: list) -> Rollouts:
        """vLLM's RequestOutputs as one Rollouts."""
        tokens, prompt_length, responses = [], [], []
        listed_tokens, listed_logp = [], []
        truncated, versions = [], set()
        for output in outputs:
            prompt = output.prompt_token_ids
            for response in output.outputs:
                ids = list(response.token_ids)
                tokens.append(torch.tensor(prompt + ids))
                prompt_length.append(len(prompt))
                responses.append(ids)
                # For each token of the response vLLM lists it, and then the K most
                # likely ones. numpy reads a list faster than torch does.
                shape = (len(ids), 1 + self.top_logprobs)
                listed = response.logprobs
                token_ids = np.array(listed.token_ids, dtype=np.int64)
                listed_tokens.append(token_ids.reshape(shape))
                logp = np.array(listed.logprobs, dtype=np.float32)
                listed_logp.append(logp.reshape(shape))
                truncated.append(response.finish_reason == "length")
                versions.update(span.version for span in response.weight_versions)
        response_length = torch.tensor([len(ids) for ids in responses])
        t = torch.arange(int(response_length.max()))
        mask = t < response_length[:, None]  # [N, T]
        # [M, 1 + K] each, for M response tokens
        all_tokens = torch.from_numpy(np.concatenate(listed_tokens))
        all_logp = torch.from_numpy(np.concatenate(listed_logp))
        return Rollouts(
            tokens=pad_sequence(tokens, batch_first=True),
            prompt_length=torch.tensor(prompt_length),
            mask=mask,
            logp_behavior=padded(all_logp[:, 0], mask),
            top_tokens=padded(all_tokens[:, 1:], mask),
            top_logp_behavior=padded(all_logp[:, 1:], mask),
            truncated=torch.tensor(truncated),
            text=self.tokenizer.batch_decode(responses, skip_special_tokens=True),
            # One version, or something is very wrong.
            weight_version=" and ".join(sorted(versions)),
        )

    def log_probabilities(self, rollouts: Rollouts) -> torch.Tensor:
        """The engine's log-probabilities of these responses at temperature 1: [N, T].

        In nats, 0 where the mask is False. Ranks that share an engine ask for the same
        responses.
        """
        from vllm import SamplingParams

        prompts = []
        length = rollouts.prompt_length + rollouts.mask.sum(dim=1)
        for row, end in enumerate(length.tolist()):
            prompts.append(rollouts.tokens[row, :end].tolist())
        only_the_prompt = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            seed=0,
        )
        outputs = self.generate(prompts, only_the_prompt)
        log_probabilities = torch.zeros_like(rollouts.logp_behavior)
        for row, output in enumerate(outputs):
            # The first token of a prompt has no log-probability.
            first = int(rollouts.prompt_length[row]) - 1
            logp = torch.tensor(output.prompt_logprobs.logprobs)[first:]
            log_probabilities[row, : len(logp)] = logp
        return log_probabilities

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: str
    ) -> None:
        """Replace all weights, and call them `version`.

        `weights` are the (name, tensor) pairs of a state_dict, with both names of a
        tied head. vLLM gets copies, so each may be freed when the next one is asked
        for. It loads them as it loads a checkpoint, so fp8 is quantized anew. Raises
        Refused, on all ranks, where a layer got nothing, or less than in the first
        call. A collective.
        """

        def copies() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                yield name, weight.to(self.dtype, copy=True)

        if self.can_sleep:
            self.llm.wake_up(tags=["weights"])
        self.incomplete.empty.clear()
        self.incomplete.partial.clear()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies()})
        complaints: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(complaints, self.missing_weights())
        for complaint in complaints:
            if complaint:
                raise Refused(
                    f"the sync to weights {version!r} {complaint} of the engine: are "
                    "all names of the state_dict there, the tied head's too?"
                )
        if self.can_sleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.is_asleep = False
        self.llm.update_weight_version(version)

    def missing_weights(self) -> str:
        """What the last reload left out, as vLLM logged it; "" if nothing.

        vLLM never fills a layer that it has padded, so the first reload tells which
        layers those are. A layer that lacks weights since the first reload is found by
        support.probe, and in an on-policy run by check_on_policy as well.
        """
        from vllm import distributed

        partial = Counter(self.incomplete.partial)
        padded = partial if self.padded_layers is None else self.padded_layers
        too_little = set(partial - padded)
        # A rank's part of a small vocabulary may be padding alone, which gets nothing:
        # a layer is empty if no rank that shares this engine got a part of it.
        tp_group = distributed.get_tp_group()
        empty_of_ranks: list = [None] * tp_group.world_size
        empty = set(self.incomplete.empty)
        dist.all_gather_object(empty_of_ranks, empty, tp_group.cpu_group)
        empty = set.intersection(*empty_of_ranks)
        if empty:
            return f"brought nothing to a {', '.join(sorted(empty))}"
        if too_little:
            return f"left out a part of a {', '.join(sorted(too_little))}"
        self.padded_layers = padded
        return ""

    def sleep(self) -> None:
        """On CUDA, lend out the engine's memory until the next load_weights."""
        if self.can_sleep:
            self.llm.sleep(level=2)
            self.is_asleep = True

    def leave_unclosed(self) -> None:
        """At the end of a process that an error ended, on CUDA: leave at once.

        vLLM would free the memory of an engine that sleeps, which is free already
        (device_allocator/cumem.py), and CUDA would complain below what has been said.
        It would also destroy the process group, where NCCL waits for the other ranks,
        which wait for this one. After close() there is no group.
        """
        has_peers = dist.is_initialized() and dist.get_world_size() > 1
        if self.is_asleep or has_peers:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def close(self) -> None:
        """End the engine and the process group: the last thing that a rank does."""
        self.llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """Sample two responses to a prompt of the embedded task, and print them."""
    init_distributed()
    engine = Engine("tiny", 128, top_logprobs=3)
    prompt = engine.tokenizer.encode("<bos>478+805:", add_special_tokens=False)
    rollouts = engine.sample([prompt], 2, seeds=[0], temperature=1.2, max_tokens=64)
    for response in range(2):
        print(f"response {response}: {rollouts.text[response]!r}")
    print("\nits first tokens: log pi_b at T = 1.2, and the most likely tokens there")
    for t in range(6):
        token = engine.tokenizer.decode(
            rollouts.tokens[1, rollouts.prompt_length[1] + t]
        )
        top = [
            f"{engine.tokenizer.decode(top_token)!r} {logp:.3f}"
            for top_token, logp in zip(
                rollouts.top_tokens[1, t],
                rollouts.top_logp_behavior[1, t],
                strict=True,
            )
        ]
        print(f"  {token!r} {rollouts.logp_behavior[1, t]:8.3f}    {', '.join(top)}")
    engine.close()


if __name__ == "__main__":
    main()

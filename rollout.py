"""Rollouts: responses that a vLLM engine samples, and log pi_b of their tokens.

The behavior policy pi_b (see loss.py) is the distribution that vLLM really drew from:
after temperature, top-p and top-k, in the engine's precision. The engine runs inside
the trainer's process, with the same code on CPU and CUDA.
"""

import logging
import os
import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from support.command import Refused, Stopped, one_line
from support.models import load_tokenizer, model_folder, turn_end_tokens


@dataclass
class Rollouts:
    """N responses, padded right. Column t of [N, T] tensors is for response token t."""

    tokens: torch.Tensor  # [N, L] prompt, response with its end token, padding of -1
    prompt_length: torch.Tensor  # [N], the column of `tokens` where the response begins
    mask: torch.Tensor  # [N, T] bool: True on the response and its end token
    logp_behavior: torch.Tensor  # [N, T] log pi_b of the response tokens, nats
    top_tokens: torch.Tensor  # [N, T, K] pi_b's K most likely tokens at each position
    top_logp_behavior: torch.Tensor  # [N, T, K] log pi_b of top_tokens, nats
    truncated: torch.Tensor  # [N] bool: ended by max_tokens, not by an end token
    text: list[str]  # [N] the response without its end token
    weight_version: str  # names the weights that sampled these; "7" is after step 7
    gold: list[str] | None = None  # [N] the gold answer
    reward: torch.Tensor | None = None  # [N]
    advantage: torch.Tensor | None = None  # [N, T], equal on all tokens of a response

    def select(self, rows: torch.Tensor, device: torch.device) -> "Rollouts":
        """Return these rows on this device, without columns that are all padding."""
        in_response = self.mask[rows].any(dim=0)  # [T]
        in_sequence = (self.tokens[rows] >= 0).any(dim=0)  # [L]
        selected = {}
        for name, value in vars(self).items():
            if isinstance(value, list):
                selected[name] = [value[row] for row in rows]
            elif isinstance(value, torch.Tensor):
                value = value[rows]
                if value.dim() > 1:
                    columns = in_sequence if name == "tokens" else in_response
                    value = value[:, columns]
                selected[name] = value.to(device)
        return replace(self, **selected)


def prompts_of_rank(prompt_count: int) -> range:
    """Return the indices of this rank's prompts: r, r + w, r + 2w, ... for rank r of w.

    The responses to one prompt are a group, which is never divided among ranks. In
    training, Config ensures that all ranks have equally many prompts. In an evaluation
    a rank may have none; eval.evaluate then gives it the first problem, so that it
    takes part in every collective.
    """
    return range(dist.get_rank(), prompt_count, dist.get_world_size())


def noise_seed(seed: int, group: int, samples: int) -> int:
    """Return the noise seed of a group's first sample; sample j has this seed plus j.

    Every group has `samples` samples, so different groups share no seed.
    The first noise seed of a run is a pseudorandom function of `seed`, so that runs
    with different seeds hardly ever share one.
    """
    return random.Random(seed).getrandbits(31) + group * samples


def unlink_shared_memory() -> None:
    """Unlink the shared memory through which ranks share an engine on a CPU.

    Call this after every rank has opened it. The memory is freed when the last rank
    exits, so a later run finds nothing stale.
    """
    for line in open("/proc/self/maps"):
        if "-cpushm" in line:  # /dev/shm/...-cpushm_0, of rank 0
            Path(line.split()[5]).unlink(missing_ok=True)


def silence_vllm() -> None:
    """Make vLLM print only errors. Call this before vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM reads the variable too late for some of its first messages.
    logging.getLogger("vllm").setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)


# The arguments of vllm.LLM that are the same for every engine.
LLM_OPTIONS = {
    # log pi_b is taken after temperature, top-p and top-k.
    "logprobs_mode": "processed_logprobs",
    # The head is applied in float32, as in Policy.
    "hf_overrides": {"head_dtype": "float32"},
    "distributed_executor_backend": "external_launcher",  # runs in this process
    # Mistral's repositories also have files in Mistral's own format, not read here.
    "config_format": "hf",
    "tokenizer_mode": "hf",
    # vLLM only checks that this share of the memory is free. The size of
    # the KV cache is set by kv_cache_memory_bytes.
    "gpu_memory_utilization": 0.01,
    "use_tqdm_on_load": False,  # Draw no progress bar on stderr.
}


class Engine:
    """A vLLM engine in this process, or split between `tp` neighboring ranks of a node.

    Call `init_distributed` first; all ranks build their engines together. With
    quantization "fp8_per_channel", vLLM computes linear layers in fp8, and quantizes
    their weights anew in every `load_weights`. load_format "hf" reads the files that
    support/models.py has checked. "dummy" starts with random weights, so that
    policy.check_sync notices a weight that was not loaded. max_model_len is in tokens,
    kv_cache_gb in GB of 2^30 bytes, and top_logprobs is K. Raises Refused with vLLM's
    reason if it cannot build the engine, for example because the KV cache is too small
    for one response or exceeds the free memory.
    """

    asleep = False
    show_progress = False  # whether to draw a progress bar on stderr

    def __init__(
        self,
        model: str,
        max_model_len: int,
        *,
        load_format: str = "hf",
        tp: int = 1,
        quantization: str = "none",
        dtype: str = "float32",
        top_logprobs: int = 0,
        kv_cache_gb: float = 0.25,
        max_num_seqs: int = 256,
        can_sleep: bool = False,
        verbose: bool = False,
    ) -> None:
        if not verbose:
            silence_vllm()
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # It would override kv_cache_gb.
        # Imported here and not at the top: importing vLLM takes seconds, and it reads
        # the environment variables set above.
        from vllm import LLM, distributed

        cuda = torch.cuda.is_available()
        self.dtype = getattr(torch, dtype)
        self.quantization = quantization
        model = model_folder(model)
        self.can_sleep = can_sleep and cuda  # vLLM can sleep on GPUs only.
        if cuda and dist.get_rank() == 0:
            print("vLLM captures CUDA graphs, which takes a minute or more", flush=True)
        try:
            self.llm = LLM(
                model,
                **LLM_OPTIONS,
                trust_remote_code=False,
                load_format=load_format,
                dtype=dtype,
                quantization=None if quantization == "none" else quantization,
                tensor_parallel_size=tp,
                max_logprobs=top_logprobs,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                kv_cache_memory_bytes=int(kv_cache_gb * 2**30),
                enforce_eager=not cuda,
                enable_sleep_mode=self.can_sleep,
                # On a CPU vLLM cannot prefill in chunks if requests have seeds.
                enable_chunked_prefill=cuda,
                # The samples of a prompt share only the blocks of the KV cache that
                # the prompt fills completely. On a CPU a block has 128 tokens by
                # default, more than many prompts have.
                block_size=None if cuda else 32,
                max_num_batched_tokens=None if cuda else max(8192, max_model_len),
            )
        except (ValueError, torch.OutOfMemoryError) as error:
            raise Refused(
                f"vLLM cannot build an engine for {model} with kv_cache_gb "
                f"{kv_cache_gb}: {one_line(error)}"
            ) from error
        self.top_logprobs = min(
            top_logprobs, self.llm.llm_engine.model_config.get_vocab_size()
        )
        if tp > 1 and not cuda:
            unlink_shared_memory()
            # Drop the message queue that vLLM makes for these ranks: it is not used.
            distributed.get_tp_group().mq_broadcaster = None
        self.tokenizer = load_tokenizer(model)
        # Without these stop tokens, a base model with a chat template may continue
        # after the end of its turn.
        self.turn_end_tokens = turn_end_tokens(self.tokenizer)

    def sample(
        self,
        prompts: list[list[int]],
        n: int,
        seeds: list[int],
        **sampling: Any,
    ) -> Rollouts:
        """Sample n responses to each prompt (token ids), as adjacent rows.

        Response j to prompt i has noise seed seeds[i] + j. `sampling` has further
        fields of vLLM's SamplingParams: temperature (0: greedy), top_p, top_k,
        max_tokens. Ranks that share an engine call this together, each with its own
        prompts. Raises RuntimeError while the engine sleeps.
        """
        from vllm import SamplingParams, distributed

        if self.asleep:
            raise RuntimeError("the engine sleeps: call wake_up and load_weights first")
        # The prefix cache holds results of older weights. Moreover, a resumed run,
        # whose cache is empty, has to sample what an uninterrupted run samples.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM kept its prefix cache: is another thread sampling?"
            )
        # The engine answers the prompts of all ranks that share it.
        tp_group = distributed.get_tp_group()
        requests_by_rank = [None] * tp_group.world_size
        dist.all_gather_object(
            requests_by_rank, list(zip(prompts, seeds, strict=True)), tp_group.cpu_group
        )
        all_requests = sum(requests_by_rank, [])
        # This rank's requests follow those of the ranks before it.
        first = sum(map(len, requests_by_rank[: tp_group.rank_in_group]))
        own = range(first, first + len(prompts))
        # On CPUs with AMX but without AMX-FP16 (Sapphire Rapids), torch 2.13 leaves fp8
        # matrix products to oneDNN, which takes 60 times as long as torch itself.
        torch.backends.mkldnn.enabled = self.quantization == "none"
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in all_requests],
            [
                SamplingParams(
                    n=n,
                    seed=seed,
                    # The log-probabilities take 2 KB per token, so a rank asks for
                    # those of its own prompts only.
                    logprobs=self.top_logprobs if i in own else None,
                    flat_logprobs=True,
                    detokenize=False,
                    stop_token_ids=self.turn_end_tokens,
                    **sampling,
                )
                for i, (_, seed) in enumerate(all_requests)
            ],
            use_tqdm=self.show_progress,
        )
        torch.backends.mkldnn.enabled = True
        return self.as_rollouts([outputs[i] for i in own])

    def as_rollouts(self, outputs: list) -> Rollouts:
        """Turn vLLM's RequestOutputs into one Rollouts.

        The log-probabilities are log pi_b because of LLM_OPTIONS["logprobs_mode"].
        """
        prompts = [each.prompt_token_ids for each in outputs for _ in each.outputs]
        responses = [response for output in outputs for response in output.outputs]
        # At each position vLLM lists the sampled token, then the K most likely ones.
        shape = -1, 1 + self.top_logprobs

        def read(values: list, dtype: type) -> torch.Tensor:  # [T, 1 + K]
            # numpy reads a list faster than torch does.
            return torch.from_numpy(np.array(values, dtype).reshape(shape))

        pad = partial(pad_sequence, batch_first=True)
        all_tokens = pad(  # [N, T, 1 + K]
            [read(r.logprobs.token_ids, np.int64) for r in responses], padding_value=-1
        )
        all_logp = pad(  # [N, T, 1 + K]
            [read(r.logprobs.logprobs, np.float32) for r in responses]
        )
        sequences = [
            torch.tensor([*prompt, *response.token_ids])
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        # A ValueError here means that the weights changed during sampling.
        [version] = {span.version for r in responses for span in r.weight_versions}
        return Rollouts(
            tokens=pad(sequences, padding_value=-1),
            prompt_length=torch.tensor([len(prompt) for prompt in prompts]),
            mask=all_tokens[:, :, 0] >= 0,
            logp_behavior=all_logp[:, :, 0],  # the sampled token's
            top_tokens=all_tokens[:, :, 1:],
            top_logp_behavior=all_logp[:, :, 1:],
            truncated=torch.tensor([r.finish_reason == "length" for r in responses]),
            # Special tokens are kept, because in some models <think> and </think> are
            # special tokens, and reward.py needs them.
            text=self.tokenizer.batch_decode(
                [
                    r.token_ids[: -1 if r.finish_reason == "stop" else None]
                    for r in responses
                ]
            ),
            weight_version=version,
        )

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: str
    ) -> None:
        """Replace all weights and name them `version`. A collective.

        `weights` yields the (name, tensor) pairs of a state_dict, including both names
        of a tied head, in the trainer's float32. vLLM gets copies in this engine's
        dtype, so the caller may free each tensor afterwards. vLLM loads them like a
        checkpoint: an fp8 engine quantizes them anew.
        """
        copies = ((name, weight.to(self.dtype, copy=True)) for name, weight in weights)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
        self.llm.update_weight_version(version)

    def sleep(self) -> None:
        """Forbid sampling until wake_up; if can_sleep, also free memory until then.

        The weights and the KV cache are freed, but not CUDA graphs and NCCL's buffers.
        """
        self.asleep = True
        if self.can_sleep:
            self.llm.sleep(level=2)

    def wake_up(self) -> None:
        """Allocate the freed memory again. Weights are undefined until load_weights.

        Raises Stopped if the GPU has too little free memory.
        """
        self.asleep = False
        if not self.can_sleep:
            return
        torch.cuda.empty_cache()
        try:
            self.llm.wake_up()
        except RuntimeError as error:
            raise Stopped(
                "the engine cannot take back the memory that it lent to the update "
                f"({one_line(error)}): give a smaller kv_cache_gb, and look in "
                "nvidia-smi for other programs; --resume continues from the newest "
                "checkpoint, if there is one"
            ) from error

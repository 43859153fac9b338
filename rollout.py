"""Rollouts: what the vLLM engine samples, and with which probability it does.

The behavior policy pi_b of (7) and (12) is what vLLM really drew from: after
temperature, top-p and top-k, in the engine's precision. The engine runs inside the
trainer's process, by the same code on CPU and CUDA.
"""

import logging
import os
import random
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from support.command import Refused, Stopped


@dataclass
class Rollouts:
    """N responses, padded on the right. Column t of [N, T]: a response's t-th token."""

    tokens: torch.Tensor  # [N, L] prompt, response with its end of sequence, padding
    prompt_length: torch.Tensor  # [N], the column of `tokens` where the response begins
    mask: torch.Tensor  # [N, T] bool: True on response tokens
    logp_behavior: torch.Tensor  # [N, T] log pi_b of the response tokens, nats
    top_tokens: torch.Tensor  # [N, T, K] the K tokens that pi_b finds most likely there
    top_logp_behavior: torch.Tensor  # [N, T, K] log pi_b of these, nats
    truncated: torch.Tensor  # [N] bool: ended by max_tokens, not by an end of sequence
    text: list[str]  # [N] the response without its end of sequence
    weight_version: str  # of the weights that sampled: the step they are from
    gold: list[str] | None = None  # [P] the right answer to each prompt of the batch
    reward: torch.Tensor | None = None  # [N]
    advantage: torch.Tensor | None = None  # [N, T], the same for a response's tokens

    def select(self, rows: torch.Tensor, device: torch.device) -> "Rollouts":
        """These responses on this device, as wide as the longest of them needs.

        Columns that are all padding are cut.
        """
        response_length = self.mask[rows].sum(dim=1)
        response_columns = int(response_length.max())
        token_columns = int((self.prompt_length[rows] + response_length).max())
        chosen = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                value = value[rows]
                if value.dim() > 1:
                    columns = token_columns if name == "tokens" else response_columns
                    value = value[:, :columns]
                chosen[name] = value.to(device)
        return replace(self, text=[self.text[row] for row in rows], **chosen)


def prompts_of_rank(prompt_count: int) -> range:
    """Which of the prompts this rank samples: r, r + w, r + 2w, ... for rank r of w.

    The responses to a prompt are a group, which is never divided among ranks.
    """
    return range(dist.get_rank(), prompt_count, dist.get_world_size())


def noise_seed(seed: int, place: int, samples: int) -> int:
    """The seed of sample 0 of the prompt at `place` of a run; sample j has seed + j.

    Each prompt has `samples` of them, so no two rollouts of a run have the same noise.
    The first seed of a run is a random number, so that two runs hardly ever share any.
    """
    return random.Random(seed).getrandbits(31) + place * samples


def free_shared_memory() -> None:
    """Take the name from the memory that ranks of an engine share on a CPU.

    They have found it by then. Without a name it is freed when the last of them ends,
    and a later run finds none of it.
    """
    for line in open("/proc/self/maps"):
        if "-cpushm" in line:  # /dev/shm/...-cpushm_0, of rank 0
            Path(line.split()[5]).unlink(missing_ok=True)


# What every engine asks of vLLM.
OPTIONS = {
    # log pi_b: after temperature, top-p and top-k.
    "logprobs_mode": "processed_logprobs",
    # The head in float32, as in Policy.
    "hf_overrides": {"head_dtype": "float32"},
    "distributed_executor_backend": "external_launcher",  # in this process
    # transformers' files: Mistral's repositories have others, too.
    "config_format": "hf",
    "tokenizer_mode": "hf",
    # vLLM only checks that this share is free, as kv_cache_memory_bytes sets the size.
    "gpu_memory_utilization": 0.01,
    # With it sampling is 1 to 5% faster, but paused engines lost tokens (vLLM's pull
    # requests 23914 and 42042).
    "async_scheduling": False,
}


class Engine:
    """A vLLM engine in this process, or split between `tp` neighboring ranks of a node.

    `init_distributed` comes first, and all ranks build their engines together.
    quantization "fp8_per_channel" is vLLM's own, of weights and activations of the
    linear layers; every `load_weights` quantizes anew. load_format "hf" reads the files
    that support/models.py has checked, and "dummy" begins with random weights, so that
    a weight which `load_weights` never brings shows at once.
    max_model_len is in tokens, and top_logprobs is K. Raises Refused where the KV cache
    is too small for one response, or weights and cache are larger than the free memory.
    """

    asleep = False
    show_progress = False  # a bar on stderr

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
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            # vLLM reads the variable too late for some of its first messages.
            logging.getLogger("vllm").setLevel("ERROR")
            warnings.filterwarnings("ignore", category=FutureWarning)
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # It overrides kv_cache_gb.
        # Not at the top of the file: it takes seconds, and reads the variables above.
        from transformers import AutoConfig
        from vllm import LLM, distributed

        cuda = torch.cuda.is_available()
        self.dtype = getattr(torch, dtype)
        self.quantization = quantization
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        self.top_logprobs = min(top_logprobs, config.get_text_config().vocab_size)
        self.can_sleep = can_sleep and cuda  # vLLM can sleep on GPUs only.
        if cuda and dist.get_rank() == 0:
            print("vLLM prepares CUDA graphs: a minute or more", flush=True)
        try:
            self.llm = LLM(
                model,
                **OPTIONS,
                trust_remote_code=False,
                load_format=load_format,
                dtype=dtype,
                quantization=None if quantization == "none" else quantization,
                tensor_parallel_size=tp,
                max_logprobs=self.top_logprobs,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                kv_cache_memory_bytes=int(kv_cache_gb * 2**30),
                enforce_eager=not cuda,
                enable_sleep_mode=self.can_sleep,
                use_tqdm_on_load=verbose,
                # On a CPU vLLM cannot prefill in pieces where each request has a seed.
                enable_chunked_prefill=cuda,
                max_num_batched_tokens=None if cuda else max(8192, max_model_len),
            )
        except (ValueError, RuntimeError) as error:
            # The path of a model may have "cache" in it, too.
            about_memory = ("cache blocks", "kv cache", "free memory", "out of memory")
            if not any(words in str(error).lower() for words in about_memory):
                raise
            reason, *_ = str(error).split(". ")  # then vLLM's advice on other options
            hint = "; nvidia-smi shows what else uses the GPU" if cuda else ""
            raise Refused(f"kv_cache_gb is {kv_cache_gb}: {reason}{hint}") from None
        if tp > 1 and not cuda:
            free_shared_memory()
            # Nor is vLLM's queue between these ranks used here. It frees its own.
            distributed.get_tp_group().mq_broadcaster = None
        self.tokenizer = self.llm.get_tokenizer()

    def as_current(self) -> Any:
        """A context in which the policy of the same model can be built.

        Models that vLLM has no code of its own for are sampled by transformers'
        classes, which it prepares for its compiler: they then ask for its config.
        """
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.llm.llm_engine.vllm_config)

    def sample(
        self,
        prompts: list[list[int]],
        n: int,
        seeds: list[int],
        **sampling: Any,
    ) -> Rollouts:
        """n responses to each prompt (token ids); those to one prompt are neighbors.

        Response j to prompt i draws its noise from seeds[i] + j. `sampling` are others
        of vLLM's SamplingParams: temperature (0: greedy), top_p, top_k, max_tokens.
        Ranks that share an engine call it together, each with prompts of its own.
        RuntimeError while it sleeps.
        """
        from vllm import SamplingParams, distributed

        if self.asleep:
            raise RuntimeError("the engine sleeps: load_weights wakes it up")
        # The prefix cache holds what older weights computed. And a resumed run begins
        # with an empty one, and has to sample what a run without a break does.
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
        all_requests = [request for rank in requests_by_rank for request in rank]
        # This rank's own come behind those of the ranks before it.
        first = sum(map(len, requests_by_rank[: tp_group.rank_in_group]))
        own = range(first, first + len(prompts))
        # Where a CPU has AMX but not for fp16, as Sapphire Rapids, torch multiplies fp8
        # by oneDNN's plain loops, which are 60 times slower than torch's own way.
        torch.backends.mkldnn.enabled = self.quantization == "none"
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in all_requests],
            [
                SamplingParams(
                    n=n,
                    seed=seed % 2**31,
                    # For this rank's own prompts alone, as they take 2 KB a token.
                    logprobs=self.top_logprobs if i in own else None,
                    flat_logprobs=True,
                    detokenize=False,
                    **sampling,
                )
                for i, (_, seed) in enumerate(all_requests)
            ],
            use_tqdm=self.show_progress,
        )
        torch.backends.mkldnn.enabled = True
        return self.as_rollouts([outputs[i] for i in own])

    def as_rollouts(self, outputs: list) -> Rollouts:
        """vLLM's RequestOutputs as one Rollouts.

        Their log-probabilities are log pi_b, as OPTIONS asks for processed_logprobs.
        """
        prompts = [
            output.prompt_token_ids for output in outputs for _ in output.outputs
        ]
        responses = [response for output in outputs for response in output.outputs]
        listed_tokens, listed_logp = [], []
        # At each position vLLM lists the sampled token, and then the K likeliest.
        shape = -1, 1 + self.top_logprobs
        for response in responses:
            listed = response.logprobs
            # numpy reads a list faster than torch does.
            token_ids = np.array(listed.token_ids, dtype=np.int64)
            listed_tokens.append(torch.from_numpy(token_ids.reshape(shape)))
            logp = np.array(listed.logprobs, dtype=np.float32)
            listed_logp.append(torch.from_numpy(logp.reshape(shape)))
        all_tokens = pad_sequence(listed_tokens, batch_first=True)  # [N, T, 1 + K]
        all_logp = pad_sequence(listed_logp, batch_first=True)  # [N, T, 1 + K]
        length = torch.tensor([len(response.token_ids) for response in responses])
        sequences = [
            torch.tensor(prompt + list(response.token_ids))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        # ValueError if there are several: then the weights changed during sampling.
        [version] = {span.version for r in responses for span in r.weight_versions}
        return Rollouts(
            tokens=pad_sequence(sequences, batch_first=True),
            prompt_length=torch.tensor([len(prompt) for prompt in prompts]),
            mask=torch.arange(all_logp.shape[1]) < length[:, None],
            logp_behavior=all_logp[:, :, 0],  # the sampled token's
            top_tokens=all_tokens[:, :, 1:],
            top_logp_behavior=all_logp[:, :, 1:],
            truncated=torch.tensor([r.finish_reason == "length" for r in responses]),
            # Tags of thoughts are special tokens in some models, and stay.
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
        """Replace all weights, and call them `version`. A collective.

        `weights` are the (name, tensor) pairs of a state_dict, with both names of a
        tied head, in the trainer's float32. vLLM gets copies in this engine's dtype, so
        the caller may free each tensor afterwards. It loads them as it loads a
        checkpoint: where the engine computes in fp8, it quantizes them to fp8 anew.
        """
        copies = ((name, weight.to(self.dtype, copy=True)) for name, weight in weights)
        self.wake_up("weights")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
        self.wake_up("kv_cache")
        self.llm.update_weight_version(version)
        self.asleep = False

    def sleep(self) -> None:
        """On CUDA, lend out the engine's memory until the next load_weights.

        Its CUDA graphs and NCCL's buffers stay.
        """
        self.asleep = True
        if self.can_sleep:
            self.llm.sleep(level=2)

    def wake_up(self, part: str) -> None:
        """On CUDA, take the memory of this part back: "weights" or "kv_cache"."""
        if not self.can_sleep:
            return
        torch.cuda.empty_cache()
        try:
            self.llm.wake_up(tags=[part])
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise Stopped(
                f"the GPU has too little free memory for the engine's {part}, which it "
                "lent to the update: give a smaller kv_cache_gb, and see nvidia-smi "
                "for other programs; --resume goes on from the newest checkpoint"
            ) from error

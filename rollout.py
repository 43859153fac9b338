"""Rollouts: what the vLLM engine samples, and the log-probability with which it does.

pi_b, the behavior policy of (1), is what vLLM really sampled from: after temperature, top-p and
top-k, in the engine's precision. It runs in the trainer's process, on CPU and CUDA by the same
code. Run this file to measure how far an engine is from its trainer:

    python rollout.py --model tiny --rollout_quantization fp8_per_channel --temperature 1.2
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

if "--verbose" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
import torch
import torch.distributed as dist
import transformers
from torch.nn.utils.rnn import pad_sequence

QUANTIZATIONS = ("none", "fp8_per_channel", "fp8_emulated")


@dataclass
class Rollouts:
    """N responses, right-padded; column t of an [N, T] tensor is the t-th token of the response."""

    tokens: torch.Tensor  # [N, L] prompt, response (a sampled end of sequence included), padding
    prompt_length: torch.Tensor  # [N]; response token t stands at position prompt_length + t
    mask: torch.Tensor  # [N, T] bool: True on response tokens
    logp_behavior: torch.Tensor  # [N, T] log pi_b, nats
    truncated: torch.Tensor  # [N] bool: ended by max_tokens, not by an end of sequence
    text: list[str]  # [N] the response without special tokens
    weight_version: str  # of the weights that sampled
    reward: torch.Tensor | None = None  # [N]
    advantage: torch.Tensor | None = None  # [N]
    logp_prox: torch.Tensor | None = None  # [N, T] log pi_theta before the first update on them

    def rows(self, rows: list[int], device: torch.device | str = "cpu") -> "Rollouts":
        """These rows, without needless padding; no rows: one of padding, for a rank has to run."""
        if not rows:
            nothing = self.rows([0], device)
            return replace(nothing, mask=torch.zeros_like(nothing.mask))
        columns = int(self.mask[rows].sum(1).max())  # T of the rows
        length = int((self.prompt_length + self.mask.sum(1))[rows].max())  # L of the rows
        part = {name: x[rows] for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        for name, x in part.items():
            if x.dim() == 2:
                x = x[:, : length if name == "tokens" else columns]
            part[name] = x.to(device)
        return replace(self, text=[self.text[i] for i in rows], **part)


def init_distributed() -> dist.DeviceMesh:
    """Join torchrun's group, or be its only rank; returns the mesh (node, rank) or (rank,).
    Before the engine, which would otherwise make a group of its own, of the wrong size."""
    if "RANK" not in os.environ:  # no torchrun; port 0 is any free one
        alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_PORT=0)
        os.environ.update({k: str(v) for k, v in alone.items()}, MASTER_ADDR="127.0.0.1")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // local
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        # torchrun gives each of several ranks one thread; the engine keeps the number it finds.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
    shape, names = ((nodes, local), ("node", "rank")) if nodes > 1 else ((local,), ("rank",))
    return dist.init_device_mesh(device.type, shape, mesh_dim_names=names)


def fp8_round(weight: torch.Tensor) -> torch.Tensor:
    """A linear weight [out, in] rounded to float8_e4m3 (at most 448), one scale an output."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1 / 512) / 448  # [out, 1]
    rounded = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)  # [out, in]
    return (rounded.float() * scale).to(weight.dtype)


class Engine:
    """A vLLM engine in this process, or, split between them, in `tp` neighbouring ranks of a node.

    `init_distributed` comes first, and all ranks build together. quantization "fp8_per_channel" is
    vLLM's own, of weights and activations, done anew by every `load_weights`. "fp8_emulated" has
    `load_weights` round the weights, and computes in `dtype`.
    """

    def __init__(
        self,
        model: str,
        max_model_len: int,
        *,
        tp: int = 1,
        quantization: str = "none",
        dtype: str = "bfloat16",
        kv_cache_gb: float = 0.25,
        max_num_seqs: int = 256,
        can_sleep: bool = False,
        verbose: bool = False,
    ) -> None:
        if not verbose:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            logging.getLogger("vllm").setLevel("ERROR")  # for what it says before it reads that
            warnings.filterwarnings("ignore", category=FutureWarning)
            transformers.utils.logging.disable_progress_bar()
        from vllm import LLM  # not above: it takes seconds, and reads the level when imported

        cuda = torch.cuda.is_available()
        self.quantization, self.dtype = quantization, getattr(torch, dtype)
        self.can_sleep = can_sleep and cuda  # vLLM sleeps on GPUs only
        self.llm = LLM(
            model,
            dtype=dtype,
            quantization="fp8_per_channel" if quantization == "fp8_per_channel" else None,
            distributed_executor_backend="external_launcher",  # in this process, in its group
            tensor_parallel_size=tp,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
            hf_overrides={"head_dtype": "float32"},  # as in Policy
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=int(kv_cache_gb * 2**30),
            gpu_memory_utilization=0.01,  # not used, as the cache has its size; but it must be free
            enforce_eager=not cuda,
            enable_sleep_mode=self.can_sleep,
            use_tqdm_on_load=verbose,
            enable_chunked_prefill=cuda,  # on CPU vLLM cannot split a prompt that has its own seed
            max_num_batched_tokens=None if cuda else max(8192, max_model_len),
        )
        self.tokenizer = self.llm.get_tokenizer()

    def sample(self, prompts: list[list[int]], n: int, seeds: list[int], **sampling) -> Rollouts:
        """n responses to each prompt (token ids), those to one prompt next to each other.

        Response j to prompt i draws its noise from seeds[i] + j; `sampling` as SamplingParams.
        Ranks that share an engine call it together, each with prompts of its own."""
        from vllm import SamplingParams, distributed

        if not self.llm.reset_prefix_cache():  # stale after a sync, missing in a resumed run
            raise RuntimeError("vLLM kept its prefix cache: is another thread sampling?")
        sampling |= dict(n=n, logprobs=0, flat_logprobs=True, detokenize=False)  # the token's own
        sharing, mine = distributed.get_tp_group(), list(zip(prompts, seeds, strict=True))
        asked: list = [None] * sharing.world_size  # of the ranks that share this engine
        dist.all_gather_object(asked, mine, sharing.cpu_group)
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for part in asked for prompt, _ in part],
            [SamplingParams(seed=s % 2**31, **sampling) for part in asked for _, s in part],
            use_tqdm=False,
        )
        own = outputs[sum(map(len, asked[: sharing.rank_in_group])) :][: len(prompts)]
        sampled = [(output.prompt_token_ids, r) for output in own for r in output.outputs]
        versions = {span.version for _, r in sampled for span in r.weight_versions}
        padded = partial(pad_sequence, batch_first=True)
        return Rollouts(
            tokens=padded([torch.tensor(prompt + list(r.token_ids)) for prompt, r in sampled]),
            prompt_length=torch.tensor([len(prompt) for prompt, _ in sampled]),
            mask=padded([torch.ones(len(r.token_ids), dtype=torch.bool) for _, r in sampled]),
            logp_behavior=padded([torch.tensor(r.logprobs.logprobs) for _, r in sampled]),
            truncated=torch.tensor([r.finish_reason == "length" for _, r in sampled]),
            text=[self.tokenizer.decode(r.token_ids, skip_special_tokens=True) for _, r in sampled],
            weight_version=" and ".join(sorted(versions)),  # one, or something is very wrong
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        """Replace all weights by the (name, tensor) pairs of a state_dict, tied head included. They
        may be gathered one by one and freed again: vLLM has copies. `version` labels samples."""

        def as_loaded() -> Iterator[tuple[str, torch.Tensor]]:
            for name, w in weights:
                # fp8 as vLLM's own: of linear layers, but neither of the embedding nor of the head.
                linear = w.dim() == 2 and "embed" not in name and "lm_head" not in name
                fp8 = linear and self.quantization == "fp8_emulated"
                yield name, fp8_round(w.to(self.dtype)) if fp8 else w.to(self.dtype, copy=True)

        if self.can_sleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=as_loaded()))
        if self.can_sleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.update_weight_version(version)

    def sleep(self) -> None:
        """On CUDA, lend out the memory of weights and KV cache until the next `load_weights`."""
        if self.can_sleep:
            self.llm.sleep(level=2)

    def close(self) -> None:
        """End the engine and, with it, the process group: the last thing that a rank does."""
        self.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    from experiments.meter import main  # it needs loss.py and policy.py, which this file does not

    main()

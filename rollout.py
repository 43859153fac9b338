"""Rollouts: both sides of the policy ratio (1), what the engine sampled and how the trainer scores it.

    pi_b      the behavior policy: the distribution that vLLM really sampled from, after temperature,
              top-p and top-k, in the engine's precision; its log-probabilities come with the samples
    pi_theta  the policy: the trainer's forward pass over the same tokens (`response_logp`)

The engine lives in the trainer's process, one a rank, on CPU and on CUDA by the same code. Run this
file to measure how far an engine is from its trainer, for any model folder or hub name:

    python rollout.py --model tiny --rollout_quantization fp8_per_channel --temperature 1.2
"""

import argparse
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

QUANTIZATIONS = ("none", "fp8_per_channel", "fp8_emulated")


@dataclass
class Batch:
    """B responses as right-padded tensors; column t of a [B, T] tensor is the t-th response token."""

    tokens: torch.Tensor  # [B, L] prompt, response, padding
    prompt_length: torch.Tensor  # [B]; response token t stands at position prompt_length + t
    mask: torch.Tensor  # [B, T] bool, True on response tokens
    logp_behavior: torch.Tensor  # [B, T] log pi_b, nats
    advantage: torch.Tensor | None  # [B]
    logp_prox: torch.Tensor | None  # [B, T]


@dataclass
class Rollouts:
    """N responses of one rank in one step; the G responses to a prompt stand next to each other."""

    prompt_index: list[int]  # [N] which problem of the task
    prompt_ids: list[list[int]]  # [N][P_i] token ids
    response_ids: list[list[int]]  # [N][R_i] token ids, a sampled end of sequence included
    logp_behavior: list[list[float]]  # [N][R_i] log pi_b, nats
    truncated: list[bool]  # [N] ended by max_tokens, not by an end of sequence
    text: list[str]  # [N] the response without special tokens
    weight_version: str  # of the weights that sampled
    reward: torch.Tensor | None = None  # [N]
    advantage: torch.Tensor | None = None  # [N]
    logp_prox: list[list[float]] | None = None  # [N][R_i] log pi_theta before the first update on them

    def batch(self, rows: list[int], device: torch.device | str = "cpu") -> Batch:
        """These rows as tensors; no rows give one row of padding, for a rank always has to run."""
        responses = [self.response_ids[i] for i in rows] or [[]]
        prompts = [self.prompt_ids[i] for i in rows] or [[0, 0]]
        length = torch.tensor([len(r) for r in responses])  # [B]

        def padded(sequences: list[list]) -> torch.Tensor:
            return pad_sequence([torch.tensor(s) for s in sequences], batch_first=True).to(device)

        def aligned(values: list[list[float]]) -> torch.Tensor:
            return padded([values[i] for i in rows] or [[0.0]])  # [B, T]

        return Batch(
            tokens=padded([p + r for p, r in zip(prompts, responses, strict=True)]),
            prompt_length=torch.tensor([len(p) for p in prompts], device=device),
            mask=(torch.arange(max(1, length.max())) < length[:, None]).to(device),
            logp_behavior=aligned(self.logp_behavior),
            advantage=None if self.advantage is None else self.advantage[rows or [0]].to(device),
            logp_prox=None if self.logp_prox is None else aligned(self.logp_prox),
        )


def response_logp(
    model: torch.nn.Module, batch: Batch, temperature: float = 1.0, chunk: int = 1024
) -> torch.Tensor:
    """log pi_theta of the response tokens, [B, T] float32 in nats, 0 where the mask is False.

    `model` is a causal language model of transformers with a linear head (Llama, Qwen). Right padding
    needs no attention mask: no token sees a later one. The head is applied in float32, to response
    positions alone, `chunk` at a time, and again in the backward pass: no [tokens, vocabulary]
    tensor is ever kept.
    """
    hidden = model.base_model(
        input_ids=batch.tokens, use_cache=False
    ).last_hidden_state  # [B, L, D]
    row, t = batch.mask.nonzero(as_tuple=True)  # [M] each, for M response tokens
    position = (
        batch.prompt_length[row] + t
    )  # [M]; predicted by the hidden state one position earlier
    hidden, target = hidden[row, position - 1], batch.tokens[row, position]  # [M, D], [M]
    head = model.get_output_embeddings().weight  # [V, D]

    def chunk_logp(hidden: torch.Tensor, target: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits = hidden.float() @ head.float().T / temperature  # [chunk, V]
        return -torch.nn.functional.cross_entropy(logits, target, reduction="none")  # [chunk]

    chunks = zip(hidden.split(chunk), target.split(chunk), strict=True)
    logp = [checkpoint(chunk_logp, h, y, head, use_reentrant=False) for h, y in chunks]
    return hidden.new_zeros(batch.mask.shape).float().masked_scatter(batch.mask, torch.cat(logp))


def init_distributed() -> torch.distributed.DeviceMesh:
    """Join torchrun's process group, or be its only rank; returns the mesh (node, rank) or (rank,).

    It comes before the engine, which would otherwise make a group of its own, with the wrong size.
    """
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR="127.0.0.1")
    if "RANK" not in os.environ:
        os.environ.update(
            {k: str(v) for k, v in alone.items()}, MASTER_PORT="0"
        )  # 0: any free port
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // per_node
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
        # torchrun gives each of several ranks one thread; the engine freezes the number it finds.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // per_node))
    shape = (nodes, per_node) if nodes > 1 else (per_node,)
    return dist.device_mesh.init_device_mesh(device.type, shape)


def fp8_round(weight: torch.Tensor) -> torch.Tensor:
    """A linear weight [out, in] rounded to float8_e4m3 (largest number 448), a scale per output."""
    scale = (weight.float().abs().amax(-1, keepdim=True) / 448).clamp_min(
        1 / (448 * 512)
    )  # [out, 1]
    rounded = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)  # [out, in]
    return (rounded.float() * scale).to(weight.dtype)


class Engine:
    """A vLLM engine in this process; `init_distributed` comes first, and all ranks build together.

    quantization "fp8_per_channel" is vLLM's own: fp8 weights and activations, quantized again at
    every `load_weights`. "fp8_emulated" computes in `dtype` with weights that `load_weights` rounded.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        quantization: str = "none",
        dtype: str = "bfloat16",
        kv_cache_gb: float = 0.25,
        max_num_seqs: int = 256,
        seed: int = 0,
        sleeps: bool = False,
        verbose: bool = False,
    ) -> None:
        if not verbose:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            warnings.filterwarnings("ignore", category=FutureWarning)
        from vllm import LLM  # not above: it takes seconds, and reads the logging level at import

        cuda = torch.cuda.is_available()
        self.sleeps = sleeps and cuda  # vLLM can sleep on GPUs only
        self.quantization, self.dtype = quantization, getattr(torch, dtype)
        # On CPU vLLM cannot split the prefill of a request that has its own seed.
        whole = dict(enable_chunked_prefill=False, max_num_batched_tokens=max(8192, max_model_len))
        self.llm = LLM(
            model,
            dtype=dtype,
            quantization="fp8_per_channel" if quantization == "fp8_per_channel" else None,
            distributed_executor_backend="external_launcher",  # in this process, in its group
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
            hf_overrides={"head_dtype": "float32"},  # as in response_logp
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=int(kv_cache_gb * 2**30),
            enforce_eager=not cuda,
            enable_sleep_mode=self.sleeps,
            use_tqdm_on_load=verbose,
            seed=seed,
            **({} if cuda else whole),
        )
        self.tokenizer = self.llm.get_tokenizer()

    def sample(
        self,
        prompts: list[list[int]],
        n: int,
        seeds: list[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Rollouts:
        """n responses to each prompt (token ids); the noise of response j to prompt i is seeds[i] + j.

        top_k 0 is all tokens. Raises RuntimeError if several versions of the weights took part.
        """
        from vllm import SamplingParams

        fixed = dict(n=n, temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens)
        fixed |= dict(
            logprobs=0, flat_logprobs=True, detokenize=False
        )  # the sampled token's, plain
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(seed=seed % 2**31, **fixed) for seed in seeds],
            use_tqdm=False,
        )
        responses = [(i, r) for i, output in enumerate(outputs) for r in output.outputs]
        versions = {span.version for _, r in responses for span in r.weight_versions}
        if len(versions) > 1:
            raise RuntimeError(f"several versions of the weights sampled one batch: {versions}")
        return Rollouts(
            prompt_index=[i for i, _ in responses],
            prompt_ids=[prompts[i] for i, _ in responses],
            response_ids=[list(r.token_ids) for _, r in responses],
            logp_behavior=[list(r.logprobs.logprobs) for _, r in responses],
            truncated=[r.finish_reason == "length" for _, r in responses],
            text=[
                self.tokenizer.decode(r.token_ids, skip_special_tokens=True) for _, r in responses
            ],
            weight_version=versions.pop() if versions else self.llm.get_weight_version(),
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        """Replace all weights by (name, tensor) pairs as in the model's state_dict, tied head included.

        A lazy iterator may run collectives: vLLM consumes it in order. `version` labels the samples.
        """

        def rounded() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                weight = weight.to(self.dtype)
                # Like vLLM's own fp8: linear layers, but neither the embedding nor the head.
                linear = weight.dim() == 2 and "embed" not in name and "lm_head" not in name
                fp8 = self.quantization == "fp8_emulated" and linear
                yield name, fp8_round(weight) if fp8 else weight

        if self.sleeps:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=rounded()))
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        if not self.llm.reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError("vLLM kept its prefix cache: load weights only between samplings")
        self.llm.update_weight_version(version)

    def sleep(self) -> None:
        """On CUDA, lend the memory of weights and KV cache until the next `load_weights`."""
        if self.sleeps:
            self.llm.sleep(level=2)

    def close(self) -> None:
        """End the engine and, with it, the process group: the last thing that a rank does."""
        self.llm.llm_engine.engine_core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    """The mismatch meter: sample as set, score with the trainer's forward pass, print e_B and rho."""
    parser = argparse.ArgumentParser(description="How far is an engine from the trainer?")
    tiny = Path(__file__).parent / "tiny"
    parser.add_argument("--model", default=str(tiny), help="a model folder or hub name")
    parser.add_argument("--prompts", default=str(tiny / "heldout.jsonl"), help="field 'prompt'")
    parser.add_argument("--rollout_quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    init_distributed()
    engine = Engine(args.model, max_model_len=128, quantization=args.rollout_quantization)
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    engine.load_weights(policy.state_dict().items(), version="0")
    chats = [
        [{"role": "user", "content": json.loads(line)["prompt"]}] for line in open(args.prompts)
    ]
    template = dict(add_generation_prompt=True, return_dict=False)
    prompts = [engine.tokenizer.apply_chat_template(chat, **template) for chat in chats[:256]]
    sampling = dict(temperature=args.temperature, top_p=args.top_p, max_tokens=64)
    rollouts = engine.sample(prompts, 1, list(range(len(prompts))), **sampling)
    log_ratio = []
    with torch.no_grad():
        for start in range(0, len(prompts), 16):
            batch = rollouts.batch(list(range(start, min(start + 16, len(prompts)))))
            log_ratio.append((response_logp(policy, batch) - batch.logp_behavior)[batch.mask])
    log_ratio = torch.cat(log_ratio).double()  # [M]
    # Equation (2) in log space, as in loss.effective_sample_size.
    ess = (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp() / len(log_ratio)
    absolute = log_ratio.abs()
    print(f"e_B {ess:.5f}  mean |log rho| {absolute.mean():.5f}  max {absolute.max():.3f}")
    engine.close()


if __name__ == "__main__":
    main()

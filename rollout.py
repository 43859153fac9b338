"""Rollouts: what the engine sampled, and how the trainer scores it: both sides of the ratio (1).

    pi_b      the behavior policy: what vLLM really sampled from, after temperature, top-p, top-k,
              in the engine's precision; its log-probabilities come with the samples
    pi_theta  the policy: the trainer's forward pass over the same tokens (`response_logp`)

The engine lives in the trainer's process, one a rank, on CPU and CUDA by the same code. Run this
file to measure how far an engine is from its trainer, for any model folder or hub name:

    python rollout.py --model tiny --rollout_quantization fp8_per_channel --temperature 1.2
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

if "--verbose" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

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
        """These rows alone, in this order, with no more padding than they need."""
        columns = int(self.mask[rows].sum(1).max()) if rows else 0  # T of the rows
        length = int((self.prompt_length + self.mask.sum(1))[rows].max()) if rows else 0  # L
        part = {"text": [self.text[i] for i in rows]}
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), torch.Tensor):
                value = value[rows]
                if value.dim() == 2:
                    value = value[:, : length if field.name == "tokens" else columns]
                part[field.name] = value.to(device)
        return replace(self, **part)


def response_logp(
    model: torch.nn.Module, batch: Rollouts, temperature: float = 1.0, chunk: int = 1024
) -> torch.Tensor:
    """log pi_theta of the response tokens, [N, T] float32, nats; 0 where the mask is False.

    `model` is a causal language model of transformers with a linear head (Llama, Qwen). Right
    padding needs no attention mask: no token sees a later one. The head is applied in float32, to
    response positions alone, `chunk` of them at a time, and once more in the backward pass: no
    [tokens, vocabulary] tensor is ever kept.
    """
    hidden = model.base_model(
        input_ids=batch.tokens, use_cache=False
    ).last_hidden_state  # [N, L, D]
    row, t = batch.mask.nonzero(as_tuple=True)  # [M] each, for M response tokens
    position = batch.prompt_length[row] + t  # [M]; predicted one position earlier
    hidden, target = hidden[row, position - 1], batch.tokens[row, position]  # [M, D], [M]
    head = model.get_output_embeddings().weight  # [V, D]

    def chunk_logp(hidden: torch.Tensor, target: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits = hidden.float() @ head.float().T / temperature  # [chunk, V]
        return -torch.nn.functional.cross_entropy(logits, target, reduction="none")  # [chunk]

    chunks = zip(hidden.split(chunk), target.split(chunk), strict=True)
    logp = [checkpoint(chunk_logp, h, y, head, use_reentrant=False) for h, y in chunks]
    return torch.zeros_like(batch.logp_behavior).masked_scatter(batch.mask, torch.cat(logp))


def init_distributed() -> dist.DeviceMesh:
    """Join torchrun's process group, or be its only rank; returns the mesh (node, rank) or (rank,).

    It comes before the engine, which would otherwise make a group of its own, of the wrong size.
    """
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
    return dist.init_device_mesh(device.type, (nodes, local) if nodes > 1 else (local,))


def fp8_round(weight: torch.Tensor) -> torch.Tensor:
    """A linear weight [out, in] rounded to float8_e4m3 (at most 448), one scale an output."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1 / 512) / 448  # [out, 1]
    rounded = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)  # [out, in]
    return (rounded.float() * scale).to(weight.dtype)


class Engine:
    """A vLLM engine in this process; `init_distributed` comes first, and all ranks build together.

    quantization "fp8_per_channel" is vLLM's own: fp8 weights and activations, quantized anew by
    every `load_weights`. "fp8_emulated" has `load_weights` round them, and computes in `dtype`.
    """

    def __init__(
        self,
        model: str,
        max_model_len: int,
        *,
        quantization: str = "none",
        dtype: str = "bfloat16",
        kv_cache_gb: float = 0.25,
        max_num_seqs: int = 256,
        seed: int = 0,
        can_sleep: bool = False,
        verbose: bool = False,
    ) -> None:
        if not verbose:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            logging.getLogger("vllm").setLevel("ERROR")  # for what it says before it reads that
            warnings.filterwarnings("ignore", category=FutureWarning)
        from vllm import LLM  # not above: it takes seconds, and reads the level when imported

        cuda = torch.cuda.is_available()
        self.quantization, self.dtype = quantization, getattr(torch, dtype)
        self.can_sleep = can_sleep and cuda  # vLLM sleeps on GPUs only
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
            enable_sleep_mode=self.can_sleep,
            use_tqdm_on_load=verbose,
            seed=seed,
            **({} if cuda else whole),
        )
        self.tokenizer = self.llm.get_tokenizer()

    def sample(self, prompts: list[list[int]], n: int, seeds: list[int], **sampling) -> Rollouts:
        """n responses to each prompt (token ids), those to one prompt next to each other.

        Response j to prompt i draws its noise from seeds[i] + j. `sampling` is max_tokens, and as
        needed temperature, top_p, top_k (0: all tokens), ... of vllm.SamplingParams.
        """
        from vllm import SamplingParams

        sampling |= dict(n=n, logprobs=0, flat_logprobs=True, detokenize=False)  # the token's own
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(seed=seed % 2**31, **sampling) for seed in seeds],
            use_tqdm=False,
        )
        sampled = [(prompts[i], r) for i, output in enumerate(outputs) for r in output.outputs]
        versions = {span.version for _, r in sampled for span in r.weight_versions}
        lengths = torch.tensor([len(r.token_ids) for _, r in sampled], dtype=torch.long)  # [N]

        def padded(rows: list, dtype: torch.dtype) -> torch.Tensor:
            rows = [torch.tensor(row, dtype=dtype) for row in rows]
            return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=dtype)

        logp_behavior = padded([r.logprobs.logprobs for _, r in sampled], torch.float32)  # [N, T]
        return Rollouts(
            tokens=padded([prompt + list(r.token_ids) for prompt, r in sampled], torch.long),
            prompt_length=torch.tensor([len(prompt) for prompt, _ in sampled], dtype=torch.long),
            mask=torch.arange(logp_behavior.shape[1]) < lengths[:, None],
            logp_behavior=logp_behavior,
            truncated=torch.tensor([r.finish_reason == "length" for _, r in sampled]),
            text=[self.tokenizer.decode(r.token_ids, skip_special_tokens=True) for _, r in sampled],
            weight_version=" and ".join(sorted(versions)),  # one, or something is very wrong
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        """Replace all weights by these (name, tensor) pairs of a state_dict, tied head included.

        A lazy iterator may run collectives: vLLM takes it in order. `version` labels the samples.
        """

        def as_sampled_with() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                weight = weight.to(self.dtype)
                # As vLLM's own fp8: linear layers, but neither the embedding nor the head.
                linear = weight.dim() == 2 and "embed" not in name and "lm_head" not in name
                yield name, fp8_round(weight) if linear and emulated else weight

        emulated = self.quantization == "fp8_emulated"
        if self.can_sleep:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=as_sampled_with()))
        if self.can_sleep:
            self.llm.wake_up(tags=["kv_cache"])
        if not self.llm.reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError("vLLM kept its prefix cache: load weights only between samplings")
        self.llm.update_weight_version(version)

    def sleep(self) -> None:
        """On CUDA, lend out the memory of weights and KV cache until the next `load_weights`."""
        if self.can_sleep:
            self.llm.sleep(level=2)

    def close(self) -> None:
        """End the engine and, with it, the process group: the last thing that a rank does."""
        self.llm.llm_engine.engine_core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    """The mismatch meter: sample as set, score with the trainer's forward pass, compare."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    tiny = Path(__file__).parent / "tiny"
    parser.add_argument("--model", default=str(tiny), help="a model folder or hub name")
    parser.add_argument("--prompts", default=str(tiny / "heldout.jsonl"), help="field 'prompt'")
    parser.add_argument("--rollout_quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    init_distributed()
    engine = Engine(args.model, 128, quantization=args.rollout_quantization)
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    engine.load_weights(policy.state_dict().items(), version="0")
    problems = [json.loads(line)["prompt"] for line in open(args.prompts)][:256]
    prompts = [
        engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False
        )
        for p in problems
    ]
    sampling = dict(temperature=args.temperature, top_p=args.top_p, max_tokens=64)
    rollouts = engine.sample(prompts, 1, list(range(len(prompts))), **sampling)
    with torch.no_grad():
        parts = [rollouts.rows(list(range(i, i + 16))) for i in range(0, len(prompts), 16)]
        log_ratio = [(response_logp(policy, b) - b.logp_behavior)[b.mask] for b in parts]
    log_ratio = torch.cat(log_ratio).double()  # [M]
    # Equation (2) in log space, as in loss.effective_sample_size.
    ess = (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp() / len(log_ratio)
    off = log_ratio.abs()
    print(f"e_B {ess:.5f}  |log rho| mean {off.mean():.5f}, max {off.max():.3f}")
    engine.close()


if __name__ == "__main__":
    main()

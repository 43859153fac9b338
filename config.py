"""What the user gives: the flags of train.py and eval.py, a model, a task; and what is refused."""

import inspect
import os
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from loss import OBJECTIVES
from reward import encode_prompt, load_task, task_of
from rollout import QUANTIZATIONS

DTYPES = ("float32", "bfloat16")
REPORTS = ("wandb", "tensorboard")


def flag(default, help: str, **choices):
    """A field of Config with its sentence for --help and, where there are some, its choices."""
    is_list = isinstance(default, list)
    value = {"default_factory": lambda: list(default)} if is_list else {"default": default}
    return field(**value, metadata={"help": help, **choices})


@dataclass
class Config:
    """A run. Its mismatch is set by temperature to lag and by passes x minibatches alone."""

    model: str = flag("tiny", "the initial policy: a model folder or a hub name")
    task: str = flag("tiny", "a name of reward.TASKS, a JSONL file, or a hub dataset")
    out_dir: str = flag("", "where the run writes; by default runs/ and the time")
    objective: str = flag("p3o", "an objective of loss.py", choices=list(OBJECTIVES))
    objective_args: list[str] = flag([], "its hyper-parameters: name=value ...")
    scale_advantage: bool = flag(True, "divide the advantage by its group's standard deviation")
    steps: int = flag(80, "rollout batches to learn from")
    prompts_per_step: int = flag(32, "prompts of a rollout batch, over all ranks")
    group_size: int = flag(8, "G, the responses to a prompt")
    passes: int = flag(1, "how often a rollout batch is gone through")
    minibatches: int = flag(1, "optimizer steps of a pass; each is a batch B of the loss")
    temperature: float = flag(1.0, "of the rollouts; not policy_temperature: off-policy")
    top_p: float = flag(1.0, "of the rollouts; nothing is learned about tokens outside")
    top_k: int = flag(0, "of the rollouts, as top_p; 0: all tokens")
    rollout_quantization: str = flag("none", "of the engine", choices=QUANTIZATIONS)
    lag: int = flag(0, "steps between the sampling of a batch and its use")
    policy_temperature: float = flag(1.0, "of pi_theta, in training and evaluation")
    max_prompt_tokens: int = flag(0, "drop longer prompts; 0: every prompt has to fit")
    max_response_tokens: int = flag(64, "truncate longer responses")
    learning_rate: float = flag(2e-4, "of AdamW, constant after the warm-up")
    warmup_steps: int = flag(5, "optimizer steps of linear warm-up")
    weight_decay: float = flag(0.0, "of AdamW")
    max_grad_norm: float = flag(1.0, "clip the gradient to this norm")
    dtype: str = flag("auto", "of the trainer; auto: bfloat16 on CUDA", choices=("auto", *DTYPES))
    rollout_dtype: str = flag("bfloat16", "of the engine", choices=DTYPES)
    micro_batch_tokens: int = flag(16384, "padded, in one forward pass: memory, no result")
    gradient_checkpointing: bool = flag(False, "trade a forward pass for activation memory")
    rollout_tp: int = flag(1, "ranks of a node that share an engine (tensor parallelism)")
    kv_cache_gb: float = flag(0.25, "the engine's KV cache on a rank")
    max_num_seqs: int = flag(256, "responses that an engine decodes at once")
    eval_every: int = flag(10, "steps between evaluations; 0: before and after")
    eval_problems: int = flag(512, "held-out problems to evaluate on; 0: all")
    save_every: int = flag(0, "steps between checkpoints; 0: none")
    keep_checkpoints: int = flag(2, "how many of the newest checkpoints stay")
    resume: bool = flag(False, "go on from the newest checkpoint of out_dir")
    report_to: str = flag("none", "besides metrics.jsonl", choices=("none", *REPORTS))
    seed: int = flag(0, "of the order of the problems and the noise of the samples")
    dry_run: bool = flag(False, "print the memory that the run would take, and load nothing")
    device_memory_gb: float = flag(0.0, "of the GPU that a dry_run without one is for; 0: this CPU")
    verbose: bool = flag(False, "show the messages of vLLM and torch")


@dataclass
class EvalConfig:
    """An evaluation. All but the last six fields decide what is sampled."""

    model: str = flag("tiny", "what to evaluate: a run, a model folder or a hub name")
    task: list[str] = flag(["tiny"], "one or several tasks, each as train.py takes it")
    split: str = flag("heldout", "of the tasks", choices=("train", "heldout"))
    samples: int | None = flag(None, "n, responses to a problem; by default 8, or 1 if greedy")
    temperature: float = flag(1.0, "of the samples; 0: greedy")
    top_p: float = flag(1.0, "of the samples")
    max_response_tokens: int = flag(64, "truncate longer responses")
    limit: int = flag(0, "only the first problems of each task; 0: all")
    drop_long: bool = flag(False, "drop and count prompts that leave no room for a response")
    dtype: str = flag("auto", "of the engine; auto: bfloat16 on CUDA", choices=("auto", *DTYPES))
    seed: int = flag(0, "of the noise of the samples")
    out_dir: str = flag("", "what to write into or go on with; by default one for these settings")
    chunk_responses: int = flag(1024, "of a rank between two writes: what a kill can lose")
    rollout_tp: int = flag(1, "ranks of a node that share an engine (tensor parallelism)")
    kv_cache_gb: float = flag(0.25, "the engine's KV cache on a rank")
    max_num_seqs: int = flag(256, "responses that an engine decodes at once")
    verbose: bool = flag(False, "show the messages of vLLM and torch")


POSITIVE = """steps prompts_per_step passes minibatches temperature top_p policy_temperature samples
    max_response_tokens learning_rate max_grad_norm micro_batch_tokens rollout_tp kv_cache_gb
    max_num_seqs chunk_responses keep_checkpoints"""


class Refused(Exception):
    """What the user can act on: its message, one sentence, is all that is printed."""


def parse_config(arguments: list[str] | None = None, kind: type = Config) -> Any:
    """A Config or EvalConfig: defaults, then --config FILE.yaml, then flags. Raises Refused."""
    parser = transformers.HfArgumentParser(kind, description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="a YAML file of these fields")

    def refuse(message: str) -> None:
        raise Refused(f"{message}; see --help")

    parser.error = refuse
    if path := parser.parse_known_args(arguments)[0].config:
        try:
            recipe = dict(yaml.safe_load(Path(path).read_text()))
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise Refused(f"--config {path} is no YAML file of fields: {reason}") from error
        if unknown := sorted(recipe.keys() - {f.name for f in fields(kind)}):
            raise Refused(f"{path}: no such field: {', '.join(unknown)}")
        parser.set_defaults(**recipe)
    values = vars(parser.parse_args(arguments))
    return kind(**{name: value for name, value in values.items() if name != "config"})


def hyper_parameters(cfg: Config) -> dict[str, float | str]:
    """objective_args as keywords of the objective. Raises Refused on one that it does not have."""
    keywords = inspect.signature(OBJECTIVES[cfg.objective]).parameters.items()
    # The other keywords are quantities of the batch, unknown before it: their default is None.
    known = {name: p.default for name, p in keywords if p.default not in (p.empty, None)}
    given = dict(argument.partition("=")[::2] for argument in cfg.objective_args)
    try:
        return {name: type(known[name])(value) for name, value in given.items()}
    except (KeyError, ValueError) as error:
        takes = ", ".join(f"{name}={value}" for name, value in known.items()) or "nothing"
        raise Refused(f"objective_args {given}: {cfg.objective} takes {takes}") from error


def check_fields(cfg: Config | EvalConfig, may_be_zero: str = "") -> None:
    """Raises Refused on a value that is none of its field's choices, or negative, or wrongly 0, and
    on a rollout_tp that does not divide the ranks of a node."""
    for f in fields(cfg):
        value, choices = getattr(cfg, f.name), f.metadata.get("choices", ())
        if choices and value not in choices:  # argparse looks at flags, but not at --config
            raise Refused(f"unknown {f.name} {value!r}: choose one of {', '.join(choices)}")
        positive = f.name in POSITIVE.split() and f.name not in may_be_zero
        if isinstance(value, int | float) and (value < 0 or positive and not value):
            least = "positive" if positive else "0 or more"
            raise Refused(f"{f.name} is {value}: it has to be {least}")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks % cfg.rollout_tp:
        raise Refused(f"rollout_tp is {cfg.rollout_tp}: it has to divide a node's {ranks} ranks")


def check_config(cfg: Config) -> None:
    """Raises Refused on what cannot run."""
    check_fields(cfg)
    if cfg.group_size < 2:
        raise Refused(
            f"group_size is {cfg.group_size}: an advantage within a group takes 2 or more"
        )
    hyper_parameters(cfg)
    spec = find_spec(cfg.report_to) if cfg.report_to in REPORTS else None
    if cfg.report_to in REPORTS and (spec is None or spec.origin is None):  # None: just a folder
        raise Refused(f"report_to {cfg.report_to} needs a package: pip install {cfg.report_to}")
    temperatures = cfg.temperature, cfg.policy_temperature
    if min(temperatures) < 0.01 or max(temperatures) > 2 or cfg.top_p > 1:
        raise Refused("vLLM samples at a temperature of 0.01 to 2 and a top_p of at most 1")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if cfg.prompts_per_step < max(world, cfg.minibatches):
        raise Refused(f"{cfg.prompts_per_step} prompts_per_step: give each rank and minibatch one")
    if Path(cfg.out_dir, "config.json").exists() and cfg.out_dir and not cfg.resume:
        raise Refused(f"{cfg.out_dir} holds another run: choose another out_dir, or --resume")


def check_eval_config(cfg: EvalConfig) -> None:
    """Raises Refused on what cannot run; decides samples and dtype where the user did not."""
    check_fields(cfg, may_be_zero="temperature")
    if not (cfg.temperature == 0 or 0.01 <= cfg.temperature <= 2) or not cfg.top_p <= 1:
        raise Refused(  # at most 2, and below 0.01 it would use 0.01
            "vLLM samples at a temperature of 0 (greedy) or 0.01 to 2 and a top_p of at most 1"
        )
    if cfg.dtype == "auto":
        cfg.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if cfg.samples is None:
        cfg.samples = 8 if cfg.temperature else 1
    if cfg.samples > 1 and not cfg.temperature:
        raise Refused(f"greedy samples are all the same: samples is {cfg.samples}, 1 says it all")
    cfg.task = [cfg.task] if isinstance(cfg.task, str) else cfg.task  # YAML: task: tiny
    if len(set(cfg.task)) < len(cfg.task):
        raise Refused(f"a task is given twice: {' '.join(cfg.task)}")


def load_model_files(model: str, tp: int = 1) -> tuple[PreTrainedTokenizerBase, int]:
    """Tokenizer and context length of a model folder or hub name; ValueError where none is, or
    where its attention heads cannot be shared by the tp ranks of an engine."""
    if not Path(model).is_dir() and model.count("/") != 1:
        raise ValueError(f"no model at {model!r}: neither a folder nor a hub name, owner/name")
    try:
        config = AutoConfig.from_pretrained(model)
        files = AutoTokenizer.from_pretrained(model), config.max_position_embeddings
    except (OSError, ValueError) as error:
        raise ValueError(f"no model at {model!r}: {str(error).splitlines()[0]}") from error
    if config.num_attention_heads % tp:
        heads = f"the {config.num_attention_heads} attention heads of {model}"
        raise ValueError(f"rollout_tp is {tp}, which does not divide {heads}")
    return files


class Split(NamedTuple):
    """A split of a task, ready to sample from."""

    problems: list[dict[str, str]]
    prompts: list[list[int]]  # token ids, one of each problem
    verifier: str
    dropped: int  # problems left out: their prompts leave no room for a response


def load_prompts(
    task: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    room: int,
    drop: bool = False,
    limit: int = 0,
) -> Split:
    """The first `limit` problems of a task (0: all), and their prompts as token ids.

    A prompt of more than `room` tokens is dropped and counted if `drop`, else a ValueError.
    """
    source = task_of(task)
    problems = load_task(task, split)[: limit or None]
    prompts = [encode_prompt(tokenizer, p["prompt"], source.instruction) for p in problems]
    keep = [i for i, prompt in enumerate(prompts) if len(prompt) <= room]
    dropped = len(prompts) - len(keep)
    if dropped:
        long = f"{dropped} of {len(prompts)} {split} prompts of {task} have over {room} tokens"
        if not drop or not keep:
            raise ValueError(
                f"{long}, and no room for a response: lower max_response_tokens, or drop such "
                "prompts (train.py: --max_prompt_tokens, eval.py: --drop_long)"
            )
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"dropped: {long}")
    return Split([problems[i] for i in keep], [prompts[i] for i in keep], source.verifier, dropped)


def load_evaluation(cfg: EvalConfig) -> tuple[str, dict[str, Split]]:
    """The folder or hub name of the model and what to evaluate it on, by task. Raises Refused."""
    check_eval_config(cfg)
    run = Path(cfg.model, "model")
    model = str(run) if run.is_dir() else cfg.model
    try:
        tokenizer, context = load_model_files(model, cfg.rollout_tp)
        room = context - cfg.max_response_tokens
        options = cfg.split, tokenizer, room, cfg.drop_long, cfg.limit
        return model, {task: load_prompts(task, *options) for task in cfg.task}
    except ValueError as error:
        raise Refused(str(error)) from error

"""The trainer on real parts: the batch-wide gradient through FSDP2, short runs under torchrun, what
a run leaves behind, and what it says of bad input."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TORCHRUN, TWO_STEPS
from gradient_on_ranks import CASES, GROUP, WHOLE, gradients_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from config import Config, Refused, check_config, parse_config
from eval import noise_seeds
from loss import OBJECTIVES
from policy import Policy, build_policy
from rollout import Engine
from train import check_on_policy, problems_of_step, update


def torchrun(ranks, script, *arguments):
    """Run a script of this repository on so many ranks, to its end; returns what it printed."""
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", ROOT / script, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def on_nodes(nodes, ranks, script, *arguments):
    """Run a script under torchrun agents on the loopback address, each standing for a node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for node in range(nodes):
        command = [
            *TORCHRUN,
            f"--nnodes={nodes}",
            f"--node-rank={node}",
            f"--nproc-per-node={ranks}",
        ]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}", ROOT / script, *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        agents.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    assert [agent.wait(timeout=300) for agent in agents] == [0] * nodes


def metrics(out_dir):
    return [json.loads(line) for line in open(Path(out_dir, "metrics.jsonl"))]


# The gradient


@pytest.fixture(scope="module")
def gradients(engine, group, prompts, tmp_path_factory):
    """Of a policy that has moved away from the one that sampled: gradients by plain autograd on the
    whole batch; on 1 rank, this process, and on 2 {ranks: {case: (gradient, statistics)}}; and what
    computes them on more; and the folder with model/ and saved-N/, as N ranks save it."""
    folder = tmp_path_factory.mktemp("gradients")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    engine.load_weights(model.state_dict().items(), version="0")
    rollouts = engine.sample(prompts[:8], GROUP, [GROUP * i for i in range(8)], max_tokens=64)
    generator = torch.Generator().manual_seed(0)
    rollouts.advantage = torch.randn(len(rollouts.text), generator=generator)
    noise = 0.1 * torch.randn(rollouts.mask.shape, generator=generator)
    rollouts.logp_prox = (rollouts.logp_behavior + noise) * rollouts.mask
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator))
    torch.save(rollouts, folder / "rollouts.pt")
    model.save_pretrained(folder / "model")
    plain = {}
    for name, objective in OBJECTIVES.items():
        prox = {"logp_prox": rollouts.logp_prox} if name == "decoupled" else {}
        batch = rollouts.logp_behavior, rollouts.advantage, rollouts.mask
        loss, _ = objective(Policy(model)(rollouts), *batch, **prox)
        model.zero_grad()
        loss.backward()
        plain[name] = {n: p.grad.clone() for n, p in model.named_parameters()}

    def on_ranks(ranks, nodes=1):
        if nodes == 1:
            torchrun(ranks, "tests/gradient_on_ranks.py", str(folder))
        else:
            on_nodes(nodes, ranks // nodes, "tests/gradient_on_ranks.py", str(folder))
        return torch.load(folder / f"gradients-{ranks}.pt", weights_only=False)

    here = gradients_of(build_policy(Config(model=str(folder / "model")), group), str(folder))
    return plain, {1: here, 2: on_ranks(2)}, on_ranks, folder


def relative_error(found, expected):
    """|found - expected| / |expected| of all weights as one vector."""
    distance = sum(((found[n] - expected[n]) ** 2).sum() for n in expected).sqrt()
    return (distance / sum((e**2).sum() for e in expected.values()).sqrt()).item()


def assert_gathered_whole(folder, ranks):
    """What an engine got in bfloat16 is the model rounded, each weight once, the tied head too."""
    found = torch.load(folder / f"gathered-{ranks}.pt")
    right = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert sorted(name for name, _ in found) == sorted(right) and "lm_head.weight" in right
    assert all(torch.equal(weight, right[name].bfloat16()) for name, weight in found)


@pytest.mark.parametrize("objective, tokens", CASES)
def test_the_gradient_is_that_of_the_whole_batch_for_any_micro_batches_on_1_and_2_ranks(
    objective, tokens, gradients
):
    plain, found, *_ = gradients
    for ranks in 1, 2:
        assert relative_error(found[ranks][objective, tokens][0], plain[objective]) < 1e-4, ranks


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_gradient_is_that_of_the_whole_batch_on_4_ranks_of_1_and_of_2_nodes(nodes, gradients):
    # On two nodes the weights are sharded within each and replicated across: HSDP.
    plain, _, on_ranks, folder = gradients
    for (objective, _), (gradient, _) in on_ranks(4, nodes).items():
        assert relative_error(gradient, plain[objective]) < 1e-4
    assert_gathered_whole(folder, ranks=4)


def test_the_logged_statistics_are_those_of_the_whole_batch_too(gradients):
    _, found, *_ = gradients
    expected = found[1]["p3o", WHOLE][1]
    assert 0.1 < expected["ess"] < 0.98 and expected["capped"] > 0.05  # a stale batch
    for ranks in 1, 2:
        for tokens in 1, 300, WHOLE:
            assert found[ranks]["p3o", tokens][1] == pytest.approx(expected, rel=1e-4)


def test_the_gradients_of_the_objectives_differ_by_far_more_than_that(gradients):
    plain, *_ = gradients
    for name in set(OBJECTIVES) - {"p3o"}:
        assert relative_error(plain[name], plain["p3o"]) > 0.1


def test_two_ranks_save_the_whole_model(gradients):
    *_, folder = gradients
    right, found = (
        AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
        for name in ("model", "saved-2")
    )
    assert all(torch.equal(found[name], weight) for name, weight in right.items())


def test_an_engine_gets_the_weights_that_the_policy_computes_with_from_two_ranks(gradients):
    *_, folder = gradients
    assert_gathered_whole(folder, ranks=2)


def test_in_bfloat16_only_the_forward_pass_is_rounded(engine, policy, prompts, group):
    rollouts = engine.sample(prompts[:8], 2, [2 * i for i in range(8)], max_tokens=64)
    half = build_policy(Config(dtype="bfloat16"), group)
    assert all(p.dtype == torch.float32 for p in half.parameters())  # master weights
    behavior = rollouts.logp_behavior.clone()
    logp = half(rollouts).detach()
    assert logp.dtype == rollouts.logp_behavior.dtype == torch.float32
    assert torch.equal(rollouts.logp_behavior, behavior)
    error = (logp - Policy(policy)(rollouts).detach()).abs()[rollouts.mask]
    assert 1e-5 < error.mean() < 0.01  # bfloat16 has 8 bits: 0.4% of an activation


# The order of problems and noise


def test_an_epoch_has_every_problem_once_and_the_next_one_another_order():
    cfg = Config(prompts_per_step=3, seed=5)
    order = [i for step in range(8) for i in problems_of_step(cfg, step, 12)]
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(12))
    assert order[:12] != order[12:]
    assert problems_of_step(cfg, 5, 12) == order[15:18]  # needs no history: a run can resume


def test_noise_seeds_never_repeat_in_a_run_and_differ_between_runs():
    def used(seed):  # 50 steps of 32 prompts; 8 responses take s, ..., s + 7
        steps = [noise_seeds(seed, step * 32, 32, 8) for step in range(50)]
        return {s + j for seeds in steps for s in seeds for j in range(8)}

    runs = [used(seed) for seed in range(5)]
    assert all(len(run) == 50 * 32 * 8 for run in runs)
    assert len(set.union(*runs)) == 5 * 50 * 32 * 8


# Runs


@pytest.fixture(scope="module")
def run(short_run):
    """10 steps of half the default's prompts, with 4 times its learning rate: (out_dir, what was
    printed)."""
    out, process = short_run
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return out, printed


def test_a_short_run_raises_held_out_accuracy(run):
    rows = metrics(run[0])
    before, after = rows[0]["heldout_pass@1"], rows[-1]["heldout_pass@1"]
    # Standard error of each on 512 problems: sqrt(0.25 / 512) = 0.022.
    assert 0.35 < before < 0.55
    assert after > before + 0.1


def test_every_step_logs_what_a_reader_of_the_run_needs(run):
    rows = metrics(run[0])[1:]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["weight_version"] for row in rows] == [str(step) for step in range(10)]
    names = """reward groups_with_signal response_tokens truncated entropy loss kl capped ratio
        ess ess_min ratio_q1 ratio_q50 ratio_q99 mismatch_mean mismatch_max grad_norm learning_rate
        rollout_seconds reward_seconds update_seconds sync_seconds tokens_per_second
        peak_memory_gb"""
    for row in rows:
        assert all(isinstance(row[name], float) for name in names.split())
        assert 0.99 < row["ess"] <= 1 and abs(row["ratio"] - 1) < 0.01  # fresh batches
        assert 0 < row["mismatch_mean"] < 0.01 < 20 < row["response_tokens"] < 60


def test_a_run_prints_a_line_a_step_and_a_table_and_nothing_of_the_libraries(run):
    lines = [line for line in run[1].splitlines() if line.strip()]
    assert sum(line.startswith("step") for line in lines) == 11
    assert len(lines) == 11 + 7, run[1]
    assert "before" in run[1] and "seconds in rollout" in run[1]


def test_a_run_leaves_the_files_that_it_promises(run):
    out = run[0]
    config = json.loads((out / "config.json").read_text())
    assert config["steps"] == 10 and config["objective"] == "p3o" and config["seed"] == 0
    sample = json.loads(open(out / "samples.jsonl").readline())
    assert set(sample) == {"step", "reward", "prompt", "response"}
    assert (out / "curves.png").stat().st_size > 10_000


def test_the_trained_model_says_the_same_in_transformers_and_in_vllm(run, build_engine, prompts):
    folder = run[0] / "model"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    engine = build_engine(folder)
    by_vllm = engine.sample(prompts[:8], 1, [0] * 8, temperature=0, max_tokens=64).text
    for prompt, text in zip(prompts[:8], by_vllm, strict=True):
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64)[0]
        assert tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True) == text


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A run on two ranks that gets a Ctrl-C after its second step: (out_dir, what was printed, its
    launcher)."""
    out = tmp_path_factory.mktemp("two-ranks") / "run"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / "train.py"]
    process = subprocess.Popen(
        [*command, *TWO_STEPS, "--steps=80", f"--out_dir={out}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith("step    2"):
            os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does: to launcher and ranks
            break
    printed += process.stdout.readlines()
    process.wait()
    return out, "".join(printed), process


def test_an_interrupt_finishes_the_step_saves_it_and_leaves_no_process(two_ranks):
    out, text, process = two_ranks
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert "stopped by signal 2 after step" in text and "--resume" in text
    assert len(text.splitlines()) < 50, text  # torchrun's own traceback of the signal is half
    done = [row["step"] for row in metrics(out)]
    assert done == list(range(len(done))) and len(done) >= 3
    assert (out / "checkpoints" / f"step-{done[-1]:06d}" / ".metadata").exists()


def test_two_ranks_do_what_one_rank_does(two_ranks, one_rank):
    two = metrics(two_ranks[0])
    assert one_rank[0]["heldout_pass@1"] == two[0]["heldout_pass@1"]
    for a, b in zip(one_rank[1:], two[1:3], strict=True):
        for name in "reward", "response_tokens", "groups_with_signal":
            assert a[name] == pytest.approx(b[name], rel=1e-6)
        for name in "ess", "grad_norm", "entropy":
            assert a[name] == pytest.approx(b[name], rel=1e-3)


# What the user can get wrong


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--objective=ppo", "invalid choice: 'ppo'"),
        ("--objective=grpo --objective_args epsilon=0.4", "grpo takes eps=0.2"),
        ("--objective_args eps=0.4", "p3o takes kl_estimator=k3"),
        ("--objective=grpo --objective_args eps=wide", "grpo takes eps=0.2"),
        ("--task=sums", "unknown task 'sums'"),
        ("--model=missing", "no model at 'missing'"),
        ("--group_size=1", "group_size is 1"),
        ("--steps=0", "steps is 0"),
        ("--learning_rate=fast", "invalid float value: 'fast'"),
        ("--lerning_rate=1e-4", "unrecognized arguments: --lerning_rate"),
        ("--temperature=3", "temperature of 0.01 to 2"),
        ("--temperature=0.001", "temperature of 0.01 to 2"),
        ("--minibatches=64", "give each rank and minibatch one"),
        ("--max_response_tokens=128", "have over 0 tokens"),
        ("--max_prompt_tokens=5", "4096 of 4096 train prompts of tiny have over 5 tokens"),
        ("--config=missing.yaml", "missing.yaml"),
    ],
)
def test_bad_input_is_one_sentence_before_the_engine_is_built(arguments, sentence, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments.split()])
    monkeypatch.setattr(train, "init_distributed", lambda: pytest.fail("too late"))
    with pytest.raises(Refused) as refused:
        train.main()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "lines, sentence",
    [
        ("", "0 problems"),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": 1+1}\n', "line 2"),
        ('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2"}\n', "line 2"),
    ],
)
def test_a_bad_task_file_is_named_with_its_line(lines, sentence, tmp_path, monkeypatch):
    (tmp_path / "task.jsonl").write_text(lines)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--task={tmp_path / 'task.jsonl'}"])
    with pytest.raises(Refused, match=sentence):
        train.main()


def test_the_folder_of_another_run_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match="holds another run"):
        check_config(Config(out_dir=str(tmp_path)))
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_refused_run_or_evaluation_exits_with_one_line_and_status_1():
    options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run, evaluation = (  # both at once
        subprocess.Popen([sys.executable, ROOT / script, flag], **options)
        for script, flag in (("train.py", "--steps=0"), ("eval.py", "--samples=0"))
    )
    assert run.communicate() == ("", "train.py: steps is 0: it has to be positive\n")
    assert evaluation.communicate() == ("", "eval.py: samples is 0: it has to be positive\n")
    assert run.returncode == evaluation.returncode == 1


def test_flags_override_the_recipe_and_a_recipe_has_only_fields_of_config(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("objective: grpo\nobjective_args: [eps=0.4]\nsteps: 7\nlearning_rate: 1e-5\n")
    cfg = parse_config([f"--config={recipe}", "--steps=9"])
    assert (cfg.objective, cfg.objective_args, cfg.steps) == ("grpo", ["eps=0.4"], 9)
    assert cfg.learning_rate == 1e-5  # which YAML itself reads as a string
    recipe.write_text("clip_range: 0.2\n")
    with pytest.raises(Refused, match="clip_range"):
        parse_config([f"--config={recipe}"])
    recipe.write_text("objective: ppo\n")
    with pytest.raises(Refused, match="unknown objective 'ppo'"):
        check_config(parse_config([f"--config={recipe}"]))


def test_the_on_policy_check_stops_a_batch_that_is_not_and_says_where_to_look():
    fresh = {"ess": 0.99, "ratio": 1.01, "mismatch_mean": 0.01}
    check_on_policy(Config(), fresh)
    for stale in {"ess": 0.85}, {"ratio": 1.2}, {"ratio": 0.02}:
        with pytest.raises(Refused, match="weight sync"):
            check_on_policy(Config(), fresh | stale)
        for planned in {"temperature": 1.2}, {"top_p": 0.9}, {"top_k": 5}, {"lag": 1}:
            check_on_policy(Config(**planned), fresh | stale)


def test_a_number_that_is_not_finite_stops_the_run_with_step_rank_and_response(
    engine, prompts, group
):
    cfg = Config(prompts_per_step=2, group_size=2)
    policy = build_policy(cfg, group)
    rollouts = engine.sample(prompts[:2], 2, [0, 2], max_tokens=64)
    rollouts.advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    rollouts.logp_behavior[2, 1] = -torch.inf
    with pytest.raises(FloatingPointError) as error:
        update(policy, None, None, rollouts, cfg, step=7)
    assert str(error.value).startswith("step 7, rank 0: log rho is not within 82.0 nats")
    assert repr(rollouts.text[2]) in str(error.value)


def test_a_sync_left_out_is_detected_in_the_step_that_would_have_used_the_old_weights(
    train_here, monkeypatch
):
    load_weights = Engine.load_weights

    def forgetful(engine, weights, version):
        if version != "2":
            load_weights(engine, weights, version)

    monkeypatch.setattr(Engine, "load_weights", forgetful)
    with pytest.raises(Refused, match="step 2: a batch was sampled by weights 1, not by weights 2"):
        train_here("--steps=4", "--prompts_per_step=4")

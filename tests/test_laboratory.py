"""The laboratory: what it plans, how it runs, and how it sums up."""

import os
import re
import statistics
from functools import cache, partial

import pytest
import torch
from conftest import ROOT

from loss import p3o
from study import mismatch, patched, pretrained, report, runs
from study.mismatch import LEARNING_RATE, PARTS, Cell, command_of
from support.command import Refused, parse_flags
from train import Config

LAG = Cell("lag 16", "p3o", LEARNING_RATE, 0)


def run_of(cell, *accuracies, stopped=None):
    """A finished run with these sampled accuracies from step 0 on."""
    steps = [10 * number for number in range(len(accuracies))]
    return {
        **cell._asdict(),
        "stopped": stopped,
        "seconds": 1.0,
        "config": {"passes": 1, "minibatches": 2},
        "metrics": {
            "step": steps,
            "heldout_pass@1": list(accuracies),
            "heldout_greedy": [accuracy / 2 for accuracy in accuracies],
            "ess": [None, 0.5] + [0.25] * (len(steps) - 2),
            "ess_min": [None, 0.4] + [0.1] * (len(steps) - 2),
            "ess_used": [None, 0.8] + [0.6] * (len(steps) - 2),
            "entropy": [None] + [0.25] * (len(steps) - 1),
        },
    }


def config_of(command):
    """The configuration that the flags of a command ask for."""
    return parse_flags(Config, [word for word in command if word.startswith("--")])


# The plan


def test_every_planned_run_has_flags_that_train_py_takes():
    p3o_runs = {
        cell: run_of(cell, 0.4, 0.9, 0.9)
        for cell in PARTS["grid"]
        if cell.objective == "p3o"
    }
    # One run of each objective and of each kind of data: their flags are put together.
    cells = sum(PARTS.values(), [])
    of_each = {cell.objective: cell for cell in cells}
    of_each |= {cell.mismatch: cell for cell in cells}
    for cell in of_each.values():
        script, *flags = command_of(cell, p3o_runs, ROOT / "runs/test")
        assert (ROOT / script).exists()
        cfg = config_of(flags)
        assert (cfg.seed, cfg.learning_rate) == (cell.seed, cell.learning_rate)
        # No result hangs on what "auto" means on a machine.
        assert cfg.dtype == "float32"
        fp8 = cell.mismatch == "fp8"
        assert cfg.rollout_dtype == ("bfloat16" if fp8 else "float32")


def test_alpha_of_a3po_follows_from_the_lag(tmp_path):
    # Data d updates old: (d - 1) / d. 15 / 16
    cfg = config_of(command_of(LAG._replace(objective="a3po"), {}, tmp_path))
    assert cfg.objective_args == {"alpha": 0.9375}


def test_a_run_of_smollm2_is_the_recipe_but_for_what_its_cell_says():
    cell = Cell("T = 1.2", "p3o, no KL", pretrained.LEARNING_RATE, 2)
    cfg = config_of(pretrained.command_of(cell, model="models/SmolLM2"))
    recipe = parse_flags(Config, ["--config", pretrained.EVERY_RUN["config"]])
    changed = {name: value for name, value in cfg if value != getattr(recipe, name)}
    # On a CPU without bfloat16 of its own that is the recipe's as well.
    changed["rollout_dtype"] = cfg.rollout_dtype
    assert changed == {
        "model": "models/SmolLM2",
        "steps": 20,
        "eval_every": 5,
        "dtype": "float32",
        "rollout_dtype": "float32",
        "objective": "study.ablations:cap_without_kl",
        "temperature": 1.2,
        "seed": 2,
    }


def test_the_grid_of_smollm2_has_a_task_of_its_own_and_fresh_data_first():
    grid = pretrained.PARTS["grid"]
    assert len(grid) == 6 * 6 * 3
    configs = [config_of(pretrained.command_of(cell, "smollm2")) for cell in grid[:36]]
    lags = [0] * 6 + [4] * 6 + [0] * 12 + [16] * 6 + [0] * 6
    assert [cfg.lag for cfg in configs] == lags
    in_fp8 = [cfg.rollout_quantization == "fp8_per_channel" for cfg in configs]
    assert in_fp8 == [False] * 30 + [True] * 6
    assert {cfg.rollout_dtype for cfg in configs[30:]} == {"bfloat16"}
    assert {cfg.task for cfg in configs} == {"recipes/formulas"}


def test_e_b_of_the_runs_own_mean_and_of_another_run_wait_for_p3os(tmp_path):
    own = Cell("lag 16", mismatch.OWN_MEAN, LEARNING_RATE, 0)
    with pytest.raises(Refused, match="--part grid comes first"):
        command_of(own, {}, tmp_path)
    done = {LAG: run_of(LAG, 0.4, 0.9, 0.9)}  # e_B 0.5 and 0.25, two updates a step
    assert config_of(command_of(own, done, tmp_path)).objective_args == {"level": 0.375}
    # Seed 2 has the e_B of seed 0, which is next after 0, 1, 2.
    yoked = own._replace(objective=mismatch.YOKED, seed=2)
    path = config_of(command_of(yoked, done, tmp_path)).objective_args["path"]
    assert (ROOT / path).read_text() == "[0.5, 0.5, 0.25, 0.25]"


# Remedies for heat


def test_step_where_signal_skips_the_optimizer_where_all_advantages_are_0(monkeypatch):
    class Batch:
        advantage = torch.tensor([[0.0, 0.0], [1.0, 0.0]])

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def update(policy, optimizer, objective, rollouts, rows, cfg, step):
        weight.grad = torch.ones(1)
        optimizer.step()

    monkeypatch.setattr(patched.train, "update", update)
    patched.step_where_signal()
    for rows, expected in (([0], 0.0), ([0, 1], -1.0), ([0], -1.0)):
        patched.train.update(None, optimizer, None, Batch, rows, None, 1)
        assert weight.item() == expected


def test_what_an_objective_had_in_place_of_e_b_stands_beside_it(monkeypatch):
    def update(objective, e_b):
        objective(*torch.zeros(4, 1, 1), e_b)
        return {"ess": e_b}

    monkeypatch.setattr(patched.ablations, "p3o", p3o)
    monkeypatch.setattr(patched.train, "update", update)
    patched.ess_used()
    fixed_ess = partial(patched.ablations.fixed_ess, level=0.8)
    assert patched.train.update(fixed_ess, 0.9) == {"ess": 0.9, "ess_used": 0.8}


def test_the_kl_at_one_heat_is_0_where_the_engine_is_the_hot_policy(monkeypatch):
    at_temperature = patched.policy.token_log_probabilities
    monkeypatch.setattr(patched.policy, "token_log_probabilities", at_temperature)
    monkeypatch.setattr("sys.argv", ["patched.py", "--temperature=1.5"])
    patched.kl_at_rollout_temperature()
    hidden, head = torch.randn(4, 8), torch.randn(5, 8)
    tokens = torch.arange(4 * 6).view(4, 6) % 5  # the sampled one, then all five
    found = patched.policy.token_log_probabilities(hidden, head, 1.0, tokens)
    logits = hidden @ head.T
    expected = [logits.log_softmax(-1)] + 5 * [(logits / 1.5).log_softmax(-1)]
    for column, logp in enumerate(expected):
        token = tokens[:, column : column + 1]
        torch.testing.assert_close(found[:, column], logp.gather(1, token)[:, 0])


# Running it


@pytest.fixture
def grid(monkeypatch, tmp_path):
    """Makes a grid of three runs by two workers, without training; reads its file."""
    cells = [LAG._replace(seed=seed) for seed in range(3)]

    def make_run(cell, command):
        if command == ["fails"]:
            raise RuntimeError("no memory")
        cores = sorted(os.sched_getaffinity(0))
        return run_of(cell, 0.4, 0.9) | {"cores": cores}

    monkeypatch.setattr(runs, "make_run", make_run)
    monkeypatch.setattr(runs.signal, "signal", lambda *_: None)

    def make(failing=None):
        def command_of(cell):
            return ["fails"] if cell.seed == failing else ["runs"]

        runs.run_grid(cells, command_of, tmp_path / "light.jsonl", workers=2)
        return runs.read_runs(tmp_path / "light.jsonl")

    return make


def test_a_run_that_fails_keeps_no_other_from_running_and_is_run_again(grid, capsys):
    with pytest.raises(Refused, match="1 runs failed"):
        grid(failing=1)
    printed = capsys.readouterr()
    assert "no memory" in printed.err
    assert "3/3" in printed.out + printed.err
    assert len(grid()) == 3
    # What has its line is not run again.
    assert "1/1" in capsys.readouterr().out


def test_workers_share_the_cores_and_each_run_has_a_share(grid):
    assert runs.shares_of([0, 1, 2], 2) == [{0, 2}, {1}]
    assert runs.shares_of([0], 2) == [{0}, {0}]
    shares = runs.shares_of(sorted(os.sched_getaffinity(0)), 2)
    for run in grid().values():
        assert set(run["cores"]) in shares


# Summing it up


def test_the_score_is_the_mean_of_the_last_three_sampled_accuracies():
    # (0.6 + 0.7 + 0.8) / 3
    run = run_of(LAG, 0.1, 0.5, 0.6, 0.7, 0.8)
    assert runs.score(run) == pytest.approx(0.7)
    assert runs.score(run | {"stopped": "step 9: not finite"}) == 0


def test_a_run_has_collapsed_below_half_of_its_own_best_or_if_it_stopped():
    assert runs.collapsed(run_of(LAG, 0.4, 0.8, 0.39))
    assert not runs.collapsed(run_of(LAG, 0.4, 0.8, 0.41))
    assert runs.collapsed(run_of(LAG, 0.4, 0.8, stopped="step 9: not finite"))


def test_an_interval_is_students():
    # 1, 2, 3: standard deviation 1; 4.303 is t of two degrees; 4.303 / sqrt(3) = 2.484
    assert runs.interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2.484), abs=1e-3)
    assert runs.text_of([1.0, 2.0, 3.0], "+") == "+2.000 ± 2.484"
    assert runs.text_of([0.5]) == "0.500"


def laboratory():
    """P3O and GRPO under two mismatches; one seed of P3O has nothing beside it."""
    scores = {
        ("T = 1.4", "p3o"): (0.8, 0.6, 0.1),
        ("T = 1.4", "grpo 0.2"): (0.4, 0.4),
        ("lag 16", "p3o"): (0.9, 0.7),
        ("lag 16", "grpo 0.2"): (0.7, 0.7),
    }
    found = {}
    for (name, objective), of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            cell = Cell(name, objective, LEARNING_RATE, seed)
            found[cell] = run_of(cell, 0.4, score, score, score)
    return found


def row_of(text, *begin):
    """The cells of the one row of a table that begins like this, by column."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    (row,) = [line for line in lines if line[: len(begin)] == list(begin)]
    return dict(zip(lines[0], row, strict=True))


def test_differences_are_taken_seed_by_seed_with_the_mismatches_fixed():
    row = row_of(
        report.table_of_differences(laboratory(), mismatch.MISMATCHES), "grpo 0.2"
    )
    # Seed 0: 0.4 and 0.2, mean 0.3. Seed 1: 0.2 and 0, mean 0.1. So 0.2, and
    # 12.706 (t of one degree) * 0.1414 / sqrt(2).
    assert row["P3O minus it"] == "+0.200 ± 1.271"
    # The means of the mismatches are 0.3 and 0.1.
    assert (row["mismatches"], row["P3O better"], row["seeds"]) == ("2", "2", "2")
    assert (row["least"], row["most"]) == ("+0.100", "+0.300")


def test_a_run_of_another_machine_is_compared_with_p3o_there():
    found = laboratory()
    cell = LAG._replace(objective="p3o on a GPU")
    found[cell] = run_of(cell, 0.4, 0.6, 0.6, 0.6)
    found[LAG._replace(objective="grpo 0.2")]["beside"] = cell.objective
    # Of seed 0 0.6 - 0.7, where P3O has 0.9 here; of seed 1 0.7 - 0.7, as before.
    by_seed = report.differences(found, "grpo 0.2")["lag 16"]
    assert by_seed == pytest.approx({0: -0.1, 1: 0})
    # 0.9 - 0.6
    assert report.differences(found, cell.objective)["lag 16"][0] == pytest.approx(0.3)


def test_a_table_of_scores_has_greedy_accuracy_and_a_star_at_a_collapse():
    row = row_of(report.table_of_scores(laboratory()), "p3o")
    # (0.9 + 0.7) / 2 is the score, and run_of's greedy accuracy is half of it.
    assert row["lag 16"] == "0.80 / 0.40"
    # (0.8 + 0.6 + 0.1) / 3, and 0.1 is below half of 0.4.
    assert row["T = 1.4"] == "0.50 / 0.25 *"


def test_the_table_of_runs_has_every_measure():
    text = report.table_of_runs(laboratory())
    row = row_of(text, "lag 16", "0.0002", "grpo 0.2")
    assert (row["seeds"], row["collapsed"]) == ("2", "0")
    assert row["beside P3O on a GPU"] == "0"
    assert (row["score"], row["greedy"]) == ("0.700 ± 0.000", "0.350 ± 0.000")
    # P3O's 0.9 and 0.7 less 0.7: 0.2 and 0
    assert row["P3O minus it"] == "0.100 ± 1.271"
    assert row["entropy"] == "0.250 ± 0.000"
    # The means of the steps are 0.5, 0.25 and 0.25, and the least of an update is 0.1.
    assert (row["mean e_B"], row["least e_B"]) == ("0.333", "0.100")
    # 0.8, 0.6 and 0.6
    assert row["mean in its place"] == "0.667"


@pytest.mark.slow
def test_figures_are_made_of_whatever_runs_there_are(tmp_path):
    report.draw_scores(laboratory(), tmp_path / "scores.png")
    shown = [("lag 16", "lag 16", "heldout_pass@1"), ("e_B", "T = 1.6", "ess")]
    report.draw_by_step(laboratory(), mismatch.MAIN, shown, tmp_path / "curves.png")
    report.draw_weights(tmp_path / "objectives.png")
    assert len(list(tmp_path.glob("*.png"))) == 3


@pytest.mark.parametrize(
    "name",
    ["light", "pretrained", "gpu/pretrained", "first/mismatch", "first/pretrained"],
)
def test_the_committed_tables_are_those_of_the_committed_runs(name):
    path = runs.RESULTS / f"{name}.jsonl"
    of_smollm2 = path.stem == "pretrained"
    text_of = report.table_of_runs if of_smollm2 else report.text_of_laboratory
    assert path.with_suffix(".md").read_text() == text_of(runs.read_runs(path))


def test_each_run_on_a_gpu_has_its_p3o_of_that_gpu_and_no_run_on_a_cpu_has():
    every = runs.read_runs(runs.RESULTS / "light.jsonl")
    for cell, run in every.items():
        # Runs of an early commit have no environment.
        cuda = "CUDA_VERSION" in run["config"].get("environment", {})
        of_p3o = cell.objective == "p3o on a GPU"
        assert run.get("beside") == ("p3o on a GPU" if cuda and not of_p3o else None)
        assert cell._replace(objective=run.get("beside", cell.objective)) in every


ON_THE_FRONT = {
    "on-policy": "fresh",
    "T = 1.6": "rollouts at temperature 1.6",
    "fp8": "rollouts in fp8",
    "lag 16": "16 steps old",
    "16 updates": "4 passes, 16 updates",
}
PAGE = ROOT / "study/README.md"
IN_THE_FIRST_TABLE = {
    "P3O": "p3o",
    "GRPO 0.2": "grpo 0.2",
    "GRPO 0.4": "grpo 0.4",
    "REINFORCE": "reinforce",
    "P3O, e_B of responses": "p3o, e_B of responses",
    "P3O, last 16 e_B": "p3o, recent e_B",
    "A-3PO": "a3po",
    "P3O on a GPU": "p3o on a GPU",
    **{name: name.lower() for name in ("OPMD", "REC", "BAPO", "M2PO", "SAPO")},
    "AsymRE": "asymre",
}
# What it leaves out lies between two of its columns, or is cooler data.
LEFT_OUT = ("T = 0.6", "T = 0.8", "T = 1.2", "T = 1.4", "lag 1")
COLUMNS = [name for name in mismatch.MISMATCHES if name not in LEFT_OUT]

CONSTANTS = {
    "P3O, seeds 0 to 2": "p3o",
    **{level: f"p3o, e_B = {level}" for level in ("0.8", "0.9", "0.97")},
    "P3O's own mean": "p3o, own mean e_B",
    "another seed's e_B": "p3o, yoked e_B",
}
PARTS_OF_P3O = {
    "without its KL": "p3o, no KL",
    "without its cap": "p3o, no cap",
    "k3, unclamped, for the KL": "p3o, k3",
    "`is`, unbiased, for the KL": "p3o, is",
    **{name: name.lower() for name in ("DAPO", "GSPO", "CISPO", "TIS")},
}
OF_SMOLLM2 = {
    **{title: IN_THE_FIRST_TABLE[title] for title in [*IN_THE_FIRST_TABLE][:4]},
    "P3O, e_B = 0.9": "p3o, e_B = 0.9",
    "OPMD": "opmd",
}

KINDS_OF_SMOLLM2 = [
    f"{name}, formulas"
    for name in ("on-policy", "lag 4", "lag 16", "4 updates", "T = 1.2", "fp8")
]


@cache
def of_the_laboratory():
    return runs.read_runs(runs.RESULTS / "light.jsonl")


@cache
def at_the_rate():
    return runs.select(of_the_laboratory(), learning_rate=LEARNING_RATE)


@cache
def of_smollm2():
    """Its runs: on fresh data and with fp8 a CPU's, elsewhere a GPU's."""
    of_cpu = runs.read_runs(runs.RESULTS / "pretrained.jsonl")
    of_gpu = runs.read_runs(runs.RESULTS / "gpu/pretrained.jsonl")
    kinds = ("on-policy, formulas", "fp8, formulas")
    return {c: run for c, run in of_gpu.items() if c.mismatch not in kinds} | {
        c: run for c, run in of_cpu.items() if c.mismatch in kinds
    }


def test_the_front_page_has_the_scores_of_the_committed_runs():
    scores = report.table_of_scores(at_the_rate())
    text = (ROOT / "README.md").read_text().replace(" *", "")
    for name, title in ON_THE_FRONT.items():
        cells = [row_of(scores, of)[name] for of in ("p3o", "grpo 0.2", "reinforce")]
        assert f"{title} | {' | '.join(cells)} |".replace(" *", "") in text


def is_a_row_of_the_page(title, cells):
    row = f"| {title} | {' | '.join(cells)} |".replace("|  ", "|")
    return f"\n{row}\n" in PAGE.read_text()


def scores_of(every, objective, kinds, digits=2):
    """The cells of an objective: its mean score on each kind of data."""
    cells = []
    for name in kinds:
        same = runs.select(every, objective=objective, mismatch=name).values()
        score = f"{statistics.mean(map(runs.score, same)):.{digits}f}" if same else ""
        if 0 < len(same) < 3:
            score = f"({score})"
        cells.append(score + "*" * any(map(runs.collapsed, same)))
    return cells


@pytest.mark.parametrize("title", IN_THE_FIRST_TABLE)
def test_the_first_table_has_the_mean_score_of_an_objective_on_each_kind_of_data(title):
    objective = IN_THE_FIRST_TABLE[title]
    cells = scores_of(at_the_rate(), objective, COLUMNS)
    assert is_a_row_of_the_page(title, cells)


def of_three_seeds(every):
    return {cell: run for cell, run in every.items() if cell.seed < 3}


def less_p3o(objective, kinds):
    """P3O's score less this objective's, over all of these kinds, by report.py."""
    text = report.table_of_differences(at_the_rate(), kinds)
    return row_of(text, objective)["P3O minus it"]


@pytest.mark.parametrize("title", CONSTANTS)
def test_the_table_of_constants_has_the_mean_scores_of_three_seeds(title):
    every, objective = of_three_seeds(at_the_rate()), CONSTANTS[title]
    apart = ("lag 4", "lag 16", "T = 1.2, lag 4", "16 updates", "4 minibatches")
    eight = [name for name in mismatch.MISMATCHES if name not in (*apart, "4 updates")]
    of_eight = [float(cell) for cell in scores_of(every, objective, eight, digits=9)]
    cells = [f"{statistics.mean(of_eight):.3f}"]
    cells += scores_of(every, objective, apart, digits=3)
    if objective == "p3o":
        cells.append("")
    else:
        # The page has the constant less P3O.
        less = less_p3o(objective, mismatch.MISMATCHES)
        cells.append(less.translate(str.maketrans("+-", "-+")))
    assert is_a_row_of_the_page(title, cells)


@pytest.mark.parametrize("title", PARTS_OF_P3O)
def test_the_table_of_p3os_parts_has_what_each_is_worth(title):
    objective = PARTS_OF_P3O[title]
    cells = scores_of(at_the_rate(), objective, ("lag 4", "lag 16", "16 updates"))
    less = less_p3o(objective, mismatch.BREAKING).removeprefix("+")
    assert is_a_row_of_the_page(title, [*cells, less])


@pytest.mark.parametrize("kind", mismatch.SOME[1:])
def test_the_table_of_learning_rates_has_three_seeds_at_each(kind):
    every = of_three_seeds(of_the_laboratory())
    cells = []
    for objective in ("p3o", "grpo 0.2", "reinforce", "p3o, e_B of responses", "rec"):
        of_rates = [
            scores_of(runs.select(every, learning_rate=rate), objective, [kind])[0]
            for rate in (1e-4, 2e-4, 4e-4)
        ]
        cells.append(", ".join(of_rates))
    assert is_a_row_of_the_page(kind.replace(" = ", "="), cells)


@pytest.mark.parametrize("title", OF_SMOLLM2)
def test_so_has_the_table_of_smollm2(title):
    cells = scores_of(of_smollm2(), OF_SMOLLM2[title], KINDS_OF_SMOLLM2)
    assert is_a_row_of_the_page(title, cells)


def test_the_table_of_smollm2_has_the_mean_e_b_of_p3o():
    cells = []
    for name in KINDS_OF_SMOLLM2:
        same = runs.select(of_smollm2(), objective="p3o", mismatch=name).values()
        means = [statistics.mean(ess for _, ess in runs.series(r, "ess")) for r in same]
        cells.append(f"{statistics.mean(means):.2f}" if means else "")
    assert is_a_row_of_the_page("e_B of P3O", cells)


def test_the_intervals_on_the_page_are_of_tables_of_the_committed_runs():
    tables = "".join(path.read_text() for path in runs.RESULTS.rglob("*.md"))
    # The page says which of two is above.
    values = re.sub(r"[+-]", "", tables)
    found = re.findall(r"\d\.\d+ ± \d\.\d+", " ".join(PAGE.read_text().split()))
    assert len(found) > 40
    assert [interval for interval in found if interval not in values] == []


def intervals_without_0(objectives):
    """How many intervals there are of P3O less these, without 0, and above 0."""
    found = [
        runs.interval(list(by_seed.values()))
        for objective in objectives
        for by_seed in report.differences(at_the_rate(), objective).values()
        if len(by_seed) > 1
    ]
    sure = [middle for middle, half in found if abs(middle) > half]
    return len(found), len(sure), sum(middle > 0 for middle in sure)


def test_the_page_counts_the_intervals_that_exclude_0():
    rivals = (*mismatch.RIVALS, mismatch.A3PO)
    apart = (*rivals, *mismatch.STATISTICS, *mismatch.REMEDIES, mismatch.RAW)
    others = [name for name in mismatch.OBJECTIVES if name not in ("p3o", *apart)]
    text = " ".join(PAGE.read_text().split())
    every, sure, above = intervals_without_0(others)
    assert f"Of {every} intervals of P3O less another objective" in text
    assert f"{sure} exclude 0, {above} for P3O" in text
    every, sure, above = intervals_without_0(rivals)
    assert f"Of {every} of neighbours and two statistics {sure} do, {above}" in text

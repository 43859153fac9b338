"""The runs of a pretrained model: their plan, their flags, and their table."""

from conftest import ROOT
from test_laboratory import row_of

from experiments import pretrained
from experiments.mismatch import Cell, finished
from support.flags import parse_flags
from train import Config


def test_each_mismatch_has_each_objective_with_three_seeds():
    cells = pretrained.plan({})
    # Three objectives under fp8, five with hot rollouts, and one of a hot policy.
    assert len(cells) == len(set(cells)) == (3 + 5 + 1) * 3
    # Seed by seed: a grid that is stopped has whole comparisons.
    assert [cell.seed for cell in cells] == 9 * [0] + 9 * [1] + 9 * [2]


def test_a_run_is_the_recipe_but_for_its_length_objective_mismatch_and_seed():
    cell = Cell("fp8", pretrained.LEARNING_RATE, "grpo 0.4", seed=2)
    script, *flags = pretrained.flags_of(cell, {}, model="models/SmolLM2")
    assert script == "train.py"
    cfg = parse_flags(Config, flags)
    recipe = parse_flags(Config, ["--config", pretrained.RECIPE])
    changed = {name: value for name, value in cfg if value != getattr(recipe, name)}
    assert changed == {
        "model": "models/SmolLM2",
        "steps": pretrained.STEPS,
        "eval_every": 10,
        "objective": "grpo",
        "objective_args": {"eps": 0.4},
        "rollout_quantization": "fp8_per_channel",
        "seed": 2,
    }
    assert cfg.learning_rate == pretrained.LEARNING_RATE


def test_raw_log_probabilities_come_from_their_own_script_and_change_nothing_else():
    cell = Cell("T = 1.2", pretrained.LEARNING_RATE, "p3o", seed=0)
    script, *flags = pretrained.flags_of(cell, {}, model="models/SmolLM2")
    raw = cell._replace(objective="p3o, raw log pi_b")
    script_of_raw, *flags_of_raw = pretrained.flags_of(raw, {}, model="models/SmolLM2")
    assert (script, script_of_raw) == ("train.py", "experiments/raw_logprobs.py")
    assert flags_of_raw == flags


def test_the_table_has_means_over_seeds_and_p3os_difference_in_pairs():
    p3o = [Cell("fp8", pretrained.LEARNING_RATE, "p3o", seed) for seed in (0, 1)]
    grpo = p3o[0]._replace(objective="grpo 0.4")
    done = {
        p3o[0]: row_of(p3o[0], [0.1, 0.8, 0.8, 0.8]),
        p3o[1]: row_of(p3o[1], [0.1, 0.6, 0.6, 0.6]),
        grpo: row_of(grpo, [0.1, 0.5, 0.5, 0.5]),
    }
    head, _, of_p3o, of_grpo = pretrained.report(done).splitlines()
    columns = [name.strip() for name in head.strip("|").split("|")]

    def cell(line: str, name: str) -> str:
        return line.strip("|").split("|")[columns.index(name)].strip()

    # Scores 0.8 and 0.6: Student's t of one degree of freedom, 12.706 x 0.1.
    assert cell(of_p3o, "score") == "0.700 ± 1.271"
    assert cell(of_p3o, "P3O minus it") == ""
    # Seed 1 has no run of GRPO: its pair does not count.
    assert cell(of_grpo, "P3O minus it") == "0.300"
    assert cell(of_grpo, "seeds") == "1"


def test_the_committed_table_is_that_of_the_committed_runs_and_of_the_page():
    done = finished(pretrained.RESULTS / "pretrained.jsonl")
    text = pretrained.report(done)
    assert (pretrained.RESULTS / "pretrained.md").read_text() == text
    page = (ROOT / "experiments/README.md").read_text()
    assert text in page

"""The tables of experiments/results/bench.md, from what experiments/bench.py measured.

A cell is a median, with the least and the most in brackets where there are several.
"""

from typing import Any

from experiments.tables import table

# Of the table of speed: title, goal, and where speed.measure_speed has the number.
SPEED_ROWS = [
    ("rollout, tokens a second", "", "rollout", "tokens a second"),
    (
        "rollout, beside vLLM driven directly, with log-probabilities",
        "0.97 or more",
        "rollout",
        "speed beside vLLM as asked",
    ),
    (
        "the same, beside vLLM without them",
        "",
        "rollout",
        "speed beside vLLM bare",
    ),
    (
        "update, share of the products' ceiling in its dtype",
        "0.60 or more",
        "update",
        "share of the ceiling",
    ),
    (
        "update, tokens a second, each response with its prompt",
        "",
        "update",
        "tokens a second",
    ),
    ("padding, share of the places", "", "update", "share of padding"),
    (
        "responses that share their prompt's sequence in a run",
        "",
        "update",
        "responses that share a sequence",
    ),
    (
        "tokens that the model reads if groups share their prompts, share of all",
        "",
        "shared prompts",
        "share of the tokens read",
    ),
    (
        "gradient's time if groups share their prompts, beside that if not",
        "",
        "shared prompts",
        "shared / alone",
    ),
    ("sync, GB/s", "", "sync", "GB/s"),
    (
        "pass for e_B, share of the gradient's time, itself included",
        "0.33 or less",
        "pass for e_B",
        "share of the update",
    ),
    (
        "torch.compile of the layers, gradient's time beside the plain one's",
        "",
        "torch.compile",
        "compiled / plain",
    ),
    ("and the first gradient, s", "", "torch.compile", "seconds of the first"),
]


def format_number(value: float) -> str:
    """Three digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def cell(value: float | dict[str, float]) -> str:
    """A number, or a spread: its median, with the least and the most."""
    if not isinstance(value, dict):
        return format_number(value)
    median, least, most = (
        format_number(value[name]) for name in ("median", "least", "most")
    )
    return f"{median} [{least}, {most}]"


def table_of_machine(machine: dict[str, Any]) -> str:
    rows = [[name, cell(value)] for name, value in machine.items()]
    return table([["the machine", "at most"], *rows])


def table_of_speed(models: dict[str, Any]) -> str:
    """The goals, and each model beside them; empty where a part was not measured."""
    rows = []
    for title, goal, part, name in SPEED_ROWS:
        cells = [
            cell(model[part][name]) if part in model else ""
            for model in models.values()
        ]
        rows.append([title, goal, *cells])
    return table([["", "goal", *models], *rows])


def table_of_heads(heads: dict[str, Any]) -> str:
    rows = [
        [
            name,
            format_number(head["bytes in chunks"] / 1e9),
            format_number(head["bytes at once"] / 1e9),
            format_number(head["ratio"]),
        ]
        for name, head in heads.items()
    ]
    head = ["vocabulary", "in chunks, GB", "all at once, GB", "ratio (goal: 0.125)"]
    return table([head, *rows])


def table_of_arms(arms: dict[str, Any]) -> str:
    rows = []
    for name, arm in arms.items():
        phases = [
            format_number(arm[phase]) if phase in arm else ""
            for phase in ("rollout", "update", "sync", "share of the sync")
        ]
        tokens = format_number(arm["tokens of a response"])
        rows.append([name, cell(arm["seconds"]), *phases, tokens])
    head = ["", "step, s", "rollout, s", "update, s", "sync, s"]
    return table([[*head, "its share (goal: 0.03)", "tokens of a response"], *rows])


def table_of_ratios(ratios: dict[str, Any]) -> str:
    rows = [[name, cell(ratio)] for name, ratio in ratios.items()]
    return table([["of the medians of a round", "ratio"], *rows])


def table_of_failures(failed: dict[str, str]) -> str:
    rows = [[name, f"`{why.replace('|', '/')}`"] for name, why in failed.items()]
    return table([["failed", "with"], *rows])


def table_of_profile(profile: list[dict[str, Any]]) -> str:
    rows = [
        [f"`{row['operator']}`", format_number(100 * row["share"]), str(row["calls"])]
        for row in profile
    ]
    return table([["operator", "% of the time", "calls"], *rows])


def table_of_kl(exact_kl: dict[str, Any]) -> str:
    """What K = 20 listed tokens cost, beside none."""
    rows = []
    for name, found in exact_kl.items():
        peak = "peak bytes of the gradient"
        cells = [
            cell(
                {
                    "median": found[phase]["ratio of processor seconds"],
                    "least": found[phase]["ratios"][0],
                    "most": found[phase]["ratios"][-1],
                }
            )
            for phase in ("rollout", "gradient")
        ]
        memory = found["K = 20"][peak] / found["K = 0"][peak]
        rows.append([name, *cells, f"{memory:.4f}"])
    head = ["K = 20 / K = 0", "rollout, processor time", "gradient, processor time"]
    return table([[*head, "gradient, peak memory"], *rows])


def made_by(part: dict[str, Any]) -> str:
    """What measured a part, and on what."""
    versions = ", ".join(
        f"{name} {number}" for name, number in part["versions"].items()
    )
    return f"`python {part['command']}` on {part['machine']}: {versions}."


def report(results: dict[str, Any]) -> str:
    """All of it as a page."""
    sections = ["# The benchmark"]
    if "steps" in results:
        steps = results["steps"]
        sections += [
            "## Whole steps",
            made_by(steps),
            f"Every command ran {steps['rounds']} times, in turn. A step lasts from "
            "the line that a trainer prints to the next one.",
            table_of_arms(steps["arms"]),
            table_of_ratios(steps["ratios"]),
        ]
        if steps["failed"]:
            sections.append(table_of_failures(steps["failed"]))
    if "speed" in results:
        speed = results["speed"]
        sections += [
            "## Beside what is possible",
            made_by(speed),
            table_of_machine(speed["machine's rates"]),
            table_of_speed(speed["models"]),
            "## Memory of log pi_theta and its gradient",
            table_of_heads(speed["heads"]),
        ]
        for name, model in speed["models"].items():
            sections += [
                f"## Where the time of a gradient goes: {name}",
                table_of_profile(model["profile"]),
            ]
    if "exact KL" in results:
        exact_kl = results["exact KL"]
        sections += [
            "## What the K tokens of the KL cost",
            made_by(exact_kl),
            table_of_kl(exact_kl["models"]),
        ]
    return "\n\n".join(sections) + "\n"

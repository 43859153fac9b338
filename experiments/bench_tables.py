"""The tables of experiments/results/bench.md, from what experiments/bench.py measured.

A cell is a median, with the least and the most in brackets where there are several.
"""

from typing import Any

from experiments.choices import SHORT_TURNS
from experiments.speed import KL_TURNS, LISTED, ROLLOUT_TURNS, TURNS
from experiments.tables import table
from experiments.threads import THREAD_TURNS
from support.log import PHASES

# What a part of experiments/bench.py is called on the page, in their order there.
PARTS = {
    "tiny_steps": "whole steps of the embedded policy",
    "model_steps": "whole steps of the pretrained model",
    "head": "the head",
    "choices": "smaller choices",
    "speed": "rollouts, updates, syncs and profiles",
    "threads": "threads",
    "kl": "the KL's tokens",
}
# Those of whole steps.
STEPS = ("tiny_steps", "model_steps")

# A number, or its median, least and most; None if it was not measured, or the word for
# what became of it.
Value = float | dict[str, float] | str | None

# What was profiled, by its name in the results.
PROFILES = {"profile": "an update", "profile of the sync": "a sync"}

# What experiments/speed.py found of a model: its part and name there, and its title.
SPEED_TITLES = {
    ("rollout", "tokens a second"): "rollout, tokens a second",
    ("rollout", "speed beside vLLM as asked"): "rollout, our speed / vLLM's "
    "driven directly",
    ("rollout", "speed beside vLLM bare"): "rollout, our speed / vLLM's without "
    "log-probabilities",
    ("update", "tokens a second"): "update, tokens a second, each response with its "
    "prompt",
    ("update", "tokens read a second"): "update, tokens a second, a shared prompt once",
    ("update", "GFLOP/s"): "update, GFLOP/s",
    ("update", "GFLOP/s of the products"): "the machine's products in turn with the "
    "update: its ceiling, GFLOP/s",
    ("update", "share of the ceiling"): "update, share of its ceiling",
    ("update", "share of the ceiling, head of responses"): "the same without the head "
    "on prompts, where it is not applied",
    ("profile", "share outside of products"): "update, share of its operators' time "
    "outside of matrix products, attention included",
    ("profile", "share in the head's products"): "update, share of its operators' "
    "time in the head's products, which are in float32",
    ("update", "share of padding"): "padding, share of the layers' places",
    ("update", "responses that share a sequence"): "responses that share their "
    "prompt's sequence in a run",
    ("shared prompts", "share of the tokens read"): "tokens that the model reads if "
    "groups share their prompts, share of all",
    ("shared prompts", "shared / alone"): "gradient's time, groups that share their "
    "prompts / not",
    ("pass for e_B", "share of the update"): "pass for e_B with several "
    "micro-batches, share of the gradient's time",
    ("torch.compile", "compiled / plain"): "gradient's time, compiled layers / plain "
    "ones",
    ("torch.compile", "seconds of the first"): "the first gradient with compiled "
    "layers, s",
    ("sync", "GB/s"): "sync, GB/s",
}
# By the titles of the table.
GOALS = {
    "a step, our time / TRL's with transformers": ("at most", 1 / 3),
    "a step, our time / TRL's with vllm": ("at most", 1 / 3),
    "rollout, our speed / vLLM's driven directly": ("at least", 0.97),
    "update, share of its ceiling": ("at least", 0.60),
    "sync, share of the step": ("at most", 0.03),
    "pass for e_B with several micro-batches, share of the gradient's time": (
        "at most",
        1 / 3,
    ),
    "peak memory of a head of SmolLM2-135M's size / all logits at once": (
        "at most",
        1 / 8,
    ),
    "peak memory of a head of Qwen2.5-1.5B's size / all logits at once": (
        "at most",
        1 / 8,
    ),
}


def format_number(value: float) -> str:
    """Three digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def cell(value: Value) -> str:
    """A number, or a spread: its median, with the least and the most."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        return format_number(value)
    median, least, most = (
        format_number(value[name]) for name in ("median", "least", "most")
    )
    return f"{median} [{least}, {most}]"


def columns_of(results: dict[str, Any]) -> dict[str, dict[str, Value]]:
    """What was measured by its title, of each model and dtype."""
    return {name: numbers_of(name, results) for name in results["speed"]["models"]}


def table_of_goals(results: dict[str, Any]) -> str:
    """A row for each goal, and a column for each model and dtype.

    A cell is bold if its median falls short of the goal.
    """
    columns = columns_of(results)
    lines = [["", "goal", *columns]]
    for title, (side, bound) in GOALS.items():
        line = [title, f"{side} {format_number(bound)}"]
        for found in columns.values():
            text = cell(found.get(title))
            is_short = falls_short(found.get(title), side, bound)
            line.append(f"**{text}**" if is_short else text)
        lines.append(line)
    return table(lines)


def table_of_numbers(results: dict[str, Any]) -> str:
    """A row for each quantity that has no goal, likewise."""
    columns = columns_of(results)
    lines = [["", *columns]]
    # A column may lack a row of another: not every model can share prompts.
    titles = dict.fromkeys(title for found in columns.values() for title in found)
    for title in titles:
        values = [found.get(title) for found in columns.values()]
        is_measured = any(value is not None for value in values)
        if is_measured and title not in GOALS:
            lines.append([title, *(cell(value) for value in values)])
    return table(lines)


def falls_short(value: Value, side: str, bound: float) -> bool:
    """Whether a number, or the median of several, misses a goal; without one, no."""
    if value is None or isinstance(value, str):
        return False
    median = value["median"] if isinstance(value, dict) else value
    return (side == "at most" and median > bound) or (
        side == "at least" and median < bound
    )


def steps_of(column: str, results: dict[str, Any]) -> dict[str, Any]:
    """The part that has whole steps of a column, or an empty one."""
    for part in STEPS:
        if column in results.get(part, {"arms": {}})["arms"]:
            return results[part]
    return {"arms": {}, "ratios": {}, "failed": {}}


def numbers_of(column: str, results: dict[str, Any]) -> dict[str, Value]:
    """All that is measured of a model in a dtype ("tiny, float32"), by its title."""
    dtype = column.split(", ")[-1]
    found: dict[str, Value] = {}
    rates = results["speed"]["machine's rates"]
    found["the machine's threads"] = rates["threads"]
    found["the machine's products, GFLOP/s in the dtype"] = rates[f"GFLOP/s, {dtype}"]
    found["the machine's memory, GB/s"] = rates["memory, GB/s"]

    steps = steps_of(column, results)
    arm = steps["arms"].get(column, {})
    found["a step, s"] = arm.get("seconds")
    for generator in ("transformers", "vllm"):
        trl = f"TRL with {generator}, {dtype}"
        ratio = steps["ratios"].get(f"{column} / {trl}")
        if trl in steps["failed"]:
            ratio = "failed"
        found[f"a step, our time / TRL's with {generator}"] = ratio
    found["sync, share of the step"] = arm.get("share of the sync")

    model = results["speed"]["models"][column]
    for (part, name), title in SPEED_TITLES.items():
        found[title] = model.get(part, {}).get(name)
    for parts, of_parts in model.get("forward passes", {}).items():
        found[f"gradient's time, {parts} / a single one"] = of_parts["time beside one"]
        found[f"padding, share of the places in {parts}"] = of_parts["share of padding"]
    for length, ratio in model.get("shared prompts by length", {}).items():
        title = f"gradient's time, prompts shared / not, made-up groups of {length}"
        found[title] = ratio

    # Columns of a dtype have the same: these heads are of made-up weights.
    for name, head in results.get("head", {}).get(dtype, {}).items():
        title = f"peak memory of a head of {name}'s size"
        found[f"{title}, GB"] = head["bytes in chunks"] / 1e9
        found[f"{title} / all logits at once"] = head["ratio"]
        torchs = head.get("linear_cross_entropy", {})
        title = f"torch's linear_cross_entropy, a head of {name}'s size"
        for quantity, key in (("memory", "bytes"), ("time", "time")):
            value = torchs.get(f"{key} beside chunks")
            found[f"{title}, {quantity} / ours for the sampled token"] = value

    of_threads = results.get("threads", {"models": {}})["models"].get(column, {})
    for phase in ("rollout", "gradient"):
        title = f"{phase}, time with threads bound to cores / free ones"
        found[title] = of_threads.get(phase)

    choices = results.get("choices", {"chunks": {}, "models": {}})
    found |= choices["models"].get(column, {})
    if dtype == "float32":
        found |= choices["chunks"]

    kl = results.get("kl", {"models": {}})["models"].get(column)
    for phase in ("rollout", "gradient"):
        title = f"{phase}, processor time with the KL's {LISTED} tokens / none"
        found[title] = kl and {
            "median": kl[phase]["ratio"],
            "least": kl[phase]["ratios"][0],
            "most": kl[phase]["ratios"][-1],
        }
    peak = "peak bytes of the gradient"
    added = kl and 100 * (kl[f"K = {LISTED}"][peak] / kl["K = 0"][peak] - 1)
    found["peak memory that these add to the gradient, %"] = added
    return found


def table_of_arms(arms: dict[str, Any]) -> str:
    rows = []
    for name, arm in arms.items():
        phases = [cell(arm.get(phase)) for phase in (*PHASES, "elsewhere")]
        tokens = format_number(arm["tokens of a response"])
        rows.append([name, cell(arm["seconds"]), *phases, tokens])
    head = ["", "step, s", *(f"{phase}, s" for phase in PHASES), "elsewhere, s"]
    return table([[*head, "tokens of a response"], *rows])


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
    return table([["operator", "% of the operators' time", "calls"], *rows])


def made_by(results: dict[str, Any]) -> str:
    """A list of what measured the parts, and on what."""
    parts_of: dict[str, list[str]] = {}
    for part, title in PARTS.items():
        if part in results:
            found = results[part]
            versions = ", ".join(
                f"{name} {number}" for name, number in found["versions"].items()
            )
            made = f"`python {found['command']}` on {found['machine']}"
            made += f", commit {found['commit']}, {versions}"
            parts_of.setdefault(made, []).append(title)
    return "\n".join(
        f"- {'; '.join(titles)}: {made}." for made, titles in parts_of.items()
    )


def report(results: dict[str, Any]) -> str:
    """All of it as a page: the goals, and what stands behind them."""
    sections = ["# The benchmark", made_by(results)]
    if "speed" in results:
        sections += [
            "Medians, with the least and the most in brackets; bold where the median "
            "falls short of its goal. What is compared ran in turn: rollouts in "
            f"{ROLLOUT_TURNS} turns, threads in {THREAD_TURNS}, the KL's cost in "
            f"{KL_TURNS['tiny']} (tiny) and {KL_TURNS['pretrained']}, lists, optimizer "
            f"steps and the order of micro-batches in {SHORT_TURNS}, and whole steps "
            f"as said below; all else in {TURNS}.",
            table_of_goals(results),
            "## Without a goal",
            table_of_numbers(results),
        ]
    for part in STEPS:
        if part not in results:
            continue
        steps = results[part]
        sections += [
            f"## {PARTS[part].capitalize()}",
            f"Every command ran {steps['rounds']} times, in turn. A step lasts from "
            "the line that a trainer prints to the next one.",
            table_of_arms(steps["arms"]),
            table_of_ratios(steps["ratios"]),
        ]
        if steps["failed"]:
            sections.append(table_of_failures(steps["failed"]))
    if "speed" in results:
        for part, act in PROFILES.items():
            for name, model in results["speed"]["models"].items():
                if part in model:
                    sections += [
                        f"## Where the time of {act} goes: {name}",
                        table_of_profile(model[part]["operators"]),
                    ]
    return "\n\n".join(sections) + "\n"

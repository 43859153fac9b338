r"""Counts the wrong verdicts of a grader on the pairs of tests/data/verdicts.jsonl.

    python tools/graders.py reward

The other graders are installed beside the environment and found by PYTHONPATH:

    pip install --no-deps --target others \
        math-verify==0.9.0 verl==0.9.1 mathruler==0.1.0 pylatexenc==2.11
    PYTHONPATH=others python tools/graders.py math_verify

That of Qwen2.5-Math is in no package, and needs an older sympy in a folder of its own:

    pip install --no-deps --target older sympy==1.12 mpmath==1.3.0 \
        antlr4-python3-runtime==4.11.1 word2number==1.1
    git clone https://github.com/QwenLM/Qwen2.5-Math
    git -C Qwen2.5-Math checkout a45202bd16f1ec06f433442dc1152d0074773465
    CODE=Qwen2.5-Math/evaluation
    PYTHONPATH=$CODE:$CODE/latex2sympy:older python tools/graders.py qwen_math

A line of the file has a gold answer, an answer, and whether that answer is right.
"""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def math_verify() -> Callable[[str, str], bool]:
    """Return math-verify, with the answer in a box."""
    from math_verify import parse, verify

    return lambda gold, box: verify(parse(f"${gold}$"), parse(f"${box}$"))


def prime_math() -> Callable[[str, str], bool]:
    """Return verl's grader for PRIME's data, without importing the rest of verl."""
    folder = Path(find_spec("verl").submodule_search_locations[0])
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    from verl.utils.reward_score.prime_math import compute_score

    return lambda gold, box: compute_score(box, gold)[0]


def mathruler() -> Callable[[str, str], bool]:
    """Return mathruler, which has the grader of PRM800K."""
    from mathruler.grader import extract_boxed_content, grade_answer

    return lambda gold, box: grade_answer(extract_boxed_content(box), gold)


def qwen_math() -> Callable[[str, str], bool]:
    """Return the grader of Qwen2.5-Math, from the folder evaluation/ of its code."""
    from grader import math_equal
    from parser import extract_answer, strip_string

    return lambda gold, box: math_equal(extract_answer(box, "math"), strip_string(gold))


def verdicts_of(grader: str, golds: list[str], boxes: list[str]) -> list[bool]:
    """Return for each answer in a box whether the grader accepts it."""
    if grader == "reward":
        sys.path.insert(0, str(ROOT))
        from reward import score

        return [reward == 1 for reward in score(boxes, golds)]
    grade = globals()[grader]()
    verdicts = []
    for pair in zip(golds, boxes, strict=True):
        try:
            verdicts.append(bool(grade(*pair)))
        except Exception:  # a grader may raise any; it has then not accepted the answer
            verdicts.append(False)
    return verdicts


def main() -> None:
    """Print the wrong verdicts of the grader that the command line names."""
    lines = (ROOT / "tests/data/verdicts.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    golds = [pair["gold"] for pair in pairs]
    boxes = [rf"\boxed{{{pair['answer']}}}" for pair in pairs]
    verdicts = zip(pairs, verdicts_of(sys.argv[1], golds, boxes), strict=True)
    bad = [
        (pair["right"], pair) for pair, verdict in verdicts if verdict != pair["right"]
    ]
    for right, pair in bad:
        sign = "=" if right else "!="
        print(pair["gold"], sign, pair["answer"], sep="  ")
    refused = sum(right for right, _ in bad)
    print(
        f"{len(bad) - refused} wrong accepted, {refused} right refused, of {len(pairs)}"
    )


if __name__ == "__main__":
    main()

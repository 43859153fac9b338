"""Writes a variant of the assignment whose objective differs in one place.

    python assignment/variant.py 2027 ../variant

writes a copy of the repository in which e_B is raised to a power in (11), in the cap or
in the weight of the KL. The copy's loss.py, its reference's derivations and its handout
have the change, and the handout announces it. The copy's grader takes the expected
values from these files, so the public solution loses the items that check the
change. The number in the command determines the place and the power.
"""

import argparse
import random
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Texts of loss.py, the handout, the starter, the reference and the known mistakes, each
# with its replacement. @ is the power.
CHANGES = {
    "in (11)": {
        "mean_B[rho]^2 / mean_B[rho^2]": "(mean_B[rho]^2 / mean_B[rho^2])^@",
        "1/|B|": "1/|B|^@",
        "1 / (1 + CV^2)": "1 / (1 + CV^2)^@",
        "1 / (1 + chi^2(pi_theta || pi_b))": "1 / (1 + chi^2(pi_theta || pi_b))^@",
        "ess.clamp(max=1.0)": "(ess.clamp(max=1.0) ** @)",
        "1 / (1 + variation**2)": "(1 / (1 + variation**2)) ** @",
        "mean**2 / mean_square": "(mean**2 / mean_square) ** @",
        "1 / float((policy**2 / behavior).sum())": (
            "(1 / float((policy**2 / behavior).sum())) ** @"
        ),
    },
    "in the cap of (12)": {
        ", e_B)": ", e_B^@)",
        "max=e_b": "max=e_b**@",
        "min(ratio, e_b)": "min(ratio, e_b**@)",
    },
    "in the weight of the KL in (12)": {
        "(1 - e_B) KL": "(1 - e_B^@) KL",
        "(1 - e_b)": "(1 - e_b**@)",
    },
}
POWERS = ["0.5", "1.5", "2", "3"]


def make_variant(seed: int, folder: Path) -> str:
    """Write the variant with this number, and return the sentence that announces it."""
    draw = random.Random(seed)
    part, power = draw.choice(list(CHANGES)), draw.choice(POWERS)
    shutil.copytree(
        ROOT,
        folder,
        ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "variant.py"),
    )
    handout = folder / "assignment/README.md"
    for path in [folder / "loss.py", handout, *folder.glob("assignment/**/*.py")]:
        text = path.read_text()
        for right, other in CHANGES[part].items():
            text = text.replace(right, other.replace("@", power))
        path.write_text(text)
    sentence = (
        f"Variant {seed}: {part} e_B is raised to the power {power}, so that other "
        "solutions are wrong."
    )
    title, rest = handout.read_text().split("\n", 1)
    handout.write_text(f"{title}\n\n**{sentence}**\n{rest}")
    return sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seed", type=int, help="a number, such as the year")
    parser.add_argument("folder", type=Path, help="a new folder")
    args = parser.parse_args()
    print(make_variant(**vars(args)))


if __name__ == "__main__":
    main()

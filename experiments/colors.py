"""The color of each objective: the same one in every figure of experiments/."""

# The names are those of the grid (experiments/mismatch.py), and of the objectives
# themselves where those have no setting of their own ("grpo").
COLORS = {
    # What runs in every setting. These five are told apart by color-blind readers too.
    "p3o": "#0072B2",
    "grpo": "#D55E00",
    "grpo 0.2": "#D55E00",
    "grpo 0.4": "#E69F00",
    "reinforce": "#4D4D4D",
    "p3o, k3": "#CC79A7",
    # P3O with a part of it replaced or taken out.
    "p3o, is": "#56B4E9",
    "p3o, no KL": "#009E73",
    "p3o, no cap": "#7FBF3F",
    "p3o, e_B of a micro-batch": "#1B4F72",
    "p3o, fixed e_B": "#17BECF",
    "p3o, yoked e_B": "#7B8EC8",
    "p3o, clamped k3": "#8E3B76",
    "p3o, raw log pi_b": "#0B3C5D",
    # The other objectives.
    "grpo 0.6": "#B8860B",
    "grpo 0.2, raw log pi_b": "#8B3A00",
    "dapo": "#C0392B",
    "gspo": "#6A3D9A",
    "cispo": "#8C564B",
    "tis": "#9A8F00",
    "m2po": "#2E8B57",
    "decoupled": "#E377C2",
}


def color_of(name: str) -> str:
    """The color of an objective; black for one that has none yet."""
    return COLORS.get(name, "black")

r"""LaTeX as people mean it: what math_verify would misread is rewritten or refused.

support/judge.py has math_verify read the formulas. A rewrite that is missing costs a
model the reward of an answer that is right; a refusal that is missing may give it the
reward of one that is wrong, which it would find and repeat. So whatever is neither
common nor clear is refused. Each rule stands beside the case that needs it, which is
also a case of tests/test_reward.py.
"""

import re

MAX_LENGTH = 300  # characters of an answer

# Words behind a number that are no unit: they make it another number, or are a part of
# what is said. 18\text{ million} is not 18, and 20\%\text{ increase} no decrease.
NO_UNITS = (
    "hundred|thousand|million|billion|trillion|dozen|score|half|halves|thirds?|"
    "quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|"
    "or|and|plus|minus|squared|cubed|factorial|am|pm|even|odd|more|less|increase|"
    "decrease|north|south|east|west"
)

REWRITES = [
    # $18$, \$18
    (r"\\?\$", ""),
    # 18.
    (r"\.\s*$", ""),
    # 5\text{ cm}^2, 12\pi\mbox{ cm}, 5\,\mathrm{kg}; but e and i are no units
    (
        r"((?<=[\d)}%])|(?<=\\pi))\s*(\\,)?\\(text|mbox|mathrm)\{"
        rf"(?![ei]\}}|[^}}]*\b({NO_UNITS})\b)[a-z\s~]+\}}(\^\{{?\d\}}?)?$",
        "",
    ),
    # 18 dollars, 72 clips; but 18 xy may be a product
    (rf"(?<=\d)(?!.*\b({NO_UNITS})\b)(\s+[a-z]{{3,}})+$", ""),
    # 18\%
    (r"\\?%$", ""),
    # 1{,}234, 10,\!000, 1\,234
    (r"(?<=\d)(\{,\}|,\\!|\\,)(?=\d{3}(?!\d))", ""),
    # 204_5, 1A3_{16}: a numeral becomes a name, which is equal to itself alone
    (r"(?<![\w.])(\d[\dA-F]*)_\{?(\d+)\}?", r"\\text{\1 base \2}"),
]

# A whole number before another number, without a sign between them: math_verify takes
# them for a mixed number, as 2\frac{3}{4} is one, and adds them. And a numeral with
# another base, which it leaves out.
MISREAD = re.compile(
    r"""
    (?<![\d_^])\d+(?:\s|~|\\[,;:!\ ]|\\q?quad)+\d  # 1 2, 1\,2, 2 3/4
    | \d_                                         # 204_{(5)}, 204_{\text{five}}
    | [\d)]\s*(?:\\left)?\(                        # 2(3), (2)(3), 2(\frac{3}{4})
      \s*(?:\d+|\\[dt]?frac[{}\d\s]+)(?:\\right)?\)
    """,
    re.VERBOSE,
)


def latex_of(text: str) -> str:
    """An answer as LaTeX that math_verify reads as people do; "" for one that is none.

    What is longer than MAX_LENGTH or would be misread is none.
    """
    if len(text) > MAX_LENGTH:
        return ""
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text.strip())
    return "" if MISREAD.search(text) else text

r"""LaTeX as people mean it: one spelling for what can be written in many.

support/formulas.py reads the result. A rewrite that is missing costs a model the reward
of a right answer. A unit that is none may give it the reward of a wrong one, which it
would find and repeat. So what is neither common nor clear is left as it is. Each rule
stands beside the case that needs it, which is also a case of tests/test_reward.py.
"""

import re
import unicodedata

MAX_LENGTH = 300  # characters of an answer

SIGNS = dict(
    zip(
        "−–×·⋅÷±∞∪∩∅∈≤≥≠√∛º",
        r"- - \times \cdot \cdot \div \pm \infty \cup \cap \emptyset \in \le \ge \ne "
        r"\sqrt \sqrt[3] °".split(),
        strict=True,
    )
)

# Words behind a number that are no unit: they make it another number, or are a part of
# what is said. 18\text{ million} is not 18, and 20\%\text{ increase} no decrease.
NO_UNITS = (
    r"one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|"
    r"\w*(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundreds?|thousands?|\w+illions?|"
    r"dozens?|score|lakhs?|crores?|grand|[kKMB]|half|halves|thirds?|quarters?|"
    r"\w*(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|red|sand|lion)ths?|"
    r"or|not|but|then|plus|minus|times|divided|over|point|squared|cubed|factorial|"
    r"inverse|root|power|choose|mod\w*|remainder|base|[ap]\.? ?m|even|odd|more|less|"
    r"fewer|increased?|decreased?|gain|loss|profit|north|south|east|west|above|below"
)
UNIT = (
    rf"[(/]?\s*\\text\{{(?![^{{}}]*\b(?:{NO_UNITS})\b)"
    r"(?:\s*[mgshLlAVWJNC]|[^{}\d]*[a-zA-Z€°][^{}\d]*[a-zA-Z.)€°])\s*\}\)?"
    r"(?:\^\{?-?\d\}?)?\s*"
)
FUNCTION = (
    r"sqrt|sinh?|cosh?|tanh?|cot|sec|csc|arcsin|arccos|arctan|exp|log|ln|pi|max|min|"
    r"gcd|lcm|infty"
)


def fraction_of_repeating(decimal: re.Match) -> str:
    r"""\frac{16-1}{90} for 0.1\overline{6}."""
    whole, once, again = decimal.groups()
    below = "9" * len(again) + "0" * len(once)
    return rf"\frac{{{whole}{once}{again}-{whole}{once}}}{{{below}}}"


REWRITES = [
    # zero-width spaces, colours of a terminal
    ("[\u200b\u2060\ufeff]|\x1b\\[\\d*m", ""),
    # 1, 2, ..., n
    (r"\.{3,}|\\[lc]?dots\b", r"\\ldots "),
    # \begin{pmatrix}1\\[4pt]2\end{pmatrix}
    (r"\\\\\[\w+\]", r"\\\\"),
    # 1{,}234, 10,\!000, 1\,234, 1 234, 1'234
    (
        r"(?<=\d)\s*(?:\{\s*,\s*\}|\\text\{,\}|,\s*(?:\\[!,]|\{\})|\\[, ]|['~ ])"
        r"(?:\\!|\s)*(?=\d{3}(?!\d))",
        "",
    ),
    # {-}5, 4{:}30
    (r"\{([-:+=])\}", r"\1"),
    # 15\,\text{cm}, x=3,\; x=5, 18~m
    (r"(?<!\\)\\[,;:!> ]|\\q?quad\b|\\(?:thin|en)space\b|[~\s]+", " "),
    # \$18, 18€; \[18\], \(18\)
    (r"\\?\$|[€£¥¢]|\\(?:euro|pounds|cent|mathdollar)(?![a-z])|\\[][()]|✓|\*\*", " "),
    # \left(, \Big[, \displaystyle, \boxed{5}, \textcolor{red}{18}
    (
        r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|huge|large|small|checkmark|boxed|"
        r"fbox|(?:text)?color\{\w*\})(?![a-zA-Z])",
        "",
    ),
    # \mathrm{cm}, \mbox{cm}, \textbf{6}, {\rm cm}, \rm{cm}
    (
        r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)|math(?:bf|it|rm|sf|tt)|[mh]box|emph|bm|"
        r"boldsymbol|underline|operatorname)\s*\{|\{\\(?:rm|bf|it)\b|\\(?:rm|bf|it)\s*\{",
        r"\\text{",
    ),
    (r"\\bf\b", ""),
    # \dfrac{1}{2}, \tbinom{4}{2}, {3 \over 4}
    (r"\\(?:[dtc]|nice)(frac|binom)", r"\\\1"),
    (r"\{([^{}]*)\\over\b([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose\b([^{}]*)\}", r"\\binom{\1}{\2}"),
    # \text{5 cm}, \text{−5}, \text{1, 2}; and \text{} at an end
    (r"\\text\{([^{}]*\d[^{}]*|[^{}a-zA-Z\s][^{}a-zA-Z]*)\}", r"\1"),
    (r"^\\text\{\s*\}|\\text\{\s*\}\s*(?=\\text|$)", ""),
    # \text{gcd}(4,6), sqrt(3), pi/2
    (
        rf"\\text\{{({FUNCTION})\}}|(?<![\\a-zA-Z])(?<!_\{{)({FUNCTION})(?![a-zA-Z])",
        r"\\\1\2 ",
    ),
    # Sunday, 18 dollars, 64 square feet
    (
        r"(\\text\{[^{}]*\}|\\[a-zA-Z]+(?:\{[a-z]+\})?|_\{[^{}]*\})|"
        r"(?<![a-zA-Z])((?:[a-zA-Z]{2,} )*(?=\w*[aeiouy])[a-zA-Z]{4,}"
        r"(?:[ '-][a-zA-Z]+)*)",
        lambda found: found[1] or rf"\text{{{found[2]}}}",
    ),
    # 28 percent
    (r"\\?%|\\text\{\s*percent\s*\}|\bpct\b", ""),
    # 5 \text{ or } 6, 1, 2, and 3, 2 \& 3
    (
        r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|\\&)",
        ", ",
    ),
    (r",(?:\s*,)+", ","),
    # **70,000**, "5", 72,
    (r"^(?:[\s*`\"_#:]|=>?)+|[\s*`\"_.,;:\\]+$", ""),
    # f(x)=x\text{ for all }x
    (
        r"[,\s]*(?:\\forall|\\text\{\s*for (?:all|any|some|every)\b|"
        r",\s*[a-z]\s*\\in\s*\\mathbb).*",
        "",
    ),
    # \text{Answer}: 5, the answer is 5, USD 18
    (
        r"(?i)^\\text\{(?![^{}]*\bno)[^{}]*\b(?:answer|total|only|therefore|is)\b[^{}]*\}[\s:=,]*",
        "",
    ),
    (r"^(?:\\text\{)?\s*(?:USD?|Rs|EUR)\b\.?\s*\}?(?=\s*-?[\d.])", ""),
    # \textbf{(E)}\ 5, C. x = 42
    (r"^\\text\{\s*\(([A-Z])\)\s*\}.*|^([A-Z])[.:] .*", r"\1\2"),
    # 12^{\text{th}}, 8^{th}, 12th
    (r"(?<=\d)\s*(?:\^?\{?\\text\{\s*|\^?\{?)(?:st|nd|rd|th)\b(?:\s*\}){0,2}", ""),
    # 90^\circ, 25^{\circ}\mathrm{C}, but \sin 10^\circ
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree", "°"),
    (r"\\text\{\s*°\s*[CF]?\s*\}|°\s*(?:\\text\{\s*[CF]\s*\}|[CF]\b)", ""),
    (
        r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?-?\d\}?)?[\s({]*)([\d.]+)\s*°",
        r"\1{(\2\\pi/180)}",
    ),
    (r"°(?!\s*\d)", ""),
    # 5\text{ cm}^2, 12\pi\mbox{ cm}, 36\text{ km}/\text{h}, 9 (apples)
    (rf"(?<=[a-zA-Z\d)}}!\]|])\s*(?:{UNIT})+(?=,|$)", ""),
    (
        r"(?<=\d)\s*(?:[cmk]m|kg|m[gLl]|ft|in|lbs?|oz|hrs?|min|sec|mph|k[mW]|USD)(?:\s*\^\{?\d\}?)?(?=,|$)",
        "",
    ),
    # x_{\text{max}}, x_\text{max}, m_{\max}, L_{\odot}
    (r"_\s*\{\s*(?:\\text\{\s*(\w+)\s*\}|\\([a-zA-Z]+))\s*\}", r"_{\1\2}"),
    (r"_\s*(?:\\text\{\s*(\w+)\s*\}|\\(?!frac)([a-zA-Z]+))", r"_{\1\2}"),
    # \text{B.}, \text{(C)}, \mathrm{e}
    (r"\\text\{\s*\(?([a-zA-Z])\)?\.?\s*\}", r"\1"),
    # \text{No solution.}
    (r"\\text\{\s*([^{}]*?)[\s.]*\}", lambda found: rf"\text{{{found[1].lower()}}}"),
    (r"\\text\{all real numbers\}", r"\\mathbb{R}"),
    # \varnothing, \varepsilon, x \not= 3, 2 x 10^3
    (r"\\varnothing", r"\\emptyset"),
    (r"\\varepsilon", r"\\epsilon"),
    (r"\\not\s*=", r"\\ne "),
    (r"(?<=\d)\s*x\s*(?=10\^)", r"\\times "),
    # \{x | x > 2\}
    (r"\\\{\s*[a-z]\s*(?:\||:|\\mid)(.*)\\\}$", r"\1"),
    # 0.\overline{3}
    (r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", fraction_of_repeating),
    # names that latex2sympy takes for something else: I_1, e_1, f', A^T, \pi(2)
    (r"(?<![\\a-zA-Z{])([eE](?=_)|I)(?![a-z])", r"\\mathit{\1}"),
    (r"(?<=[a-zA-Z])'", "_{prime}"),
    (r"\^\s*\{?(?:T\b|\\top\b)\}?", "^{1T}"),
    (r"\\pi\s*\(", r"\\pi\\cdot("),
    # 204_5, 1A3_{16}: a numeral becomes a name, which is equal to itself alone
    (r"(?<![\w.}])(\d[\dA-F]*)_\{?(\d+)\}?", r"\\text{\1 base \2}"),
    # odd, No, ABC
    (
        r"^([A-Z]{2,}|[Nn]o|(?=\w*[eiou])[a-zA-Z]{3})$",
        lambda found: rf"\text{{{found[1].lower()}}}",
    ),
    # +5, {5}, 5\text{ cm},
    (r"^\+|[\s.,;:\\]+$", ""),
    (r"^\{([^{}]*)\}$", r"\1"),
    # x + 1 is x+1, but 1 2 is not 12, and 32, 349 not 32,349
    (r"(?<![a-zA-Z\d,]) | (?![a-zA-Z\d])", ""),
]
# How many arguments follow a command.
ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, "^": 1, "_": 1}


def latex_of(text: str) -> str:
    """An answer in the one spelling; "" for one that is too long or lacks a brace."""
    if len(text) > MAX_LENGTH:
        return ""
    # x², ½, √53, 120°, １８
    text = re.sub("[²³¹⁰⁴-⁹⁻]+", r"^{\g<0>}", text)
    text = re.sub("[¼-¾]", lambda found: rf"\frac{{{found[0]}}}", text)
    text = re.sub(r"√(\d+)", r"\\sqrt{\1}", text)
    for sign, command in SIGNS.items():
        text = text.replace(sign, f"{command} ")
    text = unicodedata.normalize("NFKC", text).replace("⁄", "}{")
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text.strip())
    try:
        return braced(re.findall(r"\\[a-zA-Z]+|\\.|\d+|.", text)[::-1], "")
    except IndexError:
        return ""


def braced(signs: list[str], end: str) -> str:
    r"""The signs up to `end` with braces around arguments: \frac{1}{2} for \frac12.

    Takes them from the end of the list. Raises IndexError if a sign is missing.
    """
    text = ""
    while signs or end:
        sign = signs.pop()
        if sign == end:
            break
        text += item(sign, signs)
    return text


def item(sign: str, signs: list[str]) -> str:
    """A sign with what belongs to it: up to its closing brace, or its arguments."""
    if sign == "{":
        return "{" + braced(signs, "}") + "}"
    count = ARGUMENTS.get(sign, 0)
    if sign == r"\sqrt" and signs[-1] == "[":
        signs.pop()
        sign += f"[{braced(signs, ']')}]"
    return sign + "".join(argument(sign, signs) for _ in range(count))


def argument(command: str, signs: list[str]) -> str:
    """An argument in braces: without them it is a sign, 10 in x^10, (-3) in x^(-3)."""
    sign = signs.pop()
    if sign == " ":
        sign = signs.pop()
    if sign == "(" and command in ("^", r"\sqrt"):
        return "{(" + braced(signs, ")") + ")}"
    if sign.isdigit() and command != "^":
        signs += [sign[1:]] if sign[1:] else []
        sign = sign[0]
    text = item(sign, signs)
    return text if sign == "{" else "{" + text + "}"

r"""What counts as a correct answer. See it work: python reward.py

A completion is judged in three steps:

    1. where its final answer is     after </think>, in the last box
    2. what that says                a word, a number, or LaTeX that has one meaning
    3. whether it is the gold one    the same word, number or formula

docs/rewards.md lists what was decided in each step, and why.

Completions are untrusted text to compare, never code to run. Comparing words and
numbers is safe. Comparing formulas may take forever, as with 98^{97^{96}}:
support/judge.py does that, in processes with a bound on time and memory.
"""

import os
import re
import sys
from fractions import Fraction
from pathlib import Path

from support.judge import equal_formulas
from support.tasks import Row, read_rows, source_of, task_of

MAX_TEXT = 100_000  # characters read, at the end of a completion
MAX_ANSWER = 300  # characters of a final answer; a longer one is wrong


# --- 1. Where the final answer is

# What matters for boxes: a box that opens; a box without braces, around a number or a
# capital letter that ends its formula or sentence, as 18 in \boxed 18x does not; a line
# break or an escaped brace, which is no brace; a brace.
BOX_TOKEN = re.compile(
    r"\\(?:boxed|fbox)\s*(?P<opening>\{)"
    r"|\\(?:boxed|fbox)\s*(?P<bare>-?\d+(?:[.,]\d+)*|(?<=\s)[A-Z])"
    r"(?=[ \t]*(?:[.,;!?]?(?:\$|\\[)\]]|\n|$)|[.,;!?]\s))"
    r"|\\\\(?!boxed|fbox)"
    r"|\\[{}]"
    r"|(?P<brace>[{}])"
)


def answer_part(completion: str) -> str:
    """The end of a completion, without the thoughts of a model that thinks first.

    Thoughts end with </think>. Where <think> has not ended, nothing is an answer yet.
    """
    answer = completion.rpartition("</think>")[2]
    if "<think>" in answer:
        return ""
    return answer[-MAX_TEXT:]


def last_box(text: str) -> str:
    r"""The content of the last \boxed{...}, \fbox{...} or \boxed 2; "" without one.

    The last box is the last to close; one that never closes is none. The text is read
    once, so that a megabyte of braces takes no longer than other text.
    """
    content = ""
    open_braces = []  # for each: where the content of its box begins, or None
    for token in BOX_TOKEN.finditer(text):
        if token["opening"]:
            open_braces.append(token.end())
        elif token["bare"]:
            content = token["bare"]
        elif token["brace"] == "{":
            open_braces.append(None)
        elif token["brace"] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                content = text[start : token.start()]
    return content


def marked_answer(text: str) -> str:
    """The sentence behind the last ####, up to its line's end; "" without one."""
    _, marker, behind = text.rpartition("####")
    if not marker:
        return ""
    line = behind.lstrip().split("\n", maxsplit=1)[0]
    return re.split(r"[.!?](?:\s|$)", line, maxsplit=1)[0]


# --- 2. What it says: a number

# Commands that change only how their text looks.
STYLE = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}"
)
SPACE = r"(?:\s|~|\\[,;:! ]|\\(?:q?quad|(?:thin|med|thick)space)(?![A-Za-z]))"
# What may surround a number, in Markdown and in LaTeX: how it opens, and how it closes.
SURROUNDINGS = [("**", "**"), ("__", "__"), ("`", "`"), ("\\(", "\\)"), ("$", "$")]
NUMBER = re.compile(
    r"(?P<sign>[-+−]?)\s*[$€£]?\s*"
    r"(?P<digits>(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)",
    re.ASCII,
)
# A text with one of these characters, a digit or an operator for one, is no unit.
NOT_IN_A_UNIT = re.compile(r"[^A-Za-z\s%°$€£'/.,;:()-]")
# Words that follow no number: 18 million and 2 thirds are other ones, 84 or 85 are
# two, 18 x is none. 3 quarters are coins.
NOT_UNITS = set(
    "hundred hundreds thousand thousands million millions billion billions trillion "
    "trillions dozen dozens score k bn mn plus minus or x y n half halves third thirds "
    "quarter fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths "
    "ninth ninths tenth tenths hundredth hundredths thousandth thousandths".split()
)
# Words that change a number right behind it: 5 squared, but 5 inches squared.
OPERATIONS = {"squared", "cubed", "factorial"}


def number_in(text: str) -> Fraction | None:
    r"""The value of 1,234.50 or \$7 or 18\% or 12 eggs; None for what is no number.

    1/2, x=3, 18 million, 18x and 84 or 85 are none.
    """
    text = text.replace("{,}", ",").replace(",\\!", ",")
    text = STYLE.sub(r"\1", text)
    text = STYLE.sub(r"\1", text)  # \textbf{\text{18}}
    text = re.sub(SPACE, " ", text)
    text = text.replace("\\$", "$").replace("\\%", "%").strip()
    for opening, closing in SURROUNDINGS:
        if text.startswith(opening):
            text = text[len(opening) :].replace(closing, " ", 1).strip()
    found = NUMBER.match(text)
    if found is None or len(found["digits"]) > MAX_ANSWER:
        return None
    if not is_unit(text[found.end() :]):
        return None
    value = Fraction(re.sub("[, ]", "", found["digits"]))
    return -value if found["sign"] in ("-", "−") else value


def is_unit(text: str) -> bool:
    """Whether the text behind a number leaves its value alone, as units and % do."""
    if NOT_IN_A_UNIT.search(text):
        return False
    if re.match(r"[A-Za-z](?![A-Za-z])", text):
        return False  # right behind the number stands one letter: a variable, as in 18x
    words = re.findall(r"[a-z]+", text.lower())
    return NOT_UNITS.isdisjoint(words) and OPERATIONS.isdisjoint(words[:1])


# --- 2. What it says: a formula

INTEGER = re.compile(r"-?\d+", re.ASCII)
EDGES = re.compile(r"^[$\s]+|(?:(?<!\\)[$\s]|(?<!\\right)\.)+$")
# Where a number may begin that is no index, exponent or argument, as in \log_2 8.
ALONE = r"(?<![\d._^A-Za-z])"
GROUPED_DIGITS = re.compile(rf"{ALONE}\d{{1,3}}(?:{SPACE}+\d{{3}})+(?!\d)")
MIXED_NUMBER = re.compile(rf"{ALONE}(\d+){SPACE}+(\d+)/(\d+)(?!\d)")
DIGITS_APART = re.compile(rf"{ALONE}[\d.]+(?:{SPACE}+\.?\d|{SPACE}*\{{\s*\d)")
# 1{,}234, in which math_verify sees the set of 1 and 234 unless it stands alone
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))")
# \frac 1 2, \frac 1{2}
TWO_DIGITS = re.compile(r"\\([dt]?frac|binom)\s+(\d)\s+(\d)")
DIGIT_AND_BRACE = re.compile(r"\\([dt]?frac|binom)\s+(\d)\s*(?=\{)")
# 2(3), in which it sees the mixed number 2 + 3; the 2 may be in parentheses as well.
IN_PARENTHESES = r"\(\s*-?\d+\s*(?:\\right\s*)?\)"
PRODUCT = re.compile(rf"({ALONE}\d+|{IN_PARENTHESES}){SPACE}*(?=(?:\\left\s*)?\()")
# 4i, and \mathrm{i}: it knows the letter only where that stands alone.
IMAGINARY = re.compile(r"(?<=\d)i(?![A-Za-z])")
ROMAN = re.compile(r"\\(?:mathrm|text)\s*\{\s*([ie])\s*\}")
INNER_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])")
BASE_IN_WORDS = re.compile(r"_\{?\\(?:text|mathrm|mbox)\s*\{\s*(\w+)\s*\}\}?")
# 204_5, (204)_{5}, 1A3_{(16)}: letters are digits where the base is above 10.
DIGITS = r"\d+|\d[\dA-F]*(?=\)?_\{?\s*\(?\s*1[1-6]\b)"
NUMERAL = re.compile(
    rf"(?<![\w.^])(?:\(0*({DIGITS})\)|0*({DIGITS}))"
    r"_(?:\{\s*\(?\s*(\w+)\s*\)?\s*\}|(\d+))"
)
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
IN_TEXT = r"\\(?:text|textrm|textbf|textit|mbox|mathrm)\s*\{"
SCALE = re.compile(
    rf"(?<=\d){SPACE}*({IN_TEXT}[\s~]*)?({'|'.join(POWERS)})s?\b", re.IGNORECASE
)
# A unit at the end, behind a number or a formula: \text{ cm}^2, \mathrm{~m}/\mathrm{s}.
ONE_UNIT = rf"{SPACE}*{IN_TEXT}([^{{}}\\]*)\}}(?:\^\{{?-?\d\}}?)?"
UNIT = re.compile(
    rf"(?<=[\w)}}!%])(?<!_){ONE_UNIT}(?:{SPACE}*(?:/|\\cdot){ONE_UNIT})*$", re.ASCII
)
# Words that are the answer, or a part of it, and no unit.
SAYING = set(
    "am pm even odd increase decrease north south east west left right yes no true "
    "false more less up down win loss".split()
)
# Without \text one letter, or two, may be variables: only these words are units.
UNITS = (
    "dollars? cents? euros? degrees? radians? units? inch(?:es)? feet foot yards? "
    "miles? meters? metres? kilometers? centimeters? km cm mm kg grams? kilograms? "
    "liters? litres? hours? minutes? seconds? days? weeks? months? years? mph ft min "
    "sec hr lbs?"
).split()
BARE_UNIT = re.compile(
    rf"(?:(?<=[\d)}}%]){SPACE}*|(?<=\\pi){SPACE}+)"
    rf"(?:(?:square|cubic)\s+)?(?:{'|'.join(UNITS)})"
    r"(?:\^\{?\d\}?)?$"
)


def latex_of(text: str) -> str:
    r"""LaTeX that math_verify understands as people do.

    It is "" for what is ambiguous, and for more than MAX_ANSWER characters. Left alone,
    it would read 1 2 as 1 + 2, 2(3) as 2 + 3, 2 3/4 as 5/4, 204_5 as 204, 1e-7 with
    Euler's number, and 18\text{ million} as 18.
    """
    text = text.strip()
    # EDGES, for one, takes time by the square of the length. And math_verify looks
    # behind this word for a formula, where it cannot read the whole.
    if len(text) > MAX_ANSWER or "answer" in text.lower():
        return ""
    text = EDGES.sub("", text)
    text = INNER_BOX.sub("", text)
    text = THOUSANDS.sub("", text)
    text = TWO_DIGITS.sub(r"\\\1{\2}{\3}", text)
    text = DIGIT_AND_BRACE.sub(r"\\\1{\2}", text)
    text = GROUPED_DIGITS.sub(lambda found: re.sub(SPACE, "", found[0]), text)
    text = MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    if DIGITS_APART.search(text):
        return ""
    text = PRODUCT.sub(r"\1\\cdot ", text)
    text = IMAGINARY.sub(" i", text)
    text = ROMAN.sub(r" \1", text)
    text = SCALE.sub(
        lambda found: f"\\cdot 10^{POWERS[found[2].lower()]}{found[1] or ' '}", text
    )
    text = without_unit(text)
    text = SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)
    # A numeral with its base becomes a name, which equals itself and no number.
    text = BASE_IN_WORDS.sub(r"_{\1}", text)
    return NUMERAL.sub(
        lambda found: f"b_{{{found[1] or found[2]}base{found[3] or found[4]}}}",
        text,
    )


def without_unit(text: str) -> str:
    r"""A formula without the unit at its end, as in 5\text{ cm}^2 or 5 cm.

    Left as they are: \text{A}, which is all there is, and words that change the value.
    """
    found = UNIT.search(text)
    if found is None:
        return BARE_UNIT.sub("", text)
    formula = text[: found.start()]
    # In A \text{ or } \text{B} the last one is no unit, and in \triangle\text{ABC}.
    follows_words = re.search(rf"{IN_TEXT}[^{{}}]*\}}\s*$", formula)
    follows_command = re.search(r"\\(?!pi$|circ$)[A-Za-z]+$", formula)
    if follows_words or follows_command:
        return text
    for words in re.findall(ONE_UNIT, found[0]):
        if not is_latex_unit(words.replace("~", " "), formula):
            return text
    return formula


def is_latex_unit(words: str, formula: str) -> bool:
    r"""Whether what stands in a \text behind the formula leaves its value alone."""
    if re.fullmatch(r"[A-Z]+", words.strip()):
        if re.search(r"\\circ\}?$", formula):
            return words.strip() in ("C", "F")
        # 10\text{ N} is a force, and 3\mathrm{B} is three times B.
        return len(words.strip()) == 1 and words[0] == " " and formula[-1].isdigit()
    said = set(words.lower().replace(".", "").split())
    return is_unit(f" {words}") and SAYING.isdisjoint(said)


# --- 3. Whether it is the gold answer


def same_words(completions: list[str], golds: list[str]) -> list[bool]:
    """Whether each completion's last word is the gold answer."""
    last_words = [answer_part(completion).split()[-1:] for completion in completions]
    return [word == [gold] for word, gold in zip(last_words, golds, strict=True)]


def same_numbers(completions: list[str], golds: list[str]) -> list[bool]:
    """Whether the last box, or without a box what follows ####, is the gold number."""
    correct = []
    for completion, gold in zip(completions, golds, strict=True):
        text = answer_part(completion)
        number = number_in(last_box(text) or marked_answer(text))
        correct.append(number is not None and number == number_in(gold))
    return correct


def same_formulas(completions: list[str], golds: list[str]) -> list[bool]:
    """Whether the last box is equal to the gold formula."""
    pairs = []
    for completion, gold in zip(completions, golds, strict=True):
        answer = last_box(answer_part(completion))
        pairs.append((latex_of(gold), latex_of(answer)))
    verdicts = dict.fromkeys(pairs, False)  # the samples of a problem often agree
    for_judge = []
    for gold, answer in verdicts:
        if not gold or not answer or max(len(gold), len(answer)) > MAX_ANSWER:
            continue
        if INTEGER.fullmatch(gold) and INTEGER.fullmatch(answer):
            verdicts[gold, answer] = int(gold) == int(answer)
        else:
            for_judge.append((gold, answer))
    if for_judge:
        verdicts.update(zip(for_judge, equal_formulas(for_judge), strict=True))
    return [verdicts[pair] for pair in pairs]


VERIFIERS = {"exact": same_words, "gsm8k": same_numbers, "math": same_formulas}


def score(
    completions: list[str], answers: list[str], verifier: str = "math"
) -> list[float]:
    """1.0 for each completion whose final answer is the gold answer, else 0.0.

    completions and answers are of one length; verifier is "exact", "gsm8k" or "math".
    Each reward depends on its own completion and answer alone.

    Raises ValueError for lists of unequal lengths or an unknown verifier, and
    RuntimeError if formulas cannot be compared on this machine.
    """
    if verifier not in VERIFIERS:
        names = ", ".join(repr(name) for name in VERIFIERS)
        raise ValueError(f"unknown verifier {verifier!r}: give one of {names}")
    if len(completions) != len(answers):
        raise ValueError(
            f"{len(completions)} completions and {len(answers)} answers: "
            "give one answer for each completion"
        )
    correct = VERIFIERS[verifier](completions, answers)
    return [float(is_correct) for is_correct in correct]


def load_task(name_or_path: str, split: str) -> list[dict[str, str]]:
    """[{"prompt": problem, "answer": gold}, ...] of the split "train" or "heldout".

    Each gold answer must be one that its own verifier calls correct. In the user's own
    files a problem with another is an error. In a hub dataset, which is not the user's
    to correct, it is left out, and how many were is said on stderr.

    Raises ValueError, in one sentence, for an unknown task or split or a bad row.
    """
    task = task_of(name_or_path)
    source = source_of(name_or_path, split)
    rows = read_rows(source)
    golds = [gold_answer(row) for row in rows]
    # A completion that answers with the gold answer itself.
    completions = [
        gold if task.verifier == "exact" else f"\\boxed{{{gold}}}" for gold in golds
    ]
    rewards = score(completions, golds, task.verifier)
    problems = []
    unreachable = []
    for row, gold, reward in zip(rows, golds, rewards, strict=True):
        if reward == 1.0:
            problems.append({"prompt": row.prompt, "answer": gold})
        else:
            unreachable.append(f"{row.where}, has {gold[:40]!r}")
    if not rows:
        raise ValueError(f"{source} has no problems: give it one on each line")
    if unreachable:
        note = (
            f"{len(unreachable)} of the {len(rows)} problems of {source} have no gold "
            f"answer that {task.verifier!r} can read; the first, {unreachable[0]}"
        )
        if isinstance(source, Path) or not problems:
            raise ValueError(f"{note}: correct or remove these lines")
        if os.environ.get("RANK", "0") == "0":
            print(f"{note}: left out", file=sys.stderr)
    return problems


def gold_answer(row: Row) -> str:
    """The answer in a row's gold text: its last box, what follows ####, or all of it.

    "" if a worked solution has neither box nor ####: nobody answers with all of it.
    """
    boxed = last_box(row.gold).strip()
    if boxed:
        return boxed
    _, marker, behind = row.gold.rpartition("####")
    if row.is_solution and not marker:
        return ""
    return behind.strip()


def main() -> None:
    """One problem, and completions that each verifier calls correct and wrong."""
    print("a problem:", load_task("tiny", "train")[0])
    examples = [
        ("exact", "1283", "8+5+0=13. 7+0+1=8. 4+8+0=12. 1283"),
        ("exact", "1283", "1284"),
        ("gsm8k", "72", "48 and half of it.\n#### 72 clips"),
        ("gsm8k", "72", "I guess 72"),
        ("math", r"\frac{1}{2}", r"So it is \boxed{0.5}."),
        ("math", r"\frac{1}{2}", r"So it is \boxed{98^{97^{96}}}."),
    ]
    for verifier, gold, completion in examples:
        reward = score([completion], [gold], verifier)[0]
        print(f"{verifier:6}gold {gold:12}{completion!r:50} -> {reward}")


if __name__ == "__main__":
    main()

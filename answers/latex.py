r"""LaTeX as people mean it: one spelling for what can be written in many.

answers/formulas.py reads the result. A rewrite that is missing costs a model the reward
of a right answer. A unit that is none may give it the reward of a wrong one, which it
would find and repeat. So what is neither common nor clear is left as it is.

An answer passes through SIGNS, and then from top to bottom through REWRITES. A row of
these is a pattern, -> and what takes the place of all that it finds. Above it, behind a
#, are its cases; headings stand on the right. Meanwhile a blank is a ~, to be seen.
"""

import functools
import re
from fractions import Fraction

MAX_LENGTH = 300  # characters of an answer

# Signs that LaTeX has a command for, or none.
SIGNS = r"""
− - – - × \times~ · \cdot~ ⋅ \cdot~ ÷ \div~ ± \pm~ ∞ \infty~ ∪ \cup~ ∩ \cap~ ∈ \in~
∅ \emptyset~ ≤ \le~ ≥ \ge~ ≠ \ne~ π \pi~ ℝ \mathbb{R} ∛ \sqrt[3]~ º ° ⁰ ^{0} ¹ ^{1}
² ^{2} ³ ^{3} ⁴ ^{4} ⁵ ^{5} ⁶ ^{6} ⁷ ^{7} ⁸ ^{8} ⁹ ^{9} ⁻ ^{-} ½ \frac{1}{2}
⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅕ \frac{1}{5} ⅖ \frac{2}{5}
⅗ \frac{3}{5} ⅘ \frac{4}{5} ⅙ \frac{1}{6} ⅚ \frac{5}{6} ⅛ \frac{1}{8} ⅜ \frac{3}{8}
⅝ \frac{5}{8} ⅞ \frac{7}{8} … \ldots~ € ~ £ ~ ¥ ~ ¢ ~ ✓ ~ ⁄ / ∕ / ％ % ₹ ~ “ ~ ” ~ 。 .
✅ ~ ′ ' ‐ - ‑ - ⩽ \le~ ⩾ \ge~ ₀ _{0} ₁ _{1} ₂ _{2} ₃ _{3} ₄ _{4} ₅ _{5} ₆ _{6}
₇ _{7} ₈ _{8} ₉ _{9}
０ 0 １ 1 ２ 2 ３ 3 ４ 4 ５ 5 ６ 6 ７ 7 ８ 8 ９ 9 ． . ， , － - ＝ = （ ( ） )
"""

# What patterns of REWRITES name. A name may stand in one above it.
NAMES = {
    # What stands between two = in one line.
    "PART": r"(?:GROUP|MACRO[a-zA-Z]++~?|\([^()]*\)|[^=,;<>~(){}\\])*",
    # Not words that part two answers, as in x=-2\text{ or maybe }x=3.
    "MACRO": r"(?:(?<![^=])\\|\\(?!text\{[^{}]*\}~*[^=~^]))",
    # What may be differentiated, as in \frac{d\theta}{dt}.
    "LETTER": r"[a-zA-Z]|\\[a-z]+",
    # What is in braces, three deep, and what LaTeX takes where there are none.
    "GROUP": r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}",
    "ARGUMENT": r"(\\[a-zA-Z]+|[^\\{}~])",
    # Commas within a number, which a list does not have.
    # Within brackets ,\, parts a pair: (3,\,200).
    "COMMA": r"\{\s*,\s*\}|\\text\{,\}|,\s*(?:\\!|\{\}|\\,(?![^([{]*(?:[)\]]|\\\})))",
    # Commands that change the looks alone, and those that set words.
    "LOOKS": (
        r"left|right|[bB]igg?[lrm]?|displaystyle|huge|large|small|checkmark|fbox|boxed|"
        r"bf|angle|(?:text)?color\{\w*\}"
    ),
    "STYLE": (
        r"text(?:bf|it|rm|sf|tt|up|normal)|math(?:bf|it|rm|sf|tt)|[mh]box|emph|bm|"
        r"boldsymbol|underline|operatorname"
    ),
    # min and sec are units where nothing follows.
    "FUNCTION": (
        r"sqrt|a?r?c?(?:sin|cos|tan)h?|cot|csc|exp|log|ln|pi|max|gcd|lcm|"
        r"(?:min|sec)(?!~*\}?(?:\^\{?-?\d\}?)?~*(?:[,./]|\\text|$))"
    ),
    # A word. Four letters behind a digit are a product, as in 2abcd.
    "WORD": r"(?!(?<=\d)[a-z]{4}\b)(?=\w*[aeiouy])[a-zA-Z]{4,}",
    # Words that end in a colon.
    "LABEL": (
        r"\\text\{(?![^}]*\b(?i:NONE|no|none|false|cannot)\b)[^}:]*(?::~*\}|\}:)"
    ),
    # A unit behind a number, with the dot or bracket and the power behind it.
    "UNIT": (
        r"\\text\{(?![^{}]*\b(?:(?i:NONE)|[kKMB])\b|~*(?i:MONTH)\b)(?:~*[mgshLlAVWJNC]|"
        r"SIGN*[a-zA-Z]SIGN*[a-zA-Z.)])~*(?:POWER)?~*\}\)?(?:POWER)?"
    ),
    # What stands in a unit, and its powers.
    "SIGN": r"(?:[^{}\d^]|POWER)",
    "POWER": r"\^(?:\{-?\d\}|\d)",
    # Words that make it another number, or are a part of what is said: 18\text{
    # million} is not 18, and an increase is no decrease.
    "NONE": (
        r"one|two|three|four|five|six|seven|eight|nine|tens?|eleven|twelve|\w+teen|"
        r"\w*(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundreds?|thousands?|"
        r"\w+illions?|dozens?|score|lakhs?|crores?|grand|half|halves|thirds?|"
        r"quarters?|\w*(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|red|"
        r"sand|lion)ths?|or|not|but|then|plus|minus|times~\w+|divided|over|point|"
        r"squared|cubed|factorial|inverse|root|power|choose|mod\w*|remainder|base|"
        r"[ap]m|even|odd|more|less|fewer|increas\w+|decreas\w+|gain|loss|profit|north|"
        r"south|east|west|above|below|negative|couple|short|mil|mille|[bm]n|mln|"
        r"\w*clockwise|(?:up|down|in|out)wards?|up|down|the~(?:left|right)|max\w*|"
        r"minimum|least|most|repeating|recurring|basis|binary|AD|BCE?|is|are|if|when|"
        r"twice|thrice|doubled|tripled|noon|midnight|(?:for|back)wards?"
    ),
    # At the beginning of a text they make a date: 15\text{ April}.
    "MONTH": (
        r"january|february|march|april|may|june|july|august|"
        r"(?:sept|nov|dec)ember|october"
    ),
    # The usual range of a parameter, which may be left out.
    "REAL": r"[,(][a-z~]*\\in~*\\mathbb\{?[RZ](?!\}?[\^_])",
    # What keeps it: a part of the range. From 0 or 1 on, or but for 0, is none.
    "CONDITION": (
        r"[^,{]*(?:[<>]|\\(?:[lg]t|leq?(?:slant)?)(?![a-z])|"
        r"\\geq?(?:slant)?(?![a-z])(?!~*[01](?!\d))|\\neq?(?![a-z])(?!~*0(?!\d)))|"
        r"[^,]*(?:\\setminus|\\backslash|\b(?:odd|even)\b)"
    ),
    # These make a list, but "and" between inequalities is no "or".
    "AND": r"or|and(?!~*\}?[^,]*(?:[<>]|\\[lg]eq?(?![a-z])))",
    # Units that may stand behind a number without more ado.
    "SHORT": (
        r"[cmk]m|kg|m[gLl]|ft|in|lbs?|oz|hrs?|min|sec|mph|k[mW]|USD|km/hr?|m/s|sq~ft|"
        r"per~day"
    ),
}

REWRITES = r"""
                                                                    Blanks and signs
# 10⁻³ and x₁₀, whose exponents and subscripts are two by now
(([_^])\{-?\d*)\}\2\{ -> \1
# 18 with a zero-width space, or in the colours of a terminal
[\u200b\u2060\ufeff]|\x1b\[\d*m ->
# \begin{pmatrix}1\\[4pt]2\end{pmatrix}
\\\\\[\w+\] -> \\\\
# 1{,}234, 10,\!000, 1\,234, 1 234, 1'234
(?<=\d)\s*(?:COMMA|\\[,;: ]|'|~|[^\S\n])(?:\\!|\s)*(?=\d{3}(?!\d)) ->
# {-}5, 4{:}30
\{([-:+=])\} -> \1
# 15\,\text{cm}, x=3,\; x=5
(?<!\\)\\[,;:!> ]|\\q?quad\b|\\(?:thin|en)space\b|\s -> ~
# \$18, \euro18, \[18\], \(18\), **18**
\\?\$|\\(?:euro|pounds|cent|mathdollar)(?![a-z])|\\[]()[]|\*\* -> ~
# 1,2,...,n
\.{3,}|\\[lc]?dots\b -> \\ldots~
# \left(, \Big[, \displaystyle, \boxed{5}, \textcolor{red}{18}
\\(?:LOOKS)(?![a-zA-Z]) ->
# {3 \over x+4}, {4 \choose 2}
\{([^{}]*)\\over\b([^{}]*)\} -> \\frac{\1}{\2}
\{([^{}]*)\\choose\b([^{}]*)\} -> \\binom{\1}{\2}
                                                                    Words
# \mathrm{cm}, \mbox{cm}, \textbf{6}, {\rm cm}, \rm{cm}
\\(?:STYLE)~*\{|\{\\(?:rm|it)\b|\\(?:rm|it)~*\{ -> \\text{
# \mathbf{x^2}, \mathbf{\frac{1}{2}}, \text{\textbf{6}}
^\\text\{([^{}]*[\\^](?:[^{}]|GROUP)*)\}$ -> \1
# \text{5 cm}, \text{−5}, \text{1, 2}; 5\text{}; but not \text{m/s^2}
\\text\{([^{}]*(?<!\^)\d[^{}]*|[^{}a-zA-Z~][^{}a-zA-Z]*)\} -> \1
^\\text\{~*\}|\\text\{~*\}~*(?=\\text|$) ->
# \text{gcd}(4,6), sqrt(3), pi/2, sinx
\\text\{~*(FUNCTION)~*\}|(?<![\\a-zA-Z])(?<!_\{)(FUNCTION)(?!x?[a-wyzA-Z]) -> \\\1\2~
# 12^{\text{th}}, 8^{th}, 12th
(?<=\d)~*(?:\^?\{?\\text\{~*|\^?\{?)(?:st|nd|rd|th)\b(?:~*\}){0,2} ->
# Sunday, 18 dollars, 64 square feet
(?<![\\a-zA-Z])((?:[a-zA-Z]{2,}~)*WORD(?:[~'-][a-zA-Z]+)*)(?![^{}]*\}) -> \\text{\1}
# {15\text{ cm}^2}
^\{((?:[^{}]|GROUP)*)\}$ -> \1
# 28%, 28 percent
\\?%|\\text\{~*percent~*\}|\bpct\b -> ~
# 5\text{ or }6, 2 and 3, 2 \& 3; but x>1 and x<3 is no list
,?~*(?:\\text\{~*,?~*(?i:AND)~*\}|(?<![a-zA-Z])(?:AND)(?![a-zA-Z])|\\&)~* -> ,~
# _4C_2, {}^4C_2, C(4,2)
(?<![\w}])(?:\{\})?[_^]\{?(\d+)\}?~*C_\{?(\d+)\}? -> \\binom{\1}{\2}
(?<![\w\\])C\((\d+),~*(\d+)\) -> \\binom{\1}{\2}
# "5", 72,
^(?:[~*`"_#:]|=>?)+|[~*`"_.,;:\\]+$ ->
# f(x)=x\text{ for all }x, x=k\pi, k\in\mathbb{Z}
[,~]*(?:\\forall|\\text\{~*for~(?:all|any|some|every)\b|REAL)(?!CONDITION)[^,]* ->
# \text{Answer}: 5, the answer is 5, \text{Cost: }5; but not \text{I and III only}
^\\text\{(?![^}]*\bno)[^}]*\b(?i:answer|total|only|therefore|is)[~:=,]*\}[~:=,]*(?=.) ->
^LABEL~*(?!.*\\text)(?=.) ->
# USD 18
^(?:\\text\{)?~*(?:USD?|Rs|EUR)\b\.?~*\}?(?=~*-?[\d.]) ->
# \textbf{(E)}\ 5, (E) 5, C. x = 42, \text{C. Paris}
^(?:\\text\{~*)?\(([A-J])\)(?:~*\}|~)(?!.*\([A-Z]\)).* -> \1
^(?:\\text\{~*)?([A-J])[.:)]~(?!.*\b[A-Z]\b).* -> \1
                                                                    Units
# 90^\circ, 25^{\circ}\mathrm{C}; but \sin 10^\circ is another number
\^~*(\{)?~*\\(?:circ|degree)(?![a-z])~*(?(1)\})|\\degree -> °
\\text\{~*°~*[CF]?~*\}|°~*(?:\\text\{~*[CF]~*\}|[CF]\b) ->
(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?-?\d\}?)?[~({]*)([\d.]+)~*° -> \1{(\2\\pi/180)}
°(?!~*\d) ->
# 5:30\text{ p.m.}, 5:30 p.m., 5\text{ PM}, 5 PM
~*(?:\\text\{~*)?(?<!\\)\b(?i:([ap])\.~?m)\b\.?~*\}? -> \\text{\1m}
(?<=:\d\d)~*(?i:([ap])m)\b|(?<=\d)~([AP])M$ -> \\text{\1\2m}
# 15\frac{\text{m}}{\text{s}}
(?<=\d)~*\\d?frac\{~*(UNIT)~*\}\{~*(UNIT)~*\} -> \1/\2
# 5\text{ cm}^2, 9\text{ m/s^2}, 12\pi\mbox{ cm}, 36\text{ km}/\text{h}, 9 (apples)
(?<=[a-zA-Z\d)}!\]|])~*(?>(?:\\cdot|[(/])?~*UNIT~*)+(?=,|$) ->
# 15cm, 12\pi cm^2
(?:(?<=\d)|(?<=\\pi))~*(?:SHORT)(?:~*\^(?:\{\d\}|\d))?(?=,|$) ->
                                                                    Names
# x_{\text{max}}, x_\text{max}, m_{\max}, L_\odot, x_1
_~*(\{)?~*(?:\\text\{~*(\w+)~*\}|\\(?!frac)([a-zA-Z]+))~*(?(1)\}) -> _{\2\3}
_~*(\w) -> _{\1}
# \text{B.}, \text{(C)}, \mathrm{e}, \mathbf{x^2}; odd, No, ABC; \text{Odd.}
\\text\{~*\(?([a-zA-Z](?:POWER)?)\)?\.?~*\} -> \1
^([A-Z]{2,}|[Nn]o|(?=\w*[eiou])[a-zA-Z]{3})$ -> \\text{\1}
\\text\{~*([^{}]*?)[~.]*\} -> \\text{\1}
# \text{all real numbers}, \varnothing, \varepsilon, x \not= 3
\\text\{[aA]ll~real(?:s|~numbers)\} -> \\mathbb{R}
\\varnothing -> \\emptyset
\\varepsilon -> \\epsilon
\\not~*= -> \\ne~
# I_1, e_1, which are no constants
((?<![\\a-zA-Z])[eE](?=_)|(?<![\\a-zA-Z{])I(?![a-z])) -> \\mathit{\1}
# \frac{dV}{dt}, \frac{\partial f}{\partial x}
\\[dtc]?frac\{(?:d|\\partial)~*(LETTER)\}\{(?:d|\\partial)~*(LETTER)\} -> \1_{\2}
# f', y^{\prime\prime}, and A^T, which is no power
\\prime~* -> '
\^\{?('+)\}? -> \1
(?<=[a-zA-Z])' -> _{prime}
\^~*(?:\{(?:T|\\top)\}|T\b|\\top\b) -> ^{1T}
# 204_5, 1A3_{16}: a numeral becomes a name, which is equal to itself alone
(?<![\w.}^])(\d[\dA-F]*)_\{(\d+)\} -> \\text{\1~base~\2}
                                                                    Arguments
# 2 3/4, x = 2 11/12
(?<![^=,~])(-?\d+)~(\d(?=/)|\d\d(?=/\d\d))/(\d+)(?=[~,]|$) -> \1\\frac{\2}{\3}
# -3./2, np.arcsin(10/13)
\bnp\.|(?<=\d)\.(?=[/*+}]) ->
# 2 x 10^3, √53, \pi(2)
(?<=\d)~*x~*(?=10\^) -> \\times~
√(\d+) -> \\sqrt{\1}
√ -> \\sqrt~
\\pi~*\( -> \\pi\\cdot(
# \dfrac{1}{2}, \tbinom{4}{2}
\\(?:[dtc]|nice)(frac|binom) -> \\\1
# \frac12, \frac\pi4, \frac{1+a}c, \binom 4 2, \sqrt2, \sqrt[3]2, \sqrt(3)
\\(frac|binom)~*ARGUMENT -> \\\1{\2}
\\(frac|binom)~*(GROUP)~*ARGUMENT -> \\\1\2{\3}
\\sqrt~*(\[[^\]]*\])?~*(\\frac(?:GROUP){2}|(?![(\[])ARGUMENT) -> \\sqrt\1{\2}
(\\sqrt|\^)~*\(([^()]*)\) -> \1{\2}
# 10^-3, e^-x
\^(-\d+|-[a-z]) -> ^{\1}
# \sqrt[3]{-2} is real
\\sqrt(\[\d*[13579]\])\{-(\w+)\} -> (-\\sqrt\1{\2})
# x^\frac12
\^~*(\\frac(?:GROUP){2}) -> ^{\1}
# 0.\bar{3}, 0.\overline{3}, 0.1\overline{6}, 0.\overline{12}, 0.\overline{142857}
(?<=[.\d])\\(?:bar|overline)~*(?:\{(\d+)\}|(\d)) -> \\overline{\1\2}
(\d*)\.\\overline\{(\d)\} -> (0\1+\\frac{\2}{9})
(\d*\.\d)\\overline\{(\d)\} -> (\1+\\frac{\2}{90})
(\d*\.\d)\\overline\{(\d\d)\} -> (\1+\\frac{\2}{990})
(\d*)\.\\overline\{(\d\d)\} -> (0\1+\\frac{\2}{99})
(\d*)\.\\overline\{(\d{3})\} -> (0\1+\\frac{\2}{999})
(\d*)\.\\overline\{(\d{6})\} -> (0\1+\\frac{\2}{999999})
                                                                    The whole
# x + 1 is x+1, but 1 2 is not 12, and 32, 349 not 32,349
~~+ -> ~
(?<![a-zA-Z\d,])~|~(?![a-zA-Z\d])|(?<=,)~(?!\d{3}(?!\d)) ->
# 0,100 is a list, and 1,000\pi is a number
(?<![\d,.])0,(?=\d{3}(?!\d)) -> 0,~
(?<![\d,.])([1-9]\d?\d?),(?=0\d\d(?![\d,])) -> \1
# \mathbb{R}-\{3\}
(?<=\\mathbb\{R\})(?:-|\\backslash)(?=\\\{) -> \\setminus
# \{x | x > 2\}, \{x\in\mathbb{R} : x > 2\}, x = 1, 2, k = 1,234, x = 1+2 = 3
\\\{~*[a-z]~*(?:\\in~*\\mathbb\{R\})?(?:\||:|\\mid)([^{}]*(?:GROUP)?[^{}]*)\\\}$ -> \1
^[a-zA-Z]~*=(?=[^=]*(?:,|\\pm)[^=]*$) ->
^(?!.*(?:implies|arrow|\\to\b|equiv|\\neq?\b))(PART=)(?!\d*[a-zA-Z]=)(?:PART=)+ -> \1
# +5, 5\text{ cm},
^\+|[~.,;:\\]+$ ->
"""


def compiled(table: str) -> list[tuple[re.Pattern, str]]:
    """The patterns of such a table and what takes the place of what they find."""
    for name, pattern in NAMES.items():
        table = table.replace(name, pattern)
    rows = re.findall(r"(?m)^(?! |#)(.+?) ->(.*)$", table)
    return [(re.compile(pattern), place.strip()) for pattern, place in rows]


PATTERNS = compiled(REWRITES)
TRANSLATION = str.maketrans(dict(zip(*[iter(SIGNS.split())] * 2, strict=True)))


@functools.lru_cache(2**16)
def latex_of(text: str) -> str:
    """An answer in the one spelling; "" for one that is too long."""
    if len(text) > MAX_LENGTH:
        return ""
    text = text.translate(TRANSLATION)
    for pattern, place in PATTERNS:
        text = pattern.sub(place, text.strip("~ "))
    text = re.sub(r"\\text\{[^{}]*", lambda words: words[0].lower(), text)
    return text.replace("~", " ")


NUMBER = re.compile(
    r"-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d\d?)?", re.ASCII
)


def number_of(latex: str) -> Fraction | None:
    """The value of 1,234.50 or -.5 or 6e-5, exactly; None for what is no number."""
    return Fraction(latex.replace(",", "")) if NUMBER.fullmatch(latex) else None

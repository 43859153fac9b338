r"""Rewrites the many spellings of a LaTeX formula as one spelling.

formulas.py parses the result. A missing rule costs the model the reward for a correct
answer. A rule that strips too much can reward a wrong answer, which the model would
discover and exploit. So only common, unambiguous notation is rewritten.

An answer passes through SIGNS, and then through the rows of REWRITES from top to
bottom. A row is `pattern -> replacement`; the # comment above it lists inputs that it
handles, and section headings are far to the right. While the rows run, a space is
written as ~ so that it is visible in the patterns.
"""

import functools
import re
from fractions import Fraction

MAX_LENGTH = 300  # characters of an answer

SIGNS = r"""
− - – - × \times~ · \cdot~ ⋅ \cdot~ ÷ \div~ ± \pm~ ∞ \infty~ ∪ \cup~ ∩ \cap~ ∈ \in~
∅ \emptyset~ ≤ \le~ ≥ \ge~ ≠ \ne~ π \pi~ ℝ \mathbb{R} ∛ \sqrt[3]~ º ° ⁰ ^{0} ¹ ^{1}
² ^{2} ³ ^{3} ⁴ ^{4} ⁵ ^{5} ⁶ ^{6} ⁷ ^{7} ⁸ ^{8} ⁹ ^{9} ⁻ ^{-} ½ \frac{1}{2}
⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅕ \frac{1}{5} ⅖ \frac{2}{5}
⅗ \frac{3}{5} ⅘ \frac{4}{5} ⅙ \frac{1}{6} ⅚ \frac{5}{6} ⅛ \frac{1}{8} ⅜ \frac{3}{8}
⅝ \frac{5}{8} ⅞ \frac{7}{8} … \ldots~ € ~ £ ~ ¥ ~ ¢ ~ ✓ ~ ⁄ / ∕ / ％ % ₹ ~ “ ~ ” ~ 。 .
✅ ~ ′ ' ‐ - ‑ - ⩽ \le~ ⩾ \ge~ ₀ _{0} ₁ _{1} ₂ _{2} ₃ _{3} ₄ _{4} ₅ _{5} ₆ _{6}
₇ _{7} ₈ _{8} ₉ _{9} ⟨ ( ⟩ ) 或 ,~ 和 ,~ ∨ \lor~
∶ : ： : 、 ,~ ； ; ｛ \{ ｝ \} ［ [ ］ ] ∜ \sqrt[4]~ ∙ \cdot~ • \cdot~ ∗ *
⌊ \lfloor~ ⌋ \rfloor~ ⌈ \lceil~ ⌉ \rceil~ ≈ \approx~
０ 0 １ 1 ２ 2 ３ 3 ４ 4 ５ 5 ６ 6 ７ 7 ８ 8 ９ 9 ． . ， , － - ＝ = （ ( ） )
"""

# Names for patterns. REWRITES uses them, and a pattern here may use names below it.
# Space and line breaks in a pattern are ignored. What a name stands for:
#   PART       what is between two = of one line
#   MACRO      a command in a PART, but not words that separate two answers, as in
#              x=-2\text{ or maybe }x=3
#   LETTER     what can be differentiated, as in \frac{d\theta}{dt}
#   GROUP      braces with their content, three levels deep
#   ARGUMENT   what LaTeX takes as an argument without braces
#   COMMA      a comma inside a number. After an opening bracket, ",\," separates the
#              entries of a pair instead, as in (3,\,200)
#   LOOKS      commands that only change the appearance
#   STYLE      commands that set their argument as words
#   FUNCTION   functions. "min" and "sec" are units if nothing follows them
#   CHOICES    letters of choices or Roman numerals, with commas or "and" between them
#   LEAD       a word before a WORD, but not in "I and III only"
#   WORD       a word. Four letters after a digit are a product, as in 2abcd
#   LABEL      words that end with a colon
#   BASIS      what precedes the letter of a basis vector, as in \mathbf{i} and
#              \hat{\imath}
#   CLOSE      what follows the letter of a basis vector
#   UNIT       a unit after a number, with the bracket, dot and power that follow it
#   SIGN       what a unit is made of
#   POWER      the power of a unit, as in cm^{2} and s^{-1}
#   NONE       words that are not a unit, as they change the number or its meaning: 18
#              million is not 18, and an increase is not a decrease
#   MONTH      months
#   REAL       the usual range of a parameter, which may be left out
#   CONDITION  a restriction of that range. A restricted range may not be left out.
#              Ranges from 0 or 1 on, and ranges without 0, do not count as restricted
#   AND        words between the items of a list, but not "and" between inequalities
#   SEVERAL    several equations that are not a chain, as in x=5|x=6
#   SHORT      units that may follow a number directly
#   FROM, TO   where an item of a list begins and ends
NAMES = r"""
PART = (?:GROUP|MACRO[a-zA-Z]++~?|\([^()]*\)|[^=,;<>~(){}\\])*
MACRO = (?:(?<![^=])\\|\\(?!text\{[^{}]*\}~*[^=~^]))
LETTER = [a-zA-Z]|\\[a-z]+
GROUP = \{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}
ARGUMENT = (\\[a-zA-Z]+|[^\\{}~])
COMMA = \{\s*,\s*\}|\\text\{,\}|,\s*(?:\\!|\{\}|\\,(?![^([{]*(?:[)\]]|\\\})))
LOOKS = left|right|[bB]igg?[lrm]?|displaystyle|huge|large|small|checkmark|fbox|boxed|bf|
    angle|(?:text)?color\{\w*\}
STYLE = text(?:bf|it|rm|sf|tt|up|normal)|math(?:bf|it|rm|sf|tt)|[mh]box|emph|bm|
    boldsymbol|underline|operatorname
FUNCTION = sqrt|a?r?c?(?:sin|cos|tan)h?|cot|csc|exp|log|ln|pi|max|gcd|lcm|
    (?:min|sec)(?!~*\}?(?:\^\{?-?\d\}?)?~*(?:[,./]|\\text|$))
CHOICES = (?:[A-J]|[IVX]+)(?:(?:,~*(?:and~)?|~and~)(?:[A-J]|[IVX]+))*
LEAD = (?:(?!(?:and~)?[A-Z]+~only)[a-zA-Z]{2,}~)
WORD = (?!(?<=\d)[a-z]{4}\b)(?=\w*[aeiouy])[a-zA-Z]{4,}
LABEL = \\text\{(?![^}]*\b(?i:NONE|no|none|false|cannot)\b)[^}:]*(?::~*\}|\}:)
BASIS = \\(?:text|hat|vec)(?:~*\{)?~*(?:\\text\{~*)?\\?
CLOSE = (?:math)?~*\}*
UNIT = \\text\{(?![^{}]*\b(?:(?i:NONE)|[kKMB])\b|~*(?i:MONTH)\b)
    (?:~*[mgshLlAVWJNC]|SIGN*[a-zA-Z]SIGN*[a-zA-Z.)])~*(?:POWER)?~*\}\)?(?:POWER)?
SIGN = (?:[^{}\d^]|POWER)
POWER = \^(?:\{-?\d\}|\d)
NONE = one|two|three|four|five|six|seven|eight|nine|tens?|eleven|twelve|\w+teen|
    \w*(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundreds?|thousands?|\w+illions?|
    dozens?|score|lakhs?|crores?|grand|half|halves|thirds?|quarters?|
    \w*(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|red|sand|lion)ths?|
    or|not|but|then|plus|minus|times~\w+|divided|over|point|squared|cubed|factorial|
    inverse|root|power|choose|mod\w*|remainder|base|[ap]m|even|odd|more|less|fewer|
    increas\w+|decreas\w+|gain|loss|profit|north|south|east|west|above|below|negative|
    couple|short|mil|mille|[bm]n|mln|\w*clockwise|(?:up|down|in|out)wards?|up|down|
    the~(?:left|right)|max\w*|minimum|least|most|repeating|recurring|basis|binary|AD|
    BCE?|is|are|if|when|twice|thrice|doubled|tripled|noon|midnight|(?:for|back)wards?
MONTH = january|february|march|april|may|june|july|august|october|
    (?:sept|nov|dec)ember
REAL = [,(][a-z~]*\\in~*\\mathbb\{?[RZ](?!\}?[\^_])
CONDITION = [^,{]*(?:[<>]|\\(?:[lg]t|leq?(?:slant)?)(?![a-z])|
    \\geq?(?:slant)?(?![a-z])(?!~*[01](?!\d))|\\neq?(?![a-z])(?!~*0(?!\d)))|
    [^,]*(?:\\setminus|\\backslash|\b(?:odd|even)\b)
AND = or|and(?!~*\}?[^,]*(?:[<>]|\\[lg]eq?(?![a-z])))
SEVERAL = .*(?:implies|arrow|\\to\b|equiv|\\(?:neq?|lor|vee)\b)|
    \\?(\w+)=.*[^\w{(+*/^-]\1=|[^=]*=.*[⇒→\u2e80-\u9fff].*=|
    .*=[^=]*\d\}?~?\\(?:land|wedge|cup|mid)\b~?\\?[\w{}]+=
SHORT = [cmk]m|kg|m[gLl]|ft|in|lbs?|oz|hrs?|min|sec|mph|k[mWJ]|USD|km/hr?|m/s|sq~ft|
    per~day|[kMG]?Hz|[kM]Pa|kWh|mol|rad|rpm|ft/s|sq~in
FROM = (?:^|(?<=,)|(?<=,~))
TO = (?=~*(?:,|$))
"""

REWRITES = r"""
                                                                    Blanks and signs
# 10⁻³ and x₁₀, which SIGNS turns into two exponents or subscripts
(([_^])\{-?\d*)\}\2\{ -> \1
# 18 with a zero-width space, or in the colors of a terminal
[\u200b\u2060\ufeff]|\x1b\[\d*m ->
# 9*2=<<9*2=18>>18, as in GSM8K's solutions
<<[^<>]*>> ->
# \begin{pmatrix}1\\[4pt]2\end{pmatrix}
\\\\\[\w+\] -> \\\\
# 1{,}234, 10,\!000, 1\,234, 1 234, 1'234
(?<=\d)\s*(?:COMMA|\\[,;: ]|'|~|[^\S\n])(?:\\!|\s)*(?=\d{3}(?!\d)) ->
# {-}5, 4{:}30
\{([-:+=])\} -> \1
# 15\,\text{cm}, x=3,\; x=5
(?<!\\)\\[,;:!> ]|\\(?:q?quad|thinspace|enspace)(?![a-z])|\s -> ~
# x**2, (x+1) ** 2 and 2**n are powers; **18** is bold
^\*\*([^*]*)\*\*(?=[a-zA-Z(]) -> \1~
(?<=[\w)}])(~?)\*\*\1(-?\d*\.?\d+)(?!\.?\d|\*\*) -> ^{\2}
(?<=[\w)}])(~?)\*\*\1(?=-?(?:[a-zA-Z(]|\\(?:pi|frac|sqrt)\b)) -> ^
# \$18, \euro18, \[18\], \(18\), **18**
\\?\$|\\(?:euro|pounds|cent|mathdollar)(?![a-z])|\\[]()[]|\*\* -> ~
# \langle 1,2\rangle, <1,2>
^<([^<>=]*,[^<>=]*)>$ -> (\1)
\\langle(?![a-z]) -> (
\\rangle(?![a-z]) -> )
# 1,2,...,n
\.{3,}|\\[lc]?dots\b -> \\ldots~
# \left(, \Big[, \displaystyle, \boxed{5}, \textcolor{red}{18}
\\(?:LOOKS)(?![a-zA-Z]) ->
# \begin{cases}x=1\\y=2\end{cases}
^\\begin\{cases\}~*(\w~*=[^&,]*?),?~*\\\\~*(\w~*=[^&,]*?)\\end\{cases\}[~.]*$ -> \1,\2
# ]1,3[, ]-\infty,1] \cup [2,\infty[
(^|\\(?:cup|in)~*)\](?=[^][]*,) -> \1(
,([^][(),]*)\[(?=~*(?:\\cup|$)) -> ,\1)
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
# \operatorname{tg} x, \ctg x, \arctg 2, \lg 5
\\text\{~*(arc)?tg~*\}|\\(arc)?tg(?![a-z]) -> \\\1\2tan~
\\text\{~*(arc)?co?tg~*\}|\\(arc)?co?tg(?![a-z]) -> \\\1\2cot~
\\text\{~*lg~*\}|\\lg(?![a-z]) -> \\log_{10}~
# \text{gcd}(4,6), sqrt(3), pi/2, sinx
\\text\{~*(FUNCTION)~*\}|(?<![\\a-zA-Z])(?<!_\{)(FUNCTION)(?!x?[a-wyzA-Z]) -> \\\1\2~
# 12^{\text{th}}, 8^{th}, 12th
(?<=\d)~*(?:\^?\{?\\text\{~*|\^?\{?)(?:st|nd|rd|th)\b(?:~*\}){0,2} ->
# \text{A and C}, \text{I and III only}
^\\text\{~*(CHOICES)(?:~only)?[~.]*\}$ -> \1
# Sunday, 18 dollars, 64 square feet; I and III only
(?<![\\a-zA-Z])(?![^{}]*\})(LEAD*WORD(?:[~'-][a-zA-Z]+)*) -> \\text{\1}
# \text{an ellipse}
^\\text\{~*(?:an?|the)~+(?=[a-z]{3}) -> \\text{
# {15\text{ cm}^2}
^\{((?:[^{}]|GROUP)*)\}$ -> \1
# 10%-15%
(?<=\d)\\?%(?=-) ->
# 28%, 28 percent
\\?%|\\text\{~*percent~*\}|\bpct\b -> ~
# 5\text{ or }6, 2 and 3, 2 \& 3; but x>1 and x<3 is not a list
,?~*(?:\\text\{~*,?~*(?i:AND)~*\}|(?<![a-zA-Z])(?:AND)(?![a-zA-Z])|\\&)~* -> ,~
# _4C_2, {}^4C_2, C(4,2), C_4^2, C^2_4; {}_4P_2, P(4,2), P_4^2, A_4^2
(?<![\w}])(?:\{\})?[_^]\{?(\d+)\}?~*([CP])_\{?(\d+)\}? -> \2(\1,\3)
^C\^\{?(\d+)\}?_\{?(?!1\b)(\d+)\}?$ -> C(\2,\1)
^C_\{?(?!1\b)(\d+)\}?\^\{?(\d+)\}?$ -> C(\1,\2)
^[AP]\^\{?(\d+)\}?_\{?(?!1\b)(\d+)\}?$ -> P(\2,\1)
^[AP]_\{?(?!1\b)(\d+)\}?\^\{?(\d+)\}?$ -> P(\1,\2)
(?<![\w\\])C\((\d+),~*(\d+)\) -> \\binom{\1}{\2}
(?<![\w\\])P\((\d+),~*(\d+)\) -> \\frac{\1!}{(\1-\2)!}
# 5!!, 6!!
(\d*[13579])!!(?!!) -> \\frac{(\1+1)!}{2^{(\1+1)/2}((\1+1)/2)!}
(\d*[02468])!!(?!!) -> (2^{\1/2}(\1/2)!)
# \overline{3+4i}, \overline{3-4i}
\\(?:overline|bar)~*\{([^{}]+)\+~*(\d*)~*i~*\} -> (\1-\2i)
\\(?:overline|bar)~*\{([^{}]+)-~*(\d*)~*i~*\} -> (\1+\2i)
# 3\mathbf{i}-\mathbf{j}+2\hat{k}, 3\mathbf{i}-\mathbf{j}
(^|[+-])~*(?=BASIS(?:[ij].*BASIS[jk]|[jk]CLOSE$)) -> \g<1>1
^([^,]+?)BASISiCLOSE([^,]+?)BASISjCLOSE([^,]+?)BASISkCLOSE$ -> (\1,\2,\3)
^([^,]+?)BASISiCLOSE([^,]+?)BASISjCLOSE$ -> (\1,\2)
# 4\pmod 7, 4 \mod 7, 4 (\text{mod }7), x \equiv 4 \pmod{7}
~*\(?~*(?:\\[bp]?mod(?![a-z])|\\text\{~*mod~*\})~*\{?~*(\d+)~*\}?~*\)? -> \\text{mod~\1}
^[a-z]~*\\equiv~*(?=.*\\text\{mod) ->
# "5", 72,
^(?:[~*`"_#:]|=>?)+|[~*`"_.,;:\\]+$ ->
# f(x)=x\text{ for all }x, x=k\pi, k\in\mathbb{Z}
[,~]*(?:\\forall|\\text\{~*for~(?:all|any|some|every)\b|REAL)(?!CONDITION)[^,]* ->
# \text{Answer: C}, \text{The answer is C}, Option C
^(?i:\\text\{(?:[^{}]*\banswer(?:~is)?|option|choice))[~:}]*\(?([A-J])\)?[~.]*\}?$ -> \1
# \text{Answer}: 5, the answer is 5, \text{Cost: }5; but not \text{I and III only}
^\\text\{(?![^}]*\bno)[^}]*\b(?i:answer|total|only|therefore|is)[~:=,]*\}[~:=,]*(?=.) ->
^LABEL~*(?!.*\\text)(?=.) ->
# USD 18
^(?:\\text\{)?~*(?:USD?|Rs|EUR)\b\.?~*\}?(?=~*-?[\d.]) ->
# \textbf{(E)}\ 5, (E) 5, C. x = 42, \text{C. Paris}, B)
^([A-J])\)$ -> \1
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
# \text{March }14, 14\text{ March}, March 14th, 2024
^(?:\\text\{~*)?(?i:(MONTH))[~}]*(\d\d?)(?:,?~*(\d{4}))?$ -> \\text{\1~\2~\3}
^(\d\d?)~*(?:\\text\{~*)?(?i:(MONTH))[~}]*(?:,?~*(\d{4}))?$ -> \\text{\2~\1~\3}
# 15\frac{\text{m}}{\text{s}}
(?<=\d)~*\\d?frac\{~*(UNIT)~*\}\{~*(UNIT)~*\} -> \1/\2
# 5\text{ cm}^2, 9\text{ m/s^2}, 12\pi\mbox{ cm}, 36\text{ km}/\text{h}, 9 (apples)
(?<=[a-zA-Z\d)}!\]|])~*(?>(?:\\cdot|[(/])?~*UNIT~*)+(?=,|$) ->
# 15cm, 12\pi cm^2
(?:(?<=\d)|(?<=\\pi))~*(?:SHORT)(?:~*\^(?:\{\d\}|\d))?(?=,|$) ->
# 5 N, 18\,m, 24 m^2; but 5N, 18m and \pi r^2 h are products
FROM(-?[\d.]+)~(?:[gshLlVWJ]|k?N(?:/m)?|Pa|m(?:\^\{?\d\}?)?)TO(?![^([{]*[])}]) -> \1
                                                                    Names
# x_{\text{max}}, x_\text{max}, m_{\max}, L_\odot, x_1
_~*(\{)?~*(?:\\text\{~*(\w+)~*\}|\\(?!frac)([a-zA-Z]+))~*(?(1)\}) -> _{\2\3}
_~*(\w) -> _{\1}
# \text{B.}, \text{(C)}, \mathrm{e}, \mathbf{x^2}; odd, No, ABC; \text{Odd.}
\\text\{~*\(?([a-zA-Z](?:POWER)?)\)?\.?~*\} -> \1
FROM([A-Z]{2,}|[Nn]o|(?=\w*[eiou])[a-zA-Z]{3})TO -> \\text{\1}
\\text\{~*([^{}]*?)[~.]*\} -> \\text{\1}
# \text{all real numbers}, \varnothing, \text{empty set}, \varepsilon, x \not= 3
\\text\{[aA]ll~real(?:s|~numbers)\} -> \\mathbb{R}
\\varnothing|\\text\{(?:the~)?empty~set\} -> \\emptyset
# \text{no solution}, \text{No real solutions.}, DNE
^\\text\{(?:There~(?:is|are)~)?[nN]o~solutions?\}$ -> \\emptyset
^\\text\{([nN]o~real~solution)s\}$ -> \\text{\1}
^\\text\{(?:DNE|[^{}]*(?<!\w)[dD]oes~not~exist)\}$ -> \\text{does~not~exist}
\\varepsilon -> \\epsilon
\\not~*= -> \\ne~
# I_1, e_1, which are not constants
((?<![\\a-zA-Z])[eE](?=_)|(?<![\\a-zA-Z{])I(?![a-z])) -> \\mathit{\1}
# \frac{dV}{dt}, \frac{\partial f}{\partial x}
\\[dtc]?frac\{(?:d|\\partial)~*(LETTER)\}\{(?:d|\\partial)~*(LETTER)\} -> \1_{\2}
# f', y^{\prime\prime}, and A^T, which is not a power
\\prime~* -> '
\^\{?('+)\}? -> \1
(?<=[a-zA-Z])' -> _{prime}
\^~*(?:\{(?:T|\\top)\}|T\b|\\top\b) -> ^{1T}
# 204_5, 204_{(5)}, (204)_5, 1A3_{16}: a numeral becomes a name, equal only to itself
(?<![\w.}^])\((\d\w*)\)(?=_\{) -> \1
(?<![\w.}^])(\d(?:[\dA-F]*|[\da-f]*(?=_\{16)))_\{\(?(\d+)\)?\} -> \\text{\1~base~\2}
# 10--15, which LaTeX prints as 10–15
FROM(\d[\d.]*)--(?=\d) -> \1-
# 2024-05-01, 555-1234, (555) 123-4567, 10-15, 1.5-2.5, -5--3, which are not
# subtractions; 10 - 3 is one
FROM(\+?[\d()~.]*\d\)?-~?\d[\d.X-]*|-\d+--\d+)TO -> \\text{\1}
# 05/01/2024, 05/2024, which are not quotients
FROM(0\d+/\d+|\d+/0\d+|\d+/\d+/\d+)TO -> \\text{\1}
                                                                    Arguments
# 2 3/4, x = 2 11/12
(?<![^=,~])(-?\d+)~(\d(?=/)|\d\d(?=/\d\d))/(\d+)(?=[~,]|$) -> \1\\frac{\2}{\3}
# 1/2 x, which is x/2
(?<![\w.)}/^{])(\d+)/(\d+)~(?=[a-z](?![a-z])) -> \\frac{\1}{\2}
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
# \sqrt[3]{x^2}, \sqrt[4]{x^3}, \sqrt{x^3} are powers of x; but \sqrt{x^2} is |x|
\\sqrt\[([3579])\]\{([a-z]|\([^()]*\))\^\{?(\d)\}?\} -> \2^{\3/\1}
\\sqrt\[([468])\]\{([a-z]|\([^()]*\))\^\{?([13579])\}?\} -> \2^{\3/\1}
\\sqrt\{([a-z]|\([^()]*\))\^\{?([3579])\}?\} -> \1^{\2/2}
# x^\frac12
\^~*(\\frac(?:GROUP){2}) -> ^{\1}
# 0.\bar{3}, 0.\dot{3}, 0.\dot{1}4\dot{2}, 0.(3), 0.58\overline{3} = 0.58+0.003/0.9
(?<=[.\d])\\dot~*\{?(\d)\}?(\d*)\\dot~*\{?(\d)\}? -> \\overline{\1\2\3}
(?<=[.\d])\\(?:bar|overline|dot)~*(?:\{(\d+)\}|(\d)) -> \\overline{\1\2}
(?<=\.)\((\d+)\) -> \\overline{\1}
(\d*)\.(\d*)\\overline\{(\d+)\} -> (0\1.\g<2>0+\\frac{0.\2⟨\3}{0.\3⟩})
# In the result of the row above, digits before ⟨ become 0, and those before ⟩ become 9.
\d(?=\d*⟨) -> 0
\d(?=\d*⟩) -> 9
[⟨⟩] ->
                                                                    The whole
# x + 1 is x+1, \pm 1 is \pm1; but 1 2 is not 12, and 32, 349 is not 32,349
~~+ -> ~
(\\[a-zA-Z]+)~(?![a-zA-Z]) -> \1
(?<![a-zA-Z\d,])~|~(?![a-zA-Z\d])|(?<=,)~(?!\d{3}(?!\d)) ->
# 0,100 is a list; but 1,000\pi is a number
(?<![\d,.])0,(?=\d{3}(?!\d)) -> 0,~
(?<![\d,.])([1-9]\d?\d?),(?=0\d\d(?![\d,])) -> \1
# \mathbb{R}-\{3\}
(?<=\\mathbb\{R\})(?:-|\\backslash)(?=\\\{) -> \\setminus
# \{x | x > 2\}, \{x\in\mathbb{R} : x > 2\}, x = 1, 2, k = 1,234, x = 1+2 = 3
\\\{~*[a-z]~*(?:\\in~*\\mathbb\{R\})?(?:\||:|\\mid)([^{}]*(?:GROUP)?[^{}]*)\\\}$ -> \1
^[a-zA-Z]~*=(?=[^=]*(?:,|\\pm)[^=]*$) ->
^(?!SEVERAL)(PART=)(?!\d*[a-zA-Z]=)(?:PART=)+ -> \2
# +5, \approx 5, 5\text{ cm},
^\+|^\\approx~*|[~.,;:\\]+$ ->
"""


for name, pattern in re.findall(r"(?m)^([A-Z]+) = (.*(?:\n .*)*)", NAMES):
    REWRITES = REWRITES.replace(name, re.sub(r"\s", "", pattern))
PATTERNS = [
    (re.compile(pattern), replacement.strip())
    for pattern, replacement in re.findall(r"(?m)^(?! |#)(.+?) ->(.*)$", REWRITES)
]
TRANSLATION = str.maketrans(dict(re.findall(r"(\S+) (\S+)", SIGNS)))


@functools.lru_cache(65536)
def latex_of(text: str) -> str:
    """Return an answer in one spelling, or "" if it has over MAX_LENGTH characters."""
    if len(text) > MAX_LENGTH:
        return ""
    text = text.translate(TRANSLATION)
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text.strip("~ "))
    text = re.sub(r"\\text\{[^{}]*", lambda words: words[0].lower(), text)
    return text.replace("~", " ")


def number_of(latex: str) -> Fraction | None:
    """Return the exact value of a number such as 1,234.50, -.5 or 6e-5, else None."""
    number = r"-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d\d?)?"
    matches = re.fullmatch(number, latex, re.ASCII)
    return matches and Fraction(latex.replace(",", ""))

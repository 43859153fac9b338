"""Loads the problems of a task, makes prompts of them, and refuses unusable rows."""

import functools
import json
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

from pydantic.dataclasses import dataclass

from answer_checking.extraction import (
    final_answer,
    last_box,
    last_thought_tag,
    without_thoughts,
)
from answer_checking.latex import MAX_LENGTH, latex_of, number_of
from support.command import Refused, one_line
from support.hub import COMMITS, explain, split_revision

BUILT_IN_VERIFIERS = ("exact", "gsm8k", "math")  # of reward.VERIFIERS
BASE_PROMPT_END = "\n\nSolution:"  # ends the prompt of a model without a chat template


@dataclass(config={"extra": "forbid"})
class Task:
    """Where the problems of a task are, and how its answers are compared."""

    # A JSONL file, or a hub dataset as "owner/name split [configuration]", or None.
    train: Path | str | None
    heldout: Path | str | None
    # The verifier of reward.score. Only the user's flags or recipe can name a verifier
    # of the user's own, because a folder of data must not run code.
    verifier: Literal[BUILT_IN_VERIFIERS] = "math"
    # The text before each problem in its prompt, or None.
    instruction: str | None = (
        "Reason step by step and put the final answer in \\boxed{}."
    )


AIME24 = "HuggingFaceH4/aime_2024 train"
MATH500 = "HuggingFaceH4/MATH-500 test"
# The ids and columns are those that other programs use to load these datasets. We have
# loaded none of them from the hub. The data cards of gsm8k, deepscaler, aime2024 and
# amo-bench confirm theirs.
TASKS = {
    "gsm8k": Task("openai/gsm8k train main", "openai/gsm8k test main", "gsm8k"),
    "math": Task("DigitalLearningGmbH/MATH-lighteval train", MATH500),
    "math500": Task(None, MATH500),
    "deepscaler": Task("agentica-org/DeepScaleR-Preview-Dataset train", AIME24),
    "aime2024": Task(None, AIME24),
    "aime2025": Task(None, "MathArena/aime_2025 train"),
    "aime2026": Task(None, "MathArena/aime_2026 train"),
    "amc23": Task(None, "math-ai/amc23 test"),
    "amo-bench": Task(None, "meituan-longcat/AMO-Bench test"),
}

PROBLEM_COLUMNS = ("prompt", "problem", "question")
COLUMNS = (*PROBLEM_COLUMNS, "answer", "solution")  # all that are read
# Matches the names of columns that hold a part of the problem. The names are given one
# per line, the shortest first.
PART_OF_PROBLEM = re.compile(
    r"""(?imx)
    # Facts about a part are not a part: num_images, has_image, topic_graph_theory,
    ^(?!(?:n|num|has|is|contain|require|need|no|topic|category|subject|domain|skill|tag)
        s?_ | number_of_
    # chart_type, context_length, wrong_rate, wrong_solutions
    | .*_(?:count|type|length|size|rate|tried|window|tokens|score|theory|
        (?:solution|generation|rollout)s?)$)
    (?:
    # Options, answer_choices, wrong_answers; but not adoption_year or optional
    .*(?:choice|(?<!ad)option(?!al)|distractor|incorrect|wrong|candidate).*
    # alternatives, alternativas, opciones, 选项 (options), possible_answers
    | .*(?:alternativ(?:es|as)|opci[oó]n|选项|
        (?:possible|potential|suggested|false)_?answer).*
    # mcq, mc1_targets, mc_answer1, endings
    | mcq?\d?(?:_(?:targets?|answers?)\d?)? | endings?\d?
    # alternative_b, opa, opt1, ans_1, answer_c
    | (?:alternative|opt?|ans|answer|sol)[ _-]?(?:[a-e]|\d)
    # several columns: A and B, (A) and (B), 1 and 2; a, b and c; a1 and a2, o1 and o2
    | (?-i:\W?[A1]\W?\n\W?[B2]\W?) | \W?a\W?\n\W?b\W?\n\W?c\W? | [ao]1\n[ao]2
    # pictures and other media: images, decoded_image, img_path, visual, 图 (picture)
    | .*(?:image|img|picture|screenshot|pixel|audio|video).* | (?:.*_)?visuals?
    | (?:.*_|题目?|问题|配|插|附|示意)?图[片像]?(?:[_\d].*)?
    # drawings and texts: Figure 1, png_path, Context; but not geography or context_id
    | (?!.*_id$)(?:.*[^a-z\n])?
        (?:fig(?:ure)?|photo|pic|diagram|drawing|graph|chart|illustration|plot|jpe?g|
        png|svg|gif|webp|tikz|context|passage|article)s?(?:[^a-z\n].*)?
    | body
    )$"""
)
# Matches what is not text in a problem: pictures, and any model's chat markup. No
# quantifier runs past a possible next match, so searches of long texts are fast.
MARKUP = re.compile(
    r"""(?ix)
    # <image>, <image_1>, <img src="x.png">, <ImageHere>, <video>
    <(?:ima?ge?|video|audio)(?:[^a-z<>][^<>]*|_?(?:here|placeholder|token))?>
    # ![](x/y) and, after a letter or digit, x![](y.png); but not n![x^n](e^{x/2})
    | (?:(?<![a-z\d)}\]!])!\[[^][]*\]\((?=[^()\s]*[/.])
        |!\[[^][]*\]\((?=https?:|[^()\s]*\.(?:jpe?g|png|gif|svg|webp)\b))[^()]*\)
    # \includegraphics{x}, [IMAGE: a circle]
    | \\includegraphics | \[ima?ge?\b[^][]*\]
    # <|im_start|>, <｜User｜>, <start_of_turn>, <|turn>, [INST], <<SYS>>
    | <\|[\w-]{3,}\|> | <｜ | <\w+_of_turn> | <\|turn> | \[/?INST\] | <<SYS>>
    # <reserved_106>, <extra_id_1>, [|Human|], <role>, </user>
    | <(?:reserved|unused|special|extra_id)_?\d+> | \[\|(?:user|human)\|\]
    | </?(?:role|user|assistant)>
    # {"role": "user"}, {"from": "human"}; but not {"from": "A"}
    | ['"](?:role|from)['"]\s*:(?=\s*['"](?:human|gpt|system|user|assistant|model)\b)
    # at the end: "Assistant:", "# Response:" or a line "Response:",
    | (?:(?:\b(?:assistant|ai|bot|gpt)>?|\#[ ]*(?:response|output)
            |\n[^\w\n]*response)\s*:
    # a heading such as "### Answer" or "## ## Output", and perhaps <think>
        |\n(?=[^\w\n]*\#)[^\w\n]*(?:response|output|answer|solution|assistant)\b)
        \W*(?:<think>\W*)?$
    | </?think>\W*$"""
)
# Patterns of gold answers that a built-in verifier cannot use, and what is wrong. The
# length comes first, so that the others search only short texts.
GOLD_FAULTS = {
    rf"(?s).{{{MAX_LENGTH + 1}}}": (
        f"has over {MAX_LENGTH} characters: mark the result by \\boxed{{}} or ####"
    ),
    # Markup and a few words may be around these, as in \text{N/A} and "Answer: none".
    r"""(?ix)^(?: \W*(?:\\\w+\W*)?(?:(?:pd|np|math)\.|.*\b(?:answer|solution)\b.*\b)?
    # nan, None, null, n.a., N/A, NA; but not Na
    (?:nan|none|null|nil|n[ ]?[/.][ ]?a|(?-i:NA|na|NaT)
    # TBD, [deleted], not found, pending
    |tbd|todo|omitted|deleted|removed|redacted|withheld|missing|unavailable|pending
    |placeholder|not[ ]?found|not[ ]given|no_?answer
    # <unk>, and the errors of a spreadsheet: #REF!, #DIV/0!, #NAME?, Err:502
    |(?<=[<[(])(?:unk|pad|blank|empty) | (?<=\#)[a-z/0]+[!?] | err:\d+
    # Q.E.D., \square, open-ended, "Sample answer: ...", "Answers may vary."
    |q\.?e\.?d|[∎□■]|(?<=\\)(?:black)?square|open[ -]ended
    |sample[ ](?:answer|solution).*|answers?[ ](?:may|will|can)[ ]vary
    # "No answer was found.", "not provided", "See the proof.", Proof
    |(?:there[ ](?:is|was)[ ])?(?:no|not|none)
        (?![a-z]).*(?:answer|found|given|provided|available|applicable)
    |see\b(?!-).*|.*\bpro(?:of|ved?|ven)\b.*
    # 证明略 (the proof is omitted); but not 策略 (a strategy) and its like
    |.*(?:证明|証明|(?<![策战谋忽侵攻])略(?!\w)|见解析|暂无|无答案).*)\W*
    # -, ?
    |[-—–…?._\s]+)$""": "says that there is no answer",
    r"""(?isx)
    # ["34"], {"34"}, b'34', "34", {answer: 34}, {34: 1}; but not {x: x>2}
    (?<!\^)[\[({]\s*[bru]?['"] | ^[bru]?(['"]).*\1$ | ^\{\s*(?:\w{3,}|\d+)\s*:
    # [34], [$34$], [true], [A], (34,), [34, None]; but not [1,2] or [\frac{n}{2}]
    | ^\[+(?:[^][,;a-z]|\\[a-z]+|true|false|null|none)*\]+$ | ^\[[a-j]\]$
    | ^[(\[].*,\s*[)\]]$ | ^[(\[].*\b(?:nan|none|null)\b.*[)\]]$
    # 34 ||| 35, 34###35; but not |||x|-2|-1|
    | ^[^|]+(?:\|{3}[^|]+)+$ | \w\#{3}\w | \t
    # np.float64(34.0), deque([34]), Fraction(1, 2); but not range(f) or Set(1, 2)
    | ^(?:\w+\.|Union\()*(?-i:
        (?:\w*[Aa]rray|\w*[Mm]atrix|bytes|date\w*|deque|\w*dict\w*|float\d*|list|range|
        \w*set|str|tensor|u?int\d+|[Tt]uple|Counter|Decimal|Float|Fraction|Integer|
        Rational|Union)\(\s*b?[-\d.'"\[({]
    # Interval(0, 1), Interval.open(0, 1), FiniteSet(x), Eq(x, 34)
        | (?:(?:Finite|Image|Condition)Set|Interval(?:\.\w+)?|Eq(?=.*,))\()
    # Answer(34), Namespace(x=34), Row(answer=34); but not Log(34) or Prob(X=2)
    | ^(?:final_?)?(?:answer
        |(?:output|response|result|solution|value|\w*namespace)
            (?=\((?:\w+=|[-\d'"\[{\\$])))\(.*\)$
    | ^\w{3,}\((?:(?:answer|data|result|solution|text|value)=|\w{3,}=['"]).*\)$
    # <Answer: 34>, <answer>34</answer>; but not <12, 5>
    | ^<[a-z]\w+[ :].*>$ | ^<([a-z]+)>.*</\2>$""": (
        "is a list or another object as text: give the answer that it contains"
    ),
    r"^(?!.*\\begin).*\n": "has several lines and marks no answer by \\boxed{} or ####",
    r"""(?ix)^(?!.*\\begin)(?:
    (?:because|since)\s | .*(?: \bhope[ ](?:it|this)(?:[ ]is|'s)\b
    # 72, because 48+24=72; 72, since 48+24=72; but not 12 days since departure
    | [\w$)}]\W+(?:because|therefore|thus(?![ ]far))[,:]?\s+\S | ,[$\s]*since\s.*[=<>]
    # 24 clips in May, so 72 in all; but not 45 pages so far, SO (3) or "fa, so, la"
    | (?-i:[,，][$\s]*so|[.;!][$\s]+[Ss]o):?\s+(?!far\b|on\b|that\b|m(?:any|uch)\b)\S
    | [,.;][$\s]+hence[,:]?\s+\S
    # the same words in Chinese; but not 原因为 (the reason is)
    | [∵∴]\s*\S | (?:^|[\W\d])(?:因[为此為]|所以).))
    """: "reads like a solution: give only its result, or mark it by \\boxed{} or ####",
}
# Matches a place for the problem in an instruction.
PLACEHOLDER = re.compile(
    r"""(?ix)
    # {question}, {{ prompt }}, {}, {row['q']}; but not \boxed{}, x^{2} or {answer}
    (?<![\w\\{}^])(?<!boxed[ ])\{
        (?:[{%] | (?!\s*(?:final_?)?answer)
            \s*[\w.]*(?:\[[^][{}]*\]|\([^(){}]*\))*(?:[!:][\w.]+)?\s*\})
    # %s, %d, %(question)s; but not 100% x
    | (?<![\d\\])%(?:[dis](?!\w)|\(\w+\))
    # <problem>, [your question], $input, #question#; but not [Task] or 【题目】
    | (?![<\[](?:your[ ])?task)
        (?:[<\[$|@«‹]+\{?|<%=[ ]|\(insert[ ]|\#(?=\w+\#)|\\\{|__|%)
        (?:(?:insert|your|the|this|user|input|math)[ _])*
        (?:(?:question|problem|prompt|query|input|task)(?![a-z])|问题|题目)"""
)


def task_of(name_or_path: str) -> Task:
    """Return the task of this name in TASKS, or that of the user's own data.

    The user's data are a folder with train.jsonl and heldout.jsonl, a JSONL file that
    serves as both splits, or a hub dataset owner/name[@revision] with the splits train
    and test. Verifier and instruction are the defaults of Task, unless a task.json
    beside the JSONL sets them, such as {"verifier": "exact", "instruction": null}.

    Raises Refused if there is no such task, or if its task.json cannot be used.
    """
    if name_or_path in TASKS:
        return TASKS[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        train, heldout = path / "train.jsonl", path / "heldout.jsonl"
    elif path.is_file():
        train = heldout = path
    elif re.fullmatch(
        r"\w[\w.-]*/(?!.*\.(jsonl?|csv|parquet|gz|txt)$)\w[\w.-]*(@[\w./-]+)?",
        name_or_path,
    ):
        return Task(f"{name_or_path} train", f"{name_or_path} test")
    else:
        raise Refused(
            f"there is no task {name_or_path!r}: give a file, a folder (such as tiny, "
            f"beside train.py), a hub dataset, or one of {', '.join(TASKS)}"
        )
    settings = train.with_name("task.json")
    try:
        fields = json.loads(settings.read_bytes()) if settings.exists() else {}
        task = Task(train, heldout, **fields)
        text = task.instruction or ""
        check_escapes(text)
        if found := PLACEHOLDER.search(text):
            raise ValueError(
                f"the instruction has a placeholder, {found[0]!r}: the problem follows "
                "the instruction and is not put into it"
            )
    except Exception as error:
        reason = re.sub(r"1 validation error for Task | \[type=.*", "", one_line(error))
        raise Refused(
            f"{settings} cannot be used: {reason}; it may set only verifier "
            f"({', '.join(BUILT_IN_VERIFIERS)}) and instruction, and --verifier "
            "module:name gives your own verifier"
        ) from None
    return task


def load_task(
    name_or_path: str, split: str, verifier: str = ""
) -> list[dict[str, str]]:
    """Return [{"prompt": problem, "answer": gold}, ...] of "train" or "heldout".

    `verifier` replaces that of the task. A built-in verifier can read every gold that
    is returned. In the user's own files, a row that cannot be used is refused. In a hub
    dataset, which the user cannot correct, it is left out and counted on stderr. The
    columns that are not read are also named there.

    Raises OSError if a file cannot be read, and Refused, in one sentence, for an
    unknown task or split or an unusable row.
    """
    task = task_of(name_or_path)
    verifier = verifier or task.verifier
    if verifier == "exact" and "boxed" in (task.instruction or ""):
        raise Refused(
            f"the verifier of {name_or_path!r} is exact, which compares the last word, "
            "but its instruction asks for a box: give another instruction, or null, in "
            "task.json"
        )
    source = getattr(task, split, None)
    if source is None:
        raise Refused(f"the task {name_or_path!r} has no split {split!r}")
    rows = read_jsonl(source) if isinstance(source, Path) else read_hub(source)
    if not rows:
        raise Refused(f"{source} has no rows")
    # `examples` has the first row with each fault.
    problems, unread, examples = [], Counter(), {}
    for number, row in rows.items():
        others = [
            name
            for name in row
            if name not in COLUMNS and row[name] not in (None, "", [], False)
        ]
        unread.update(others)
        try:
            problems.append(problem_of(row, others, verifier))
        except ValueError as fault:
            examples.setdefault(str(fault), f"row {number}: {fault}")
    if examples:
        count = f"{len(rows) - len(problems)} of the {len(rows)} rows of {source}"
        reasons = f"such as {'; '.join([*examples.values()][:3])}"
        if isinstance(source, Path) or not problems:
            raise Refused(f"{count} have to be corrected or removed, {reasons}")
        say_once(f"{count} cannot be used and are left out, {reasons}")
    if unread:
        say_once(
            f"{source}: these columns are not read, but are filled in this many of the "
            f"{len(rows)} rows: {dict(unread)}"
        )
    return problems


def read_jsonl(path: Path) -> dict[int, dict[str, Any]]:
    """Return the objects of a JSONL file by line number, with numbers as written.

    Raises OSError if the file cannot be read, and Refused if a line is not a usable
    JSON object.
    """
    rows = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(
                line.decode("utf-8-sig"),
                parse_int=str,
                parse_float=str,
                parse_constant=lambda name: None,
            )
            rows[number] = {**row}  # TypeError: "is not a mapping"
            check_escapes(" ".join(str(row.get(column)) for column in COLUMNS))
        except Exception as error:  # also RecursionError, for many brackets
            raise Refused(
                f"{path}, line {number} is not a usable JSON object, and a task has "
                f"one per line: {one_line(error)}"
            ) from None
    return rows


def check_escapes(text: str) -> None:
    r"""Raise ValueError if a text from JSON seems to have lost a backslash of LaTeX.

    JSON reads \boxed, \frac and \times as a control character and oxed, rac and imes.
    """
    text.encode()  # This fails on half of a character, such as "\ud83d".
    if found := re.search(
        r"[\b\a][a-z]+|\v(?:ec|ar[a-z]+|dots|ert|ee)(?![a-z])|\f(?:rac|orall|box)|"
        r"\t(?:ext[a-z]*\{|(?:heta|imes|frac)(?![a-z])|riangle)|"
        r"\r(?:ight(?:arrow|[)}\].|\\])|(?:angle|ho)(?![a-z]))|"
        r"\n(?:(?:abla|otin)(?![a-z])|eq\b)",
        text,
    ):
        raise ValueError(
            f"{found[0]!r} was probably written with a single backslash: write two"
        )


def read_hub(source: str) -> dict[int, dict[str, Any]]:
    """Return the rows of "owner/name[@revision] split [configuration]" by number.

    Raises Refused if the rows cannot be loaded, or if loading would change a value.
    """
    from datasets import Features, Value, load_dataset  # takes seconds to import

    name, split, *configuration = source.split()
    repository, revision = split_revision(name)
    load = functools.partial(
        load_dataset, repository, *configuration, split=split, revision=revision
    )
    try:
        rows = load()
        if rows.info.builder_name == "csv":
            # Load it again as texts, so that 025 is not 25.
            texts = Features(dict.fromkeys(rows.features, Value("string")))
            rows = load(features=texts, keep_default_na=False)
        for column in COLUMNS:
            kind, *_ = str(rows.features.get(column)).split("(names")
            if re.search(r"^(Json|ClassLabel)|float(16|32)", kind):
                raise ValueError(
                    f"its {column} has the type {kind} (Json is a mix of texts, "
                    "numbers or lists), and `datasets` changes such values "
                    '("025" to 25, "yes" to 1, 0.1 to 0.10000000149011612): download '
                    "the file, and write its rows to a JSONL file"
                )
        table = rows.data.to_pylist()  # This does not decode pictures.
    except Exception as error:  # many kinds, from the network's to the file format's
        raise Refused(f"{source} cannot be loaded: {explain(error)}") from None
    # datasets caches what it has read from the hub in a folder named by the commit.
    if commit := re.search("/([0-9a-f]{40})/", rows.cache_files[0]["filename"]):
        COMMITS[name] = commit[1]
    # AMO-Bench marks answers that only a person can judge.
    return {
        number: row
        for number, row in enumerate(table, start=1)
        if row.get("answer_type") != "description"
    }


def problem_of(row: dict[str, Any], others: list[str], verifier: str) -> dict[str, str]:
    """Return {"prompt": problem, "answer": gold} of a row.

    `others` are the names of the row's columns that are not read. Raises ValueError,
    with the reason, unless the row has one problem and one gold answer, both of them
    texts, and the problem's text holds the whole problem.
    """
    texts = dict.fromkeys(COLUMNS, "")
    for column in COLUMNS:
        value = row.get(column)
        # The numbers of a hub dataset are answers, but true and NaN are not, and a
        # large integer has lost digits if it was read as a float.
        if type(value) in (str, int) or type(value) is float and abs(value) < 2**53:
            texts[column] = str(value)
        elif value == value is not None:
            raise ValueError(
                f"its {column} is not a text but {str(value)[:60]!r}: write it as a "
                "text in quotes (if it is a chat, write only the user's text)"
            )
    prompts = {texts[column].strip() for column in PROBLEM_COLUMNS} - {""}
    if len(prompts) != 1:
        raise ValueError(
            "its prompt, problem and question differ: keep the one that is complete"
            if prompts
            else f"it has no problem (its columns are {[*row]}): give one in a column "
            "prompt, problem or question"
        )
    [prompt] = prompts
    if part := PART_OF_PROBLEM.search("\n".join(sorted(sorted(others), key=len))):
        raise ValueError(
            f"{' '.join(part[0].split())!r} holds a part of the problem that is not "
            "read, such as choices or a picture: write it into the problem's text, or "
            "remove the column if it is not needed"
        )
    if markup := MARKUP.search(prompt):
        raise ValueError(
            f"its problem has {markup[0].strip()!r}, which belongs to a picture or a "
            "chat: the model's own template is added, so keep only the user's text"
        )
    return {"prompt": prompt, "answer": gold_of(texts, verifier)}


def gold_of(texts: dict[str, str], verifier: str) -> str:
    """Return the gold answer of a row, whose columns are in `texts`.

    For a built-in verifier, the gold answer may be marked in a longer text, such as a
    worked solution. A verifier of the user's own gets the whole text.

    Raises ValueError, with the reason, if there is no answer that can be read.
    """
    text = texts["answer"] or texts["solution"]
    if not text.strip():
        raise ValueError("it has no answer: give one in a column answer or solution")
    if verifier not in BUILT_IN_VERIFIERS:
        return text
    marked = final_answer(text).strip()
    # A heading in Markdown, such as "#### Step 1" above other lines, marks no answer.
    heading = r"####[*_ ]*[^\W\d_]{2}.*\n(?:(?!####)[\s\S])*$"
    if re.search(heading, text) and not last_box(text):
        marked = ""
    if not marked and not texts["answer"]:
        raise ValueError(
            "its solution marks no answer by \\boxed{} or ####: give the answer in a "
            'column "answer"'
        )
    gold = marked or text.strip()
    for pattern, fault in GOLD_FAULTS.items():
        if re.search(pattern, gold):
            raise ValueError(f"its answer {gold[:60]!r} {fault}")
    # No box can hold a gold with an unpaired brace.
    latex = latex_of(gold) if last_box(rf"\boxed{{{gold}}}") == gold else ""
    is_readable = {
        "exact": len(gold.split()) == 1,
        "gsm8k": number_of(latex) is not None,
        "math": latex != "",
    }
    if not is_readable[verifier]:
        raise ValueError(
            f"{gold[:60]!r} is not an answer that {verifier!r} can read (exact: a "
            "word; gsm8k: a number; math: a formula)"
        )
    return gold


class Dataset(NamedTuple):
    """Problems of a task, ready to sample from."""

    problems: list[dict[str, str]]  # {"prompt": ..., "answer": ...}
    prompts: list[list[int]]  # token ids, one prompt for each problem
    verifier: str
    opened: str = ""  # the thought tag that ends the prompts, such as <think>
    own: str = "(?s).*"  # matches the model's own turn, at the beginning of a text

    def own_turn(self, response: str) -> str:
        """Return the text to grade: `opened`, and the response until its turn ends.

        If only text separates the turns of a chat, such as "User:", sampling does not
        stop there, and the model invents the next turns. After its answer, a base model
        often also invents the next problem with its solution.
        """
        return re.match(self.own, self.opened + response)[0]

    def is_unmarked(self, response: str) -> bool:
        """Return whether a response lacks the \\boxed{} or #### that is needed."""
        return self.verifier in ("gsm8k", "math") and not final_answer(
            without_thoughts(self.own_turn(response))
        )

    def golds(self, indices: list[int], samples: int) -> list[str]:
        """Return the gold of each of `samples` responses to each of these problems."""
        return [self.problems[i]["answer"] for i in indices for _ in range(samples)]


def load_split(
    name_or_path: str,
    tokenizer: Any,
    split: str,
    *,
    limit: int = 0,
    room: int,
    drop_long: bool,
    verifier: str = "",
) -> Dataset:
    """Return the first `limit` problems of a task's split (0: all) and their prompts.

    `verifier`, if given, replaces that of the task. With `drop_long`, prompts of more
    than `room` tokens are dropped and counted. Raises Refused if there are such prompts
    without `drop_long`, if no prompt is left, if prompts have two answers on average,
    or if check_texts refuses a text.
    """
    task = task_of(name_or_path)
    problems = load_task(name_or_path, split, verifier)[: limit or None]
    check_texts(tokenizer, task.instruction, problems)
    prompts = [
        encode_prompt(tokenizer, problem["prompt"], task.instruction)
        for problem in problems
    ]
    # A few problems with two different answers are allowed: many large datasets have
    # them.
    if len({*map(repr, problems)}) >= 2 * len({*map(repr, prompts)}):
        raise Refused(
            f"the prompts of {name_or_path} have on average two or more answers (the "
            f"first problem is {problems[0]['prompt'][:50]!r}): a problem is partly in "
            "a column that is not read, recurs with another answer, or is omitted by "
            "the chat template"
        )
    fits = [len(prompt) <= room for prompt in prompts]
    if not all(fits):
        note = (
            f"{fits.count(False)} of {len(prompts)} {split} prompts of {name_or_path} "
            f"have over {room} tokens"
        )
        if not (any(fits) and drop_long):
            raise Refused(
                f"{note}, which is what the model's context, max_response_tokens and "
                "max_prompt_tokens leave for them: change these, or drop such prompts "
                "(train.py: a max_prompt_tokens above 0; eval.py: --drop_long)"
            )
        say_once(f"{note}; these are left out")
    # A chat template may itself open the thoughts, at the end of every prompt.
    prompt = tokenizer.decode(prompts[0]).rstrip()
    tag = last_thought_tag(prompt)
    turn_end = re.escape(text_after_answer(tokenizer, 3).rstrip()) or r"\Z"
    return Dataset(
        [*compress(problems, fits)],
        [*compress(prompts, fits)],
        verifier or task.verifier,
        opened=tag[0] if tag and tag["begin"] and tag.end() == len(prompt) else "",
        own=rf"(?s).*?(?={turn_end}|\Z)"
        if tokenizer.chat_template
        # up to the next problem's instruction or solution, if there is an answer before
        else rf"(?s).*?(?:\\boxed(?!\{{\}})|####).*?(?={BASE_PROMPT_END}|"
        rf"\n\s{{0,9}}{re.escape(task.instruction or BASE_PROMPT_END)}|\Z)|.*",
    )


def check_texts(
    tokenizer: Any, instruction: str | None, problems: list[dict[str, str]]
) -> None:
    """Raise Refused if a text has a special token or a character without a token.

    Blanks, invisible characters and Unicode forms do not matter.
    """
    # Solved examples in an instruction may end with the end-of-sequence token.
    examples = (instruction or "").replace(tokenizer.eos_token or "", "")
    texts = (text for problem in problems for text in problem.values())
    together = "\n".join([examples, *texts])
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and len(token.content) > 1 and token.content in together:
            raise Refused(
                f"the task has the special token {token.content!r} in a problem, an "
                "answer or the instruction: remove it, because only the model's "
                "template or tokenizer may add such tokens"
            )
    characters = "\n".join({*together})
    token_ids = tokenizer.encode(characters, add_special_tokens=False)
    written = normalize("NFKC", tokenizer.decode(token_ids))
    lost = {*normalize("NFKC", characters)} - {*written, " "}
    if visible := [*filter(str.isprintable, lost)]:
        raise Refused(
            f"the model's tokenizer cannot represent {min(visible)!r} of the task (the "
            "policy in tiny/ knows digits and a few other characters): give another "
            "--model"
        )


def encode_prompt(
    tokenizer: Any, problem: str, instruction: str | None = None
) -> list[int]:
    """Return the token ids of a prompt: a user's message, or text for a base model.

    A base model is one whose tokenizer has no chat template. In both cases the prompt
    begins with exactly one beginning-of-sequence token, if the tokenizer or its
    template adds one.
    """
    text = f"{instruction}\n\n{problem}" if instruction else problem
    if not tokenizer.chat_template:
        token_ids = tokenizer.encode(f"{text}{BASE_PROMPT_END}")
        # Some tokenizers append their end-of-sequence token.
        while token_ids[-1] in tokenizer.all_special_ids:
            token_ids.pop()
        return token_ids
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],  # some templates refuse a system turn
            add_generation_prompt=True,
            return_dict=False,
            # A template that prints the date prints the same one in every run.
            strftime_now=datetime(2026, 1, 1).strftime,
        )
    except Exception as error:  # the template may raise anything
        raise Refused(f"the model's chat template fails: {one_line(error)}") from None


def text_after_answer(tokenizer: Any, turns: int) -> str:
    """Return the text after an answer, up to the user's next turn or to the end.

    The conversation is made up; `turns` (2 or 3) is its length. The result is "" if
    there is no chat template, or if it does not show an assistant's turn.
    """
    conversation = [
        {"role": role, "content": f"{role} text"}
        for role in ("user", "assistant", "user")[:turns]
    ]
    # A template may raise any exception, as does a tokenizer without a template.
    with suppress(Exception):
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        return text.partition("assistant text")[2].partition("user text")[0]
    return ""


def check_same_on_ranks(*inputs: Any) -> None:
    """Raise Refused, on all ranks, if these inputs of a run differ. A collective.

    Nodes may be given different commands, or different copies of a task.
    """
    import torch.distributed as dist  # not at the top: reward.py needs no torch

    digests: list = [None] * dist.get_world_size()
    dist.all_gather_object(digests, sha256(repr(inputs).encode()).hexdigest())
    if len({*digests}) > 1:
        raise Refused(
            "the ranks have different flags, problems or prompts: give all nodes the "
            "same command, and the same copy of the task and of the model's tokenizer"
        )


@functools.cache
def say_once(note: str) -> None:
    """Print a note for the user on stderr, only once and only on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(note, file=sys.stderr)

"""How problems are loaded, which of them are refused, and how prompts are made."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TORCHRUN
from hub import COMMIT, Hub
from launch import run_command, start_node

from reward import VERIFIERS, check_verifier, compute_rewards
from support.command import Refused, Stopped
from support.config import Config, EvalConfig
from support.hub import COMMITS, explain, split_revision
from support.tasks import (
    BUILT_IN_VERIFIERS,
    PLACEHOLDER,
    Dataset,
    check_texts,
    encode_prompt,
    gold_of,
    load_split,
    load_task,
    problem_of,
    task_of,
)


def tokenizer_with(template: str | None = None, pattern: str = "$A") -> Any:
    """Return a real tokenizer of single ASCII characters, with <s> and </s>.

    `template` is its chat template, if any; `pattern` is what it adds to a text, $A.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(128)}
    vocabulary |= {"<s>": 128, "</s>": 129}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=[("<s>", 128), ("</s>", 129)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="?",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def write(path: Path, *rows: dict | str) -> str:
    """Write a JSONL file of these rows, or lines; return its path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Dataset]:
    """Writes rows to a file and loads it, with no instruction unless one is given."""

    def load(
        *rows: dict | str,
        template: str | None = None,
        instruction: str = "null",
        **options: Any,
    ) -> Dataset:
        (tmp_path / "task.json").write_text(f'{{"instruction": {instruction}}}')
        name = write(tmp_path / "t.jsonl", *rows)
        options = {"room": 99, "drop_long": False} | options
        return load_split(name, tokenizer_with(template), "train", **options)

    return load


def cells_of(table: str) -> list[str]:
    """Return the cells of a table, which a | or the end of a line divides."""
    return re.split(r" \| |\n", table.strip())


def own(*problems: str) -> list[dict]:
    """Return rows whose problems are their own answers."""
    return [{"prompt": text, "answer": text} for text in problems]


# --- the tasks that are known by name


@pytest.fixture
def hub_folders(monkeypatch, tmp_path):
    """`datasets` takes a folder of tests/data for the hub dataset of that name."""
    import datasets

    monkeypatch.chdir(ROOT / "tests/data")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()


LOADED_ANSWERS = r"""
gsm8k train -> 84; 3,600
gsm8k heldout -> -3
math heldout -> \left( 5, \frac{\pi}{2} \right); \text{Sunday}
math500 heldout -> \left( 5, \frac{\pi}{2} \right); \text{Sunday}
deepscaler train -> 8; (x-3)(x+3)
deepscaler heldout -> 035
aime2024 heldout -> 035
aime2025 heldout -> 70
aime2026 heldout -> 0
amc23 heldout -> 9
amo-bench heldout -> \sqrt{2}; \frac{n(n+1)}{2}
"""


@pytest.mark.parametrize("row", LOADED_ANSWERS.strip().splitlines())
def test_a_dataset_loads_from_its_own_columns(hub_folders, row):
    name, answers = row.split(" -> ")
    problems = load_task(*name.split())
    assert "; ".join(problem["answer"] for problem in problems) == answers
    assert all(len(problem["prompt"]) > 10 for problem in problems)


def test_rows_of_a_hub_dataset_without_a_marked_answer_are_left_out(
    hub_folders, capsys
):
    answers = [problem["answer"] for problem in load_task("math", "train")]
    assert len(answers) == 8 and answers[:3] == ["4", r"\frac{1}{3}", r"\sqrt{2}"]
    assert answers[5] == "6"  # which follows the box of an intermediate result
    # Row 8 has \boxed 2, without braces, and row 10 ends with "so x is 2."
    note = (
        "2 of the 10 rows of .*lighteval train cannot be used and are left out, such "
        r"as row 8: its solution marks no answer by \\boxed{} or ####: [^;]*\n"
    )
    said = capsys.readouterr().err
    assert re.search(note, said)
    assert re.search(
        "lighteval train: these .* of the 10 rows: {'level': 10, 'ty", said
    )


def test_the_embedded_task_is_disjoint_and_right():
    train, heldout = load_task("tiny", "train"), load_task("tiny", "heldout")
    train_prompts = {problem["prompt"] for problem in train}
    assert train_prompts.isdisjoint(problem["prompt"] for problem in heldout)
    for problem in train + heldout:
        a, b = problem["prompt"].split("+")
        assert int(a) + int(b) == int(problem["answer"])


UNKNOWN_TASKS = """
gsm9k train -> no task 'gsm9k': .*tiny, .* gsm8k, math
data/x.parquet train -> no task 'data/x.parquet'
nosuch/file.jsonl train -> no task 'nosuch/file.jsonl'
aime2024 train -> 'aime2024' has no split 'train'
tiny test -> 'tiny' has no split 'test'
"""


@pytest.mark.parametrize("row", UNKNOWN_TASKS.strip().splitlines())
def test_an_unknown_task_or_split_is_refused(row):
    name, message = row.split(" -> ")
    with pytest.raises(Refused, match=message):
        load_task(*name.split())


def test_a_task_may_name_the_verifiers_of_reward_py():
    assert BUILT_IN_VERIFIERS == tuple(VERIFIERS)


def test_a_file_that_a_folder_lacks_is_named():
    with pytest.raises(OSError, match="No such file .*'tests/train.jsonl'"):
        load_task("tests", "train")


# --- datasets of the hub, by its real clients


LOAD_SCRIPT = """
import json, os, resource, sys
from support.command import Refused
from support.hub import COMMITS
from support.tasks import load_task
found = {}
for name in sys.argv[1:]:
    if name == "owner/large":  # no file may grow beyond this: the disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))
    try:
        if "model" in name:
            from support.models import model_folder
            found[name] = sorted(os.listdir(model_folder(name)))
        else:
            found[name] = load_task(name, "train")[-1:]
    except Refused as error:
        found[name] = str(error)
print(json.dumps([found, COMMITS]))
"""
ROW = '{"question": "5*5?", "answer": "025"}\n'
DATASETS = {
    "plain": ROW,
    "mixed": ROW + '{"question": "2+2?", "answer": 4}\n',
    "empty": "",
    "torn": ROW + "{",
    "large": ROW * 999,
}


@pytest.fixture(scope="module")
def from_hub(tmp_path_factory) -> Callable[..., tuple[dict, dict]]:
    """Loads from an imitated hub in a process, and also returns its COMMITS.

    What is loaded is the last row of a dataset, or the names of a model's files.
    """
    repositories = {
        f"datasets/owner/{name}": {"train.jsonl": text}
        for name, text in DATASETS.items()
    }
    repositories["datasets/owner/other"] = {"validation.jsonl": ROW}
    # pandas infers the types of a table's columns anew every 10,000 rows.
    late = "no\n5*5?," * 10_000 + "025"
    for name, answers in (("table", late), ("large_number", "9" * 20)):
        table = f"question,answer\n5*5?,{answers}\n"
        repositories[f"datasets/owner/{name}"] = {"train.csv": table}
    types = {"label": "{class_label: {names: {'0': 'no', '1': 'yes'}}}"}
    types["float"] = "float32"
    for name, dtype in types.items():
        question, answer = (
            "name: question, dtype: string",
            f"name: answer, dtype: {dtype}",
        )
        features = f"{{dataset_info: {{features: [{{{question}}}, {{{answer}}}]}}}}"
        repositories[f"datasets/owner/{name}"] = {
            "README.md": f"---\n{features}\n---\n",
            "train.jsonl": '{"question": "5*5?", "answer": 1}\n',
        }
    names = ("config.json", "model-1.safetensors", "README.md", "modeling.py")
    repositories["owner/model"] = dict.fromkeys(names, "{}")
    faults = {
        "datasets/owner/gated": (403, "GatedRepo"),
        "owner/gated_model": (403, "GatedRepo"),
        "datasets/owner/down": (500, ""),
    }
    home = tmp_path_factory.mktemp("home")
    environment = {
        "HF_ENDPOINT": Hub(repositories, faults).address,
        "HF_HOME": str(home),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }

    def load(*names: str, **variables: str) -> tuple[dict, dict]:
        done = subprocess.run(
            [sys.executable, "-c", LOAD_SCRIPT, *names],
            cwd=ROOT,
            env=os.environ | environment | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found, commits = json.loads(done.stdout)
        return found, commits

    load.cache = home / "datasets"
    return load


UNREADABLE_NAMES = {
    "owner/plain@nope": "it has no such revision: give a branch, a tag or a commit",
    "owner/none": "there is no such folder or repository.*`hf auth login` or HF_TOKEN",
    "owner/gated": ".*or it is gated or private: .*'owner/gated' is a gated dataset",
    "owner/mixed": r'its answer has the type Json.* mix .* changes .*\("025" to 25',
    "owner/label": (
        "its answer has the type ClassLabel.*, and `datasets` changes such values"
    ),
    "owner/float": r"its answer has the type Value\('float32'\) .* 0.1 to 0.1000",
    "owner/large_number": "a column .* an integer of over 18 digits: download the file",
    "owner/empty": "it has no rows",
    "owner/torn": "a file is damaged, .* HF_DATASETS_CACHE, .*JSON parse error: Mis",
    "owner/other": "only the splits train and .*.Unknown split .train",
    "owner/model@nope": "it has no such revision: give a branch, a tag or a commit",
    "owner/no_model": "there is no such folder or repo.*`hf auth login` or HF_TOKEN",
    "owner/gated_model": ".*or it is gated or private: ",
    "owner/large": "the cache cannot be written: .*HF_HOME.*Errno 27. File too large",
}


@pytest.mark.slow
def test_what_the_hub_has_is_read_at_a_commit_or_a_sentence_says_why_not(from_hub):
    readable = "plain", "plain@v1", "table", "model", "model@v1"
    readable = [f"owner/{name}" for name in readable]
    found, commits = from_hub(*readable, *UNREADABLE_NAMES)
    expected = [{"prompt": "5*5?", "answer": "025"}]
    files = ["config.json", "model-1.safetensors"]  # no code
    assert [found[name] for name in readable] == 3 * [expected] + 2 * [files]
    assert commits == dict.fromkeys(readable, COMMIT)
    for name, sentence in UNREADABLE_NAMES.items():
        start = f"(no model at '{name}'|{name} train cannot be loaded): "
        assert re.match(start + sentence, found[name]), found[name]
        assert "\n" not in found[name]

    # Offline, the cache serves what was read before, until it is damaged.
    found, commits = from_hub("owner/plain", "owner/none", HF_HUB_OFFLINE="1")
    assert found["owner/plain"] == expected and commits == {"owner/plain": COMMIT}
    assert (
        "HF_HUB_OFFLINE is set, and the cache has no usable copy" in found["owner/none"]
    )
    [file] = from_hub.cache.glob("owner___plain/*/*/*/*.arrow")
    os.truncate(file, 99)
    found, _ = from_hub("owner/plain", HF_HUB_OFFLINE="1")
    assert re.search("a file is damaged.*metadata bytes", found["owner/plain"])


CAUSES = """
[Errno 2] x | [Errno 13] x | [Errno 20] x | [Errno 28] x -> the cache cannot be written
[Errno 27] x | [Errno 30] x | [Errno 122] x -> the cache cannot be written
OfflineModeIsEnabled: x | Couldn't find cache for x -> HF_HUB_OFFLINE is set
error 401 x | RepositoryNotFoundError: | DatasetNotFoundError: x -> there is no such
error 429 x | error 502 x | ConnectError: x | ReadTimeout: x -> the hub does not answer
LocalEntryNotFoundError: x | FileMetadataError: x -> the hub does not answer
Found no data! | EmptyDataError: x | StopIteration: x -> it has no rows
x because column names don't match -> its files have different columns: download
Dataset scripts are no longer supported -> it is loaded by a program, and a dataset must
Unknown split x | Config name is missing -> only the splits train and test of a dataset
column changed from string | Failed to parse string: 'x' -> a column has texts in some
ArrowInvalid: x | JSONDecodeError: x | SafetensorError: x -> a file is damaged
another error -> An error occurred while loading
"""


@pytest.mark.parametrize("row", CAUSES.strip().splitlines())
def test_a_failure_of_the_hub_is_explained_by_its_cause(row):
    causes, meaning = row.split(" -> ")
    for cause in causes.split(" | "):
        # The libraries wrap the cause in an error that says nothing.
        error = ValueError("An error occurred while loading")
        error.__cause__ = ValueError(cause)
        assert explain(error).startswith(meaning), cause


@pytest.mark.slow
def test_a_hub_that_is_down_is_named_with_the_way_around_it(from_hub):
    found, _ = from_hub("owner/down")  # its clients try for half a minute
    assert re.search(
        "try again later, or set HF_HUB_OFFLINE=1.*500", found["owner/down"]
    )


def test_a_resumed_run_reads_the_commit_that_its_config_records(monkeypatch):
    monkeypatch.setitem(COMMITS, "owner/name", COMMIT)
    assert split_revision("owner/name") == ("owner/name", COMMIT)
    assert split_revision("owner/name@v1") == ("owner/name", "v1")
    assert split_revision("owner/another") == ("owner/another", None)
    assert task_of("owner/name@refs/pr/1").heldout == "owner/name@refs/pr/1 test"


# --- files and folders of the user's own


def test_a_file_is_both_splits_and_a_folder_has_two(tmp_path):
    for name in ("train", "heldout"):
        write(tmp_path / f"{name}.jsonl", {"prompt": name, "answer": 2})
    file = str(tmp_path / "train.jsonl")
    assert load_task(file, "heldout") == [{"prompt": "train", "answer": "2"}]
    assert load_task(str(tmp_path), "heldout") == [{"prompt": "heldout", "answer": "2"}]


# Data must not run code, so a task.json cannot name a verifier such as os:system.
UNUSABLE_SETTINGS = r"""
{"verifer": "exact"} -> task\.json cannot be used: verifer
{"verifier": "exakt"} -> task\.json cannot be used: .*should be 'exact', 'gsm8k'
{"verifier": "os:system"} -> \(exact, .*--verifier module:name gives your own verifier$
{"verifier": "exact"} -> is exact, .* asks for a box: give another instr
{"instruction": 7} -> used: instruction Input should be a valid string; it may
{"instruction": "\ud83d"} -> surrogates not allowed
{"instruction": "Use \boxed{}."} -> '\\x08oxed' was probably written with a single
{"instruction": "Solve {question}."} -> a placeholder, '{question}': the pro
{"verifier":  -> Expecting value
[1] -> mapping
"""


@pytest.mark.parametrize("row", UNUSABLE_SETTINGS.strip().splitlines())
def test_an_unusable_task_json_is_refused(tmp_path, row):
    content, message = row.split(" -> ")
    write(tmp_path / "train.jsonl", *own("5"))
    write(tmp_path / "task.json", content)
    with pytest.raises(Refused, match=message) as said:
        load_task(str(tmp_path), "train")
    assert "\n" not in str(said.value) and "https" not in str(said.value)


# One instruction a line.
PLACEHOLDERS = r"""
{question} | {{ prompt }} | {} | {0} | {q!r} | {q:.2f} | {% if %} | {item['q']}
{row.get("q")} | %s | a %d | %(q)s | ${x} | $input | <problem> | <user_question>
<the problem> | [your question] | [Insert question here] | \{question\} | <|prompt|>
«question» | <%= question %> | #question# | (insert problem here) | [insert task here]
"""
INSTRUCTIONS = r"""
Use \boxed{}, \boxed {x} or $\frac{a}{b}$, x^{2} and \text{ cm}. | 100% x | 100%d
Write <think> and your thoughts on the problem. | [your answer] | $\{1, 2\}$
#### {answer} | \boxed{{}} | # The problem | (the problem) | [Task] | <task>Add.</task>
【题目】 | [Your task]
"""


def test_an_instruction_with_a_placeholder_is_told_from_one_with_latex():
    for lines, is_bad in ((PLACEHOLDERS, True), (INSTRUCTIONS, False)):
        for text in cells_of(lines):
            assert bool(PLACEHOLDER.search(text)) == is_bad, text


GOOD_ROW = '{"prompt": "1+1", "answer": "2"}\n'


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no rows"),
        (GOOD_ROW + '{"prompt": "1+', "line 2 is not a usable JSON object"),
        ("7\n", "line 1 is not a usable JSON object"),
        # The other patterns are not searched in a long text.
        ('{"prompt": "1", "answer": "' + "-" * 301 + '"}', "has over 300 characters"),
        (
            f"[{GOOD_ROW}]",
            "line 1 is not a usable JSON object, and a task has one per line: ",
        ),
        ("\xff\xfe[\0", "line 1 is not a usable JSON object.* 'utf-8' codec"),  # UTF-16
        ('{"prompt": "\\ud83d"}', "line 1 is not .* surrogates not allowed"),
        # JSON reads \f, \t and \r as control characters.
        (
            r'{"prompt": "1", "answer": "\frac{1}{2}"}',
            r"'\\x0crac' was probably written",
        ),
        (r'{"prompt": "2\times3", "answer": "6"}', r"'\\times' was probably written"),
        (r'{"prompt": "2", "answer": "\left(2\right)"}', "not a usable .*escape"),
        # Blank lines count, so that the number is that of an editor.
        (
            GOOD_ROW + '\n\n{"prompt": "1+1", "answer": NaN}\n',
            "1 of the 2 .* have to be corrected or removed, such as row 4: it has no",
        ),
        (
            '{"x": "2"}\n' + GOOD_ROW + '{"prompt": "1", "answer": "}{"}\n' * 3,
            "4 of the 5 .* row 1: it has no problem .its columns are .'x'..: give one "
            "in a column prompt, problem or question; row 3: '}{' is not an answer",
        ),
    ],
)
def test_an_unusable_file_is_refused_by_name_and_line(tmp_path, content, message):
    (tmp_path / "t.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(Refused, match=message) as said:
        load_task(str(tmp_path / "t.jsonl"), "train")
    assert "t.jsonl" in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize("number", ["1e-12", "24.0", "0.50", "9" * 200])
def test_numbers_and_dates_are_read_as_they_are_written(number, tmp_path):
    line = f'{{"prompt": "2026-01-01", "answer": {number}, "x": NaN}}\r\n \n'
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode())
    problems = load_task(str(tmp_path / "t.jsonl"), "train")
    assert problems == [{"prompt": "2026-01-01", "answer": number}]


# --- what a row must not have

# Rows and the reason for which each is refused, or none for a row that can be used.
UNUSABLE_ROWS = r"""
{"prompt": [{"role": "user"}]} -> not a text but .*'user'.*: write it .*the user's
{"answer": ["2"]} -> answer is not a text but \"\['2'\]\"
{"answer": true} -> answer is not a text but 'True'
{"answer": null, "solution": "2"} -> its solution marks no answer .*column \"answ
{"answer": "1 and 1\nare 2."} -> has several lines and marks no answer
{"answer": "\\boxed{5"} -> '.*boxed.5' is not an answer that 'math' can read
{"answer": "5}"} -> '5}' is not an answer that 'math' can read
{"answer": "#### Step 1\n6*7 = 42"} -> has several lines and marks no answer
{"question": "What is 1+2?"} -> prompt, problem and question differ
{"Options": ["2", "3"]} -> 'Options' holds a part of the problem
{"decoded_image": "x.png"} -> 'decoded_image' holds a part
{"(A)": "2", "url": "x", "(B)": "3"} -> '\(A\) \(B\)' holds a part
{"1": "2", "2": "3", "3": "4"} -> '1 2' holds a part
{"prompt": "<image>Find x."} -> its problem has '<image>'
{"prompt": "<image_1>Find x."} -> its problem has '<image_1>'
{"prompt": "<video>Find x."} -> its problem has '<video>'
{"prompt": "Find x. ![](https://x/y.png)"} -> its problem has '!\[\]\(https://x/y.png\)'
{"prompt": "[IMAGE: a circle] Find x."} -> its problem has '\[IMAGE: a circle\]'
{"prompt": "<|im_start|>user\n1+1<|im_end|>"} -> has '<\|im_start\|>', which
{"prompt": "<start_of_turn>user\n1+1"} -> has '<start_of_turn>'
{"prompt": "<reserved_106>1+1"} -> has '<reserved_106>'
{"prompt": "user<|im_sep|>1+1"} -> has '<\|im_sep\|>'
{"prompt": "[INST] 1+1 [/INST]"} -> has '\[INST\]'
{"prompt": "1+1\n\n### Response:\n"} -> has '### Response:'
{"prompt": "1+1\n### Answer"} -> has '### Answer'
{"prompt": "Query: 1+1\nResponse:"} -> has 'Response:'
{"prompt": "Query: 1+1 ### Response:"} -> has '# Response:'
{"prompt": "User: 1+1\nAssistant: <think>"} -> has 'Assistant: <think>'
{"prompt": "[{\"role\": \"user\", \"content\": \"1+1\"}]"} -> has '\"role\":'
{"prompt": "[{\"from\": \"human\", \"value\": \"1+1\"}]"} -> has '\"from\":'
{"prompt": "如图![](x/y)"} -> has '!\[\]\(x/y\)'
{"prompt": "Find x![](y.png)"} -> has '!\[\]\(y.png\)'
{"prompt": "1+1\n* # *\n## ## Output"} -> has '## ## Output'
{"prompt": "Simplify n![x^n](e^{x/2})."} ->
{"prompt": "An edge is {\"from\": 1, \"to\": 2}."} ->
{"prompt": "An edge is {\"from\": \"A\", \"to\": \"B\"}."} ->
{"prompt": "1+1\n### Response time"} ->
{"prompt": "<role>HUMAN</role>1+1"} -> has '<role>'
{"prompt": "<extra_id_1>User\n1+1"} -> has '<extra_id_1>'
{"prompt": "1+1\n<think>\n\n</think>\n"} -> has '</think>'
"""


@pytest.mark.parametrize("case", UNUSABLE_ROWS.strip().splitlines())
def test_a_row_without_one_whole_problem_and_one_gold_is_refused(case, load):
    row, reason = case.split(" ->")
    row = {"prompt": "1+1", "answer": "2"} | json.loads(row)
    refused = pytest.raises(Refused, match=f"1 of the 2 rows .* row 2:.*{reason}")
    with refused if reason else nullcontext():
        load(GOOD_ROW.strip(), row)


def test_a_number_of_the_hub_is_a_gold_unless_its_digits_may_be_lost():
    row = {"prompt": "1+1", "answer": 2.0**53}
    with pytest.raises(ValueError, match="but '9007199254740992.0': write it as"):
        problem_of(row, [], "math")
    with pytest.raises(ValueError, match="it has no answer"):
        problem_of(row | {"answer": math.nan}, [], "math")
    for number in 2**53 + 1, 2.0**53 - 1, -0.5:
        assert problem_of(row | {"answer": number}, [], "math")["answer"] == str(number)


# The columns of a row, which hold a part of the problem or only facts about one.
PARTS = """
answer_choices | possible_answers | mc1_targets | mcq | endings | Incorrect Answer 1
opb | choice1 | option_a | ans_1 | A, B | a, b, c | wrong_answers | candidates
images | img_path | image_id | visual | svg | Context | Figure 1 | chart | screenshot
a1, a2 | alternative_b | alternativas | opciones | 选项 | potential_answers | mc_answer1
png_path | fig1 | pics | plot | illustration | 图片 | 图 | 图1 | 题目_图像 | 题目图片
o1, o2
"""
FACTS = """
num_images | chart_type | paragraph_id | topic_graph_theory | graph_theory | has_image
geography | optional | adoption_year | visualized | context_length | tags_graph | a, b
wrong_rate | requires_image | contains_diagram | number_of_options | wrong_solutions
n_choices | table | level | source | idea | A, c | body_temperature | mcmc | 意图 | 地图
o1 | o1, o3
"""


def test_columns_that_hold_a_part_of_the_problem_are_told_from_facts_about_one():
    for lines, is_part in ((PARTS, True), (FACTS, False)):
        for columns in cells_of(lines):
            row = {"prompt": "1+1", "answer": "2"}
            refusal = pytest.raises(ValueError, match="holds a part of the problem")
            with refusal if is_part else nullcontext():
                problem_of(row, columns.split(", "), "math")


def test_columns_that_are_not_read_are_named_once_with_their_rows(load, capsys):
    rows = own("1", "2", "3")
    rows[0] |= {"table": "1|2", "image": None, "choices": [], "a": 5, "b": 7}
    rows[2] |= {"table": "3|4", "messages": [{"role": "user"}], "optional": "x"}
    rows[1] |= {"num_images": 3}
    for _ in range(2):
        assert len(load(*rows).problems) == 3
    note = "these columns are not read, but are filled in this many of the 3 rows: "
    note += (
        "{'table': 2, 'a': 1, 'b': 1, 'num_images': 1, 'messages': 1, 'optional': 1}"
    )
    assert capsys.readouterr().err.count(note) == 1
    load(*own("1"))
    assert capsys.readouterr().err == ""


def test_problems_that_most_often_have_several_golds_are_refused(load):
    # The same instruction, or one of two paraphrases, and the problem in another column
    for prompts in (["Solve it."], ["Solve it.", "Please solve it."]):
        golds = range(2 * len(prompts))
        rows = [{"prompt": prompts[n // 2], "answer": n, "text": n} for n in golds]
        with pytest.raises(Refused, match="answers .the first problem is 'Solve "):
            load(*rows)
        # If only some problems have two golds, or the golds are equal, these are used.
        assert len(load(*rows[1:], *own("7")).problems) == len(rows)
        assert len(load(rows[0], rows[0]).problems) == 2


GOLDS_WITHOUT_ANSWER = r"""
nan | None | null | N/A | N / A | n.a. | NA | pd.NA | <NA> | NaT | - | — | ? | Proof.
\text{N/A} | not found | (see solution) | No final answer was found. | no_answer
[deleted] | The proof is above. | Answers may vary. | #REF! | Answer: none | <unk>
The answer is not given | answer not found | \square | ∎ | 证明略 | pending
Sample answer | 略。 | 略，见上 | （略） | #NAME? | #BEZUG! | Err:502
"""
CONTAINERS = r"""
["34"] | ['$34$'] | {"answer": "34"} | {answer: 34} | {'34'} | ('34',) | (34,) | [34]
[] | [true] | b'34' | "34" | array(['34'], dtype=object) | array([34]) | Fraction(1, 2)
Decimal('34') | np.float64(34.0) | deque([34]) | tensor(34) | <answer>34</answer>
Answer(34) | Result(value=34) | <Answer: 34> | Namespace(x=34) | Interval(0, 1)
FiniteSet(1, 2) | {34: 1} | [$34$] | [\frac{1}{2}] | [34, None] | [A] | 34 ||| 35
$34$|||$35$|||36 | Union(Interval(0, 1), Interval(2, 3))
Row(answer=34) | Word(text='A') | Answer(A)
"""
SOLUTIONS = r"""
72, because 48 + 24 = 72 | 72, since 48+24=72 | 24 clips in May, so 72 in all
x<0, so |x|=5 | 48+24=72; thus, 72 | 48+24=72. Hence 72 | 48+24=72, therefore, 72
Since x=2, y=3 | I hope it's correct | $x=2$, so $y=3$
x>0，所以x=5 | 因此x=5 | ∵x>0，∴x=2 | x=2! So y=3
"""
GOLDS = r"""
45\text{ pages so far} | 12 days since departure | AS = SO \sqrt{2} | \mathfrak{so}(3)
\text{all } n \text{ so that } 3 \mid n | Therefore 72 | thus far 7 | 原因为温度
do, re, mi, fa, so, la, ti | 1, 2, 3, so on | 5 \text{ hours since } t = 0
Na | -5 | no | [2,5] | [1,2,3] | (1,2) | \{1,2\} | <1,2> | <x,y> | f(2) | Log(2) | A(3)
y^{''} | 5'10" | A' | np.arcsin(1./2) | \emptyset | \text{None of these} | undefined
[0, 1) | x=[2] | \{x: x>2\} | True | no solution | unknown | 12:30 | nat | square
[\frac{n}{2}] | [1;2] | {x: x>2} | sample variance | P(X=2) | The solution is 5
先手有必胜策略 | 策略梯度 | 战略优势 | 略大于3 | |||x|-2|-1| | 2|||x|-2|-1| | Prob(X=2)
range(f) | Range(f) | Set(1, 2) | Union(A, B) | Rank(A) | Span({1, 2})
max([1, 2]) | prob(sum=7) | Value(f) | error | #3 | 5!!
"""


def test_golds_that_are_containers_or_solutions_or_say_there_is_none_are_refused():
    for lines, fault in (
        (GOLDS_WITHOUT_ANSWER, "says that there is no answer"),
        (CONTAINERS, "is a list or another object as text"),
        (SOLUTIONS, "reads like a solution"),
        (GOLDS, None),
    ):
        for gold in cells_of(lines):
            for verifier in ("math", "exact") if fault else ("math",):
                try:
                    said = gold_of({"answer": gold, "solution": ""}, verifier)
                except ValueError as error:
                    said = str(error)
                sentence = f"its answer {gold!r} {fault}" if fault else gold
                assert said.startswith(sentence)


# --- verifiers of the user's own


def length_of_digits(responses: list[str], golds: list[str]) -> list[float]:
    """Give the length of a response of digits, as a share of the gold's length."""
    pairs = zip(responses, golds, strict=True)
    return [len(text) * text.isdigit() * (1 / len(gold)) for text, gold in pairs]


def test_a_verifier_of_ones_own_gets_whole_golds_and_gives_parts_of_a_reward(load):
    gold = "  x = 1  #### 3 spaces\nprint(x) \\boxed{2}"
    rows = [*own("7" * 49, "56"), {"prompt": "Write.", "answer": gold}]
    dataset = load(*rows, verifier="test_tasks:length_of_digits")
    assert dataset.problems[2]["answer"] == gold
    check_verifier(dataset)
    # In floating point 49 * (1 / 49) is 0.9999999999999999.
    rewards = compute_rewards(dataset, [0, 1], ["7777777", "7" * 49, "", "5"])
    assert rewards == [0.142857, 1.0, 0.0, 0.5]
    sentence = "test_tasks:length_of_digits fails on the response '123' with the gold"
    with pytest.raises(Stopped, match=f"{sentence} answer '56': it gave .1.5."):
        compute_rewards(dataset, [0, 1], ["1", "123"])


# Functions of responses and golds, in parameters of any names, and functions that are
# refused, with the reason.
FUNCTIONS = r"""
f(answers, golds): return [0.0, 0.5] ->
f(samples, golds): return [0.0, 0.5] ->
f(texts, expected_outputs): return [0.0, 0.5] ->
f(x, references): return [True, False] ->
f(refined_texts, target_outputs): return [0.0, 0.5] ->
f(outputs, sample_answers): return [0.0, 0.5] ->
f(prompts, completions, **others): return [1.0, 1.0] -> begin with prompts completions
f(data_source, solution_str, ground_truth): return 1.0 -> begin with data_source solut
f(queries, prompts, labels): return [1.0, 1.0] -> begin with queries prompts
f(doc, results): return [1.0, 1.0] -> begin with doc results
f(args, sample): return [1.0, 1.0] -> begin with args sample
f(reference, hypothesis): return [1.0, 1.0] -> begin with reference hypothesis
f(golds, responses): return [1.0, 1.0] -> begin with golds responses
f(y_true, y_pred): return [1.0, 1.0] -> begin with y_true y_pred
f(completions, *, answer): return [1.0, 1.0] -> takes 1 positional argument but 2 were
f(response, gold): return 1.0 -> fails on the response '' .*not iterable
f(texts, golds): return [float(t[0]["x"]) for t in texts] -> the response '' .*out of r
f(texts, golds): return [-1.0] * len(golds) -> fails .*it gave \[-1.0\], not a number in
f(texts, golds): return [1.0] -> 2 responses together, .* alone: it gave \[1.0\], not
f(texts, golds): return [None] * len(golds) -> fails .*not 'NoneType'
f(texts, golds): exit("no key") -> no key
g(texts, golds): return [1.0, 1.0] -> no attribute 'f'
"""


@pytest.mark.parametrize("case", FUNCTIONS.strip().splitlines())
def test_a_verifier_that_cannot_score_is_refused_before_anything_is_built(
    case, load, tmp_path, monkeypatch
):
    function, reason = case.split(" ->")
    write(tmp_path / "mine.py", f"def {function}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    sentence = f"--verifier mine:f: .*{reason.strip()}.*; give exact,"
    refused = pytest.raises(Refused, match=sentence)
    with refused if reason else nullcontext():
        check_verifier(load(*own("7"), verifier="mine:f"))


@pytest.mark.parametrize("script", ["train", "eval"])
def test_the_flag_verifier_replaces_that_of_the_task(script):
    import eval
    import train

    flags = ["--verifier", "gsm8k"]
    if script == "train":
        dataset = train.load_data(Config.from_flags(flags))[1]
    else:
        dataset = eval.load_benchmarks(EvalConfig.from_flags(flags))["tiny"]
    assert task_of("tiny").verifier == "exact"
    assert dataset.verifier == "gsm8k"  # 30.0 is 30 as a number, not as a word
    gold = dataset.problems[0]["answer"]
    assert compute_rewards(dataset, [0], [rf"\boxed{{{gold}.0}}"]) == [1.0]


# --- prompts

CHAT = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


# With `pattern`, a tokenizer adds special tokens to a text. Those with which a template
# begins a prompt are not doubled, and no prompt ends with the end of sequence.
@pytest.mark.parametrize(
    "template, pattern, instruction, text",
    [
        (CHAT, "$A", "Think.", "<user>Think.\n\n1+1<assistant>"),
        (CHAT, "$A", None, "<user>1+1<assistant>"),
        ("{{bos_token}}" + CHAT, "<s> $A", None, "<s><user>1+1<assistant>"),
        ("{{ strftime_now('%Y%m%d') }}", "$A", None, "20260101"),  # on any day
        (None, "$A", "Think.", "Think.\n\n1+1\n\nSolution:"),
        (None, "<s> $A", None, "<s>1+1\n\nSolution:"),
        (None, "<s> $A </s>", None, "<s>1+1\n\nSolution:"),
    ],
)
def test_a_prompt_follows_the_chat_template_if_there_is_one(
    template, pattern, instruction, text
):
    tokenizer = tokenizer_with(template, pattern)
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1", instruction)) == text


def test_a_limit_takes_the_first_problems_and_their_prompts(load):
    dataset = load(*own("1", "22", "333"), limit=2)
    assert dataset.problems == own("1", "22")
    # "\n\nSolution:" has 11 characters, which are tokens here.
    assert [len(prompt) for prompt in dataset.prompts] == [12, 13]
    assert len(load(*own("1", "22", "333")).problems) == 3


def test_prompts_without_room_are_refused_or_left_out_and_counted(load, capsys):
    rows = own("11+1", "1+1", "2+22")
    dataset = load(*rows, room=14, drop_long=True)
    assert dataset.problems == own("1+1")
    assert [len(prompt) for prompt in dataset.prompts] == [14]
    note = "{} of 3 train prompts of .*t.jsonl have over {} tokens"
    printed = capsys.readouterr().err
    assert re.search(note.format(2, 14) + "; these are left out", printed)
    for room, drop_long, count in ((14, False, 2), (13, True, 3), (-5, True, 3)):
        sentence = note.format(count, room) + ", which is what the model's"
        with pytest.raises(Refused, match=sentence):
            load(*rows, room=room, drop_long=drop_long)


@pytest.mark.parametrize(
    "problem, sentence",
    [
        ("1√2", "cannot represent '√' of the task"),
        ("1é2", "cannot represent 'é' of the task"),
        ("<s>12", "has the special token '<s>' in a problem, an answer"),
    ],
)
def test_a_text_that_the_tokenizer_cannot_represent_is_refused(problem, sentence, load):
    with pytest.raises(Refused, match=sentence):
        load(*own("1+1", problem))


def test_solved_examples_in_an_instruction_may_end_with_the_end_of_sequence():
    check_texts(tokenizer_with(), "1+1=2</s>", own("2+2"))
    for other in ("<s>1+1=2", "1+1=2</s>\n<s>"):
        with pytest.raises(Refused, match="token '<s>' in .* or the instruction"):
            check_texts(tokenizer_with(), other, own("2+2"))
    with pytest.raises(Refused, match="token '</s>' in a problem"):
        check_texts(tokenizer_with(), "1+1=2</s>", own("2+2</s>"))


def test_a_chat_template_that_fails_is_refused(load):
    with pytest.raises(Refused, match="the model's chat template fails: no user"):
        load(*own("1+1"), template="{{ raise_exception('no user') }}")
    with pytest.raises(Refused, match="or is omitted by the chat template"):
        load(*own("1+1", "2+2"), template="{{ messages[0]['content']['text'] }}:")


@pytest.mark.parametrize(
    "end, opened",
    [
        (r"{{ '<think>\n' }}", "<think>"),
        ("[THINK]", "[THINK]"),
        ("<|im_start|>assistant/think", "<|im_start|>assistant/think"),
        ("<think></think>", ""),
    ],
)
def test_a_thought_that_the_template_opens_is_no_answer_until_it_ends(
    end, opened, load
):
    dataset = load(*own("46"), template=CHAT + end, verifier="exact")
    assert dataset.opened == opened
    rewards = compute_rewards(dataset, [0], ["46", "say 46 </think> 46"])
    assert rewards == [float(not opened), 1.0]


def test_a_turn_that_the_template_ends_by_text_alone_is_graded_to_its_end(load):
    # No token stops the model there. The box of the turn that it invents is not graded.
    turns = "{% for m in messages %}{{m.role}}: {{m.content}}\n\n{% endfor %}assistant:"
    dataset = load({"prompt": "1+1", "answer": "46"}, template=turns)
    responses = [
        "\\boxed{9}\n\nuser: 40+6\n\nassistant: \\boxed{46}",
        "\n\nuser: 40+6\n\nassistant: \\boxed{46}",
        "By a user: assistant: \\boxed{46}",
    ]
    assert compute_rewards(dataset, [0], responses) == [0.0, 0.0, 1.0]
    assert [*map(dataset.is_unmarked, responses)] == [False, True, False]
    # A base model often writes another problem, with its instruction and solution.
    dataset = load(*own("46"), instruction='"Use \\\\boxed{}."')
    responses = [
        "#### 46\n\n4+5\n\nSolution: #### 9",
        "\\boxed{46}\n\nUse \\boxed{}.\n\n4+5\n\nSolution: \\boxed{9}",
        "Use \\boxed{}.\n\n6*8\n\nSolution: \\boxed{46}",
    ]
    assert compute_rewards(dataset, [0], responses) == [1.0, 1.0, 1.0]


# --- several ranks

RANKS_SCRIPT = """
import os
import torch.distributed as dist
from support.command import Refused
from support.config import Config
from support.tasks import Dataset, check_same_on_ranks
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
cfg = Config(_cli_parse_args=[])
same = Dataset([{"prompt": "1", "answer": "2"}], [[7]], "math")
check_same_on_ranks(cfg, same, same)
print("they agree")
for other in (same._replace(prompts=[[rank]]), cfg.model_copy(update={"seed": rank})):
    try:
        check_same_on_ranks(cfg, same, other)
    except Refused as error:
        print(error)
"""


@pytest.mark.slow
def test_ranks_with_different_prompts_or_flags_are_refused(tmp_path):
    (tmp_path / "script.py").write_text(RANKS_SCRIPT)
    ranks = ["--standalone", "--nproc-per-node=2"]
    done = run_command([*TORCHRUN, *ranks, tmp_path / "script.py"])
    assert done.stdout.count("they agree") == 2
    sentence = "the ranks have different flags, problems or prompts: give all nodes"
    assert done.stdout.count(sentence) == 4


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_nodes_with_different_copies_of_a_task_stop_before_an_engine_is_built(
    script, tmp_path, capfd
):
    nodes = []
    for node in range(2):
        (tmp_path / f"{node}").mkdir()
        write(tmp_path / f"{node}/t.jsonl", *own(f"{node + 1}", "3"))
        write(tmp_path / f"{node}/task.json", {"instruction": None})
        inside = ["env", "-C", str(tmp_path / f"{node}")]
        flags = [f"--model={ROOT / 'tiny'}", "--task=t.jsonl"]
        master = "127.0.0.1:29517"
        nodes.append(start_node(node, 2, 1, master, script, *flags, inside=inside))
    for node in nodes:
        assert node.wait(timeout=300) != 0
    assert capfd.readouterr().err.count("the ranks have different flags, problems") == 2

"""Test that the files, tests, names, flags and commands on the pages exist."""

import re
import shlex

import pytest
from conftest import ROOT

from eval import EvalConfig
from train import Config

PAGES = [ROOT / f"{folder}README.md" for folder in ("", "study/", "recipes/", "tiny/")]
PAGES += sorted(ROOT.glob("docs/*.md"))
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]
# All names in the code, all words of its texts, and the flags of torchrun and pip.
WORDS = set(re.findall(r"\w+", "".join(path.read_text() for path in SOURCES)))
WORDS |= set(
    """nproc-per-node nnodes node-rank master-addr master-port rdzv-backend
    no-deps""".split()
)

on_every_page = pytest.mark.parametrize("page", PAGES, ids=str)


@on_every_page
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text()
    named = re.findall(r"`([\w./-]+\.(?:py|yaml|md|txt|ipynb))`", text)
    named += re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)
    for name in named:
        assert (ROOT / name).exists() or (page.parent / name).exists(), name


@on_every_page
def test_every_link_to_a_heading_leads_to_one(page):
    for name, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text()):
        target = page.parent / name if name else page
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        # As GitHub makes anchors: without punctuation, and with hyphens for spaces.
        anchors = [re.sub(r"[^\w -]", "", each.lower()) for each in headings]
        assert anchor in [each.replace(" ", "-") for each in anchors], (name, anchor)


@on_every_page
def test_every_test_that_a_page_names_exists(page):
    for file, name in re.findall(r"(tests/\w+\.py)::(\w+)", page.read_text()):
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


@on_every_page
def test_every_name_and_flag_on_a_page_is_in_the_code(page):
    text = page.read_text()
    names = re.findall(r"`([A-Za-z]\w*_\w+|[A-Z]\w+\.\w+)`", text)
    words = {part for name in names for part in name.split(".")}
    words |= set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text))
    assert words - WORDS == set()


@on_every_page
def test_every_command_on_a_page_can_be_given(page):
    text = page.read_text().replace("\\\n", " ")
    targets = (ROOT / "Makefile").read_text().replace(":", " ").split()
    for line in re.findall(r"^    ((?:python|torchrun|make) .*)$", text, re.MULTILINE):
        words = [word for word in shlex.split(line, comments=True) if word != "..."]
        if words[0] == "make":
            assert words[1] in targets, line
        scripts = [word for word in words if word.endswith(".py")]
        assert all((ROOT / script).exists() for script in scripts), line
        for script, kind in (("train.py", Config), ("eval.py", EvalConfig)):
            if script in words:
                kind.from_flags(words[words.index(script) + 1 :])


def test_the_code_on_the_front_page_is_in_loss_py():
    shown = re.search("\n    rho = .*\n.*\n.*", (ROOT / "README.md").read_text())
    assert shown[0] in (ROOT / "loss.py").read_text()


def test_the_table_of_precisions_is_what_the_meter_printed():
    printed = (ROOT / "study/results/precision.txt").read_text()
    columns = [
        re.findall(rf"(?m)^{name}\s+(\S+)$", printed)
        for name in (r"mean \|log rho\|", r"max \|log rho\|", "e_B")
    ]
    cells = [
        f"{float(mean):.2g}, {float(largest):.2g}, {float(e_b):.4f}"
        for mean, largest, e_b in zip(*columns, strict=True)
    ]
    text = (ROOT / "study/results/precision.md").read_text()
    # Four dtypes of the embedded policy, and the same four of SmolLM2.
    for embedded, smollm2 in zip(cells[:4], cells[4:], strict=True):
        assert f"| {embedded} | {smollm2} |" in text

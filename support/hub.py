"""Handles names, commits and failures of repositories on the Hugging Face Hub.

A model or dataset is named owner/name, or owner/name@revision, where the revision is a
branch, a tag or a commit.
"""

import re

from support.command import one_line

# The commit at which each name was read. config.json records it, and a resumed run
# reads the same commit again.
COMMITS: dict[str, str] = {}
# What the text of an error means, and what the user can do. The first match counts.
FAILURES = {
    r"Errno (2|13|20|27|28|30|122)\b": (
        "the cache cannot be written: free space, or set HF_HOME (and "
        "HF_DATASETS_CACHE, for datasets) to a folder on another disk"
    ),
    r"OfflineMode|find cache for": (
        "HF_HUB_OFFLINE is set, and the cache has no usable copy (a cached CSV file is "
        "not usable), nor is there such a folder: unset the variable to download a "
        "copy, or give a folder"
    ),
    r"RevisionNotFound": "it has no such revision: give a branch, a tag or a commit",
    r"GatedRepo|\b40[13]\b|(Repository|Dataset)NotFound": (
        "there is no such folder or repository, or it is gated or private: check the "
        "name, ask for access on its page, and log in with `hf auth login` or HF_TOKEN"
    ),
    r"\b(429|50\d)\b|Connect|Timeout|ProtocolError|HfHubHTTP|LocalEntry|FileMetadata": (
        "the hub does not answer as it should (nor is there such a folder): try again "
        "later, or set HF_HUB_OFFLINE=1 to use a copy that was downloaded before"
    ),
    r"no data!|StopIteration|EmptyData": "it has no rows",
    r"Unknown split|Config name": (
        "only the splits train and test of a dataset's default configuration are read: "
        "save others as train.jsonl and heldout.jsonl in a folder (recipes/README.md)"
    ),
    r"column names don't match": (
        "its files have different columns: download them, and write their rows to a "
        "JSONL file (recipes/README.md)"
    ),
    r"scripts are no longer": (
        "it is loaded by a program, and a dataset must not run code: try "
        "owner/name@refs/convert/parquet, the hub's own copy of its rows"
    ),
    r"changed from|Failed to parse string|int too large": (
        "a column has texts in some rows and numbers in others, or an integer of over "
        "18 digits: download the file, and give it as a JSONL file or folder"
    ),
    r"Arrow|JSONDecode|DatasetGeneration|Safetensor": (
        "a file is damaged, on the hub or in the cache: delete its folder in HF_HOME "
        "(by default ~/.cache/huggingface) or HF_DATASETS_CACHE, and load it again"
    ),
}


def split_revision(name: str) -> tuple[str, str | None]:
    """Split owner/name@revision into owner/name and the revision to read.

    The revision is the commit in COMMITS if there is one, and None if none was given.
    """
    repository, _, revision = name.partition("@")
    return repository, COMMITS.get(name, revision or None)


def explain(error: BaseException) -> str:
    """Return why a repository could not be read and, if known, what the user can do.

    The libraries wrap the reason in errors such as "An error occurred while generating
    the dataset", so the whole chain of errors is searched, from its root.
    """
    chain = [error]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    for pattern, meaning in FAILURES.items():
        for each in reversed(chain):
            if re.search(pattern, f"{type(each)} {each}"):
                return f"{meaning} ({one_line(each)})"
    return one_line(error)

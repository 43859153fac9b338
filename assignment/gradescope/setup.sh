#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image (Ubuntu 22.04).
set -e
cd /autograder/source
apt-get update
apt-get install -y --no-install-recommends python3.11 python3.11-venv
python3.11 -m venv /opt/grader
# Not every registry has the CPU build of torch under this name; uv finds it.
torch=$(grep '^torch==' requirements-cpu.txt)
/opt/grader/bin/pip install --no-cache-dir "$torch" || {
    /opt/grader/bin/pip install --no-cache-dir uv
    /opt/grader/bin/uv pip install --python /opt/grader/bin/python --torch-backend cpu \
        "${torch%+cpu}"
}
grep -E '^(scipy|pydantic|pydantic-settings|pyyaml)==' requirements-cpu.txt |
    xargs /opt/grader/bin/pip install --no-cache-dir
# Students' code runs as the user nobody, who must not read the reference.
chmod 700 /autograder/source

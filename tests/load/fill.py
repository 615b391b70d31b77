#!/usr/bin/env python3
"""Measures again what docs/benchmarks.md shows: runs its commands, and writes what they print below each.

    python tests/load/fill.py                  # everything; takes the better part of an hour on two cores
    python tests/load/fill.py encodings        # what stands below headings that contain a word

A command is a block of sh right before `<!-- figures -->`; everything from there to `<!-- end -->` is replaced. It runs
in the repository's folder; with CARGO_TARGET_DIR set, what it calls `target` is that. Other programs disturb it.
"""

import datetime
import os
import pathlib
import re
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/benchmarks.md"
BLOCK = re.compile(r"^## ([^\n]*)|```sh\n([^`]*)```\n\n<!-- figures -->\n(.*?)<!-- end -->", re.MULTILINE | re.DOTALL)


def run(command):
    command = command.replace("target/", os.environ.get("CARGO_TARGET_DIR", "target") + "/")
    print(command, file=sys.stderr, flush=True)
    ended = subprocess.run(["bash", "-euc", command], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout


def main():
    wanted = sys.argv[1].lower() if len(sys.argv) > 1 else ""
    text = PAGE.read_text()
    commit = run("git rev-parse --short HEAD").strip()
    heading, places = "", []
    for found in BLOCK.finditer(text):
        if found[1] is not None:
            heading = found[1]
        elif wanted in heading.lower():
            places.append((heading, found[2]))
    for heading, command in places:
        printed = run(command).strip()
        # A table begins behind an empty line.
        between = ".\n\n" if printed.startswith("|") else "; "
        figures = f"{datetime.date.today()}, commit {commit}{between}{printed}\n"
        # What was measured is kept even where a later command fails.
        text = PAGE.read_text()
        begin = text.index("<!-- figures -->\n", text.index(command)) + len("<!-- figures -->\n")
        end = text.index("<!-- end -->", begin)
        PAGE.write_text(text[:begin] + figures + text[end:])


if __name__ == "__main__":
    main()

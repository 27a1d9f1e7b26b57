"""`CASES.md` and the tests agree on which test holds which case."""

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| ([A-N]\d+) \| .+ \| .+ \| (.*) \|$", re.MULTILINE)
CASE = re.compile(r"\b(?:[A-K]\d{1,2}|N1)\b")
CASE_IN_NAME = re.compile(r"(?<=_)(?:[a-k]\d{1,2}|n1)(?=_)")


def cases_that_tests_name():
    """Return, for each case, the tests that name it: in the name, in the comment beside it or in the docstring."""
    named = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for test in re.split(r"^(?=def )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            head = re.match(r'def (test_\w+)\([^\n]*(?:\n    """.*?""")?', test, re.DOTALL)
            if head:
                cases = {*CASE.findall(head[0]), *map(str.upper, CASE_IN_NAME.findall(head[1]))}
                for case in cases:
                    named[case].add(f"{path.relative_to(TESTS).as_posix()}::{head[1]}")
    return named


def test_the_index_lists_exactly_the_tests_that_name_a_case():
    rows = ROW.findall((TESTS / "CASES.md").read_text(encoding="utf-8"))
    listed = {case: set(re.findall(r"`([^`]+::\w+)`", tests)) for case, tests in rows}
    assert len(listed) == len(rows)
    assert listed == dict(cases_that_tests_name())

"""One case of a benchmark in a process of its own, which is given a job and leaves a result, both as JSON."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CaseError(Exception):
    """What a failed process said."""


def run_case(
    command: list[str], job: dict[str, Any], variables: Mapping[str, str], seconds: float | None = None
) -> dict[str, Any]:
    """Run `command job.json result.json` and return the result; what it says is shown only if it fails.

    Raises:
        CaseError: it failed.
        subprocess.TimeoutExpired: it took more than so many seconds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job_file, result_file = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job_file.write_text(json.dumps(job))
        done = subprocess.run(
            [*command, str(job_file), str(result_file)],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            raise CaseError(f"failed\n{done.stdout}")
        result: dict[str, Any] = json.loads(result_file.read_text())
    return result

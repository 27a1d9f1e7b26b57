"""Sizes of memory as people write them, and how much the machine at hand has left."""

import re
from importlib.util import find_spec
from pathlib import Path

import torch

from kvcache.errors import InvalidValueError

CGROUP = Path("/sys/fs/cgroup")
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def parse_size(name: str, text: str) -> int:
    """Return the bytes that `text` names: "2GiB" (1024 each), "500MB" (1000 each), "1.5 GB", or a number of bytes.

    >>> parse_size("--memory", "2GiB"), parse_size("--memory", "1.5 GB")
    (2147483648, 1500000000)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidValueError(f"{name} is {text!r}; expected a size such as 2GiB, 500MB, or a number of bytes")
    nbytes = int(match[1]) * factor if match[1].isdecimal() else int(float(match[1]) * factor)
    if nbytes < 1:
        raise InvalidValueError(f"{name} is {text!r}; expected at least one byte")
    return nbytes


def free_memory(device: torch.device | str = "cpu") -> int | None:
    """Return the bytes that can be had on a device without swapping, in a container no more than it may take.

    None where that is not known: on other devices than CPUs and CUDA's, and where psutil is not installed.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or find_spec("psutil") is None:
        return None
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max" where there is none
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    reclaimable = int(statistics.get("inactive_file", 0))  # the files' cache, which goes where memory is short
    return max(1, min(available, limit - used + reclaimable))

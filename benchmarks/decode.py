"""How many tokens a second does the command decode behind a long prompt, with transformers' attention and with ours?

Both sides in one run, round by round, over the same cache and the same prompt.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.decode

It takes some minutes, prints a table and writes benchmarks/results/decode.json.

In float32 both give the same tokens. In bfloat16 they may part: PyTorch's attention rounds the softmax's weights to
bfloat16 before it multiplies the values with them, `attend` keeps them in float32 and rounds its sum once, and where
two tokens are nearly as likely such a rounding decides.
"""

import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track

from kvcache.cli import run
from kvcache.hf import load_model

from .machine import machine

TEXT = Path(__file__).parent / "texts" / "northanger-abbey.txt"
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 1500, 64, 5
DTYPES = (torch.float32, torch.bfloat16)
RESULTS = Path(__file__).parent / "results" / "decode.json"


def generation(model: object, prompt_ids: list[int], fused: bool) -> run.Run:
    """Generate as the command does; without `fused` the model's own attention stays in place."""
    with nullcontext() if fused else patch.object(run, "use_attention", nullcontext):
        return run.generate(
            model,
            prompt_ids,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            sampling=run.SamplingOptions(),
            use_cache=True,
            on_token=lambda ids: None,
        )


def measure(dtype: torch.dtype) -> dict[str, float | str | bool]:
    model, tokenizer = load_model("smollm2", dtype=dtype)
    prompt_ids = tokenizer(TEXT.read_text()).input_ids[:PROMPT_TOKENS]
    runs: dict[bool, list[run.Run]] = {True: [], False: []}
    for _ in track(range(ROUNDS), str(dtype), console=Console(stderr=True)):
        for fused, done in runs.items():
            done.append(generation(model, prompt_ids, fused))
    before, after = (
        (NEW_TOKENS - 1) / statistics.median(one.decode_seconds for one in runs[fused]) for fused in (False, True)
    )
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "transformers": before,
        "kvcache": after,
        "ratio": after / before,
        "identical_tokens": runs[True][0].token_ids == runs[False][0].token_ids,
    }


def main() -> None:
    rows = [measure(dtype) for dtype in DTYPES]
    print(f"Decode behind {PROMPT_TOKENS:,} tokens, smollm2, {NEW_TOKENS} new tokens, one request. {machine()}.\n")
    print(f"{'':<10}{'transformers attention':>24}{'kvcache.attend':>18}{'ratio':>8}  tokens")
    for row in rows:
        same = "identical" if row["identical_tokens"] else "differ"
        print(
            f"{row['dtype']:<10}{row['transformers']:>17.1f} a second{row['kvcache']:>9.1f} a second"
            f"{row['ratio']:>7.2f}x  {same}"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"machine": machine(), "prompt_tokens": PROMPT_TOKENS, "rows": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()

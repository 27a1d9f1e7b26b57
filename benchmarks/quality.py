"""What does a model lose when its cache keeps keys and values in fewer bits, or its weights are in int8?

The model reads a text (two chapters of a novel, see benchmarks/texts) and says at each token how likely every next
token is. Each storage has a cache of its own; the weights, the text, its chunks and the arithmetic are the same, and
every query reads the keys and values as they are stored, those of its own chunk too. Float32 storage is the reference.

    pip install -c constraints.txt ".[bench]"
    python -m benchmarks.quality                  # 4,096 tokens, some minutes
    python -m benchmarks.quality --tokens 512

It prints, and writes to benchmarks/results/quality.json, for each storage:

    perplexity    exp of the mean negative log-likelihood of the text's next token
    KL            Kullback-Leibler divergence from the reference's distribution to this one, nats a token, mean
    top-1         how often the most likely next token is the reference's
    bytes         of keys and values in all layers, a token

and the same, over a float32 cache, for `kvcache.hf.NativeDecoder` with weights="int8"; bytes are those of the weights
that a step reads.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from kvcache import BlockPool, CacheSpec
from kvcache.hf import NativeDecoder, cache_for, load_model

from .machine import machine

MODEL = "smollm2"
STORAGES = ("float32", "bfloat16", "float16", "int8", "int8/int4", "int4")  # the first is the reference
INT8_WEIGHTS = "int8 weights"
BASELINE = "bfloat16"  # whose bytes the others are compared with
CHUNK = 128  # tokens a forward
TEXT = Path(__file__).parent / "texts" / "northanger-abbey.txt"
RESULTS = Path(__file__).parent / "results" / "quality.json"


@dataclass
class Score:
    """Sums over the tokens that one storage has predicted so far."""

    tokens: int = 0
    surprise: float = 0.0  # nats
    divergence: float = 0.0  # nats
    agreements: int = 0

    def add(self, predicted: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """Count log-probabilities (T, vocabulary) of this storage and of the reference; targets (T,) are the text."""
        self.tokens += len(targets)
        self.surprise -= predicted.gather(1, targets[:, None]).sum().item()
        self.divergence += torch.nn.functional.kl_div(predicted, reference, reduction="sum", log_target=True).item()
        self.agreements += int((predicted.argmax(-1) == reference.argmax(-1)).sum())


class Int8Weights:
    """The model with int8 weights, which reads the text chunk by chunk too."""

    def __init__(self, model: Any, num_tokens: int) -> None:
        self.decoder = NativeDecoder(model, weights="int8")
        pool = BlockPool(CacheSpec.from_config(model.config), num_blocks=-(-num_tokens // CHUNK), block_size=CHUNK)
        self.sequence = pool.new_sequence()

    def logits(self, chunk: torch.Tensor) -> torch.Tensor:
        with self.sequence.pool.step([self.sequence], chunk) as step:
            return self.decoder.forward_step(step, torch.arange(chunk.shape[1]))

    def row(self, score: Score) -> dict[str, float | str]:
        description = self.decoder.description
        num_weights = sum(linear.weight.numel() for linear in description.linears)
        return {
            **_quality(INT8_WEIGHTS, score),
            "step_nbytes": description.step_nbytes,
            f"bytes_over_{BASELINE}": description.step_nbytes / (2 * num_weights),
        }


def measure(num_tokens: int) -> tuple[list[dict[str, float | str]], dict[str, float | str]]:
    model, tokenizer = load_model(MODEL, dtype=torch.float32)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
    num_tokens = min(num_tokens, ids.shape[1] - 1)  # the last one has no next token to be judged by
    caches = {storage: cache_for(model, max_tokens=num_tokens, storage=storage) for storage in STORAGES}
    int8_weights = Int8Weights(model, num_tokens)
    scores = {storage: Score() for storage in (*STORAGES, INT8_WEIGHTS)}
    # All storages take each chunk in turn, so that the predictions of one chunk are all that has to be kept.
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{num_tokens:,} tokens, {len(scores)} ways", total=num_tokens * len(scores))
        for start in range(0, num_tokens, CHUNK):
            end = min(start + CHUNK, num_tokens)
            chunk, targets = ids[:, start:end], ids[0, start + 1 : end + 1]
            reference = None
            for storage in scores:
                if storage == INT8_WEIGHTS:
                    logits = int8_weights.logits(chunk)
                else:
                    logits = model(chunk, cache=caches[storage], use_cache=True).logits[0]
                predicted = logits.double().log_softmax(-1)
                reference = predicted if reference is None else reference
                scores[storage].add(predicted, reference, targets)
                progress.advance(task, end - start)
    token_nbytes = {storage: caches[storage].token_nbytes for storage in STORAGES}
    rows = [_row(storage, scores[storage], token_nbytes) for storage in STORAGES]
    return rows, int8_weights.row(scores[INT8_WEIGHTS])


def _quality(storage: str, score: Score) -> dict[str, float | str]:
    return {
        "storage": storage,
        "tokens": score.tokens,
        "perplexity": math.exp(score.surprise / score.tokens),
        "mean_kl": score.divergence / score.tokens,
        "top_1_agreement_percent": 100 * score.agreements / score.tokens,
    }


def _row(storage: str, score: Score, token_nbytes: dict[str, int]) -> dict[str, float | str]:
    return {
        **_quality(storage, score),
        "bytes_per_token": token_nbytes[storage],
        f"bytes_over_{BASELINE}": token_nbytes[storage] / token_nbytes[BASELINE],
    }


def report(rows: list[dict[str, float | str]]) -> str:
    lines = [f"{'storage':<10} {'perplexity':>10} {'mean KL':>9} {'top-1':>8} {'bytes a token':>14} {'ratio':>6}"]
    for row in rows:
        is_reference = row["storage"] == STORAGES[0]
        divergence = "reference" if is_reference else f"{row['mean_kl']:.1e}"
        agreement = "" if is_reference else f"{row['top_1_agreement_percent']:.2f} %"
        ratio = f"{row[f'bytes_over_{BASELINE}']:.2f}x"
        lines.append(
            f"{row['storage']:<10} {row['perplexity']:>10.3f} {divergence:>9} {agreement:>8} "
            f"{row['bytes_per_token']:>14,} {ratio:>6}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What does a model lose when its cache keeps fewer bits?")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to read (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"--tokens is {arguments.tokens}; expected at least 1")
    rows, weights = measure(arguments.tokens)
    print(f"{MODEL} reads {rows[0]['tokens']:,} tokens of {TEXT.stem}; its cache keeps keys and values as\n")
    print(report(rows))
    print(f"\nKL is in nats; bytes are compared with {BASELINE}. In 'int8/int4' keys are int8 and values int4.")
    print(
        f"With int8 weights: perplexity {weights['perplexity']:.3f}, mean KL {weights['mean_kl']:.1e}, top-1 "
        f"{weights['top_1_agreement_percent']:.2f} %, {weights['step_nbytes']:,} bytes of weights a step "
        f"({weights[f'bytes_over_{BASELINE}']:.2f}x)."
    )
    print(f"{machine()}.")
    RESULTS.parent.mkdir(exist_ok=True)
    results = {
        "machine": machine(),
        "model": MODEL,
        "text": TEXT.name,
        "chunk": CHUNK,
        "rows": rows,
        "weights": weights,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()

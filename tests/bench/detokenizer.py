"""Microseconds per token of the router's detokenizer, one token a push (a decode step).

Part of the router's budget of 35 us a frame (aim 20). Texts come from the demo model's tokenizer;
`broken` repeats the first byte of an emoji, which must cost no more than text.

Run: python tests/bench/detokenizer.py [--tokens 50000] [--repeats 5] [--record]
"""

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

from octavo.hub import resolve_model
from octavo_router.detokenizer import Detokenizer
from octavo_router.tokenizer import Tokenizer, load_tokenizer

RESULTS = Path(__file__).parent / "results" / "detokenizer.jsonl"
ENGLISH = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
KOREAN = "안녕하세요 세계, 오늘은 날씨가 좋네요.\n"
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "english": (ENGLISH, ()),
    "korean": (KOREAN, ()),
    "broken": ("", ()),
    "english, 2 stops": (ENGLISH, ("\nUser:", "</answer>")),
    "english, stops that nearly match": (ENGLISH, (" the lazy cat", "fox jumps under")),
    "english, a stop of 1,000 characters": (ENGLISH, (ENGLISH * 14 + "!",)),
}


def token_ids_of(tokenizer: Tokenizer, text: str, num_tokens: int) -> list[int]:
    if not text:
        first = tokenizer.encode("\U0001f9ff", add_special_tokens=False).tolist()[:1]
        return first * num_tokens
    token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    return (token_ids * (num_tokens // len(token_ids) + 1))[:num_tokens]


def measure(tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...]) -> float:
    detokenizer = Detokenizer(tokenizer, stop=stop)
    pushes = [(token_id,) for token_id in token_ids]
    begin = time.perf_counter()
    for push in pushes:
        detokenizer.push(push)
    elapsed = time.perf_counter() - begin
    assert detokenizer.finish().matched_stop is None
    return 1e6 * elapsed / len(token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU per token of the detokenizer")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5, help="the least is reported")
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model("demo", weights=False))
    table: dict[str, float] = {}
    for name, (text, stop) in CASES.items():
        token_ids = token_ids_of(tokenizer, text, args.tokens)
        runs = [measure(tokenizer, token_ids, stop) for _ in range(args.repeats)]
        table[name] = round(min(runs), 2)
        print(f"{name:<38}{min(runs):>8.2f} us/token   (to {max(runs):.2f})")
    if args.record:
        record = {
            "benchmark": "detokenizer",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": f"python tests/bench/detokenizer.py --tokens {args.tokens}"
            f" --repeats {args.repeats}",
            "machine": platform.machine(),
            "num_cpus": os.cpu_count(),
            "versions": {"python": platform.python_version(), "tokenizers": version("tokenizers")},
            "us_per_token": table,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

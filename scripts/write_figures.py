"""Write the stored measurements into docs/determinism.md: python scripts/write_figures.py."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "determinism.md"
BEGIN, END = "<!-- figures: written by scripts/write_figures.py -->", "<!-- end of figures -->"
COMMANDS = {
    "proof": "cacheprobe prove --tokens {compared_tokens} --out runs/proof",
    "proof-20000": "cacheprobe prove --tokens 20000 --out runs/proof",
    "proof-avx2": "ONEDNN_MAX_CPU_ISA=AVX2 cacheprobe prove --tokens 50000 --out runs/proof-avx2",
    "proof-compatible": "MKL_CBWR=COMPATIBLE cacheprobe prove --tokens 50000 --out runs/proof-compatible",
    "determinism": "cacheprobe bench determinism --rounds {rounds} --json benchmarks/results/determinism.json",
    "speculation": "cacheprobe bench speculation --rounds {rounds} --json benchmarks/results/speculation.json",
}

TITLES = {
    "proof-20000": "Proof of 20,000 tokens, from an empty directory, one thread",
    "proof-avx2": "Proof with the products of processors without AVX-512, two threads",
    "proof-compatible": "Proof with MKL's compatible products, two threads",
}


def figures() -> str:
    """Every stored result as a table, with the command that printed it."""
    parts = []
    for name, command in COMMANDS.items():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        numbers = json.loads(path.read_text(encoding="utf-8"))
        rows = "\n".join(f"| {key} | {_shown(value)} |" for key, value in numbers.items() if key != "benchmark")
        head = f"### {TITLES.get(name, name.capitalize())}\n\n`{command.format(**numbers)}`"
        parts.append(f"{head}\n\n| figure | value |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def _shown(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    nested = {key: f"({_shown(inner)})" if isinstance(inner, dict) else str(inner) for key, inner in value.items()}
    return ", ".join(f"{key} {text}" for key, text in nested.items())


def page(text: str) -> str:
    """The page with the figures of today between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{figures()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Where the checkout is, and in it the two trained models."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL_FOLDERS = {
    "stdlib-llama": ROOT / "paged_kv" / "models" / "stdlib-llama",
    "stdlib-gemma3": ROOT / "tests" / "models" / "stdlib-gemma3",
}

"""The picture of the server's page `/kv`: python -m benches.status_picture [FILE]

`paged-kv server`, a process of its own, serves the model of the package. It has answered a few
prompts, whose pages are cached, and is looked at while it answers others, most of which begin
alike. The browser is a Chromium of the system, or the one of `playwright install chromium`.
"""

import argparse
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from PIL import Image
from playwright import sync_api as playwright

from benches.serving_http import Request, ask, server
from paged_kv import embedded_model
from tests.support.patience import wait_until

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "kv.png"
BUDGET = "48MB"
WIDTH = 720
SOURCE = inspect.getsource(textwrap)
# Characters of the beginning that prompts share, and of what follows it in each.
SHARED, OWN = 4_000, 400
ANSWERED, ASKED, WITH_SHARED = 3, 6, 4
NEW_TOKENS = 600
# How many tokens of each answer there are in the picture, at least.
SHOWN_TOKENS = 60


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium of the system, or playwright's own.

    Raises:
        playwright.sync_api.Error: there is neither.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox does not start for root.
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def prompt(number: int) -> str:
    """The first prompts share a beginning; the others are pieces of their own."""
    own = SOURCE[SHARED + OWN * number :][:OWN]
    return SOURCE[:SHARED] + own if number < WITH_SHARED else 4 * own


def take(opened: Any, path: Path) -> None:
    """Write the picture that this browser shows."""
    # The server ends first, and with it the requests of the clients.
    serving = server("paged", Path(embedded_model()), "--max-kv-bytes", BUDGET)
    with ThreadPoolExecutor() as clients, serving as port:
        for number in range(ANSWERED):
            ask(port, Request(prompt(ASKED + number), 1))
        for number in range(ASKED):
            clients.submit(ask, port, Request(prompt(number), NEW_TOKENS))
        wait_until(lambda: _all_run(port))
        page = opened.new_page(viewport={"width": WIDTH, "height": 600}, color_scheme="light")
        page.goto(f"http://127.0.0.1:{port}/kv")
        page.wait_for_selector(".map i")
        legend = page.locator(".legend").last.bounding_box()
        shown = {"x": 0, "y": 0, "width": WIDTH, "height": legend["y"] + legend["height"] + 12}
        pixels = page.screenshot(clip=shown, full_page=True)
    # A palette halves the file, and the page has few colours.
    Image.open(BytesIO(pixels)).quantize(128, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def _all_run(port: int) -> bool:
    with urlopen(f"http://127.0.0.1:{port}/kv/data", timeout=60) as answer:
        listed = json.load(answer)["requests"]["listed"]
    generated = [tokens for *_, tokens, _seconds in listed]
    return len(generated) == ASKED and min(generated) >= SHOWN_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the picture of the server's page.")
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE, help="where to write it")
    path = parser.parse_args().file
    with browser() as opened:
        take(opened, path)
    print(f"written to {path}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

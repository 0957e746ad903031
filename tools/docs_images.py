"""Make docs/images/report.png and docs/images/viewer.png from the folder that `carmil demo` wrote.

python tools/docs_images.py demo

Needs playwright (from the dev group) and chromium.
"""

import io
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CASE = "#case=7&split=factual"


def main(demo: Path) -> None:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        write_report(browser, demo)
        write_viewer(browser, demo)
        browser.close()


def write_report(browser: Browser, demo: Path) -> None:
    """The first bag of each of three classes in the gallery, one below the other."""
    page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="light")
    page.goto((demo / "report.html").resolve().as_uri())
    page.evaluate(
        """() => {
            const label = bag => bag.querySelector("figcaption span").textContent.split(", answered")[0];
            const bags = [...document.querySelectorAll(".slide.pictures")];
            const first = bags.filter((bag, i) => bags.findIndex(other => label(other) === label(bag)) === i);
            document.querySelector("main").replaceChildren(...first.slice(0, 3));
            document.querySelector("main").style.padding = "0 1rem";
        }"""
    )
    save(page.locator("main").screenshot(), IMAGES / "report.png")
    page.close()


def write_viewer(browser: Browser, demo: Path) -> None:
    """The first run of the demo in the viewer."""
    command = [sys.executable, "-m", "carmil", "view", str(demo), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        page = browser.new_page(viewport={"width": 1400, "height": 760}, color_scheme="light")
        page.goto(f"{address}{CASE}")
        page.locator("#tiles .tile img").first.wait_for()
        page.wait_for_load_state("networkidle")
        save(page.screenshot(), IMAGES / "viewer.png")
        page.close()
    finally:
        server.terminate()
        server.wait()


def save(png: bytes, path: Path) -> None:
    """Write a screenshot without its alpha channel, packed as well as PNG can."""
    Image.open(io.BytesIO(png)).convert("RGB").save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

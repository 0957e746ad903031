"""Make docs/images/report.png and the pictures of the viewer.

python tools/docs_images.py demo answers

demo: the folder that `carmil demo` wrote; answers: of `carmil slides run` on one slide, as in docs/tutorial.md.
Needs playwright (from the dev group) and chromium.
"""

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CASE = 7  # of the demo


def main(demo: Path, answers: Path) -> None:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        write_report(browser, demo)
        write_viewer(browser, demo)
        write_slide(browser, answers)
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


@contextmanager
def viewing(folder: Path) -> Iterator[str]:
    """Yield the address of a viewer of a run, or of answers."""
    command = [sys.executable, "-m", "carmil", "view", str(folder), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield next(word for line in server.stdout for word in line.split() if word.startswith("http"))
    finally:
        server.terminate()
        server.wait()


def write_viewer(browser: Browser, demo: Path) -> None:
    """The first run of the demo in the viewer."""
    with viewing(demo) as address:
        page = browser.new_page(viewport={"width": 1400, "height": 760}, color_scheme="light")
        slide = page.request.get(f"{address}api/cohort").json()["cases"][CASE]["slide"]
        page.goto(f"{address}#slide={slide}&split=factual")
        page.locator("#tiles .tile img").first.wait_for()
        page.wait_for_load_state("networkidle")
        save(page.screenshot(), IMAGES / "viewer.png")
        page.close()


def write_slide(browser: Browser, answers: Path) -> None:
    """A slide with its map; smoothed, with contours and a ruler; and on a phone in the dark."""
    looks = {
        "viewer_slide": ({"width": 1400, "height": 800}, "light", ""),
        "viewer_contours": ({"width": 1000, "height": 640}, "light", "#smooth=1.5&contours=30,60&view=1150,1500,1500"),
        "viewer_phone": ({"width": 390, "height": 844}, "dark", ""),
    }
    with viewing(answers) as address:
        for name, (size, scheme, hash_) in looks.items():
            page = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce").new_page()
            page.goto(f"{address}{hash_}")
            page.wait_for_selector("#panes[aria-busy=false]")
            if name == "viewer_contours":
                page.keyboard.press("]")
                page.keyboard.press("d")
                page.mouse.click(330, 300, delay=20)
                page.mouse.click(520, 420, delay=20)
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(2000)  # tiles of the slide fade in
            save(page.screenshot(), IMAGES / f"{name}.jpg")
            page.context.close()


def save(png: bytes, path: Path) -> None:
    """Write a screenshot without its alpha channel, packed as well as the format can."""
    Image.open(io.BytesIO(png)).convert("RGB").save(path, optimize=True, quality=80)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

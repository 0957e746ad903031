"""Measure the viewer under load: first paint, what-if on 10,000 instances for several models, tiles for 8 clients, memory.

    python benchmarks/viewer.py FOLDER [--seconds 60] [--clients 8] [--models car/abmil,transmil,rrt,dsmil]

Writes into FOLDER, once, a pyramidal slide of 30,000 x 30,000 pixels and a short study of six slides of 10,000 x 1024 features.
Then starts `carmil view` in a process of its own and sends it HTTP requests from threads of this process. For the first model
everything is measured, for the others only what-if. First paint is that of the page in a fresh headless chromium (playwright,
from the dev group), as its own paint entries report it. cold: every tile is requested for the first time. warm: the 60 tiles of
one view again and again. roaming: any tile of the slide.
"""

import http.client
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import tifffile
from speed.script import run_script
from speed.timing import anonymous_memory

from carmil.bags.sources import Bag
from carmil.bags.writers import write_bag
from carmil.runs.settings import Settings
from carmil.studies.train import run_study

SIDE, TILE, ROWS, WIDTH, SLIDES = 30_000, 256, 10_000, 1024, 6


def make_slide(path: Path) -> None:
    """Noise like tissue, in JPEG tiles, with levels of 1, 4, 16 and 64."""
    rng = np.random.default_rng(0)
    smooth = np.kron(rng.integers(120, 240, (64, 64, 3)), np.ones((16, 16, 1)))
    texture = np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    sides = [SIDE // 4**level for level in range(4)]

    def tiles(side: int):
        across = -(-side // TILE)
        for i in range(across * across):
            y, x = (i // across * 97) % 768, (i % across * 61) % 768
            yield texture[y : y + TILE, x : x + TILE]

    options = {"tile": (TILE, TILE), "photometric": "rgb", "compression": "jpeg", "dtype": np.uint8, "metadata": None}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level, side in enumerate(sides):
            more = {"subifds": len(sides) - 1} if level == 0 else {"subfiletype": 1}
            resolution = {"resolution": (40_000 / 4**level,) * 2, "resolutionunit": "CENTIMETER"}
            file.write(tiles(side), shape=(side, side, 3), **options, **more, **resolution)


def train_run(folder: Path, model: str) -> Path:
    run = folder / f"run_{model.replace('/', '-')}"
    slides, features = folder / "slides", folder / "features"
    slides.mkdir(parents=True, exist_ok=True)
    if not (slides / "s0.tif").exists():
        make_slide(slides / "s0.tif")
    if not (folder / "labels.csv").exists():
        rng = np.random.default_rng(0)
        places = np.array([(x * TILE, y * TILE) for y in range(100) for x in range(100)], dtype=np.float32)
        for s in range(SLIDES):
            values = rng.normal(size=(ROWS, WIDTH)).astype(np.float16)
            values[:200, s % 2] += 3
            bag = Bag(f"s{s}", values, coordinates=places, coordinate_unit="level0_px", tile_size=TILE, encoder="noise")
            write_bag(bag, features, "trident")
        lines = [f"s{s},P{s},{'ab'[s % 2]}" for s in range(SLIDES)]
        (folder / "labels.csv").write_text("\n".join(["slide_id,case_id,label", *lines]) + "\n")
    run_study(
        Settings(bags=features, labels=folder / "labels.csv", out=run, model=model, folds=2, epochs=1, device="cpu")
    )
    return run


class Server:
    def __init__(self, run: Path, slides: Path) -> None:
        words = ["view", str(run), "--slides", str(slides), "--port", "0", "--no-browser"]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "carmil", *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        address = re.search(r":(\d+)/", self.process.stdout.readline())
        assert address is not None
        self.port = int(address[1])

    def mib(self) -> float:
        """Anonymous memory of the server, without the mapped features."""
        return anonymous_memory(self.process.pid) / 2**20


class Client:
    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def request(self, target: str, body: object = None) -> tuple[int, float, bytes]:
        """Status, milliseconds, body."""
        start = time.perf_counter()
        if body is None:
            self.connection.request("GET", target)
        else:
            self.connection.request("POST", target, json.dumps(body), {"content-type": "application/json"})
        response = self.connection.getresponse()
        content = response.read()
        return response.status, 1000 * (time.perf_counter() - start), content


def load(server: Server, clients: int, seconds: float, next_tile) -> str:
    """Times and errors of all clients together."""
    times: list[float] = []
    errors: Counter[int] = Counter()
    memory = [server.mib()]
    end = time.monotonic() + seconds

    def run_client(seed: int) -> None:
        client, rng = Client(server.port), random.Random(seed)
        while time.monotonic() < end and (target := next_tile(rng)) is not None:
            status, ms, _ = client.request(target)
            if status == 200:
                times.append(ms)
            else:
                errors[status] += 1

    threads = [threading.Thread(target=run_client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        memory.append(server.mib())
    middle = len(memory) // 2
    p50, p95, p99 = np.percentile(times, (50, 95, 99))
    return (
        f"{len(times):,} tiles, median {p50:.1f} ms, p95 {p95:.1f}, p99 {p99:.1f}, largest {max(times):.0f}; "
        f"errors {dict(errors) or 'none'}; memory {memory[0]:.0f} MiB before, {memory[middle]:.0f} halfway, {memory[-1]:.0f} "
        f"at the end (at most {max(memory):.0f})"
    )


def measure_tiles(server: Server, clients: int, seconds: float) -> None:
    client = Client(server.port)
    number = next(
        case["number"] for case in json.loads(client.request("/api/cohort")[2])["cases"] if case["slide"] == "s0"
    )
    top = json.loads(client.request(f"/api/case/{number}")[2])["picture"]["levels"] - 1

    def address(level: int, x: int, y: int) -> str:
        return f"/api/case/{number}/zoom/{level}/{x}_{y}.jpeg"

    across = {level: -(-SIDE // 2 ** (top - level)) // 254 for level in range(top - 5, top + 1)}
    view = [address(top, 20 + x, 20 + y) for x in range(10) for y in range(6)]
    untouched = [address(top - 1, x, y) for x in range(40) for y in range(10)]

    def roaming(rng: random.Random) -> str:
        level = rng.choice(list(across))
        return address(level, rng.randrange(across[level]), rng.randrange(across[level]))

    print("cold:   ", load(server, clients, seconds, lambda rng: untouched.pop() if untouched else None))
    client = Client(server.port)  # the server closes an idle connection after some seconds
    for target in view:
        client.request(target)
    print("warm:   ", load(server, clients, seconds, lambda rng: rng.choice(view)))
    print("roaming:", load(server, clients, seconds, roaming))


def measure_first_paint(server: Server, loads: int = 9) -> None:
    """Paint of the page with its first case, nothing cached."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("first paint: not measured: no chromium")
        return
    from playwright.sync_api import sync_playwright

    paints, listed = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(loads):
            context = browser.new_context(viewport={"width": 1400, "height": 900})
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{server.port}/")
            page.wait_for_selector(".rows .row")
            listed.append(page.evaluate("performance.now()"))
            page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            context.close()
        browser.close()
    print(
        f"first paint: median {np.median(paints):.0f} ms, largest {max(paints):.0f}; the cohort is listed after "
        f"{np.median(listed):.0f} ms ({loads} fresh pages)"
    )


def measure_first_view(server: Server) -> None:
    """Requests of a case that was not opened before."""
    client, number = Client(server.port), 1
    for name in ("case", "places", "map/evidence", "map/factual", "top", "deletion"):
        target = f"/api/case/{number}" + (f"/{name}?class=1" if name not in ("case", "places") else "")
        status, ms, body = client.request(target + ("/places" if name == "places" else ""))
        print(f"{name}: {ms:.0f} ms, {len(body):,} bytes ({status})")


def measure_whatif(server: Server, repeats: int) -> None:
    client, number = Client(server.port), 1
    rng = random.Random(0)
    questions = {
        "a region of 900 tiles": lambda: {
            "polygon": _square(rng.randrange(70) * TILE, rng.randrange(70) * TILE, 30 * TILE)
        },
        "the top tenth": lambda: {"top": 0.1, "map": "evidence", "class": 1},
        "5,000 by name": lambda: {"remove": rng.sample(range(ROWS), 5000)},
    }
    for name, question in questions.items():
        times = [client.request(f"/api/case/{number}/whatif", question())[1] for _ in range(repeats)]
        print(f"what-if, {name}: first {times[0]:.0f} ms, median {np.median(times):.0f}, largest {max(times):.0f}")
    status, ms, _ = client.request("/api/case/2/whatif", {"top": 0.1, "map": "evidence", "class": 1})
    print(f"what-if, a case that was not opened before: {ms:.0f} ms ({status})")


def _square(x: int, y: int, side: int) -> list[list[int]]:
    return [[x, y], [x + side, y], [x + side, y + side], [x, y + side]]


def main(folder: Path, seconds: float = 60, clients: int = 8, models: str = "car/abmil,transmil,rrt,dsmil") -> None:
    print(f"{clients} clients, {seconds:g} s each")
    for i, model in enumerate(models.split(",")):
        server = Server(train_run(folder, model), folder / "slides")
        try:
            print(f"\n{model}")
            if i == 0:
                measure_first_paint(server)
                measure_first_view(server)
            measure_whatif(server, repeats=30 if i == 0 else 9)
            if i == 0:
                measure_tiles(server, clients, seconds)
        finally:
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    run_script(main)

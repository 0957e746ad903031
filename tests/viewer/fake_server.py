"""A small server that implements the viewer's API for made-up cases, for tests of the page alone.

Case i has one of four kinds, i % 4: a slide with its picture; tiles without the slide file; pictures without places
(digits); features only. The probabilities are the softmax of the summed evidence of the remaining instances.
"""

import io
import json
import threading
import time
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image, ImageDraw

from carmil import viewer
from carmil.viewer.guard import HEADERS

PAGE = Path(viewer.__path__[0]) / "page"
CLASSES = ["normal", "micro", "macro"]
TILE, SIDE = 254, 512  # of the deep zoom, and of an instance in level-0 pixels
WIDTH, HEIGHT = 20480, 14336
CASES = 3000
BROKEN = 17  # this case cannot be read
TINY = 20  # this case's evidence is negligible
FAINT, FILL = 24, 0.25  # this case's evidence fills a quarter of the colours
UNIFORM = 28  # this case's attention is nearly uniform
CAUTION = "attention is nearly uniform: on this slide it is spread over 98 % of the instances, so maps of attention point nowhere"
WHY_FAINT = "all tiles together change no answer"
NEGLIGIBLE = "all tiles together change no logit"
MAPS = [
    {"name": "factual", "title": "attention weight", "diverging": False, "of_class": False},
    {"name": "counterfactual", "title": "counterfactual attention weight", "diverging": False, "of_class": False},
    {"name": "difference", "title": "attention weight minus counterfactual", "diverging": True, "of_class": False},
    {"name": "evidence", "title": "evidence", "diverging": True, "of_class": True},
]
PERCENT = {"share": True, "signed": False, "decimals": 2, "low": 0.0, "high": 1.0}
TARGET = {
    "outputs": [
        {
            "name": name, "positive": f"supports “{name}”", "negative": f"refutes “{name}”",
            "most_positive": f"Most supporting “{name}”", "most_negative": f"Most refuting “{name}”", "sides": "For and against",
            "top": f"that support “{name}” most", "curve": f"Probability of “{name}”",
        }
        for name in CLASSES
    ],
    "rows": [{"name": name, "output": i, "format": PERCENT} for i, name in enumerate(CLASSES)],
    "output_word": "class", "leading": "the answer", "predicted": "class", "quantity": "probability", "note": "",
    "format": PERCENT, "judged": True, "answers": True, "either": "is for or against",
    "neither": "is neither for nor against", "first": "most supporting first", "last": "least supporting first",
}  # fmt: skip
MEANINGS = {
    "factual": "share of the slide's attention: all weights add up to 1, and 0 is none",
    "counterfactual": "share of the attention for another answer: all weights add up to 1, and 0 is none",
    "difference": "difference of two shares of attention: blue is more for this answer, orange more for another, 0 is equal",
    "evidence": "blue supports, orange refutes, 0 neither: contribution to the logit of {}; all add up to its change from what "
    "is attended least",
}
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


TRUTH = [[7168, 3584], [10240, 3584], [10240, 8192], [7168, 8192], [7168, 3584]]


class RefusalError(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@cache
def places(i: int) -> np.ndarray:
    """Return the upper left corners (n, 2) of the tiles in an egg-shaped piece of tissue."""
    columns, rows = np.meshgrid(np.arange(WIDTH // SIDE), np.arange(HEIGHT // SIDE))
    x, y = columns.ravel(), rows.ravel()
    inside = ((x - 20) / 16) ** 2 + ((y - 14 + 2 * np.sin(x / 4 + i)) / 10) ** 2 < 1
    return np.stack([x[inside], y[inside]], 1) * SIDE


@cache
def evidence(i: int) -> np.ndarray:
    """Return the evidence (n, k) in logits. Two foci support `macro`, another part of the tissue refutes it."""
    random = np.random.default_rng(i)
    if i % 4 >= 2:
        return random.normal(0, 0.4, (30 if i % 4 == 2 else 1500, 3)).round(4) / (1 if i % 4 == 2 else 20)
    x, y = (places(i) / SIDE).T

    def focus(cx, cy, wide):
        return np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / wide)

    macro = focus(14, 11, 8) + 0.8 * focus(27, 18, 5) - 0.5 * focus(21, 8, 12) + random.normal(0, 0.03, len(x))
    micro = 0.6 * focus(25, 10, 6) - 0.4 * focus(14, 11, 8) + random.normal(0, 0.03, len(x))
    return (np.stack([-0.6 * macro, micro, macro], 1) / 6).round(4)


def answer(i: int, kept: np.ndarray, *, counterfactual: bool = False) -> list[float]:
    logits = evidence(i)[kept].sum(0) + np.array([0.4, 0.2, 0.0]) - np.array([0, 0, 2.0 if counterfactual else 0.0])
    shares = np.exp(logits - logits.max())
    return (shares / shares.sum()).round(4).tolist()


def most_probable(p: list[float]) -> str:
    return CLASSES[int(np.argmax(p))]


def attention(i: int, *, counterfactual: bool = False) -> np.ndarray:
    scores = 6 * evidence(i)[:, 1 if counterfactual else 2]
    return np.exp(scores) / np.exp(scores).sum()


@cache
def row(i: int) -> dict:
    probabilities = (
        answer(i, np.arange(len(evidence(i)))) if i < 40 else [0.2, 0.1 + 0.3 * (i % 2), 0.7 - 0.3 * (i % 2)]
    )
    prediction = most_probable(probabilities)
    label = None if i % 50 == 49 else CLASSES[(CLASSES.index(prediction) + (i % 6 == 5)) % 3]
    return {
        "number": i, "slide": f"patient_{i // 3:03d}_node_{i % 3}", "patient": f"patient_{i // 3:03d}", "label": label,
        "prediction": prediction, "rule": "the most probable class", "class": CLASSES.index(prediction),
        "value": max(probabilities), "predicted": probabilities,
        "counterfactual": CLASSES[(CLASSES.index(prediction) + (i % 5 > 0)) % 3],
        "right": None if label is None else label == prediction, "fold": i % 5, "instances": 0 if i >= 40 else len(evidence(i)),
        "thumbnail": i % 4 == 0,
    }  # fmt: skip


def link(i: int) -> str:
    """Return the part of a page's address that names the slide of a case."""
    return f"#slide={row(i)['slide']}"


def case(i: int) -> dict:
    known, kind = row(i), i % 4
    everything = np.arange(len(evidence(i)))
    levels = int(np.ceil(np.log2(max(WIDTH, HEIGHT)))) + 1
    return {
        **{name: known[name] for name in ("number", "slide", "label", "prediction", "rule", "class", "value", "right")},
        "instances": len(everything), "predicted": answer(i, everything),
        "counterfactual_predicted": answer(i, everything, counterfactual=True),
        "picture": None if kind else {
            "case": i, "width": WIDTH, "height": HEIGHT, "mpp": 0.5, "tile": TILE, "overlap": 1, "levels": levels,
        },
        "tile_pixels": None if kind > 1 else 256, "tile_mpp": None if kind > 1 else 1.0,
        "places": kind < 2, "tile_size": SIDE if kind < 2 else None, "extent": [WIDTH, HEIGHT] if kind == 1 else None,
        "images": kind in (0, 2),
    }  # fmt: skip


def a_map(i: int, name: str, c: int) -> dict:
    values = {
        "factual": lambda: attention(i),
        "counterfactual": lambda: attention(i, counterfactual=True),
        "difference": lambda: attention(i) - attention(i, counterfactual=True),
        "evidence": lambda: evidence(i)[:, c],
    }.get(name)
    if values is None:
        raise RefusalError(404, f"there is no map {name!r}; there are: {', '.join(MEANINGS)}")
    drawn, diverging = values(), name in ("difference", "evidence")
    faint = i == FAINT and name == "evidence"
    bound = float(np.abs(drawn).max()) / (FILL if faint else 1)
    return {
        "values": [float(f"{value:.4g}") for value in drawn],
        "low": -bound if diverging else float(drawn.min()),
        "high": bound if diverging else float(drawn.max()),
        "diverging": diverging,
        "of": MEANINGS[name].format(CLASSES[c]),
        "unit": "logit" if name == "evidence" else "",
        "negligible": NEGLIGIBLE if i == TINY and name == "evidence" else "",
        "even": False,
        "faint": WHY_FAINT if faint else "",
        "fill": FILL if faint else 1,
        "caution": CAUTION if i == UNIFORM and name == "factual" else "",
    }


def top(i: int, c: int, count: int) -> dict:
    values, order = evidence(i)[:, c], np.argsort(-evidence(i)[:, c], kind="stable")

    def entries(instances):
        corners = places(i).tolist() if i % 4 < 2 else [[None, None]] * len(values)
        return [
            {"instance": int(j), "value": float(values[j]), "x": corners[j][0], "y": corners[j][1]} for j in instances
        ]

    least = 0.05 * np.abs(values).max()
    if i == TINY:
        return {"supporting": [], "refuting": [], "negligible": NEGLIGIBLE, "attention": ""}
    return {
        "negligible": "",
        "attention": CAUTION if i == UNIFORM else "",
        "supporting": entries([j for j in order[:count] if values[j] >= least]),
        "refuting": entries([j for j in order[::-1][:count] if values[j] <= -least]),
    }


def deletion(i: int, c: int) -> dict:
    n, order = len(evidence(i)), np.argsort(-evidence(i)[:, c], kind="stable")
    shares = np.linspace(0, 1, 101)

    def curve(ordered):
        return [answer(i, ordered[round(share * n) :])[c] for share in shares]

    shuffled = np.random.default_rng(0).permutation(n)
    return {
        "share": shares.round(2).tolist(),
        "most": curve(order),
        "least": curve(order[::-1]),
        "random": curve(shuffled),
    }


def whatif(i: int, request: dict) -> dict:
    n = len(evidence(i))
    if "top" in request:
        order = np.argsort(-np.array(a_map(i, request["map"], request["class"])["values"]), kind="stable")
        removed = np.sort(order[: max(1, round(request["top"] * n))])
    elif "keep" in request:
        removed = np.setdiff1d(np.arange(n), request["keep"])
    else:
        removed = np.array(sorted(set(request["remove"])), dtype=int)
    kept = np.setdiff1d(np.arange(n), removed)
    if not len(kept):
        raise RefusalError(400, "nothing would be left: keep at least one instance")
    return {
        "removed": removed.tolist(), "before": answer(i, np.arange(n)), "after": answer(i, kept),
        "answer_before": most_probable(answer(i, np.arange(n))), "answer_after": most_probable(answer(i, kept)),
        "counterfactual_after": answer(i, kept, counterfactual=True),
    }  # fmt: skip


def annotations(i: int, added: dict | None = None) -> dict:
    """Return the truth, and the region that is added: nothing is kept."""
    truth = [{"id": "truth 0", "name": "labelled macro", "class": "", "colour": [28, 35, 48], "rings": [TRUTH]}]
    drawn = (
        []
        if added is None
        else [
            {
                "id": "1",
                "name": added["name"],
                "class": added["class"] or added["name"],
                "colour": [0, 90, 60],
                "rings": [added["outline"]],
            }
        ]
    )
    return {"drawn": drawn, "truth": truth if i % 4 == 0 else [], "file": "drawn", "refusal": "", "problem": ""}


def jpeg(image: Image.Image) -> bytes:
    held = io.BytesIO()
    image.save(held, "JPEG", quality=80)
    return held.getvalue()


@cache
def slide_picture() -> Image.Image:
    """Return the made-up slide at 1/16: a pale pink piece of tissue with darker cells."""
    small = Image.new("RGB", (WIDTH // 16, HEIGHT // 16), (244, 242, 245))
    draw, random = ImageDraw.Draw(small), np.random.default_rng(3)
    draw.ellipse((120, 110, 1160, 790), fill=(236, 190, 214), outline=(214, 150, 190), width=6)
    for x, y, r in random.uniform((140, 130, 2), (1140, 770, 6), (2500, 3)):
        if ((x - 640) / 510) ** 2 + ((y - 450) / 330) ** 2 < 1:
            draw.ellipse((x - r, y - r, x + r, y + r), fill=(150, 90, 160))
    return small


def zoom_tile(level: int, column: int, line: int) -> bytes:
    most = int(np.ceil(np.log2(max(WIDTH, HEIGHT))))
    shrink = 2 ** (most - level)
    wide, high = -(-WIDTH // shrink), -(-HEIGHT // shrink)
    left, upper = max(0, column * TILE - 1), max(0, line * TILE - 1)
    right, lower = min(wide, (column + 1) * TILE + 1), min(high, (line + 1) * TILE + 1)
    if not (0 <= level <= most and left < right and upper < lower):
        raise RefusalError(404, "there is no such tile")
    part = tuple(edge * shrink / 16 for edge in (left, upper, right, lower))
    return jpeg(slide_picture().resize((right - left, lower - upper), box=part))


def instance_picture(i: int, j: int) -> bytes:
    if i % 4 == 0:
        x, y = places(i)[j] / 16
        return jpeg(slide_picture().crop((int(x), int(y), int(x) + SIDE // 16, int(y) + SIDE // 16)).resize((128, 128)))
    image = Image.new("L", (28, 28), 255)
    ImageDraw.Draw(image).text((8, 6), str(int(j) % 10), fill=0)
    return jpeg(image)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words) -> None:
        pass

    def reply(self, content: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": len(content), **HEADERS,
                            "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}.items():  # fmt: skip
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def answer_to(self, does) -> None:
        try:
            response = does()
        except RefusalError as refusal:
            self.reply(json.dumps({"error": str(refusal)}).encode(), "application/json", refusal.status)
        else:
            if isinstance(response, tuple):
                self.reply(*response)
            else:
                self.reply(json.dumps(response).encode(), "application/json")

    def do_GET(self) -> None:
        self.answer_to(self.get)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        i, room = int(self.path.split("/")[3]), self.path.split("/")[4]
        self.answer_to(lambda: annotations(i, body["add"]) if room == "annotations" else whatif(i, body))

    def get(self):
        url = urlsplit(self.path)
        request = {name: int(value[0]) for name, value in parse_qs(url.query).items()}
        match url.path.strip("/").split("/"):
            case [""]:
                return (PAGE / "index.html").read_bytes(), TYPES[".html"]
            case ["page", name] if (PAGE / name).is_file():
                return (PAGE / name).read_bytes(), TYPES[Path(name).suffix]
            case ["api", "cohort"]:
                rows = [row(i) for i in range(CASES)]
                return {
                    "run": "a made-up run",
                    "runs": ["a made-up run"],
                    "target": TARGET,
                    "maps": MAPS,
                    "explainer": "path evidence",
                    "cases": rows,
                }
            case ["api", "case", i, *rest]:
                return self.of_case(int(i), rest, request)
        raise RefusalError(404, "there is nothing here")

    def of_case(self, i: int, rest: list[str], request: dict[str, int]):
        if i == BROKEN or i >= CASES:
            raise RefusalError(
                404, f"case {i}: its features are not where the run says; they were expected in the bags folder"
            )
        match rest:
            case []:
                return case(i)
            case ["places"]:
                return {"x": places(i)[:, 0].tolist(), "y": places(i)[:, 1].tolist()}
            case ["map", name]:
                return a_map(i, name, request["class"])
            case ["top"]:
                return top(i, request["class"], request["count"])
            case ["deletion"]:
                return deletion(i, request["class"])
            case ["annotations"]:
                return annotations(i)
            case ["tiles.csv"]:
                lines = ["tile,x_level0_px,y_level0_px", *(f"{j},{x},{y}" for j, (x, y) in enumerate(places(i)))]
                return "\n".join(lines).encode(), "text/csv"
            case ["zoom", level, name]:
                return zoom_tile(
                    int(level), *(int(part) for part in name.removesuffix(".jpeg").split("_"))
                ), "image/jpeg"
            case ["thumbnail.jpeg"]:
                return jpeg(slide_picture().resize((112, 78))), "image/jpeg"
            case ["instance", name]:
                return instance_picture(i, int(name.removesuffix(".jpeg"))), "image/jpeg"
        raise RefusalError(404, "there is nothing here")


@contextmanager
def serving():
    """Yield the address of a running server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with serving() as address:
        print(address, flush=True)
        while True:
            time.sleep(3600)

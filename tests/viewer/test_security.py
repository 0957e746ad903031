"""Hostile requests are answered with one line and nothing else."""

import json
import threading

import numpy as np
import pytest

from carmil.errors import CarmilError
from carmil.slides.slide import Level, Slide
from carmil.viewer import pictures
from carmil.viewer.app import LARGEST_BODY
from carmil.viewer.guard import HEADERS, known_hosts
from carmil.viewer.serve import checked_token, hosts_of, is_loopback

JSON = ("content-type", "application/json")
WHATIF = "/api/case/0/whatif"
ANNOTATIONS = "/api/case/0/annotations"

TRAVERSALS = [
    "/../../etc/passwd",
    "/page/../../../../etc/passwd",
    "/page/..%2f..%2f..%2fetc%2fpasswd",
    "/page/%2e%2e/%2e%2e/etc/passwd",
    "/page/%2E%2E%2Fapp.py",
    "/page/..%252f..%252fapp.py",
    "/page/%252e%252e%252fapp.py",
    "/page/..%c0%af..%c0%afapp.py",
    "/page/..%u2215app.py",
    "/page/..\\..\\app.py",
    "/page/..%5c..%5capp.py",
    "/page/....//....//app.py",
    "/page/..;/app.py",
    "/page//etc/passwd",
    "//etc/passwd",
    "/page/%2fetc%2fpasswd",
    "/page/C:%5cWindows%5cwin.ini",
    "/page/file:///etc/passwd",
    "/page/index.html%00.css",
    "/page/index.html\0.css",
    "/page/.gitignore",
    "/page/.",
    "/page/..",
    "/page/~root",
    "/page/",
    "/page/app.py",
    "/page/__init__.py",
    "/page/openseadragon.LICENSE.txt",
    "/page/index.html/",
    "/page/index.html/../../app.py",
    "/page/sub/folder.js",
    "/page/\xe9.js",
    "/page/main.js%0d%0aset-cookie:x=1",
    "/run.json",
    "/static/../run.json",
    "/api/../run.json",
    "/api/case/0/zoom/../../../run.json",
    "/api/case/0/zoom/10/..%2f..%2fsecret.txt",
    "/api/case/0/zoom/10/../secret.txt",
    "/api/case/0/instance/../../secret.txt",
    "/api/case/0/instance/secret.txt",
    "/api/case/s0/places",
    "/api/case/../../etc/passwd",
    "/api/case/0/map/..%2f..%2fweights.safetensors",
    "/api/case/0/map/weights.safetensors",
    "/api/case/0/annotations/../../secret.txt",
    "/api/case/0/annotations/s0.geojson",
    "/api/case/0/..%2fs0.geojson",
    "/api/case/0/s0.geojson",
]

HUGE = [
    "/api/case/99999999999999999999",
    "/api/case/" + "9" * 5000,
    "/api/case/-1",
    "/api/case/1e3",
    "/api/case/0x0",
    "/api/case/\xb2",
    "/api/case/0/zoom/99/0_0.jpeg",
    "/api/case/0/zoom/10/99999999_0.jpeg",
    "/api/case/0/zoom/10/9999999_9999999.jpeg",
    "/api/case/0/zoom/10/-1_0.jpeg",
    "/api/case/0/zoom/10/0_0.png",
    "/api/case/0/zoom/10/0_0.jpeg.exe",
    "/api/case/0/zoom/" + "1" * 100 + "/0_0.jpeg",
    "/api/case/0/instance/999999999.jpeg",
    "/api/case/0/instance/" + "9" * 50 + ".jpeg",
    "/api/case/0/top?class=2",
    "/api/case/0/top?class=-1",
    "/api/case/0/top?class=1.5",
    "/api/case/0/top?class=%D9%A1",
    "/api/case/0/top?class=0&class=1",
    "/api/case/0/top?count=0",
    "/api/case/0/top?count=101",
    "/api/case/0/top?count=999999999999999999999",
    "/api/case/0/top?" + "x=1&" * 50,
    "/api/case/0/top?&&&",
    "/api/case/0/top?class=%00",
    "/api/case/0/map/evidence?class=" + "1" * 5000,
    "/api/case/0/map/evidence?path=/etc/passwd",
    "/api/case/0/map/nothing",
    "/api/case/0/map/" + "a" * 1000,
    "/api/case/0/annotations?name=../../x",
    "/api/case/0/annotations.geojson?path=/etc/passwd",
    "/api/case/0/tiles.csv?columns=all",
    "/api/case/99999/tiles.csv",
    "/api/cohort?callback=steal",
    "/api/cohort?run=1",
    "/api/cohort?run=-1",
    "/api/cohort?run=" + "9" * 100,
    "/api/cohort?run=0&run=0",
    "/?token=x&next=http://elsewhere",
    "/" + "a/" * 3000,
]

METHODS = [
    ("POST", "/"),
    ("POST", "/api/cohort"),
    ("PUT", "/api/case/0"),
    ("DELETE", "/api/case/0"),
    ("PATCH", WHATIF),
    ("OPTIONS", WHATIF),
    ("TRACE", "/"),
    ("CONNECT", "/"),
    ("GET", WHATIF),
    ("PUT", ANNOTATIONS),
    ("DELETE", ANNOTATIONS),
    ("POST", f"{ANNOTATIONS}.geojson"),
    ("POST", "/api/case/0/tiles.csv"),
    ("BREW", "/api/cohort"),
]

HOSTS = [
    "elsewhere.example",
    "localhost.elsewhere.example",
    "127.0.0.1.elsewhere.example:8765",
    "elsewhere.example:8765",
    "192.168.0.7:8765",
    "localhost@elsewhere.example",
    "localhost:8765, elsewhere.example",
    "localhost:port",
    "[::1",
    "[::2]:8765",
    "0.0.0.0:8765",
    "",
    "\xb2",
    None,
]

FOREIGN = [
    [("origin", "http://elsewhere.example")],
    [("origin", "null")],
    [("origin", "http://localhost:9999")],
    [("origin", "file://")],
    [("sec-fetch-site", "cross-site")],
    [("sec-fetch-site", "same-site")],
]

KINDS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp", ""]

BODIES = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"0",
    b"[" * 100_000,
    b'{"remove": null}',
    b'{"remove": [-1]}',
    b'{"remove": [99]}',
    b'{"remove": [1.5]}',
    b'{"remove": [true]}',
    b'{"remove": ["0"]}',
    b'{"remove": {"0": 1}}',
    b'{"remove": [1e400]}',
    b'{"keep": null}',
    b'{"keep": []}',
    b'{"keep": [99]}',
    b'{"keep": [0], "remove": [0]}',
    b'{"top": ' + b"9" * 400 + b', "map": "evidence", "class": 0}',
    b'{"polygon": [[0, 0], [0, ' + b"9" * 400 + b"], [1, 1]]}",
    b'{"polygon": [[0, 0], [0, NaN], [1, 1]]}',
    b'{"remove": [' + b"9" * 5000 + b"]}",
    b'{"remove": [' + b"9" * 5000 + b"]}",
    b'{"top": 0, "map": "evidence", "class": 0}',
    b'{"top": 1.01, "map": "evidence", "class": 0}',
    b'{"top": NaN, "map": "evidence", "class": 0}',
    b'{"top": 1, "map": "evidence", "class": 0}',
    b'{"top": 0.5}',
    b'{"top": 0.5, "class": 0}',
    b'{"top": 0.5, "map": "none", "class": 0}',
    b'{"top": 0.5, "map": ["evidence"], "class": 0}',
    b'{"top": 0.5, "map": "evidence", "class": 2}',
    b'{"top": 0.5, "map": "evidence", "class": 0, "remove": []}',
    b'{"polygon": [[0, 0], [1, 1]]}',
    b'{"polygon": [[0, 0], [1, 1], [2]]}',
    b'{"polygon": [[0, 0], [1, 1], [Infinity, 0]]}',
    b'{"polygon": [[0, 0], [1, 1], ["a", 0]]}',
    json.dumps({"polygon": [[0, 0]] * 1001}).encode(),
    b'{"__proto__": {}}',
    b'{"remove": [' + b"0," * LARGEST_BODY + b"0]}",
]


CHANGES = [
    b"",
    b"[]",
    b"null",
    b"{}",
    b'{"add": null}',
    b'{"add": {"name": "a"}}',
    b'{"add": {"name": 1, "outline": [[0, 0], [9, 0], [9, 9]]}}',
    b'{"add": {"name": "", "outline": [[0, 0], [9, 0], [9, 9]]}}',
    b'{"add": {"name": "a\\u0000b", "outline": [[0, 0], [9, 0], [9, 9]]}}',
    b'{"add": {"name": "\\ud800", "outline": [[0, 0], [9, 0], [9, 9]]}}',
    b'{"add": {"name": "\\u202egnp.x", "outline": [[0, 0], [9, 0], [9, 9]]}}',
    b'{"add": {"name": "a", "outline": {}}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0]]}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [9, 9, 9]]}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], ["9", 9]]}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [true, 9]]}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [NaN, 9]]}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [1e400, 9]]}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [' + b"9" * 400 + b", 9]]}}",
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [9, 9]], "file": "../../x"}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [9, 9]], "class": {"name": "b"}}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [9, 9]], "class": "b\\u0000"}}',
    b'{"classify": {"region": "1"}}',
    b'{"classify": {"region": "1", "class": null}}',
    b'{"classify": {"region": "1", "class": "b", "colour": [0, 0, 0]}}',
    b'{"classify": {"region": "1", "class": "b"}}',
    b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [9, 9]]}, "delete": {"region": "1"}}',
    json.dumps({"add": {"name": "a" * 101, "outline": [[0, 0], [9, 0], [9, 9]]}}).encode(),
    json.dumps({"add": {"name": "a", "outline": [[0, 0]] * 5001}}).encode(),
    json.dumps(
        {"add": {"name": "a", "outline": [[(3571 * i) % 4999, (7919 * i) % 4993] for i in range(5000)]}}
    ).encode(),
    b'{"rename": {"region": "../../x", "name": "a"}}',
    b'{"rename": {"region": 0, "name": "a"}}',
    b'{"delete": {"region": "../../x"}}',
    b'{"delete": {"region": ["1"]}}',
    b'{"delete": "all"}',
    b'{"add": {"name": "' + b"a" * LARGEST_BODY + b'", "outline": []}}',
]


def assert_refused(response, *statuses):
    """Assert a one-line error without traceback or file contents, and with every security header."""
    assert response.status in (statuses or (400, 404, 405, 414)), response.body[:200]
    (line,) = response.json.values()
    assert list(response.json) == ["error"] and line and "\n" not in line and len(line) < 300
    for word in (b"Traceback", b"root:", b"nobody may read", b"site-packages", b"/tmp"):
        assert word not in response.body
    assert response.headers.items() >= HEADERS.items()


@pytest.mark.parametrize("target", TRAVERSALS)
def test_path_traversal_is_rejected(ask, target):
    assert_refused(ask(target), 404)


@pytest.mark.parametrize("target", HUGE)
def test_out_of_range_numbers_and_unknown_parameters_are_rejected(ask, target):
    assert_refused(ask(target))


@pytest.mark.parametrize(("method", "target"), METHODS)
def test_other_http_methods_are_rejected(ask, method, target):
    assert_refused(ask(target, method, [JSON]), 405)


@pytest.mark.parametrize("host", HOSTS)
def test_unknown_hosts_are_rejected(ask, host):
    assert_refused(ask("/api/cohort", host=host), 421)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8765", "[::1]:8765"])
def test_loopback_hosts_are_accepted(ask, host):
    assert ask("/api/case/0", host=host).status == 200


@pytest.mark.parametrize("headers", FOREIGN)
def test_cross_site_requests_are_rejected(ask, headers):
    assert_refused(ask(WHATIF, "POST", [JSON, *headers], b'{"remove": []}'), 403)
    assert_refused(ask("/api/cohort", headers=headers), 403)


def test_same_origin_requests_are_accepted(ask):
    own = [JSON, ("origin", "http://localhost:8765"), ("sec-fetch-site", "same-origin")]
    assert ask(WHATIF, "POST", own, b'{"remove": []}').status == 200
    assert ask("/", headers=[("sec-fetch-site", "cross-site")]).status == 200  # a link to the viewer


@pytest.mark.parametrize("kind", KINDS)
def test_posts_that_are_not_json_are_rejected(ask, kind):
    assert_refused(ask(WHATIF, "POST", [("content-type", kind)], b'{"remove": []}'), 415)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_invalid_request_bodies_are_rejected(ask, body):
    assert_refused(ask(WHATIF, "POST", [JSON], body), 400, 413, 422)


@pytest.mark.parametrize("body", CHANGES, ids=range(len(CHANGES)))
def test_invalid_changes_of_annotations_are_rejected_and_write_nothing(ask, study_folder, body):
    assert_refused(ask(ANNOTATIONS, "POST", [JSON], body), 400, 413, 422)
    assert not (study_folder / "annotations").exists()


@pytest.mark.parametrize(
    "headers", [[JSON, *foreign] for foreign in FOREIGN] + [[("content-type", kind)] for kind in KINDS]
)
def test_annotations_cannot_be_changed_from_another_page(ask, study_folder, headers):
    body = b'{"add": {"name": "a", "outline": [[0, 0], [9, 0], [9, 9]]}}'
    assert_refused(ask(ANNOTATIONS, "POST", headers, body), 403, 415)
    assert not (study_folder / "annotations").exists()


def test_region_with_a_hostile_name_is_saved_in_the_folder_of_annotations_only(
    ask, study_folder, tmp_path, run, asking
):
    from carmil.viewer.app import guarded_app
    from carmil.viewer.responses import Responses
    from carmil.viewer.slide_files import SlideFiles

    responses = Responses(run, SlideFiles(None, []), annotations=tmp_path / "inside")
    ask = asking(guarded_app(responses, is_known=known_hosts([], any_address=False)))
    for name in ("../../x", "/etc/passwd", "C:\\x", "<script>alert(1)</script>", "=1+1", "con"):
        done = ask.post(ANNOTATIONS, {"add": {"name": name, "outline": [[0, 0], [9, 0], [9, 9]]}})
        assert done.status == 200 and done.json["drawn"][-1]["name"] == name
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        f"inside/{run.cases[0].slide}.geojson"
    ]


def test_duplicate_or_oversized_headers_are_rejected(ask):
    assert_refused(ask("/api/cohort", headers=[("host", "localhost")]), 400)
    assert_refused(ask("/api/cohort", headers=[("cookie", "a=1"), ("cookie", "b=1")]), 400)
    assert_refused(ask("/api/cohort", headers=[("x-long", "x" * 9000)]), 431)


def test_symlink_out_of_the_page_folder_is_not_served(ask, tmp_path, monkeypatch):
    from carmil.viewer import app

    (tmp_path / "secret.js").write_text("nobody may read this")
    page = tmp_path / "page"
    page.mkdir()
    (page / "own.js").write_text("ours")
    (page / "out.js").symlink_to(tmp_path / "secret.js")
    monkeypatch.setattr(app, "PAGE", page)
    assert ask("/page/own.js").body == b"ours"
    assert_refused(ask("/page/out.js"), 404)


def test_slide_replaced_by_a_symlink_is_not_opened(study_folder, run, tmp_path):
    from carmil.viewer.slide_files import SlideFiles

    inside = tmp_path / "slides"
    inside.mkdir()
    (inside / "s0.tif").write_bytes((study_folder / "elsewhere.tif").read_bytes())
    files = SlideFiles(inside, ["s0"])
    (inside / "s0.tif").unlink()
    (inside / "s0.tif").symlink_to(study_folder / "elsewhere.tif")
    with pytest.raises(CarmilError, match=r"s0\.tif is outside the folder"), files.opened("s0"):
        pass


def test_every_response_forbids_framing_and_foreign_scripts(ask):
    for target in ("/", "/api/cohort", "/api/case/0/zoom/0/0_0.jpeg", "/nothing"):
        headers = ask(target).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers and "server" not in headers


@pytest.mark.parametrize("target", ["/", "/page/main.js", "/api/cohort", "/api/case/0/zoom/0/0_0.jpeg", "/nothing"])
@pytest.mark.parametrize(
    "cookie",
    [None, "carmil_8765=", "carmil_8765=" + "t" * 31, "carmil_8765=" + "t" * 33, "other=" + "t" * 32, ";;;=\xe9"],
)
def test_requests_without_the_token_are_rejected(ask_with_token, target, cookie):
    assert_refused(ask_with_token(target, headers=[("cookie", cookie)] if cookie is not None else []), 401)


@pytest.mark.parametrize("target", ["/?token=", "/?token=wrong", "/?token=" + "t" * 33, "/?token=%ff"])
def test_wrong_token_is_rejected(ask_with_token, target):
    response = ask_with_token(target)
    assert_refused(response, 401)
    assert "set-cookie" not in response.headers


def test_valid_token_sets_a_cookie_that_scripts_cannot_read(ask_with_token):
    response = ask_with_token("/?token=" + "t" * 32)
    assert (response.status, response.headers["location"]) == (303, "/")
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    cookie_header = [("cookie", cookie.partition(";")[0])]
    assert ask_with_token("/api/cohort", headers=cookie_header).status == 200
    assert_refused(ask_with_token("/api/cohort?token=" + "t" * 32), 400)
    assert_refused(ask_with_token("/?token=wrong", headers=cookie_header), 401)


def test_token_is_generated_for_addresses_other_than_loopback():
    assert checked_token(None, "127.0.0.1") is checked_token(None, "localhost") is checked_token(None, "::1") is None
    tokens = [checked_token(None, host) for host in ("0.0.0.0", "::", "192.168.0.7", "machine.example", "")]
    assert all(len(token) >= 40 for token in tokens) and len(set(tokens)) == 5
    assert checked_token("x" * 16, "0.0.0.0") == "x" * 16
    for bad in ("", "short", "with space in it....", "ä" * 20, "x;y" * 10):
        with pytest.raises(CarmilError, match="--token"):
            checked_token(bad, "127.0.0.1")
    assert not is_loopback("127.0.0.1.elsewhere.example")


def test_only_the_given_host_is_accepted():
    assert hosts_of("machine.example")("machine.example") and not hosts_of("machine.example")("other.example")
    assert hosts_of("192.168.0.7")("192.168.0.7") and not hosts_of("192.168.0.7")("192.168.0.8")
    assert hosts_of("0.0.0.0")("192.168.0.8") and not hosts_of("0.0.0.0")("elsewhere.example")
    assert hosts_of("::1")("[::1]") and known_hosts([], any_address=True)("[fe80::1]")


def test_ten_thousand_concurrent_tile_requests_are_served_or_deferred(ask, answers, number_of):
    number = number_of["s1"]
    where = [(level, x, y) for level in range(16) for x in range(25) for y in range(25)]
    targets = [f"/api/case/{number}/zoom/{level}/{x}_{y}.jpeg" for level, x, y in where]
    assert len(targets) == 10_000
    responses = ask.many(targets)
    statuses = {status: sum(one.status == status for one in responses) for status in {one.status for one in responses}}
    assert set(statuses) <= {200, 404, 503} and statuses[200] > 0
    for one in responses:
        if one.status == 200:
            assert one.body[:2] == b"\xff\xd8" and len(one.body) < 2**17
        else:
            assert_refused(one, 404, 503)
            assert one.status == 404 or one.headers["retry-after"] == "1"
    assert answers.pictures._kept.weight <= pictures.KEPT
    assert ask(f"/api/case/{number}/zoom/10/0_0.jpeg").status == 200  # the server then responds normally again


def test_concurrent_requests_for_the_same_tile_read_it_once(ask, answers, number_of, monkeypatch):
    read = []
    monkeypatch.setattr(
        type(answers.pictures),
        "tile",
        lambda self, *key: read.append(key) or threading.Event().wait(0.05) or b"\xff\xd8",
    )
    number = number_of["s1"]
    responses = ask.many([f"/api/case/{number}/zoom/9/1_1.jpeg"] * 1000 + [f"/api/case/{number}/zoom/64/0_0.jpeg"])
    assert {one.status for one in responses[:1000]} == {200}
    assert len(read) <= 2


def test_slow_request_does_not_block_other_requests(ask, answers, monkeypatch):
    import asyncio

    gate = threading.Event()
    monkeypatch.setattr(type(answers), "deletion", lambda self, number, of: gate.wait(10) and b"{}")

    async def both():
        slow = asyncio.create_task(ask.one("/api/case/0/deletion?class=0"))
        others = [await ask.one(target) for target in ("/api/cohort", "/api/case/0/zoom/0/0_0.jpeg", "/")]
        assert not slow.done()
        gate.set()
        return others, await slow

    others, slow = ask.runner.run(both())
    assert slow.status == 200 and all(one.status in (200, 404) for one in others)


class Flat(Slide):
    """A huge slide without small levels that records the pixels read."""

    width = height = 200_000
    mpp, mpp_from = 0.25, "made"
    levels = (Level(200_000, 200_000, 1.0),)

    def __init__(self):
        self.read_pixels = []

    def read(self, x, y, width, height, pixels):
        self.read_pixels.append(width * height)
        return np.zeros((pixels[1], pixels[0], 3), np.uint8)


def test_no_tile_request_reads_a_whole_slide():
    slide = Flat()
    zoom = pictures.zoom_of(slide)
    for level in range(zoom.levels):
        pictures._tile(slide, level, 0, 0)
    assert zoom.coarsest > 0
    assert len(slide.read_pixels) == zoom.levels - zoom.coarsest and max(slide.read_pixels) <= pictures.MOST_READ


def test_internal_error_is_logged_and_answered_with_one_line(ask, answers, monkeypatch, caplog):
    def broken(self, number):
        raise RuntimeError("/a/secret/path is broken")

    monkeypatch.setattr(type(answers), "case", broken)
    response = ask("/api/case/1")
    assert_refused(response, 500)
    assert b"secret" not in response.body and "broken" in caplog.text


@pytest.mark.finding(n=15)
@pytest.mark.parametrize("body", [b"", b'{"remove": [0'])
def test_interrupted_request_is_rejected_without_a_log_entry(ask, caplog, body):
    assert_refused(ask.runner.run(ask.one(WHATIF, "POST", [JSON], body, cut=True)), 400)
    assert not caplog.records

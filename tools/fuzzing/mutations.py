"""Damaged and hostile variants of a file: of its bytes, and of the structure that its format has.

`mutated` is a function of its arguments alone, so that a case can be made again from its seed.
"""

import csv
import io
import json
import re
import struct
import zipfile
import zlib
from contextlib import suppress
from random import Random
from typing import Any

ODD_JSON = (
    *("null", "true", "false", '""', '"x"', "-1", "0", "1", "0.5", "-0.0", "1e400", "-1e400", "NaN", "Infinity"),
    *("1e-320", "2147483648", "9223372036854775808", "9" * 400, "9" * 5000, "[]", "{}", "[[]]", '{"":{}}', "[null]"),
    *('"\\u0000"', '"\\ud800"', '"a\\nb"', '"../../x"', '"nan"', '"1e400"', '"\\u001b[2J"', "[1,[2,[3]]]", "[NaN,1]"),
    *(
        '"' + "x" * 5000 + '"',
        "[" * 2000 + "]" * 2000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 3000 + "1" + "}" * 3000,
    ),
)
ODD_CELLS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1e400",
        "nan",
        "NA",
        "inf",
        "9" * 400,
        "=1+1",
        "../../x",
        "\0",
        "a\nb",
        '"',
        '""',
        "\x1b[2J",
    ),
    *(
        "\ud7ff",
        "\ufeff",
        "x" * 5000,
        "true",
        "None",
        "1.0",
        "½",
        "\u2028",
        "é",
        "e\u0301",
        "train",
        "test",
        "0,1",
        "\t",
    ),
)
ODD_YAML = (
    *(
        "2001-01-01",
        "2001-99-99",
        "2001-01-01t25:61:61",
        "2001-02-30",
        "9999-12-31T23:59:59.999999+99:99",
        "0001-01-01",
    ),
    *("1e400", ".inf", ".nan", "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1:99:99:99", "!!python/object:os.system x"),
    *("!!binary x", "!!set {a, b}", "!!omap [a: 1]", "&a [*a]", "*nothing", "{a: b", "[1, 2", "? [a]\n: b", "~", "yes"),
    *(
        "[" * 3000,
        "[" * 500 + "]" * 500,
        "{a: " * 800 + "}" * 800,
        "'",
        '"\\x"',
        "|",
        ">\n x",
        "- 1",
        "!!int x",
        "!!float x",
    ),
    *("!!timestamp x", "!!bool maybe", "!!null x", "<<: 1", "1_000", "0b2", "0o9", "-", "%TAG x", "\0", "\x85", "{}"),
)
NUMBERS = (0, 1, 2, 3, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def mutated(content: bytes, suffix: str, rng: Random, others: tuple[bytes, ...] = ()) -> bytes:
    """A variant of a file's content. `suffix` names its format, `others` are files of which pieces may be put in."""
    structured = STRUCTURED.get(suffix)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = None
        if structured is not None and rng.random() < 0.6:
            with suppress(Exception):  # the content may be damaged already, and its library raises anything
                changed = structured(content, rng)
        if changed is None:
            changed = _bytes(content, rng, others)
            if suffix in (".h5", ".parquet"):  # over a damaged one the libraries hang or raise anything
                structured = None
        content = changed
    return content


def _bytes(content: bytes, rng: Random, others: tuple[bytes, ...]) -> bytes:
    data = bytearray(content)
    if not data:
        return rng.randbytes(rng.randrange(64))
    at = rng.randrange(len(data))
    size = min(len(data) - at, rng.choice((1, 2, 4, 8, 16, 64, 256, 4096)))
    match rng.randrange(10):
        case 0:
            for _ in range(rng.choice((1, 1, 2, 8, 32))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
        case 2:
            del data[at:]
        case 3:
            del data[at : at + size]
        case 4:
            data[at:at] = data[at : at + size] * rng.choice((1, 1, 2, 50))
        case 5:
            other = rng.randrange(len(data))
            data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
        case 6:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16, 256)))
        case 7 | 8:
            width = rng.choice((2, 4, 8))
            number = rng.choice(NUMBERS) % 2 ** (8 * width)
            data[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
        case 9:
            source = rng.choice(others) if others else content
            start = rng.randrange(len(source)) if source else 0
            data[at : at + size] = source[start : start + size]
    return bytes(data)


def _json(content: bytes, rng: Random) -> bytes | None:
    """A value of the tree is replaced by an odd one, removed, renamed, repeated or exchanged with another."""
    try:
        tree: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    places = list(_places(tree))
    if not places:
        return rng.choice(ODD_JSON).encode("utf-8", "surrogatepass")
    holder, key = rng.choice(places)
    token = None
    match rng.randrange(7):
        case 0 | 1 | 2:
            token, holder[key] = rng.choice(ODD_JSON), "@@odd@@"
        case 3:
            del holder[key]
        case 4:
            other, place = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[place]))
        case 5 if isinstance(holder, dict):
            holder[rng.choice(("", "x", "__class__", "id", "type", key.upper()))] = holder.pop(key)
        case _:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"": holder[key]}
    text = json.dumps(tree)
    return (text if token is None else text.replace('"@@odd@@"', token)).encode("utf-8", "surrogatepass")


def _places(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(min(len(tree), 50)):
            yield tree, key
            yield from _places(tree[key])


def _table(content: bytes, rng: Random) -> bytes | None:
    text = content.decode("utf-8", "replace")
    delimiter = "\t" if "\t" in text else ","
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return None
    rows = [row for row in rows if row]
    if not rows:
        return None
    row = rng.choice(rows)
    column = rng.randrange(len(row))
    match rng.randrange(7):
        case 0 | 1 | 2:
            row[column] = rng.choice(ODD_CELLS)
        case 3:
            rows.remove(row)
        case 4:
            rows.insert(rng.randrange(len(rows)), list(row))
        case 5:
            row.insert(column, rng.choice(ODD_CELLS)) if rng.random() < 0.5 else row.pop(column)
        case _:
            odd = rng.choice(ODD_CELLS)
            for other in rows[rng.randrange(2) :]:
                if column < len(other):
                    other[column] = odd
    out = io.StringIO()
    csv.writer(out, delimiter=rng.choice((delimiter, delimiter, delimiter, ";", "\t", ","))).writerows(rows)
    return out.getvalue().encode(rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1")), "replace")


def _xml(content: bytes, rng: Random) -> bytes | None:
    text = content.decode("utf-8", "replace")
    attributes = list(re.finditer(r'"([^"]*)"', text))
    tags = list(re.finditer(r"<[^>]*>", text))
    if not tags:
        return None
    if attributes and rng.random() < 0.6:
        found, odd = rng.choice(attributes), rng.choice(ODD_CELLS).replace('"', "&quot;").replace("\0", "")
        return (text[: found.start(1)] + odd + text[found.end(1) :]).encode("utf-8", "replace")
    found = rng.choice(tags)
    odd = rng.choice(
        (
            "",
            "<a>" * 3000,
            "<a>" * 100_000,
            "&x;",
            "<!DOCTYPE a [<!ENTITY x 'y'>]>",
            found[0] * 2,
            "<![CDATA[",
            "]]>",
            "<a b=''/>",
        )
    )
    return (text[: found.start()] + odd + text[found.end() :]).encode()


def _yaml(content: bytes, rng: Random) -> bytes | None:
    lines = content.decode("utf-8", "replace").splitlines()
    at = rng.randrange(len(lines)) if lines else 0
    odd = rng.choice(ODD_YAML)
    match rng.randrange(6):
        case 0 | 1 | 2 if lines:
            lines[at] = f"{lines[at].partition(':')[0]}: {odd}"
        case 3:
            lines.insert(at, f"{odd}: {rng.choice(ODD_YAML)}")
        case 4:
            levels, name = rng.choice((4, 9, 30)), rng.choice(("options", "model", "lr", "folds", "out"))
            bomb = [f"{name}:", "  a0: &a0 [x, x, x, x, x, x, x, x, x]"]
            bomb += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
            lines = [line for line in lines if not line.startswith(f"{name}:")] + bomb
        case _:
            lines.insert(at, odd)
    return "\n".join(lines).encode("utf-8", "replace")


def _tiff(content: bytes, rng: Random) -> bytes | None:
    """Tag, type, count or value of an entry of a directory of classic or big TIFF."""
    if content[:2] not in (b"II", b"MM") or len(content) < 16:
        return None
    order = "<" if content[:2] == b"II" else ">"
    (magic,) = struct.unpack_from(order + "H", content, 2)
    big = magic == 43
    entries: list[int] = []
    try:
        (at,) = struct.unpack_from(order + ("Q" if big else "I"), content, 8 if big else 4)
        for _ in range(8):
            if not at:
                break
            (many,) = struct.unpack_from(order + ("Q" if big else "H"), content, at)
            start, size = at + (8 if big else 2), 20 if big else 12
            if many > 200:
                break
            entries += [start + i * size for i in range(many)]
            (at,) = struct.unpack_from(order + ("Q" if big else "I"), content, start + many * size)
    except struct.error:
        pass
    if not entries:
        return None
    data, at = bytearray(content), rng.choice(entries)
    width = 8 if big else 4
    field = rng.choice(("tag", "type", "count", "value", "value"))
    number = rng.choice((*NUMBERS, rng.randrange(2**16), len(content), len(content) - 1))
    try:
        match field:
            case "tag":
                tags = (
                    254,
                    256,
                    257,
                    258,
                    259,
                    262,
                    270,
                    273,
                    277,
                    278,
                    279,
                    282,
                    284,
                    296,
                    317,
                    322,
                    323,
                    324,
                    325,
                    330,
                    338,
                    347,
                    530,
                )
                struct.pack_into(order + "H", data, at, rng.choice((*tags, number % 65536)))
            case "type":
                struct.pack_into(order + "H", data, at + 2, rng.choice((*range(20), 65535)))
            case "count":
                struct.pack_into(order + ("Q" if big else "I"), data, at + 4, number % 2 ** (8 * width))
            case _:
                struct.pack_into(order + ("Q" if big else "I"), data, at + 4 + width, number % 2 ** (8 * width))
    except struct.error:
        return None
    return bytes(data)


def _zip(content: bytes, rng: Random) -> bytes | None:
    """A member of the archive is changed and packed again, with a right checksum."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
    except (
        zipfile.BadZipFile,
        OSError,
        ValueError,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        struct.error,
    ):
        return None
    if not members:
        return None
    name = rng.choice(list(members))
    match rng.randrange(8):
        case 0:
            del members[name]
        case 1:
            members[rng.choice(("../x", "features.npy", "", "\0", name.upper()))] = members.pop(name)
        case 2:
            members[name] += bytes(2**20)
        case _:
            change = _npy if members[name].startswith(b"\x93NUMPY") else _bytes_only
            members[name] = change(members[name], rng) or members[name]
    out = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(out, "w", method) as archive:
        for member, data in members.items():
            archive.writestr(zipfile.ZipInfo(member or "x"), data, method)
    return out.getvalue()


def _bytes_only(content: bytes, rng: Random) -> bytes:
    return _bytes(content, rng, ())


def _npy(content: bytes, rng: Random) -> bytes | None:
    """Another type, shape or order in the header."""
    found = re.search(rb"\{.*\}", content[:512], re.DOTALL)
    if found is None:
        return None
    header, odd = found[0], rng.choice
    shapes = (
        b"()",
        b"(-1, 4)",
        b"(0, 4)",
        b"(6,)",
        b"(1, 6, 4)",
        b"(1000000000, 1024)",
        b"(6, 0)",
        b"(99999999999999999999,)",
        b"6",
        b"(6.5, 4)",
        b"None",
        b"(True, 24)",
    )
    types = (
        b"'<f2'",
        b"'>f4'",
        b"'<f8'",
        b"'|O'",
        b"'<i8'",
        b"'|V7'",
        b"'<U9'",
        b"'<M8[s]'",
        b"'|b1'",
        b"'x'",
        b"[('a', '<f4')]",
        b"'<c8'",
        b"'(2,)f4'",
        b"None",
        b"'|S0'",
    )
    match rng.randrange(4):
        case 0:
            header = re.sub(rb"'shape': \([^)]*\)", lambda _: b"'shape': " + odd(shapes), header)
        case 1:
            header = re.sub(rb"'descr': '[^']*'", lambda _: b"'descr': " + odd(types), header)
        case 2:
            header = header.replace(b"False", odd((b"True", b"None", b"1", b"[]")))
        case _:
            header = odd((b"{}", b"{'a': 1}", b"(" * 300, b"__import__('os')", b"{'descr': '<f4'}", b"[" * 5000))
    header = header + b" " * max(0, len(found[0]) - len(header))
    start = content[: found.start()]
    if len(header) != len(found[0]) and len(start) >= 10:
        start = start[:8] + struct.pack("<H", min(65535, len(header) + 1)) + start[10:]
    return start + header + content[found.end() :]


def _safetensors(content: bytes, rng: Random) -> bytes | None:
    if len(content) < 8:
        return None
    (size,) = struct.unpack_from("<Q", content)
    if size > len(content) - 8:
        return None
    header = _json(content[8 : 8 + size], rng)
    return None if header is None else struct.pack("<Q", len(header)) + header + content[8 + size :]


def _hdf5(content: bytes, rng: Random) -> bytes | None:
    """An attribute or array replaced by one of another type or shape, or by a link."""
    import h5py
    import numpy as np

    memory = io.BytesIO(content)
    odd = (
        *(
            -1,
            0,
            1e300,
            np.nan,
            np.inf,
            "",
            "x",
            "None",
            b"\xff",
            "a\nb",
            2**63 - 1,
            [],
            [1, 2],
            ["a", "b"],
            np.zeros((2, 3)),
        ),
        *(
            h5py.Empty("f4"),
            np.bool_(True),
            np.complex64(1),
            np.zeros(2, "i4,f4"),
            np.zeros(1000),
            np.float16(1),
            "x" * 5000,
        ),
    )
    try:
        with h5py.File(memory, "r+") as file:
            items: list[Any] = [file]
            file.visititems(lambda name, item: items.append(item))
            item = rng.choice(items)
            attributes = list(item.attrs)
            if rng.random() < 0.6 or item is file:
                name = (
                    rng.choice(attributes)
                    if attributes and rng.random() < 0.8
                    else rng.choice(("unit", "encoder", "label", "mpp"))
                )
                if rng.random() < 0.2 and name in attributes:
                    del item.attrs[name]
                else:
                    item.attrs[name] = rng.choice(odd)
            else:
                name, parent, told = item.name, item.parent, dict(item.attrs)
                shape = item.shape if isinstance(item, h5py.Dataset) else (6, 4)
                del file[name]
                new = rng.randrange(8)
                if new == 0:
                    parent[name] = h5py.SoftLink(rng.choice(("/", "/nowhere", name)))
                elif new == 1:
                    parent[name] = h5py.ExternalLink("other.h5", "/features")
                elif new == 2:
                    parent.create_group(name)
                elif new == 3:
                    parent.create_dataset(name, shape=(10**9, 64), dtype="f4", chunks=(64, 64), compression="gzip")
                elif new == 4:
                    parent.create_dataset(name, data=rng.choice(odd))
                elif new == 5:
                    kind = rng.choice(("f2", "f4", ">f4", "f8", "i1", "u8", "c8", "S3", "?", "V4", "M8[s]"))
                    parent.create_dataset(name, data=np.zeros(shape or (), kind if kind != "M8[s]" else "i8"))
                else:
                    other = rng.choice(((), (0,), (6,), (0, 4), (1, 6, 4), (4, 6), (6, 4, 1), (7, 2), (1, 1)))
                    parent.create_dataset(name, data=np.full(other, rng.choice((0, 1, np.nan, np.inf, -1)), "f4"))
                if new > 1 and name in file:
                    for key, value in told.items():
                        parent[name].attrs[key] = value
    except Exception:  # the content may be damaged already
        return None
    return memory.getvalue()


def _parquet(content: bytes, rng: Random) -> bytes | None:
    """A column dropped, repeated, renamed, or of other values; or other metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(content))
    except Exception:  # the content may be damaged already
        return None
    if not table.num_columns:
        return None
    at, rows = rng.randrange(table.num_columns), table.num_rows
    name = table.column_names[at]
    columns = (
        lambda: pa.array([None] * rows, pa.float64()),
        lambda: pa.array([None] * rows),
        lambda: pa.array([float("nan")] * rows),
        lambda: pa.array([float("inf")] * rows),
        lambda: pa.array([-1] * rows),
        lambda: pa.array([2**62] * rows),
        lambda: pa.array(["x"] * rows),
        lambda: pa.array([""] * rows),
        lambda: pa.array([b"\xff"] * rows),
        lambda: pa.array([[1, 2]] * rows),
        lambda: pa.array([{"a": 1}] * rows),
        lambda: pa.array([True] * rows),
        lambda: pa.array([1] * rows, pa.timestamp("s")),
        lambda: pa.array([2**40] * rows, pa.date64()),
        lambda: pa.array(["a"] * rows).dictionary_encode(),
        lambda: pa.array([1] * rows, pa.decimal128(38, 10)),
        lambda: pa.array([1] * rows, pa.duration("ns")),
    )
    try:
        match rng.randrange(8):
            case 0:
                table = table.remove_column(at)
            case 1:
                names = list(table.column_names)
                names[at] = rng.choice(("", "slide", "label", "x", names[rng.randrange(len(names))]))
                table = table.rename_columns(names)
            case 2:
                table = table.slice(0, rng.randrange(rows + 1))
            case 3:
                table = pa.concat_tables([table, table.slice(0, rng.randrange(rows + 1))])
            case 4:
                known = dict(table.schema.metadata or {b"x": b"{}"})
                key = rng.choice(list(known))
                known[key] = _json(known[key], rng) or known[key]
                table = table.replace_schema_metadata(known)
            case _:
                table = table.set_column(at, name, rng.choice(columns)())
        out = io.BytesIO()
        pq.write_table(table, out)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None
    return out.getvalue()


STRUCTURED = {
    ".json": _json,
    ".geojson": _json,
    ".csv": _table,
    ".tsv": _table,
    ".xml": _xml,
    ".yaml": _yaml,
    ".tif": _tiff,
    ".svs": _tiff,
    ".npz": _zip,
    ".pt": _zip,
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".h5": _hdf5,
    ".parquet": _parquet,
}
